package lease

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// An owner that cannot reach the store continues as long as every other member promises not to
// admit. Each promise lasts longer than the time until the next one. This is only safe if the
// members are fixed: all have the same list, the lease contains it, and a proxy that is not on it
// never takes the lease. A proxy on the list that is configured with another list or none gives no
// promise, so the owner stops before that proxy may take the lease.
//
// A promise lasts as long as a lease. For the owner it counts from the time of the question. The
// waits that prevent two owners by leases therefore also prevent two owners by promises. A promise
// ends early if its owner releases the lease.
//
// A process that has just started behaves as if it had given a promise, because its earlier process
// may have. This promise ends early if the process sees a holder of the lease, and then sees that
// this holder has released it: a holder only releases a lease by which it may admit, so all earlier
// owners have stopped.
//
// A member whose acquisition was under way when it promised may hold the lease afterwards, but does
// not admit before its promise is over.
//
// Votes only prolong a time in which the owner may admit. An owner whose time is over needs the
// store, because the members may have promised another owner since.

// promise is a member's promise to an owner not to take the lease.
type promise struct {
	to    string // identity; empty: an earlier process may have given the promise
	epoch int64
	until time.Time // the lease is not acquired until then, and admission begins a start delay later
}

// endsWithRelease: an owner stops admission before it releases the lease. A promise of an earlier
// process was for one of the holders up to now. All of them have stopped if the last was seen to
// hold (sawHeld) before the release.
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

func (m *Machine) hasFixedMembers() bool { return len(m.cfg.Members) > 0 }

// excluded: this proxy must never take the lease, because it is missing on its own list or the last
// known holder's. That holder may continue by promises, which this proxy would not know.
func (m *Machine) excluded() bool {
	missingOn := func(list []string) bool {
		return len(list) > 0 && !slices.Contains(list, Dispatcher(m.cfg.Self))
	}
	return missingOn(m.cfg.Members) || missingOn(m.rec.Members)
}

func (m *Machine) isReleasing() bool { return m.stopping || !m.tryReleaseUntil.IsZero() }

func (m *Machine) membersDiffer() bool {
	lastHolderIsOther := !m.held && m.rec.Holder != "" && m.rec.Holder != m.cfg.Self
	return lastHolderIsOther && !slices.Equal(m.rec.Members, m.cfg.Members)
}

// GivePromise answers an owner that cannot renew its lease. Without an error, this proxy does not
// take the lease for Duration, and admits nothing for a start delay more, because the clocks of the
// two may differ in speed. If it holds a lease with a lower epoch, it stops admission until it has
// renewed that lease.
func (m *Machine) GivePromise(now time.Time, ask Vote) error {
	if err := checkVote(m, ask); err != nil {
		return err
	}
	m.ObserveEpoch(ask.Epoch)
	if m.held {
		// The store refuses the renewal if the lease was acquired with a later epoch, so a renewal that
		// succeeds shows that the asking owner's epoch does not exist.
		m.stopUntilRenewed(now, ask.Epoch)
	}
	until := later(m.givenPromise.until, now.Add(m.cfg.Duration))
	m.givenPromise = promise{to: ask.Holder, epoch: ask.Epoch, until: until}
	return nil
}

// checkVote: both must have the same fixed list, because a proxy that is not on it could take the
// lease without a promise. The epoch must not be over.
func checkVote(m *Machine, ask Vote) error {
	self, owner := Dispatcher(m.cfg.Self), Dispatcher(ask.Holder)
	switch {
	case !m.hasFixedMembers() || !slices.Equal(ask.Members, m.cfg.Members):
		return fmt.Errorf("%w: our lists of members differ", ErrNoVote)
	case owner == self || !slices.Contains(m.cfg.Members, owner):
		return fmt.Errorf("%w: %q is not another member", ErrNoVote, owner)
	}
	ownsLater := m.held && m.epoch >= ask.Epoch
	// A later epoch of the same process is no obstacle: it may not know that it has acquired the lease
	// again. An earlier process of the same proxy is another holder, so whole identities are compared.
	sawOthersLater := m.recValid && m.rec.Epoch > ask.Epoch && m.rec.Holder != ask.Holder
	if ownsLater || sawOthersLater {
		return fmt.Errorf("%w: epoch %d is over", ErrNoVote, ask.Epoch)
	}
	return nil
}

