package journal

import (
	"maps"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/gateway/detect"
	"evenkeel/gateway/openai"
)

// recent has figures about the last requests, for people who look at the proxy directly. The metrics have the same figures, but need a
// server that scrapes them.
type recent struct {
	ttft, tpot    minute
	ended, failed atomic.Uint64
	byKeyLimit    atomic.Uint64 // the failed requests that a limit of their caller's API key refused

	mu              sync.Mutex // only failed requests and readers lock it, so successful requests never wait
	failures        map[detect.Outcome]uint64
	whys            map[detect.Outcome]detect.Why
	readersHaveMaps bool // a reader has the maps failures and whys, so they must be copied before they change
}

// sharedReasonKeptFor is how long a failure's reason that concerns all callers stays, before a reason that concerns only one API key may
// replace it.
const sharedReasonKeptFor = 10 * time.Second

// count counts a request that has ended, and stores the reason of a failure. fail is nil if the client got its whole answer. A reason that
// concerns all callers stays for a while (sharedReasonKeptFor) before one that concerns only one API key replaces it.
func (r *recent) count(fail *openai.Error) {
	// a flood of requests without a valid API key would hide that other requests fail
	if fail != nil && fail.Status == http.StatusUnauthorized {
		return
	}
	r.ended.Add(1)
	if !isProxyFailure(fail) {
		return
	}
	r.failed.Add(1)
	if fail.ByKeyLimit {
		r.byKeyLimit.Add(1)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.failures == nil:
		r.failures, r.whys = map[detect.Outcome]uint64{}, map[detect.Outcome]detect.Why{}
	case r.readersHaveMaps: // the maps that readers have must not change, so copies take their place
		r.failures, r.whys, r.readersHaveMaps = maps.Clone(r.failures), maps.Clone(r.whys), false
	}
	outcome := detect.Outcome{Name: Outcome(fail), Status: fail.Status}
	r.failures[outcome]++
	before, now := r.whys[outcome], time.Now()
	beforeConcernsAll := before.Text != "" && !before.ByKeyLimit
	beforeStays := beforeConcernsAll && fail.ByKeyLimit && now.Sub(before.At) < sharedReasonKeptFor
	if fail.Why != "" && !beforeStays {
		r.whys[outcome] = detect.Why{Text: fail.Why, ByKeyLimit: fail.ByKeyLimit, At: now}
	}
}

// isProxyFailure says whether a request failed for another reason than a mistake of its client: with 5xx or 429.
func isProxyFailure(fail *openai.Error) bool {
	return fail != nil && (fail.Status/100 == 5 || fail.Status == http.StatusTooManyRequests)
}

// failuresSoFar returns the failures since the start, and the reason of the last failure of each kind. The returned maps never change,
// because the next request that fails copies them first.
func (r *recent) failuresSoFar() (map[detect.Outcome]uint64, map[detect.Outcome]detect.Why) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.readersHaveMaps = true
	return r.failures, r.whys
}

// A minute is a histogram of the last minute. It consists of parts of 5 s, and the oldest part is dropped when a new one begins. Each class
// is a tenth wider than the class before, so that a quantile is off by 5 % at most.
type minute struct {
	mu    sync.Mutex
	parts [minuteParts + 1]part // the part that is being filled, and the parts of a whole minute before
}

// part counts the values of one part of a minute.
type part struct {
	number  int64           // number of the part, counted from 1970 in units of partLength
	classes [classes]uint32 // number of values in each class
}

const (
	minuteParts = 12
	partLength  = time.Minute / minuteParts

	leastSeconds = 0.0002 // upper bound of the first class, in seconds
	classGrowth  = 1.1    // each class is wider than the one before by this factor
	classes      = 160    // the last class begins at about 12 minutes
)

// Observe implements prometheus.Observer.
func (m *minute) Observe(seconds float64) { m.add(seconds, time.Now()) }

// add counts a value in its class. It empties a part that is older than a minute, and uses it again.
func (m *minute) add(seconds float64, now time.Time) {
	class := 0                  // class 0 has all values up to leastSeconds
	if seconds > leastSeconds { // class k ends at leastSeconds * classGrowth^k; the last class also has all larger values
		class = min(classes-1, int(math.Log(seconds/leastSeconds)/math.Log(classGrowth))+1)
	}
	number := now.UnixNano() / int64(partLength)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.parts[number%int64(len(m.parts))] // the parts are a ring, in which each number has its place
	if p.number != number {                   // the place still has an old part
		*p = part{number: number}
	}
	p.classes[class]++
}

// latency returns the median and the 99th percentile of the last minute.
func (m *minute) latency(now time.Time) detect.Latency {
	var sum [classes]uint32
	present := now.UnixNano() / int64(partLength) // number of the part that is being filled
	oldest := present - int64(len(m.parts)) + 1   // number of the oldest part that still counts
	m.mu.Lock()
	for i := range m.parts {
		if p := &m.parts[i]; p.number >= oldest && p.number <= present { // others are too old, or from before the clock was set back
			for class, count := range p.classes {
				sum[class] += count
			}
		}
	}
	m.mu.Unlock()
	var l detect.Latency
	for _, count := range sum {
		l.Samples += int(count)
	}
	l.P50Ms, l.P99Ms = quantile(&sum, l.Samples, 0.5), quantile(&sum, l.Samples, 0.99)
	return l
}

// quantile returns the quantile q (from 0 to 1) in ms: the middle of the class that contains it; 0: there are no samples. sum has the
// number of samples in each class.
func quantile(sum *[classes]uint32, samples int, q float64) float64 {
	remaining := int(math.Ceil(q * float64(samples))) // how many samples, from the lowest on, come up to the quantile
	for class, count := range sum {
		remaining -= int(count)
		if remaining <= 0 && count > 0 { // half a power of classGrowth below the end of the class is its middle
			return 1000 * leastSeconds * math.Pow(classGrowth, float64(class)-0.5)
		}
	}
	return 0
}

// Recent says how requests went: latencies over the last minute, and counts since the start.
type Recent struct {
	TTFT, TPOT    detect.Latency
	Ended, Failed uint64                        // requests since the start; failed ones had 5xx or 429
	ByKeyLimit    uint64                        // the failed requests that a limit of their caller's API key refused
	Failures      map[detect.Outcome]uint64     // failed requests since the start, by outcome
	Whys          map[detect.Outcome]detect.Why // reason of the last failure of each outcome, if it is known
}

// Recent returns the latencies of the last minute, and the counts since the start.
func (g *Journal) Recent() Recent {
	r, now := &g.recent, time.Now()
	failures, whys := r.failuresSoFar()
	return Recent{
		TTFT: r.ttft.latency(now), TPOT: r.tpot.latency(now), Ended: r.ended.Load(), Failed: r.failed.Load(), ByKeyLimit: r.byKeyLimit.Load(),
		Failures: failures, Whys: whys,
	}
}
