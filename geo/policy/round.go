package policy

import (
	"fmt"
	"math"
	"slices"

	"evenkeel/internal/namedargs"
)

// Name has no settings, for metrics and headers.
func (p *Policy) Name() string { return p.name }

// String is what Parse reads.
func (p *Policy) String() string { return p.spec }

// Settings are the general ones, changed by the policy's own defaults and text.
func (p *Policy) Settings() *Settings { return &p.settings }

// Act is what a decision does with a request.
type Act uint8

// Metrics show these as wait, local and forward.
const (
	Hold Act = iota
	Send
	Forward
)

var actWords = [...]string{"wait", "local", "forward"}

func (a Act) String() string { return actWords[a] }

// Decision is for one request.
type Decision struct {
	Act       Act
	Candidate int   // for Hold: for which the request waits, or -1
	Terms     Terms // at Candidate
	// LocalMs is the cost at the best local replica; +Inf: there is none. It is set for forwards, and
	// by policies that compare.
	LocalMs float64
	UntilMs float64 // decide again when the request has waited so long; 0: at the next event
}

// Begin begins a round. The caller must not change candidates until it is over. For departureGapMs,
// see DepartureGap.
func (p *Policy) Begin(candidates []Candidate, departureGapMs float64) {
	p.candidates, p.departureGapMs = candidates, departureGapMs
	p.waitingAhead, p.peersBlocked = 0, false
	p.openReplicas, p.openPeers = 0, 0
	p.charges = p.charges[:0]
	for i := range candidates {
		candidate := &candidates[i]
		c := charge{}
		if candidate.Why == Available && candidate.MaxSends > 0 {
			c.sendsLeft = candidate.MaxSends
			if candidate.Peer {
				p.openPeers++
			} else {
				p.openReplicas++
			}
		}
		p.charges = append(p.charges, c)
	}
	if p.rule.chooseLocal == byRing { // such a rule chooses its peers so, too
		for _, among := range []side{amongReplicas, amongPeers} {
			p.rings[among].refresh(candidates, among)
		}
	}
}

// Done reports that no further request of this round can be sent anywhere.
func (p *Policy) Done() bool {
	noPeerPossible := p.openPeers == 0 || p.peersBlocked || p.rule.neverForwards
	return p.openReplicas == 0 && noPeerPossible
}

// Next decides for the next request in the order of arrival.
func (p *Policy) Next(r *Request) Decision {
	d := p.decide(r)
	if d.Act == Hold {
		p.waitingAhead++
		// The request is held for the best candidate, so its tokens count there. Other policies only wait
		// for a longer cache hit. Without it the request goes elsewhere.
		if d.Candidate >= 0 && p.rule.comparesAll {
			p.addCharge(r, d.Candidate)
		}
		return d
	}
	d.Terms = p.predictCost(r, d.Candidate)
	p.CountSent(r, d.Candidate)
	return d
}

// CountSent counts a request that is sent to candidate i. A caller that sends without Next must
// call it.
func (p *Policy) CountSent(r *Request, i int) {
	c := p.addCharge(r, i)
	requests := 1
	stillOpen := &p.openReplicas
	if p.candidates[i].Peer { // it gets all legs
		requests = max(1, r.Legs)
		stillOpen = &p.openPeers
	}
	wasOpen := c.sendsLeft > 0 // else it is sent to a candidate that takes none in this round
	closesNow := wasOpen && c.sendsLeft <= requests
	if closesNow {
		*stillOpen--
	}
	c.sendsLeft = max(0, c.sendsLeft-requests)
}

func (p *Policy) addCharge(r *Request, i int) *charge {
	c := &p.charges[i]
	c.newTokens += r.newTokens(i)
	c.promptTokens += float64(r.Tokens)
	return c
}

// decide counts nothing. Policies that compare no costs take a local replica, or wait for a cache
// hit, and take a peer only if no replica is available.
func (p *Policy) decide(r *Request) Decision {
	if p.rule.comparesAll {
		return p.decideByCost(r)
	}
	if i := p.choose(r, p.rule.chooseLocal, amongReplicas); i >= 0 {
		if patienceMs, holder := p.waitForHit(r, i); patienceMs > r.WaitedMs {
			return Decision{Act: Hold, Candidate: holder, UntilMs: patienceMs}
		}
		p.moveTurn(i, amongReplicas) // for byTurn
		return Decision{Act: Send, Candidate: i}
	}
	return p.decideForPeer(r)
}

