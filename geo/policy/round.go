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

// Settings are the settings with which the policy decides.
func (p *Policy) Settings() *Settings { return &p.set }

// Act is what a decision does with a request.
type Act uint8

// The acts.
const (
	Hold    Act = iota // the request waits
	Send               // it goes to a local replica
	Forward            // it goes to a peer
)

var actWords = [...]string{"wait", "local", "forward"}

func (a Act) String() string { return actWords[a] }

// Decision is a policy's decision for one request.
type Decision struct {
	Act     Act
	Place   int     // index of the chosen place; for Hold: of the place for which it waits, or -1
	Terms   Terms   // predicted cost at Place
	LocalMs float64 // predicted cost at the best local replica, +Inf if there is none; set for forwards and by policies that compare
	UntilMs float64 // for a Hold by patience: decide again when the request has waited for this time; 0: at the next event
}

// Begin begins a round with the state of all local replicas and peers. The caller must not change places until the round is
// over. drainMs is the average time between two departures from the region's arrival queue; see Drain.
func (p *Policy) Begin(places []Place, drainMs float64) {
	p.places, p.drainMs = places, drainMs
	p.localLeft, p.peersLeft, p.ahead, p.blocked = 0, 0, 0, false
	p.charges = p.charges[:0]
	for i := range places {
		x := &places[i]
		c := charge{}
		if x.Why == Available && x.Left > 0 {
			c.left = x.Left
			if x.Peer {
				p.peersLeft++
			} else {
				p.localLeft++
			}
		}
		p.charges = append(p.charges, c)
	}
	if p.rule.local == byRing {
		p.rings[0].refresh(places, false)
		p.rings[1].refresh(places, true)
	}
}

// Done reports whether no further request of this round can be sent anywhere.
func (p *Policy) Done() bool {
	return p.localLeft == 0 && (p.peersLeft == 0 || p.blocked || p.rule.never)
}

// Next decides for the next request in the order of arrival, and counts the request at the chosen place. A request that waits
// counts as ahead of later requests and, if the policy compares, also at the place for which it waits.
func (p *Policy) Next(r *Request) Decision {
	d := p.decide(r)
	if d.Act == Hold {
		p.ahead++
		if d.Place >= 0 && p.rule.compare {
			p.charge(r, d.Place)
		}
		return d
	}
	d.Terms = p.terms(r, d.Place)
	p.Sent(r, d.Place)
	return d
}

// Sent counts a request that is sent to place i. Next calls it; a caller that sends a request without Next must call it, too.
func (p *Policy) Sent(r *Request, i int) {
	c := p.charge(r, i)
	requests := 1
	sideLeft := &p.localLeft
	if p.places[i].Peer { // all legs of the request go there
		requests = max(1, r.Legs)
		sideLeft = &p.peersLeft
	}
	if c.left > 0 && c.left <= requests { // from now on the place takes no request
		*sideLeft--
	}
	c.left = max(0, c.left-requests)
}

// charge counts a request at place i for the rest of the round.
func (p *Policy) charge(r *Request, i int) *charge {
	c := &p.charges[i]
	c.tokens += r.newTokens(i)
	c.prompts += float64(r.Tokens)
	return c
}

// decide makes the decision for a request, and counts nothing. Policies that compare consider all places. Other policies take
// an available replica, and a peer only if no replica is available. A Decision below without an Act is a Hold.
func (p *Policy) decide(r *Request) Decision {
	if p.rule.compare {
		return p.finish(r)
	}
	if i := p.choose(r, p.rule.local, false); i >= 0 {
		if until, holder := p.patience(r, i); until > r.Waited {
			return Decision{Place: holder, UntilMs: until}
		}
		p.moveTurn(i, false)
		return Decision{Act: Send, Place: i}
	}
	if r.Stay || p.rule.never {
		return Decision{Place: -1}
	}
	if p.blocked || p.peersLeft == 0 {
		p.blocked = true // requests are forwarded in the order of arrival
		return Decision{Place: -1}
	}
	i := p.choose(r, p.rule.remote, true)
	if i < 0 { // data residency forbids all peers that are available
		return Decision{Place: -1}
	}
	local := p.leastLocalMs(r)
	cheaper := p.terms(r, i).Total()+p.set.MinGainMs+p.places[i].DistrustMs < local
	if p.rule.stays && !cheaper {
		p.blocked = true
		return Decision{Place: -1, LocalMs: local}
	}
	p.moveTurn(i, true)
	return Decision{Act: Forward, Place: i, LocalMs: local}
}

