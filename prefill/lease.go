package prefill

import (
	"container/heap"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine/circuit"
	"evenkeel/prefill/cache"
)

// Lease is the charge of one prompt on one candidate, from the moment it was
// chosen until the engine has its KV blocks back:
//
//	Acquire ─▶ probing ─Answered─▶ pooled ─Dispatched─▶ dispatched
//
// from each of which one of three calls, the last on the lease, ends it:
// Release (the KV is free: first decode event, drained, or never written),
// Orphan (nobody will fetch it) and Failed (the probe failed). What is answered
// or orphaned also ends by itself at the engine's hold timeout; the caller's
// last call then changes nothing. A call after the last is a counted bug.
type Lease struct {
	Candidate Candidate     // as it was when it was chosen
	Policy    string        // that chose it
	Wait      time.Duration // in the arrival queue
	HitTokens int           // of the prompt thought to be in the candidate's prefix cache
	Grounds   *Grounds      // what it was chosen on; nil without Config.Explain
	Others    int           // probes of ours the candidate had not answered when this one was charged

	tier     *Tier
	c        *candidate
	number   uint64
	phase    phase
	settled  bool // the caller made its last call
	renewed  bool // by the decode engine that has the request
	holder   *Holder
	canary   bool
	alone    bool // nothing else was on the candidate when it was charged
	model    string
	charge   charge
	expected cache.Expectation // of what it finds and leaves in the prefix cache
	sent     time.Time         // when it was charged
	since    time.Time         // when it got into this phase
	expires  time.Time         // when the engine frees the KV by itself; zero while probing
	place    int               // in the tier's heap of expiries

	before, after *Lease // among the candidate's unanswered probes
}

// defaultHold is how long an engine holds a hand-off whose profile does not
// say: the longest of those we know, so that its KV is never called free early.
const defaultHold = 480 * time.Second

// Usage is what an engine says it did for a probe.
type Usage = cache.Usage

// Answered says that the probe came back with a hand-off. expires is when the
// engine frees the blocks by itself, its whole hold timeout from the response
// headers.
func (l *Lease) Answered(u Usage, expires time.Time) {
	t := l.tier
	t.lock()
	back := !l.c.circuit.In()
	suspected := l.answer(u, expires)
	back = back && l.c.circuit.In()
	t.unlock()
	if suspected != nil {
		t.tellSuspected(l.Candidate.ID, suspected)
	}
	if back { // logged without the lock
		t.cfg.Log.Info("prefiller is back: it answered a probe", zap.String("candidate", l.Candidate.ID))
	}
}

func (l *Lease) answer(u Usage, expires time.Time) *cache.Suspected {
	t := l.tier
	if l.settled || l.phase != probing {
		t.misuses++
		return nil
	}
	if expires.IsZero() {
		expires = t.now.Add(l.hold())
	}
	l.expires = expires
	tokens := l.charge.tokens
	if u.PromptTokens > 0 {
		tokens = int64(u.PromptTokens)
	}
	l.answered(probeAnswered)
	l.c.circuit.Succeed()
	if m := t.models[l.model]; m != nil {
		m.pace.Answered(t.now, float64(t.now.Sub(l.sent))/float64(time.Millisecond))
	}
	t.learn(l, u)
	found := l.expected.Answered(u, l.c.capacityTokens(), l.c.blockTokens(), t.now)
	t.metrics.predicted(found)
	t.move(l, pooled, tokens)
	return found.Suspected
}

// tellSuspected logs a change of what is thought of a capacity.
func (t *Tier) tellSuspected(candidate string, s *cache.Suspected) {
	log := t.cfg.Log.With(zap.String("candidate", candidate), zap.Int64("capacity_tokens", s.CapacityTokens),
		zap.Float64("over_predicted_share", s.Over), zap.Float64("under_predicted_share", s.Under))
	switch s.Suspicion {
	case cache.HoldsLess:
		log.Warn("a prefiller finds less of its prompts in its prefix cache than one of its capacity holds; set kv_tokens_per_rank in its profile to what it has, or see who else uses it")
	case cache.HoldsMore:
		log.Warn("a prefiller finds more of its prompts in its prefix cache than one of its capacity holds; set kv_tokens_per_rank in its profile to what it has")
	default:
		log.Info("a prefiller's prefix cache is as large as its capacity says")
	}
}

// Dispatched says that a decode rank was asked for the KV. It may be called
// again when another rank is asked.
func (l *Lease) Dispatched() {
	t := l.tier
	t.lock()
	defer t.unlock()
	switch {
	case l.settled || l.phase == probing:
		t.misuses++
	case l.phase == pooled:
		t.move(l, dispatched, l.charge.tokens)
	}
}

// Renewed says that the decode engine keeps the KV held for as long as it has the
// request: it is not free by itself before the caller's last call.
func (l *Lease) Renewed() {
	t := l.tier
	t.lock()
	defer t.unlock()
	if l.settled || l.phase != dispatched {
		return
	}
	l.renewed, l.expires = true, t.now.Add(renewedFor)
	heap.Fix(&t.expiries, l.place)
}

// renewedFor is longer than any request runs.
const renewedFor = 10_000 * time.Hour

// Failed says that the probe failed in a way that speaks against the
// candidate. If the request was written and no answer came, the engine may
// have finished it and hold its KV: the prompt then stays charged for hold, 0
// being the profile's timeout. Any answer, a refused connection
// or an unusable hand-off holds nothing: written is false.
func (l *Lease) Failed(written bool, hold time.Duration) {
	t := l.tier
	t.lock()
	out := l.fail(written, hold)
	t.unlock()
	if out > 0 { // logged without the lock
		t.cfg.Log.Warn("prefiller taken out after failures in a row: one probe at a time tries it again until one is answered",
			zap.String("candidate", l.Candidate.ID), zap.Int("failures", circuit.Limit), zap.Duration("first_trial_in", out))
	}
}

