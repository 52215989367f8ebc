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
	Worker   int32
	Instance string // key of the engine, as in engine.Monitor
	Target   *engine.Target
	Profile  *mooncake.Profile
	Traffic  *engine.Traffic
	Signs    *engine.Liveness // of the rank's engine core
	Board    string
	Group    string // of an aggregated rank; else empty
	// longest of its models, prompt and answer together, in tokens; 0: unknown
	Context       int
	BlockTokens   int64        // tokens of a KV block by the engine's metrics; 0: unknown
	PinsResponses bool         // a request to /v1/responses runs on the rank that it names
	Scope         *owner.Scope // nil: ranks have no owners

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
	Name          string // a base model or a LoRA
	Adapter       string // name at its engines; empty: no adapter, or its engines do not say so
	Weights       uint32 // see numberWeights; 0: the model is not an adapter
	Board         string // of the base model, whose ranks LoRAs share
	MaxLen        int    // in tokens; 0: unknown
	Clamps        bool   // some decode engine cuts max_tokens to the rest of the context
	Prefill       bool   // some engine that prefills is in service or awaited
	Decode        bool   // some engine that decodes is in service or awaited
	AllAggregated bool   // all engines of the model, even if down, prefill and decode
	// every decode engine computes a prompt itself if its logprobs are asked for
	PromptLogprobs  bool
	SGLang          bool // some engine accepts request keys that only SGLang knows
	OneSided        bool // only engines of one side list the model, so no request can be completed
	GivesBackUnseen bool // some engine may give a request back where the answer does not show it

	NoHandOff [mooncake.Endpoints]bool // some engine in service takes no hand-offs there

	listed [2]bool // by side, also by engines that are down
}
