// Package watch looks at a proxy once a second: it has detect judge what is wrong, counts it in a metric, and hands what it saw to
// whoever shows it.
package watch

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/detect"
)

// Host is the proxy that is looked at.
type Host struct {
	Sample     func(context.Context) (s detect.Sample, ok bool) // costs little; ok is false when the context ends first
	Facts      func(context.Context) detect.Facts
	Registerer prometheus.Registerer // nil: there are no metrics
}

// Watch looks at a proxy, from Run on.
type Watch struct {
	host   Host
	began  time.Time
	turns  int // seconds so far; Run's own
	wanted func() bool
	show   func(*Look)

	mu    sync.Mutex
	watch detect.Watch
}

// Look is how the proxy was when it was looked at as a whole.
type Look struct {
	Facts     detect.Facts
	Incidents []detect.Incident
	Bin       bool // a bin of the ring has ended
}

// lookEvery is how many seconds lie between two looks at the whole while nobody wants to see it: incidents begin and end then, too.
const lookEvery = int(detect.Bin / detect.Every)

// looksFor is how long the whole proxy may take to say how it is. A machine that is short of CPU time is looked at all the same.
const looksFor = 10 * time.Second

// New prepares to look at a proxy.
func New(h Host) *Watch {
	w := &Watch{host: h, began: time.Now()}
	if h.Registerer != nil {
		h.Registerer.MustRegister((*incidents)(w))
	}
	return w
}

// OnLook has looks shown: one in five seconds, and one in each second in which it is wanted. Call it before Run.
func (w *Watch) OnLook(wanted func() bool, show func(*Look)) { w.wanted, w.show = wanted, show }

// Run looks until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	tick := time.NewTicker(detect.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.Second(ctx)
		}
	}
}

// Second is what is done each second. Parts of the proxy that do not answer within it leave a gap.
func (w *Watch) Second(parent context.Context) {
	ctx, cancel := context.WithTimeout(parent, detect.Every)
	defer cancel()
	s, ok := w.host.Sample(ctx)
	if !ok {
		return
	}
	bin := w.turns%lookEvery == 0
	w.turns++
	if !bin && (w.wanted == nil || !w.wanted()) {
		w.With(func(d *detect.Watch) { d.Add(s) })
		return
	}
	slow, end := context.WithTimeout(parent, looksFor)
	defer end()
	look := Look{Facts: w.host.Facts(slow), Bin: bin}
	if slow.Err() != nil {
		w.With(func(d *detect.Watch) { d.Add(s) })
		return
	}
	w.With(func(d *detect.Watch) {
		d.Look(&look.Facts, s)
		look.Incidents = d.Incidents()
	})
	if w.show != nil {
		w.show(&look)
	}
}

// Now is how the proxy is now. Nothing is judged anew, because somebody who leaves may cut it short.
func (w *Watch) Now(ctx context.Context) (look Look) {
	look.Facts = w.host.Facts(ctx)
	w.With(func(d *detect.Watch) {
		d.Complete(&look.Facts)
		look.Incidents = d.Incidents()
	})
	return look
}

// With has a function read what is known. It must not keep any of it.
func (w *Watch) With(f func(*detect.Watch)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.watch)
}

// incidents is the metric.
type incidents Watch

var incidentDesc = prometheus.NewDesc("evenkeel_incident",
	"An incident that lasts, as the live page tells it: the value is the Unix time at which it began. severity is bad if requests fail or "+
		"wait because of it, "+
		"and else warn. subject is the first engine, group or model that it was of; it is empty for the proxy itself.",
	[]string{"kind", "severity", "subject"}, nil)

var lookDesc = prometheus.NewDesc("evenkeel_incident_look_timestamp_seconds",
	"Unix time at which the proxy was looked at last to see what is wrong, or at which it started. It is at most some seconds old.", nil, nil)

// Describe implements prometheus.Collector.
func (*incidents) Describe(to chan<- *prometheus.Desc) {
	to <- incidentDesc
	to <- lookDesc
}

// Collect implements prometheus.Collector. There are as many series as the book keeps incidents.
func (i *incidents) Collect(to chan<- prometheus.Metric) {
	var list []detect.Incident
	var looked time.Time
	(*Watch)(i).With(func(d *detect.Watch) { list, looked = d.Incidents(), d.LookedAt() })
	if looked.IsZero() {
		looked = i.began
	}
	to <- prometheus.MustNewConstMetric(lookDesc, prometheus.GaugeValue, float64(looked.UnixMilli())/1000)
	told := map[[3]string]bool{}
	for k := range list {
		in := &list[k]
		subject := strings.ToValidUTF8(in.Subject, "?")
		labels := [3]string{string(in.Kind), in.Severity, subject}
		if in.UntilMs > 0 || told[labels] {
			continue
		}
		told[labels] = true
		to <- prometheus.MustNewConstMetric(incidentDesc, prometheus.GaugeValue, float64(in.SinceMs)/1000, labels[:]...)
	}
}
