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
	Sources []Source // if two sources list an engine, the list of the first one counts
	// Probe is the trial of an engine before its first request. It returns an error if the engine cannot be used. nil: engines are
	// used without a trial.
	Probe      func(context.Context, Engine) error
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// States of an engine that a source lists, as operators see them.
const (
	InUse  = "in_use"
	Away   = "away"   // the engine gets no new requests for now; Engine.Away says why
	Trying = "trying" // the engine's trial has not ended
	Unfit  = "unfit"  // the engine failed the trial, or the fleet refused it; the trial will be repeated
	Listed = "listed" // the engine is also in the config, so discovery does not manage it
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
	maxTrials       = 8           // largest number of trials that run at the same time
	firstRetryDelay = time.Second // pause after the first failed trial; it doubles with each further one
	maxRetryDelay   = time.Minute // longest pause between two trials of an engine
)

// Discoverer reports to the fleet which engines the sources list. Only Run's goroutine uses its fields, except the channels and
// status.
type Discoverer struct {
	cfg          Config
	metrics      *metrics
	reports      chan sourceReport
	trialResults chan trialResult
	recheck      chan struct{}
	status       atomic.Pointer[Status]

	lists         [][]Engine // the last list of each source, in the order of Config.Sources
	sources       []SourceStatus
	loggedCauses  []map[string]bool // for each source, the causes of failures that were logged since it last worked
	records       map[string]*record
	runningTrials int // number of trials that run now, at most maxTrials
}

// sourceReport is a report of a source. source is its index in Config.Sources.
type sourceReport struct {
	source  int
	engines []Engine
	err     error
}

// trialResult is the result of a trial. engine is the engine as it was listed when the trial began.
type trialResult struct {
	engine Engine
	err    error
}

// record is the state of one engine that a source lists.
type record struct {
	listed       Engine    // the engine as the source lists it
	inFleet      *Engine   // the engine as the fleet has it; nil: the fleet does not have it
	trialPassed  bool      // this engine has passed its trial
	trialRuns    bool      // a trial of this engine runs now
	inConfig     bool      // the config lists this engine, so discovery leaves it alone
	failedTrials int       // failed trials, and refusals by the fleet, since its description changed
	err          error     // why the last trial failed, or why the fleet refused the description; nil: neither happened
	nextAttempt  time.Time // the earliest time of the next trial, or of the next attempt to pass the engine to the fleet
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

// Status returns the state after the last update by Run. Any goroutine may call it.
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
				case d.reports <- sourceReport{i, engines, err}:
				case <-ctx.Done():
				}
			})
		})
	}
	timer := time.NewTimer(time.Hour) // set after each pass; until the first report there is nothing to do
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

// storeList stores the list of a source, and logs when the source begins to fail or works again. After a failure without a list, the last
// list stays valid.
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

// logFailure logs the failure of a source, and sets it in the source's status, if it has a cause that was not logged since the source last
// worked. Each cause is logged once per outage, because several causes often alternate. source is the source's index in Config.Sources.
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
	return []string{strings.Map(func(r rune) rune { // err wraps no other error
		if r >= '0' && r <= '9' {
			return -1 // strings.Map removes the digit
		}
		return r
	}, err.Error())}
}

// updateFleet updates the records and the fleet to the lists of the sources: it removes engines that no source lists any more, and adds or
// changes others. Engines that have not passed their trial are left out, and so are those that are in the config.
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
	for _, key := range slices.Sorted(maps.Keys(all)) { // sorted, because the fleet keeps the order in which engines come
		r, e := d.records[key], all[key]
		if r == nil {
			r = &record{}
			d.records[key] = r
		}
		if r.listed != e { // the description has changed, so earlier failures say nothing
			r.trialPassed = r.trialPassed && !isOtherEngine(r.listed, e) // another process needs a trial of its own
			r.listed = e
			r.err, r.failedTrials, r.nextAttempt = nil, 0, time.Time{}
		}
		if r.inConfig = d.cfg.Fleet.InConfig(e); r.inConfig {
			r.inFleet, r.trialPassed = nil, false // the fleet has this engine from the config now, so discovery no longer manages it
			continue
		}
		d.passToFleet(r, now)
	}
}

