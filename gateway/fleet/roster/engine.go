package roster

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill/kvevents"
)

// Engine is an engine's API server. A published Engine does not change any more.
type Engine struct {
	ID      string // host:port
	Role    string
	Target  *engine.Target // its API server, without a rank
	Conf    config.Engine
	Profile *mooncake.Profile
	Hosts   []string // hosts that its hand-offs or callbacks may name; never changed
	Found
	Own     bool                           // it is in the config, so that discovery leaves it alone
	Traffic *engine.Traffic                `json:"-"` // reports of its streams
	Finder  func(rank int) kvevents.Finder `json:"-"` // finds where a rank publishes what its cache holds; nil: only the config says

	Status   engine.Status
	Scope    string // its decode group or its region; the owner of this scope admits to it
	Deserted bool   // it is down or halted while another engine serves one of its models: probes leave it
	standing
	pausedBy     *Pause         // nil: it is not paused
	otherRegion  string         // its region, if that is not ours; else empty
	fence        *owner.Scope   // which proxy admits to it; nil: this proxy, which is alone
	board        string         // board of its models, as last known; empty: never known
	lists        *board.Names   // the models in its status; nil: not known
	listedModels []engine.Model // the models from which lists was made
	number       int            // number in the order of arrival
	processes    *Processes     // processes that were seen at its address
	gaveBack     *float64       // start of the process that gave an answer back against its profile; 0: not known; nil: none did
}

// Found is what discovery says of an engine; its zero value: discovery did not find it.
type Found struct {
	Source      string
	Incarnation string // empty: only host:port identifies the engine
	Away        string // why it gets no new work: not ready, leaving; empty: it gets work
}

// Roles of an engine.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // it prefills and decodes
)

// RegionMark stands between a board and its region, if that is not ours.
const RegionMark = "@"

// BoardIn is the board of the ranks of another region while this proxy owns them. KV does not cross regions, so what
// was prefilled there is decoded there.
func BoardIn(board, region string) string {
	if region == "" {
		return board
	}
	return board + RegionMark + region
}

// AggregatedMark follows the model in the name of the board of its ranks that prefill and decode. From its turn on, a
// request is on ranks of one kind only, so each kind has a board.
const AggregatedMark = "+aggregated"

// Key is the engine's role and address. The monitor knows the engine by it.
func (e *Engine) Key() string { return e.Role + " " + e.ID }

// rankKey is a rank's role and name, by which drains know it.
func (e *Engine) rankKey(rank int) string { return e.Key() + "/" + strconv.Itoa(max(0, rank)) }

// At returns the target of one rank of the engine; -1: of the engine itself.
func (e *Engine) At(rank int) *engine.Target {
	t := *e.Target
	if rank >= 0 {
		t.ID, t.Rank = e.ID+"/"+strconv.Itoa(rank), rank
	}
	return &t
}

// Decodes says whether requests have slots on the engine's ranks.
func (e *Engine) Decodes() bool { return e.Role != Prefill }

