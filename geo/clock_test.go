package geo

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
)

// handClock is time that a test moves on.
type handClock struct {
	now time.Time
	due []*alarm
}

type alarm struct {
	at time.Time
	f  func()
}

func (c *handClock) Now() time.Time  { return c.now }
func (c *handClock) Spread() float64 { return 0.5 }

func (c *handClock) After(d time.Duration, f func()) func() bool {
	a := &alarm{c.now.Add(d), f}
	c.due = append(c.due, a)
	return func() bool {
		before := len(c.due)
		c.due = slices.DeleteFunc(c.due, func(x *alarm) bool { return x == a })
		return len(c.due) < before
	}
}

func (c *handClock) pass(d time.Duration) {
	end := c.now.Add(d)
	for {
		next := -1
		for i, a := range c.due {
			if !a.at.After(end) && (next < 0 || a.at.Before(c.due[next].at)) {
				next = i
			}
		}
		if next < 0 {
			c.now = end
			return
		}
		a := c.due[next]
		c.due = slices.Delete(c.due, next, next+1)
		c.now = a.at
		a.f()
	}
}

// handLink is a peer 80 ms away that answers as long as it is well.
type handLink struct {
	clock *handClock
	well  bool
	near  bool // it answers at once
	asked []time.Time
	ended bool
}

func (l *handLink) Ask(_ context.Context, text []byte, limit time.Duration, answered func(ProbeOutcome)) {
	sent := l.clock.now
	l.asked = append(l.asked, sent)
	if !l.well {
		l.clock.After(limit, func() { answered(ProbeOutcome{Err: errors.New("silence")}) })
		return
	}
	var q question
	_ = json.Unmarshal(text, &q)
	reply, _ := json.Marshal(answer{Version: "1.0", ID: "eu-1", Boot: "b", Seq: q.Seq,
		Models: map[string]policy.Offer{"m": {Replicas: 1, NAvail: 1, Free: 1}}})
	if l.near {
		answered(ProbeOutcome{Text: reply})
		return
	}
	l.clock.After(80*time.Millisecond, func() { answered(ProbeOutcome{Text: reply, RoundTrip: l.clock.now.Sub(sent)}) })
}

func (l *handLink) Warm(context.Context, time.Duration) error { return nil }
func (l *handLink) Close()                                    { l.ended = true }

func TestAFarPeerThatAnswersIsNotStale(t *testing.T) {
	clock := &handClock{now: time.Unix(1_000_000_000, 0)}
	link := &handLink{clock: clock, well: true}
	ps, _ := node(t, func(c *Config) {
		c.Clock, c.Link, c.Probe.Interval = clock, func(string) Link { return link }, 25*time.Millisecond
	}, entry(t, "eu-1", "http://nowhere"))
	clock.pass(time.Second)
	for range 105 { // longer than three intervals pass between two answers
		clock.pass(time.Millisecond)
		require.Equal(t, "available", first(ps).Available["m"], "%v ms after its last answer", first(ps).AgeMs)
	}
	link.well = false
	clock.pass(340 * time.Millisecond) // 25 of them until the answer that is on its way
	require.Equal(t, "stale", first(ps).Available["m"], "three times it should have answered")
	clock.pass(220 * time.Millisecond) // until the last question is given up
}

func TestANodeLivesInTheTimeAndOnTheLinksThatItIsGiven(t *testing.T) {
	clock := &handClock{now: time.Unix(1_000_000_000, 0)}
	link := &handLink{clock: clock, well: true}
	ps, q := node(t, func(c *Config) {
		c.Clock, c.Link, c.Probe.Interval = clock, func(string) Link { return link }, 500*time.Millisecond
	}, entry(t, "eu-1", "http://nowhere"))
	start := clock.now
	clock.pass(time.Second)
	require.True(t, first(ps).Up, "after two answers")
	require.Equal(t, 80.0, first(ps).RTTMs)
	require.Equal(t, []time.Time{start, start.Add(580 * time.Millisecond)}, link.asked, "an interval after each answer")
	require.EqualValues(t, 2, q.wakes.Load())
	require.Equal(t, 340.0, first(ps).AgeMs)

	link.well = false
	clock.pass(10 * time.Second)
	require.False(t, first(ps).Up)
	require.Equal(t, "silence", first(ps).Fault)
	ps.Close()
	require.True(t, link.ended)
	require.Empty(t, clock.due)
}

func TestAForwardIsPredictedWithWhatThePeerLatelyTookBeyondIt(t *testing.T) {
	clock := &handClock{now: time.Unix(1_000_000_000, 0)}
	link := &handLink{clock: clock, well: true, near: true}
	ps, _ := node(t, func(c *Config) {
		c.Clock, c.Link, c.Probe.Interval = clock, func(string) Link { return link }, 25*time.Millisecond
	}, entry(t, "eu-1", "http://nowhere"))
	clock.pass(time.Second)
	round := uint64(0)
	forward := func(late time.Duration) *Forward {
		clock.pass(200 * time.Millisecond) // a probe has counted the one before
		round++
		q := ps.NewQuery(Ask{ID: "r", Model: "m"})
		require.Equal(t, prefill.ToThere, q.Where(&prefill.Here{Model: "m", Round: round, Now: clock.now, Since: clock.now, Tokens: 100}))
		f := q.Forward()
		f.Written()
		clock.pass(time.Duration(f.predicted.WithoutResidual()*float64(time.Millisecond)) + late)
		f.AnswerBegun(false, 0)
		f.End(OutcomeOK)
		return f
	}
	require.Zero(t, forward(30*time.Millisecond).predicted.Residual)
	for range 40 {
		forward(30 * time.Millisecond)
	}
	require.InDelta(t, 26, forward(0).predicted.Residual, 3, "it is not believed at once")
	for range 300 {
		forward(-30 * time.Millisecond)
	}
	require.InDelta(t, -26, forward(0).predicted.Residual, 4)
	clock.pass(10 * time.Minute)
	require.InDelta(t, 0, forward(0).predicted.Residual, 0.1, "what was learned fades")
}

// However often the queue asks while a request waits for a replica, it is woken once for that.
func TestARequestThatWaitsForAHitSetsOneTimer(t *testing.T) {
	clock := &handClock{now: time.Unix(1_000_000_000, 0)}
	ps, queue := node(t, func(c *Config) { c.Clock, c.Policy = clock, "gorgo:push=sp-p,load=50,patience=2" })
	h := &prefill.Here{Model: "m", Since: clock.now, Tokens: 4100}
	h.Prefillers = []prefill.Prefiller{{Live: true, Open: true, WaitingAtScrape: 1}, {Live: true, Open: true, MaxSeqs: 8}}
	for i := range h.Prefillers {
		p := &h.Prefillers[i]
		p.ID, p.TPMs = string(rune('a'+i)), 0.1
	}
	h.Prefillers[0].HitTokens = 4000
	q := ps.NewQuery(Ask{ID: "r", Model: "m"})
	for range 5 {
		h.Round++
		h.Now = clock.now
		require.Equal(t, prefill.WaitsAlone, q.Where(h))
		clock.pass(100 * time.Millisecond)
	}
	require.Len(t, clock.due, 1)
	clock.pass(300*time.Millisecond + 1)
	require.EqualValues(t, 1, queue.wakes.Load(), "once it has waited 2 ms for each of the 400 ms that the hit saves")
	h.Now = clock.now
	h.Round++
	require.Equal(t, prefill.ToHere, q.Where(h))
	require.Empty(t, clock.due)
}
