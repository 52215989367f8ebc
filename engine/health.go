package engine

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// health is what is known of one engine: a value without clock, lock, log and socket. Its moves are
// methods, each of which gets what was seen. Settle, after a move, derives the Status from it.
type health struct {
	Status
	in    Instance // Slots, Canary and Held may change
	facts facts
	suspicion
	halt     halt
	scrapes  scrapes
	expiries Expiries // by the engine's last metrics

	due          due
	failedChecks int    // in a row
	lateChecks   uint64 // checks that were answered late, while streams went on
	reports      uint64 // how many failures to connect, or refusals of all requests, callers have reported
	rankCount    int    // by the last refusal of a rank since the list of models was read (Status.RankCount)
	lastCount    int    // the last rankCount that was not 0, of this process and its group of now
	keyRefused   bool

	rereadDue bool      // an answer to a request showed that the engine's list of models has changed
	rereadAt  time.Time // when rereadDue last caused a check at once
	unlisted  error     // the answer that did
}

// facts are what checks have read. Only a check changes them, when it ends.
type facts struct {
	models          []Model
	version         string
	memory          *Sample // the last sample that told the KV memory; nil: none did
	start           float64
	modelsErr       error // why the list of models could not be read; nil: it was read
	badPage         error // numbers or names on a page cannot be right
	reportsFaults   bool  // the engine is a vLLM with --enable-fault-tolerance
	reportsPause    bool  // the engine is a vLLM that reports whether it is paused
	featuresUnknown bool  // the engine has not answered which of both it is, so it is asked again
	readAt          time.Time

	goodAt time.Time     // when the last good health check was answered
	rtt    time.Duration // mean time of a health check over an open connection; 0: unknown
	address
}

// due says whether a check must be made at once, and why.
type due uint8

const (
	notDue    due = iota
	dueNow        // a caller asks for it, or has met a refusal
	dueRedial     // a caller's connect timed out, so that the check must use a new connection
	dueBroken     // a caller's connection broke, so that the engine is down if the check cannot connect
)

// settle derives the fields of the Status that follow from other facts. before is the last Status.
func (h *health) settle(before Status, now time.Time) {
	h.Moved, h.RankCount, h.Accused = h.facts.moved, h.rankCount, h.accusedError()
	h.Out, h.Wedged, h.Halt = nil, false, h.halt.why
	if h.outage != nil {
		h.Out, h.Wedged = h.outage.why, h.outage.wedged
	}
	// An operator may have stopped requests (Held), and may also have paused the engine for it.
	// Then Held has the reason. A halt of another kind stays: the group of the engine re-forms, or
	// it has met a fault, which Held does not explain.
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

// hold sets why an operator has stopped requests to the engine; nil: it gets requests again.
// Failures while it is held do not count, and the end of the hold clears those from before it.
func (h *health) hold(why *Held) {
	if h.in.Held != nil && why == nil {
		h.suspicion, h.failedChecks = suspicion{}, 0
		h.askCheck(dueNow)
	}
	h.in.Held = why
}

// recordFailure records how a call failed, as Monitor.ReportFailure says.
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
	case e.Timeout || errors.Is(err, ErrMalformed) || errors.Is(err, ErrTooLarge): // the request may be at fault
	case isOwnFault(err): // a proxy without free sockets says nothing about the engine
	case unreachable(err):
		h.reports++ // so that a check which began before this report does not set Up
		if h.Up {
			h.Up, h.Err, h.failedChecks = false, err, failuresUntilDown
			h.askCheck(dueNow)
		}
	case h.Up:
		h.askCheck(dueBroken)
	}
}

// minRereadInterval is the least time between two readings of a list of models for rereadModels.
const minRereadInterval = time.Second

// rereadModels makes the engine's list of models due: at once or, if it was read for the same
// reason less than minRereadInterval ago, with the next check.
func (h *health) rereadModels(why error, now time.Time) {
	h.rereadDue = true
	if now.Sub(h.rereadAt) >= minRereadInterval {
		h.rereadAt, h.unlisted = now, why
		h.askCheck(dueNow)
	}
}

// compare records a sample, and whether it fits what this proxy knows of its own requests. It
// returns for how many prompt tokens the engine did not pull KV although it should have.
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
	p.running = runningOnFullestRank(s, h.in.Canaries) // each rank gets canaries, so these are all ranks of the engine
	p.updateAllowedRunning(h.in.Slots, p.running)
	p.excess = 0
	if h.in.Slots > 0 { // 0: the number of slots is not known
		p.excess = max(0, p.running-float64(p.allowedRunning)-float64(ours.withoutSlot))
	}
	return p.pulls.newlyNotPulled(s, ours.settled, ours.computed)
}

