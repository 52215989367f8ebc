package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// foresee predicts the end of the lease's prefill in two parts. at is when the engine ends the prompt that it computes now, and
// rest is the time after that, with the round trip included: the prefill ends at at+rest, or at now+rest if at has passed. If
// the probe was not sent yet, the prediction is for a probe that is sent now.
func (l *Lease) predictEnd(now time.Time) (at time.Time, rest time.Duration) {
	scheduler, load, ownPrediction := l.scheduler, &l.c.load, l.inFlight.Predicted()
	residual := time.Duration(l.c.residual.Ms(now) * float64(time.Millisecond))
	// took corrects a predicted duration by the recent error of the engine's predictions.
	took := func(predicted time.Duration) time.Duration {
		return max(time.Duration(minBacklogShare*float64(predicted)), predicted+residual)
	}
	at, rest = load.PredictEnd(&l.inFlight, took)
	if l.inFlight.Sent().IsZero() {
		latency, _ := scheduler.latencyFor(l.model, l.c)
		rest += time.Duration(load.OthersBacklog(latency, scheduler.fit.MeanNewTokens(), l.c.Decodes, now) * float64(time.Millisecond))
		if notBefore := now.Add(took(ownPrediction) - rest); notBefore.After(at) {
			at = notBefore // the prefill begins at at+rest-took(ownPrediction), which cannot be before now
		}
	}
	return at, rest + l.c.rtt()
}

// way holds the learned time of callbacks for the lease's profile.
func (l *Lease) callbackLatency() *fit.CallbackLatency { return l.scheduler.fit.CallbackLatencyOf(l.Candidate.Profile.Name) }
