package detect

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// fleet is facts of two groups of ranks with slots, a pool and prefill engines, in which nothing is
// wrong.
func fleet() Facts {
	f := Facts{Proxy: Proxy{Ready: true, Places: 1000, Policy: "evenkeel"}, Prefill: Prefill{QueueMax: 1000, ScrapeEveryMs: 500}}
	m := Model{Name: "m", Pool: Pool{TTLS: 60}}
	for _, name := range []string{"a", "b"} {
		g := Group{StepMs: 43, ModelMs: 43, StepModel: StepModel{BaseMs: 40, PerTokenMs: 1e-4}}
		g.Name, g.Barrier, g.MostTokens, g.Policy = name, true, 30_000, "evenkeel"
		for i := range 4 {
			g.Ranks = append(g.Ranks, Rank{ID: int32(10*int(name[0]) + i), Name: name + ":" + string(rune('1'+i)), State: RankUp, InSteps: true,
				Slots: 16, Used: 12, Running: 11, Capacity: 200_000, KVTokens: 30_000})
			f.Engines = append(f.Engines, Engine{ID: name + ":" + string(rune('1'+i)), Role: "decode", State: "up", Ranks: 1})
		}
		m.Groups = append(m.Groups, g)
	}
	for _, id := range []string{"p:1", "p:2"} {
		f.Engines = append(f.Engines, Engine{ID: id, Role: "prefill", State: "up", Ranks: 1})
		f.Prefill.Engines = append(f.Prefill.Engines, PrefillEngine{ID: id + "/0", State: "open", KVShare: 0.4, ScrapeAgeMs: 100})
	}
	f.Models = []Model{m}
	return f
}

// play has a fleet go on second by second. Each rank gives its running answers a token in 43 ms.
func play(w *Watch, from, to int, change func(s int, f *Facts, sample *Sample)) (incidents []Incident) {
	for s := from; s < to; s++ {
		f := fleet()
		f.At = noon.Add(time.Duration(s) * time.Second)
		for _, g := range f.groups() {
			for i := range g.Ranks {
				g.Ranks[i].Output = int64(1000 + float64(s)*1000/43*11)
			}
		}
		sample := Sample{Ended: uint64(40 * s), TTFT: Latency{300, 900, 99}, TPOT: Latency{43, 60, 99}}
		change(s, &f, &sample)
		is := sampleOf(&f)
		is.Ended, is.Failed, is.Failures, is.TTFT, is.TPOT = sample.Ended, sample.Failed, sample.Failures, sample.TTFT, sample.TPOT
		w.Update(&f, is)
		incidents = w.Incidents()
	}
	return incidents
}

// A healthy hour with a bursty load: slots and places fill up for some seconds, gates close for a
// moment, and nothing is said.
func TestABurstyHourIsQuiet(t *testing.T) {
	race.Alone(t)
	rng := rand.New(rand.NewPCG(7, 7))
	var w Watch
	burst := 0
	play(&w, 0, 3600, func(s int, f *Facts, _ *Sample) {
		if s > burst+10 && rng.IntN(60) == 0 {
			burst = s + 2 + rng.IntN(7)
		}
		if s < burst {
			f.Models[0].Pool.Entries, f.Models[0].Pool.OldestS, f.Prefill.Waiting = 150, 4, 40
			f.Prefill.BacklogS = 8
			for _, g := range f.groups() {
				for i := range g.Ranks {
					g.Ranks[i].Used = 16
				}
			}
		}
		require.Empty(t, w.Incidents(), "second %d", s)
	})
	require.Empty(t, w.Incidents())
}

// Many requests that wait for longer are an overload, which is said within half a minute.
func TestAnOverloadIsSaid(t *testing.T) {
	var w Watch
	crowd := func(s int, f *Facts, _ *Sample) {
		f.Models[0].Pool.Entries = 150
		for _, g := range f.groups() {
			for i := range g.Ranks {
				g.Ranks[i].Used = 16
			}
		}
	}
	require.Empty(t, play(&w, 0, 9, crowd))
	require.Len(t, play(&w, 9, 25, crowd), 1)
	require.Equal(t, Overload, w.Incidents()[0].Kind)
	list := play(&w, 25, 90, func(int, *Facts, *Sample) {})
	require.Len(t, list, 1)
	require.Positive(t, list[0].UntilMs)
}
