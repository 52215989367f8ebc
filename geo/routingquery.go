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

// RoutingQuery implements prefill.RemoteRegions for one request.
type RoutingQuery struct {
	peers *Peers
	ask   Ask
	// firstLeg decides for all legs; nil: this is the first.
	firstLeg      *RoutingQuery
	waitCounted   bool
	policyName    string                   // that chose an engine of this region
	regionAllowed func(region string) bool // by residency; nil: all are allowed
	legs          int                      // for which the query decides
	roundSettings *policy.Settings         // of the last Where; nil: no policy was asked
	// wakeAt is when the queue is woken for this request; zero: not scheduled.
	wakeAt time.Time
	booked *Forward // by Where; nil: none
}

// Ask is what the Peers must know of a request.
type Ask struct {
	ID, Model, Tenant string
	Prompt            prefill.Prompt
	RingKey           uint64
	LocalOnly         bool // may not be forwarded
	RegionOnly        bool // may not leave the region
	PreferForward     bool // attempts in this region have failed
	InboundHop        *Hop // by which another proxy sent the request; nil: a client did
}

// NewQuery is for prefill.Request.Remote.
func (ps *Peers) NewQuery(a Ask) *RoutingQuery {
	isCentral := ps.cfg.Central == ps.cfg.Self.ID
	a.LocalOnly = a.LocalOnly || isCentral // the central proxy has the engines of all regions
	return &RoutingQuery{peers: ps, ask: a, legs: 1, regionAllowed: ps.RegionFilter(a.Tenant, a.Model)}
}

// SetLegs sets the number of legs: a request has one for each of its prompts.
func (q *RoutingQuery) SetLegs(n int) { q.legs = n }

// NewLeg is for another leg, which follows the decision for the first one.
func (q *RoutingQuery) NewLeg(id string, p prefill.Prompt) *RoutingQuery {
	leg := &RoutingQuery{peers: q.peers, ask: q.ask, firstLeg: q, regionAllowed: q.regionAllowed}
	leg.ask.ID, leg.ask.Prompt, leg.ask.LocalOnly = id, p, true
	return leg
}

// Stay makes all legs stay in this region, because one is served here. The scheduler calls this and
// the other methods of prefill.RemoteRegions under its lock.
func (q *RoutingQuery) Stay() {
	if q.firstLeg != nil {
		q = q.firstLeg
	}
	q.ask.LocalOnly = true
}

// Forward is what Where booked; nil: the request is served here, or goes back to its sender.
func (q *RoutingQuery) Forward() *Forward { return q.booked }

// Prompt is that of the request.
func (q *RoutingQuery) Prompt() prefill.Prompt { return q.ask.Prompt }

// Offered reports whether the request may go to a peer that serves its model.
func (q *RoutingQuery) Offered() bool {
	if q.firstLeg != nil {
		q = q.firstLeg
	}
	return !q.ask.LocalOnly && q.peers.anyPeerServes(q.ask.Model, q.mayForwardTo)
}

// Queued records an entry into the arrival queue of the model, or a departure, which show how fast
// the queue empties. waiting is its length now.
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

// Where decides where the first request of the queue is served:
//
//   - ToHere: in this region;
//   - ToThere: at a peer, by the booked Forward; without one, at the proxy that sent it;
//   - WaitsAlone or ModelWaits: it waits; Where wakes the queue when a limited wait ends.
//
// The policy decides, unless the request must go to a certain peer (prescribedPeer).
func (q *RoutingQuery) Where(h *prefill.Here) prefill.Where {
	ps := q.peers
	running, maxRunning := ps.cfg.Running(h.Model) // on the least busy decode rank; at most, on all
	noRanks := maxRunning == 0                     // none takes requests for the model
	ps.mu.Lock()
	defer ps.mu.Unlock()
	s := ps.stateOf(h.Model)
	if s.round != h.Round {
		ps.startRound(s, h, running, !noRanks)
	}
	maySendBack := q.ask.LocalOnly && q.ask.InboundHop != nil
	// Siblings have the same engines, and each decode group is owned by one of them. If no group that
	// is owned here decodes the model, the sender gets the request back and asks again who does.
	if ps.cfg.Siblings && noRanks && maySendBack {
		return prefill.ToThere
	}
	q.roundSettings = &s.settings
	if i := q.prescribedPeer(s, noRanks); i >= 0 {
		s.policy.CountSent(&policy.Request{Tokens: h.Tokens, Legs: q.legs}, i)
		notComputed := math.Inf(1) // nothing is compared
		return q.bookForward(s, h, policy.Decision{Candidate: i, LocalMs: notComputed})
	}
	return q.askPolicy(s, h)
}

