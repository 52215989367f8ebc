package geo

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"time"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// RoutingQuery implements prefill.RemoteRegions for one request: it decides whether the request is forwarded to a peer.
type RoutingQuery struct {
	peers         *Peers
	ask           Ask
	firstLeg      *RoutingQuery            // for a further leg: the first leg's query, which decides for all legs; nil: this is the first
	waitCounted   bool                     // the metrics have counted that the request had to wait
	policyName    string                   // the policy that chose an engine of this region
	regionAllowed func(region string) bool // whether residency allows a region; nil: it allows all
	legs          int                      // number of legs for which the query decides
	roundSettings *policy.Settings         // settings of the last Where; nil: Where has not asked a policy yet
	wakeAt        time.Time                // when the queue is woken for this request; zero: no wake was scheduled yet
	booked        *Forward                 // the forward that Where booked; nil: it has booked none
}

// Ask has the properties of a request by which the Peers decide.
type Ask struct {
	ID, Model, Tenant string
	Prompt            prefill.Prompt
	RingKey           uint64
	LocalOnly         bool // the request may not be forwarded
	RegionOnly        bool // the request may not leave the region
	PreferForward     bool // the request should be forwarded, because attempts in this region have failed
	InboundHop        *Hop // the hop by which another proxy sent the request; nil: a client sent it
}

// NewQuery returns the RoutingQuery of a request, for prefill.Request.Remote.
func (ps *Peers) NewQuery(a Ask) *RoutingQuery {
	isCentral := ps.cfg.Central == ps.cfg.Self.ID
	a.LocalOnly = a.LocalOnly || isCentral // the central proxy has the engines of all regions
	return &RoutingQuery{peers: ps, ask: a, legs: 1, regionAllowed: ps.RegionFilter(a.Tenant, a.Model)}
}

// SetLegs sets the number of legs of the request: a request with several prompts has a leg for each of them. Without it, the number is
// 1.
func (q *RoutingQuery) SetLegs(n int) { q.legs = n }

// NewLeg returns the RoutingQuery of another leg of the same request. All legs follow the decision for the first leg.
func (q *RoutingQuery) NewLeg(id string, p prefill.Prompt) *RoutingQuery {
	leg := &RoutingQuery{peers: q.peers, ask: q.ask, firstLeg: q, regionAllowed: q.regionAllowed}
	leg.ask.ID, leg.ask.Prompt, leg.ask.LocalOnly = id, p, true // only the first leg may decide that the request is forwarded
	return leg
}

// Stay makes the request stay in this region with all its legs, because one leg is served here. It implements prefill.RemoteRegions, as
// do Offered, Queued, Where and Takes. The scheduler calls them under its lock.
func (q *RoutingQuery) Stay() {
	if q.firstLeg != nil { // the first leg of a request decides where all its legs go
		q = q.firstLeg
	}
	q.ask.LocalOnly = true
}

// Forward is the forward that Where booked; nil: the request is served in this region, or the proxy that sent it must ask
// again.
func (q *RoutingQuery) Forward() *Forward { return q.booked }

// Prompt returns the request's prompt, by which engines and peers with cached tokens of it are found.
func (q *RoutingQuery) Prompt() prefill.Prompt { return q.ask.Prompt }

// Offered reports whether the request may be forwarded to a peer that serves its model.
func (q *RoutingQuery) Offered() bool {
	if q.firstLeg != nil { // the first leg of a request decides where all its legs go
		q = q.firstLeg
	}
	return !q.ask.LocalOnly && q.peers.anyPeerServes(q.ask.Model, q.mayForwardTo)
}

// Queued records that the request entered the arrival queue of its model, or left it. waiting is the number of requests in the
// queue now. From this the policies learn how fast the queue empties.
func (q *RoutingQuery) Queued(now time.Time, entered bool, waiting int) {
	ps := q.peers
	ps.mu.Lock()
	defer ps.mu.Unlock()
	s := ps.stateOf(q.ask.Model)
	if entered {
		s.departureGap.Entered(ps.sinceStartMs(now))
	} else {
		s.departureGap.Departed(ps.sinceStartMs(now), waiting)
	}
	ps.metrics.queue.WithLabelValues(q.ask.Model).Set(float64(waiting))
}

