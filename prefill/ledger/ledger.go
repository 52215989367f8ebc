// Package ledger accounts for the load of prompts on prefill engines. It holds the load of each candidate, the charges on
// it and their phases, the gate that closes when the KV cache is full, and the engine's gauges; an audit checks the
// sums. The package has no clock and no lock: its owner passes the time of each event.
package ledger

import (
	"container/heap"
	"time"

	"evenkeel/prefill/policy"
)

// Ledger holds the state that all EngineLoads share.
type Ledger struct {
	cfg      Config
	expiries expiries

	// The counts of Audit: charged - released must equal the number of charges on all engines, and lostCharges must be 0.
	charged, released, misuses, expired uint64
	lostCharges                         int // charges that are still on an engine although their owner has ended
}

// Config holds the settings of all EngineLoads.
type Config struct {
	KVThreshold float64       // share of a KV cache in use, 0 to 1, at which its gate closes
	Interval    time.Duration // time between two scrapes
}

// staleAfter is the number of failed scrapes in a row after which an engine's gauges are stale. One or two failures are
// normal while a busy engine computes a long prompt.
const staleAfter = 3

// New returns a ledger without charges.
func New(cfg Config) *Ledger { return &Ledger{cfg: cfg} }

// Configure changes the settings. The caller must then call UpdateGate on every EngineLoad.
func (l *Ledger) Configure(cfg Config) { l.cfg = cfg }

// Audit shows whether every charge was released exactly once.
type Audit struct {
	Drift            int64 // charged less released, plus lost charges; must be 0 after the caller has subtracted the charges that engines hold
	Misuses, Expired uint64
}

// Audit returns the counts since the start. Misuses counts calls on charges that had ended, and Expired the charges that ended by
// their engine's timeout.
func (l *Ledger) Audit() Audit {
	return Audit{Drift: int64(l.charged-l.released) + int64(l.lostCharges), Misuses: l.misuses, Expired: l.expired}
}

// NextExpiry is the earliest time at which an engine's own timeout frees the KV of a charge; false: no charge has one.
func (l *Ledger) NextExpiry() (time.Time, bool) {
	if len(l.expiries) == 0 {
		return time.Time{}, false
	}
	return l.expiries[0].expires, true
}

// Expire ends one charge whose KV the engine has freed by its own timeout, and returns the EngineLoad of the charge; nil: no
// charge has expired.
func (l *Ledger) Expire(now time.Time) *EngineLoad {
	if len(l.expiries) == 0 || now.Before(l.expiries[0].expires) { // the first charge of the heap expires first
		return nil
	}
	l.expired++
	f := l.expiries[0]
	f.moveTo(Ended, 0, now)
	return f.load
}

// freeOrphans ends the charges of an engine that were orphaned before the cutoff. The engine has restarted after the cutoff, so their KV is
// gone with its old process.
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

// expiries is a heap of the answered and orphaned charges, by the time at which they expire.
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

// LeaseOwner stands for one request in this proxy, with all its attempts. The request must make the last call (Release or Orphan) on every
// charge that names its LeaseOwner. A charge that has no last call when the request ends here is lost, and the audit shows it.
type LeaseOwner struct {
	openCharges int // charges on which the owner must still make the last call
	ended       bool
}

// OwnerEnded notes that an owner makes no more calls, and returns the number of its lost charges. A lost charge stays on its
// engine, because the engine may still hold the KV, and counts as drift in the audit.
func (l *Ledger) OwnerEnded(o *LeaseOwner) (lost int) {
	if !o.ended { // a second call counts nothing again
		o.ended = true
		l.lostCharges += o.openCharges
	}
	return o.openCharges
}

// DetachOwner separates the charge from its owner: from now on other code is responsible for the last call on the charge (Release or
// Orphan). If the owner has ended already, the charge counted as lost, and does so no more. Without an owner, DetachOwner does nothing.
func (f *InFlight) DetachOwner() {
	o := f.owner
	if o == nil { // it was detached before, or never had an owner
		return
	}
	f.owner = nil
	o.openCharges--
	if o.ended {
		f.load.ledger.lostCharges-- // the charge counted as lost; now it ends, or other code will end it
	}
}

// Phase is a stage in the life of a prompt's KV blocks on the prefill engine.
type Phase uint8

