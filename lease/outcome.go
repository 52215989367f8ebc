package lease

import (
	"errors"
	"time"
)

// setStoreAway sets storeAway after a call of the store: whether the store fails, or answers more slowly than a quarter of
// RenewDeadline. An owner stops after RenewDeadline without a renewal, and must get several answers in this time.
func (m *Machine) setStoreAway(sent, now time.Time, err error) {
	refused := errors.Is(err, ErrLost) || errors.Is(err, ErrTaken) // the store works, and says that the lease has changed
	failed := err != nil && !refused
	slow := now.Sub(sent) > m.cfg.RenewDeadline/4
	m.storeAway = failed || slow
}

// Looked records the result of a Look, which was sent at sent and answered at now. The lease that was read shows whether this proxy may
// acquire a lease again that the store had lost, and whether an acquisition succeeded whose answer was lost.
func (m *Machine) Looked(sent, now time.Time, rec Record, err error) {
	m.setStoreAway(sent, now, err)
	if err != nil {
		m.nextCall = sent.Add(m.cfg.Retry)
		return
	}
	m.setRecord(now, rec)
	m.scheduleNextCall(sent, now)
	switch {
	case m.storeLostLease && m.noOtherHeld(): // this proxy may acquire the lease again, once all members have voted for it
		if m.hasVotes(now) {
			m.nextCall = now
		}
	case m.storeLostLease: // another proxy has held the lease since
		m.stopHolding(now)
	case m.acquiredUnknowingly(): // the answer to the acquisition was lost, so it is not known when the last holder's lease ended
		start := now.Add(m.startDelay())
		if m.blindAcquirePending { // the store may not have known the last holder, which may have renewed the lease just before
			start = start.Add(m.leaseLastsAtMost()) // so wait for a whole lease, too
		}
		m.startHolding(sent, start, rec.Epoch)
		m.renewed, m.admitsUntil = time.Time{}, time.Time{} // the age of the lease is not known until it is renewed
		m.nextCall = now                                    // renew the lease at once
	}
}

// acquiredUnknowingly reports whether the lease that was just read is held by this proxy although it does not know
// this: the answer to its acquisition was lost.
func (m *Machine) acquiredUnknowingly() bool {
	isOurs := m.rec.Holder == m.cfg.Self && m.rec.Expiry != Expired
	isNew := m.rec.Epoch > m.epoch // not the lease that this proxy held last, which it may have let go without a release
	return !m.held && isOurs && isNew && !m.storeForgotEpochs()
}

// setRecord stores the lease that a look or an acquisition returned, and notes when it changed. It also ends this proxy's promise to admit
// nothing for a while, if the lease shows that the owner to whom the promise was given has stopped. An earlier process of this proxy may
// have given a promise that this process does not know: givenPromise.to is then empty, and stands for one of the holders up to now.
func (m *Machine) setRecord(now time.Time, rec Record) {
	changed := !m.hasRead || rec.Stamp != m.rec.Stamp || rec.Expiry != m.rec.Expiry
	if changed || rec.Expiry == NotExpired { // if the store itself measures the holder's time, a renewal need not change Stamp
		m.recChangedAt = now
	}
	wasHeld := m.hasRead && m.rec.Holder != "" && m.rec.Epoch == rec.Epoch // the last look saw a holder with this epoch
	m.rec, m.hasRead, m.acquireInDoubt = rec, true, false
	m.maxEpochSeen = max(m.maxEpochSeen, rec.Epoch)
	switch {
	case !m.releasedByHolder(): // the owner may still admit, so this proxy's promise remains in force
	case rec.Epoch == m.givenPromise.epoch: // the owner to whom the promise was given has released the lease
		m.givenPromise = promise{}
	case m.givenPromise.to == "" && wasHeld: // the promise was given to this holder or an earlier one, and all of them have stopped
		m.givenPromise = promise{}
	}
}

// scheduleNextCall sets the time of the next call: now if a Release or an AskBack is due, otherwise one interval after the last call
// was sent, or earlier if the lease may be acquired earlier. sent is when the last call was sent.
func (m *Machine) scheduleNextCall(sent, now time.Time) {
	interval := m.cfg.Retry
	if now.Before(m.lookOftenUntil) { // the holder is about to release the lease
		interval /= 10
	}
	m.nextCall = sent.Add(interval)
	at, mayAcquire := m.acquirableFrom()
	switch {
	case m.releaseDue(now):
		m.nextCall = now
	case m.held: // an owner has nothing to ask for or to acquire
	case m.mayAskBack(now):
		m.nextCall = now
	case mayAcquire && at.Before(m.nextCall):
		m.nextCall = at
	}
}

// releaseDue reports whether to release the lease now: the process ends, or a hand-back has begun and its time is not over.
func (m *Machine) releaseDue(now time.Time) bool {
	return m.held && (m.stopping || now.Before(m.tryReleaseUntil))
}

// Acquired records the outcome of Acquire. sent is when the call was sent; the lease counts from then on. A proxy that already admits by
// votes may acquire its lease again, because the store had lost it (storeLostLease). It then continues to admit without a wait.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	m.setStoreAway(sent, now, err)
	if err != nil {
		m.acquireInDoubt = true // a failed acquisition may still have written the lease
		m.scheduleNextCall(sent, now)
		if errors.Is(err, ErrTaken) { // the lease was written since the last look, so look again at once
			m.nextCall = now
		}
		return
	}
	start := m.admitsFromIfAcquired(now)
	reacquiredInTime := m.storeLostLease && now.Before(m.admitsUntil)
	if reacquiredInTime { // the votes have kept all other members from admitting, so there is no other owner to wait for
		start = m.admitsNotBefore
	}
	m.setRecord(now, rec)
	m.startHolding(sent, start, rec.Epoch)
	m.scheduleNextCall(sent, now)
}

