package engine

import (
	"errors"
	"fmt"
	"time"

	"evenkeel/engine/circuit"
)

// Verdict is what the end of a request says about its engine. If the request or its client caused the end, there is no verdict, and
// RecordOutcome is not called.
type Verdict uint8

// The verdicts, from which RecordOutcome decides whether the engine gets a canary or is taken out of service.
const (
	Served  Verdict = iota // the whole answer came, so the engine works
	Faulted                // the request failed, and the engine is at fault
	Silent                 // the engine sent nothing in time, so it may hang
	Unclear                // the request failed, and only a canary can show whether the engine is at fault
)

// Outcomes of a canary. A canary is a short request that shows whether an engine computes.
const (
	canaryPassed  = "passed"
	canaryFailed  = "failed"
	canaryVouched = "vouched"  // the canary timed out, but streams of the engine sent tokens meanwhile: its batch was full
	canaryNotSent = "not sent" // canaries are off, or the engine has named no model yet
	canaryRefused = "refused"  // the engine or a rank takes no requests, which does not mean that it is broken
	canaryNotMade = "not made" // the proxy could open no connection
)

// canaryOutcomes are those that are values of a metric's label.
var canaryOutcomes = []string{canaryPassed, canaryFailed, canaryVouched}

// suspicion has the evidence that an instance does not work although it answers its health check.
type suspicion struct {
	circuit         circuit.Circuit
	outage          *outage   // nil: the circuit is in service
	canaryPending   bool      // a canary must show whether the instance, which is in service, computes
	lastCanaryAt    time.Time // when the last canary was sent
	openAccusations int       // failed requests of which it is not known yet whether the engine or the request is at fault
	// silentSince is the time since which requests have waited for their KV without a sign of life of the core; zero: the
	// core gives signs. It stays set until a sign comes or a canary passes, even if no request waits any more.
	silentSince time.Time
}

// outage is why the circuit has taken an instance out of service.
type outage struct {
	cause  string // a label of the metric
	why    error
	wedged bool // a canary failed, and no request was served since
}

// Causes of an outage, as values of a metric's label.
const (
	outFailures = "failures"
	outCanary   = "canary"
)

// recordOutcome records the verdict on a request. Served clears the suspicion. Faulted and Silent
// count as failures, and several in a row take the instance out of service. Silent and Unclear ask
// for a canary, which shows whether the engine computes.
func (h *health) recordOutcome(v Verdict, why error, now time.Time) {
	if len(h.in.Canaries) == 0 || h.in.Held != nil || isOwnFault(why) {
		return
	}
	const noTrial = 0 // only canaries are trial requests of the circuit
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

// maxAccused is the number of failed requests that are not judged yet (see Accuse) at which an instance gets no new requests. An engine
// that fails each request at once always has free slots, so without this bound it would get every request until the first accusation is
// settled.
const maxAccused = 3

var (
	errAccused = fmt.Errorf("%d requests failed there with 500; until another engine has answered one of them, it is open whether the engine "+
		"or the requests are at fault", maxAccused)
	errSilent = errors.New("its core gave no sign of life for so long that the KV of requests that wait there may be lost: there was no " +
		"event on any stream, and no gauge moved")
)

// addAccusations adds n to the accusations of an instance that recordOutcome may judge. It may have
// forgotten them meanwhile, because the engine has restarted.
func (h *health) addAccusations(n int) {
	if len(h.in.Canaries) > 0 {
		h.openAccusations = max(0, h.openAccusations+n)
	}
}

// accusedError returns why the engine should get no new requests for now; nil: it may get them. A request that failed there is an open
// accusation until its caller knows whether the engine or the request is at fault (see Accuse).
func (s *suspicion) accusedError() error {
	switch {
	case s.openAccusations >= maxAccused:
		return errAccused
	case !s.silentSince.IsZero(): // the core gives no sign of life while requests wait for their KV
		return errSilent
	}
	return nil
}

// recordSilence records whether the engine's core is silent: it has given no sign of life for
// longer than a request that waits there for its KV allows. The engine then gets a canary, and no
// new requests until it passes or a sign comes. hasSign says that one came since silentSince.
func (h *health) recordSilence(isSilent, hasSign bool, now time.Time) {
	switch wasSilent := !h.silentSince.IsZero(); {
	case h.in.Held != nil || wasSilent == isSilent: // a held engine gets no requests, and no canary either
		return
	case wasSilent && hasSign:
		h.silentSince = time.Time{}
		return
	case isSilent:
		h.silentSince = now
	}
	h.askCanary() // if no request waits any more, only a canary can show whether the core works
}

// minCanaryInterval is the least time between two canaries to an engine in service. It limits their cost: while a rank prefills a canary,
// all ranks of its group wait.
const minCanaryInterval = 5 * time.Second

// nextCanary returns when the next canary must be sent; isScheduled is false if none must be. An instance that is out of service gets one
// when its circuit allows a trial. An instance in service gets one only while canaryPending is set, because something made it a suspect:
// for example a request failed, or its gauges did not change. An instance that is down gets none, because its health checks will show when
// it is up again. An instance that gets no requests, because it is halted or an operator holds it, gets none either.
func (h *health) nextCanary() (at time.Time, isScheduled bool) {
	switch {
	case !h.Up || h.halt.why != nil || h.in.Held != nil:
		return time.Time{}, false
	case h.outage != nil: // the canary is the trial of the circuit
		return h.circuit.TrialAt(), true
	default:
		return h.lastCanaryAt.Add(minCanaryInterval), h.canaryPending
	}
}

const canaryID = 1 // the id of the canary for circuit.Circuit, which allows one trial request at a time

// sendCanary records that a canary is sent. If the engine is out of service, it is the trial.
func (s *suspicion) sendCanary(now time.Time) {
	s.canaryPending, s.lastCanaryAt = false, now
	s.circuit.Send(canaryID, now)
}

// endCanary records the outcome of a canary. isSilent says that a request still waits for longer
// than it allows without a sign of life. A canary that failed takes the engine out of service. One
// that passed, or that was vouched for, brings it back. So does one that was not sent, because then
// none would ever do so. Others prove nothing.
func (h *health) endCanary(outcome string, why error, isSilent bool, now time.Time) {
	switch outcome {
	case canaryRefused:
		h.recordRefusal(why, now)
		return
	case canaryNotMade: // another one is sent after a while; out of service, as the next trial
		if h.askCanary(); !h.canaryPending {
			h.circuit.Trip(now)
		}
		return
	case canaryFailed:
		h.circuit.Trip(now)
		h.takeOut(outCanary, why)
		return
	case canaryPassed, canaryNotSent:
		if !isSilent { // after a vouched one, recordSilence ends the silence by the tokens that streams sent
			h.silentSince = time.Time{}
		}
	}
	if h.outage != nil {
		h.circuit.ReturnToService() // one token proves less than a served request, so the next outage lasts twice as long
		h.outage = nil
	}
}

// askCanary has a canary sent. Out of service, the instance gets canaries anyway.
func (s *suspicion) askCanary() { s.canaryPending = s.outage == nil }

// takeOut records that the circuit has taken the instance out of service. From then on canaries are
// trials of the circuit, so that none is pending.
func (s *suspicion) takeOut(cause string, why error) {
	wedged := cause == outCanary || s.outage != nil && s.outage.wedged
	s.outage, s.canaryPending = &outage{cause, why, wedged}, false
}
