package policy

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/predictor"
)

// runs is a rank that decodes one request and has room for so many KV tokens more.
func runs(id int32, tokens, room int64) Worker {
	w := Worker{ID: id, Up: true, Free: 1, Running: []Request{{ID: 1000 + uint64(id), Prompt: int32(tokens) - 1, Generated: 1, Age: 1}}}
	if room > 0 {
		w.Capacity = tokens + room
	}
	return w
}

// ending is an outlook that knows how many tokens each request has left.
type ending struct {
	*predictor.Survival
	left map[uint64]int
}

func (e *ending) Left(id uint64, _ int) int { return e.left[id] }

func TestAnEntryCountsFromItsBindOn(t *testing.T) {
	entry := func(tokens, start int32) []Entry { return []Entry{{ID: 1, Prompt: tokens, Start: start}} }
	lengths := predictor.NewSurvival([]int32{40, 80, 120, 400})
	beyond := []Worker{runs(0, 3000, 5000), runs(1, 4000, 9000)}
	emptied := []Worker{runs(0, 4000, 0), runs(1, 3000, 0)}
	ends := &ending{lengths, map[uint64]int{1000: 20, 1001: 60, 1: 12}}
	for _, c := range []struct {
		name    string
		spec    string
		workers []Worker
		pool    []Entry
		outlook Outlook
		want    int
	}{
		{"one that starts beyond the horizon goes where least is held", "evenkeel:mode=sampled,watermark=0", beyond, entry(2000, 200), lengths, 0},
		{"so in mean", "evenkeel:mode=mean,watermark=0", beyond, entry(2000, 200), lengths, 0},
		{"so where there is only now", "evenkeel:mode=now,watermark=0", beyond, entry(2000, 200), lengths, 0},
		{"with room without end everywhere it goes where least is held", "evenkeel:mode=sampled", []Worker{runs(0, 4000, 0), runs(1, 3000, 0)}, entry(2000, 200), lengths, 1},
		{"one that starts when a rank will have room in its steps goes where less is held now", "evenkeel:mode=oracle,objective=max", emptied, entry(2000, 30), ends, 1},
		{"one that starts at once goes where less is held", "evenkeel:mode=oracle,objective=max", emptied, entry(2000, 0), ends, 1},
		{"where there is only now the start does not count", "evenkeel:mode=now", emptied, entry(2000, 30), ends, 1},
		{"a policy that counts KV tokens counts what is bound", "pjsq-kv", emptied, entry(2000, 30), nil, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &Snapshot{Workers: c.workers, Pool: c.pool, Outlook: c.outlook}
			require.Equal(t, [][2]int{{1, c.want}}, pairs(decide(t, c.spec, s)))
		})
	}
}

func TestWhatIsBoundHasItsRoomAndCountsUntilItsEnd(t *testing.T) {
	s := &Snapshot{
		Workers: []Worker{{ID: 0, Up: true, Free: 1, Capacity: 5500, Running: []Request{{ID: 9, Prompt: 4000, Start: 20}}}},
		Outlook: predictor.NewSurvival([]int32{100}),
	}
	for _, mode := range []string{"sampled", "mean"} {
		p, err := Parse("evenkeel:watermark=0,mode=" + mode)
		require.NoError(t, err)
		s.Pool = []Entry{{ID: 1, Prompt: 2000}}
		require.Empty(t, p.Decide(s, nil), "1500 tokens of room")
		e := p.(*evenkeel)
		n := len(e.look.steps)
		for c, x := range e.cols.row(0) {
			h := e.look.steps[c%n]
			require.Equal(t, (4000+max(0, h-20))*e.look.weight[c%n], x, "at step %d in %s", h, mode)
		}
		require.Zero(t, e.cols.now[0], "no step reads it now")
		s.Pool[0].Prompt = 1500
		require.Len(t, p.Decide(s, nil), 1)
	}

	var e envelope
	e.build(s, 0)
	require.EqualValues(t, 4000, e.held[0])
	require.EqualValues(t, 4000, e.row(0)[0])
	for _, spec := range []string{"br0:watermark=0", "brh:watermark=0", "pjsq:watermark=0"} {
		s.Pool = []Entry{{ID: 1, Prompt: 2000}}
		require.Empty(t, decide(t, spec, s), spec)
	}
}