// Where decides where the first request of the queue is served. With the first request of a round it begins a round of the
// policy. It returns:
//
//   - ToHere: this region serves the request;
//   - ToThere: a peer serves it. Where has booked the forward, which the method Forward returns. If it has booked none, the request goes
//     back to the proxy that forwarded it here;
//   - WaitsAlone or ModelWaits: it waits. If it waits for a limited time, Where wakes the queue at the end of this time.
//
// The policy decides, except for a request that must go to a certain peer (prescribedPeer).
func (q *RoutingQuery) Where(h *prefill.Here) prefill.Where {
	ps := q.peers
	running, maxRunning := ps.cfg.Running(h.Model) // requests on the least busy decode rank; how many all ranks can run at once
	noRanks := maxRunning == 0                     // no decode rank here takes requests for the model
	ps.mu.Lock()
	defer ps.mu.Unlock()
	s := ps.stateOf(h.Model)
	if s.round != h.Round {
		ps.startRound(s, h, running, !noRanks)
	}
	maySendBack := q.ask.LocalOnly && q.ask.InboundHop != nil // another proxy sent it, and it may not be forwarded once more
	// Siblings are proxies with the same engines, and each decode group has one of them as its owner. If no rank of the groups that
	// this proxy owns takes requests for the model (noRanks), and the request may not be sent on, no forward is booked: the proxy that
	// sent the request gets it back, and asks again who decodes the model.
	if ps.cfg.Siblings && noRanks && maySendBack {
		return prefill.ToThere
	}
	q.roundSettings = &s.settings
	if i := q.prescribedPeer(s, noRanks); i >= 0 {
		s.policy.CountSent(&policy.Request{Tokens: h.Tokens, Legs: q.legs}, i)
		notComputed := math.Inf(1) // the cost in this region, with which nothing is compared
		return q.bookForward(s, h, policy.Decision{Candidate: i, LocalMs: notComputed})
	}
	return q.askPolicy(s, h)
}

// askPolicy lets the policy decide about the request: an engine of this region serves it, a peer gets it, or it waits. It is called with
// the lock of Peers held.
func (q *RoutingQuery) askPolicy(s *modelState, h *prefill.Here) prefill.Where {
	if s.policy.Done() { // neither this request nor any other of the model can go anywhere in this round
		q.countWait(s)
		return prefill.ModelWaits
	}
	r := q.policyRequest(s, h)
	d := s.policy.Next(&r)
	switch d.Act {
	case policy.Send:
		q.policyName = s.policy.Name()
		return prefill.ToHere
	case policy.Forward:
		return q.bookForward(s, h, d)
	}
	q.countWait(s)
	if d.UntilMs > 0 { // the policy decides anew at the end of this time, even if nothing else happens
		leftMs := d.UntilMs - r.WaitedMs
		q.wakeAfter(time.Duration(leftMs*float64(time.Millisecond))+1, h.Now) // 1 ns more, because Duration rounds down
	}
	return prefill.WaitsAlone
}

// prescribedPeer is the index of the candidate to which the request goes without a decision of the policy; -1: the policy decides. noRanks
// says that no decode rank here takes requests for the model. There are three such peers, in this order: the central proxy, if the config
// has one that decides for all regions; the sibling that owns the model's decode groups; and, if the request should not run here, the peer
// that will probably answer first.
func (q *RoutingQuery) prescribedPeer(s *modelState, noRanks bool) int {
	ps := q.peers
	if q.ask.LocalOnly {
		return -1
	}
	if i := q.centralPeer(s); i >= 0 { // below 0: there is no central proxy, or the request cannot go there now
		return i
	}
	if ps.cfg.Siblings && noRanks { // no group that is owned here decodes the model, but a group of a sibling may
		if i := q.ownerSibling(s); i >= 0 {
			return i
		}
	}
	if q.ask.PreferForward || ps.cfg.Draining() { // the request should not run here even if the policy prefers it
		return q.soonestAvailable(s)
	}
	return -1
}

