package gateway

import (
	"context"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
)

// What the proxy remembers of the last minute for people who look at it now.
// Metrics have the same for ever; these need nobody to scrape them.

// recent is what requests told that ended or began lately.
type recent struct {
	ttft, tpot    minute
	ended, failed atomic.Uint64
}

// end counts a request; fail is nil for an answer that was whole.
func (r *recent) end(fail *openai.Error) {
	r.ended.Add(1)
	if fail != nil && (fail.Status/100 == 5 || fail.Status == http.StatusTooManyRequests) {
		r.failed.Add(1)
	}
}

// both observes twice.
type both struct{ forever, lately prometheus.Observer }

func (b both) Observe(v float64) {
	b.forever.Observe(v)
	b.lately.Observe(v)
}

// A minute is a histogram of the last one, in parts that are forgotten one by
// one. Its classes grow by a tenth, so that a quantile is off by 5 % at most.
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
	Ended, Failed uint64 // requests since the start; failed: 5xx and 429
}

// Recent tells what clients got lately.
func (g *Gateway) Recent() Recent {
	r, now := g.metrics.recent, time.Now()
	return Recent{r.ttft.latency(now), r.tpot.latency(now), r.ended.Load(), r.failed.Load()}
}

// Sample is the little that is worth keeping of every second.
type Sample struct {
	dispatcher.Loads
	Recent
}

// Sample tells how things stand; ok is false when ctx ends first.
func (g *Gateway) Sample(ctx context.Context) (s Sample, ok bool) {
	if s.Loads, ok = g.dispatcher.Loads(ctx); !ok {
		return s, false
	}
	s.Recent = g.Recent()
	return s, true
}
