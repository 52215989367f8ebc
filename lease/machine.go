package lease

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Call is a call that a machine wants to be made: a call of its engine, or AskBack, the request to the holder to give the
// scope back.
type Call int

// Values of Call. None means that nothing is to be done now. Look, Acquire, Renew and Release are the methods of Engine.
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
	Watching   Phase = "watching"   // another proxy holds the lease, or no proxy does
	Recovering Phase = "recovering" // another proxy holds the lease, and this one, the scope's home, wants it back
	Starting   Phase = "starting"   // holds the lease, and waits until the earlier owner must have stopped
	Owner      Phase = "owner"      // holds the lease and admits
	Fenced     Phase = "fenced"     // admits nothing, because the proxy may have lost the lease without knowing
	Giving     Phase = "giving"     // is about to release the lease, and admits nothing
)

// Config describes the proxy for which a machine runs, and its times.
type Config struct {
	Self         string // identity of this process, see Identity
	Home         bool   // by configuration, the scope belongs to this proxy
	TakeoverRank int    // this proxy's place among those that may take the scope over; 0 is the first
	Times

	// MaxEpoch is the highest epoch that is accepted from other proxies and guards, so that the store can count on from
	// it. 0: 1<<30, because the epoch of a Kubernetes Lease must stay below 1<<31.
	MaxEpoch int64

	Members []string  // ids of all proxies that may ever own the scope; empty: any proxy may
	Begun   time.Time // start of this process; matters with Members: an earlier process may have given promises until then
}

// View is the state of a machine at one time.
type View struct {
	Phase         Phase
	Admits        bool   // may send new requests to the scope's engines
	Voted         bool   // admits by the promises of the other members alone, because the store does not confirm renewals
	MembersDiffer bool   // the holder lists other members than this proxy: neither gives the other a promise
	StoreAway     bool   // the store fails, or answers too slowly for an owner to renew in time
	Holder        string // identity of the holder at the last look; empty: no holder
	Epoch         int64  // epoch of this proxy's lease while it holds one, else of the lease at the last look
}

// ErrNotHolder is the answer to a proxy that asks for a scope which this proxy does not hold with the epoch that
// was named.
var ErrNotHolder = errors.New("not held here with this epoch")

// Machine decides when a proxy looks at a lease, takes it, renews it and gives it back, and whether the proxy may
// admit meanwhile. All times are read from this proxy's clock. Next returns one call. The caller reports the outcome
// of the call before it calls Next again. Only after AskBack may it call Next before the answer comes, because a holder that
// hangs must not keep this proxy from looking at the lease. The other methods may be called at any time.
type Machine struct {
	cfg Config

	rec                 Record    // the lease, as read or acquired last
	recValid            bool      // rec is valid; false before the first look, and after this proxy has lost or released its lease
	acquireSent         bool      // this machine has sent an acquisition
	acquireInDoubt      bool      // rec may be out of date, because a failed acquisition may have written the lease
	recChangedAt        time.Time // when this proxy last saw the Stamp or Expiry of rec change, or last saw that rec has not expired
	nextCall            time.Time // earliest time of the next call
	blindAcquirePending bool      // an acquisition that was sent while the store did not know the last holder may still succeed
	lastReleased        struct {  // the lease that this proxy last released
		epoch        int64 // epoch of that lease; 0: this process has released none
		maxEpochSeen int64 // value of Machine.maxEpochSeen at the time of that release
	}

	held            bool      // this proxy holds the lease, as far as it knows
	epoch           int64     // the epoch of the lease that is held, or was held last
	maxEpochSeen    int64     // highest epoch that was read, held, or named by a proxy or by a guard in front of an engine
	renewed         time.Time // when the last successful acquisition or renewal was sent; zero: no proof that the lease is still held
	admitsUntil     time.Time // end of admission: from then on, neither the last renewal nor the votes count
	admitsNotBefore time.Time // start of admission: until then, an earlier owner may still admit
	storeAway       bool      // the last call of the store failed, or took too long

	givenPromise promise              // this proxy's promise not to admit, given to an owner that cannot reach the store
	votes        map[string]time.Time // by member: when this proxy requested the last promise that the member gave
	nextVotes    time.Time            // no vote is requested before this time
	// storeLostLease is set while this proxy counts as the holder of a lease that the store has lost. It may acquire the lease again
	// once all other members have voted for it.
	storeLostLease bool

	rivalEpoch     int64     // an epoch above this proxy's by which another proxy says that it owns the scope; 0: none
	rivalNamedAt   time.Time // when another proxy named rivalEpoch
	disprovenEpoch int64     // rival epochs up to this one do not exist: a renewal succeeded after they were named
	refusedAt      time.Time // when a guard in front of an engine last refused this proxy's epoch

	canServe        bool      // this proxy is healthy enough to serve the scope
	stopping        bool      // the process ends, so the lease is given up and never acquired again
	tryReleaseUntil time.Time // after GiveBack or Refused, Release is called until this time, and then the lease is kept; zero: neither came
	lookOftenUntil  time.Time // until this time the lease is read more often, because its holder is about to release it
	nextAskBack     time.Time // before this time, the holder is not asked for the scope again
	askingBack      bool      // the holder has not answered this proxy's AskBack yet
}

