package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// ends calls f with every end that a call can have.
func ends(f func(e CallEnd, said Disposition)) {
	for why := range reasons {
		for progress := Unsent; progress <= Through; progress++ {
			for flags := range 16 {
				e := CallEnd{Progress: progress, Reason: why, Kept: flags&1 > 0, Frees: flags&2 > 0, Moved: flags&4 > 0, Open: flags&8 > 0}
				f(e, prefills[why].kv[progress])
				e.Call = Decode
				f(e, decodes[why].kv[progress])
			}
		}
	}
}

func TestNoVerdictOffersKVThatMayHaveBeenRead(t *testing.T) {
	ends(func(e CallEnd, _ Disposition) {
		v := e.Verdict()
		if v.KV == Keep {
			require.Equal(t, Decode, e.Call, "%+v", e)
			require.Equal(t, Unsent, e.Progress, "%+v", e)
		}
		mayHaveRead := e.Call == Decode && (e.Progress == Sent || e.Progress == Headed) && !e.Frees
		if mayHaveRead && e.Reason != Uncalled && e.Reason != Misplaced && e.Reason != Unbegun {
			require.Contains(t, []Disposition{MaybeRead, MaybeRunning}, v.KV, "%+v", e)
		}
	})
}

func TestWhatAnEngineMayHoldIsNeverCalledFree(t *testing.T) {
	ends(func(e CallEnd, _ Disposition) {
		v := e.Verdict()
		switch {
		case e.Call == Prefill && e.Kept && e.Progress == Through: // it has handed the KV over, and somebody must fetch it
			require.Contains(t, []Disposition{Orphan, Discard, Free}, v.KV, "%+v", e)
			if v.KV == Free {
				require.Contains(t, []Reason{Unconfirmed, Incomplete}, e.Reason, "%+v", e)
			}
		case e.Call == Prefill && e.Kept && e.Reason == Broke && e.Progress >= Sent,
			e.Call == Prefill && e.Kept && e.Reason == Silent && e.Progress >= Sent:
			require.Contains(t, []Disposition{Lose, Orphan}, v.KV, "%+v", e)
		case e.Call == Prefill && !e.Kept:
			require.Contains(t, []Disposition{Free, Refuse}, v.KV, "%+v", e)
		}
		if v.KV == Refuse || v.KV == Lose {
			require.Equal(t, Prefill, e.Call, "only a prefill engine has the lease: %+v", e)
		}
		require.NotEqual(t, unsaid, v.KV)
	})
}

// What is not an engine's fault is not held against one.
func TestNobodyIsBlamedForWhatDidNotFail(t *testing.T) {
	ends(func(e CallEnd, _ Disposition) {
		if v := e.Verdict(); v.Next == Over && e.Reason != Unusable || // half of it is out, and it is the engine's all the same
			v.Next == Anew || v.Next == NoRoom || v.Next == Ask {
			require.Equal(t, Nobody, v.Blame, "%+v", e)
		}
		if e.Reason < Unreachable || e.Moved {
			require.Equal(t, Nobody, e.Verdict().Blame, "%+v", e)
		}
	})
}

