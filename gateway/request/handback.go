package request

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/handback"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// With hand_back: fetched in its profile, a decode engine keeps the KV of an answer. The prefill engine of the conversation's next turn
// fetches this KV, and does not compute it again. This file has the proxy's part of that.

// turnScope returns the token ids of a request's prompt, and the scope of the earlier turns whose KV it may use: turns of the same caller,
// model and cache_salt. ok is false if the request does not give token ids, if the engine changes the prompt, or if the engine must
// compute the whole prompt.
func turnScope(j *job) (scope string, prompt []int32, ok bool) {
	prompt, _ = j.parts().IDs()
	if prompt == nil {
		return "", nil, false
	}
	truncated, _ := j.body.Get("truncate_prompt_tokens")
	// Logprobs of prompt tokens come from computing them. One engine alone does a beam search, and computes its prompt, too.
	computesWhole := j.req.PromptLogprobs || j.req.Beams > 0
	if truncated != nil || computesWhole || openai.HasMedia(&j.body, j.req.Endpoint) { // engines replace media by tokens of their own
		return "", nil, false
	}
	salt, _ := j.body.Salt()
	caller := j.record.Key
	return caller + "\x00" + j.model.Name + "\x00" + string(salt), prompt, true
}

// fetchTurn makes the prefill engine of a lease fetch the KV of the conversation's earlier turn from the decode engine that kept it. It
// returns the patch for the body of the prefill request, and the turn, which no other request can take any more. A nil turn means that no
// earlier turn is known. Only the first attempt fetches, so that later attempts do not depend on a further engine.
func (j *job) fetchTurn(lease *prefill.Lease) (patch *mooncake.Patch, turn *handback.Turn) {
	if lease.Candidate.Profile.HandBack != mooncake.HandBackFetched || j.record.Attempts > 1 {
		return j.changes, nil
	}
	scope, prompt, ok := turnScope(j)
	if !ok {
		return j.changes, nil
	}
	engines := j.srv.Engines()
	turn = j.srv.turns.Take(scope, prompt, time.Now(), func(turn *handback.Turn) bool {
		restarted, _ := engines.ProcessGone(turn.Process) // true also if the engine only may have restarted, because its KV may be gone
		return !restarted && !j.srv.Fleet.DownSince(turn.Process.Key, turn.KeptSince)
	})
	if turn == nil {
		j.srv.metrics.handBacks.WithLabelValues("none").Inc()
		return j.changes, nil
	}
	changes := *j.changes
	changes.Fetch = turn.Params
	return &changes, turn
}

// recordFetch counts how a prefill that was to fetch the KV of a turn has ended. turn is nil if there was nothing to fetch. If the fetch
// fails, the engine answers 500 (vLLM 0.33.0, kv_load_failure_policy fail). Neither this engine nor the request is to blame for it, so
// recordFetch changes the reason of the fault to Expired. It leaves every other fault as it is.
func (j *job) recordFetch(turn *handback.Turn, fault *failure.Fault) {
	switch {
	case turn == nil:
	case fault == nil:
		j.srv.metrics.handBacks.WithLabelValues("fetched").Inc()
	case fault.Status == http.StatusInternalServerError:
		fault.Reason, fault.Err = lifecycle.Expired, fmt.Errorf("%w: %w", fault.Err, failure.ErrUndelivered)
		j.srv.metrics.handBacks.WithLabelValues("failed").Inc()
		j.srv.Log.Warn("a prefill engine could not fetch the KV of the turn before, and the prompt is computed; "+
			"if this repeats, compare decoder_kv_blocks_ttl of the profile with that of the decode engine",
			zap.Inline(j), zap.String("kept_by", turn.Process.Key), zap.Int("tokens", len(turn.IDs)))
	}
}

// keepTurn remembers which KV the decode engine keeps after a complete answer, so that the next turn of the conversation can fetch it.
func keepTurn(s *stream) {
	j, profile, transcript := s.job, s.upstream.rank.Profile, &s.upstream.answer.Transcript
	if !nextTurnMayFetchKV(s) {
		return
	}
	scope, prompt, ok := turnScope(j)
	if !ok { // for example, it is not known to which token ids the KV belongs
		return
	}
	engines := j.srv.Engines()
	process := engines.ProcessAt(s.upstream.rank.Instance)
	if process.Process != j.decodeProcess { // the engine has restarted or loaded other weights during the call, so the KV is gone
		return
	}
	tokens, err := profile.ReadHandBack(transcript.HandBack, engines.HostsOf(s.upstream.rank.Instance))
	ids := slices.Concat(prompt, transcript.IDs)
	if err != nil || tokens > len(ids) { // the engine cannot keep more tokens than the prompt and the answer have together
		j.srv.Log.Warn("what a decode engine says of the KV that it keeps is not used", zap.Inline(j),
			zap.String("engine", s.upstream.rank.Target.ID),
			zap.Int("tokens", tokens), zap.Error(err))
		return
	}
	now := time.Now()
	maxBytes := j.srv.Settings().Limits.ResumeBytes // this limit bounds the memory for turns, too, which have no limit of their own
	j.srv.turns.Keep(&handback.Turn{
		Scope: scope, IDs: ids[:tokens:tokens], Params: bytes.Clone(transcript.HandBack), Process: process, KeptSince: now,
		OfferUntil: now.Add(profile.Keeps() - profile.Keeps()/4), // a quarter of the time that the engine keeps the KV is left for the fetch
	}, now, maxBytes)
}

// nextTurnMayFetchKV says whether the KV of the answer can be offered to the conversation's next turn: a prefill engine may fetch it, and
// all tokens of the KV are known.
func nextTurnMayFetchKV(s *stream) bool {
	transcript := &s.upstream.answer.Transcript
	// The profile lets prefill engines fetch the KV, and the answer says how (transcript.HandBack).
	offersKV := s.upstream.rank.Profile.HandBack == mooncake.HandBackFetched && len(transcript.HandBack) > 0
	// The rank got the prompt's KV by a hand-off: it has not computed the prompt, and no prefill call ran beside the decode call.
	afterHandoff := !s.upstream.computesPrompt && s.upstream.prefillCall == nil
	tokensKnown := transcript.Exact() && !s.job.life.Resumed() // of a resumed answer, the transcript has only the last part
	return offersKV && afterHandoff && tokensKnown
}
