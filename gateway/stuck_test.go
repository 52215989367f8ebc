package gateway_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// twoGroups are two groups of four ranks that prefill and decode.
func twoGroups(server string) options {
	o := together(func(cfg *config.Config) {
		cfg.Prefill.Retry = config.Default().Prefill.Retry // the usual tries, with the usual pauses
		for i := range cfg.Engines.Aggregated {
			e := &cfg.Engines.Aggregated[i]
			e.Group, e.Barrier = []string{"one", "other"}[i*2/len(cfg.Engines.Aggregated)], config.BarrierDP
		}
	})
	o.mixed[0].DPSize = 4
	if server != ownServers {
		o.mixed[0].DPMode = "internal"
	}
	o.mixed = append(o.mixed, o.mixed[0])
	return o
}

// The ways in which ranks share what refuses their requests.
const (
	oneServer  = "a group has one API server"
	ownServers = "each rank has its own API server"
)

// knowsPrompts are two groups of ranks that prefill and decode, of which it is known what a prompt costs.
func knowsPrompts(server string, quiet time.Duration) options {
	o := twoGroups(server)
	configure := o.configure
	o.configure = func(cfg *config.Config) {
		configure(cfg)
		cfg.Health.Interval = 50 * time.Millisecond
		cfg.Dispatch.StepModel = board.StepModel{C0Ms: 1, C1Ms: 1e-6, OwnMs: 1e-6}
		cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, FirstEventTimeout: quiet}
	}
	return o
}

// The core of one group stands still while its API servers answer. Its requests go to the other group long before limits.probe_timeout is
// over, and the engine that stood still aborts them.
func TestRequestsLeaveAGroupWhoseCoreStandsStill(t *testing.T) {
	t.Parallel()
	for _, server := range []string{oneServer, ownServers} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			c := start(t, knowsPrompts(server, time.Second))
			require.Equal(t, "right", c.judge("all is well", streamed))
			require.NoError(t, c.decode[0].SetFaults(standsStill(time.Hour)))
			require.Equal(t, map[string]int{"right": 24}, c.judgeAll(24, streamed))
			require.Equal(t, http.StatusOK, c.post(chatPath, talk("", "in one piece")).status)
			c.eventually("nothing is left there", func() bool { s := c.decode[0].Stats(); return s.Running+s.Waiting == 0 })
			require.NoError(t, c.decode[0].SetFaults())
			was := c.decode[0].Stats().Finished
			for i := 0; c.decode[0].Stats().Finished == was; i++ { // it woke up, and its ranks serve again
				require.Equal(t, "right", c.judge(fmt.Sprint("after it, ", i), streamed))
			}
		})
	}
}

// A prompt that takes much longer than predicted stays where it is as long as streams of its rank show that the core lives, and where
// there is no other group.
func TestASlowCoreKeepsItsPrompts(t *testing.T) {
	t.Parallel()
	t.Run("other streams of its ranks move", func(t *testing.T) {
		t.Parallel()
		o := knowsPrompts(oneServer, 3*time.Second) // a busy machine stops this process for one or two
		for i := range o.mixed {
			o.mixed[i].MaxBatchedTokens, o.mixed[i].PrefillPerToken = 64, 2*time.Millisecond // the predicted time is next to nothing
		}
		c := start(t, o)
		for range 16 { // on each rank some
			defer c.endless()()
		}
		require.Equal(t, "right", c.judge(strings.Repeat("a long prompt, ", 800), streamed))
		require.Empty(t, c.logs.FilterMessage("an attempt failed, and the request is tried again").All())
	})
	t.Run("there is no other group", func(t *testing.T) {
		t.Parallel()
		o := knowsPrompts(oneServer, 500*time.Millisecond)
		o.mixed = o.mixed[:1]
		c := start(t, o)
		require.NoError(t, c.decode[0].SetFaults(standsStill(3*time.Second)))
		require.Equal(t, "right", c.judge("a prompt", streamed))
		c.settledRequests(1)
		require.Empty(t, c.logs.FilterMessage("an attempt failed, and the request is tried again").All())
	})
}
