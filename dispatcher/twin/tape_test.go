package twin

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func empty(t testing.TB) *board.Boards {
	b, err := board.New(board.Config{})
	require.NoError(t, err)
	return b
}

// one is a request that comes, gets a slot, and leaves.
type one struct {
	come  board.Enqueue
	bind  board.Effect
	leave board.Release
}

func request(id uint64, slot int32) *one {
	e := &pool.Entry{ID: id, Model: "m", Prompt: 100, Entered: noon, Arrival: noon}
	return &one{
		board.Enqueue{Entry: e},
		board.Effect{Kind: board.EffectBind, Group: board.GroupKey{Model: "m"}, Entry: e, Bound: board.Binding{Slot: slot, Step: 7}},
		board.Release{Model: "m", Slot: slot, Generated: 50, Started: true, FirstStep: 10, LastStep: 60},
	}
}

// Of ranks that prefill and decode a tape keeps no requests, and no replay is made.
func TestRanksThatPrefillAreNotForetold(t *testing.T) {
	b := empty(t)
	b.Apply(board.SetWorkers{Workers: []board.Worker{{Model: "m", Group: "main", Barrier: true, Mixed: true, Slots: 4, Up: true}}}, noon)
	var tape Tape
	tape.NextSegment(noon, b)
	r := request(1, 3)
	r.come.Entry.Aggregated = true
	tape.Record(r.come, noon)
	tape.RecordEffect(&r.bind, noon)
	tape.Record(&r.leave, noon.Add(time.Second))
	s := tape.NextSegment(noon.Add(15*time.Second), b)
	require.Empty(t, s.arrivals)
	require.Empty(t, s.departures)
	_, err := NewReplay(&Window{Segments: []*Segment{s}, End: b}, "m", "", 0)
	require.ErrorContains(t, err, "m has ranks that prefill and decode")
}

func TestATapeKeepsWhatComesAndLeaves(t *testing.T) {
	var tape Tape
	first, second := request(1, 3), request(2, 3) // one after the other in the same slot
	tape.RecordEffect(&first.bind, noon)
	require.Nil(t, tape.NextSegment(noon, empty(t)), "nothing was before")
	require.True(t, tape.segment.AfterGap)
	tape.Record(&first.leave, noon.Add(time.Second))
	tape.Record(&second.come, noon.Add(2*time.Second))
	tape.RecordEffect(&second.bind, noon.Add(3*time.Second))
	second.leave.FirstStep = 0
	tape.Record(&second.leave, noon.Add(4*time.Second))
	refused := request(3, 0).come
	tape.Record(refused, noon.Add(5*time.Second))
	tape.RecordEffect(&board.Effect{Kind: board.EffectRefuse, Entry: refused.Entry}, noon.Add(6*time.Second))

	s := tape.NextSegment(noon.Add(15*time.Second), empty(t))
	require.Equal(t, noon, s.From)
	require.Equal(t, noon.Add(15*time.Second), s.To)
	require.Equal(t, []departure{
		{at: time.Second, id: 1, generated: 50, stepsToFirstToken: 2},
		{at: 4 * time.Second, id: 2, generated: 50, stepsToFirstToken: -1}, // no token came
		{at: 6 * time.Second, id: 3, generated: -1, stepsToFirstToken: -1},
	}, s.departures)
	require.Len(t, s.arrivals, 2)
	require.EqualValues(t, 2, s.arrivals[0].id)
	require.Equal(t, 2*time.Second, s.arrivals[0].at)
	require.False(t, tape.segment.AfterGap)
}

func TestAStretchEndsWithThePolicy(t *testing.T) {
	var tape Tape
	require.True(t, tape.Due(noon, time.Minute))
	tape.NextSegment(noon, empty(t))
	require.False(t, tape.Due(noon.Add(59*time.Second), time.Minute))
	require.True(t, tape.Due(noon.Add(time.Minute), time.Minute))
	tape.Record(board.SetPolicy{Spec: "br0"}, noon.Add(time.Second))
	require.True(t, tape.Due(noon.Add(time.Second), time.Minute))
	require.Nil(t, tape.NextSegment(noon.Add(2*time.Second), empty(t)), "it is of two policies")
	require.True(t, tape.segment.AfterGap, "what comes is not replayed with what was")
	require.False(t, tape.Due(noon.Add(3*time.Second), time.Minute))
}

func TestAStretchIsBounded(t *testing.T) {
	var tape Tape
	tape.NextSegment(noon, empty(t))
	r := request(1, 0)
	for !tape.Due(noon, time.Hour) {
		tape.Record(&r.come, noon)
		require.LessOrEqual(t, len(tape.segment.arrivals), maxSegmentRequests)
	}
}

func TestTheTwinKeepsWhatOneWindowNeeds(t *testing.T) {
	judge, end := New([]string{"jsq"}), empty(t)
	for n := range 100 {
		from := noon.Add(time.Duration(n) * 15 * time.Second)
		judge.AddSegment(&Segment{Boards: end, From: from, To: from.Add(15 * time.Second), arrivals: make([]arrival, 5000)}, end)
		require.LessOrEqual(t, from.Add(15*time.Second).Sub(judge.segments[0].From), Span)
		require.LessOrEqual(t, 5000*len(judge.segments), maxRequests)
	}
	judge.AddSegment(&Segment{Boards: end, From: noon, To: noon, AfterGap: true}, end)
	require.Len(t, judge.segments, 1, "a window does not reach over a change")
}

func TestATapeDoesNotTouchTheHeap(t *testing.T) {
	var tape Tape
	r := request(1, 0)
	tape.lastCount = 10_000
	tape.NextSegment(noon, empty(t))
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		tape.Record(&r.come, noon)
		tape.RecordEffect(&r.bind, noon)
		tape.Record(&r.leave, noon)
	}))
}
