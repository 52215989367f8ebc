// Package ledger accounts for the load of prompts on prefill engines. It holds an account per candidate, the charges on
// it and their phases, the gate that closes when the KV cache is full, and the engine's gauges; an audit checks the
// sums. The package has no clock and no lock: its owner passes the time of each event.
package ledger

import (
	"container/heap"
	"time"

	"evenkeel/prefill/policy"
)

// Ledger holds the state that all accounts share.
type Ledger struct {
	cfg      Config
	expiries expiries

	// The counts of Audit: charged - released must equal the number of charges on all accounts, and unheld must be 0.
	charged, released, misuses, expired uint64
	unheld                              int // lost charges: they are still on an account, but their holder has ended
}

// Config holds the settings of all accounts.
type Config struct {
	KVThreshold float64       // share of a KV cache in use, 0 to 1, at which its gate closes
	Interval    time.Duration // between two scrapes
}

// staleAfter is the number of failed scrapes in a row after which an engine's gauges are stale. One or two failures are
// normal while a busy engine computes a long prompt.
const staleAfter = 3

// New returns a ledger without accounts.
func New(cfg Config) *Ledger { return &Ledger{cfg: cfg} }

// Configure changes the settings. The caller must then call UpdateGate on every account.
func (l *Ledger) Configure(cfg Config) { l.cfg = cfg }

// Audit shows whether every charge was released exactly once.
type Audit struct {
	Drift            int64 // charged less released, plus lost charges; the caller subtracts the charges that accounts hold
	Misuses, Expired uint64
}

// Audit returns the counts since the start.
func (l *Ledger) Audit() Audit {
	return Audit{Drift: int64(l.charged-l.released) + int64(l.unheld), Misuses: l.misuses, Expired: l.expired}
}

// NextExpiry is the earliest time at which an engine's own timeout frees the KV of a charge; false: no charge has one.
func (l *Ledger) NextExpiry() (time.Time, bool) {
	if len(l.expiries) == 0 {
		return time.Time{}, false
	}
	return l.expiries[0].expires, true
}

// Expire ends one charge whose KV the engine has freed by its own timeout, and returns the charge's account; nil: no
// charge has expired.
func (l *Ledger) Expire(now time.Time) *EngineLoad {
	if len(l.expiries) == 0 || now.Before(l.expiries[0].expires) {
		return nil
	}
	l.expired++
	c := l.expiries[0]
	c.move(Ended, 0, now)
	return c.account
}

