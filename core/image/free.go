package image

import (
	"path/filepath"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// freeOn says how much room is left where path is, or would be; "" when that
// cannot be told.
func freeOn(path string) string {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil {
			return " (" + units.BytesSize(float64(st.Bavail)*float64(st.Bsize)) + " free)"
		}
		if dir == "/" || dir == "." {
			return ""
		}
	}
}
