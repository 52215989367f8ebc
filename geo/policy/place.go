package policy

import "math"

// Place is where a request may go: one local replica, or one peer with all its
// replicas, as it was when the round began.
type Place struct {
	ID   string
	Peer bool
	Why  Reason // why it takes nothing now; Available: it does

	Left       int     // requests it still takes before somebody looks again
	RTTMs      float64 // to a peer, or to a replica that is not on this site
	TPMs, T0Ms float64 // prefill: ms a new token, and ms at all

	QueuedTokens float64 // new tokens that are prefilled before a request of ours
	Running      float64 // requests that decode, a replica
	ResidualMs   float64 // by which first tokens from there lately came later than predicted; below 0: sooner
	RoomMs       float64 // until its KV has room for a prompt without tokens; below 0: so long ago
	TokenMs      float64 // in which its KV gets room for one more token; 0: nobody knows
	Outstanding  float64 // requests sent and not finished: a replica's own, a peer's load

	// Of a peer only.
	Replicas     int     // that share UnseenTokens
	Queue        int     // requests in its arrival queue
	WaitMs       float64 // what it says a request waits there
	UnseenTokens float64 // new tokens of our forwards that its probe did not count yet
	DistrustMs   float64 // added to min_gain: by so much its costs were too small
}

// Request is one that waits, with what the caller looked up for it.
type Request struct {
	ID     string
	Key    uint64  // where it stands on a ring: RingKey
	Tokens int     // of the prompt
	Hits   []int32 // tokens cached, by place; shorter: none there
	Stay   bool    // it may not be forwarded: hop used, fell back, asked for, residency
	Barred []bool  // by place: residency keeps it from there; shorter: nothing does
	Waited float64 // ms since it could have gone somewhere, for patience
}

func (r *Request) hit(place int) float64 {
	if place < len(r.Hits) {
		return float64(r.Hits[place])
	}
	return 0
}

func (r *Request) barred(place int) bool { return place < len(r.Barred) && r.Barred[place] }

// newTokens a place would compute: an engine always computes one.
func (r *Request) newTokens(place int) float64 {
	return max(1, float64(r.Tokens)-r.hit(place))
}

// Terms are what a request is predicted to cost at a place, in ms.
type Terms struct {
	RTT      float64 `json:"rtt"`
	T0       float64 `json:"t0"`
	Prefill  float64 `json:"prefill"`
	Wait     float64 `json:"wait"`
	Residual float64 `json:"residual,omitempty"` // correction of all before it
	Batch    float64 `json:"-"`                  // the price of one more in the batch, paid and inflicted
}

// Total is the cost.
func (t Terms) Total() float64 { return t.TTFT() + t.Batch }

// TTFT is the part of the cost that a first token waits for.
func (t Terms) TTFT() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait + t.Residual }

// Known is the part of a first token's time that is predicted without the residual.
func (t Terms) Known() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait }

// residualFloor is what of a prediction counts however early first tokens lately came.
const residualFloor = 0.25

// terms of a request at a place, after what this round has already charged
// there.
func (p *Policy) terms(r *Request, i int) Terms {
	x, s := &p.places[i], &p.set
	t := Terms{
		RTT: x.RTTMs, T0: x.T0Ms, Prefill: s.W * x.TPMs * r.newTokens(i),
		Wait: s.QS * p.wait(r, i), Batch: s.Load * s.BMs * x.Running,
	}
	t.Residual = max(x.ResidualMs, (residualFloor-1)*t.Known())
	return t
}

// wait is what stands between a request and its prefill at a place.
func (p *Policy) wait(r *Request, i int) float64 {
	x, c := &p.places[i], &p.charges[i]
	if !x.Peer {
		wait := x.TPMs * (x.QueuedTokens + c.tokens)
		if p.localLeft == 0 && x.TokenMs == 0 {
			wait = max(wait, float64(p.ahead+1)*p.drainMs)
		}
		return max(wait, p.room(r, i))
	}
	wait := max(x.TPMs*x.QueuedTokens, x.WaitMs, p.room(r, i))
	return wait + x.TPMs*(x.UnseenTokens+c.tokens)/float64(max(1, x.Replicas))
}

// room is how long a request waits for memory at a place, behind what this round has
// put there. A closed gate opens whatever the prompt's length is.
func (p *Policy) room(r *Request, i int) float64 {
	x := &p.places[i]
	tokens := p.charges[i].prompts
	if x.Why != NoRoom && x.Why != NoReplica {
		tokens += float64(r.Tokens)
	}
	return max(0, x.RoomMs+x.TokenMs*tokens)
}

// near is how near two costs are that count as the same, relatively.
const near = 1e-9

func same(a, b float64) bool { return math.Abs(a-b) <= near*max(math.Abs(a), math.Abs(b)) }

// Policy decides for one region and one model. It has scratch of its own, so
// one goroutine at a time may use it; Parse makes as many as are needed.
type Policy struct {
	name, spec string
	rule       rule
	set        Settings

	// The round.
	places    []Place
	charges   []charge // beside places
	localLeft int      // replicas that still take a request
	peersLeft int
	ahead     int // requests that were asked for and still wait
	drainMs   float64
	blocked   bool // a forwardable request found nothing: those behind it are not forwarded either

	turn  [2]int  // round-robin: the place after the last, of replicas and of peers
	rings [2]ring // by replicas and peers
}

// charge is what this round has put on a place.
type charge struct {
	left    int
	tokens  float64 // new tokens of requests sent to it or held for it
	prompts float64 // all tokens of the same
}

// ring is a Ring with the ids it was made of.
type ring struct {
	Ring
	ids    []string
	places []int // by owner
}

// rule is what makes one policy another.
type rule struct {
	compare bool // all places, always, and wait for the best; the others take a local replica if one is available
	local   by   // which available replica
	remote  by   // which available peer
	stays   bool // it does not go to a peer that costs more than staying
	never   bool // it does not go to a peer
	tau     bool // a peer with a longer queue is not available
}
