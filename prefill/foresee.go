package prefill

import (
	"time"

	"evenkeel/prefill/fit"
)

// foresee predicts the end of a prefill that is not over. If its probe was not sent yet, it supposes that it is sent
// now. The end is rest after at, or rest after the present once at has passed.
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
			at = waits // the prefill cannot begin before now
		}
	}
	return at, rest + l.c.rtt()
}

// way is what is learned of how the two engines meet in requests of the lease's profile.
func (l *Lease) way() *fit.Way { return l.tier.fit.Way(l.Candidate.Profile.Name) }
