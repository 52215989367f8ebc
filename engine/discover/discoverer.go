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

// Config has the settings of a Discoverer; Fleet and Sources are required.
type Config struct {
	Fleet   Fleet
	Sources []Source // if two sources list an engine, the first one counts
	// Probe is the trial of an engine before its first request. It returns an error if the engine cannot be used. nil: engines are
	// used without a trial.
	Probe      func(context.Context, Engine) error
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// States of an engine that a source lists.
const (
	InUse  = "in_use"
	Away   = "away"   // it must not get new requests now
	Trying = "trying" // its trial has not ended
	Unfit  = "unfit"  // it failed the trial, or the fleet refused it; the trial will be repeated
	Listed = "listed" // it is also in the config, so discovery ignores it
)

var states = []string{InUse, Away, Trying, Unfit, Listed}

// Status is the state of all sources and engines.
type Status struct {
	Sources []SourceStatus `json:"sources"`
	Engines []Found        `json:"engines"`
}

// SourceStatus says whether a source works.
type SourceStatus struct {
	Name    string    `json:"name"`
	Engines int       `json:"engines"`         // number of engines in its last list
	At      time.Time `json:"at,omitzero"`     // when this list came
	Error   string    `json:"error,omitempty"` // failure since then; the list stays valid
}

// Found is an engine that a source lists.
type Found struct {
	ID          string    `json:"id"` // host:port
	Role        string    `json:"role"`
	Source      string    `json:"source"`
	Incarnation string    `json:"incarnation,omitempty"`
	State       string    `json:"state"`
	Why         string    `json:"why,omitempty"` // why it is not used
	Tries       int       `json:"tries,omitempty"`
	Next        time.Time `json:"next_try,omitzero"`
}

const (
	probes     = 8           // trials that may run at the same time
	firstPause = time.Second // pause after the first failed trial; it doubles with each further one
	lastPause  = time.Minute // longest pause
)

// Discoverer reports to the fleet which engines the sources list. Only Run's goroutine uses its fields, except the channels and
// status.
type Discoverer struct {
	cfg      Config
	metrics  *metrics
	news     chan news
	verdicts chan verdict
	recheck  chan struct{}
	status   atomic.Pointer[Status]

	lists        [][]Engine // for each source, its last list
	sources      []SourceStatus
	loggedCauses []map[string]bool // for each source, the causes of failures that were logged since it last worked
	records      map[string]*record
	running      int // how many trials run now
}

// news is a report of a source, as its Run passes it on.
type news struct {
	source  int
	engines []Engine
	err     error
}

// verdict is the result of a trial.
type verdict struct {
	engine Engine
	err    error
}

// record is the state of one engine that a source lists.
type record struct {
	want    Engine    // the engine as the source lists it
	inFleet *Engine   // the engine as the fleet has it; nil: the fleet does not have it
	passed  bool      // it has passed the trial
	trying  bool      // its trial runs
	listed  bool      // it is in the config
	tries   int       // failed tries since its description changed
	err     error     // why the last try failed
	next    time.Time // the earliest time of the next try
}

// New returns a Discoverer; Run starts it.
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

// Status returns the last published status.
func (d *Discoverer) Status() Status { return *d.status.Load() }

// Recheck makes Run ask the fleet again which engines are in the config, after the config has changed.
func (d *Discoverer) Recheck() {
	select {
	case d.recheck <- struct{}{}:
	default: // a recheck is due already
	}
}

// Run discovers engines until ctx ends. It returns once all sources and trials have ended.
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

// hear stores the list of a source. After a failure without a list, the last list stays valid.
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

// complain logs a failure, and sets it in the source's status, if it has a cause that was not logged since the source last worked. Each
// cause is logged once per outage, because several causes often alternate.
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

// causesOf returns the texts of the innermost errors of err. It removes digits, because ports and times differ at
// every try.
func causesOf(err error) (causes []string) {
	switch e := err.(type) { //nolint:errorlint // this function itself follows the chain
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

// settle updates the fleet to the lists of the sources. Engines that have not passed their trial are left out.
func (d *Discoverer) settle(now time.Time) {
	all := merge(d.lists)
	for key, r := range d.records {
		want, listed := all[key]
		otherProcess := r.inFleet != nil && replaced(*r.inFleet, want)
		if !listed || otherProcess {
			d.drop(r)
			delete(d.records, key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(all)) { // sorted, because the fleet keeps the order in which engines come
		r, e := d.records[key], all[key]
		if r == nil {
			r = &record{}
			d.records[key] = r
		}
		if r.want != e { // the description has changed, so earlier failures say nothing
			r.passed = r.passed && !replaced(r.want, e) // another process needs a trial of its own
			r.want = e
			r.err, r.tries, r.next = nil, 0, time.Time{}
		}
		if r.listed = d.cfg.Fleet.InConfig(e); r.listed {
			r.inFleet, r.passed = nil, false // the fleet now has the engine from the config, so it is not discovery's
			continue
		}
		d.report(r, now)
	}
}

// report passes an engine to the fleet if it is new there and may be used, or if its description has changed. After a failure it
// waits for the time of the next try.
func (d *Discoverer) report(r *record, now time.Time) {
	isNew := r.inFleet == nil
	unchanged := !isNew && *r.inFleet == r.want
	untried := !r.passed && d.cfg.Probe != nil
	notYet := isNew && (untried || r.want.Away != "")
	if unchanged || notYet || now.Before(r.next) {
		return
	}
	change := added
	if !isNew {
		change = difference(*r.inFleet, r.want)
	}
	switch change {
	case away, back:
		d.cfg.Fleet.SetAway(r.want)
	default:
		if err := d.cfg.Fleet.Put(r.want); err != nil {
			d.turnOnly(r)
			d.fail(r, now, err)
			return
		}
	}
	d.cfg.Log.Info("discovery: engine "+change, zap.String("engine", r.want.Key()), zap.String("source", r.want.Source),
		zap.String("incarnation", r.want.Incarnation), zap.String("why", r.want.Away))
	r.inFleet, r.err, r.tries = new(r.want), nil, 0
}

// turnOnly starts or stops new work for an engine whose new description the fleet has refused. The fleet keeps the old description.
func (d *Discoverer) turnOnly(r *record) {
	if r.inFleet == nil || r.inFleet.Away == r.want.Away {
		return
	}
	turned := *r.inFleet
	turned.Away = r.want.Away
	d.cfg.Fleet.SetAway(turned)
	r.inFleet = &turned
}

// difference names the change from old, an engine as the fleet has it, to want.
func difference(old, want Engine) string {
	old.Away = want.Away
	switch {
	case old != want:
		return changed
	case want.Away != "":
		return away
	}
	return back
}

// drop removes an engine from the fleet, if the fleet has it.
func (d *Discoverer) drop(r *record) {
	if r.inFleet == nil {
		return
	}
	d.cfg.Fleet.Remove(*r.inFleet)
	d.cfg.Log.Info("discovery: engine "+removed, zap.String("engine", r.inFleet.Key()), zap.String("source", r.inFleet.Source),
		zap.String("incarnation", r.inFleet.Incarnation))
}

// try starts the trials that are due.
func (d *Discoverer) try(ctx context.Context, wg *sync.WaitGroup, now time.Time) {
	if d.cfg.Probe == nil {
		return
	}
	for _, r := range d.records {
		if d.running == probes {
			return
		}
		tried := r.inFleet != nil || r.passed || r.trying
		if tried || r.listed || r.want.Away != "" || now.Before(r.next) {
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

// judge records the result of a trial. If the source describes the engine differently by now, the result is ignored.
func (d *Discoverer) judge(v verdict, now time.Time) {
	d.running--
	d.metrics.probed(v.engine.Role, v.err)
	r := d.records[v.engine.Key()]
	if r == nil || !r.trying { // meanwhile the engine was removed, and may have been listed again
		return
	}
	r.trying = false
	switch {
	case r.want != v.engine: // a new trial of the changed engine begins
	case v.err != nil:
		d.fail(r, now, v.err)
	default:
		r.passed = true
	}
}

// fail records why an engine cannot be used, and sets the time of its next try.
func (d *Discoverer) fail(r *record, now time.Time, err error) {
	pause := min(firstPause<<min(r.tries, 10), lastPause) // 10 doublings are past lastPause, and more could overflow
	r.tries++
	r.next = now.Add(time.Duration(float64(pause) * (0.9 + 0.2*rand.Float64())))
	if r.err == nil || r.err.Error() != err.Error() {
		d.cfg.Log.Warn("a discovered engine is not used, because its trial failed", zap.String("engine", r.want.Key()),
			zap.String("source", r.want.Source), zap.Int("tries", r.tries), zap.Error(err))
	}
	r.err = err
}

// pause returns the time until the next try is due.
func (d *Discoverer) pause(now time.Time) time.Duration {
	next := now.Add(time.Hour)
	for _, r := range d.records {
		needsTrial := d.cfg.Probe != nil && r.inFleet == nil && !r.passed
		if needsTrial && d.running == probes {
			continue // no trial may begin until another one ends, and its end wakes Run
		}
		if r.err != nil && !r.trying && !r.listed && r.next.Before(next) {
			next = r.next
		}
	}
	return max(time.Millisecond, next.Sub(now)) // bounded below, so that a try that is overdue does not keep Run busy
}

// publish stores a copy of the state for calls of Status.
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

// status returns the state of the engine for operators.
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