// freeOrphans ends the orphaned charges of an account that are older than before. The engine restarted after before, so
// their KV is gone with its old process.
func (l *Ledger) freeOrphans(a *EngineLoad, before, now time.Time) {
	var gone []*InFlight
	for _, c := range l.expiries {
		if c.account == a && c.phase == Orphaned && c.since.Before(before) {
			gone = append(gone, c)
		}
	}
	for _, c := range gone {
		c.move(Ended, 0, now)
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
	c := x.(*InFlight)
	c.expiriesIndex = len(*e)
	*e = append(*e, c)
}

func (e *expiries) Pop() any {
	old := *e
	c := old[len(old)-1]
	old[len(old)-1] = nil
	*e = old[:len(old)-1]
	return c
}

// LeaseOwner stands for one attempt to serve a request. The attempt must make the last call (Release or Orphan) on every
// charge that names its LeaseOwner. A charge that has no last call when the attempt ends is lost, and the audit shows it.
type LeaseOwner struct {
	charges int // charges on which the holder must still make the last call
	ended   bool
}

// Ended notes that a holder makes no more calls, and returns the number of its lost charges. A lost charge stays on its
// account, because the engine may still hold the KV, and counts as drift in the audit.
func (l *Ledger) Ended(h *LeaseOwner) (lost int) {
	if !h.ended {
		h.ended = true
		l.unheld += h.charges
	}
	return h.charges
}

// PassOn separates the charge from its holder: from now on other code is responsible for the last call.
func (c *InFlight) PassOn() {
	h := c.holder
	if h == nil {
		return
	}
	c.holder = nil
	h.charges--
	if h.ended {
		c.account.ledger.unheld--
	}
}

// Phase is a stage in the life of a prompt's KV blocks on the prefill engine.
type Phase uint8

// The phases.
const (
	Probing    Phase    = iota // the probe is not answered yet
	Pooled                     // answered, waits for a decode rank
	Dispatched                 // the request was sent to a decode rank, which has sent no data event yet
	Orphaned                   // no decode engine will fetch it; the engine frees it at its timeout
	Phases                     // the number of phases above
	Ended      = Phases        // no longer charged
)

func (p Phase) String() string {
	return [...]string{"probing", "pooled", "dispatched", "orphan", "ended"}[p]
}

// Weight is the load of one prompt.
type Weight struct {
	Tokens int64 // of the prompt
	Work   int64 // vllm-ascend's weight of it, in millionths

	// The load of the prefill itself; an account counts it only while the charge is Probing.
	NewTokens   int64 // tokens that are predicted not to be cached
	PredictedUs int64 // predicted duration in microseconds
	Attention   int64 // twice policy.Attention, which may end in .5
}

// WeightOf computes the weight of a prompt from its indicators on a candidate.
func WeightOf(v *policy.Engine, promptBytes int) Weight {
	line := policy.Latency{T0Ms: v.T0Ms, TPMs: v.TPMs, Beta2: v.Beta2}
	hitTokens, newTokens := int64(v.HitTokens), int64(v.NewTokens)
	return Weight{
		Tokens:      int64(v.PromptTokens),
		Work:        ascendWork(promptBytes),
		NewTokens:   newTokens,
		PredictedUs: int64(1000 * line.Ms(float64(newTokens), float64(hitTokens))),
		Attention:   newTokens * (2*hitTokens + newTokens),
	}
}

// ascendWork is the weight of a prompt in vllm-ascend's proxy, in millionths: 120.0745 per request plus 0.0345 per four
// bytes.
func ascendWork(promptBytes int) int64 { return 8625*int64(promptBytes) + 120_074_500 }

// InFlight is one prompt on one account, from the choice of the candidate until the engine has freed the prompt's KV blocks:
//
//	InFlight ─▶ Probing ─Answer─▶ Pooled ─Dispatch─▶ Dispatched
//
// Account.Reserve also makes a charge that is Probing, but its probe is sent later, by Send. In each phase Release ends
// the charge, and Orphan leaves it to the engine's own timeout. The owner calls Settle before this last call. Any call
// after it is a bug, which the ledger counts as a misuse.
type InFlight struct {
	Weight        Weight
	account       *EngineLoad
	phase         Phase
	settled       bool // Settle was called: the next call is the last
	renewed       bool // the request's decode engine keeps renewing the prefill engine's hold on the KV
	holder        *LeaseOwner
	sent          time.Time    // when the probe was sent; zero: not yet
	since         time.Time    // when the present phase began
	expires       time.Time    // when the engine frees the KV by itself; zero while probing
	expiriesIndex int          // index in the ledger's heap of expiries
	modelCounts   *ModelCounts // counts of the charge's model, which include the charge until it is answered; nil: not counted
}

// ModelCounts counts the unanswered charges of one model on an account that several models share.
type ModelCounts struct{ Probing, Unsent int }

// CountByModel adds a new charge to the counts of its model.
func (c *InFlight) CountByModel(counts *ModelCounts) {
	c.modelCounts = counts
	counts.Probing++
	if c.sent.IsZero() {
		counts.Unsent++
	}
}

// Send notes that the probe is sent now. It is called once.
func (c *InFlight) Send(now time.Time) {
	if c.settled || c.phase != Probing || !c.sent.IsZero() {
		c.account.ledger.misuses++
		return
	}
	a := c.account
	c.sent = now
	if c.modelCounts != nil {
		c.modelCounts.Unsent--
	}
	a.unanswered = append(a.unanswered, c)
	a.sends++
	a.engineWaits++
}

// Phase is the present phase of the prompt's KV.
func (c *InFlight) Phase() Phase { return c.phase }

// Predicted is the duration of the prefill without any wait, as predicted when the prompt was charged.
func (c *InFlight) Predicted() time.Duration {
	return time.Duration(c.Weight.PredictedUs) * time.Microsecond
}

// Sent is when the probe was sent; zero: not yet.
func (c *InFlight) Sent() time.Time { return c.sent }

// MayAnswer reports whether the probe was sent and not answered yet; if not, it counts a misuse.
func (c *InFlight) MayAnswer() bool {
	if c.settled || c.phase != Probing || c.sent.IsZero() {
		c.account.ledger.misuses++
		return false
	}
	return true
}

// Answer books that the probe was answered with a hand-off. tokens is the KV of the hand-off, which the engine frees at
// expires.
func (c *InFlight) Answer(tokens int64, expires, now time.Time) {
	c.expires = expires
	c.move(Pooled, tokens, now)
}

// Dispatch books that the request was sent to a decode rank, which fetches the KV.
func (c *InFlight) Dispatch(now time.Time) {
	switch {
	case c.settled || c.phase == Probing:
		c.account.ledger.misuses++
	case c.phase == Pooled:
		c.move(Dispatched, c.Weight.Tokens, now)
	}
}

// renewedFor is the time until a renewed charge expires: about a year, which is longer than any request runs.
const renewedFor = 10_000 * time.Hour

// Renew notes that the decode engine keeps renewing the prefill engine's hold on the KV, so that the charge does not
// expire while the request runs.
func (c *InFlight) Renew(now time.Time) {
	if c.settled || c.phase != Dispatched {
		return
	}
	c.renewed, c.expires = true, now.Add(renewedFor)
	heap.Fix(&c.account.ledger.expiries, c.expiriesIndex)
}

// Settle must be called before the last call on a charge. It reports whether the last call still changes anything: not if
// the charge has ended already, or if this is the second Settle, which counts as a misuse.
func (c *InFlight) Settle() bool {
	if c.settled {
		c.account.ledger.misuses++
		return false
	}
	c.settled = true
	c.PassOn()
	return c.phase != Ended
}

// Orphan books that no decode engine will fetch the KV, so that the engine frees it by its own timeout. hold is that
// timeout. It began when the probe was answered, and Answer has set the time at which the charge expires.
func (c *InFlight) Orphan(hold time.Duration, now time.Time) {
	if c.phase == Probing || c.renewed { // no answer has set the time, or Renew has put it off: the timeout counts from now
		c.renewed, c.expires = false, now.Add(hold)
	}
	c.account.Unfetched++
	c.move(Orphaned, c.Weight.Tokens, now)
}

// Release books that the prefill engine has freed the KV.
func (c *InFlight) Release(now time.Time) { c.move(Ended, 0, now) }

// leaveApart removes the charge from the counts of its model, if it is counted there.
func (c *InFlight) leaveApart() {
	if c.modelCounts == nil {
		return
	}
	c.modelCounts.Probing--
	if c.sent.IsZero() {
		c.modelCounts.Unsent--
	}
	c.modelCounts = nil
}

// move moves a charge to another phase, from which on it weighs tokens. The phase Ended removes the charge from its
// account. No other function reduces the sums of an account.
func (c *InFlight) move(to Phase, tokens int64, now time.Time) {
	a := c.account
	a.book(c.phase, c.Weight, -1)
	if to == Ended {
		a.freed.add(c.Weight.Tokens, now)
	}
	if c.phase == Probing {
		a.end(c, to == Pooled, now)
		c.leaveApart()
	} else {
		heap.Remove(&a.ledger.expiries, c.expiriesIndex)
	}
	c.phase, c.Weight.Tokens, c.since = to, tokens, now
	if to == Ended {
		c.PassOn()
		a.ledger.released++
	} else {
		a.book(to, c.Weight, 1)
		heap.Push(&a.ledger.expiries, c)
	}
	a.UpdateGate(now)
}
