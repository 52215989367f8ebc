package twin

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
	"evenkeel/pool"
)

// taped runs two ranks of four slots in virtual time for so long, and cuts what happens into segments of 15 s. Every second a
// request comes whose prompt is long, if its number is even, or short. A step takes 20 ms and 4 ms for each 1,000 KV tokens of the
// fullest rank.
func taped(t *testing.T, policy string, seconds int) (segments []*Segment) {
	t.Helper()
	b, err := board.New(board.Config{Policy: policy})
	require.NoError(t, err)
	var workers []board.Worker
	g := virtual.NewGroup(board.GroupKey{Model: "m", Name: "main", Barrier: true}, board.StepModel{C0Ms: 20, C1Ms: 0.004})
	for id := range int32(2) {
		workers = append(workers, board.Worker{ID: id, Model: "m", Group: "main", Barrier: true, Slots: 4, Up: true})
		g.Ranks = append(g.Ranks, &virtual.Rank{ID: id, Slots: 4, Cost: 1, Group: g})
	}
	e := &virtual.Engines{Driver: virtual.NewDriver(b, noon, "m"), Groups: []*virtual.Group{g}}
	chance, waiting, finished := rand.New(rand.NewPCG(1, 1)), map[*pool.Entry]int32{}, 0
	e.Length = func(g *virtual.Group) float64 {
		fullest := int64(0)
		for _, r := range g.Ranks {
			fullest = max(fullest, r.KV)
		}
		return g.Law.C0Ms + g.Law.C1Ms*float64(fullest)
	}
	e.Token, e.Seated, e.Stepped = func(*virtual.Request) {}, func(*virtual.Request) {}, func(*virtual.Group, int) {}
	e.Finished = func(*virtual.Group, virtual.Request) { finished++ }
	e.Preempted = func(*virtual.Rank, virtual.Request) { t.Error("there is no bound on the KV") }
	e.OnRefuse = func(*board.Effect) { t.Error("nothing is refused") }
	e.OnBind = func(f *board.Effect) {
		e.Place(g.Ranks[f.Bound.Worker], virtual.Request{Slot: f.Bound.Slot, Prompt: int32(f.Entry.Prompt), Left: waiting[f.Entry]})
	}
	tape := &Tape{}
	e.OnEvent, e.OnEffect = tape.Record, tape.RecordEffect
	e.Apply(board.SetWorkers{Workers: workers}, 0)

	tape.NextSegment(noon, b.Clone())
	came := 0
	for e.Now < float64(1000*seconds) {
		e.Turn(func() {
			for ; float64(1000*came) <= e.Now; came++ {
				prompt := 200
				if came%2 == 0 {
					prompt = 2000
				}
				entry := &pool.Entry{ID: uint64(came + 1), Model: "m", Prompt: prompt, Arrival: e.Instant(e.Now), Entered: e.Instant(e.Now)}
				waiting[entry] = 50 + chance.Int32N(100)
				e.Apply(board.Enqueue{Entry: entry}, e.Now)
			}
		})
		if now := e.Instant(e.Now); tape.Due(now, 15*time.Second) { // at the end of a turn, as in the server
			e.Count(e.Now)
			if s := tape.NextSegment(now, b.Clone()); s != nil {
				segments = append(segments, s)
			}
		}
		e.Begin()
		next, _ := e.Due()
		e.Now = min(next, float64(1000*came))
	}
	require.Greater(t, finished, came*9/10)
	return segments
}

// judged is the verdict about the last five minutes.
func judged(t *testing.T, judge *Twin, segments []*Segment) (v Verdict) {
	t.Helper()
	for i, s := range segments[:len(segments)-1] {
		judge.AddSegment(s, segments[i+1].Boards)
	}
	for more := true; more && v.Replays == 0; {
		var fresh []Verdict
		if fresh, more = judge.Work(1 << 20); len(fresh) > 0 {
			v = fresh[0]
		}
	}
	require.NotZero(t, v.Replays)
	return v
}

// On engines that are what the twin takes them for, a replay of what was comes to what was, and a replay under another policy
// to what that one really has.
func TestAReplayComesToWhatReallyWas(t *testing.T) {
	const seconds = 330
	v := judged(t, New([]string{"random", "no-such-policy"}), taped(t, "br0", seconds))
	require.InEpsilon(t, v.StepMs, v.TwinMs, 0.01, "the policy in force")
	require.Equal(t, "random", v.Against[0].Policy)
	require.NoError(t, v.Against[0].Failed)
	require.Error(t, v.Against[1].Failed)
	other := judged(t, New([]string{"br0"}), taped(t, "random", seconds))
	require.InEpsilon(t, other.StepMs, v.Against[0].StepMs, 0.01, "as foretold, and as it was")
	require.Greater(t, other.StepMs, 1.03*v.StepMs, "or it would say nothing that they are alike")
	require.InEpsilon(t, v.StepMs, other.Against[0].StepMs, 0.01)
	t.Logf("br0 %.2f ms, replayed %.2f, foretold %.2f; random %.2f, replayed %.2f, foretold %.2f",
		v.StepMs, v.TwinMs, other.Against[0].StepMs, other.StepMs, other.TwinMs, v.Against[0].StepMs)
}

