package lease

import (
	"errors"
	"time"
)

// noteIfStoreAway sets storeAway after a call of the store: whether the store fails, or answers more slowly than a quarter of
// RenewDeadline. An owner stops after RenewDeadline without a renewal, and must get several answers in this time.
func (m *Machine) noteIfStoreAway(sent, now time.Time, err error) {
	refused := errors.Is(err, ErrLost) || errors.Is(err, ErrTaken) // the store works, and says that the lease has changed
	failed := err != nil && !refused
	slow := now.Sub(sent) > m.cfg.RenewDeadline/4
	m.storeAway = failed || slow
}

// Looked records the result of a Look, which read the lease: the call was sent at sent and answered at now. If the store had lost this
// proxy's lease (storeLostLease), the record shows whether another proxy has acquired the lease since. If an acquisition by this proxy got
// no answer, the record shows whether the acquisition succeeded.
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
		if m.hasVotes(now) { // all other members have promised not to admit, so acquire the lease again at once
			m.nextCall = now
		}
	case m.storeLostLease: // another proxy has held the lease since
		m.stopHolding(now)
	case m.acquiredUnknowingly(): // the acquisition succeeded, although no answer came
		holdAsRead(m, sent, now)
	}
}

// holdAsRead records that this proxy holds the lease that it has just read: the answer to its acquisition was lost. It is not known when
// the last holder's lease ended. So this proxy admits no requests to the scope before a start delay from now on is over, nor before it has
// renewed the lease.
func holdAsRead(m *Machine, sent, now time.Time) {
	start := now.Add(m.startDelay())
	// When the acquisition was sent, the store may not have known the last holder, which may have renewed the lease just before. If an
	// earlier claim of this process has sent it, this is not known.
	if m.blindAcquirePending || !m.acquireSent {
		start = start.Add(m.leaseLastsAtMost()) // so wait for a whole lease, too
	}
	m.startHolding(sent, start, m.rec.Epoch)
	m.renewed, m.admitsUntil = time.Time{}, time.Time{} // the age of the lease is not known, so nothing is admitted until it is renewed
	m.nextCall = now                                    // renew the lease at once
}

// acquiredUnknowingly reports whether the lease that was just read is held by this proxy although it does not know
// this: the answer to its acquisition was lost.
func (m *Machine) acquiredUnknowingly() bool {
	isOurs := m.rec.Holder == m.cfg.Self && m.rec.Expiry != Expired
	isNew := m.rec.Epoch > m.epoch // not the lease that this proxy held last, which it may have let go without a release
	return !m.held && isOurs && isNew && !m.storeForgotEpochs()
}

// setRecord stores the lease that a look or an acquisition returned, and notes when it changed. It also ends this proxy's promise to admit
// nothing for a while, if the record shows that the owner to whom the promise was given has stopped: an owner stops admission before it
// releases the lease. endsWithRelease says which releases show this.
func (m *Machine) setRecord(now time.Time, rec Record) {
	changed := !m.recValid || rec.Stamp != m.rec.Stamp || rec.Expiry != m.rec.Expiry
	if changed || rec.Expiry == NotExpired { // if the store itself measures the holder's time, a renewal need not change Stamp
		m.recChangedAt = now
	}
	sawHolder := m.recValid && m.rec.Holder != "" && m.rec.Epoch == rec.Epoch // at the last look, the lease was held with this epoch
	m.rec, m.recValid, m.acquireInDoubt = rec, true, false
	m.maxEpochSeen = max(m.maxEpochSeen, rec.Epoch)
	if m.releasedByHolder() && m.givenPromise.endsWithRelease(rec.Epoch, sawHolder) {
		m.givenPromise = promise{}
	}
}

// scheduleNextCall sets the time of the next call: now if a Release is due, or an AskBack, which asks the holder of a scope that belongs to
// this proxy to give it back. Otherwise it is one interval after the last call was sent, or earlier if the lease may be acquired earlier.
// sent is when the last call was sent.
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
	case m.held: // an owner has nothing to ask for or to acquire, so its next call comes after the interval
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

