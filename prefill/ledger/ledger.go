// Package ledger books what prompts weigh on prefill engines: the accounts of
// candidates, charges and their phases, the audit, the gates that full KV caches
// close, and what engines' gauges say beside the accounts. It has no clock and no
// lock: its owner gives it the time of each event.
package ledger

import (
	"container/heap"
	"time"

	"evenkeel/prefill/policy"
)

// Ledger is what all accounts have in common.
type Ledger struct {
	cfg      Config
	expiries expiries

	// The audit: charged - released - held, without lost charges, is always 0.
	charged, released, misuses, expired uint64
	unheld                              int // lost charges: they are on the accounts, but their holder has ended
}

// Config is the settings of the accounts.
type Config struct {
	KVThreshold float64       // usage of a KV cache at which its gate closes
	Interval    time.Duration // between two scrapes
}

// staleAfter is the number of failed scrapes in a row from which an engine's gauges are stale: one or two are lost
// while a busy engine computes a long prompt.
const staleAfter = 3

// New returns a ledger without accounts.
func New(cfg Config) *Ledger { return &Ledger{cfg: cfg} }

// Configure changes the settings of the accounts. Their gates must be updated after that.
func (l *Ledger) Configure(cfg Config) { l.cfg = cfg }

// Audit compares what was charged and released with what the accounts hold, without
// charges that were lost.
type Audit struct {
	Drift            int64 // charged minus released; what the accounts hold is yet to be subtracted
	Misuses, Expired uint64
}

// Audit counts all charges so far.
func (l *Ledger) Audit() Audit {
	return Audit{Drift: int64(l.charged-l.released) + int64(l.unheld), Misuses: l.misuses, Expired: l.expired}
}

// NextExpiry is when an engine next frees KV by its own timeout; false: no charge has such a time.
func (l *Ledger) NextExpiry() (time.Time, bool) {
	if len(l.expiries) == 0 {
		return time.Time{}, false
	}
	return l.expiries[0].expires, true
}

// Expire ends one charge whose engine has freed the KV by its own timeout, and returns its account; nil: there is
// none.
func (l *Ledger) Expire(now time.Time) *Account {
	if len(l.expiries) == 0 || now.Before(l.expiries[0].expires) {
		return nil
	}
	l.expired++
	c := l.expiries[0]
	c.move(Ended, 0, now)
	return c.account
}

// freeOrphans ends an account's orphans from before a moment: its engine restarted since, so that their KV is gone
// with the old process.
func (l *Ledger) freeOrphans(a *Account, before, now time.Time) {
	var gone []*Charge
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
type expiries []*Charge

func (e expiries) Len() int           { return len(e) }
func (e expiries) Less(i, j int) bool { return e[i].expires.Before(e[j].expires) }
func (e expiries) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].expiriesIndex, e[j].expiriesIndex = i, j
}

