package gateway_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// centre is us-1 that decides for all: beside its own engines it has those of
// eu, whose proxy need not run for that.
func centre(t *testing.T, more func(*config.Config)) *cluster {
	two := []refengine.Config{{Slots: 8}, {Slots: 8}}
	c := start(t, options{prefill: two, decode: two, configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", freePorts(t, 1)[0])
		cfg.Geo.Mode, cfg.Geo.Central = geo.Central, "us-1"
		cfg.Engines.Prefill[1].Region, cfg.Engines.Decode[1].Region = "eu", "eu"
		if more != nil {
			more(cfg)
		}
	}})
	c.eventually("all engines are up", func() bool { return c.metric(`evenkeel_prefill_candidates{state="open"}`) == 2 })
	return c
}

// crowd sends requests and returns how many were served in us and in eu.
func (c *cluster) crowd(n int) (us, eu int) {
	before := len(c.records())
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			require.Equal(c, http.StatusOK, c.post(chatPath, chat("one two three", `"max_tokens":3,`)).status)
		})
	}
	wg.Wait()
	c.accounted()
	in := func(e *refengine.Engine, id string) bool {
		return strings.HasPrefix(id, strings.TrimPrefix(e.URLs()[0], "http://"))
	}
	for _, r := range c.records()[before:] {
		switch {
		case in(c.prefill[0], r.Prefill) && in(c.decode[0], r.Rank):
			us++
		case in(c.prefill[1], r.Prefill) && in(c.decode[1], r.Rank):
			eu++
		default:
			c.Errorf("KV went from %s to %s", r.Prefill, r.Rank)
		}
	}
	return us, eu
}

func TestACentreHasTheEnginesOfAllRegionsAndKVStaysInEach(t *testing.T) {
	t.Parallel()
	c := centre(t, nil)
	us, eu := c.crowd(40)
	require.Positive(t, us)
	require.Positive(t, eu)
	require.Zero(t, c.metric(`evenkeel_geo_decisions_total{policy="finish",route="forward"}`))

	c.decode[1].Close()
	c.eventually("nothing decodes there", func() bool { return c.metric(`evenkeel_prefill_candidates{state="open"}`) == 1 })
	us, eu = c.crowd(10)
	require.Equal(t, []int{10, 0}, []int{us, eu}, "so nothing is prefilled there")
}

func TestACentreKeepsRequestsInTheirRegions(t *testing.T) {
	t.Parallel()
	c := centre(t, func(cfg *config.Config) { cfg.Geo.Residency = map[string][]string{model: {"us"}} })
	us, eu := c.crowd(20)
	require.Equal(t, []int{20, 0}, []int{us, eu})
}