// fail books a failure and returns for how long it took the candidate out, 0
// where it did not, or was out already and failed its trial.
func (l *Lease) fail(written bool, hold time.Duration) (out time.Duration) {
	t := l.tier
	if !l.settle() || l.phase == ended {
		return 0
	}
	if l.phase != probing { // it was answered: no verdict on the candidate any more
		t.move(l, orphaned, l.charge.tokens)
		return 0
	}
	if in := l.c.circuit.In(); l.c.circuit.Fail(l.number, t.now) && in {
		out = l.c.circuit.Out()
	}
	if !written {
		l.answered(probeFailed)
		l.expected.Dropped()
		t.move(l, ended, 0)
		return out
	}
	l.answered(probeLost)
	l.expected.Lost(t.now)
	if hold <= 0 {
		hold = l.hold()
	}
	l.expires = t.now.Add(hold)
	t.move(l, orphaned, l.charge.tokens)
	return out
}

// Orphan says that nobody will fetch the KV. It stays charged until the
// engine frees it by itself.
func (l *Lease) Orphan() {
	t := l.tier
	t.lock()
	defer t.unlock()
	if !l.settle() || l.phase == ended {
		return
	}
	if l.phase == probing {
		l.answered(probeLost)
		l.expected.Lost(t.now)
		l.c.circuit.Neutral(l.number)
		l.expires = t.now.Add(l.hold())
	}
	if l.renewed { // until now
		l.renewed, l.expires = false, t.now.Add(l.hold())
	}
	t.move(l, orphaned, l.charge.tokens)
}

// Release says that the prefiller has the KV back: the first decode event
// came, the hand-off was drained, or the probe ended without one, because the
// client left or the engine refused its request.
func (l *Lease) Release() {
	t := l.tier
	t.lock()
	defer t.unlock()
	if !l.settle() || l.phase == ended {
		return
	}
	if l.phase == probing {
		l.answered(probeDropped)
		l.expected.Dropped()
		l.c.circuit.Neutral(l.number)
	}
	t.move(l, ended, 0)
}

// settle admits the caller's last call once.
func (l *Lease) settle() bool {
	if l.settled {
		l.tier.misuses++
		return false
	}
	l.settled = true
	l.unhold()
	return true
}

// answered counts the end of the probe.
func (l *Lease) answered(outcome string) {
	m := l.tier.metrics
	m.attempts.WithLabelValues(outcome).Inc()
	m.probeSeconds.WithLabelValues(l.c.ID, outcome).Observe(l.tier.now.Sub(l.sent).Seconds())
	if l.canary {
		m.canaries.WithLabelValues(l.c.ID, outcome).Inc()
	}
}

func (l *Lease) hold() time.Duration {
	if p := l.Candidate.Profile; p != nil && p.KVHoldTimeout > 0 {
		return p.KVHoldTimeout
	}
	return defaultHold
}

// book charges a new lease.
func (t *Tier) book(l *Lease) {
	if h := l.holder; h != nil {
		h.leases++
		if h.ended {
			t.unheld++
		}
	}
	l.phase = probing
	l.sent, l.since = t.now, t.now
	l.c.account.add(probing, l.charge)
	l.c.noteSend(l)
	t.charged++
	t.updateGate(l.c)
}

// move books a lease into another phase, or out. It is the only place that
// takes anything off an account.
func (t *Tier) move(l *Lease, to phase, tokens int64) {
	c := l.c
	c.account.remove(l.phase, l.charge)
	if l.phase == probing {
		c.noteAnswer(l, t.now)
	} else {
		heap.Remove(&t.expiries, l.place)
	}
	l.phase, l.charge.tokens, l.since = to, tokens, t.now
	if to == ended {
		l.unhold()
		t.released++
		t.forget(c)
	} else {
		c.account.add(to, l.charge)
		heap.Push(&t.expiries, l)
	}
	t.updateGate(c)
}

// expire ends every lease whose engine has freed the KV by itself.
func (t *Tier) expire() {
	for len(t.expiries) > 0 && !t.now.Before(t.expiries[0].expires) {
		t.expired++
		t.move(t.expiries[0], ended, 0)
	}
}

// freeOrphans ends a candidate's orphans from before a moment: its engine
// restarted since, and their KV went with the old process.
func (t *Tier) freeOrphans(c *candidate, before time.Time) {
	var gone []*Lease
	for _, l := range t.expiries {
		if l.c == c && l.phase == orphaned && l.since.Before(before) {
			gone = append(gone, l)
		}
	}
	for _, l := range gone {
		t.move(l, ended, 0)
	}
}

// expiries is a heap of what is answered or orphaned, by the time it ends.
type expiries []*Lease

func (e expiries) Len() int           { return len(e) }
func (e expiries) Less(i, j int) bool { return e[i].expires.Before(e[j].expires) }
func (e expiries) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].place, e[j].place = i, j
}

func (e *expiries) Push(x any) {
	l := x.(*Lease)
	l.place = len(*e)
	*e = append(*e, l)
}

func (e *expiries) Pop() any {
	old := *e
	l := old[len(old)-1]
	old[len(old)-1] = nil
	*e = old[:len(old)-1]
	return l
}