// votesDueAt is when to ask the other members for votes: if the store has not confirmed a renewal
// for twice Retry, or has lost the lease; zero: not as long as nothing changes.
func (m *Machine) votesDueAt() time.Time {
	switch {
	case !m.hasFixedMembers(): // any other proxy could take the lease
		return time.Time{}
	case !m.held, m.isReleasing(): // votes only prolong the time of an owner that stays
		return time.Time{}
	case m.storeLostLease: // no renewal can succeed
		return m.nextVotes
	}
	return later(m.nextVotes, m.renewed.Add(2*m.cfg.Retry))
}

// AskVotes also notes that the members are asked now; ok is false if no question is due.
func (m *Machine) AskVotes(now time.Time) (ask Vote, ok bool) {
	at := m.votesDueAt()
	due := !at.IsZero() && !now.Before(at)
	if !due || !isAdmissionTime(m, now) { // votes do not begin admission again
		return Vote{}, false
	}
	m.nextVotes = now.Add(m.cfg.Retry)
	return Vote{Holder: m.cfg.Self, Epoch: m.epoch, Members: m.cfg.Members}, true
}

// RecordVote records a member's promise to this proxy, which asked for it at sent. With the votes
// of all other members, this proxy may admit longer, and may acquire again a lease that the store
// has lost.
func (m *Machine) RecordVote(sent, now time.Time, member string, epoch int64) {
	isForThisLease := m.held && epoch == m.epoch
	tooLate := !now.Before(m.admitsUntil)
	// a vote neither begins admission again nor stops a release
	if !isForThisLease || tooLate || m.isReleasing() {
		return
	}
	m.votes[member] = later(m.votes[member], sent)
	m.admitsUntil = later(m.admitsUntil, m.votedUntil())
	if m.storeLostLease && m.hasVotes(now) {
		m.nextCall = now
	}
}

// votedUntil is zero if a promise is missing, or if there is no other member.
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
	if oldest.IsZero() {
		return oldest
	}
	return oldest.Add(m.cfg.RenewDeadline)
}

// hasVotes: votes count only for an owner that keeps the lease, and only while its time of
// admission lasts.
func (m *Machine) hasVotes(now time.Time) bool {
	mayUseVotes := m.held && m.hasFixedMembers() && !m.isReleasing() && now.Before(m.admitsUntil)
	return mayUseVotes && now.Before(m.votedUntil())
}

// mayReclaim: only before the time of admission ends, because votes never begin admission again.
// From the loss until all have voted, nothing is admitted.
func (m *Machine) mayReclaim(now time.Time) bool {
	othersCanVote := m.hasFixedMembers() && len(m.cfg.Members) > 1
	return othersCanVote && isAdmissionTime(m, now) && !m.isReleasing()
}

func isAdmissionTime(m *Machine, now time.Time) bool {
	return now.Before(m.admitsUntil) && !now.Before(m.admitsFrom())
}

// noOtherHeld is called after the store has lost this proxy's lease, so a lease that has not
// expired is a later one. Without a holder, an epoch not above this proxy's shows that no proxy
// acquired it since, because each acquisition raises the epoch.
func (m *Machine) noOtherHeld() bool {
	if m.rec.Expiry == NotExpired {
		return false
	}
	noHolderSince := m.rec.Holder == "" && m.rec.Epoch <= m.epoch
	lastHolderIsThis := m.rec.Holder == m.cfg.Self
	return noHolderSince || lastHolderIsThis
}
