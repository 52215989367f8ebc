package lifecycle

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// faulty is the end of a call whose engine says that it failed; broken that of one whose connection
// broke.
func faulty(engine string) Event {
	return Event{Kind: CallFailed, Engine: engine, Faulty: true, End: CallEnd{Call: Decode, Progress: Through, Reason: Failed, Open: true}}
}

func broken(engine string, down ...string) Event {
	return Event{Kind: CallFailed, Engine: engine, BrokenConn: BrokenConn{Engine: engine}, Down: down,
		End: CallEnd{Call: Decode, Progress: Through, Reason: Broke, Open: true}}
}

// A request is stopped when two engines failed at it, or died under it, and not before.
func TestWhenARequestIsTakenForWhatBreaksEngines(t *testing.T) {
	for _, row := range []struct {
		name  string
		falls []Event
		stops bool // with the last one
	}{
		{"one engine says 500", []Event{faulty("decode a")}, false},
		{"a second one says 500", []Event{faulty("decode a"), faulty("decode b")}, true},
		{"the same one says 500 twice", []Event{faulty("decode a"), faulty("decode a")}, true},
		{"a connection breaks", []Event{broken("decode a")}, false},
		{"two connections break, and both engines live", []Event{broken("decode a"), broken("decode b")}, false},
		{"two connections break, and the first engine died", []Event{broken("decode a"), broken("decode b", "decode a")}, true},
		{"the same engine's connections break", []Event{broken("decode a"), broken("decode a", "decode a")}, false},
		{"an engine of each side dies", []Event{broken("prefill a"), broken("decode b", "prefill a")}, false},
		{"a connection breaks after a 500", []Event{faulty("decode a"), broken("decode b")}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			var l, streamed Lifecycle
			for i := range row.falls {
				last := i == len(row.falls)-1
				l = coupledAfter(l)
				got := l.Step(row.falls[i], nil)
				pause := got[len(got)-1]
				require.Equal(t, Pause, pause.Kind)
				require.Equal(t, last && row.stops, pause.Retry == Retry{}, "before the answer has begun")

				streamed = coupledAfter(streamed)
				streamed.Step(Event{Kind: First}, nil)
				got = streamed.Step(row.falls[i], nil)
				want := GoOn
				if last && row.stops {
					want = BreakOff
				}
				require.Equal(t, want, got[len(got)-1].Kind, "while it flows")
			}
		})
	}
}

// coupledAfter is a life whose calls are under way again, with what it remembers.
func coupledAfter(l Lifecycle) Lifecycle {
	next := coupled()
	next.tries = l.tries
	return next
}

// How attempts count, by what they come to.
func TestHowAttemptsCount(t *testing.T) {
	for _, row := range []struct {
		why        Reason
		mostLosses int
		want       []Retry
	}{
		{Silent, 0, []Retry{{Budget: Counted, N: 1}, {Budget: Counted, N: 2}, {Budget: Counted, N: 3}}},
		{Unreachable, 0, []Retry{{Budget: OfUnsent, N: 1}, {Budget: OfUnsent, N: 2}}},
		{Stale, 0, []Retry{{Budget: Freely}, {Budget: Counted, N: 1}, {Budget: Counted, N: 2}}},
		{Preempted, 2, []Retry{{Budget: Freely, Pause: 1}, {Budget: Freely, Pause: 2}, {}}},
		{Paused, 0, []Retry{
			{Budget: Freely, Pause: 1}, {Budget: Freely, Pause: 2}, {Budget: Counted, N: 1}, {Budget: Counted, N: 2},
		}},
		{Stuck, 0, []Retry{{Budget: Freely}, {Budget: Freely}}}, // the budget was asked before
		{Unable, 0, []Retry{{}}},
	} {
		l := coupled()
		for i, want := range row.want {
			progress := Headed
			switch {
			case row.why == Stale:
				progress = Sent
			case row.why < Broke:
				progress = Unsent
			}
			got := l.Step(Event{Kind: CallFailed, MostLosses: row.mostLosses, End: CallEnd{Call: Decode, Progress: progress, Reason: row.why}}, nil)
			require.Equal(t, Effect{Kind: Pause, Retry: want}, got[len(got)-1], "%d of %d", i, row.why)
			l = coupledAfter(l)
		}
	}
	l := Lifecycle{}
	for i, want := range []Retry{
		{Budget: Counted, N: 1, Pause: 1}, {Budget: Counted, N: 1, Pause: 2}, {Budget: Counted, N: 1, Pause: 3},
		{Budget: Counted, N: 1}, {Budget: Counted, N: 2},
	} {
		for _, e := range []Event{{Kind: Begun}, {Kind: NoLocal}, {Kind: Turn}} {
			l.Step(e, nil)
		}
		got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Prefill, Progress: Headed, Reason: Busy, Kept: true}}, nil)
		require.Equal(t, want, got[len(got)-1].Retry, "refusal %d of a prefill engine", i)
		l = Lifecycle{tries: l.tries}
	}
}

