package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/internal/words"
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

// check makes one check and records its result: it asks for the engine's health, reads its facts or
// gauges if that is due, and finds out whether the engine is halted. If it asks over a new
// connection, it first looks up the engine's name again.
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
	if c.err == nil && errors.Is(c.facts.modelsErr, ErrReforming) { // asked for its models, it answered so
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

// lookupTimeout bounds one look-up of an engine's name, so that a slow resolver does not delay health checks for long.
const lookupTimeout = time.Second

// checkAddress looks up the addresses of the engine's name, before the engine is checked over a new
// connection. If the engine has moved, idle connections lead to the old host, and are closed.
func (w *watch) checkAddress(ctx context.Context, f *facts) {
	c, host := w.m.cfg.Client, w.in.Target.URL.Hostname()
	if _, err := netip.ParseAddr(host); err == nil || c.opts.Lookup == nil { // it is an address already
		return
	}
	ctx, stop := context.WithTimeout(ctx, min(lookupTimeout, w.m.cfg.Timeout))
	defer stop()
	found, err := c.opts.Lookup(ctx, host)
	if err != nil || len(found) == 0 { // ignored: if the failure lasts, new connections fail, too
		return
	}
	if f.resolve(found, time.Now()) {
		c.idle.closeHost(w.in.Target.key())
		w.log.Warn("the name of an engine has another address now; it is up only while new connections to that "+
			"address are answered", zap.String("role", w.in.Role),
			zap.String("from", f.moved.From), zap.String("to", f.moved.To))
	}
}

// alive asks an engine whether it takes requests: at its path Ready, or at /health if it has none. An engine with a path Ready computes a
// token for GET /health, which takes longer. Even so, alive also asks at /health in two cases. If Ready answers 503, this may only be left
// over from an earlier GET /health whose token came too late: the engine then answers 503 until another GET /health succeeds. If Ready
// answers 404, the engine may be an older version without this path. withoutComputing says that the engine computed nothing for the answer.
//
// fresh says to ask over a new connection, to the current address of the engine's name. An idle connection may lead to a process that
// accepts no new connections.
func (w *watch) alive(ctx context.Context, fresh bool) (withoutComputing bool, err error) {
	ask := func(path string) error {
		call := w.m.cfg.Client.NewCall(w.in.Target)
		if fresh {
			call.Fresh()
		}
		_, err := w.ask(ctx, call, path, w.m.cfg.Timeout, answerLimit)
		return err
	}
	hasReady := w.in.Ready != ""
	if hasReady {
		err = ask(w.in.Ready)
		var answered *StatusError
		unsure := errors.As(err, &answered) && (answered.Status == http.StatusNotFound || answered.Status == http.StatusServiceUnavailable)
		if !unsure {
			return true, err
		}
	}
	return !hasReady, ask("/health")
}

// readWhatIsDue reads the engine's facts if the engine has answered its health check well and the facts are due. Otherwise it may read only
// the gauges, early, because they may show that the core still works: if the engine takes connections, and a rank has been silent for more
// than half of the time that a waiting request allows.
func (w *watch) readWhatIsDue(ctx context.Context, c *check) {
	modelsUnknown := c.facts.modelsErr != nil && len(c.facts.models) == 0
	getsNoRequests := !c.was.Up || modelsUnknown || c.was.halt.why != nil // until its facts are read
	switch isHealthy := c.err == nil; {
	case isHealthy && (getsNoRequests || c.was.rereadDue || w.factsDue(&c.facts)):
		readAll := !c.was.Up // after an outage, because another process may answer now
		w.readFacts(ctx, &c.facts, readAll, getsNoRequests)
	case (isHealthy || isLate(c.err)) && w.traffic.maxSilenceShare(c.began) > earlyScrapeShare:
		w.scrapeSigns(ctx)
	}
}

func (w *watch) factsDue(f *facts) bool { return time.Since(f.readAt) >= w.m.cfg.FactsInterval }

// checkSilence records whether the engine's core gives signs of life, and logs a change. The caller
// holds m.mu.
func (w *watch) checkSilence() {
	before := w.silentSince
	w.move(func(h *health, now time.Time) {
		h.recordSilence(w.traffic.maxSilenceShare(now) > 1, w.traffic.hasSignSince(h.silentSince), now)
	})
	switch after := w.silentSince; {
	case before.IsZero() && !after.IsZero():
		w.log.Warn("an engine gets no new requests for a moment; a request of one token will tell whether it computes",
			zap.Error(errSilent))
	case !before.IsZero() && after.IsZero():
		w.log.Info("an engine gives signs of life again")
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
	// They are taken before the scrape, so that the scraped counters include them.
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

// storeExpiries stores and returns how many hand-offs have expired since the engine's start, as the sample says.
func (w *watch) storeExpiries(s *Sample) Expiries {
	n, known := s.Expired()
	late, _ := s.ReadLate()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	before := w.expiries
	w.expiries = Expiries{HandOffs: n, Start: s.StartTime, Known: known, ReadLate: late, ReadLateAt: before.ReadLateAt}
	if before.Known && s.StartTime == before.Start && late > before.ReadLate {
		w.expiries.ReadLateAt = time.Now()
	}
	return w.expiries
}

// crossCheck compares the sample s of the engine's metrics with what this proxy knows of its own
// requests on the engine. It records signs of life, gives the sample to onSample, and stores it. at
// is when the scrape began, and settled Traffic.settledTokens before it.
func (w *watch) crossCheck(s *Sample, at time.Time, settled float64) {
	if len(w.in.Canaries) == 0 { // only the gauges of engines that get canaries are watched
		return
	}
	w.recordSigns(s, at)
	if onSample := w.m.onSample; onSample != nil { // called after recordSigns, so that the signs of life in s are recorded
		onSample(w.in.ID, s, at)
	}
	t, metrics := w.traffic, w.m.metrics
	ours := load{running: t.running.Load(), withoutSlot: t.sentWithoutSlot.Load(), settled: settled,
		computed: float64(t.computedTokens.Load())}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.move(func(h *health, _ time.Time) {
		metrics.shortPulls.WithLabelValues(w.in.ID).Add(h.compare(s, at, ours))
		metrics.overSlots.WithLabelValues(w.in.ID).Set(h.scrapes.excess)
	})
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

// recordSigns records as signs of life what has changed since the previous scrape. at is when this
// scrape began.
func (w *watch) recordSigns(s *Sample, at time.Time) {
	w.m.mu.Lock()
	previousAt := w.scrapes.at
	moved := w.scrapes.record(s, at, w.in.Canaries)
	w.m.mu.Unlock()
	for _, rank := range moved { // the core made a step, it is not known when, after the previous scrape
		w.traffic.Liveness(rank).RecordSign(previousAt)
	}
}

// readHalt asks an engine that is alive for what its health check does not show: whether
// it is paused or waits for recovery. It returns why the engine may get no new requests; nil: it
// may get them. silentCore says why the core has not answered whether it is paused. While vLLM
// shuts down, its core answers no such question, and GET /health may still be answered well
// (0.33.0, _reject_utility_in_shutdown in v1/engine/core.py).
func (w *watch) readHalt(ctx context.Context, f *facts) (halt, silentCore error) {
	h := w.known()
	wasPaused := errors.Is(h.halt.why, ErrPaused)
	mayReport := f.reportsPause || wasPaused
	if mayReport && h.in.Held == nil { // an engine that an operator holds gets no requests anyway
		paused, err := w.readPaused(ctx)
		if err != nil { // without an answer the last known state stays valid, unless the engine lacks the path
			paused = wasPaused && !isMissingFeature(err)
			if !isMissingFeature(err) {
				silentCore = err
			}
		}
		if paused {
			return ErrPaused, silentCore
		}
	}
	if !f.reportsFaults {
		return nil, silentCore
	}
	fault, err := w.readFault(ctx, w.m.cfg.Timeout)
	if err != nil { // without an answer, the last reported fault stays valid
		fault = h.halt.reportedFault()
	}
	return fault, silentCore
}

// readScaling asks a vLLM that changes the number of its ranks whether this change goes on or has failed. It returns ErrReforming or, if
// the change failed, errScaleFailed, each with details. From 0.33 on, vLLM answers with the phase of the change, the requested number and
// the reason of a failure, even if each rank has an API server of its own (entrypoints/serve/elastic_ep/api_router.py).
func (w *watch) readScaling(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, min(w.m.cfg.Timeout, time.Second))
	defer stop()
	status, body, err := w.m.cfg.Client.NewCall(w.in.Target).Repeat().ask(ctx, http.MethodPost, "/is_scaling_elastic_ep", answerLimit)
	var answer struct {
		Phase string `json:"phase"`
		Error string `json:"error"`
		Ranks Number `json:"requested_data_parallel_size"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &answer) != nil { // older versions do not have this path
		return ErrReforming
	}
	ranks, err := answer.Ranks.Whole("requested_data_parallel_size", MostRanks)
	if err != nil {
		return fmt.Errorf("%w; %w", ErrReforming, err)
	}
	switch {
	case answer.Phase == "failed":
		return fmt.Errorf("%w; it was to have %d, and says: %.200q", errScaleFailed, ranks, answer.Error)
	case ranks > 0:
		return fmt.Errorf("%w; it is to have %d", ErrReforming, ranks)
	}
	return ErrReforming
}

// readFault asks vLLM whether its core has met a fault and waits for recovery. halt is the fault, for which requests must wait; nil: there
// is none. err says why there is no answer. Only a vLLM that was started with --enable-fault-tolerance answers
// (entrypoints/serve/fault_tolerance/api_router.py of 0.33). While it waits, GET /health answers 200, and new requests wait in the engine.
// vLLM's status is unhealthy while recovery is possible, and dead if a worker has died.
func (w *watch) readFault(ctx context.Context, timeout time.Duration) (halt, err error) {
	body, err := w.get(ctx, "/fault_tolerance/status", timeout, answerLimit)
	var answer struct {
		Schema  int `json:"schema_version"`
		Engines []struct {
			Status string `json:"status"`
			Fault  string `json:"fault_info"`
		} `json:"engines"`
	}
	switch {
	case err != nil:
		return nil, err
	case json.Unmarshal(body, &answer) != nil || answer.Schema == 0: // this server is not vLLM, or sends another format
		return nil, errNoFaultReport
	}
	for _, e := range answer.Engines {
		switch e.Status {
		case "healthy":
		case "dead":
			return errDead, nil
		default: // the status unhealthy: recovery is possible
			return fmt.Errorf("it has met a fault (%.64q) and waits for its recovery (vLLM, POST /fault_tolerance/apply)", e.Fault), nil
		}
	}
	return nil, nil
}

// readPaused asks vLLM whether its core is paused. vLLM has the paths to ask and to pause only with
// VLLM_SERVER_DEV_MODE=1 (entrypoints/rl/online/api_router.py and entrypoints/launchers/api_server/routers.py of 0.32
// and 0.33).
func (w *watch) readPaused(ctx context.Context) (paused bool, err error) {
	body, err := w.get(ctx, "/is_paused", min(w.m.cfg.Timeout, time.Second), answerLimit)
	if err != nil {
		return false, err
	}
	var answer struct {
		Paused bool `json:"is_paused"`
	}
	err = json.Unmarshal(body, &answer)
	return answer.Paused, err
}

var errNoFaultReport = errors.New("it does not say whether it has met a fault")

// isMissingFeature says whether an error means that the engine does not have the path or the feature at all, so that asking again is
// useless: by a status such as 404, or by an answer that is no report of faults.
func isMissingFeature(err error) bool {
	var answered *StatusError
	if errors.As(err, &answered) {
		return slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, answered.Status)
	}
	return errors.Is(err, errNoFaultReport)
}

// models reads the engine's list of models, within the monitor's timeout.
func (w *watch) models(ctx context.Context) ([]Model, error) {
	ctx, stop := context.WithTimeout(ctx, w.m.cfg.Timeout)
	defer stop()
	return Models(ctx, w.m.cfg.Client, w.in.Target)
}

// scrape reads the engine's metrics, within timeout, by the names of series that vLLM and SGLang use.
func (w *watch) scrape(ctx context.Context, timeout time.Duration) (*Sample, error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	return Scrape(ctx, w.m.cfg.Client, w.in.Target)
}

// get reads a page of the engine, of at most limit bytes and within timeout. It fails unless the status is 200.
func (w *watch) get(ctx context.Context, path string, timeout time.Duration, limit int) ([]byte, error) {
	return w.ask(ctx, w.m.cfg.Client.NewCall(w.in.Target), path, timeout, limit)
}

// ask reads a page as get does, but by a call that the caller has prepared, for example one that uses a new connection.
func (w *watch) ask(ctx context.Context, call *Call, path string, timeout time.Duration, limit int) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	status, body, err := call.ask(ctx, http.MethodGet, path, limit)
	if err == nil && status != http.StatusOK {
		err = &StatusError{Target: w.in.ID, Path: path, Status: status, Why: ParseRefusal(status, body, w.in.Target.Unranked())}
	}
	return body, err
}

// parseVersion returns the version in an answer; empty: there is none, or it is not a name by words.IsName.
func parseVersion(body []byte) string {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) != nil || !words.IsName(v.Version) {
		return ""
	}
	return v.Version
}

// jitter returns a random duration within 10 % of d, so that the checks of many engines do not coincide.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}
