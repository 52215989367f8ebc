package prefill

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"evenkeel/prefill/policy"
	"evenkeel/prefill/queue"
)

// enter serves a request at once, refuses it, or puts it into the arrival queue. Only one result is
// set.
func (qm *queueManager) enter(r Request) (*waiter, *Lease, error) {
	m, p, err := qm.acceptNew(&r)
	if err != nil {
		return nil, nil, err
	}
	if lease, err := qm.tryAtOnce(m, p, &r); lease != nil || err != nil {
		return nil, lease, err
	}
	if err := qm.makeRoomOrRefuse(m, &r, 1); err != nil {
		return nil, nil, err
	}
	return qm.addWaiter(m, p, r), nil, nil
}

// acceptNew checks a new request, counts it, and serves the waiting requests that can be served by
// now, so that the new one does not overtake them.
func (qm *queueManager) acceptNew(r *Request) (*model, *policy.Policy, error) {
	p, err := qm.steering.Named(r.Policy)
	if err != nil {
		return nil, nil, wrapPolicyError(err)
	}
	if r.isFirstAttempt() {
		qm.budget.countRequest(qm.now)
	}
	if err := qm.checkServable(r); err != nil && !r.remoteMayServe() {
		return nil, nil, err
	}
	if r.Arrival.IsZero() {
		r.Arrival = qm.now
	}
	qm.serveWaiters()
	m := qm.modelOf(r.Model)
	if r.isFirstAttempt() && !r.Batch { // Local counts no batch requests
		m.throughput.Arrived(qm.now)
	}
	return m, p, nil
}

// tryAtOnce serves a request if it can be served now and no request for its model comes first. It
// returns neither a lease nor an error if the request has to wait.
func (qm *queueManager) tryAtOnce(m *model, p *policy.Policy, r *Request) (*Lease, error) {
	// A retry, which has its place already, waits only behind other retries.
	isRetry := r.HasPlace
	if m.queue.AnyServable(!isRetry) {
		return nil, nil
	}
	qm.queue.StartRound() // for this request alone
	lease, why := qm.choose.tryServe(m, p, r, qm.now)
	qm.choose.endRound()
	switch why {
	case goesElsewhere:
		qm.dropModelIfEmpty(m) // acceptNew may have made m for this request only
		return nil, ErrElsewhere
	case deadlineMissed:
		qm.dropModelIfEmpty(m)
		return nil, qm.deadlineError(r)
	}
	return lease, nil // nil: the request waits
}

// makeRoomOrRefuse makes room in the queue for n requests like this one, or returns why they may
// not wait.
func (qm *queueManager) makeRoomOrRefuse(m *model, r *Request, n int) error {
	if r.deadlinePassed(qm.now) {
		return qm.deadlineError(r)
	}
	if !qm.now.Before(r.Arrival.Add(qm.maxWait(m, r))) {
		return qm.timeoutError(m, r)
	}
	waitsAnyway := r.HasPlace || r.Returned // a retry, or one that another region gave back
	if !waitsAnyway && !qm.makeRoom(m, r, n) {
		return qm.fullError(m, r)
	}
	return nil
}

// maxWait counts from the request's first arrival.
func (qm *queueManager) maxWait(m *model, r *Request) time.Duration {
	if r.Batch {
		return qm.cfg.Queue.BatchTimeout
	}
	return qm.queueLimits(m).Timeout
}

// fullError names the setting that bounds the queue.
func (qm *queueManager) fullError(m *model, r *Request) error {
	key, limit := "prefill.queue.max", qm.queueLimits(m).Max
	if m.needsRankFirst() { // Config.Early has the limit
		key = "pool.size"
	}
	if r.Batch { // batch requests may fill only a part of the queue
		key, limit = "half of "+key+" for batch", queue.MaxBatch(limit)
	}
	return &FullError{m.name, limit, key}
}

