package lease

import (
	"errors"
	"time"
)

// answered notes whether the store answers, and soon enough: an owner that stops
// after a renew deadline must get several answers in that time.
func (m *Machine) answered(sent, now time.Time, err error) {
	m.away = err != nil && !errors.Is(err, ErrLost) && !errors.Is(err, ErrTaken) || now.Sub(sent) > m.cfg.RenewDeadline/4
}

// Looked tells what Look, sent and answered at these moments, read.
func (m *Machine) Looked(sent, now time.Time, rec Record, err error) {
	if m.answered(sent, now, err); err != nil {
		m.try = sent.Add(m.cfg.Retry)
		return
	}
	m.see(now, rec)
	m.again(sent, now)
	switch {
	case m.reclaim && m.mine():
		if m.hasVotes(now) {
			m.try = now
		}
	case m.reclaim:
		m.lose(now)
	// an acquisition whose answer was lost
	case rec.Holder == m.cfg.Self && rec.Term != Over && rec.Epoch > m.epoch && !m.forgotten() && !m.held:
		start := now.Add(m.startDelay())
		if m.bare { // perhaps the store said nothing of the last holder when the acquisition succeeded
			start = start.Add(m.duration())
		}
		m.hold(sent, start, rec.Epoch)
		m.renewed, m.lasts = time.Time{}, time.Time{} // nothing is known of its age before it is renewed
		m.try = now
	}
}

// see keeps what a look or an acquisition found.
func (m *Machine) see(now time.Time, rec Record) {
	if !m.looked || rec.Stamp != m.rec.Stamp || rec.Term != m.rec.Term || rec.Term == Running {
		m.changed = now
	}
	// if the lease is released now, it was released after we began: we had seen it held in this epoch
	gave := m.looked && m.rec.Holder != "" && rec.Epoch == m.rec.Epoch
	m.rec, m.looked, m.stale = rec, true, false
	m.seen = max(m.seen, rec.Epoch)
	if m.released() && (rec.Epoch == m.promise.epoch || gave && m.promise.to == "") { // the owner that was promised something has stopped
		m.promise = promise{}
	}
}

// again spaces the calls, by when they were sent.
func (m *Machine) again(sent, now time.Time) {
	every := m.cfg.Retry
	if now.Before(m.hurry) {
		every /= 10
	}
	m.try = sent.Add(every)
	switch at, ok := m.mayAcquire(); {
	case m.held && (m.leaving || now.Before(m.giveBy)), !m.held && m.mayAsk(now): // wanted while the call was under way
		m.try = now
	case !m.held && ok && at.Before(m.try):
		m.try = at
	}
}

// Acquired tells what came of Acquire.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	if m.answered(sent, now, err); err != nil { // even one that failed may have been written
		m.stale = true
		if m.again(sent, now); errors.Is(err, ErrTaken) {
			m.try = now
		}
		return
	}
	start := m.mayAdmit(now)
	if m.reclaim && now.Before(m.lasts) { // nobody else has admitted since we did
		start = m.start
	}
	m.see(now, rec)
	m.hold(sent, start, rec.Epoch)
	m.again(sent, now)
}

func (m *Machine) hold(sent, start time.Time, epoch int64) {
	m.held, m.reclaim, m.bare, m.epoch, m.start = true, false, false, epoch, start
	m.renewed, m.lasts = sent, sent.Add(m.cfg.RenewDeadline)
	m.giveBy, m.claimed = time.Time{}, 0
	clear(m.votes)
}

// Renewed tells what came of Renew. A renewal counts from when it was sent: the
// lease was ours at no moment before, for all we know, and some time after.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.answered(sent, now, err)
	m.again(sent, now)
	switch {
	case !m.held: // it was lost meanwhile
	case errors.Is(err, ErrLost) && m.mayReclaim(now):
		m.reclaim, m.looked, m.try, m.ask = true, false, now, now
	case errors.Is(err, ErrLost):
		m.lose(now)
	case err == nil && m.claimed > 0 && !sent.After(m.claimedAt): // it says nothing of what was claimed since
		m.try = now
	case err == nil:
		m.renewed, m.lasts = sent, later(m.lasts, sent.Add(m.cfg.RenewDeadline))
		m.refuted, m.claimed = max(m.refuted, m.claimed), 0 // the store knows of no such epoch
		if !now.Before(m.giveBy) {
			m.giveBy = time.Time{} // the hand-back did not happen in time
		}
	}
}

// Released tells what came of Release.
func (m *Machine) Released(sent, now time.Time, err error) {
	m.answered(sent, now, err)
	if err == nil {
		m.gave.epoch, m.gave.seen = m.epoch, m.seen
	}
	expired := m.leaving && now.Sub(m.renewed) > m.cfg.Duration // there is nothing to release any more
	if err == nil || errors.Is(err, ErrLost) || expired {
		m.lose(now)
		return
	}
	m.try = sent.Add(m.cfg.Retry / 2)
}

func (m *Machine) lose(now time.Time) {
	m.held, m.looked, m.giveBy, m.lasts, m.reclaim = false, false, time.Time{}, time.Time{}, false
	m.try = now
}

// Asked tells whether the holder has agreed to give the scope back.
func (m *Machine) Asked(now time.Time, err error) {
	m.asking, m.asked = false, now.Add(m.cfg.Step)
	if err == nil {
		m.hurry = now.Add(m.cfg.Step)
	}
	m.try = now
}

// Next is the call to make now, or None and when to ask again.
func (m *Machine) Next(now time.Time) (call Call, wake time.Time) {
	if now.Before(m.try) {
		return None, m.until(now, m.try)
	}
	if m.reclaim && !now.Before(m.lasts) {
		looked := m.looked
		m.lose(now)
		m.looked = looked // what was found then still counts
	}
	if m.held && m.leaving && now.Before(m.admitsFrom()) {
		m.lose(now) // who finds it released may admit at once, and the one before us may not have stopped yet
	}
	switch {
	case m.held && (m.leaving || now.Before(m.giveBy)):
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