// NewMachine returns a machine that admits nothing yet. Its first call reads the lease (Look). Until SetRole says whether this proxy can
// serve the scope, only its home counts as able to: the proxy to which the scope belongs.
func NewMachine(cfg Config) *Machine {
	cfg.MaxEpoch = cmp.Or(cfg.MaxEpoch, 1<<30)
	m := &Machine{cfg: cfg, canServe: cfg.Home, votes: map[string]time.Time{}}
	if len(cfg.Members) > 0 { // an earlier process of this proxy may have given a promise just before it ended
		m.givenPromise.until = cfg.Begun.Add(cfg.Duration)
	}
	return m
}

// startAcquire returns Acquire. It also notes a blind acquisition, which is one while the store says nothing about the last holder. If the
// answer to the call is lost and a later look shows that it succeeded, this proxy then also waits for a whole lease before it admits.
func (m *Machine) startAcquire() Call {
	m.blindAcquirePending = m.blindAcquirePending || m.lastHolderUnknown()
	return Acquire
}

// nextTimer returns when the caller must look at the machine again if no event comes earlier: the next of four times, or latest, if that is
// earlier. At three of them the view changes: a holder begins to admit requests, it must stop, or its last renewal no longer counts. At the
// fourth, the holder must ask the other members for votes. A vote is a member's promise not to admit for a while. With the votes of all
// other members, a holder may go on to admit even if the store confirms no renewal.
func (m *Machine) nextTimer(now, latest time.Time) time.Time {
	next := latest
	if m.held { // without a lease, only the outcome of a call changes the view
		renewalEnds := m.renewed.Add(m.cfg.RenewDeadline) // after that, only votes let the holder admit
		for _, t := range []time.Time{m.admitsFrom(), m.admitsUntil, renewalEnds, m.votesDueAt()} {
			if t.After(now) && t.Before(next) {
				next = t
			}
		}
	}
	return next
}

// releasedByHolder reports whether the last holder released the lease. A holder stops admission before it releases the lease. If a higher
// epoch was seen than the record has (storeForgotEpochs), the store may have forgotten a later holder, and then the release proves nothing.
// It still does if this proxy itself released the lease, and has seen no higher epoch since.
func (m *Machine) releasedByHolder() bool {
	released := m.rec.Holder == "" && m.rec.Epoch > 0
	noHigherEpochSince := m.maxEpochSeen == m.lastReleased.maxEpochSeen
	releasedByThisProxy := m.rec.Epoch == m.lastReleased.epoch && noHigherEpochSince
	return released && (releasedByThisProxy || !m.storeForgotEpochs())
}

// storeHasNoLease reports whether the store had no lease at the last look. A lease may have been deleted at an unknown time: another
// proxy may have acquired it between two looks of this proxy, and may still admit.
func (m *Machine) storeHasNoLease() bool { return m.rec.Holder == "" && m.rec.Epoch == 0 }

