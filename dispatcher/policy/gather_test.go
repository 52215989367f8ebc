package policy

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// prompt is an entry of a test.
type prompt struct {
	tokens int32
	urgent bool
	EntryDetails
	express bool
}

// ofMixed is two ranks that prefill, with four requests each that decode, and a law of 0.1 ms for
// each token of a prompt. Many requests wait for their first token.
func ofMixed(pool ...prompt) *Snapshot {
	s := &Snapshot{Aggregated: true, OwnPromptMs: 0.1, NotStarted: 1000, PromptRate: 10_000, C0Ms: 10, C1Ms: 1e-4}
	for id := range int32(2) {
		w := Worker{ID: 10 * id, Free: 4, Up: true}
		for i := range uint64(4) {
			w.Running = append(w.Running, Request{ID: 100*uint64(id) + i, Prompt: 10, Generated: 5, Slot: 4*id + int32(i)})
		}
		s.Workers = append(s.Workers, w)
	}
	for i, e := range pool {
		s.Pool = append(s.Pool, Entry{ID: uint64(i) + 1, Prompt: e.tokens, Urgent: e.urgent, Express: e.express})
		s.Waits = append(s.Waits, e.EntryDetails)
	}
	return s
}

func newPolicy(t interface {
	Helper()
	Fatal(...any)
}, spec string) Policy {
	t.Helper()
	p, err := Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRoundsOfAPolicy(t *testing.T) {
	of := func(tokens int32, details EntryDetails) prompt { return prompt{tokens: tokens, EntryDetails: details} }
	never := func(tokens int32) prompt { return of(tokens, EntryDetails{HeldMs: -1}) }
	few := func(pool ...prompt) *Snapshot {
		s := ofMixed(pool...)
		s.NotStarted = 0.2
		return s
	}
	for _, tt := range []struct {
		name   string
		spec   string
		s      *Snapshot
		ranks  []int32 // of the entries that are sent, in order of the pool; -1: it waits
		first  []uint64
		nextMs float64
	}{
		{"one prompt is held until its wait is worth it", "evenkeel", ofMixed(never(1000)), []int32{-1}, []uint64{1}, 100},
		{"where few wait for their first token, it is held for less", "evenkeel", few(never(1000)), []int32{-1}, []uint64{1}, 25},
		{"with more patience it is held for longer", "evenkeel:patience=5", few(never(1000)), []int32{-1}, []uint64{1}, 50},
		{"but not for longer than max_hold", "evenkeel:max_hold=0.05", ofMixed(never(1000)), []int32{-1}, []uint64{1}, 50},
		{"without patience all go at once", "evenkeel:patience=0", ofMixed(never(1000)), []int32{0}, []uint64{1}, math.Inf(1)},
		{"two level a round", "evenkeel", ofMixed(never(1000), never(1000)), []int32{0, 10}, []uint64{1, 2}, math.Inf(1)},
		{"what was held for long enough goes", "evenkeel", ofMixed(of(1000, EntryDetails{HeldMs: 101})), []int32{0}, nil, math.Inf(1)},
		// The first one fits beside the second one. The third one would be 9,500 on a rank, 6,500 more
		// than there are now, where 4,500 would be level.
		{"one that is not held goes alone", "evenkeel", ofMixed(never(500),
			prompt{tokens: 3000, EntryDetails: EntryDetails{HeldMs: -1}, express: true}, never(9000)),
			[]int32{10, 0, -1}, []uint64{1, 3}, 0.25 * 8 * 0.1 * 2000},
		{"so does one that is urgent", "evenkeel",
			ofMixed(prompt{tokens: 3000, urgent: true, EntryDetails: EntryDetails{HeldMs: -1}}), []int32{0}, nil, math.Inf(1)},
		{"or will soon be", "evenkeel", ofMixed(of(1000, EntryDetails{HeldMs: -1, UrgentInMs: 70})), []int32{-1}, []uint64{1}, 70},
		{"a rank that holds the prefix is preferred", "evenkeel:patience=0",
			ofMixed(of(1000, EntryDetails{HeldMs: -1, Hits: []Hit{{Worker: 10, Tokens: 600}, {Worker: 7, Tokens: 900}}})),
			[]int32{10}, []uint64{1}, math.Inf(1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPolicy(t, tt.spec)
			sent := p.Decide(tt.s, nil)
			for i, want := range tt.ranks {
				at := slices.IndexFunc(sent, func(a Assignment) bool { return a.Entry == tt.s.Pool[i].ID })
				if want < 0 {
					require.Negative(t, at)
					continue
				}
				require.GreaterOrEqual(t, at, 0, "entry %d waits", i)
				require.Equal(t, want, sent[at].Worker, "entry %d", i)
			}
			got := HoldReportOf(p)
			require.ElementsMatch(t, tt.first, got.First)
			require.InDelta(t, tt.nextMs, got.NextMs, 1e-3)
			require.Equal(t, len(sent) < len(tt.s.Pool), Held(p) > 0)
		})
	}
	require.True(t, math.IsInf(HoldReportOf(newPolicy(t, "jsq")).NextMs, 1), "no other policy has rounds")
}

func TestExplainSaysWhoIsHeldForARound(t *testing.T) {
	_, left := Explain(newPolicy(t, "evenkeel"), ofMixed(prompt{tokens: 1000, EntryDetails: EntryDetails{HeldMs: -1}}))
	require.Equal(t, []Unplaced{{1, "held for a round: it goes in 100 ms, or sooner with others"}}, left)
}

// Whatever a snapshot holds: no rank gets more than its slots and its room, no entry goes twice,
// none that is held could never be sent, and the same snapshot gives the same.
func TestRoundsKeepToSlotsAndRoom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &Snapshot{Aggregated: true, RequestTokens: 100, MeanOutput: 50, C0Ms: 10, C1Ms: 1e-4}
		s.OwnPromptMs = rapid.SampledFrom([]float32{0, 0.1, 10}).Draw(t, "own")
		for id := range rapid.Int32Range(1, 5).Draw(t, "ranks") {
			w := Worker{ID: id, Free: rapid.Int32Range(-2, 4).Draw(t, "free"), Up: rapid.Bool().Draw(t, "up")}
			w.Backlog = rapid.Int64Range(0, 5000).Draw(t, "backlog")
			w.Capacity = rapid.SampledFrom([]int64{0, 5000, 20_000}).Draw(t, "capacity")
			for i := range rapid.IntRange(0, 3).Draw(t, "running") {
				q := Request{ID: uint64(i), Prompt: rapid.Int32Range(1, 3000).Draw(t, "prompt"), Generated: rapid.Int32Range(0, 9).Draw(t, "generated")}
				w.Running = append(w.Running, q)
			}
			s.Workers = append(s.Workers, w)
		}
		for id := range rapid.Uint64Range(0, 12).Draw(t, "pool") {
			e := Entry{ID: id + 1, Prompt: rapid.Int32Range(1, 9000).Draw(t, "prompt")}
			d := EntryDetails{HeldMs: rapid.Float64Range(-1, 6000).Draw(t, "held")}
			e.Express = rapid.IntRange(0, 9).Draw(t, "express") == 0
			e.Urgent = rapid.IntRange(0, 9).Draw(t, "urgent") == 0
			for range rapid.IntRange(0, 2).Draw(t, "hits") {
				d.Hits = append(d.Hits, Hit{rapid.Int32Range(0, 6).Draw(t, "rank"), rapid.IntRange(1, 9000).Draw(t, "tokens")})
			}
			s.Pool, s.Waits = append(s.Pool, e), append(s.Waits, d)
		}
		p := newPolicy(t, "evenkeel")
		sent := p.Decide(s, nil)
		require.Equal(t, sent, newPolicy(t, "evenkeel").Decide(s, nil))
		seen := map[uint64]bool{}
		for g := range s.Workers {
			w := &s.Workers[g]
			n, kv := int32(0), w.KVTokens()
			for _, a := range sent {
				if a.Worker == w.ID {
					require.False(t, seen[a.Entry])
					seen[a.Entry] = true
					n++
					kv += int64(s.Pool[a.Entry-1].Prompt)
				}
			}
			if n > 0 {
				require.True(t, w.Up)
				require.LessOrEqual(t, n, w.Free)
				require.LessOrEqual(t, kv, KVBudget(w.Capacity, 0.05))
			}
		}
		require.Len(t, seen, len(sent))
		if s.OwnPromptMs == 0 {
			require.Zero(t, Held(p), "nothing is held before the law is learned")
		}
		require.Equal(t, Held(p) > 0, !math.IsInf(HoldReportOf(p).NextMs, 1))
	})
}

