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

// quickHealth looks at engines often, and tries their ranks.
func quickHealth(cfg *config.Config) {
	cfg.Health.Interval, cfg.Health.Canary, cfg.Health.SlowStart = 20*time.Millisecond, 3*time.Second, 0
	cfg.Prefill.Retry.Attempts = 1 // nothing that is withheld counts as an attempt
	cfg.Dispatch.Policy = "rr"
}

// retrying is quickHealth for tests in which requests are aborted, which counts as an attempt
// before their first event.
func retrying(cfg *config.Config) {
	quickHealth(cfg)
	cfg.Prefill.Retry.Attempts, cfg.Prefill.Retry.Budget = 3, 1
}

// seldomRead is retrying for tests in which lost ranks must not come back by a reading of the
// engine's facts, which is made with each 10th check.
func seldomRead(cfg *config.Config) {
	retrying(cfg)
	cfg.Health.Interval = 2 * time.Second
}

// state is what the page shows of an engine.
func (b *bed) state(e *refengine.Engine) string { return b.engineStatus(e).State }

// rankOf is what is shown of a rank of an engine.
func (b *bed) rankOf(e *refengine.Engine, rank int) board.WorkerStatus {
	b.Helper()
	for _, w := range b.now().Dispatch.Models[0].Workers {
		if strings.HasSuffix(w.Name, fmt.Sprint("/", rank)) && strings.HasPrefix(w.Name, b.engineStatus(e).ID) {
			return w
		}
	}
	b.Fatalf("no rank %d at %s", rank, e.URLs()[0])
	return board.WorkerStatus{}
}

// While the group of an engine re-forms, vLLM answers 503 to all requests. They wait, and are
// answered after it.
func TestAGroupThatReformsIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, side, version string
		connector           refengine.Connector
		mixed               bool
	}{
		{"decode", "decode", "0.33.0", refengine.NIXLPull, false},
		{"decode, and its health check says it, too", "decode", "0.32.0", refengine.NIXLPull, false},
		{"prefill", "prefill", "0.33.0", refengine.NIXLPull, false},
		{"a decode engine that is bound before the prefill", "decode", "0.33.0", refengine.AscendLayerwise, false},
		{"a prefill engine that is chosen after the bind", "prefill", "0.33.0", refengine.AscendLayerwise, false},
		{"ranks that do both", "decode", "0.33.0", "", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			two := refengine.Config{DPSize: 2, DPMode: "internal", Version: row.version, Steps: refengine.Steps{C0: 2 * time.Millisecond}}
			o := options{dirty: true, decode: []refengine.Config{two}, prefill: []refengine.Config{{Version: row.version}},
				configure: func(cfg *config.Config) {
					quickHealth(cfg)
					cfg.Prefill.Retry.Base = 500 * time.Millisecond // a busy machine sees the first refusal late
				}}
			begin := func() *bed { return start(t, o) }
			switch {
			case row.mixed:
				o.mixed, o.decode, o.prefill = o.decode, nil, nil
			case row.connector == refengine.AscendLayerwise:
				begin = func() *bed { return early(t, row.connector, o) }
			default:
				o.profile.Connector = string(row.connector)
				o.decode[0].Connector, o.prefill[0].Connector = row.connector, row.connector
			}
			b := begin()
			reforms := b.Decode[0]
			if row.side == "prefill" {
				reforms = b.Prefill[0]
			}
			under := b.Judging("a stream that is under way", `"stream":true,`)
			b.Eventually("it has begun", func() bool { return b.Decode[0].Stats().Running > 0 || len(under) > 0 })

			require.NoError(t, reforms.SetFaults(refengine.Rule{Fault: refengine.Scaling}))
			asked := reforms.Stats().Requests
			var waiting []<-chan string
			for i := range 6 {
				waiting = append(waiting, b.Judging(fmt.Sprint("waits ", i), `"stream":true,`))
			}
			b.Eventually("it is seen", func() bool { return b.state(reforms) == "halted" })
			require.Contains(t, b.engineStatus(reforms).Error, "re-forms")
			require.True(t, b.ready(), "requests are taken")
			require.Equal(t, "right", <-under, "what runs goes on")
			require.Equal(t, asked, reforms.Stats().Requests, "nothing has reached it")
			for _, w := range waiting {
				require.Empty(t, w, "it waits")
			}

			require.NoError(t, reforms.SetFaults())
			for _, w := range waiting {
				require.Equal(t, "right", <-w)
			}
			b.Eventually("it is over", func() bool { return b.state(reforms) == "up" })
			require.Zero(t, b.Sum("evenkeel_engine_outages_total"), "it is not what failed")
		})
	}
}