// passToFleet passes an engine to the fleet if the fleet does not have it and it may be used, or if its description has changed. If only
// the reason why the engine gets no requests for now (Away) has changed, it passes only that. The fleet may refuse an engine. Then
// passToFleet does nothing until r.nextAttempt.
func (d *Discoverer) passToFleet(r *record, now time.Time) {
	isNew := r.inFleet == nil
	unchanged := !isNew && *r.inFleet == r.listed
	needsTrial := !r.trialPassed && d.cfg.Probe != nil
	notYet := isNew && (needsTrial || r.listed.Away != "") // an engine that gets no requests for now is added when it gets them
	if unchanged || notYet || now.Before(r.nextAttempt) {  // before nextAttempt: the fleet has just refused it
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
			d.setAwayOnly(r) // the fleet keeps the old description, but must learn whether the engine gets requests now
			d.recordFailure(r, now, err)
			return
		}
	}
	d.cfg.Log.Info("discovery: engine "+change, zap.String("engine", r.listed.Key()), zap.String("source", r.listed.Source),
		zap.String("incarnation", r.listed.Incarnation), zap.String("why", r.listed.Away))
	r.inFleet, r.err, r.failedTrials = new(r.listed), nil, 0
}

// setAwayOnly starts or stops new requests to an engine whose new description the fleet has refused. The fleet keeps the old description.
func (d *Discoverer) setAwayOnly(r *record) {
	if r.inFleet == nil || r.inFleet.Away == r.listed.Away { // nil: the fleet does not have the engine
		return
	}
	updated := *r.inFleet
	updated.Away = r.listed.Away
	d.cfg.Fleet.SetAway(updated)
	r.inFleet = &updated
}

// difference names the change from old, the engine as the fleet has it, to want, the engine as its source lists it: changed, away or back.
func difference(old, want Engine) string {
	old.Away = want.Away // from here on, old differs from want only by its other fields
	switch {
	case old != want:
		return changed
	case want.Away != "":
		return away
	}
	return back
}

// removeFromFleet removes an engine from the fleet and logs it. It does nothing if the fleet does not have the engine.
func (d *Discoverer) removeFromFleet(r *record) {
	if r.inFleet == nil {
		return
	}
	d.cfg.Fleet.Remove(*r.inFleet)
	d.cfg.Log.Info("discovery: engine "+removed, zap.String("engine", r.inFleet.Key()), zap.String("source", r.inFleet.Source),
		zap.String("incarnation", r.inFleet.Incarnation))
}

// startTrials starts the trials that are due, as long as fewer than maxTrials run.
func (d *Discoverer) startTrials(ctx context.Context, wg *sync.WaitGroup, now time.Time) {
	if d.cfg.Probe == nil {
		return
	}
	for _, r := range d.records {
		if d.runningTrials == maxTrials {
			return
		}
		needsNoTrial := r.inFleet != nil || r.trialPassed || r.trialRuns
		mustWait := r.listed.Away != "" || now.Before(r.nextAttempt) // Away: it gets no requests for now
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

// recordTrial records the result of a trial. If the source describes the engine differently by now, the result is ignored.
func (d *Discoverer) recordTrial(result trialResult, now time.Time) {
	d.runningTrials--
	d.metrics.countTrial(result.engine.Role, result.err)
	r := d.records[result.engine.Key()]
	if r == nil || !r.trialRuns { // meanwhile the engine was removed; if it was listed again, its new record has no trial
		return
	}
	r.trialRuns = false
	switch {
	case r.listed != result.engine: // the result is of an older description, so startTrials starts a new trial
	case result.err != nil:
		d.recordFailure(r, now, result.err)
	default:
		r.trialPassed = true
	}
}

// recordFailure records and logs why an engine cannot be used or, if the fleet has it, why its new description cannot. It sets the time of
// the next attempt. The pause doubles with each failure, up to maxRetryDelay.
func (d *Discoverer) recordFailure(r *record, now time.Time, err error) {
	pause := min(firstRetryDelay<<min(r.failedTrials, 10), maxRetryDelay) // 10 doublings are past maxRetryDelay, and more could overflow
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

// untilNextRetry returns the time until what failed for an engine must be tried again: its trial, or to pass it to the fleet, which refused
// it. The result is at most an hour, and a millisecond if a retry is overdue. First trials do not count, because they follow no pause.
func (d *Discoverer) untilNextRetry(now time.Time) time.Duration {
	next := now.Add(time.Hour) // any long wait will do, because new reports and results wake Run
	for _, r := range d.records {
		needsTrial := d.cfg.Probe != nil && r.inFleet == nil && !r.trialPassed // otherwise the retry is to pass it to the fleet
		if needsTrial && d.runningTrials == maxTrials {
			continue // no trial may begin until another one ends, and its end wakes Run
		}
		awaitsRetry := r.err != nil && !r.trialRuns && !r.inConfig // it may have failed before the config listed it
		if awaitsRetry && r.nextAttempt.Before(next) {
			next = r.nextAttempt
		}
	}
	return max(time.Millisecond, next.Sub(now)) // bounded below, so that a retry that is overdue does not keep Run busy
}

// publish stores a copy of the state, which Status returns, and updates the metrics.
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

// status returns the state of the engine for operators. If several states apply, the first one of the switch counts.
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
		if r.err != nil { // the fleet has refused the new description, so the engine serves with the one before
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
