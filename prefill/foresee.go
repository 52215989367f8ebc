package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// foresee predicts the end of the lease's prefill, which is not over. If the probe was not sent yet, it supposes that
// the probe is sent now. at is when the engine is predicted to end the prompt that it computes now, and rest is what
// comes after that, the round trip included. So the prefill ends rest after at, or rest after now if at has passed.
func (l *Lease) foresee(now time.Time) (at time.Time, rest time.Duration) {
	tier, a, ownPrediction := l.tier, &l.c.account, l.charge.Predicted()
	residual := time.Duration(l.c.residual.Ms(now) * float64(time.Millisecond))
	// took is a predicted time, corrected by how much longer the engine's prefills lately took than predicted.
	took := func(predicted time.Duration) time.Duration {
		return max(time.Duration(leastOfBacklog*float64(predicted)), predicted+residual)
	}
	at, rest = a.Foresee(&l.charge, took)
	if l.charge.Sent().IsZero() {
		line, _ := tier.line(l.model, l.c)
		rest += time.Duration(a.OthersBacklog(line, tier.fit.Usual(), l.c.Decodes, now) * float64(time.Millisecond))
		if notBefore := now.Add(took(ownPrediction) - rest); notBefore.After(at) {
			at = notBefore // the prefill cannot begin before now
		}
	}
	return at, rest + l.c.rtt()
}

// way is what is learned of how the two engines meet in requests of the lease's profile.
func (l *Lease) way() *fit.Way { return l.tier.fit.Way(l.Candidate.Profile.Name) }
