package decode

import (
	"cmp"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/twin"
	"evenkeel/internal/race"
)

// taped is a run of which a tape is kept, cut every so often.
func taped(t testing.TB, f *Fleet, load Load, w *workload, spec string, every time.Duration) (segments []*twin.Segment) {
	return tapedWith(t, f, load, w, by(spec), every, func(board.Event) bool { return false })
}

// tapedWith leaves out some of the events.
func tapedWith(t testing.TB, f *Fleet, load Load, w *workload, cfg board.Config, every time.Duration,
	misses func(board.Event) bool) (segments []*twin.Segment) {
	cfg.Twin = []string{"jsq-kv", "evenkeel"} // their predictors learn, too
	r, err := newRun(f, load, w, cfg)
	require.NoError(t, err)
	tape := &twin.Tape{}
	r.OnEvent, r.OnEffect = func(e board.Event, now time.Time) {
		if !misses(e) {
			tape.Record(e, now)
		}
	}, tape.RecordEffect
	cut := func(at float64) {
		r.Count(at)
		if s := tape.NextSegment(r.Instant(at), r.Boards.Clone()); s != nil {
			segments = append(segments, s)
		}
	}
	cut(r.Now)
	for over := false; !over; {
		at := r.Now
		over, err = r.instant()
		require.NoError(t, err)
		if tape.Due(r.Instant(at), every) { // at the end of a turn, as in the server
			cut(at)
		}
	}
	cut(r.Now)
	return segments
}

// ranksOf is a fleet for the twin: a step takes twice as long with full ranks as with empty ones.
func ranksOf(ranks, slots int) Fleet {
	f := Uniform(ranks, slots, 0)
	f.Transfer = 2
	f.Groups[0].C0Ms, f.Groups[0].C1Ms = 20, 0.02/float64(slots)
	return f
}

// What the twin says of a policy is what the simulator has under it, within the error that it states: the same requests,
// the same engines. Each run is seven minutes of a real trace, from empty ranks and at the rate of `make claim NAME=twin`.
func TestTheTwinForetellsWhatAnotherPolicyHas(t *testing.T) {
	race.Alone(t)
	const requests, judged = 2000, 6
	f := ranksOf(8, 8)
	all := azureTrace().Requests
	rate := f.Rate(0.85, all[:6000])
	specs := []string{"jsq", "evenkeel"}
	forecasts, within, thirds, apart, offs, errs := 0, 0, 0, 0, 0.0, 0.0
	for from := 0; from+requests <= len(all); from += requests {
		tapes := tapedUnder(t, &f, all[from:from+requests], rate, specs)
		last := min(len(tapes[0]), len(tapes[1])) - 1
		for in, spec := range specs {
			judge, v := twin.New([]string{specs[1-in]}), twin.Verdict{}
			for i, s := range tapes[in][:last] {
				judge.AddSegment(s, tapes[in][i+1].Boards)
				for more := i >= last-judged; more; {
					var fresh []twin.Verdict
					if fresh, more = judge.Work(1 << 20); len(fresh) > 0 {
						v = fresh[0]
					}
				}
			}
			require.Len(t, v.Against, 1)
			told, begun := v.Against[0], tapes[in][0].From
			really := mean(t, at(t, tapes[1-in], v.From.Sub(begun)), at(t, tapes[1-in], v.To.Sub(begun)))
			off, differ := math.Abs(told.StepMs/really-1), math.Abs(really/v.StepMs-1)
			t.Logf("%s in force, from request %d: %.2f ms, replayed %.2f; %s has %.2f as told, really %.2f; off by %.1f %%, error %.1f %%",
				spec, from, v.StepMs, v.TwinMs, specs[1-in], told.StepMs, really, 100*off, 100*told.Error)
			forecasts, offs, errs = forecasts+1, offs+off, errs+told.Error
			if off <= told.Error {
				within++
			}
			if differ <= 0.03 {
				continue
			}
			apart++
			require.Equal(t, spec == "evenkeel", told.SavedMs > 0, "the better one")
			if told.Error <= differ/3 {
				thirds++
			}
		}
	}
	n := float64(forecasts)
	t.Logf("%d forecasts, %d within the error; off by %.2f %% and error %.2f %% in the mean", forecasts, within, 100*offs/n, 100*errs/n)
	t.Logf("of %d where the policies differ by more than 3 %%, %d have an error of at most a third of that", apart, thirds)
	require.Equal(t, 18, forecasts)
	require.Greater(t, apart, 8)
	require.GreaterOrEqual(t, float64(within), 0.85*n)
	require.Less(t, offs/n, 0.01)
	require.Less(t, errs/n, 0.025)
}

