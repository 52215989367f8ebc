package prefill

import (
	"context"
	"math"
	"slices"
	"time"

	"evenkeel/prefill/ledger"
)

// CalledBack records the time from the choice of the decode rank until the callback of its engine.
func (l *Lease) CalledBack(took time.Duration) {
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	l.callbackLatency().Add(took)
}

// AcquireAnother waits for a lease of a candidate that was not tried yet, after l has ended because
// its engine ran nothing of the request. The caller makes all further calls on the new lease.
func (l *Lease) AcquireAnother(ctx context.Context, tried []string) (*Lease, error) {
	r := *l.request
	r.Exclude = tried
	return l.scheduler.Acquire(ctx, r)
}

// MoveIfSooner moves a lease whose probe was not sent yet to the candidate that is predicted to end
// the prefill first, if it ends sooner by at least leastGain and its instance is not in avoid. With
// a negative leastGain it may end later by as much. The caller makes all further calls on the new
// lease; nil: nothing has changed.
func (l *Lease) MoveIfSooner(leastGain time.Duration, avoid []string) *Lease {
	s := l.scheduler
	s.lock()
	defer s.unlock()
	unsent := l.inFlight.Phase() == ledger.Probing && l.inFlight.Sent().IsZero()
	if !unsent || l.request == nil { // the engine may have begun, or the lease may not be replaced
		return nil
	}
	if l.predictedMs == 0 {
		return nil
	}
	next := s.choose.makeEarlierLease(l, l.request, leastGain, avoid)
	if next == nil {
		return nil
	}
	next.Policy, next.Wait, next.Trace = l.Policy, l.Wait, l.Trace
	// The old lease ends without a result: its engine ran nothing, and did not fail.
	l.inFlight.ClaimEnd()
	l.predictedHit.NotRun()
	l.chargedTo.circuit.Neutral(l.number)
	if l.chargedTo.trialLease == l.number { // the next prompt is the trial instead
		s.setTrial(l.chargedTo.Instance, s.now)
	}
	l.endCharge()
	return next
}

// makeEarlierLease does the work of MoveIfSooner; nil: no candidate that can take over gains
// enough, or the ends cannot be predicted.
func (d *chooser) makeEarlierLease(l *Lease, r *Request, leastGain time.Duration, avoid []string) *Lease {
	m := d.models[l.model]
	if m == nil {
		return nil
	}
	eligible, circuitsIgnored := d.filterCircuit(r, m.candidates)
	if circuitsIgnored { // only engines that failed are left
		return nil
	}
	eligible = slices.DeleteFunc(d.filterGate(eligible), func(c *candidate) bool {
		return slices.Contains(avoid, c.Instance) || !d.canTakeOver(c, l, r)
	})
	if len(eligible) == 0 {
		return nil
	}
	// Without learned times, the indicators would only be a guess.
	if timesKnown := d.fillView(m, r, eligible); !timesKnown {
		return nil
	}
	best, bestMs := 0, math.Inf(1)
	for i := range d.view {
		latency, _ := d.latencyFor(m.name, eligible[i])
		if endMs := prefillEndMs(&d.view[i], latency); endMs < bestMs {
			best, bestMs = i, endMs
		}
	}
	leastGainMs := float64(leastGain) / float64(time.Millisecond)
	if bestMs+leastGainMs > d.predictedEndMs(l) {
		return nil
	}
	// The policy is a placeholder: MoveIfSooner replaces its name.
	return d.makeLease(eligible[best], d.steering.Default(), r, &d.view[best], d.now)
}

// canTakeOver reports whether a candidate can start the request of lease l now, and reaches its
// decode rank.
func (d *chooser) canTakeOver(c *candidate, l *Lease, r *Request) bool {
	if c == l.chargedTo || !c.reachesRankOf(&l.Candidate) || !d.canStart(r, c) {
		return false
	}
	predictable := !c.load.Stale() && !c.load.Stalled(d.now) // otherwise the end would be a guess
	return predictable && !c.atProbeLimit()
}

// predictedEndMs is the predicted time until a lease's prefill ends if its probe is sent now;
// infinite if its candidate takes no probes, or seems to hang.
func (d *chooser) predictedEndMs(l *Lease) float64 {
	c := l.chargedTo
	if !c.Live || !c.configured || !c.takesPrompts(d.now) || c.load.Stalled(d.now) {
		return math.Inf(1)
	}
	currentEnds, afterCurrent := l.predictEnd(d.now)
	untilCurrentEnds := max(0, currentEnds.Sub(d.now)) // 0: overdue
	return float64(afterCurrent+untilCurrentEnds) / float64(time.Millisecond)
}
