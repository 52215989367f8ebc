package policy

import (
	"fmt"
	"math"
	"slices"

	"evenkeel/internal/namedargs"
)

// Name is the policy's name without its settings, for metrics and headers.
func (p *Policy) Name() string { return p.name }

// String is the policy in the form that Parse reads.
func (p *Policy) String() string { return p.spec }

// Settings returns the settings with which the policy decides: the general ones, changed by the policy's own defaults and text.
func (p *Policy) Settings() *Settings { return &p.settings }

// Act is what a decision does with a request.
type Act uint8

// Values of Act. Metrics show them as wait, local and forward.
const (
	Hold    Act = iota // the request waits
	Send               // the request goes to a local replica
	Forward            // the request goes to a peer
)

var actWords = [...]string{"wait", "local", "forward"}

func (a Act) String() string { return actWords[a] }

// Decision is a policy's decision for one request.
type Decision struct {
	Act       Act
	Candidate int     // index of the chosen candidate; for Hold: of the candidate for which it waits, or -1
	Terms     Terms   // predicted cost at Candidate
	LocalMs   float64 // predicted cost in ms at the best local replica, +Inf: none; set for forwards and by policies that compare
	UntilMs   float64 // for a Hold by waitForHit: decide again when the request has waited for this time; 0: at the next event
}

// Begin begins a round with the state of all local replicas and peers. The caller must not change candidates until the round is
// over. departureGapMs is the average time between two departures from the region's arrival queue; see DepartureGap.
func (p *Policy) Begin(candidates []Candidate, departureGapMs float64) {
	p.candidates, p.departureGapMs = candidates, departureGapMs
	p.waitingAhead, p.peersBlocked = 0, false // no request of the round waits yet
	p.openReplicas, p.openPeers = 0, 0        // the candidates that take a request, which are counted below
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
	if p.rule.chooseLocal == byRing { // such a rule also chooses its peers by a ring
		for _, among := range []side{amongReplicas, amongPeers} {
			p.rings[among].refresh(candidates, among) // candidates may have come or gone since the last round
		}
	}
}

// Done reports whether no further request of this round can be sent anywhere.
func (p *Policy) Done() bool {
	noPeerPossible := p.openPeers == 0 || p.peersBlocked || p.rule.neverForwards
	return p.openReplicas == 0 && noPeerPossible
}

// Next decides for the next request in the order of arrival, and counts the request at the chosen candidate. A request that waits
// counts as ahead of later requests. If the policy compares all candidates, it also counts at the candidate for which it waits.
func (p *Policy) Next(r *Request) Decision {
	d := p.decide(r)
	if d.Act == Hold {
		p.waitingAhead++
		// A policy that compares all candidates holds a request for the best one, so the request's tokens count there. For other
		// policies, the candidate is only a replica with a longer cache hit: when the patience for it is used up, the request goes
		// elsewhere.
		if d.Candidate >= 0 && p.rule.comparesAll {
			p.addCharge(r, d.Candidate)
		}
		return d
	}
	d.Terms = p.predictCost(r, d.Candidate)
	p.CountSent(r, d.Candidate)
	return d
}

// CountSent counts a request that is sent to candidate i: its tokens, which later requests wait for, and its share of how many requests the
// candidate takes in this round. Next calls it; a caller that sends a request without Next must call it, too.
func (p *Policy) CountSent(r *Request, i int) {
	c := p.addCharge(r, i)
	requests := 1
	stillOpen := &p.openReplicas
	if p.candidates[i].Peer { // a peer gets all legs of the request, one for each prompt
		requests = max(1, r.Legs)
		stillOpen = &p.openPeers
	}
	wasOpen := c.sendsLeft > 0 // else the caller sends a request to a candidate that takes none in this round
	closesNow := wasOpen && c.sendsLeft <= requests
	if closesNow {
		*stillOpen--
	}
	c.sendsLeft = max(0, c.sendsLeft-requests)
}

