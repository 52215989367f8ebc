package lifecycle

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is told of a request until it stands where the questions begin. A late one is bound after its prefill, an early one before.
const (
	probing = "Begun; NoLocal; Turn; "
	pooled  = probing + "HandedOver; "
	opening = pooled + "Bound; "
	both    = "Begun; NoLocal; Turn Script=Early; Bound; "
)

// What happens if one thing happens while another is under way. Each answer stands in the tables of verdict.go, in owed.go and in the
// table of waits; here it is what the last event has done.
func TestWhatHappensIf(t *testing.T) {
	w := readWords(t)
	for _, q := range []struct{ question, told, done string }{
		{
			"the decode engine resets after its 200, and the client is leaving",
			opening + "Fell End.Leg=Decode End.Far=Headed End.Why=Broke End.Open Left",
			"Condemn Blame=Engine Leg=Decode, Settle Thing=KV How=DoubtOn, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Settle Thing=Doubted How=Discard, " +
				"Settle Thing=Holder How=Back, Fail Error=OfClient",
		},
		{
			"the same, where a second request for the hand-off would have the id of the first",
			probing + "HandedOver Named; Bound; Fell End.Leg=Decode End.Far=Headed End.Why=Broke End.Open Left",
			"Condemn Blame=Engine Leg=Decode, Settle Thing=KV How=DoubtOn, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Settle Thing=Doubted How=Orphan, " +
				"Settle Thing=Holder How=Back, Fail Error=OfClient",
		},
		{
			"the client leaves while the prefill engine computes",
			probing + "Fell End.Leg=Prefill End.Far=Sent End.Why=Left End.Kept Left",
			"Settle Thing=Lease How=Free, Settle Thing=Place How=Back, Settle Thing=Holder How=Back, Fail Error=OfClient",
		},
		{
			"it leaves while the hand-off waits in the pool",
			pooled + "Fell End.Leg=Prefill End.Far=Through End.Why=Left End.Kept Left",
			"Settle Thing=KV How=Discard, Settle Thing=Holder How=Back, Fail Error=OfClient",
		},
		{
			"a decode engine answers 503",
			opening + "Fell End.Leg=Decode End.Far=Headed End.Why=Busy",
			"Condemn Blame=Engine Leg=Decode, Settle Thing=KV How=Doubt, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"the hand-off is not offered again then: the prompt is prefilled anew",
			opening + "Fell End.Leg=Decode End.Far=Headed End.Why=Busy; Retried",
			"Attempt, TryLocal",
		},
		{
			"it answers 503 where a rejection has the prefill engine free the KV",
			opening + "Fell End.Leg=Decode End.Far=Headed End.Why=Busy End.Frees",
			"Condemn Blame=Engine Leg=Decode, Settle Thing=KV How=Free, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"the prefill engine refuses a request whose decode leg is under way",
			both + "Fell End.Leg=Prefill End.Far=Headed End.Why=Rejected",
			"Settle Thing=Slot How=Failing, Settle Thing=Call How=Failing, Settle Thing=Holder How=Back, Fail Error=OfAttempt",
		},
		{
			"the prefill engine is declared down during the probe, which is as if its connection broke",
			probing + "Fell End.Leg=Prefill End.Far=Sent End.Why=Broke End.Kept",
			"Settle Thing=Lease How=Lose, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"it is drained then",
			probing + "Fell End.Leg=Prefill End.Far=Sent End.Why=Moved End.Kept",
			"Settle Thing=Lease How=Free, Pause Retry.Budget=Freely",
		},
		{
			"the scope is handed over between the slot and the first byte",
			opening + "Fell End.Leg=Decode End.Far=Unsent End.Why=NotOurs",
			"Settle Thing=Slot How=Cancelled, Settle Thing=Call How=Cancelled, Shun, Pause Retry.Budget=Freely",
		},
		{
			"the same hand-off then waits for another slot",
			opening + "Fell End.Leg=Decode End.Far=Unsent End.Why=NotOurs; Retried; Bound",
			"SendDecode Until=ByFirstEvent",
		},
		{
			"the first event comes: the hand-off is not held from then on, and so it cannot be used again",
			opening + "First",
			"Settle Thing=KV How=Free, Settle Thing=Holder How=Back, AnswerIt",
		},
		{
			"the connection breaks in the middle of an answer",
			opening + "First; Fell End.Leg=Decode End.Far=Through End.Why=Broke End.Open",
			"Condemn Blame=Engine Leg=Decode, Settle Thing=Slot How=Failing, Settle Thing=Call How=Failing, Shun, GoOn",
		},
		{
			"the answer can go on: the prompt is prefilled anew, and no other dispatcher is asked",
			opening + "First; Fell End.Leg=Decode End.Far=Through End.Why=Broke End.Open; Begun",
			"Attempt, TryLocal",
		},
		{
			"it cannot",
			opening + "First; Fell End.Leg=Decode End.Far=Through End.Why=Broke End.Open; GivenUp",
			"BreakOff",
		},
		{
			"the client left, and that is why it broke",
			opening + "First; Fell End.Leg=Decode End.Far=Through End.Why=Left End.Open Left",
			"Settle Thing=Slot How=Cancelled, Settle Thing=Call How=Cancelled, BreakOff",
		},
		{
			"SGLang's answer is whole, and its prefill engine has not answered: the slot is given back first",
			both + "First; Ends",
			"Acclaim, Settle Thing=Slot How=Finish, Settle Thing=Call How=Finish, Confirm",
		},
		{
			"it does not confirm the answer in time, goes down, or the client leaves",
			both + "First; Ends; Fell End.Why=Unconfirmed",
			"BreakOff",
		},
		{
			"the hand-off's hold ends in the pool",
			pooled + "Fell End.Leg=Prefill End.Far=Through End.Why=NoRank End.Kept",
			"Settle Thing=KV How=Discard, Settle Thing=Holder How=Back, Fail Error=OfAttempt",
		},
		{
			"its slot comes after its deadline",
			opening + "Fell End.Leg=Decode End.Far=Unsent End.Why=Expired",
			"Settle Thing=KV How=Orphan, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"it is not certain that the KV was kept until the first event",
			opening + "Fell End.Leg=Decode End.Far=Through End.Why=Disbelieved",
			"Settle Thing=KV How=Free, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Pause Retry.Budget=Counted Retry.N=1",
		},
		{
			"the callback never comes",
			both + "Fell End.Leg=Decode End.Far=Sent End.Why=Uncalled",
			"Condemn Blame=Engine Leg=Decode, Settle Thing=Slot How=Failing, " +
				"Settle Thing=Call How=Failing, Shun, Pause Retry.Budget=Counted Retry.N=1",
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

// The same of requests whose two legs are under way at once.
func TestWhatHappensToTwoLegsIf(t *testing.T) {
	w := readWords(t)
	for _, q := range []struct{ question, dialect, told, done string }{
		{
			"the client leaves while SGLang's whole answer waits for its prefill engine",
			"sglang", "ProbeDue; Began Prompt=5; Confirmed; DecodeOver; Unwanted",
			"AbortPrefill, HangUp",
		},
		{
			"that prefill leg then ends",
			"sglang", "ProbeDue; Began Prompt=5; Confirmed; DecodeOver; Unwanted; PrefillFell End.Far=Sent End.Why=HungUp",
			"Settle Thing=Lease How=Free",
		},
		{
			"the prefill engine goes down meanwhile",
			"sglang", "ProbeDue; Began Prompt=5; Confirmed; DecodeOver; PrefillFell End.Far=Sent End.Why=Broke",
			"Settle Thing=Lease How=Refuse",
		},
		{
			"a prefill engine is full that decode engines know by name: no other one may take its place",
			"push", "ProbeDue; PrefillFell End.Far=Headed End.Why=Busy End.Kept Again",
			"Settle Thing=Lease How=Refuse, EndDecode",
		},
		{
			"one is full that was not named yet",
			"layerwise", "CalledBack; ProbeDue; PrefillFell End.Far=Headed End.Why=Busy Again",
			"Settle Thing=Lease How=Refuse, Seek Until=ByProbe",
		},
		{
			"the prefill engine refuses",
			"sglang", "ProbeDue; PrefillFell End.Far=Headed End.Why=Rejected",
			"Settle Thing=Lease How=Free, AbortDecode, EndDecode",
		},
		{
			"it refuses, and the decode engine keeps blocks for the KV",
			"layerwise", "CalledBack; ProbeDue; PrefillFell End.Far=Headed End.Why=Rejected",
			"Settle Thing=Lease How=Free, EndDecode",
		},
		{
			"the decode leg ends for that",
			"layerwise", "CalledBack; ProbeDue; PrefillFell End.Far=Headed End.Why=Rejected; DecodeFell Reason=Died",
			"StopWaiting, Strand, Forget, CountLoss",
		},
		{
			"the prefill engine breaks after the decode engine did: the decode engine's failure is the one that counts",
			"sglang", "ProbeDue; DecodeFell Reason=Died; PrefillFell End.Far=Sent End.Why=Broke",
			"Settle Thing=Lease How=Refuse",
		},
		{
			"the callback never comes",
			"layerwise", "Overdue End.Leg=Decode End.Far=Sent End.Why=Uncalled",
			"EndDecode",
		},
		{
			"the client leaves before the callback",
			"layerwise", "ClientGone End.Why=Left",
			"EndDecode",
		},
		{
			"the callback comes after the client has left",
			"layerwise", "ClientGone End.Why=Left; DecodeFell Reason=Died; CalledLate",
			"DrainBeside Until=ByProbe",
		},
		{
			"it comes after the grace, or never",
			"layerwise", "ClientGone End.Why=Left; DecodeFell Reason=Died; Uncallable",
			"Settle Thing=Lease How=Free",
		},
	} {
		l := newPair(dialects[q.dialect], false, false)
		var did string
		for told := range strings.SplitSeq(q.told, "; ") {
			var e Event
			w.set(t, told, &e)
			did = w.done(l.step(e, nil))
		}
		require.Equal(t, q.done, did, q.question)
	}
}
