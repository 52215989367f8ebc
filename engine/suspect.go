package engine

import (
	"errors"
	"fmt"
	"time"

	"evenkeel/engine/circuit"
)

// Verdict is what the end of a request says about its engine. If the request or its client caused
// the end, there is none.
type Verdict uint8

// The verdicts.
const (
	Served  Verdict = iota // the whole answer came, so the engine works
	Faulted                // the engine is at fault
	Silent                 // the engine sent nothing in time, so it may hang
	Unclear                // only a canary can show whether the engine is at fault
)

// Outcomes of a canary, a short request that shows whether an engine computes.
const (
	canaryPassed  = "passed"
	canaryFailed  = "failed"
	canaryVouched = "vouched"  // it timed out, but streams sent tokens: the batch was full
	canaryNotSent = "not sent" // canaries are off, or no model is known yet
	canaryRefused = "refused"  // the engine takes no requests, which does not mean that it is broken
	canaryNotMade = "not made" // the proxy could open no connection
)

// Values of a metric's label.
var canaryOutcomes = []string{canaryPassed, canaryFailed, canaryVouched}

// suspicion has the evidence that an instance does not work although it answers its health check.
type suspicion struct {
	circuit         circuit.Circuit
	outage          *outage // nil: the circuit is in service
	canaryPending   bool    // a canary must show whether the instance, which is in service, computes
	lastCanaryAt    time.Time
	openAccusations int // failed requests not yet judged (see Monitor.Accuse)
	// silentSince is since when requests have waited for their KV without a sign of life of the core;
	// zero: it gives signs. It stays until a sign comes or a canary passes.
	silentSince time.Time
}

type outage struct {
	cause  string // a label of the metric
	why    error
	wedged bool // a canary failed, and no request was served since
}

const (
	outFailures = "failures"
	outCanary   = "canary"
)

// recordOutcome: Served clears the suspicion. Several failures in a row take the instance out of
// service.
func (h *health) recordOutcome(v Verdict, why error, now time.Time) {
	if len(h.in.Canaries) == 0 || h.in.Held != nil || isOwnFault(why) {
		return
	}
	const noTrial = 0 // only canaries are trials of the circuit
	switch {
	case v == Served:
		h.circuit.Succeed()
		h.outage, h.canaryPending = nil, false
	case (v == Faulted || v == Silent) && h.circuit.Fail(noTrial, now):
		h.takeOut(outFailures, fmt.Errorf("%d requests in a row failed, the last: %w", circuit.Limit, why))
	case v == Silent || v == Unclear:
		h.askCanary()
	}
}

// maxAccused failed requests that are not judged yet bar an instance from new ones. An engine that
// fails each at once always has free slots, so without this bound it would get every request until
// the first accusation is settled.
const maxAccused = 3

var (
	errAccused = fmt.Errorf("%d requests failed there with 500; until another engine has answered one of them, it is open whether the engine "+
		"or the requests are at fault", maxAccused)
	errSilent = errors.New("its core gave no sign of life for so long that the KV of requests that wait there may be lost: there was no " +
		"event on any stream, and no gauge moved")
)

// addAccusations: recordOutcome may have forgotten accusations, because the engine restarted.
func (h *health) addAccusations(n int) {
	if len(h.in.Canaries) > 0 {
		h.openAccusations = max(0, h.openAccusations+n)
	}
}

func (s *suspicion) accusedError() error {
	switch {
	case s.openAccusations >= maxAccused:
		return errAccused
	case !s.silentSince.IsZero():
		return errSilent
	}
	return nil
}

// recordSilence: a silent core has given no sign of life for longer than a request that waits for
// its KV allows. The engine then gets a canary, and no new requests until it passes or a sign
// comes. hasSign says that one came since silentSince.
func (h *health) recordSilence(isSilent, hasSign bool, now time.Time) {
	switch wasSilent := !h.silentSince.IsZero(); {
	case h.in.Held != nil || wasSilent == isSilent: // a held engine gets no requests and no canary
		return
	case wasSilent && hasSign:
		h.silentSince = time.Time{}
		return
	case isSilent:
		h.silentSince = now
	}
	h.askCanary() // if no request waits any more, only a canary can show whether the core works
}

// minCanaryInterval limits the cost: while a rank prefills a canary, all ranks of its group wait.
const minCanaryInterval = 5 * time.Second

// nextCanary: an instance out of service gets one as its circuit's trial, and a suspect in service
// while canaryPending. One that is down gets none: its health checks will show when it is up again.
func (h *health) nextCanary() (at time.Time, isScheduled bool) {
	switch {
	case !h.Up || h.halt.why != nil || h.in.Held != nil:
		return time.Time{}, false
	case h.outage != nil:
		return h.circuit.TrialAt(), true
	default:
		return h.lastCanaryAt.Add(minCanaryInterval), h.canaryPending
	}
}

const canaryID = 1 // for circuit.Circuit, which allows one trial at a time

func (s *suspicion) sendCanary(now time.Time) {
	s.canaryPending, s.lastCanaryAt = false, now
	s.circuit.Send(canaryID, now)
}

// endCanary: isSilent says that a request still waits too long without a sign of life. A canary
// that was not sent returns the engine to service, too: otherwise nothing would.
func (h *health) endCanary(outcome string, why error, isSilent bool, now time.Time) {
	switch outcome {
	case canaryRefused:
		h.recordRefusal(why, now)
		return
	case canaryNotMade: // another is sent later; out of service, as the next trial
		if h.askCanary(); !h.canaryPending {
			h.circuit.Trip(now)
		}
		return
	case canaryFailed:
		h.circuit.Trip(now)
		h.takeOut(outCanary, why)
		return
	case canaryPassed, canaryNotSent:
		if !isSilent { // after a vouched one, recordSilence ends the silence
			h.silentSince = time.Time{}
		}
	}
	if h.outage != nil {
		// One token proves less than a served request, so the next outage lasts twice as long.
		h.circuit.ReturnToService()
		h.outage = nil
	}
}

func (s *suspicion) askCanary() { s.canaryPending = s.outage == nil }

func (s *suspicion) takeOut(cause string, why error) {
	wedged := cause == outCanary || s.outage != nil && s.outage.wedged
	s.outage, s.canaryPending = &outage{cause, why, wedged}, false
}
