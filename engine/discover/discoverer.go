package discover

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Config of a Discoverer; Fleet and Sources are required.
type Config struct {
	Fleet   Fleet
	Sources []Source // if two sources list an engine, the first one counts
	// Probe tries an engine before its first request; an error says why the engine is not fit. nil: engines are not
	// tried.
	Probe      func(context.Context, Engine) error
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// States of a found engine.
const (
	InUse  = "in_use"
	Away   = "away"   // found, but it must get no new work now
	Trying = "trying" // its trial before its first request has not ended
	Unfit  = "unfit"  // it failed the trial, or the fleet refused it; it is tried again
	Listed = "listed" // it is also in the config, and left alone
)

var states = []string{InUse, Away, Trying, Unfit, Listed}

// Status is what discovery knows.
type Status struct {
	Sources []SourceStatus `json:"sources"`
	Engines []Found        `json:"engines"`
}

// SourceStatus says whether a source works.
type SourceStatus struct {
	Name    string    `json:"name"`
	Engines int       `json:"engines"`         // in its last list
	At      time.Time `json:"at,omitzero"`     // of that list
	Error   string    `json:"error,omitempty"` // failure since then; the list stays in force
}

// Found is an engine that a source lists.
type Found struct {
	ID          string    `json:"id"` // host:port
	Role        string    `json:"role"`
	Source      string    `json:"source"`
	Incarnation string    `json:"incarnation,omitempty"`
	State       string    `json:"state"`
	Why         string    `json:"why,omitempty"` // why it is not in use
	Tries       int       `json:"tries,omitempty"`
	Next        time.Time `json:"next_try,omitzero"`
}

const (
	probes     = 8 // at a time
	firstPause = time.Second
	lastPause  = time.Minute
)

// Discoverer reports to the fleet what the sources list. Everything but its channels and the published status belongs
// to Run's goroutine.
type Discoverer struct {
	cfg      Config
	metrics  *metrics
	news     chan news
	verdicts chan verdict
	recheck  chan struct{}
	status   atomic.Pointer[Status]

	lists        [][]Engine // by source, the last good ones
	sources      []SourceStatus
	loggedCauses []map[string]bool // by source, the causes of failure that were logged since the source last worked
	records      map[string]*record
	running      int // probes that run
}

type news struct {
	source  int
	engines []Engine
	err     error
}

type verdict struct {
	engine Engine
	err    error
}

// record is one engine between a source and the fleet.
type record struct {
	want    Engine
	inFleet *Engine // the engine as the fleet has it; nil: the fleet does not have it
	passed  bool    // the engine has passed the probe
	trying  bool
	listed  bool
	tries   int
	err     error
	next    time.Time // the next try is not before this time
}

// New returns a Discoverer that does nothing yet.
func New(cfg Config) *Discoverer {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	d := &Discoverer{
		cfg: cfg, metrics: newMetrics(cfg.Registerer), news: make(chan news), verdicts: make(chan verdict), recheck: make(chan struct{}, 1),
		lists: make([][]Engine, len(cfg.Sources)), loggedCauses: make([]map[string]bool, len(cfg.Sources)), records: map[string]*record{},
	}
	for _, s := range cfg.Sources {
		d.sources = append(d.sources, SourceStatus{Name: s.Name()})
		d.metrics.createSeries(s.Name())
	}
	d.publish()
	return d
}

// Status is what was known last.
func (d *Discoverer) Status() Status { return *d.status.Load() }

// Recheck looks again which engines are in the config.
func (d *Discoverer) Recheck() {
	select {
	case d.recheck <- struct{}{}:
	default: // a recheck is due already
	}
}

// Run discovers until ctx ends; it returns when every source and probe has ended.
func (d *Discoverer) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, s := range d.cfg.Sources {
		wg.Go(func() {
			s.Run(ctx, func(engines []Engine, err error) {
				select {
				case d.news <- news{i, engines, err}:
				case <-ctx.Done():
				}
			})
		})
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case n := <-d.news:
			d.hear(n, time.Now())
		case v := <-d.verdicts:
			d.judge(v, time.Now())
		case <-d.recheck:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		d.settle(now)
		d.try(ctx, &wg, now)
		d.publish()
		timer.Reset(d.pause(now))
	}
}

