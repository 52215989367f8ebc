// Package ledger accounts for the load of prompts on prefill engines: the charges and their phases,
// the gate that closes when the KV cache is full, and the engine's gauges; an audit checks the
// sums. The package has no clock and no lock: its owner passes the time of each event.
package ledger

import (
	"container/heap"
	"time"

	"evenkeel/prefill/policy"
)

type Ledger struct {
	cfg      Config
	expiries expiries

	// Audit needs these: charged - released must equal the number of charges on all engines, and
	// lostCharges must be 0.
	charged, released, misuses, expired uint64
	lostCharges                         int // still on an engine although their owner has ended
}

type Config struct {
	KVThreshold float64       // share of a KV cache in use, 0 to 1, at which its gate closes
	Interval    time.Duration // between two scrapes
}

// staleAfter is the number of failed scrapes in a row after which an engine's gauges are stale. One
// or two are normal while a busy engine computes a long prompt.
const staleAfter = 3

func New(cfg Config) *Ledger { return &Ledger{cfg: cfg} }

// Configure changes the settings. The caller must then call UpdateGate on every EngineLoad.
func (l *Ledger) Configure(cfg Config) { l.cfg = cfg }

// Audit shows whether every charge was released exactly once.
type Audit struct {
	Drift            int64 // charged less released, plus lost charges; 0 after the caller has subtracted the charges that engines hold
	Misuses, Expired uint64
}

// Audit counts since the start: Misuses are calls on charges that had ended, Expired are charges
// that ended by their engine's timeout.
func (l *Ledger) Audit() Audit {
	return Audit{Drift: int64(l.charged-l.released) + int64(l.lostCharges), Misuses: l.misuses, Expired: l.expired}
}

// NextExpiry is the earliest time at which an engine's own timeout frees the KV of a charge.
func (l *Ledger) NextExpiry() (time.Time, bool) {
	if len(l.expiries) == 0 {
		return time.Time{}, false
	}
	return l.expiries[0].expires, true
}

// Expire ends one charge whose KV the engine has freed by its own timeout; nil: there is none.
func (l *Ledger) Expire(now time.Time) *EngineLoad {
	if len(l.expiries) == 0 || now.Before(l.expiries[0].expires) {
		return nil
	}
	l.expired++
	f := l.expiries[0]
	f.moveTo(Ended, 0, now)
	return f.load
}

// freeOrphans ends the charges of a restarted engine that were orphaned before the cutoff.
func (l *Ledger) freeOrphans(e *EngineLoad, cutoff, now time.Time) {
	var gone []*InFlight // collected first, because moveTo changes the heap
	for _, f := range l.expiries {
		if f.load == e && f.phase == Orphaned && f.since.Before(cutoff) {
			gone = append(gone, f)
		}
	}
	for _, f := range gone {
		f.moveTo(Ended, 0, now)
	}
}

// expiries is a heap of the answered and orphaned charges.
type expiries []*InFlight

func (e expiries) Len() int           { return len(e) }
func (e expiries) Less(i, j int) bool { return e[i].expires.Before(e[j].expires) }
func (e expiries) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].expiriesIndex, e[j].expiriesIndex = i, j
}

func (e *expiries) Push(x any) {
	f := x.(*InFlight)
	f.expiriesIndex = len(*e)
	*e = append(*e, f)
}

func (e *expiries) Pop() any {
	old := *e
	f := old[len(old)-1]
	old[len(old)-1] = nil
	*e = old[:len(old)-1]
	return f
}

// LeaseOwner stands for one request in this proxy, with all its attempts. It must make the last
// call (Release or Orphan) on each of its charges. A charge without that call when the request ends
// is lost, and the audit shows it.
type LeaseOwner struct {
	openCharges int // still without their last call
	ended       bool
}

