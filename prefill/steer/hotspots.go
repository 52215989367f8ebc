package steer

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// Hotspots finds hot classes. A class is the set of requests that share a long prefix. It is hot if it causes more load
// than the candidates that hold its prefix (its holders) can serve. Hotspots keeps a hot class off its holders for a
// while, so that further candidates compute and then hold the prefix (LMetric).
//
// A class is alarmed while its share of all requests is larger than its holders' share of the candidates. If the
// policy then chooses a holder more than twice as often in a row as there are holders, the class is filtered: its
// requests go to the other candidates. These become holders, too. The alarm ends when the holders' share of
// the candidates has reached the class's share of the requests.
type Hotspots struct {
	maxClasses  int // most classes that are watched at a time
	allRequests window
	classes     map[uint64]*hotClass
	changes     []Change // changes of state since the last call of Changes
}

// These are the detector's settings. No cluster has needed other values yet.
const (
	// windowLength is the time over which shares are computed. A minute is short enough to notice a prompt that becomes
	// popular, and long enough that a burst of one second changes little.
	windowLength = time.Minute
	// minRequests is how many requests of all kinds, with or without a class, must have come in windowLength before a class can become
	// hot. With fewer requests, one class may have a large share of them by chance.
	minRequests = 20
	// maxWatchedClasses bounds the classes that are watched. A hot class has a large share of the requests, so that it stays among
	// the most frequent classes.
	maxWatchedClasses = 256
	// maxFilterTime is the longest time for which a class is kept off its holders. A few prefills are enough for other
	// candidates to hold its prefix.
	maxFilterTime = time.Minute
)

// ClassTokens lists how many tokens at the start of their prompts the requests of a class share, in ascending order. For each
// prompt, the largest of these numbers that is within the prompt counts. A system prompt has a few hundred tokens; a document or a
// long list of tools has a few thousand.
var ClassTokens = []int{512, 4096}

// State is whether a class is hot.
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
	Share   float64 // the class's share of the requests in the window, 0 to 1
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

// advance advances the window to a bucket, and drops the counts of buckets that have left it. An earlier bucket than the newest one changes
// nothing, unless it is earlier by more than the window.
func (w *window) advance(to int64) {
	if to < w.lastBucket-windowBuckets { // the wall clock was set back far, so that the counted requests lie in the future
		*w = window{lastBucket: to}
	}
	firstNew := max(w.lastBucket, to-windowBuckets) + 1 // of more than windowBuckets new buckets, the last ones overwrite all counts
	for n := firstNew; n <= to; n++ {
		w.sum -= w.counts[n%windowBuckets] // of the bucket that is windowBuckets older
		w.counts[n%windowBuckets] = 0
	}
	w.lastBucket = max(w.lastBucket, to)
}

// add counts one request in the newest bucket.
func (w *window) add() {
	w.counts[w.lastBucket%windowBuckets]++
	w.sum++
}

// hotClass is a watched class, hot or not.
type hotClass struct {
	hash              uint64
	requests          window
	inheritedPriority int   // priority of the class that this one replaced; counts for the first windowLength
	watchedSince      int64 // bucket in which the class was first watched
	state             State
	holderWinsInRow   int       // requests in a row, during the alarm, for which a holder had the best score
	holders           int       // candidates that held the prefix at the last request
	filterUntil       time.Time // when the class may return to its holders
}

// NewHotspots returns a detector without classes. It adds each class at its first request, up to maxWatchedClasses.
func NewHotspots() *Hotspots {
	return &Hotspots{maxClasses: maxWatchedClasses, classes: map[uint64]*hotClass{}}
}

// bucketOf is the number of the bucket to which a time belongs.
func bucketOf(now time.Time) int64 { return now.UnixNano() / int64(windowLength/windowBuckets) }

// CountRequest counts a request. hash is its class, 0 for a request without a class or with a prefix that no candidate holds
// well. A request with hash 0 counts only in the number of all requests.
func (h *Hotspots) CountRequest(now time.Time, hash uint64) {
	bucket := bucketOf(now)
	h.allRequests.advance(bucket)
	h.allRequests.add()
	if hash == 0 {
		return
	}
	c := h.classes[hash]
	if c == nil { // the class is not watched yet
		c = h.watch(hash, bucket, now)
	}
	c.requests.advance(bucket)
	c.requests.add()
}

// watch begins to watch a class. If too many are watched, the class replaces the least frequent one and inherits its
// keepPriority (the space-saving algorithm): otherwise the next new class would replace it at once. The inherited priority does not count
// as requests of the class.
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

// leastFrequent returns the class with the lowest keepPriority. Of equal ones it is the class with the lowest hash, so that the order of
// the map does not decide.
func (h *Hotspots) leastFrequent(bucket int64) (least *hotClass) {
	for _, c := range h.classes {
		if least == nil || cmp.Or(cmp.Compare(c.keepPriority(bucket), least.keepPriority(bucket)), cmp.Compare(c.hash, least.hash)) < 0 {
			least = c
		}
	}
	return least
}

