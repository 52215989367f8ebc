package fleet_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// standsStill is a fault of an engine whose core stands still for so long, while its API server
// answers.
func standsStill(d time.Duration) refengine.Rule {
	return refengine.Rule{Fault: refengine.Standstill, DelayMS: int(d.Milliseconds())}
}

// A decode engine whose core stands still for longer than the lease renews no hold, and decodes
// another prompt's KV when it goes on. Requests that were sent to it go to another engine in time,
// and it gets nothing new meanwhile.
func TestAnEngineThatStandsStillForLongerThanTheLease(t *testing.T) {
	t.Parallel()
	// A loaded machine stops this process for a second or two, and signs of life are believed for
	// three eighths of the hold.
	const lease = 8 * time.Second
	e := refengine.Config{Connector: refengine.NIXLPull, KV: refengine.KV{HoldTimeout: lease, PrefixCache: 1000}}
	b := start(t, options{
		dirty: true, prefill: []refengine.Config{e}, decode: []refengine.Config{e, e},
		profile: mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: lease},
		configure: func(cfg *config.Config) {
			cfg.Health.Interval, cfg.Health.Canary = 100*time.Millisecond, config.Default().Health.Canary
		},
	})
	require.NoError(t, b.Decode[0].SetFaults(standsStill(time.Hour)))
	require.Equal(t, map[string]int{"right": 8}, b.JudgeAll(8, streamed))
	require.NotZero(t, b.Metric("evenkeel_late_pulls_total"), "some were sent to the engine that stood still")
	sent := b.Decode[0].Stats().Decodes
	require.Equal(t, map[string]int{"right": 8}, b.JudgeAll(8, streamed))
	require.Equal(t, sent, b.Decode[0].Stats().Decodes, "it gets nothing new while it is silent")
	require.NoError(t, b.Decode[0].SetFaults())
	b.Eventually("it gets requests again", func() bool {
		require.Equal(t, "right", b.Judge("another prompt", streamed))
		return b.Decode[0].Stats().Decodes > sent
	})
	b.settled(true) // nothing pulled what was given away
}

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

// knowsPrompts are two groups of ranks that prefill and decode, of which it is known what a prompt
// costs.
func knowsPrompts(server string, quiet time.Duration) options {
	o := twoGroups(server)
	configure := o.configure
	o.configure = func(cfg *config.Config) {
		configure(cfg)
		cfg.Health.Interval = 50 * time.Millisecond
		cfg.Dispatch.StepModel = board.StepModel{C0Ms: 1, C1Ms: 1e-6, OwnPromptMs: 1e-6}
		cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, FirstEventTimeout: quiet}
	}
	return o
}

// The core of one group stands still while its API servers answer. Its requests go to the other
// group long before limits.probe_timeout is over, and the engine that stood still aborts them.
func TestRequestsLeaveAGroupWhoseCoreStandsStill(t *testing.T) {
	t.Parallel()
	for _, server := range []string{oneServer, ownServers} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			b := start(t, knowsPrompts(server, time.Second))
			require.Equal(t, "right", b.Judge("all is well", streamed))
			require.NoError(t, b.Decode[0].SetFaults(standsStill(time.Hour)))
			require.Equal(t, map[string]int{"right": 24}, b.JudgeAll(24, streamed))
			require.Equal(t, http.StatusOK, b.Post(refclient.ChatPath, talk("", "in one piece")).Status)
			b.Eventually("nothing is left there", func() bool { s := b.Decode[0].Stats(); return s.Running+s.Waiting == 0 })
			require.NoError(t, b.Decode[0].SetFaults())
			was := b.Decode[0].Stats().Finished
			for i := 0; b.Decode[0].Stats().Finished == was; i++ { // it woke up, and its ranks serve again
				require.Equal(t, "right", b.Judge(fmt.Sprint("after it, ", i), streamed))
			}
		})
	}
}

// A prompt that takes much longer than predicted stays where it is as long as streams of its rank
// show that the core lives, and where there is no other group.
func TestASlowCoreKeepsItsPrompts(t *testing.T) {
	t.Parallel()
	t.Run("other streams of its ranks move", func(t *testing.T) {
		t.Parallel()
		o := knowsPrompts(oneServer, 6*time.Second) // a busy machine stops this process for up to three
		for i := range o.mixed {
			o.mixed[i].Prompts.MaxBatchedTokens, o.mixed[i].Prompts.PerToken = 64, 2*time.Millisecond // the predicted time is next to nothing
		}
		b := start(t, o)
		for range 16 { // on each rank some
			defer b.Endless()()
		}
		require.Equal(t, "right", b.Judge(strings.Repeat("a long prompt, ", 1600), streamed))
		require.Empty(t, b.logs.FilterMessage("an attempt failed, and the request is tried again").All())
	})
	t.Run("there is no other group", func(t *testing.T) {
		t.Parallel()
		o := knowsPrompts(oneServer, 500*time.Millisecond)
		o.mixed = o.mixed[:1]
		b := start(t, o)
		require.NoError(t, b.Decode[0].SetFaults(standsStill(3*time.Second)))
		require.Equal(t, "right", b.Judge("a prompt", streamed))
		b.settledRequests(1)
		require.Empty(t, b.logs.FilterMessage("an attempt failed, and the request is tried again").All())
	})
}