// addCharge counts the tokens of a request at candidate i for the rest of the round. It returns the candidate's charge.
func (p *Policy) addCharge(r *Request, i int) *charge {
	c := &p.charges[i]
	c.newTokens += r.newTokens(i)
	c.promptTokens += float64(r.Tokens)
	return c
}

// decide makes the decision for a request, and counts nothing. Policies that compare costs consider all candidates. Other policies take an
// available local replica (Send), and a peer only if no replica is available (Forward). The request waits (Hold) if neither is available,
// or for a while if a busy replica has more of its prompt in the cache.
func (p *Policy) decide(r *Request) Decision {
	if p.rule.comparesAll {
		return p.decideByCost(r)
	}
	if i := p.choose(r, p.rule.chooseLocal, amongReplicas); i >= 0 {
		if patienceMs, holder := p.waitForHit(r, i); patienceMs > r.WaitedMs { // its patience for a cache hit is not used up
			return Decision{Act: Hold, Candidate: holder, UntilMs: patienceMs}
		}
		p.moveTurn(i, amongReplicas) // matters only if the policy chooses each replica in turn (byTurn)
		return Decision{Act: Send, Candidate: i}
	}
	return p.decideForPeer(r)
}

// decideForPeer makes the decision for a request for which no local replica is available: Forward to an available peer, or Hold. Requests
// are forwarded in the order of arrival. So if no peer is available now, or cheap enough, later requests of the round are not forwarded
// either (peersBlocked). A request that may not go to any of the available peers does not block later ones. With peerMustBeCheaper, the
// peer must be cheaper than each local replica by MinGainMs, and by the time by which its predictions were too low lately (DistrustMs).
func (p *Policy) decideForPeer(r *Request) Decision {
	if r.LocalOnly || p.rule.neverForwards {
		return Decision{Act: Hold, Candidate: noCandidate}
	}
	if p.peersBlocked || p.openPeers == 0 {
		p.peersBlocked = true // no later request is forwarded before this one
		return Decision{Act: Hold, Candidate: noCandidate}
	}
	i := p.choose(r, p.rule.choosePeer, amongPeers)
	if i < 0 { // data residency forbids all available peers for this request; later requests may still be forwarded
		return Decision{Act: Hold, Candidate: noCandidate}
	}
	localMs := p.cheapestLocalMs(r)
	cheaper := p.predictCost(r, i).Total()+p.settings.MinGainMs+p.candidates[i].DistrustMs < localMs
	if p.rule.peerMustBeCheaper && !cheaper {
		p.peersBlocked = true // no later request is forwarded before this one
		return Decision{Act: Hold, Candidate: noCandidate, LocalMs: localMs}
	}
	p.moveTurn(i, amongPeers) // matters only if the policy chooses each peer in turn (byTurn)
	return Decision{Act: Forward, Candidate: i, LocalMs: localMs}
}

// noCandidate stands for the index of a candidate where there is none, as in a Hold that is not for a certain candidate.
const noCandidate = -1

// decideByCost takes the cheapest candidate, available or busy, even if the request has to wait for it. A peer is taken only if it is
// cheaper than each local replica by MinGainMs.
func (p *Policy) decideByCost(r *Request) Decision {
	local, peer := p.cheapest(r)
	d := Decision{Candidate: local.candidate, Terms: local.terms, LocalMs: local.costMs}
	act := Send
	if peer.candidate != noCandidate && peer.costMs+p.settings.MinGainMs < local.costMs {
		d.Candidate, d.Terms, act = peer.candidate, peer.terms, Forward
	}
	waitedLong := r.WaitedMs >= max(local.costMs, maxPeerWaitMs) // false without a local replica: costMs is infinite
	switch {
	case d.Candidate != noCandidate && p.Takes(d.Candidate):
		d.Act = act
	case act == Forward && waitedLong && p.Takes(local.candidate): // the peer has been full for too long
		d = Decision{Act: Send, Candidate: local.candidate, Terms: local.terms, LocalMs: local.costMs}
	default: // d is a Hold: the request waits for the cheapest candidate
	}
	return d
}

