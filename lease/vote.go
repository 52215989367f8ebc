package lease

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// While an owner cannot reach the store, it goes on as long as every other member
// promises not to admit, each time for longer than until the next promise. That is safe
// only if membership is closed: all members have the same list, the lease names
// it, and a dispatcher that is not on the list never takes the lease. A dispatcher that is
// on the list but runs with another list, or none, gives no promise, so that the owner
// has stopped by the time that dispatcher may take the lease itself.
//
// A promise lasts as long as a lease, ends early when its owner gives the lease
// back, and counts for the owner from when it asked. So the waits that prevent two owners
// by leases also prevent two owners by promises. A process that has just started keeps a
// promise, too, because the process before it may have given one. This promise ends early
// if the process has seen a holder of the lease, and then that this holder released it: a
// holder releases a lease only if it may admit by it, so all owners before it have stopped,
// and the promise was given to it or to one of them. A promise says nothing about the store: a member whose acquisition
// was under way when it promised may hold the lease afterwards, but does not admit before
// its promise is over.
//
// Votes only prolong a time in which the owner may admit. An owner whose time is over
// needs the store, because the others may have given another promise since.

// promise is what a member has promised an owner.
type promise struct {
	to    string // the owner's identity; empty: not known, the process before this one may have given the promise
	epoch int64
	until time.Time // until then the lease is not acquired; admission begins a start delay later at the earliest
}

// Vote is what an owner asks of the other members.
type Vote struct {
	Holder  string   `json:"holder"` // identity
	Epoch   int64    `json:"epoch"`
	Members []string `json:"members"`
}

// ErrNoVote is the answer to an owner that gets no promise.
var ErrNoVote = errors.New("no promise not to take the scope")

// closed says whether only the listed members may ever own the scope.
func (m *Machine) closed() bool { return len(m.cfg.Members) > 0 }

// excluded says whether this dispatcher must never take the lease: it is not on
// its own list, or not on the list of the holder that was seen last. That holder may go
// on by the promises of other members, of which this dispatcher does not know.
func (m *Machine) excluded() bool {
	self := Dispatcher(m.cfg.Self)
	return m.closed() && !slices.Contains(m.cfg.Members, self) || len(m.rec.Members) > 0 && !slices.Contains(m.rec.Members, self)
}

// differs says whether the holder that was seen last lists other members.
func (m *Machine) differs() bool {
	return !m.held && m.rec.Holder != "" && m.rec.Holder != m.cfg.Self && !slices.Equal(m.rec.Members, m.cfg.Members)
}

// Promise answers an owner that cannot reach the store. If it returns no error, this
// dispatcher does not admit before Duration and a start delay from now are over.
func (m *Machine) Promise(now time.Time, ask Vote) error {
	self, owner := Dispatcher(m.cfg.Self), Dispatcher(ask.Holder)
	switch {
	case !m.closed() || !slices.Equal(ask.Members, m.cfg.Members):
		return fmt.Errorf("%w: our lists of members differ", ErrNoVote)
	case owner == self || !slices.Contains(m.cfg.Members, owner):
		return fmt.Errorf("%w: %q is not another member", ErrNoVote, owner)
	case m.held && m.epoch >= ask.Epoch, m.looked && m.rec.Epoch > ask.Epoch && m.rec.Holder != ask.Holder:
		return fmt.Errorf("%w: epoch %d is over", ErrNoVote, ask.Epoch)
	}
	m.ObserveEpoch(ask.Epoch)
	if m.held { // with an older epoch
		m.forgetProofs()
		m.claimed, m.claimedAt, m.nextCall = ask.Epoch, now, now.Add(1)
	}
	m.promise = promise{ask.Holder, ask.Epoch, later(m.promise.until, now.Add(m.cfg.Duration))}
	return nil
}

// askAt is when the other members are to be asked for votes; zero: never. They are asked if the
// store has not confirmed a renewal for two Retry, or has lost our lease.
func (m *Machine) askAt() time.Time {
	switch {
	case !m.closed() || !m.held || m.leaving || !m.releaseBy.IsZero():
		return time.Time{}
	case m.reclaim:
		return m.nextVotes
	}
	return later(m.nextVotes, m.renewed.Add(2*m.cfg.Retry))
}

// AskVotes returns the question for the other members; false: they are not to be asked now.
func (m *Machine) AskVotes(now time.Time) (Vote, bool) {
	if at := m.askAt(); at.IsZero() || now.Before(at) || !now.Before(m.admitsUntil) || now.Before(m.admitsFrom()) {
		return Vote{}, false
	}
	m.nextVotes = now.Add(m.cfg.Retry)
	return Vote{Holder: m.cfg.Self, Epoch: m.epoch, Members: m.cfg.Members}, true
}

// Votes records that a member gave the promise that was asked for at sent.
func (m *Machine) Votes(sent, now time.Time, member string, epoch int64) {
	if !m.held || epoch != m.epoch || !now.Before(m.admitsUntil) || m.leaving || !m.releaseBy.IsZero() {
		return
	}
	m.votes[member] = later(m.votes[member], sent)
	m.admitsUntil = later(m.admitsUntil, m.votedUntil())
	if m.reclaim && m.hasVotes(now) {
		m.nextCall = now
	}
}

// votedUntil is until when the promises of all other members count; zero: a promise is missing.
func (m *Machine) votedUntil() time.Time {
	var oldest time.Time
	for _, id := range m.cfg.Members {
		if id == Dispatcher(m.cfg.Self) {
			continue
		}
		at, ok := m.votes[id]
		if !ok {
			return time.Time{}
		}
		if oldest.IsZero() || at.Before(oldest) {
			oldest = at
		}
	}
	if oldest.IsZero() {
		return oldest
	}
	return oldest.Add(m.cfg.RenewDeadline)
}

// hasVotes says whether every other member has promised not to admit now.
func (m *Machine) hasVotes(now time.Time) bool {
	return m.held && m.closed() && !m.leaving && m.releaseBy.IsZero() && now.Before(m.admitsUntil) && now.Before(m.votedUntil())
}

// mayReclaim says whether this dispatcher may ask for votes to acquire again a lease that the
// store has lost. Until the votes have come, nothing is admitted.
func (m *Machine) mayReclaim(now time.Time) bool {
	return m.closed() && len(m.cfg.Members) > 1 && !m.leaving && m.releaseBy.IsZero() && now.Before(m.admitsUntil) &&
		!now.Before(m.admitsFrom())
}

// mine says whether no other dispatcher has held the lease since we did.
func (m *Machine) mine() bool {
	return m.rec.Term != Running && (m.rec.Holder == m.cfg.Self || m.rec.Holder == "" && m.rec.Epoch <= m.epoch)
}
