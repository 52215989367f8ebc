package policy

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"

	prefill "evenkeel/prefill/policy"
)

// chooseBy is the rule by which one of the available places is chosen.
type chooseBy uint8

const (
	byHit  chooseBy = iota // the most cached tokens of the prompt, then the nearest, then the shortest queue
	byCost                 // the lowest cost, then the nearest
	byLoad                 // the fewest unfinished requests, then the nearest
	byTurn                 // each place in turn
	byRing                 // the next open place on the ring
)

// choose returns the index of a replica, or of a peer, that still takes the request; -1: none does, or data residency forbids
// them.
func (p *Policy) choose(r *Request, how chooseBy, peers bool) int {
	switch how {
	case byRing:
		return p.rings[sideIndex(peers)].findOpen(p, r)
	case byTurn:
		return p.nextInTurn(r, peers)
	}
	best, value := -1, 0.0
	for i := range p.candidates {
		if !p.isOpen(r, i, peers) {
			continue
		}
		v := p.rankingValue(r, how, i)
		if best < 0 || p.ranksBefore(r, how, i, v, best, value) {
			best, value = i, v
		}
	}
	return best
}

// Takes reports whether place i takes one more request in this round.
func (p *Policy) Takes(i int) bool { return p.charges[i].sendsLeft > 0 }

// open reports whether place i takes the request, and is a peer if peers is true, a replica otherwise.
func (p *Policy) isOpen(r *Request, i int, peers bool) bool {
	return p.candidates[i].Peer == peers && p.Takes(i) && !r.barred(i)
}

// value is the number by which a rule compares places; the lowest is best.
func (p *Policy) rankingValue(r *Request, how chooseBy, i int) float64 {
	switch how {
	case byCost:
		return p.predictCost(r, i).Total() + p.candidates[i].DistrustMs
	case byLoad:
		return p.candidates[i].Outstanding + p.sentThisRound(i)
	}
	return -r.hitTokens(i)
}

// sent is how many requests this round has sent to a replica. It is 0 for a peer, whose load is a
// share and not a number of requests.
func (p *Policy) sentThisRound(i int) float64 {
	if x := &p.candidates[i]; !x.Peer {
		return float64(x.MaxSends - p.charges[i].sendsLeft)
	}
	return 0
}

// goesBefore reports whether place i, with its value v, is better than the best place so far. Between equal values the nearer
// place is better; then, for byHit, the shorter queue; then the hash decides.
func (p *Policy) ranksBefore(r *Request, how chooseBy, i int, v float64, best int, value float64) bool {
	if !sameCost(v, value) {
		return v < value
	}
	a, b := &p.candidates[i], &p.candidates[best]
	if !sameCost(a.RTTMs, b.RTTMs) {
		return a.RTTMs < b.RTTMs
	}
	if how == byHit {
		if x, y := p.queueLength(i), p.queueLength(best); x != y {
			return x < y
		}
	}
	return hashesFirst(r, a, b)
}

// queue is the number of requests that place i serves before a new request.
func (p *Policy) queueLength(i int) float64 {
	if x := &p.candidates[i]; x.Peer {
		return float64(x.Queue)
	}
	return p.candidates[i].Outstanding + p.sentThisRound(i)
}

// first breaks the last tie, by a hash that is the same in every process.
func hashesFirst(r *Request, a, b *Candidate) bool {
	return prefill.HRW(r.ID, a.ID) < prefill.HRW(r.ID, b.ID)
}

// next returns the next open place in turn; -1: there is none.
func (p *Policy) nextInTurn(r *Request, peers bool) int {
	for k := range p.candidates {
		if i := (p.nextTurn[sideIndex(peers)] + k) % len(p.candidates); p.isOpen(r, i, peers) {
			return i
		}
	}
	return -1
}

// moveTurn makes next begin after place i.
func (p *Policy) moveTurn(i int, peers bool) { p.nextTurn[sideIndex(peers)] = i + 1 }

// side is the index in turn and rings for replicas, or for peers.
func sideIndex(peers bool) int {
	if peers {
		return 1
	}
	return 0
}

// refresh rebuilds the ring of the replicas, or that of the peers, if their places have changed.
func (g *ring) refresh(places []Candidate, peers bool) {
	same := 0 // the first places of the ring that are still there
	for i := range places {
		if places[i].Peer != peers {
			continue
		}
		if same >= len(g.ids) || g.ids[same] != places[i].ID || g.candidates[same] != i {
			g.rebuild(places, peers)
			return
		}
		same++
	}
	if same != len(g.ids) {
		g.rebuild(places, peers)
	}
}

// rebuild makes the ring of the replicas, or of the peers.
func (g *ring) rebuild(places []Candidate, peers bool) {
	g.ids, g.candidates = nil, nil
	for i := range places {
		if places[i].Peer == peers {
			g.ids, g.candidates = append(g.ids, places[i].ID), append(g.candidates, i)
		}
	}
	g.Ring = NewRing(g.ids)
}

// find is the place of the first owner on the ring, from the request's key on, that takes the request; -1: none does.
func (g *ring) findOpen(p *Policy, r *Request) int {
	owner := g.Find(r.Key, func(owner int) bool {
		i := g.candidates[owner]
		return p.isOpen(r, i, p.candidates[i].Peer)
	})
	if owner < 0 {
		return -1
	}
	return g.candidates[owner]
}

// vnodes is how many points an owner has on the ring.
const vnodes = 100

// Ring is a consistent hash ring, whose owners are numbers.
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
	for i := range r.points {
		if p := &r.points[(start+i)%len(r.points)]; open(p.owner) {
			return p.owner
		}
	}
	return -1
}
