// Package ledger books what prompts weigh on prefill engines: the accounts of
// candidates, charges and their phases, the audit, the gates that full KV caches
// close, and what engines' gauges say beside the accounts. It has no clock and no
// lock: its owner gives it the time of each event.
package ledger

import "time"

// Ledger is what all accounts have in common.
type Ledger struct {
	cfg      Config
	expiries expiries

	// The audit: charged - released - held, without lost charges, is always 0.
	charged, released, misuses, expired uint64
	unheld                              int // lost charges: they are on the accounts, but their holder has ended
}

// Config is what the accounts go by.
type Config struct {
	KVThreshold float64       // usage of a KV cache at which its gate closes
	Interval    time.Duration // between two scrapes
	Misses      int           // scrapes in a row that failed, after which gauges are stale
}

// New returns a ledger without accounts.
func New(cfg Config) *Ledger { return &Ledger{cfg: cfg} }

// Configure changes what the accounts go by. Their gates must be updated then.
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

// NextExpiry is when the next engine frees KV by itself.
func (l *Ledger) NextExpiry() (time.Time, bool) {
	if len(l.expiries) == 0 {
		return time.Time{}, false
	}
	return l.expiries[0].expires, true
}

// Expire ends one charge whose engine has freed the KV by itself, and returns its
// account; nil: there is none.
func (l *Ledger) Expire(now time.Time) *Account {
	if len(l.expiries) == 0 || now.Before(l.expiries[0].expires) {
		return nil
	}
	l.expired++
	c := l.expiries[0]
	c.move(Ended, 0, now)
	return c.account
}

// freeOrphans ends an account's orphans from before a moment: its engine restarted
// since, and their KV went with the old process.
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

// expiries is a heap of what is answered or orphaned, by the time it ends.
type expiries []*Charge

func (e expiries) Len() int           { return len(e) }
func (e expiries) Less(i, j int) bool { return e[i].expires.Before(e[j].expires) }
func (e expiries) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].place, e[j].place = i, j
}

func (e *expiries) Push(x any) {
	c := x.(*Charge)
	c.place = len(*e)
	*e = append(*e, c)
}

func (e *expiries) Pop() any {
	old := *e
	c := old[len(old)-1]
	old[len(old)-1] = nil
	*e = old[:len(old)-1]
	return c
}
