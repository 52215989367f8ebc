package lease

import (
	"errors"
	"fmt"
	"time"
)

// Call is what a machine wants done next: one call of its engine, or AskBack, the
// question to the holder whether it gives the scope back.
type Call int

// Calls.
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

// Phase is the relation of a dispatcher to a scope.
type Phase string

// Phases.
const (
	Watching   Phase = "watching"   // another dispatcher holds it, or none does
	Recovering Phase = "recovering" // another holds it, and this dispatcher, its home, wants it back
	Starting   Phase = "starting"   // holds it, and waits until the owner before must have stopped
	Owner      Phase = "owner"      // holds it and admits
	Fenced     Phase = "fenced"     // may hold it, but cannot be sure: admits nothing
	Giving     Phase = "giving"     // hands it back
)

// Config is the dispatcher that a machine runs for, and its times.
type Config struct {
	Self string // identity
	Home bool   // the scope is this dispatcher's by configuration
	Rank int    // the place among the dispatchers that may take it over; 0 is the first
	Times

	Members []string  // ids of all dispatchers that may ever own the scope; empty: any dispatcher may
	Begun   time.Time // when the process began; with Members: promises of the process before are not known any more
}

// View is the state of a machine at a moment.
type View struct {
	Phase   Phase
	Admits  bool   // may bind new requests to the scope's engines
	Voted   bool   // admits by the votes of the other members alone, because the store does not confirm renewals
	Differs bool   // the holder lists other members than we do: neither gives the other a promise
	Away    bool   // the store fails, or answers too slowly for an owner to renew in time
	Holder  string // identity, as last read; empty: there is none
	Epoch   int64  // ours while we hold the lease, else as last read
}

// ErrNotHolder is the answer to a dispatcher that asks for a scope which is not held here with
// that epoch.
var ErrNotHolder = errors.New("not held here with this epoch")

// Machine decides when a dispatcher looks at a lease, takes it, renews it and
// gives it back, and whether it may admit meanwhile. All times are of its own
// clock. Next returns one call. The caller reports its outcome before it calls Next again,
// except for AskBack: a holder that hangs must not stop this dispatcher from looking at
// the lease. The other methods may be called at any time.
type Machine struct {
	cfg Config

	rec           Record // as last looked at
	looked        bool
	stale         bool      // rec may be out of date: an acquisition that failed may have written the lease
	changed       time.Time // when another Stamp or Term was last seen
	nextCall      time.Time // no call is made before
	acquiredBlind bool      // an acquisition that was sent while the store did not know the last holder may still succeed
	gaveBack      struct {  // the lease that we released last
		epoch int64 // its epoch; 0: none
		seen  int64 // the highest epoch that was seen by then
	}

	held        bool
	epoch       int64     // the epoch with which we hold the lease, while held
	seen        int64     // highest epoch that was read, held, or named by a dispatcher or by a guard in front of an engine
	renewed     time.Time // when the last acquisition or renewal that succeeded was sent
	admitsUntil time.Time // until when the last renewal or the votes last: nothing is admitted afterwards
	admitsAfter time.Time // nothing is admitted before this time
	away        bool      // the last call of the store failed, or took too long

	promise   promise              // that we gave to an owner that cannot reach the store
	votes     map[string]time.Time // promises to us, by member: when the last promise was asked for
	nextVotes time.Time            // no vote is asked for before
	reclaim   bool                 // the store has lost our lease: it is ours again if votes show that no other proxy admits

	claimed   int64 // an epoch above ours that a dispatcher named; 0: none
	claimedAt time.Time
	refuted   int64     // epochs up to this one that were named are false: a later renewal succeeded
	refusedAt time.Time // when a guard in front of an engine last refused our epoch

	fit         bool
	leaving     bool
	releaseBy   time.Time // the release must be done by then; zero: nothing is given back
	hurryUntil  time.Time // until then the lease is looked at more often, because a release is expected
	nextAskBack time.Time // before this time, the holder is not asked for the scope again
	asking      bool      // a question to the holder is under way
}

// NewMachine returns a machine that has not looked at the lease yet.
func NewMachine(cfg Config) *Machine {
	m := &Machine{cfg: cfg, fit: cfg.Home, votes: map[string]time.Time{}}
	if len(cfg.Members) > 0 { // the process before may have given a promise just before it ended
		m.promise.until = cfg.Begun.Add(cfg.Duration)
	}
	return m
}

// acquire returns Acquire, and notes whether the store does not know the last holder while the acquisition is under
// way.
func (m *Machine) acquire() Call {
	m.acquiredBlind = m.acquiredBlind || m.vague()
	return Acquire
}

