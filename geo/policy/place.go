package policy

import "math"

// Place is a local replica or a peer with all its replicas, to which a request may be sent. Its state is that of the begin of
// the round.
type Candidate struct {
	ID   string
	Peer bool
	Why  Reason // why it takes no request now; Available: it takes requests

	MaxSends       int     // requests that it takes in this round
	RTTMs      float64 // round trip to a peer, or to a replica that is not on this site
	TPMs, T0Ms float64 // prefill time: ms per new token, and ms per prompt

	QueuedTokens float64 // new tokens that are prefilled before a request that is sent now
	Running      float64 // decode requests per replica
	ResidualMs   float64 // ms by which its recent first tokens came later than predicted; negative: earlier
	KVRoomMs       float64 // ms until its KV cache has room for a prompt of 0 tokens; negative: it has room already
	KVTokenMs      float64 // ms in which its KV cache frees one token; 0: not known
	Outstanding  float64 // of a replica: unfinished requests; of a peer: Offer.Load, a share of the requests that it can decode at once

	// The fields below are only used for a peer.
	Replicas     int     // number of its replicas that take a request now or soon, which share UnseenTokens; 0: no request waits for it
	Queue        int     // requests in its arrival queue
	WaitMs       float64 // ms that a request waits in this queue, as the peer reports
	UnseenTokens float64 // new tokens of forwards to the peer that its last probe did not count yet
	DistrustMs   float64 // ms by which its predicted costs were too low; added to min_gain_ms
}

// Request is a request that waits.
type Request struct {
	ID     string
	Key    uint64  // its position on a ring, from RingKey
	Tokens int     // tokens of the prompt
	Hits   []int32 // cached tokens, by place; 0 for places beyond its end
	LocalOnly   bool    // it may not be forwarded: no hops left, a forward failed, the client asked for it, or residency forbids it
	Barred []bool  // by place: data residency forbids it; false for places beyond its end
	WaitedMs float64 // ms since some place could first have taken it, for patience
	Legs   int     // number of requests as which it counts at a peer, because all its prompts go there; 0: one
}

func (r *Request) hitTokens(place int) float64 {
	if place < len(r.Hits) {
		return float64(r.Hits[place])
	}
	return 0
}

func (r *Request) barred(place int) bool { return place < len(r.Barred) && r.Barred[place] }

// newTokens is how many tokens of the prompt a place would have to compute. An engine always computes at least one.
func (r *Request) newTokens(place int) float64 {
	return max(1, float64(r.Tokens)-r.hitTokens(place))
}

// Terms are the parts of the predicted cost of a request at a place, in ms.
type Terms struct {
	RTT      float64 `json:"rtt"`
	T0       float64 `json:"t0"`
	Prefill  float64 `json:"prefill"`
	Wait     float64 `json:"wait"`
	Residual float64 `json:"residual,omitempty"` // correction of the sum of the terms above
	Batch    float64 `json:"-"`                  // cost of a larger decode batch, for this request and for the others
}

// Total is the whole cost.
func (t Terms) Total() float64 { return t.TTFT() + t.Batch }

// TTFT is the part of the cost that delays the first token.
func (t Terms) TTFT() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait + t.Residual }

// Known is TTFT without the correction by the residual.
func (t Terms) WithoutResidual() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait }

// residualFloor is the smallest share of a prediction that remains after a negative residual is added.
const residualFloor = 0.25

// terms predicts the cost of a request at place i, after the requests that this round has already counted at the place.
func (p *Policy) predictCost(r *Request, i int) Terms {
	x, s := &p.candidates[i], &p.settings
	t := Terms{
		RTT: x.RTTMs, T0: x.T0Ms, Prefill: s.PrefillWeight * x.TPMs * r.newTokens(i),
		Wait: s.WaitWeight * p.waitMs(r, i), Batch: s.BatchWeight * s.BatchMs * x.Running,
	}
	t.Residual = max(x.ResidualMs, (residualFloor-1)*t.WithoutResidual())
	return t
}

// wait is how long, in ms, a request waits at place i until its prefill begins.
func (p *Policy) waitMs(r *Request, i int) float64 {
	x, c := &p.candidates[i], &p.charges[i]
	if !x.Peer {
		wait := x.TPMs * (x.QueuedTokens + c.newTokens)
		if p.openReplicas == 0 && x.KVTokenMs == 0 { // all replicas are full, and roomWait does not know when KV is freed
			wait = max(wait, float64(p.waitingAhead+1)*p.departureGapMs)
		}
		return max(wait, p.kvWaitMs(r, i))
	}
	wait := max(x.TPMs*x.QueuedTokens, x.WaitMs, p.kvWaitMs(r, i))
	return wait + x.TPMs*(x.UnseenTokens+c.newTokens)/float64(max(1, x.Replicas))
}

// roomWait is how long, in ms, a request waits for KV memory at place i, after the requests that this round has counted at the
// place. Its own tokens do not count while the KV gate is closed: the gate opens when there is room for any prompt.
func (p *Policy) kvWaitMs(r *Request, i int) float64 {
	x := &p.candidates[i]
	tokens := p.charges[i].promptTokens
	if x.Why != NoRoom && x.Why != NoReplica {
		tokens += float64(r.Tokens)
	}
	return max(0, x.KVRoomMs+x.KVTokenMs*tokens)
}

// near is the relative difference up to which two costs count as equal.
const near = 1e-9

// sameCost reports whether two numbers differ by no more than a rounding error.
func sameCost(a, b float64) bool { return math.Abs(a-b) <= near*max(math.Abs(a), math.Abs(b)) }

// Policy decides for one region and one model. It reuses its memory, so that only one goroutine at a time may use it. Each
// Parse makes another Policy.
type Policy struct {
	name, spec string
	rule       rule
	settings        Settings

	// The state of the present round:
	candidates    []Candidate
	charges   []charge // by place
	openReplicas int      // replicas that still take a request
	openPeers int      // peers that still take a request
	waitingAhead     int      // requests for which Next returned Hold
	departureGapMs   float64
	peersBlocked   bool // a request that could be forwarded found no place: later requests are not forwarded either

	nextTurn  [2]int  // for byTurn: the index after the last chosen place; [0] of replicas, [1] of peers
	rings [2]ring // [0] of replicas, [1] of peers
}

// charge is the sum of the requests that this round has counted at a place.
type charge struct {
	sendsLeft    int     // requests that the place still takes
	newTokens  float64 // new tokens of the requests that were sent to the place or held for it
	promptTokens float64 // prompt tokens of these requests
}

// ring is a Ring, with the places from which it was made.
type ring struct {
	Ring
	ids    []string
	candidates []int // index of the place, by owner
}

// rule describes how a policy chooses.
type rule struct {
	comparesAll bool     // compare all places, and wait for the best; otherwise an available local replica is taken first
	chooseLocal   chooseBy // how an available replica is chosen
	choosePeer  chooseBy // how an available peer is chosen
	peerMustBeCheaper   bool     // a request does not go to a peer that costs more than a local replica
	neverForwards   bool     // a request never goes to a peer
	limitsPeerQueue     bool     // a peer with a longer queue is not available
}
