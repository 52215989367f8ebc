package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// run checks the instance again and again until ctx ends: after each HealthInterval, and at once when checkNow says so.
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

// checkNow has run make a check at once. It does not wait for it.
func (w *watch) checkNow() {
	select {
	case w.checkDue <- struct{}{}:
	default: // a check is due already
	}
}

// check makes one check and updates the engine's state. A health check that comes too late does not count against an
// engine that answered something else meanwhile: its API server is busy, and the work goes on.
func (w *watch) check(ctx context.Context) {
	w.m.mu.Lock()
	reportsBefore, wasUp, hadBroken, wasHalted, relist := w.reports, w.status.Up, w.broke, w.absent.halt != nil, w.relist
	fresh := !wasUp || hadBroken || w.redial || w.failed > 0 || time.Since(w.factsAt) >= w.m.cfg.FactsInterval
	w.broke, w.redial = false, false
	w.m.mu.Unlock()
	if fresh {
		w.locate(ctx)
	}
	eventsBefore := w.traffic.events.Load()
	began := time.Now()
	quick, err := w.alive(ctx, fresh)
	if err == nil && quick {
		now := time.Now()
		w.learnRTT(now.Sub(began), now, fresh)
	}
	if err == nil && fresh {
		w.unproven = false
	}
	modelsUnknown := w.facts.err != nil && len(w.facts.models) == 0
	switch {
	case err == nil && (!wasUp || modelsUnknown || wasHalted || relist || time.Since(w.factsAt) >= w.m.cfg.FactsInterval):
		w.readFacts(ctx, !wasUp, !wasUp || modelsUnknown || wasHalted)
	case (err == nil || late(err)) && w.traffic.quiet(began) > 0.5:
		w.lookForSigns(ctx)
	}
	var halt, reforming error
	if err == nil {
		halt = w.lookForRanks(ctx)
	}
	if err == nil && errors.Is(w.facts.err, ErrReforming) {
		reforming = w.reforming(ctx)
	}
	if ctx.Err() != nil { // the watch was stopped, and failures may come from that
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.gone {
		return
	}
	w.listen(time.Now())
	keyRefused := errors.Is(err, ErrCredential) || (err == nil && errors.Is(w.facts.err, ErrCredential))
	w.alarmCredential(keyRefused)
	if err == nil && w.facts.err != nil && !w.status.Up && errors.Is(w.status.Err, ErrRetired) {
		w.facts.err = ErrRetired // the engine has told a request so: that counts like a list of models that is refused so
	}
	strange := err == nil && (errors.Is(w.facts.err, ErrNotAnEngine) || errors.Is(w.facts.err, ErrRetired))
	if w.in.Held != nil && errors.Is(halt, ErrPaused) { // the pause is the operator's, and Held has its reason
		halt = nil
	}
	confirmed := halt != nil
	switch {
	case errors.Is(err, ErrReforming):
		halt, confirmed = ErrReforming, true
	case reforming != nil:
		halt, confirmed = reforming, true
	case err == nil && w.facts.err != nil && (errors.Is(w.absent.halt, ErrReforming) || errors.Is(w.absent.halt, errScaleFailed)):
		halt = w.absent.halt // only a list of models shows that the halt is over
	}
	switch {
	case errors.Is(err, ErrReforming): // before 0.33 the health check of vLLM also answers that it re-forms
		w.failed = 0
		w.halt(halt, true)
		next := w.status
		if why := w.absent.hopeless(time.Now()); why != nil {
			next.Up, next.Err = false, why
		} else if !next.Up {
			next.Err = err
		}
		w.setStatus(next)
	case w.holdsBack(err) && !keyRefused:
		w.failed = 0
	case err == nil && reportsBefore != w.reports: // meanwhile a caller could not reach it, or it took no requests: the next check decides
	case err == nil:
		w.failed = 0
		if w.facts.start != w.status.StartTime {
			w.forgive() // another process did what is held against it
			w.absent = absent{halt: w.absent.halt, since: w.absent.since, confirmed: w.absent.halt != nil}
		}
		w.halt(halt, confirmed)
		next := w.statusByFacts(!keyRefused && !strange)
		if why := w.absent.hopeless(time.Now()); why != nil {
			next.Up, next.Err = false, why
		}
		w.publish(next)
		w.lookForMore()
		w.publishSuspicion()
	// if the address is unproven, the events may be of another host
	case late(err) && w.traffic.events.Load() != eventsBefore && len(w.facts.models) > 0 && !w.unproven:
		w.m.metrics.late.WithLabelValues(w.in.ID).Inc()
		if reportsBefore != w.reports { // a caller could not reach it meanwhile
			return
		}
		w.failed = 0
		next := w.status
		next.Accused = w.suspect.accusation()
		next.Up, next.Hangs, next.Err = true, false, fmt.Errorf("it answered a health check too late, while requests go on: %w", err)
		w.setStatus(next)
	default:
		w.failed++
		if hadBroken && unreachable(err) { // a broken connection and a failed connect are two signs of one death
			w.failed = misses
		}
		next := w.status
		if keyRefused || w.failed >= misses {
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
}

// alarmCredential logs once that the engine refuses the API key, until it accepts the key. It needs m.mu.
func (w *watch) alarmCredential(refused bool) {
	if refused && !w.alarmed {
		w.m.cfg.Log.Error("ALARM: an engine refuses the API key that the proxy sends, so it gets no requests; check api_key_env of its profile",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(ErrCredential))
	}
	w.alarmed = refused
}

// statusByFacts is the status that follows from the facts that were read last, with the present suspicion.
func (w *watch) statusByFacts(up bool) Status {
	f := w.facts
	return Status{
		Up: up, Err: f.err, Since: w.status.Since, Changed: w.status.Changed,
		Models: f.models, Version: f.version, CapacityTokens: f.capacity, StartTime: f.start,
		Out: w.status.Out, Wedged: w.status.Wedged,
	}
}

// readFacts reads what /health does not say. Version and capacity are read again after a restart, which shows as
// another start time, or if full asks for it. If an engine has no /version or /metrics (404, or no usable answer), they
// stay unknown: such an engine serves as well as others. hurry says that the engine gets no requests until the facts
// are read.
func (w *watch) readFacts(ctx context.Context, full, hurry bool) {
	f, patience := w.facts, w.m.cfg.Timeout
	if hurry { // the engine could serve already, so it must not wait for facts that only help
		patience = min(patience, time.Second)
	}
	w.scrapes.pulls.before(w.traffic)
	began := time.Now()
	sample, err := w.scrape(ctx, patience)
	pageErr := err
	if err == nil {
		w.countExpired(sample)
		w.crossCheck(sample, began)
	}
	if err == nil && sample.StartTime != 0 && sample.StartTime != f.start {
		full, f.start, f.version = true, sample.StartTime, ""
	}
	if full {
		f.capacity = nil
	}
	if err == nil && len(f.capacity) == 0 {
		f.capacity = sample.Capacities()
	}
	if full || f.version == "" {
		path, limit := "/version", answerLimit
		if w.in.Version != "" { // this path may ask each rank, so it takes longer while they are busy
			path, patience, limit = w.in.Version, w.m.cfg.Timeout, versionLimit
		}
		if answer, err := w.get(ctx, path, patience, limit); err == nil {
			f.version = parseVersion(answer) // else the version known before stays
			f.elastic = w.in.Version != "" && parseElastic(answer)
		}
	}
	if w.in.Version == "" && (full || f.unsure) {
		_, err := w.fault(ctx, patience)
		f.tolerant, f.unsure = err == nil, err != nil && !lacks(err)
		_, err = w.isPaused(ctx)
		f.pauses, f.unsure = err == nil, f.unsure || err != nil && !lacks(err)
	}
	w.m.mu.Lock()
	w.relist = false // a report from now on may be about a newer list
	w.m.mu.Unlock()
	models, err := w.models(ctx)
	if errors.As(err, new(*PageError)) { // the models are known all the same
		pageErr, err = err, nil
	}
	if f.err = err; err == nil {
		f.models = models // else the models known before stay
	}
	w.tellOdd(pageErr)
	w.facts, w.factsAt = f, time.Now()
}

// tellOdd warns of a page whose numbers cannot be right. It warns once, until the engine's pages can be read again.
func (w *watch) tellOdd(err error) {
	odd := errors.As(err, new(*PageError))
	if odd && !w.odd {
		w.m.cfg.Log.Warn("an engine's page is not believed, so the proxy goes by its own accounts; if its numbers stay so, restart the engine, "+
			"or report them to its makers",
			zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.Error(err))
	}
	w.odd = odd || w.odd && err != nil
}

// lookForSigns reads the gauges out of turn: the streams are quiet, and the gauges may show that the core goes on.
func (w *watch) lookForSigns(ctx context.Context) {
	began := time.Now()
	if s, err := w.scrape(ctx, min(w.m.cfg.Timeout, time.Second)); err == nil {
		w.noteSigns(s, began)
	}
}
