package lease

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// An owner that cannot reach the store continues as long as every other member promises not to admit. Each promise lasts
// longer than the time until the next one. This is only safe if the members are fixed: all members have the same list,
// the lease contains the list, and a proxy that is not on the list never takes the lease. A proxy that is on the
// list, but is configured with another list or none, gives no promise. Without its promise the owner stops before that
// proxy may take the lease.
//
// A promise lasts as long as a lease. For the owner it counts from the time of the question. The waits that prevent two
// owners by leases therefore also prevent two owners by promises. A promise ends early if its owner releases the lease.
//
// A process that has just started behaves as if it had given a promise, because an earlier process of this proxy may
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

// endsWithRelease reports whether the promise ends because the lease was released with this epoch. It does if it was given to the owner
// with this epoch: an owner stops admission before it releases the lease. A promise that an earlier process may have given was for one of
// the holders up to now. All of them have stopped if this process saw the last one hold the lease (sawHeld) before it was released.
func (p promise) endsWithRelease(epoch int64, sawHeld bool) bool {
	maybeByEarlierProcess := p.to == ""
	return epoch == p.epoch || maybeByEarlierProcess && sawHeld
}

// Vote is an owner's question to the other members.
type Vote struct {
	Holder  string   `json:"holder"`  // identity of the asking owner
	Epoch   int64    `json:"epoch"`   // epoch of the asking owner's lease
	Members []string `json:"members"` // the owner's list of members; a member with another list gives no promise
}

// ErrNoVote is the answer to an owner if a member gives no promise.
var ErrNoVote = errors.New("no promise not to take the scope")

// hasFixedMembers reports whether only the members on the configured list may ever own the scope.
func (m *Machine) hasFixedMembers() bool { return len(m.cfg.Members) > 0 }

// excluded reports whether this proxy must never take the lease, because it is missing on its own list or on the list
// of the last known holder. That holder may continue by promises of other members, which this proxy would not know.
func (m *Machine) excluded() bool {
	missingOn := func(list []string) bool { // an empty list excludes no proxy
		return len(list) > 0 && !slices.Contains(list, Dispatcher(m.cfg.Self))
	}
	return missingOn(m.cfg.Members) || missingOn(m.rec.Members)
}

// isReleasing reports whether a lease that is held is about to be released: the process ends, or a hand-back is under way.
func (m *Machine) isReleasing() bool { return m.stopping || !m.tryReleaseUntil.IsZero() }

// membersDiffer reports whether the last known holder lists other members than this proxy.
func (m *Machine) membersDiffer() bool {
	lastHolderIsOther := !m.held && m.rec.Holder != "" && m.rec.Holder != m.cfg.Self
	return lastHolderIsOther && !slices.Equal(m.rec.Members, m.cfg.Members)
}

// GivePromise answers an owner that cannot renew its lease, for example because it cannot reach the store. The owner may go on if all other
// members promise not to admit meanwhile. If GivePromise returns no error, this proxy has given its promise: it does not take the lease for
// the time Duration, and admits nothing for a start delay more, because the clocks of the two may differ in speed. If this proxy holds a
// lease with a lower epoch itself, it also stops admission until it has renewed that lease.
func (m *Machine) GivePromise(now time.Time, ask Vote) error {
	if err := checkVote(m, ask); err != nil {
		return err
	}
	m.ObserveEpoch(ask.Epoch)
	if m.held { // with a lower epoch, see checkVote
		// The store refuses this proxy's renewal if the lease was acquired with a later epoch. So a renewal that succeeds shows
		// that the asking owner's epoch does not exist.
		m.stopUntilRenewed(now, ask.Epoch)
	}
	until := later(m.givenPromise.until, now.Add(m.cfg.Duration)) // an earlier promise may last longer
	m.givenPromise = promise{to: ask.Holder, epoch: ask.Epoch, until: until}
	return nil
}

// checkVote returns an error with the reason if this proxy must not give its promise to the asking owner. Both must have the same fixed
// list of members, because a proxy that is not on it could take the lease without a promise. The owner must be another member. And its
// epoch must not be over: this proxy must not hold a lease with this epoch or a later one, and must not have read at the last look that
// another process holds, or held, a later one. Members are the ids of proxies. A holder's identity names one process of a proxy, and
// Dispatcher returns the id in it.
func checkVote(m *Machine, ask Vote) error {
	self, owner := Dispatcher(m.cfg.Self), Dispatcher(ask.Holder)
	switch {
	case !m.hasFixedMembers() || !slices.Equal(ask.Members, m.cfg.Members):
		return fmt.Errorf("%w: our lists of members differ", ErrNoVote)
	case owner == self || !slices.Contains(m.cfg.Members, owner):
		return fmt.Errorf("%w: %q is not another member", ErrNoVote, owner)
	}
	ownsLater := m.held && m.epoch >= ask.Epoch
	// A later epoch of the same process is no obstacle: it has acquired the lease again, and may not know it if the answer was lost. An
	// earlier process of the same proxy is another holder, so the whole identities are compared.
	sawOthersLater := m.recValid && m.rec.Epoch > ask.Epoch && m.rec.Holder != ask.Holder
	if ownsLater || sawOthersLater {
		return fmt.Errorf("%w: epoch %d is over", ErrNoVote, ask.Epoch)
	}
	return nil
}

