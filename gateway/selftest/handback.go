package selftest

import (
	"context"
	"encoding/json"

	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
)

// Findings about whether a decode engine keeps the KV of its answers, compared with its profile.
// Source: vLLM 0.32 and 0.33, nixl/pull_scheduler.py, request_finished.
const (
	handsBack = "keeps the KV of each answer for the next request of its chat (bidirectional_kv_xfer), for 480 s unless " +
		"decoder_kv_blocks_ttl says otherwise. " +
		"evenkeel takes that room for free, so that requests will wait or be preempted in a busy engine; start it " +
		"without bidirectional_kv_xfer, or write hand_back: counted in its profile"
	handBackCounts = "keeps the KV of each answer for the next request of its chat (bidirectional_kv_xfer), and evenkeel counts its room as " +
		"taken for %v (hand_back: counted)"
	handsNoneBack = "keeps the KV of no answer, although its profile has hand_back: counted, so that " +
		"evenkeel takes free room for taken; remove hand_back from the profile"
)

// reportKVKept reports whether a decode engine keeps the KV of answers, unless its profile expects
// neither.
func (t *tester) reportKVKept(d testedRank, keeps bool) {
	switch counted := d.profile.Keeps(); {
	case keeps && counted > 0:
		t.report(d.name, OK, handBackCounts, counted)
	case keeps:
		t.report(d.name, Warn, handsBack)
	case counted > 0:
		t.report(d.name, Warn, handsNoneBack)
	}
}

// findKVKeepers finds the decode engines that keep the KV of answers. From 0.33 on vLLM shows this
// in streams, before only in an answer in one piece. So findKVKeepers asks each engine for such an
// answer, unless a stream has already shown it.
func (t *tester) findKVKeepers(ctx context.Context, prefills, decodes []testedRank) {
	alreadyReported := func(d testedRank) bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.reported[[2]string{d.name, handsBack}] || t.reported[[2]string{d.name, handBackCounts}]
	}
	for id, p := range t.healthyPairs(ctx, prefills, decodes, "h") {
		if p.decode.profile.Connector != mooncake.NIXLPull || alreadyReported(p.decode) {
			continue
		}
		keeps, err := t.keepsKV(ctx, p.prefill, p.decode, id)
		if err == nil { // a failure would have been found and reported by the tests before
			t.reportKVKept(p.decode, keeps)
		}
	}
}

// keepsKV asks for an answer in one piece, and returns whether the answer says that the engine
// keeps its KV.
func (t *tester) keepsKV(ctx context.Context, p, d testedRank, id string) (keeps bool, err error) {
	model, _ := commonModel(p, d)
	q := newQuery(mooncake.Completions, model, id, shortPrompt)
	a, err := t.prefill(ctx, p, q, id)
	if err != nil {
		return false, err
	}
	body := d.profile.DecodeBody(&q.body, q.endpoint, q.changes, a.KV, "", false, nil)
	text, err := t.send(ctx, d, q, lifecycle.Decode, id+decodeIDSuffix(a), body)
	if err != nil {
		return false, err
	}
	var answer struct {
		KV struct {
			Decode bool `json:"do_remote_decode"`
		} `json:"kv_transfer_params"`
	}
	err = json.Unmarshal(text, &answer)
	return answer.KV.Decode, err
}