// On a rank that prefills and decodes, room stays free for answers that grow. An overdue prompt
// that has room only without that gets its turn all the same: younger prompts do not take what
// becomes free.
func TestAnOverduePromptGetsItsTurnOnARankThatDoesBoth(t *testing.T) {
	p, err := Parse("evenkeel")
	require.NoError(t, err)
	w, next := Worker{ID: 1, Up: true, Capacity: 100_000}, uint64(100)
	run := func(id uint64) {
		w.Running = append(w.Running, Request{Prompt: 2000, Generated: 1000, ID: id, Slot: int32(len(w.Running))})
	}
	for range 30 {
		run(next)
		next++
	}
	for round := range 100 {
		if len(w.Running) > 0 { // the oldest answer ends
			w.Running = w.Running[1:]
		}
		w.Free = int32(64 - len(w.Running))
		s := &Snapshot{
			Aggregated: true, Workers: []Worker{w}, MaxAgeMs: 30_000, MeanOutput: 8000, OwnPromptMs: 0.02, NotStarted: -1, PromptRate: -1,
			Pool: []Entry{{ID: 1, Prompt: 60_000, WaitMs: 40_000 + float32(round)*100}}, Waits: []EntryDetails{{HeldMs: -1}},
		}
		for range 3 {
			s.Pool, s.Waits = append(s.Pool, Entry{ID: next, Prompt: 2000, WaitMs: 10}), append(s.Waits, EntryDetails{HeldMs: -1})
			next++
		}
		for _, a := range p.Decide(s, nil) {
			if a.Entry == 1 {
				return
			}
			run(a.Entry)
		}
	}
	require.Fail(t, "it is never sent")
}

