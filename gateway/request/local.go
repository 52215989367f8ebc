package request

import (
	"cmp"
	"math"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/prompt"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// Values of Wishes.Disaggregate.
const (
	DisaggregateAuto   = "auto"
	DisaggregateAlways = "always"
	DisaggregateNever  = "never"
)

// recognize hashes the prompt, so that prefix caches can be asked for it. If evenkeel remembers what the model's decode ranks hold, the
// job keeps the hashes, and hashes only once.
func (j *job) recognize() prefill.Prompt {
	if j.life.Resumed() {
		return j.srv.Prompts.Recognize(j.parts()) // the prompt now includes the answer so far
	}
	if j.local.knownPrompt != nil {
		return *j.local.knownPrompt
	}
	p := j.srv.Prompts.Recognize(j.parts())
	if j.srv.Locals.Remember(j.model.Board) { // for ranks that prefill and decode, placeMixed keeps the hashes
		known := p // a copy, so that p itself stays off the heap
		j.local.knownPrompt = &known
	}
	return p
}

// bindLocal binds the request to a decode rank that computes the prompt itself, if the rules allow this and a rank has room. If it returns
// nil, a prefill engine computes the prompt. It always does so for a leg of a fan-out that has entered the arrival queue with the other
// legs. A request that may go to another dispatcher is not bound before this is decided, if one dispatcher decides for all, or if attempts
// here failed.
func (j *job) bindLocal() *dispatcher.Slot {
	if slot := j.local.boundSlot; slot != nil {
		j.local.boundSlot = nil
		return slot
	}
	if j.ticket != nil || j.question != nil && j.life.Open() && (j.srv.Settings().Geo.Follows() || j.life.Tried()) {
		return nil
	}
	conf := &j.srv.Settings().Prefill.Disaggregation
	why := j.local.reason(conf, j.incoming, j.life.Resumed())
	if why == "" || j.client.Left() || !j.srv.Locals.Serve(j.model.Board) {
		return nil
	}
	sought := local.Prompt{Prompt: j.recognize(), Model: j.model.Board, Tokens: j.local.endedTokens}
	j.local.endedTokens = 0
	if sought.Tokens == 0 {
		if sought.Media {
			return nil // the number of tokens of images and the like is not known
		}
		if sought.Bytes == 0 || j.req.PromptTokens > 0 {
			sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimate())
		}
	}
	tokens := j.srv.Locals.Length(&sought)
	rule := j.srv.localRule(conf, &sought, why, tokens)
	hits := map[int32]int{}
	for _, offer := range j.srv.Locals.Offers(&sought, j.avoid.ranks()) {
		if rule.Allows(offer.New, 0, 0) {
			rule.Ranks = append(rule.Ranks, board.LocalRank{Worker: offer.Rank, Tokens: offer.New})
			hits[offer.Rank] = offer.Hit
		}
	}
	if len(rule.Ranks) == 0 {
		return nil
	}
	entry := &pool.Entry{ID: j.srv.nextID(), Model: j.model.Board, Name: j.model.Name, Prompt: tokens, Key: j.promptHash(),
		Arrival: j.record.Arrival, Entered: time.Now(), Response: j.req.Endpoint == mooncake.Responses}
	result := <-j.srv.Dispatcher.EnqueueLocal(entry, rule)
	if result.Err != nil {
		j.srv.metrics.localDeclined.Inc()
		return nil
	}
	j.srv.metrics.localRequests.WithLabelValues(why).Inc()
	j.question = nil
	j.record.Report(journal.Event{What: journal.PlacedLocally, Slot: result.Slot, Tokens: hits[result.Slot.Worker]})
	return result.Slot
}

// nearRanks returns the ranks of the board that hold a part of the prompt, and how many tokens of it, which they need not pull.
func (j *job) nearRanks(on string, tokens int) (hits []board.Hit) {
	if j.local.knownPrompt == nil || j.life.Resumed() {
		return nil
	}
	for _, offer := range j.srv.Locals.Held(&local.Prompt{Prompt: *j.local.knownPrompt, Model: on, Tokens: tokens}) {
		hits = append(hits, board.Hit{Worker: offer.Rank, Tokens: offer.Hit})
	}
	return hits
}

// reason returns why a decode rank may serve the request alone now, without a prefill engine; empty: it may not. For a short prompt, or if
// the caller wants it, this is decided only once. So after a failed prefill, only two reasons are left: the endpoint takes no hand-off, or
// the prefill engine found that the answer is empty and handed nothing off.
func (l *locally) reason(conf *prefill.Disaggregation, in *Incoming, resumed bool) string {
	switch {
	case resumed, in.aimed():
		return ""
	case l.endedTokens > 0:
		return localEnded
	case in.Whole:
		return localWhole
	case l.decided:
		return ""
	}
	l.decided = true
	switch {
	case in.Batch: // all ranks of the group would wait while one computes the prompt, and a batch request must not delay others
	case in.Disaggregate == DisaggregateNever:
		return localAsked
	case in.Disaggregate == DisaggregateAuto, in.Disaggregate == "" && conf.Mode == prefill.DisaggregateConditional:
		return localShort
	}
	return ""
}

