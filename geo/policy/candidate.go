package policy

import "math"

// Candidate is a local replica or a peer with all its replicas, to which a request may be sent. Its state is that of the begin of
// the round.
type Candidate struct {
	ID   string
	Peer bool
	Why  Reason // why the candidate takes no request now; Available: it takes requests

	MaxSends   int     // how many requests may be sent to the candidate in this round
	RTTMs      float64 // round trip to a peer, or to a replica that is not on this site
	TPMs, T0Ms float64 // prefill time: ms per new token, and ms per prompt

	QueuedTokens float64 // new tokens that are prefilled before a request that is sent now
	Running      float64 // decode requests that run on the replica that would take the request
	ResidualMs   float64 // ms by which recent first tokens came later than predicted; negative: earlier
	KVRoomMs     float64 // ms until the KV cache has room for a prompt of 0 tokens; negative: it has room already
	KVTokenMs    float64 // ms in which the KV cache frees one token; 0: not known
	Outstanding  float64 // of a replica: unfinished requests; of a peer: these as a share of the requests that it can decode at once

	// The fields below are only used for a peer.
	Replicas     int     // the peer's replicas that take a request now or soon, which share UnseenTokens; 0: no request waits for the peer
	Queue        int     // requests in the peer's arrival queue
	WaitMs       float64 // ms that a request waits in the peer's arrival queue, as the peer reports
	UnseenTokens float64 // new tokens of forwards to the peer that its last probe did not count yet
	DistrustMs   float64 // ms by which the peer's predicted costs were too low; added to min_gain_ms
}

// Request is a waiting request, for which the policy decides where it goes.
type Request struct {
	ID        string
	Key       uint64  // the request's position on a hash ring, from RingKey
	Tokens    int     // tokens of the prompt
	Hits      []int32 // cached prompt tokens, by candidate; 0 for candidates beyond the end of the slice
	LocalOnly bool    // may not be forwarded: no hops left, a forward failed, the client asked for this, or residency forbids it
	Barred    []bool  // by candidate: data residency forbids the candidate; false beyond the end of the slice
	WaitedMs  float64 // ms since some candidate could first have taken the request; limits how long it waits for a cache hit
	Legs      int     // number of its prompts, each of which counts as a request at a peer; 0: one
}

// hitTokens is how many tokens of the prompt are cached at a candidate.
func (r *Request) hitTokens(candidate int) float64 {
	if candidate < len(r.Hits) {
		return float64(r.Hits[candidate])
	}
	return 0
}

// barred reports whether data residency forbids a candidate.
func (r *Request) barred(candidate int) bool { return candidate < len(r.Barred) && r.Barred[candidate] }

// newTokens is how many tokens of the prompt a candidate would have to compute. An engine always computes at least one.
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

// Total is the predicted cost in ms by which candidates are compared.
func (t Terms) Total() float64 { return t.TTFT() + t.Batch }

// TTFT is the part of the cost that delays the first token.
func (t Terms) TTFT() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait + t.Residual }

// WithoutResidual is TTFT without the correction by the residual.
func (t Terms) WithoutResidual() float64 { return t.RTT + t.T0 + t.Prefill + t.Wait }

// residualFloor is the smallest share of a prediction that remains after a negative residual is added.
const residualFloor = 0.25

// predictCost predicts the cost of a request at candidate i, after the requests that this round has already counted at the candidate. The
// term Batch counts each request of the decode batch with BatchWeight*BatchMs. A negative Residual leaves at least residualFloor of the
// other terms of the TTFT.
func (p *Policy) predictCost(r *Request, i int) Terms {
	candidate, s := &p.candidates[i], &p.settings
	t := Terms{
		RTT: candidate.RTTMs, T0: candidate.T0Ms, Prefill: s.PrefillWeight * candidate.TPMs * r.newTokens(i),
		Wait: s.WaitWeight * p.waitMs(r, i), Batch: s.BatchWeight * s.BatchMs * candidate.Running,
	}
	t.Residual = max(candidate.ResidualMs, (residualFloor-1)*t.WithoutResidual())
	return t
}

