package decode

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/dispatcher/virtual"
)

// by is a board whose groups have a policy. It waits for no burst, so that a step that begins
// when slots come free has those that take them.
func by(spec string) board.Config { return board.Config{Policy: spec} }

// simple is a fleet of one group: so many ranks and slots, a step of 10 ms and
// 0.01 ms a KV token.
func simple(ranks, slots int, capacity int64) Fleet {
	f := Uniform(ranks, slots, capacity)
	f.Groups[0].C0Ms, f.Groups[0].C1Ms = 10, 0.01
	return f
}

// of makes requests of prompt and output.
func of(lengths ...[2]int32) *workload {
	w := &workload{}
	for _, l := range lengths {
		w.jobs = append(w.jobs, arrival{prompt: l[0], output: l[1]})
	}
	return w
}

// stepSeen is a step as a test writes it: when it begins, in ms, and the KV tokens
// of the ranks.
type stepSeen struct {
	at    float64
	loads []int
}

// trace runs to the end and returns every step of the first group.
func follow(t *testing.T, f Fleet, l Load, w *workload, spec string) (*run, []stepSeen) {
	t.Helper()
	r, err := newRun(&f, l, w, by(spec))
	require.NoError(t, err)
	r.meter.keep = true
	require.NoError(t, r.all(context.Background()))
	var got []stepSeen
	for _, s := range r.meter.kept {
		got = append(got, stepSeen{math.Round(float64(s.Start)/float64(10*time.Microsecond)) / 100, s.KVTokens})
	}
	return r, got
}

func TestStepByStep(t *testing.T) {
	unequal := simple(2, 1, 0)
	unequal.Groups[0].Ranks[1].Cost = 3
	late := simple(1, 1, 0)
	late.Transfer = 2
	joins := simple(2, 1, 0)
	joins.Groups[0].Ranks[1].Join = Moment{Step: 2}
	leaves := simple(2, 1, 0)
	leaves.Groups[0].Ranks[0].Leave = Moment{Ms: 1}
	fails := simple(2, 1, 0)
	fails.Groups[0].Ranks[0].Leave, fails.Groups[0].Ranks[0].Fails = Moment{Step: 2}, true
	for _, c := range []struct {
		name  string
		fleet Fleet
		load  Load
		jobs  *workload
		spec  string
		want  []stepSeen
	}{
		{
			"the oldest takes the slot that came free, the step waits for the fullest rank",
			simple(2, 1, 0), Load{Pool: 1}, of([2]int32{100, 2}, [2]int32{200, 1}, [2]int32{300, 3}, [2]int32{50, 1}), "pjsq-kv",
			// whoever takes a slot that came free misses a step
			[]stepSeen{{0, []int{100, 200}}, {12, []int{101, 0}}, {23.01, []int{0, 300}}, {36.01, []int{50, 301}}, {49.02, []int{0, 302}}},
		},
		{
			"an immediate policy lets the engine queue, first come first served",
			simple(2, 1, 0), Load{Pool: 2}, of([2]int32{100, 2}, [2]int32{200, 1}, [2]int32{300, 1}, [2]int32{400, 1}), "rr",
			[]stepSeen{{0, []int{100, 200}}, {12, []int{101, 400}}, {26, []int{300, 0}}},
		},
		{
			"a cost counts in the step's time, not in the tokens",
			unequal, Load{}, of([2]int32{100, 1}, [2]int32{100, 1}), "prr", []stepSeen{{0, []int{100, 100}}},
		},
		{
			"a transfer takes slot and steps, but no step time for its KV",
			late, Load{Pool: 1}, of([2]int32{100, 2}, [2]int32{200, 1}), "pjsq",
			[]stepSeen{{0, []int{0}}, {10, []int{0}}, {20, []int{100}}, {31, []int{101}}, {42.01, []int{0}}, {52.01, []int{0}}, {62.01, []int{200}}},
		},
		{
			"KV overflow preempts the last admitted, which is prefilled again and goes on",
			simple(1, 2, 500), Load{}, of([2]int32{200, 3}, [2]int32{299, 3}), "pjsq:watermark=0",
			// Each took a token: 201 + 300 are one too many. Prefill of 300: 65 ms.
			[]stepSeen{{0, []int{499}}, {14.99, []int{201}}, {27, []int{202}}, {79.99, []int{300}}, {92.99, []int{301}}},
		},
		{
			"an open loop waits for the end of prefill",
			simple(1, 1, 0), Load{Rho: 0.5}, of([2]int32{100, 1}, [2]int32{200, 1}), "pjsq",
			[]stepSeen{{55, []int{100}}, {66, []int{200}}}, // the second, ready at 60, finds a step in progress
		},
		{
			"a rank joins after two steps",
			joins, Load{Pool: 3}, of([2]int32{100, 3}, [2]int32{200, 2}, [2]int32{300, 1}), "pjsq",
			[]stepSeen{{0, []int{100}}, {11, []int{101}}, {22.01, []int{102, 0}}, {33.03, []int{0, 200}}, {45.03, []int{300, 201}}},
		},
		{
			"a rank that leaves finishes what it runs, takes nothing and holds the barrier until then",
			leaves, Load{Pool: 2}, of([2]int32{500, 2}, [2]int32{200, 1}, [2]int32{300, 3}), "pjsq",
			[]stepSeen{{0, []int{500, 200}}, {15, []int{501, 0}}, {30.01, []int{300}}, {43.01, []int{301}}, {56.02, []int{302}}},
		},
		{
			"a rank that fails loses its KV: its requests are prefilled again with what they had",
			fails, Load{Pool: 1}, of([2]int32{500, 3}, [2]int32{200, 4}), "pjsq",
			// At 30.01 two tokens of the first are out; prefill of 502 takes 75.1 ms.
			[]stepSeen{{0, []int{500, 200}}, {15, []int{501, 201}}, {30.01, []int{202}}, {42.03, []int{203}}, {105.11, []int{502}}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.load.Rho > 0 {
				for i := range c.jobs.jobs {
					c.jobs.jobs[i].at = 0
				}
			}
			_, got := follow(t, c.fleet, c.load, c.jobs, c.spec)
			require.Equal(t, c.want, got)
		})
	}
}