// recordRefusal records the reason with which an engine refused a request (see ParseRefusal), and
// makes a check due. If it refuses all requests, the good result of a check that is under way is
// out of date. If it only lacks a rank, that result stays right, as other ranks get requests.
func (h *health) recordRefusal(why error, now time.Time) {
	if h.in.Held != nil { // an operator has stopped requests to the engine, so the reason is known
		return
	}
	h.askCheck(dueNow)
	const confirmed = false // no check has seen this reason
	var rank *RankError
	switch {
	case errors.Is(why, ErrReforming):
		h.reports++
		h.setHalt(ErrReforming, confirmed, now)
	case errors.Is(why, ErrPaused): // another program paused it, or this proxy did so before it was restarted
		h.reports++
		h.setHalt(ErrPaused, confirmed, now)
	case errors.As(why, &rank):
		// No page of vLLM gives this number, so the ranks are lost only until the facts are read
		// next: then a request finds out whether they are back.
		if rank.Ranks < h.in.Ranks { // else the request named a rank that the config does not have
			h.rankCount, h.lastCount = rank.Ranks, rank.Ranks
		}
	case errors.Is(why, ErrRetired):
		h.reports++
		h.Up, h.Err = false, ErrRetired
	}
}

func (h *health) askCheck(why due) { h.due = max(h.due, why) }

// failuresUntilDown is how many checks in a row must fail before an instance counts as down. After
// one good check it is up again.
const failuresUntilDown = 2

// Standstill is how long requests wait for a model if all of its engines hang, counted from the
// last good health check. An engine hangs if it takes connections but does not answer. A stopped
// process, or a host that swaps memory, may hang and then continue. After this time the engine
// counts as dead.
const Standstill = 30 * time.Second

// needsNewConnection says that a check must use one: because the facts are due, or because the
// engine may take no connections any more, which an idle one would not show.
func (h *health) needsNewConnection(factsDue bool) bool {
	return factsDue || !h.Up || h.due >= dueRedial || h.failedChecks > 0
}

// check is what one check of an engine found out.
type check struct {
	was        health // what was known when it began
	facts      facts  // those of was, and what it has read since
	began      time.Time
	fresh      bool          // it used a new connection
	limit      time.Duration // in which its requests must be answered
	err        error         // why the health check failed; nil: the engine takes requests
	streamed   bool          // streams sent tokens while it went on
	halt       error         // why the engine may get no new requests, by readHalt; nil: it may get them
	silentCore error         // why the core has not said whether it is paused; nil: it has, or was not asked
	reforming  error         // state of a change of the number of ranks, by readScaling; nil: there is none
}

// rttWeight is the weight of one health check in the moving mean. The value is that of GORGO, a
// published router.
const rttWeight = 0.3

// answerCheck records that the engine has answered its health check well, at the time now.
// withoutComputing says that it computed nothing for the answer (see alive). Only then, and over a
// connection that was open already, the check took a round trip: it was not fresh, and did not come
// after a pause in which idle connections expire.
func (c *check) answerCheck(withoutComputing bool, idle time.Duration, now time.Time) {
	f := &c.facts
	took, reused := now.Sub(c.began), !c.fresh && now.Sub(f.goodAt) < idle
	switch {
	case !withoutComputing || !reused:
	case f.rtt == 0: // the first measurement
		f.rtt = took
	default:
		f.rtt += time.Duration(rttWeight * float64(took-f.rtt)) // (1 - rttWeight) * old mean + rttWeight * took
	}
	f.goodAt = now
	f.unproven = f.unproven && !c.fresh
}

