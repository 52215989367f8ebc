package policy

import "math"

// Offer is the state that a region reports for one model in the answer to a probe.
type Offer struct {
	Replicas     int     `json:"replicas"` // replicas that take a request now or soon
	NAvail       int     `json:"n_avail"`  // replicas that take a request now
	Free         int     `json:"free"`     // requests that the replicas of n_avail together take now
	Queue        int     `json:"queue"`    // requests in the arrival queue
	QueueMax     int     `json:"queue_max"`
	QueueWaitMs  float64 `json:"queue_wait_ms"`
	QueuedTokens float64 `json:"queued_new_tokens"` // tokens prefilled before a new request on the least busy replica
	Running      float64 `json:"running"`           // decode requests of the replica that would be chosen next
	Load         float64 `json:"load"`
	TPMs         float64 `json:"tp_ms"`
	T0Ms         float64 `json:"t0_ms"`
	FitN         int     `json:"fit_n"` // number of prefills from which tp_ms and t0_ms were learned
	// The time in ms until a replica's KV cache has room for a prompt of 0 tokens; negative: it has
	// room already.
	KVRoomMs  float64 `json:"room_ms,omitempty"`
	KVTokenMs float64 `json:"kv_token_ms,omitempty"` // ms in which the region's KV caches free one token; 0: unknown
}

// NewOffer sums up the local replicas. waiting requests with waitingTokens new tokens are in the
// arrival queue, which lets one go per departureGapMs. seqs requests can be decoded at once.
func NewOffer(local []Candidate, waiting int, waitingTokens, departureGapMs float64, seqs int) Offer {
	o := Offer{Queue: waiting}
	outstanding := 0.0
	queuedTokens := 0.0        // at all replicas that a request may wait for
	leastQueued := math.Inf(1) // at one of them
	next := -1                 // the replica that the next request would probably get
	for i := range local {
		replica := &local[i]
		if replica.Peer {
			continue
		}
		outstanding += replica.Outstanding
		// A replica that takes no request soon may have an empty queue because it is dead.
		if !replica.Why.Awaitable() {
			continue
		}
		o.countReplica(replica)
		queuedTokens += replica.QueuedTokens
		leastQueued = min(leastQueued, replica.QueuedTokens)
		if next < 0 || preferred(replica, &local[next]) {
			next = i
		}
	}
	if o.Replicas == 0 {
		return o
	}
	o.TPMs, o.T0Ms, o.Running = local[next].TPMs, local[next].T0Ms, local[next].Running
	o.QueuedTokens = leastQueued
	if o.NAvail == 0 { // the next request waits behind the arrival queue
		o.QueuedTokens = (queuedTokens + waitingTokens) / float64(o.Replicas)
	}
	o.QueueWaitMs = o.predictedWaitMs(departureGapMs)
	o.setKVRoom(local, waitingTokens)
	o.Load = (outstanding + float64(waiting)) / float64(max(1, seqs))
	return o
}

func (o *Offer) countReplica(replica *Candidate) {
	o.Replicas++
	if replica.Why == Available {
		o.NAvail++
		o.Free += min(replica.MaxSends, unlimited-o.Free) // unlimited stands for no bound
	}
}

// predictedWaitMs is the wait for the prefill of QueuedTokens and, if no replica is available, for
// a turn in the arrival queue. They overlap, so the longer one counts.
func (o *Offer) predictedWaitMs(departureGapMs float64) float64 {
	turnMs := 0.0
	if o.NAvail == 0 {
		turnMs = float64(o.Queue+1) * departureGapMs
	}
	return max(o.TPMs*o.QueuedTokens, turnMs)
}

// setKVRoom sets when there is KV memory for a request: at the available replicas or, if there are
// none, at all for which it may wait, after the requests in the arrival queue. Both are 0 if
// nothing is known.
func (o *Offer) setKVRoom(local []Candidate, waitingTokens float64) {
	freedPerMs := 0.0 // by these replicas together
	o.KVRoomMs = math.Inf(1)
	for i := range local {
		replica := &local[i]
		mayTake := !replica.Peer && replica.Why.Awaitable()
		passedOver := o.NAvail > 0 && replica.Why != Available // no request waits for this one
		kvUnknown := replica.KVTokenMs == 0
		if !mayTake || passedOver || kvUnknown {
			continue
		}
		freedPerMs += 1 / replica.KVTokenMs
		o.KVRoomMs = min(o.KVRoomMs, replica.KVRoomMs)
	}
	if freedPerMs == 0 {
		o.KVRoomMs = 0
		return
	}
	o.KVTokenMs = 1 / freedPerMs
	if o.NAvail == 0 { // the requests in the arrival queue come first
		o.KVRoomMs += waitingTokens * o.KVTokenMs
	}
}