// wakeAfter wakes the queue after the time d, unless a timer that runs for this request wakes it by then. At each wake of the queue, all
// requests that wait are decided again: with a timer for each decision, the number of timers would multiply.
func (q *RoutingQuery) wakeAfter(d time.Duration, now time.Time) {
	at := now.Add(d)
	timerRuns := q.wakeAt.After(now)
	muchSooner := !at.After(q.wakeAt.Add(-time.Millisecond)) // by 1 ms or more
	if timerRuns && !muchSooner {
		return
	}
	q.wakeAt = at
	q.peers.clock.After(d, q.peers.cfg.Queue.Wake)
}

// Takes reports whether the push mode allows one more request on a prefill engine, by the engine's present state. The policy
// has only seen the state at the begin of the round.
func (q *RoutingQuery) Takes(p *prefill.Prefiller) bool {
	if q.roundSettings == nil { // no policy was asked, so no push mode applies
		return true
	}
	state := policyReplica(p, q.roundSettings)
	state.Healthy, state.GateOpen = true, true // the scheduler has checked health and gate already
	maxSends, _ := q.roundSettings.JudgeReplica(&state)
	return maxSends > 0
}

// countWait counts in the metrics that the request has to wait, once per request.
func (q *RoutingQuery) countWait(s *modelState) {
	if !q.waitCounted {
		q.waitCounted = true
		q.peers.metrics.countDecision(s.policy.Name(), policy.Hold)
	}
}

// CountLocal counts in the metrics that an engine of this region serves the request.
func (q *RoutingQuery) CountLocal() {
	q.peers.metrics.countDecision(q.policyName, policy.Send)
}

// startRound begins a round with the present state of all candidates, and records in the metrics which peers are available. It is
// called with ps.mu held, like the functions below. running is the number of requests on the least busy decode rank; decodes says
// whether any decode rank here takes requests for the model.
func (ps *Peers) startRound(s *modelState, h *prefill.Here, running float64, decodes bool) {
	s.round = h.Round
	s.settings = roundSettings(&s.policy, &h.Local)
	s.candidates = localCandidates(s.candidates[:0], &s.settings, &h.Local, running, decodes)
	s.localCount = len(s.candidates)
	s.peers = s.peers[:0]
	for _, p := range ps.peers {
		p.expireReservations(ps, h.Now)
		v := p.policyView(ps, h.Model, h.Now)
		candidate := s.policy.PeerCandidate(&v)
		ps.recordReason(p, h.Model, candidate.Why)
		s.candidates = append(s.candidates, candidate)
		s.peers = append(s.peers, p)
	}
	// The gap is the average time between two departures from the arrival queue. By it, the policy predicts how long a request waits
	// behind those that it finds there.
	departureGapMs := s.departureGap.Ms()
	s.policy.Begin(s.candidates, departureGapMs)
}

// roundSettings returns the settings of a policy for the present round. If MaxUnanswered is Auto, it is replaced by a number that
// follows the traffic, see policy.AutoUnanswered.
func roundSettings(p *policy.Policy, l *prefill.Local) policy.Settings {
	set := *p.Settings()
	if set.MaxUnanswered == policy.Auto {
		live := 0
		for i := range l.Prefillers {
			if l.Prefillers[i].Live {
				live++
			}
		}
		set.MaxUnanswered = policy.AutoUnanswered(l.ArrivalsPerS/float64(max(1, live)), l.TTFTMs)
	}
	return set
}

// localCandidates appends the prefill engines of this region to dst as candidates. They count as unhealthy if no decode rank of this
// region serves the model (decodes). running is the number of requests on the least busy decode rank. It is the same for all candidates,
// because the prefill engine does not decide which rank decodes the request.
func localCandidates(dst []policy.Candidate, set *policy.Settings, l *prefill.Local, running float64, decodes bool) []policy.Candidate {
	for i := range l.Prefillers {
		prefiller := &l.Prefillers[i]
		replica := policyReplica(prefiller, set)
		replica.Healthy = prefiller.Live && decodes
		maxSends, why := set.JudgeReplica(&replica)
		dst = append(dst, policy.Candidate{
			ID: prefiller.ID, Why: why, MaxSends: maxSends,
			// The time to the first token, in ms: the round trip to an engine on another site, the prefill per new token and
			// per prompt, and the correction by recent errors of such predictions.
			RTTMs: prefiller.RTTMs, TPMs: prefiller.TPMs, T0Ms: prefiller.T0Ms, ResidualMs: prefiller.ResidualMs,
			// When the KV cache has room: ms until a prompt of 0 tokens has room, and further ms for each token of the prompt.
			KVRoomMs: prefiller.Room.InMs, KVTokenMs: prefiller.Room.TokenMs,
			QueuedTokens: prefiller.QueuedNewTokens, Running: running, Outstanding: float64(prefiller.Held),
		})
	}
	return dst
}

