package lease

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// An owner that cannot reach the store continues as long as every other member promises not to admit. Each promise lasts
// longer than the time until the next one. This is only safe if the membership is closed: all members have the same list,
// the lease contains the list, and a dispatcher that is not on the list never takes the lease. A dispatcher that is on the
// list, but is configured with another list or none, gives no promise. Without its promise the owner stops before that
// dispatcher may take the lease.
//
// A promise lasts as long as a lease. For the owner it counts from the time of the question. The waits that prevent two
// owners by leases therefore also prevent two owners by promises. A promise ends early if its owner releases the lease.
//
// A process that has just started behaves as if it had given a promise, because an earlier process of this dispatcher may
// have given one. This promise ends early if the process sees a holder of the lease, and then sees that this holder has
// released it. A holder only releases a lease by which it may admit. All earlier owners have then stopped, and the promise
// was given to this holder or to one of them.
//
// A promise says nothing about the store. A member whose acquisition was under way when it promised may hold the lease
// afterwards, but does not admit before its promise is over.
//
// Votes only prolong a time in which the owner may admit. An owner whose time is over needs the store, because the other
// members may have given a promise to another owner since.

// promise is a member's promise to an owner not to take the lease.
type promise struct {
	to    string // the owner's identity; empty: not known, because an earlier process may have given the promise
	epoch int64
	until time.Time // until then the lease is not acquired; admission begins a start delay later at the earliest
}

// Vote is an owner's question to the other members.
type Vote struct {
	Holder  string   `json:"holder"` // identity
	Epoch   int64    `json:"epoch"`
	Members []string `json:"members"`
}

// ErrNoVote is the answer to an owner if a member gives no promise.
var ErrNoVote = errors.New("no promise not to take the scope")

// closed reports whether only the listed members may ever own the scope.
func (m *Machine) hasFixedMembers() bool { return len(m.cfg.Members) > 0 }

// excluded reports whether this dispatcher must never take the lease, because it is missing on its own list or on the list
// of the last known holder. That holder may continue by promises of other members, which this dispatcher would not know.
func (m *Machine) excluded() bool {
	missingOn := func(list []string) bool { // an empty list excludes no dispatcher
		return len(list) > 0 && !slices.Contains(list, Dispatcher(m.cfg.Self))
	}
	return missingOn(m.cfg.Members) || missingOn(m.rec.Members)
}

// givesUp reports whether a lease that is held is about to be released: the process ends, or a hand-back is under way.
func (m *Machine) isReleasing() bool { return m.stopping || !m.releaseBy.IsZero() }

// differs reports whether the last known holder lists other members than this dispatcher.
func (m *Machine) membersDiffer() bool {
	return !m.held && m.rec.Holder != "" && m.rec.Holder != m.cfg.Self && !slices.Equal(m.rec.Members, m.cfg.Members)
}

// Promise answers an owner that cannot reach the store. If it returns no error, this dispatcher admits nothing until
// Duration and a start delay have passed.
func (m *Machine) GivePromise(now time.Time, ask Vote) error {
	self, owner := Dispatcher(m.cfg.Self), Dispatcher(ask.Holder)
	switch {
	case !m.hasFixedMembers() || !slices.Equal(ask.Members, m.cfg.Members):
		return fmt.Errorf("%w: our lists of members differ", ErrNoVote)
	case owner == self || !slices.Contains(m.cfg.Members, owner):
		return fmt.Errorf("%w: %q is not another member", ErrNoVote, owner)
	}
	ownsLater := m.held && m.epoch >= ask.Epoch
	sawLater := m.hasRead && m.rec.Epoch > ask.Epoch && m.rec.Holder != ask.Holder
	if ownsLater || sawLater {
		return fmt.Errorf("%w: epoch %d is over", ErrNoVote, ask.Epoch)
	}
	m.ObserveEpoch(ask.Epoch)
	if m.held { // with a lower epoch than the owner's
		m.stopUntilRenewed(now, ask.Epoch)
	}
	m.givenPromise = promise{ask.Holder, ask.Epoch, later(m.givenPromise.until, now.Add(m.cfg.Duration))}
	return nil
}

// askAt is when to ask the other members for votes; zero: not before something changes. They are asked if the store has not
// confirmed a renewal for two Retry, or has lost this dispatcher's lease.
func (m *Machine) votesDueAt() time.Time {
	switch {
	case !m.hasFixedMembers(): // a dispatcher that was not asked could take the lease
		return time.Time{}
	case !m.held, m.isReleasing(): // votes only prolong the time of an owner that stays
		return time.Time{}
	case m.lostByStore: // no renewal can succeed
		return m.nextVotes
	}
	return later(m.nextVotes, m.renewed.Add(2*m.cfg.Retry))
}

// AskVotes returns the question for the other members, and notes that they are asked now; false: do not ask them now.
func (m *Machine) AskVotes(now time.Time) (Vote, bool) {
	at := m.votesDueAt()
	due := !at.IsZero() && !now.Before(at)
	if !due || !isAdmissionTime(m, now) { // votes prolong this time, but do not begin it again
		return Vote{}, false
	}
	m.nextVotes = now.Add(m.cfg.Retry)
	return Vote{Holder: m.cfg.Self, Epoch: m.epoch, Members: m.cfg.Members}, true
}

// Votes records that a member gave the promise for which this dispatcher asked at sent. A promise that comes after the time
// that it was to prolong, or that is for another epoch, does not count.
func (m *Machine) RecordVote(sent, now time.Time, member string, epoch int64) {
	if !m.held || epoch != m.epoch || !now.Before(m.admitsUntil) || m.isReleasing() {
		return
	}
	m.votes[member] = later(m.votes[member], sent)
	m.admitsUntil = later(m.admitsUntil, m.votedUntil())
	if m.lostByStore && m.hasVotes(now) { // the lease may be acquired again
		m.nextCall = now
	}
}

// votedUntil is the time until which the promises of all other members count; zero: a promise is missing.
func (m *Machine) votedUntil() time.Time {
	var oldest time.Time
	for _, id := range m.cfg.Members {
		if id == Dispatcher(m.cfg.Self) {
			continue
		}
		asked, ok := m.votes[id]
		if !ok {
			return time.Time{}
		}
		if oldest.IsZero() || asked.Before(oldest) {
			oldest = asked
		}
	}
	if oldest.IsZero() { // there is no other member
		return oldest
	}
	return oldest.Add(m.cfg.RenewDeadline)
}

// hasVotes reports whether promises of all other members, not to admit, are in force.
func (m *Machine) hasVotes(now time.Time) bool {
	return m.held && m.hasFixedMembers() && !m.isReleasing() && now.Before(m.admitsUntil) && now.Before(m.votedUntil())
}

// mayReclaim reports whether this dispatcher may acquire again a lease that the store has lost, if all other members vote
// for it. Until they have voted, nothing is admitted.
func (m *Machine) mayReclaim(now time.Time) bool {
	canVote := m.hasFixedMembers() && len(m.cfg.Members) > 1
	return canVote && isAdmissionTime(m, now) && !m.isReleasing()
}

// inTime reports whether now lies in the time in which the holder may admit.
func isAdmissionTime(m *Machine, now time.Time) bool {
	return now.Before(m.admitsUntil) && !now.Before(m.admitsFrom())
}

// mine reports whether no other dispatcher has held the lease since this one did, by the last look.
func (m *Machine) noOtherHeld() bool {
	unheldSince := m.rec.Holder == "" && m.rec.Epoch <= m.epoch // each acquisition would have raised the epoch
	return m.rec.Expiry != NotExpired && (unheldSince || m.rec.Holder == m.cfg.Self)
}