// tapedUnder are tapes of the same requests under each policy, at so many a second.
func tapedUnder(t testing.TB, f *Fleet, requests []trace.Request, rate float64, specs []string) (tapes [][]*twin.Segment) {
	for _, spec := range specs {
		rho := rate / f.Rate(1, requests)
		w := drawn(t, Source{Drawn: &Drawn{Requests: requests, Warm: 1}}, len(requests))
		w.pace(rho, f)
		tapes = append(tapes, taped(t, f, Load{Rho: rho}, w, spec, 15*time.Second))
	}
	return tapes
}

// Over all windows of a run the twin is surer than over one: in a quarter of an hour its error is at most a third of the
// difference between the policies.
func TestOverManyWindowsTheTwinIsSurer(t *testing.T) {
	race.Alone(t)
	const requests = 4300
	f := ranksOf(8, 8)
	all := azureTrace().Requests
	specs := []string{"jsq-kv", "evenkeel"}
	tapes := tapedUnder(t, &f, all[:requests], f.Rate(0.85, all[:6000]), specs)
	last := min(len(tapes[0]), len(tapes[1])) - 1
	for in, spec := range specs {
		judge, v := twin.New([]string{specs[1-in]}), twin.Verdict{}
		for i, s := range tapes[in][:last] {
			judge.AddSegment(s, tapes[in][i+1].Boards)
			for more := i%4 == 0; more; { // each minute is judged
				var fresh []twin.Verdict
				if fresh, more = judge.Work(1 << 20); len(fresh) > 0 {
					v = fresh[0]
				}
			}
		}
		told, to := v.Against[0].Hour, v.Against[0].Hour.To.Sub(tapes[in][0].From)
		require.Greater(t, told.Seconds, 600.)
		from := to - time.Duration(told.Seconds*float64(time.Second))
		under := func(tape []*twin.Segment) float64 { return mean(t, at(t, tape, from), at(t, tape, to)) }
		own, really := under(tapes[in]), under(tapes[1-in])
		off, differ := math.Abs(told.StepMs/really-1), math.Abs(really/own-1)
		t.Logf("%s in force for %.0f s: %.2f ms, replayed %.2f; %s has %.2f as told, really %.2f; off by %.1f %%, error %.1f %%, they differ by "+
			"%.1f %%",
			spec, told.Seconds, own, told.StepMs-told.SavedMs, specs[1-in], told.StepMs, really, 100*off, 100*told.Error, 100*differ)
		require.Greater(t, differ, 0.03)
		require.Equal(t, spec == "evenkeel", told.SavedMs > 0, "the better one")
		require.LessOrEqual(t, off, told.Error)
		require.LessOrEqual(t, told.Error, differ/3)
	}
}

// Where requests pile up under the policy in force, a replay of a better one that begins with them works them off for
// longer than its window lasts. One that goes on from where the last one was never had them.
func TestAReplayGoesOnFromWhereTheLastOneWas(t *testing.T) {
	race.Alone(t)
	const span, spec = 20, "evenkeel"
	f := ranksOf(8, 8)
	all := azureTrace().Requests
	tapes := tapedUnder(t, &f, all[:4300], f.Rate(0.85, all[:6000]), []string{"jsq-kv", spec})
	last := min(len(tapes[0]), len(tapes[1])) - 2
	var begun []*twin.Checkpoint
	n, onOff, anewOff := 0., 0., 0.
	for i := 1; i+span < last; i++ {
		w := &twin.Window{Segments: tapes[0][i : i+span], End: tapes[0][i+span].Boards}
		anew := replay(t, w, spec, 0)
		w.Checkpoints = begun
		on := replay(t, w, spec, 0)
		begun = on.Checkpoints
		require.Len(t, begun, span-1)
		if i == 1 {
			require.Equal(t, anew.StepMs(), on.StepMs(), "there was no replay before")
		}
		from, to := w.Measured().From.Sub(tapes[0][0].From), w.To().Sub(tapes[0][0].From)
		really := mean(t, at(t, tapes[1], from), at(t, tapes[1], to))
		n, onOff, anewOff = n+1, onOff+on.StepMs()/really-1, anewOff+anew.StepMs()/really-1
	}
	told := func(from int) (ms float64) {
		judge := twin.New([]string{spec})
		for i := range 2 * span {
			judge.AddSegment(tapes[0][1+i], tapes[0][2+i].Boards)
			for more := i >= from; more; {
				var fresh []twin.Verdict
				if fresh, more = judge.Work(1 << 20); len(fresh) > 0 {
					ms = fresh[0].Against[0].StepMs
				}
			}
		}
		return ms
	}
	require.NotEqual(t, told(2*span-2), told(2*span-1), "the last window, after one before it and alone")
	t.Logf("%.0f windows: off by %.1f %% in the mean, and by %.1f %% if each begins anew", n, 100*onOff/n, 100*anewOff/n)
	require.InDelta(t, 0, onOff/n, 0.01)
	require.Greater(t, anewOff/n, 0.01)
}

