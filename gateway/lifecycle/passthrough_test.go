package lifecycle

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// soleEnds are the ends that a Sole call may have.
var soleEnds = func() (all []CallEnd) {
	for why, progress := range map[Reason][]Progress{
		HungUp: {Unsent, Sent, Headed}, Unreachable: {Unsent}, Stale: {Unsent, Sent}, Broke: {Unsent, Sent, Headed},
		Silent: {Unsent, Sent, Headed}, Garbled: {Headed}, TooLarge: {Headed},
		Lacks: {Headed}, Rejected: {Headed}, Throttled: {Headed}, Busy: {Headed}, Failed: {Headed}, Erred: {Headed}, Unable: {Headed},
		Odd: {Headed}, Unlisted: {Headed},
	} {
		for _, progress := range progress {
			for flags := range 4 {
				all = append(all, CallEnd{Call: Sole, Progress: progress, Reason: why, Moved: flags&1 > 0, Open: flags&2 > 0 && progress == Headed})
			}
		}
	}
	slices.SortFunc(all, func(a, b CallEnd) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	return all
}()

// spent says whether an engine may have computed a request, by what is known of it alone.
func spent(e CallEnd) bool {
	return e.Open || e.Progress > Unsent && e.Reason != Stale && e.Reason < Lacks
}

// begins is how such a request does.
var begins = Event{Kind: Begun, Bind: Passthrough}

// onePassed is what a model of the world knows of a request that is passed through, by the effects
// alone.
type onePassed struct {
	life                  Lifecycle
	held                  [resources]int
	engines, calls, ended int
	failures              int // that the log tells of
}

func (w *onePassed) tell(t require.TestingT, e Event) []Effect {
	require.False(t, w.over())
	state := w.life.state
	if e.Kind == Begun {
		w.held[Seat]++
		w.held[Body]++
	}
	twin := w.life
	dst := w.life.Step(e, nil)
	require.Equal(t, dst, twin.Step(e, nil), "equal events give equal effects")
	require.Equal(t, w.life, twin)
	for _, x := range dst {
		require.Zero(t, w.ended, "something follows the end")
		switch x.Kind {
		case Settle:
			require.Contains(t, settles[x.Resource], x.Disposition, "%d of thing %d", x.Disposition, x.Resource)
			require.Positive(t, w.held[x.Resource], "thing %d is settled, and is not held", x.Resource)
			w.held[x.Resource]--
		case Choose:
			require.Zero(t, w.held[Call])
		case SendOver, SendAnew:
			require.Zero(t, w.held[Call], "one engine at a time has it")
			require.Positive(t, w.held[Body], "its body is sent")
			w.held[Call]++
			w.held[Memory]++
			w.calls++
			if x.Kind == SendOver {
				w.engines++
			}
		case Complain:
			w.failures++
		case EndWhole, BreakOff, Fail:
			w.ended++
		}
	}
	if e.Kind != Panicked && len(dst) > 0 && !w.over() {
		require.Equal(t, TryLocal, dst[len(dst)-1].Kind-EffectKind(w.life.state-TryingLocal), "the last effect is what the state waits for")
	}
	if e.Kind == Ends && state < Done && state != Streaming { // all of the answer came at once
		require.Empty(t, dst)
		require.Equal(t, state, w.life.state)
	}
	return dst
}

// over says whether the life is.
func (w *onePassed) over() bool { return w.life.state == Done }

// drawn is an event that may come now; of no use when the life is over.
func (w *onePassed) drawn(t *rapid.T) Event {
	if w.over() {
		return Event{}
	}
	e := Event{Kind: rapid.SampledFrom(answers[w.life.state]).Draw(t, "what"), ClientLeft: rapid.IntRange(0, 9).Draw(t, "left") == 0}
	if rapid.IntRange(0, 99).Draw(t, "panic") == 0 {
		e.Kind = Panicked
	}
	if e.Kind == CallFailed {
		e.End = rapid.SampledFrom(soleEnds).Draw(t, "end")
	}
	return e
}

// In whatever order things happen: what is taken is settled once, in a way that is its own, and
// nothing is held at the end. The engines of a request are few. A copy does what the first one
// does.
func TestWhatAPassedRequestTakesIsSettledOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w onePassed
		e := begins
		for steps := 0; !w.over(); {
			require.Less(t, steps, 40, "it comes to an end")
			dst := w.tell(t, e)
			steps += min(1, len(dst)) // all of an answer may come at once
			require.LessOrEqual(t, w.failures, maxFailedEngines)
			require.LessOrEqual(t, w.engines, maxEnginesAsked)
			require.LessOrEqual(t, w.calls, 2*w.engines)
			if w.over() {
				require.True(t, e.Kind == Panicked || w.ended == 1, "%+v", dst)
				break
			}
			e = w.drawn(t)
		}
		require.Zero(t, w.held)
		require.Empty(t, w.life.Step(Event{Kind: Ends}, nil), "an end is told once")
	})
}

