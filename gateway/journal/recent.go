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

// recent has figures about the last requests, for people who look at the proxy now.
// Metrics have the same, but only with a server that scrapes them.
type recent struct {
	ttft, tpot    minute
	ended, failed atomic.Uint64
	own           atomic.Uint64 // failed requests that were refused by a limit of their caller's key

	mu        sync.Mutex // taken by requests that failed, and by readers
	failures  map[detect.Outcome]uint64
	whys      map[detect.Outcome]detect.Why
	handedOut bool // a reader has failures and whys, so that they must not change any more
}

// shared is how long the reason of a limit that all callers share stays, before that of one key's own limit may replace it.
const sharedFor = 10 * time.Second

// count counts a request that has ended; fail is nil for an answer that was whole.
func (r *recent) count(fail *openai.Error) {
	if fail != nil && fail.Status == http.StatusUnauthorized { // no valid key: a flood of these would hide that the requests of others fail
		return
	}
	r.ended.Add(1)
	if failed(fail) {
		r.failed.Add(1)
		if fail.Own {
			r.own.Add(1)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		switch { // a map that a reader has is copied before it changes
		case r.failures == nil:
			r.failures, r.whys = map[detect.Outcome]uint64{}, map[detect.Outcome]detect.Why{}
		case r.handedOut:
			r.failures, r.whys, r.handedOut = maps.Clone(r.failures), maps.Clone(r.whys), false
		}
		outcome := detect.Outcome{Name: Outcome(fail), Status: fail.Status}
		r.failures[outcome]++
		last, now := r.whys[outcome], time.Now()
		if fail.Why != "" && !(fail.Own && last.Text != "" && !last.Own && now.Sub(last.At) < sharedFor) {
			r.whys[outcome] = detect.Why{Text: fail.Why, Own: fail.Own, At: now}
		}
	}
}

// failed says whether a request failed, other than by what its client did wrong: 5xx and 429.
func failed(fail *openai.Error) bool {
	return fail != nil && (fail.Status/100 == 5 || fail.Status == http.StatusTooManyRequests)
}

// failuresSoFar returns the failures since the start, and the reason of the last failure of each kind. The maps do not change any more:
// the next request that fails makes copies.
func (r *recent) failuresSoFar() (map[detect.Outcome]uint64, map[detect.Outcome]detect.Why) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handedOut = true
	return r.failures, r.whys
}

// A minute is a histogram of the last minute, in parts that are forgotten one by
// one. Each class is a tenth wider than the one before, so that a quantile is off by
// 5 % at most.
type minute struct {
	mu    sync.Mutex
	parts [minuteParts + 1]part // the part that fills, and those of a whole minute
}

// part has the values of one part of a minute.
type part struct {
	number  int64 // counted in parts of this length since 1970
	classes [classes]uint32
}

const (
	minuteParts = 12
	partLength  = time.Minute / minuteParts

	leastSeconds = 0.0002
	classGrowth  = 1.1
	classes      = 160 // up to 14 minutes
)

// Observe implements prometheus.Observer.
func (m *minute) Observe(seconds float64) { m.add(seconds, time.Now()) }

// add counts a value in the class that it falls into. A part that is older than a minute is emptied and used again.
func (m *minute) add(seconds float64, now time.Time) {
	class := 0
	if seconds > leastSeconds {
		class = min(classes-1, int(math.Log(seconds/leastSeconds)/math.Log(classGrowth))+1)
	}
	n := now.UnixNano() / int64(partLength)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.parts[n%int64(len(m.parts))]
	if p.number != n {
		*p = part{number: n}
	}
	p.classes[class]++
}

// latency is the median and the 99th percentile of the last minute.
func (m *minute) latency(now time.Time) detect.Latency {
	var sum [classes]uint32
	n := now.UnixNano() / int64(partLength)
	m.mu.Lock()
	for i := range m.parts {
		if p := &m.parts[i]; p.number > n-int64(len(m.parts)) && p.number <= n {
			for c, k := range p.classes {
				sum[c] += k
			}
		}
	}
	m.mu.Unlock()
	var l detect.Latency
	for _, k := range sum {
		l.Samples += int(k)
	}
	l.P50Ms, l.P99Ms = quantile(&sum, l.Samples, 0.5), quantile(&sum, l.Samples, 0.99)
	return l
}

// quantile is the middle of the class that the quantile q (from 0 to 1) falls into, in ms; 0: there are no samples. sum has the number of
// samples of each class.
func quantile(sum *[classes]uint32, samples int, q float64) float64 {
	left := int(math.Ceil(q * float64(samples)))
	for c, k := range sum {
		if left -= int(k); left <= 0 && k > 0 {
			return 1000 * leastSeconds * math.Pow(classGrowth, float64(c)-0.5)
		}
	}
	return 0
}

// Recent is what clients got: latencies over the last minute, and counts since the start.
type Recent struct {
	TTFT, TPOT    detect.Latency
	Ended, Failed uint64                        // requests since the start; failed: 5xx and 429
	Own           uint64                        // of Failed, those refused by a limit of their caller's key
	Failures      map[detect.Outcome]uint64     // failed requests since the start, by outcome
	Whys          map[detect.Outcome]detect.Why // reasons of the last failure of each outcome, where one is known
}

// Recent returns the figures of now.
func (g *Journal) Recent() Recent {
	r, now := &g.recent, time.Now()
	failures, whys := r.failuresSoFar()
	return Recent{
		TTFT: r.ttft.latency(now), TPOT: r.tpot.latency(now), Ended: r.ended.Load(), Failed: r.failed.Load(), Own: r.own.Load(),
		Failures: failures, Whys: whys,
	}
}