// makeRoom displaces waiting requests, or none if it cannot make enough room.
func (qm *queueManager) makeRoom(m *model, r *Request, n int) bool {
	displaced, ok := m.queue.MakeRoom(r.class(), r.Key, n, qm.queueLimits(m).Max)
	for _, item := range displaced {
		w := item.Value
		qm.metrics.displaced.Inc()
		qm.reportQueued(m, &w.Request, leftQueue)
		w.deliverResult(nil, qm.fullError(m, &w.Request))
	}
	return ok
}

func (qm *queueManager) addWaiter(m *model, p *policy.Policy, r Request) *waiter {
	w := &waiter{Request: r, policy: p, since: qm.now, timesOutAt: r.Arrival.Add(qm.maxWait(m, &r)), done: make(chan struct{})}
	w.item = queue.Item[*waiter]{Value: w, Key: r.Key, Priority: r.class(), Tokens: r.PromptTokens, Arrival: r.Arrival, Deadline: r.Deadline,
		HasPlace: r.HasPlace}
	// With Remote it may go to another region while its target is busy, so that DeferSameTarget must
	// not defer it.
	if r.Remote == nil {
		w.item.Target = r.Target
	}
	m.queue.Add(&w.item)
	qm.reportQueued(m, &w.Request, enteredQueue)
	return w
}

// timeoutError names the resource that was missing.
func (qm *queueManager) timeoutError(m *model, r *Request) error {
	timeout := qm.maxWait(m, r)
	if len(m.candidates) == 0 { // the request waited for another region
		return fmt.Errorf("%w: no region took model %q for %v", ErrQueueTimeout, m.name, timeout)
	}
	if !slices.ContainsFunc(m.candidates, func(c *candidate) bool { return c.Live }) {
		return fmt.Errorf("%w for model %q: for %v, no prefill engine of the %d that serve it took requests, or no decode engine did; "+
			"look at their state in /status", ErrUnavailable, m.name, timeout, len(m.candidates))
	}
	if r.Batch && !r.HasPlace { // a retry does not wait for capacity that others leave
		return fmt.Errorf("%w: for %[3]v, other requests took all engines of model %[2]q, and batch requests take only the rest; send batch "+
			"requests when there are fewer others, add engines, "+
			"or raise prefill.queue.batch_timeout", ErrQueueTimeout, m.name, timeout)
	}
	for _, c := range m.candidates {
		if c.Live && !c.load.Closed(qm.now) { // KV memory was not what was missing
			return fmt.Errorf("%w: for %[3]v, a request for model %[2]q found no place in the pool or no prefill engine that could start it; add "+
				"decode slots or prefill engines, raise pool.size, or see /prefill", ErrQueueTimeout, m.name, timeout)
		}
	}
	return fmt.Errorf("%w: a request for model %q waited %v; add prefill engines, or look for hand-offs that are not fetched", ErrKVExhausted,
		m.name, timeout)
}

func (r *Request) deadlinePassed(now time.Time) bool {
	return !r.Deadline.IsZero() && !now.Before(r.Deadline)
}

func (qm *queueManager) deadlineError(r *Request) error {
	if r.deadlinePassed(qm.now) {
		return fmt.Errorf("%w: it has passed, and no prefill engine could start the request before; give the request more time, or add prefill "+
			"engines", ErrDeadline)
	}
	return fmt.Errorf("%w: %v are left, and every prefill engine would probably need longer; give the request more time, or add prefill "+
		"engines", ErrDeadline, r.Deadline.Sub(qm.now))
}

