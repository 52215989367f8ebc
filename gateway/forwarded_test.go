package gateway_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// Batch requests and requests with deadlines are forwarded among others to a region that has too
// few slots for all, and that may be shut down meanwhile. Every answer is right. A deadline is met
// or ends the request there, and the region is not blamed for it.
func TestBatchAndDeadlinesAmongForwards(t *testing.T) {
	t.Parallel()
	for name, places := range map[string]int{"the region stays, with few places": 4, "the region is shut down": 64} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "keys.yaml")
			refclient.KeyFile(t, file, "ops ek-ops , trusted: true")
			step := 4 * time.Millisecond
			if places > 32 { // what waits there must be seen on a busy machine, too
				step *= 8
			}
			us, eu := pair(t,
				options{configure: func(cfg *config.Config) { remote(cfg); cfg.KeysFile = file }},
				options{
					decode:    []refengine.Config{{Slots: 2, Steps: refengine.Steps{C0: step}}},
					configure: func(cfg *config.Config) { cfg.Geo.Policy, cfg.Pool.Size = "local-only", places },
				})
			const each = 8
			ends := places > 4*each // and has a place for each of them until then
			var mu sync.Mutex
			var wg sync.WaitGroup
			got := map[string]map[string]int{}
			for kind, more := range map[string][2]string{
				"interactive": {"X-Evenkeel-Priority", "0"}, "batch": {"X-Evenkeel-Class", "batch"},
				"short": {"X-Evenkeel-Deadline-Ms", "5"}, "long": {"X-Evenkeel-Deadline-Ms", "60000"},
			} {
				got[kind] = map[string]int{}
				for i := range each {
					wg.Go(func() {
						verdict := us.Judge(fmt.Sprint(kind, " number ", i), streamed, "Authorization", "Bearer ek-ops", more[0], more[1])
						mu.Lock()
						defer mu.Unlock()
						got[kind][verdict]++
					})
				}
			}
			if ends {
				us.Eventually("requests run and wait there", func() bool {
					return eu.Decode[0].Stats().Running > 0 && eu.gw.Status(t.Context()).Open > 2
				})
				require.NoError(t, eu.gw.Shutdown(t.Context()))
			}
			wg.Wait()
			t.Log(got)
			for _, kind := range []string{"interactive", "batch", "long"} {
				require.Equal(t, map[string]int{"right": each}, got[kind], kind)
			}
			require.Equal(t, each, got["short"]["right"]+got["short"]["503"], got["short"])
			require.LessOrEqual(t, us.Metric(`evenkeel_geo_forwards_total{outcome="relayed_error",peer="eu-1"}`), float64(got["short"]["503"]), "an error of the region is the deadline's")
			require.NotZero(t, us.Metric(`evenkeel_geo_forwards_total{outcome="ok",peer="eu-1"}`))
			if !ends {
				passing := []string{"available", "queue", "no_replica", "full"}
				require.Contains(t, passing, us.availability("eu-1"), "what the last probe found passes by itself")
				us.Eventually("a probe finds it available", func() bool { return us.availability("eu-1") == "available" })
			}
		})
	}
}