// A step of two ranks takes what its law says: the first one has one long prompt, the second one
// three short ones.
func TestStepsFollowTheirLaw(t *testing.T) {
	for form, want := range map[step.Form]float64{
		step.Eager: 10 + (10 + 1) + 3*2 + 2*3, step.Unmasked: 10 + (10 + 4) + 4*2 + 4*3, step.Masked: 10 + (10 + 4) + 4*2 + 2*3,
		step.OwnBuckets: 10 + (10 + 1) + 4*2 + 2*3,
	} {
		f := simple(2, 3, 0)
		f.Groups[0].Law = &step.Law{Model: step.Model{C0Ms: 10, C1Ms: 0.01, RequestMs: 1}, Form: form, MostRowsMs: 2, MeanRowsMs: 3,
			Sizes: step.Captured(4)}
		require.NoError(t, f.Validate())
		g := &virtual.Group{Law: *f.Groups[0].Law, Step: 1}
		for _, prompts := range [][]int32{{1000}, {10, 10, 10}} {
			r := &virtual.Rank{Cost: 1, Group: g, Active: len(prompts)}
			for _, p := range prompts {
				r.Requests = append(r.Requests, virtual.Request{Prompt: p})
			}
			g.Ranks = append(g.Ranks, r)
		}
		require.InDelta(t, want, (&meter{}).step(g, true, 0), 1e-9, form)

		f.Groups[0].Ranks[1].Cost = 2
		require.ErrorContains(t, f.Validate(), "wants ranks of cost 1")
	}
}

