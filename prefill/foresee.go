package prefill

import (
	"slices"
	"time"

	"evenkeel/prefill/fit"
	"evenkeel/prefill/ledger"
)

// foresee tells those that follow requests of a candidate what has become of their prediction. Those whose prefill is
// over are told so, once.
func (s *state) foresee(c *candidate) {
	c.followed = slices.DeleteFunc(c.followed, func(l *Lease) bool {
		switch l.charge.Phase() {
		case ledger.Probing:
			l.follower.tell(l.foresee(s.now, l.follower.callback))
			return false
		case ledger.Pooled:
			l.follower.tell(s.now.Add(l.way().Transfer(int(l.charge.Weight.Tokens))), 0)
		}
		return true
	})
}

// foresee is when the first event is predicted of a request whose prefill is not over.
func (l *Lease) foresee(now, callback time.Time) (at time.Time, rest time.Duration) {
	t, a, own := l.tier, &l.c.account, l.charge.Predicted()
	late := time.Duration(l.c.residual.Ms(now) * float64(time.Millisecond))
	took := func(predicted time.Duration) time.Duration {
		return max(time.Duration(leastOfBacklog*float64(predicted)), predicted+late)
	}
	at, rest = a.Foresee(&l.charge, took)
	if l.charge.Sent().IsZero() {
		line, _ := t.line(l.model, l.c)
		rest += time.Duration(a.OthersBacklog(line, t.fit.Usual(), l.c.Decodes, now) * float64(time.Millisecond))
		if waits := callback.Add(took(own) - rest); waits.After(at) {
			at = waits // the engine has nothing to do until then
		}
	}
	rest += l.c.rtt() + l.way().Transfer(int(l.charge.Weight.Tokens))
	return at, rest
}

// Foresee is in how long the request's first event is predicted if its decode leg is sent now; false: no law is known
// yet.
func (l *Lease) Foresee() (in time.Duration, known bool) {
	t := l.tier
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock()
	at, rest := l.foresee(now, now.Add(l.way().Callback()))
	return max(0, at.Sub(now)) + rest, l.predicted > 0
}

// way is what is learned of the profile.
func (l *Lease) way() *fit.Way { return l.tier.fit.Way(l.Candidate.Profile.Name) }
