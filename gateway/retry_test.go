package gateway_test

import (
	"evenkeel/gateway/config"
)

// turns takes engines one after the other, on both sides.
func turns(cfg *config.Config) { cfg.Prefill.Policy, cfg.Dispatch.Policy = "round-robin", "rr" }

// allUp waits until every engine of the cluster takes requests.
func (c *cluster) allUp() {
	c.Helper()
	c.eventually("all engines are up", func() bool {
		s, up := c.gw.Status(c.Context()), 0
		for _, m := range s.Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					up++
				}
			}
		}
		want := len(c.prefill)
		for _, d := range c.decode {
			want += d.Config().DPSize
		}
		return float64(up)+c.metric(`evenkeel_prefill_candidates{state="open"}`) == float64(want)
	})
}

// probes and decodes are how many requests the engines got of each kind.
func (c *cluster) probes() (n int64) {
	for _, e := range c.prefill {
		n += e.Stats().Probes
	}
	return n
}
