package roster

import (
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// Published is what follows from the roster at one moment: one consistent picture, which never changes.
type Published struct {
	Candidates []prefill.Candidate
	Locals     []local.Rank
	Workers    []board.Worker

	owners  Owners
	engines map[string]*Engine
	order   []*Engine
	ranks   map[int32]*Rank  // those of engines that are gone for a while, too
	workers map[string]int32 // of ranks that decode, by name
	stops   map[string]*Stop
	pauses  map[string]*Pause
	hosts   map[string]trust
	dead    map[string]time.Time
	routes  map[string]Route // model or LoRA name → board
	ready   tally            // that take requests, of which tier and dispatcher know it
}

// tally is how many engines there are of each role.
type tally struct{ prefills, decodes int }

// WithRoutes returns this picture with the routes of the one before it, which say what requests are let in. It is in force until the tier
// and the dispatcher know this one, so that a request that is let in finds there what it was let in for.
func (p *Published) WithRoutes(before *Published) *Published {
	next := *p
	next.routes, next.ready = before.routes, before.ready
	return &next
}

// Rank is one place a decode leg can be sent to.
type Rank struct {
	Worker   int32
	Instance string // the monitor's id
	Target   *engine.Target
	Profile  *mooncake.Profile
	Traffic  *engine.Traffic
	Signs    *engine.Signs // signs of life of the rank's core
	Region   string        // empty: ours
	Board    string        // that it is on
	Group    string        // the candidate that its group is, if it prefills and decodes; empty: it does not
	Context  int           // tokens of prompt and answer, of its longest model; 0: unknown
	Pins     bool          // its engine runs a response on the rank that it names
	Scope    *owner.Scope  // who admits to it; nil: this proxy, which is alone

	State RankState
}

// Heeds says whether a request at an endpoint runs on the rank that it names. Before 0.33 vLLM does not read the name at
// /v1/responses, where it has several ranks behind one address.
func (r *Rank) Heeds(ep mooncake.Endpoint) bool {
	return r.Target.Rank < 0 || r.Pins || ep != mooncake.Responses
}

// Vouch takes an arrival of a stream for a sign of life of the rank's core, if it has tokens: an API server alone can send
// the rest. TLS may keep some of what has come back, so it tells nothing.
func (r *Rank) Vouch(a *engine.Arrival, ep mooncake.Endpoint, bytes int, left, tokens bool, now time.Time) {
	if made, ok := a.Came(bytes, left, now); ok && tokens && r.Target.TLS == nil && r.Heeds(ep) {
		r.Signs.Seen(made)
	}
}

// Lost says that KV may have been read too late. Where the rank is not known, no rank of the engine is believed to have cached
// right KV.
func (r *Rank) Lost(ep mooncake.Endpoint) {
	if !r.Heeds(ep) {
		r.Traffic.Lose()
	}
}

// Route is where a model's requests go.
type Route struct {
	Name    string // as the client wrote it: a base model or a LoRA
	Board   string // the base model, whose ranks they share
	MaxLen  int    // context length, 0 = unknown
	Clamps  bool   // some decode engine cuts max_tokens to what the prompt leaves of it
	Prefill bool   // some prefill engine that is up has it
	Decode  bool   // some decode rank that is up has it
	Alone   bool   // all engines that have it, those that are down included, prefill and decode
	Rows    bool   // each engine that decodes what another one has prefilled computes a prompt whose logprobs are asked for by itself
	SGLang  bool   // some engine obeys keys that only SGLang knows
	Half    bool   // engines that prefill or engines that decode list it, but not both: so nobody completes a prompt for it
	Blind   bool   // some engine could give an answer back without a word, on an endpoint that is not common

	Whole [mooncake.Endpoints]bool // some engine that is up takes no hand-off there

	listed [2]bool // by engines that prefill, by engines that decode, up or not
}
