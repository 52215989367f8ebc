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

// recent has figures for people who look at the proxy without a server that scrapes its metrics.
type recent struct {
	ttft, tpot    minute
	ended, failed atomic.Uint64
	byKeyLimit    atomic.Uint64 // of these, refused by a limit of their caller's API key

	mu              sync.Mutex // only failed requests and readers lock it
	failures        map[detect.Outcome]uint64
	whys            map[detect.Outcome]detect.Why
	readersHaveMaps bool // so they must be copied before they change
}

// sharedReasonKeptFor is how long a reason that concerns all callers stays before one of only one
// API key may replace it.
const sharedReasonKeptFor = 10 * time.Second

// count counts a request that has ended; fail is nil if the client got its whole answer.
func (r *recent) count(fail *openai.Error) {
	// A flood of requests without a valid API key would hide that others fail.
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
	case r.readersHaveMaps:
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

// isProxyFailure: 5xx or 429, no mistake of the client.
func isProxyFailure(fail *openai.Error) bool {
	return fail != nil && (fail.Status/100 == 5 || fail.Status == http.StatusTooManyRequests)
}

// failuresSoFar: the returned maps never change, because the next failure copies them first.
func (r *recent) failuresSoFar() (map[detect.Outcome]uint64, map[detect.Outcome]detect.Why) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.readersHaveMaps = true
	return r.failures, r.whys
}

// A minute is a histogram of the last minute, in parts of 5 s; a new part replaces the oldest. Each
// class is a tenth wider than the one before, so that a quantile is off by 5 % at most.
type minute struct {
	mu    sync.Mutex
	parts [minuteParts + 1]part // the present one, and those of a whole minute before
}

type part struct {
	number  int64           // counted from 1970 in units of partLength
	classes [classes]uint32 // values in each class
}

const (
	minuteParts = 12
	partLength  = time.Minute / minuteParts

	leastSeconds = 0.0002 // upper bound of the first class
	classGrowth  = 1.1
	classes      = 160 // the last begins at about 12 minutes
)

func (m *minute) Observe(seconds float64) { m.add(seconds, time.Now()) }

func (m *minute) add(seconds float64, now time.Time) {
	class := 0 // up to leastSeconds
	// Class k ends at leastSeconds * classGrowth^k; the last one has all larger values.
	if seconds > leastSeconds {
		class = min(classes-1, int(math.Log(seconds/leastSeconds)/math.Log(classGrowth))+1)
	}
	number := now.UnixNano() / int64(partLength)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.parts[number%int64(len(m.parts))] // a ring
	if p.number != number {                   // an old part
		*p = part{number: number}
	}
	p.classes[class]++
}

func (m *minute) latency(now time.Time) detect.Latency {
	var sum [classes]uint32
	present := now.UnixNano() / int64(partLength) // of the part that is being filled
	oldest := present - int64(len(m.parts)) + 1   // that still counts
	m.mu.Lock()
	for i := range m.parts {
		// Other parts are too old, or from before the clock was set back.
		if p := &m.parts[i]; p.number >= oldest && p.number <= present {
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

// quantile returns ms, the middle of the class; 0: there are no samples.
func quantile(sum *[classes]uint32, samples int, q float64) float64 {
	remaining := int(math.Ceil(q * float64(samples))) // from the lowest on, up to the quantile
	for class, count := range sum {
		remaining -= int(count)
		if remaining <= 0 && count > 0 { // half a power below the end of the class is its middle
			return 1000 * leastSeconds * math.Pow(classGrowth, float64(class)-0.5)
		}
	}
	return 0
}

// Recent has latencies over the last minute, and counts since the start.
type Recent struct {
	TTFT, TPOT    detect.Latency
	Ended, Failed uint64 // failed: 5xx or 429
	ByKeyLimit    uint64 // of these, by a limit of their caller's API key
	Failures      map[detect.Outcome]uint64
	Whys          map[detect.Outcome]detect.Why // of the last failure of each outcome, if known
}

// Recent returns the present figures.
func (g *Journal) Recent() Recent {
	r, now := &g.recent, time.Now()
	failures, whys := r.failuresSoFar()
	return Recent{
		TTFT: r.ttft.latency(now), TPOT: r.tpot.latency(now), Ended: r.ended.Load(), Failed: r.failed.Load(), ByKeyLimit: r.byKeyLimit.Load(),
		Failures: failures, Whys: whys,
	}
}
