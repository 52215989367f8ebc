package engine

import (
	"cmp"
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
	silentCore      error  // why the core has not said whether it is paused, although it could; nil: it has, or was not asked
	reforming       error  // state of a change of the number of ranks, by readScaling; nil: the number does not change
	wasUp           bool   // the engine was up before the check
	wasHalted       bool   // the engine was halted before the check (see Status.Halt)
	rereadDue       bool   // an answer to a request showed before the check that the engine's list of models has changed
	connectionBroke bool   // whether a caller's connection broke before the check
	reportsBefore   uint64 // watch.reportCount before the check; a higher count now shows a report during the check
	eventsBefore    uint64 // Traffic.events before the check; a higher count now shows that streams sent tokens meanwhile
}

// check makes one check and updates the engine's status: it asks for the engine's health, reads its facts or gauges if that is due, and
// finds out whether the engine is halted. If it asks over a new connection, it first looks up the engine's name again.
func (w *watch) check(ctx context.Context) {
	result, fresh := startCheck(w)
	if fresh {
		w.checkAddress(ctx)
	}
	result.eventsBefore = w.traffic.events.Load() // if streams send events during the check, a late answer does not count as a failure
	began := time.Now()
	withoutComputing, err := w.alive(ctx, fresh) // withoutComputing: the answer came without a step of the core
	result.health = err
	if err == nil {
		recordGoodAnswer(w, began, withoutComputing, fresh)
	}
	result.readWhatIsDue(ctx, w, began)
	if err == nil {
		result.halt, result.silentCore = w.checkRestrictions(ctx)
	}
	if err == nil && errors.Is(w.facts.modelsErr, ErrReforming) { // the engine answered so when it was asked for its models
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
	close(w.lastCheck.next)
	w.lastCheck = lastCheck{next: make(chan struct{}), began: began, found: result.found(w)}
}

// found returns why the engine does not work, by this check and what callers have reported meanwhile; nil: it works, although it may be
// paused. The caller holds m.mu.
func (result checkResult) found(w *watch) error {
	halt := w.restrictions.haltReason
	switch {
	case result.health != nil:
		return result.health
	case !w.status.Up:
		return cmp.Or(w.status.Err, errNotUp)
	case halt != nil && !errors.Is(halt, ErrPaused):
		return halt
	}
	return result.silentCore
}

var errNotUp = errors.New("it is down")

// startCheck returns a result with what the watch has recorded before the check. fresh says that the check must use a new connection:
// because the facts are due, or because the engine may take no connections any more, which an idle one would not show.
func startCheck(w *watch) (result checkResult, fresh bool) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	result = checkResult{
		wasUp: w.status.Up, wasHalted: w.restrictions.haltReason != nil, rereadDue: w.rereadDue,
		connectionBroke: w.connectionBroke, reportsBefore: w.reportCount,
	}
	doubtful := !result.wasUp || w.connectionBroke || w.redial || w.failedChecks > 0
	w.connectionBroke, w.redial = false, false // this check takes account of both
	return result, doubtful || time.Since(w.factsAt) >= w.m.cfg.FactsInterval
}

