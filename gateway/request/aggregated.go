package request

import (
	"cmp"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// placeAggregated waits in the pool until the dispatcher binds the request to a rank that prefills and decodes. It tells the dispatcher how
// much of the prompt each rank holds in its prefix cache. The lease counts as sent from the binding on, although the caller sends the
// request only after that.
func (j *job) placeAggregated(lease *prefill.Lease) (*dispatcher.Slot, *failure.Fault) {
	sought := local.Prompt{Prompt: j.prefixKeys(), Model: lease.Candidate.Board}
	tokens := setAggregatedLength(j, &sought)
	var hits []board.Hit // for each rank that holds a part of the prompt, the number of tokens that it need not compute
	for _, offer := range j.srv.LocalRanks.Offers(&sought, j.avoid.ranks()) {
		if cached := tokens - offer.New; cached > 0 { // offer.New is the number of tokens that the rank would have to compute
			hits = append(hits, board.Hit{Worker: offer.Rank, Tokens: cached})
		}
	}
	j.local.promptHashes = &sought.Prompt // noteKVArrived and checkPrefixCache need the hashes once the rank has the KV
	slot, fault := j.place(lease.Candidate, tokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		entry.Deadline = aggregatedDeadline(j, entry)
		return j.srv.Dispatcher.EnqueueAggregated(entry, hits)
	})
	if fault == nil {
		lease.MarkSent()
		cached := max(0, tokens-int(slot.NewTokens))
		j.record.Report(journal.Event{Kind: journal.PlacedAggregated, Slot: slot, Tokens: cached})
	}
	return slot, fault
}

// setAggregatedLength returns the length of the prompt in tokens: a count, or else an estimate. It stores the length in sought, unless
// LocalRanks is to estimate it from the bytes of the prompt, by the number of tokens per byte that it has learned.
func setAggregatedLength(j *job, sought *local.Prompt) (tokens int) {
	// The length is counted if an engine has reported it, or if the client has sent the prompt as token ids.
	counted := j.promptTokens > 0 || j.req.PromptTokens > 0
	// The bytes are those of the client's text. They leave out images and sound, and the answer so far of a resumed request.
	bytesShowLength := !counted && !j.life.Resumed() && !sought.Media && sought.Bytes > 0
	if !bytesShowLength {
		sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimatedTokens())
	}
	tokens = j.srv.LocalRanks.Length(sought)
	isEstimate := sought.Prompt.Tokens == 0 && !counted
	if isEstimate && j.model.MaxLen > 0 {
		// No rank would take a longer prompt, although an engine may count fewer tokens than the estimate.
		tokens = min(tokens, j.model.MaxLen)
	}
	return tokens
}

// aggregatedDeadline returns until when an entry may wait in the pool for a rank that prefills and decodes: until the client's deadline for
// the first token, and, if pool.ttl is not set, at most for prefill.queue.timeout. Zero: neither limit holds, so only pool.ttl does.
func aggregatedDeadline(j *job, entry *pool.Entry) (deadline time.Time) {
	if settings := j.srv.Settings(); settings.Pool.TTL == 0 {
		waitsSince := entry.Arrival
		if j.life.Resumed() { // since Arrival, the request has mostly been served, and not waited
			waitsSince = entry.Entered
		}
		deadline = waitsSince.Add(settings.Prefill.Queue.Timeout)
	}
	ofClient := j.firstTokenDeadline()
	if !ofClient.IsZero() && (deadline.IsZero() || ofClient.Before(deadline)) {
		deadline = ofClient
	}
	return deadline
}
