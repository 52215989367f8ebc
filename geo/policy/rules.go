package policy

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"

	prefill "evenkeel/prefill/policy"
)

// chooseBy is the rule by which one of the available candidates is chosen.
type chooseBy uint8

const (
	byHit  chooseBy = iota // the most cached tokens of the prompt, then the nearest, then the shortest queue
	byCost                 // the lowest cost, then the nearest
	byLoad                 // the fewest unfinished requests, then the nearest
	byTurn                 // each candidate in turn, in the order of the round's list
	byRing                 // the first candidate on the hash ring, from the request's key on, that takes the request
)

// choose returns the index of the best candidate on one side that takes the request, by the rule how; -1: none takes it.
func (p *Policy) choose(r *Request, how chooseBy, among side) int {
	switch how {
	case byRing:
		return p.rings[among].findOpen(p, r)
	case byTurn:
		return p.nextInTurn(r, among)
	}
	best, bestValue := -1, 0.0
	for i := range p.candidates {
		if !p.isOpen(r, i, among) {
			continue
		}
		v := p.rankingValue(r, how, i)
		if best < 0 || p.ranksBefore(r, how, i, v, best, bestValue) {
			best, bestValue = i, v
		}
	}
	return best
}

// Takes reports whether candidate i takes one more request in this round.
func (p *Policy) Takes(i int) bool { return p.charges[i].sendsLeft > 0 }

// isOpen reports whether candidate i is on this side and takes the request now.
func (p *Policy) isOpen(r *Request, i int, among side) bool {
	return p.candidates[i].side() == among && p.takesRequest(r, i)
}

// takesRequest reports whether candidate i takes the request now, and data residency allows it.
func (p *Policy) takesRequest(r *Request, i int) bool { return p.Takes(i) && !r.barred(i) }

// rankingValue is the number by which a rule compares candidates; the lowest is best.
func (p *Policy) rankingValue(r *Request, how chooseBy, i int) float64 {
	switch how {
	case byCost:
		return p.predictCost(r, i).Total() + p.candidates[i].DistrustMs
	case byLoad:
		return p.candidates[i].Outstanding + p.sentThisRound(i)
	}
	return -r.hitTokens(i) // byHit: the most cached tokens are best
}

// sentThisRound is how many requests this round has sent to a replica. It is 0 for a peer, whose load is a share and not a number of
// requests.
func (p *Policy) sentThisRound(i int) float64 {
	if candidate := &p.candidates[i]; !candidate.Peer {
		return float64(candidate.MaxSends - p.charges[i].sendsLeft)
	}
	return 0
}

// ranksBefore reports whether candidate i, with its value v, is better than the best candidate so far, with bestValue. Between equal
// values the nearer candidate is better; then, for byHit, the shorter queue; then the hash decides.
func (p *Policy) ranksBefore(r *Request, how chooseBy, i int, v float64, best int, bestValue float64) bool {
	if !sameCost(v, bestValue) {
		return v < bestValue
	}
	a, b := &p.candidates[i], &p.candidates[best]
	if !sameCost(a.RTTMs, b.RTTMs) {
		return a.RTTMs < b.RTTMs
	}
	if how == byHit { // the values of the other rules include the load already
		if aQueue, bQueue := p.queueLength(i), p.queueLength(best); aQueue != bQueue {
			return aQueue < bQueue
		}
	}
	return hashesFirst(r, a, b)
}

// queueLength is the number of requests that candidate i serves before a new request.
func (p *Policy) queueLength(i int) float64 {
	if candidate := &p.candidates[i]; candidate.Peer {
		return float64(candidate.Queue)
	}
	return p.candidates[i].Outstanding + p.sentThisRound(i)
}

// hashesFirst reports whether a comes before b for this request, by a hash that is the same in every process. It breaks the last tie.
func hashesFirst(r *Request, a, b *Candidate) bool {
	return prefill.HRW(r.ID, a.ID) < prefill.HRW(r.ID, b.ID)
}

