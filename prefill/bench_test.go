package prefill

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"evenkeel/prefill/index"
)

func fleet(n int) []Candidate {
	var ids []string
	for i := range n {
		ids = append(ids, fmt.Sprintf("p%d/%d", i/8, i%8))
	}
	candidates := up(ids...)
	for i := range candidates {
		candidates[i].CapacityTokens = 0 // no gate closes
	}
	return candidates
}

// Target: 50 µs at 64 candidates, nothing allocated but the lease.
func BenchmarkChooseAndReserve(b *testing.B) {
	for _, policy := range []string{"finish", "lmetric", "least-tokens", "round-robin"} {
		b.Run(policy, func(b *testing.B) {
			scheduler := newScheduler(b, fleet(64), withPolicy(policy))
			for n := range 640 {
				acquire(b, scheduler, request(n)) // a busy fleet
			}
			r := Request{ID: "req-1", Model: testModel, PromptTokens: 4000}
			took := make([]time.Duration, 0, 1<<20)
			b.ReportAllocs()
			for b.Loop() {
				start := time.Now()
				lease, err := scheduler.Acquire(b.Context(), r)
				if err != nil {
					b.Fatal(err)
				}
				if len(took) < cap(took) {
					took = append(took, time.Since(start))
				}
				lease.Release()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
		})
	}
}

// All are alike, so that every candidate is hashed.
func BenchmarkChooseAmongIdle(b *testing.B) {
	scheduler := newScheduler(b, fleet(64))
	r := Request{ID: "3f1c9a64-7d2e-4b51-9c07-7d1c2b3a4e5f", Model: testModel, PromptTokens: 4000}
	b.ReportAllocs()
	for b.Loop() {
		lease, err := scheduler.Acquire(b.Context(), r)
		if err != nil {
			b.Fatal(err)
		}
		lease.Release()
	}
}

func TestADecisionAllocatesOnlyTheLease(t *testing.T) {
	scheduler := newScheduler(t, fleet(64))
	r := Request{ID: "req-1", Model: testModel, PromptTokens: 4000}
	allocs := testing.AllocsPerRun(200, func() {
		if lease, err := scheduler.Acquire(t.Context(), r); err == nil {
			lease.Release()
		}
	})
	if allocs > 1 {
		t.Errorf("a decision and its release allocate %v times, want 1", allocs)
	}
}

// Target: 250 µs with hashing and the index walk of a prompt of 2,048 blocks: one
// that every candidate holds, and one whose second half nobody has seen. What
// the choice costs others, for it holds the lock, is all but the hashing.
func BenchmarkChooseWithALongPrompt(b *testing.B) {
	const block, blocks = 16, 2048
	root := index.Scope{Model: testModel}.Root(index.Tokens, block)
	for _, row := range []struct {
		name string
		new  int // blocks
		hash bool
	}{{"held", 0, false}, {"held, hashed", 0, true}, {"half new, hashed", blocks / 2, true}, {"all new, hashed", blocks, true}} {
		b.Run(row.name, func(b *testing.B) {
			scheduler := newScheduler(b, fleet(64), withPolicy("lmetric"))
			ids := make([]int32, block*blocks)
			for i := range ids {
				ids[i] = int32(i)
			}
			var h index.Hasher
			keys := h.Tokens(nil, root, ids, block)
			scheduler.lock()
			for _, c := range scheduler.candidates {
				c.CapacityTokens = 500_000
				c.cache.Stored(c.cache.EnsureSlot(&Prompt{BlockTokens: block}, testModel, c.CapacityTokens, scheduler.now), keys)
			}
			scheduler.unlock()
			b.ReportAllocs()
			n := int32(0)
			for b.Loop() {
				if row.new > 0 {
					n++
					ids[block*(blocks-row.new)] = 100_000 + n
				}
				if row.hash {
					keys = h.Tokens(make([]index.Key, 0, blocks), root, ids, block)
				}
				lease, err := scheduler.Acquire(b.Context(),
					Request{ID: "req-1", Model: testModel, PromptTokens: len(ids), Counted: true, Prompt: Prompt{Keys: keys, BlockTokens: block}})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer() // its end is not the choice's
				lease.Answered(Usage{PromptTokens: len(ids), CachedTokens: -1}, time.Time{})
				lease.Release()
				b.StartTimer()
			}
		})
	}
}
