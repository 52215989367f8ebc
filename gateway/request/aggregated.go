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

// placeAggregated waits in the pool for a rank that prefills and decodes. The dispatcher learns how
// much of the prompt each rank has in its prefix cache.
func (j *job) placeAggregated(lease *prefill.Lease) (*dispatcher.Slot, *failure.Fault) {
	sought := local.Prompt{Prompt: j.prefixKeys(), Model: lease.Candidate.Board}
	isCounted := j.promptTokens > 0 || j.req.PromptTokens > 0
	// The bytes lack images and sound, and the answer so far of a resumed request.
	bytesShowLength := !isCounted && !j.life.Resumed() && !sought.Media && sought.Bytes > 0
	if !bytesShowLength { // else LocalRanks estimates the length from the bytes
		sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimatedTokens())
	}
	tokens := j.srv.LocalRanks.Length(&sought)
	if isEstimate := sought.Prompt.Tokens == 0 && !isCounted; isEstimate && j.model.MaxLen > 0 {
		// No rank would take a longer prompt, although an engine may count fewer tokens than the
		// estimate.
		tokens = min(tokens, j.model.MaxLen)
	}
	var hits []board.Hit // tokens that a rank need not compute
	for _, offer := range j.srv.LocalRanks.Offers(&sought, j.avoid.ranks()) {
		if cached := tokens - offer.New; cached > 0 { // offer.New is what it would have to compute
			hits = append(hits, board.Hit{Worker: offer.Rank, Tokens: cached})
		}
	}
	j.local.promptHashes = &sought.Prompt // for noteKVArrived and checkPrefixCache
	slot, fault := j.place(lease.Candidate, tokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		entry.Deadline = aggregatedDeadline(j, entry)
		return j.srv.Dispatcher.EnqueueAggregated(entry, hits)
	})
	if fault == nil {
		lease.MarkSent() // for the scheduler, the prefill begins with the binding
		cached := max(0, tokens-int(slot.NewTokens))
		j.record.Report(journal.Event{Kind: journal.PlacedAggregated, Slot: slot, Tokens: cached})
	}
	return slot, fault
}

// aggregatedDeadline is the client's deadline for the first token, and, if pool.ttl is not set, at
// most prefill.queue.timeout. Zero: only pool.ttl holds.
func aggregatedDeadline(j *job, entry *pool.Entry) (deadline time.Time) {
	if settings := j.srv.Settings(); settings.Pool.TTL == 0 {
		waitsSince := entry.Arrival
		if j.life.Resumed() { // since Arrival, the request has mostly been served
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
