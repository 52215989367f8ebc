package board

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/step"
	"evenkeel/pool"
)

// Two ranks of eight slots, half of which decode: a prompt of 1,000 tokens alone has eight decodes
// wait for 500 tokens more than if both computed half of it, which is 0.4 s. For a quarter of that
// it is held.
func TestAPromptIsHeldForARound(t *testing.T) {
	for _, tt := range []struct {
		name string
		then func(h *hand)
		held time.Duration
	}{
		{"it goes when its wait is worth what it spares", func(h *hand) { h.pass(99 * time.Millisecond); h.pass(2 * time.Millisecond) }, 101 * time.Millisecond},
		{"or when the timer says so", func(h *hand) { h.at = h.Next(); h.do() }, 100 * time.Millisecond},
		{"or with a second one that levels the round", func(h *hand) { h.pass(50 * time.Millisecond); h.put(pool.Entry{Prompt: 1000}) }, 50 * time.Millisecond},
		{"or beside one that is not held", func(h *hand) {
			h.pass(20 * time.Millisecond)
			h.put(pool.Entry{Prompt: 1200, Express: true})
		}, 20 * time.Millisecond},
		{"or when nothing decodes any more", func(h *hand) {
			h.pass(10 * time.Millisecond)
			h.release(slices.Clone(append(h.slotsOf(0), h.slotsOf(1)...))...)
		}, 10 * time.Millisecond},
		{"or when it must have been sent", nil, 60 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := onMixed(t, "evenkeel", ranks(2, 8, 0))
			h.decode(t, 8)
			require.NoError(t, h.setPolicy("evenkeel"))
			e := pool.Entry{Prompt: 1000}
			if tt.then == nil { // three quarters of the time until then
				e.Deadline = h.at.Add(80 * time.Millisecond)
				tt.then = func(h *hand) { h.at = h.Next(); h.do() }
			}
			began := h.at
			w := h.put(e)
			require.True(t, w.waits())
			require.Equal(t, 1, h.status(h.at).Models[0].Groups[0].Held)
			h.pass(time.Millisecond)
			h.step()
			require.True(t, w.waits(), "a step changes nothing")
			h.at = began
			tt.then(h)
			s := w.slotNow(t)
			require.Equal(t, tt.held, s.Held.Round(10*time.Microsecond))
			require.Equal(t, s.Held, h.at.Sub(began))
			require.Zero(t, h.status(h.at).Models[0].Groups[0].Held)
		})
	}
}

// holding is a board on which a prompt is held for a round, for 100 ms.
func holding(t *testing.T) (*hand, waiting) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.decode(t, 8)
	require.NoError(t, h.setPolicy("evenkeel"))
	w := h.put(pool.Entry{Prompt: 1000})
	require.True(t, w.waits())
	return h, w
}

func TestAHeldEntryIsLookedAtOnceAStep(t *testing.T) {
	h, w := holding(t)
	b := h.boards["m"]
	require.Equal(t, 1, b.groups[0].heldEntries)
	ticks, due := b.ticks, h.Next()
	require.Equal(t, h.at.Add(100*time.Millisecond), due.Round(10*time.Microsecond))

	h.pass(time.Millisecond)
	require.Equal(t, ticks, b.ticks, "nothing changed and no step is over")
	h.step()
	require.Equal(t, ticks+1, b.ticks, "told by a stream, before the timer")
	require.True(t, w.waits())

	h.at = h.Next()
	h.do()
	require.Equal(t, ticks+2, b.ticks)
	require.False(t, w.waits(), "nobody is held for ever")
	require.Zero(t, b.groups[0].heldEntries)
	require.Zero(t, h.Next())
}

func TestAStepIsNotLookedAtBeforeAWindowEnds(t *testing.T) {
	h, w := holding(t)
	b := h.boards["m"]
	b.windowEnds = h.at.Add(10 * time.Millisecond)
	ticks := b.ticks
	h.step()
	require.Equal(t, ticks, b.ticks)
	require.Equal(t, b.windowEnds, h.Next())
	h.pass(10 * time.Millisecond)
	require.Equal(t, ticks+1, b.ticks)
	require.True(t, w.waits())
}

func TestAHeldEntryThatLeavesEndsTheTicks(t *testing.T) {
	h, w := holding(t)
	h.do(func(l *hand) { l.withdraw(w.entry) })
	h.at = h.Next()
	h.do()
	require.Zero(t, h.boards["m"].groups[0].heldEntries)
	require.Zero(t, h.Next())
}