// at is the segment that begins so long after the first, to within a step or two.
func at(t testing.TB, all []*twin.Segment, after time.Duration) *twin.Segment {
	off := func(s *twin.Segment) time.Duration { return (s.From.Sub(all[0].From) - after).Abs() }
	nearest := slices.MinFunc(all, func(a, b *twin.Segment) int { return cmp.Compare(off(a), off(b)) })
	require.Less(t, off(nearest), time.Second)
	return nearest
}

// A policy that is replayed under its name is what is replayed as the one in force, and differs from it in nothing.
func TestTwoEqualPoliciesDifferInNothing(t *testing.T) {
	race.Alone(t)
	f := ranksOf(8, 8)
	for _, spec := range []string{"jsq-kv", "evenkeel"} {
		w := drawn(t, Source{Trace: azure(6000)}, 1500)
		w.pace(0.85, &f)
		tape := taped(t, &f, Load{Rho: 0.85}, w, spec, 15*time.Second)
		window := &twin.Window{Segments: tape[2:12], End: tape[12].Boards}
		for draw := range uint64(3) {
			require.Equal(t, replayed(t, window, "", draw), replayed(t, window, spec, draw))
		}
		require.NotEqual(t, replayed(t, window, "", 0), replayed(t, window, "", 1), "draws differ")
		require.Less(t, replayed(t, window, spec, 0), replayed(t, window, "random", 0))
	}
}

// A verdict is made of four rounds, and of fewer where the next window is ready earlier. A policy that is in force under
// another spec is no other one, one that cannot be replayed says why, and one that fails now and then has fewer replays.
func TestWhatAVerdictIsMadeOf(t *testing.T) {
	race.Alone(t)
	f := ranksOf(4, 8)
	w := drawn(t, Source{Trace: azure(6000)}, 600)
	w.pace(0.8, &f)
	decided := 0
	cfg := by("br0")
	cfg.Parse = func(spec string) (policy.Policy, error) {
		if spec != "fails" && spec != "fails now and then" {
			return policy.Parse(spec)
		}
		p, err := policy.Parse("jsq-kv")
		n := 0
		return &fakes.Policy{Spec: spec, Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			if n == 0 {
				decided++
				n = decided
			}
			if spec == "fails" || n%2 == 0 {
				panic(spec)
			}
			return p.Decide(s, dst)
		}}, err
	}
	tape := tapedWith(t, &f, Load{Rho: 0.8}, w, cfg, 15*time.Second, func(board.Event) bool { return false })
	judge := twin.New([]string{"fails now and then", "jsq-kv", "br0", "no-such-policy", "random", "fails"})
	take := func(i int) { judge.AddSegment(tape[i], tape[i+1].Boards) }
	verdictWhile := func(comes func(n int)) (v twin.Verdict) {
		n := 0
		for more := true; more && v.Replays == 0; n++ {
			comes(n)
			var fresh []twin.Verdict
			if fresh, more = judge.Work(1 << 20); len(fresh) > 0 {
				v = fresh[0]
			}
		}
		return v
	}
	for i := range 6 {
		take(1 + i)
	}
	v := verdictWhile(func(int) {})
	require.Equal(t, 4, v.Replays)
	var policies, failed []string
	for _, a := range v.Against {
		if policies = append(policies, a.Policy); a.Failed != nil {
			failed = append(failed, a.Policy)
		} else {
			require.InEpsilon(t, v.StepMs, a.StepMs, 0.2, a.Policy)
		}
	}
	require.Equal(t, []string{"fails now and then", "jsq-kv", "no-such-policy", "random", "fails"}, policies)
	require.Equal(t, []string{"no-such-policy", "fails"}, failed)

	take(7)
	v = verdictWhile(func(n int) {
		if n == 3 {
			take(8)
		}
	})
	require.Equal(t, 1, v.Replays, "how much is by chance is known")

	tape[10].AfterGap = true // nobody knows what was before
	v = verdictWhile(func(n int) {
		if n == 3 {
			take(10)
		}
	})
	require.Equal(t, tape[10].From, v.From)
}

