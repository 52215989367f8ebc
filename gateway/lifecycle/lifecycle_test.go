package lifecycle

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// answers are the events that may follow what is waited for in a state. A panic may follow
// anything.
var answers = map[State][]EventKind{
	Fresh:        {Begun},
	TryingLocal:  {LocalBound, NoLocal},
	Queued:       {Turn, NoTurn, Directed},
	Forwarded:    {PeerAnswers, PeerRefuses, RegionReturns, SiblingReturns},
	Prefilling:   {HandedOver, CallFailed},
	Pooled:       {Bound, CallFailed},
	Transferring: {First, CallFailed, Ends},
	Coupled:      {First, CallFailed, Ends},
	Pausing:      {Retried, GivenUp},
	Offering:     {Offered, NotOffered},
	Streaming:    {Ends, CallFailed},
	Confirming:   {Believed, CallFailed},
	Lost:         {Begun, Ends, GivenUp, CallFailed},
	Choosing:     {Chosen, NoneLeft, NoRoute},
	Calling:      {First, CallFailed, Ends},
	Redialing:    {First, CallFailed, Ends},
}

// settles are the ways in which each thing may be settled.
var settles = [resources][]Disposition{
	Permit:      {Back, Pass},
	Lease:       {Free, Refuse, Lose, Orphan, Discard, Pass},
	KV:          {Free, Orphan, Discard, MaybeRead, MaybeRunning},
	MaybeReadKV: {Discard, Orphan},
	Slot:        {Failing, Cancelled, Finish},
	LeaseOwner:  {Back},
	Copy:        {Back},
	Seat:        {Back},
	Body:        {Back, Pass},
	Call:        {Failing, Cancelled, Finish, Free, Spent},
	Memory:      {Back, Pass},
}

// calls are the ends that a call may have in a state: those for which the tables have an entry.
func legs(l *Lifecycle) (all []CallEnd) {
	early := []Reason{Uncalled, Misplaced, Unbegun}             // only the calls of an early attempt end so
	pool := []Reason{Left, Leaving, Unowned, NoRank, RanksLost} // only the pool's wait does
	late := []Reason{Unconfirmed, Incomplete, MaybeWrongKV}     // only an early prefill does
	ends(func(e CallEnd, said Disposition) {
		fits := said != unsaid
		switch l.state {
		case Prefilling:
			fits = fits && e.Call == Prefill && e.Progress < Through && e.Kept && !slices.Contains(late, e.Reason)
		case Pooled:
			fits = fits && e.Call == Prefill && e.Kept && slices.Contains(pool, e.Reason) && (e.Progress == Through) == (l.bind == Late) &&
				(e.Progress == Unsent) == (l.bind != Late)
		case Transferring:
			fits = fits && e.Call == Decode && !slices.Contains(early, e.Reason)
		case Streaming:
			fits = fits && e.Call == Decode && e.Progress == Through && !slices.Contains(early, e.Reason)
		case Confirming, Lost:
			fits = fits && e.Call == Prefill && e.Progress == Through
		}
		if fits {
			all = append(all, e)
		}
	})
	return all
}

// engines is what a model of the world knows of a request: what it holds, by the effects alone.
type engines struct {
	held    [resources]int
	read    bool // an engine may have read the KV that is held
	begun   bool // the client has the beginning of an answer
	ends    int  // of the answer, and errors
	charged int  // 500s of which it is open whose they are
	awaited int  // effects that are waited for, of one step
	pairs   []twoLegs
}

// tellPair has something happen to the calls of an attempt.
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
	if x.Pair > 0 && x.Kind != SendBoth { // of legs that a panic has left
		w.pairs[x.Pair-1].follow(t, x)
		return
	}
	if x.Kind == Settle {
		require.Contains(t, settles[x.Resource], x.Disposition, "%d of thing %d", x.Disposition, x.Resource)
		require.Positive(t, w.held[x.Resource], "thing %d is settled, and is not held", x.Resource)
		w.held[x.Resource]--
		if x.Disposition == MaybeRead || x.Disposition == MaybeRunning {
			w.held[MaybeReadKV]++
		}
		return
	}
	if x.Kind >= TryLocal {
		w.awaited++
	}
	switch x.Kind {
	case SendDecode:
		require.False(t, w.read && w.held[KV] > 0, "a hand-off is sent that may have been read")
	case AnswerIt:
		w.begun = true
	case Fail, EndWhole, BreakOff:
		require.True(t, w.begun || x.Kind == Fail, "the end of an answer that has not begun")
		w.ends++
	case ReportFailure:
		if x.Blame == Disputed {
			w.charged++
		}
	case Resolve:
		require.Positive(t, w.charged, "nobody is accused")
		w.charged = 0
	}
}

