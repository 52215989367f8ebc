// Package watch checks the state of the proxy once per second. Package detect finds incidents in
// this state. Package watch exports the incidents as a metric, and passes the state to the live
// page.
package watch

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/gateway/detect"
)

// Deps is what a Watch needs of the proxy.
type Deps struct {
	Sample     func(context.Context) (s detect.Sample, ok bool) // takes a sample, which is cheap; ok is false if the context ended first
	Facts      func(context.Context) detect.Facts               // the whole state of the proxy
	Registerer prometheus.Registerer                            // nil: the Watch exports no metrics
}

// Watch checks the state of the proxy while Run runs.
type Watch struct {
	deps          Deps
	began         time.Time
	samples       int // number of samples so far; only Run uses it
	pulse         pulse
	wantsSnapshot func() bool // says whether show needs a Snapshot in this second
	show          func(*Snapshot)

	mu    sync.Mutex
	watch detect.Watch
}

// Snapshot is the whole state of the proxy at one time, with its incidents.
type Snapshot struct {
	Facts     detect.Facts
	Incidents []detect.Incident
	EndsBin   bool // the snapshot ends one bin of the history (detect.BinLength)
}

// samplesPerBin is how many samples a bin has. There is a Snapshot for each bin even if none is
// wanted, because incidents begin and end at a Snapshot.
const samplesPerBin = int(detect.BinLength / detect.SampleInterval)

// snapshotTimeout bounds the time of a Snapshot. It is far longer than a second, so that a machine
// that is short of CPU time is still checked.
const snapshotTimeout = 10 * time.Second

// New returns a Watch, and registers its metrics.
func New(d Deps) *Watch {
	w := &Watch{deps: d, began: time.Now()}
	if d.Registerer != nil {
		d.Registerer.MustRegister((*incidents)(w))
	}
	return w
}

// OnSnapshot sets the function show, which gets Snapshots: one every five seconds, and one in each
// second in which wanted is true. It must be called before Run.
func (w *Watch) OnSnapshot(wanted func() bool, show func(*Snapshot)) {
	w.wantsSnapshot, w.show = wanted, show
}

// Run checks the proxy every second until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	var pulsing sync.WaitGroup
	defer pulsing.Wait()
	pulsing.Go(func() { w.pulse.run(ctx) })
	tick := time.NewTicker(detect.SampleInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.CheckOnce(ctx)
		}
	}
}

// CheckOnce takes one sample of the proxy. If the proxy does not answer within a second, this
// sample is missing. With the first sample, with every fifth one after it (samplesPerBin), and
// whenever wantsSnapshot is true, it also takes a Snapshot, which begins and ends incidents, and
// calls show with it. If the whole state of the proxy is not known within snapshotTimeout, only the
// sample is kept.
func (w *Watch) CheckOnce(parent context.Context) {
	ctx, cancel := context.WithTimeout(parent, detect.SampleInterval)
	defer cancel()
	s, ok := w.deps.Sample(ctx)
	if !ok { // the proxy did not answer in time
		return
	}
	w.pulse.addTo(&s)
	endsBin := w.samples%samplesPerBin == 0 // also with the first sample
	w.samples++
	takesSnapshot := endsBin || w.wantsSnapshot != nil && w.wantsSnapshot()
	if !takesSnapshot {
		w.With(func(d *detect.Watch) { d.Add(s) })
		return
	}
	longer, end := context.WithTimeout(parent, snapshotTimeout)
	defer end()
	snapshot := Snapshot{Facts: w.deps.Facts(longer), EndsBin: endsBin}
	if longer.Err() != nil { // the Facts may not be complete, so only the sample counts
		w.With(func(d *detect.Watch) { d.Add(s) })
		return
	}
	w.With(func(d *detect.Watch) {
		d.Update(&snapshot.Facts, s)
		snapshot.Incidents = d.Incidents()
	})
	if w.show != nil {
		w.show(&snapshot)
	}
}

// Now returns the present state of the proxy, with the known incidents. It finds no new incidents,
// because ctx may end before the state is complete.
func (w *Watch) Now(ctx context.Context) (snapshot Snapshot) {
	snapshot.Facts = w.deps.Facts(ctx)
	w.With(func(d *detect.Watch) {
		d.FillInFound(&snapshot.Facts)
		snapshot.Incidents = d.Incidents()
	})
	return snapshot
}

// With calls f with the detect.Watch, under the lock. f must not keep any part of it.
func (w *Watch) With(f func(*detect.Watch)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.watch)
}

// incidents exports the metrics of a Watch, as a prometheus.Collector.
type incidents Watch

var incidentDesc = prometheus.NewDesc("evenkeel_incident",
	"An incident that lasts, as the live page tells it: the value is the Unix time at which it began. severity is bad if requests fail or "+
		"wait because of it, "+
		"and else warn. subject is the engine, group or model that the page names first now; it is empty for "+
		"the proxy itself. An incident that has come three times keeps its series while it is away, until it has been "+
		"away for 90 seconds.",
	[]string{"kind", "severity", "subject"}, nil)

var checkedDesc = prometheus.NewDesc("evenkeel_incident_look_timestamp_seconds",
	"Unix time at which the proxy was looked at last to see what is wrong, or at which it started. It is at most some seconds old.", nil, nil)

// Describe implements prometheus.Collector.
func (*incidents) Describe(to chan<- *prometheus.Desc) {
	to <- incidentDesc
	to <- checkedDesc
}

// Collect implements prometheus.Collector. There is one series per incident that lasts.
func (i *incidents) Collect(to chan<- prometheus.Metric) {
	var list []detect.Incident
	var checked time.Time
	(*Watch)(i).With(func(d *detect.Watch) { list, checked = d.Incidents(), d.UpdatedAt() })
	if checked.IsZero() { // there was no Snapshot yet
		checked = i.began
	}
	to <- prometheus.MustNewConstMetric(checkedDesc, prometheus.GaugeValue, float64(checked.UnixMilli())/1000)
	exported := map[[3]string]bool{}
	for k := range list {
		in := &list[k]
		subject := strings.ToValidUTF8(in.Subject, "?")
		labels := [3]string{string(in.Kind), in.Severity, subject}
		if in.UntilMs > 0 || exported[labels] { // the incident is over; or a series with its labels exists, and Gather would fail
			continue
		}
		exported[labels] = true
		to <- prometheus.MustNewConstMetric(incidentDesc, prometheus.GaugeValue, float64(in.SinceMs)/1000, labels[:]...)
	}
}
