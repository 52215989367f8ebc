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
	ranks   map[int32]*Rank  // also those of engines that left a short time ago
	workers map[string]int32 // worker ids of ranks that decode, by name
	stops   map[string]*Stop
	pauses  map[string]*Pause
	hosts   map[string]trust
	dead    map[string]time.Time
	routes  map[string]Route // by the name of a model or LoRA
	ready   tally            // engines that take requests and that the tier and the dispatcher know
}

// tally is how many engines there are of each role.
type tally struct{ prefills, decodes int }

// WithRoutes returns this picture with the routes of the picture before it. Routes decide which requests are
// admitted. The result is in force until the tier and the dispatcher know this picture, so that an admitted request
// finds there what it was admitted for.
func (p *Published) WithRoutes(before *Published) *Published {
	next := *p
	next.routes, next.ready = before.routes, before.ready
	return &next
}

// Rank is a rank to which a decode leg can be sent.
type Rank struct {
	Worker   int32
	Instance string // key of its engine, by which the monitor knows it
	Target   *engine.Target
	Profile  *mooncake.Profile
	Traffic  *engine.Traffic
	Signs    *engine.Signs // signs of life of the rank's core
	Region   string        // its region; empty: ours
	Board    string        // the board that it is on
	Group    string        // ID of the candidate that its group is, if it prefills and decodes; empty: it only decodes
	Context  int           // largest context of its models, prompt and answer together, in tokens; 0: unknown
	Pins     bool          // its engine runs a response on the rank that the request names
	Scope    *owner.Scope  // which proxy admits to it; nil: this proxy, which is alone

	State RankState
}

// Heeds says whether a request at an endpoint runs on the rank that it names. Before 0.33, vLLM ignores the named
// rank at /v1/responses if it has several ranks behind one address.
func (r *Rank) Heeds(ep mooncake.Endpoint) bool {
	return r.Target.Rank < 0 || r.Pins || ep != mooncake.Responses
}

// Vouch takes an arrival with tokens as a sign that the engine core of the rank is alive; an arrival without tokens may come from the API
// server alone. The sign counts from the arrival before, if that left nothing to read. With TLS this is not known, because the TLS layer
// may keep received bytes back, so no arrival counts.
func (r *Rank) Vouch(a *engine.Arrival, ep mooncake.Endpoint, bytes int, left, tokens bool, now time.Time) {
	if made, ok := a.Came(bytes, left, now); ok && tokens && r.Target.TLS == nil && r.Heeds(ep) {
		r.Signs.Seen(made)
	}
}

// Lost says that KV may have been read too late. If the rank is not known, no rank of the engine is trusted any more
// to have right KV in its cache.
func (r *Rank) Lost(ep mooncake.Endpoint) {
	if !r.Heeds(ep) {
		r.Traffic.Lose()
	}
}

// Route says where a model's requests go.
type Route struct {
	Name            string // the name in the request: a base model or a LoRA
	Board           string // the board of the base model, whose ranks they share
	MaxLen          int    // context length, 0 = unknown
	Clamps          bool   // some decode engine cuts max_tokens to what the prompt leaves of the context
	Prefill         bool   // some prefill engine that is up lists it
	Decode          bool   // some decode rank that is up lists it
	Mixed           bool   // all engines that list it, also those that are down, prefill and decode
	PromptLogprobs  bool   // every engine of role decode computes a prompt by itself if the prompt's logprobs are asked for
	SGLang          bool   // some engine accepts keys that only SGLang knows
	Half            bool   // only engines that prefill list it, or only engines that decode, so that no request for it can be completed
	GivesBackUnseen bool   // some engine could give an answer back without a sign of it, on an endpoint that is not common

	NoHandOff [mooncake.Endpoints]bool // some engine that is up takes no hand-off at the endpoint

	listed [2]bool // whether engines that prefill list it, and engines that decode, up or not
}