// OwnerEnded notes that an owner makes no more calls. A lost charge stays on its engine, because
// the engine may still hold the KV.
func (l *Ledger) OwnerEnded(o *LeaseOwner) (lost int) {
	if !o.ended { // a second call counts nothing again
		o.ended = true
		l.lostCharges += o.openCharges
	}
	return o.openCharges
}

// DetachOwner makes other code responsible for the last call on the charge (Release or Orphan).
func (f *InFlight) DetachOwner() {
	o := f.owner
	if o == nil {
		return
	}
	f.owner = nil
	o.openCharges--
	if o.ended {
		f.load.ledger.lostCharges-- // it counted as lost; now it ends, or other code will end it
	}
}

// Phase is a stage in the life of a prompt's KV blocks on the prefill engine.
type Phase uint8

// The phases stand in their order. A charge can become Orphaned in each of the phases before.
const (
	Probing    Phase = iota // the probe is not answered yet
	Pooled                  // the hand-off waits for a decode rank
	Dispatched              // sent to a decode rank, which has sent no data event yet
	Orphaned                // no decode engine will fetch the KV; the prefill engine frees it at its timeout
	Phases
	Ended = Phases // no sum counts the charge
)

func (p Phase) String() string {
	return [...]string{"probing", "pooled", "dispatched", "orphan", "ended"}[p]
}

// Weight is the load of one prompt.
type Weight struct {
	Tokens int64 // of the prompt's KV
	Work   int64 // in vllm-ascend's proxy, in millionths

	// The load of the prefill itself counts only while the charge is Probing.
	NewTokens   int64 // predicted not to be cached
	PredictedUs int64 // duration in microseconds
	Attention   int64 // twice policy.Attention, which may end in .5
}

// WeightOf computes the weight of a prompt from its indicators on a candidate.
func WeightOf(v *policy.Engine, promptBytes int) Weight {
	latency := policy.Latency{T0Ms: v.T0Ms, TPMs: v.TPMs, Beta2: v.Beta2}
	hitTokens, newTokens := int64(v.HitTokens), int64(v.NewTokens)
	return Weight{
		Tokens:      int64(v.PromptTokens),
		Work:        ascendWork(promptBytes),
		NewTokens:   newTokens,
		PredictedUs: int64(1000 * latency.Ms(float64(newTokens), float64(hitTokens))),
		Attention:   newTokens * (2*hitTokens + newTokens),
	}
}

// ascendWork is the weight of a prompt in vllm-ascend's proxy, in millionths: 120.0745 per request
// plus 0.0345 per four bytes.
func ascendWork(promptBytes int) int64 { return 8625*int64(promptBytes) + 120_074_500 }

// InFlight is one prompt on one engine, from the choice of the candidate until its KV blocks are
// freed:
//
//	InFlight ─▶ Probing ─Answer─▶ Pooled ─Dispatch─▶ Dispatched
//
// Reserve makes a charge that is Probing, and MarkSent sends its probe later. In each phase Release
// ends the charge, and Orphan leaves it to the engine's own timeout. The owner calls ClaimEnd
// before this last call. Any later call is a bug, which counts as a misuse.
type InFlight struct {
	Weight        Weight
	load          *EngineLoad
	phase         Phase
	endClaimed    bool // the next call is the last
	owner         *LeaseOwner
	sent          time.Time // zero: not yet
	since         time.Time // of the present phase
	expires       time.Time // when the engine frees the KV by itself; zero while probing
	expiriesIndex int
	modelCounts   *ModelCounts // include the charge until it is answered; nil: not counted
}

// ModelCounts counts the unanswered charges of one model on an engine that several models share.
type ModelCounts struct{ Probing, Unsent int }

func (f *InFlight) CountByModel(counts *ModelCounts) {
	f.modelCounts = counts
	counts.Probing++
	if f.sent.IsZero() {
		counts.Unsent++
	}
}

