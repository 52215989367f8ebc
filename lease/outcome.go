package lease

import (
	"errors"
	"time"
)

// setAway sets away after a call of the store: whether the store fails, or answers more slowly than a quarter of
// RenewDeadline. An owner stops after RenewDeadline without a renewal, and must get several answers in this time.
func (m *Machine) setAway(sent, now time.Time, err error) {
	refused := errors.Is(err, ErrLost) || errors.Is(err, ErrTaken) // the store works, and says that the lease has changed
	failed := err != nil && !refused
	slow := now.Sub(sent) > m.cfg.RenewDeadline/4
	m.away = failed || slow
}

// Looked records the result of a Look, which was sent at sent and answered at now.
func (m *Machine) Looked(sent, now time.Time, rec Record, err error) {
	m.setAway(sent, now, err)
	if err != nil {
		m.nextCall = sent.Add(m.cfg.Retry)
		return
	}
	m.record(now, rec)
	m.schedule(sent, now)
	switch {
	case m.lostByStore && m.mine():
		if m.hasVotes(now) {
			m.nextCall = now // to acquire the lease again
		}
	case m.lostByStore: // another dispatcher has held the lease since
		m.letGo(now)
	case m.acquiredUnknowingly():
		start := now.Add(m.startDelay())
		if m.acquiredBlind { // the store may not have known the last holder when the acquisition took effect
			start = start.Add(m.duration())
		}
		m.hold(sent, start, rec.Epoch)
		m.renewed, m.admitsUntil = time.Time{}, time.Time{} // the age of the lease is not known until it is renewed
		m.nextCall = now                                    // to renew it
	}
}

// acquiredUnknowingly reports whether the lease that was just read is held by this dispatcher although it does not know
// this: the answer to its acquisition was lost.
func (m *Machine) acquiredUnknowingly() bool {
	isNew := m.rec.Epoch > m.epoch // not the lease that this dispatcher held last, which it may have let go without a release
	return !m.held && m.rec.Holder == m.cfg.Self && m.rec.Term != Over && isNew && !m.forgotten()
}

// record stores the lease that a look or an acquisition returned. It also ends this dispatcher's promise if the lease shows
// that the owner with the promise has stopped.
func (m *Machine) record(now time.Time, rec Record) {
	changed := !m.looked || rec.Stamp != m.rec.Stamp || rec.Term != m.rec.Term
	if changed || rec.Term == Running { // if the store itself measures the holder's time, a renewal need not change Stamp
		m.changed = now
	}
	wasHeld := m.looked && m.rec.Holder != "" && m.rec.Epoch == rec.Epoch // at the last look: a release with this epoch came since
	m.rec, m.looked, m.stale = rec, true, false
	m.seen = max(m.seen, rec.Epoch)
	switch {
	case !m.released():
	case rec.Epoch == m.promise.epoch: // released by the owner with the promise
		m.promise = promise{}
	case m.promise.to == "" && wasHeld: // an earlier process promised it to this holder or to one before, and all of them have stopped
		m.promise = promise{}
	}
}

// schedule sets the time of the next call: now if a Release or an AskBack is due, otherwise one interval after the last call
// was sent, or earlier if the lease may be acquired earlier.
func (m *Machine) schedule(sent, now time.Time) {
	interval := m.cfg.Retry
	if now.Before(m.hurryUntil) {
		interval /= 10
	}
	m.nextCall = sent.Add(interval)
	at, mayAcquire := m.mayAcquire()
	switch {
	case m.releaseDue(now):
		m.nextCall = now
	case m.held: // nothing to ask for or to acquire
	case m.mayAsk(now):
		m.nextCall = now
	case mayAcquire && at.Before(m.nextCall):
		m.nextCall = at
	}
}

// releaseDue reports whether to release the lease now: the process ends, or the hand-back has time left.
func (m *Machine) releaseDue(now time.Time) bool {
	return m.held && (m.leaving || now.Before(m.releaseBy))
}

// Acquired records the outcome of Acquire.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	m.setAway(sent, now, err)
	if err != nil {
		m.stale = true // a failed acquisition may still have written the lease
		m.schedule(sent, now)
		if errors.Is(err, ErrTaken) { // the lease was written since the last look, so look again at once
			m.nextCall = now
		}
		return
	}
	start := m.mayAdmit(now)
	if m.lostByStore && now.Before(m.admitsUntil) { // no other dispatcher has admitted since this one did
		start = m.admitsAfter
	}
	m.record(now, rec)
	m.hold(sent, start, rec.Epoch)
	m.schedule(sent, now)
}