// A request of which an engine may have died goes to no other engine, unless it was ended because
// that engine drains. The engine itself gets it a second time only where a connection ended that
// had been kept alive.
func TestWhatMayHaveKilledAnEngineGoesToNoOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w onePassed
		e := begins
		for !w.over() {
			second, answered := w.life.state == Redialing, w.life.state == Streaming
			dst := w.tell(t, e)
			if e.Kind == CallFailed && !answered {
				killed := e.End.Progress > Unsent && slices.Contains([]Reason{HungUp, Broke, Silent, Garbled}, e.End.Reason) ||
					second && e.End.Progress < Headed
				if killed && !e.End.Moved || e.ClientLeft {
					require.Equal(t, Fail, dst[len(dst)-1].Kind, "%+v", e.End)
				}
				again := slices.ContainsFunc(dst, func(x Effect) bool { return x.Kind == SendAnew })
				require.Equal(t, e.End.Reason == Stale && !e.End.Moved && !second && !e.ClientLeft, again, "%+v", e.End)
				disposition := map[bool]Disposition{true: Spent, false: Free}[spent(e.End)]
				require.Contains(t, dst, Effect{Kind: Settle, Resource: Call, Disposition: disposition}, "%+v", e.End)
			}
			e = w.drawn(t)
		}
	})
}

// The client may leave in any state: what it waits for ends, and then nothing is tried any more.
func TestAPassedRequestWhoseClientLeavesEnds(t *testing.T) {
	for _, before := range [][]Event{
		{},
		{{Kind: CallFailed, End: CallEnd{Call: Sole, Reason: Unreachable}}, {Kind: Chosen}},
		{{Kind: CallFailed, End: CallEnd{Call: Sole, Progress: Sent, Reason: Stale}}},
	} {
		for _, end := range soleEnds {
			var w onePassed
			for _, e := range slices.Concat([]Event{begins, {Kind: Chosen}}, before, []Event{{Kind: CallFailed, End: end, ClientLeft: true}}) {
				w.tell(t, e)
			}
			require.True(t, w.over())
			require.Zero(t, w.held)
		}
	}
}

