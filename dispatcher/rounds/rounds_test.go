package rounds

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// group is ranks with so many tokens of backlog each, of which half of the slots decode, and many
// requests wait for their first token.
func group(backlog ...int64) *Group {
	g := &Group{Own: 0.0001, NotStarted: 1000, Rate: 10_000}
	for _, b := range backlog {
		g.Ranks = append(g.Ranks, Rank{Slots: 8, Room: 100_000, Backlog: b})
	}
	g.Slots = 16 * len(backlog)
	g.Decoding = g.Slots / 2
	return g
}

func waiting(since float64, prompts ...int32) (all []Candidate) {
	for _, p := range prompts {
		all = append(all, Candidate{Prompt: p, Since: since, Until: math.Inf(1)})
	}
	return all
}

func TestDecide(t *testing.T) {
	never := math.NaN()
	all := math.Inf(1)
	for _, tt := range []struct {
		name    string
		group   *Group
		change  func(g *Group, w []Candidate)
		waiting []Candidate
		picks   []Pick
		wake    float64
	}{
		{name: "nothing waits", group: group(0, 0), wake: all},
		{name: "a level round goes at once", group: group(0, 0), waiting: waiting(never, 1000, 1000), picks: []Pick{{0, 0}, {1, 1}}, wake: all},
		// 16 decodes would wait 1000 tokens on one rank less the 500 that each had if they were level: 16
		// * 0.0001 * 500 = 0.8 s, of which a quarter.
		{name: "one prompt is held until its wait is worth what it spares the decodes", group: group(0, 0), waiting: waiting(10, 1000), wake: 10.2},
		{name: "and two share the wait", group: group(0, 0), waiting: waiting(10, 1500, 500), wake: 10.1},
		{name: "it goes when it has waited for that", group: group(0, 0), waiting: waiting(9.8, 1000), picks: []Pick{{0, 0}}, wake: all},
		{name: "nobody decodes: nothing is held", group: group(0, 0), change: func(g *Group, _ []Candidate) { g.Decoding = 0 },
			waiting: waiting(never, 1000), picks: []Pick{{0, 0}}, wake: all},
		{name: "nothing is learned: nothing is held", group: group(0, 0), change: func(g *Group, _ []Candidate) { g.Own = 0 },
			waiting: waiting(never, 1000), picks: []Pick{{0, 0}}, wake: all},
		{name: "nobody waits for longer than max_hold", group: group(0, 0), change: func(g *Group, _ []Candidate) { g.Own = 1 },
			waiting: waiting(5, 1000), picks: []Pick{{0, 0}}, wake: all},
		{name: "nor for longer than it can", group: group(0, 0), change: func(_ *Group, w []Candidate) { w[0].Until = 10.05 },
			waiting: waiting(10, 1000), wake: 10.05},
		{name: "a group that serves little holds for less", group: group(0, 0), change: func(g *Group, _ []Candidate) { g.Decoding = 4 },
			waiting: waiting(10, 1000), wake: 10 + 0.2/16},
		// 2.5 * 0.4 requests, for 500 tokens each.
		{name: "where few wait for their first token it is held for less", group: group(0, 0),
			change:  func(g *Group, _ []Candidate) { g.NotStarted = 0.4 },
			waiting: waiting(10, 1000), wake: 10.05},
		// and with 2,500 tokens a second, 2 * 2.5 * 0.4 requests * 0.25 of that.
		{name: "where prompts come so seldom that none is expected meanwhile, for a part of that", group: group(0, 0),
			change:  func(g *Group, _ []Candidate) { g.NotStarted, g.Rate = 0.4, 2500 },
			waiting: waiting(10, 1000), wake: 10.025},
		{name: "where nobody knows, as if many did", group: group(0, 0), change: func(g *Group, _ []Candidate) { g.NotStarted, g.Rate = -1, -1 },
			waiting: waiting(10, 1000), wake: 10.2},
		{name: "and where none did it is not held", group: group(0, 0), change: func(g *Group, _ []Candidate) { g.NotStarted = 0 },
			waiting: waiting(never, 1000), picks: []Pick{{0, 0}}, wake: all},
		{name: "one that fits beside what another rank computes rides along", group: group(4000, 0), waiting: waiting(10, 3000),
			picks: []Pick{{0, 1}}, wake: all},
		{name: "and leaves the others held", group: group(0, 2000), waiting: waiting(10, 12_000, 1500),
			picks: []Pick{{1, 0}}, wake: 10 + 0.25*16*0.0001*(11_500-6000)}, // 12,000 on 1,500 against 2,000, where each would have 6,000 more
		{name: "the largest prompts are placed first", group: group(0, 0), waiting: waiting(never, 1000, 2000, 3000),
			change: func(g *Group, _ []Candidate) { g.Own = 0 }, picks: []Pick{{0, 1}, {1, 1}, {2, 0}}, wake: all},
		{name: "the rank that holds the prefix is preferred", group: group(0, 2000), waiting: waiting(never, 4000),
			change: func(g *Group, w []Candidate) { g.Own, w[0].Hits = 0, []Hit{{1, 3000}} }, picks: []Pick{{0, 1}}, wake: all},
		{name: "but not if the round grows by more than that saves", group: group(0, 2000), waiting: waiting(never, 4000),
			change: func(g *Group, w []Candidate) { g.Own, w[0].Hits = 0, []Hit{{1, 1900}} }, picks: []Pick{{0, 0}}, wake: all},
		{name: "where backlogs are alike the KV is levelled", group: group(200, 0), waiting: waiting(never, 1000),
			change: func(g *Group, _ []Candidate) { g.Own, g.Ranks[1].Load = 0, 5000 }, picks: []Pick{{0, 0}}, wake: all},
		{name: "a rank without room takes nothing", group: group(0, 5000), waiting: waiting(never, 1000),
			change: func(g *Group, _ []Candidate) { g.Own, g.Ranks[0].Room = 0, 999 }, picks: []Pick{{0, 1}}, wake: all},
		{name: "without slots all wait, and nobody has to ask again", group: group(0, 0), waiting: waiting(never, 1000),
			change: func(g *Group, _ []Candidate) { g.Ranks[0].Slots, g.Ranks[1].Slots = 0, 0 }, wake: all},
		{name: "an urgent one goes alone", group: group(0, 0), waiting: waiting(10, 5000, 1000),
			change: func(_ *Group, w []Candidate) { w[1].Urgent = true }, picks: []Pick{{1, 0}}, wake: 10 + 0.25*16*0.0001*(4000-2500)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.change != nil {
				tt.change(tt.group, tt.waiting)
			}
			var p Planner
			picks, wake := p.Decide(10, tt.group, tt.waiting, Default)
			require.ElementsMatch(t, tt.picks, picks)
			if math.IsInf(tt.wake, 1) {
				require.Equal(t, tt.wake, wake)
			} else {
				require.InDelta(t, tt.wake, wake, 1e-9)
			}
		})
	}
}

