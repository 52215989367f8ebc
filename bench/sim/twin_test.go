package sim

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/race"
	"evenkeel/dispatcher/twin"
)

// taped is a run of which a tape is kept, cut every so often.
func taped(t testing.TB, f *Fleet, load Load, w *workload, spec string, every time.Duration) (stretches []*twin.Stretch) {
	cfg := by(spec)
	cfg.Twin = []string{"jsq-kv", "evenkeel"} // their predictors learn, too
	r, err := newRun(f, load, w, cfg)
	require.NoError(t, err)
	tape := &twin.Tape{}
	r.Hears, r.Does = tape.Hear, tape.Done
	cut := func() {
		r.Count(r.Now)
		if s := tape.Cut(r.Instant(r.Now), r.Boards.Clone()); s != nil {
			stretches = append(stretches, s)
		}
	}
	for over := false; !over; {
		if tape.Due(r.Instant(r.Now), every) {
			cut()
		}
		over, err = r.instant()
		require.NoError(t, err)
	}
	cut()
	return stretches
}

// ranksOf is a fleet for the twin: a step takes twice as long with full ranks as with empty ones.
func ranksOf(ranks, slots int) Fleet {
	f := Uniform(ranks, slots, 0)
	f.Transfer = 2
	f.Groups[0].C0Ms, f.Groups[0].C1Ms = 20, 0.02/float64(slots)
	return f
}

// What the twin says of a policy is what the simulator has under it: the same requests, the same engines.
// It starts where the other policy was, so that it cannot be exact.
func TestTheTwinForetellsWhatAnotherPolicyHas(t *testing.T) {
	race.Alone(t)
	const stretches, lead = 20, 4
	f := ranksOf(8, 8)
	tapes := map[string][]*twin.Stretch{}
	for _, spec := range []string{"jsq-kv", "evenkeel", "random"} {
		w := drawn(t, Source{Trace: azure(6000)}, 4000)
		w.pace(0.85, &f)
		tapes[spec] = taped(t, &f, Load{Rho: 0.85}, w, spec, 15*time.Second)
	}
	windows, offs := 0, 0.0
	for in, tape := range tapes {
		if in == "random" {
			continue // the others begin with what waits for engines under it, and never had that themselves
		}
		for from := lead; from+stretches < len(tape); from += stretches {
			w := &twin.Window{Stretches: tape[from : from+stretches], End: tape[from+stretches].Boards}
			told := map[string]float64{}
			for spec, other := range tapes {
				if from+stretches >= len(other) {
					continue
				}
				told[spec] = replayed(t, w, spec)
				really := mean(t, other[from+lead], other[from+stretches])
				t.Logf("%s in force, at %d: %s has %.2f ms as told, really %.2f, %+.1f %%", in, from, spec, told[spec], really, 100*(told[spec]/really-1))
				require.InEpsilon(t, really, told[spec], 0.04)
				offs += math.Abs(told[spec]/really - 1)
				windows++
			}
			require.Less(t, told["evenkeel"], told["jsq-kv"])
			require.Less(t, told["jsq-kv"], told["random"])
			require.Equal(t, replayed(t, w, ""), replayed(t, w, in), "two equal policies differ in nothing")
		}
	}
	require.Greater(t, windows, 10)
	require.Less(t, offs/float64(windows), 0.01, "in the mean")
}

// The replay of the policy in force is what was: also where requests wait in engines, where KV binds and some are
// preempted, where they pile up, and where there are several groups.
func TestTheTwinReplaysWhatWas(t *testing.T) {
	race.Alone(t)
	several := ranksOf(6, 8)
	several.Groups = []Group{several.Groups[0], several.Groups[0]}
	tight := ranksOf(8, 8)
	for i := range tight.Groups[0].Ranks {
		tight.Groups[0].Ranks[i].Capacity = 16_000
	}
	many := ranksOf(16, 20)
	many.Transfer = 6
	const stretches = 20
	offs, runs := 0.0, 0
	for name, c := range map[string]struct {
		fleet    Fleet
		rho      float64
		requests int
	}{
		"requests pile up": {ranksOf(8, 8), 1.1, 4000}, "KV binds": {tight, 0.8, 4000}, "two groups": {several, 0.9, 4000}, "many are on their way": {many, 0.95, 16_000},
	} {
		for _, spec := range []string{"jsq-kv", "br0", "evenkeel"} {
			t.Run(name+" under "+spec, func(t *testing.T) {
				w := drawn(t, Source{Trace: azure(c.requests)}, c.requests*3/4)
				w.pace(c.rho, &c.fleet)
				tape := taped(t, &c.fleet, Load{Rho: c.rho}, w, spec, 15*time.Second)
				judge := twin.New([]string{"random"})
				for i := range stretches {
					judge.Take(tape[2+i], tape[3+i].Boards)
				}
				var found []twin.Verdict
				for more := true; more; {
					var fresh []twin.Verdict
					fresh, more = judge.Work(1 << 20)
					found = append(found, fresh...)
				}
				require.Len(t, found, len(c.fleet.Groups))
				v := found[0]
				require.InEpsilon(t, v.StepMs, v.TwinMs, 0.04)
				require.InEpsilon(t, v.Owed, v.TwinOwed, 0.06)
				t.Logf("%.2f ms replayed %.2f (%+.1f %%), owed %.0f, %.0f", v.StepMs, v.TwinMs, 100*(v.TwinMs/v.StepMs-1), v.Owed, v.TwinOwed)
				offs, runs = offs+v.TwinMs/v.StepMs-1, runs+1
				require.NoError(t, v.Against[0].Failed)
				for _, other := range found {
					require.Equal(t, v.StepMs, other.StepMs, "the groups of a model are judged together")
					require.Positive(t, other.Fresh)
				}
			})
		}
	}
	require.Equal(t, 12, runs)
	require.InDelta(t, 0, offs/float64(runs), 0.01, "they are off by chance")
}

func replayed(t testing.TB, w *twin.Window, spec string) (ms float64) {
	r, err := twin.NewReplay(w, model, spec)
	require.NoError(t, err)
	over, err := r.Run(math.MaxInt)
	require.NoError(t, err)
	require.True(t, over)
	require.Positive(t, r.Steps.Mean())
	return r.Steps.Mean()
}

// mean is the mean step between the beginnings of two stretches.
func mean(t testing.TB, from, to *twin.Stretch) float64 {
	a, _ := from.Boards.Groups(model)
	b, _ := to.Boards.Groups(model)
	require.Greater(t, b[0].Steps, a[0].Steps)
	return (b[0].Seconds - a[0].Seconds) / float64(b[0].Steps-a[0].Steps) * 1000
}

// What five minutes of a large fleet cost to be replayed, and to be copied.
func BenchmarkTwin(b *testing.B) {
	f := ranksOf(144, 40)
	w := drawn(b, Source{Synth: "mix"}, 40_000)
	w.pace(0.85, &f)
	tape := taped(b, &f, Load{Rho: 0.85}, w, "evenkeel", 100*time.Second)
	require.Greater(b, len(tape), 4)
	window := &twin.Window{Stretches: tape[1:4], End: tape[4].Boards}
	for _, spec := range []string{"jsq-kv", "evenkeel"} {
		b.Run(spec, func(b *testing.B) {
			for b.Loop() {
				replayed(b, window, spec)
			}
		})
	}
	b.Run("copy", func(b *testing.B) {
		for b.Loop() {
			tape[2].Boards.Clone()
		}
	})
}
