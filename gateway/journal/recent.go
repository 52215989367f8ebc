package journal

import (
	"maps"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/timeline"
)

// recent is what the requests of the last minute came to, for people who look at the
// proxy now. Metrics keep the same for ever; these figures need no one who scrapes them.
type recent struct {
	ttft, tpot    minute
	ended, failed atomic.Uint64

	mu       sync.Mutex // only requests that failed take it
	failures map[timeline.Outcome]uint64
	whys     map[timeline.Outcome]timeline.Why
}

// shared is how long a limit of one key hides no limit of all.
const shared = 10 * time.Second

// end counts a request; fail is nil for an answer that was whole.
func (r *recent) end(fail *openai.Error) {
	if fail != nil && fail.Status == http.StatusUnauthorized { // a stranger: a flood of them would hide that the requests of others fail
		return
	}
	r.ended.Add(1)
	if failed(fail) {
		r.failed.Add(1)
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.failures == nil {
			r.failures, r.whys = map[timeline.Outcome]uint64{}, map[timeline.Outcome]timeline.Why{}
		}
		f := timeline.Outcome{Name: Outcome(fail), Status: fail.Status}
		r.failures[f]++
		was, now := r.whys[f], time.Now()
		if fail.Why != "" && !(fail.Own && was.Text != "" && !was.Own && now.Sub(was.At) < shared) {
			r.whys[f] = timeline.Why{Text: fail.Why, Own: fail.Own, At: now}
		}
	}
}

// failed leaves out what clients did wrong themselves.
func failed(fail *openai.Error) bool {
	return fail != nil && (fail.Status/100 == 5 || fail.Status == http.StatusTooManyRequests)
}

// fails are the failures since the start, and why the last one of each was; what it
// returns is the caller's.
func (r *recent) fails() (map[timeline.Outcome]uint64, map[timeline.Outcome]timeline.Why) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.failures), maps.Clone(r.whys)
}

// A minute is a histogram of the last minute, in parts that are forgotten one by
// one. Each class is a tenth wider than the one before, so that a quantile is off by
// 5 % at most.
type minute struct {
	mu    sync.Mutex
	parts [minuteParts + 1]part // the one that fills, and a whole minute
}

type part struct {
	number  int64 // of this length since 1970
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

// Latency is how long something took over the last minute.
type Latency struct {
	P50, P99 time.Duration
	Samples  int // 0: nothing is known
}

func (m *minute) latency(now time.Time) Latency {
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
	var l Latency
	for _, k := range sum {
		l.Samples += int(k)
	}
	l.P50, l.P99 = quantile(&sum, l.Samples, 0.5), quantile(&sum, l.Samples, 0.99)
	return l
}

// quantile is the middle of the class that the quantile falls into.
func quantile(sum *[classes]uint32, samples int, q float64) time.Duration {
	left := int(math.Ceil(q * float64(samples)))
	for c, k := range sum {
		if left -= int(k); left <= 0 && k > 0 {
			return time.Duration(leastSeconds * math.Pow(classGrowth, float64(c)-0.5) * float64(time.Second))
		}
	}
	return 0
}

// Recent is what clients got over the last minute.
type Recent struct {
	TTFT, TPOT    Latency
	Ended, Failed uint64                            // requests since the start; failed: 5xx and 429
	Failures      map[timeline.Outcome]uint64       // those that failed, by how
	Whys          map[timeline.Outcome]timeline.Why // of the last one of each, where somebody told it
}

// Recent tells what clients got lately.
func (g *Journal) Recent() Recent {
	r, now := &g.recent, time.Now()
	failures, whys := r.fails()
	return Recent{r.ttft.latency(now), r.tpot.latency(now), r.ended.Load(), r.failed.Load(), failures, whys}
}