// Who waits for a first token is counted over the steps: on its rank or for a slot, but not who is
// held.
func TestWhoWaitsForAFirstTokenIsCounted(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	b := h.boards["m"]
	g := b.groups[0]
	h.decode(t, 8)
	require.NoError(t, h.setPolicy("evenkeel"))
	require.True(t, h.put(pool.Entry{Prompt: 1000}).waits())
	require.Zero(t, b.awaitingFirstToken(g), "one request is held")
	require.NoError(t, h.setPolicy("evenkeel:patience=0"))
	for range 9 {
		h.put(pool.Entry{Prompt: 10})
	}
	require.InDelta(t, 10, b.awaitingFirstToken(g), 0, "eight have a slot, and two wait for one")
	g.recentSteps = recentSteps{}
	for range 3000 { // one minute
		h.step()
	}
	is, rate := g.recentSteps.means()
	require.InDelta(t, 10, is, 1e-3)
	require.Positive(t, rate)
	h.release(h.slotsOf(0)...)
	h.release(h.slotsOf(1)...)
	for range 3000 {
		h.step()
	}
	before := math.Exp(-1) / (1 + math.Exp(-1)) // what the minute before counts for
	is, _ = g.recentSteps.means()
	require.InDelta(t, 10*before+2*(1-before), is, 1e-2, "of the two that waited, each has a slot now")
}

// What came of a group lately is a mean per second of its steps. One that stood still counts for
// five seconds.
func TestLatelyIsPerSecond(t *testing.T) {
	var l recentSteps
	requests, rate := l.means()
	require.Negative(t, requests)
	require.Negative(t, rate)
	for range 100 {
		l.add(3, 50, 20*time.Millisecond)
	}
	requests, rate = l.means()
	require.InDelta(t, 3, requests, 1e-4)
	require.InEpsilon(t, 2500, rate, 1e-3, "the tokens of a step count for all of it")
	l.add(0, 0, time.Hour)
	_, rate = l.means()
	require.InEpsilon(t, 2500*2/7., rate, 0.1)
}

// Under a light load a prompt is held for a millisecond at most: seldom does anybody wait for a
// first token, so little is worth a wait, and seldom does a second prompt come. One of 1,000 tokens
// takes 0.1 s.
func TestALonePromptIsHardlyHeld(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.decode(t, 8)
	h.boards["m"].groups[0].recentSteps = recentSteps{}
	require.NoError(t, h.setPolicy("evenkeel"))
	for range 50 {
		h.step()
	}
	for range 20 {
		w := h.put(pool.Entry{Prompt: 1000})
		for w.waits() {
			h.at = h.Next()
			h.do()
		}
		s := w.slotNow(t)
		require.LessOrEqual(t, s.Held, time.Millisecond)
		h.step()
		s.Started()
		for k := range 50 {
			s.Progress(1 + k)
			h.step()
		}
		h.release(s)
	}
}

// Requests are not held any more once they wait for a slot.
func TestWithoutASlotNothingIsHeld(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 1000}})
	h.decode(t, 8)
	require.NoError(t, h.setPolicy("evenkeel"))
	w := h.put(pool.Entry{Prompt: 3000})
	require.True(t, w.waits())
	require.Equal(t, 1, h.status(h.at).Models[0].Groups[0].Held)
	h.fleet(mixed(ranks(2, 4, 0)))
	h.pass(time.Minute)
	require.True(t, w.waits())
	g := h.status(h.at).Models[0].Groups[0]
	require.Zero(t, g.Held)
	require.Zero(t, g.Rounds.HeldS)
}

// The status says how long requests are held, how many prompts each rank got, and how many ranks
// computed none.
func TestTheStatusTellsOfRounds(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 1000}})
	h.decode(t, 8)
	require.NoError(t, h.setPolicy("evenkeel:max_hold=2"))
	before := h.status(h.at).Models[0]
	require.True(t, h.put(pool.Entry{Prompt: 3000}).waits())
	h.pass(time.Second)
	h.step()
	s := h.status(h.at.Add(time.Second / 2)).Models[0].Groups[0].Rounds
	require.InDelta(t, 1.5, s.HeldS, 1e-6)
	require.InDelta(t, 2, s.MaxHoldS, 1e-9)
	h.pass(time.Second)
	after := h.status(h.at).Models[0]
	require.Zero(t, after.Groups[0].Rounds.HeldS, "it was sent")
	prompts := func(m ModelStatus) (n uint64) {
		for _, w := range m.Workers {
			n += w.Prompts
		}
		return n
	}
	require.Equal(t, prompts(before)+1, prompts(after))
	h.step()
	was, is := after.Groups[0].Rounds, h.status(h.at).Models[0].Groups[0].Rounds
	require.Equal(t, was.PrefillSteps+1, is.PrefillSteps)
	require.InDelta(t, was.EmptyShare*float64(was.PrefillSteps)+0.5, is.EmptyShare*float64(is.PrefillSteps), 1e-9,
		"one of two ranks computed none")
}

