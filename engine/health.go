package engine

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// health is what is known of one engine: a value without clock, lock, log and socket. Settle, after
// each of its moves, derives the Status.
type health struct {
	Status
	in    Instance // Slots, Canary and Held may change
	facts facts
	suspicion
	halt     halt
	scrapes  scrapes
	expiries Expiries

	due          due
	failedChecks int    // in a row
	lateChecks   uint64 // checks that were answered late, while streams went on
	reports      uint64 // failures to connect, or refusals of all requests, by callers
	rankCount    int    // by the last refusal of a rank since the list of models was read
	lastCount    int    // the last rankCount that was not 0, of this process and group
	keyRefused   bool

	rereadDue bool      // an answer showed that the engine's list of models has changed
	rereadAt  time.Time // when rereadDue last caused a check at once
	unlisted  error
}

// facts change only when a check ends.
type facts struct {
	models          []Model
	version         string
	memory          *Sample // the last that told the KV memory; or nil
	start           float64
	modelsErr       error // nil: the list of models was read
	badPage         error // numbers or names on a page cannot be right
	reportsFaults   bool  // the engine is a vLLM with --enable-fault-tolerance
	reportsPause    bool  // it is a vLLM that reports whether it is paused
	featuresUnknown bool  // it has not answered whether it reports faults and pauses
	readAt          time.Time

	goodAt time.Time     // last good health check
	rtt    time.Duration // mean time of a health check over an open connection; 0: unknown
	address
}

type due uint8

const (
	notDue    due = iota
	dueNow        // a caller asks, or has met a refusal
	dueRedial     // a connect timed out, so the check must use a new connection
	dueBroken     // a connection broke, so the engine is down if the check cannot connect
)

// settle derives the fields of the Status that follow from other facts.
func (h *health) settle(before Status, now time.Time) {
	h.Moved, h.RankCount, h.Accused = h.facts.moved, h.rankCount, h.accusedError()
	h.Out, h.Wedged, h.Halt = nil, false, h.halt.why
	if h.outage != nil {
		h.Out, h.Wedged = h.outage.why, h.outage.wedged
	}
	// An operator who holds the engine may also have paused it; then Held has the reason. A halt of
	// another kind stays, because Held does not explain it.
	if h.in.Held != nil && (h.Halt == nil || errors.Is(h.Halt, ErrPaused)) {
		h.Halt = h.in.Held
	}
	if h.Up != before.Up {
		h.Since = now
	}
	if h.State().String() != before.State().String() {
		h.Changed = now
	}
}

// hold stops requests to the engine; nil: it gets them again. Failures while it is held do not
// count, and the end of the hold clears those from before.
func (h *health) hold(why *Held) {
	if h.in.Held != nil && why == nil {
		h.suspicion, h.failedChecks = suspicion{}, 0
		h.askCheck(dueNow)
	}
	h.in.Held = why
}

func (h *health) recordFailure(err error, now time.Time) {
	var e *Error
	isCall := errors.As(err, &e)
	switch {
	case errors.Is(err, ErrUnlisted):
		if h.Up {
			h.rereadModels(err, now)
		}
	case IsRefusal(err):
		if h.Up {
			h.recordRefusal(err, now)
		}
	case isCall && e.Phase == PhaseConnect && e.Timeout:
		if h.Up { // it may have moved, while idle connections to its old address still work
			h.askCheck(dueRedial)
		}
	case !isCall || e.Aborted || errors.Is(err, ErrClosed): // the proxy may have ended the call
	case e.Timeout || errors.Is(err, ErrMalformed) || errors.Is(err, ErrTooLarge):
		// The request may be at fault.
	case isOwnFault(err): // a proxy without free sockets says nothing about the engine
	case unreachable(err):
		h.reports++ // a check which began before must not set Up
		if h.Up {
			h.Up, h.Err, h.failedChecks = false, err, failuresUntilDown
			h.askCheck(dueNow)
		}
	case h.Up:
		h.askCheck(dueBroken)
	}
}

// minRereadInterval is the least time between two readings that rereadModels causes at once.
const minRereadInterval = time.Second

// rereadModels makes the list of models due: at once or, if it was read for the same reason less
// than minRereadInterval ago, with the next check.
func (h *health) rereadModels(why error, now time.Time) {
	h.rereadDue = true
	if now.Sub(h.rereadAt) >= minRereadInterval {
		h.rereadAt, h.unlisted = now, why
		h.askCheck(dueNow)
	}
}

