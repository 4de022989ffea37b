package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"virtkit/core/fleet/dispatch"
	"virtkit/core/fleet/relay"
	"virtkit/core/fleet/relay/relaytest"
	"virtkit/core/fleet/wire"
)

// The stand-in hub keeps to the contract that the real one is held to.
func TestHubSuite(t *testing.T) {
	relaytest.RunSuite(t, func(t *testing.T) relaytest.World {
		h := relaytest.New(t, 2)
		client := func() *relay.Client {
			j, err := relay.Join(t.Context(), relay.JoinOptions{StateDir: t.TempDir() + "/state", Hub: h.URL, CA: h.CA, Token: h.Token()})
			if err != nil {
				t.Fatal(err)
			}
			c, err := relay.NewClient(j.Enrollment, nil)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		return relaytest.World{Relay: client(), Other: client(), Room: 2,
			Placement: dispatch.Placement{Pool: "ci", Envelope: wire.Envelope{Memory: 1 << 30, CPUs: 1}},
			Spec:      func(id int64) json.RawMessage { return json.RawMessage(fmt.Sprintf(`{"id":%d}`, id)) },
			Node:      memoryNode{h}}
	})
}

// memoryNode is the test as the stand-in's node.
type memoryNode struct{ h *relaytest.Hub }

func (n memoryNode) job(id string) *relaytest.Job {
	for _, j := range n.h.Jobs() {
		if j.ID == id {
			return j
		}
	}
	return nil
}

func (n memoryNode) Accept(_ context.Context, id string) error { n.job(id).Accept(); return nil }

func (n memoryNode) Output(_ context.Context, id string, p []byte) error {
	_, err := n.job(id).Write(p)
	return err
}

func (n memoryNode) Finish(_ context.Context, id string, r wire.JobResult) error {
	n.job(id).Finish(r)
	return nil
}

func (n memoryNode) Canceled(ctx context.Context, id string, mode wire.CancelMode) error {
	j := n.job(id)
	return n.h.Until(ctx, "it is canceled", func() bool { return j.View().Cancel == mode })
}