// Each step of a projection is what the plain rule gives.
func TestAProjectionCountsARequestUntilItsEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		horizon := rapid.IntRange(0, 40).Draw(t, "horizon")
		running := make([]Request, rapid.IntRange(1, 5).Draw(t, "running"))
		for i := range running {
			running[i] = Request{
				Prompt: rapid.Int32Range(0, 50).Draw(t, "prompt"), Start: rapid.Int32Range(0, 50).Draw(t, "start"),
				Rhat: float32(rapid.IntRange(0, 90).Draw(t, "rhat")) / 2,
			}
		}
		got := make([]int64, horizon+1)
		Project(got, running)
		for h, x := range got {
			want := int64(0)
			for _, r := range running {
				since := max(0, h-int(r.Start))
				if r.Rhat == 0 || r.Rhat >= float32(horizon) || float32(since) < r.Rhat {
					want += int64(r.Prompt) + int64(since)
				}
			}
			require.Equal(t, want, x, "step %d", h)
		}
	})
}

// The columns of a request that is bound are those of the entry that it was.
func TestABoundRequestHasTheColumnsOfItsEntry(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outputs := rapid.SliceOfN(rapid.Int32Range(1, 300), 1, 20).Draw(t, "outputs")
		e := Entry{ID: rapid.Uint64().Draw(t, "id"), Prompt: rapid.Int32Range(1, 5000).Draw(t, "prompt"), Start: rapid.Int32Range(1, 100).Draw(t, "start")}
		s := &Snapshot{Workers: []Worker{{Up: true, Free: 1}}, Pool: []Entry{e}, Outlook: predictor.NewSurvival(outputs)}
		spec := "evenkeel:mode=" + rapid.SampledFrom([]string{"sampled", "mean"}).Draw(t, "mode")
		parsed, err := Parse(spec)
		require.NoError(t, err)
		p := parsed.(*evenkeel)
		require.Len(t, p.Decide(s, nil), 1)
		entry := append([]int64(nil), p.pick.vector(0)...)

		s.Workers[0].Running = []Request{{ID: e.ID, Prompt: e.Prompt, Start: e.Start}}
		s.Pool[0].ID++
		p.Decide(s, nil)
		p.cols.build(s, &p.look)
		require.Equal(t, entry, p.cols.row(0))
		require.Equal(t, int64(e.Prompt), p.cols.held[0])
	})
}

// Nothing is bound into a rank twice over, whatever starts when.
func TestStartsKeepTheRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, p := drawOutlook(t), drawEvenkeel(t)
		for g := range s.Workers {
			for i := range s.Workers[g].Running {
				s.Workers[g].Running[i].Start = rapid.Int32Range(0, 80).Draw(t, "start")
			}
		}
		for i := range s.Pool {
			s.Pool[i].Start = rapid.SampledFrom([]int32{0, 1, 7, 33, 500, math.MaxInt32}).Draw(t, "start")
		}
		checkRules(t, p, s, p.Decide(s, nil))
	})
}

// An entry is held back for what it adds to the steps in which it decodes.
func TestAnEntryIsHeldBackAtItsStart(t *testing.T) {
	outlook := &ending{predictor.NewSurvival([]int32{100}), map[uint64]int{1000: 20, 1001: 90, 1: 12}}
	for _, c := range []struct {
		name  string
		start int32
		want  int
	}{
		{"at once it is no longer than another rank", 0, 1},
		{"when that will be empty it would be the longest", 30, 0},
		{"while that still runs it would not", 10, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &Snapshot{
				Workers: []Worker{runs(0, 60_000, 0), runs(1, 100, 0)}, Pool: []Entry{{ID: 1, Prompt: 50_000, Start: c.start}},
				C0Ms: 10, C1Ms: 0.01, StepMs: 12, Outlook: outlook,
			}
			s.Workers[0].Free = 0
			require.Len(t, decide(t, "evenkeel:mode=oracle,hold=0.5", s), c.want)
		})
	}
}