// hold records that this dispatcher holds the lease with an epoch, by the answer to a call that was sent at sent. Nothing is
// admitted before start. Votes, claims and a hand-back that concern an earlier epoch are dropped.
func (m *Machine) hold(sent, start time.Time, epoch int64) {
	m.held, m.epoch, m.admitsAfter = true, epoch, start
	m.lostByStore, m.acquiredBlind = false, false
	m.renewed, m.admitsUntil = sent, sent.Add(m.cfg.RenewDeadline)
	m.releaseBy, m.claimed = time.Time{}, 0
	clear(m.votes)
}

// Renewed records the outcome of Renew. A renewal counts from the time at which it was sent: it only proves that the lease
// was held at some later, unknown time.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.setAway(sent, now, err)
	m.schedule(sent, now)
	switch {
	case !m.held: // the lease was lost before the answer came
	case errors.Is(err, ErrLost) && m.mayReclaim(now): // look at the lease and ask for votes at once
		m.lostByStore, m.looked = true, false
		m.nextCall, m.nextVotes = now, now
	case errors.Is(err, ErrLost):
		m.letGo(now)
	case err == nil && m.claimed > 0 && !sent.After(m.claimedAt): // a renewal that was sent before the claim does not disprove it
		m.nextCall = now
	case err == nil:
		m.renewed, m.admitsUntil = sent, later(m.admitsUntil, sent.Add(m.cfg.RenewDeadline))
		m.refuted = max(m.refuted, m.claimed) // the renewal proves that no dispatcher has a higher epoch
		m.claimed = 0
		if !now.Before(m.releaseBy) {
			m.releaseBy = time.Time{} // the release was not done in time: this dispatcher remains the owner
		}
	}
}

// Released records the outcome of Release.
func (m *Machine) Released(sent, now time.Time, err error) {
	m.setAway(sent, now, err)
	if err == nil {
		m.gaveBack.epoch, m.gaveBack.seen = m.epoch, m.seen
	}
	expired := m.leaving && now.Sub(m.renewed) > m.cfg.Duration // the lease has expired, so there is nothing to release
	if err == nil || errors.Is(err, ErrLost) || expired {
		m.letGo(now)
		return
	}
	m.nextCall = sent.Add(m.cfg.Retry / 2) // earlier than after other calls, because no dispatcher admits until the release is done
}

// letGo records that this dispatcher no longer holds the lease, whether or not it released it. The next call is a Look.
func (m *Machine) letGo(now time.Time) {
	m.held, m.lostByStore = false, false
	m.releaseBy, m.admitsUntil = time.Time{}, time.Time{}
	m.looked = false
	m.nextCall = now
}

// Asked records the answer to AskBack. err is nil if the holder has agreed to give the scope back.
func (m *Machine) Asked(now time.Time, err error) {
	m.asking, m.nextAskBack = false, now.Add(m.cfg.Step)
	if err == nil {
		m.hurryUntil = now.Add(m.cfg.Step)
	}
	m.nextCall = now
}

// Next returns the call to make now, or None and when to call Next again.
func (m *Machine) Next(now time.Time) (call Call, wake time.Time) {
	if now.Before(m.nextCall) {
		return None, m.until(now, m.nextCall)
	}
	if m.lostByStore && !now.Before(m.admitsUntil) { // the members did not vote in time
		looked := m.looked
		m.letGo(now)
		m.looked = looked // the last look remains valid
	}
	if m.held && m.leaving && now.Before(m.admitsFrom()) {
		m.letGo(now) // not released: after a release the next holder admits at once, but the earlier owner may still admit
	}
	switch {
	case m.releaseDue(now):
		return Release, now
	case m.lostByStore:
		if m.looked && !m.stale && m.mine() && m.hasVotes(now) {
			return m.acquire(), now
		}
		return Look, now
	case m.held:
		return Renew, now
	}
	if m.leaving { // this dispatcher takes no lease any more
		return None, now.Add(m.cfg.Duration)
	}
	switch at, mayAcquire := m.mayAcquire(); {
	case mayAcquire && !now.Before(at):
		return m.acquire(), now
	case m.mayAsk(now):
		m.asking = true
		return AskBack, now
	}
	return Look, now
}