// If the replay of the policy in force is wrong, here because the tape misses some of the requests, every forecast may be
// as wrong, however little its replays differ from each other.
func TestAForecastIsNoSurerThanTheReplayOfWhatWas(t *testing.T) {
	race.Alone(t)
	f := ranksOf(8, 8)
	judged := func(misses uint64) (v twin.Verdict) {
		w := drawn(t, Source{Trace: azure(6000)}, 1500)
		w.pace(0.85, &f)
		tape := tapedWith(t, &f, Load{Rho: 0.85}, w, by("evenkeel"), 15*time.Second, func(e board.Event) bool {
			came, is := e.(board.Enqueue)
			return is && came.Entry.ID%10 < misses
		})
		judge := twin.New([]string{"jsq-kv"})
		for i := range len(tape) - 1 {
			judge.AddSegment(tape[i], tape[i+1].Boards)
			for more := i > 5; more; {
				var fresh []twin.Verdict
				if fresh, more = judge.Work(1 << 20); len(fresh) > 0 {
					v = fresh[0]
				}
			}
		}
		return v
	}
	for _, misses := range []uint64{0, 1, 2} {
		v := judged(misses)
		off := math.Abs(v.TwinMs/v.StepMs - 1)
		t.Logf("%d of 10 are missed: the replay of what was is off by %.1f %%, the forecast by %.1f %% at most", misses, 100*off,
			100*v.Against[0].Error)
		require.Equal(t, misses > 0, off > 0.03)
		require.Equal(t, misses > 0, v.Against[0].Error > 0.05)
		require.Greater(t, v.Against[0].Error, off)
	}
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
	const segments = 20
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
				for i := range segments {
					judge.AddSegment(tape[2+i], tape[3+i].Boards)
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
				t.Logf("%.2f ms replayed %.2f (%+.1f %%)", v.StepMs, v.TwinMs, 100*(v.TwinMs/v.StepMs-1))
				offs, runs = offs+v.TwinMs/v.StepMs-1, runs+1
				require.NoError(t, v.Against[0].Failed)
				for _, other := range found {
					require.Equal(t, v.StepMs, other.StepMs, "the groups of a model are judged together")
					require.Positive(t, other.NewSteps)
				}
			})
		}
	}
	require.Equal(t, 12, runs)
	require.InDelta(t, 0, offs/float64(runs), 0.01, "they are off by chance")
}

func replayed(t testing.TB, w *twin.Window, spec string, draw uint64) (ms float64) {
	return replay(t, w, spec, draw).StepMs()
}

// replay is one that is over.
func replay(t testing.TB, w *twin.Window, spec string, draw uint64) *twin.Replay {
	r, err := twin.NewReplay(w, model, spec, draw)
	require.NoError(t, err)
	over, err := r.Run(math.MaxInt)
	require.NoError(t, err)
	require.True(t, over)
	require.Positive(t, r.StepMs())
	return r
}

// mean is the mean step between the beginnings of two segments.
func mean(t testing.TB, from, to *twin.Segment) float64 {
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
	window := &twin.Window{Segments: tape[1:4], End: tape[4].Boards}
	for _, spec := range []string{"jsq-kv", "evenkeel"} {
		b.Run(spec, func(b *testing.B) {
			for b.Loop() {
				replayed(b, window, spec, 0)
			}
		})
	}
	b.Run("copy", func(b *testing.B) {
		for b.Loop() {
			tape[2].Boards.Clone()
		}
	})
}