// storeForgotEpochs reports whether the store has a lower epoch than was seen, because the lease was deleted or the store's data
// were restored from a copy. The lease in the store then says nothing about the last holder, which may have renewed a
// moment before.
func (m *Machine) storeForgotEpochs() bool { return m.rec.Epoch < m.maxEpochSeen }

// lastHolderUnknown reports whether the lease in the store says nothing about the last holder.
func (m *Machine) lastHolderUnknown() bool {
	return m.storeHasNoLease() || m.storeForgotEpochs() && !m.releasedByHolder()
}

// neverHeld reports whether the lease was never held, as far as this proxy knows.
func (m *Machine) neverHeld() bool { return m.storeHasNoLease() && m.maxEpochSeen == 0 }

// leaseEnds is when the lease of the last known holder ends or ended at the latest, by this proxy's clock. The holder renewed it no later
// than this proxy saw the record change.
func (m *Machine) leaseEnds() time.Time {
	if m.rec.Expiry == Expired || m.releasedByHolder() || m.neverHeld() { // there is no lease any more that could last longer
		return m.recChangedAt
	}
	return m.recChangedAt.Add(m.leaseLastsAtMost())
}

// leaseLastsAtMost is the longer of this proxy's lease duration and the last known holder's: a holder with a longer lease also
// stops later.
func (m *Machine) leaseLastsAtMost() time.Duration { return max(m.cfg.Duration, m.rec.Duration) }

// startDelay is the wait from the end of the last holder's lease to this proxy's first admission.
func (m *Machine) startDelay() time.Duration { return max(m.cfg.StartDelay, m.rec.Duration/3) }

// acquirableFrom is the time from which this proxy may take the lease; ok is false if it may not take the lease at all. The scope's home,
// the proxy to which the scope belongs, may take it when the last holder's lease ends. Another proxy waits for RankDelay more, multiplied
// by its TakeoverRank, and also for Step if the lease was released or never held.
func (m *Machine) acquirableFrom() (at time.Time, ok bool) {
	recordIsKnown := m.recValid && !m.acquireInDoubt
	mayOwn := m.canServe && !m.stopping && !m.excluded()
	holderIsAlive := m.rec.Expiry == NotExpired // by the store's own clock, which counts more than the time that leaseEnds computes
	if !recordIsKnown || !mayOwn || holderIsAlive {
		return time.Time{}, false
	}
	at = m.leaseEnds()
	if !m.cfg.Home {
		// A lease that was released or never held is free at once, so the home gets the time Step to take it first. It gets no
		// such time after an expiry: the scope has been without an owner for a while already.
		if m.releasedByHolder() || m.neverHeld() {
			at = at.Add(m.cfg.Step)
		}
		at = at.Add(time.Duration(m.cfg.TakeoverRank) * m.cfg.RankDelay) // so that not all proxies try at the same time
	}
	// This proxy may have promised another owner, which could not reach the store, not to take the lease for a while.
	return later(at, m.givenPromise.until), true
}

// admitsFromIfAcquired is when this proxy may begin to admit if it acquires the lease now. If the store does not know the last
// holder, this is after a whole lease and a start delay: the last holder may just have renewed a lease that the store then lost.
func (m *Machine) admitsFromIfAcquired(now time.Time) time.Time {
	switch {
	case m.releasedByHolder(): // the last holder stopped admission before it released the lease
		return m.recChangedAt
	case m.lastHolderUnknown():
		return now.Add(m.leaseLastsAtMost() + m.startDelay())
	}
	return m.leaseEnds().Add(m.startDelay())
}

// admitsFrom is when this proxy may begin to admit by the lease that it holds. If it has promised another owner not to admit, it
// also waits until the promise is over, and a start delay longer, as after a lease that has expired: the clocks may differ in speed.
func (m *Machine) admitsFrom() time.Time {
	if m.givenPromise.until.IsZero() { // no promise was given
		return m.admitsNotBefore
	}
	return later(m.admitsNotBefore, m.givenPromise.until.Add(m.startDelay()))
}

