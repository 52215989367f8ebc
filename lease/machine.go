package lease

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Call is a call of Engine, or AskBack: ask the holder to give the scope back.
type Call int

// Values of Call.
const (
	None Call = iota
	Look
	Acquire
	Renew
	Release
	AskBack
)

func (c Call) String() string {
	return [...]string{"none", "look", "acquire", "renew", "release", "ask back"}[c]
}

// Phase is the relation of a proxy to a scope.
type Phase string

// Values of Phase. A proxy admits requests only in the phase Owner.
const (
	Watching Phase = "watching" // another proxy holds the lease, or no proxy does
	// another proxy holds the lease, and this one, the scope's home, wants it back
	Recovering Phase = "recovering"
	// holds the lease, and waits until the earlier owner must have stopped
	Starting Phase = "starting"
	Owner    Phase = "owner" // holds the lease and admits
	// admits nothing, because the proxy may have lost the lease without knowing
	Fenced Phase = "fenced"
	Giving Phase = "giving" // is about to release the lease, and admits nothing
)

// Config describes the proxy for which a machine runs, and its times.
type Config struct {
	Self         string // identity of this process, see Identity
	Home         bool   // by configuration, the scope belongs to this proxy
	TakeoverRank int    // this proxy's place among those that may take the scope over; 0 is the first
	Times

	// MaxEpoch is the highest epoch that is accepted from other proxies and guards, so that the store
	// can count on from it. 0: 1<<30, because the epoch of a Kubernetes Lease must stay below 1<<31.
	MaxEpoch int64

	Members []string // ids of all proxies that may ever own the scope; empty: any proxy may
	// start of this process; matters with Members: an earlier process may have given promises until
	// then
	Begun time.Time
}

// View is the state of a machine at one time.
type View struct {
	Phase  Phase
	Admits bool // may send new requests to the scope's engines
	// admits by the promises of the other members alone, because the store does not confirm renewals
	Voted bool
	// the holder lists other members than this proxy: neither gives the other a promise
	MembersDiffer bool
	StoreAway     bool   // the store fails, or answers too slowly for an owner to renew in time
	Holder        string // identity of the holder at the last look; empty: no holder
	// epoch of this proxy's lease while it holds one, else of the lease at the last look
	Epoch int64
}

// ErrNotHolder says that this proxy does not hold the lease with the epoch that was named.
var ErrNotHolder = errors.New("not held here with this epoch")

// Machine decides when a proxy looks at a lease, takes it, renews it and gives it back, and whether
// the proxy may admit meanwhile. All times are read from this proxy's clock. The caller reports the
// outcome of a call before it calls Next again. Only after AskBack may it call Next before the
// answer comes: a holder that hangs must not keep this proxy from looking at the lease. The other
// methods may be called at any time.
type Machine struct {
	cfg Config

	rec         Record // as read or acquired last
	recValid    bool   // false before the first look, and after the lease was lost or released
	acquireSent bool
	// rec may be out of date, because a failed acquisition may have written the lease
	acquireInDoubt bool
	// when Stamp or Expiry of rec last changed, or rec was last seen not to have expired
	recChangedAt time.Time
	nextCall     time.Time // earliest time of the next call
	// an acquisition that was sent while the store did not know the last holder may still succeed
	blindAcquirePending bool
	lastReleased        struct {
		epoch        int64 // 0: this process has released none
		maxEpochSeen int64 // value of Machine.maxEpochSeen at that release
	}

	held         bool  // as far as this proxy knows
	epoch        int64 // epoch of the lease that is held, or was held last
	maxEpochSeen int64 // highest epoch that was read, held, or named by a proxy or a guard
	// when the last successful acquisition or renewal was sent; zero: no proof that the lease is held
	renewed time.Time
	// end of admission: from then on, neither the last renewal nor the votes count
	admitsUntil     time.Time
	admitsNotBefore time.Time // start of admission: until then, an earlier owner may still admit
	storeAway       bool

	// this proxy's promise not to admit, given to an owner that cannot reach the store
	givenPromise promise
	// by member: when this proxy requested the last promise that the member gave
	votes     map[string]time.Time
	nextVotes time.Time
	// storeLostLease: the store has lost the lease that this proxy counts as holding. The proxy may
	// acquire it again once all other members have voted for it.
	storeLostLease bool

	rivalEpoch     int64 // a higher epoch by which another proxy claims the scope; 0: none
	rivalNamedAt   time.Time
	disprovenEpoch int64     // rival epochs up to this one do not exist: a later renewal succeeded
	refusedAt      time.Time // when a guard last refused this proxy's epoch

	canServe bool
	stopping bool
	// after GiveBack or Refused, Release is called until then, and then the lease is kept; zero:
	// neither came
	tryReleaseUntil time.Time
	// until then the lease is read more often, because its holder is about to release it
	lookOftenUntil time.Time
	nextAskBack    time.Time
	askingBack     bool // the holder has not answered this proxy's AskBack yet
}

