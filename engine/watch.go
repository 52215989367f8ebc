package engine

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// newWatch returns the watch of an instance. The instance counts as down until its first check. The
// caller holds m.mu.
func newWatch(m *Monitor, in Instance) *watch {
	return &watch{
		m: m, health: health{in: in, Status: Status{Since: time.Now(), Changed: time.Now()}}, traffic: m.trafficOf(in.ID),
		log:      m.cfg.Log.With(zap.String("engine", in.ID)),
		checkDue: make(chan struct{}, 1), canaryWake: make(chan struct{}, 1), stop: func() {},
		lastCheck: lastCheck{next: make(chan struct{})},
	}
}

// known returns what is known now.
func (w *watch) known() health {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	return w.health
}

// move makes a move, and says what has changed by it. The caller holds m.mu.
func (w *watch) move(f func(h *health, now time.Time)) {
	if w.removed {
		return
	}
	before, now := w.health, time.Now()
	f(&w.health, now)
	w.settle(before.Status, now)
	w.wake(&before)
	w.logChanges(&before)
	if !w.Status.equal(before.Status) {
		w.logStatus(before.Status)
		w.m.metrics.setState(w.in, w.Status)
		w.m.queueChange(w.in.ID)
	}
}

// wake wakes the goroutines for which there may be something to do. The caller holds m.mu.
func (w *watch) wake(before *health) {
	give := func(token chan struct{}) {
		select {
		case token <- struct{}{}:
		default: // a wake-up is pending already
		}
	}
	if before.due == notDue && w.due != notDue {
		give(w.checkDue)
	}
	if w.canaryPending || w.outage != nil {
		give(w.canaryWake)
	}
}

// logChanges logs and counts what has changed beside the status. The caller holds m.mu.
func (w *watch) logChanges(before *health) {
	log, m, role, f := w.log, w.m.metrics, zap.String("role", w.in.Role), &w.facts
	if errors.Is(f.modelsErr, ErrTooLarge) && !errors.Is(before.facts.modelsErr, ErrTooLarge) {
		log.Warn("an engine's list of models is too long to be read, so the proxy goes by the last one that it could "+
			"read; unload LoRA adapters", role, zap.Error(f.modelsErr))
	}
	if f.badPage != nil && before.facts.badPage == nil {
		log.Warn("an engine's page is not believed, so the proxy goes by its own accounts or does without; if the page "+
			"stays so, restart the engine, or report it to its makers", role, zap.Error(f.badPage))
	}
	if w.keyRefused && !before.keyRefused {
		log.Error("ALARM: an engine refuses the API key that the proxy sends, so it gets no requests; check api_key_env "+
			"of its profile", role, zap.Error(ErrCredential))
	}
	if w.rereadAt != before.rereadAt {
		log.Info("an engine answered that it does not have a model that its list has; the list is read again",
			zap.Error(w.unlisted))
	}
	if w.lateChecks != before.lateChecks {
		m.lateChecks.WithLabelValues(w.in.ID).Inc()
	}
	if w.lastCount != before.lastCount && w.lastCount != 0 {
		log.Warn("an engine has lost ranks; now and then a request is sent to them and, if they refuse it, "+
			"served elsewhere; if they do not come back, lower ranks of the engine in the config", zap.Error(w.LostRanks()))
	}
	switch { // each halt is logged once, when a check confirms it
	case before.halt.confirmed && w.halt.why == nil:
		log.Info("an engine takes requests again")
	case !before.halt.confirmed && w.halt.confirmed:
		log.Warn("an engine takes no requests for now, and its requests wait", zap.Error(w.halt.why))
	}
	if w.scrapes.frozen != before.scrapes.frozen {
		m.frozen.WithLabelValues(w.in.ID).Set(gaugeValue(w.scrapes.frozen))
		if w.scrapes.frozen {
			log.Warn("ALARM: an engine's gauges do not change although it has requests of this proxy; a request of one " +
				"token will tell whether it computes")
		}
	}
	if w.scrapes.excess > 0 && before.scrapes.excess == 0 {
		log.Warn("ALARM: a rank runs more requests than it has slots; correct engines.decode[].slots, or keep other "+
			"clients off the engine", zap.Int("slots", w.scrapes.allowedRunning), zap.Float64("running", w.scrapes.running))
	}
	if w.outage != nil && w.outage != before.outage {
		m.outages.WithLabelValues(w.in.ID, w.outage.cause).Inc()
		log.Warn(w.outageMessage(), zap.Duration("after", w.circuit.OutageLength()), zap.Error(w.outage.why))
	}
}

// outageMessage says only of an engine that answers its health check that it does.
func (w *watch) outageMessage() string {
	switch {
	case unreachable(w.outage.why):
		return "an engine is out of service, because it takes no connection"
	case w.failedChecks > 0:
		return "an engine is out of service, because requests and its last health check failed"
	case w.m.cfg.Canary == 0: // no request of one token is sent
		return "an engine is out of service although it answers its health check; it gets requests again after a while"
	}
	return "an engine is out of service although it answers its health check; requests of one token will tell when " +
		"it works again"
}

// logStatus logs how the status has changed. An engine that does not serve may get many new
// statuses with the same reason, so the reason is logged only if it differs from loggedReason. The
// caller holds m.mu.
func (w *watch) logStatus(old Status) {
	next, log := &w.Status, w.log.With(zap.String("role", w.in.Role))
	switch {
	case next.Up && !old.Up:
		log.Info("an engine is up", zap.String("version", next.Version), zap.Int("models", len(next.Models)))
	case old.Up && !next.Up:
		log.Warn("an engine is down", zap.Error(next.Err))
		// Idle connections lead to no process, or to another one.
		w.m.cfg.Client.idle.closeHost(w.in.Target.key())
	case old.StartTime != 0 && next.StartTime != old.StartTime:
		log.Warn("an engine restarted between two health checks, so the KV that it held is lost")
	}
	switch { // loggedReason is why the engine does not serve, as the log has it already
	case next.Err == nil:
		w.loggedReason = ""
	case old.Up && !next.Up: // the line above that the engine is down has the reason
		w.loggedReason, w.loggedAt = kindOf(next.Err), time.Now()
	case !next.Up || len(next.Models) == 0:
		// It stays down, or is up but gets no requests without a list of models.
		w.logDownReason(log)
	}
}

// minLogInterval is the least time between two log lines about an engine that stays down while the
// reason changes.
const minLogInterval = time.Minute

// logDownReason logs why an engine does not serve: once, and again if the reason has changed and
// minLogInterval has passed. The caller holds m.mu.
func (w *watch) logDownReason(log *zap.Logger) {
	next := &w.Status
	kind, now := kindOf(next.Err), time.Now()
	first := w.loggedReason == ""
	tooSoon := !first && now.Sub(w.loggedAt) < minLogInterval
	if kind == w.loggedReason || tooSoon {
		return
	}
	w.loggedReason, w.loggedAt = kind, now
	switch {
	case next.Up:
		log.Warn("an engine gets no requests, because its models are not known", zap.Error(next.Err))
	case first:
		log.Warn("an engine does not answer yet, so it gets no requests", zap.Error(next.Err))
	default:
		log.Warn("an engine is still down, now for another reason", zap.Error(next.Err))
	}
}

// kindOf returns the text of an error without the parts that differ each time, such as the local
// port of a connection.
func kindOf(err error) string {
	var e *Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	root := e.Err
	for inner := errors.Unwrap(root); inner != nil; inner = errors.Unwrap(root) {
		root = inner
	}
	return fmt.Sprint(e.Phase, " ", root)
}