// costed is a candidate with the predicted cost of a request there. Without a candidate, the cost is infinite.
type costed struct {
	candidate int // its index, or noCandidate
	costMs    float64
	terms     Terms
}

// cheapest returns the cheapest local replica and the cheapest peer of those to which the request may go now or soon. The cost of a peer
// includes DistrustMs, the time by which its predictions were too low lately. Without such a replica or peer, its candidate is noCandidate.
func (p *Policy) cheapest(r *Request) (local, peer costed) {
	local = costed{candidate: noCandidate, costMs: math.Inf(1)}
	peer = local
	mayForward := !p.rule.neverForwards && !r.LocalOnly
	for i := range p.candidates {
		candidate := &p.candidates[i]
		if !candidate.Why.Awaitable() || r.barred(i) { // barred: data residency forbids the candidate
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

// maxPeerWaitMs is how long a request waits for a peer that says that it is full, while a local replica would take the request. It
// waits longer if the local replica would need longer.
const maxPeerWaitMs = 10_000

// beats reports whether candidate i, with its cost, is better than the best candidate so far: cheaper; or equally cheap and nearer; or
// equally near and first by the hash.
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

// cheapestLocalMs returns the cost of the request, in ms, at the cheapest local replica; +Inf: there is none. A busy replica
// counts, too, if the request may wait for it.
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

// waitForHit is how long a request waits for a busy replica whose cache has more of its prompt, instead of going to the available
// replica i: Patience times the prefill time that the longer hit saves. patienceMs counts from when some candidate could first have taken
// the request; 0: the request does not wait. holder is the busy replica with the longest hit. It means nothing if patienceMs is 0.
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

// Names lists the names of all policies, in the order in which users see them.
func Names() []string {
	names := make([]string, len(policyForms))
	for i := range policyForms {
		names[i] = policyForms[i].name
	}
	return names
}

// Parse makes a policy from `name` or `name:key=value,...`. Settings that the text does not name are taken from s.
func (s *Settings) Parse(text string) (*Policy, error) {
	name, set, err := namedargs.Parse(text, Names())
	if err != nil {
		return nil, err
	}
	f := &policyForms[slices.IndexFunc(policyForms, func(f policyForm) bool { return f.name == name })]
	p := &Policy{name: f.name, rule: f.rule, settings: *s}
	if f.changeDefaults != nil { // the policy has defaults of its own, which the text may change again
		f.changeDefaults(&p.settings)
	}
	defaults := p.settings // for a text that names no settings
	if err := namedargs.Apply(name, f.keys, &p.settings, set...); err != nil {
		return nil, err
	}
	// With patience, a request waits for a busy replica with a cache hit. To keep this replica from being full for long, both are
	// needed: the push mode SPP (sp-p), which sends a replica only what it can begin, and a BatchWeight (load) above 0, by which a
	// replica with a larger decode batch costs more.
	waitsForFullReplicas := p.settings.Push != SPP || p.settings.BatchWeight == 0
	if p.settings.Patience > 0 && waitsForFullReplicas {
		return nil, fmt.Errorf("policy %s: patience=%g needs push=sp-p and a load above 0: without them it waits for replicas that are full for "+
			"long", name, p.settings.Patience)
	}
	p.spec = namedargs.Text(name, f.keys, &p.settings, &defaults) // names only the settings that differ from the defaults
	return p, nil
}

// policyForm describes a policy: its rule, the keys of its settings, and the change of the default settings that it needs.
type policyForm struct {
	name           string
	rule           rule
	keys           []setting
	changeDefaults func(s *Settings)
}

// policyForms are listed to users in this order.
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