// preferred: available replicas come first, then those with a smaller batch.
func preferred(a, b *Candidate) bool {
	if aAvailable, bAvailable := a.Why == Available, b.Why == Available; aAvailable != bAvailable {
		return aAvailable
	}
	return a.Running < b.Running
}

// maxOffered is above any number of a real offer, in ms or tokens. Products of two such numbers are
// finite: an infinite cost would equal every other, and would be NaN with a weight of 0.
const maxOffered = 1e15

// plausible: an offer with one impossible number is not used at all.
func (o *Offer) plausible() bool {
	// KVRoomMs may be below 0; max leaves NaN as it is.
	for _, v := range [...]float64{o.QueueWaitMs, o.QueuedTokens, o.Running, o.Load, o.TPMs, o.T0Ms, o.KVTokenMs, max(0, o.KVRoomMs)} {
		if !(v >= 0 && v <= maxOffered) { // refuses NaN, too
			return false
		}
	}
	return o.NAvail >= 0 && o.NAvail <= o.Replicas && o.Free >= 0 && o.Queue >= 0
}

// Peer is a peer proxy when a round begins.
type Peer struct {
	ID     string
	Probed bool // it has answered a probe
	Down   bool // it missed several probes in a row, and has not answered two in a row since
	Major  int  // of its protocol

	AgeMs      float64 // of the last answered probe
	IntervalMs float64 // from one answer to the next

	Draining    bool
	OffersModel bool // its last answer has an Offer for the model
	CircuitOpen bool
	BudgetSpent bool // the egress budget of the day

	Offer        Offer
	RTTMs        float64
	Reserved     int     // forwards that its last probe did not count yet
	UnseenTokens float64 // new tokens of those
	DistrustMs   float64
	ResidualMs   float64
	Unanswered   int // forwards without a first event
	Window       int // largest Unanswered; 0: no bound
}

// maxSends is what the peer offers, within its window; 0 or below: none.
func (peer *Peer) maxSends() int {
	sends := peer.Offer.Free - peer.Reserved
	if peer.Window > 0 {
		sends = min(sends, peer.Window-peer.Unanswered)
	}
	return sends
}

// Protocol is the major version between proxies.
const Protocol = 1

// staleAfter is in probe intervals.
const staleAfter = 3

// Judge returns the first reason why a peer takes no forward.
func (p *Policy) Judge(peer *Peer) Reason {
	switch {
	case !peer.Probed:
		return NeverProbed
	case peer.Down:
		return Down
	case peer.AgeMs >= staleAfter*peer.IntervalMs:
		return Stale
	case peer.Major != Protocol:
		return OtherVersion
	case peer.Draining:
		return Draining
	case !peer.OffersModel:
		return NotOffered
	case !peer.Offer.plausible():
		return Nonsense
	case peer.CircuitOpen:
		return CircuitOpen
	case peer.BudgetSpent:
		return BudgetSpent
	case peer.Offer.NAvail == 0:
		return NoReplica
	case p.rule.limitsPeerQueue && peer.Offer.Queue > p.settings.Tau:
		return QueueTooLong
	case peer.maxSends() <= 0:
		return Full
	}
	return Available
}

// PeerCandidate converts a peer. Forwards that its last probe did not count need KV memory first.
// The times of the settings stand in until the peer has learned its own.
func (p *Policy) PeerCandidate(peer *Peer) Candidate {
	o := &peer.Offer
	candidate := Candidate{
		ID: peer.ID, Peer: true, Why: p.Judge(peer),
		// predictCost adds up these:
		RTTMs: peer.RTTMs, TPMs: o.TPMs, T0Ms: o.T0Ms, ResidualMs: peer.ResidualMs, Running: o.Running,
		// waitMs predicts the wait by these:
		QueuedTokens: o.QueuedTokens, WaitMs: o.QueueWaitMs, UnseenTokens: peer.UnseenTokens, Replicas: o.Replicas,
		KVRoomMs: o.KVRoomMs + peer.UnseenTokens*o.KVTokenMs, KVTokenMs: o.KVTokenMs,
		Outstanding: o.Load, Queue: o.Queue, // for rules that compare no costs
		DistrustMs: peer.DistrustMs, // raises the gain that a forward must promise
	}
	if candidate.Why == Available {
		candidate.MaxSends = peer.maxSends()
	}
	if candidate.TPMs == 0 {
		candidate.TPMs, candidate.T0Ms = p.settings.TPMs, p.settings.T0Ms
	}
	return candidate
}

// AcceptsForward takes twice Tau as the limit, because the sender decided by the length at its last
// probe.
func (s *Settings) AcceptsForward(queue int) bool { return queue <= 2*s.Tau }
