package fleet

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// A Fleet knows the engines: who they are, which models and ranks they have, whether
// they are up. It publishes what follows from that whenever it changes. Identities
// outlive health: a rank that comes back finds its load.
type Fleet struct {
	host      Host
	Admission *owner.Set // who admits to scopes of engines, regions or decode groups; set before the first engine enters

	pages sync.Map // of *page: the last metric page of each prefill engine, by instance

	publishing sync.Mutex // serialises Publish, so that the last list published is the newest one

	mu          sync.RWMutex
	instances   map[string]*instance // by role and host:port
	order       []string             // as configured, then as added
	ranks       map[int32]*Rank      // those of engines that are gone for a while, too: assignments may be on their way
	ids         map[string]int32     // rank name → worker id, never reused
	numbers     int32                // given out
	bygone      map[string]bygone    // ids of ranks whose engine may come back, by incarnation and name
	dead        map[string]time.Time // incarnations that will not, until when a hand-off of theirs may turn up
	broken      map[string]bool      // groups of ranks that prefill and decode of which an engine is down, as published last
	routes      map[string]Route     // model or LoRA name → board
	ready       tally                // that take requests, of which tier and dispatcher know it
	hosts       map[string]trust     // from which a prefiller's KV may be pulled
	stops       map[string]*stopped  // engines and ranks that drain, by role and id
	added       int                  // engines that ever were
	asked       int                  // times a prefill engine was asked for token ids
	again       *time.Timer          // publishes while an engine gets its load step by step
	coordinates sync.Map             // of placed, by candidate
	exchanges   sync.Map             // of learned: what the bootstrap servers of vllm-mooncake prefillers answered, by candidate
	runs        runs
}

// Place is where a call to an engine runs: the monitor's id, and the rank or -1.
type Place struct {
	Instance string
	Rank     int
}

// Host is the proxy as its fleet sees it.
type Host struct {
	Context    context.Context        // ends with the proxy
	Serving    func() context.Context // ends when what has no answer yet must end
	Started    time.Time
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Settings   func() *Settings // those in force
	Client     *engine.Client
	Monitor    *engine.Monitor
	Dispatch   func(context.Context) board.Status
	Publish    func([]prefill.Candidate, []local.Rank, []board.Worker) // to all that bind requests
	Callbacks  *metaserver.Server                                      // hears decode engines that call back; nil: none does
	Gauged     func(worker int32, kvTokens int64, at time.Time)        // hears what is in use on ranks that bind early; it must not block
}

// instance is one engine's API server.
type instance struct {
	id      string // host:port
	role    string
	engine  *engine.Target // without a rank
	conf    config.Engine
	profile *mooncake.Profile
	status  engine.Status
	lists   *board.Names   // what its status has of models; nil: it is not known
	named   []engine.Model // what lists follows from
	number  int            // in the order of arrival
	hosts   []string       // trusted for its hand-offs
	found
	own bool // stands in the config, and is discovery's no more
	standing
	processes *roster.Processes // seen at its address
	gaveBack  *float64          // when the process was started that gave an answer back, though its profile says that none does; 0: not known; nil: none did
}

func (i *instance) key() string { return i.role + " " + i.id }

// target addresses one rank of the engine, -1 the engine itself.
func (i *instance) target(rank int) *engine.Target {
	t := *i.engine
	if rank >= 0 {
		t.ID, t.Rank = i.id+"/"+strconv.Itoa(rank), rank
	}
	return &t
}

// kind is what engines that can stand in for each other have in common.
func (i *instance) kind() string {
	if len(i.status.Models) == 0 {
		return i.role
	}
	return i.role + " " + boardOf(i.status.Models)
}

// callsBack says whether a decode engine tells where the KV of a request goes.
func (i *instance) callsBack() bool {
	return i.role == Decode && i.profile.Connector == mooncake.AscendLayerwise
}

// reaches says whether an engine's version is 0.minor or a later one; unread is the answer
// for a version that cannot be read.
func (i *instance) reaches(minor int, unread bool) bool {
	first, rest, _ := strings.Cut(strings.TrimPrefix(i.status.Version, "v"), ".")
	second, _, _ := strings.Cut(rest, ".")
	major, err1 := strconv.Atoi(first)
	number, err2 := strconv.Atoi(second)
	if err1 != nil || err2 != nil {
		return unread
	}
	return major > 0 || number >= minor
}

