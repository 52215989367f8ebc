package policy

import "math"

// Offer is what a region says of itself in a probe's answer, for one model.
type Offer struct {
	Replicas     int     `json:"replicas"`
	NAvail       int     `json:"n_avail"` // replicas that take a request
	Free         int     `json:"free"`    // how many they take
	Queue        int     `json:"queue"`   // requests in the arrival queue
	QueueMax     int     `json:"queue_max"`
	QueueWaitMs  float64 `json:"queue_wait_ms"`
	QueuedTokens float64 `json:"queued_new_tokens"` // ahead of a request on the least busy replica
	Running      float64 `json:"running"`           // requests that decode there
	Load         float64 `json:"load"`
	TPMs         float64 `json:"tp_ms"`
	T0Ms         float64 `json:"t0_ms"`
	FitN         int     `json:"fit_n"`                 // prefills that tp and t0 were learned from
	RoomMs       float64 `json:"room_ms,omitempty"`     // until a replica's KV has room for a prompt without tokens; below 0: so long ago
	TokenMs      float64 `json:"kv_token_ms,omitempty"` // time until the region's KV gets room for one more token; 0: unknown
}

// NewOffer sums up the local replicas. In the arrival queue wait so many
// requests with so many new tokens; seqs is what the replicas decode at most.
func NewOffer(local []Place, waiting int, waitingTokens, drainMs float64, seqs int) Offer {
	o := Offer{Queue: waiting}
	var sum, outstanding float64
	least, best := math.Inf(1), -1
	for i := range local {
		x := &local[i]
		if x.Peer {
			continue
		}
		o.Replicas++
		sum += x.QueuedTokens
		outstanding += x.Outstanding
		if x.Why == Available {
			o.NAvail++
			o.Free += min(x.Left, unlimited-o.Free)
		}
		least = min(least, x.QueuedTokens)
		if best < 0 || better(x, &local[best]) {
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

// room says when there is memory for a next request: on an available replica, else on
// the first that has some once the arrival queue is served.
func (o *Offer) room(local []Place, waitingTokens float64) {
	perMs := 0.0
	o.RoomMs = math.Inf(1)
	for i := range local {
		x := &local[i]
		if x.Peer || x.TokenMs == 0 || o.NAvail > 0 && x.Why != Available {
			continue
		}
		perMs += 1 / x.TokenMs
		o.RoomMs = min(o.RoomMs, x.RoomMs)
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

// better says which replica a next request would meet: an available one, then
// the smaller batch.
func better(a, b *Place) bool {
	if av, bv := a.Why == Available, b.Why == Available; av != bv {
		return av
	}
	return a.Running < b.Running
}

// sane says that the numbers can be true. A peer that sends others is not
// believed at all.
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
	Probed bool // a good probe ever
	Down   bool // misses in a row, or not yet two good ones since
	Major  int  // of its protocol, Protocol is ours

	AgeMs, IntervalMs float64 // of the last good probe; from one answer to the next

	Draining, Offers bool // Offers: the model
	CircuitOpen      bool
	BudgetSpent      bool

	Offer        Offer
	RTTMs        float64
	Reserved     int     // of our forwards that its probe did not count yet
	UnseenTokens float64 // of the same
	DistrustMs   float64
	ResidualMs   float64
	Unanswered   int // of our forwards
	Window       int // how many may be; 0: any number
}

// left is how many more requests it gets: as many as it offers, but no more than its
// window allows.
func (x *Peer) left() int {
	left := x.Offer.Free - x.Reserved
	if x.Window > 0 {
		left = min(left, x.Window-x.Unanswered)
	}
	return left
}

// Protocol is the major version of what dispatchers say to each other.
const Protocol = 1

// staleAfter is how many intervals an answer is believed.
const staleAfter = 3

// Judge says why a peer takes no forward, or Available. The first
// reason in the order of the sources counts.
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

// PeerPlace is a peer as a place to go.
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

// Accepts says whether a region with so long a queue takes one more forwarded
// request; the origin knew an older length.
func (s *Settings) Accepts(queue int) bool { return queue <= 2*s.Tau }
