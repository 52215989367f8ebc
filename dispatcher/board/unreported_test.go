package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// stream has streams get a token each in every step of 50 ms, for so long.
func (h *hand) stream(d time.Duration, streams ...*Slot) {
	for end := h.at.Add(d); h.at.Before(end); {
		h.at = h.at.Add(50 * time.Millisecond)
		for _, s := range streams {
			s.Progress(s.Generated() + 1)
		}
		told := h.told
		h.told = nil
		h.do(told...)
		h.count()
	}
}

// held are the KV tokens of a rank.
func (h *hand) heldBy(id int32) int64 {
	h.status(h.at)
	return h.boards["m"].ranks[id].kv
}

func TestAnAnswerThatIsNotHeardGrowsAsTheStreamsDo(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(w *Worker)
		before bool // the answer begins before any stream was looked at
	}{
		{"with a barrier", func(*Worker) {}, false},
		{"without one", func(w *Worker) { w.Barrier = false }, false},
		{"on ranks that prefill and decode", func(w *Worker) { w.Mixed = true }, false},
		{"there, without a barrier", func(w *Worker) { w.Mixed, w.Barrier = true, false }, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			h := newHand(t, testConfig())
			fleet := ranks(2, 8, 0)
			for i := range fleet {
				row.change(&fleet[i])
			}
			h.fleet(fleet)
			heard := h.put(pool.Entry{Prompt: 100}).slotNow(t)
			heard.Started()
			heard.Progress(1)
			h.stream(2*time.Second, heard)
			whole := h.put(pool.Entry{Prompt: 100}).slotNow(t)
			require.NotEqual(t, heard.Worker, whole.Worker)
			require.EqualValues(t, 100, h.heldBy(whole.Worker))
			whole.maxUnreported = 1000
			h.stream(5*time.Second, heard)
			require.InDelta(t, 200, h.heldBy(whole.Worker), 10, "twenty tokens in each of five seconds")
			require.True(t, h.boards["m"].hasBegun(whole.index), "it is not on its way any more")

			whole.generated.Store(110)
			h.release(whole)
			require.Len(t, h.metrics.thought, 1)
			require.InDelta(t, 100./110, h.metrics.thought[0], .1)
			require.Zero(t, h.heldBy(whole.Worker))
			slots, kv := h.boards["m"].drift()
			require.Zero(t, slots)
			require.Zero(t, kv)
		})
	}
}

func TestAnAnswerThatIsNotHeardHasNoMoreThanItMay(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 8, 0))
	heard := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	heard.Progress(1)
	h.stream(time.Second, heard)
	before := h.heldBy(0)
	whole := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	whole.maxUnreported = 16
	h.stream(10*time.Second, heard)
	require.EqualValues(t, before+200+100+16, h.heldBy(0), "200 tokens more of the stream, and a prompt with 16")
	whole.Progress(40) // as a stream whose engine has held its text back so far
	require.EqualValues(t, before+200+100+40, h.heldBy(0), "what is told counts")
}

// Where no stream was ever heard nothing is known, until the first answer ends.
func TestAnswersThatAreNotHeardTeachTheirPaceWhereThereIsNoStream(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 8, 0))
	first := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	first.maxUnreported = 1000
	h.stream(10 * time.Second)
	require.LessOrEqual(t, h.heldBy(0), int64(101))
	first.generated.Store(100)
	h.release(first)
	next := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	next.maxUnreported = 1000
	h.stream(5 * time.Second)
	require.InDelta(t, 150, h.heldBy(0), 5, "ten tokens in a second")
}

// One that waits in its engine's own queue does not grow.
func TestAnAnswerThatIsNotHeardDoesNotGrowInItsEnginesQueue(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 8, 0))
	heard := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	heard.Progress(1)
	h.stream(time.Second, heard)
	whole := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	whole.maxUnreported = 1000
	h.boards["m"].slots.records[whole.index].inEngineQueue = true
	h.boards["m"].ranks[0].engineQueued = 1
	before := h.heldBy(0)
	h.stream(time.Second, heard)
	require.Equal(t, before+20, h.heldBy(0), "the stream's tokens alone")
}

func TestWhatIsNotHeardAllocatesNothing(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(4, 8, 0))
	var slots []*Slot
	for range 16 {
		slots = append(slots, h.put(pool.Entry{Prompt: 100}).slotNow(t))
	}
	for i, s := range slots {
		if s.Progress(1); i%2 == 0 {
			s.maxUnreported = 1 << 20
		}
	}
	h.count()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		h.at = h.at.Add(measureEvery)
		for i, s := range slots {
			if i%2 == 1 {
				s.generated.Add(2)
			}
		}
		h.count()
	}))
	require.Greater(t, h.boards["m"].generated(slots[0].index), int32(100))
}

// Boards are looked at when something comes, which may be after a long time.
func TestAnAnswerThatIsNotHeardDoesNotGrowByWhatWasBeforeIt(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 8, 0))
	heard := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	heard.Progress(1)
	h.stream(time.Second, heard)
	h.at = h.at.Add(time.Minute)
	heard.Progress(heard.Generated() + 20*60)
	whole := h.put(pool.Entry{Prompt: 100})
	slot := whole.slotNow(t)
	slot.maxUnreported = 10_000
	h.at = h.at.Add(measureEvery)
	h.count()
	require.LessOrEqual(t, h.boards["m"].generated(slot.index), int32(1+20))
}

// What is only thought does not say that a hand-off has reached its engine.
func TestAnAnswerThatIsNotHeardProvesNoPair(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 8, 0))
	heard := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	heard.Progress(1)
	whole := h.put(pool.Entry{Prompt: 100, Prefiller: "p"}).slotNow(t)
	whole.maxUnreported = 1000
	h.stream(time.Second, heard)
	b := h.boards["m"]
	require.True(t, b.hasBegun(whole.index))
	require.False(t, b.firstEventCame(whole.index))
	require.False(t, b.slots.records[whole.index].started)
}

// No step is reported while only answers run that are not heard. An answer that began after the
// last reported step and ends before the next one has taken one step, and not the 2^32 by which its
// last step seems to come before its first.
func TestAnAnswerThatIsNotHeardEndsNoEarlierThanItBegan(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(2, 50, 0)
	for i := range ws {
		ws[i].Barrier, ws[i].Group = true, "g"
	}
	h.fleet(ws)
	stream := h.put(pool.Entry{Prompt: 1}).slotNow(t)
	stream.Started()
	for n := 1; n < 6; n++ {
		h.pass(50 * time.Millisecond)
		stream.Progress(n)
		reported := h.told
		h.told = nil
		h.do(reported...)
	}
	whole := h.put(pool.Entry{Prompt: 1}).slotNow(t)
	whole.maxUnreported = 100
	h.release(stream)
	for range 4 {
		h.pass(150 * time.Millisecond)
		h.status(h.at)
	}
	b := h.boards["m"]
	require.Greater(t, b.slots.records[whole.index].estimate.firstStep, b.groups[0].lastStep.Number)
	whole.generated.Store(8)
	h.release(whole)
	running := handoffDelay{}
	for range 128 {
		running.learn(10, 12, 12)
		b.groups[0].handoffDelay.learn(10, 12, 12)
	}
	require.Equal(t, running.extraSlots(50), b.groups[0].handoffDelay.extraSlots(50), "requests go ahead as where no such answer was")
}
