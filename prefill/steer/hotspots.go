package steer

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// Hotspots finds classes of requests, which share a long prefix, that ask for more than the candidates that hold this
// prefix can give. It keeps such a class off these candidates for a while, so that other candidates come to hold the
// prefix (LMetric).
//
// A class is alarmed while its share of the requests is larger than the share of the candidates that hold its prefix
// (phase 1). If the policy then chooses holders more than twice as often in a row as there are holders, it is
// overruled: the class goes to the other candidates (phase 2). Each of these then holds the prefix, too, so that the
// alarm ends when as many candidates hold it as the share of the class deserves.
type Hotspots struct {
	most    int // classes that are watched at most
	all     window
	classes map[uint64]*hotClass
	changes []Change // since the last call of Changes
}

// These are the detector's settings. No cluster has needed other values yet.
const (
	// sharesOver is the time over which shares are taken: a minute follows a prompt that becomes popular, and is not
	// moved by a burst of one second.
	sharesOver = time.Minute
	// enough is how many requests there must be in sharesOver before a class can be alarmed: with fewer, shares are
	// chance.
	enough = 20
	// mostClasses is how many classes are watched. A class that matters has a large share, so the sketch needs no
	// more places.
	mostClasses = 256
	// mostFilter is the longest time for which a class is kept off its holders. Other candidates hold its prefix
	// after a few prefills.
	mostFilter = time.Minute
)

// ClassTokens says how many tokens at the start of their prompts requests of a class share, ascending. The deepest that fits
// a prompt counts: a system prompt has some hundred tokens, a document or a long list of tools some thousand.
var ClassTokens = []int{512, 4096}

// State is whether a class is hot.
type State string

// States of a class.
const (
	OK     State = "ok"
	Alarm  State = "alarm"
	Filter State = "filter"
)

// Change is one transition, for the log.
type Change struct {
	Class   uint64
	To      State
	Share   float64 // of the requests in the window
	Holders int
	K       int // requests in a row for which a holder scored best although the class was alarmed
}

const windowBuckets = 12

// window counts what happened in the last sharesOver.
type window struct {
	counts [windowBuckets]int
	last   int64 // the newest bucket's number
	sum    int
}

// roll moves the window on to a bucket, and forgets what has left it.
func (w *window) roll(to int64) {
	if to < w.last-windowBuckets { // the wall clock was set back: what was counted has later times than now
		*w = window{last: to}
	}
	for n := max(w.last, to-windowBuckets) + 1; n <= to; n++ {
		w.sum -= w.counts[n%windowBuckets]
		w.counts[n%windowBuckets] = 0
	}
	w.last = max(w.last, to)
}

func (w *window) add() {
	w.counts[w.last%windowBuckets]++
	w.sum++
}

// hotClass is a class that is watched.
type hotClass struct {
	hash       uint64
	seen       window
	inherited  int   // count that it inherited when it took another class's place
	since      int64 // bucket in which it did; the inherited count ends with the window
	state      State
	holderWins int
	holders    int
	until      time.Time // end of the filter
}

// NewHotspots returns a detector that has seen nothing yet.
func NewHotspots() *Hotspots { return &Hotspots{most: mostClasses, classes: map[uint64]*hotClass{}} }

// bucketOf is the number of the window's bucket that a moment falls into.
func bucketOf(now time.Time) int64 { return now.UnixNano() / int64(sharesOver/windowBuckets) }

// Arrive counts a request. hash is 0 for a request without a class, or whose prefix no candidate holds well: it is
// not watched, but counts among all requests.
func (h *Hotspots) Arrive(now time.Time, hash uint64) {
	bucket := bucketOf(now)
	h.all.roll(bucket)
	h.all.add()
	if hash == 0 {
		return
	}
	c := h.classes[hash]
	if c == nil {
		c = h.watch(hash, bucket, now)
	}
	c.seen.roll(bucket)
	c.seen.add()
}

// watch begins to watch a class. If all places are taken it replaces the least frequent class. As in a space-saving
// sketch, it inherits the rank of that class: else a new class could never stay. The inherited count does not count
// as its own requests.
func (h *Hotspots) watch(hash uint64, bucket int64, now time.Time) *hotClass {
	c := &hotClass{hash: hash, since: bucket, state: OK}
	if len(h.classes) >= h.most {
		var least *hotClass
		for _, other := range h.classes {
			if least == nil || cmp.Or(cmp.Compare(other.rank(bucket), least.rank(bucket)), cmp.Compare(other.hash, least.hash)) < 0 {
				least = other
			}
		}
		c.inherited = least.rank(bucket)
		h.enter(least, OK, now)
		delete(h.classes, least.hash)
	}
	h.classes[hash] = c
	return c
}

