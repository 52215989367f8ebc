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

// Values of Options.Disaggregate. "always" asks for a prefill engine, "never" for a decode rank that computes the prompt itself, and "auto"
// for such a rank only if little of the prompt is new to it.
const (
	DisaggregateAuto   = "auto"
	DisaggregateAlways = "always"
	DisaggregateNever  = "never"
)

// prefixKeys hashes the prompt for lookups in prefix caches. If ranks of the model may compute
// prompts themselves, the job keeps the hashes, so that the prompt is hashed only once.
func (j *job) prefixKeys() prefill.Prompt {
	if j.life.Resumed() {
		return j.srv.Prompts.CacheKeys(j.parts()) // the answer so far is a part of the prompt now
	}
	if j.local.promptHashes != nil {
		return *j.local.promptHashes
	}
	p := j.srv.Prompts.CacheKeys(j.parts())
	// For ranks that also prefill, placeAggregated keeps the hashes.
	if j.srv.LocalRanks.AnyComputes(j.model.Board) {
		hashes := p // a copy on the heap; taking p's address would move p to the heap on every call
		j.local.promptHashes = &hashes
	}
	return p
}

// bindLocal binds the request to a decode rank that computes the prompt itself, if the
// configuration allows it and a rank has room. It returns nil if the request must go to a prefill engine,
// or if another proxy may have to serve it, which is decided in the arrival queue (j.query).
func (j *job) bindLocal() *dispatcher.Slot {
	if slot := j.local.boundSlot; slot != nil { // enterQueue has bound this leg before
		j.local.boundSlot = nil
		return slot
	}
	// The leg has entered the arrival queue with the other legs, and waits there for a prefill engine.
	queued := j.ticket != nil
	// Follows: a central proxy decides where requests are served. TriedHere: every attempt here has failed. In both cases evenkeel
	// first asks which proxy gets the request (j.query), while the request is in the arrival queue.
	asksFirst := j.query != nil && j.life.MayAsk() && (j.srv.Settings().Geo.Follows() || j.life.TriedHere())
	if queued || asksFirst {
		return nil
	}
	conf := &j.srv.Settings().Prefill.Disaggregation
	why := j.local.whyLocal(conf, j.incoming, j.life.Resumed())
	// An empty why says that no decode rank may compute this prompt. AnyComputes says that a rank of the model computes prompts at all.
	if why == "" || j.client.Left() || !j.srv.LocalRanks.AnyComputes(j.model.Board) {
		return nil
	}
	sought, lengthKnown := j.localPrompt()
	if !lengthKnown { // no limit on the new tokens could be checked
		return nil
	}
	tokens := j.srv.LocalRanks.Length(&sought)
	rule := j.srv.localRule(conf, &sought, why, tokens)
	hits := addAllowedRanks(j, rule, &sought)
	if len(rule.Ranks) == 0 { // too much of the prompt is new to every rank
		return nil
	}
	return askForLocalSlot(j, rule, hits, why, tokens)
}

// askForLocalSlot asks the dispatcher for a slot on one of the rule's ranks, and returns nil if it gives none at once. why is the reason
// that whyLocal gave, for the metrics. tokens is the length of the prompt. hits has, for each rank, how many tokens of the prompt its
// prefix cache has, for the record.
func askForLocalSlot(j *job, rule *board.Local, hits map[int32]int, why string, tokens int) *dispatcher.Slot {
	entry := &pool.Entry{ID: j.srv.nextID(), Model: j.model.Board, Name: j.model.Name, Prompt: tokens, Key: j.promptHash(),
		Arrival: j.record.Arrival, Entered: time.Now(), Response: j.req.Endpoint == mooncake.Responses}
	result := <-j.srv.Dispatcher.EnqueueLocal(entry, rule)
	if result.Err != nil { // no rank has room now, or entries in the pool come first; so a prefill engine gets the prompt
		j.srv.metrics.localDeclined.Inc()
		return nil
	}
	j.srv.metrics.localRequests.WithLabelValues(why).Inc()
	j.query = nil // the request is served here, so evenkeel need not ask which dispatcher should serve it
	j.record.Report(journal.Event{Kind: journal.PlacedLocally, Slot: result.Slot, Tokens: hits[result.Slot.Worker]})
	return result.Slot
}

