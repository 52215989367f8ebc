package lease

import (
	"errors"
	"time"
)

// noteIfStoreAway: an owner stops after RenewDeadline without a renewal, and must get several
// answers in this time.
func (m *Machine) noteIfStoreAway(sent, now time.Time, err error) {
	refused := errors.Is(err, ErrLost) || errors.Is(err, ErrTaken) // the store works
	failed := err != nil && !refused
	slow := now.Sub(sent) > m.cfg.RenewDeadline/4
	m.storeAway = failed || slow
}

// Looked records the result of a Look that was sent at sent and answered at now.
func (m *Machine) Looked(sent, now time.Time, rec Record, err error) {
	m.noteIfStoreAway(sent, now, err)
	if err != nil {
		m.nextCall = sent.Add(m.cfg.Retry)
		return
	}
	m.setRecord(now, rec)
	m.scheduleNextCall(sent, now)
	switch {
	case m.storeLostLease && m.noOtherHeld():
		if m.hasVotes(now) {
			m.nextCall = now
		}
	case m.storeLostLease:
		m.stopHolding(now)
	case m.acquiredUnknowingly():
		holdAsRead(m, sent, now)
	}
}

// holdAsRead: this proxy holds the lease that it has just read, but it is not known when the last
// holder's lease ended.
func holdAsRead(m *Machine, sent, now time.Time) {
	start := now.Add(m.startDelay())
	// The store may not have known the last holder at the acquisition, and then that holder may have
	// renewed just before. If an earlier claim of this process sent it, this is not known.
	if m.blindAcquirePending || !m.acquireSent {
		start = start.Add(m.leaseLastsAtMost())
	}
	m.startHolding(sent, start, m.rec.Epoch)
	m.renewed, m.admitsUntil = time.Time{}, time.Time{} // the age of the lease is not known
	m.nextCall = now
}

// acquiredUnknowingly: this proxy holds the lease, but the answer to its acquisition was lost.
func (m *Machine) acquiredUnknowingly() bool {
	isOurs := m.rec.Holder == m.cfg.Self && m.rec.Expiry != Expired
	// not the lease that it held last, which it may have let go without a release
	isNew := m.rec.Epoch > m.epoch
	return !m.held && isOurs && isNew && !m.storeForgotEpochs()
}

// setRecord also ends this proxy's promise if the record shows that the owner has stopped.
func (m *Machine) setRecord(now time.Time, rec Record) {
	changed := !m.recValid || rec.Stamp != m.rec.Stamp || rec.Expiry != m.rec.Expiry
	// if the store itself measures the holder's time, a renewal need not change Stamp
	if changed || rec.Expiry == NotExpired {
		m.recChangedAt = now
	}
	sawHolder := m.recValid && m.rec.Holder != "" && m.rec.Epoch == rec.Epoch
	m.rec, m.recValid, m.acquireInDoubt = rec, true, false
	m.maxEpochSeen = max(m.maxEpochSeen, rec.Epoch)
	if m.releasedByHolder() && m.givenPromise.endsWithRelease(rec.Epoch, sawHolder) {
		m.givenPromise = promise{}
	}
}

// scheduleNextCall: sent is when the last call was sent.
func (m *Machine) scheduleNextCall(sent, now time.Time) {
	interval := m.cfg.Retry
	if now.Before(m.lookOftenUntil) {
		interval /= 10
	}
	m.nextCall = sent.Add(interval)
	at, mayAcquire := m.acquirableFrom()
	switch {
	case m.releaseDue(now):
		m.nextCall = now
	case m.held:
	case m.mayAskBack(now):
		m.nextCall = now
	case mayAcquire && at.Before(m.nextCall):
		m.nextCall = at
	}
}

func (m *Machine) releaseDue(now time.Time) bool {
	return m.held && (m.stopping || now.Before(m.tryReleaseUntil))
}

// Acquired records the outcome of Acquire. The lease counts from sent. If the store had lost this
// proxy's lease (storeLostLease), all other members have promised not to admit, so there is no
// other owner to wait for.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	m.noteIfStoreAway(sent, now, err)
	m.acquireSent = true
	if err != nil {
		m.acquireInDoubt = true // a failed acquisition may still have written the lease
		m.scheduleNextCall(sent, now)
		if errors.Is(err, ErrTaken) {
			m.nextCall = now
		}
		return
	}
	admissionStart := m.admitsFromIfAcquired(now)
	reacquiredInTime := m.storeLostLease && now.Before(m.admitsUntil)
	if reacquiredInTime {
		admissionStart = m.admitsNotBefore // lies in the past
	}
	m.setRecord(now, rec)
	m.startHolding(sent, admissionStart, rec.Epoch)
	m.scheduleNextCall(sent, now)
}

// startHolding drops votes, rival epochs and a hand-back that concern an earlier epoch.
func (m *Machine) startHolding(sent, admitsNotBefore time.Time, epoch int64) {
	m.held, m.epoch, m.admitsNotBefore = true, epoch, admitsNotBefore
	m.storeLostLease, m.blindAcquirePending = false, false
	m.renewed, m.admitsUntil = sent, sent.Add(m.cfg.RenewDeadline)
	m.tryReleaseUntil, m.rivalEpoch = time.Time{}, 0
	clear(m.votes)
}