// policyReplica converts the state of a prefill engine for a policy. Its credit is how many requests may be sent to the engine before the
// next scrape of its gauges. It is counted from the last scrape in which no request waited: how many requests the engine could begin then
// (Settings.Credit), plus those that were answered since then, less those that were sent since then. It is at most CreditMax. If requests
// waited at the very last scrape, Settings.Credit is 0.
func policyReplica(prefiller *prefill.Prefiller, set *policy.Settings) policy.Replica {
	maxSeqs := cmp.Or(prefiller.MaxSeqs, math.MaxInt) // 0: not known, so it is no limit
	creditAtScrape := set.Credit(prefiller.Ran, prefiller.WaitingAtScrape, maxSeqs)
	answeredLessSent := prefiller.Answered // the field counts the answered requests, less those that were sent
	return policy.Replica{
		Healthy: prefiller.Live, GateOpen: prefiller.Open, GateWillOpen: prefiller.KVGateWillOpen,
		Unanswered: prefiller.Unanswered, Outstanding: prefiller.Held,
		ForeignWaiting: prefiller.OthersWaiting, Pending: prefiller.WaitingAtScrape,
		Credit: min(creditAtScrape+answeredLessSent, set.CreditMax),
	}
}

// centralPeer is the index of the central proxy's candidate, if the request may go there, and it is available or may be waited
// for; -1: this proxy decides itself.
func (q *RoutingQuery) centralPeer(s *modelState) int {
	if !q.peers.cfg.Follows() {
		return -1
	}
	for k, p := range s.peers {
		i := s.localCount + k
		isCentral := p.conf.ID == q.peers.cfg.Central
		if isCentral && s.candidates[i].Why.Awaitable() && q.mayForwardTo(p) {
			return i
		}
	}
	return -1
}

// soonestAvailable is the index of the available peer's candidate that will probably answer first; -1: none. It is used for requests
// that this region sends away because it drains or fails.
func (q *RoutingQuery) soonestAvailable(s *modelState) int {
	return q.soonest(s, func(_ *peer, i int) bool { return s.policy.Takes(i) })
}

// soonest is the index of the peer's candidate that will probably answer first, among those for which isSuitable returns true and to
// which the request may go; -1: none. Available peers come before the others. isSuitable gets a peer and the index of its candidate.
func (q *RoutingQuery) soonest(s *modelState, isSuitable func(p *peer, i int) bool) int {
	best := -1
	for k, p := range s.peers {
		i := s.localCount + k
		if !q.mayForwardTo(p) || !isSuitable(p, i) {
			continue
		}
		if best < 0 || sooner(&s.candidates[i], &s.candidates[best]) {
			best = i
		}
	}
	return best
}

// sooner reports whether a request would probably be answered sooner at a than at b. Available candidates come before the others.
func sooner(a, b *policy.Candidate) bool {
	if aAvailable, bAvailable := a.Why == policy.Available, b.Why == policy.Available; aAvailable != bAvailable {
		return aAvailable
	}
	return a.RTTMs+a.WaitMs < b.RTTMs+b.WaitMs
}