// endCheck records a check. If the proxy itself could not ask the engine, only the error in the
// status changes. An engine that re-forms, or that an operator holds, may answer badly without a
// failure. A good check does not count if a caller reported the opposite while it went on: that it
// could not connect, or that the engine refuses all requests. Then the next check decides.
func (h *health) endCheck(c check, now time.Time) {
	err, reported := c.err, c.was.reports != h.reports
	h.facts = c.facts
	if isOwnFault(err) { // the engine was not asked, so it stays up or down as it was
		h.Err = fmt.Errorf("the proxy cannot check it, because it can open no connection: %w", err)
		return
	}
	h.keyRefused = errors.Is(cmp.Or(err, h.facts.modelsErr), ErrCredential)
	if err == nil && h.facts.modelsErr != nil && !h.Up && errors.Is(h.Err, ErrRetired) {
		h.facts.modelsErr = ErrRetired // it stays the reason until the engine lists models
	}
	// While only the API server is busy, streams go on. They prove nothing of an engine without a
	// list, which gets no requests, and may be of the host that had the engine's name before.
	isOnlyBusy := isLate(err) && c.streamed && len(h.facts.models) > 0 && !h.facts.unproven
	switch seenNow, halt := h.haltAfter(c); {
	case errors.Is(err, ErrReforming): // before 0.33 the health check of vLLM also answers that it re-forms
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

// haltAfter returns why the engine must be halted after a check; nil: it need not be. There are
// three sources of a reason, in this order:
//   - The health check or readScaling says that the number of ranks changes, or could not.
//   - The engine is halted for such a change, and only a list of its models shows that it is over.
//   - readHalt found a pause or a fault.
//
// seenNow says that this check has seen a reason, so that setHalt counts the halt as confirmed.
func (h *health) haltAfter(c check) (seenNow bool, halt error) {
	halt, old := c.halt, h.halt.why
	if h.in.Held != nil && (halt == nil || errors.Is(halt, ErrPaused)) {
		halt = nil // the operator may have paused the engine, and Held has the reason
		if errors.Is(old, ErrPaused) {
			halt = old // a held engine is not asked, so a pause from before the hold stays until one is asked again
		}
	}
	wasReforming := errors.Is(old, ErrReforming) || errors.Is(old, errScaleFailed)
	switch {
	case errors.Is(c.err, ErrReforming):
		return true, ErrReforming
	case c.reforming != nil:
		return true, c.reforming
	case c.err == nil && h.facts.modelsErr != nil && wasReforming:
		return halt != nil, old // a pause or fault that was seen confirms that the engine takes no requests
	}
	return halt != nil, halt
}

// applyGoodCheck records a good health check. That is not enough to be up if the engine refuses the
// key or lists no models.
func (h *health) applyGoodCheck(halt error, haltSeenNow bool, now time.Time) {
	f := &h.facts
	if f.start != h.StartTime { // suspicion and lost ranks are of the process before
		h.suspicion, h.rankCount, h.lastCount = suspicion{}, 0, 0
		// A halt that ends now, and that no check has seen, is explained by the restart.
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

// setHalt stops new requests to the engine for the reason why; nil: it may get them again.
// confirmed says that a check has seen the reason. A halt that ends before counts as a failure of
// the engine: it has refused a request, and its health checks did not show why. An engine without
// canaries is left alone.
func (h *health) setHalt(why error, confirmed bool, now time.Time) {
	old := h.halt
	h.halt = halt{why, old.since, why != nil && (confirmed || old.confirmed)}
	switch {
	case old.why == nil:
		h.halt.since = now
	case why != nil: // it goes on
	case old.confirmed: // it may have caused failures, and the number of ranks may be another one now
		h.suspicion, h.rankCount, h.lastCount = suspicion{}, 0, 0
	case len(h.in.Canaries) > 0 && h.circuit.Fail(canaryID, now): // in an outage, only if a canary is the trial
		h.takeOut(outFailures,
			fmt.Errorf("it refuses requests again and again, although its health checks do not say so: %w", old.why))
	}
}

// applyFailedCheck records a failed health check. An engine that is down because it hangs is late
// until its last good check is Standstill ago: requests wait for it, because a stopped process may
// continue.
func (h *health) applyFailedCheck(c check, now time.Time) {
	h.failedChecks++
	if c.was.due == dueBroken && unreachable(c.err) { // the process has ended
		h.failedChecks = failuresUntilDown
	}
	if h.keyRefused || h.failedChecks >= failuresUntilDown { // with a refused key, every request would fail
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

// found returns why the engine does not work, by a check that has ended and what callers have
// reported meanwhile; nil: it works, although it may be paused.
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

// isLate says that the engine accepted the connection but did not answer in time.
func isLate(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Timeout && e.Phase > PhaseConnect
}

// unreachable says that an attempt to connect failed without a timeout: the process or its machine
// does not run. With a busy engine, connecting would time out instead.
func unreachable(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Phase == PhaseConnect && !e.Timeout
}