// Renewed records the outcome of Renew. After ErrLost, the lease is acquired again if all other
// members promise not to admit, and otherwise it is given up. After any other error it still counts
// as held.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.noteIfStoreAway(sent, now, err)
	m.scheduleNextCall(sent, now)
	switch {
	case !m.held:
	case errors.Is(err, ErrLost) && m.mayReclaim(now): // look, and ask for votes, both at once
		m.storeLostLease = true
		m.recValid = false // read before the loss
		m.nextCall, m.nextVotes = now, now
	case errors.Is(err, ErrLost):
		m.stopHolding(now)
	case err == nil:
		recordRenewal(m, sent, now)
	}
}

// recordRenewal: a renewal counts from sent, because it only proves that the lease was held at some
// later, unknown time. If it was sent after another proxy named a higher epoch, it proves that
// there is no such epoch.
func recordRenewal(m *Machine, sent, now time.Time) {
	if m.rivalEpoch > 0 && !sent.After(m.rivalNamedAt) { // it disproves nothing
		m.nextCall = now
		return
	}
	// later, because votes may let it admit longer
	m.renewed, m.admitsUntil = sent, later(m.admitsUntil, sent.Add(m.cfg.RenewDeadline))
	m.disprovenEpoch = max(m.disprovenEpoch, m.rivalEpoch)
	m.rivalEpoch = 0
	if !now.Before(m.tryReleaseUntil) { // no release succeeded in time: this proxy remains the owner
		m.tryReleaseUntil = time.Time{}
	}
}

// Released records the outcome of Release. After an error other than ErrLost, the release is tried
// again; if the process stops, until the lease has expired, else until tryReleaseUntil.
func (m *Machine) Released(sent, now time.Time, err error) {
	m.noteIfStoreAway(sent, now, err)
	if err == nil {
		// If the record still has this epoch, and no epoch above maxEpochSeen was seen, then no later
		// holder is known, and the last one has stopped (releasedByHolder).
		m.lastReleased.epoch, m.lastReleased.maxEpochSeen = m.epoch, m.maxEpochSeen
	}
	expired := m.stopping && now.Sub(m.renewed) > m.cfg.Duration
	if err == nil || errors.Is(err, ErrLost) || expired {
		m.stopHolding(now)
		return
	}
	m.nextCall = sent.Add(m.cfg.Retry / 2) // soon, because no proxy admits until the release is done
}

// stopHolding also drops the last look, so that the next call is a Look.
func (m *Machine) stopHolding(now time.Time) {
	m.held, m.storeLostLease = false, false
	m.tryReleaseUntil, m.admitsUntil = time.Time{}, time.Time{}
	m.recValid = false
	m.nextCall = now
}

// AskedBack records the answer to AskBack. A holder that agreed (err is nil) has Step to release
// the lease. The next question waits for Step.
func (m *Machine) AskedBack(now time.Time, err error) {
	m.askingBack, m.nextAskBack = false, now.Add(m.cfg.Step)
	if err == nil {
		m.lookOftenUntil = now.Add(m.cfg.Step)
	}
	m.nextCall = now
}

// Next returns the call to make now, which the caller must make, or None and when to call Next
// again.
func (m *Machine) Next(now time.Time) (call Call, wake time.Time) {
	if now.Before(m.nextCall) {
		return None, m.nextTimer(now, m.nextCall)
	}
	letGoIfOver(m, now)
	switch {
	case m.held:
		return holdersCall(m, now), now
	case m.stopping:
		return None, now.Add(m.cfg.Duration)
	}
	switch at, mayAcquire := m.acquirableFrom(); {
	case mayAcquire && !now.Before(at):
		return m.startAcquire(), now
	case m.mayAskBack(now):
		m.askingBack = true
		return AskBack, now
	}
	return Look, now
}

// letGoIfOver ends a lease that cannot be held any longer. If the process stops before it may
// admit, an earlier owner may still send requests. A release would let the next holder admit at
// once, so the lease is left to expire.
func letGoIfOver(m *Machine, now time.Time) {
	if m.storeLostLease && !now.Before(m.admitsUntil) {
		recWasValid := m.recValid
		m.stopHolding(now)
		m.recValid = recWasValid // read since the store lost the lease, so it remains valid
	}
	if m.held && m.stopping && now.Before(m.admitsFrom()) {
		m.stopHolding(now)
	}
}

// holdersCall: no renewal can succeed if the store has lost the lease.
func holdersCall(m *Machine, now time.Time) Call {
	switch {
	case m.releaseDue(now):
		return Release
	case m.storeLostLease:
		// An acquisition without an answer may have written the lease since the last look.
		noOtherInStore := m.recValid && !m.acquireInDoubt && m.noOtherHeld()
		if noOtherInStore && m.hasVotes(now) {
			return m.startAcquire()
		}
		return Look
	}
	return Renew
}