// The phases of a prompt's KV, in order. A charge can become Orphaned in each of the phases before.
const (
	Probing    Phase    = iota // the probe is not answered yet
	Pooled                     // the probe was answered, and the hand-off waits for a decode rank
	Dispatched                 // the request was sent to a decode rank, which has sent no data event yet
	Orphaned                   // no decode engine will fetch the KV; the prefill engine frees it at its timeout
	Phases                     // the number of phases above
	Ended      = Phases        // the charge has ended: no sum counts it
)

func (p Phase) String() string {
	return [...]string{"probing", "pooled", "dispatched", "orphan", "ended"}[p]
}

// Weight is the load of one prompt.
type Weight struct {
	Tokens int64 // length of the prompt's KV in tokens
	Work   int64 // weight of the prompt in vllm-ascend's proxy, in millionths

	// The load of the prefill itself; an EngineLoad counts it only while the charge is Probing.
	NewTokens   int64 // tokens that are predicted not to be cached
	PredictedUs int64 // predicted duration in microseconds
	Attention   int64 // twice policy.Attention: an integer, although policy.Attention may end in .5
}

// WeightOf computes the weight of a prompt from its indicators on a candidate. Work is the weight that vllm-ascend's proxy gives the
// prompt, for the policies that weigh as that proxy does. All parts are integers, so that adding and subtracting them leaves no rounding
// error.
func WeightOf(v *policy.Engine, promptBytes int) Weight {
	latency := policy.Latency{T0Ms: v.T0Ms, TPMs: v.TPMs, Beta2: v.Beta2}
	hitTokens, newTokens := int64(v.HitTokens), int64(v.NewTokens)
	return Weight{
		Tokens:      int64(v.PromptTokens),
		Work:        ascendWork(promptBytes),
		NewTokens:   newTokens,
		PredictedUs: int64(1000 * latency.Ms(float64(newTokens), float64(hitTokens))),
		Attention:   newTokens * (2*hitTokens + newTokens), // twice policy.Attention, which may end in .5
	}
}

// ascendWork is the weight of a prompt in vllm-ascend's proxy, in millionths: 120.0745 per request plus 0.0345 per four
// bytes.
func ascendWork(promptBytes int) int64 { return 8625*int64(promptBytes) + 120_074_500 }

// InFlight is one prompt on one engine, from the choice of the candidate until the engine has freed the prompt's KV blocks:
//
//	InFlight ─▶ Probing ─Answer─▶ Pooled ─Dispatch─▶ Dispatched
//
// EngineLoad.Reserve also makes a charge that is Probing, but its probe is sent later, by MarkSent. In each phase Release ends the
// charge, and Orphan leaves the charge to the engine's own timeout. The owner calls ClaimEnd before this last call. Any later call
// is a bug, which the ledger counts as a misuse.
type InFlight struct {
	Weight        Weight
	load          *EngineLoad
	phase         Phase
	endClaimed    bool // ClaimEnd was called: the next call is the last
	owner         *LeaseOwner
	sent          time.Time    // when the probe was sent; zero: not yet
	since         time.Time    // when the present phase began
	expires       time.Time    // when the engine frees the KV by itself; zero while probing
	expiriesIndex int          // index in the ledger's heap of expiries
	modelCounts   *ModelCounts // counts of the charge's model, which include the charge until it is answered; nil: not counted
}

// ModelCounts counts the unanswered charges of one model on an engine that several models share.
type ModelCounts struct{ Probing, Unsent int }

// CountByModel adds a new charge to the counts of its model.
func (f *InFlight) CountByModel(counts *ModelCounts) {
	f.modelCounts = counts
	counts.Probing++
	if f.sent.IsZero() {
		counts.Unsent++
	}
}

// MarkSent notes that the probe is sent now. The call counts as a misuse if the probe was sent or answered before, or if its end was
// claimed.
func (f *InFlight) MarkSent(now time.Time) {
	if f.endClaimed || f.phase != Probing || !f.sent.IsZero() {
		f.load.ledger.misuses++
		return
	}
	e := f.load
	f.sent = now
	if f.modelCounts != nil { // the charge is counted by its model, too
		f.modelCounts.Unsent--
	}
	e.unanswered = append(e.unanswered, f)
	e.probesSent++
	e.waitingNow++ // it counts the waiting requests of all clients; the new one counts as waiting until the next scrape
}