// finish compares all places, available or busy, and chooses the best, even if the request has to wait for it.
func (p *Policy) finish(r *Request) Decision {
	local, peer := -1, -1
	var localTerms, peerTerms Terms
	localMs, peerMs := math.Inf(1), math.Inf(1)
	for i := range p.places {
		x := &p.places[i]
		if !x.Why.Awaitable() || r.barred(i) {
			continue
		}
		if !x.Peer {
			terms := p.terms(r, i)
			if total := terms.Total(); local < 0 || p.beats(r, i, total, local, localMs) {
				local, localMs, localTerms = i, total, terms
			}
			continue
		}
		if p.rule.never || r.Stay || x.Replicas == 0 {
			continue
		}
		terms := p.terms(r, i)
		if total := terms.Total() + x.DistrustMs; peer < 0 || p.beats(r, i, total, peer, peerMs) {
			peer, peerMs, peerTerms = i, total, terms
		}
	}
	d := Decision{Place: local, Terms: localTerms, LocalMs: localMs}
	act := Send
	if peer >= 0 && peerMs+p.set.MinGainMs < localMs {
		d.Place, d.Terms, act = peer, peerTerms, Forward
	}
	switch { // without a case, the request waits for the best place
	case d.Place >= 0 && p.Takes(d.Place):
		d.Act = act
	case act == Forward && r.Waited >= max(localMs, mostHeldMs) && p.Takes(local): // the peer has been full for too long
		d = Decision{Act: Send, Place: local, Terms: localTerms, LocalMs: localMs}
	}
	return d
}

// mostHeldMs is how long a request waits for a peer that says that it is full, while a local replica takes the request. It waits longer if
// the local replica would need longer.
const mostHeldMs = 10_000

// beats reports whether place i, with its cost, is better than the best place so far: cheaper; or equally cheap and nearer; or
// equally near and first by the hash.
func (p *Policy) beats(r *Request, i int, cost float64, best int, bestCost float64) bool {
	if !sameCost(cost, bestCost) {
		return cost < bestCost
	}
	a, b := &p.places[i], &p.places[best]
	if !sameCost(a.RTTMs, b.RTTMs) {
		return a.RTTMs < b.RTTMs
	}
	return first(r, a, b)
}

// leastLocalMs returns the cost of the request, in ms, at the cheapest local replica; +Inf: there is none. A busy replica
// counts, too, if the request may wait for it.
func (p *Policy) leastLocalMs(r *Request) float64 {
	least := math.Inf(1)
	for i := range p.places {
		if x := &p.places[i]; !x.Peer && x.Why.Awaitable() && !r.barred(i) {
			least = min(least, p.terms(r, i).Total())
		}
	}
	return least
}

// patience is how long a request waits for a busy replica that holds more of its prompt, instead of going to the available
// replica i. untilMs counts from when some place could first have taken the request; 0: it does not wait. holder is the
// busy replica.
func (p *Policy) patience(r *Request, i int) (untilMs float64, holder int) {
	if p.set.Patience == 0 {
		return 0, -1
	}
	hit := r.hit(i)
	holder = i
	for busy := range p.places {
		if x := &p.places[busy]; !x.Peer && x.Why.Awaitable() && !r.barred(busy) && r.hit(busy) > hit {
			hit, holder = r.hit(busy), busy
		}
	}
	return p.set.Patience * p.places[i].TPMs * (hit - r.hit(i)), holder
}

// Names lists the names of all policies.
func Names() []string {
	names := make([]string, len(forms))
	for i := range forms {
		names[i] = forms[i].name
	}
	return names
}

// Parse makes a policy from `name` or `name:key=value,...`. Settings that the text does not name are taken from s.
func (s *Settings) Parse(text string) (*Policy, error) {
	name, set, err := namedargs.Parse(text, Names())
	if err != nil {
		return nil, err
	}
	f := &forms[slices.IndexFunc(forms, func(f form) bool { return f.name == name })]
	p := &Policy{name: f.name, rule: f.rule, set: *s}
	if f.adds != nil {
		f.adds(&p.set)
	}
	before := p.set
	if err := namedargs.Apply(name, f.keys, &p.set, set...); err != nil {
		return nil, err
	}
	if p.set.Patience > 0 && (p.set.Push != SPP || p.set.Load == 0) {
		return nil, fmt.Errorf("policy %s: patience=%g needs push=sp-p and a load above 0: without them it waits for replicas that are full for "+
			"long", name, p.set.Patience)
	}
	p.spec = namedargs.Text(name, f.keys, &p.set, &before)
	return p, nil
}

// form describes a policy: its rule, the keys of its settings, and the change of the default settings that it needs.
type form struct {
	name string
	rule rule
	keys []setting
	adds func(s *Settings)
}

// forms are listed to users in this order.
var forms = []form{
	{name: "finish", rule: rule{compare: true}, keys: slices.Concat(pushKeys, costKeys)},
	{
		name: "gorgo", rule: rule{local: byCost, remote: byCost, stays: true}, keys: slices.Concat(pushKeys, costKeys, patienceKeys),
		adds: func(s *Settings) { s.Load = 0 },
	},
	{name: "skylb", rule: rule{local: byHit, remote: byHit, tau: true}, keys: slices.Concat(pushKeys, tauKeys)},
	{name: "skylb-ch", rule: rule{local: byRing, remote: byRing, tau: true}, keys: slices.Concat(pushKeys, tauKeys)},
	{name: "least-load", rule: rule{local: byLoad, remote: byLoad}, keys: pushKeys},
	{name: "round-robin", rule: rule{local: byTurn, remote: byTurn}, keys: pushKeys},
	{name: "local-only", rule: rule{compare: true, never: true}, keys: slices.Concat(pushKeys, costKeys)},
}