// later returns the later of two times; the zero time is before all others.
func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// wantsBack reports whether this proxy should get the scope back from its holder: it is the scope's home, it could take the
// lease and serve the scope, and another proxy holds the lease.
func (m *Machine) wantsBack() bool {
	couldOwn := m.canServe && !m.stopping && !m.storeAway && !m.excluded() // otherwise no proxy would own the scope after the hand-back
	if !m.cfg.Home || !couldOwn {
		return false
	}
	isHeld := m.recValid && m.rec.Holder != "" && m.rec.Expiry != Expired
	holder, self := Dispatcher(m.rec.Holder), Dispatcher(m.cfg.Self) // the ids of the proxies, without the names of their processes
	return isHeld && holder != self
}

// mayAskBack reports whether to ask the holder for the scope now. A proxy does not ask while a promise keeps it from
// admitting. A promise that an earlier process may have given does not count here, because it ends when the holder
// releases the lease.
func (m *Machine) mayAskBack(now time.Time) bool {
	promiseIsOver := m.givenPromise.to == "" || !now.Before(m.givenPromise.until.Add(m.startDelay()))
	pauseIsOver := !m.askingBack && !now.Before(m.nextAskBack) // the last question was answered, and long enough ago
	return m.wantsBack() && pauseIsOver && promiseIsOver
}

// GiveBack stops admission and begins to release the lease, for a proxy that asks for the scope and names the lease's epoch. If no release
// succeeds within Step, the time limit of each step of a hand-back, this proxy remains the owner. An error (ErrNotHolder with a reason)
// says why the lease is kept: this proxy does not hold it with this epoch, or a release would leave the scope with two owners or none.
func (m *Machine) GiveBack(now time.Time, epoch int64) error {
	if !m.held || epoch != m.epoch {
		return fmt.Errorf("%w: %d", ErrNotHolder, epoch)
	}
	if now.Before(m.admitsFrom()) { // after a release the next holder admits at once, but the earlier owner may still admit
		return fmt.Errorf("%w: the owner before may not have stopped yet", ErrNotHolder)
	}
	if m.storeAway { // the store fails or is slow: after a release, no other proxy could take the lease
		return fmt.Errorf("%w: its store does not answer, so no other proxy could take it", ErrNotHolder)
	}
	if m.tryReleaseUntil.IsZero() { // a repeated question does not prolong the time
		m.tryReleaseUntil = now.Add(m.cfg.Step) // this also stops admission
	}
	m.nextCall = now // Next then returns Release
	return nil
}

// Leave gives the scope up for good, because the process ends. The next call releases the lease, except while an earlier owner may
// still admit: then the lease is left to expire.
func (m *Machine) Leave(now time.Time) {
	m.stopping, m.nextCall = true, now
}

// SetRole changes this proxy's role for the scope, and reports whether anything changed. home: the scope belongs to
// this proxy, which takes the lease first and asks for it back. takeoverRank is its place among the proxies that may take
// the lease; 0 is the first. canServe: this proxy is healthy enough to serve the scope; otherwise it does not take the lease.
func (m *Machine) SetRole(now time.Time, home bool, takeoverRank int, canServe bool) (changed bool) {
	changed = m.cfg.Home != home || m.cfg.TakeoverRank != takeoverRank || m.canServe != canServe
	if home && !m.cfg.Home { // the home does not wait for the next look before it takes the lease or asks for it
		m.nextCall = now
	}
	m.cfg.Home, m.cfg.TakeoverRank, m.canServe = home, takeoverRank, canServe
	return changed
}

// ObserveRivalEpoch records that another proxy says that it owns the scope with this epoch. An epoch above this proxy's own
// stops admission at once. A renewal that is sent later and succeeds proves that the named epoch does not exist, and admission
// continues.
func (m *Machine) ObserveRivalEpoch(now time.Time, epoch int64) {
	m.ObserveEpoch(epoch)
	isNews := epoch > m.disprovenEpoch && epoch > m.rivalEpoch // otherwise a repeated claim would stop admission again and again
	if m.held && epoch > m.epoch && isNews {
		m.stopUntilRenewed(now, epoch)
	}
}