// roomsEverywhere says whether an engine of SGLang reads the room of a response and of a message, too. A version that
// cannot be read does not.
func (i *instance) roomsEverywhere() bool {
	var v [3]int
	n, _ := fmt.Sscanf(strings.TrimPrefix(i.status.Version, "v"), "%d.%d.%d", &v[0], &v[1], &v[2])
	return n >= 2 && slices.Compare(v[:], firstRooms[:]) >= 0
}

// computesRows says whether a decode engine computes a prompt whose logprobs are asked for by itself, although it is given its KV.
// From 0.31 on the scheduler of vLLM loads nothing for such a request (v1/core/sched/scheduler.py, skip_reading_prefix_cache). Before, an
// engine ended with an OverflowError there (vLLM issue 50792, of 0.23). vllm-ascend has schedulers of its own, and a decode engine of SGLang
// tells no logprobs of a prompt (0.5.23, disaggregation/utils.py).
func (i *instance) computesRows() bool {
	switch i.profile.Connector {
	case mooncake.NIXLPull, mooncake.NIXLPush, mooncake.VLLMMooncake:
		return i.reaches(rowsMinor, false)
	}
	return false
}

// rowsMinor is the first 0.x of vLLM whose decode engines compute such prompts.
const rowsMinor = 31

// clamps tells whether a decode engine cuts max_tokens to fit. If its version cannot
// be read, the answer is yes: the engine then decides.
func (i *instance) clamps() bool {
	if says := i.profile.ClampsMaxTokens; says != nil {
		return *says
	}
	return i.reaches(clampsMinor, true)
}

// takesHandOff says whether an engine takes hand-offs at an endpoint. vLLM does not call a response
// by its X-Request-Id, by which an engine that pushes finds where its KV goes.
func (i *instance) takesHandOff(ep mooncake.Endpoint) bool {
	if i.profile.Connector == mooncake.SGLang {
		return ep.Common() || i.roomsEverywhere()
	}
	return ep.Common() || !i.profile.Early() && i.profile.Connector != mooncake.NIXLPush && i.reaches(handOffMinor[ep], false)
}

// mayGiveBack says whether a decode engine may give an answer back, which responses and messages do not show.
func (i *instance) mayGiveBack() bool {
	same := i.gaveBack != nil && (*i.gaveBack == 0 || i.status.StartTime == 0 || *i.gaveBack == i.status.StartTime)
	return i.role == Decode && (i.profile.MayGiveBack() || same)
}

// context is the longest of its models' contexts, 0 where one is unknown.
func (i *instance) context() (longest int) {
	for _, m := range i.status.Models {
		n := i.maxLen(m)
		if n <= 0 && m.Parent == "" {
			return 0
		}
		longest = max(longest, n)
	}
	return longest
}