// addAllowedRanks adds to the rule the ranks that may compute the prompt, as far as the number of its new tokens decides. It returns, by
// the number of the rank, how many tokens of the prompt each of them has in its prefix cache.
func addAllowedRanks(j *job, rule *board.Local, sought *local.Prompt) (hits map[int32]int) {
	hits = map[int32]int{}
	for _, offer := range j.srv.LocalRanks.Offers(sought, j.avoid.ranks()) {
		// The rule is asked as if the rank were idle, because only the dispatcher knows what runs there. It checks again.
		const noneRunning, noneInFlight = 0, 0
		if rule.Allows(offer.New, noneRunning, noneInFlight) {
			rule.Ranks = append(rule.Ranks, board.LocalRank{Worker: offer.Rank, Tokens: offer.New})
			hits[offer.Rank] = offer.Hit
		}
	}
	return hits
}

// localPrompt describes the prompt for the search of a decode rank that computes it. Its length may be an estimate. lengthKnown is false if
// not even an estimate is good, because the prompt has images or sound. If sought.Tokens is 0, LocalRanks.Length estimates the length from
// the bytes. The count of a prefill engine that handed nothing off (tokensNotHandedOff) is used only once, for this attempt.
func (j *job) localPrompt() (sought local.Prompt, lengthKnown bool) {
	sought = local.Prompt{Prompt: j.prefixKeys(), Model: j.model.Board, Tokens: j.local.tokensNotHandedOff}
	j.local.tokensNotHandedOff = 0
	clientSentIDs := j.req.PromptTokens > 0
	switch {
	case sought.Tokens > 0: // the prefill engine that handed nothing off has counted the tokens
	case sought.Media:
		return sought, false
	case sought.Bytes == 0 || clientSentIDs: // LocalRanks has no bytes for an estimate, or the number of the ids is exact
		sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimatedTokens())
	}
	return sought, true
}

// whyLocal returns why a decode rank may compute the prompt now; empty: no decode rank may. localShort says that it may if little of the
// prompt is new to the rank, which the caller must check (localRule). The reasons localShort and localAsked are returned only at the first
// call. Later calls follow a failed attempt. Then a decode rank may compute the prompt only if it cannot be handed off (localEndpoint,
// localNoHandOff).
func (l *localDecode) whyLocal(conf *prefill.Disaggregation, in *Incoming, resumed bool) string {
	switch {
	case resumed: // a lost answer goes on by way of the arrival queue
		return ""
	case in.namesEngines(): // the caller has chosen the engines
		return ""
	case l.tokensNotHandedOff > 0: // prefill engines hand nothing off, because the first token of the answer ends it
		return localNoHandOff
	case in.NoHandOff: // the endpoint takes no hand-off
		return localEndpoint
	case l.decided: // an earlier attempt has failed; now even a client that asked for no disaggregation gets a prefill engine
		return ""
	}
	l.decided = true
	switch {
	case in.Batch: // all ranks of the group would wait for this prompt, and a batch request must not delay other requests
	case in.Disaggregate == DisaggregateNever: // the caller wants no prefill engine
		return localAsked
	case in.Disaggregate == DisaggregateAuto, in.Disaggregate == "" && conf.Mode == prefill.DisaggregateConditional:
		return localShort
	}
	return ""
}

// localRule returns the limits under which a decode rank may compute the prompt: how many of the prompt's tokens may be new to the rank,
// and how many such tokens may be in flight. why is what whyLocal returned, and tokens is the length of the prompt. The limit for new
// tokens is a fixed Threshold, or with a Threshold of 0 the BreakEven: as many as the rank computes in the time that a hand-off takes.
func (srv *Server) localRule(conf *prefill.Disaggregation, sought *local.Prompt, why string, tokens int) *board.Local {
	rule := &board.Local{Threshold: conf.Threshold(), InFlight: conf.MaxLocalTokens}
	switch {
	case why != localShort: // the prompt may have any length; one longer than MaxLocalTokens runs only if no other tokens are in flight
		rule.Threshold, rule.InFlight = math.MaxInt, max(rule.InFlight, tokens)
	case rule.Threshold == 0: // threshold_tokens is auto
		if latency, rtt, known := srv.Prefill.LearnedLatency(sought.Model); known {
			rule.BreakEven = srv.LocalRanks.BreakEven(sought, latency, rtt)
		} else { // it is not known yet how long prefills take
			rule.Threshold = prefill.DefaultLocalThreshold
		}
	}
	return rule
}

