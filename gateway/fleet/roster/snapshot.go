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

// Snapshot is the roster at one moment. It never changes.
type Snapshot struct {
	Candidates []prefill.Candidate
	Locals     []local.Rank
	Workers    []board.Worker

	owners  Owners
	engines map[string]*Engine
	order   []*Engine
	// ranks that decode, by worker id; also those that left less than rankMemory ago
	ranks     map[int32]*Rank
	workers   map[string]int32 // worker ids by name
	drains    map[string]*Drain
	pauses    map[string]*Pause
	hosts     map[string]trust
	departed  map[string]departedEngine
	routes    map[string]Route // by the name of a model or LoRA
	inService roleCounts       // known to the prefill tier and the dispatcher
}

// An aggregated engine counts for both.
type roleCounts struct{ prefills, decodes int }

// WithRoutes returns this picture with the earlier routes, which decide what is admitted. It is
// published until the prefill tier and the dispatcher know the new engines.
func (p *Snapshot) WithRoutes(before *Snapshot) *Snapshot {
	next := *p
	next.routes, next.inService = before.routes, before.inService
	return &next
}

// Rank is a rank to which a decode call can be sent.
type Rank struct {
	Worker        int32
	Instance      string // key of the rank's engine, by which the monitor knows the engine
	Target        *engine.Target
	Profile       *mooncake.Profile
	Traffic       *engine.Traffic
	Signs         *engine.Liveness // signs of life of the rank's engine core
	Board         string           // the dispatcher's board for the rank's model
	Group         string           // groupID of an aggregated rank, which prefills and decodes; empty: the rank only decodes
	Context       int              // longest context of the rank's models, prompt and answer together, in tokens; 0: unknown
	BlockTokens   int64            // tokens of a KV block, as the engine's metrics say; 0: unknown
	PinsResponses bool             // the engine runs a request to /v1/responses on the rank that the request names
	Scope         *owner.Scope     // says whether this proxy owns the rank; nil: ranks have no owners

	State RankState
}

// EngineHonoursRank says whether a request runs on the rank that it names. Before 0.33, vLLM
// ignores the rank at /v1/responses if several ranks share one address.
func (r *Rank) EngineHonoursRank(ep mooncake.Endpoint) bool {
	namesNone := r.Target.Rank < 0 // an only rank
	return namesNone || r.PinsResponses || ep != mooncake.Responses
}

// ObserveRead takes bytes with tokens as a sign that the rank's engine core is alive. Without
// tokens, the API server may send them without the core. The sign is dated to the previous arrival,
// because the tokens were sent after it, unless that arrival left bytes unread. With TLS there is
// never a sign, because the TLS layer may hold received bytes back.
func (r *Rank) ObserveRead(read *engine.LastRead, ep mooncake.Endpoint, bytes int, leftUnread, hasTokens bool, now time.Time) {
	// always, because the next read needs this time
	sentAfter, timeKnown := read.Record(bytes, leftUnread, now)
	if !timeKnown || !hasTokens || r.Target.TLS != nil {
		return
	}
	if r.EngineHonoursRank(ep) { // else the tokens may come from another rank
		r.Signs.RecordSign(sentAfter)
	}
}

// Route says where a model's requests go.
type Route struct {
	Name            string // the name in the request: a base model or a LoRA
	Adapter         string // the LoRA adapter's name at its engines; empty: the model is not an adapter, or its engines do not say so
	Weights         uint32 // number of an adapter's weights, see numberWeights; 0: the model is not an adapter
	Board           string // the dispatcher's board of the base model, whose ranks LoRAs share
	MaxLen          int    // context length in tokens; 0: unknown
	Clamps          bool   // some decode engine cuts max_tokens to what the prompt leaves of the context
	Prefill         bool   // some engine that prefills lists the model, and is in service or has requests that wait for it
	Decode          bool   // some engine that decodes lists the model, and is in service or has requests that wait for it
	AllAggregated   bool   // all engines that list the model, even if down, prefill and decode
	PromptLogprobs  bool   // every engine of role decode computes a prompt by itself if the prompt's logprobs are asked for
	SGLang          bool   // some engine accepts request keys that only SGLang knows
	OneSided        bool   // only engines that prefill, or only engines that decode, list the model, so no request for it can be completed
	GivesBackUnseen bool   // some engine may give a request back at an endpoint whose answers do not show it

	NoHandOff [mooncake.Endpoints]bool // some engine in service takes no hand-offs at the endpoint

	listed [2]bool // by side (prefillSide, decodeSide): whether engines of the side list the model, up or not
}