func TestVerdicts(t *testing.T) {
	for _, r := range []struct {
		what string
		end  CallEnd
		want Consequences
	}{
		{"the client leaves before a probe is sent", CallEnd{Prefill, Unsent, Left, true, false, false, false}, Consequences{Free, Over, Nobody}},
		{"the client leaves while a probe runs, which is aborted", CallEnd{Prefill, Sent, Left, true, false, false, false}, Consequences{Free, Over, Nobody}},
		{"the client leaves while a probe is answered", CallEnd{Prefill, Headed, Left, true, false, false, false}, Consequences{Orphan, Over, Nobody}},
		{"the client leaves in the pool", CallEnd{Prefill, Through, Left, true, false, false, false}, Consequences{Discard, Over, Nobody}},
		{"a prefill engine cannot be reached", CallEnd{Prefill, Unsent, Unreachable, true, false, false, false}, Consequences{Refuse, Unreached, Nobody}},
		{"the connection of a probe was stale", CallEnd{Prefill, Sent, Stale, true, false, false, false}, Consequences{Orphan, Redial, Nobody}},
		{"the connection of a decode was stale, and the KV may have been read", CallEnd{Decode, Sent, Stale, false, false, false, false}, Consequences{MaybeRunning, Redial, Nobody}},
		{"no byte of a decode was written to it", CallEnd{Decode, Unsent, Stale, false, false, false, false}, Consequences{Keep, Redial, Nobody}},
		{"a prefill engine dies with a probe", CallEnd{Prefill, Sent, Broke, true, false, false, false}, Consequences{Lose, Again, Nobody}},
		{"one that keeps nothing does", CallEnd{Prefill, Sent, Broke, false, false, false, false}, Consequences{Refuse, Again, Nobody}},
		{"a prefill engine is full", CallEnd{Prefill, Headed, Busy, true, false, false, false}, Consequences{Refuse, Untaken, Nobody}},
		{"a prefill engine fails with 500", CallEnd{Prefill, Headed, Failed, true, false, false, false}, Consequences{Refuse, Again, Disputed}},
		{"a prefill engine refuses the request", CallEnd{Prefill, Headed, Rejected, true, false, false, false}, Consequences{Free, Over, Nobody}},
		{"a region loses its ranks while the hand-off is in the pool", CallEnd{Prefill, Through, RanksLost, true, false, false, false}, Consequences{Orphan, Anew, Nobody}},
		{"another proxy gets the group then", CallEnd{Prefill, Through, Unowned, true, false, false, false}, Consequences{Orphan, Ask, Nobody}},
		{"the scope is lost before the decode is written", CallEnd{Decode, Unsent, NotOurs, false, false, false, false}, Consequences{Keep, Anew, Nobody}},
		{"a decode engine cannot be reached", CallEnd{Decode, Unsent, Unreachable, false, false, false, false}, Consequences{Keep, Unreached, Engine}},
		{"a decode engine dies before its first event", CallEnd{Decode, Sent, Broke, false, false, false, false}, Consequences{MaybeRunning, Again, Engine}},
		{"the core of a rank that does both stands still", CallEnd{Decode, Sent, Stuck, false, false, false, false}, Consequences{MaybeRunning, Granted, Wedged}},
		{"a decode engine is silent", CallEnd{Decode, Sent, Silent, false, false, false, false}, Consequences{MaybeRunning, Again, Wedged}},
		{"a decode engine refuses, and the KV may still be held", CallEnd{Decode, Headed, Rejected, false, false, false, false}, Consequences{MaybeRead, Over, Nobody}},
		{"it refuses, and has the KV freed", CallEnd{Decode, Headed, Rejected, false, true, false, false}, Consequences{Free, Over, Nobody}},
		{"it says so in an event of an answer that it has begun", CallEnd{Decode, Headed, Rejected, false, true, false, true}, Consequences{MaybeRunning, Over, Nobody}},
		{"its rank drains at that moment, which changes nothing", CallEnd{Decode, Headed, Rejected, false, true, true, false}, Consequences{Free, Over, Nobody}},
		{"a drain ends a decode before its first event", CallEnd{Decode, Sent, HungUp, false, false, true, false}, Consequences{MaybeRunning, Anew, Nobody}},
		{"a decode engine is out of KV memory", CallEnd{Decode, Headed, Preempted, false, false, false, false}, Consequences{MaybeRead, NoRoom, Nobody}},
		{"a group re-forms, so that nobody frees the KV", CallEnd{Decode, Headed, Paused, false, true, false, false}, Consequences{MaybeRead, Held, Nobody}},
		{"that of a prefill engine does, which has read nothing", CallEnd{Prefill, Headed, Paused, true, false, false, false}, Consequences{Free, Held, Nobody}},
		{"that of an engine that serves a request alone does", CallEnd{Sole, Headed, Paused, false, false, false, false}, Consequences{Free, Again, Nobody}},
		{"a prefill engine does not have the model any more", CallEnd{Prefill, Headed, Unlisted, true, false, false, false}, Consequences{Free, NoModel, Nobody}},
		{"a decode engine does not", CallEnd{Decode, Headed, Unlisted, false, false, false, false}, Consequences{MaybeRead, NoModel, Nobody}},
		{"it does not, and has the KV freed", CallEnd{Decode, Headed, Unlisted, false, true, false, false}, Consequences{Free, NoModel, Nobody}},
		{"an engine that serves a request alone does not", CallEnd{Sole, Headed, Unlisted, false, false, false, false}, Consequences{Free, NoModel, Nobody}},
		{"the KV was perhaps another prompt's", CallEnd{Decode, Through, MaybeWrongKV, false, false, false, false}, Consequences{Free, Again, Nobody}},
		{"the slot came too late", CallEnd{Decode, Unsent, Expired, false, false, false, false}, Consequences{Orphan, Again, Nobody}},
		{"a reset after the 200 and before an event", CallEnd{Decode, Headed, Broke, false, false, false, false}, Consequences{MaybeRunning, Again, Engine}},
	} {
		require.Equal(t, r.want, r.end.Verdict(), r.what)
	}
}

func TestReasonsOfStatuses(t *testing.T) {
	for status, want := range map[int]Reason{0: Erred, 302: Odd, 400: Rejected, 401: Rejected, 404: Rejected, 409: Rejected, 429: Throttled,
		500: Failed, 501: Unable, 502: Erred, 503: Busy, 504: Erred, 507: Odd} {
		require.Equal(t, want, ReasonOfStatus(status), "%d", status)
	}
}