// Phase is the present phase of the prompt's KV; Ended if the charge is over.
func (f *InFlight) Phase() Phase { return f.phase }

// Predicted is the duration of the prefill without any wait, as predicted when the prompt was charged.
func (f *InFlight) Predicted() time.Duration {
	return time.Duration(f.Weight.PredictedUs) * time.Microsecond
}

// Sent is when the probe was sent; zero: not yet.
func (f *InFlight) Sent() time.Time { return f.sent }

// CheckAnswerable reports whether the probe was sent and not answered yet; if not, it counts a misuse.
func (f *InFlight) CheckAnswerable() bool {
	answerable := !f.endClaimed && f.phase == Probing && !f.sent.IsZero()
	if !answerable {
		f.load.ledger.misuses++
	}
	return answerable
}

// Answer books that the probe was answered with a hand-off. tokens is the size of the hand-off's KV in tokens, and expires is when
// the engine frees this KV by itself.
func (f *InFlight) Answer(tokens int64, expires, now time.Time) {
	f.expires = expires
	f.moveTo(Pooled, tokens, now)
}

// Dispatch books that the request was sent to a decode rank, which fetches the KV. A further call, for another rank, changes
// nothing.
func (f *InFlight) Dispatch(now time.Time) {
	switch {
	case f.endClaimed || f.phase == Probing: // the charge is over, or there is no hand-off yet
		f.load.ledger.misuses++
	case f.phase == Pooled:
		f.moveTo(Dispatched, f.Weight.Tokens, now)
	}
}

// ClaimEnd must be called before the last call on a charge (Release or Orphan), so that only one caller ends it. It also detaches the
// owner. It reports whether the caller may make the last call. It may not if the charge has expired, or if ClaimEnd was called before,
// which counts as a misuse.
func (f *InFlight) ClaimEnd() bool {
	if f.endClaimed {
		f.load.ledger.misuses++
		return false
	}
	f.endClaimed = true
	f.DetachOwner()
	return f.phase != Ended // Ended: the charge has expired
}

// Orphan books that no decode engine will fetch the KV, so that the engine frees it by its own timeout. For an answered probe this is at
// the time expires that was passed to Answer. If the probe has no answer, that time is not known, and the KV counts as held for the duration
// hold from now on.
func (f *InFlight) Orphan(hold time.Duration, now time.Time) {
	if f.phase == Probing {
		f.expires = now.Add(hold)
	}
	f.moveTo(Orphaned, f.Weight.Tokens, now)
}

// Release books that the prefill engine has freed the KV.
func (f *InFlight) Release(now time.Time) { f.moveTo(Ended, 0, now) }

// leaveModelCounts removes the charge from the counts of its model, if it is counted there.
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

// moveTo moves a charge to another phase, in which it weighs the given number of tokens. The phases follow each other: Probing (the probe
// has no answer yet), Pooled, Dispatched, Ended; a charge becomes Orphaned if no decode engine will fetch its KV. Ended removes the charge
// from its EngineLoad. No other function reduces the sums of an EngineLoad. As they change, the KV gate of the engine may open or close.
func (f *InFlight) moveTo(to Phase, tokens int64, now time.Time) {
	e := f.load
	e.book(f.phase, f.Weight, -1)
	if to == Ended { // the engine has freed the prompt's KV
		e.freedPace.add(f.Weight.Tokens, now) // for the prediction of when further KV is freed
	}
	if f.phase == Probing {
		answered := to == Pooled // any other phase: the probe ended without a hand-off, or its outcome is not known
		e.probeEnded(f, answered, now)
		f.leaveModelCounts() // they count only charges without an answer
	} else { // only an unanswered probe has no time at which it expires
		heap.Remove(&e.ledger.expiries, f.expiriesIndex)
	}
	f.phase, f.Weight.Tokens, f.since = to, tokens, now
	if to == Ended {
		f.DetachOwner() // the charge's LeaseOwner, the request that had to end it, has one charge less to end
		e.ledger.released++
	} else {
		e.book(to, f.Weight, 1)
		heap.Push(&e.ledger.expiries, f)
	}
	e.UpdateGate(now)
}
