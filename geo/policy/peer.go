package policy

import "math"

// Offer is what a region reports of itself for one model, in the answer to a probe.
type Offer struct {
	Replicas     int     `json:"replicas"`
	NAvail       int     `json:"n_avail"` // replicas that take a request now
	Free         int     `json:"free"`    // how many requests these replicas take
	Queue        int     `json:"queue"`   // requests in the arrival queue
	QueueMax     int     `json:"queue_max"`
	QueueWaitMs  float64 `json:"queue_wait_ms"`
	QueuedTokens float64 `json:"queued_new_tokens"` // ahead of a request on the least busy replica
	Running      float64 `json:"running"`           // requests that decode there
	Load         float64 `json:"load"`
	TPMs         float64 `json:"tp_ms"`
	T0Ms         float64 `json:"t0_ms"`
	FitN         int     `json:"fit_n"` // prefills that tp and t0 were learned from
	// ms until a replica's KV has room for a prompt of 0 tokens; below 0: for how long it has had room
	RoomMs  float64 `json:"room_ms,omitempty"`
	TokenMs float64 `json:"kv_token_ms,omitempty"` // time until the region's KV gets room for one more token; 0: unknown
}

// NewOffer sums up the local replicas. waiting requests with waitingTokens new tokens wait in the
// arrival queue; seqs is how many requests the replicas can decode at once.
func NewOffer(local []Place, waiting int, waitingTokens, drainMs float64, seqs int) Offer {
	o := Offer{Queue: waiting}
	var sum, outstanding float64
	least, best := math.Inf(1), -1
	for i := range local {
		replica := &local[i]
		if replica.Peer {
			continue
		}
		o.Replicas++
		sum += replica.QueuedTokens
		outstanding += replica.Outstanding
		if replica.Why == Available {
			o.NAvail++
			o.Free += min(replica.Left, unlimited-o.Free)
		}
		least = min(least, replica.QueuedTokens)
		if best < 0 || better(replica, &local[best]) {
			best = i
		}
	}
	if o.Replicas == 0 {
		return o
	}
	o.TPMs, o.T0Ms, o.Running = local[best].TPMs, local[best].T0Ms, local[best].Running
	o.QueuedTokens = least
	wait := 0.0
	if o.NAvail == 0 {
		o.QueuedTokens = (sum + waitingTokens) / float64(o.Replicas)
		wait = float64(waiting+1) * drainMs
	}
	o.QueueWaitMs = max(o.TPMs*o.QueuedTokens, wait)
	o.room(local, waitingTokens)
	o.Load = (outstanding + float64(waiting)) / float64(max(1, seqs))
	return o
}

// room sets when there is KV memory for a next request: on an available replica, or if there is none, on
// the first replica that has memory after the arrival queue is served.
func (o *Offer) room(local []Place, waitingTokens float64) {
	perMs := 0.0
	o.RoomMs = math.Inf(1)
	for i := range local {
		replica := &local[i]
		if replica.Peer || replica.TokenMs == 0 || o.NAvail > 0 && replica.Why != Available {
			continue
		}
		perMs += 1 / replica.TokenMs
		o.RoomMs = min(o.RoomMs, replica.RoomMs)
	}
	if perMs == 0 {
		o.RoomMs = 0
		return
	}
	o.TokenMs = 1 / perMs
	if o.NAvail == 0 {
		o.RoomMs += waitingTokens * o.TokenMs
	}
}

// better says that a next request would go to a rather than b: an available replica goes first, then
// the smaller batch.
func better(a, b *Place) bool {
	if av, bv := a.Why == Available, b.Why == Available; av != bv {
		return av
	}
	return a.Running < b.Running
}

// sane says that the numbers are possible. If a peer sends impossible numbers, nothing in its
// offer is believed.
func (o *Offer) sane() bool {
	for _, v := range [...]float64{o.QueueWaitMs, o.QueuedTokens, o.Running, o.Load, o.TPMs, o.T0Ms, o.TokenMs, max(0, o.RoomMs)} {
		if !(v >= 0) || math.IsInf(v, 0) {
			return false
		}
	}
	return o.NAvail >= 0 && o.NAvail <= o.Replicas && o.Free >= 0 && o.Queue >= 0
}

// Peer is what is known of a peer dispatcher when a round begins.
type Peer struct {
	ID     string
	Probed bool // a good probe has come
	Down   bool // it missed several probes in a row, and not two good ones have come since
	Major  int  // the major version of its protocol; ours is Protocol

	AgeMs, IntervalMs float64 // the age of the last good probe; the time from one answer to the next

	Draining, Offers bool // Offers: it offers the model
	CircuitOpen      bool
	BudgetSpent      bool

	Offer        Offer
	RTTMs        float64
	Reserved     int     // our forwards that its last probe did not count yet
	UnseenTokens float64 // new tokens of these forwards
	DistrustMs   float64
	ResidualMs   float64
	Unanswered   int // our forwards without a first event
	Window       int // how many may be unanswered; 0: any number
}

// left is how many more requests the peer may get: as many as it offers, but no more than its
// window allows.
func (x *Peer) left() int {
	left := x.Offer.Free - x.Reserved
	if x.Window > 0 {
		left = min(left, x.Window-x.Unanswered)
	}
	return left
}

// Protocol is the major version of the protocol between dispatchers.
const Protocol = 1

// staleAfter is for how many probe intervals an answer is believed.
const staleAfter = 3

// Judge returns why a peer takes no forward, or Available. If there are several reasons, the
// first in the order of the code counts.
func (p *Policy) Judge(x *Peer) Reason {
	switch {
	case !x.Probed:
		return Never
	case x.Down:
		return Down
	case x.AgeMs >= staleAfter*x.IntervalMs:
		return Stale
	case x.Major != Protocol:
		return Version
	case x.Draining:
		return Draining
	case !x.Offers:
		return Model
	case !x.Offer.sane():
		return Nonsense
	case x.CircuitOpen:
		return Circuit
	case x.BudgetSpent:
		return Budget
	case x.Offer.NAvail == 0:
		return NoReplica
	case p.rule.tau && x.Offer.Queue > p.set.Tau:
		return Queued
	case x.left() <= 0:
		return Full
	}
	return Available
}

// PeerPlace returns the peer as a Place.
func (p *Policy) PeerPlace(x *Peer) Place {
	o := &x.Offer
	place := Place{
		ID: x.ID, Peer: true, Why: p.Judge(x), RTTMs: x.RTTMs, TPMs: o.TPMs, T0Ms: o.T0Ms,
		QueuedTokens: o.QueuedTokens, Running: o.Running, Outstanding: o.Load,
		Replicas: o.Replicas, Queue: o.Queue, WaitMs: o.QueueWaitMs,
		RoomMs: o.RoomMs + x.UnseenTokens*o.TokenMs, TokenMs: o.TokenMs, UnseenTokens: x.UnseenTokens, DistrustMs: x.DistrustMs,
		ResidualMs: x.ResidualMs,
	}
	if place.Why == Available {
		place.Left = x.left()
	}
	if place.TPMs == 0 {
		place.TPMs, place.T0Ms = p.set.TPMs, p.set.T0Ms
	}
	return place
}

// Accepts says whether a region with a queue of this length takes one more forwarded
// request. The limit is twice Tau, because the origin decided by an older length.
func (s *Settings) Accepts(queue int) bool { return queue <= 2*s.Tau }