func TestEnginesThatTakeNoRequestsAnyMore(t *testing.T) {
	t.Parallel()
	b := start(t, options{dirty: true, configure: quickHealth, decode: []refengine.Config{{Version: "0.33.0"}, {Version: "0.33.0"}}})
	// A group whose change failed takes no requests until it is restarted. Requests do not wait for
	// it.
	t.Run("one that could not change its ranks is down until it is restarted", func(t *testing.T) {
		failed := b.Decode[0]
		require.NoError(t, failed.SetFaults(refengine.Rule{Fault: refengine.Scaling, Value: 8}))
		b.Eventually("it is seen, with the number", func() bool {
			s := b.engineStatus(failed)
			return s.State == "halted" && strings.Contains(s.Error, "it is to have 8")
		})
		require.NoError(t, failed.SetFaults(refengine.Rule{Fault: refengine.Scaling, Value: -8}))
		b.Eventually("it is down, with the reason", func() bool {
			s := b.engineStatus(failed)
			return s.State == "down" && strings.Contains(s.Error, "RuntimeError")
		})
		require.Equal(t, "right", b.Judge("served by the other one", ""))
		require.NoError(t, failed.SetFaults())
		b.Eventually("it was restarted", func() bool { return b.state(failed) == "up" })
	})
	// A rank that vLLM has retired gets nothing, and its group goes on.
	t.Run("one that was retired is down", func(t *testing.T) {
		gone := b.Decode[1]
		require.NoError(t, gone.SetFaults(refengine.Rule{Fault: refengine.Retired}))
		for i := range 4 {
			require.Equal(t, "right", b.Judge(fmt.Sprint("prompt ", i), `"stream":true,`))
		}
		b.Eventually("it is down", func() bool { return b.state(gone) == "down" })
		require.Contains(t, b.engineStatus(gone).Error, "has taken this rank out of its group")
	})
}

// A group that re-forms for too long ends the waits at their limits, with an error that says so,
// and nothing is held then.
func TestAWaitForAGroupThatReformsHasItsLimit(t *testing.T) {
	t.Parallel()
	for side, code := range map[string]string{
		"decode": "pool_timeout|prefill_unavailable", "prefill": "prefill_unavailable", // behind or before a prefill
	} {
		t.Run(side, func(t *testing.T) {
			t.Parallel()
			b := start(t, options{dirty: true, configure: func(cfg *config.Config) {
				quickHealth(cfg)
				cfg.Pool.TTL, cfg.Prefill.Queue.Timeout = 300*time.Millisecond, 300*time.Millisecond
			}})
			reforms := b.Decode[0]
			if side == "prefill" {
				reforms = b.Prefill[0]
			}
			require.NoError(t, reforms.SetFaults(refengine.Rule{Fault: refengine.Scaling}))
			r := b.Post(refclient.ChatPath, chat("waits in vain", `"stream":true,`))
			require.Equal(t, http.StatusServiceUnavailable, r.Status, r.Body)
			require.Regexp(t, code, r.Body)
			b.Accounted()
			leave, wait := b.Send(chat("leaves", `"stream":true,`))
			b.Eventually("it waits, or has waited before a busy machine looks", func() bool {
				return b.now().Open == 1 || len(b.Records()) == 2
			})
			leave()
			wait()
			require.NoError(t, reforms.SetFaults())
			b.Eventually("it serves again", func() bool { return b.Judge("again", "") == "right" })
		})
	}
}