// votesDueAt is when to ask the other members for votes; zero: no votes are needed as long as nothing changes. A vote is a member's promise
// not to admit; with the votes of all, an owner may go on without the store. So the members are asked if the store has not confirmed a
// renewal for twice the time Retry, or has lost this proxy's lease. They are asked at intervals: not before nextVotes.
func (m *Machine) votesDueAt() time.Time {
	switch {
	case !m.hasFixedMembers(): // votes prove nothing, because any other proxy could take the lease
		return time.Time{}
	case !m.held, m.isReleasing(): // votes only prolong the time of an owner that stays
		return time.Time{}
	case m.storeLostLease: // the store has lost the lease, so no renewal can succeed
		return m.nextVotes
	}
	return later(m.nextVotes, m.renewed.Add(2*m.cfg.Retry))
}

// AskVotes returns the question for the other members, and notes that they are asked now, so that the next question is not due before
// the time Retry is over. ok is false if they are not to be asked now.
func (m *Machine) AskVotes(now time.Time) (ask Vote, ok bool) {
	at := m.votesDueAt()
	due := !at.IsZero() && !now.Before(at)
	if !due || !isAdmissionTime(m, now) { // votes prolong the time of admission, but do not begin it again
		return Vote{}, false
	}
	m.nextVotes = now.Add(m.cfg.Retry)
	return Vote{Holder: m.cfg.Self, Epoch: m.epoch, Members: m.cfg.Members}, true
}

// RecordVote records that a member voted for this proxy, which asked for the vote at the time sent. A vote is the member's promise not to
// admit for a while (GivePromise). It does not count if it is for another epoch, or if it comes only after this proxy had to stop
// admission. With the votes of all other members, this proxy may admit longer. If the store has lost the lease (storeLostLease), this proxy
// may then also acquire it again.
func (m *Machine) RecordVote(sent, now time.Time, member string, epoch int64) {
	isForThisLease := m.held && epoch == m.epoch
	tooLate := !now.Before(m.admitsUntil)
	if !isForThisLease || tooLate || m.isReleasing() { // a vote neither begins admission again nor stops a release
		return
	}
	m.votes[member] = later(m.votes[member], sent)
	m.admitsUntil = later(m.admitsUntil, m.votedUntil())
	if m.storeLostLease && m.hasVotes(now) { // this was the last vote that was missing to acquire the lost lease again
		m.nextCall = now
	}
}

// votedUntil is the time until which the promises of all other members let this proxy admit; zero: a promise is missing, or there
// is no other member.
func (m *Machine) votedUntil() time.Time {
	var oldest time.Time // when the oldest of these promises was requested
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

// hasVotes reports whether all other members have promised not to admit, and these promises are in force. Votes count only for an owner
// that keeps the lease, and only as long as its time of admission is not over.
func (m *Machine) hasVotes(now time.Time) bool {
	mayUseVotes := m.held && m.hasFixedMembers() && !m.isReleasing() && now.Before(m.admitsUntil)
	return mayUseVotes && now.Before(m.votedUntil())
}

// mayReclaim reports whether this proxy may acquire again a lease that the store has lost, if all other members vote for it. It may do so
// only before its time of admission ends, which the last renewal and earlier votes set, because votes never begin admission again. From the
// loss until all have voted, nothing is admitted, although this time is not over.
func (m *Machine) mayReclaim(now time.Time) bool {
	othersCanVote := m.hasFixedMembers() && len(m.cfg.Members) > 1
	return othersCanVote && isAdmissionTime(m, now) && !m.isReleasing()
}

// isAdmissionTime reports whether now lies in the time in which this proxy, as the holder of the lease, may admit.
func isAdmissionTime(m *Machine, now time.Time) bool {
	return now.Before(m.admitsUntil) && !now.Before(m.admitsFrom())
}

// noOtherHeld reports whether, by the last look, no other proxy has held the lease since this one did. It is called after the store has
// lost this proxy's lease. So a lease that has not expired is a later one. A lease without a holder was not acquired since if its epoch is
// not above this proxy's: each acquisition raises the epoch. Any other record names the last holder, which is this process if no other has
// acquired the lease.
func (m *Machine) noOtherHeld() bool {
	if m.rec.Expiry == NotExpired {
		return false
	}
	noHolderSince := m.rec.Holder == "" && m.rec.Epoch <= m.epoch
	lastHolderIsThis := m.rec.Holder == m.cfg.Self
	return noHolderSince || lastHolderIsThis
}