// keepPriority decides which class is kept or replaced: the number of the class's requests in the window, which it first advances to the
// bucket. Until the class has been watched for as long as the window, its inherited priority is added.
func (c *hotClass) keepPriority(bucket int64) int {
	c.requests.advance(bucket)
	if bucket-c.watchedSince < windowBuckets {
		return c.requests.sum + c.inheritedPriority
	}
	return c.requests.sum
}

// UpdateState updates and returns the state of a class of requests, whose prompts share a long prefix; hash is the hash of this prefix.
// holders is the number of live candidates that hold the prefix, and others the number of live candidates that do not. A class whose share
// of the requests is larger than its holders' share of the candidates becomes alarmed (Alarm): from then on RecordScores watches it, and
// may keep its requests off the holders (Filter). An alarm ends when the share is no longer too large, and so does a filter, which also
// ends after maxFilterTime.
func (h *Hotspots) UpdateState(now time.Time, hash uint64, holders, others int) State {
	c := h.classes[hash]
	if c == nil { // the class is not watched
		return OK
	}
	bucket := bucketOf(now)
	h.allRequests.advance(bucket)
	c.requests.advance(bucket)
	c.holders = holders
	all, ofClass := h.allRequests.sum, c.requests.sum
	// The class's share of the requests is larger than its holders' share of the candidates: ofClass/all > holders/(holders+others).
	overloaded := ofClass*others > (all-ofClass)*holders
	canMove := holders >= 1 && others >= 1 // the class has holders to avoid, and other candidates to use
	hot := all >= minRequests && canMove && overloaded
	switch {
	case !hot, c.filterOver(now): // after a filter, a class that is still hot is alarmed again at its next request
		h.setState(c, OK, now)
	case c.state == OK:
		h.setState(c, Alarm, now)
	}
	return c.state
}

// filterOver reports whether the class is filtered although the time of its filter is over.
func (c *hotClass) filterOver(now time.Time) bool {
	return c.state == Filter && !now.Before(c.filterUntil)
}

// RecordScores is called once for each request of an alarmed class, with the best score among the holders and the best score among
// the other candidates (lower is better). If a holder was best more than twice as often in a row as there are holders, the class
// is kept off its holders from then on (State Filter): the policy alone would then go on to send the class to its few holders, which
// cannot serve so many requests. RecordScores returns the state of the class.
func (h *Hotspots) RecordScores(now time.Time, hash uint64, bestHolder, bestOther float64) State {
	c := h.classes[hash]
	if c == nil || c.state != Alarm { // scores decide only during an alarm
		return h.stateOf(hash)
	}
	if !(bestHolder <= bestOther) { // negated, so that a NaN score ends the row, too
		c.holderWinsInRow = 0
		return c.state
	}
	c.holderWinsInRow++
	if c.holderWinsInRow > 2*c.holders { // on average, each holder had the best score more than twice in this row
		h.setState(c, Filter, now)
		c.filterUntil = now.Add(maxFilterTime)
	}
	return c.state
}

// stateOf returns the state of a class; OK if the class is not watched.
func (h *Hotspots) stateOf(hash uint64) State {
	if c := h.classes[hash]; c != nil {
		return c.state
	}
	return OK
}

// setState changes the state of a class, and records the change for Changes: with the class's share of all requests in the window, and with
// the number of requests in a row for which a holder of the prefix had the best score (K). The class's own requests must be counted up to
// now already.
func (h *Hotspots) setState(c *hotClass, to State, now time.Time) {
	if c.state == to {
		return
	}
	h.allRequests.advance(bucketOf(now)) // so that the share is that of the present window
	h.changes = append(h.changes,
		Change{Class: c.hash, To: to, Share: float64(c.requests.sum) / float64(max(1, h.Requests())), Holders: c.holders, K: c.holderWinsInRow})
	c.state = to
	if to == OK { // the next alarm counts from the beginning
		c.holderWinsInRow = 0
	}
}

// Changes returns the changes of state since the last call, for the log.
func (h *Hotspots) Changes() []Change {
	changes := h.changes
	h.changes = nil
	return changes
}

// endExpired ends filters whose time is over, without waiting for the next request of the class. A filter keeps the requests of a hot class
// off the candidates that hold its prefix; with the state OK, they may go to all candidates again. endExpired also drops classes without a
// request in the window.
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

// States counts the classes by state.
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

// HotspotClass is a watched class: requests that share a long prefix, and may overload the engines that hold it.
type HotspotClass struct {
	Class    string  `json:"class"` // hexadecimal hash of the shared prefix
	State    State   `json:"state"`
	Requests int     `json:"requests"` // requests of the class in the last minute
	Share    float64 `json:"share"`
	Holders  int     `json:"holders"`
	K        int     `json:"k"`
}

// List returns all classes that are watched, the most frequent first. K of a class is the number of requests in a row, during an alarm, for
// which a holder of the class's prefix had the best score.
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