// decideForPeer: no local replica is available. Requests are forwarded in the order of arrival: if
// no peer is available or cheap enough, later ones are not forwarded either. A request that may go
// to none of the available peers does not block them.
func (p *Policy) decideForPeer(r *Request) Decision {
	if r.LocalOnly || p.rule.neverForwards {
		return Decision{Act: Hold, Candidate: noCandidate}
	}
	if p.peersBlocked || p.openPeers == 0 {
		p.peersBlocked = true
		return Decision{Act: Hold, Candidate: noCandidate}
	}
	i := p.choose(r, p.rule.choosePeer, amongPeers)
	if i < 0 { // residency forbids all of them for this request
		return Decision{Act: Hold, Candidate: noCandidate}
	}
	localMs := p.cheapestLocalMs(r)
	cheaper := p.predictCost(r, i).Total()+p.settings.MinGainMs+p.candidates[i].DistrustMs < localMs
	if p.rule.peerMustBeCheaper && !cheaper {
		p.peersBlocked = true
		return Decision{Act: Hold, Candidate: noCandidate, LocalMs: localMs}
	}
	p.moveTurn(i, amongPeers) // for byTurn
	return Decision{Act: Forward, Candidate: i, LocalMs: localMs}
}

// noCandidate is also for a Hold that is not for a certain candidate.
const noCandidate = -1

// decideByCost takes the cheapest candidate, even if the request has to wait for it.
func (p *Policy) decideByCost(r *Request) Decision {
	local, peer := p.cheapest(r)
	d := Decision{Candidate: local.candidate, Terms: local.terms, LocalMs: local.costMs}
	act := Send
	if peer.candidate != noCandidate && peer.costMs+p.settings.MinGainMs < local.costMs {
		d.Candidate, d.Terms, act = peer.candidate, peer.terms, Forward
	}
	// This is false without a local replica: costMs is infinite.
	waitedLong := r.WaitedMs >= max(local.costMs, maxPeerWaitMs)
	switch {
	case d.Candidate != noCandidate && p.Takes(d.Candidate):
		d.Act = act
	case act == Forward && waitedLong && p.Takes(local.candidate):
		// The peer has been full for too long.
		d = Decision{Act: Send, Candidate: local.candidate, Terms: local.terms, LocalMs: local.costMs}
	default: // Hold
	}
	return d
}

// costed: without a candidate, the cost is infinite.
type costed struct {
	candidate int // or noCandidate
	costMs    float64
	terms     Terms
}

// cheapest returns the cheapest replica and peer that take the request now or soon.
func (p *Policy) cheapest(r *Request) (local, peer costed) {
	local = costed{candidate: noCandidate, costMs: math.Inf(1)}
	peer = local
	mayForward := !p.rule.neverForwards && !r.LocalOnly
	for i := range p.candidates {
		candidate := &p.candidates[i]
		if !candidate.Why.Awaitable() || r.barred(i) {
			continue
		}
		best, distrustMs := &local, 0.0
		if candidate.Peer {
			if !mayForward || candidate.Replicas == 0 { // no request waits for a peer without replicas
				continue
			}
			best, distrustMs = &peer, candidate.DistrustMs
		}
		terms := p.predictCost(r, i)
		costMs := terms.Total() + distrustMs
		if best.candidate == noCandidate || p.beats(r, i, costMs, best.candidate, best.costMs) {
			*best = costed{i, costMs, terms}
		}
	}
	return local, peer
}

// maxPeerWaitMs is how long a request waits for a full peer while a local replica would take it, or
// longer if that replica would need longer.
const maxPeerWaitMs = 10_000

// beats compares by cost, then by distance, then by the hash.
func (p *Policy) beats(r *Request, i int, cost float64, best int, bestCost float64) bool {
	if !sameCost(cost, bestCost) {
		return cost < bestCost
	}
	a, b := &p.candidates[i], &p.candidates[best]
	if !sameCost(a.RTTMs, b.RTTMs) {
		return a.RTTMs < b.RTTMs
	}
	return hashesFirst(r, a, b)
}