// noteKVArrived notes, when the first event has come, that the rank holds the prompt's KV. h is the hand-off that brought the KV; nil: the
// rank computed it, or fetched it during the prefill. The answer's KV is not noted. The next turn contains the answer as text, and that
// text may get other token ids than the answer had. If a rank then lacked KV that evenkeel expected, it would have to compute the prompt
// while all other ranks of its group wait.
func (j *job) noteKVArrived(h *handoff.Handoff, s *stream) {
	if j.life.Resumed() {
		return // the KV of a resumed request also has a part of the answer
	}
	if h == nil { // otherwise the prefill engine has reported the counts before (notePrefilled)
		j.takeDecodeCounts(s)
	}
	hashes := j.local.promptHashes
	if hashes == nil {
		return
	}
	sought := local.Prompt{Prompt: *hashes, Model: s.upstream.rank.Board}
	if j.incoming.EndsSession {
		sought.Keys = nil // no later turn asks for these keys; the prompt's length is still used for estimates
	}
	j.srv.LocalRanks.NoteHeld(s.upstream.rank.Worker, &sought, j.promptTokens, s.upstream.began)
	// A long prompt has thousands of hashes. Only checkPrefixCache needs them once more, and only if the rank has computed the prompt.
	if !s.upstream.computesPrompt {
		j.local.promptHashes = nil
	}
	// Moved learns how long hand-offs take. An answer in one piece does not show when the KV was there.
	if h != nil && !s.upstream.unstreamed {
		j.srv.LocalRanks.Moved(sought.Model, j.promptTokens, time.Since(s.upstream.began))
	}
}

// takeDecodeCounts takes the prompt's length and its token ids from the decode engine. It is called if no earlier prefill has reported
// them: the rank computes the prompt itself, or the prefill runs beside the decode call. With them, keepForResume decides anew what of a
// streamed answer's request stays in memory, in case the engine loses the answer.
func (j *job) takeDecodeCounts(s *stream) {
	j.promptTokens = cmp.Or(s.upstream.answer.Filter.Prompt(), prompt.Tokens(j.req, j.changes))
	if s.upstream.slot != nil { // nil: all of the answer came at once, and the slot is released
		j.srv.Dispatcher.CorrectPrompt(s.upstream.slot, j.promptTokens)
	}
	const unknown = -1 // no prefill engine has reported how many tokens it found in its prefix cache
	j.resume.promptTokens, j.cachedTokens = j.promptTokens, unknown
	j.record.PromptTokens = j.promptTokens
	if s.upstream.unstreamed { // no other engine can continue an answer in one piece, so nothing is kept for that
		return
	}
	if needsPromptIDs(j.req, s.upstream.rank.Profile) && len(s.upstream.answer.Transcript.PromptIDs) > 0 {
		// This is a copy, because later requests use the transcript's memory.
		j.resume.promptIDs = slices.Clone(s.upstream.answer.Transcript.PromptIDs)
	}
	j.keepForResume(s.upstream.rank) // with token ids, the answer may go on from them, and their bytes are charged, too
}

// checkPrefixCache notes how many prompt tokens the engine found in its prefix cache, which its final usage says. LocalRanks compares this
// number with the hits that were expected (HitTokens). If too few are found, it no longer counts on hits at this engine (see Offers).
// checkPrefixCache logs when this changes.
func (s *stream) checkPrefixCache() {
	j := s.job
	if !s.upstream.computesPrompt || s.endError != nil {
		return
	}
	usage, reported := s.upstream.answer.Filter.Usage()
	if !reported {
		usage.Cached = -1 // unknown, and not 0
	}
	j.record.CachedTokens = max(0, usage.Cached)
	if hashes := j.local.promptHashes; hashes != nil {
		sought := local.Prompt{Prompt: *hashes, Model: s.upstream.rank.Board}
		if changed, asExpected := j.srv.LocalRanks.Computed(s.upstream.rank.Worker, &sought, j.promptTokens, j.record.HitTokens, usage.Cached,
			s.upstream.began); changed {
			j.srv.Log.Warn("a decode engine's cached_tokens show whether its prefix cache works as expected; if it does not, the engine gets no "+
				"more prompts without a hand-off; without --enable-prompt-tokens-details an engine reports no cached_tokens",
				zap.String("engine", s.upstream.rank.Target.ID), zap.Bool("as_expected", asExpected))
		}
	}
}