// No request is held for longer than max_hold, whatever goes wrong.
func TestTheLongestHoldIsMaxHold(t *testing.T) {
	const most = 2 * time.Second
	for _, tt := range []struct {
		name  string
		while func(h *hand)
	}{
		{"a rank stops, and no step is told any more", func(*hand) {}},
		{"the window of a burst is open all the time", func(h *hand) {
			h.cfg.Window = 10 * time.Millisecond
			h.boards["m"].windowEnds = h.at.Add(h.cfg.Window)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := onMixed(t, "evenkeel", ranks(2, 8, 0))
			h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 1000}})
			h.decode(t, 8)
			require.NoError(t, h.setPolicy("evenkeel:max_hold=2"))
			began := h.at
			w := h.put(pool.Entry{Prompt: 3000})
			for w.waits() {
				require.LessOrEqual(t, h.at.Sub(began), most)
				tt.while(h)
				h.at = h.Next()
				h.do()
			}
			require.LessOrEqual(t, w.slotNow(t).Held, most)
			require.Equal(t, most, h.at.Sub(began))
		})
	}
}

func TestAClockThatJumpsHoldsNothingForLonger(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 1000}})
	h.decode(t, 8)
	require.NoError(t, h.setPolicy("evenkeel:max_hold=2"))
	w := h.put(pool.Entry{Prompt: 3000})
	h.pass(time.Second)
	h.at = h.at.Add(-time.Hour)
	h.step()
	require.True(t, w.waits())
	require.Equal(t, h.at.Add(2*time.Second), h.Next(), "it begins anew")
	h.pass(time.Hour)
	w.slotNow(t)
	w = h.put(pool.Entry{Prompt: 9000}) // more than what the other rank computes
	require.True(t, w.waits())
	h.pass(24 * time.Hour)
	w.slotNow(t)
}

func TestBeforeAPromptsPriceIsLearnedItIsTheUsualOne(t *testing.T) {
	h := newHand(t, realConfig("evenkeel"))
	h.fleet(mixed(ranks(2, 8, 0)))
	h.decode(t, 8)
	h.manyWait()
	require.NoError(t, h.setPolicy("evenkeel"))
	w := h.put(pool.Entry{Prompt: 3000})
	require.True(t, w.waits())
	began := h.at
	for w.waits() {
		h.at = h.Next()
		h.do()
	}
	require.Equal(t, h.at.Sub(began), w.slotNow(t).Held)
	require.Less(t, h.at.Sub(began), 100*time.Millisecond)
	require.EqualValues(t, float32(step.UsualOwnPromptMs), h.boards["m"].snapshot.OwnPromptMs)
}

// onDecode is a board of two ranks that only decode, with eight requests of 1,000 tokens each. A
// step takes 10 ms and a microsecond for each token of the fullest rank. A request of 60,000 tokens
// is held back, because it would make each step 60 ms longer.
func onDecode(t *testing.T, ws []Worker) (*hand, []*Slot, waiting) {
	cfg := realConfig("evenkeel:hold=0")
	cfg.StepModel = StepModel{C0Ms: 10, C1Ms: 1e-3}
	h := newHand(t, cfg)
	h.fleet(ws)
	var slots []*Slot
	for range 16 {
		slots = append(slots, h.put(pool.Entry{Prompt: 1000}).slotNow(t))
	}
	for _, s := range slots {
		s.Progress(1)
	}
	require.NoError(t, h.setPolicy("evenkeel"))
	return h, slots, h.put(pool.Entry{Prompt: 60_000})
}

func TestALongPromptIsHeldBack(t *testing.T) {
	h, slots, w := onDecode(t, ranks(2, 20, 0))
	require.True(t, w.waits())
	b := h.boards["m"]
	require.Equal(t, 1, h.status(h.at).Models[0].Groups[0].Held)
	ticks := b.ticks
	h.pass(time.Millisecond)
	require.Equal(t, ticks, b.ticks, "nothing changed and no step is over")
	slots[0].Progress(2) // it speaks again: a step is over
	require.Len(t, h.told, 1)
	h.do(h.told...)
	require.Equal(t, ticks+1, b.ticks, "told by a stream, before the timer")
	require.True(t, w.waits())

	began := h.at
	for w.waits() && h.at.Sub(began) < 10*time.Second { // no stream says anything more
		require.False(t, h.Next().IsZero(), "it is not forgotten")
		require.LessOrEqual(t, h.Next().Sub(h.at), time.Second)
		h.at = h.Next()
		h.do()
	}
	require.False(t, w.waits())
	require.LessOrEqual(t, h.at.Sub(began), 5*time.Second+20*time.Millisecond, "max_hold, and half a step more than one")
	require.Zero(t, b.groups[0].heldEntries)
	require.Zero(t, h.Next())
}

func TestALongPromptGoesOnceNobodyElseDecodes(t *testing.T) {
	h, slots, w := onDecode(t, ranks(2, 20, 0))
	require.True(t, w.waits())
	h.put(pool.Entry{Prompt: 10}).slotNow(t) // a shorter one is not held
	h.release(slots...)
	require.False(t, w.waits())
}

func TestNoPromptIsHeldBackBeforeItsPrefill(t *testing.T) {
	_, _, w := onDecode(t, early(ranks(2, 20, 0)))
	require.False(t, w.waits())
}
