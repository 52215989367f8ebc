package policy

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// vnodes is how often an owner stands on the ring.
const vnodes = 100

// Ring is a hash ring of places by number.
type Ring struct{ points []point }

type point struct {
	at    uint64
	owner int
}

// NewRing puts every id on the ring; its owner is its number in ids.
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

// RingKey is where a request stands: by its session, else its user, else the
// client's address.
func RingKey(session, user, address string) uint64 {
	return xxhash.Sum64String(cmp.Or(session, user, address))
}

// Find returns the first owner at or after the key that open lets through, once
// round; -1 when there is none.
func (r *Ring) Find(key uint64, open func(owner int) bool) int {
	start, _ := slices.BinarySearchFunc(r.points, key, func(p point, key uint64) int { return cmp.Compare(p.at, key) })
	for i := range r.points {
		if p := &r.points[(start+i)%len(r.points)]; open(p.owner) {
			return p.owner
		}
	}
	return -1
}