// happens takes an event in, before it is told.
func (w *engines) happens(state State, alone bool, e Event) {
	if e.Copied && w.held[Copy] == 0 && (e.Kind == LocalBound || e.Kind == Bound || e.Kind == First && state != Prefilling) {
		w.held[Copy]++
	}
	if state == TryingLocal && e.Kind != LocalBound && e.Kind != Panicked && !alone && w.held[LeaseOwner] == 0 {
		w.held[LeaseOwner]++
	}
	switch e.Kind {
	case LocalBound, Bound:
		w.held[Slot]++
		w.held[Call]++
	case Turn:
		if w.held[Permit] == 0 {
			w.held[Permit]++
		}
		w.held[Lease]++
	case HandedOver:
		w.held[KV]++
		w.read = false
	case CallFailed:
		if state == Transferring && e.End.Progress != Unsent {
			w.read = true
		}
	}
}

// drawn is an event that may come now.
func drawn(t *rapid.T, l *Lifecycle) Event {
	e := Event{Kind: rapid.SampledFrom(answers[l.state]).Draw(t, "what"), ClientLeft: rapid.IntRange(0, 9).Draw(t, "left") == 0}
	if e.Kind == Ends && l.state < Streaming && !l.held.has[Slot] { // it ends once
		e.Kind = First
	}
	if rapid.IntRange(0, 199).Draw(t, "panic") == 0 {
		e.Kind = Panicked
	}
	e.Bind = rapid.SampledFrom([]Bind{Late, Early, Aggregated}).Draw(t, "script")
	e.Copied, e.Idle = rapid.Bool().Draw(t, "kept"), rapid.Bool().Draw(t, "idle")
	e.Open, e.ReusesRequestID, e.Quit = rapid.Bool().Draw(t, "open"), rapid.Bool().Draw(t, "named"), rapid.Bool().Draw(t, "quit")
	if e.Kind == CallFailed {
		e.End = rapid.SampledFrom(legs(l)).Draw(t, "end")
		e.Engine = rapid.SampledFrom([]string{"decode a", "decode b"}).Draw(t, "engine")
		if e.Faulty = rapid.IntRange(0, 3).Draw(t, "faulty") == 0; !e.Faulty && rapid.IntRange(0, 3).Draw(t, "breach") == 0 {
			e.BrokenConn.Engine, e.Down = e.Engine, rapid.SliceOf(rapid.SampledFrom([]string{"decode a", "decode b"})).Draw(t, "down")
		}
		e.MostLosses = rapid.IntRange(0, 3).Draw(t, "mostLosses")
	}
	return e
}

// In whatever order things happen: what is taken is settled once, in a way that is its own, and
// nothing is held at the end. No hand-off is sent that may have been read. The client gets one
// answer or one error. A copy does what the first one does.
func TestWhatIsTakenIsSettledOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Lifecycle{MustServeHere: rapid.Bool().Draw(t, "bound"), NoHandOff: rapid.IntRange(0, 4).Draw(t, "alone") == 0}
		var w engines
		var events []Event
		e := Event{Kind: Begun}
		for range 200 {
			state := l.state
			w.happens(state, l.NoHandOff, e)
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
					pair.legs, pair.closed = l.pairs[n], l.pairs[n].DecodeEnded() // of a panic, it is
					pair.asksLate = pair.asksLate || pair.closed && pair.legs.prefill == awaitsCallback
				}
				for n := range w.pairs { // the request is over, and its legs come to their ends
					for e, more := w.pairs[n].last(); more; e, more = w.pairs[n].last() {
						w.tellPair(t, &l, n, e)
					}
					require.Zero(t, w.pairs[n].leases, "%+v", l.pairs[n])
				}
				require.Equal(t, [resources]int{}, w.held, "after %v", events)
				require.Zero(t, w.charged, "after %v", events)
				if e.Kind != Panicked && e.Kind != PeerAnswers {
					require.Equal(t, 1, w.ends, "after %v", events)
				}
				require.Empty(t, l.Step(drawn(t, &Lifecycle{state: Streaming}), nil), "nothing follows")
				return
			}
			require.Zero(t, w.ends, "after %v", events)
			if l.state == Streaming {
				require.LessOrEqual(t, w.held[Slot], 1, "after %v", events)
				require.Equal(t, w.held[Slot], w.held[Call], "after %v", events)
				require.Zero(t, w.held[Permit]+w.held[Lease]+w.held[KV]+w.held[MaybeReadKV]+w.held[LeaseOwner], "after %v", events)
			}
			if e.Kind == Ends && state < Streaming { // all of it came at once, and the wait goes on
				require.Equal(t, state, l.state, "after %v", events)
				require.Zero(t, w.held[Slot]+w.held[Call]+w.awaited, "after %v", events)
				e = drawn(t, &l)
				continue
			}
			require.Equal(t, 1, w.awaited, "something is waited for, in state %d after %v", l.state, events)
			require.Equal(t, TryLocal, dst[len(dst)-1].Kind-EffectKind(l.state-TryingLocal), "and it is what the state waits for")
			if e.ClientLeft && (e.Kind == CallFailed || e.Kind == GivenUp) {
				require.Fail(t, "a request goes on whose client has left", "%v", events)
			}
			e = drawn(t, &l)
		}
	})
}