// What the client gets and what is tried, by what the engines do in turn.
func TestWhatBecomesOfAPassedRequest(t *testing.T) {
	fell := func(progress Progress, why Reason) Event {
		return Event{Kind: CallFailed, End: CallEnd{Call: Sole, Progress: progress, Reason: why}}
	}
	moved := Event{Kind: CallFailed, End: CallEnd{Call: Sole, Progress: Sent, Reason: HungUp, Moved: true}}
	unlisted := fell(Headed, Unlisted)
	busy, lacks, stale, unreached := fell(Headed, Busy), fell(Headed, Lacks), fell(Sent, Stale), fell(Unsent, Unreachable)
	chosen, none, noRoute := Event{Kind: Chosen}, Event{Kind: NoneLeft}, Event{Kind: NoRoute}
	times := func(n int, all ...Event) []Event { return slices.Repeat(all, n) }
	const goesOn = Error(99)
	for _, row := range []struct {
		name     string
		events   []Event
		with     Error // of the client; goesOn: it has none yet
		engines  int
		calls    int
		failures int
	}{
		{"no engine takes it", []Event{none}, OfRanks, 0, 0, 0},
		{"no engine has the endpoint", []Event{noRoute}, OfRanks, 0, 0, 0},
		{"an engine is busy, and another is chosen", []Event{chosen, busy, chosen}, goesOn, 2, 2, 1},
		{"an engine has too many requests", []Event{chosen, fell(Headed, Throttled), chosen}, goesOn, 2, 2, 1},
		{"an engine cannot be reached", []Event{chosen, unreached, chosen}, goesOn, 2, 2, 1},
		{"a connection ended before a byte was sent", []Event{chosen, fell(Unsent, Broke), chosen}, goesOn, 2, 2, 1},
		{"an engine is busy, and no other is left", []Event{chosen, busy, none}, OfAttempt, 1, 1, 1},
		{"an engine is busy, and the others lack the endpoint by now", []Event{chosen, busy, noRoute}, OfRanks, 1, 1, 1},
		{"three engines are busy", times(3, chosen, busy), OfAttempt, 3, 3, 3},
		{"two engines are busy, and one drains", append(times(2, chosen, busy), chosen, moved), OfAttempt, 3, 3, 3},
		{"an engine refuses the request", []Event{chosen, fell(Headed, Rejected)}, OfAttempt, 1, 1, 0},
		{"an engine does not have the model any more", []Event{chosen, unlisted, chosen}, goesOn, 2, 2, 0},
		{"no engine does", []Event{chosen, unlisted, chosen, unlisted, none}, OfAttempt, 2, 2, 0},
		{"as many were asked as may be", times(8, chosen, unlisted), OfAttempt, 8, 8, 0},
		{"an engine fails", []Event{chosen, fell(Headed, Erred)}, OfAttempt, 1, 1, 1},
		{"an engine cannot do what it asks for", []Event{chosen, fell(Headed, Unable)}, OfAttempt, 1, 1, 1},
		{"an engine breaks off", []Event{chosen, fell(Sent, Broke)}, OfAttempt, 1, 1, 1},
		{"an engine breaks off in its answer", []Event{chosen, fell(Headed, Broke)}, OfAttempt, 1, 1, 1},
		{"an engine is silent", []Event{chosen, fell(Sent, Silent)}, OfAttempt, 1, 1, 1},
		{"an engine is drained", []Event{chosen, moved, chosen}, goesOn, 2, 2, 1},
		{"an engine lacks the endpoint", []Event{chosen, lacks, chosen}, goesOn, 2, 2, 0},
		{"eight engines lack the endpoint", times(8, chosen, lacks), OfRanks, 8, 8, 0},
		{"seven do, and one is busy", append(times(7, chosen, lacks), chosen, busy), OfAttempt, 8, 8, 1},
		{"a kept-alive connection ended", []Event{chosen, stale}, goesOn, 1, 2, 0},
		{"the new one ends, too", []Event{chosen, stale, fell(Sent, Broke)}, OfAttempt, 1, 2, 1},
		{"no new one can be made", []Event{chosen, stale, unreached}, OfAttempt, 1, 2, 1},
		{"over the new one the engine says that it is busy", []Event{chosen, stale, busy, chosen}, goesOn, 2, 3, 1},
		{"over the new one it drains", []Event{chosen, stale, moved, chosen}, goesOn, 2, 3, 1},
		{"another engine's connection ended, too", []Event{chosen, stale, busy, chosen, stale}, goesOn, 2, 4, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			var w onePassed
			last := w.tell(t, begins)
			for _, e := range row.events {
				last = w.tell(t, e)
			}
			got := goesOn
			if x := last[len(last)-1]; x.Kind == Fail {
				got = x.Error
			}
			require.Equal(t, row.with, got, "%+v", last)
			require.Equal(t, []int{row.engines, row.calls, row.failures}, []int{w.engines, w.calls, w.failures})
		})
	}
}

// The failure that a client is told of is the last one that counts.
func TestWhichFailureCounts(t *testing.T) {
	for name, row := range map[string]struct {
		first, second CallEnd
		recalls       bool
	}{
		"an engine that lacks the endpoint":         {CallEnd{Progress: Headed, Reason: Busy}, CallEnd{Progress: Headed, Reason: Lacks}, true},
		"an engine that died at the second attempt": {CallEnd{Progress: Sent, Reason: Stale}, CallEnd{Reason: Unreachable}, true},
		"an engine that is busy then":               {CallEnd{Progress: Sent, Reason: Stale}, CallEnd{Progress: Headed, Reason: Busy}, false},
		"another engine that is busy":               {CallEnd{Progress: Headed, Reason: Busy}, CallEnd{Progress: Headed, Reason: Busy}, false},
	} {
		var w onePassed
		w.tell(t, begins)
		w.tell(t, Event{Kind: Chosen})
		row.first.Call, row.second.Call = Sole, Sole
		w.tell(t, Event{Kind: CallFailed, End: row.first})
		if w.life.state == Choosing {
			w.tell(t, Event{Kind: Chosen})
		}
		require.Equal(t, row.recalls, slices.Contains(w.tell(t, Event{Kind: CallFailed, End: row.second}), Effect{Kind: Recall}), name)
	}
}
