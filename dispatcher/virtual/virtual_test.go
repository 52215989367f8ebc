package virtual

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// request comes to a group of ranks.
type request struct {
	at             float64 // ms
	prompt, tokens int32
}

// told runs ranks of so many slots and KV tokens until all requests have ended, and says what
// became of each. The boards bind twice as many requests as a rank has slots. A step takes 10 ms
// and 1 ms for each 100 KV tokens of the fullest rank.
func told(t *testing.T, ranks, slots int, capacity int64, requests ...request) (all []string) {
	t.Helper()
	return toldOf(t, ranks, Rank{Slots: slots, Capacity: capacity}, 0, requests...)
}

// toldOf is told for ranks like this one, to which KV takes so many steps.
func toldOf(t *testing.T, ranks int, like Rank, lag int64, requests ...request) (all []string) {
	t.Helper()
	b, err := board.New(board.Config{Policy: "rr", TTL: time.Hour})
	require.NoError(t, err)
	g := NewGroup(board.GroupKey{Model: "m", Name: "g", Barrier: true}, board.StepModel{C0Ms: 10, C1Ms: 0.01})
	e := &Engines{Driver: NewDriver(b, time.Unix(0, 0), "m"), Groups: []*Group{g}}
	var workers []board.Worker
	for id := range int32(ranks) {
		workers = append(workers, board.Worker{ID: id, Model: "m", Group: "g", Barrier: true, Slots: 2 * like.Slots,
			KeepsKVFor: like.KeepsKVFor, Up: true})
		r := like
		r.ID, r.Cost, r.Group = id, 1, g
		g.Ranks = append(g.Ranks, &r)
	}
	note := func(format string, args ...any) {
		all = append(all, fmt.Sprintf("%.2f ms: ", e.Now)+fmt.Sprintf(format, args...))
	}
	e.Length = func(g *Group) float64 {
		fullest := int64(0)
		for _, r := range g.Ranks {
			kv, _ := r.Load(g.Step)
			fullest = max(fullest, kv)
		}
		return g.Law.C0Ms + g.Law.C1Ms*float64(fullest)
	}
	left := len(requests)
	e.Token, e.Stepped = func(*Request) {}, func(*Group, int) {}
	e.Seated = func(l *Request) { note("%d has a slot", l.Job) }
	e.Finished = func(_ *Group, l Request) { left--; note("%d has its %d tokens", l.Job, l.Gen) }
	e.Preempted = func(r *Rank, l Request) { left--; note("%d leaves rank %d after %d tokens", l.Job, r.ID, l.Gen) }
	e.OnRefuse = func(*board.Effect) { t.Error("nothing is refused") }
	e.OnBind = func(f *board.Effect) {
		job := int32(f.Entry.ID)
		e.Place(g.Ranks[f.Bound.Worker], Request{Job: job, Slot: f.Bound.Slot, Prompt: int32(f.Entry.Prompt), Left: requests[job-1].tokens,
			StepsToFirstToken: lag})
	}
	e.Apply(board.SetWorkers{Workers: workers}, 0)
	came := 0
	for turn := 0; left > 0; turn++ {
		require.Less(t, turn, 1000, "it stands still after %v", all)
		e.Turn(func() {
			for ; came < len(requests) && requests[came].at <= e.Now; came++ {
				entry := &pool.Entry{ID: uint64(came + 1), Model: "m", Prompt: int(requests[came].prompt)}
				entry.Arrival, entry.Entered = e.Instant(e.Now), e.Instant(e.Now)
				e.Apply(board.Enqueue{Entry: entry}, e.Now)
			}
		})
		e.Begin()
		next, _ := e.Due()
		if came < len(requests) {
			next = min(next, requests[came].at)
		}
		e.Now = next
	}
	for _, r := range g.Ranks {
		require.Zero(t, r.KV+int64(r.Active+len(r.Requests)), "what has ended holds nothing")
	}
	_, busy := e.Due()
	require.False(t, busy, "nothing decodes, so nothing steps")
	return all
}

// Each step of a group takes as long as its fullest rank needs, and a request that comes in a step
// joins the next one.
func TestRanksOfAGroupStepTogether(t *testing.T) {
	require.Equal(t, []string{
		"0.00 ms: 1 has a slot",
		"5.00 ms: 2 has a slot",
		"40.01 ms: 1 has its 2 tokens", // 20 ms for its prompt alone, then 20.01 ms for that and a token
		"60.02 ms: 2 has its 2 tokens",
	}, told(t, 2, 4, 0, request{0, 1000, 2}, request{5, 1000, 2}))
}