// The client may leave while anything is waited for. The next event ends the request, but for those
// that something has begun for that must be settled first.
func TestARequestWhoseClientLeavesEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Lifecycle{}
		l.Step(Event{Kind: Begun}, nil)
		for range rapid.IntRange(0, 20).Draw(t, "events") {
			if l.state == Done {
				return
			}
			l.Step(drawn(t, &l), nil)
		}
		for more := 0; l.state != Done; more++ {
			require.Less(t, more, 6, "in state %d", l.state)
			e := drawn(t, &l)
			e.ClientLeft = true
			switch e.Kind { // whatever waits ends with the client
			case Turn:
				e.Kind = NoTurn
			case RegionReturns, SiblingReturns:
				e.Kind = PeerRefuses
			case Retried, Begun:
				e.Kind = GivenUp
			case Offered:
				e.Kind = NotOffered
			}
			l.Step(e, nil)
		}
	})
}

// An attempt that is bound before its prefill, or to a rank that prefills and decodes, and comes to
// the same as a late one, owes the same.
func TestEarlyAggregatedAndLateOweTheSame(t *testing.T) {
	for _, end := range []CallEnd{{Reason: Left}, {Reason: Leaving}, {Reason: Unowned}, {Reason: NoRank}} {
		for _, left := range []bool{false, true} {
			var after [3][]Effect
			for i := range after {
				l := Lifecycle{MustServeHere: true}
				l.Step(Event{Kind: Begun}, nil)
				l.Step(Event{Kind: NoLocal}, nil)
				l.Step(Event{Kind: Turn, Bind: Bind(i)}, nil)
				if e := end; i == 0 {
					l.Step(Event{Kind: HandedOver}, nil)
					e.Progress, e.Kept = Through, true
					end = e
				} else {
					end.Progress = Unsent
				}
				after[i] = l.Step(Event{Kind: CallFailed, End: end, ClientLeft: left}, nil)
				require.Equal(t, held{reusesRequestID: l.held.reusesRequestID}, l.held, "nothing is held")
			}
			for _, other := range after[1:] {
				require.Equal(t, after[0][len(after[0])-1], other[len(other)-1], "%+v", end)
			}
		}
	}
}

func TestASettleOfWhatIsNotHeldChangesNothing(t *testing.T) {
	var o held
	for resource := range resources {
		require.Empty(t, o.settle(nil, resource, Free), fmt.Sprint(resource))
	}
}

// aggregated is a life on a rank that prefills and decodes.
func aggregated() Lifecycle {
	l := Lifecycle{MustServeHere: true}
	for _, e := range []Event{{Kind: Begun}, {Kind: NoLocal}, {Kind: Turn, Bind: Aggregated}, {Kind: Bound}} {
		l.Step(e, nil)
	}
	return l
}

// The lease of a request on a rank that prefills and decodes goes back with its first event, or
// with the end of its leg: as the engine's failure where that is held against it. No KV is left
// anywhere, so that nothing is doubted, orphaned or discarded.
func TestTheLeaseOfAnAggregatedRequest(t *testing.T) {
	l := aggregated()
	require.Equal(t, []Effect{{Kind: Settle, Resource: Lease, Disposition: Free},
		{Kind: Settle, Resource: LeaseOwner, Disposition: Back}, {Kind: AnswerIt}},
		l.Step(Event{Kind: First}, nil))
	ends(func(e CallEnd, said Disposition) {
		if e.Call != Decode || said == unsaid {
			return
		}
		l := aggregated()
		var disposition []Disposition
		for _, x := range l.Step(Event{Kind: CallFailed, End: e}, nil) {
			if x.Kind == Settle {
				require.Contains(t, []Resource{Lease, Slot, Call, LeaseOwner}, x.Resource, "%+v", e)
				if x.Resource == Lease {
					disposition = append(disposition, x.Disposition)
				}
			}
		}
		want := Refuse
		if e.Verdict().Blame == Nobody || e.Reason == Busy {
			want = Free
		}
		require.Equal(t, []Disposition{want}, disposition, "%+v", e)
	})
}