func TestSinceIsWhenARequestCouldFirstHaveBeenSent(t *testing.T) {
	g, w := group(0), waiting(math.NaN(), 1000, 1000)
	g.Ranks[0].Slots = 1
	var p Planner
	_, _ = p.Decide(3, g, w, Default)
	require.InDelta(t, 3, w[0].Since, 0)
	require.True(t, math.IsNaN(w[1].Since), "there was no slot for it")
}

func TestAClockThatGoesBackHoldsNobodyForLonger(t *testing.T) {
	g, w := group(0, 0), waiting(math.NaN(), 1000)
	g.Own = 1
	var p Planner
	_, wake := p.Decide(5000, g, w, Default)
	require.InDelta(t, 5005, wake, 1e-9)
	_, wake = p.Decide(1000, g, w, Default)
	require.InDelta(t, 1005, wake, 1e-9)
	_, wake = p.Decide(1004, g, w, Default)
	require.InDelta(t, 1005, wake, 1e-9)
	picks, _ := p.Decide(1005, g, w, Default)
	require.Len(t, picks, 1)
}

// Whatever waits: slots and room are kept, each is sent once, and nobody who could be sent is held
// beyond max_hold.
func TestRoundsKeepTheirBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := &Group{Own: rapid.SampledFrom([]float64{0, 1e-5, 1e-4, 1}).Draw(t, "own"), Request: rapid.Float64Range(0, 3000).Draw(t, "request")}
		g.NotStarted, g.Rate = rapid.Float64Range(-1, 20).Draw(t, "unbegun"), rapid.Float64Range(-1, 20_000).Draw(t, "rate")
		for range rapid.IntRange(1, 6).Draw(t, "ranks") {
			g.Ranks = append(g.Ranks, Rank{
				Slots: rapid.IntRange(0, 4).Draw(t, "slots"), Room: rapid.Int64Range(0, 9000).Draw(t, "room"),
				Backlog: rapid.Int64Range(0, 9000).Draw(t, "backlog"),
				Load:    rapid.Float64Range(0, 1e5).Draw(t, "load"),
			})
		}
		g.Decoding = rapid.IntRange(0, 20).Draw(t, "decoding")
		g.Slots = g.Decoding + rapid.IntRange(1, 20).Draw(t, "more")
		now := rapid.Float64Range(0, 100).Draw(t, "now")
		var w []Candidate
		for range rapid.IntRange(0, 12).Draw(t, "waiting") {
			c := Candidate{Prompt: rapid.Int32Range(1, 9000).Draw(t, "prompt"), Since: math.NaN(), Until: math.Inf(1)}
			c.Urgent = rapid.IntRange(0, 9).Draw(t, "urgent") == 0
			if rapid.Bool().Draw(t, "known") {
				c.Since = now + rapid.Float64Range(-8, 1).Draw(t, "since") // the clock may have gone back
			}
			for r := range g.Ranks {
				if rapid.Bool().Draw(t, "holds") {
					c.Hits = append(c.Hits, Hit{int32(r), rapid.Int32Range(0, c.Prompt).Draw(t, "hit")})
				}
			}
			w = append(w, c)
		}
		var p, again Planner
		before := slices.Clone(w)
		picks, wake := p.Decide(now, g, w, Default)
		picks = slices.Clone(picks)
		slots, room, sent := make([]int, len(g.Ranks)), make([]int64, len(g.Ranks)), make([]bool, len(w))
		for r := range g.Ranks {
			slots[r], room[r] = g.Ranks[r].Slots, g.Ranks[r].Room
		}
		for _, k := range picks {
			require.False(t, sent[k.Candidate])
			sent[k.Candidate] = true
			slots[k.Rank]--
			room[k.Rank] -= int64(w[k.Candidate].Prompt)
			require.GreaterOrEqual(t, slots[k.Rank], 0)
			require.GreaterOrEqual(t, room[k.Rank], int64(0))
		}
		require.Greater(t, wake, now)
		if !math.IsInf(wake, 1) {
			require.LessOrEqual(t, wake, now+Default.MaxHold)
		}
		left := 0
		for _, n := range slots {
			left += n
		}
		for i := range w {
			if sent[i] {
				continue
			}
			if left--; left < 0 {
				break
			}
			for r := range g.Ranks {
				if slots[r] > 0 && room[r] >= int64(w[i].Prompt) {
					require.False(t, now-w[i].Since >= Default.MaxHold, "%d is held: %v", i, w[i])
					require.False(t, math.IsInf(wake, 1) && len(picks) == 0, "nobody asks again for %d", i)
				}
			}
		}
		equal, same := again.Decide(now, g, before, Default)
		require.Equal(t, picks, slices.Clone(equal))
		require.InDelta(t, 0, math.Atan(wake)-math.Atan(same), 0) // also where it is never
	})
}

func TestDecidingAllocatesNothing(t *testing.T) {
	g := group(make([]int64, 32)...)
	w := waiting(0, make([]int32, 1000)...)
	for i := range w {
		w[i].Prompt = int32(100 + 7919*i%8000)
		w[i].Hits = []Hit{{int32(i % 32), w[i].Prompt / 2}}
	}
	var p Planner
	require.Zero(t, testing.AllocsPerRun(100, func() { p.Decide(1, g, w, Default) }))
}

func BenchmarkDecide(b *testing.B) {
	g := group(make([]int64, 32)...)
	w := waiting(0, make([]int32, 1000)...)
	for i := range w {
		w[i].Prompt = int32(100 + 7919*i%8000)
	}
	var p Planner
	b.ReportAllocs()
	for b.Loop() {
		p.Decide(0, g, w, Default)
	}
}