// Prompts that no rank has room for now keep no slot from younger ones that fit, whether or not
// they are overdue.
func TestPromptsWithoutRoomKeepNoSlotFromYoungerOnes(t *testing.T) {
	for _, wait := range []float32{100, 60_000} {
		p, err := Parse("evenkeel:patience=0")
		require.NoError(t, err)
		w := Worker{ID: 1, Up: true, Capacity: 100_000, Free: 7, Running: []Request{{Prompt: 60_000, Generated: 5, ID: 99, Slot: 1}}}
		other := w // one of both is reserved for prompts that are overdue
		other.ID = 2
		s := &Snapshot{
			Aggregated: true, Workers: []Worker{w, other}, MaxAgeMs: 30_000, MeanOutput: 100, OwnPromptMs: 0.02, NotStarted: -1, PromptRate: -1,
		}
		for i := range 40 {
			e := Entry{ID: uint64(i + 1), Prompt: 60_000, WaitMs: wait}
			if i >= 20 {
				e.Prompt, e.WaitMs = 2000, 50
			}
			s.Pool, s.Waits = append(s.Pool, e), append(s.Waits, EntryDetails{HeldMs: -1})
		}
		require.NotEmpty(t, p.Decide(s, nil), "waited for %v ms", wait)
	}
}