// After a scale-down the highest ranks are gone: their answers go on elsewhere, and nothing names
// them any more. After a scale-up they are used again.
func TestRanksThatAreGoneAreNotNamed(t *testing.T) {
	t.Parallel()
	for _, connector := range []refengine.Connector{refengine.NIXLPull, refengine.AscendLayerwise} {
		t.Run(string(connector), func(t *testing.T) {
			t.Parallel()
			o := options{
				dirty: true, decode: []refengine.Config{{DPSize: 3, DPMode: "internal", Steps: refengine.Steps{C0: 20 * time.Millisecond},
					Connector: connector}},
				prefill: []refengine.Config{{Connector: connector}},
				profile: mooncake.Profile{Connector: string(connector), ChatResume: mooncake.ChatResumeVLLM}, configure: seldomRead,
			}
			begin := start
			if connector == refengine.AscendLayerwise {
				begin = func(t *testing.T, o options) *bed { return early(t, connector, o) }
			}
			b := begin(t, o)
			d := b.Decode[0]
			var under []<-chan string
			for i := range 9 {
				under = append(under, b.Judging(fmt.Sprint("runs ", i), `"stream":true,`))
			}
			b.Eventually("all ranks run some", func() bool { return b.rankOf(d, 1).Running > 0 && b.rankOf(d, 2).Running > 0 })
			require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.FewerRanks, Value: 1}))
			for _, w := range under {
				require.Equal(t, "right", <-w)
			}
			for i := range 4 {
				require.Equal(t, "right", b.Judge(fmt.Sprint("after it ", i), ""))
			}
			for rank := 1; rank < 3; rank++ {
				w := b.rankOf(d, rank)
				require.False(t, w.Up)
				require.True(t, w.Down, "it takes no part in the steps")
				require.Zero(t, w.Used)
			}
			require.True(t, b.rankOf(d, 0).Up)
			s := b.engineStatus(d)
			require.Equal(t, "up", s.State)
			require.Equal(t, "rank 1 and those above it are lost: the engine has only 1 ranks now (elastic EP)", s.Error)

			require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.Scaling}))
			b.Eventually("the scale-up is seen", func() bool {
				go b.Post(refclient.ChatPath, chat("waits", ""))
				return b.state(d) == "halted"
			})
			require.NoError(t, d.SetFaults())
			b.Eventually("they are back", func() bool { return b.rankOf(d, 2).Up && b.rankOf(d, 1).Up && b.engineStatus(d).Error == "" })
			require.Equal(t, map[string]int{"right": 9}, b.JudgeAll(9, `"stream":true,`))
		})
	}
}

// vLLM with --enable-fault-tolerance stays up after a fault and waits for its recovery. It says
// that it is healthy to all who ask for its health only.
func TestACoreThatWaitsForItsRecoveryGetsNothing(t *testing.T) {
	t.Parallel()
	one := refengine.Config{FaultTolerance: true, Steps: refengine.Steps{C0: 5 * time.Millisecond}}
	b := start(t, options{
		dirty: true, decode: []refengine.Config{one, one}, profile: mooncake.Profile{ChatResume: mooncake.ChatResumeVLLM},
		configure: retrying,
	})
	var under []<-chan string
	for i := range 6 {
		under = append(under, b.Judging(fmt.Sprint("runs ", i), `"stream":true,`))
	}
	b.Eventually("both run some", func() bool { return b.Decode[0].Stats().Running > 0 && b.Decode[1].Stats().Running > 0 })
	require.NoError(t, b.Decode[0].SetFaults(refengine.Rule{Fault: refengine.CoreFault}))
	for _, w := range under {
		require.Equal(t, "right", <-w, "the engine aborts them, and they go on elsewhere")
	}
	b.Eventually("it is seen", func() bool { return b.state(b.Decode[0]) == "halted" })
	require.Contains(t, b.engineStatus(b.Decode[0]).Error, "waits for its recovery")
	decodes := b.Decode[0].Stats().Decodes
	require.Equal(t, map[string]int{"right": 6}, b.JudgeAll(6, `"stream":true,`))
	require.Equal(t, decodes, b.Decode[0].Stats().Decodes)

	require.NoError(t, b.Decode[1].SetFaults(refengine.Rule{Fault: refengine.CoreFault}))
	b.Eventually("no rank is left", func() bool { return b.state(b.Decode[1]) == "halted" })
	waits := b.Judging("waits for the recovery", `"stream":true,`)
	probes := b.Prefill[0].Stats().Requests
	b.Eventually("it waits", func() bool { return b.now().Open == 1 })
	require.NoError(t, b.Decode[0].SetFaults())
	require.Equal(t, "right", <-waits)
	require.Equal(t, probes+1, b.Prefill[0].Stats().Requests, "its prompt was prefilled when a rank could fetch the KV")
}

