package vkcmd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"virtkit/core/fault"
	"virtkit/core/fleet/wire"
)

// nodeState is where vk node keeps what its hub last asked for.
const nodeState = "node/state.json"

// nodeCeiling is the ceiling that the node of this host last received from its
// hub; 0 = none, or no node. A file that cannot be read is an error: the number
// would rise above what the hub allows.
func nodeCeiling(stateDir string) (int, error) {
	path := filepath.Join(stateDir, nodeState)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	var st struct {
		Applied *wire.Applied `json:"applied"`
	}
	if err == nil {
		err = json.Unmarshal(b, &st)
	}
	if err == nil && st.Applied != nil && st.Applied.Policy.Ceiling < 0 {
		err = fmt.Errorf("its ceiling is %d", st.Applied.Policy.Ceiling)
	}
	if err != nil {
		return 0, fault.Newf(fault.System, "the ceiling that this node received last is not known: %s", path).Because(err).
			Hint("start vk node run, which mends or names what is wrong with it")
	}
	if st.Applied == nil {
		return 0, nil
	}
	return st.Applied.Policy.Ceiling, nil
}