// policyRequest converts the query for a policy. The result shares memory of s, and is valid until the next call.
func (q *RoutingQuery) policyRequest(s *modelState, h *prefill.Here) policy.Request {
	// A request that may not leave the region could still go to a sibling. But then prescribedPeer sends it there, and not the policy.
	noPeers := q.ask.LocalOnly || q.ask.RegionOnly
	r := policy.Request{
		ID: q.ask.ID, Key: q.ask.RingKey, Tokens: h.Tokens, LocalOnly: noPeers, WaitedMs: ms(h.Now.Sub(h.Since)), Legs: q.legs,
	}
	// hits and barred have one element for each candidate; the local candidates come first.
	s.hits = slices.Grow(s.hits[:0], len(s.candidates))[:len(s.candidates)]
	s.barred = slices.Grow(s.barred[:0], len(s.candidates))[:len(s.candidates)]
	for i := range s.candidates {
		s.hits[i], s.barred[i] = 0, false
		// A local candidate and its engine have the same index. Within a round there are as many of both, because all its requests
		// have the same engines. len(h.Prefillers) is only checked so that a mistake in this causes no panic.
		isLocal := i < s.localCount && i < len(h.Prefillers)
		if isLocal {
			prefiller := &h.Prefillers[i]
			s.hits[i] = int32(prefiller.HitTokens)
			s.barred[i] = prefiller.Region != "" && q.regionAllowed != nil && !q.regionAllowed(prefiller.Region)
		}
	}
	for i, p := range s.peers {
		if !noPeers {
			s.hits[s.localCount+i] = int32(q.hitTokens(p, h.Tokens))
			s.barred[s.localCount+i] = !q.mayForwardTo(p)
		}
	}
	r.Hits, r.Barred = s.hits, s.barred
	return r
}

// hitTokens is how many of the prompt's tokens are predicted to be cached at a peer, by the prompts that were forwarded to it.
func (q *RoutingQuery) hitTokens(p *peer, tokens int) int {
	keys := q.ask.Prompt.Keys
	if len(keys) == 0 { // without blocks no hit can be predicted
		return 0
	}
	matchedTokens := int(float64(p.matchedBlocks(keys)) * q.blockTokens(tokens))
	return min(matchedTokens, max(0, tokens-1)) // an engine always computes at least one token
}

// matchedBlocks is how many of a prompt's first blocks are predicted to be cached at the peer. keys are the keys of its blocks.
func (p *peer) matchedBlocks(keys []index.Key) int32 {
	bySlot := p.prompts.Match(nil, keys) // an index can have a slot for each of several engines; this one has only the peer's
	if p.indexSlot.N >= len(bySlot) {    // no slot matched
		return 0
	}
	return bySlot[p.indexSlot.N]
}

// blockTokens is the number of tokens per block of the prompt. tokens is the length of the prompt. A prompt without token ids has blocks
// of bytes, whose tokens are computed by its mean number of tokens per byte.
func (q *RoutingQuery) blockTokens(tokens int) float64 {
	if b := q.ask.Prompt.BlockTokens; b > 0 {
		return float64(b)
	}
	return index.BlockBytes * float64(tokens) / float64(max(1, q.ask.Prompt.Bytes))
}

// mayForwardTo reports whether the request may be forwarded to a peer: the request may leave the region or the peer is in it, the peer
// has not forwarded the request itself, and residency allows it.
func (q *RoutingQuery) mayForwardTo(p *peer) bool {
	if q.ask.RegionOnly && p.conf.Region != q.peers.cfg.Self.Region {
		return false
	}
	if q.ask.InboundHop != nil && slices.ContainsFunc(q.ask.InboundHop.Via, p.conf.AnswersTo) { // the peer would refuse it as a loop
		return false
	}
	return q.regionAllowed == nil || q.regionAllowed(p.conf.Region)
}

// RegionFilter returns a function that reports whether a tenant's requests for a model may go to a region: the region must be in the
// residency lists of the tenant and of the model, as far as they have lists. nil: all regions are allowed.
func (ps *Peers) RegionFilter(tenant, model string) func(region string) bool {
	ofTenant, ofModel := ps.cfg.Residency[tenant], ps.cfg.Residency[model]
	if len(ofTenant)+len(ofModel) == 0 {
		return nil
	}
	return func(region string) bool { // an empty list allows all regions
		tenantAllows := len(ofTenant) == 0 || slices.Contains(ofTenant, region)
		return tenantAllows && (len(ofModel) == 0 || slices.Contains(ofModel, region))
	}
}