// The lock of Peers is held.
func (q *RoutingQuery) askPolicy(s *modelState, h *prefill.Here) prefill.Where {
	if s.policy.Done() {
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
	if d.UntilMs > 0 {
		leftMs := d.UntilMs - r.WaitedMs
		// 1 ns more, because Duration rounds down.
		q.wakeAfter(time.Duration(leftMs*float64(time.Millisecond))+1, h.Now)
	}
	return prefill.WaitsAlone
}

// prescribedPeer is the candidate that gets the request without a decision of the policy; -1: none.
// It is the central proxy, or the sibling that owns the model's decode groups, or, if the request
// should not run here, the peer that will probably answer first.
func (q *RoutingQuery) prescribedPeer(s *modelState, noRanks bool) int {
	ps := q.peers
	if q.ask.LocalOnly {
		return -1
	}
	if i := q.centralPeer(s); i >= 0 {
		return i
	}
	if ps.cfg.Siblings && noRanks { // a group of a sibling may decode the model
		if i := q.ownerSibling(s); i >= 0 {
			return i
		}
	}
	if q.ask.PreferForward || ps.cfg.Draining() {
		return q.soonestAvailable(s)
	}
	return -1
}

// wakeAfter sets no timer if one wakes the queue by then. Each wake decides all requests again: a
// timer for each decision would multiply them.
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

// Takes asks the push mode by the engine's present state. The policy has only seen that of the
// round's begin.
func (q *RoutingQuery) Takes(p *prefill.Prefiller) bool {
	if q.roundSettings == nil {
		return true
	}
	state := policyReplica(p, q.roundSettings)
	state.Healthy, state.GateOpen = true, true // the scheduler has checked these
	maxSends, _ := q.roundSettings.JudgeReplica(&state)
	return maxSends > 0
}

func (q *RoutingQuery) countWait(s *modelState) {
	if !q.waitCounted {
		q.waitCounted = true
		q.peers.metrics.countDecision(s.policy.Name(), policy.Hold)
	}
}

// CountLocal counts that an engine of this region serves the request.
func (q *RoutingQuery) CountLocal() {
	q.peers.metrics.countDecision(q.policyName, policy.Send)
}

// startRound begins a round with the present candidates. ps.mu is held, as in the functions below.
// running is of the least busy decode rank; decodes: a rank here takes requests for the model.
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
	departureGapMs := s.departureGap.Ms()
	s.policy.Begin(s.candidates, departureGapMs)
}

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

// localCandidates appends the engines of this region to dst. running is that of the least busy
// decode rank for all of them: the prefill engine does not decide which rank decodes.
func localCandidates(dst []policy.Candidate, set *policy.Settings, l *prefill.Local, running float64, decodes bool) []policy.Candidate {
	for i := range l.Prefillers {
		prefiller := &l.Prefillers[i]
		replica := policyReplica(prefiller, set)
		replica.Healthy = prefiller.Live && decodes
		maxSends, why := set.JudgeReplica(&replica)
		dst = append(dst, policy.Candidate{
			ID: prefiller.ID, Why: why, MaxSends: maxSends,
			RTTMs: prefiller.RTTMs, TPMs: prefiller.TPMs, T0Ms: prefiller.T0Ms, ResidualMs: prefiller.ResidualMs,
			KVRoomMs: prefiller.Room.InMs, KVTokenMs: prefiller.Room.TokenMs,
			QueuedTokens: prefiller.QueuedNewTokens, Running: running, Outstanding: float64(prefiller.Held),
		})
	}
	return dst
}

