package policy

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// ofHolders is ranks with a request of so many tokens each and free slots, and an entry of 1,000 tokens of which they hold something.
// A step takes 50 ms and a microsecond for each token.
func ofHolders(loads []int32, hits ...Hit) *Snapshot {
	s := &Snapshot{C0Ms: 50, C1Ms: 1e-3, StepMs: 60, Pool: []Entry{{ID: 1, Prompt: 1000}}, Waits: []EntryDetails{{Hits: hits, HeldMs: -1}}}
	for g, tokens := range loads {
		s.Workers = append(s.Workers,
			Worker{ID: int32(10 * g), Up: true, Free: 2, Running: []Request{{ID: uint64(100 + g), Prompt: tokens, Generated: 1, Slot: int32(g)}}})
	}
	return s
}

// The fullest rank must become no fuller. Below it, ranks may become less level: with near=0.01 by 0.01 * (50,000 + 30,000) = 800 tokens
// of the mean that heavy ranks dominate.
func TestAPromptGoesWhereItIsHeldIfThatCostsNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		spec string
		s    *Snapshot
		to   int
	}{
		{"without hits, to the least rank", "evenkeel", ofHolders([]int32{10_000, 10_500, 30_000}), 0},
		{"to the one that holds it", "evenkeel", ofHolders([]int32{10_000, 10_500, 30_000}, Hit{10, 960}), 10},
		{"of two, to the one that holds more", "evenkeel", ofHolders([]int32{10_000, 10_500, 11_000, 30_000}, Hit{10, 900}, Hit{20, 960}), 20},
		{"not to the fullest rank", "evenkeel", ofHolders([]int32{10_000, 10_500, 30_000}, Hit{20, 960}), 0},
		{"nor to one that would become the fullest", "evenkeel", ofHolders([]int32{10_000, 10_500, 30_000, 29_500}, Hit{30, 960}), 0},
		{"nor where ranks become much less level", "evenkeel:near=0.001", ofHolders([]int32{10_000, 28_000, 30_000}, Hit{10, 960}), 0},
		{"nor so for a small part of it", "evenkeel", ofHolders([]int32{10_000, 28_000, 30_000}, Hit{10, 16}), 0},
		{"nor for what the least rank holds, too", "evenkeel", ofHolders([]int32{10_000, 10_500, 30_000}, Hit{0, 960}, Hit{10, 960}), 0},
		{"where only the fullest rank counts, anywhere below it", "evenkeel:kappa=0", ofHolders([]int32{10_000, 28_000, 30_000}, Hit{10, 960}), 10},
		{"not with near=0", "evenkeel:near=0", ofHolders([]int32{10_000, 10_500, 30_000}, Hit{10, 960}), 0},
		{"not to a rank that is not there", "evenkeel", ofHolders([]int32{10_000, 10_500, 30_000}, Hit{30, 960}), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.Equal(t, [][2]int{{1, tt.to}}, pairs(newPolicy(t, tt.spec).Decide(tt.s, nil)))
		})
	}
}

func TestARankThatIsFullTakesNoPromptThatItHolds(t *testing.T) {
	s := ofHolders([]int32{10_000, 10_000, 10_000, 30_000}, Hit{20, 960})
	s.Workers[2].Free = 0
	require.NotEqual(t, 20, pairs(newPolicy(t, "evenkeel").Decide(s, nil))[0][1])
	s.Workers[2].Free, s.Workers[2].Capacity = 2, 11_000
	require.NotEqual(t, 20, pairs(newPolicy(t, "evenkeel").Decide(s, nil))[0][1], "its KV would be above the watermark")
}

// Two prompts as long as each other change places if each is held where the other was to go.
func TestPromptsChangePlaces(t *testing.T) {
	s := ofHolders([]int32{10_000, 10_000, 30_000}, Hit{10, 960})
	s.Workers[0].Free, s.Workers[1].Free = 1, 1
	s.Pool = append(s.Pool, Entry{ID: 2, Prompt: 1000})
	s.Waits = append(s.Waits, EntryDetails{Hits: []Hit{{0, 960}}, HeldMs: -1})
	require.ElementsMatch(t, [][2]int{{1, 10}, {2, 0}}, pairs(newPolicy(t, "evenkeel").Decide(s, nil)))
}

