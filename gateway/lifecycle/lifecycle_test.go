package lifecycle

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// answers are the events that may follow what is waited for in a state. A panic may follow anything.
var answers = map[State][]What{
	Fresh:       {Begun},
	TryingLocal: {LocalBound, NoLocal},
	Queued:      {Turn, NoTurn, Directed},
	Forwarded:   {PeerAnswers, PeerRefuses, RegionReturns, SiblingReturns},
	Probing:     {HandedOver, Fell},
	Pooled:      {Bound, Fell},
	Opening:     {First, Fell, Ends},
	Coupled:     {First, Fell, Ends},
	Pausing:     {Retried, GivenUp},
	Offering:    {Offered, NotOffered},
	Answering:   {Ends, Fell},
	Confirming:  {Believed, Fell},
	Lost:        {Begun, Ends, GivenUp, Fell},
	Choosing:    {Chosen, NoneLeft, NoRoute},
	Calling:     {First, Fell, Ends},
	Redialing:   {First, Fell, Ends},
}

// settles are the ways in which each thing may be settled.
var settles = [things][]How{
	Place:   {Back, Pass},
	Lease:   {Free, Refuse, Lose, Orphan, Discard, Pass},
	KV:      {Free, Orphan, Discard, Doubt, DoubtOn},
	Doubted: {Discard, Orphan},
	Slot:    {Failing, Cancelled, Finish},
	Holder:  {Back},
	Copy:    {Back},
	Seat:    {Back},
	Body:    {Back, Pass},
	Call:    {Failing, Cancelled, Finish, Free, Spent},
	Memory:  {Back, Pass},
}

// legs are the ends that a leg may have in a state: those for which the tables have an entry.
func legs(l *Lifecycle) (all []Ended) {
	early := []Why{Uncalled, Misplaced, Unbegun}                   // only the legs of an early attempt end so
	pool := []Why{Left, Leaving, Unowned, NoRank, RanksLost}       // only the pool's wait does
	late := []Why{Unconfirmed, Incomplete, Restarted, Disbelieved} // only an early prefill does
	ends(func(e Ended, said How) {
		fits := said != unsaid
		switch l.state {
		case Probing:
			fits = fits && e.Leg == Prefill && e.Far < Through && e.Kept && !slices.Contains(late, e.Why)
		case Pooled:
			fits = fits && e.Leg == Prefill && e.Kept && slices.Contains(pool, e.Why) && (e.Far == Through) == (l.script == Late) &&
				(e.Far == Unsent) == (l.script != Late)
		case Opening:
			fits = fits && e.Leg == Decode && !slices.Contains(early, e.Why)
		case Answering:
			fits = fits && e.Leg == Decode && e.Far == Through && !slices.Contains(early, e.Why)
		case Confirming, Lost:
			fits = fits && e.Leg == Prefill && e.Far == Through
		}
		if fits {
			all = append(all, e)
		}
	})
	return all
}

// engines is what a model of the world knows of a request: what it holds, by the effects alone.
type engines struct {
	held    [things]int
	read    bool // an engine may have read the KV that is held
	begun   bool // the client has the beginning of an answer
	ends    int  // of the answer, and errors
	charged int  // 500s of which it is open whose they are
	awaited int  // effects that are waited for, of one step
	pairs   []twoLegs
}

// tellPair has something happen to the legs of an attempt.
func (w *engines) tellPair(t require.TestingT, l *Lifecycle, n int, e Event) {
	w.pairs[n].legs = l.pairs[n]
	for _, was := range w.pairs[n].tell(t, e) {
		was.Pair = n + 1
		for i := range was.do {
			was.do[i].Pair = n + 1
		}
		require.Equal(t, was.do, l.Step(was.Event, nil))
	}
	require.Equal(t, w.pairs[n].legs, l.pairs[n])
}

// follow takes an effect in.
func (w *engines) follow(t require.TestingT, x Effect) {
	if x.Pair > 0 && x.Do != SendBoth { // of legs that a panic has left
		w.pairs[x.Pair-1].follow(t, x)
		return
	}
	if x.Do == Settle {
		require.Contains(t, settles[x.Thing], x.How, "%d of thing %d", x.How, x.Thing)
		require.Positive(t, w.held[x.Thing], "thing %d is settled, and is not held", x.Thing)
		w.held[x.Thing]--
		if x.How == Doubt || x.How == DoubtOn {
			w.held[Doubted]++
		}
		return
	}
	if x.Do >= TryLocal {
		w.awaited++
	}
	switch x.Do {
	case SendDecode:
		require.False(t, w.read && w.held[KV] > 0, "a hand-off is sent that may have been read")
	case AnswerIt:
		w.begun = true
	case Fail, EndWhole, BreakOff:
		require.True(t, w.begun || x.Do == Fail, "the end of an answer that has not begun")
		w.ends++
	case Condemn:
		if x.Blame == Disputed {
			w.charged++
		}
	case Find:
		require.Positive(t, w.charged, "nobody is accused")
		w.charged = 0
	}
}

