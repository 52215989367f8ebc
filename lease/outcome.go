package lease

import (
	"errors"
	"time"
)

// answered notes in away whether the store fails, or takes longer than a quarter of RenewDeadline: an owner, which
// stops after RenewDeadline without a renewal, must get several answers in that time.
func (m *Machine) answered(sent, now time.Time, err error) {
	m.away = err != nil && !errors.Is(err, ErrLost) && !errors.Is(err, ErrTaken) || now.Sub(sent) > m.cfg.RenewDeadline/4
}

// Looked records what a Look read. It was sent at sent and answered at now.
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
			m.nextCall = now
		}
	case m.reclaim:
		m.letGo(now)
	// an acquisition whose answer was lost
	case rec.Holder == m.cfg.Self && rec.Term != Over && rec.Epoch > m.epoch && !m.forgotten() && !m.held:
		start := now.Add(m.startDelay())
		if m.acquiredBlind { // when the acquisition succeeded, the store may not have known the last holder
			start = start.Add(m.duration())
		}
		m.hold(sent, start, rec.Epoch)
		m.renewed, m.admitsUntil = time.Time{}, time.Time{} // the age of the lease is not known until it is renewed
		m.nextCall = now
	}
}

// record takes in what a look or an acquisition found.
func (m *Machine) record(now time.Time, rec Record) {
	if !m.looked || rec.Stamp != m.rec.Stamp || rec.Term != m.rec.Term || rec.Term == Running {
		m.changed = now
	}
	// if the lease is released now, it was released after we began: we had seen it held in this epoch
	sawHeld := m.looked && m.rec.Holder != "" && rec.Epoch == m.rec.Epoch
	m.rec, m.looked, m.stale = rec, true, false
	m.seen = max(m.seen, rec.Epoch)
	if m.released() && (rec.Epoch == m.promise.epoch || sawHeld && m.promise.to == "") { // the owner that has our promise has stopped
		m.promise = promise{}
	}
}

// schedule sets when the next call is made, counted from when the last was sent.
func (m *Machine) schedule(sent, now time.Time) {
	interval := m.cfg.Retry
	if now.Before(m.hurryUntil) {
		interval /= 10
	}
	m.nextCall = sent.Add(interval)
	switch at, ok := m.mayAcquire(); {
	case m.held && (m.leaving || now.Before(m.releaseBy)), !m.held && m.mayAsk(now): // this was asked for while the call was under way
		m.nextCall = now
	case !m.held && ok && at.Before(m.nextCall):
		m.nextCall = at
	}
}

// Acquired records the outcome of Acquire.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	if m.answered(sent, now, err); err != nil { // even an acquisition that failed may have written the lease
		m.stale = true
		if m.schedule(sent, now); errors.Is(err, ErrTaken) {
			m.nextCall = now
		}
		return
	}
	start := m.mayAdmit(now)
	if m.reclaim && now.Before(m.admitsUntil) { // no other dispatcher has admitted since we did
		start = m.admitsAfter
	}
	m.record(now, rec)
	m.hold(sent, start, rec.Epoch)
	m.schedule(sent, now)
}

// hold notes that the lease is held with an epoch, as a call showed that was sent at sent. Nothing is admitted before
// start.
func (m *Machine) hold(sent, start time.Time, epoch int64) {
	m.held, m.reclaim, m.acquiredBlind, m.epoch, m.admitsAfter = true, false, false, epoch, start
	m.renewed, m.admitsUntil = sent, sent.Add(m.cfg.RenewDeadline)
	m.releaseBy, m.claimed = time.Time{}, 0
	clear(m.votes)
}

// Renewed records the outcome of Renew. A renewal counts from when it was sent: it proves
// that the lease was ours at some moment after that, but not at which.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.answered(sent, now, err)
	m.schedule(sent, now)
	switch {
	case !m.held: // the lease was lost before the answer came
	case errors.Is(err, ErrLost) && m.mayReclaim(now):
		m.reclaim, m.looked, m.nextCall, m.nextVotes = true, false, now, now
	case errors.Is(err, ErrLost):
		m.letGo(now)
	case err == nil && m.claimed > 0 && !sent.After(m.claimedAt): // a renewal from before the claim does not disprove it
		m.nextCall = now
	case err == nil:
		m.renewed, m.admitsUntil = sent, later(m.admitsUntil, sent.Add(m.cfg.RenewDeadline))
		m.refuted, m.claimed = max(m.refuted, m.claimed), 0 // the renewal proves that no higher epoch was acquired
		if !now.Before(m.releaseBy) {
			m.releaseBy = time.Time{} // the release was not done in time: this dispatcher stays the owner
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

// letGo notes that the lease is not held here any more, and has it looked at.
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
		m.looked = looked // what the last look found still counts
	}
	if m.held && m.leaving && now.Before(m.admitsFrom()) {
		m.letGo(now) // without a release: the next holder of a released lease admits at once, and the owner before us may still run
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
