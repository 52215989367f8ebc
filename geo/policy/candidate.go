package policy

import "math"

// Candidate is a local replica or a peer with all its replicas, as of the begin of the round.
type Candidate struct {
	ID   string
	Peer bool
	Why  Reason // why it takes no request now, or Available

	MaxSends   int     // in this round
	RTTMs      float64 // to a peer, or to a replica on another site
	TPMs, T0Ms float64 // prefill: ms per new token, and per prompt

	QueuedTokens float64 // new tokens prefilled before a request that is sent now
	Running      float64 // decode requests on the replica that would take the request
	ResidualMs   float64 // by which recent first tokens came later than predicted; negative: earlier
	KVRoomMs     float64 // until the KV cache has room for a prompt of 0 tokens; negative: it has
	KVTokenMs    float64 // in which the KV cache frees one token; 0: not known
	// Unfinished requests of a replica; of a peer, as a share of those that it can decode at once.
	Outstanding float64

	// The fields below are only for a peer.
	Replicas     int     // that take a request now or soon; 0: no request waits for the peer
	Queue        int     // requests in its arrival queue
	WaitMs       float64 // in its arrival queue, as it reports
	UnseenTokens float64 // new tokens of forwards that its last probe did not count yet
	DistrustMs   float64 // by which its predicted costs were too low; added to min_gain_ms
}

// Request is a waiting request.
type Request struct {
	ID        string
	Key       uint64  // position on a hash ring, from RingKey
	Tokens    int     // of the prompt
	Hits      []int32 // cached prompt tokens, by candidate; 0 beyond the end
	LocalOnly bool    // no hops left, a forward failed, the client asked for this, or residency
	Barred    []bool  // by candidate: residency forbids it; false beyond the end
	WaitedMs  float64 // since some candidate could first have taken it
	Legs      int     // its prompts, each a request at a peer; 0: one
}

func (r *Request) hitTokens(candidate int) float64 {
	if candidate < len(r.Hits) {
		return float64(r.Hits[candidate])
	}
	return 0
}

func (r *Request) barred(candidate int) bool { return candidate < len(r.Barred) && r.Barred[candidate] }

// newTokens: an engine always computes at least one.
func (r *Request) newTokens(candidate int) float64 {
	return max(1, float64(r.Tokens)-r.hitTokens(candidate))
}

// Terms are the parts of the predicted cost of a request at a candidate, in ms.
type Terms struct {
	RTT      float64 `json:"rtt"`
	T0       float64 `json:"t0"`
	Prefill  float64 `json:"prefill"`
	Wait     float64 `json:"wait"`
	Residual float64 `json:"residual,omitempty"` // correction of RTT+T0+Prefill+Wait by the errors of recent predictions
	Batch    float64 `json:"-"`                  // cost of a larger decode batch, for this request and for the others
}

// Total is what candidates are compared by.
func (t Terms) Total() float64 { return t.TTFT() + t.Batch }

// TTFT is what delays the first token.
func (t Terms) TTFT() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait + t.Residual }

// WithoutResidual is TTFT without its correction.
func (t Terms) WithoutResidual() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait }

// residualFloor is the smallest share of a prediction that a negative residual leaves.
const residualFloor = 0.25

// predictCost counts what this round has already sent to candidate i. Each request of the decode
// batch costs BatchWeight*BatchMs.
func (p *Policy) predictCost(r *Request, i int) Terms {
	candidate, s := &p.candidates[i], &p.settings
	t := Terms{
		RTT: candidate.RTTMs, T0: candidate.T0Ms, Prefill: s.PrefillWeight * candidate.TPMs * r.newTokens(i),
		Wait: s.WaitWeight * p.waitMs(r, i), Batch: s.BatchWeight * s.BatchMs * candidate.Running,
	}
	t.Residual = max(candidate.ResidualMs, (residualFloor-1)*t.WithoutResidual())
	return t
}

// waitMs is how long a request waits at candidate i until its prefill begins: for the prefills
// before it, for KV memory and, if no replica takes a request and it is not known how fast KV is
// freed, for its turn in the arrival queue. These overlap, so the longest counts.
func (p *Policy) waitMs(r *Request, i int) float64 {
	candidate := &p.candidates[i]
	if candidate.Peer {
		return p.peerWaitMs(r, i)
	}
	countedTokens := p.charges[i].newTokens // of this round
	waitMs := candidate.TPMs * (candidate.QueuedTokens + countedTokens)
	if p.openReplicas == 0 && candidate.KVTokenMs == 0 {
		turn := float64(p.waitingAhead + 1)
		waitMs = max(waitMs, turn*p.departureGapMs) // the queue lets one go per gap
	}
	return max(waitMs, p.kvWaitMs(r, i))
}

// peerWaitMs: the waits that the peer reports and the one for KV memory overlap, so the longest
// counts. Tokens that the report lacks are prefilled after those, by all replicas together.
func (p *Policy) peerWaitMs(r *Request, i int) float64 {
	peer := &p.candidates[i]
	reportedMs := max(peer.TPMs*peer.QueuedTokens, peer.WaitMs, p.kvWaitMs(r, i))
	countedTokens := p.charges[i].newTokens
	unseen := peer.UnseenTokens + countedTokens
	return reportedMs + peer.TPMs*unseen/float64(max(1, peer.Replicas))
}

// kvWaitMs is the wait for KV memory: room for 0 tokens after KVRoomMs, then one token per
// KVTokenMs, first for the requests that this round has counted. While the KV gate is closed, the
// request's own tokens do not count: the gate opens with any room, and then lets any prompt pass.
func (p *Policy) kvWaitMs(r *Request, i int) float64 {
	candidate := &p.candidates[i]
	tokens := p.charges[i].promptTokens
	// A peer without an available replica counts as closed, too.
	gateIsClosed := candidate.Why == NoRoom || candidate.Why == NoReplica
	if !gateIsClosed {
		tokens += float64(r.Tokens)
	}
	return max(0, candidate.KVRoomMs+candidate.KVTokenMs*tokens)
}

// costTolerance is relative.
const costTolerance = 1e-9

func sameCost(a, b float64) bool { return math.Abs(a-b) <= costTolerance*max(math.Abs(a), math.Abs(b)) }

// Policy decides for one region and one model. It reuses its memory, so that only one goroutine at
// a time may use it. Each Parse makes another Policy.
type Policy struct {
	name, spec string
	rule       rule
	settings   Settings

	// The fields below have the state of the present round.
	candidates     []Candidate
	charges        []charge // by candidate
	openReplicas   int      // replicas that still take a request
	openPeers      int      // peers that still take a request
	waitingAhead   int      // requests for which Next returned Hold
	departureGapMs float64  // the average time between two departures from the arrival queue; 0: unknown
	peersBlocked   bool     // a request that could be forwarded found no candidate: later requests are not forwarded either

	nextTurn [2]int  // for byTurn, by side: the index after the last chosen candidate
	rings    [2]ring // for byRing, by side: the hash rings
}

// charge is what this round has sent to a candidate or holds for it.
type charge struct {
	sendsLeft    int // how many more requests it may get in this round
	newTokens    float64
	promptTokens float64
}

type ring struct {
	Ring
	ids     []string
	indexes []int // of ids, in the round's candidates
}

type rule struct {
	// comparesAll: wait for the best of all; otherwise an available local replica is taken first.
	comparesAll       bool
	chooseLocal       chooseBy // among available replicas
	choosePeer        chooseBy // among available peers
	peerMustBeCheaper bool     // than a local replica
	neverForwards     bool
	limitsPeerQueue   bool // a peer with a queue longer than tau is not available
}