// Where nothing but the slowest rank counts, a run by a law is the run without one, to the bit.
func TestAPlainLawChangesNothing(t *testing.T) {
	jobs := func() *workload { return of([2]int32{100, 5}, [2]int32{900, 3}, [2]int32{50, 9}, [2]int32{400, 4}) }
	_, without := follow(t, simple(2, 2, 0), Load{}, jobs(), "evenkeel")
	f := simple(2, 2, 0)
	f.Groups[0].Law = &step.Law{Model: step.Model{C0Ms: 10, C1Ms: 0.01}}
	_, with := follow(t, f, Load{}, jobs(), "evenkeel")
	require.NotEmpty(t, without)
	require.Equal(t, without, with)
}

func TestTimesOfARequest(t *testing.T) {
	f := simple(2, 1, 0)
	r, err := newRun(&f, Load{Pool: 1}, of([2]int32{100, 2}, [2]int32{200, 1}, [2]int32{300, 3}, [2]int32{50, 1}), by("pjsq-kv"))
	require.NoError(t, err)
	r.meter.warm, r.meter.over, r.meter.measuring = 0, true, true // all of it is measured
	require.NoError(t, r.all(context.Background()))
	s, bound := r.meter.sample()
	require.InDeltaSlice(t, []float64{12, 12, 36.01, 49.02 - 12}, r.meter.ttft, 1e-9, "the fourth arrives when the second is done")
	require.InDeltaSlice(t, []float64{11.01, (62.04 - 36.01) / 2}, r.meter.tpot, 1e-9, "23.01-12 and two tokens after the first")
	require.InDelta(t, 12, s[report.PoolWaitMax], 1e-9, "the third waited for the second")
	require.InDelta(t, 7.0, r.meter.tokens, 0)
	require.InDelta(t, (100.+101+300+251+302)/5, s[report.Imbalance], 1e-9)
	require.InDelta(t, (12.+11.01+13+13.01+13.02)/5, s[report.StepMean], 1e-9)
	require.InDelta(t, (11.5+10.505+11.5+11.755+11.51)/5, bound[report.StepMean], 1e-9)
	require.EqualValues(t, 4, s[report.OK])
}

func TestProgressIsSeenLate(t *testing.T) {
	for stale, want := range map[int][]int32{0: {0, 1, 2, 3, 4}, 2: {0, 0, 0, 1, 2}, 9: {0, 0, 0, 0, 0}} {
		f := simple(1, 1, 0)
		f.Stale = stale
		r, err := newRun(&f, Load{}, of([2]int32{10, 6}), by("pjsq"))
		require.NoError(t, err)
		var got []int32
		for range 5 {
			over, err := r.instant()
			require.NoError(t, err)
			require.False(t, over)
			got = append(got, r.Counts.Tokens[r.workers[0].Requests[0].Slot])
		}
		require.Equal(t, want, got, "%d steps late", stale)
	}
}

func TestAPreemptedRequestKeepsItsPlaceAndItsTokens(t *testing.T) {
	f := simple(1, 2, 500)
	r, err := newRun(&f, Load{Pool: 3}, of([2]int32{200, 5}, [2]int32{298, 5}, [2]int32{400, 1}, [2]int32{400, 1}), by("pjsq:watermark=0"))
	require.NoError(t, err)
	for r.meter.preempted == 0 {
		_, err := r.instant()
		require.NoError(t, err)
	}
	q := &r.jobs[1]
	require.EqualValues(t, 300, q.prompt, "298 and two tokens")
	require.EqualValues(t, 2, q.age)
	var next policy.Entry // that a round saw once it was back
	r.round = func(round *board.Round) {
		if r.Now >= q.entered && next.ID == 0 {
			next = round.Snapshot.Pool[0]
		}
	}
	require.NoError(t, r.all(context.Background()))
	require.EqualValues(t, 2, next.ID, "ahead of those that arrived later")
	require.EqualValues(t, 2, next.Age)
	require.Equal(t, 4, r.meter.done)
}

