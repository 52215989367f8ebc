package roster

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill/kvevents"
)

// Engine is the API server of an engine, which may have several ranks behind it. A published Engine
// does not change any more.
type Engine struct {
	ID      string // host:port
	Role    string
	Target  *engine.Target // the API server, without a rank number
	Conf    config.Engine
	Profile *mooncake.Profile
	Hosts   []string // hosts that hand-offs or callbacks of the engine may name; a change replaces the list
	Found
	FromNewEntry bool                           // a reload has built the engine from a new or changed entry of the config
	Traffic      *engine.Traffic                `json:"-"` // what this proxy's streams on the engine have shown, e.g. signs of life
	Finder       func(rank int) kvevents.Finder `json:"-"` // finds where a rank publishes its KV events; nil: as the config says

	Status   engine.Status
	Scope    string // the engine's decode group or region: the unit that one proxy owns
	Deserted bool   // the engine takes no requests while another one can do its work, so calls move there (markDeserted)
	serviceState
	pausedBy     *pausedEngine  // the pause that keeps requests away; nil: none
	waitsFor     string         // host:port of the engine for which the group of this one waits (Broken); empty: none
	otherRegion  string         // the engine's region; empty: the proxy's own region
	ownerScope   *owner.Scope   // says whether this proxy owns the engine's scope; nil: scopes have no owners
	board        string         // board of the engine's models; empty: the engine has never named its models
	lists        *board.Names   // names of the models in Status; nil: not known
	listedModels []engine.Model // the models from which lists was made
	arrival      int            // number of the engine in the order in which engines were added; the first one has 1
	kv           generation     // of the KV that the engine makes; only of a prefill engine
	// gaveBack is the start time of the process that gave a request back, although the profile says
	// that the engine never does. 0: not known. nil: no process did.
	gaveBack *float64
}

// Found is what discovery says about an engine; the zero value: discovery did not find the engine.
type Found struct {
	Source string
	// identifies one of several engines at the same host:port; empty: only host:port does
	Incarnation string
	Away        string // why the source wants no new work for it: not ready, leaving
}

// Roles of an engine.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // each rank prefills and decodes (board.Worker.Mixed)
)

// RegionMark stands between a board and its region.
const RegionMark = "@"

// BoardIn returns a board's name in a region; empty: the proxy's own. KV does not cross regions, so
// each has its own boards.
func BoardIn(board, region string) string {
	if region == "" {
		return board
	}
	return board + RegionMark + region
}

// AggregatedMark follows the model's name in the board of aggregated ranks. A request that has left
// the arrival queue stays on ranks of one kind, so they have a board of their own.
const AggregatedMark = "+aggregated"

// DisplayName turns "model+aggregated@region" into "model@region (aggregated)" for people. Another
// name stays.
func DisplayName(board string) (name string, aggregated bool) {
	at := strings.LastIndex(board, AggregatedMark)
	if at < 0 {
		return board, false
	}
	model, markedRegion := board[:at], board[at+len(AggregatedMark):]
	// "+aggregated" belongs to the model's name
	isPartOfModel := markedRegion != "" && !strings.HasPrefix(markedRegion, RegionMark)
	if isPartOfModel {
		return board, false
	}
	return model + markedRegion + " (aggregated)", true
}

// NoRank stands for the engine as a whole, or for an only rank without a number.
const NoRank = -1

// Key is the engine's role and address.
func (e *Engine) Key() string { return e.Role + " " + e.ID }

func (e *Engine) rankDrainKey(rank int) string { return e.Key() + "/" + strconv.Itoa(max(0, rank)) }

// At returns the target for one rank of the engine; NoRank: for the engine itself.
func (e *Engine) At(rank int) *engine.Target {
	t := *e.Target
	if rank >= 0 {
		t.ID, t.Rank = e.ID+"/"+strconv.Itoa(rank), rank
	}
	return &t
}

// Decodes says whether the engine decodes, so that requests have slots on its ranks.
func (e *Engine) Decodes() bool { return e.Role != Prefill }