// maxLen is the context length of a model, the profile's word first.
func (i *instance) maxLen(m engine.Model) int {
	if i.profile.MaxModelLen > 0 {
		return i.profile.MaxModelLen
	}
	return m.MaxModelLen
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

	gone time.Time // its engine is, since then; under the fleet's mu
	up   bool      // it takes requests, as last published; under the fleet's mu
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

// standing is an engine's place in the service, as last published. What runs on
// it and what is charged for that depends on none of it.
type standing struct {
	serving bool    // takes requests, drains aside
	paused  bool    // but nothing new for a moment: what failed there is not settled
	served  bool    // did once
	start   float64 // of the process that serves
	fresh   time.Time
	share   float64 // of its slots that may be used now; below 1 while it is fresh
	odd     string  // why it cannot serve beside the others of its model; empty: it can

	deserted uint32 // why probes have to leave it for another engine
}

// trust is why a hand-off may point decode engines at a host.
type trust struct {
	by    int       // prefill engines that stand for it
	until time.Time // and after the last of them
}

// bygone is a rank's number that waits for its engine.
type bygone struct {
	id int32
	at time.Time
}

// found is what discovery says of an engine; the zero value: it found none.
type found struct {
	source      string
	incarnation string // empty: host:port is all the identity there is
	away        string // why it gets no new work: not ready, leaving; empty: it does
}

// runs are the calls under way.
type runs struct {
	mu  sync.Mutex
	all map[*Run]struct{}
}

// Run is a call to an engine. A drain's deadline may end it. A probe also ends when its engine is declared down.
type Run struct {
	at     Place
	call   *engine.Call
	probe  bool
	leaves atomic.Uint32 // why it has to go on elsewhere
	safe   atomic.Bool   // it may be aborted: no pull of KV is under way
}

// Settings are a config with what follows from it for engines. They never change: a
// reload puts others in their place.
type Settings struct {
	*config.Config
	Profiles map[string]*mooncake.Profile
	Listed   map[string]bool // the config's own engines, by role and host:port
}

// tally is how many engines there are of each role.
type tally struct{ prefills, decodes int }

// ErrNoSuchEngine is what Remove and Drain answer for an unknown id.
var ErrNoSuchEngine = errors.New("no such engine")

// Roles of an engine.
const (
	Prefill    = "prefill"
	Decode     = "decode"
	Aggregated = "aggregated" // it prefills and decodes
)

// decodes says whether requests have slots on the engine's ranks.
func (i *instance) decodes() bool { return i.role != Prefill }

func ranksOf(in *instance) []int {
	if in.conf.Ranks == 0 {
		if in.role == Prefill && in.profile.Connector == mooncake.VLLMMooncake {
			return []int{0} // it wants the header even for its only rank
		}
		return []int{-1}
	}
	ranks := make([]int, in.conf.Ranks)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// capacityOf is what the engine reports for the rank; the only series of a
// single-rank server counts whatever its label.
func capacityOf(in *instance, r int) int64 {
	if n, ok := in.status.CapacityTokens[strconv.Itoa(max(0, r))]; ok {
		return n
	}
	if r < 0 && len(in.status.CapacityTokens) == 1 {
		for _, n := range in.status.CapacityTokens {
			return n
		}
	}
	return 0
}

// boardOf is the base model an engine serves; its LoRAs share the ranks.
func boardOf(models []engine.Model) string {
	for _, m := range models {
		if m.Parent == "" {
			return m.ID
		}
	}
	return models[0].ID
}

// rankMemory is how long a rank is known after its engine: far longer than an
// assignment takes to become a call. Calls hold the rank themselves.
const rankMemory = 10 * time.Minute

// limit is how much of n the engine gets now; 0: all.
func (s standing) limit(n int) int {
	if s.share >= 1 {
		return 0
	}
	return max(1, int(math.Ceil(s.share*float64(n))))
}

// shareAt is the share of an engine that is in service for so long.
func shareAt(age, slow time.Duration) float64 {
	return min(1, firstShare+(1-firstShare)*max(0, age.Seconds())/slow.Seconds())
}

const (
	firstShare = 0.1 // of its slots an engine gets at once
	slowSteps  = 30  // of a slow start
	slowProbes = 8   // unanswered probes a prefill engine may have at the end of one
)

// pinsMinor is the first 0.x of vLLM that runs a response on the rank that it names
// (entrypoints/openai/responses/serving.py).
const pinsMinor = 33

// clampsMinor is the first 0.x of vLLM that cuts max_tokens to what the prompt
// leaves of the context; 0.31 answers 400.
const clampsMinor = 32

// firstRooms is the first version of SGLang of which it is sure that it reads rooms at every endpoint: PDRoutingFields in its
// entrypoints/openai/protocol.py. An earlier one may drop them, and refuse the request for want of a room.
var firstRooms = [3]int{0, 5, 23}

// handOffMinor is the first 0.x of vLLM of which it is sure that it takes hand-offs at an endpoint,
// where not every one does. An earlier one would drop them without a word. Responses have them
// since PR 37424, of March 2026. Messages have them since PR 37535, of the same month, but
// cache_salt, by which a discard keeps its KV apart, since PR 49498, of July 2026: it is in 0.27.0
// and not in 0.26.0 (AnthropicMessagesRequest in entrypoints/anthropic/protocol.py).
var handOffMinor = map[mooncake.Endpoint]int{mooncake.Responses: 20, mooncake.Messages: 27}
