package lease

import (
	"errors"
	"fmt"
	"time"
)

// Call is what a machine wants done next: one call of its engine, or the
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

// Phase is where a dispatcher stands towards a scope.
type Phase string

// Phases.
const (
	Watching   Phase = "watching"   // another holds it, or nobody
	Recovering Phase = "recovering" // this is its home, and another holds it
	Starting   Phase = "starting"   // holds it, waits until the one before must have stopped
	Owner      Phase = "owner"      // holds it and admits
	Fenced     Phase = "fenced"     // holds it as far as it knows and cannot be sure: admits nothing
	Giving     Phase = "giving"     // hands it back
)

// Config says who a machine speaks for.
type Config struct {
	Self string // identity
	Home bool   // the scope is this dispatcher's by configuration
	Rank int    // among those that may take it over, 0 first
	Times

	Members []string  // ids of all dispatchers that may ever own the scope; none: whoever asks the store may
	Begun   time.Time // when the process began, with Members: what it promised before is not known any more
}

// View is what a machine holds true at a moment.
type View struct {
	Phase   Phase
	Admits  bool   // may bind new requests to the scope's engines
	Voted   bool   // admits by the votes of the other members alone, for the store confirms nothing
	Differs bool   // the holder lists other members than we do: it gets no promise from us, and we none from it
	Away    bool   // the store fails, or answers too slowly for an owner to renew in time
	Holder  string // identity, as last read; empty: nobody
	Epoch   int64  // ours while we hold the lease, else as last read
}

// ErrNotHolder is the answer to who asks for a scope that is not held here with
// that epoch.
var ErrNotHolder = errors.New("not held here with this epoch")

// Machine decides when a dispatcher looks at a lease, takes it, renews it and
// gives it back, and whether it may admit meanwhile. All times are of its own
// clock. Next names one call, whose outcome is told before Next is asked again,
// except for AskBack: a holder that hangs must not keep anybody from looking at
// the lease. The other methods may come at any time.
type Machine struct {
	cfg Config

	rec     Record // as last looked at
	looked  bool
	stale   bool      // it has been written since
	changed time.Time // when another Stamp or Term was last seen
	try     time.Time // no call before
	bare    bool      // an acquisition may still succeed that was sent when the store said nothing of the last holder
	gave    struct {  // the lease that we released last
		epoch int64 // its epoch; 0: none
		seen  int64 // the highest that was seen by then
	}

	held    bool
	epoch   int64     // ours, while held
	seen    int64     // highest epoch that was read, held or named by anybody
	renewed time.Time // when the last acquisition or renewal that succeeded was sent
	lasts   time.Time // until then what was renewed or voted lasts: nothing is admitted afterwards
	start   time.Time // nothing is admitted before
	away    bool      // the last call of the store failed, or took too long

	promise promise              // to an owner that cannot reach the store
	votes   map[string]time.Time // to us, by member: when the last one that was given was asked for
	ask     time.Time            // no vote is asked for before
	reclaim bool                 // the store has lost our lease: it is ours again if votes show that no other proxy admits

	claimed   int64 // an epoch above ours that somebody named; 0: none
	claimedAt time.Time
	refuted   int64     // those up to here were named and are false
	refusedAt time.Time // when something in front of an engine last refused our epoch

	fit     bool
	leaving bool
	giveBy  time.Time // the release must be done by then; zero: nothing is given back
	hurry   time.Time // looks often until then: a release is expected
	asked   time.Time // when the holder may be asked for the scope again
	asking  bool      // it is being asked
}

// NewMachine begins to watch.
func NewMachine(cfg Config) *Machine {
	m := &Machine{cfg: cfg, fit: cfg.Home, votes: map[string]time.Time{}}
	if len(cfg.Members) > 0 { // the process before may have promised something at its end
		m.promise.until = cfg.Begun.Add(cfg.Duration)
	}
	return m
}

func (m *Machine) acquire() Call {
	m.bare = m.bare || m.vague()
	return Acquire
}

// until is when the view changes by itself, at most at.
func (m *Machine) until(now, at time.Time) time.Time {
	if m.held {
		for _, t := range []time.Time{m.admitsFrom(), m.lasts, m.renewed.Add(m.cfg.RenewDeadline), m.askAt()} {
			if t.After(now) && t.Before(at) {
				at = t
			}
		}
	}
	return at
}

// released says whether the last holder gave the lease back. It had stopped
// before.
func (m *Machine) released() bool {
	return m.rec.Holder == "" && m.rec.Epoch > 0 && (!m.forgotten() || m.rec.Epoch == m.gave.epoch && m.seen == m.gave.seen)
}

// absent says whether there was no lease. Nobody knows then whether one was deleted,
// and when: another may have acquired it, and admit, between any two looks of ours.
func (m *Machine) absent() bool { return m.rec.Holder == "" && m.rec.Epoch == 0 }

// forgotten says whether the store knows less than was seen: its lease was deleted, or its
// data were restored from a copy. The lease in the store then says nothing of the last
// holder, which may have renewed it a moment before.
func (m *Machine) forgotten() bool { return m.rec.Epoch < m.seen }

// vague says whether the lease in the store says nothing of the last holder.
func (m *Machine) vague() bool { return m.absent() || m.forgotten() && !m.released() }