// After a connection that had ended unseen all calls of a request dial, whatever becomes of it, and
// the rank is not shunned. A request under which engines die does not get another one for that.
func TestAStaleConnectionIsNoAttempt(t *testing.T) {
	stale := Event{Kind: CallFailed, BrokenConn: BrokenConn{Engine: "decode a"}, End: CallEnd{Call: Decode, Progress: Sent, Reason: Stale}}
	l := coupledAfter(Lifecycle{})
	require.False(t, l.NeedsNewConnections())
	dst := l.Step(stale, nil)
	require.NotContains(t, dst, Effect{Kind: Avoid})
	require.Equal(t, Effect{Kind: Pause, Retry: Retry{Budget: Freely}}, dst[len(dst)-1])
	require.True(t, l.NeedsNewConnections())
	l = coupledAfter(l)
	l.Step(Event{Kind: First}, nil)
	l.Step(broken("decode b"), nil)
	l.Step(Event{Kind: Begun}, nil)
	require.True(t, l.NeedsNewConnections(), "its answer was lost, and goes on")

	l = coupledAfter(Lifecycle{})
	l.Step(broken("decode b"), nil)
	l = coupledAfter(l)
	stale.Down = []string{"decode b"}
	dst = l.Step(stale, nil)
	require.Equal(t, Effect{Kind: Pause}, dst[len(dst)-1])
}

// Engines whose lists have just changed cost no attempt, and they are not asked without end.
func TestEnginesThatDoNotHaveTheModelCostNoAttempt(t *testing.T) {
	var l Lifecycle
	for i := range uncountedWithoutModel + 1 {
		for _, e := range []Event{{Kind: Begun}, {Kind: NoLocal}, {Kind: Turn}} {
			l.Step(e, nil)
		}
		got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Prefill, Progress: Headed, Reason: Unlisted, Kept: true}}, nil)
		require.Contains(t, got, Effect{Kind: Settle, Resource: Lease, Disposition: Free}, "the engine is not blamed")
		want := Retry{Budget: Freely, Pause: i + 1}
		if i == uncountedWithoutModel {
			want = Retry{}
		}
		require.Equal(t, want, got[len(got)-1].Retry)
		l = Lifecycle{tries: l.tries}
	}
	require.Zero(t, l.tries.counted)
}

// An engine that says again and again that it is not there gets the request no more.
func TestAnEngineThatIsNeverThereIsShunned(t *testing.T) {
	var l Lifecycle
	for i := range uncountedPauses + 1 {
		l = coupledAfter(l)
		got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Headed, Reason: Paused}}, nil)
		require.Equal(t, i == uncountedPauses, slices.Contains(got, Effect{Kind: Avoid}))
	}
	l = Lifecycle{}
	for i := range uncountedPauses + 1 {
		for _, e := range []Event{{Kind: Begun}, {Kind: NoLocal}, {Kind: Turn}} {
			l.Step(e, nil)
		}
		got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Prefill, Progress: Headed, Reason: Paused, Kept: true}}, nil)
		require.Equal(t, i == uncountedPauses, slices.Contains(got, Effect{Kind: Settle, Resource: Lease, Disposition: Refuse}))
		l = Lifecycle{tries: l.tries}
	}
}

// It is settled once whose a 500 was, and by what came after it.
func TestWhoseA500Was(t *testing.T) {
	l := coupled()
	l.Step(faulty("decode a"), nil)
	l = coupledAfter(l)
	require.Contains(t, l.Step(Event{Kind: First}, nil), Effect{Kind: Resolve, Blame: Engine}, "another engine answered")
	l = coupledAfter(Lifecycle{})
	l.Step(faulty("decode a"), nil)
	l = coupledAfter(l)
	require.Contains(t, l.Step(faulty("decode b"), nil), Effect{Kind: Resolve, Blame: Nobody}, "another one failed at it, too")
	require.NotContains(t, l.Step(Event{Kind: GivenUp}, nil), Effect{Kind: Resolve}, "that was settled")
	l = coupledAfter(Lifecycle{})
	l.Step(faulty("decode a"), nil)
	require.Contains(t, l.Step(Event{Kind: GivenUp}, nil), Effect{Kind: Resolve, Blame: Disputed}, "no other engine had it")
}

// A rank that computes the prompt itself and refuses a request has taken nothing, as a prefill
// engine that refuses it: the first few are no attempts. A rank that was to pull KV has cost a
// prefill.
func TestRefusalsOfRanksThatDoBothAreNoAttempts(t *testing.T) {
	for _, why := range []Reason{Throttled, Busy} {
		l := Lifecycle{}
		for i, want := range []Retry{
			{Budget: Counted, N: 1, Pause: 1}, {Budget: Counted, N: 1, Pause: 2}, {Budget: Counted, N: 1, Pause: 3},
			{Budget: Counted, N: 1}, {Budget: Counted, N: 2},
		} {
			for _, e := range []Event{{Kind: Begun}, {Kind: NoLocal}, {Kind: Turn, Bind: Aggregated}, {Kind: Bound}} {
				l.Step(e, nil)
			}
			got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Headed, Reason: why}}, nil)
			require.Equal(t, want, got[len(got)-1].Retry, "refusal %d", i)
			require.Contains(t, got, Effect{Kind: Avoid})
			l = Lifecycle{tries: l.tries}
		}
		l = coupledAfter(Lifecycle{})
		got := l.Step(Event{Kind: CallFailed, End: CallEnd{Call: Decode, Progress: Headed, Reason: why}}, nil)
		require.Equal(t, Retry{Budget: Counted, N: 1}, got[len(got)-1].Retry)
	}
}