// Ranks are the numbers of its ranks; -1 stands for the only rank of an engine that does not number it.
func (e *Engine) Ranks() []int {
	if e.Conf.Ranks == 0 {
		if e.Role == Prefill && e.Profile.Connector == mooncake.VLLMMooncake {
			return []int{0} // the engine needs the rank header even for its only rank
		}
		return []int{-1}
	}
	ranks := make([]int, e.Conf.Ranks)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// Capacity is how many KV tokens the memory of a rank holds, as the engine reports it; 0: it does not. r is -1 for the only rank of an
// engine that does not number it. Then the engine's only series counts, whatever its label.
func (e *Engine) Capacity(r int) int64 {
	if n, ok := e.Status.CapacityTokens[strconv.Itoa(max(0, r))]; ok {
		return n
	}
	if r < 0 && len(e.Status.CapacityTokens) == 1 {
		for _, n := range e.Status.CapacityTokens {
			return n
		}
	}
	return 0
}

// kind is equal for engines that can stand in for each other.
func (e *Engine) kind() string {
	if len(e.Status.Models) == 0 {
		return e.Role
	}
	return e.Role + " " + e.base()
}

// base is the base model that the engine serves; its LoRAs share the ranks. Empty: the engine has not named its
// models.
func (e *Engine) base() string {
	for _, m := range e.Status.Models {
		if m.Parent == "" {
			return m.ID
		}
	}
	if len(e.Status.Models) > 0 {
		return e.Status.Models[0].ID
	}
	return ""
}

// decodesFor says whether the engine decodes requests for a model and its ranks are on a board. An empty model stands for any model.
// It is false for an engine without a fence: no proxy owns such an engine, but a nil fence would admit requests to it.
func (e *Engine) decodesFor(board, model string) bool {
	return e.fence != nil && e.Decodes() && len(e.Status.Models) > 0 && (e.base() == board || e.homeBoard() == board) &&
		(model == "" || e.has(model))
}

// Serves says whether the engine takes requests now, or is about to.
func (e *Engine) Serves() bool { return e.state.serves() }

// Learns says whether a start time shows something new about the engine's processes. It was asked for at the time
// asked, and read just now.
func (e *Engine) Learns(start float64, asked time.Time) bool {
	next, _ := e.processes.Lives(start, asked)
	return e.Role == Prefill && next != e.processes
}

// has says whether the engine lists a model, as far as is known.
func (e *Engine) has(model string) bool {
	return slices.ContainsFunc(e.Status.Models, func(m engine.Model) bool { return m.ID == model })
}

// homeBoard is the board of its model in its own region: without the mark of another region.
func (e *Engine) homeBoard() string {
	if e.Role == Aggregated {
		return e.base() + AggregatedMark
	}
	return e.base()
}

// groupID is the ID of the candidate that its group is.
func (e *Engine) groupID() string { return e.Conf.Group + " of " + e.board }

// barrierGroup names the group whose ranks step together, with a barrier, for an engine that prefills and decodes; empty: its ranks step
// alone, or it is of another role.
func (e *Engine) barrierGroup() string {
	if e.Role != Aggregated || e.Conf.Barrier != config.BarrierDP {
		return ""
	}
	return e.Conf.Region + "/" + e.Conf.Group
}

// CallsBack says whether a decode engine calls back to say where the KV of a request goes.
func (e *Engine) CallsBack() bool {
	return e.Role == Decode && e.Profile.Connector == mooncake.AscendLayerwise
}

// reaches says whether an engine's version is 0.minor or later. If the version cannot be read, it returns unread.
func (e *Engine) reaches(minor int, unread bool) bool {
	first, rest, _ := strings.Cut(strings.TrimPrefix(e.Status.Version, "v"), ".")
	second, _, _ := strings.Cut(rest, ".")
	major, err1 := strconv.Atoi(first)
	number, err2 := strconv.Atoi(second)
	if err1 != nil || err2 != nil {
		return unread
	}
	return major > 0 || number >= minor
}

// readsRoomsEverywhere says whether an engine of SGLang also reads the bootstrap room in a request for a response or a message. It is false
// if the version cannot be read.
func (e *Engine) readsRoomsEverywhere() bool {
	var v [3]int
	n, _ := fmt.Sscanf(strings.TrimPrefix(e.Status.Version, "v"), "%d.%d.%d", &v[0], &v[1], &v[2])
	return n >= 2 && slices.Compare(v[:], firstRooms[:]) >= 0
}

// computesRows says whether a decode engine itself computes a prompt whose logprobs are asked for, although the
// request has a hand-off. From 0.31 on the scheduler of vLLM loads nothing for such a request
// (v1/core/sched/scheduler.py, skip_reading_prefix_cache). Before, an engine ended with an OverflowError there (vLLM
// issue 50792, of 0.23). vllm-ascend has schedulers of its own, and a decode engine of SGLang returns no logprobs of
// a prompt (0.5.23, disaggregation/utils.py).
func (e *Engine) computesRows() bool {
	switch e.Profile.Connector {
	case mooncake.NIXLPull, mooncake.NIXLPush, mooncake.VLLMMooncake:
		return e.reaches(rowsMinor, false)
	}
	return false
}

// rowsMinor is the first 0.x of vLLM whose decode engines compute such prompts.
const rowsMinor = 31

// clamps says whether a decode engine cuts max_tokens to what fits. It is true if its version cannot be read: then
// the engine decides.
func (e *Engine) clamps() bool {
	if byProfile := e.Profile.ClampsMaxTokens; byProfile != nil {
		return *byProfile
	}
	return e.reaches(clampsMinor, true)
}

// takesHandOff says whether an engine takes hand-offs at an endpoint. Early connectors and nixl-push need one more thing: an engine that
// pushes KV finds where the KV goes by the X-Request-Id. vLLM does not name a response by it, so a response has no hand-off there.
func (e *Engine) takesHandOff(ep mooncake.Endpoint) bool {
	if e.Profile.Connector == mooncake.SGLang {
		return ep.Common() || ep == mooncake.Generate || e.readsRoomsEverywhere()
	}
	return ep.Common() || (ep == mooncake.Tokens || !e.Profile.Early() && e.Profile.Connector != mooncake.NIXLPush) &&
		e.reaches(handOffMinor[ep], false)
}

// mayGiveBack says whether a decode engine may give an answer back before its end, for want of KV memory: by its profile, or because its
// process has done so. Responses and messages do not show that they were given back, so such an engine gets none of them.
func (e *Engine) mayGiveBack() bool {
	didGiveBack := e.gaveBack != nil && (*e.gaveBack == 0 || e.Status.StartTime == 0 || *e.gaveBack == e.Status.StartTime)
	return e.Role == Decode && (e.Profile.MayGiveBack() || didGiveBack)
}

// MustNotGiveBack says whether it would be news that the decode engine gives an answer back: its connector has engines that do so, but its
// profile says that this one does not, and it has not done so yet.
func (e *Engine) MustNotGiveBack() bool {
	return e.Role == Decode && e.Profile.Ascend() && !e.mayGiveBack()
}

// context is the longest context of its models, in tokens; 0 if that of a base model is unknown.
func (e *Engine) context() (longest int) {
	for _, m := range e.Status.Models {
		n := e.maxLen(m)
		if n <= 0 && m.Parent == "" {
			return 0
		}
		longest = max(longest, n)
	}
	return longest
}

// maxLen is the context length of a model in tokens: that of the profile if it has one.
func (e *Engine) maxLen(m engine.Model) int {
	if e.Profile.MaxModelLen > 0 {
		return e.Profile.MaxModelLen
	}
	return m.MaxModelLen
}

// pinsMinor is the first 0.x of vLLM that runs a response on the rank that it names
// (entrypoints/openai/responses/serving.py).
const pinsMinor = 33

// clampsMinor is the first 0.x of vLLM that cuts max_tokens to what the prompt
// leaves of the context; 0.31 answers 400.
const clampsMinor = 32

// firstRooms is the first version of SGLang that is known to read rooms at every endpoint: PDRoutingFields in its
// entrypoints/openai/protocol.py. An earlier version may drop them, and refuse the request because it has no room.
var firstRooms = [3]int{0, 5, 23}

// handOffMinor is the first 0.x of vLLM that is known to take hand-offs at an endpoint, for endpoints where not every
// version does. An earlier version would drop them without an error. Responses have them since PR 37424, of March
// 2026. Messages have them since PR 37535, of the same month, but cache_salt, by which a discard keeps its KV apart,
// since PR 49498, of July 2026: it is in 0.27.0 and not in 0.26.0 (AnthropicMessagesRequest in
// entrypoints/anthropic/protocol.py). Token ids were read and run with 0.32.0.
var handOffMinor = map[mooncake.Endpoint]int{mooncake.Responses: 20, mooncake.Messages: 27, mooncake.Tokens: 32}

// rejectReleasesMinor is the first 0.x of vLLM that notifies the prefiller of a
// rejected decode request (vLLM PR 41269, May 2026).
const rejectReleasesMinor = 25

// requestIDsMinor is the first 0.x of vllm-ascend whose hand-offs have a remote_request_id. vllm-ascend reports the
// version of vLLM that it is made for.
const requestIDsMinor = 14
