package lifecycle

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
)

// traitsByName holds the traits of all connectors, by short names.
var traitsByName = map[string]ConnectorTraits{"layerwise": Traits[mooncake.AscendLayerwise], "sglang": Traits[mooncake.SGLang]}

// Each connector with two engines that binds before the prefill has one trait, and no other
// connector has any.
func TestConnectorsThatHaveTraits(t *testing.T) {
	for _, name := range mooncake.Connectors() {
		p := mooncake.Profile{Connector: name}.WithDefaults()
		_, has := Traits[name]
		require.Equal(t, p.Early() && name != mooncake.None, has, name)
	}
	for name, traits := range Traits {
		require.True(t, traits.Aborts != traits.CallsBack, name)
	}
}

// mayCome are the events that the world may send to legs now. asked are effects that are waited
// for.
func (w *twoLegs) mayCome() []EventKind {
	var all []EventKind
	switch l := &w.legs; l.prefill {
	case awaitsCallback:
		if w.asksLate {
			all = append(all, CalledLate, Uncallable)
		} else {
			all = append(all, CalledBack, NeedsNothing, Miscalled)
			if !w.overdue {
				all = append(all, Overdue)
			}
		}
	case mayBeSent:
		all = append(all, ProbeDue)
	case running, aborting:
		all = append(all, PrefillFailed, PrefillDone)
	case seekingEngine:
		if l.holdsLease {
			all = append(all, ProbeDue)
		} else {
			all = append(all, Found, NotFound)
		}
	case answered, noPrefill:
	}
	switch w.legs.decode {
	case unbegun:
		all = append(all, Began, DecodeFailed, ClientGone)
	case begun:
		if w.legs.Failed { // the first event is not believed
			all = append(all, DecodeFailed)
		} else {
			all = append(all, Confirmed, DecodeOver, Unwanted)
		}
	case endedUnbegun:
	case endedBegun:
		all = append(all, Confirmed, Unwanted)
	}
	if w.quiet {
		all = append(all, Quiet)
	}
	if w.waits {
		all = append(all, ClientWaited)
	}
	return all
}

// twoLegs is what a model of the world knows of two legs.
type twoLegs struct {
	legs          Pair
	leases        int  // that are not settled
	overdue       bool // the time for the callback is over
	asksLate      bool // and the decode call, so that only the grace is left
	quiet, waits  bool // a timer runs
	ended, hungUp int
	closed        bool
}

// happened is an event, and what was to be done for it.
type happened struct {
	Event
	do []Effect
}

// tell has something happen, and what follows from that at once.
func (w *twoLegs) tell(t require.TestingT, e Event) (all []happened) {
	twin := w.legs
	dst := w.legs.step(e, nil)
	require.Equal(t, dst, twin.step(e, nil), "equal events give equal effects")
	require.Equal(t, w.legs, twin)
	all = append(all, happened{e, dst})
	for _, x := range dst {
		w.follow(t, x)
	}
	switch e.Kind {
	case Began: // the wait for the prefill engine's answer follows, and has an end
		all = append(all, w.tell(t, Event{Kind: Confirmed, Prompt: e.Prompt})...)
	case Overdue:
		w.overdue = true
	case Found:
		w.leases++
	case DecodeFailed, DecodeOver:
		w.closed = true
	case ClientWaited:
		w.waits = false
	case Quiet:
		w.quiet = false
	}
	if w.closed && w.legs.prefill == awaitsCallback {
		w.asksLate = true
	}
	return all
}

// follow takes an effect in.
func (w *twoLegs) follow(t require.TestingT, x Effect) {
	switch x.Kind {
	case Settle:
		w.leases--
		require.Equal(t, Lease, x.Resource)
		require.Contains(t, settles[Lease], x.Disposition)
	case EndDecode:
		require.False(t, w.closed, "a decode leg is ended that has ended")
		w.ended++
	case AwaitFirst:
		w.quiet = true
	case StopWaiting:
		w.quiet = false
	case WaitGone:
		w.waits = true
	case HangUp:
		w.hungUp++
	}
	require.GreaterOrEqual(t, w.leases, 0, "a lease is settled twice")
	require.LessOrEqual(t, w.ended, 1)
}

// last is what happens next if both calls only come to their ends; false: they have.
func (w *twoLegs) last() (e Event, more bool) {
	switch may := w.mayCome(); {
	case slices.Contains(may, DecodeOver):
		e.Kind = DecodeOver
	case slices.Contains(may, DecodeFailed):
		e = Event{Kind: DecodeFailed, Reason: Died}
	case slices.Contains(may, Uncallable):
		e.Kind = Uncallable
	case slices.Contains(may, ProbeDue):
		e.Kind = ProbeDue
	case slices.Contains(may, PrefillDone):
		e = Event{Kind: PrefillDone, Prompt: 10}
	case slices.Contains(may, NotFound):
		e = Event{Kind: NotFound, End: CallEnd{Progress: Headed, Reason: Busy}}
	default:
		return e, false
	}
	return e, true
}