// policyReplica converts an engine for a policy. Its credit is that of the last scrape in which no
// request waited (Settings.Credit), plus the requests answered since then, less those sent.
func policyReplica(prefiller *prefill.Prefiller, set *policy.Settings) policy.Replica {
	maxSeqs := cmp.Or(prefiller.MaxSeqs, math.MaxInt) // 0: not known
	creditAtScrape := set.Credit(prefiller.Ran, prefiller.WaitingAtScrape, maxSeqs)
	answeredLessSent := prefiller.Answered
	return policy.Replica{
		Healthy: prefiller.Live, GateOpen: prefiller.Open, GateWillOpen: prefiller.KVGateWillOpen,
		Unanswered: prefiller.Unanswered, Outstanding: prefiller.Held,
		ForeignWaiting: prefiller.OthersWaiting, Pending: prefiller.WaitingAtScrape,
		Credit: min(creditAtScrape+answeredLessSent, set.CreditMax),
	}
}

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

// soonestAvailable is for requests that this region sends away.
func (q *RoutingQuery) soonestAvailable(s *modelState) int {
	return q.soonest(s, func(_ *peer, i int) bool { return s.policy.Takes(i) })
}

// soonest is the candidate that will probably answer first, among the suitable peers to which the
// request may go; -1: none. Available ones come first.
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

func sooner(a, b *policy.Candidate) bool {
	if aAvailable, bAvailable := a.Why == policy.Available, b.Why == policy.Available; aAvailable != bAvailable {
		return aAvailable
	}
	return a.RTTMs+a.WaitMs < b.RTTMs+b.WaitMs
}