// NewMachine returns a machine that admits nothing yet. Until SetRole is called, only the scope's
// home counts as able to serve it.
func NewMachine(cfg Config) *Machine {
	cfg.MaxEpoch = cmp.Or(cfg.MaxEpoch, 1<<30)
	m := &Machine{cfg: cfg, canServe: cfg.Home, votes: map[string]time.Time{}}
	// an earlier process of this proxy may have given a promise just before it ended
	if len(cfg.Members) > 0 {
		m.givenPromise.until = cfg.Begun.Add(cfg.Duration)
	}
	return m
}

// startAcquire notes a blind acquisition. If its answer is lost and a later look shows that it
// succeeded, this proxy also waits for a whole lease before it admits.
func (m *Machine) startAcquire() Call {
	m.blindAcquirePending = m.blindAcquirePending || m.lastHolderUnknown()
	return Acquire
}

// nextTimer is when the view next changes, or votes are due, if no event comes earlier; at most
// latest.
func (m *Machine) nextTimer(now, latest time.Time) time.Time {
	next := latest
	if m.held {
		renewalEnds := m.renewed.Add(m.cfg.RenewDeadline) // after that, only votes let the holder admit
		for _, t := range []time.Time{m.admitsFrom(), m.admitsUntil, renewalEnds, m.votesDueAt()} {
			if t.After(now) && t.Before(next) {
				next = t
			}
		}
	}
	return next
}

// releasedByHolder: a holder stops admission before it releases the lease. If a higher epoch was
// seen than the record has, the store may have forgotten a later holder, and then only a release by
// this proxy itself proves anything.
func (m *Machine) releasedByHolder() bool {
	released := m.rec.Holder == "" && m.rec.Epoch > 0
	noHigherEpochSince := m.maxEpochSeen == m.lastReleased.maxEpochSeen
	releasedByThisProxy := m.rec.Epoch == m.lastReleased.epoch && noHigherEpochSince
	return released && (releasedByThisProxy || !m.storeForgotEpochs())
}

// storeHasNoLease: a lease may have been deleted at an unknown time, and another proxy may have
// acquired it between two looks, and may still admit.
func (m *Machine) storeHasNoLease() bool { return m.rec.Holder == "" && m.rec.Epoch == 0 }

// storeForgotEpochs: the lease was deleted, or the store's data were restored from a copy. The
// lease in the store then says nothing about the last holder, which may have renewed a moment
// before.
func (m *Machine) storeForgotEpochs() bool { return m.rec.Epoch < m.maxEpochSeen }

func (m *Machine) lastHolderUnknown() bool {
	return m.storeHasNoLease() || m.storeForgotEpochs() && !m.releasedByHolder()
}

func (m *Machine) neverHeld() bool { return m.storeHasNoLease() && m.maxEpochSeen == 0 }

// leaseEnds is when the last known holder's lease ends at the latest: it was renewed no later than
// this proxy saw the record change.
func (m *Machine) leaseEnds() time.Time {
	if m.rec.Expiry == Expired || m.releasedByHolder() || m.neverHeld() {
		return m.recChangedAt
	}
	return m.recChangedAt.Add(m.leaseLastsAtMost())
}

// leaseLastsAtMost: a holder with a longer lease also stops later.
func (m *Machine) leaseLastsAtMost() time.Duration { return max(m.cfg.Duration, m.rec.Duration) }

