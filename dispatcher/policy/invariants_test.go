package policy

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestEveryPolicyKeepsTheRules(t *testing.T) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				s := drawSnapshot(t)
				before := clone(s)
				p, err := Parse(name)
				require.NoError(t, err)
				kept := []Assignment{{Entry: 7}}
				got := p.Decide(s, kept)
				require.Equal(t, before, s, "the snapshot is the board's")
				require.Equal(t, kept[0], got[0], "appends")
				got = append([]Assignment(nil), got[1:]...)
				checkRules(t, p, s, got)

				again, err := Parse(p.Name())
				require.NoError(t, err)
				require.Equal(t, got, again.Decide(s, nil), "a fresh policy decides the same")
				checkExplained(t, name, s, got)
			})
		})
	}
}

// checkRules: no entry twice, only to ranks that are up; free slots and room are
// kept by pooled policies, and no immediate one holds back what some rank could hold.
func checkRules(t *rapid.T, p Policy, s *Snapshot, got []Assignment) {
	prompt := map[uint64]int64{}
	for _, e := range s.Pool {
		prompt[e.ID] = int64(e.Prompt)
	}
	slots, tokens := map[int32]int32{}, map[int32]int64{}
	for _, a := range got {
		require.Contains(t, prompt, a.Entry, "each entry at most once, and only those of the pool")
		slots[a.Worker]++
		tokens[a.Worker] += prompt[a.Entry]
		delete(prompt, a.Entry)
	}
	largest := int64(-1) // what an idle rank could hold
	for g := range s.Workers {
		w := &s.Workers[g]
		n, sum := slots[w.ID], tokens[w.ID]
		delete(slots, w.ID)
		budget := KVBudget(w.Capacity, Watermark(p))
		if w.Up {
			largest = max(largest, budget)
		}
		switch {
		case n == 0:
		case !w.Up:
			require.Fail(t, "a rank that is down was chosen")
		case p.Immediate():
			require.LessOrEqual(t, sum/int64(n), budget)
		default:
			require.LessOrEqual(t, n, w.Free)
			if w.Capacity > 0 {
				require.LessOrEqual(t, w.KVTokens()+sum, budget)
			}
		}
	}
	require.Empty(t, slots, "only workers of the snapshot")
	if f, ok := p.(*firstCome); ok && f.engineQueues {
		for id, size := range prompt {
			require.Greater(t, size, largest, "entry %d was held back", id)
		}
	}
}

func checkExplained(t *rapid.T, name string, s *Snapshot, want []Assignment) {
	p, err := Parse(name)
	require.NoError(t, err)
	got, left := Explain(p, s)
	require.Equal(t, want, got)
	require.Len(t, left, len(s.Pool)-len(got))
	for _, l := range left {
		require.NotEmpty(t, l.Why)
	}
}

func TestNoPooledPolicyLeavesASlotIdleThatSomeoneFits(t *testing.T) {
	for _, name := range slices.DeleteFunc(Names(), func(n string) bool { p, _ := Parse(n); return p.Immediate() }) {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				s := drawSnapshot(t)
				s.MaxAgeMs = 0 // a reserved rank may idle
				for i := range s.Pool {
					s.Pool[i].Urgent = false
				}
				p, err := Parse(name)
				require.NoError(t, err)
				got := p.Decide(s, nil)
				after := s.ranksAfter(got)
				for _, e := range s.Pool {
					if slices.ContainsFunc(got, func(a Assignment) bool { return a.Entry == e.ID }) {
						continue
					}
					for _, w := range s.Workers {
						room := int64(math.MaxInt64)
						if w.Capacity > 0 {
							room = KVBudget(w.Capacity, Watermark(p)) - after[w.ID].held
						}
						require.False(t, w.Up && after[w.ID].free > 0 && int64(e.Prompt) <= room, "entry %d waits, worker %d idles", e.ID, w.ID)
					}
				}
			})
		})
	}
}

// A policy with a guard places the overdue entries before all others, so that none waits for ever:
// no younger entry gets a slot while an overdue one waits. Entries wait the longer, the earlier
// they came, and the ranks have KV room for all of them.
func TestOverdueEntriesArePlacedBeforeAllOthers(t *testing.T) {
	n := 0
	for _, name := range Names() {
		if p, _ := Parse(name); p.Immediate() || p.MaxAgeMs() == 0 {
			continue
		}
		n++
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				s := drawSnapshot(t)
				s.MaxAgeMs = 500
				for g := range s.Workers {
					s.Workers[g].Capacity = 0
				}
				slices.SortStableFunc(s.Pool, func(a, b Entry) int { return cmp.Compare(b.WaitMs, a.WaitMs) })
				waiting := map[uint64]bool{} // of the overdue ones
				for i := range s.Pool {
					e := &s.Pool[i]
					if e.Urgent = false; e.WaitMs >= s.MaxAgeMs {
						waiting[e.ID] = true
					}
				}
				p, err := Parse(name)
				require.NoError(t, err)
				younger := 0
				for _, a := range p.Decide(s, nil) {
					if !waiting[a.Entry] {
						younger++
					}
					delete(waiting, a.Entry)
				}
				require.False(t, younger > 0 && len(waiting) > 0, "%d younger entries were placed, and these overdue ones wait: %v", younger, waiting)
			})
		})
	}
	require.GreaterOrEqual(t, n, 8, "most policies have a guard")
}