// hear takes over a source's answer. If a failure comes without engines, the engines that the source found last stay
// in force.
func (d *Discoverer) hear(n news, now time.Time) {
	s := &d.sources[n.source]
	d.metrics.answered(s.Name, n.err)
	if n.err == nil || n.engines != nil {
		s.At, s.Engines = now, len(n.engines)
		d.lists[n.source] = slices.Clone(n.engines)
		for i := range d.lists[n.source] {
			d.lists[n.source][i].Source = s.Name
		}
	}
	if n.err != nil {
		d.complain(n.source, n.err)
		return
	}
	if s.Error != "" {
		d.cfg.Log.Info("discovery works again", zap.String("source", s.Name), zap.Int("engines", len(n.engines)))
	}
	d.loggedCauses[n.source], s.Error = nil, ""
}

// complain logs a failure if one of its causes was not logged since the source last worked. At the begin and at the
// end of an outage causes alternate, so each is logged only once.
func (d *Discoverer) complain(source int, err error) {
	s, logged := &d.sources[source], d.loggedCauses[source]
	if logged == nil {
		logged = map[string]bool{}
		d.loggedCauses[source] = logged
	}
	isNew := false
	for _, cause := range causesOf(err) {
		isNew = isNew || !logged[cause]
		logged[cause] = true
	}
	if isNew {
		s.Error = err.Error()
		d.cfg.Log.Warn("discovery fails; the engines that it found last stay in use", zap.String("source", s.Name), zap.Int("engines", s.Engines),
			zap.Error(err))
	}
}

// causesOf returns the causes by which failures are told apart. A text has the failed call, ports and times, which
// differ at every try, so digits are left out.
func causesOf(err error) (causes []string) {
	switch e := err.(type) { //nolint:errorlint // it looks at each link of the chain itself
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			causes = append(causes, causesOf(one)...)
		}
		return causes
	case interface{ Unwrap() error }:
		if cause := e.Unwrap(); cause != nil {
			return causesOf(cause)
		}
	}
	return []string{strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, err.Error())}
}