func TestTheBoardHearsOfPreemptions(t *testing.T) {
	f := simple(1, 4, 500)
	long, short := [2]int32{120, 60}, [2]int32{100, 60}
	r, err := newRun(&f, Load{Pool: 4}, of(long, long, long, long, short, short, short, short), by("pjsq:watermark=0"))
	require.NoError(t, err)
	for over := false; r.meter.preempted < 2; {
		require.False(t, over, "the rank overflows when others take the room of the first that went")
		over, err = r.instant()
		require.NoError(t, err)
	}
	require.True(t, r.Boards.Status(instant(r.Now)).Models[0].Workers[0].Tight, "two within ten seconds")
}

func TestWhatFitsNowhereFails(t *testing.T) {
	f := simple(2, 1, 1000)
	f.Groups[0].Ranks[1].Capacity = 2000
	f.Groups[0].Ranks[1].Leave = Moment{Step: 2}
	r, _ := follow(t, f, Load{Pool: 2}, of([2]int32{100, 1}, [2]int32{1901, 1}, [2]int32{1500, 5}, [2]int32{1600, 5}, [2]int32{200, 1}),
		"pjsq")
	require.Equal(t, 3, r.meter.done)
	require.Equal(t, 2, r.meter.failed, "one is larger than any watermark leaves, one waits for a rank that leaves")
}

// bad is a policy that breaks the rules.
type bad struct{ policy.Assignment }

func (bad) Name() string      { return "bad" }
func (bad) Immediate() bool   { return false }
func (bad) MaxAgeMs() float32 { return 0 }
func (b bad) Decide(*policy.Snapshot, []policy.Assignment) []policy.Assignment {
	if b.Entry == 0 {
		return nil
	}
	return []policy.Assignment{b.Assignment, b.Assignment}
}

// withPolicy is a board whose groups have a test's own policy.
func withPolicy(name string, p policy.Policy) board.Config {
	return board.Config{Policy: name, Parse: func(spec string) (policy.Policy, error) {
		if spec == name {
			return p, nil
		}
		return policy.Parse(spec)
	}}
}

func TestAPolicyThatBreaksTheRulesEndsTheRun(t *testing.T) {
	for _, c := range []struct {
		name  string
		entry uint64
		to    int32
		want  string
	}{
		{"an entry that does not wait", 7, 0, "entry 7 does not wait"},
		{"a worker that is not there", 1, 5, "worker 5, which takes nothing"},
		{"an entry twice", 1, 0, "entry 1 does not wait"},
		{"no room", 2, 0, "entry 2 of 600 tokens was sent to worker 0, which holds 0 of 500"},
		{"nothing, for ever", 0, 0, "leaves 2 requests waiting though every rank is idle"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := simple(2, 1, 500)
			f.Groups[0].Ranks[1].Capacity = 1000
			r, err := newRun(&f, Load{}, of([2]int32{100, 5}, [2]int32{600, 5}),
				withPolicy("bad", bad{policy.Assignment{Entry: c.entry, Worker: c.to}}))
			require.NoError(t, err)
			require.ErrorContains(t, r.all(context.Background()), c.want)
		})
	}
}

func TestWhenAllRanksHaveLeft(t *testing.T) {
	f := simple(1, 1, 0)
	f.Groups[0].Ranks[0].Leave = Moment{Step: 1}
	jobs := of([2]int32{100, 2}, [2]int32{200, 1})
	r, _ := follow(t, f, Load{Pool: 1}, jobs, "pjsq")
	require.Equal(t, 1, r.meter.done)
	require.Equal(t, 1, r.meter.failed, "it waited in the pool")

	r, err := newRun(&f, Load{}, jobs, by("pjsq"))
	require.NoError(t, err)
	require.ErrorContains(t, r.all(context.Background()), "1 requests are left and no rank will ever take them")
}
