package live

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/receipt"
)

func TestADecisionSaysWhereAndWhy(t *testing.T) {
	prefill := &receipt.Prefill{Candidate: "p1:8000/0", Policy: "finish", Reason: "policy", Eligible: 4, Hit: 512, Prompt: 900}
	decode := &receipt.Decode{Rank: "d1:8000/3", Policy: "evenkeel", Stage: "subset", Able: 7, KVTokens: 1000, Fullest: 9000}
	for name, tt := range map[string]struct {
		r    receipt.Receipt
		want Decision
	}{
		"it has run": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended, Outcome: "ok", Model: "m", PromptTokens: 901, Waits: receipt.Waits{Pool: 3},
			Attempts: []receipt.Attempt{{Prefill: prefill, Decode: decode, Waits: receipt.Waits{Pool: 3}}}},
			Decision{"a", noon.UnixMilli(), "m", 901, "p1:8000/0", "d1:8000/3", 3, "ok",
				"Prefill policy finish chose among 4 engines. 512 tokens were thought to be cached there. Decode policy evenkeel chose among 7 ranks " +
					"with room. This one held 1,000 KV tokens, the fullest 9,000."}},
		"it runs": {receipt.Receipt{ID: "a", Arrival: noon, State: "pool", Model: "m", Attempts: []receipt.Attempt{{Prefill: prefill, Waits: receipt.Waits{Pool: 2}}}},
			Decision{"a", noon.UnixMilli(), "m", 900, "p1:8000/0", "", 2, "",
				"Prefill policy finish chose among 4 engines. 512 tokens were thought to be cached there."}},
		"it waits": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Pooled, Model: "m", Attempts: []receipt.Attempt{{State: receipt.Pooled, Since: 1200, Prefill: prefill, Waits: receipt.Waits{Pool: 2}}}},
			Decision{"a", noon.UnixMilli(), "m", 900, "p1:8000/0", "", 2 + 3800, "",
				"Prefill policy finish chose among 4 engines. 512 tokens were thought to be cached there."}},
		"nothing is decided": {receipt.Receipt{ID: "a", Arrival: noon, State: "queue", Model: "m"}, Decision{"a", noon.UnixMilli(), "m", 0, "", "", 0, "", "It is in this phase: queue."}},
		"it was tried twice, and the guard let it in": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended, Outcome: "ok",
			Attempts: []receipt.Attempt{
				{Prefill: prefill, Cause: "connection refused", Again: true},
				{Prefill: &receipt.Prefill{Candidate: "p2:8000/0", Policy: "finish", Reason: "affinity", Eligible: 3}, Decode: &receipt.Decode{Rank: "d", Policy: "brh", Stage: "guard", Able: 1}},
			}}, Decision{"a", noon.UnixMilli(), "", 900, "p2:8000/0", "d", 0, "ok",
			"It had 2 attempts or legs. The prefill engine was chosen by affinity among 3. It had waited longest. Decode policy brh chose among 1 " +
				"rank with room. This one held 0 KV tokens, the fullest 0."}},
		"a rank did both": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended, Outcome: "ok", Attempts: []receipt.Attempt{{
			Prefill: &receipt.Prefill{Candidate: "main of m+aggregated", Policy: "finish", Reason: "only", Eligible: 1}, Decode: decode,
		}}}, Decision{"a", noon.UnixMilli(), "", 0, "", "d1:8000/3", 0, "ok",
			"The group of ranks that prefill and decode was the only one left. Decode policy evenkeel chose among 7 ranks with room. This one " +
				"held 1,000 KV tokens, the fullest 9,000."}},
		"it failed in another region": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended, Outcome: "upstream_failed", Attempts: []receipt.Attempt{{Peer: "us-1", Cause: "no answer"}}},
			Decision{"a", noon.UnixMilli(), "", 0, "", "", 0, "upstream_failed", "It was sent to us-1. It failed: no answer."}},
		"its prefill failed, after its rank was bound": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended, Outcome: "prefill_failed",
			Attempts: []receipt.Attempt{
				{Cause: "status 500", FailedOn: "p1:8000/0", Prefill: prefill, Decode: decode},
			}}, Decision{"a", noon.UnixMilli(), "", 900, "p1:8000/0", "d1:8000/3", 0, "prefill_failed",
			"Prefill policy finish chose among 4 engines. 512 tokens were thought to be cached there. Decode policy evenkeel chose among 7 ranks " +
				"with room. " +
				"This one held 1,000 KV tokens, the fullest 9,000. It failed on p1:8000/0: status 500."}},
		"no grounds of its prefill engine were noted": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended,
			Attempts: []receipt.Attempt{{
				Prefill: &receipt.Prefill{Candidate: "p1:8000/0", Policy: "finish"},
			}}}, Decision{"a", noon.UnixMilli(), "", 0, "p1:8000/0", "", 0, "",
			"Prefill policy finish chose the prefill engine."}},
		"no grounds were noted": {receipt.Receipt{ID: "a", Arrival: noon, State: receipt.Ended, Attempts: []receipt.Attempt{{Decode: &receipt.Decode{Rank: "d", Policy: "jsq", Stage: "single"}}}},
			Decision{"a", noon.UnixMilli(), "", 0, "", "d", 0, "", "Decode policy jsq chose the rank in its stage single."}},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, []Decision{tt.want}, Decisions([]*receipt.Receipt{&tt.r}, noon.Add(5*time.Second)))
		})
	}
}