// Ranks are gone while nothing runs on them. The engine says so with the 400 that the next request
// to one of them gets. This request goes to another rank, and nothing names one that is gone until
// the engine's facts are read next.
func TestRanksThatVanishWhileNothingRuns(t *testing.T) {
	t.Parallel()
	one := refengine.Config{DPSize: 4, DPMode: "internal", KV: refengine.KV{PrefixCache: 4096}}
	for name, o := range map[string]options{
		"decode ranks":                  {decode: []refengine.Config{one}},
		"ranks that prefill and decode": {mixed: []refengine.Config{one}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.dirty, o.configure = true, seldomRead
			b := start(t, o)
			require.Equal(t, map[string]int{"right": 8}, b.JudgeAll(8, streamed))
			b.Accounted()
			d := b.Decode[0]
			require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.FewerRanks, Value: 2}))
			require.Equal(t, map[string]int{"right": 16}, b.JudgeAll(16, streamed))
			b.Eventually("it is known", func() bool { return b.engineStatus(d).Error != "" })
			require.Equal(t, "rank 2 and those above it are lost: the engine has only 2 ranks now (elastic EP)", b.engineStatus(d).Error)
			for rank := range one.DPSize {
				require.Equal(t, rank < 2, b.rankOf(d, rank).Up, "rank %d", rank)
			}
			require.Equal(t, map[string]int{"right": 8}, b.JudgeAll(8, ""))
			b.settledRequests(32)
			for _, r := range b.Records()[24:] {
				require.Equal(t, 1, r.Attempts, "no request is sent to a rank that is gone")
			}
		})
	}
}

// With each reading of the facts requests find out whether lost ranks are back. Those that are
// refused are served elsewhere, and that is no failure of the engine.
func TestRequestsFindOutWhetherLostRanksAreBack(t *testing.T) {
	t.Parallel()
	one := refengine.Config{DPSize: 4, DPMode: "internal"}
	for name, o := range map[string]options{
		"decode ranks":                  {decode: []refengine.Config{one}},
		"ranks that prefill and decode": {mixed: []refengine.Config{one}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.dirty, o.configure = true, func(cfg *config.Config) {
				retrying(cfg)
				cfg.Health.Interval = 100 * time.Millisecond // facts are read each second: no request is refused three times
			}
			b := start(t, o)
			e := b.Decode[0]
			require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.FewerRanks, Value: 2}))
			for range 3 {
				b.Eventually("a request finds that they are lost", func() bool {
					require.Equal(t, map[string]int{"right": 8}, b.JudgeAll(8, streamed))
					return b.engineStatus(e).Error != ""
				})
				b.Eventually("the facts are read", func() bool { return b.engineStatus(e).Error == "" })
			}
			require.NoError(t, e.SetFaults())
			b.Eventually("they are back", func() bool { return b.engineStatus(e).Error == "" })
			require.Equal(t, map[string]int{"right": 8}, b.JudgeAll(8, ""))
			require.Zero(t, b.Sum("evenkeel_engine_outages_total"))
		})
	}
}