// bookForward books the request on the peer that the decision d chose. It also makes the Forward that q.Forward returns, and counts it in
// the metrics. It returns ToThere. A request with several prompts has a leg for each. The legs count as so many requests of the peer, but
// they make one forward: they go there in one call, which succeeds or fails as a whole. Its number identifies it in reserved and circuit.
func (q *RoutingQuery) bookForward(s *modelState, h *prefill.Here, d policy.Decision) prefill.Where {
	ps, p := q.peers, s.peers[d.Candidate-s.localCount] // the local candidates come first
	f := q.newForward(p, h, d)
	newTokens := max(1, h.Tokens-f.hitTokens) // an engine always computes at least one token
	for range q.legs {
		p.reserved.Book(f.number, float64(newTokens)) // the peer has yet to report these tokens in an answer to a probe
	}
	p.circuit.Send(f.number, h.Now)
	p.inflight[f] = struct{}{}
	f.unansweredCount = q.legs
	p.unanswered += f.unansweredCount
	if len(f.prompt.Keys) > 0 {
		// From now on the prompt counts as cached there, until the forward fails.
		f.speculation = p.prompts.Speculate(p.indexSlot, f.prompt.Keys)
	}
	q.booked = f
	ps.metrics.countDecision(s.policy.Name(), policy.Forward)
	ps.metrics.inflight.WithLabelValues(p.id).Inc()
	return prefill.ToThere
}

// newForward returns a Forward, with a new number, of the request to a peer. It books nothing on the peer. h is the state of this region
// for the request, and d the decision that chose the peer.
func (q *RoutingQuery) newForward(p *peer, h *prefill.Here, d policy.Decision) *Forward {
	q.peers.lastForward++
	f := &Forward{
		peers: q.peers, peer: p, number: q.peers.lastForward, model: h.Model, rid: q.ask.ID, inboundHop: q.ask.InboundHop, tenant: q.ask.Tenant,
		hitTokens: q.hitTokens(p, h.Tokens), predicted: d.Terms, localMs: d.LocalMs,
		prompt: q.ask.Prompt, blockTokens: q.blockTokens(h.Tokens), decidedAt: h.Now, queuedAt: h.Since,
	}
	// Infinite: no engine of this region could serve the request, or no costs were compared. The receipt is JSON, which has no infinite
	// numbers, so -1 stands for it.
	if math.IsInf(f.localMs, 0) {
		f.localMs = -1
	}
	return f
}

// recordReason records in the metrics whether a peer is available for a model. When the reason changes, it also counts the new one,
// unless that is Available. It records and counts only the first maxModels models, because adapters may come and go under ever
// new names.
func (ps *Peers) recordReason(p *peer, model string, why policy.Reason) {
	before, known := p.reasons[model]
	unchanged := known && before == why
	tooMany := !known && len(p.reasons) >= maxModels
	if unchanged || tooMany {
		return
	}
	p.reasons[model] = why
	ps.metrics.peerAvailable.WithLabelValues(p.id, model).Set(oneIf(why == policy.Available))
	if why != policy.Available {
		ps.metrics.unavailable.WithLabelValues(p.id, why.String()).Inc()
	}
}

// recordAvailability records in the metrics whether a peer is available, for each model with a state.
func (ps *Peers) recordAvailability(p *peer, now time.Time) {
	for model, s := range ps.models {
		v := p.policyView(ps, model, now)
		ps.recordReason(p, model, s.policy.Judge(&v))
	}
}

// RingKeyOf is the position of a request on a hash ring: by its session, or by the client's address if session is 0.
func RingKeyOf(session uint64, address string) uint64 {
	if session != 0 {
		return policy.RingKey(strconv.FormatUint(session, 16), "", "")
	}
	return policy.RingKey("", "", address)
}

// ownerSibling is the index of the candidate for the sibling that decodes the request's model; -1: none is known. The sibling may be
// full, because the requests of all siblings wait in its queue. It may be draining, because it continues until another proxy owns its
// groups.
func (q *RoutingQuery) ownerSibling(s *modelState) int {
	return q.soonest(s, func(p *peer, i int) bool {
		// For the policy, a sibling offers only the models that it decodes (see policyView), and no request may wait for a peer
		// that does not offer the model (NotOffered). So a sibling for which requests may wait is the owner. Draining does not show
		// it: ask decodesModel.
		why := s.candidates[i].Why
		drainsAsOwner := why == policy.Draining && p.decodesModel(q.ask.Model)
		isOwner := why.Awaitable() || drainsAsOwner
		return p.sibling && isOwner
	})
}