// coupled is a life whose two calls are under way.
func coupled() Lifecycle {
	l := Lifecycle{MustServeHere: true}
	for _, e := range []Event{{Kind: Begun}, {Kind: NoLocal}, {Kind: Turn, Bind: Early}, {Kind: Bound}} {
		l.Step(e, nil)
	}
	return l
}

// What a prefill engine has failed at is held against no decode engine, and keeps no attempt off
// its rank.
func TestADecodeEngineIsNotBlamedForItsPrefill(t *testing.T) {
	l := coupled()
	again := Effect{Kind: Pause, Retry: Retry{Budget: Counted, N: 1}}
	got := l.Step(Event{Kind: CallFailed, Faulty: true, End: CallEnd{Call: Prefill, Progress: Headed, Reason: Failed}}, nil)
	leaves := []Effect{{Kind: Settle, Resource: Slot, Disposition: Failing}, {Kind: Settle, Resource: Call, Disposition: Failing}}
	require.Equal(t, slices.Concat([]Effect{{Kind: ReportFailure, Call: Prefill, Blame: Disputed}}, leaves, []Effect{again}), got)
	l = coupled()
	got = l.Step(Event{Kind: CallFailed, Faulty: true, End: CallEnd{Call: Decode, Progress: Headed, Reason: Failed}}, nil)
	require.Equal(t, slices.Concat([]Effect{{Kind: ReportFailure, Call: Decode, Blame: Disputed}}, leaves,
		[]Effect{{Kind: Avoid}, again}), got)
	l = coupled()
	got = l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Headed, Reason: Failed}}, nil) // its KV did not arrive
	require.Equal(t, Effect{Kind: ReportFailure, Call: Decode, Blame: Engine}, got[0])
}

// An attempt of which nothing was sent, or that its engine gave back, does not keep the next one
// off the rank.
func TestWhenARankIsShunned(t *testing.T) {
	for why, want := range map[Reason]bool{Unready: false, Leaving: false, Preempted: false, NotOurs: true, Broke: true} {
		l := coupled()
		progress := Headed
		if why < Unreachable {
			progress = Unsent
		}
		got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: progress, Reason: why, Moved: why == Preempted}}, nil)
		require.Equal(t, want, slices.Contains(got, Effect{Kind: Avoid}), "%d", why)
	}
}

// The slot of a call that the client's leaving has ended is free at once; else it may have to cool
// down.
func TestHowASlotGoesBack(t *testing.T) {
	for _, row := range []struct {
		e    Event
		want Disposition
	}{
		{Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Sent, Reason: HungUp}, ClientLeft: true, Quit: true}, Cancelled},
		{Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Sent, Reason: HungUp}, ClientLeft: true}, Failing}, // it left a moment later
		{Event{Kind: CallFailed, End: CallEnd{Call: Decode, Reason: NotOurs}}, Cancelled},
		{Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Sent, Reason: Broke}}, Failing},
	} {
		l := coupled()
		require.Contains(t, l.Step(row.e, nil), Effect{Kind: Settle, Resource: Slot, Disposition: row.want}, "%+v", row.e)
	}
}

// A prefill engine may have the whole answer: of one token, that is. Then nothing is handed over,
// and no rank is asked.
func TestAPrefillEngineMayAnswerAlone(t *testing.T) {
	var l Lifecycle
	step := func(e Event) (all []EffectKind) {
		for _, x := range l.Step(e, nil) {
			all = append(all, x.Kind)
		}
		return all
	}
	step(Event{Kind: Begun})
	step(Event{Kind: NoLocal})
	require.Contains(t, step(Event{Kind: Turn}), SendProbe)
	require.True(t, l.HasPoolPlace())
	require.Equal(t, []Effect{{Kind: Settle, Resource: Lease, Disposition: Free}, {Kind: Settle, Resource: Permit, Disposition: Back},
		{Kind: Settle, Resource: LeaseOwner, Disposition: Back}, {Kind: AnswerIt}}, l.Step(Event{Kind: First}, nil))
	require.False(t, l.HasPoolPlace())
	require.Equal(t, []EffectKind{EndWhole}, step(Event{Kind: Ends}))
}