func (w *twoLegs) drawn(t *rapid.T) Event {
	e := Event{Kind: rapid.SampledFrom(w.mayCome()).Draw(t, "what"), Prompt: rapid.SampledFrom([]int{0, 5, 10}).Draw(t, "prompt"),
		Again: rapid.Bool().Draw(t, "again")}
	e.Reason = rapid.SampledFrom([]DecodeFailure{Refused, Declined, Died}).Draw(t, "parting")
	switch e.Kind {
	case PrefillFailed, NotFound:
		e.End = rapid.SampledFrom(probeEnds).Draw(t, "end")
	case Quiet, Began:
		e.End = CallEnd{Call: Decode, Progress: Sent, Reason: Unbegun}
	case Overdue:
		e.End = CallEnd{Call: Decode, Progress: Sent, Reason: Uncalled}
	case Miscalled:
		e.End = CallEnd{Call: Decode, Progress: Sent, Reason: Garbled}
	case ClientGone, ClientWaited, Unwanted:
		e.End = CallEnd{Reason: Left}
	}
	return e
}

// probeEnds are the ends of a prefill call that was sent.
var probeEnds = func() (all []CallEnd) {
	ends(func(e CallEnd, said Disposition) {
		if said != unsaid && e.Call == Prefill && e.Progress < Through && !e.Moved && !e.Frees && e.Reason != Left {
			all = append(all, e)
		}
	})
	return all
}()

// In whatever order things happen to two legs: the lease is settled once, and when both calls have
// ended nothing is owed. One leg ends the other one at most once.
func TestTwoLegsOweNothingAtTheEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{"layerwise", "sglang"}).Draw(t, "connector")
		w := twoLegs{legs: newPair(traitsByName[name], false, false), leases: 1}
		for range rapid.IntRange(0, 15).Draw(t, "events") {
			if len(w.mayCome()) == 0 {
				break
			}
			w.tell(t, w.drawn(t))
		}
		for e, more := w.last(); more; e, more = w.last() {
			w.tell(t, e)
		}
		require.Zero(t, w.leases, "%s: %+v", name, w.legs)
	})
}

// A client that leaves before the first event ends both calls, at once or when what it left may be
// ended.
func TestAClientThatLeavesEndsBothLegs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{"layerwise", "sglang"}).Draw(t, "connector")
		w := twoLegs{legs: newPair(traitsByName[name], false, false), leases: 1}
		for range rapid.IntRange(0, 6).Draw(t, "events") {
			if w.legs.decode != unbegun {
				return
			}
			w.tell(t, w.drawn(t))
		}
		if w.legs.decode != unbegun {
			return
		}
		w.tell(t, Event{Kind: ClientGone, End: CallEnd{Reason: Left}})
		if w.waits {
			w.tell(t, Event{Kind: ClientWaited, End: CallEnd{Reason: Left}})
		}
		require.True(t, w.legs.Failed, "%s: %+v", name, w.legs)
		require.Equal(t, 1, w.ended)
	})
}

// An answer whose prompt was not prefilled to its end is never believed.
func TestAnAnswerOfHalfAPromptIsNotBelieved(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := twoLegs{legs: newPair(traitsByName["sglang"], false, false), leases: 1}
		w.tell(t, Event{Kind: ProbeDue})
		steps := []Event{{Kind: Began, Prompt: 10}, {Kind: PrefillDone, Prompt: 5}, {Kind: DecodeOver}, {Kind: Confirmed, Prompt: 10}}
		if rapid.Bool().Draw(t, "the prefill's answer comes first") {
			steps[0], steps[1] = steps[1], steps[0]
		}
		for _, e := range steps {
			w.tell(t, e)
		}
		require.True(t, w.legs.Failed)
	})
}

// What stays on a decode rank when its leg ends by itself, by connector and phase.
func TestWhatAnEndedDecodeStrands(t *testing.T) {
	called := []Event{{Kind: CalledBack}, {Kind: ProbeDue}}
	for _, row := range []struct {
		name, connector string
		before          []Event
		reason          DecodeFailure
		strands         bool
	}{
		{"a layerwise decode that broke while its prefill runs", "layerwise", called, Died, true},
		{"one whose KV is written", "layerwise", append(slices.Clone(called), Event{Kind: PrefillDone}), Died, false},
		{"one that refused", "layerwise", nil, Refused, false},
		{"one that broke before its callback", "layerwise", nil, Died, false},
		{"a layerwise one that broke while its prompt goes to another engine", "layerwise", append(slices.Clone(called), Event{Kind: PrefillFailed, Again: true, End: CallEnd{Progress: Headed, Reason: Busy}}, Event{Kind: Found}), Died, true},
		{"one that says then that it needs nothing", "layerwise", []Event{{Kind: ClientGone, End: CallEnd{Reason: Left}}, {Kind: Began}, {Kind: NeedsNothing}}, Died, false},
		{"SGLang's that broke while its prefill runs", "sglang", []Event{{Kind: ProbeDue}}, Died, false},
	} {
		l := newPair(traitsByName[row.connector], false, false)
		for _, e := range row.before {
			l.step(e, nil)
		}
		got := l.step(Event{Kind: DecodeFailed, Reason: row.reason}, nil)
		require.Equal(t, row.strands, slices.Contains(got, Effect{Kind: LeakBlocks}), row.name)
	}
}
