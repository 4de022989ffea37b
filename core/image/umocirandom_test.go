package image_test

import (
	"archive/tar"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestAgainstUmociAtRandom is TestAgainstUmoci with images made at random: 4,
// or $VK_UMOCI, from $VK_UMOCI_SEED on (0 unless given, so that a run can be
// repeated).
func TestAgainstUmociAtRandom(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount the filesystem image and to unpack owners")
	}
	for _, p := range []string{"umoci", "mount"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s: apt-get install %s", p, p)
		}
	}
	number := func(name string, or int) int {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
			return n
		}
		return or
	}
	seed := number("VK_UMOCI_SEED", 0)
	for i := range number("VK_UMOCI", 4) {
		t.Run(fmt.Sprintf("seed %d", seed+i), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(seed+i), 26))
			tree := &randomTree{r: r, at: map[string]byte{}}
			var layers []sent
			for range 2 + r.IntN(7) {
				raw := layer(t, tree.layer()...)
				switch r.IntN(3) {
				case 0:
					layers = append(layers, gz(t, raw))
				case 1:
					layers = append(layers, sent{raw, raw, "application/vnd.oci.image.layer.v1.tar"})
				default: // umoci of Debian has no zstd
					layers = append(layers, gz(t, raw))
				}
			}
			compareWithUmoci(t, layers...)
		})
	}
}

// randomTree makes layers that a builder could have made: each changes what
// the layers below it left.
type randomTree struct {
	r  *rand.Rand
	at map[string]byte // type of each name, without a slash at its end
}

// pick returns one of the names of these types, in an order that the seed
// alone decides, or "".
func (x *randomTree) pick(types string) string {
	var names []string
	for _, n := range slices.Sorted(maps.Keys(x.at)) {
		if strings.IndexByte(types, x.at[n]) >= 0 {
			names = append(names, n)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return names[x.r.IntN(len(names))]
}

// fresh is a name in some directory of the tree, or in its root.
func (x *randomTree) fresh() string {
	dir := ""
	if x.r.IntN(4) > 0 {
		dir = x.pick("5")
	}
	return path.Join(dir, string(rune('a'+x.r.IntN(12)))+strings.Repeat("n", x.r.IntN(3)*60))
}

func (x *randomTree) forget(name string) {
	maps.DeleteFunc(x.at, func(n string, _ byte) bool { return n == name || strings.HasPrefix(n, name+"/") })
}

func (x *randomTree) layer() []f {
	var out []f
	made := map[string]bool{} // in this layer
	put := func(e f, typ byte) {
		name := strings.TrimSuffix(e.name, "/")
		if made[name] {
			return
		}
		if x.at[name] != typ || typ != '5' { // a directory over a directory keeps what is in it
			for n := range made {
				if strings.HasPrefix(n, name+"/") {
					return
				}
			}
			x.forget(name)
		}
		e.uid, e.gid = []int{0, 0, 1000, 70000}[x.r.IntN(4)], x.r.IntN(3)
		if typ != '2' {
			e.mode = []int64{0o755, 0o644, 0o600, 0o4755, 0o2711, 0o1777}[x.r.IntN(6)]
		}
		if typ == '0' && x.r.IntN(4) == 0 {
			e.pax = map[string]string{"SCHILY.xattr.user.x": strconv.Itoa(x.r.IntN(1000))}
		}
		out = append(out, e)
		x.at[name], made[name] = typ, true
	}
	for range 4 + x.r.IntN(20) {
		switch x.r.IntN(9) {
		case 0, 1, 2:
			put(f{name: x.fresh(), body: strings.Repeat("b", x.r.IntN(3)*x.r.IntN(9000))}, '0')
		case 3, 4:
			put(f{name: x.fresh() + "/"}, '5')
		case 5:
			put(f{name: x.fresh(), typ: tar.TypeSymlink, link: []string{"a", "../b", "/c", "nowhere"}[x.r.IntN(4)]}, '2')
		case 6: // a hard link to a file, of this layer or of one below
			target, name := x.pick("0"), x.fresh()
			if target == "" || made[name] || x.at[name] != 0 {
				continue
			}
			out = append(out, f{name: name, typ: tar.TypeLink, link: target})
			x.at[name], made[name] = '0', true
		case 7: // a whiteout of what a layer below has
			name := x.pick("025")
			if name == "" || slices.ContainsFunc(slices.Collect(maps.Keys(made)), func(n string) bool { return n == name || strings.HasPrefix(n, name+"/") }) {
				continue
			}
			out = append(out, f{name: path.Join(path.Dir(name), ".wh."+path.Base(name))})
			x.forget(name)
			made[name] = true
		case 8: // an opaque directory, marked before anything is put into it
			name := x.pick("5")
			if name == "" || slices.ContainsFunc(slices.Collect(maps.Keys(made)), func(n string) bool { return n == name || strings.HasPrefix(n, name+"/") }) {
				continue
			}
			x.forget(name)
			put(f{name: name + "/"}, '5')
			out = append(out, f{name: name + "/.wh..wh..opq"})
		}
	}
	return out
}