// Acquired records the outcome of Acquire. sent is when the call was sent; the lease counts from then on. A new holder waits until the
// owner before it must have stopped, and then admits. It is different if the store has lost the lease of this proxy while it admitted
// (storeLostLease). Next returns Acquire then only after all other members have voted for this proxy: they have promised not to admit. So
// there is no other owner to wait for, and this proxy continues to admit.
func (m *Machine) Acquired(sent, now time.Time, rec Record, err error) {
	m.noteIfStoreAway(sent, now, err)
	m.acquireSent = true
	if err != nil {
		m.acquireInDoubt = true // a failed acquisition may still have written the lease
		m.scheduleNextCall(sent, now)
		if errors.Is(err, ErrTaken) { // the lease was written since the last look, so look again at once
			m.nextCall = now
		}
		return
	}
	admissionStart := m.admitsFromIfAcquired(now) // an earlier owner may still admit until then
	reacquiredInTime := m.storeLostLease && now.Before(m.admitsUntil)
	if reacquiredInTime {
		admissionStart = m.admitsNotBefore // the start of admission with the lost lease, which lies in the past
	}
	m.setRecord(now, rec)
	m.startHolding(sent, admissionStart, rec.Epoch)
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

// Renewed records the outcome of Renew; sent is when the call was sent. If the store no longer has this proxy's lease (ErrLost), there are
// two cases. If the other members can vote for this proxy (mayReclaim), it acquires the lease again when all of them have promised not to
// admit. Otherwise it stops holding the lease. After any other error the lease still counts as held, and the next call renews it again.
func (m *Machine) Renewed(sent, now time.Time, err error) {
	m.noteIfStoreAway(sent, now, err)
	m.scheduleNextCall(sent, now)
	switch {
	case !m.held: // the lease was lost before the answer came
	case errors.Is(err, ErrLost) && m.mayReclaim(now): // look at the lease, and ask the other members for votes, both at once
		m.storeLostLease = true
		m.recValid = false // the record was read before the loss, so it does not show who has held the lease since
		m.nextCall, m.nextVotes = now, now
	case errors.Is(err, ErrLost):
		m.stopHolding(now)
	case err == nil:
		recordRenewal(m, sent, now)
	}
}

// recordRenewal records a renewal that succeeded. It counts from the time at which it was sent, because it only proves that the lease was
// held at some later, unknown time. Another proxy may have said that it owns the scope with a higher epoch (rivalEpoch). The renewal proves
// that there is no such epoch, if it was sent after the epoch was named.
func recordRenewal(m *Machine, sent, now time.Time) {
	if m.rivalEpoch > 0 && !sent.After(m.rivalNamedAt) { // sent before the epoch was named, so the renewal disproves nothing
		m.nextCall = now // renew again at once
		return
	}
	m.renewed, m.admitsUntil = sent, later(m.admitsUntil, sent.Add(m.cfg.RenewDeadline)) // later, because votes may let it admit longer
	m.disprovenEpoch = max(m.disprovenEpoch, m.rivalEpoch)
	m.rivalEpoch = 0
	if !now.Before(m.tryReleaseUntil) { // no release is wanted, or none succeeded in time: this proxy remains the owner
		m.tryReleaseUntil = time.Time{}
	}
}

// Released records the outcome of Release; sent is when the call was sent. After a success or ErrLost, this proxy no longer holds the
// lease. After any other error, it tries again. If the process stops, it does so until the lease has expired. Otherwise (GiveBack, Refused)
// it does so until tryReleaseUntil, and then renews the lease and remains the owner.
func (m *Machine) Released(sent, now time.Time, err error) {
	m.noteIfStoreAway(sent, now, err)
	if err == nil {
		// releasedByHolder compares with both epochs later. If the record still has the first, and no epoch above the second was
		// seen, then no later holder is known, and the last one has stopped.
		m.lastReleased.epoch, m.lastReleased.maxEpochSeen = m.epoch, m.maxEpochSeen
	}
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
	m.recValid = false
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
func (m *Machine) Next(now time.Time) (call Call, wake time.Time) {
	if now.Before(m.nextCall) {
		return None, m.nextTimer(now, m.nextCall)
	}
	letGoIfOver(m, now)
	switch {
	case m.held:
		return holdersCall(m, now), now
	case m.stopping: // this proxy takes no lease any more
		return None, now.Add(m.cfg.Duration)
	}
	switch at, mayAcquire := m.acquirableFrom(); {
	case mayAcquire && !now.Before(at):
		return m.startAcquire(), now
	case m.mayAskBack(now): // the scope belongs to this proxy, so ask the holder to give it back
		m.askingBack = true
		return AskBack, now
	}
	return Look, now
}

// letGoIfOver records that this proxy no longer holds the lease, if it cannot go on to hold it. There are two cases. If the store has lost
// the lease (storeLostLease), the other members must vote for this proxy before its time of admission ends (admitsUntil). And if the
// process stops before this proxy may admit (admitsFrom), an earlier owner may still send requests to the engines. A release would let the
// next holder admit at once, so the lease is not released: it expires.
func letGoIfOver(m *Machine, now time.Time) {
	if m.storeLostLease && !now.Before(m.admitsUntil) { // the members did not vote in time
		recWasValid := m.recValid
		m.stopHolding(now)
		m.recValid = recWasValid // stopHolding drops the record, but one that was read since the store lost the lease remains valid
	}
	if m.held && m.stopping && now.Before(m.admitsFrom()) { // an earlier owner may still admit
		m.stopHolding(now)
	}
}

// holdersCall returns the next call of a proxy that holds the lease. Usually it is Renew. If the store has lost the lease (storeLostLease),
// for example with its data, no renewal can succeed. Then the holder acquires it again, once a look shows no other holder and all other
// members have voted for it: they promise not to admit.
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