// Ranks returns the numbers of the ranks; NoRank: an only rank.
func (e *Engine) Ranks() []int {
	if e.Conf.Ranks == 0 {
		// even for an only rank
		needsRankHeader := e.Role == Prefill && e.Profile.Connector == mooncake.VLLMMooncake
		if needsRankHeader {
			return []int{0}
		}
		return []int{NoRank}
	}
	ranks := make([]int, e.Conf.Ranks)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// workKind is equal for two engines that can do each other's work.
func (e *Engine) workKind() string {
	if len(e.Status.Models) == 0 {
		return e.Role
	}
	return e.Role + " " + e.baseModel()
}

// baseModel is empty while the engine has not named its models.
func (e *Engine) baseModel() string {
	for _, m := range e.Status.Models {
		if m.Parent == "" { // LoRA adapters have a parent
			return m.ID
		}
	}
	if len(e.Status.Models) > 0 { // it lists only adapters
		return e.Status.Models[0].ID
	}
	return ""
}

// decodesFor: callers name the board of aggregated ranks with or without AggregatedMark. An empty
// model stands for any model. An engine that no proxy owns (ownerScope is nil) decodes for none,
// because the methods of a nil *owner.Scope would allow requests to it.
func (e *Engine) decodesFor(board, model string) bool {
	decodes := e.ownerScope != nil && e.Decodes() && len(e.Status.Models) > 0
	if !decodes {
		return false
	}
	isOnBoard := e.baseModel() == board || e.homeBoard() == board
	return isOnBoard && (model == "" || e.listsModel(model))
}

// Serves says whether the engine takes requests now, or is about to.
func (e *Engine) Serves() bool { return e.state.serves() }

// StartIsNews says whether a start time shows something new of a prefill engine.
func (e *Engine) StartIsNews(start float64) bool { return e.Role == Prefill && start > e.kv.start }

func (e *Engine) listsModel(model string) bool {
	return slices.ContainsFunc(e.Status.Models, func(m engine.Model) bool { return m.ID == model })
}

// homeBoard is the board without a region.
func (e *Engine) homeBoard() string {
	if e.Role == Aggregated {
		return e.baseModel() + AggregatedMark
	}
	return e.baseModel()
}

func (e *Engine) groupID() string { return e.Conf.Group + " of " + e.board }

// barrierGroup is empty if the ranks do not step together.
func (e *Engine) barrierGroup() string {
	if e.Role != Aggregated || e.Conf.Barrier != config.BarrierDP {
		return ""
	}
	return e.Conf.Region + "/" + e.Conf.Group
}

// CallsBack says whether the engine is a decode engine that calls the proxy back to say where the
// KV of a request goes.
func (e *Engine) CallsBack() bool {
	return e.Role == Decode && e.Profile.Connector == mooncake.AscendLayerwise
}

// hasVersion says whether the version is 0.minor or later.
func (e *Engine) hasVersion(minor int, ifUnknown bool) bool {
	first, rest, _ := strings.Cut(strings.TrimPrefix(e.Status.Version, "v"), ".")
	second, _, _ := strings.Cut(rest, ".")
	major, majorErr := strconv.Atoi(first)
	engineMinor, minorErr := strconv.Atoi(second)
	if majorErr != nil || minorErr != nil {
		return ifUnknown
	}
	return major > 0 || engineMinor >= minor
}

// readsRoomsEverywhere: an SGLang engine reads the bootstrap room also in requests for responses
// and messages.
func (e *Engine) readsRoomsEverywhere() bool {
	var v [3]int
	numbers, _ := fmt.Sscanf(strings.TrimPrefix(e.Status.Version, "v"), "%d.%d.%d", &v[0], &v[1], &v[2])
	isReadable := numbers >= 2 // a missing third number counts as 0
	return isReadable && slices.Compare(v[:], roomsVersion[:]) >= 0
}

// computesPromptLogprobs says whether a decode engine computes the prompt of a request for prompt
// logprobs itself, although the request has a hand-off. From 0.31 on the scheduler of vLLM loads no
// KV for such a request (v1/core/sched/scheduler.py, skip_reading_prefix_cache). Before, an engine
// ended with an OverflowError (vLLM issue 50792, of 0.23). vllm-ascend has schedulers of its own,
// and decode engines of SGLang return no prompt logprobs (0.5.23, disaggregation/utils.py).
func (e *Engine) computesPromptLogprobs() bool {
	switch e.Profile.Connector {
	case mooncake.NIXLPull, mooncake.NIXLPush, mooncake.VLLMMooncake:
		return e.hasVersion(promptLogprobsMinor, false)
	}
	return false
}

const promptLogprobsMinor = 31

// clampsMaxTokens says whether a decode engine cuts max_tokens to what fits into the context. If
// the version is unknown it is true, so that the engine decides.
func (e *Engine) clampsMaxTokens() bool {
	if byProfile := e.Profile.ClampsMaxTokens; byProfile != nil {
		return *byProfile
	}
	return e.hasVersion(clampsMinor, true)
}

func (e *Engine) takesHandOff(ep mooncake.Endpoint) bool {
	if ep.IsChatOrCompletions() {
		return true
	}
	if e.Profile.Connector == mooncake.SGLang {
		// By the room, a number in the body, the two engines of a request find each other.
		return ep == mooncake.Generate || e.readsRoomsEverywhere()
	}
	// With a connector that pushes KV (nixl-push, ascend-layerwise), the vLLM engine that pushes finds
	// the destination by the X-Request-Id of the decode request. Of the endpoints left here, vLLM uses
	// this id only at the one for token ids.
	needsRequestID := e.Profile.Early() || e.Profile.Connector == mooncake.NIXLPush
	if needsRequestID && ep != mooncake.Tokens {
		return false
	}
	const ifUnknown = false        // an earlier version would drop the hand-off without an error
	firstMinor := handOffMinor[ep] // 0: not an endpoint of vLLM
	return e.hasVersion(firstMinor, ifUnknown)
}

// mayGiveBack says whether a decode engine that lacks KV memory may end an answer early. Responses
// and messages do not show this, so such an engine gets none of them.
func (e *Engine) mayGiveBack() bool {
	if e.Role != Decode {
		return false
	}
	if e.Profile.MayGiveBack() {
		return true
	}
	if e.gaveBack == nil {
		return false
	}
	// If a start time is not known (0), the present process may be the one that gave the request back.
	startUnknown := *e.gaveBack == 0 || e.Status.StartTime == 0
	return startUnknown || *e.gaveBack == e.Status.StartTime
}

// MustNotGiveBack says whether engines of this connector may give a request back, but the profile
// says that this one does not, and it has not done so yet.
func (e *Engine) MustNotGiveBack() bool {
	return e.Role == Decode && e.Profile.Ascend() && !e.mayGiveBack()
}

// longestContext is in tokens; 0: the context of a base model is unknown.
func (e *Engine) longestContext() (longest int) {
	for _, m := range e.Status.Models {
		length := e.maxLen(m)
		if length <= 0 && m.Parent == "" { // a base model
			return 0
		}
		longest = max(longest, length)
	}
	return longest
}

// maxLen is in tokens; 0: unknown.
func (e *Engine) maxLen(m engine.Model) int {
	if e.Profile.MaxModelLen > 0 {
		return e.Profile.MaxModelLen
	}
	return m.MaxModelLen
}

// pinsMinor is the first 0.x of vLLM that runs a request for a response on the rank that the
// request names (entrypoints/openai/responses/serving.py).
const pinsMinor = 33

// clampsMinor is the first 0.x of vLLM that cuts max_tokens to the rest of the context behind the
// prompt. 0.31 answers 400 instead.
const clampsMinor = 32

// roomsVersion is the first version of SGLang that is known to read rooms at every endpoint:
// PDRoutingFields in its entrypoints/openai/protocol.py. An earlier version may drop the room, and
// then refuse the request.
var roomsVersion = [3]int{0, 5, 23}

// handOffMinor is, for endpoints where not every version takes hand-offs, the first 0.x of vLLM
// that is known to take them. An earlier version would drop a hand-off without an error. Responses
// take them since PR 37424 (March 2026). Messages take them since PR 37535 (March 2026), but the
// cache_salt that keeps the KV of a discard apart only since PR 49498 (July 2026): it is in 0.27.0
// and not in 0.26.0 (AnthropicMessagesRequest in entrypoints/anthropic/protocol.py). For token ids,
// 0.32.0 was read and tried.
var handOffMinor = map[mooncake.Endpoint]int{mooncake.Responses: 20, mooncake.Messages: 27, mooncake.Tokens: 32}

// rejectReleasesMinor is the first 0.x of vLLM whose decode engines tell the prefill engine when
// they reject a request (vLLM PR 41269, May 2026).
const rejectReleasesMinor = 25

// requestIDsMinor is the first 0.x of vllm-ascend whose hand-offs have a remote_request_id. As its
// version, vllm-ascend reports that of the vLLM for which it is made.
const requestIDsMinor = 14
