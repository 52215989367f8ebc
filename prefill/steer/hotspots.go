package steer

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// Hotspots finds hot classes. A class is the set of requests that share a long prefix; its holders
// are the candidates that hold this prefix. A class is hot if it causes more load than its holders
// can serve. Hotspots then keeps it off its holders for a while, so that further candidates compute
// and hold the prefix (LMetric).
//
// A class is alarmed while its share of all requests is larger than its holders' share of the
// candidates. If the policy then chooses a holder more than twice as often in a row as there are
// holders, the class is filtered: its requests go to the other candidates, which become holders,
// too.
type Hotspots struct {
	maxClasses  int // most classes that are watched at a time
	allRequests window
	classes     map[uint64]*hotClass
	changes     []Change // since the last call of Changes
}

// No cluster has needed other values yet.
const (
	// windowLength is the time over which shares are computed: short enough to notice a prompt that
	// becomes popular, and long enough that a burst of one second changes little.
	windowLength = time.Minute
	// minRequests is how many requests must have come in windowLength before a class can become hot.
	// With fewer, one class may have a large share by chance.
	minRequests = 20
	// maxWatchedClasses is enough, because a hot class stays among the most frequent ones.
	maxWatchedClasses = 256
	// maxFilterTime is the longest filter. A few prefills are enough for other candidates to hold the
	// prefix.
	maxFilterTime = time.Minute
)

// ClassTokens lists how many tokens at the start of their prompts the requests of a class share, in
// ascending order; the largest number within the prompt counts. A system prompt has a few hundred
// tokens, a document or a long list of tools a few thousand.
var ClassTokens = []int{512, 4096}

type State string

// States of a class: not hot, hot but still allowed on its holders, and kept off its holders.
const (
	OK     State = "ok"
	Alarm  State = "alarm"
	Filter State = "filter"
)

// Change is one change of a class's state, for the log.
type Change struct {
	Class   uint64
	To      State
	Share   float64 // of the requests in the window, 0 to 1
	Holders int
	K       int // requests in a row, during the alarm, for which a holder had the best score
}

const windowBuckets = 12

// window counts requests over the last windowLength, in buckets.
type window struct {
	counts     [windowBuckets]int
	lastBucket int64 // number of the newest bucket, counted from 1970
	sum        int
}

// advance drops the counts of buckets that have left the window. An earlier bucket changes nothing,
// unless it is earlier by more than the window.
func (w *window) advance(to int64) {
	if to < w.lastBucket-windowBuckets { // the wall clock was set back far, so that the counted requests lie in the future
		*w = window{lastBucket: to}
	}
	firstNew := max(w.lastBucket, to-windowBuckets) + 1 // the last windowBuckets overwrite all counts
	for n := firstNew; n <= to; n++ {
		w.sum -= w.counts[n%windowBuckets] // of the bucket that is windowBuckets older
		w.counts[n%windowBuckets] = 0
	}
	w.lastBucket = max(w.lastBucket, to)
}

func (w *window) add() {
	w.counts[w.lastBucket%windowBuckets]++
	w.sum++
}

type hotClass struct {
	hash              uint64
	requests          window
	inheritedPriority int   // of the class that this one replaced; counts for the first windowLength
	watchedSince      int64 // bucket
	state             State
	holderWinsInRow   int // see Change.K
	holders           int // at the last request
	filterUntil       time.Time
}

func NewHotspots() *Hotspots {
	return &Hotspots{maxClasses: maxWatchedClasses, classes: map[uint64]*hotClass{}}
}

func bucketOf(now time.Time) int64 { return now.UnixNano() / int64(windowLength/windowBuckets) }

// CountRequest counts a request. hash is its class; 0: it has none, or no candidate holds its
// prefix well.
func (h *Hotspots) CountRequest(now time.Time, hash uint64) {
	bucket := bucketOf(now)
	h.allRequests.advance(bucket)
	h.allRequests.add()
	if hash == 0 {
		return
	}
	c := h.classes[hash]
	if c == nil {
		c = h.watch(hash, bucket, now)
	}
	c.requests.advance(bucket)
	c.requests.add()
}

// watch begins to watch a class. If too many are watched, it replaces the least frequent one and
// inherits its keepPriority (the space-saving algorithm): otherwise the next new class would
// replace it at once.
func (h *Hotspots) watch(hash uint64, bucket int64, now time.Time) *hotClass {
	c := &hotClass{hash: hash, watchedSince: bucket, state: OK}
	if len(h.classes) >= h.maxClasses {
		least := h.leastFrequent(bucket)
		c.inheritedPriority = least.keepPriority(bucket)
		h.setState(least, OK, now)
		delete(h.classes, least.hash)
	}
	h.classes[hash] = c
	return c
}

// leastFrequent returns, of equal classes, the one with the lowest hash, so that the order of the
// map does not decide.
func (h *Hotspots) leastFrequent(bucket int64) (least *hotClass) {
	for _, c := range h.classes {
		if least == nil || cmp.Or(cmp.Compare(c.keepPriority(bucket), least.keepPriority(bucket)), cmp.Compare(c.hash, least.hash)) < 0 {
			least = c
		}
	}
	return least
}

