package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// predictEnd predicts the end of the lease's prefill in two parts. currentEnds is when the engine ends the prompt that it computes
// now, and rest is the time after that, with the round trip included. The prefill ends at currentEnds+rest, or at now+rest if
// currentEnds has passed. If the probe was not sent yet, the prediction is for a probe that is sent now: behind all prompts that the engine
// has, and not begun before now.
func (l *Lease) predictEnd(now time.Time) (currentEnds time.Time, rest time.Duration) {
	scheduler, load, ownPrediction := l.scheduler, &l.chargedTo.load, l.inFlight.Predicted()
	residual := time.Duration(l.chargedTo.residual.Ms(now) * float64(time.Millisecond))
	// corrected adds the recent error of the engine's predictions to a predicted duration. At least minBacklogShare of the duration
	// remains.
	corrected := func(predicted time.Duration) time.Duration {
		return max(time.Duration(minBacklogShare*float64(predicted)), predicted+residual)
	}
	currentEnds, rest = load.PredictEnd(&l.inFlight, corrected)
	if l.inFlight.Sent().IsZero() {
		// The prompts of other proxies and clients that the engine has now come before this probe.
		latency, _ := scheduler.latencyFor(l.model, l.chargedTo)
		rest += time.Duration(load.OthersBacklog(latency, scheduler.fit.MeanNewTokens(), l.chargedTo.Decodes, now) * float64(time.Millisecond))
		// rest ends with this prefill itself, which therefore begins at currentEnds + restBefore. As it cannot begin before now,
		// currentEnds is raised if necessary, also if it is zero because the engine computes no prompt.
		restBefore := rest - corrected(ownPrediction)
		if earliest := now.Add(-restBefore); earliest.After(currentEnds) {
			currentEnds = earliest
		}
	}
	return currentEnds, rest + l.chargedTo.rtt()
}

// callbackLatency holds the learned time of callbacks for the lease's profile.
func (l *Lease) callbackLatency() *fit.CallbackLatency {
	return l.scheduler.fit.CallbackLatencyOf(l.Candidate.Profile.Name)
}
