package policy

import "math"

// Place is where a request may go: one local replica, or one peer with all its
// replicas, as it was when the round began.
type Place struct {
	ID   string
	Peer bool
	Why  Reason // why it takes no request now; Available: it takes requests

	Left       int     // requests that it still takes in this round
	RTTMs      float64 // round trip to a peer, or to a replica that is not on this site
	TPMs, T0Ms float64 // prefill time: ms for each new token, and ms for each prompt

	QueuedTokens float64 // new tokens that are prefilled before a request that is sent now
	Running      float64 // decode requests for each replica
	ResidualMs   float64 // ms by which its first tokens lately came later than predicted; below 0: earlier
	RoomMs       float64 // ms until its KV has room for a prompt of 0 tokens; below 0: it has had room for so long
	TokenMs      float64 // ms in which its KV gets room for one more token; 0: not known
	Outstanding  float64 // of a replica: requests sent and not finished; of a peer: its Offer.Load, a share of what it can decode at once

	// Of a peer only.
	Replicas     int     // its replicas, which share UnseenTokens
	Queue        int     // requests in its arrival queue
	WaitMs       float64 // ms that a request waits there, as the peer reports
	UnseenTokens float64 // new tokens of our forwards that its probe did not count yet
	DistrustMs   float64 // ms by which its predicted costs were too small; added to min_gain_ms
}

// Request is a request that waits, with what the caller looked up for it.
type Request struct {
	ID     string
	Key    uint64  // its place on a ring: RingKey
	Tokens int     // tokens of the prompt
	Hits   []int32 // cached tokens by place; a place beyond its end has none
	Stay   bool    // the request may not be forwarded: its hops are used up, a forward failed, the client asked so, or residency forbids it
	Barred []bool  // by place: residency forbids it; a place beyond its end is allowed
	Waited float64 // ms since it could have gone somewhere, for patience
}

func (r *Request) hit(place int) float64 {
	if place < len(r.Hits) {
		return float64(r.Hits[place])
	}
	return 0
}

func (r *Request) barred(place int) bool { return place < len(r.Barred) && r.Barred[place] }

// newTokens is how many tokens a place would compute: an engine always computes at least one.
func (r *Request) newTokens(place int) float64 {
	return max(1, float64(r.Tokens)-r.hit(place))
}

// Terms are what a request is predicted to cost at a place, in ms.
type Terms struct {
	RTT      float64 `json:"rtt"`
	T0       float64 `json:"t0"`
	Prefill  float64 `json:"prefill"`
	Wait     float64 `json:"wait"`
	Residual float64 `json:"residual,omitempty"` // correction of the sum of the terms before it
	Batch    float64 `json:"-"`                  // the cost of one more request in the decode batch, for it and for the others
}

// Total is the cost.
func (t Terms) Total() float64 { return t.TTFT() + t.Batch }

// TTFT is the part of the cost that a first token waits for.
func (t Terms) TTFT() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait + t.Residual }

// Known is the part of a first token's time that is predicted without the residual.
func (t Terms) Known() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait }

// residualFloor is the least share of a prediction that counts, however early first tokens lately came.
const residualFloor = 0.25

// terms predicts the cost of a request at a place, behind the requests that this round has already
// counted there.
func (p *Policy) terms(r *Request, i int) Terms {
	x, s := &p.places[i], &p.set
	t := Terms{
		RTT: x.RTTMs, T0: x.T0Ms, Prefill: s.W * x.TPMs * r.newTokens(i),
		Wait: s.QS * p.wait(r, i), Batch: s.Load * s.BMs * x.Running,
	}
	t.Residual = max(x.ResidualMs, (residualFloor-1)*t.Known())
	return t
}

// wait is how long, in ms, a request waits at a place for its prefill to begin.
func (p *Policy) wait(r *Request, i int) float64 {
	x, c := &p.places[i], &p.charges[i]
	if !x.Peer {
		wait := x.TPMs * (x.QueuedTokens + c.tokens)
		if p.localLeft == 0 && x.TokenMs == 0 {
			wait = max(wait, float64(p.ahead+1)*p.drainMs)
		}
		return max(wait, p.roomWait(r, i))
	}
	wait := max(x.TPMs*x.QueuedTokens, x.WaitMs, p.roomWait(r, i))
	return wait + x.TPMs*(x.UnseenTokens+c.tokens)/float64(max(1, x.Replicas))
}

// roomWait is how long, in ms, a request waits for KV memory at a place, behind the requests that this round has
// counted there. If the KV gate is closed, the request's own tokens do not matter for the time until it opens.
func (p *Policy) roomWait(r *Request, i int) float64 {
	x := &p.places[i]
	tokens := p.charges[i].prompts
	if x.Why != NoRoom && x.Why != NoReplica {
		tokens += float64(r.Tokens)
	}
	return max(0, x.RoomMs+x.TokenMs*tokens)
}

// near is the relative difference up to which two costs count as the same.
const near = 1e-9

// sameCost says whether two numbers differ by no more than a rounding error.
func sameCost(a, b float64) bool { return math.Abs(a-b) <= near*max(math.Abs(a), math.Abs(b)) }

// Policy decides for one region and one model. It has scratch of its own, so
// one goroutine at a time may use it; Parse makes as many as are needed.
type Policy struct {
	name, spec string
	rule       rule
	set        Settings

	// Of the present round:
	places    []Place
	charges   []charge // by place
	localLeft int      // replicas that still take a request
	peersLeft int
	ahead     int // requests for which Next returned Hold
	drainMs   float64
	blocked   bool // a request that could be forwarded found no place: later requests are not forwarded either

	turn  [2]int  // for byTurn: the index after the last place taken, of replicas and of peers
	rings [2]ring // of replicas and of peers
}

// charge is what this round has counted at a place.
type charge struct {
	left    int     // requests that the place still takes
	tokens  float64 // new tokens of requests sent to it or held for it
	prompts float64 // all prompt tokens of these requests
}

// ring is a Ring with the ids from which it was made.
type ring struct {
	Ring
	ids    []string
	places []int // by owner
}

// rule says how a policy chooses.
type rule struct {
	compare bool     // compare all places, and wait for the best; other policies take a local replica if one is available
	local   chooseBy // how an available replica is chosen
	remote  chooseBy // how an available peer is chosen
	stays   bool     // a request does not go to a peer that costs more than staying
	never   bool     // a request never goes to a peer
	tau     bool     // a peer with a longer queue is not available
}
