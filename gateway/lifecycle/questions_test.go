package lifecycle

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is told of a request until it stands where the questions begin. A late one is bound after
// its prefill, an early one before.
const (
	probing = "Begun; NoLocal; Turn; "
	pooled  = probing + "HandedOver; "
	opening = pooled + "Bound; "
	both    = "Begun; NoLocal; Turn Bind=Early; Bound; "
)

// What happens if one thing happens while another is under way. Each answer stands in the tables of
// verdict.go, in held.go and in the table of waits; here it is what the last event has done.
func TestWhatHappensIf(t *testing.T) {
	w := readWords(t)
	for _, q := range []struct{ question, told, done string }{
		{
			"the decode engine resets after its 200, and the client is leaving",
			opening + "CallFailed End.Call=Decode End.Progress=Headed End.Reason=Broke End.Open ClientLeft",
			"ReportFailure Blame=Engine Call=Decode, Settle Resource=KV Disposition=MaybeRunning, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Settle Resource=MaybeReadKV Disposition=Discard, " +
				"Settle Resource=LeaseOwner Disposition=Back, Fail Error=OfClient",
		},
		{
			"the same, where a second request for the hand-off would have the id of the first",
			probing + "HandedOver ReusesRequestID; Bound; CallFailed End.Call=Decode End.Progress=Headed End.Reason=Broke End.Open ClientLeft",
			"ReportFailure Blame=Engine Call=Decode, Settle Resource=KV Disposition=MaybeRunning, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Settle Resource=MaybeReadKV Disposition=Orphan, " +
				"Settle Resource=LeaseOwner Disposition=Back, Fail Error=OfClient",
		},
		{
			"the client leaves while the prefill engine computes",
			probing + "CallFailed End.Call=Prefill End.Progress=Sent End.Reason=Left End.Kept ClientLeft",
			"Settle Resource=Lease Disposition=Free, Settle Resource=Permit Disposition=Back, " +
				"Settle Resource=LeaseOwner Disposition=Back, Fail Error=OfClient",
		},
		{
			"it leaves while the hand-off waits in the pool",
			pooled + "CallFailed End.Call=Prefill End.Progress=Through End.Reason=Left End.Kept ClientLeft",
			"Settle Resource=KV Disposition=Discard, Settle Resource=LeaseOwner Disposition=Back, Fail Error=OfClient",
		},
		{
			"a decode engine answers 503",
			opening + "CallFailed End.Call=Decode End.Progress=Headed End.Reason=Busy",
			"ReportFailure Blame=Engine Call=Decode, Settle Resource=KV Disposition=MaybeRead, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"the hand-off is not offered again then: the prompt is prefilled anew",
			opening + "CallFailed End.Call=Decode End.Progress=Headed End.Reason=Busy; Retried",
			"Attempt, TryLocal",
		},
		{
			"it answers 503 where a rejection has the prefill engine free the KV",
			opening + "CallFailed End.Call=Decode End.Progress=Headed End.Reason=Busy End.Frees",
			"ReportFailure Blame=Engine Call=Decode, Settle Resource=KV Disposition=Free, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"the prefill engine refuses a request whose decode leg is under way",
			both + "CallFailed End.Call=Prefill End.Progress=Headed End.Reason=Rejected",
			"Settle Resource=Slot Disposition=Failing, Settle Resource=Call Disposition=Failing, " +
				"Settle Resource=LeaseOwner Disposition=Back, Fail Error=OfAttempt",
		},
		{
			"the prefill engine is declared down during the probe, which is as if its connection broke",
			probing + "CallFailed End.Call=Prefill End.Progress=Sent End.Reason=Broke End.Kept",
			"Settle Resource=Lease Disposition=Lose, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"it is drained then",
			probing + "CallFailed End.Call=Prefill End.Progress=Sent End.Reason=Moved End.Kept",
			"Settle Resource=Lease Disposition=Free, Pause Retry.Budget=Freely",
		},
		{
			"the scope is handed over between the slot and the first byte",
			opening + "CallFailed End.Call=Decode End.Progress=Unsent End.Reason=NotOurs",
			"Settle Resource=Slot Disposition=Cancelled, Settle Resource=Call Disposition=Cancelled, Avoid, Pause Retry.Budget=Freely",
		},
		{
			"the same hand-off then waits for another slot",
			opening + "CallFailed End.Call=Decode End.Progress=Unsent End.Reason=NotOurs; Retried; Bound",
			"SendDecode Until=ByFirstEvent",
		},
		{
			"the first event comes: the hand-off is not held from then on, and so it cannot be used again",
			opening + "First",
			"Settle Resource=KV Disposition=Free, Settle Resource=LeaseOwner Disposition=Back, AnswerIt",
		},
		{
			"the connection breaks in the middle of an answer",
			opening + "First; CallFailed End.Call=Decode End.Progress=Through End.Reason=Broke End.Open",
			"ReportFailure Blame=Engine Call=Decode, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, GoOn",
		},
		{
			"the answer can go on: the prompt is prefilled anew, and no other dispatcher is asked",
			opening + "First; CallFailed End.Call=Decode End.Progress=Through End.Reason=Broke End.Open; Begun",
			"Attempt, TryLocal",
		},
		{
			"it cannot",
			opening + "First; CallFailed End.Call=Decode End.Progress=Through End.Reason=Broke End.Open; GivenUp",
			"BreakOff",
		},
		{
			"the client left, and that is why it broke",
			opening + "First; CallFailed End.Call=Decode End.Progress=Through End.Reason=Left End.Open ClientLeft",
			"Settle Resource=Slot Disposition=Cancelled, Settle Resource=Call Disposition=Cancelled, BreakOff",
		},
		{
			"SGLang's answer is whole, and its prefill engine has not answered: the slot is given back first",
			both + "First; Ends",
			"ReportSuccess, Settle Resource=Slot Disposition=Finish, Settle Resource=Call Disposition=Finish, Confirm",
		},
		{
			"it does not confirm the answer in time, goes down, or the client leaves",
			both + "First; Ends; CallFailed End.Reason=Unconfirmed",
			"BreakOff",
		},
		{
			"the hand-off's hold ends in the pool",
			pooled + "CallFailed End.Call=Prefill End.Progress=Through End.Reason=NoRank End.Kept",
			"Settle Resource=KV Disposition=Discard, Settle Resource=LeaseOwner Disposition=Back, Fail Error=OfAttempt",
		},
		{
			"its slot comes after its deadline",
			opening + "CallFailed End.Call=Decode End.Progress=Unsent End.Reason=Expired",
			"Settle Resource=KV Disposition=Orphan, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"it is not certain that the KV was kept until the first event",
			opening + "CallFailed End.Call=Decode End.Progress=Through End.Reason=MaybeWrongKV",
			"Settle Resource=KV Disposition=Free, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"the callback never comes",
			both + "CallFailed End.Call=Decode End.Progress=Sent End.Reason=Uncalled",
			"ReportFailure Blame=Engine Call=Decode, Settle Resource=Slot Disposition=Failing, " +
				"Settle Resource=Call Disposition=Failing, Avoid, Pause Retry.Budget=Counted Retry.N=1",
		},
	} {
		var l Lifecycle
		var did string
		for told := range strings.SplitSeq(q.told, "; ") {
			var e Event
			w.set(t, told, &e)
			did = w.done(l.Step(e, nil))
		}
		require.Equal(t, q.done, did, q.question)
	}
}