// readWhatIsDue reads the engine's facts if the engine has answered its health check well and the facts are due. Otherwise it may read only
// the gauges, early, because they may show that the core still works: if the engine takes connections, and a rank has been silent for more
// than half of the time that a waiting request allows. began is when the health check began.
func (result checkResult) readWhatIsDue(ctx context.Context, w *watch, began time.Time) {
	modelsUnknown := w.facts.modelsErr != nil && len(w.facts.models) == 0
	getsNoRequests := !result.wasUp || modelsUnknown || result.wasHalted // the engine gets no requests until its facts are read
	factsDue := getsNoRequests || result.rereadDue || time.Since(w.factsAt) >= w.m.cfg.FactsInterval
	isHealthy := result.health == nil
	connects := isHealthy || isLate(result.health)
	switch {
	case isHealthy && factsDue:
		readAll := !result.wasUp // after an outage, because another process may answer now
		w.readFacts(ctx, readAll, getsNoRequests)
	case connects && w.traffic.maxSilenceShare(began) > earlyScrapeShare:
		w.scrapeSigns(ctx)
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

// updateStatus updates the engine's status by the result of a check, and logs a refused API key. If the proxy itself could not ask the
// engine, only the error in the status changes. The caller holds m.mu.
func (result checkResult) updateStatus(w *watch) {
	err := result.health
	if isOwnFault(err) { // the engine was not asked, so it stays up or down as it was
		next := w.status
		next.Err = fmt.Errorf("the proxy cannot check it, because it can open no connection: %w", err)
		w.setStatus(next)
		return
	}
	keyRefused := errors.Is(err, ErrCredential) || (err == nil && errors.Is(w.facts.modelsErr, ErrCredential))
	w.logRefusedCredential(keyRefused)
	listFailed := err == nil && w.facts.modelsErr != nil              // the engine lists no models
	wasRetired := !w.status.Up && errors.Is(w.status.Err, ErrRetired) // the engine gave this reason to a request before
	if listFailed && wasRetired {
		w.facts.modelsErr = ErrRetired // stays the reason until the engine lists models
	}
	result.applyHealth(w, keyRefused)
}

// applyHealth updates the status by the result of the health check, which the proxy could send. keyRefused says that the engine refuses
// the API key. An engine that re-forms, or that an operator holds, may answer badly without a failure, so these cases come before the
// failed checks. A good check does not count if a caller reported the opposite while it went on: that it could not connect, or that the
// engine refuses all requests. The caller holds m.mu.
func (result checkResult) applyHealth(w *watch, keyRefused bool) {
	err := result.health
	haltSeenNow, halt := w.haltAfter(result) // halt is why requests must wait for the engine
	reported := result.reportsBefore != w.reportCount
	switch {
	case errors.Is(err, ErrReforming): // before 0.33 the health check of vLLM also answers that it re-forms
		applyReforming(w, err, halt)
	case w.ignoredWhileHeld(err) && !keyRefused: // while an operator holds the engine, only a refused key or no connection counts
		w.failedChecks = 0
	case err == nil && reported: // a caller's report contradicts this good check, so the next check decides
	case err == nil: // a good answer is not enough if the engine refuses the key or lists no models
		unusable := keyRefused || errors.Is(w.facts.modelsErr, ErrNotAnEngine) || errors.Is(w.facts.modelsErr, ErrRetired)
		w.applyGoodCheck(halt, haltSeenNow, !unusable)
	case result.isOnlyBusy(w):
		w.m.metrics.lateChecks.WithLabelValues(w.in.ID).Inc()
		if !reported { // after a contrary report of a caller, the next check decides
			applyLateCheck(w, err)
		}
	default:
		w.applyFailedCheck(err, result.connectionBroke, keyRefused)
	}
}

// isOnlyBusy says that the answer to the health check is late, but that streams of the engine sent tokens meanwhile, so that only its API
// server is busy and the engine stays up. It is false if the models are unknown, because such an engine gets no requests. It is also false
// if no check has proven the engine's new address: the streams may be of the host that had its name before. The caller holds m.mu.
func (result checkResult) isOnlyBusy(w *watch) bool {
	streamsGoOn := w.traffic.events.Load() != result.eventsBefore
	return isLate(result.health) && streamsGoOn && len(w.facts.models) > 0 && !w.addressUnproven
}

// applyReforming halts an engine whose health check answers err: its group re-forms. halt is the reason of the halt. The engine stays up or
// down as it was, unless it counts as down because the halt has lasted for LongestHalt. The caller holds m.mu.
func applyReforming(w *watch, err, halt error) {
	w.failedChecks = 0
	w.setHalt(halt, true) // true: this check has seen the reason
	next := w.status
	if why := w.restrictions.downReason(time.Now()); why != nil { // the halt has lasted too long
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
	next.Up, next.Hangs, next.Err = true, false, fmt.Errorf("it answered a health check too late, while requests go on: %w", err)
	w.setStatus(next)
}

// haltAfter returns why the engine must be halted after a check, so that requests wait for it; nil: it need not be. There are three sources
// of a reason, in this order:
//   - The health check or readScaling reports that the number of ranks changes, or that this change has failed.
//   - The engine is halted for such a change, and still does not list its models. Only a list of models shows that the change is over.
//   - checkRestrictions found a pause or a fault.
//
// seenNow says that this check itself has seen a reason, so that setHalt counts the halt as confirmed. The caller holds m.mu.
func (w *watch) haltAfter(result checkResult) (seenNow bool, halt error) {
	otherHalt := result.halt                                 // a pause or a fault
	if w.in.Held != nil && errors.Is(otherHalt, ErrPaused) { // the operator paused the engine, and Held has the reason
		otherHalt = nil
	}
	sawOther := otherHalt != nil
	old := w.restrictions.haltReason
	wasReforming := errors.Is(old, ErrReforming) || errors.Is(old, errScaleFailed)
	switch {
	case errors.Is(result.health, ErrReforming):
		return true, ErrReforming
	case result.reforming != nil:
		return true, result.reforming
	case result.health == nil && w.facts.modelsErr != nil && wasReforming:
		return sawOther, old // the old halt goes on; a pause or fault that was seen confirms that the engine takes no requests
	}
	return sawOther, otherHalt
}

// applyGoodCheck updates the status after a good health check. halt says why new requests must wait
// for the engine, for example that it is paused; nil: they need not. haltSeenNow says whether this
// check has seen a reason, and up whether the engine may serve. The caller holds m.mu.
func (w *watch) applyGoodCheck(halt error, haltSeenNow, up bool) {
	w.failedChecks = 0
	if w.facts.start != w.status.StartTime { // the engine has restarted, and suspicion and lost ranks are of the old process
		w.clearFailures()
		w.restrictions = w.restrictions.afterRestart()
	}
	w.setHalt(halt, haltSeenNow)
	next := w.statusByFacts(up)
	if why := w.restrictions.downReason(time.Now()); why != nil { // the halt has lasted too long, or cannot end
		next.Up, next.Err = false, why
	}
	w.setStatus(next)
}

// afterRestart returns the restrictions of an engine that has restarted. Only a halt stays, and setHalt, which its caller calls next, ends
// it or lets it go on. If a halt ends that no check has seen, setHalt counts a failure, because nothing explains it. Here the restart
// explains the end, so the halt counts as seen by a check.
func (r *restrictions) afterRestart() restrictions {
	return restrictions{haltReason: r.haltReason, haltedAt: r.haltedAt, haltConfirmed: r.haltReason != nil}
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

// statusByFacts returns a status with the facts that were read last, and with this Up. It keeps
// Since and Changed of the current status.
func (w *watch) statusByFacts(up bool) Status {
	f := w.facts
	return Status{
		Up: up, Err: f.modelsErr, Since: w.status.Since, Changed: w.status.Changed,
		Models: f.models, Version: f.version, Memories: f.memory.Memories(f.models), StartTime: f.start,
	}
}

// readFacts reads the facts that GET /health does not report: the metrics, the version, whether the engine is a vLLM that reports pauses
// and faults (its features), and the list of models. It reads version and features again if full is true, or if the start time
// shows that the engine has restarted. If an engine has no /version or /metrics, these facts stay unknown, which does not keep the engine
// from serving. hurry says that the engine gets no requests until the facts are read.
func (w *watch) readFacts(ctx context.Context, full, hurry bool) {
	f, timeout := w.facts, w.m.cfg.Timeout
	if hurry { // the engine could serve already, so facts that are only useful must not delay it
		timeout = min(timeout, time.Second)
	}
	sample, pageErr := scrapeAndCrossCheck(ctx, w, timeout)
	if restarted := pageErr == nil && sample.StartTime != 0 && sample.StartTime != f.start; restarted {
		full = true
		f.start, f.version = sample.StartTime, ""
	}
	if full {
		f.memory = nil
	}
	if pageErr == nil && len(sample.memory) > 0 {
		f.memory = sample
	}
	if full || f.version == "" {
		f.readVersion(ctx, w, timeout)
	}
	mayBeVLLM := w.in.Version == "" // only for SGLang is a path of the version set
	if mayBeVLLM && (full || f.featuresUnknown) {
		f.readFeatures(ctx, w, timeout)
	}
	modelsPageErr := f.readModels(ctx, w)
	w.logBadPage(cmp.Or(modelsPageErr, pageErr))
	w.facts, w.factsAt = f, time.Now()
}

// scrapeAndCrossCheck reads the engine's metrics. It stores how many hand-offs have expired by them. Then crossCheck compares them with
// what this proxy knows of its own requests: for example, whether a rank runs more requests than it has slots, and how many prompt tokens
// the engine computed although it should have pulled their KV.
func scrapeAndCrossCheck(ctx context.Context, w *watch, timeout time.Duration) (*Sample, error) {
	// Settled tokens are those that the engine has counted, because their requests have got their first event or will get none. They
	// are taken before the scrape, so that the scraped counters include them.
	w.scrapes.pulls.setSettledTokens(w.traffic)
	began := time.Now()
	sample, err := w.scrape(ctx, timeout)
	if err == nil {
		w.storeExpiries(sample)
		w.crossCheck(sample, began)
	}
	return sample, err
}

// readModels reads the list of models. After an error the old models stay, and modelsErr has the
// error. A name or a context length that cannot be right is no such error: the list is used without
// it, and bad says what is wrong; nil: nothing is.
func (f *facts) readModels(ctx context.Context, w *watch) (bad error) {
	w.m.mu.Lock()
	// Both are cleared before the list is read, because what a caller reports later may be about the
	// list that is read now.
	w.rereadDue, w.restrictions.rankCount = false, 0
	w.m.mu.Unlock()
	models, err := w.models(ctx)
	if errors.As(err, new(*PageError)) { // the models can be used without what cannot be right
		bad, err = err, nil
	}
	if errors.Is(err, ErrTooLarge) && !errors.Is(f.modelsErr, ErrTooLarge) {
		w.m.cfg.Log.Warn("an engine's list of models is too long to be read, so the proxy goes by the last one that it could read; unload "+
			"LoRA adapters", zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(err))
	}
	f.modelsErr = err
	if err == nil {
		f.models = models
	}
	return bad
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

// readVersion sets the version. After an error the old one stays.
func (f *facts) readVersion(ctx context.Context, w *watch, timeout time.Duration) {
	path, limit := "/version", answerLimit
	if w.in.Version != "" { // SGLang may ask each rank for this answer, which takes longer while ranks are busy
		path, timeout, limit = w.in.Version, w.m.cfg.Timeout, perRankLimit
	}
	if answer, err := w.get(ctx, path, timeout, limit); err == nil {
		f.version = parseVersion(answer)
	}
}

// logBadPage logs that numbers or names on an engine's page cannot be right. It logs again only after the pages were right.
func (w *watch) logBadPage(err error) {
	isBad := errors.As(err, new(*PageError))
	if isBad && !w.badPageLogged {
		w.m.cfg.Log.Warn("an engine's page is not believed, so the proxy goes by its own accounts or does without; if the page "+
			"stays so, restart the engine, or report it to its makers",
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
