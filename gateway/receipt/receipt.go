// Package receipt keeps a receipt for each of the last requests: which engines served it and which
// were nearly as good, how long it waited for what, and what failed. A receipt has no text of the
// prompt or the answer.
package receipt

import "time"

// Ended is the state of a receipt or an attempt that is over.
const Ended = "ended"

// States of a request that runs.
const (
	Queued       = "queued" // the request waits for a prefill engine
	Prefilling   = "prefill"
	Pooled       = "pooled"   // the request waits for a decode rank
	Transferring = "transfer" // the decode request was sent, and its first event has not come
)

// A Receipt says what happened to one client's request, as GET /decisions shows it. Times are in
// ms.
type Receipt struct {
	ID       string    `json:"id"`
	ClientID string    `json:"client_id,omitempty"` // the client's X-Request-Id
	TraceID  string    `json:"trace_id,omitempty"`
	Model    string    `json:"model"`
	Key      string    `json:"key,omitempty"` // name of the caller's API key
	Endpoint string    `json:"endpoint,omitempty"`
	Stream   bool      `json:"stream,omitempty"`
	Class    string    `json:"class,omitempty"`       // batch: the request only got capacity that other requests left
	Priority int       `json:"priority,omitempty"`    // priority in the arrival queue; higher ones are served first
	Deadline float64   `json:"deadline_ms,omitempty"` // time from arrival until which the first token was wanted; 0: the caller gave none
	Arrival  time.Time `json:"arrival"`
	State    string    `json:"state"`             // the phase in which the request is, or ended
	Outcome  string    `json:"outcome,omitempty"` // ok, client_closed, or the error's code; empty: the request runs
	Status   int       `json:"status,omitempty"`  // the status of an error; 0: the answer is whole, or still runs

	Route  string `json:"route,omitempty"`  // disaggregated, aggregated, local-prefill or passed-through
	Peer   string `json:"peer,omitempty"`   // the other proxy to which the request was sent
	Origin string `json:"origin,omitempty"` // the other proxy from which the request came

	PromptTokens int     `json:"prompt_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	OutputTokens int     `json:"output_tokens"`
	TTFT         float64 `json:"ttft_ms,omitempty"`
	Total        float64 `json:"total_ms,omitempty"`
	Waits        Waits   `json:"waits_ms"` // time in each phase, as the sum of all attempts

	Attempts []Attempt `json:"attempts"`
	LeftOut  int       `json:"attempts_left_out,omitempty"` // how many attempts are not kept, because there were more than MaxAttempts
}

// Waits is the time that each phase took, in ms.
type Waits struct {
	Parse    float64 `json:"parse,omitempty"`
	Queue    float64 `json:"queue,omitempty"`    // waiting for a prefill engine
	Prefill  float64 `json:"prefill,omitempty"`  // computing the prompt, on a prefill engine or on the decode rank
	Pool     float64 `json:"pool,omitempty"`     // waiting for a decode rank
	Transfer float64 `json:"transfer,omitempty"` // from the decode request, or the request to another region, to the first event
	Relay    float64 `json:"relay,omitempty"`    // from the first event of the answer to its end
	Backoff  float64 `json:"backoff,omitempty"`  // pauses between attempts
}

// Add adds the waits of an attempt.
func (w *Waits) Add(other *Waits) {
	w.Parse += other.Parse
	w.Queue += other.Queue
	w.Prefill += other.Prefill
	w.Pool += other.Pool
	w.Transfer += other.Transfer
	w.Relay += other.Relay
	w.Backoff += other.Backoff
}

// Attempt is one try to serve a request, or one part (leg) of a fanned-out request.
type Attempt struct {
	N       int      `json:"n"`
	Leg     string   `json:"leg,omitempty"`
	At      float64  `json:"at_ms"` // when the attempt began, in ms since arrival
	State   string   `json:"state"`
	Since   float64  `json:"since_ms"` // when the state began, in ms since arrival
	Waits   Waits    `json:"waits_ms"` // times of the phases that have ended
	Prefill *Prefill `json:"prefill,omitempty"`
	Decode  *Decode  `json:"decode,omitempty"`
	Engine  string   `json:"engine,omitempty"` // the engine to which a request was passed through
	Peer    string   `json:"peer,omitempty"`   // the other proxy to which the request was sent; its part is in GET /geo/receipts
	Cause   string   `json:"cause,omitempty"`  // why the attempt failed
	Status  int      `json:"status,omitempty"` // the status of the engine's answer; 0: no answer came
	Again   bool     `json:"again,omitempty"`  // another attempt followed

	FailedOn string `json:"failed_on,omitempty"` // the engine or rank that failed; empty: none failed, or it is not known which
}

// Prefill says which prefill engine was chosen, and why.
type Prefill struct {
	Candidate string   `json:"candidate"`
	Policy    string   `json:"policy"`
	Reason    string   `json:"reason,omitempty"`        // why the engine was chosen: policy, only, affinity, canary or fallback
	Eligible  int      `json:"eligible,omitempty"`      // number of candidates among which the engine was chosen
	Hit       int      `json:"hit_tokens"`              // prompt tokens that were expected in the engine's prefix cache
	Prompt    int      `json:"prompt_tokens,omitempty"` // counted or estimated when the engine was chosen, then replaced by the engine's count
	Cached    int      `json:"cached_tokens,omitempty"` // prompt tokens that the engine found in its prefix cache
	Ahead     int      `json:"probes_ahead"`            // other prefill requests on the engine when this one was sent
	Best      []Choice `json:"best,omitempty"`          // the best candidates, least score first
}

// Decode says which decode rank was chosen, and why.
type Decode struct {
	Rank     string   `json:"rank"`
	Group    string   `json:"group,omitempty"`
	Policy   string   `json:"policy"`
	Stage    string   `json:"stage,omitempty"` // stage of the decision that chose the rank: guard, single or subset
	Score    float64  `json:"score"`           // the policy's score of the rank when it chose the rank
	Decide   float64  `json:"decide_ms"`
	Local    int      `json:"local_prefill_tokens,omitempty"` // prompt tokens that the rank has to compute itself
	Tick     uint64   `json:"tick,omitempty"`                 // number of the decision round (tick) in the decision log
	Waiting  int      `json:"waiting,omitempty"`              // requests in the pool at the tick
	KVTokens int64    `json:"kv_tokens"`                      // KV tokens on the rank before this request
	Fullest  int64    `json:"fullest_kv_tokens"`              // KV tokens on the group's fullest rank before this request
	Able     int      `json:"able,omitempty"`                 // ranks that could have taken the request
	Better   string   `json:"better,omitempty"`               // whether more or less of the score is better: more or less
	Best     []Choice `json:"best,omitempty"`                 // the best ranks, best first, with their values at the end of the tick
}

// Choice is a prefill candidate or a decode rank that could have been chosen.
type Choice struct {
	Name     string   `json:"name"`
	Score    *float64 `json:"score"` // null: scores were not compared
	KVTokens int64    `json:"kv_tokens,omitempty"`
	Free     int32    `json:"free,omitempty"` // free slots of a decode rank
	Chosen   bool     `json:"chosen,omitempty"`
}

// MaxAttempts is per request, with all parts of a fanned-out one.
const MaxAttempts = 32

// AddAttempt only counts an attempt beyond MaxAttempts.
func (r *Receipt) AddAttempt(a Attempt) {
	if len(r.Attempts) == MaxAttempts {
		r.LeftOut++
		return
	}
	r.Attempts = append(r.Attempts, a)
}

// FindAttempt returns nil if the receipt has no such attempt.
func (r *Receipt) FindAttempt(leg string, n int) *Attempt {
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.N == n && a.Leg == leg {
			return a
		}
	}
	return nil
}

func (r *Receipt) close() {
	r.State = Ended
	for i := range r.Attempts {
		a := &r.Attempts[i]
		a.State = Ended
		r.Waits.Add(&a.Waits)
	}
}

// The sizes of the parts of a receipt are in bytes, without texts. sizeReceipt includes the ring's
// entry.
const (
	sizeReceipt = 640
	sizeAttempt = 272
	sizePrefill = 144
	sizeDecode  = 208
	sizeChoice  = 56
)

// size is about how much memory a receipt takes.
func (r *Receipt) size() int64 {
	bytes := sizeReceipt + len(r.ID) + len(r.ClientID) + len(r.TraceID) + len(r.Model) + len(r.Key) + len(r.Peer) + len(r.Origin) +
		sizeAttempt*cap(r.Attempts)
	addChoices := func(list []Choice) {
		for i := range list {
			bytes += sizeChoice + len(list[i].Name)
		}
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		bytes += len(a.Cause) + len(a.FailedOn) + len(a.Peer) + len(a.Engine)
		if a.Prefill != nil {
			bytes += sizePrefill + len(a.Prefill.Candidate)
			addChoices(a.Prefill.Best)
		}
		if a.Decode != nil {
			bytes += sizeDecode + len(a.Decode.Rank)
			addChoices(a.Decode.Best)
		}
	}
	return int64(bytes)
}