// startHolding records that this proxy holds the lease with an epoch, by the answer to a call that was sent at sent. Nothing is
// admitted before admitsNotBefore. Votes, rival epochs and a hand-back that concern an earlier epoch are dropped.
func (m *Machine) startHolding(sent, admitsNotBefore time.Time, epoch int64) {
	m.held, m.epoch, m.admitsNotBefore = true, epoch, admitsNotBefore
	m.storeLostLease, m.blindAcquirePending = false, false
	m.renewed, m.admitsUntil = sent, sent.Add(m.cfg.RenewDeadline)
	m.tryReleaseUntil, m.rivalEpoch = time.Time{}, 0
	clear(m.votes)
}

// Renewed records the outcome of Renew. A renewal counts from the time at which it was sent: it only proves that the lease was held at some
// later, unknown time. If it was sent after another proxy named a rival epoch, by which that proxy says that it owns the scope
// (ObserveRivalEpoch, GivePromise), it also proves that there is no such epoch.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.setStoreAway(sent, now, err)
	m.scheduleNextCall(sent, now)
	switch {
	case !m.held: // the lease was lost before the answer came
	case errors.Is(err, ErrLost) && m.mayReclaim(now): // look at the lease and ask for votes at once
		m.storeLostLease, m.hasRead = true, false
		m.nextCall, m.nextVotes = now, now
	case errors.Is(err, ErrLost):
		m.stopHolding(now)
	case err == nil && m.rivalEpoch > 0 && !sent.After(m.rivalNamedAt): // sent before the rival epoch was named, so it disproves nothing
		m.nextCall = now // renew again at once
	case err == nil:
		m.renewed, m.admitsUntil = sent, later(m.admitsUntil, sent.Add(m.cfg.RenewDeadline))
		m.disprovenEpoch = max(m.disprovenEpoch, m.rivalEpoch) // the renewal proves that no proxy has a higher epoch
		m.rivalEpoch = 0
		if !now.Before(m.tryReleaseUntil) { // no release is wanted, or none succeeded in time: this proxy remains the owner
			m.tryReleaseUntil = time.Time{}
		}
	} // after any other error the lease still counts as held, and the next call renews it again
}

// Released records the outcome of Release. sent is when the call was sent. After a success it keeps the lease's epoch, and the highest
// epoch that was seen. As long as the record has this epoch and no higher one is seen, no later holder is known, and releasedByHolder
// trusts the release.
func (m *Machine) Released(sent, now time.Time, err error) {
	m.setStoreAway(sent, now, err)
	if err == nil {
		m.lastReleased.epoch = m.epoch
		m.lastReleased.maxEpochSeen = m.maxEpochSeen
	}
	// While the process stops, Release is called again until it succeeds or the lease has expired. A hand-back without a stop is given up at
	// tryReleaseUntil instead, and then the lease is renewed.
	expired := m.stopping && now.Sub(m.renewed) > m.cfg.Duration
	if err == nil || errors.Is(err, ErrLost) || expired {
		m.stopHolding(now)
		return
	}
	m.nextCall = sent.Add(m.cfg.Retry / 2) // earlier than after other calls, because no proxy admits until the release is done
}

// stopHolding records that this proxy no longer holds the lease, whether or not it released it. The last look is dropped, so that
// the next call is a Look.
func (m *Machine) stopHolding(now time.Time) {
	m.held, m.storeLostLease = false, false
	m.tryReleaseUntil, m.admitsUntil = time.Time{}, time.Time{}
	m.hasRead = false
	m.nextCall = now
}

// AskedBack records the answer to AskBack. err is nil if the holder has agreed to give the scope back. The holder then has the time Step to
// release the lease, in which this proxy reads the lease more often, so that it soon takes it. After any answer, the next question waits
// for Step.
func (m *Machine) AskedBack(now time.Time, err error) {
	m.askingBack, m.nextAskBack = false, now.Add(m.cfg.Step)
	if err == nil {
		m.lookOftenUntil = now.Add(m.cfg.Step)
	}
	m.nextCall = now
}

// Next returns the call to make now, or None and when to call Next again. It also lets a lease go that cannot be held any longer, and
// notes that an acquisition or an AskBack begins: the caller must make the call.
//
// A holder whose lease the store has lost (storeLostLease), for example with its data, acquires the lease again if all other members have
// voted for it: they promise not to admit meanwhile. If the votes do not come in time, it is no longer the holder.
func (m *Machine) Next(now time.Time) (call Call, wake time.Time) {
	if now.Before(m.nextCall) {
		return None, m.nextTimer(now, m.nextCall)
	}
	if m.storeLostLease && !now.Before(m.admitsUntil) { // the members did not vote in time
		hadRead := m.hasRead
		m.stopHolding(now)
		m.hasRead = hadRead // a look since the store lost the lease remains valid
	}
	if m.held && m.stopping && now.Before(m.admitsFrom()) {
		m.stopHolding(now) // not released: after a release the next holder admits at once, but the earlier owner may still admit
	}
	switch {
	case m.releaseDue(now):
		return Release, now
	case m.storeLostLease:
		noOtherInStore := m.hasRead && !m.acquireInDoubt && m.noOtherHeld() // by the last look
		if noOtherInStore && m.hasVotes(now) {
			return m.startAcquire(), now
		}
		return Look, now
	case m.held:
		return Renew, now
	}
	if m.stopping { // this proxy takes no lease any more
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