// nextInTurn returns the index of the next candidate on one side, after the last chosen one, that takes the request; -1: there is none.
func (p *Policy) nextInTurn(r *Request, among side) int {
	for k := range p.candidates {
		if i := (p.nextTurn[among] + k) % len(p.candidates); p.isOpen(r, i, among) {
			return i
		}
	}
	return -1
}

// moveTurn makes the next nextInTurn begin after candidate i, because i was chosen.
func (p *Policy) moveTurn(i int, among side) { p.nextTurn[among] = i + 1 }

// side says among which candidates a rule chooses: the local replicas or the peers.
type side uint8

const (
	amongReplicas side = iota
	amongPeers
)

// side is the side on which the candidate is.
func (c *Candidate) side() side {
	if c.Peer {
		return amongPeers
	}
	return amongReplicas
}

// refresh rebuilds the ring of one side if its candidates have changed.
func (g *ring) refresh(candidates []Candidate, among side) {
	same := 0 // how many of the ring's candidates, from the first on, are unchanged
	for i := range candidates {
		if candidates[i].side() != among {
			continue
		}
		isSame := same < len(g.ids) && g.ids[same] == candidates[i].ID && g.indexes[same] == i
		if !isSame {
			g.rebuild(candidates, among)
			return
		}
		same++
	}
	if same != len(g.ids) { // the last candidates of the ring are gone
		g.rebuild(candidates, among)
	}
}

// rebuild makes the ring of one side.
func (g *ring) rebuild(candidates []Candidate, among side) {
	g.ids, g.indexes = nil, nil
	for i := range candidates {
		if candidates[i].side() == among {
			g.ids, g.indexes = append(g.ids, candidates[i].ID), append(g.indexes, i)
		}
	}
	g.Ring = NewRing(g.ids)
}

// findOpen is the index of the first candidate on the ring, from the request's key on, that takes the request; -1: none does.
func (g *ring) findOpen(p *Policy, r *Request) int {
	owner := g.Find(r.Key, func(owner int) bool { return p.takesRequest(r, g.indexes[owner]) })
	if owner < 0 {
		return -1
	}
	return g.indexes[owner]
}

// vnodes is how many points an owner has on the ring.
const vnodes = 100

// Ring is a consistent hash ring. Each of its points has an owner, which is an index into the ids of NewRing.
type Ring struct{ points []point }

type point struct {
	at    uint64
	owner int
}

// NewRing puts every id on the ring. The owner of its points is its index in ids.
func NewRing(ids []string) Ring {
	points := make([]point, 0, vnodes*len(ids))
	var buf []byte
	for owner, id := range ids {
		for i := range vnodes {
			buf = append(append(buf[:0], id...), '#')
			buf = strconv.AppendInt(buf, int64(i), 10)
			points = append(points, point{xxhash.Sum64(buf), owner})
		}
	}
	return newRing(points)
}

// newRing makes a Ring of the points, which it sorts in place. Points at the same position are in the order of their owners, so that
// the ring does not depend on the order of the list.
func newRing(points []point) Ring {
	slices.SortFunc(points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.owner, b.owner))
	})
	return Ring{points}
}

// RingKey is the position of a request on a ring: the hash of its session, or else of its user, or else of the client's
// address.
func RingKey(session, user, address string) uint64 {
	return xxhash.Sum64String(cmp.Or(session, user, address))
}

// Find returns the first owner on the ring, at or after the key, for which open returns true; -1: there is none.
func (r *Ring) Find(key uint64, open func(owner int) bool) int {
	start, _ := slices.BinarySearchFunc(r.points, key, func(p point, key uint64) int { return cmp.Compare(p.at, key) })
	for i := range r.points { // from there on around the whole ring
		if p := &r.points[(start+i)%len(r.points)]; open(p.owner) {
			return p.owner
		}
	}
	return -1
}
