package policy

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"

	prefill "evenkeel/prefill/policy"
)

type chooseBy uint8

const (
	byHit  chooseBy = iota // most cached tokens, then nearest, then shortest queue
	byCost                 // lowest cost, then nearest
	byLoad                 // fewest unfinished requests, then nearest
	byTurn                 // each in turn, in the order of the round's list
	byRing                 // first on the hash ring, from the request's key on
)

// choose returns the best candidate of a side that takes the request; -1: none.
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

func (p *Policy) isOpen(r *Request, i int, among side) bool {
	return p.candidates[i].side() == among && p.takesRequest(r, i)
}

func (p *Policy) takesRequest(r *Request, i int) bool { return p.Takes(i) && !r.barred(i) }

// rankingValue: the lowest is best.
func (p *Policy) rankingValue(r *Request, how chooseBy, i int) float64 {
	switch how {
	case byCost:
		return p.predictCost(r, i).Total() + p.candidates[i].DistrustMs
	case byLoad:
		return p.candidates[i].Outstanding + p.sentThisRound(i)
	}
	return -r.hitTokens(i) // byHit
}

// sentThisRound is 0 for a peer, whose load is a share.
func (p *Policy) sentThisRound(i int) float64 {
	if candidate := &p.candidates[i]; !candidate.Peer {
		return float64(candidate.MaxSends - p.charges[i].sendsLeft)
	}
	return 0
}

// ranksBefore: between equal values the nearer is better; then, for byHit, the shorter queue; then
// the hash decides.
func (p *Policy) ranksBefore(r *Request, how chooseBy, i int, v float64, best int, bestValue float64) bool {
	if !sameCost(v, bestValue) {
		return v < bestValue
	}
	a, b := &p.candidates[i], &p.candidates[best]
	if !sameCost(a.RTTMs, b.RTTMs) {
		return a.RTTMs < b.RTTMs
	}
	if how == byHit { // the other values include the load
		if aQueue, bQueue := p.queueLength(i), p.queueLength(best); aQueue != bQueue {
			return aQueue < bQueue
		}
	}
	return hashesFirst(r, a, b)
}

// queueLength is the requests that are served before a new one.
func (p *Policy) queueLength(i int) float64 {
	if candidate := &p.candidates[i]; candidate.Peer {
		return float64(candidate.Queue)
	}
	return p.candidates[i].Outstanding + p.sentThisRound(i)
}

// hashesFirst breaks the last tie, in the same way in every process.
func hashesFirst(r *Request, a, b *Candidate) bool {
	return prefill.HRW(r.ID, a.ID) < prefill.HRW(r.ID, b.ID)
}

// nextInTurn begins after the last chosen one; -1: none.
func (p *Policy) nextInTurn(r *Request, among side) int {
	for k := range p.candidates {
		if i := (p.nextTurn[among] + k) % len(p.candidates); p.isOpen(r, i, among) {
			return i
		}
	}
	return -1
}

func (p *Policy) moveTurn(i int, among side) { p.nextTurn[among] = i + 1 }

// side is the local replicas or the peers.
type side uint8

const (
	amongReplicas side = iota
	amongPeers
)

func (c *Candidate) side() side {
	if c.Peer {
		return amongPeers
	}
	return amongReplicas
}

// refresh rebuilds the ring if its candidates have changed.
func (g *ring) refresh(candidates []Candidate, among side) {
	same := 0 // of the ring's candidates
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
	if same != len(g.ids) { // the last ones are gone
		g.rebuild(candidates, among)
	}
}

func (g *ring) rebuild(candidates []Candidate, among side) {
	g.ids, g.indexes = nil, nil
	for i := range candidates {
		if candidates[i].side() == among {
			g.ids, g.indexes = append(g.ids, candidates[i].ID), append(g.indexes, i)
		}
	}
	g.Ring = NewRing(g.ids)
}

// findOpen returns -1 if none takes the request.
func (g *ring) findOpen(p *Policy, r *Request) int {
	owner := g.Find(r.Key, func(owner int) bool { return p.takesRequest(r, g.indexes[owner]) })
	if owner < 0 {
		return -1
	}
	return g.indexes[owner]
}

// vnodes is how many points an owner has on the ring.
const vnodes = 100

// Ring is a consistent hash ring. An owner is an index into the ids of NewRing.
type Ring struct{ points []point }

type point struct {
	at    uint64
	owner int
}

// NewRing puts every id on the ring.
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

// newRing sorts points in place. Ties are in the order of owners, so that the ring does not depend
// on the list's order.
func newRing(points []point) Ring {
	slices.SortFunc(points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.owner, b.owner))
	})
	return Ring{points}
}

// RingKey hashes the session, or else the user, or else the client's address.
func RingKey(session, user, address string) uint64 {
	return xxhash.Sum64String(cmp.Or(session, user, address))
}

// Find returns the first owner at or after the key for which open is true; -1: none.
func (r *Ring) Find(key uint64, open func(owner int) bool) int {
	start, _ := slices.BinarySearchFunc(r.points, key, func(p point, key uint64) int { return cmp.Compare(p.at, key) })
	for i := range r.points {
		if p := &r.points[(start+i)%len(r.points)]; open(p.owner) {
			return p.owner
		}
	}
	return -1
}