// happens takes an event in, before it is told.
func (w *engines) happens(state State, alone bool, e Event) {
	if e.Copied && w.held[Copy] == 0 && (e.What == LocalBound || e.What == Bound || e.What == First && state != Probing) {
		w.held[Copy]++
	}
	if state == TryingLocal && e.What != LocalBound && e.What != Panicked && !alone && w.held[Holder] == 0 {
		w.held[Holder]++
	}
	switch e.What {
	case LocalBound, Bound:
		w.held[Slot]++
		w.held[Call]++
	case Turn:
		if w.held[Place] == 0 {
			w.held[Place]++
		}
		w.held[Lease]++
	case HandedOver:
		w.held[KV]++
		w.read = false
	case Fell:
		if state == Opening && e.End.Far != Unsent {
			w.read = true
		}
	}
}

// drawn is an event that may come now.
func drawn(t *rapid.T, l *Lifecycle) Event {
	e := Event{What: rapid.SampledFrom(answers[l.state]).Draw(t, "what"), Left: rapid.IntRange(0, 9).Draw(t, "left") == 0}
	if e.What == Ends && l.state < Answering && !l.owed.has[Slot] { // it ends once
		e.What = First
	}
	if rapid.IntRange(0, 199).Draw(t, "panic") == 0 {
		e.What = Panicked
	}
	e.Script = rapid.SampledFrom([]Script{Late, Early, Mixed}).Draw(t, "script")
	e.Copied, e.Idle = rapid.Bool().Draw(t, "kept"), rapid.Bool().Draw(t, "idle")
	e.Open, e.Named, e.Quit = rapid.Bool().Draw(t, "open"), rapid.Bool().Draw(t, "named"), rapid.Bool().Draw(t, "quit")
	if e.What == Fell {
		e.End = rapid.SampledFrom(legs(l)).Draw(t, "end")
		e.Engine = rapid.SampledFrom([]string{"decode a", "decode b"}).Draw(t, "engine")
		if e.Faulty = rapid.IntRange(0, 3).Draw(t, "faulty") == 0; !e.Faulty && rapid.IntRange(0, 3).Draw(t, "breach") == 0 {
			e.Breach.Engine, e.Down = e.Engine, rapid.SliceOf(rapid.SampledFrom([]string{"decode a", "decode b"})).Draw(t, "down")
		}
		e.MostLosses = rapid.IntRange(0, 3).Draw(t, "mostLosses")
	}
	return e
}

// In whatever order things happen: what is taken is settled once, in a way that is its own, and nothing is held at the end. No
// hand-off is sent that may have been read. The client gets one answer or one error. A copy does what the first one does.
func TestWhatIsTakenIsSettledOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Lifecycle{Bound: rapid.Bool().Draw(t, "bound"), OnlyLocal: rapid.IntRange(0, 4).Draw(t, "alone") == 0}
		var w engines
		var events []Event
		e := Event{What: Begun}
		for range 200 {
			state := l.state
			w.happens(state, l.OnlyLocal, e)
			events = append(events, e)
			for n := range w.pairs {
				if rapid.Bool().Draw(t, "of the legs") && len(w.pairs[n].mayCome()) > 0 {
					w.tellPair(t, &l, n, w.pairs[n].drawn(t))
				}
			}
			require.Equal(t, state, l.state, "what happens to a leg that runs beside is no step of its request")
			twin := twinOf(&l)
			dst := l.Step(e, nil)
			require.Equal(t, dst, twin.Step(e, nil), "equal events give equal effects")
			require.Equal(t, l.state, twin.state)
			w.awaited = 0
			for _, x := range dst {
				w.follow(t, x)
			}
			for range len(l.pairs) - len(w.pairs) {
				w.held[Lease]--
				w.pairs = append(w.pairs, twoLegs{legs: l.pairs[len(w.pairs)], leases: 1})
			}
			if l.state == Done {
				for n := range w.pairs {
					pair := &w.pairs[n]
					pair.legs, pair.closed = l.pairs[n], l.pairs[n].Closed() // of a panic, it is
					pair.asksLate = pair.asksLate || pair.closed && pair.legs.prefill == uncalled
				}
				for n := range w.pairs { // the request is over, and its legs come to their ends
					for e, more := w.pairs[n].last(); more; e, more = w.pairs[n].last() {
						w.tellPair(t, &l, n, e)
					}
					require.Zero(t, w.pairs[n].leases, "%+v", l.pairs[n])
				}
				require.Equal(t, [things]int{}, w.held, "after %v", events)
				require.Zero(t, w.charged, "after %v", events)
				if e.What != Panicked && e.What != PeerAnswers {
					require.Equal(t, 1, w.ends, "after %v", events)
				}
				require.Empty(t, l.Step(drawn(t, &Lifecycle{state: Answering}), nil), "nothing follows")
				return
			}
			require.Zero(t, w.ends, "after %v", events)
			if l.state == Answering {
				require.LessOrEqual(t, w.held[Slot], 1, "after %v", events)
				require.Equal(t, w.held[Slot], w.held[Call], "after %v", events)
				require.Zero(t, w.held[Place]+w.held[Lease]+w.held[KV]+w.held[Doubted]+w.held[Holder], "after %v", events)
			}
			if e.What == Ends && state < Answering { // all of it came at once, and the wait goes on
				require.Equal(t, state, l.state, "after %v", events)
				require.Zero(t, w.held[Slot]+w.held[Call]+w.awaited, "after %v", events)
				e = drawn(t, &l)
				continue
			}
			require.Equal(t, 1, w.awaited, "something is waited for, in state %d after %v", l.state, events)
			require.Equal(t, TryLocal, dst[len(dst)-1].Do-Do(l.state-TryingLocal), "and it is what the state waits for")
			if e.Left && (e.What == Fell || e.What == GivenUp) {
				require.Fail(t, "a request goes on whose client has left", "%v", events)
			}
			e = drawn(t, &l)
		}
	})
}

