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
	RTT     float64 `json:"rtt"`
	T0      float64 `json:"t0"`
	Prefill float64 `json:"prefill"`
	Wait    float64 `json:"wait"`
	Batch   float64 `json:"-"` // the price of one more in the batch, paid and inflicted
}

// Total is the cost.
func (t Terms) Total() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait + t.Batch }

// TTFT is the part of the cost that a first token waits for.
func (t Terms) TTFT() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait }

// terms of a request at a place, after what this round has already charged
// there.
func (p *Policy) terms(r *Request, i int) Terms {
	x, s := &p.places[i], &p.set
	return Terms{
		RTT: x.RTTMs, T0: x.T0Ms, Prefill: s.W * x.TPMs * r.newTokens(i),
		Wait: s.QS * p.wait(i), Batch: s.Load * s.BMs * x.Running,
	}
}

// wait is what stands between a request and its prefill at a place.
func (p *Policy) wait(i int) float64 {
	x, c := &p.places[i], &p.charges[i]
	if !x.Peer {
		wait := x.TPMs * (x.QueuedTokens + c.tokens)
		if p.localLeft == 0 {
			wait = max(wait, float64(p.ahead+1)*p.drainMs)
		}
		return wait
	}
	wait := max(x.TPMs*x.QueuedTokens, x.WaitMs)
	return wait + x.TPMs*(x.UnseenTokens+c.tokens)/float64(max(1, x.Replicas))
}

// near is how near two costs are that count as the same, relatively.
const near = 1e-9

func same(a, b float64) bool { return math.Abs(a-b) <= near*max(math.Abs(a), math.Abs(b)) }
