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

// check makes one check. If it uses a new connection, it first looks up the engine's name again.
func (w *watch) check(ctx context.Context) {
	c := w.beginCheck()
	if c.fresh {
		w.checkAddress(ctx, &c.facts)
	}
	events := w.traffic.events.Load()
	c.began = time.Now()
	var withoutComputing bool // without a step of the core
	withoutComputing, c.err = w.alive(ctx, c.fresh)
	if c.err == nil {
		c.answerCheck(withoutComputing, w.m.cfg.Client.opts.IdleTimeout, time.Now())
	}
	w.readWhatIsDue(ctx, &c)
	if c.err == nil {
		c.halt, c.silentCore = w.readHalt(ctx, &c.facts)
	}
	if c.err == nil && errors.Is(c.facts.modelsErr, ErrReforming) {
		c.reforming = w.readScaling(ctx)
	}
	if ctx.Err() != nil { // this may be the cause of failures
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

func (w *watch) beginCheck() check {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	c := check{was: w.health, facts: w.facts, limit: w.m.cfg.Timeout}
	c.fresh = w.needsNewConnection(w.factsDue(&w.facts))
	w.due = notDue
	return c
}

const lookupTimeout = time.Second

// checkAddress looks up the engine's name. If it has moved, idle connections lead to the old host.
func (w *watch) checkAddress(ctx context.Context, f *facts) {
	c, host := w.m.cfg.Client, w.in.Target.URL.Hostname()
	if _, err := netip.ParseAddr(host); err == nil || c.opts.Lookup == nil {
		return
	}
	ctx, stop := context.WithTimeout(ctx, min(lookupTimeout, w.m.cfg.Timeout))
	defer stop()
	found, err := c.opts.Lookup(ctx, host)
	if err != nil || len(found) == 0 { // if the failure lasts, new connections fail, too
		return
	}
	if f.resolve(found, time.Now()) {
		c.idle.closeHost(w.in.Target.key())
		w.log.Warn("the name of an engine has another address now; it is up only while new connections to that "+
			"address are answered", zap.String("role", w.in.Role),
			zap.String("from", f.moved.From), zap.String("to", f.moved.To))
	}
}

// alive asks at the path Ready or, if there is none, at /health, for which an engine with a path
// Ready computes a token. If Ready answers 503, this may be left over from a GET /health whose
// token came too late: the engine then answers 503 until another GET /health succeeds. If it
// answers 404, the engine may be too old for this path. Then alive asks at /health, too.
//
// fresh: an idle connection may lead to a process that accepts no new ones.
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

// readWhatIsDue reads the facts, or only the gauges, early, if a rank is silent: they may show that
// the core still works.
func (w *watch) readWhatIsDue(ctx context.Context, c *check) {
	modelsUnknown := c.facts.modelsErr != nil && len(c.facts.models) == 0
	getsNoRequests := !c.was.Up || modelsUnknown || c.was.halt.why != nil // until its facts are read
	switch isHealthy := c.err == nil; {
	case isHealthy && (getsNoRequests || c.was.rereadDue || w.factsDue(&c.facts)):
		readAll := !c.was.Up // another process may answer now
		w.readFacts(ctx, &c.facts, readAll, getsNoRequests)
	case (isHealthy || isLate(c.err)) && w.traffic.maxSilenceShare(c.began) > earlyScrapeShare:
		w.scrapeSigns(ctx)
	}
}

func (w *watch) factsDue(f *facts) bool { return time.Since(f.readAt) >= w.m.cfg.FactsInterval }

// The caller holds m.mu.
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

// readFacts reads the metrics, the models and, if full or after a restart, version and features
// (pauses, faults). Without /version or /metrics these facts stay unknown. hurry: the engine gets
// no requests until the facts are read.
func (w *watch) readFacts(ctx context.Context, f *facts, full, hurry bool) {
	timeout := w.m.cfg.Timeout
	if hurry { // facts that are only useful must not delay it
		timeout = min(timeout, time.Second)
	}
	// Taken before the scrape, so that the scraped counters include them.
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
	mayBeVLLM := w.in.Version == "" // SGLang sets a path of the version
	if mayBeVLLM && (full || f.featuresUnknown) {
		f.readFeatures(ctx, w, timeout)
	}
	bad := cmp.Or(f.readModels(ctx, w), pageErr)
	// Another error does not show whether the pages are right.
	if bad == nil || errors.As(bad, new(*PageError)) {
		f.badPage = bad
	}
	f.readAt = time.Now()
}

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

// crossCheck compares the sample s with this proxy's own requests. at is when the scrape began,
// settled is Traffic.settledTokens before it.
func (w *watch) crossCheck(s *Sample, at time.Time, settled float64) {
	if len(w.in.Canaries) == 0 {
		return
	}
	w.recordSigns(s, at)
	// recordSigns comes first, so that s counts as a sign of life.
	if onSample := w.m.onSample; onSample != nil {
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

// readModels: after an error (modelsErr) the old models stay. bad says which name or context length
// cannot be right; the list is used without it.
func (f *facts) readModels(ctx context.Context, w *watch) (bad error) {
	w.m.mu.Lock()
	// Cleared before the list is read: what a caller reports later may be about this list.
	w.rereadDue, w.rankCount = false, 0
	w.m.mu.Unlock()
	models, err := w.models(ctx)
	if errors.As(err, new(*PageError)) {
		bad, err = err, nil
	}
	f.modelsErr = err
	if err == nil {
		f.models = models
	}
	return bad
}

func (f *facts) readFeatures(ctx context.Context, w *watch, timeout time.Duration) {
	_, faultErr := w.readFault(ctx, timeout)
	_, pauseErr := w.readPaused(ctx)
	f.reportsFaults, f.reportsPause = faultErr == nil, pauseErr == nil
	noFaultAnswer := faultErr != nil && !isMissingFeature(faultErr)
	noPauseAnswer := pauseErr != nil && !isMissingFeature(pauseErr)
	f.featuresUnknown = noFaultAnswer || noPauseAnswer
}

func (f *facts) readVersion(ctx context.Context, w *watch, timeout time.Duration) {
	path, limit := "/version", answerLimit
	if w.in.Version != "" { // SGLang may ask each rank, which takes longer while ranks are busy
		path, timeout, limit = w.in.Version, w.m.cfg.Timeout, perRankLimit
	}
	if answer, err := w.get(ctx, path, timeout, limit); err == nil {
		f.version = parseVersion(answer)
	}
}

// earlyScrapeShare is the share of the allowed silence after which the gauges are read early.
const earlyScrapeShare = 0.5

func (w *watch) scrapeSigns(ctx context.Context) {
	began := time.Now()
	if s, err := w.scrape(ctx, min(w.m.cfg.Timeout, time.Second)); err == nil {
		w.recordSigns(s, began)
	}
}

func (w *watch) recordSigns(s *Sample, at time.Time) {
	w.m.mu.Lock()
	previousAt := w.scrapes.at
	moved := w.scrapes.record(s, at, w.in.Canaries)
	w.m.mu.Unlock()
	for _, rank := range moved { // the step was some time after the previous scrape
		w.traffic.Liveness(rank).RecordSign(previousAt)
	}
}

// readHalt asks what the health check does not show. silentCore says why the core has not answered
// whether it is paused: while vLLM shuts down, it does not, and GET /health may still be answered
// well (0.33.0, _reject_utility_in_shutdown in v1/engine/core.py).
func (w *watch) readHalt(ctx context.Context, f *facts) (halt, silentCore error) {
	h := w.known()
	wasPaused := errors.Is(h.halt.why, ErrPaused)
	mayReport := f.reportsPause || wasPaused
	if mayReport && h.in.Held == nil { // a held engine gets no requests anyway
		paused, err := w.readPaused(ctx)
		if err != nil { // without an answer the last state stays, unless the engine lacks the path
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
	if err != nil { // without an answer, the last fault stays
		fault = h.halt.reportedFault()
	}
	return fault, silentCore
}

// readScaling asks whether a change of the number of ranks goes on or has failed. From 0.33 on,
// vLLM answers, even if each rank has an API server of its own
// (entrypoints/serve/elastic_ep/api_router.py).
func (w *watch) readScaling(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, min(w.m.cfg.Timeout, time.Second))
	defer stop()
	status, body, err := w.m.cfg.Client.NewCall(w.in.Target).Repeat().ask(ctx, http.MethodPost, "/is_scaling_elastic_ep", answerLimit)
	var answer struct {
		Phase string `json:"phase"`
		Error string `json:"error"`
		Ranks Number `json:"requested_data_parallel_size"`
	}
	// Older versions lack this path.
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &answer) != nil {
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

// readFault returns the fault for which requests must wait; nil: there is none. Only a vLLM with
// --enable-fault-tolerance answers (entrypoints/serve/fault_tolerance/api_router.py of 0.33). While
// it waits for recovery, GET /health answers 200, and new requests wait in the engine. The status
// is unhealthy while recovery is possible, and dead if a worker has died.
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
	case json.Unmarshal(body, &answer) != nil || answer.Schema == 0: // not vLLM, or another format
		return nil, errNoFaultReport
	}
	for _, e := range answer.Engines {
		switch e.Status {
		case "healthy":
		case "dead":
			return errDead, nil
		default: // unhealthy
			return fmt.Errorf("it has met a fault (%.64q) and waits for its recovery (vLLM, POST /fault_tolerance/apply)", e.Fault), nil
		}
	}
	return nil, nil
}

// readPaused: vLLM has these paths only with VLLM_SERVER_DEV_MODE=1
// (entrypoints/rl/online/api_router.py and entrypoints/launchers/api_server/routers.py of 0.32 and
// 0.33).
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

// isMissingFeature: the engine lacks the path or the feature, so asking again is useless.
func isMissingFeature(err error) bool {
	var answered *StatusError
	if errors.As(err, &answered) {
		return slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, answered.Status)
	}
	return errors.Is(err, errNoFaultReport)
}

func (w *watch) models(ctx context.Context) ([]Model, error) {
	ctx, stop := context.WithTimeout(ctx, w.m.cfg.Timeout)
	defer stop()
	return Models(ctx, w.m.cfg.Client, w.in.Target)
}

func (w *watch) scrape(ctx context.Context, timeout time.Duration) (*Sample, error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	return Scrape(ctx, w.m.cfg.Client, w.in.Target)
}

// get fails unless the status is 200.
func (w *watch) get(ctx context.Context, path string, timeout time.Duration, limit int) ([]byte, error) {
	return w.ask(ctx, w.m.cfg.Client.NewCall(w.in.Target), path, timeout, limit)
}

func (w *watch) ask(ctx context.Context, call *Call, path string, timeout time.Duration, limit int) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	status, body, err := call.ask(ctx, http.MethodGet, path, limit)
	if err == nil && status != http.StatusOK {
		err = &StatusError{Target: w.in.ID, Path: path, Status: status, Why: ParseRefusal(status, body, w.in.Target.Unranked())}
	}
	return body, err
}

// parseVersion returns "" for what is no name by words.IsName.
func parseVersion(body []byte) string {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) != nil || !words.IsName(v.Version) {
		return ""
	}
	return v.Version
}

// jitter varies d by up to 10 %, so that the checks of many engines do not coincide.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}
