package prefill

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/prefill/ledger"
)

// LoRA adapters are models, and a server may have thousands of them.
func TestAdaptersBeyondANumberShareASeries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := prometheus.NewRegistry()
		candidates := up("a")
		names := []string{"zz-base", "other"}
		for i := range 3000 {
			names = append(names, fmt.Sprintf("lora-%04d", i))
		}
		candidates[0].Models, candidates[0].Board = names, "zz-base"
		scheduler := newScheduler(t, candidates, func(c *Config) { c.Registerer = r })
		for _, name := range names {
			l := acquire(t, scheduler, Request{Model: name, PromptTokens: 10, Prompt: Prompt{Bytes: 40}})
			l.Answered(Usage{PromptTokens: 10, CachedTokens: 0}, time.Now().Add(time.Minute))
			l.Release()
		}
		families, err := r.Gather()
		require.NoError(t, err)
		seen := 0
		for _, f := range families {
			if n := f.GetName(); n != "evenkeel_prefix_feedback_available" {
				require.Less(t, len(f.GetMetric()), 100, n)
				continue
			}
			seen++
			labels := map[string]bool{}
			for _, m := range f.GetMetric() {
				labels[m.GetLabel()[0].GetValue()] = true
			}
			require.Len(t, labels, maxNamedModels+1, f.GetName())
			require.True(t, labels["zz-base"], "the base model has its own")
			require.True(t, labels["lora-0000"])
			require.True(t, labels[other])
		}
		require.Equal(t, 1, seen)
	})
}

func TestStatesAreReadFromTheAccounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := prometheus.NewPedanticRegistry()
		candidates := up("a", "b", "c")
		candidates[1].Live = false
		candidates[2].Models = nil
		scheduler := newScheduler(t, candidates, func(c *Config) { c.Registerer = r })
		hold(t, scheduler, "a", probing, 1_000)
		hold(t, scheduler, "a", pooled, 2_000)
		hold(t, scheduler, "a", dispatched, 3_000, 4_000)
		acquire(t, scheduler, Request{PromptTokens: 85_000}).Failed(true, time.Minute)

		require.NoError(t, testutil.GatherAndCompare(r, strings.NewReader(`
# HELP evenkeel_audit_drift Load that was charged, less load that was released, less load that is held, by the proxy's own accounts. A hand-off counts as drift if its request has ended without giving it back. Any value but 0 is a bug in evenkeel.
# TYPE evenkeel_audit_drift gauge
evenkeel_audit_drift{kind="handoffs"} 0
# HELP evenkeel_handoffs Hand-offs whose KV prefill engines hold, by where they are. orphan: no decode engine will fetch it, so it stays until the engine's timeout.
# TYPE evenkeel_handoffs gauge
evenkeel_handoffs{state="dispatched"} 2
evenkeel_handoffs{state="orphan"} 1
evenkeel_handoffs{state="pooled"} 1
# HELP evenkeel_handoffs_expired_total Hand-offs whose engine freed their KV at its own timeout.
# TYPE evenkeel_handoffs_expired_total counter
evenkeel_handoffs_expired_total 0
# HELP evenkeel_prefill_candidates Prefill ranks, by state. closed: the KV gate is closed. out: the circuit breaker is open. unknown: the engine has not named its models yet.
# TYPE evenkeel_prefill_candidates gauge
evenkeel_prefill_candidates{state="closed"} 1
evenkeel_prefill_candidates{state="down"} 1
evenkeel_prefill_candidates{state="open"} 0
evenkeel_prefill_candidates{state="out"} 0
evenkeel_prefill_candidates{state="removed"} 0
evenkeel_prefill_candidates{state="unknown"} 1
# HELP evenkeel_prefill_held_tokens Prompt tokens whose KV the engine holds for hand-offs, by where the hand-offs are. orphan: no decode engine will fetch it.
# TYPE evenkeel_prefill_held_tokens gauge
evenkeel_prefill_held_tokens{candidate="a",state="dispatched"} 7000
evenkeel_prefill_held_tokens{candidate="a",state="orphan"} 85000
evenkeel_prefill_held_tokens{candidate="a",state="pooled"} 2000
evenkeel_prefill_held_tokens{candidate="b",state="dispatched"} 0
evenkeel_prefill_held_tokens{candidate="b",state="orphan"} 0
evenkeel_prefill_held_tokens{candidate="b",state="pooled"} 0
evenkeel_prefill_held_tokens{candidate="c",state="dispatched"} 0
evenkeel_prefill_held_tokens{candidate="c",state="orphan"} 0
evenkeel_prefill_held_tokens{candidate="c",state="pooled"} 0
`), "evenkeel_audit_drift", "evenkeel_handoffs", "evenkeel_handoffs_expired_total", "evenkeel_prefill_candidates", "evenkeel_prefill_held_tokens"))

		time.Sleep(time.Minute)
		_, audit := scheduler.status()
		require.EqualValues(t, 1, audit.Expired)
		require.Equal(t, "open", stateOf(scheduler, "a"))
	})
}

