package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// predictEnd predicts the end of the lease's prefill in two parts. currentEnds is when the engine ends the prompt that it computes now, and
// afterCurrent is the time from then until the lease's prefill ends, with the round trip included. The prefill ends at
// currentEnds+afterCurrent, or at now+afterCurrent if currentEnds has passed. If the probe was not sent yet, the prediction is for a probe
// that is sent now, behind all prompts that the engine has. currentEnds is then later if the prefill would otherwise begin before now.
func (l *Lease) predictEnd(now time.Time) (currentEnds time.Time, afterCurrent time.Duration) {
	residual := time.Duration(l.chargedTo.residual.Ms(now) * float64(time.Millisecond))
	// corrected adds the recent error of the engine's predictions to a predicted duration. The error may be negative, but at least
	// minBacklogShare of the duration remains.
	corrected := func(predicted time.Duration) time.Duration {
		return max(time.Duration(minBacklogShare*float64(predicted)), predicted+residual)
	}
	currentEnds, afterCurrent = l.chargedTo.load.PredictEnd(&l.inFlight, corrected)
	if l.inFlight.Sent().IsZero() { // PredictEnd counts only this proxy's prompts; those of others come before this probe, too
		afterCurrent += l.othersBacklog(now)
		// The lease's own prefill begins when the prompts before it are done, and not before now. If currentEnds is zero, because
		// the engine computes no prompt, it begins now.
		promptsBefore := afterCurrent - corrected(l.inFlight.Predicted())
		if earliest := now.Add(-promptsBefore); earliest.After(currentEnds) {
			currentEnds = earliest
		}
	}
	return currentEnds, afterCurrent + l.chargedTo.rtt()
}

// othersBacklog predicts how long the engine takes for the prompts of other proxies and clients that it has now.
func (l *Lease) othersBacklog(now time.Time) time.Duration {
	c, usualTokens := l.chargedTo, l.scheduler.fit.MeanNewTokens()
	latency, _ := l.scheduler.latencyFor(l.model, c)
	return time.Duration(c.load.OthersBacklog(latency, usualTokens, c.Decodes, now) * float64(time.Millisecond))
}

// callbackLatency holds the learned time of callbacks for the lease's profile.
func (l *Lease) callbackLatency() *fit.CallbackLatency {
	return l.scheduler.fit.CallbackLatencyOf(l.Candidate.Profile.Name)
}