// startDelay is the wait from the end of the last holder's lease to this proxy's first admission.
func (m *Machine) startDelay() time.Duration { return max(m.cfg.StartDelay, m.rec.Duration/3) }

// acquirableFrom is the time from which this proxy may take the lease; ok is false if it may not
// take it at all.
func (m *Machine) acquirableFrom() (at time.Time, ok bool) {
	recordIsKnown := m.recValid && !m.acquireInDoubt
	mayOwn := m.canServe && !m.stopping && !m.excluded()
	// by the store's own clock, which counts more than leaseEnds
	holderIsAlive := m.rec.Expiry == NotExpired
	if !recordIsKnown || !mayOwn || holderIsAlive {
		return time.Time{}, false
	}
	at = m.leaseEnds()
	if !m.cfg.Home {
		// A lease that was released or never held is free at once, so the home gets Step to take it
		// first. It gets no such time after an expiry: the scope has been without an owner already.
		if m.releasedByHolder() || m.neverHeld() {
			at = at.Add(m.cfg.Step)
		}
		// so that not all proxies try at once
		at = at.Add(time.Duration(m.cfg.TakeoverRank) * m.cfg.RankDelay)
	}
	return later(at, m.givenPromise.until), true
}

// admitsFromIfAcquired: if the store does not know the last holder, that holder may just have
// renewed a lease that the store then lost.
func (m *Machine) admitsFromIfAcquired(now time.Time) time.Time {
	switch {
	case m.releasedByHolder():
		return m.recChangedAt
	case m.lastHolderUnknown():
		return now.Add(m.leaseLastsAtMost() + m.startDelay())
	}
	return m.leaseEnds().Add(m.startDelay())
}