// settle brings the fleet to what the sources list, as far as the engines have passed their trial.
func (d *Discoverer) settle(now time.Time) {
	all := merge(d.lists)
	for key, r := range d.records {
		if want, ok := all[key]; !ok || r.inFleet != nil && replaced(*r.inFleet, want) {
			d.drop(r)
			delete(d.records, key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(all)) { // in a fixed order, because the fleet keeps the order of arrival
		r, e := d.records[key], all[key]
		if r == nil {
			r = &record{}
			d.records[key] = r
		}
		if r.want != e {
			r.passed = r.passed && !replaced(r.want, e)
			r.want, r.err, r.tries, r.next = e, nil, 0, time.Time{}
		}
		if r.listed = d.cfg.Fleet.Listed(e); r.listed {
			r.inFleet, r.passed = nil, false // the fleet has it from the config now
			continue
		}
		d.report(r, now)
	}
}

// report tells the fleet of an engine that may be used, or of which something has changed.
func (d *Discoverer) report(r *record, now time.Time) {
	switch {
	case r.inFleet != nil && *r.inFleet == r.want, r.inFleet == nil && r.want.Away != "", now.Before(r.next):
		return
	case r.inFleet == nil && !r.passed && d.cfg.Probe != nil:
		return
	}
	change := added
	if r.inFleet != nil {
		change = difference(*r.inFleet, r.want)
	}
	switch change {
	case away, back:
		d.cfg.Fleet.Turn(r.want)
	default:
		if err := d.cfg.Fleet.Put(r.want); err != nil {
			d.fail(r, now, err)
			return
		}
	}
	d.cfg.Log.Info("discovery: engine "+change, zap.String("engine", r.want.Key()), zap.String("source", r.want.Source),
		zap.String("incarnation", r.want.Incarnation), zap.String("why", r.want.Away))
	r.inFleet, r.err, r.tries = new(r.want), nil, 0
}

// difference names the change of an engine that the fleet has.
func difference(told, want Engine) string {
	rest := told
	rest.Away = want.Away
	switch {
	case rest != want:
		return changed
	case want.Away != "":
		return away
	}
	return back
}

// drop takes an engine out of the fleet, if the fleet has it.
func (d *Discoverer) drop(r *record) {
	if r.inFleet == nil {
		return
	}
	d.cfg.Fleet.Remove(*r.inFleet)
	d.cfg.Log.Info("discovery: engine "+removed, zap.String("engine", r.inFleet.Key()), zap.String("source", r.inFleet.Source),
		zap.String("incarnation", r.inFleet.Incarnation))
}

// try begins the probes that are due.
func (d *Discoverer) try(ctx context.Context, wg *sync.WaitGroup, now time.Time) {
	if d.cfg.Probe == nil {
		return
	}
	for _, r := range d.records {
		if d.running == probes {
			return
		}
		if r.inFleet != nil || r.passed || r.trying || r.listed || r.want.Away != "" || now.Before(r.next) {
			continue
		}
		r.trying = true
		d.running++
		e := r.want
		wg.Go(func() {
			err := d.cfg.Probe(ctx, e)
			select {
			case d.verdicts <- verdict{e, err}:
			case <-ctx.Done():
			}
		})
	}
}

// judge takes the end of a probe. If the engine is described differently by now, the result does not count.
func (d *Discoverer) judge(v verdict, now time.Time) {
	d.running--
	d.metrics.probed(v.engine.Role, v.err)
	r := d.records[v.engine.Key()]
	if r == nil || !r.trying {
		return
	}
	r.trying = false
	switch {
	case r.want != v.engine:
	case v.err != nil:
		d.fail(r, now, v.err)
	default:
		r.passed = true
	}
}

// fail records why an engine cannot be used, and sets the time of its next try.
func (d *Discoverer) fail(r *record, now time.Time, err error) {
	pause := min(firstPause<<min(r.tries, 10), lastPause)
	r.tries++
	r.next = now.Add(time.Duration(float64(pause) * (0.9 + 0.2*rand.Float64())))
	if r.err == nil || r.err.Error() != err.Error() {
		d.cfg.Log.Warn("a discovered engine is not used, because its trial failed", zap.String("engine", r.want.Key()),
			zap.String("source", r.want.Source), zap.Int("tries", r.tries), zap.Error(err))
	}
	r.err = err
}

// pause is the time until the next try is due.
func (d *Discoverer) pause(now time.Time) time.Duration {
	next := now.Add(time.Hour)
	for _, r := range d.records {
		if r.err != nil && !r.trying && r.next.Before(next) {
			next = r.next
		}
	}
	return max(time.Millisecond, next.Sub(now))
}

// publish copies what is known for calls of Status.
func (d *Discoverer) publish() {
	s := &Status{Sources: slices.Clone(d.sources), Engines: make([]Found, 0, len(d.records))}
	for _, r := range d.records {
		s.Engines = append(s.Engines, r.status())
	}
	slices.SortFunc(s.Engines, func(a, b Found) int {
		return strings.Compare(a.Role+" "+a.ID, b.Role+" "+b.ID)
	})
	d.metrics.show(s)
	d.status.Store(s)
}

// status is the engine as operators see it.
func (r *record) status() Found {
	f := Found{ID: r.want.Address, Role: r.want.Role, Source: r.want.Source, Incarnation: r.want.Incarnation, Tries: r.tries, Next: r.next}
	switch {
	case r.listed:
		f.State, f.Why = Listed, "it stands in engines of the config, which is not discovery's"
	case r.want.Away != "":
		f.State, f.Why = Away, r.want.Away
	case r.err != nil:
		f.State, f.Why = Unfit, r.err.Error()
	case r.inFleet == nil:
		f.State, f.Why = Trying, errUntried.Error()
	default:
		f.State = InUse
	}
	return f
}

var errUntried = errors.New("its trial before its first request has not ended yet")