// The client may leave while anything is waited for. The next event ends the request, but for those that something has begun for
// that must be settled first.
func TestARequestWhoseClientLeavesEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Lifecycle{}
		l.Step(Event{What: Begun}, nil)
		for range rapid.IntRange(0, 20).Draw(t, "events") {
			if l.state == Done {
				return
			}
			l.Step(drawn(t, &l), nil)
		}
		for more := 0; l.state != Done; more++ {
			require.Less(t, more, 6, "in state %d", l.state)
			e := drawn(t, &l)
			e.Left = true
			switch e.What { // whatever waits ends with the client
			case Turn:
				e.What = NoTurn
			case RegionReturns, SiblingReturns:
				e.What = PeerRefuses
			case Retried, Begun:
				e.What = GivenUp
			case Offered:
				e.What = NotOffered
			}
			l.Step(e, nil)
		}
	})
}

// An attempt that is bound before its prefill, or to a rank that prefills and decodes, and comes to the same as a late one, owes the same.
func TestEarlyMixedAndLateOweTheSame(t *testing.T) {
	for _, end := range []Ended{{Why: Left}, {Why: Leaving}, {Why: Unowned}, {Why: NoRank}} {
		for _, left := range []bool{false, true} {
			var after [3][]Effect
			for i := range after {
				l := Lifecycle{Bound: true}
				l.Step(Event{What: Begun}, nil)
				l.Step(Event{What: NoLocal}, nil)
				l.Step(Event{What: Turn, Script: Script(i)}, nil)
				if e := end; i == 0 {
					l.Step(Event{What: HandedOver}, nil)
					e.Far, e.Kept = Through, true
					end = e
				} else {
					end.Far = Unsent
				}
				after[i] = l.Step(Event{What: Fell, End: end, Left: left}, nil)
				require.Equal(t, owed{kvHasProbeID: l.owed.kvHasProbeID}, l.owed, "nothing is held")
			}
			for _, other := range after[1:] {
				require.Equal(t, after[0][len(after[0])-1], other[len(other)-1], "%+v", end)
			}
		}
	}
}

func TestASettleOfWhatIsNotHeldChangesNothing(t *testing.T) {
	var o owed
	for thing := range things {
		require.Empty(t, o.settle(nil, thing, Free), fmt.Sprint(thing))
	}
}

// mixed is a life on a rank that prefills and decodes.
func mixed() Lifecycle {
	l := Lifecycle{Bound: true}
	for _, e := range []Event{{What: Begun}, {What: NoLocal}, {What: Turn, Script: Mixed}, {What: Bound}} {
		l.Step(e, nil)
	}
	return l
}

// The lease of a request on a rank that prefills and decodes goes back with its first event, or with the end of its leg: as the
// engine's failure where that is held against it. No KV is left anywhere, so that nothing is doubted, orphaned or discarded.
func TestTheLeaseOfAMixedRequest(t *testing.T) {
	l := mixed()
	require.Equal(t, []Effect{{Do: Settle, Thing: Lease, How: Free}, {Do: Settle, Thing: Holder, How: Back}, {Do: AnswerIt}},
		l.Step(Event{What: First}, nil))
	ends(func(e Ended, said How) {
		if e.Leg != Decode || said == unsaid {
			return
		}
		l := mixed()
		var how []How
		for _, x := range l.Step(Event{What: Fell, End: e}, nil) {
			if x.Do == Settle {
				require.Contains(t, []Thing{Lease, Slot, Call, Holder}, x.Thing, "%+v", e)
				if x.Thing == Lease {
					how = append(how, x.How)
				}
			}
		}
		want := Refuse
		if e.Verdict().Blame == Nobody || e.Why == Busy {
			want = Free
		}
		require.Equal(t, []How{want}, how, "%+v", e)
	})
}