// fleet makes a snapshot as a tick sees it: some slots of some ranks just freed.
func fleet(rng *rand.Rand, workers, running, freed, pool int) *Snapshot {
	s := &Snapshot{MaxAgeMs: 30_000}
	length := func() int32 { return int32(min(64_000, max(16, math.Exp(7.6+rng.NormFloat64())))) }
	for g := range workers {
		w := Worker{ID: int32(g), Up: true, Capacity: 1 << 20}
		for range running {
			w.Running = append(w.Running, Request{Prompt: length(), Generated: rng.Int32N(400)})
		}
		s.Workers = append(s.Workers, w)
	}
	for range freed {
		w := &s.Workers[rng.IntN(workers)]
		w.Free++
		w.Running = w.Running[:max(0, len(w.Running)-1)]
	}
	for i := range pool {
		s.Pool = append(s.Pool, Entry{ID: uint64(i), Prompt: length(), WaitMs: float32((pool - i) * 40)})
	}
	return s
}

func TestDecideDoesNotAllocate(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	s := fleet(rng, 64, 16, 400, 512)
	s.MaxAgeMs = 20_000
	for _, spec := range append(Names(), "br0:order=desc,window=16,theta=1000", "br0:queue=capacity,theta=0") {
		t.Run(spec, func(t *testing.T) {
			p, err := Parse(spec)
			require.NoError(t, err)
			dst := p.Decide(s, nil)
			require.NotEmpty(t, dst)
			require.Zero(t, testing.AllocsPerRun(20, func() { dst = p.Decide(s, dst[:0]) }))
		})
	}
}

// BenchmarkTickBR0 is a tick of a full pool on ranks that were all running;
// its p99 is to be 100 us at most, without an allocation.
func BenchmarkTickBR0(b *testing.B) {
	for _, freed := range []int{1, 16, 64, 128} {
		b.Run(fmt.Sprintf("freed=%d", freed), func(b *testing.B) { benchmarkTick(b, "br0", freed) })
	}
}

func benchmarkTick(b *testing.B, spec string, freed int) {
	rng := rand.New(rand.NewPCG(3, uint64(freed)))
	snapshots := make([]*Snapshot, 64)
	for i := range snapshots {
		snapshots[i] = fleet(rng, 64, 16, freed, 512)
	}
	p, err := Parse(spec)
	require.NoError(b, err)
	var dst []Assignment
	for _, s := range snapshots {
		dst = p.Decide(s, dst[:0])
	}
	took := make([]time.Duration, 0, 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		s := snapshots[len(took)%len(snapshots)]
		start := time.Now()
		dst = p.Decide(s, dst[:0])
		if len(took) < cap(took) {
			took = append(took, time.Since(start))
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
}

// The rank that is reserved for an overdue prompt is one that can hold it: another one would stay
// empty in vain. BR-0 and BR-H take the rank with the most room, as their golden vectors do.
func TestTheReservedRankCanHoldItsPrompt(t *testing.T) {
	for _, spec := range []string{"evenkeel", "pjsq"} {
		t.Run(spec, func(t *testing.T) {
			p, err := Parse(spec)
			require.NoError(t, err)
			small, large := Worker{ID: 1, Up: true, Capacity: 200_000, Free: 20}, Worker{ID: 2, Up: true, Capacity: 1_000_000}
			run := func(id uint64) {
				large.Running = append(large.Running, Request{Prompt: 10_000, Generated: 10, ID: id, Slot: int32(len(large.Running))})
			}
			next := uint64(1000)
			for range 94 {
				run(next)
				next++
			}
			for round := range 100 {
				large.Running = large.Running[1:] // the oldest ends
				large.Free = int32(100 - len(large.Running))
				s := &Snapshot{
					Workers: []Worker{small, large}, MaxAgeMs: 30_000, MeanOutput: 100,
					Pool: []Entry{{ID: 1, Prompt: 400_000, WaitMs: 60_000 + float32(round)*1000}},
				}
				for range 4 {
					s.Pool = append(s.Pool, Entry{ID: next, Prompt: 10_000, WaitMs: 10})
					next++
				}
				for _, a := range p.Decide(s, nil) {
					switch {
					case a.Entry == 1:
						require.EqualValues(t, 2, a.Worker)
						return
					case a.Worker == 2:
						run(a.Entry)
					}
				}
			}
			require.Fail(t, "it is never sent")
		})
	}
}