// admitsFrom: after a promise this proxy also waits a start delay, as after a lease that has
// expired, because the clocks may differ in speed.
func (m *Machine) admitsFrom() time.Time {
	if m.givenPromise.until.IsZero() {
		return m.admitsNotBefore
	}
	return later(m.admitsNotBefore, m.givenPromise.until.Add(m.startDelay()))
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

func (m *Machine) wantsBack() bool {
	// otherwise no proxy would own the scope after the hand-back
	couldOwn := m.canServe && !m.stopping && !m.storeAway && !m.excluded()
	if !m.cfg.Home || !couldOwn {
		return false
	}
	isHeld := m.recValid && m.rec.Holder != "" && m.rec.Expiry != Expired
	holder, self := Dispatcher(m.rec.Holder), Dispatcher(m.cfg.Self)
	return isHeld && holder != self
}

// mayAskBack: a promise that an earlier process may have given does not count here, because it ends
// when the holder releases the lease.
func (m *Machine) mayAskBack(now time.Time) bool {
	promiseIsOver := m.givenPromise.to == "" || !now.Before(m.givenPromise.until.Add(m.startDelay()))
	pauseIsOver := !m.askingBack && !now.Before(m.nextAskBack)
	return m.wantsBack() && pauseIsOver && promiseIsOver
}

// GiveBack stops admission and begins to release the lease with this epoch. If no release succeeds
// within Step, this proxy remains the owner. ErrNotHolder: a release would leave the scope with two
// owners or none, or the lease is not held here.
func (m *Machine) GiveBack(now time.Time, epoch int64) error {
	if !m.held || epoch != m.epoch {
		return fmt.Errorf("%w: %d", ErrNotHolder, epoch)
	}
	// after a release the next holder admits at once, but the earlier owner may still admit
	if now.Before(m.admitsFrom()) {
		return fmt.Errorf("%w: the owner before may not have stopped yet", ErrNotHolder)
	}
	if m.storeAway {
		return fmt.Errorf("%w: its store does not answer, so no other proxy could take it", ErrNotHolder)
	}
	if m.tryReleaseUntil.IsZero() { // a repeated question does not prolong the time
		m.tryReleaseUntil = now.Add(m.cfg.Step) // this also stops admission
	}
	m.nextCall = now
	return nil
}

// Leave gives the scope up for good. The lease is released, except while an earlier owner may still
// admit: then it is left to expire.
func (m *Machine) Leave(now time.Time) {
	m.stopping, m.nextCall = true, now
}

// SetRole reports whether anything changed. home: the scope belongs to this proxy. canServe: it is
// healthy enough to take the lease.
func (m *Machine) SetRole(now time.Time, home bool, takeoverRank int, canServe bool) (changed bool) {
	changed = m.cfg.Home != home || m.cfg.TakeoverRank != takeoverRank || m.canServe != canServe
	if home && !m.cfg.Home { // it does not wait for the next look
		m.nextCall = now
	}
	m.cfg.Home, m.cfg.TakeoverRank, m.canServe = home, takeoverRank, canServe
	return changed
}

// ObserveRivalEpoch records that another proxy claims the scope with this epoch. A higher epoch
// than this proxy's stops admission at once. A renewal that is sent later and succeeds proves that
// the epoch does not exist, and admission continues.
func (m *Machine) ObserveRivalEpoch(now time.Time, epoch int64) {
	m.ObserveEpoch(epoch)
	// otherwise a repeated claim would stop admission again and again
	isNews := epoch > m.disprovenEpoch && epoch > m.rivalEpoch
	if m.held && epoch > m.epoch && isNews {
		m.stopUntilRenewed(now, epoch)
	}
}

func (m *Machine) stopUntilRenewed(now time.Time, epoch int64) {
	m.forgetRenewalAndVotes()
	m.rivalEpoch, m.rivalNamedAt = epoch, now
	// 1 ns later, because only a renewal that is sent after rivalNamedAt disproves the epoch
	m.nextCall = now.Add(1)
}

func (m *Machine) forgetRenewalAndVotes() {
	m.renewed, m.admitsUntil, m.storeLostLease = time.Time{}, time.Time{}, false
	clear(m.votes)
}

// ObserveEpoch records an epoch that another proxy has seen. The next acquisition gets a higher
// one, even if the store has lost its data. An epoch above MaxEpoch can only be a mistake or an
// attack, and the store could not count on from it.
func (m *Machine) ObserveEpoch(epoch int64) {
	if epoch <= m.cfg.MaxEpoch {
		m.maxEpochSeen = max(m.maxEpochSeen, epoch)
	}
}

// Refused records that a guard in front of an engine has seen this higher epoch. Only an
// acquisition gets a new epoch, above all that were seen, so the lease must be released first. If
// no release succeeds within Step, the lease is kept. Within the Duration of a lease, only the
// first refusal counts.
func (m *Machine) Refused(now time.Time, epoch int64) {
	// not while the store is away, or an earlier owner may still admit
	mayRelease := m.held && !m.storeAway && !now.Before(m.admitsFrom())
	tooSoon := now.Before(m.refusedAt.Add(m.cfg.Duration))
	isHigher := epoch > m.epoch && epoch <= m.cfg.MaxEpoch
	if !mayRelease || tooSoon || !isHigher {
		return
	}
	m.ObserveEpoch(epoch)
	m.refusedAt, m.nextCall = now, now
	// a hand-back that has begun may have set it already
	m.tryReleaseUntil = later(m.tryReleaseUntil, now.Add(m.cfg.Step))
}

// Suspended records that the computer was suspended: nothing is admitted until the lease is
// renewed.
func (m *Machine) Suspended(now time.Time) {
	if m.held {
		m.forgetRenewalAndVotes()
		m.nextCall = now
	}
}

// View changes nothing.
func (m *Machine) View(now time.Time) View {
	v := View{Phase: Watching, MembersDiffer: m.membersDiffer(), StoreAway: m.storeAway, Holder: m.rec.Holder, Epoch: m.rec.Epoch}
	if m.held {
		v.Epoch = m.epoch
	}
	switch {
	case m.held && m.isReleasing():
		v.Phase = Giving
	case m.held && !now.Before(m.admitsUntil):
		v.Phase = Fenced
	case m.held && m.storeLostLease && !m.hasVotes(now): // the renewal of a lost lease proves nothing
		v.Phase = Fenced
	case m.held && now.Before(m.admitsFrom()):
		v.Phase = Starting
	case m.held:
		v.Phase, v.Admits = Owner, true
		renewalRunOut := !now.Before(m.renewed.Add(m.cfg.RenewDeadline))
		v.Voted = m.storeLostLease || renewalRunOut
	case m.wantsBack():
		v.Phase = Recovering
	}
	return v
}
