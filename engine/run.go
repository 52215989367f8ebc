package engine

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// run checks the instance until ctx ends: once per HealthInterval, and at once if a check is due.
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

// check makes one check and records its result: it asks for the engine's health, reads its facts or gauges if that is due, and
// finds out whether the engine is halted. If it asks over a new connection, it first looks up the engine's name again.
func (w *watch) check(ctx context.Context) {
	c := w.beginCheck()
	if c.fresh {
		w.checkAddress(ctx, &c.facts)
	}
	events := w.traffic.events.Load()
	c.began = time.Now()
	var withoutComputing bool // the answer came without a step of the core
	withoutComputing, c.err = w.alive(ctx, c.fresh)
	if c.err == nil {
		c.answerCheck(withoutComputing, w.m.cfg.Client.opts.IdleTimeout, time.Now())
	}
	w.readWhatIsDue(ctx, &c)
	if c.err == nil {
		c.halt, c.silentCore = w.readHalt(ctx, &c.facts)
	}
	if c.err == nil && errors.Is(c.facts.modelsErr, ErrReforming) { // the engine answered so when it was asked for its models
		c.reforming = w.readScaling(ctx)
	}
	if ctx.Err() != nil { // the watch was stopped, which may be the cause of failures
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	c.streamed = w.traffic.events.Load() != events
	w.checkSilence()
	w.move(func(h *health, now time.Time) { h.endCheck(c, now) })
	close(w.lastCheck.next)
	w.lastCheck = lastCheck{next: make(chan struct{}), began: c.began, found: w.found(c)}
}

// beginCheck returns a check that begins with what is known, and takes account of why it is due.
func (w *watch) beginCheck() check {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	c := check{was: w.health, facts: w.facts, limit: w.m.cfg.Timeout}
	c.fresh = w.needsNewConnection(w.factsDue(&w.facts))
	w.due = notDue
	return c
}

func (w *watch) factsDue(f *facts) bool { return time.Since(f.readAt) >= w.m.cfg.FactsInterval }

// readWhatIsDue reads the engine's facts if the engine has answered its health check well and the facts are due. Otherwise it may read only
// the gauges, early, because they may show that the core still works: if the engine takes connections, and a rank has been silent for more
// than half of the time that a waiting request allows.
func (w *watch) readWhatIsDue(ctx context.Context, c *check) {
	modelsUnknown := c.facts.modelsErr != nil && len(c.facts.models) == 0
	getsNoRequests := !c.was.Up || modelsUnknown || c.was.halt.why != nil // the engine gets no requests until its facts are read
	switch isHealthy := c.err == nil; {
	case isHealthy && (getsNoRequests || c.was.rereadDue || w.factsDue(&c.facts)):
		readAll := !c.was.Up // after an outage, because another process may answer now
		w.readFacts(ctx, &c.facts, readAll, getsNoRequests)
	case (isHealthy || isLate(c.err)) && w.traffic.maxSilenceShare(c.began) > earlyScrapeShare:
		w.scrapeSigns(ctx)
	}
}

// readFacts reads the facts that GET /health does not report: the metrics, the version, whether the engine is a vLLM that reports pauses
// and faults (its features), and the list of models. It reads version and features again if full is true, or if the start time
// shows that the engine has restarted. If an engine has no /version or /metrics, these facts stay unknown, which does not keep the engine
// from serving. hurry says that the engine gets no requests until the facts are read.
func (w *watch) readFacts(ctx context.Context, f *facts, full, hurry bool) {
	timeout := w.m.cfg.Timeout
	if hurry { // the engine could serve already, so facts that are only useful must not delay it
		timeout = min(timeout, time.Second)
	}
	// Settled tokens are those that the engine has counted, because their requests have got their first event or will get none. They
	// are taken before the scrape, so that the scraped counters include them.
	settled, began := w.traffic.settledTokens(), time.Now()
	sample, pageErr := w.scrape(ctx, timeout)
	if pageErr == nil {
		w.storeExpiries(sample)
		w.crossCheck(sample, began, settled)
	}
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
	bad := cmp.Or(f.readModels(ctx, w), pageErr)
	if bad == nil || errors.As(bad, new(*PageError)) { // another error does not show whether the pages are right
		f.badPage = bad
	}
	f.readAt = time.Now()
}

// readModels reads the list of models. After an error the old models stay, and modelsErr has the
// error. A name or a context length that cannot be right is no such error: the list is used without
// it, and bad says what is wrong; nil: nothing is.
func (f *facts) readModels(ctx context.Context, w *watch) (bad error) {
	w.m.mu.Lock()
	// Both are cleared before the list is read, because what a caller reports later may be about the
	// list that is read now.
	w.rereadDue, w.rankCount = false, 0
	w.m.mu.Unlock()
	models, err := w.models(ctx)
	if errors.As(err, new(*PageError)) { // the models can be used without what cannot be right
		bad, err = err, nil
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