func (e *expiries) Push(x any) {
	c := x.(*Charge)
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

// Holder stands for one attempt to serve a request, from its turn to its end. The
// attempt must make the last call on the charges that name its Holder, so the audit
// sees a charge that was lost on the way.
type Holder struct {
	charges int // on which it has to make the last call
	ended   bool
}

// Ended says that a holder makes no more calls, and returns how many charges it still holds. They stay, because the
// engine may hold the KV, and count as drift in the audit.
func (l *Ledger) Ended(h *Holder) (lost int) {
	if !h.ended {
		h.ended = true
		l.unheld += h.charges
	}
	return h.charges
}

// PassOn says that other code than the charge's holder makes the last call.
func (c *Charge) PassOn() {
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

// Phase is where a prompt's KV blocks are in their life on the prefiller.
type Phase uint8

// The phases.
const (
	Probing    Phase = iota // the probe is not answered yet
	Pooled                  // answered, waits for a decode rank
	Dispatched              // a decode rank was asked, no data event yet
	Orphaned                // no decode engine will fetch it; the engine frees it at its timeout
	Phases
	Ended = Phases // no longer charged
)

func (p Phase) String() string {
	return [...]string{"probing", "pooled", "dispatched", "orphan", "ended"}[p]
}

// Weight is what one prompt weighs.
type Weight struct {
	Tokens int64 // of the prompt
	Work   int64 // vllm-ascend's weight of it, in millionths

	// These are what its prefill computes; an account counts them only while the charge is Probing.
	NewTokens   int64
	PredictedUs int64
	Attention   int64 // twice policy.Attention
}

// WeightOf is the weight of a prompt on a candidate, by the candidate's indicators.
func WeightOf(v *policy.Candidate, promptBytes int) Weight {
	line := policy.Line{T0Ms: v.T0Ms, TPMs: v.TPMs, Beta2: v.Beta2}
	hit, fresh := int64(v.HitTokens), int64(v.NewTokens)
	return Weight{
		Tokens:      int64(v.PromptTokens),
		Work:        ascendWork(promptBytes),
		NewTokens:   fresh,
		PredictedUs: int64(1000 * line.Ms(float64(fresh), float64(hit))),
		Attention:   fresh * (2*hit + fresh),
	}
}

// ascendWork is vllm-ascend's weight of a prompt, 0.0345 for every four bytes
// and 120.0745 a request, in millionths.
func ascendWork(promptBytes int) int64 { return 8625*int64(promptBytes) + 120_074_500 }

// Charge is one prompt on one account, from the moment a candidate was chosen for it until the engine has its KV
// blocks back:
//
//	Charge ─▶ Probing ─Answer─▶ Pooled ─Dispatch─▶ Dispatched
//
// A charge that is made by Reserve is Probing, too, and its probe goes out with Send. From each phase Release ends
// the charge, and Orphan leaves it to the engine's own timeout. The owner calls Settle before the last call on the
// charge. A call after that is a counted bug.
type Charge struct {
	Weight        Weight
	account       *Account
	phase         Phase
	settled       bool // its owner made the last call
	renewed       bool // the decode engine that has the request renews the hold
	holder        *Holder
	sent          time.Time // when its probe was; zero: it was not yet
	since         time.Time // when it got into this phase
	expires       time.Time // when the engine frees the KV by itself; zero while probing
	expiriesIndex int       // in the heap of expiries
	apart         *Apart    // the charge is counted in it until it is answered; nil: in none
}

// Apart counts the unanswered charges of one model on an account, where the model's requests are counted apart from
// the others'.
type Apart struct{ Probing, Unsent int }

// CountApart also counts in a a charge that was booked just now.
func (c *Charge) CountApart(a *Apart) {
	c.apart = a
	if a.Probing++; c.sent.IsZero() {
		a.Unsent++
	}
}

// Send says that the probe is sent now. It is called once.
func (c *Charge) Send(now time.Time) {
	if c.settled || c.phase != Probing || !c.sent.IsZero() {
		c.account.ledger.misuses++
		return
	}
	a := c.account
	c.sent = now
	if c.apart != nil {
		c.apart.Unsent--
	}
	a.unanswered = append(a.unanswered, c)
	a.sends++
	a.engineWaits++
}

// Phase is where the prompt's KV is now.
func (c *Charge) Phase() Phase { return c.phase }

// Predicted is how long the prefill takes by itself, as predicted when the prompt was charged.
func (c *Charge) Predicted() time.Duration {
	return time.Duration(c.Weight.PredictedUs) * time.Microsecond
}

// Sent is when the probe was sent; zero: it was not yet.
func (c *Charge) Sent() time.Time { return c.sent }

// MayAnswer reports whether the probe was sent and not answered yet; if not, it counts a misuse.
func (c *Charge) MayAnswer() bool {
	if c.settled || c.phase != Probing || c.sent.IsZero() {
		c.account.ledger.misuses++
		return false
	}
	return true
}

// Answer books that the probe was answered with a hand-off of so many tokens, whose KV the engine frees at expires.
func (c *Charge) Answer(tokens int64, expires, now time.Time) {
	c.expires = expires
	c.move(Pooled, tokens, now)
}

// Dispatch books that a decode rank was asked for the KV.
func (c *Charge) Dispatch(now time.Time) {
	switch {
	case c.settled || c.phase == Probing:
		c.account.ledger.misuses++
	case c.phase == Pooled:
		c.move(Dispatched, c.Weight.Tokens, now)
	}
}

// renewedFor is longer than any request runs.
const renewedFor = 10_000 * time.Hour

// Renew records that the decode engine renews the prefill engine's hold on the KV: the charge now expires renewedFor
// from now.
func (c *Charge) Renew(now time.Time) {
	if c.settled || c.phase != Dispatched {
		return
	}
	c.renewed, c.expires = true, now.Add(renewedFor)
	heap.Fix(&c.account.ledger.expiries, c.expiriesIndex)
}

// Settle must be called before the last call on a charge. It reports whether that call still changes anything; a
// second Settle is counted as a misuse.
func (c *Charge) Settle() bool {
	if c.settled {
		c.account.ledger.misuses++
		return false
	}
	c.settled = true
	c.PassOn()
	return c.phase != Ended
}

// Orphan leaves the KV to the engine's own timeout: the charge expires after hold if it was not answered yet or was
// renewed, else when it would expire anyway.
func (c *Charge) Orphan(hold time.Duration, now time.Time) {
	if c.phase == Probing || c.renewed {
		c.renewed, c.expires = false, now.Add(hold)
	}
	c.account.Unfetched++
	c.move(Orphaned, c.Weight.Tokens, now)
}

// Release books that the prefiller has the KV back.
func (c *Charge) Release(now time.Time) { c.move(Ended, 0, now) }

// leaveApart takes the charge off the counts of its model alone, if it is counted there.
func (c *Charge) leaveApart() {
	if c.apart == nil {
		return
	}
	if c.apart.Probing--; c.sent.IsZero() {
		c.apart.Unsent--
	}
	c.apart = nil
}

// move books a charge into another phase, with so many tokens from then on, or off its account if the phase is Ended. It
// is the only function that takes anything off an account.
func (c *Charge) move(to Phase, tokens int64, now time.Time) {
	a := c.account
	a.book(c.phase, c.Weight, -1)
	if to == Ended {
		a.freed.add(c.Weight.Tokens, now)
	}
	if c.phase == Probing {
		a.answer(c, now)
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
