package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// predictEnd predicts the end of the lease's prefill in two parts: it ends at
// currentEnds+afterCurrent, or at now+afterCurrent if currentEnds, when the engine ends its present
// prompt, has passed. The round trip is included. If the probe was not sent yet, the prediction is
// for one that is sent now, behind all prompts that the engine has.
func (l *Lease) predictEnd(now time.Time) (currentEnds time.Time, afterCurrent time.Duration) {
	residual := time.Duration(l.chargedTo.residual.Ms(now) * float64(time.Millisecond))
	// corrected adds the recent error of predictions, which may be negative.
	corrected := func(predicted time.Duration) time.Duration {
		return max(time.Duration(minBacklogShare*float64(predicted)), predicted+residual)
	}
	currentEnds, afterCurrent = l.chargedTo.load.PredictEnd(&l.inFlight, corrected)
	if l.inFlight.Sent().IsZero() { // PredictEnd counts only this proxy's prompts; those of others come before this probe, too
		afterCurrent += l.othersBacklog(now)
		// The prefill does not begin before now.
		promptsBefore := afterCurrent - corrected(l.inFlight.Predicted())
		if earliest := now.Add(-promptsBefore); earliest.After(currentEnds) {
			currentEnds = earliest
		}
	}
	return currentEnds, afterCurrent + l.chargedTo.rtt()
}

func (l *Lease) othersBacklog(now time.Time) time.Duration {
	c, usualTokens := l.chargedTo, l.scheduler.fit.MeanNewTokens()
	latency, _ := l.scheduler.latencyFor(l.model, c)
	return time.Duration(c.load.OthersBacklog(latency, usualTokens, c.Decodes, now) * float64(time.Millisecond))
}

func (l *Lease) callbackLatency() *fit.CallbackLatency {
	return l.scheduler.fit.CallbackLatencyOf(l.Candidate.Profile.Name)
}