// cheapestLocalMs includes busy replicas; +Inf: there is none.
func (p *Policy) cheapestLocalMs(r *Request) float64 {
	least := math.Inf(1)
	for i := range p.candidates {
		candidate := &p.candidates[i]
		mayWaitFor := !candidate.Peer && candidate.Why.Awaitable() && !r.barred(i)
		if mayWaitFor {
			least = min(least, p.predictCost(r, i).Total())
		}
	}
	return least
}

// waitForHit is how long a request waits for the busy replica with the longest hit (holder) instead
// of going to replica i: Patience times the prefill time that this saves, from when some candidate
// could first have taken it; 0: it does not wait, and holder means nothing.
func (p *Policy) waitForHit(r *Request, i int) (patienceMs float64, holder int) {
	if p.settings.Patience == 0 {
		return 0, noCandidate
	}
	hitHere := r.hitTokens(i)
	longestHit := hitHere
	holder = noCandidate
	for busy := range p.candidates {
		candidate := &p.candidates[busy]
		mayWaitFor := !candidate.Peer && candidate.Why.Awaitable() && !r.barred(busy)
		if mayWaitFor && r.hitTokens(busy) > longestHit {
			longestHit, holder = r.hitTokens(busy), busy
		}
	}
	prefillMsPerToken := p.candidates[i].TPMs
	return p.settings.Patience * prefillMsPerToken * (longestHit - hitHere), holder
}

// Names are in the order for users.
func Names() []string {
	names := make([]string, len(policyForms))
	for i := range policyForms {
		names[i] = policyForms[i].name
	}
	return names
}

// Parse makes a policy from `name` or `name:key=value,...`; other settings are taken from s.
func (s *Settings) Parse(text string) (*Policy, error) {
	name, set, err := namedargs.Parse(text, Names())
	if err != nil {
		return nil, err
	}
	f := &policyForms[slices.IndexFunc(policyForms, func(f policyForm) bool { return f.name == name })]
	p := &Policy{name: f.name, rule: f.rule, settings: *s}
	if f.changeDefaults != nil {
		f.changeDefaults(&p.settings)
	}
	defaults := p.settings
	if err := namedargs.Apply(name, f.keys, &p.settings, set...); err != nil {
		return nil, err
	}
	// With patience, requests wait for a replica with a hit. Two things keep it from being full for
	// long: sp-p sends it only what it can begin, and with a load above 0 a larger decode batch costs
	// more.
	waitsForFullReplicas := p.settings.Push != SPP || p.settings.BatchWeight == 0
	if p.settings.Patience > 0 && waitsForFullReplicas {
		return nil, fmt.Errorf("policy %s: patience=%g needs push=sp-p and a load above 0: without them it waits for replicas that are full for "+
			"long", name, p.settings.Patience)
	}
	p.spec = namedargs.Text(name, f.keys, &p.settings, &defaults) // without the defaults
	return p, nil
}

type policyForm struct {
	name           string
	rule           rule
	keys           []setting
	changeDefaults func(s *Settings)
}

// They are listed to users in this order.
var policyForms = []policyForm{
	{name: "finish", rule: rule{comparesAll: true}, keys: slices.Concat(pushKeys, costKeys)},
	{
		name: "gorgo", rule: rule{chooseLocal: byCost, choosePeer: byCost, peerMustBeCheaper: true},
		keys:           slices.Concat(pushKeys, costKeys, patienceKeys),
		changeDefaults: func(s *Settings) { s.BatchWeight = 0 },
	},
	{name: "skylb", rule: rule{chooseLocal: byHit, choosePeer: byHit, limitsPeerQueue: true}, keys: slices.Concat(pushKeys, tauKeys)},
	{name: "skylb-ch", rule: rule{chooseLocal: byRing, choosePeer: byRing, limitsPeerQueue: true}, keys: slices.Concat(pushKeys, tauKeys)},
	{name: "least-load", rule: rule{chooseLocal: byLoad, choosePeer: byLoad}, keys: pushKeys},
	{name: "round-robin", rule: rule{chooseLocal: byTurn, choosePeer: byTurn}, keys: pushKeys},
	{name: "local-only", rule: rule{comparesAll: true, neverForwards: true}, keys: slices.Concat(pushKeys, costKeys)},
}