// compare records a sample. It returns for how many prompt tokens the engine did not pull KV
// although it should have.
func (h *health) compare(s *Sample, at time.Time, ours load) (notPulled float64) {
	p := &h.scrapes
	p.gauges = make(map[int]Gauges, len(h.in.Canaries))
	for _, t := range h.in.Canaries {
		p.gauges[t.Rank] = gaugesOf(p.sample, s, t.Rank)
	}
	p.sample, p.sampleAt = s, at
	if wasFrozen := p.frozen; p.checkFrozen(s, ours.running > 0) && !wasFrozen {
		h.askCanary()
	}
	p.running = runningOnFullestRank(s, h.in.Canaries) // each rank gets canaries
	p.updateAllowedRunning(h.in.Slots, p.running)
	p.excess = 0
	if h.in.Slots > 0 {
		p.excess = max(0, p.running-float64(p.allowedRunning)-float64(ours.withoutSlot))
	}
	return p.pulls.newlyNotPulled(s, ours.settled, ours.computed)
}

// recordRefusal records why an engine refused a request (see ParseRefusal). If it refuses all, the
// good result of a check under way is out of date. If it only lacks a rank, the result stays right.
func (h *health) recordRefusal(why error, now time.Time) {
	if h.in.Held != nil { // the reason is known
		return
	}
	h.askCheck(dueNow)
	const confirmed = false
	var rank *RankError
	switch {
	case errors.Is(why, ErrReforming):
		h.reports++
		h.setHalt(ErrReforming, confirmed, now)
	case errors.Is(why, ErrPaused): // by another program, or by this proxy before a restart
		h.reports++
		h.setHalt(ErrPaused, confirmed, now)
	case errors.As(why, &rank):
		// No page of vLLM gives this number, so the ranks are lost only until the facts are read next:
		// then a request finds out whether they are back.
		if rank.Ranks < h.in.Ranks { // else the config does not have this rank
			h.rankCount, h.lastCount = rank.Ranks, rank.Ranks
		}
	case errors.Is(why, ErrRetired):
		h.reports++
		h.Up, h.Err = false, ErrRetired
	}
}

func (h *health) askCheck(why due) { h.due = max(h.due, why) }

// failuresUntilDown checks in a row must fail before an instance counts as down.
const failuresUntilDown = 2

// Standstill is how long requests wait for a model if all of its engines hang (take connections but
// do not answer), from the last good check. A stopped process, or a host that swaps memory, may
// continue.
const Standstill = 30 * time.Second

func (h *health) needsNewConnection(factsDue bool) bool {
	return factsDue || !h.Up || h.due >= dueRedial || h.failedChecks > 0
}

type check struct {
	was        health
	facts      facts
	began      time.Time
	fresh      bool // it used a new connection
	limit      time.Duration
	err        error // nil: the engine takes requests
	streamed   bool  // streams sent tokens while it went on
	halt       error // by readHalt; nil: the engine may get new requests
	silentCore error // why the core has not said whether it is paused; nil: it has, or was not asked
	reforming  error // by readScaling; nil: the number of ranks does not change
}

// rttWeight is the weight of one health check in the moving mean, as in GORGO, a published router.
const rttWeight = 0.3

// answerCheck records a good answer. The check took a round trip only if the engine computed
// nothing for it (see alive), over a connection that was open already and not used after a pause,
// in which idle ones expire.
func (c *check) answerCheck(withoutComputing bool, idle time.Duration, now time.Time) {
	f := &c.facts
	took, reused := now.Sub(c.began), !c.fresh && now.Sub(f.goodAt) < idle
	switch {
	case !withoutComputing || !reused:
	case f.rtt == 0:
		f.rtt = took
	default:
		f.rtt += time.Duration(rttWeight * float64(took-f.rtt))
	}
	f.goodAt = now
	f.unproven = f.unproven && !c.fresh
}

// endCheck records a check. An engine that re-forms, or that an operator holds, may answer badly
// without a failure. A good check does not count if a caller reported the opposite meanwhile: then
// the next one decides.
func (h *health) endCheck(c check, now time.Time) {
	err, reported := c.err, c.was.reports != h.reports
	h.facts = c.facts
	if isOwnFault(err) { // the engine was not asked
		h.Err = fmt.Errorf("the proxy cannot check it, because it can open no connection: %w", err)
		return
	}
	h.keyRefused = errors.Is(cmp.Or(err, h.facts.modelsErr), ErrCredential)
	if err == nil && h.facts.modelsErr != nil && !h.Up && errors.Is(h.Err, ErrRetired) {
		h.facts.modelsErr = ErrRetired // until the engine lists models
	}
	// While only the API server is busy, streams go on. An engine without a list gets no requests, so
	// its streams may be of the host that had the name before.
	isOnlyBusy := isLate(err) && c.streamed && len(h.facts.models) > 0 && !h.facts.unproven
	switch seenNow, halt := h.haltAfter(c); {
	case errors.Is(err, ErrReforming): // before 0.33 vLLM's health check answers so
		h.failedChecks = 0
		h.setHalt(halt, seenNow, now)
		if why := h.halt.downReason(now); why != nil {
			h.Up, h.Err = false, why
		} else if !h.Up {
			h.Err = err
		}
	case h.in.Held != nil && err != nil && !unreachable(err) && !h.keyRefused:
		h.failedChecks = 0
	case err == nil && reported:
	case err == nil:
		h.applyGoodCheck(halt, seenNow, now)
	case isOnlyBusy:
		h.lateChecks++
		if !reported {
			h.Up, h.Hangs, h.failedChecks = true, false, 0
			h.Err = fmt.Errorf("it answered a health check too late, while requests go on: %w", err)
		}
	default:
		h.applyFailedCheck(c, now)
	}
}