func TestTheDriftStandsBesideTheDispatchers(t *testing.T) {
	r := prometheus.NewRegistry()
	for _, kind := range []string{"slots", "kv_tokens"} {
		r.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "evenkeel_audit_drift",
			Help: "Load that was charged, less load that was released, less load that is held, by the proxy's own accounts. A hand-off counts as " +
				"drift if its request has ended without giving it back. Any value but 0 is a bug in evenkeel.",
			ConstLabels: prometheus.Labels{"kind": kind}}))
	}
	newScheduler(t, up("a"), func(c *Config) { c.Registerer = r })
	n, err := testutil.GatherAndCount(r, "evenkeel_audit_drift")
	require.NoError(t, err)
	require.Equal(t, 3, n)
}

func TestTwoTiersCannotShareARegistry(t *testing.T) {
	r := prometheus.NewRegistry()
	newScheduler(t, nil, func(c *Config) { c.Registerer = r })
	_, err := New(Config{Registerer: r})
	require.ErrorContains(t, err, "give each tier its own registry")
}

func TestEventsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a/0", "a/1"))
		m := scheduler.metrics
		count := func(c prometheus.Collector) int { return int(testutil.ToFloat64(c)) }

		acquire(t, scheduler, request(1)).Answered(Usage{}, time.Time{})
		acquire(t, scheduler, request(2)).Failed(false, 0)
		acquire(t, scheduler, request(3)).Failed(true, 0)
		acquire(t, scheduler, request(4)).Release()
		for _, outcome := range []string{"answered", "failed", "lost", "dropped"} {
			require.Equal(t, 1, count(m.attempts.WithLabelValues(outcome)), outcome)
		}
		require.Equal(t, 4, count(m.decisions.WithLabelValues("least-tokens", "policy")))

		acquire(t, scheduler, Request{Exclude: []string{"a/0"}}).Release()
		require.Equal(t, 1, count(m.filterSkipped.WithLabelValues("instance")))
		acquire(t, scheduler, Request{Exclude: []string{"a/0", "a/1"}}).Release()
		require.Equal(t, 1, count(m.filterSkipped.WithLabelValues("excluded")))

		scheduler.SetCandidates(up("c"))
		fail(t, scheduler, "c", 5)
		acquire(t, scheduler, request(5)).Release()
		require.Equal(t, 1, count(m.filterSkipped.WithLabelValues("circuit")))
		require.Equal(t, 2, count(m.decisions.WithLabelValues("least-tokens", "only")), "after the filters")

		hold(t, scheduler, "c", orphaned, 95_000)
		mustWait(t, scheduler, request(6))
		time.Sleep(ledger.CanaryEvery)
		acquire(t, scheduler, request(7)).Release()
		require.Equal(t, 1, count(m.canaries.WithLabelValues("c", "dropped")))
		require.Equal(t, 1, count(m.decisions.WithLabelValues("least-tokens", "canary")))

		for range budgetFloor + 1 {
			scheduler.Retry(1, 503, nil)
		}
		require.Equal(t, 1, count(m.budgetExhausted))
	})
}