// localRule returns which decode ranks may compute the prompt themselves: how many of its tokens may be new to them, and how many such
// tokens may be in flight. why says why a decode rank is to compute the prompt (localShort: because it is short), and tokens is the length
// of the prompt.
func (srv *Server) localRule(conf *prefill.Disaggregation, sought *local.Prompt, why string, tokens int) *board.Local {
	rule := &board.Local{Threshold: conf.Threshold(), InFlight: conf.MaxLocalTokens}
	switch {
	case why != localShort: // a prompt of any length, but a long one only alone
		rule.Threshold, rule.InFlight = math.MaxInt, max(rule.InFlight, tokens)
	case rule.Threshold == 0:
		if line, rtt, known := srv.Tier.Line(sought.Model); known {
			rule.BreakEven = srv.Locals.BreakEven(sought, line, rtt)
		} else {
			rule.Threshold = prefill.DefaultLocalThreshold
		}
	}
	return rule
}

// kvArrived notes at the first event that the rank holds the prompt's KV. h is the hand-off with which the KV came; nil: there was none.
// The KV of the answer is not noted, although the rank will hold it too: the next turn has the answer as text, which may get other token
// ids. If evenkeel noted more than the rank holds, the rank would have to compute the missing tokens while its whole group waits.
func (j *job) kvArrived(h *handoff.Handoff, s *stream) {
	if j.life.Resumed() {
		return // the prompt included a part of the answer, so its KV is not that of the client's prompt
	}
	if h == nil {
		j.countLocal(s)
	}
	known := j.local.knownPrompt
	if known == nil {
		return
	}
	sought := local.Prompt{Prompt: *known, Model: s.from.rank.Board}
	if j.incoming.Ends {
		sought.Keys = nil // no further turn will look for the KV; Holds still learns from the prompt's length
	}
	j.srv.Locals.Holds(s.from.rank.Worker, &sought, j.promptTokens, s.from.began)
	if !s.from.local {
		j.local.knownPrompt = nil // a long prompt has thousands of keys
	}
	if h != nil && !s.from.whole { // an answer in one piece does not show when the KV was there
		j.srv.Locals.Moved(sought.Model, j.promptTokens, time.Since(s.from.began))
	}
}

// countLocal takes the prompt's length and its token ids from the decode engine's answer. It is called if no probe has returned them
// before, because the rank computes the prompt itself, or because the prefill leg runs at the same time.
func (j *job) countLocal(s *stream) {
	j.promptTokens = cmp.Or(s.from.answer.Mirror.Prompt(), prompt.Tokens(j.req, j.changes))
	if s.from.slot != nil { // nil: the whole answer came at once, and the slot is free already
		j.srv.Dispatcher.Counted(s.from.slot, j.promptTokens)
	}
	j.resume.promptTokens, j.cachedTokens = j.promptTokens, -1
	j.record.PromptTokens = j.promptTokens
	if !s.from.whole {
		if wantsIDs(j.req, s.from.rank.Profile) && len(s.from.answer.Trail.PromptIDs) > 0 {
			j.resume.promptIDs = slices.Clone(s.from.answer.Trail.PromptIDs)
		}
		j.keep(s.from.rank) // again, now that the prompt's length and token ids are known
	}
}

// reportLocal notes how many prompt tokens the engine found in its prefix cache, by its final usage, and compares them with the expected
// number. An engine whose prefix cache does not work as expected gets no more prompts without a hand-off.
func (s *stream) reportLocal() {
	j := s.job
	if !s.from.local || s.broken != nil {
		return
	}
	usage, ok := s.from.answer.Mirror.Usage()
	if !ok {
		usage.Cached = -1
	}
	j.record.CachedTokens = max(0, usage.Cached)
	if known := j.local.knownPrompt; known != nil {
		sought := local.Prompt{Prompt: *known, Model: s.from.rank.Board}
		if turned, holds := j.srv.Locals.Computed(s.from.rank.Worker, &sought, j.promptTokens, j.record.HitTokens, usage.Cached,
			s.from.began); turned {
			j.srv.Log.Warn("a decode engine's cached_tokens show whether its prefix cache works as expected; if it does not, the engine gets no "+
				"more prompts without a hand-off; without --enable-prompt-tokens-details an engine reports no cached_tokens",
				zap.String("engine", s.from.rank.Target.ID), zap.Bool("as_expected", holds))
		}
	}
}