func (c *hotClass) keepPriority(bucket int64) int {
	c.requests.advance(bucket)
	if bucket-c.watchedSince < windowBuckets {
		return c.requests.sum + c.inheritedPriority
	}
	return c.requests.sum
}

// UpdateState updates and returns the state of a class. holders and others count the live
// candidates that hold the prefix, and that do not. While the class is alarmed, RecordScores may
// filter it.
func (h *Hotspots) UpdateState(now time.Time, hash uint64, holders, others int) State {
	c := h.classes[hash]
	if c == nil {
		return OK
	}
	bucket := bucketOf(now)
	h.allRequests.advance(bucket)
	c.requests.advance(bucket)
	c.holders = holders
	all, ofClass := h.allRequests.sum, c.requests.sum
	// This is ofClass/all > holders/(holders+others).
	overloaded := ofClass*others > (all-ofClass)*holders
	canMove := holders >= 1 && others >= 1
	hot := all >= minRequests && canMove && overloaded
	switch {
	case !hot, c.filterOver(now): // a class that is still hot is alarmed again at its next request
		h.setState(c, OK, now)
	case c.state == OK:
		h.setState(c, Alarm, now)
	}
	return c.state
}

func (c *hotClass) filterOver(now time.Time) bool {
	return c.state == Filter && !now.Before(c.filterUntil)
}

// RecordScores is called once for each request of an alarmed class, with the best score among the
// holders and among the other candidates (lower is better). It filters the class when the policy
// alone would go on to send it to its few holders.
func (h *Hotspots) RecordScores(now time.Time, hash uint64, bestHolder, bestOther float64) State {
	c := h.classes[hash]
	if c == nil || c.state != Alarm {
		return h.stateOf(hash)
	}
	if !(bestHolder <= bestOther) { // negated, so that a NaN score ends the row, too
		c.holderWinsInRow = 0
		return c.state
	}
	c.holderWinsInRow++
	if c.holderWinsInRow > 2*c.holders {
		h.setState(c, Filter, now)
		c.filterUntil = now.Add(maxFilterTime)
	}
	return c.state
}

func (h *Hotspots) stateOf(hash uint64) State {
	if c := h.classes[hash]; c != nil {
		return c.state
	}
	return OK
}

// setState records the change. The class's own requests must be counted up to now already.
func (h *Hotspots) setState(c *hotClass, to State, now time.Time) {
	if c.state == to {
		return
	}
	h.allRequests.advance(bucketOf(now)) // so that the share is that of the present window
	h.changes = append(h.changes,
		Change{Class: c.hash, To: to, Share: float64(c.requests.sum) / float64(max(1, h.Requests())), Holders: c.holders, K: c.holderWinsInRow})
	c.state = to
	if to == OK {
		c.holderWinsInRow = 0
	}
}

func (h *Hotspots) Changes() []Change {
	changes := h.changes
	h.changes = nil
	return changes
}

// endExpired ends filters whose time is over without waiting for the next request of the class, and
// drops classes without a request in the window.
func (h *Hotspots) endExpired(now time.Time) {
	bucket := bucketOf(now)
	h.allRequests.advance(bucket)
	for hash, c := range h.classes {
		c.requests.advance(bucket)
		if c.requests.sum == 0 || c.filterOver(now) {
			h.setState(c, OK, now)
		}
		if c.requests.sum == 0 {
			delete(h.classes, hash)
		}
	}
}

func (h *Hotspots) States(now time.Time) map[State]int {
	h.endExpired(now)
	n := map[State]int{}
	for _, c := range h.classes {
		n[c.state]++
	}
	return n
}

// Requests is the number of requests in the window.
func (h *Hotspots) Requests() int { return h.allRequests.sum }

// HotspotClass is a watched class: requests that share a long prefix, and may overload the engines
// that hold it.
type HotspotClass struct {
	Class    string  `json:"class"` // hexadecimal hash of the shared prefix
	State    State   `json:"state"`
	Requests int     `json:"requests"` // requests of the class in the last minute
	Share    float64 `json:"share"`
	Holders  int     `json:"holders"`
	K        int     `json:"k"`
}

// List returns the watched classes, the most frequent first. K is as in Change.
func (h *Hotspots) List(now time.Time) []HotspotClass {
	h.endExpired(now)
	list := make([]HotspotClass, 0, len(h.classes))
	for _, c := range h.classes {
		list = append(list, HotspotClass{
			Class: strconv.FormatUint(c.hash, 16), State: c.state, Requests: c.requests.sum,
			Share: float64(c.requests.sum) / float64(max(1, h.Requests())), Holders: c.holders, K: c.holderWinsInRow,
		})
	}
	slices.SortFunc(list, func(a, b HotspotClass) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Class, b.Class))
	})
	return list
}
