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

// Values of Options.Disaggregate. With "never" a decode rank computes the prompt itself, with
// "auto" only if little of it is new to the rank.
const (
	DisaggregateAuto   = "auto"
	DisaggregateAlways = "always"
	DisaggregateNever  = "never"
)

// prefixKeys hashes the prompt for lookups in prefix caches, only once if ranks may compute prompts
// themselves.
func (j *job) prefixKeys() prefill.Prompt {
	if j.life.Resumed() {
		return j.srv.Prompts.CacheKeys(j.parts()) // with the answer so far
	}
	if j.local.promptHashes != nil {
		return *j.local.promptHashes
	}
	p := j.srv.Prompts.CacheKeys(j.parts())
	// For ranks that also prefill, placeAggregated keeps the hashes.
	if j.srv.LocalRanks.AnyComputes(j.model.Board) {
		hashes := p // taking p's address would move p to the heap on every call
		j.local.promptHashes = &hashes
	}
	return p
}

// bindLocal binds the request to a decode rank that computes the prompt itself, if one may and has
// room. It returns nil if another proxy may have to serve the request, which is decided in the
// arrival queue (j.query).
func (j *job) bindLocal() *dispatcher.Slot {
	if slot := j.local.boundSlot; slot != nil { // enterQueue has bound this leg before
		j.local.boundSlot = nil
		return slot
	}
	// The leg waits in the arrival queue with the others.
	queued := j.ticket != nil
	// Follows: a central proxy decides where requests are served. TriedHere: every attempt here has
	// failed. Both are asked in the arrival queue first.
	asksFirst := j.query != nil && j.life.MayAsk() && (j.srv.Settings().Geo.Follows() || j.life.TriedHere())
	if queued || asksFirst {
		return nil
	}
	conf := &j.srv.Settings().Prefill.Disaggregation
	why := j.local.whyLocal(conf, j.incoming, j.life.Resumed())
	// AnyComputes: a rank of the model computes prompts at all.
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
	if len(rule.Ranks) == 0 { // too much is new to every rank
		return nil
	}
	return askForLocalSlot(j, rule, hits, why, tokens)
}

// askForLocalSlot returns nil if no slot is free at once. why is for the metrics, and hits, the
// cached tokens by rank, for the record.
func askForLocalSlot(j *job, rule *board.Local, hits map[int32]int, why string, tokens int) *dispatcher.Slot {
	entry := &pool.Entry{ID: j.srv.nextID(), Model: j.model.Board, Name: j.model.Name, Prompt: tokens, Key: j.promptHash(),
		Arrival: j.record.Arrival, Entered: time.Now(), Response: j.req.Endpoint == mooncake.Responses}
	result := <-j.srv.Dispatcher.EnqueueLocal(entry, rule)
	if result.Err != nil { // no room now, or entries in the pool come first
		j.srv.metrics.localDeclined.Inc()
		return nil
	}
	j.srv.metrics.localRequests.WithLabelValues(why).Inc()
	j.query = nil // the request is served here
	j.record.Report(journal.Event{Kind: journal.PlacedLocally, Slot: result.Slot, Tokens: hits[result.Slot.Worker]})
	return result.Slot
}

// addAllowedRanks adds the ranks that may compute the prompt, as far as its new tokens decide. hits
// has the cached tokens by rank.
func addAllowedRanks(j *job, rule *board.Local, sought *local.Prompt) (hits map[int32]int) {
	hits = map[int32]int{}
	for _, offer := range j.srv.LocalRanks.Offers(sought, j.avoid.ranks()) {
		// As if the rank were idle: only the dispatcher knows what runs there, and checks again.
		const noneRunning, noneInFlight = 0, 0
		if rule.Allows(offer.New, noneRunning, noneInFlight) {
			rule.Ranks = append(rule.Ranks, board.LocalRank{Worker: offer.Rank, Tokens: offer.New})
			hits[offer.Rank] = offer.Hit
		}
	}
	return hits
}

// localPrompt: lengthKnown is false if not even an estimate is good, because the prompt has images
// or sound. With sought.Tokens 0, LocalRanks.Length estimates from the bytes. tokensNotHandedOff is
// used only for this attempt.
func (j *job) localPrompt() (sought local.Prompt, lengthKnown bool) {
	sought = local.Prompt{Prompt: j.prefixKeys(), Model: j.model.Board, Tokens: j.local.tokensNotHandedOff}
	j.local.tokensNotHandedOff = 0
	clientSentIDs := j.req.PromptTokens > 0
	switch {
	case sought.Tokens > 0: // counted by a prefill engine
	case sought.Media:
		return sought, false
	case sought.Bytes == 0 || clientSentIDs: // no bytes for an estimate, or the number of the ids is exact
		sought.Tokens = cmp.Or(sought.Prompt.Tokens, j.estimatedTokens())
	}
	return sought, true
}

