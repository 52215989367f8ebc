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

// The self-test of the start is one more client of a rank: it waits for a slot, and the slot is charged.
func TestASeatOfTheSelfTestIsASlot(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{Slots: 1}}, configure: func(cfg *config.Config) { cfg.SelfTest = false }})
	c.allUp()
	rank := nameOf(t, c.decode[0].URLs()[0])
	s, err := c.gw.Seat(t.Context(), rank, 100)
	require.NoError(t, err)
	require.NoError(t, s.Scope.Ours())
	require.Empty(t, s.Scope.Mark(nil), "nobody owns what one proxy has alone")
	used := func() int { return c.gw.Status(context.Background()).Dispatch.Models[0].Workers[0].Used }
	c.eventually("it is charged", func() bool { return used() == 1 })
	soon, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.gw.Seat(soon, rank, 100)
	require.ErrorIs(t, err, context.Canceled, "the rank has one slot")
	s.Leave()
	c.eventually("it is given back", func() bool { return used() == 0 })
	_, err = c.gw.Seat(t.Context(), "127.0.0.1:1", 100)
	require.ErrorContains(t, err, "serves no requests now")
}

func TestASeatOnARankThatPrefillsAndDecodes(t *testing.T) {
	t.Parallel()
	o := together(func(cfg *config.Config) { cfg.SelfTest = false })
	o.mixed[0].DPMode = "internal"
	c := start(t, o)
	rank := nameOf(t, c.decode[0].URLs()[0]) + "/1"
	s, err := c.gw.Seat(t.Context(), rank, 100)
	require.NoError(t, err)
	used := func() (n int) {
		for _, m := range c.gw.Status(context.Background()).Dispatch.Models {
			for _, w := range m.Workers {
				if w.Name == rank {
					n += w.Used
				}
			}
		}
		return n
	}
	c.eventually("it is charged", func() bool { return used() == 1 })
	s.Leave()
	c.eventually("it is given back", func() bool { return used() == 0 })
}
