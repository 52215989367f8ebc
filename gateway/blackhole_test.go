package gateway_test

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

// A rank that fails every request at once is always free, while the others are
// full. It must not draw the requests that come, nor those it has failed.
func TestARankThatFailsAtOnceDrawsNoTraffic(t *testing.T) {
	t.Parallel()
	var struck atomic.Int64
	c := start(t, options{dirty: true, decode: []refengine.Config{{Slots: 1}, {Slots: 1, OnStrike: func(uint64, refengine.Rule) { struck.Add(1) }}, {Slots: 1}}})
	bad := c.decode[1]
	stop := c.load(8) // every answer must be right
	c.eventually("all are busy", func() bool {
		for _, d := range c.decode {
			if d.Stats().Decodes < 3 {
				return false
			}
		}
		return true
	})
	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}))
	before := c.decode[0].Stats().Decodes
	c.eventually("the others serve on", func() bool { return c.decode[0].Stats().Decodes > before+40 })
	c.eventually("it is out", func() bool { return c.status(addressOf(bad)).State == "out" })
	outages := c.sum("evenkeel_engine_outages_total")
	require.Positive(t, outages)
	require.LessOrEqual(t, float64(struck.Load()), 10*outages, "each time that it is tried again it gets no more than tell what it is")
	require.Positive(t, stop())
}
