package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// predictEnd predicts the end of the lease's prefill in two parts. currentEnds is when the engine ends the prompt that it computes
// now, and rest is the time after that, with the round trip included. The prefill ends at currentEnds+rest, or at now+rest if
// currentEnds has passed. If the probe was not sent yet, the prediction is for a probe that is sent now.
func (l *Lease) predictEnd(now time.Time) (currentEnds time.Time, rest time.Duration) {
	scheduler, load, ownPrediction := l.scheduler, &l.c.load, l.inFlight.Predicted()
	residual := time.Duration(l.c.residual.Ms(now) * float64(time.Millisecond))
	// corrected adds the recent error of the engine's predictions to a predicted duration. At least minBacklogShare of the duration
	// remains.
	corrected := func(predicted time.Duration) time.Duration {
		return max(time.Duration(minBacklogShare*float64(predicted)), predicted+residual)
	}
	currentEnds, rest = load.PredictEnd(&l.inFlight, corrected)
	if l.inFlight.Sent().IsZero() {
		// The prompts of other proxies and clients that the engine has now come before this probe.
		latency, _ := scheduler.latencyFor(l.model, l.c)
		rest += time.Duration(load.OthersBacklog(latency, scheduler.fit.MeanNewTokens(), l.c.Decodes, now) * float64(time.Millisecond))
		// The prefill begins at currentEnds + rest - corrected(ownPrediction), but not before now: currentEnds is raised if necessary.
		if earliest := now.Add(corrected(ownPrediction) - rest); earliest.After(currentEnds) {
			currentEnds = earliest
		}
	}
	return currentEnds, rest + l.c.rtt()
}

// callbackLatency holds the learned time of callbacks for the lease's profile.
func (l *Lease) callbackLatency() *fit.CallbackLatency {
	return l.scheduler.fit.CallbackLatencyOf(l.Candidate.Profile.Name)
}