// waitMs is how long, in ms, a request waits at candidate i until its prefill begins; for a peer, see peerWaitMs. At a local replica it
// waits for the prefills before it and for KV memory. If no replica takes a request now, and it is not known how fast KV memory is freed,
// its turn in this region's arrival queue counts, too. These waits overlap, so the longest counts. TPMs is the prefill time per new token,
// in ms.
func (p *Policy) waitMs(r *Request, i int) float64 {
	candidate := &p.candidates[i]
	if candidate.Peer {
		return p.peerWaitMs(r, i)
	}
	countedTokens := p.charges[i].newTokens // of the requests that this round has counted at the replica before this one
	waitMs := candidate.TPMs * (candidate.QueuedTokens + countedTokens)
	if p.openReplicas == 0 && candidate.KVTokenMs == 0 { // all replicas are full, and kvWaitMs does not know when KV is freed
		turn := float64(p.waitingAhead + 1)         // place of this request among those that wait
		waitMs = max(waitMs, turn*p.departureGapMs) // the arrival queue lets one request go per gap, on average
	}
	return max(waitMs, p.kvWaitMs(r, i))
}

// peerWaitMs is waitMs for a peer. The peer has reported the tokens before a new request (QueuedTokens) and the wait in its arrival queue
// (WaitMs). These waits and the one for KV memory overlap, so the longest counts. Tokens that the report does not include yet are prefilled
// after those that it includes, so their prefill time is added. All replicas of the peer share these tokens.
func (p *Policy) peerWaitMs(r *Request, i int) float64 {
	peer := &p.candidates[i]
	reportedMs := max(peer.TPMs*peer.QueuedTokens, peer.WaitMs, p.kvWaitMs(r, i))
	countedTokens := p.charges[i].newTokens // of the requests that this round has counted at the peer before this one
	unseen := peer.UnseenTokens + countedTokens
	return reportedMs + peer.TPMs*unseen/float64(max(1, peer.Replicas))
}

// kvWaitMs is how long, in ms, a request waits for KV memory at candidate i. After KVRoomMs, the KV cache has room for a prompt of 0
// tokens. From then on it frees one token per KVTokenMs: first for the requests that this round has counted at the candidate, then for this
// request. While the candidate's KV gate is closed, the tokens of this request do not count: the gate opens as soon as there is any room,
// and then lets a prompt of any length pass.
func (p *Policy) kvWaitMs(r *Request, i int) float64 {
	candidate := &p.candidates[i]
	tokens := p.charges[i].promptTokens
	gateIsClosed := candidate.Why == NoRoom || candidate.Why == NoReplica // a peer without an available replica counts as closed, too
	if !gateIsClosed {
		tokens += float64(r.Tokens)
	}
	return max(0, candidate.KVRoomMs+candidate.KVTokenMs*tokens)
}

// costTolerance is the relative difference up to which two costs count as equal.
const costTolerance = 1e-9

// sameCost reports whether two numbers differ by no more than a rounding error.
func sameCost(a, b float64) bool { return math.Abs(a-b) <= costTolerance*max(math.Abs(a), math.Abs(b)) }

// Policy decides for one region and one model. It reuses its memory, so that only one goroutine at a time may use it. Each
// Parse makes another Policy.
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

// charge is the sum of the requests that this round has counted at a candidate. A request that waits for the candidate also counts.
type charge struct {
	sendsLeft    int     // how many more requests may be sent to the candidate in this round; 0: none
	newTokens    float64 // new tokens of the requests that were sent to the candidate or held for it
	promptTokens float64 // prompt tokens of the requests that were sent to the candidate or held for it
}

// ring is a Ring, with the candidates from which it was made.
type ring struct {
	Ring
	ids     []string
	indexes []int // indexes[i] is the index, in the round's candidates, of the candidate ids[i]
}

// rule describes how a policy chooses.
type rule struct {
	comparesAll       bool     // compare all candidates, and wait for the best; otherwise an available local replica is taken first
	chooseLocal       chooseBy // how an available replica is chosen
	choosePeer        chooseBy // how an available peer is chosen
	peerMustBeCheaper bool     // a request does not go to a peer that costs more than a local replica
	neverForwards     bool     // a request never goes to a peer
	limitsPeerQueue   bool     // a peer with a queue longer than tau is not available
}