// serveWaiters refuses the waiters whose deadline has passed, and serves all that can be served
// now, in one order over all models. A waiter whose best engine is busy waits for it. Its tokens
// then count on this engine for the rest of the round, so that those behind it go to other engines
// if these are better for them.
func (qm *queueManager) serveWaiters() {
	if qm.queue.Len() == 0 {
		return
	}
	for late := qm.queue.NextDeadline(); late != nil && !qm.now.Before(late.Deadline); late = qm.queue.NextDeadline() {
		qm.finishWaiter(qm.models[late.Value.Model], late.Value, nil, qm.deadlineError(&late.Value.Request))
	}
	qm.queue.StartRound()
	for item := qm.queue.Next(); item != nil; item = qm.queue.Next() {
		w := item.Value
		m := qm.models[w.Model]
		if err := qm.checkServable(&w.Request); err != nil && !w.remoteMayServe() {
			qm.finishWaiter(m, w, nil, err)
			continue
		}
		lease, why := qm.choose.tryServe(m, w.policy, &w.Request, w.since)
		switch why {
		case canServe:
			qm.finishWaiter(m, w, lease, nil)
		case firstAttemptsWait: // the same holds for the others, but retries may be served
			m.queue.ServeOnlyRetries()
		case goesElsewhere:
			qm.finishWaiter(m, w, nil, ErrElsewhere)
			qm.sendSiblingsElsewhere(m, w)
		case deadlineMissed:
			qm.finishWaiter(m, w, nil, qm.deadlineError(&w.Request))
		case poolFull: // retries have their place already
			qm.queue.MarkPoolFull()
		case onlyThisWaits: // for a busy candidate or region
			item.Defer()
		case sameTargetWaits:
			item.DeferSameTarget()
		default: // gatesClosed, noneCanStart: nor can any other request for the model
			m.queue.CloseForRound()
		}
	}
	qm.choose.endRound()
}

// finishWaiter removes a waiter from its queue and passes it the result. A request that is served,
// here or elsewhere, uses up the turn of its Key.
func (qm *queueManager) finishWaiter(m *model, w *waiter, lease *Lease, err error) {
	if lease != nil || errors.Is(err, ErrElsewhere) {
		w.item.MarkServed()
	}
	if lease != nil { // one region must serve all legs
		keepSiblingsHere(w.siblings)
	}
	w.item.Remove()
	qm.reportQueued(m, &w.Request, leftQueue)
	w.deliverResult(lease, err)
	qm.dropModelIfEmpty(m)
}

// sendSiblingsElsewhere sends the other legs of a request to another region together with w.
func (qm *queueManager) sendSiblingsElsewhere(m *model, w *waiter) {
	for _, leg := range w.siblings { // w is one of them
		if leg.item.InFlowQueue() { // w has left the queue already
			qm.finishWaiter(m, leg, nil, ErrElsewhere)
		}
		leg.regionDecision.announce()
	}
}

// The values of reportQueued's parameter entered.
const (
	enteredQueue = true
	leftQueue    = false
)

// reportQueued does not report batch requests, because OnlineFirstAttempts does not count them.
func (qm *queueManager) reportQueued(m *model, r *Request, entered bool) {
	if r.Remote != nil && !r.Batch {
		r.Remote.Queued(qm.now, entered, m.queue.OnlineFirstAttempts())
	}
}

// nextWake is the next time at which a waiter may be answered without any event; zero: only an
// event can help.
func (qm *queueManager) nextWake() (next time.Time) {
	consider := func(at time.Time) {
		if at.After(qm.now) && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	if item := qm.queue.NextDeadline(); item != nil {
		consider(item.Deadline)
	}
	if at, ok := qm.ledger.NextExpiry(); ok { // an engine frees the KV of a hand-off
		consider(at)
	}
	for _, c := range qm.candidates {
		consider(c.circuit.TrialAt()) // zero, and ignored, if it is in service
		consider(c.trialAt)
		if at, ok := c.load.MayPassAt(); ok { // the gauge becomes too old, or a canary may pass
			consider(at)
		}
		if at, ok := c.load.StallsAt(); ok { // so that requests need not wait for it
			consider(at)
		}
		if at, ok := qm.earlyProbeFrom(c); ok { // a probe may be sent ahead to the busy engine
			consider(at)
		}
	}
	return next
}