// stopUntilRenewed stops admission until a renewal succeeds, because another proxy named an epoch above this proxy's.
func (m *Machine) stopUntilRenewed(now time.Time, epoch int64) {
	m.forgetRenewalAndVotes()
	m.rivalEpoch, m.rivalNamedAt = epoch, now
	m.nextCall = now.Add(1) // 1 ns later, because only a renewal that is sent after rivalNamedAt disproves the epoch
}

// forgetRenewalAndVotes drops the last renewal and all votes, because they no longer prove that the lease is held. Until the next renewal
// succeeds, nothing is admitted.
func (m *Machine) forgetRenewalAndVotes() {
	m.renewed, m.admitsUntil, m.storeLostLease = time.Time{}, time.Time{}, false
	clear(m.votes)
}

// ObserveEpoch records an epoch that another proxy has seen. The next acquisition gets a higher epoch, even if the store has lost its data.
// An epoch above MaxEpoch is ignored: it can only be a mistake or an attack, and the store could not count on from it.
func (m *Machine) ObserveEpoch(epoch int64) {
	if epoch <= m.cfg.MaxEpoch {
		m.maxEpochSeen = max(m.maxEpochSeen, epoch)
	}
}

// Refused records that a guard in front of an engine refuses this proxy's epoch, because the guard has seen the higher epoch that is given.
// A holder cannot raise its epoch. Only an acquisition gets a new one, above all that were seen, so the lease must be released first.
// Refused sets tryReleaseUntil: as long as this is set, nothing is admitted, and until this time Next returns Release. After a release,
// this proxy or another acquires the lease. If no release succeeds within Step, the lease is kept. Within the Duration of a lease, only the
// first refusal counts.
func (m *Machine) Refused(now time.Time, epoch int64) {
	mayRelease := m.held && !m.storeAway && !now.Before(m.admitsFrom()) // not while the store is away, or an earlier owner may still admit
	tooSoon := now.Before(m.refusedAt.Add(m.cfg.Duration))
	isHigher := epoch > m.epoch && epoch <= m.cfg.MaxEpoch // the store could not count on from an epoch above MaxEpoch
	if !mayRelease || tooSoon || !isHigher {
		return
	}
	m.ObserveEpoch(epoch)
	m.refusedAt, m.nextCall = now, now
	m.tryReleaseUntil = later(m.tryReleaseUntil, now.Add(m.cfg.Step)) // a hand-back that has begun may have set it already
}

// Suspended records that the computer was suspended: more time has passed than its monotonic clock shows. Nothing is admitted until
// the lease is renewed.
func (m *Machine) Suspended(now time.Time) {
	if m.held {
		m.forgetRenewalAndVotes()
		m.nextCall = now
	}
}

// View returns the state of the machine at the time now. It changes nothing. A proxy that holds the lease admits in the phase Owner. A
// renewal lets it admit for the time RenewDeadline. So do votes, the promises of all other members not to admit meanwhile, from the time at
// which the oldest of them was requested. admitsUntil is when both have run out.
func (m *Machine) View(now time.Time) View {
	v := View{Phase: Watching, MembersDiffer: m.membersDiffer(), StoreAway: m.storeAway, Holder: m.rec.Holder, Epoch: m.rec.Epoch}
	if m.held { // the epoch of this proxy's own lease, which the record may not show
		v.Epoch = m.epoch
	}
	switch {
	case m.held && m.isReleasing():
		v.Phase = Giving
	case m.held && !now.Before(m.admitsUntil): // the last renewal and the votes have run out
		v.Phase = Fenced
	case m.held && m.storeLostLease && !m.hasVotes(now): // the renewal of a lost lease proves nothing, and votes are missing
		v.Phase = Fenced
	case m.held && now.Before(m.admitsFrom()):
		v.Phase = Starting
	case m.held:
		v.Phase, v.Admits = Owner, true
		renewalRunOut := !now.Before(m.renewed.Add(m.cfg.RenewDeadline))
		v.Voted = m.storeLostLease || renewalRunOut // then only the votes let this proxy admit
	case m.wantsBack():
		v.Phase = Recovering
	}
	return v
}