// Policies hold prompts for what these cost, which they know long before decodes have told what a KV token costs.
func TestPoliciesOfAReplayKnowWhatAPromptCosts(t *testing.T) {
	law := board.StepModel{C0Ms: 20, C1Ms: 1e-4, RequestMs: 0.1, OwnPromptMs: 0.1, SharedPromptMs: 0.05, PrefillMs: 5}
	require.Equal(t, law, visibleModel(true, law))
	require.Equal(t, board.StepModel{OwnPromptMs: 0.1, SharedPromptMs: 0.05, PrefillMs: 5}, visibleModel(false, law))
	require.Zero(t, visibleModel(false, board.StepModel{C0Ms: 20, C1Ms: 1e-4}), "nothing is known")
}

func TestRanksOfAReplayKeepOfAnswersWhatTheBoardsBelieve(t *testing.T) {
	b, err := board.New(board.Config{Policy: "rr"})
	require.NoError(t, err)
	r := &Replay{Driver: virtual.NewDriver(b, noon, "m")}
	d := newDecodeEngines(r)
	r.engines = d
	require.NoError(t, d.addGroup(&board.GroupView{Key: board.GroupKey{Model: "m", Name: "main", Barrier: true}}, board.StepModel{C0Ms: 20}))
	fleet := []board.Worker{{ID: 0, Model: "m", Group: "main", Barrier: true, Slots: 4, Capacity: 1000, KeepsKVFor: time.Minute, Process: 1,
		Up: true}}
	var slot int32
	r.OnBind = func(e *board.Effect) { slot = e.Bound.Slot }
	r.Apply(board.SetWorkers{Workers: fleet}, 0)
	r.Apply(board.Enqueue{Entry: &board.Entry{ID: 1, Model: "m", Prompt: 100, Arrival: noon, Entered: noon}}, 0)
	r.Tick(0)
	r.Apply(&board.Release{Model: "m", Slot: slot, Outcome: board.Outcome{Kind: board.Finished, Generated: 5, Kept: true}}, 0)
	r.replaceRanks(fleet)
	require.EqualValues(t, 105, d.ranks[0].EndedKV.Tokens())
	again := slices.Clone(fleet)
	again[0].Process = 2
	r.replaceRanks(again)
	require.Zero(t, d.ranks[0].EndedKV.Tokens())
}

// A request may come in the turn in which its segment ends. The replay of a later window, which begins there, has it, too.
func TestARequestThatComesAtTheEndOfAStretchIsNotLost(t *testing.T) {
	segments := taped(t, "br0", 61)
	r, err := NewReplay(&Window{Segments: segments[:3], End: segments[3].Boards}, "m", "random", 0)
	require.NoError(t, err)
	over, err := r.Run(1 << 20)
	require.NoError(t, err)
	require.True(t, over)
	require.Len(t, r.Checkpoints, 2)
	for i, begun := range r.Checkpoints {
		last := segments[i].arrivals[len(segments[i].arrivals)-1]
		require.Equal(t, segments[i+1].From, segments[i].From.Add(last.at))
		require.Contains(t, begun.remaining, last.id)
		for _, c := range segments[i+1].arrivals {
			require.NotContains(t, begun.remaining, c.id, "it comes only then")
		}
	}
}

// A client that leaves between two steps leaves at once, or a checkpoint has its request for ever: the window that begins with the
// checkpoint has no record of it.
func TestARequestThatIsWithdrawnBeforeACheckpointIsNotInIt(t *testing.T) {
	segments := taped(t, "br0", 61)
	s := segments[1]
	end := s.To.Sub(s.From)
	last := &s.arrivals[len(s.arrivals)-1]
	require.Equal(t, end, last.at, "without it, nothing happens at the end of the segment")
	s.arrivals = s.arrivals[:len(s.arrivals)-1]
	const first, withdrawn = 1001, 1016 // more requests than the 8 slots, so that the last of them wait
	for id := uint64(first); id <= withdrawn; id++ {
		at := end - 10*time.Millisecond
		s.arrivals = append(s.arrivals, arrival{at: at, received: at, entered: at, id: id, model: "m", prompt: 200})
	}
	left := departure{at: end - time.Microsecond, id: withdrawn, generated: -1, stepsToFirstToken: -1}
	s.departures = append(slices.DeleteFunc(s.departures, func(d departure) bool { return d.at > left.at }), left)
	r, err := NewReplay(&Window{Segments: segments[:3], End: segments[3].Boards}, "m", "random", 0)
	require.NoError(t, err)
	_, err = r.Run(1 << 20)
	require.NoError(t, err)
	saved := r.Checkpoints[1]
	require.Equal(t, s.To, saved.at)
	require.Contains(t, saved.remaining, uint64(withdrawn-1), "it waits")
	require.NotContains(t, saved.remaining, uint64(withdrawn))
	require.False(t, slices.ContainsFunc(saved.boards.Waiting("m"), func(e *pool.Entry) bool { return e.ID == withdrawn }))
}

// A policy that is listed twice is compared once, even if it cannot be replayed: its metrics must not be there twice.
func TestAPolicyThatIsListedTwiceIsComparedOnce(t *testing.T) {
	v := judged(t, New([]string{"no-such-policy", "random", "no-such-policy", "random"}), taped(t, "br0", 61))
	var against []string
	for _, a := range v.Against {
		against = append(against, a.Policy)
	}
	require.Equal(t, []string{"no-such-policy", "random"}, against)
}