// until is when the view next changes by the time alone, or at if that is earlier.
func (m *Machine) until(now, at time.Time) time.Time {
	if m.held {
		for _, t := range []time.Time{m.admitsFrom(), m.admitsUntil, m.renewed.Add(m.cfg.RenewDeadline), m.askAt()} {
			if t.After(now) && t.Before(at) {
				at = t
			}
		}
	}
	return at
}

// released says whether the last holder gave the lease back. That holder stopped
// admission before it did so.
func (m *Machine) released() bool {
	return m.rec.Holder == "" && m.rec.Epoch > 0 && (!m.forgotten() || m.rec.Epoch == m.gaveBack.epoch && m.seen == m.gaveBack.seen)
}

// absent says whether the store had no lease. Then it is not known whether a lease was deleted,
// and when: another dispatcher may have acquired a lease between two looks of ours, and admit.
func (m *Machine) absent() bool { return m.rec.Holder == "" && m.rec.Epoch == 0 }

// forgotten says whether the store knows less than was seen: its lease was deleted, or its
// data were restored from a copy. The lease in the store then says nothing of the last
// holder, which may have renewed it a moment before.
func (m *Machine) forgotten() bool { return m.rec.Epoch < m.seen }

// vague says whether the lease in the store says nothing of the last holder.
func (m *Machine) vague() bool { return m.absent() || m.forgotten() && !m.released() }

// untouched says whether the lease was never held, as far as this dispatcher knows.
func (m *Machine) untouched() bool { return m.absent() && m.seen == 0 }

// expiry is when the holder that was seen last lost the lease, by this clock.
func (m *Machine) expiry() time.Time {
	if m.rec.Term == Over || m.released() || m.untouched() {
		return m.changed
	}
	return m.changed.Add(m.duration())
}

// duration is how long the lease of the holder that was seen last lasts: a holder
// with a longer lease than ours also stops later.
func (m *Machine) duration() time.Duration { return max(m.cfg.Duration, m.rec.Duration) }

// startDelay is the wait between the end of the last holder's lease and the first admission here.
func (m *Machine) startDelay() time.Duration { return max(m.cfg.StartDelay, m.rec.Duration/3) }

// mayAcquire is when the lease may be taken; ok is false if it may not be taken at all now.
func (m *Machine) mayAcquire() (at time.Time, ok bool) {
	if !m.looked || m.stale || !m.fit || m.leaving || m.rec.Term == Running || m.excluded() {
		return time.Time{}, false
	}
	at = m.expiry()
	if !m.cfg.Home {
		if m.released() || m.untouched() { // its home goes first
			at = at.Add(m.cfg.Step)
		}
		at = at.Add(time.Duration(m.cfg.Rank) * m.cfg.RankDelay)
	}
	return later(at, m.promise.until), true
}

// mayAdmit is when this dispatcher may admit, if it acquires the lease now. If the store does not
// know the last holder, it waits a whole lease and a start delay from now on: the last holder may
// have renewed, a moment ago, a lease that the store has lost.
func (m *Machine) mayAdmit(now time.Time) time.Time {
	switch {
	case m.released():
		return m.changed
	case m.vague():
		return now.Add(m.duration() + m.startDelay())
	}
	return m.expiry().Add(m.startDelay())
}

// admitsFrom is when the holder of the lease may begin to admit.
func (m *Machine) admitsFrom() time.Time {
	if m.promise.until.IsZero() {
		return m.admitsAfter
	}
	return later(m.admitsAfter, m.promise.until.Add(m.startDelay()))
}

// later is the later of two times.
func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// wantsBack says whether the scope is to be asked back from its holder.
func (m *Machine) wantsBack() bool {
	return m.cfg.Home && m.fit && !m.leaving && !m.away && !m.excluded() && m.looked && m.rec.Holder != "" && m.rec.Term != Over &&
		Dispatcher(m.rec.Holder) != Dispatcher(m.cfg.Self)
}

// mayAsk says whether the holder is to be asked now for the scope. A dispatcher that could not
// admit yet because of its promise does not ask. The promise that the process before may have
// given does not count here, because it ends when the holder lets go.
func (m *Machine) mayAsk(now time.Time) bool {
	return m.wantsBack() && !m.asking && !now.Before(m.nextAskBack) &&
		(m.promise.to == "" || !now.Before(m.promise.until.Add(m.startDelay())))
}