// rank orders classes when one must make room for a new one: the requests of the class in the window, and the count that
// it inherited while this is not older than the window.
func (c *hotClass) rank(bucket int64) int {
	c.seen.roll(bucket)
	if bucket-c.since < windowBuckets {
		return c.seen.sum + c.inherited
	}
	return c.seen.sum
}

// Look says what state a class is in, now that so many live candidates hold its prefix (holders) and so many do not
// (others). It alarms a class whose share of the requests is larger than the share of its holders (phase 1), and ends
// an alarm or a filter that is over.
func (h *Hotspots) Look(now time.Time, hash uint64, holders, others int) State {
	c := h.classes[hash]
	if c == nil {
		return OK
	}
	bucket := bucketOf(now)
	h.all.roll(bucket)
	c.seen.roll(bucket)
	c.holders = holders
	all, ofClass := h.all.sum, c.seen.sum
	hot := all >= enough && holders >= 1 && others >= 1 && ofClass*others > (all-ofClass)*holders
	switch {
	case !hot || c.state == Filter && !now.Before(c.until):
		h.enter(c, OK, now)
	case c.state == OK:
		h.enter(c, Alarm, now)
	}
	return c.state
}

// Weigh compares, once for each request of an alarmed class, the best score among the holders with the best among the
// others, before any filter (phase 2); lower scores are better. If a holder was best too often in a row, the class is
// kept off its holders from then on. Weigh returns the state of the class.
func (h *Hotspots) Weigh(now time.Time, hash uint64, bestHolder, bestOther float64) State {
	c := h.classes[hash]
	if c == nil || c.state != Alarm {
		return h.state(hash)
	}
	if !(bestHolder <= bestOther) {
		c.holderWins = 0
		return c.state
	}
	if c.holderWins++; c.holderWins > 2*c.holders {
		h.enter(c, Filter, now)
		c.until = now.Add(mostFilter)
	}
	return c.state
}

func (h *Hotspots) state(hash uint64) State {
	if c := h.classes[hash]; c != nil {
		return c.state
	}
	return OK
}

// enter changes a class's state and notes it.
func (h *Hotspots) enter(c *hotClass, to State, now time.Time) {
	if c.state == to {
		return
	}
	h.all.roll(bucketOf(now))
	h.changes = append(h.changes,
		Change{Class: c.hash, To: to, Share: float64(c.seen.sum) / float64(max(1, h.Requests())), Holders: c.holders, K: c.holderWins})
	c.state = to
	if to == OK {
		c.holderWins = 0
	}
}

// Changes returns the transitions since the last call.
func (h *Hotspots) Changes() []Change {
	changes := h.changes
	h.changes = nil
	return changes
}

// settle ends filters whose time is over, which else only the next request of the class would do, and forgets classes
// without a request in the window.
func (h *Hotspots) settle(now time.Time) {
	bucket := bucketOf(now)
	h.all.roll(bucket)
	for hash, c := range h.classes {
		c.seen.roll(bucket)
		if c.seen.sum == 0 || c.state == Filter && !now.Before(c.until) {
			h.enter(c, OK, now)
		}
		if c.seen.sum == 0 {
			delete(h.classes, hash)
		}
	}
}

// States counts the classes by state.
func (h *Hotspots) States(now time.Time) map[State]int {
	h.settle(now)
	n := map[State]int{}
	for _, c := range h.classes {
		n[c.state]++
	}
	return n
}

// Requests is how many requests the window has.
func (h *Hotspots) Requests() int { return h.all.sum }

// HotspotClass is a class of requests with the same long prefix, which is watched because it may ask too much of the engines that hold it.
type HotspotClass struct {
	Class    string  `json:"class"` // its hash
	State    State   `json:"state"`
	Requests int     `json:"requests"` // in the window
	Share    float64 `json:"share"`
	Holders  int     `json:"holders"`
	K        int     `json:"k"`
}

// List returns all classes that are watched, the most frequent first.
func (h *Hotspots) List(now time.Time) []HotspotClass {
	h.settle(now)
	list := make([]HotspotClass, 0, len(h.classes))
	for _, c := range h.classes {
		list = append(list, HotspotClass{
			Class: strconv.FormatUint(c.hash, 16), State: c.state, Requests: c.seen.sum,
			Share: float64(c.seen.sum) / float64(max(1, h.Requests())), Holders: c.holders, K: c.holderWins,
		})
	}
	slices.SortFunc(list, func(a, b HotspotClass) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Class, b.Class))
	})
	return list
}