// MarkSent notes that the probe is sent now. A probe that was sent, answered or ended before counts
// as a misuse.
func (f *InFlight) MarkSent(now time.Time) {
	if f.endClaimed || f.phase != Probing || !f.sent.IsZero() {
		f.load.ledger.misuses++
		return
	}
	e := f.load
	f.sent = now
	if f.modelCounts != nil {
		f.modelCounts.Unsent--
	}
	e.unanswered = append(e.unanswered, f)
	e.probesSent++
	e.waitingNow++ // the new one counts as waiting until the next scrape
}

func (f *InFlight) Phase() Phase { return f.phase }

// Predicted is the duration of the prefill without any wait, as predicted at the charge.
func (f *InFlight) Predicted() time.Duration {
	return time.Duration(f.Weight.PredictedUs) * time.Microsecond
}

// Sent is zero until the probe is sent.
func (f *InFlight) Sent() time.Time { return f.sent }

// CheckAnswerable counts a misuse if the probe was not sent, or has an answer.
func (f *InFlight) CheckAnswerable() bool {
	answerable := !f.endClaimed && f.phase == Probing && !f.sent.IsZero()
	if !answerable {
		f.load.ledger.misuses++
	}
	return answerable
}

// Answer books the hand-off: the size of its KV in tokens, and when the engine frees this KV by
// itself.
func (f *InFlight) Answer(tokens int64, expires, now time.Time) {
	f.expires = expires
	f.moveTo(Pooled, tokens, now)
}

// Dispatch books that the request was sent to a decode rank. A further call, for another rank,
// changes nothing.
func (f *InFlight) Dispatch(now time.Time) {
	switch {
	case f.endClaimed || f.phase == Probing:
		f.load.ledger.misuses++
	case f.phase == Pooled:
		f.moveTo(Dispatched, f.Weight.Tokens, now)
	}
}

// ClaimEnd must be called before the last call on a charge (Release or Orphan), so that only one
// caller ends it. It reports whether the caller may make that call, and detaches the owner.
func (f *InFlight) ClaimEnd() bool {
	if f.endClaimed {
		f.load.ledger.misuses++
		return false
	}
	f.endClaimed = true
	f.DetachOwner()
	return f.phase != Ended // Ended: the charge has expired
}

// Orphan books that no decode engine will fetch the KV, which the engine frees at its own timeout.
// For an unanswered probe this time is not known, and the KV counts as held for the duration hold.
func (f *InFlight) Orphan(hold time.Duration, now time.Time) {
	if f.phase == Probing {
		f.expires = now.Add(hold)
	}
	f.moveTo(Orphaned, f.Weight.Tokens, now)
}

// Release books that the prefill engine has freed the KV.
func (f *InFlight) Release(now time.Time) { f.moveTo(Ended, 0, now) }

func (f *InFlight) leaveModelCounts() {
	if f.modelCounts == nil {
		return
	}
	f.modelCounts.Probing--
	if f.sent.IsZero() {
		f.modelCounts.Unsent--
	}
	f.modelCounts = nil
}

// moveTo is the only function that reduces the sums of an EngineLoad. tokens is the weight in the
// new phase.
func (f *InFlight) moveTo(to Phase, tokens int64, now time.Time) {
	e := f.load
	e.book(f.phase, f.Weight, -1)
	if to == Ended {
		e.freedPace.add(f.Weight.Tokens, now)
	}
	if f.phase == Probing {
		answered := to == Pooled // else the probe ended without a hand-off, or its outcome is not known
		e.probeEnded(f, answered, now)
		f.leaveModelCounts()
	} else { // only an unanswered probe has no expiry
		heap.Remove(&e.ledger.expiries, f.expiriesIndex)
	}
	f.phase, f.Weight.Tokens, f.since = to, tokens, now
	if to == Ended {
		f.DetachOwner()
		e.ledger.released++
	} else {
		e.book(to, f.Weight, 1)
		heap.Push(&e.ledger.expiries, f)
	}
	e.UpdateGate(now)
}
