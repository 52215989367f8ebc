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
	timer := time.NewTimer(0) // the first check is due at once
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

// checkResult has what one check of an engine found out, and what the watch had recorded before the check.
type checkResult struct {
	health          error  // why the health check failed; nil: the engine takes requests
	halt            error  // why the engine may get no new requests, by checkRestrictions; nil: it may get them
	reforming       error  // state of a change of the number of ranks, by readScaling; nil: the number does not change
	connectionBroke bool   // whether a caller's connection broke before the check
	reportsBefore   uint64 // watch.reportCount before the check; a higher count now shows a report during the check
	eventsBefore    uint64 // Traffic.events before the check; a higher count now shows that streams sent tokens meanwhile
}

// check makes one check and updates the engine's status: it asks for the engine's health, reads its facts or gauges if that is due, and
// finds out whether the engine is halted. It uses a new connection if an idle one could hide that the engine takes no connections. For this
// it first looks up the engine's name again.
func (w *watch) check(ctx context.Context) {
	w.m.mu.Lock()
	// The counts before the check show later whether callers reported a failure, or streams sent tokens, while the check went on.
	result := checkResult{connectionBroke: w.connectionBroke, reportsBefore: w.reportCount}
	wasUp, wasHalted, rereadDue := w.status.Up, w.restrictions.haltReason != nil, w.rereadDue
	doubtful := !wasUp || w.connectionBroke || w.redial || w.failedChecks > 0
	fresh := doubtful || time.Since(w.factsAt) >= w.m.cfg.FactsInterval // a new connection is used then (see alive)
	w.connectionBroke, w.redial = false, false
	w.m.mu.Unlock()
	if fresh {
		w.checkAddress(ctx)
	}
	result.eventsBefore = w.traffic.events.Load()
	began := time.Now()
	withoutComputing, err := w.alive(ctx, fresh)
	result.health = err
	if err == nil {
		recordGoodAnswer(w, began, withoutComputing, fresh)
	}
	modelsUnknown := w.facts.err != nil && len(w.facts.models) == 0
	getsNoRequests := !wasUp || modelsUnknown || wasHalted // the engine gets no requests until its facts are read
	factsDue := getsNoRequests || rereadDue || time.Since(w.factsAt) >= w.m.cfg.FactsInterval
	connects := err == nil || isLate(err)
	switch {
	case err == nil && factsDue:
		w.readFacts(ctx, !wasUp, getsNoRequests) // after an outage all facts are read, because another process may answer now
	case connects && w.traffic.maxSilenceShare(began) > earlyScrapeShare: // requests have waited for half of the allowed silence
		w.scrapeSigns(ctx)
	}
	if err == nil {
		result.halt = w.checkRestrictions(ctx)
	}
	if err == nil && errors.Is(w.facts.err, ErrReforming) { // the engine answered so when it was asked for its models
		result.reforming = w.readScaling(ctx)
	}
	if ctx.Err() != nil { // the watch was stopped, which may be the cause of failures
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if !w.removed {
		w.checkSilence(time.Now())
		result.updateStatus(w)
	}
}

// recordGoodAnswer records that the engine has just answered its health check well. began is when it was asked. withoutComputing says that
// the engine computed nothing for the answer, fresh that it was asked over a new connection (see alive).
func recordGoodAnswer(w *watch, began time.Time, withoutComputing, fresh bool) {
	now := time.Now()
	if withoutComputing { // false: the engine computed for its answer, so the time is no round trip
		w.learnRTT(now.Sub(began), now, fresh)
	}
	w.lastGoodCheck = now
	if fresh { // the answer came over a new connection, so the address is proven
		w.addressUnproven = false
	}
}

// updateStatus updates the engine's status by the result of a check, and logs a refused API key. An engine that re-forms, or that an
// operator holds, may answer badly without a failure, so these cases come first. If the answer to the health check is late, but streams of
// the engine sent tokens meanwhile, the engine stays up: its API server is only busy. The caller holds m.mu.
func (result checkResult) updateStatus(w *watch) {
	err := result.health
	if isOwnFault(err) { // the engine was not asked, so it stays up or down as it was
		next := w.status
		next.Err = fmt.Errorf("the proxy cannot check it, because it can open no connection: %w", err)
		w.setStatus(next)
		return
	}
	keyRefused := errors.Is(err, ErrCredential) || (err == nil && errors.Is(w.facts.err, ErrCredential))
	w.logRefusedCredential(keyRefused)
	listFailed := err == nil && w.facts.err != nil                    // the engine still lists no models
	wasRetired := !w.status.Up && errors.Is(w.status.Err, ErrRetired) // the engine gave this reason to a request before
	if listFailed && wasRetired {
		w.facts.err = ErrRetired
	}
	haltSeenNow, halt := w.haltAfter(result)          // halt is why requests must wait for the engine
	reported := result.reportsBefore != w.reportCount // during the check a caller could not connect, or got a refusal
	streamsGoOn := w.traffic.events.Load() != result.eventsBefore
	// An engine whose models are unknown gets no requests. If the address is unproven, the streams may be of the host that had the name
	// before.
	onlyBusy := isLate(err) && streamsGoOn && len(w.facts.models) > 0 && !w.addressUnproven
	switch {
	case errors.Is(err, ErrReforming): // before 0.33 the health check of vLLM also answers that it re-forms
		applyReforming(w, err, halt)
	case w.ignoredWhileHeld(err) && !keyRefused: // while an operator holds the engine, only a refused key or no connection counts
		w.failedChecks = 0
	case err == nil && reported: // a caller's report contradicts this good check, so the next check decides
	case err == nil: // a good answer is not enough if the engine refuses the key or lists no models
		unusable := keyRefused || errors.Is(w.facts.err, ErrNotAnEngine) || errors.Is(w.facts.err, ErrRetired)
		w.applyGoodCheck(halt, haltSeenNow, !unusable)
	case onlyBusy:
		w.m.metrics.lateChecks.WithLabelValues(w.in.ID).Inc()
		if !reported { // after a contrary report of a caller, the next check decides
			applyLateCheck(w, err)
		}
	default:
		w.applyFailedCheck(err, result.connectionBroke, keyRefused)
	}
}

// applyReforming halts an engine whose health check says that its group re-forms. The engine stays up or down as it was, unless the halt
// has lasted too long. The caller holds m.mu.
func applyReforming(w *watch, err, halt error) {
	w.failedChecks = 0
	w.setHalt(halt, true) // true: this check has seen the reason
	next := w.status
	if why := w.restrictions.downReason(time.Now()); why != nil {
		next.Up, next.Err = false, why
	} else if !next.Up { // the engine stays down, now because its group re-forms
		next.Err = err
	}
	w.setStatus(next)
}

// applyLateCheck keeps an engine up whose health check came too late, because its streams go on. The caller holds m.mu.
func applyLateCheck(w *watch, err error) {
	w.failedChecks = 0
	next := w.status
	next.Accused = w.suspect.accusedError()
	next.Up, next.Hangs, next.Err = true, false, fmt.Errorf("it answered a health check too late, while requests go on: %w", err)
	w.setStatus(next)
}

// haltAfter returns why the engine must be halted after a check, so that requests wait for it; nil: it need not be. The reason is, in this
// order: a change of the number of ranks that the health check or readScaling reports, the same change seen before if the list of models
// does not show its end yet, or what checkRestrictions found. seenNow is false if this check itself has seen no reason. The caller holds
// m.mu.
func (w *watch) haltAfter(result checkResult) (seenNow bool, halt error) {
	otherHalt := result.halt                                 // a pause or a fault
	if w.in.Held != nil && errors.Is(otherHalt, ErrPaused) { // the operator paused the engine, and Held has the reason
		otherHalt = nil
	}
	old := w.restrictions.haltReason
	wasReforming := errors.Is(old, ErrReforming) || errors.Is(old, errScaleFailed)
	switch {
	case errors.Is(result.health, ErrReforming):
		return true, ErrReforming
	case result.reforming != nil:
		return true, result.reforming
	case result.health == nil && w.facts.err != nil && wasReforming: // only a list of models shows that this halt is over
		return otherHalt != nil, old
	}
	return otherHalt != nil, otherHalt
}

// applyGoodCheck updates the status after a good health check. halt says why new requests must wait for the engine, for example that it is
// paused; nil: they need not. haltSeenNow says whether this check has seen a reason, and up whether the engine may serve. If the engine has
// lost ranks, applyGoodCheck also lets one of them be tried again once that is due. The caller holds m.mu.
func (w *watch) applyGoodCheck(halt error, haltSeenNow, up bool) {
	w.failedChecks = 0
	if w.facts.start != w.status.StartTime { // the engine has restarted, and suspicion and lost ranks are of the old process
		w.clearFailures()
		old := w.restrictions
		// A halt counts as confirmed, so that its end, which the restart explains, is no failure of the engine (see setHalt).
		w.restrictions = restrictions{haltReason: old.haltReason, haltedAt: old.haltedAt, haltConfirmed: old.haltReason != nil}
	}
	w.setHalt(halt, haltSeenNow)
	next := w.statusByFacts(up)
	if why := w.restrictions.downReason(time.Now()); why != nil { // the halt has lasted too long, or cannot end
		next.Up, next.Err = false, why
	}
	w.publish(next)
	w.tryLostRankIfDue()
	w.publishSuspicion()
}

// applyFailedCheck updates the status after a health check that failed with err. connectionBroke says that a caller's connection broke
// before this check, keyRefused that the engine refuses the API key. An engine that is down because it hangs is late for a while: requests
// wait for it, because a stopped process may continue. Once its last good check is Standstill (30 s) ago, it counts as dead. The caller
// holds m.mu.
func (w *watch) applyFailedCheck(err error, connectionBroke, keyRefused bool) {
	w.failedChecks++
	if connectionBroke && unreachable(err) { // a connection broke, and a new one cannot be made: the process has ended
		w.failedChecks = failuresUntilDown
	}
	next := w.status
	if keyRefused || w.failedChecks >= failuresUntilDown { // a refused key counts at once, because every request would fail
		next.Up = false
	}
	next.Hangs = isLate(err)
	next.Late = !next.Up && next.Hangs && time.Since(w.lastGoodCheck) < Standstill
	next.Err = err
	if next.Hangs {
		next.Err = fmt.Errorf("it does not answer its health check (%.3g s): %w", w.m.cfg.Timeout.Seconds(), err)
	}
	next.Err = w.addMoveNote(next.Err)
	w.setStatus(next)
}

// logRefusedCredential logs that the engine refuses the API key. It logs again only after a check in which the key was not refused. The
// caller holds m.mu.
func (w *watch) logRefusedCredential(refused bool) {
	if refused && !w.refusalLogged {
		w.m.cfg.Log.Error("ALARM: an engine refuses the API key that the proxy sends, so it gets no requests; check api_key_env of its profile",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(ErrCredential))
	}
	w.refusalLogged = refused
}

// statusByFacts returns a status with the facts that were read last, and with this Up. It keeps Since, Changed, Out and Wedged of the
// current status. Halt, Lost and Accused are left for publish.
func (w *watch) statusByFacts(up bool) Status {
	f := w.facts
	return Status{
		Up: up, Err: f.err, Since: w.status.Since, Changed: w.status.Changed,
		Models: f.models, Version: f.version, CapacityTokens: f.capacity, StartTime: f.start,
		Out: w.status.Out, Wedged: w.status.Wedged,
	}
}

// readFacts reads the facts that GET /health does not report: the metrics, the version, whether the engine is a vLLM that reports pauses
// and faults (its features), and the list of models. It reads version, capacity and features again if full is true, or if the start time
// shows that the engine has restarted. If an engine has no /version or /metrics, these facts stay unknown, which does not keep the engine
// from serving. hurry says that the engine gets no requests until the facts are read.
func (w *watch) readFacts(ctx context.Context, full, hurry bool) {
	f, timeout := w.facts, w.m.cfg.Timeout
	if hurry { // the engine could serve already, so facts that are only useful must not delay it
		timeout = min(timeout, time.Second)
	}
	w.scrapes.pulls.setSettledTokens(w.traffic) // before the scrape, whose counters then include these tokens (see crossCheck)
	began := time.Now()
	sample, pageErr := w.scrape(ctx, timeout)
	if pageErr == nil {
		w.storeExpired(sample)
		w.crossCheck(sample, began)
		restarted := sample.StartTime != 0 && sample.StartTime != f.start
		if restarted {
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
		f.readVersion(ctx, w, timeout)
	}
	mayBeVLLM := w.in.Version == "" // it has no path of its own for its version
	if mayBeVLLM && (full || f.featuresUnknown) {
		f.readFeatures(ctx, w, timeout)
	}
	w.m.mu.Lock()
	w.rereadDue = false // cleared before the list is read: a caller that finds it wrong later may mean the list that is read now
	w.m.mu.Unlock()
	models, err := w.models(ctx)
	if errors.As(err, new(*PageError)) { // the list was read, except for a wrong number, which is logged as one of the metrics page is
		pageErr, err = err, nil
	}
	f.err = err
	if err == nil { // after an error the old models stay
		f.models = models
	}
	w.logBadPage(pageErr)
	w.facts, w.factsAt = f, time.Now()
}

// readFeatures finds out whether the engine is a vLLM that reports faults and pauses. If it does not answer, featuresUnknown is set, so
// that it is asked again.
func (f *facts) readFeatures(ctx context.Context, w *watch, timeout time.Duration) {
	_, faultErr := w.readFault(ctx, timeout)
	_, pauseErr := w.readPaused(ctx)
	f.reportsFaults, f.reportsPause = faultErr == nil, pauseErr == nil
	noFaultAnswer := faultErr != nil && !isMissingFeature(faultErr)
	noPauseAnswer := pauseErr != nil && !isMissingFeature(pauseErr)
	f.featuresUnknown = noFaultAnswer || noPauseAnswer
}

// readVersion sets the version, and whether the engine is an elastic SGLang, one that continues without ranks that have failed. After an
// error the old values stay. An engine whose version is not at /version is an SGLang: its profile gives the path /server_info, where the
// settings of the server are, too.
func (f *facts) readVersion(ctx context.Context, w *watch, timeout time.Duration) {
	path, limit := "/version", answerLimit
	isSGLang := w.in.Version != ""
	if isSGLang { // the server may ask each rank for this answer, which takes longer while ranks are busy
		path, timeout, limit = w.in.Version, w.m.cfg.Timeout, versionLimit
	}
	if answer, err := w.get(ctx, path, timeout, limit); err == nil {
		f.version = parseVersion(answer)
		f.continuesWithoutRanks = isSGLang && parseElastic(answer)
	}
}

// logBadPage logs that numbers on an engine's page cannot be right. It logs again only after the pages were right.
func (w *watch) logBadPage(err error) {
	isBad := errors.As(err, new(*PageError))
	if isBad && !w.badPageLogged {
		w.m.cfg.Log.Warn("an engine's page is not believed, so the proxy goes by its own accounts; if its numbers stay so, restart the engine, "+
			"or report them to its makers",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(err))
	}
	if isBad || err == nil { // another error does not show whether the pages are right
		w.badPageLogged = isBad
	}
}

// earlyScrapeShare says when the gauges of a silent engine are read early: after this share of the silence that its waiting requests allow.
const earlyScrapeShare = 0.5

// scrapeSigns reads the gauges before they are due. It is for an engine whose streams send nothing, because the gauges may show that its
// core still works.
func (w *watch) scrapeSigns(ctx context.Context) {
	began := time.Now()
	if s, err := w.scrape(ctx, min(w.m.cfg.Timeout, time.Second)); err == nil {
		w.recordSigns(s, began)
	}
}
