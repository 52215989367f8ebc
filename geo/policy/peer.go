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
	// The time in ms until a replica's KV cache has room for a prompt of 0 tokens; negative: it has room already.
	KVRoomMs  float64 `json:"room_ms,omitempty"`
	KVTokenMs float64 `json:"kv_token_ms,omitempty"` // ms in which the region's KV caches free one token; 0: unknown
}

// NewOffer sums up the local replicas; it skips peers. waiting is the number of requests in the arrival queue, and waitingTokens the
// sum of their new tokens. The queue lets one request go per departureGapMs. seqs is the number of requests that the replicas can
// decode at once. From the sums and from the replica that the next request would probably get, a peer predicts how long a request that it
// forwards would take here.
func NewOffer(local []Candidate, waiting int, waitingTokens, departureGapMs float64, seqs int) Offer {
	o := Offer{Queue: waiting}
	outstanding := 0.0         // unfinished requests of all replicas
	queuedTokens := 0.0        // tokens that wait for their prefill at all replicas that a request may wait for
	leastQueued := math.Inf(1) // the smallest number of such tokens at one of these replicas
	next := -1                 // index of the replica that the next request would probably get; -1: there is none
	for i := range local {
		replica := &local[i]
		if replica.Peer {
			continue
		}
		outstanding += replica.Outstanding
		// A replica that takes no request soon counts no further: its queue may be empty because it is dead.
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
	if o.Replicas == 0 { // no replica takes a request soon, so there are no times to report
		return o
	}
	o.TPMs, o.T0Ms, o.Running = local[next].TPMs, local[next].T0Ms, local[next].Running
	o.QueuedTokens = leastQueued
	if o.NAvail == 0 { // none is available: the next request waits behind the arrival queue, which all replicas empty together
		o.QueuedTokens = (queuedTokens + waitingTokens) / float64(o.Replicas)
	}
	o.QueueWaitMs = o.predictedWaitMs(departureGapMs)
	o.setKVRoom(local, waitingTokens)
	o.Load = (outstanding + float64(waiting)) / float64(max(1, seqs))
	return o
}

// countReplica counts a replica for which a request may wait and, if it is available, how many requests it takes now.
func (o *Offer) countReplica(replica *Candidate) {
	o.Replicas++
	if replica.Why == Available {
		o.NAvail++
		o.Free += min(replica.MaxSends, unlimited-o.Free) // the sum must not exceed unlimited, which stands for no bound
	}
}

// predictedWaitMs is how long, in ms, a new request waits until its prefill begins: for the prefill of QueuedTokens and, if no replica
// takes a request now, for its turn in the arrival queue. These waits overlap, so the longer one counts.
func (o *Offer) predictedWaitMs(departureGapMs float64) float64 {
	turnMs := 0.0
	if o.NAvail == 0 { // the queue lets one request go per departureGapMs
		turnMs = float64(o.Queue+1) * departureGapMs
	}
	return max(o.TPMs*o.QueuedTokens, turnMs)
}

// setKVRoom sets KVRoomMs, the time until a replica has room for a prompt of 0 tokens, and KVTokenMs, the time in which the replicas
// together free one token. A peer predicts by both when there is KV memory for a request. setKVRoom considers the available replicas; if
// there are none, it considers all for which a request may wait, and counts the requests in the arrival queue before the next request. If
// nothing is known, both are 0.
func (o *Offer) setKVRoom(local []Candidate, waitingTokens float64) {
	freedPerMs := 0.0 // KV tokens that these replicas free per ms, together
	o.KVRoomMs = math.Inf(1)
	for i := range local {
		replica := &local[i]
		mayTake := !replica.Peer && replica.Why.Awaitable()
		passedOver := o.NAvail > 0 && replica.Why != Available // while others are available, no request waits for this one
		kvUnknown := replica.KVTokenMs == 0
		if !mayTake || passedOver || kvUnknown {
			continue
		}
		freedPerMs += 1 / replica.KVTokenMs
		o.KVRoomMs = min(o.KVRoomMs, replica.KVRoomMs) // time until the first of the replicas has room
	}
	if freedPerMs == 0 { // it is known of no replica how fast its KV cache frees tokens
		o.KVRoomMs = 0
		return
	}
	o.KVTokenMs = 1 / freedPerMs
	if o.NAvail == 0 { // the requests in the arrival queue need KV memory first
		o.KVRoomMs += waitingTokens * o.KVTokenMs
	}
}

// preferred reports whether the next request would rather go to a than to b. Available replicas come first, then replicas with
// a smaller batch.
func preferred(a, b *Candidate) bool {
	if aAvailable, bAvailable := a.Why == Available, b.Why == Available; aAvailable != bAvailable {
		return aAvailable
	}
	return a.Running < b.Running
}

// maxOffered is a limit that no number of a real offer reaches, be it of ms or of tokens. Products of two numbers up to this
// limit are finite. An infinite cost would count as equal to every other cost, and would not be a number when its weight is 0.
const maxOffered = 1e15

// plausible reports whether all numbers of the offer are possible. An offer with an impossible number is not used at all.
func (o *Offer) plausible() bool {
	// KVRoomMs is below 0 if there is room already; max leaves NaN as it is.
	for _, v := range [...]float64{o.QueueWaitMs, o.QueuedTokens, o.Running, o.Load, o.TPMs, o.T0Ms, o.KVTokenMs, max(0, o.KVRoomMs)} {
		if !(v >= 0 && v <= maxOffered) { // this form also refuses NaN
			return false
		}
	}
	return o.NAvail >= 0 && o.NAvail <= o.Replicas && o.Free >= 0 && o.Queue >= 0
}

// Peer is the state of a peer proxy when a round begins.
type Peer struct {
	ID     string
	Probed bool // the peer has answered a probe
	Down   bool // the peer missed several probes in a row, and has not answered two in a row since
	Major  int  // major version of the peer's protocol, which must equal Protocol

	AgeMs      float64 // time since the last answered probe
	IntervalMs float64 // time from one answer to the next

	Draining    bool // the peer takes no new requests
	OffersModel bool // the peer's last answer has an Offer for the model
	CircuitOpen bool
	BudgetSpent bool // the egress budget of the day is used up

	Offer        Offer
	RTTMs        float64
	Reserved     int     // forwards to the peer that its last probe did not count yet
	UnseenTokens float64 // new tokens of the forwards that Reserved counts
	DistrustMs   float64
	ResidualMs   float64
	Unanswered   int // forwards to the peer without a first event
	Window       int // largest number that Unanswered may reach; 0: no bound
}

// maxSends is how many more requests may be sent to the peer: as many as it offers, but no more than its window allows. A number of 0
// or below means none.
func (peer *Peer) maxSends() int {
	sends := peer.Offer.Free - peer.Reserved
	if peer.Window > 0 { // 0: there is no window
		sends = min(sends, peer.Window-peer.Unanswered)
	}
	return sends
}

// Protocol is the major version of the protocol between proxies.
const Protocol = 1

// staleAfter is the number of probe intervals after which an answer is too old.
const staleAfter = 3

// Judge returns the reason why a peer takes no forward, or Available. If there are several reasons, it returns the first in
// the order of the cases.
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

// PeerCandidate converts a peer to a Candidate, with the reason why it takes no request. The forwards that the peer's last probe did not
// count yet (UnseenTokens) need KV memory first, so their time is added to KVRoomMs, the time until a prompt has room. If the peer has not
// learned yet how long a prefill takes, the times of the settings stand in. A peer that takes no request has MaxSends 0.
func (p *Policy) PeerCandidate(peer *Peer) Candidate {
	o := &peer.Offer
	candidate := Candidate{
		ID: peer.ID, Peer: true, Why: p.Judge(peer),
		// predictCost adds up these:
		RTTMs: peer.RTTMs, TPMs: o.TPMs, T0Ms: o.T0Ms, ResidualMs: peer.ResidualMs, Running: o.Running,
		// waitMs predicts the wait by these, which predictCost adds, too:
		QueuedTokens: o.QueuedTokens, WaitMs: o.QueueWaitMs, UnseenTokens: peer.UnseenTokens, Replicas: o.Replicas,
		KVRoomMs: o.KVRoomMs + peer.UnseenTokens*o.KVTokenMs, KVTokenMs: o.KVTokenMs,
		Outstanding: o.Load, Queue: o.Queue, // the load, for rules that compare no costs
		DistrustMs: peer.DistrustMs, // raises the gain that a forward to the peer must promise
	}
	if candidate.Why == Available {
		candidate.MaxSends = peer.maxSends()
	}
	if candidate.TPMs == 0 { // the peer has learned no times yet
		candidate.TPMs, candidate.T0Ms = p.settings.TPMs, p.settings.T0Ms
	}
	return candidate
}

// AcceptsForward reports whether a region with a queue of this length takes one more forwarded request. The limit is twice Tau,
// because the region that forwards the request has decided by the length at its last probe.
func (s *Settings) AcceptsForward(queue int) bool { return queue <= 2*s.Tau }
