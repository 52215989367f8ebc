// Package receipt keeps what became of the last requests and why: which engines
// they got and which were nearly as good, how long they waited for what, what
// failed on the way. It holds no prompt and no answer.
package receipt

import (
	"strings"
	"time"
)

// Ended is the state of a receipt, and of an attempt, to which nothing more is
// added.
const Ended = "ended"

// States of a request that waits for prefill, whose prompt is computed, that waits for a decode rank, and whose KV goes there.
const (
	Queued       = "queued"
	Prefilling   = "prefill"
	Pooled       = "pooled"
	Transferring = "transfer"
)

// A Receipt is the account of one client's request, as GET /decisions shows it.
// Times are in ms.
type Receipt struct {
	ID       string    `json:"id"`
	ClientID string    `json:"client_id,omitempty"` // its X-Request-Id
	TraceID  string    `json:"trace_id,omitempty"`
	Model    string    `json:"model"`
	Key      string    `json:"key,omitempty"` // name of the caller's API key
	Endpoint string    `json:"endpoint,omitempty"`
	Stream   bool      `json:"stream,omitempty"`
	Class    string    `json:"class,omitempty"`       // batch: it took only what other requests left
	Priority int       `json:"priority,omitempty"`    // in the arrival queue
	Deadline float64   `json:"deadline_ms,omitempty"` // since arrival, until when its first token was wanted; 0: the caller did not say
	Arrival  time.Time `json:"arrival"`
	State    string    `json:"state"`             // the phase of its last step, or ended
	Outcome  string    `json:"outcome,omitempty"` // ok, client_closed, or the error's code
	Status   int       `json:"status,omitempty"`  // the status of an error; 0: the answer was whole, or runs

	Route  string `json:"route,omitempty"`  // disaggregated, aggregated, local-prefill or passed-through
	Peer   string `json:"peer,omitempty"`   // the dispatcher that it was sent to
	Origin string `json:"origin,omitempty"` // the dispatcher that it came from

	PromptTokens int     `json:"prompt_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	OutputTokens int     `json:"output_tokens"`
	TTFT         float64 `json:"ttft_ms,omitempty"`
	Total        float64 `json:"total_ms,omitempty"`
	Waits        Waits   `json:"waits_ms"` // of all attempts together

	Attempts []Attempt `json:"attempts"`
	LeftOut  int       `json:"attempts_left_out,omitempty"` // attempts beyond MaxAttempts, which are not kept
}

// Waits is where the time went, by phase, in ms.
type Waits struct {
	Parse    float64 `json:"parse,omitempty"`
	Queue    float64 `json:"queue,omitempty"`    // for a prefill engine
	Prefill  float64 `json:"prefill,omitempty"`  // on the prefill engine, or on the decode rank that computes the prompt
	Pool     float64 `json:"pool,omitempty"`     // for a decode rank
	Transfer float64 `json:"transfer,omitempty"` // from the decode request, or that to another region, to the first event
	Relay    float64 `json:"relay,omitempty"`    // from the first event to the end
	Backoff  float64 `json:"backoff,omitempty"`  // between two attempts
}

// Add adds the waits of an attempt.
func (w *Waits) Add(o *Waits) {
	w.Parse += o.Parse
	w.Queue += o.Queue
	w.Prefill += o.Prefill
	w.Pool += o.Pool
	w.Transfer += o.Transfer
	w.Relay += o.Relay
	w.Backoff += o.Backoff
}

// Attempt is one try to serve a request, or one leg of a fan-out.
type Attempt struct {
	N       int      `json:"n"`
	Leg     string   `json:"leg,omitempty"`
	At      float64  `json:"at_ms"` // since arrival
	State   string   `json:"state"`
	Since   float64  `json:"since_ms"` // when State began, since arrival
	Waits   Waits    `json:"waits_ms"` // the steps that are over
	Prefill *Prefill `json:"prefill,omitempty"`
	Decode  *Decode  `json:"decode,omitempty"`
	Engine  string   `json:"engine,omitempty"` // the one that a request was passed through to
	Peer    string   `json:"peer,omitempty"`   // the dispatcher that it was sent to; GET /geo/receipts has the rest
	Cause   string   `json:"cause,omitempty"`  // why it failed
	Status  int      `json:"status,omitempty"` // the status of the engine's answer; 0: there was none
	Again   bool     `json:"again,omitempty"`  // another attempt followed

	FailedOn string `json:"failed_on,omitempty"` // the engine or rank that failed at it; empty: none did, or it is not known which
}

// Prefill is the choice of a prefill engine.
type Prefill struct {
	Candidate string   `json:"candidate"`
	Policy    string   `json:"policy"`
	Reason    string   `json:"reason,omitempty"`        // policy, only, affinity, canary or fallback
	Eligible  int      `json:"eligible,omitempty"`      // how many candidates it was chosen from
	Hit       int      `json:"hit_tokens"`              // prompt tokens that were expected in its prefix cache
	Prompt    int      `json:"prompt_tokens,omitempty"` // as counted or estimated when the engine was chosen, until the engine counts them
	Cached    int      `json:"cached_tokens,omitempty"` // prompt tokens that were found in its prefix cache
	Ahead     int      `json:"probes_ahead"`            // other probes on the engine when this one was sent
	Best      []Choice `json:"best,omitempty"`          // least score first
}

// Decode is the choice of a decode rank.
type Decode struct {
	Rank     string   `json:"rank"`
	Group    string   `json:"group,omitempty"`
	Policy   string   `json:"policy"`
	Stage    string   `json:"stage,omitempty"` // guard, single or subset
	Score    float64  `json:"score"`           // as the policy gave it when it chose
	Decide   float64  `json:"decide_ms"`
	Local    int      `json:"local_prefill_tokens,omitempty"` // prompt tokens that the rank has to compute
	Tick     uint64   `json:"tick,omitempty"`                 // its number in the decision log
	Waiting  int      `json:"waiting,omitempty"`              // entries of the pool at the tick
	KVTokens int64    `json:"kv_tokens"`                      // KV tokens on the rank before this request
	Fullest  int64    `json:"fullest_kv_tokens"`              // KV tokens on the group's fullest rank before this request
	Able     int      `json:"able,omitempty"`                 // ranks that could have had it
	Better   string   `json:"better,omitempty"`               // which score is better: more or less
	Best     []Choice `json:"best,omitempty"`                 // best first, as they stood when the tick was over
}

// Choice is a candidate, or a rank, that could have been chosen.
type Choice struct {
	Name     string   `json:"name"`
	Score    *float64 `json:"score"` // null: scores were not compared
	KVTokens int64    `json:"kv_tokens,omitempty"`
	Free     int32    `json:"free,omitempty"` // slots
	Chosen   bool     `json:"chosen,omitempty"`
}

// MaxAttempts is how many attempts of one request are kept. All legs of a fan-out together have no more.
const MaxAttempts = 32

// MaxText bounds what a client or an error may add to a receipt, in bytes.
const MaxText = 256

// Clip cuts a text that is too long; what it returns is UTF-8.
func Clip(s string) string {
	if len(s) > MaxText {
		s = s[:MaxText]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// Begin adds an attempt and returns its index; -1 when there are too many.
func (r *Receipt) Begin(a Attempt) int {
	if len(r.Attempts) == MaxAttempts {
		r.LeftOut++
		return -1
	}
	r.Attempts = append(r.Attempts, a)
	return len(r.Attempts) - 1
}

// At is the attempt with an index of Begin; nil for -1.
func (r *Receipt) At(i int) *Attempt {
	if i < 0 || i >= len(r.Attempts) {
		return nil
	}
	return &r.Attempts[i]
}

// close ends the receipt, and adds up the waits of its attempts.
func (r *Receipt) close() {
	r.State = Ended
	for i := range r.Attempts {
		a := &r.Attempts[i]
		a.State = Ended
		r.Waits.Add(&a.Waits)
	}
}

// What the parts of a receipt take beside their texts, in bytes, with what the
// ring needs to find it.
const (
	sizeReceipt = 640
	sizeAttempt = 272
	sizePrefill = 144
	sizeDecode  = 208
	sizeChoice  = 56
)

// size is what a receipt takes in memory, about.
func (r *Receipt) size() int64 {
	n := sizeReceipt + len(r.ID) + len(r.ClientID) + len(r.TraceID) + len(r.Model) + len(r.Key) + len(r.Peer) + len(r.Origin) +
		sizeAttempt*cap(r.Attempts)
	choices := func(list []Choice) {
		for i := range list {
			n += sizeChoice + len(list[i].Name)
		}
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		n += len(a.Cause) + len(a.FailedOn) + len(a.Peer) + len(a.Engine)
		if a.Prefill != nil {
			n += sizePrefill + len(a.Prefill.Candidate)
			choices(a.Prefill.Best)
		}
		if a.Decode != nil {
			n += sizeDecode + len(a.Decode.Rank)
			choices(a.Decode.Best)
		}
	}
	return int64(n)
}
