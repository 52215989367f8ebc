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

// placeMixed waits in the pool until the dispatcher binds the request to a rank that prefills and decodes. The rank
// gets the prompt with the next call. The dispatcher also considers how much of the prompt each rank holds.
func (j *job) placeMixed(lease *prefill.Lease) (*dispatcher.Slot, *failure.Fault) {
	p := local.Prompt{Prompt: j.recognize(), Model: lease.Candidate.Board}
	if j.prompt > 0 || j.life.Resumed() || p.Media || p.Bytes == 0 || j.req.PromptTokens > 0 {
		p.Tokens = cmp.Or(p.Prompt.Tokens, j.estimate())
	}
	tokens := j.srv.Locals.Length(&p)
	if guessed := p.Prompt.Tokens == 0 && j.prompt == 0 && j.req.PromptTokens == 0; guessed && j.model.MaxLen > 0 {
		tokens = min(tokens, j.model.MaxLen) // a longer prompt would find no rank, and only an engine can count that it is shorter
	}
	var hits []board.Hit
	for _, o := range j.srv.Locals.Offers(&p, j.avoid.ranks()) {
		if held := tokens - o.New; held > 0 {
			hits = append(hits, board.Hit{Worker: o.Rank, Tokens: held})
		}
	}
	j.local.known = &p.Prompt
	slot, f := j.place(lease.Candidate, tokens, func(e *pool.Entry) <-chan dispatcher.Result {
		e.Express = j.in.Priority > 0 && !j.in.Batch
		if set := j.srv.Settings(); set.Pool.TTL == 0 { // the pool has no limit of its own, or that of hand-offs
			e.Deadline = e.Entered.Add(set.Prefill.Queue.Timeout)
			if !j.life.Resumed() {
				e.Deadline = e.Arrival.Add(set.Prefill.Queue.Timeout)
			}
		}
		if by := j.wanted(); !by.IsZero() && (e.Deadline.IsZero() || by.Before(e.Deadline)) {
			e.Deadline = by
		}
		return j.srv.Dispatcher.EnqueueMixed(e, hits)
	})
	if f == nil {
		lease.Send()
		j.record.Report(journal.Event{What: journal.PlacedMixed, Slot: slot, Tokens: max(0, tokens-int(slot.NewTokens))})
	}
	return slot, f
}
