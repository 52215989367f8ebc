package request

import (
	"cmp"

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
	// The length is counted if an engine has reported it, or if the client has sent the prompt as token ids.
	counted := j.promptTokens > 0 || j.req.PromptTokens > 0
	// The bytes are those of the client's text. They leave out images and sound, and the answer so far of a resumed request.
	bytesShowLength := !counted && !j.life.Resumed() && !sought.Media && sought.Bytes > 0
	if !bytesShowLength { // otherwise LocalRanks.Length estimates the length from the bytes, by the ratio that it has learned
		sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimatedTokens())
	}
	tokens := j.srv.LocalRanks.Length(&sought)
	if estimated := sought.Prompt.Tokens == 0 && !counted; estimated && j.model.MaxLen > 0 {
		// No rank would take a longer prompt, although an engine may count fewer tokens than the estimate.
		tokens = min(tokens, j.model.MaxLen)
	}
	var hits []board.Hit
	for _, offer := range j.srv.LocalRanks.Offers(&sought, j.avoid.ranks()) {
		if cached := tokens - offer.New; cached > 0 {
			hits = append(hits, board.Hit{Worker: offer.Rank, Tokens: cached})
		}
	}
	j.local.promptHashes = &sought.Prompt // noteKVArrived and checkPrefixCache need the hashes once the rank has the KV
	slot, fault := j.place(lease.Candidate, tokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		if settings := j.srv.Settings(); settings.Pool.TTL == 0 { // pool.ttl is not set: prefill.queue.timeout applies
			entry.Deadline = entry.Arrival.Add(settings.Prefill.Queue.Timeout)
			if j.life.Resumed() { // since Arrival, the request has mostly been served, and not waited
				entry.Deadline = entry.Entered.Add(settings.Prefill.Queue.Timeout)
			}
		}
		if deadline := j.firstTokenDeadline(); !deadline.IsZero() && (entry.Deadline.IsZero() || deadline.Before(entry.Deadline)) {
			entry.Deadline = deadline
		}
		return j.srv.Dispatcher.EnqueueAggregated(entry, hits)
	})
	if fault == nil {
		lease.MarkSent()
		j.record.Report(journal.Event{Kind: journal.PlacedAggregated, Slot: slot, Tokens: max(0, tokens-int(slot.NewTokens))})
	}
	return slot, fault
}