// Engines begin the next step before anybody can learn that one has ended.
func TestWhoIsBoundWhenAStepEndsIsNotInTheNext(t *testing.T) {
	require.Equal(t, []string{
		"0.00 ms: 1 has a slot",
		"0.00 ms: 2 has a slot",
		"20.00 ms: 2 has its 1 tokens",
		"20.00 ms: 3 has a slot",
		"40.01 ms: 1 has its 2 tokens", // the step from 20.00 has only this one
		"60.01 ms: 3 has its 1 tokens",
	}, told(t, 3, 1, 0, request{0, 1000, 2}, request{0, 1000, 1}, request{20, 1000, 1}))
}

// An engine gives its slots in the order in which requests came, whatever the boards think of them.
func TestWhoFindsNoSlotWaitsInTheEngine(t *testing.T) {
	require.Equal(t, []string{
		"0.00 ms: 1 has a slot",
		"20.00 ms: 1 has its 1 tokens",
		"20.00 ms: 2 has a slot",
		"40.00 ms: 2 has its 1 tokens",
	}, told(t, 1, 1, 0, request{0, 1000, 1}, request{0, 1000, 1}))
}

// The KV of a second answer has no room beside the first one's after a few tokens: the last
// admitted one leaves.
func TestTheLastAdmittedRequestLeavesIfKVOverflows(t *testing.T) {
	all := told(t, 1, 2, 205, request{0, 100, 9}, request{0, 100, 9})
	require.Contains(t, all[2], "2 leaves rank 0 after 3 tokens")
	require.Contains(t, all[3], "1 has its 9 tokens")
}

// What has no room for its KV is not pulled, and begins when there is room. A request that is alone
// is served, however long it is.
func TestARequestIsPulledWhenItsKVHasRoom(t *testing.T) {
	all := told(t, 1, 2, 150, request{0, 100, 3}, request{0, 200, 1})
	require.Equal(t, "0.00 ms: 1 has a slot", all[0])
	require.Contains(t, all[1], "1 has its 3 tokens")
	require.Contains(t, all[2], "2 has a slot")
	require.Contains(t, all[3], "2 has its 1 tokens")
}

// vLLM pulls for all that wait as soon as it runs one fewer than it may, and for none while it runs
// as many. What is pulled then waits for its turn.
func TestKVIsPulledOnlyWhileFewerRun(t *testing.T) {
	requests := []request{{0, 1000, 3}, {0, 1000, 1}, {50, 1000, 1}}
	require.Equal(t, []string{
		"0.00 ms: 1 has a slot",
		"0.00 ms: 2 has a slot", // their KV is there after two steps of 10 ms
		"80.03 ms: 1 has its 3 tokens",
		"100.03 ms: 2 has its 1 tokens",
		"100.03 ms: 3 has a slot", // it came at 50 ms; its KV takes two steps from now on
		"140.03 ms: 3 has its 1 tokens",
	}, toldOf(t, 1, Rank{Slots: 2, MaxRunning: 1}, 2, requests...))
	require.Equal(t, "120.03 ms: 3 has its 1 tokens", toldOf(t, 1, Rank{Slots: 1}, 2, requests...)[5], "it is pulled when it comes")
}

func TestWhatARankKeepsOfAnAnswerHasItsRoom(t *testing.T) {
	requests := []request{{0, 100, 2}, {0, 100, 20}, {20, 100, 1}}
	require.Contains(t, toldOf(t, 1, Rank{Slots: 2, Capacity: 250}, 0, requests...), "24.02 ms: 3 has a slot")
	all := toldOf(t, 1, Rank{Slots: 2, Capacity: 250, KeepsKVFor: 100 * time.Millisecond}, 0, requests...)
	require.Contains(t, all, "24.02 ms: 1 has its 2 tokens")
	require.Contains(t, all, "134.67 ms: 3 has a slot", "with the first step that begins 100 ms later")
	all = toldOf(t, 1, Rank{Slots: 2, Capacity: 250, KeepsKVFor: 100 * time.Millisecond}, 0, request{0, 100, 1}, request{20, 200, 1},
		request{20, 300, 1})
	require.Equal(t, "111.00 ms: 2 has a slot", all[2], "an idle rank cannot take it before either")
	require.Equal(t, "223.00 ms: 3 has a slot", all[4], "what is too long for the rank waits until it keeps nothing")
}

// A rank that runs as many as it may looks for no room for others, and yet what it keeps ends.
func TestWhatARankKeptDrivesNobodyOutAfterItsTime(t *testing.T) {
	all := toldOf(t, 1, Rank{Slots: 1, MaxRunning: 1, Capacity: 250, KeepsKVFor: 200 * time.Millisecond}, 0, request{0, 100, 1},
		request{30, 60, 40}, request{30, 60, 1})
	require.Len(t, all, 6)
	require.Contains(t, all[5], "3 has its 1 tokens")
}
