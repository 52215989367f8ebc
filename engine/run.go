package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// run checks the instance until ctx ends: once per HealthInterval, and at once after checkNow.
func (w *watch) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.checkDue:
		case <-timer.C:
		}
		w.check(ctx)
		timer.Reset(jitter(w.m.cfg.HealthInterval))
	}
}

// checkNow makes run check the instance at once. It does not wait for the check.
func (w *watch) checkNow() {
	select {
	case w.checkDue <- struct{}{}:
	default: // a check is due already
	}
}

// answers has what one check of an engine found out, and what the watch had recorded before the check.
type answers struct {
	health    error  // of the health check; nil: the engine takes requests
	halt      error  // see lookForRanks
	reforming error  // see reforming; nil: the number of ranks does not change
	broke     bool   // watch.broke before the check
	reports   uint64 // watch.reports before the check
	events    uint64 // Traffic.events before the check
}

// check makes one check and updates the engine's status.
func (w *watch) check(ctx context.Context) {
	w.m.mu.Lock()
	a := answers{broke: w.broke, reports: w.reports}
	wasUp, wasHalted, relist := w.status.Up, w.absent.halt != nil, w.relist
	// A new connection is needed if there is a doubt about the engine, and otherwise from time to time (see alive).
	fresh := !wasUp || w.broke || w.redial || w.failed > 0 || time.Since(w.factsAt) >= w.m.cfg.FactsInterval
	w.broke, w.redial = false, false
	w.m.mu.Unlock()
	if fresh {
		w.locate(ctx)
	}
	a.events = w.traffic.events.Load()
	began := time.Now()
	quick, err := w.alive(ctx, fresh)
	a.health = err
	if now := time.Now(); err == nil {
		if quick { // otherwise the engine computed for its answer
			w.learnRTT(now.Sub(began), now, fresh)
		}
		w.answered = now
		if fresh { // the answer came over a new connection
			w.unproven = false
		}
	}
	modelsUnknown := w.facts.err != nil && len(w.facts.models) == 0
	waits := !wasUp || modelsUnknown || wasHalted // the engine gets no requests until its facts are read
	factsDue := waits || relist || time.Since(w.factsAt) >= w.m.cfg.FactsInterval
	connects := err == nil || late(err)
	switch {
	case err == nil && factsDue:
		w.readFacts(ctx, !wasUp, waits)
	case connects && w.traffic.quiet(began) > lookAfter:
		w.lookForSigns(ctx)
	}
	if err == nil {
		a.halt = w.lookForRanks(ctx)
	}
	if err == nil && errors.Is(w.facts.err, ErrReforming) {
		a.reforming = w.reforming(ctx)
	}
	if ctx.Err() != nil { // the watch was stopped, which may be the cause of failures
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if !w.gone {
		w.listen(time.Now())
		a.conclude(w)
	}
}

// conclude updates the engine's status by the answers of a check. If the answer to the health check is late, but streams of the
// engine sent tokens meanwhile, the engine stays up: its API server is only busy. The caller holds m.mu.
func (a answers) conclude(w *watch) {
	err := a.health
	if isOwnFault(err) { // nothing was asked, so the engine stays up or down
		next := w.status
		next.Err = fmt.Errorf("the proxy cannot check it, because it can open no connection: %w", err)
		w.setStatus(next)
		return
	}
	keyRefused := errors.Is(err, ErrCredential) || (err == nil && errors.Is(w.facts.err, ErrCredential))
	w.alarmCredential(keyRefused)
	if err == nil && w.facts.err != nil && !w.status.Up && errors.Is(w.status.Err, ErrRetired) {
		w.facts.err = ErrRetired // the engine gave this reason to a request before, and still lists no models
	}
	confirmed, halt := w.haltBy(a)
	reported := a.reports != w.reports // meanwhile a caller could not connect, or the engine took no requests
	// If the address is unproven, the streams may be of the host that had the name before.
	onlyBusy := late(err) && w.traffic.events.Load() != a.events && len(w.facts.models) > 0 && !w.unproven
	switch {
	case errors.Is(err, ErrReforming): // before 0.33 the health check of vLLM also answers that it re-forms
		w.failed = 0
		w.halt(halt, true)
		next := w.status
		if why := w.absent.hopeless(time.Now()); why != nil {
			next.Up, next.Err = false, why
		} else if !next.Up { // the engine stays down, now for this reason
			next.Err = err
		}
		w.setStatus(next)
	case w.holdsBack(err) && !keyRefused: // a refused key counts: every request would fail
		w.failed = 0
	case err == nil && reported: // the next check decides
	case err == nil: // it answers, which is not enough if it refuses the key or is no usable engine
		unusable := keyRefused || errors.Is(w.facts.err, ErrNotAnEngine) || errors.Is(w.facts.err, ErrRetired)
		w.afterGood(halt, confirmed, !unusable)
	case onlyBusy:
		w.m.metrics.late.WithLabelValues(w.in.ID).Inc()
		if reported { // the next check decides
			return
		}
		w.failed = 0
		next := w.status
		next.Accused = w.suspect.accusation()
		next.Up, next.Hangs, next.Err = true, false, fmt.Errorf("it answered a health check too late, while requests go on: %w", err)
		w.setStatus(next)
	default:
		w.afterFailed(err, a.broke, keyRefused)
	}
}

// haltBy returns why requests must wait for the engine after a check; nil: they need not. confirmed says that the engine itself has
// just given this reason. The caller holds m.mu.
func (w *watch) haltBy(a answers) (confirmed bool, why error) {
	halt := a.halt
	if w.in.Held != nil && errors.Is(halt, ErrPaused) { // the operator paused the engine, and Held has the reason
		halt = nil
	}
	old := w.absent.halt
	wasReforming := errors.Is(old, ErrReforming) || errors.Is(old, errScaleFailed)
	switch {
	case errors.Is(a.health, ErrReforming):
		return true, ErrReforming
	case a.reforming != nil:
		return true, a.reforming
	case a.health == nil && w.facts.err != nil && wasReforming: // only a list of models shows that this halt is over
		return halt != nil, old
	}
	return halt != nil, halt
}

// afterGood updates the status after a good health check. up says whether the engine may serve, halt and confirmed are the results
// of haltBy. The caller holds m.mu.
func (w *watch) afterGood(halt error, confirmed, up bool) {
	w.failed = 0
	if w.facts.start != w.status.StartTime { // the engine has restarted, and suspicion and lost ranks are of the old process
		w.forgive()
		// A halt counts as confirmed, so that its end, which the restart explains, is no failure of the engine (see halt).
		w.absent = absent{halt: w.absent.halt, since: w.absent.since, confirmed: w.absent.halt != nil}
	}
	w.halt(halt, confirmed)
	next := w.statusByFacts(up)
	if why := w.absent.hopeless(time.Now()); why != nil {
		next.Up, next.Err = false, why
	}
	w.publish(next)
	w.lookForMore()
	w.publishSuspicion()
}

// afterFailed updates the status after a health check that failed with err. hadBroken says that a caller's connection broke before
// this check, keyRefused that the engine refuses the API key. The caller holds m.mu.
func (w *watch) afterFailed(err error, hadBroken, keyRefused bool) {
	w.failed++
	if hadBroken && unreachable(err) { // a connection broke, and a new one cannot be made: the process has ended
		w.failed = misses
	}
	next := w.status
	if keyRefused || w.failed >= misses { // with a refused key, every request would fail
		next.Up = false
	}
	next.Hangs = late(err)
	next.Late = !next.Up && next.Hangs && time.Since(w.answered) < Standstill
	if next.Err = err; next.Hangs {
		next.Err = fmt.Errorf("it does not answer its health check (%.3g s): %w", w.m.cfg.Timeout.Seconds(), err)
	}
	next.Err = w.elsewhere(next.Err)
	w.setStatus(next)
}

// alarmCredential logs that the engine refuses the API key. It logs again only after a check in which the key was not refused. The
// caller holds m.mu.
func (w *watch) alarmCredential(refused bool) {
	if refused && !w.alarmed {
		w.m.cfg.Log.Error("ALARM: an engine refuses the API key that the proxy sends, so it gets no requests; check api_key_env of its profile",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(ErrCredential))
	}
	w.alarmed = refused
}

// statusByFacts returns a status with the facts that were read last. It keeps Out and Wedged of the current status.
func (w *watch) statusByFacts(up bool) Status {
	f := w.facts
	return Status{
		Up: up, Err: f.err, Since: w.status.Since, Changed: w.status.Changed,
		Models: f.models, Version: f.version, CapacityTokens: f.capacity, StartTime: f.start,
		Out: w.status.Out, Wedged: w.status.Wedged,
	}
}

// readFacts reads the facts that GET /health does not report. It reads version and capacity again if full is true, or if the
// start time shows that the engine has restarted. If an engine has no /version or /metrics, these facts stay unknown, which
// does not keep the engine from serving. hurry says that the engine gets no requests until the facts are read.
func (w *watch) readFacts(ctx context.Context, full, hurry bool) {
	f, patience := w.facts, w.m.cfg.Timeout
	if hurry { // the engine could serve already, so facts that are only useful must not delay it
		patience = min(patience, time.Second)
	}
	w.scrapes.pulls.before(w.traffic)
	began := time.Now()
	sample, pageErr := w.scrape(ctx, patience)
	if pageErr == nil {
		w.countExpired(sample)
		w.crossCheck(sample, began)
		if sample.StartTime != 0 && sample.StartTime != f.start {
			full = true
			f.start, f.version = sample.StartTime, ""
		}
	}
	if full {
		f.capacity = nil
	}
	if pageErr == nil && len(f.capacity) == 0 {
		f.capacity = sample.Capacities()
	}
	if full || f.version == "" {
		f.readVersion(ctx, w, patience)
	}
	if w.in.Version == "" && (full || f.unsure) { // it may be a vLLM
		_, faultErr := w.fault(ctx, patience)
		_, pauseErr := w.isPaused(ctx)
		f.tolerant, f.pauses = faultErr == nil, pauseErr == nil
		f.unsure = faultErr != nil && !lacks(faultErr) || pauseErr != nil && !lacks(pauseErr)
	}
	w.m.mu.Lock()
	w.relist = false // before the list is read, because a later report may be about this reading
	w.m.mu.Unlock()
	models, err := w.models(ctx)
	if errors.As(err, new(*PageError)) { // the models are known, except for a number
		pageErr, err = err, nil
	}
	f.err = err
	if err == nil { // after an error the old models stay
		f.models = models
	}
	w.tellOdd(pageErr)
	w.facts, w.factsAt = f, time.Now()
}

// readVersion sets the version, and whether the engine is an elastic SGLang. After an error the old values stay.
func (f *facts) readVersion(ctx context.Context, w *watch, patience time.Duration) {
	path, limit := "/version", answerLimit
	if w.in.Version != "" { // the server may ask each rank for this answer, which takes longer while ranks are busy
		path, patience, limit = w.in.Version, w.m.cfg.Timeout, versionLimit
	}
	if answer, err := w.get(ctx, path, patience, limit); err == nil {
		f.version = parseVersion(answer)
		f.elastic = w.in.Version != "" && parseElastic(answer)
	}
}

// tellOdd logs that numbers on an engine's page cannot be right. It logs again only after the pages were right.
func (w *watch) tellOdd(err error) {
	odd := errors.As(err, new(*PageError))
	if odd && !w.odd {
		w.m.cfg.Log.Warn("an engine's page is not believed, so the proxy goes by its own accounts; if its numbers stay so, restart the engine, "+
			"or report them to its makers",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(err))
	}
	if odd || err == nil { // another error does not show whether the pages are right
		w.odd = odd
	}
}

// lookAfter is the share of its patience that a request must have used up without a sign of life before the gauges are read early.
const lookAfter = 0.5

// lookForSigns reads the gauges before their time. It is for an engine whose streams send nothing, because the gauges may show that
// its core still works.
func (w *watch) lookForSigns(ctx context.Context) {
	began := time.Now()
	if s, err := w.scrape(ctx, min(w.m.cfg.Timeout, time.Second)); err == nil {
		w.noteSigns(s, began)
	}
}