// What is spared makes no step longer, whatever the round.
func TestWhatIsSparedMakesNoStepLonger(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawMeasured(t)
		s.Waits = nil
		for range s.Pool {
			var hits []Hit
			for g := range s.Workers {
				if rapid.Bool().Draw(t, "holds") {
					hits = append(hits, Hit{s.Workers[g].ID, rapid.IntRange(1, 200).Draw(t, "tokens")})
				}
			}
			s.Waits = append(s.Waits, EntryDetails{Hits: hits, HeldMs: -1})
		}
		far, near := evenkeelDefaults, evenkeelDefaults
		far.nearShare, near.nearShare = 0, 0.01
		apart, beside := newEvenkeel("", &far).(*evenkeel), newEvenkeel("", &near).(*evenkeel)
		a, b := apart.Decide(s, nil), beside.Decide(s, nil)
		checkRules(t, beside, s, b)
		entries := func(all []Assignment) (ids []uint64) {
			for _, x := range all {
				ids = append(ids, x.Entry)
			}
			slices.Sort(ids)
			return ids
		}
		require.Equal(t, entries(a), entries(b), "the same ones are placed")
		spared := func(all []Assignment) (sum int) {
			for _, x := range all {
				at := slices.IndexFunc(s.Pool, func(e Entry) bool { return e.ID == x.Entry })
				for _, h := range s.Waits[at].Hits {
					if h.Worker == x.Worker {
						sum += h.Tokens
					}
				}
			}
			return sum
		}
		require.GreaterOrEqual(t, spared(b), spared(a))
		if len(b) > 0 {
			l, m := &apart.loads, &beside.loads
			found, now := l.smoothed.value(l.peak(), l.smoothed.powerMeanTerm), m.smoothed.value(m.peak(), m.smoothed.powerMeanTerm)
			law := int64(0)
			if s.C1Ms > 0 {
				law = int64(float64(s.C0Ms)/float64(s.C1Ms)) << fixedBits
			}
			require.LessOrEqual(t, now-found, (found+law)/100+2)
			require.LessOrEqual(t, m.peak(), l.peak(), "no step becomes longer")
		}
	})
}

func TestStayingNearDoesNotAllocate(t *testing.T) {
	s, p := crowd(64), newPolicy(t, "evenkeel")
	dst := p.Decide(s, nil)
	require.NotEmpty(t, dst)
	require.Zero(t, testing.AllocsPerRun(20, func() { dst = p.Decide(s, dst[:0]) }))
}

// crowd is ranks with free slots and entries of which every rank holds something.
func crowd(ranks int) *Snapshot {
	s := &Snapshot{C0Ms: 50, C1Ms: 1e-4, StepMs: 60}
	for g := range ranks {
		s.Workers = append(s.Workers,
			Worker{ID: int32(g), Up: true, Free: 4,
				Running: []Request{{ID: uint64(1000 + g), Prompt: int32(9000 + g%7), Generated: 1, Slot: int32(g)}}})
	}
	for i := range ranks {
		d := EntryDetails{HeldMs: -1}
		for g := range ranks {
			d.Hits = append(d.Hits, Hit{int32(g), 16 * (1 + (i*g)%50)})
		}
		s.Pool, s.Waits = append(s.Pool, Entry{ID: uint64(i + 1), Prompt: 1000}), append(s.Waits, d)
	}
	return s
}

// BenchmarkTickNear is a tick in which every rank holds a part of every prompt, with and without that.
func BenchmarkTickNear(b *testing.B) {
	for name, spec := range map[string]string{"near": "evenkeel", "far": "evenkeel:near=0"} {
		b.Run(name, func(b *testing.B) {
			s, p := crowd(64), newPolicy(b, spec)
			dst := p.Decide(s, nil)
			b.ReportAllocs()
			for b.Loop() {
				dst = p.Decide(s, dst[:0])
			}
		})
	}
}