// untouched says whether nobody ever held the lease, for all this dispatcher has heard.
func (m *Machine) untouched() bool { return m.absent() && m.seen == 0 }

// expiry is when the holder that was seen last lost the lease, by this clock.
func (m *Machine) expiry() time.Time {
	if m.rec.Term == Over || m.released() || m.untouched() {
		return m.changed
	}
	return m.changed.Add(m.duration())
}

// duration is how long the lease of the holder that was seen last lasts: a holder
// with a longer one than ours also stops later.
func (m *Machine) duration() time.Duration { return max(m.cfg.Duration, m.rec.Duration) }

// startDelay is the wait between the end of that lease and the first admission.
func (m *Machine) startDelay() time.Duration { return max(m.cfg.StartDelay, m.rec.Duration/3) }

// mayAcquire is when the lease may be taken.
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

// mayAdmit is when who acquires now what was looked at may admit. Who creates the
// lease waits a whole one from then on: until that moment somebody may have renewed
// one that was deleted, or is later than what the store has.
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
		return m.start
	}
	return later(m.start, m.promise.until.Add(m.startDelay()))
}

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

// mayAsk says whether the holder is to be asked now: never by who could not admit
// yet because of a promise. A promise that the process before may have given ends when
// the holder lets go.
func (m *Machine) mayAsk(now time.Time) bool {
	return m.wantsBack() && !m.asking && !now.Before(m.asked) && (m.promise.to == "" || !now.Before(m.promise.until.Add(m.startDelay())))
}

// GiveBack stops admission and begins the release, on behalf of who names the
// epoch. If it is not done within a step, this dispatcher stays the owner.
func (m *Machine) GiveBack(now time.Time, epoch int64) error {
	if !m.held || epoch != m.epoch {
		return fmt.Errorf("%w: %d", ErrNotHolder, epoch)
	}
	if now.Before(m.admitsFrom()) { // what is released may be admitted to at once, and the one before us may not have stopped yet
		return fmt.Errorf("%w: the owner before may not have stopped yet", ErrNotHolder)
	}
	if m.away { // nobody could take it
		return fmt.Errorf("%w: its store does not answer, so no other proxy could take it", ErrNotHolder)
	}
	if m.giveBy.IsZero() {
		m.giveBy = now.Add(m.cfg.Step)
	}
	m.try = now
	return nil
}

// Leave gives the scope up for good: the process ends.
func (m *Machine) Leave(now time.Time) {
	m.leaving, m.try = true, now
}

// SetStanding sets all that may change where owners are chosen anew: whether the scope is this
// dispatcher's, so that it takes it first and asks for it back, its place among those
// that may take it, and whether it could serve it. It reports whether one of them is new.
func (m *Machine) SetStanding(now time.Time, home bool, rank int, fit bool) (changed bool) {
	changed = m.cfg.Home != home || m.cfg.Rank != rank || m.fit != fit
	if home && !m.cfg.Home {
		m.try = now
	}
	m.cfg.Home, m.cfg.Rank, m.fit = home, rank, fit
	return changed
}

// Claimed tells that somebody named an epoch. One above ours stops admission at
// once, until a renewal that is sent later proves it false.
func (m *Machine) Claimed(now time.Time, epoch int64) {
	m.ObserveEpoch(epoch)
	if m.held && epoch > m.epoch && epoch > m.refuted && epoch > m.claimed {
		m.claimed, m.claimedAt, m.try = epoch, now, now.Add(1)
		m.void()
	}
}

// void forgets what was renewed and voted: it proves nothing any more.
func (m *Machine) void() {
	m.renewed, m.lasts, m.reclaim = time.Time{}, time.Time{}, false
	clear(m.votes)
}

// maxEpoch bounds what is believed of others: a Kubernetes Lease counts to 1<<31.
const maxEpoch = 1 << 30

// ObserveEpoch reports an epoch that somebody has seen. The next acquisition has a
// higher one, whatever the store remembers.
func (m *Machine) ObserveEpoch(epoch int64) {
	if epoch <= maxEpoch {
		m.seen = max(m.seen, epoch)
	}
}

// Refused tells that something in front of an engine refuses our epoch, for it has seen
// a higher one. Then the lease is given back and acquired again, with an epoch
// above that one. Who says so more than once per lease is not believed again.
func (m *Machine) Refused(now time.Time, epoch int64) {
	if !m.held || epoch <= m.epoch || epoch > maxEpoch || m.away || now.Before(m.admitsFrom()) || now.Before(m.refusedAt.Add(m.cfg.Duration)) {
		return
	}
	m.ObserveEpoch(epoch)
	m.refusedAt, m.giveBy, m.try = now, later(m.giveBy, now.Add(m.cfg.Step)), now
}

// Jumped tells that the machine has stood still for longer than its clock shows.
func (m *Machine) Jumped(now time.Time) {
	if m.held {
		m.void()
		m.try = now
	}
}

// View is what holds now.
func (m *Machine) View(now time.Time) View {
	v := View{Phase: Watching, Differs: m.differs(), Away: m.away, Holder: m.rec.Holder, Epoch: m.rec.Epoch}
	if m.held {
		v.Epoch = m.epoch
	}
	switch {
	case m.held && (m.leaving || !m.giveBy.IsZero()):
		v.Phase = Giving
	case m.held && (!now.Before(m.lasts) || m.reclaim && !m.hasVotes(now)):
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
