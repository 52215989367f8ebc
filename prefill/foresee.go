package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// foresee is how the end of a prefill that is not over is predicted to come about, if it is sent now: rest after at, or
// after the present once at is over.
func (l *Lease) foresee(now time.Time) (at time.Time, rest time.Duration) {
	t, a, own := l.tier, &l.c.account, l.charge.Predicted()
	late := time.Duration(l.c.residual.Ms(now) * float64(time.Millisecond))
	took := func(predicted time.Duration) time.Duration {
		return max(time.Duration(leastOfBacklog*float64(predicted)), predicted+late)
	}
	at, rest = a.Foresee(&l.charge, took)
	if l.charge.Sent().IsZero() {
		line, _ := t.line(l.model, l.c)
		rest += time.Duration(a.OthersBacklog(line, t.fit.Usual(), l.c.Decodes, now) * float64(time.Millisecond))
		if waits := now.Add(took(own) - rest); waits.After(at) {
			at = waits // the engine has nothing to do until then
		}
	}
	return at, rest + l.c.rtt()
}

// way is what is learned of the profile.
func (l *Lease) way() *fit.Way { return l.tier.fit.Way(l.Candidate.Profile.Name) }