// GiveBack stops admission and begins the release, for a dispatcher that names the
// epoch. If the release is not done within Step, this dispatcher stays the owner.
func (m *Machine) GiveBack(now time.Time, epoch int64) error {
	if !m.held || epoch != m.epoch {
		return fmt.Errorf("%w: %d", ErrNotHolder, epoch)
	}
	if now.Before(m.admitsFrom()) { // the next holder of a released lease admits at once, and the owner before us may not have stopped yet
		return fmt.Errorf("%w: the owner before may not have stopped yet", ErrNotHolder)
	}
	if m.away { // no dispatcher could take the lease
		return fmt.Errorf("%w: its store does not answer, so no other proxy could take it", ErrNotHolder)
	}
	if m.releaseBy.IsZero() {
		m.releaseBy = now.Add(m.cfg.Step)
	}
	m.nextCall = now
	return nil
}

// Leave gives the scope up for good: the process ends.
func (m *Machine) Leave(now time.Time) {
	m.leaving, m.nextCall = true, now
}

// SetStanding sets what may change when owners are chosen again: home, whether the scope is this
// dispatcher's, so that it takes the lease first and asks for it back; rank, its place among the dispatchers
// that may take the lease; and fit, whether it could serve the scope. It reports whether any of them changed.
func (m *Machine) SetStanding(now time.Time, home bool, rank int, fit bool) (changed bool) {
	changed = m.cfg.Home != home || m.cfg.Rank != rank || m.fit != fit
	if home && !m.cfg.Home {
		m.nextCall = now
	}
	m.cfg.Home, m.cfg.Rank, m.fit = home, rank, fit
	return changed
}

// Claimed records that a dispatcher named an epoch. An epoch above ours stops admission at
// once, until a renewal that is sent later succeeds, and so proves it false.
func (m *Machine) Claimed(now time.Time, epoch int64) {
	m.ObserveEpoch(epoch)
	if m.held && epoch > m.epoch && epoch > m.refuted && epoch > m.claimed {
		m.claimed, m.claimedAt, m.nextCall = epoch, now, now.Add(1)
		m.forgetProofs()
	}
}

// forgetProofs forgets the last renewal and all votes, because they prove nothing any more.
func (m *Machine) forgetProofs() {
	m.renewed, m.admitsUntil, m.reclaim = time.Time{}, time.Time{}, false
	clear(m.votes)
}

// maxEpoch bounds the epochs of others that are believed: a Kubernetes Lease counts to 1<<31.
const maxEpoch = 1 << 30

// ObserveEpoch records an epoch that a dispatcher has seen. The next acquisition gets a
// higher epoch, even if the store has lost its data.
func (m *Machine) ObserveEpoch(epoch int64) {
	if epoch <= maxEpoch {
		m.seen = max(m.seen, epoch)
	}
}

// Refused records that a guard in front of an engine refuses our epoch, because it has seen
// this higher epoch. Then the lease is given back and acquired again, with an epoch
// above it. Within the Duration of a lease, only the first refusal counts.
func (m *Machine) Refused(now time.Time, epoch int64) {
	if !m.held || epoch <= m.epoch || epoch > maxEpoch || m.away || now.Before(m.admitsFrom()) || now.Before(m.refusedAt.Add(m.cfg.Duration)) {
		return
	}
	m.ObserveEpoch(epoch)
	m.refusedAt, m.releaseBy, m.nextCall = now, later(m.releaseBy, now.Add(m.cfg.Step)), now
}

// Jumped records that the computer stood still for longer than its monotonic clock shows.
func (m *Machine) Jumped(now time.Time) {
	if m.held {
		m.forgetProofs()
		m.nextCall = now
	}
}

// View returns the state of the machine now.
func (m *Machine) View(now time.Time) View {
	v := View{Phase: Watching, Differs: m.differs(), Away: m.away, Holder: m.rec.Holder, Epoch: m.rec.Epoch}
	if m.held {
		v.Epoch = m.epoch
	}
	switch {
	case m.held && (m.leaving || !m.releaseBy.IsZero()):
		v.Phase = Giving
	case m.held && (!now.Before(m.admitsUntil) || m.reclaim && !m.hasVotes(now)):
		v.Phase = Fenced
	case m.held && now.Before(m.admitsFrom()):
		v.Phase = Starting
	case m.held:
		v.Phase, v.Admits = Owner, true
		v.Voted = m.reclaim || !now.Before(m.renewed.Add(m.cfg.RenewDeadline))
	case m.wantsBack():
		v.Phase = Recovering
	}
	return v
}
