package lease

import (
	"errors"
	"time"
)

// answered sets away: whether the store fails, or answers more slowly than a quarter of RenewDeadline. An owner stops after
// RenewDeadline without a renewal, and must get several answers in this time.
func (m *Machine) answered(sent, now time.Time, err error) {
	m.away = err != nil && !errors.Is(err, ErrLost) && !errors.Is(err, ErrTaken) || now.Sub(sent) > m.cfg.RenewDeadline/4
}

// Looked records the result of a Look, which was sent at sent and answered at now.
func (m *Machine) Looked(sent, now time.Time, rec Record, err error) {
	if m.answered(sent, now, err); err != nil {
		m.nextCall = sent.Add(m.cfg.Retry)
		return
	}
	m.record(now, rec)
	m.schedule(sent, now)
	switch {
	case m.reclaim && m.mine():
		if m.hasVotes(now) {
			m.nextCall = now // to acquire the lease again
		}
	case m.reclaim:
		m.letGo(now)
	case m.acquiredUnknowingly():
		start := now.Add(m.startDelay())
		if m.acquiredBlind { // the store may not have known the last holder when the acquisition took effect
			start = start.Add(m.duration())
		}
		m.hold(sent, start, rec.Epoch)
		m.renewed, m.admitsUntil = time.Time{}, time.Time{} // the age of the lease is not known until it is renewed
		m.nextCall = now
	}
}

// acquiredUnknowingly reports whether the lease that was just read is held by this dispatcher although it does not know
// this: the answer to its acquisition was lost.
func (m *Machine) acquiredUnknowingly() bool {
	return m.rec.Holder == m.cfg.Self && m.rec.Term != Over && m.rec.Epoch > m.epoch && !m.forgotten() && !m.held
}

// record stores the lease that a look or an acquisition returned.
func (m *Machine) record(now time.Time, rec Record) {
	if !m.looked || rec.Stamp != m.rec.Stamp || rec.Term != m.rec.Term || rec.Term == Running {
		m.changed = now
	}
	// If the lease is released now, its holder released it after this process began, because it was seen held before.
	sawHeld := m.looked && m.rec.Holder != "" && rec.Epoch == m.rec.Epoch
	m.rec, m.looked, m.stale = rec, true, false
	m.seen = max(m.seen, rec.Epoch)
	if m.released() && (rec.Epoch == m.promise.epoch || sawHeld && m.promise.to == "") { // the owner with the promise has stopped
		m.promise = promise{}
	}
}

// schedule sets the time of the next call, counted from the time at which the last call was sent.
func (m *Machine) schedule(sent, now time.Time) {
	interval := m.cfg.Retry
	if now.Before(m.hurryUntil) {
		interval /= 10
	}
	m.nextCall = sent.Add(interval)
	switch at, ok := m.mayAcquire(); {
	case m.held && (m.leaving || now.Before(m.releaseBy)), !m.held && m.mayAsk(now): // a Release or an AskBack is due
		m.nextCall = now
	case !m.held && ok && at.Before(m.nextCall):
		m.nextCall = at
	}
}

// Acquired records the outcome of Acquire.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	if m.answered(sent, now, err); err != nil { // a failed acquisition may still have written the lease
		m.stale = true
		if m.schedule(sent, now); errors.Is(err, ErrTaken) {
			m.nextCall = now
		}
		return
	}
	start := m.mayAdmit(now)
	if m.reclaim && now.Before(m.admitsUntil) { // no other dispatcher has admitted since this one did
		start = m.admitsAfter
	}
	m.record(now, rec)
	m.hold(sent, start, rec.Epoch)
	m.schedule(sent, now)
}

// hold records that this dispatcher holds the lease with an epoch, by the answer to a call that was sent at sent. Nothing is
// admitted before start.
func (m *Machine) hold(sent, start time.Time, epoch int64) {
	m.held, m.reclaim, m.acquiredBlind, m.epoch, m.admitsAfter = true, false, false, epoch, start
	m.renewed, m.admitsUntil = sent, sent.Add(m.cfg.RenewDeadline)
	m.releaseBy, m.claimed = time.Time{}, 0
	clear(m.votes)
}

// Renewed records the outcome of Renew. A renewal counts from the time at which it was sent: it only proves that the lease
// was held at some later, unknown time.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.answered(sent, now, err)
	m.schedule(sent, now)
	switch {
	case !m.held: // the lease was lost before the answer came
	case errors.Is(err, ErrLost) && m.mayReclaim(now):
		m.reclaim, m.looked, m.nextCall, m.nextVotes = true, false, now, now
	case errors.Is(err, ErrLost):
		m.letGo(now)
	case err == nil && m.claimed > 0 && !sent.After(m.claimedAt): // a renewal that was sent before the claim does not disprove it
		m.nextCall = now
	case err == nil:
		m.renewed, m.admitsUntil = sent, later(m.admitsUntil, sent.Add(m.cfg.RenewDeadline))
		m.refuted, m.claimed = max(m.refuted, m.claimed), 0 // the renewal proves that no dispatcher has a higher epoch
		if !now.Before(m.releaseBy) {
			m.releaseBy = time.Time{} // the release was not done in time: this dispatcher remains the owner
		}
	}
}

// Released records the outcome of Release.
func (m *Machine) Released(sent, now time.Time, err error) {
	m.answered(sent, now, err)
	if err == nil {
		m.gaveBack.epoch, m.gaveBack.seen = m.epoch, m.seen
	}
	expired := m.leaving && now.Sub(m.renewed) > m.cfg.Duration // the lease has expired, so there is nothing to release
	if err == nil || errors.Is(err, ErrLost) || expired {
		m.letGo(now)
		return
	}
	m.nextCall = sent.Add(m.cfg.Retry / 2)
}

// letGo records that this dispatcher no longer holds the lease. The next call is a Look.
func (m *Machine) letGo(now time.Time) {
	m.held, m.looked, m.releaseBy, m.admitsUntil, m.reclaim = false, false, time.Time{}, time.Time{}, false
	m.nextCall = now
}

// Asked records whether the holder has agreed to give the scope back.
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
	if m.reclaim && !now.Before(m.admitsUntil) {
		looked := m.looked
		m.letGo(now)
		m.looked = looked // the last look remains valid
	}
	if m.held && m.leaving && now.Before(m.admitsFrom()) {
		m.letGo(now) // not released: after a release the next holder admits at once, but the earlier owner may still admit
	}
	switch {
	case m.held && (m.leaving || now.Before(m.releaseBy)):
		return Release, now
	case m.reclaim:
		if m.looked && !m.stale && m.mine() && m.hasVotes(now) {
			return m.acquire(), now
		}
		return Look, now
	case m.held:
		return Renew, now
	}
	if m.leaving {
		return None, now.Add(m.cfg.Duration)
	}
	switch at, ok := m.mayAcquire(); {
	case ok && !now.Before(at):
		return m.acquire(), now
	case m.mayAsk(now):
		m.asking = true
		return AskBack, now
	}
	return Look, now
}