// haltAfter returns why the engine must be halted; nil: it need not be. seenNow says that this
// check has seen a reason. After a change of the number of ranks, only a list of models shows that
// it is over.
func (h *health) haltAfter(c check) (seenNow bool, halt error) {
	halt, old := c.halt, h.halt.why
	if h.in.Held != nil && (halt == nil || errors.Is(halt, ErrPaused)) {
		halt = nil // Held has the reason
		if errors.Is(old, ErrPaused) {
			halt = old // a held engine is not asked
		}
	}
	wasReforming := errors.Is(old, ErrReforming) || errors.Is(old, errScaleFailed)
	switch {
	case errors.Is(c.err, ErrReforming):
		return true, ErrReforming
	case c.reforming != nil:
		return true, c.reforming
	case c.err == nil && h.facts.modelsErr != nil && wasReforming:
		return halt != nil, old
	}
	return halt != nil, halt
}

// A good health check is not enough to be up if the engine refuses the key or lists no models.
func (h *health) applyGoodCheck(halt error, haltSeenNow bool, now time.Time) {
	f := &h.facts
	if f.start != h.StartTime { // suspicion and lost ranks are of the process before
		h.suspicion, h.rankCount, h.lastCount = suspicion{}, 0, 0
		// A restart explains a halt that ends now and that no check has seen.
		h.halt.confirmed = h.halt.why != nil
	}
	h.setHalt(halt, haltSeenNow, now)
	h.failedChecks, h.Late, h.Hangs, h.Err = 0, false, false, f.modelsErr
	h.Up = !h.keyRefused && !errors.Is(f.modelsErr, ErrNotAnEngine) && !errors.Is(f.modelsErr, ErrRetired)
	h.Models, h.Version, h.Memories, h.StartTime = f.models, f.version, f.memory.Memories(f.models), f.start
	if why := h.halt.downReason(now); why != nil {
		h.Up, h.Err = false, why
	}
}

// setHalt stops new requests for this reason; nil: the halt ends. A halt that no check has
// confirmed then counts as a failure: the engine has refused a request, and its health checks did
// not show why. An engine without canaries is left alone.
func (h *health) setHalt(why error, confirmed bool, now time.Time) {
	old := h.halt
	h.halt = halt{why, old.since, why != nil && (confirmed || old.confirmed)}
	switch {
	case old.why == nil:
		h.halt.since = now
	case why != nil:
	case old.confirmed: // it may have caused failures, and the number of ranks may be another now
		h.suspicion, h.rankCount, h.lastCount = suspicion{}, 0, 0
	case len(h.in.Canaries) > 0 && h.circuit.Fail(canaryID, now):
		// In an outage, only the failure of a canary counts, if it is the trial.
		h.takeOut(outFailures,
			fmt.Errorf("it refuses requests again and again, although its health checks do not say so: %w", old.why))
	}
}

// applyFailedCheck: an engine that hangs is late until Standstill, because a stopped process may
// continue.
func (h *health) applyFailedCheck(c check, now time.Time) {
	h.failedChecks++
	if c.was.due == dueBroken && unreachable(c.err) { // the process has ended
		h.failedChecks = failuresUntilDown
	}
	// With a refused key, every request would fail.
	if h.keyRefused || h.failedChecks >= failuresUntilDown {
		h.Up = false
	}
	h.Hangs = isLate(c.err)
	h.Late = !h.Up && h.Hangs && now.Sub(h.facts.goodAt) < Standstill
	h.Err = c.err
	if h.Hangs {
		h.Err = fmt.Errorf("it does not answer its health check (%.3g s): %w", c.limit.Seconds(), c.err)
	}
	h.Err = h.facts.addMoveNote(h.Err)
}

// found returns why the engine does not work; nil: it works, although it may be paused.
func (h *health) found(c check) error {
	switch {
	case c.err != nil:
		return c.err
	case !h.Up:
		return cmp.Or(h.Err, errNotUp)
	case h.halt.why != nil && !errors.Is(h.halt.why, ErrPaused):
		return h.halt.why
	}
	return c.silentCore
}

var errNotUp = errors.New("it is down")

// isLate: the engine took the connection but did not answer in time.
func isLate(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Timeout && e.Phase > PhaseConnect
}

// unreachable: the process or its machine does not run. With a busy engine, connecting would time
// out.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}
