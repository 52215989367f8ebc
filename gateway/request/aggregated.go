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
// much of the prompt each rank holds in its prefix cache. It returns the slot on the rank, or why there is none.
func (j *job) placeAggregated(lease *prefill.Lease) (*dispatcher.Slot, *failure.Fault) {
	sought := local.Prompt{Prompt: j.prefixKeys(), Model: lease.Candidate.Board}
	// The length is counted if an engine has reported it, or if the client has sent the prompt as token ids.
	isCounted := j.promptTokens > 0 || j.req.PromptTokens > 0
	// The bytes are those of the client's text, without images and sound, and without the answer so far of a resumed request.
	bytesShowLength := !isCounted && !j.life.Resumed() && !sought.Media && sought.Bytes > 0
	if !bytesShowLength { // otherwise Tokens stays 0, and LocalRanks estimates the length from the bytes
		sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimatedTokens())
	}
	tokens := j.srv.LocalRanks.Length(&sought)
	if isEstimate := sought.Prompt.Tokens == 0 && !isCounted; isEstimate && j.model.MaxLen > 0 {
		// No rank would take a longer prompt, although an engine may count fewer tokens than the estimate.
		tokens = min(tokens, j.model.MaxLen)
	}
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
		lease.MarkSent() // the caller sends the request next; for the scheduler, the prefill begins with the binding
		cached := max(0, tokens-int(slot.NewTokens))
		j.record.Report(journal.Event{Kind: journal.PlacedAggregated, Slot: slot, Tokens: cached})
	}
	return slot, fault
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