// whyLocal says why a decode rank may compute the prompt; empty: none may. With localShort,
// localRule must check how much is new to the rank. localShort and localAsked come only at the
// first call. Later calls follow a failed attempt.
func (l *localDecode) whyLocal(conf *prefill.Disaggregation, in *Incoming, resumed bool) string {
	switch {
	case resumed: // it goes on by way of the arrival queue
		return ""
	case in.namesEngines(): // the caller has chosen the engines
		return ""
	case l.tokensNotHandedOff > 0: // the first token of the answer ends it
		return localNoHandOff
	case in.NoHandOff:
		return localEndpoint
	case l.decided: // now even a client that asked for no disaggregation gets a prefill engine
		return ""
	}
	l.decided = true
	switch {
	case in.Batch: // all ranks of the group would wait for this prompt
	case in.Disaggregate == DisaggregateNever:
		return localAsked
	case in.Disaggregate == DisaggregateAuto, in.Disaggregate == "" && conf.Mode == prefill.DisaggregateConditional:
		return localShort
	}
	return ""
}

// localRule limits the tokens that are new to the rank, and those in flight. The first limit is a
// fixed Threshold, or with 0 the BreakEven: as many as the rank computes in the time that a
// hand-off takes.
func (srv *Server) localRule(conf *prefill.Disaggregation, sought *local.Prompt, why string, tokens int) *board.Local {
	rule := &board.Local{Threshold: conf.Threshold(), InFlight: conf.MaxLocalTokens}
	switch {
	case why != localShort: // of any length; beyond MaxLocalTokens only if no other tokens are in flight
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

// noteKVArrived notes, at the first event, that the rank holds the prompt's KV. The answer's KV is
// not noted: the next turn has the answer as text, which may get other token ids. If a rank then
// lacked KV that evenkeel expected, it would have to compute the prompt while all other ranks of
// its group wait.
func (j *job) noteKVArrived(h *handoff.Handoff, s *stream) {
	if j.life.Resumed() {
		return // also has a part of the answer
	}
	if h == nil { // else the prefill engine has reported the counts
		j.takeDecodeCounts(s)
	}
	hashes := j.local.promptHashes
	if hashes == nil {
		return
	}
	sought := local.Prompt{Prompt: *hashes, Model: s.upstream.rank.Board}
	if j.incoming.EndsSession {
		// No later turn asks for these keys. The prompt's length is still used for estimates.
		sought.Keys = nil
	}
	j.srv.LocalRanks.NoteHeld(s.upstream.rank.Worker, &sought, j.promptTokens, s.upstream.began)
	// A long prompt has thousands of hashes. Only checkPrefixCache needs them once more.
	if !s.upstream.computesPrompt {
		j.local.promptHashes = nil
	}
	// Moved learns how long hand-offs take. An answer in one piece does not show it.
	if h != nil && !s.upstream.unstreamed {
		j.srv.LocalRanks.Moved(sought.Model, j.promptTokens, time.Since(s.upstream.began))
	}
}

// takeDecodeCounts takes the prompt's length and its token ids from the decode engine, if no
// earlier prefill has reported them. keepForResume then decides anew.
func (j *job) takeDecodeCounts(s *stream) {
	j.promptTokens = cmp.Or(s.upstream.answer.Filter.Prompt(), prompt.Tokens(j.req, j.changes))
	if s.upstream.slot != nil { // nil: all of the answer came at once
		j.srv.Dispatcher.CorrectPrompt(s.upstream.slot, j.promptTokens)
	}
	const unknown = -1 // no prefill engine has reported it
	j.resume.promptTokens, j.cachedTokens = j.promptTokens, unknown
	j.record.PromptTokens = j.promptTokens
	if s.upstream.unstreamed { // no other engine can continue it
		return
	}
	if needsPromptIDs(j.req, s.upstream.rank.Profile) && len(s.upstream.answer.Transcript.PromptIDs) > 0 {
		// Later requests use the transcript's memory.
		j.resume.promptIDs = slices.Clone(s.upstream.answer.Transcript.PromptIDs)
	}
	j.keepForResume(s.upstream.rank) // token ids are charged, too
}

// checkPrefixCache compares the cached tokens that the engine reports with the expected hits
// (HitTokens). If too few are found, LocalRanks no longer counts on hits at this engine.
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
