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

// Config needs Fleet and Sources.
type Config struct {
	Fleet   Fleet
	Sources []Source // the first that lists an engine counts
	// Probe tries an engine before its first request. nil: there is no trial.
	Probe      func(context.Context, Engine) error
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// States of an engine that a source lists.
const (
	InUse  = "in_use"
	Away   = "away" // no new requests for now; Engine.Away says why
	Trying = "trying"
	Unfit  = "unfit"  // it failed the trial, or the fleet refused it; the trial will be repeated
	Listed = "listed" // in the config, too: discovery does not manage it
)

var states = []string{InUse, Away, Trying, Unfit, Listed}

// Status is the state of all sources and of the engines that they list.
type Status struct {
	Sources []SourceStatus `json:"sources"`
	Engines []Found        `json:"engines"`
}

// SourceStatus says whether a source works.
type SourceStatus struct {
	Name    string    `json:"name"`
	Engines int       `json:"engines"`         // number of engines in the source's last list
	At      time.Time `json:"at,omitzero"`     // when the source's last list came
	Error   string    `json:"error,omitempty"` // failure since the last list came; the list stays valid
}

// Found is an engine that a source lists.
type Found struct {
	ID          string    `json:"id"` // host:port
	Role        string    `json:"role"`
	Source      string    `json:"source"`
	Incarnation string    `json:"incarnation,omitempty"`
	State       string    `json:"state"`
	Why         string    `json:"why,omitempty"` // why the engine, or its new description, is not used; empty: it is used as listed
	Tries       int       `json:"tries,omitempty"`
	Next        time.Time `json:"next_try,omitzero"`
}

const (
	maxTrials       = 8           // at the same time
	firstRetryDelay = time.Second // it doubles with each further failure
	maxRetryDelay   = time.Minute
)

// Discoverer reports to the fleet which engines the sources list. Only Run's goroutine uses its
// fields, except the channels and status.
type Discoverer struct {
	cfg          Config
	metrics      *metrics
	reports      chan sourceReport
	trialResults chan trialResult
	recheck      chan struct{}
	status       atomic.Pointer[Status]

	lists         [][]Engine // by source
	sources       []SourceStatus
	loggedCauses  []map[string]bool // by source: causes logged since it last worked
	records       map[string]*record
	runningTrials int
}

// sourceReport: source is an index in Config.Sources.
type sourceReport struct {
	source  int
	engines []Engine
	err     error
}

// trialResult: engine is as it was listed when the trial began.
type trialResult struct {
	engine Engine
	err    error
}

type record struct {
	listed       Engine
	inFleet      *Engine // as the fleet has it; or nil
	trialPassed  bool
	trialRuns    bool
	inConfig     bool      // discovery leaves it alone
	failedTrials int       // with refusals by the fleet, since its description changed
	err          error     // of the last trial, or the fleet's refusal
	nextAttempt  time.Time // of a trial, or to pass it to the fleet
}

// New returns a Discoverer; Run starts it.
func New(cfg Config) *Discoverer {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	d := &Discoverer{
		cfg: cfg, metrics: newMetrics(cfg.Registerer), reports: make(chan sourceReport),
		trialResults: make(chan trialResult), recheck: make(chan struct{}, 1),
		lists: make([][]Engine, len(cfg.Sources)), loggedCauses: make([]map[string]bool, len(cfg.Sources)), records: map[string]*record{},
	}
	for _, s := range cfg.Sources {
		d.sources = append(d.sources, SourceStatus{Name: s.Name()})
		d.metrics.createSeries(s.Name())
	}
	d.publish()
	return d
}

// Status may be called by any goroutine.
func (d *Discoverer) Status() Status { return *d.status.Load() }

// Recheck is for a change of the config.
func (d *Discoverer) Recheck() {
	select {
	case d.recheck <- struct{}{}:
	default:
	}
}

// Run discovers engines until ctx ends, and returns once all sources and trials have ended.
func (d *Discoverer) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, s := range d.cfg.Sources {
		wg.Go(func() {
			s.Run(ctx, func(engines []Engine, err error) {
				select {
				case d.reports <- sourceReport{i, engines, err}:
				case <-ctx.Done():
				}
			})
		})
	}
	timer := time.NewTimer(time.Hour) // set after each pass
	defer timer.Stop()
	for {
		select {
		case report := <-d.reports:
			d.storeList(report, time.Now())
		case result := <-d.trialResults:
			d.recordTrial(result, time.Now())
		case <-d.recheck:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		d.updateFleet(now)
		d.startTrials(ctx, &wg, now)
		d.publish()
		timer.Reset(d.untilNextRetry(now))
	}
}

// storeList keeps the last list after a failure without one.
func (d *Discoverer) storeList(report sourceReport, now time.Time) {
	s := &d.sources[report.source]
	d.metrics.countAnswer(s.Name, report.err)
	hasList := report.err == nil || report.engines != nil // without an error, nil is an empty list
	if hasList {
		s.At, s.Engines = now, len(report.engines)
		d.lists[report.source] = slices.Clone(report.engines)
		for i := range d.lists[report.source] {
			d.lists[report.source][i].Source = s.Name
		}
	}
	if report.err != nil {
		d.logFailure(report.source, report.err)
		return
	}
	if s.Error != "" {
		d.cfg.Log.Info("discovery works again", zap.String("source", s.Name), zap.Int("engines", len(report.engines)))
	}
	d.loggedCauses[report.source], s.Error = nil, ""
}

// logFailure logs each cause once per outage, because several often alternate.
func (d *Discoverer) logFailure(source int, err error) {
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

// causesOf returns the texts of the innermost errors without digits, because ports and times differ
// at every try.
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

func (d *Discoverer) updateFleet(now time.Time) {
	all := mergeLists(d.lists)
	for key, r := range d.records {
		listed, isListed := all[key]
		otherProcess := r.inFleet != nil && isOtherEngine(*r.inFleet, listed)
		if !isListed || otherProcess {
			d.removeFromFleet(r)
			delete(d.records, key)
		}
	}
	// The fleet keeps the order in which engines come.
	for _, key := range slices.Sorted(maps.Keys(all)) {
		r, e := d.records[key], all[key]
		if r == nil {
			r = &record{}
			d.records[key] = r
		}
		if r.listed != e { // earlier failures say nothing
			// Another process needs a trial of its own.
			r.trialPassed = r.trialPassed && !isOtherEngine(r.listed, e)
			r.listed = e
			r.err, r.failedTrials, r.nextAttempt = nil, 0, time.Time{}
		}
		if r.inConfig = d.cfg.Fleet.InConfig(e); r.inConfig {
			r.inFleet, r.trialPassed = nil, false // the fleet has it from the config now
			continue
		}
		d.passToFleet(r, now)
	}
}

// passToFleet: the fleet may refuse an engine; then nothing happens until r.nextAttempt.
func (d *Discoverer) passToFleet(r *record, now time.Time) {
	isNew := r.inFleet == nil
	unchanged := !isNew && *r.inFleet == r.listed
	needsTrial := !r.trialPassed && d.cfg.Probe != nil
	notYet := isNew && (needsTrial || r.listed.Away != "") // added when it gets requests
	if unchanged || notYet || now.Before(r.nextAttempt) {
		return
	}
	change := added
	if !isNew {
		change = difference(*r.inFleet, r.listed)
	}
	switch change {
	case away, back:
		d.cfg.Fleet.SetAway(r.listed)
	case added, changed:
		if err := d.cfg.Fleet.Put(r.listed); err != nil {
			d.setAwayOnly(r) // the fleet keeps the old description, but must learn this
			d.recordFailure(r, now, err)
			return
		}
	}
	d.cfg.Log.Info("discovery: engine "+change, zap.String("engine", r.listed.Key()), zap.String("source", r.listed.Source),
		zap.String("incarnation", r.listed.Incarnation), zap.String("why", r.listed.Away))
	r.inFleet, r.err, r.failedTrials = new(r.listed), nil, 0
}

func (d *Discoverer) setAwayOnly(r *record) {
	if r.inFleet == nil || r.inFleet.Away == r.listed.Away {
		return
	}
	updated := *r.inFleet
	updated.Away = r.listed.Away
	d.cfg.Fleet.SetAway(updated)
	r.inFleet = &updated
}

func difference(old, want Engine) string {
	old.Away = want.Away // from here on, old differs only by its other fields
	switch {
	case old != want:
		return changed
	case want.Away != "":
		return away
	}
	return back
}

func (d *Discoverer) removeFromFleet(r *record) {
	if r.inFleet == nil {
		return
	}
	d.cfg.Fleet.Remove(*r.inFleet)
	d.cfg.Log.Info("discovery: engine "+removed, zap.String("engine", r.inFleet.Key()), zap.String("source", r.inFleet.Source),
		zap.String("incarnation", r.inFleet.Incarnation))
}

func (d *Discoverer) startTrials(ctx context.Context, wg *sync.WaitGroup, now time.Time) {
	if d.cfg.Probe == nil {
		return
	}
	for _, r := range d.records {
		if d.runningTrials == maxTrials {
			return
		}
		needsNoTrial := r.inFleet != nil || r.trialPassed || r.trialRuns
		mustWait := r.listed.Away != "" || now.Before(r.nextAttempt)
		if needsNoTrial || r.inConfig || mustWait {
			continue
		}
		r.trialRuns = true
		d.runningTrials++
		e := r.listed
		wg.Go(func() {
			err := d.cfg.Probe(ctx, e)
			select {
			case d.trialResults <- trialResult{e, err}:
			case <-ctx.Done():
			}
		})
	}
}

func (d *Discoverer) recordTrial(result trialResult, now time.Time) {
	d.runningTrials--
	d.metrics.countTrial(result.engine.Role, result.err)
	r := d.records[result.engine.Key()]
	if r == nil || !r.trialRuns { // removed meanwhile; a new record has no trial
		return
	}
	r.trialRuns = false
	switch {
	case r.listed != result.engine: // of an older description: startTrials starts another
	case result.err != nil:
		d.recordFailure(r, now, result.err)
	default:
		r.trialPassed = true
	}
}

// recordFailure: the pause doubles, up to maxRetryDelay.
func (d *Discoverer) recordFailure(r *record, now time.Time, err error) {
	// 10 doublings are past maxRetryDelay, and more could overflow.
	pause := min(firstRetryDelay<<min(r.failedTrials, 10), maxRetryDelay)
	r.failedTrials++
	r.nextAttempt = now.Add(time.Duration(float64(pause) * (0.9 + 0.2*rand.Float64())))
	if r.err == nil || r.err.Error() != err.Error() {
		text := "a discovered engine is not used, because its trial failed"
		if r.inFleet != nil {
			text = "the new description of a discovered engine cannot be used; its last one stays in force"
		}
		d.cfg.Log.Warn(text, zap.String("engine", r.listed.Key()), zap.String("source", r.listed.Source), zap.Int("tries", r.failedTrials),
			zap.Error(err))
	}
	r.err = err
}

// untilNextRetry does not count first trials, because they follow no pause.
func (d *Discoverer) untilNextRetry(now time.Time) time.Duration {
	next := now.Add(time.Hour) // new reports and results wake Run
	for _, r := range d.records {
		needsTrial := d.cfg.Probe != nil && r.inFleet == nil && !r.trialPassed
		if needsTrial && d.runningTrials == maxTrials {
			continue // the end of another one wakes Run
		}
		// It may have failed before the config listed it.
		awaitsRetry := r.err != nil && !r.trialRuns && !r.inConfig
		if awaitsRetry && r.nextAttempt.Before(next) {
			next = r.nextAttempt
		}
	}
	return max(time.Millisecond, next.Sub(now)) // an overdue retry must not keep Run busy
}

func (d *Discoverer) publish() {
	s := &Status{Sources: slices.Clone(d.sources), Engines: make([]Found, 0, len(d.records))}
	for _, r := range d.records {
		s.Engines = append(s.Engines, r.status())
	}
	slices.SortFunc(s.Engines, func(a, b Found) int {
		return strings.Compare(a.Role+" "+a.ID, b.Role+" "+b.ID)
	})
	d.metrics.setEngineCounts(s)
	d.status.Store(s)
}

func (r *record) status() Found {
	f := Found{ID: r.listed.Address, Role: r.listed.Role, Source: r.listed.Source, Incarnation: r.listed.Incarnation,
		Tries: r.failedTrials, Next: r.nextAttempt}
	switch {
	case r.inConfig:
		f.State, f.Why = Listed, "it stands in engines of the config, which is not discovery's"
	case r.listed.Away != "":
		f.State, f.Why = Away, r.listed.Away
	case r.inFleet != nil:
		f.State = InUse
		if r.err != nil { // it serves with the description before
			f.Why = r.err.Error()
		}
	case r.err != nil:
		f.State, f.Why = Unfit, r.err.Error()
	default:
		f.State, f.Why = Trying, errUntried.Error()
	}
	return f
}

var errUntried = errors.New("its trial before its first request has not ended yet")