// The same of requests whose two calls are under way at once.
func TestWhatHappensToTwoLegsIf(t *testing.T) {
	w := readWords(t)
	for _, q := range []struct{ question, connector, told, done string }{
		{
			"the client leaves while SGLang's whole answer waits for its prefill engine",
			"sglang", "ProbeDue; Began Prompt=5; Confirmed; DecodeOver; Unwanted",
			"AbortPrefill Until=ByGrace, HangUp",
		},
		{
			"that prefill leg then ends",
			"sglang", "ProbeDue; Began Prompt=5; Confirmed; DecodeOver; Unwanted; PrefillFailed End.Progress=Sent End.Reason=HungUp",
			"Settle Resource=Lease Disposition=Free",
		},
		{
			"the prefill engine goes down meanwhile",
			"sglang", "ProbeDue; Began Prompt=5; Confirmed; DecodeOver; PrefillFailed End.Progress=Sent End.Reason=Broke",
			"Settle Resource=Lease Disposition=Refuse",
		},
		{
			"a prefill engine is full that decode engines know by name: no other one may take its place",
			"sglang", "ProbeDue; PrefillFailed End.Progress=Headed End.Reason=Busy Again",
			"Settle Resource=Lease Disposition=Refuse, AbortDecode, EndDecode",
		},
		{
			"one is full that was not named yet",
			"layerwise", "CalledBack; ProbeDue; PrefillFailed End.Progress=Headed End.Reason=Busy Again",
			"Settle Resource=Lease Disposition=Refuse, Seek Until=ByProbe",
		},
		{
			"the prefill engine refuses",
			"sglang", "ProbeDue; PrefillFailed End.Progress=Headed End.Reason=Rejected",
			"Settle Resource=Lease Disposition=Free, AbortDecode, EndDecode",
		},
		{
			"it refuses, and the decode engine keeps blocks for the KV",
			"layerwise", "CalledBack; ProbeDue; PrefillFailed End.Progress=Headed End.Reason=Rejected",
			"Settle Resource=Lease Disposition=Free, EndDecode",
		},
		{
			"the decode leg ends for that",
			"layerwise", "CalledBack; ProbeDue; PrefillFailed End.Progress=Headed End.Reason=Rejected; DecodeFailed Reason=Died",
			"StopWaiting, LeakBlocks, Forget, CountLoss",
		},
		{
			"the prefill engine breaks after the decode engine did: the decode engine's failure is the one that counts",
			"sglang", "ProbeDue; DecodeFailed Reason=Died; PrefillFailed End.Progress=Sent End.Reason=Broke",
			"Settle Resource=Lease Disposition=Refuse",
		},
		{
			"the callback never comes",
			"layerwise", "Overdue End.Call=Decode End.Progress=Sent End.Reason=Uncalled",
			"EndDecode",
		},
		{
			"the client leaves before the callback",
			"layerwise", "ClientGone End.Reason=Left",
			"EndDecode",
		},
		{
			"the callback comes after the client has left",
			"layerwise", "ClientGone End.Reason=Left; DecodeFailed Reason=Died; CalledLate",
			"DrainBeside Until=ByProbe",
		},
		{
			"it comes after the grace, or never",
			"layerwise", "ClientGone End.Reason=Left; DecodeFailed Reason=Died; Uncallable",
			"Settle Resource=Lease Disposition=Free",
		},
	} {
		l := newPair(traitsByName[q.connector], false, false)
		var did string
		for told := range strings.SplitSeq(q.told, "; ") {
			var e Event
			w.set(t, told, &e)
			did = w.done(l.step(e, nil))
		}
		require.Equal(t, q.done, did, q.question)
	}
}
