package gateway_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// resident is a model whose requests stay in us.
const resident = "resident"

// centre is us-1 that decides for all: beside its own engines it has those of
// eu, whose proxy need not run for that.
func centre(t *testing.T) *cluster {
	four := []refengine.Config{{Slots: 8}, {Slots: 8}, {Slots: 8, Model: refengine.Model{Name: resident}},
		{Slots: 8, Model: refengine.Model{Name: resident}}}
	c := start(t, options{prefill: four, decode: four, configure: func(cfg *config.Config) {
		region(t, cfg, "us-1", "127.0.0.1:0", "eu-1", freePorts(t, 1)[0])
		cfg.Geo.Mode, cfg.Geo.Central = geo.Central, "us-1"
		for i := range four {
			if i%2 > 0 {
				cfg.Engines.Prefill[i].Region, cfg.Engines.Decode[i].Region = "eu", "eu"
			}
		}
		cfg.Geo.Residency = map[string][]string{resident: {"us"}}
	}})
	c.Eventually("all engines are up", func() bool { return c.Metric(`evenkeel_prefill_candidates{state="open"}`) == 4 })
	return c
}

// crowd sends requests for a model and returns how many were served in us and in eu.
func (c *cluster) crowd(n int, of string) (us, eu int) {
	before := len(c.Records())
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			require.Equal(c, http.StatusOK, c.Post(refclient.ChatPath, strings.Replace(chat("one two three", `"max_tokens":3,`), model, of, 1)).Status)
		})
	}
	wg.Wait()
	c.Accounted()
	in := func(e *refengine.Engine, id string) bool {
		return strings.HasPrefix(id, strings.TrimPrefix(e.URLs()[0], "http://"))
	}
	for _, r := range c.Records()[before:] {
		within := func(region int) bool {
			return in(c.Prefill[region], r.Prefill) && in(c.Decode[region], r.Rank) || in(c.Prefill[region+2], r.Prefill) &&
				in(c.Decode[region+2], r.Rank)
		}
		switch {
		case within(0):
			us++
		case within(1):
			eu++
		default:
			c.Errorf("KV went from %s to %s", r.Prefill, r.Rank)
		}
	}
	return us, eu
}

func TestACentreHasTheEnginesOfAllRegionsAndKVStaysInEach(t *testing.T) {
	t.Parallel()
	c := centre(t)
	us, eu := c.crowd(20, resident)
	require.Equal(t, []int{20, 0}, []int{us, eu}, "a centre keeps requests in their regions")
	us, eu = c.crowd(40, model)
	require.Positive(t, us)
	require.Positive(t, eu)
	require.Zero(t, c.Metric(`evenkeel_geo_decisions_total{policy="finish",route="forward"}`))

	c.Decode[1].Close()
	c.Eventually("nothing decodes there", func() bool { return c.Metric(`evenkeel_prefill_candidates{state="open"}`) == 3 })
	us, eu = c.crowd(10, model)
	require.Equal(t, []int{10, 0}, []int{us, eu}, "so nothing is prefilled there")
}
