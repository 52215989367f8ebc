package gateway_test

import (
	"context"
	"net"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

func nameOf(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	require.NoError(t, err)
	return net.JoinHostPort(u.Hostname(), u.Port())
}

// The self-test of the start is one more client of a rank: it waits for a slot, and the slot is
// charged.
func TestASeatOfTheSelfTestIsASlot(t *testing.T) {
	t.Parallel()
	both := together(nil).mixed
	both[0].DPMode = "internal"
	c := start(t, options{
		prefill: []refengine.Config{{}}, decode: []refengine.Config{{Slots: 1}}, mixed: both,
		configure: func(cfg *config.Config) { cfg.SelfTest = false },
	})
	c.Eventually("all ranks take requests", func() bool {
		up := 0
		for _, m := range c.gw.Status(t.Context()).Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					up++
				}
			}
		}
		return up == 3
	})
	used := func(rank string) (n int) {
		for _, m := range c.gw.Status(context.Background()).Dispatch.Models {
			for _, w := range m.Workers {
				if w.Name == rank {
					n += w.Used
				}
			}
		}
		return n
	}
	rank := nameOf(t, c.Decode[0].URLs()[0])
	s, err := c.gw.TakeSlot(t.Context(), rank, 100)
	require.NoError(t, err)
	require.NoError(t, s.Scope.CheckOwned())
	require.Empty(t, s.Scope.AppendEpochHeader(nil), "nobody owns what one proxy has alone")
	c.Eventually("it is charged", func() bool { return used(rank) == 1 })
	soon, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.gw.TakeSlot(soon, rank, 100)
	require.ErrorIs(t, err, context.Canceled, "the rank has one slot")
	s.Release()
	c.Eventually("it is given back", func() bool { return used(rank) == 0 })
	_, err = c.gw.TakeSlot(t.Context(), "127.0.0.1:1", 100)
	require.ErrorContains(t, err, "serves no requests now")

	rank = nameOf(t, c.Decode[1].URLs()[0]) + "/1" // which prefills, too
	s, err = c.gw.TakeSlot(t.Context(), rank, 100)
	require.NoError(t, err)
	c.Eventually("it is charged", func() bool { return used(rank) == 1 })
	s.Release()
	c.Eventually("it is given back", func() bool { return used(rank) == 0 })
}