// policyRequest shares memory of s until the next call.
func (q *RoutingQuery) policyRequest(s *modelState, h *prefill.Here) policy.Request {
	// A sibling could still get it, but then prescribedPeer sends it there.
	noPeers := q.ask.LocalOnly || q.ask.RegionOnly
	r := policy.Request{
		ID: q.ask.ID, Key: q.ask.RingKey, Tokens: h.Tokens, LocalOnly: noPeers, WaitedMs: ms(h.Now.Sub(h.Since)), Legs: q.legs,
	}
	// By candidate; the local ones come first.
	s.hits = slices.Grow(s.hits[:0], len(s.candidates))[:len(s.candidates)]
	s.barred = slices.Grow(s.barred[:0], len(s.candidates))[:len(s.candidates)]
	for i := range s.candidates {
		s.hits[i], s.barred[i] = 0, false
		// Within a round there are as many local candidates as engines; the second check only keeps a
		// mistake from a panic.
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

// hitTokens predicts the cached tokens by the prompts that were forwarded there.
func (q *RoutingQuery) hitTokens(p *peer, tokens int) int {
	keys := q.ask.Prompt.Keys
	if len(keys) == 0 {
		return 0
	}
	matchedTokens := int(float64(p.matchedBlocks(keys)) * q.blockTokens(tokens))
	return min(matchedTokens, max(0, tokens-1)) // an engine always computes at least one
}

func (p *peer) matchedBlocks(keys []index.Key) int32 {
	bySlot := p.prompts.Match(nil, keys) // this index has only the peer's slot
	if p.indexSlot.N >= len(bySlot) {
		return 0
	}
	return bySlot[p.indexSlot.N]
}

// blockTokens: a prompt without token ids has blocks of bytes, whose tokens follow from its mean
// number per byte.
func (q *RoutingQuery) blockTokens(tokens int) float64 {
	if b := q.ask.Prompt.BlockTokens; b > 0 {
		return float64(b)
	}
	return index.BlockBytes * float64(tokens) / float64(max(1, q.ask.Prompt.Bytes))
}

func (q *RoutingQuery) mayForwardTo(p *peer) bool {
	if q.ask.RegionOnly && p.conf.Region != q.peers.cfg.Self.Region {
		return false
	}
	// The peer would refuse it as a loop.
	if q.ask.InboundHop != nil && slices.ContainsFunc(q.ask.InboundHop.Via, p.conf.AnswersTo) {
		return false
	}
	return q.regionAllowed == nil || q.regionAllowed(p.conf.Region)
}

// RegionFilter reports whether a region is in the residency lists of tenant and model, as far as
// they have lists; nil: all are allowed.
func (ps *Peers) RegionFilter(tenant, model string) func(region string) bool {
	ofTenant, ofModel := ps.cfg.Residency[tenant], ps.cfg.Residency[model]
	if len(ofTenant)+len(ofModel) == 0 {
		return nil
	}
	return func(region string) bool {
		tenantAllows := len(ofTenant) == 0 || slices.Contains(ofTenant, region)
		return tenantAllows && (len(ofModel) == 0 || slices.Contains(ofModel, region))
	}
}

// bookForward books the request on the peer of d. Its legs count as so many requests there, but
// they go in one call, which succeeds or fails as a whole.
func (q *RoutingQuery) bookForward(s *modelState, h *prefill.Here, d policy.Decision) prefill.Where {
	ps, p := q.peers, s.peers[d.Candidate-s.localCount]
	f := q.newForward(p, h, d)
	newTokens := max(1, h.Tokens-f.hitTokens) // an engine always computes at least one
	for range q.legs {
		// The peer has yet to report these tokens in an answer to a probe.
		p.reserved.Book(f.number, float64(newTokens))
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

// newForward books nothing.
func (q *RoutingQuery) newForward(p *peer, h *prefill.Here, d policy.Decision) *Forward {
	q.peers.lastForward++
	f := &Forward{
		peers: q.peers, peer: p, number: q.peers.lastForward, model: h.Model, rid: q.ask.ID, inboundHop: q.ask.InboundHop, tenant: q.ask.Tenant,
		hitTokens: q.hitTokens(p, h.Tokens), predicted: d.Terms, localMs: d.LocalMs,
		prompt: q.ask.Prompt, blockTokens: q.blockTokens(h.Tokens), decidedAt: h.Now, queuedAt: h.Since,
	}
	// No engine here could serve it, or no costs were compared. JSON has no infinite numbers.
	if math.IsInf(f.localMs, 0) {
		f.localMs = -1
	}
	return f
}

// recordReason sets the metrics, for the first maxModels models only: adapters may come under ever
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

func (ps *Peers) recordAvailability(p *peer, now time.Time) {
	for model, s := range ps.models {
		v := p.policyView(ps, model, now)
		ps.recordReason(p, model, s.policy.Judge(&v))
	}
}

// RingKeyOf is a position on a hash ring: by session or, if that is 0, by the client's address.
func RingKeyOf(session uint64, address string) uint64 {
	if session != 0 {
		return policy.RingKey(strconv.FormatUint(session, 16), "", "")
	}
	return policy.RingKey("", "", address)
}

// ownerSibling is the sibling that decodes the model; -1: none is known. It may be full, because
// the requests of all siblings wait in its queue, or draining, because it continues until another
// proxy owns its groups.
func (q *RoutingQuery) ownerSibling(s *modelState) int {
	return q.soonest(s, func(p *peer, i int) bool {
		// For the policy a sibling offers only models that it decodes (see policyView), and NotOffered is
		// not awaitable. Draining does not show whether it decodes the model.
		why := s.candidates[i].Why
		drainsAsOwner := why == policy.Draining && p.decodesModel(q.ask.Model)
		isOwner := why.Awaitable() || drainsAsOwner
		return p.sibling && isOwner
	})
}