// coupled is a life whose two legs are under way.
func coupled() Lifecycle {
	l := Lifecycle{Bound: true}
	for _, e := range []Event{{What: Begun}, {What: NoLocal}, {What: Turn, Script: Early}, {What: Bound}} {
		l.Step(e, nil)
	}
	return l
}

// What a prefill engine has failed at is held against no decode engine, and keeps no attempt off its rank.
func TestADecodeEngineIsNotBlamedForItsPrefill(t *testing.T) {
	l := coupled()
	again := Effect{Do: Pause, Retry: Retry{Budget: Counted, N: 1}}
	got := l.Step(Event{What: Fell, Faulty: true, End: Ended{Leg: Prefill, Far: Headed, Why: Failed}}, nil)
	leaves := []Effect{{Do: Settle, Thing: Slot, How: Failing}, {Do: Settle, Thing: Call, How: Failing}}
	require.Equal(t, slices.Concat([]Effect{{Do: Condemn, Leg: Prefill, Blame: Disputed}}, leaves, []Effect{again}), got)
	l = coupled()
	got = l.Step(Event{What: Fell, Faulty: true, End: Ended{Leg: Decode, Far: Headed, Why: Failed}}, nil)
	require.Equal(t, slices.Concat([]Effect{{Do: Condemn, Leg: Decode, Blame: Disputed}}, leaves, []Effect{{Do: Shun}, again}), got)
	l = coupled()
	got = l.Step(Event{What: Fell, End: Ended{Leg: Decode, Far: Headed, Why: Failed}}, nil) // its KV did not arrive
	require.Equal(t, Effect{Do: Condemn, Leg: Decode, Blame: Engine}, got[0])
}

// An attempt of which nothing was sent, or that its engine gave back, does not keep the next one off the rank.
func TestWhenARankIsShunned(t *testing.T) {
	for why, want := range map[Why]bool{Unlearned: false, Unready: false, Leaving: false, GivenBack: false, NotOurs: true, Broke: true} {
		l := coupled()
		far := Headed
		if why < Unreachable {
			far = Unsent
		}
		got := l.Step(Event{What: Fell, End: Ended{Leg: Decode, Far: far, Why: why, Moved: why == GivenBack}}, nil)
		require.Equal(t, want, slices.Contains(got, Effect{Do: Shun}), "%d", why)
	}
}

// The slot of a leg that the client's leaving has ended is free at once; else it may have to cool down.
func TestHowASlotGoesBack(t *testing.T) {
	for _, row := range []struct {
		e    Event
		want How
	}{
		{Event{What: Fell, End: Ended{Leg: Decode, Far: Sent, Why: HungUp}, Left: true, Quit: true}, Cancelled},
		{Event{What: Fell, End: Ended{Leg: Decode, Far: Sent, Why: HungUp}, Left: true}, Failing}, // it left a moment later
		{Event{What: Fell, End: Ended{Leg: Decode, Why: NotOurs}}, Cancelled},
		{Event{What: Fell, End: Ended{Leg: Decode, Far: Sent, Why: Broke}}, Failing},
	} {
		l := coupled()
		require.Contains(t, l.Step(row.e, nil), Effect{Do: Settle, Thing: Slot, How: row.want}, "%+v", row.e)
	}
}

// A prefill engine may have the whole answer: of one token, that is. Then nothing is handed over, and no rank is asked.
func TestAPrefillEngineMayAnswerAlone(t *testing.T) {
	var l Lifecycle
	step := func(e Event) (all []Do) {
		for _, x := range l.Step(e, nil) {
			all = append(all, x.Do)
		}
		return all
	}
	step(Event{What: Begun})
	step(Event{What: NoLocal})
	require.Contains(t, step(Event{What: Turn}), SendProbe)
	require.True(t, l.Reserved())
	require.Equal(t, []Effect{{Do: Settle, Thing: Lease, How: Free}, {Do: Settle, Thing: Place, How: Back},
		{Do: Settle, Thing: Holder, How: Back}, {Do: AnswerIt}}, l.Step(Event{What: First}, nil))
	require.False(t, l.Reserved())
	require.Equal(t, []Do{EndWhole}, step(Event{What: Ends}))
}
