// Package fleet knows which engines, ranks and models there are and which of them take
// requests: from the config, from operators and from discovery, from their health, and
// from who owns them. It says so to whoever binds requests, and drains engines and ranks.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
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
	Admission *owner.Set // who admits to areas of engines, regions or decode groups; set before the first engine enters

	slowStart *prometheus.GaugeVec
	pages     sync.Map // of *page: the last metric page of each prefill engine, by instance

	publishing sync.Mutex // serialises Publish, so that the last list published is the newest one

	mu          sync.RWMutex
	instances   map[string]*instance    // by role and host:port
	order       []string                // as configured, then as added
	ranks       map[int32]*Rank         // those of engines that are gone for a while, too: assignments may be on their way
	ids         map[string]int32        // rank name → worker id, never reused
	numbers     int32                   // given out
	bygone      map[string]bygone       // ids of ranks whose engine may come back, by incarnation and name
	dead        map[string]time.Time    // incarnations that will not, until when a hand-off of theirs may turn up
	differing   map[[2]string][2]string // pairs of a prefill and a decode engine of which only the first knew a model, and their versions then
	routes      map[string]Route        // model or LoRA name → board
	ready       tally                   // that take requests, of which tier and dispatcher know it
	hosts       map[string]trust        // from which a prefiller's KV may be pulled
	stops       map[string]*stopped     // engines and ranks that drain, by role and id
	added       int                     // engines that ever were
	asked       int                     // times a prefill engine was asked for token ids
	again       *time.Timer             // publishes while an engine gets its load step by step
	coordinates sync.Map                // of placed, by candidate
	exchanges   sync.Map                // of learned: what the bootstrap servers of vllm-mooncake prefillers answered, by candidate
	runs        runs
}

// Roles of an engine.
const (
	Prefill = "prefill"
	Decode  = "decode"
)

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
	Gauged     func(worker int32, kvTokens int64)                      // hears what is in use on ranks that bind early; it must not block
}

// instance is one engine's API server.
type instance struct {
	id      string // host:port
	role    string
	engine  *engine.Target // without a rank
	conf    config.Engine
	profile *mooncake.Profile
	status  engine.Status
	number  int      // in the order of arrival
	hosts   []string // trusted for its hand-offs
	found
	own bool // stands in the config, and is discovery's no more
	standing
	processes processes // seen at its address
}

func (i *instance) key() string { return i.role + " " + i.id }

// Rank is one place a decode leg can be sent to.
type Rank struct {
	Worker   int32
	Instance string // the monitor's id
	Target   *engine.Target
	Profile  *mooncake.Profile
	Traffic  *engine.Traffic
	Signs    *engine.Signs // signs of life of the rank's core
	Region   string        // empty: ours
	Context  int           // tokens of prompt and answer, of its longest model; 0: unknown
	Pins     bool          // its engine runs a response on the rank that it names
	Area     *owner.Area   // who admits to it; nil: this proxy, which is alone

	gone time.Time // its engine is, since then; under the fleet's mu
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
	SGLang  bool   // some engine obeys keys that only SGLang knows
	Blind   bool   // some engine that is up could give an answer back without a word, on an endpoint that is not common

	Whole [mooncake.Endpoints]bool // some engine that is up takes no hand-off there
}

// defaultSlots is what a rank is given when nobody says its max_num_seqs, which
// cannot be discovered.
const defaultSlots = 32

// New returns a fleet without engines.
func New(h Host) *Fleet {
	f := &Fleet{
		host: h, slowStart: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "evenkeel_engine_slow_start_ratio", Help: "Share of the engine's slots that may be used now. It is below 1 while the engine is newly in service.",
		}, []string{"engine", "role"}),
		instances: map[string]*instance{}, ranks: map[int32]*Rank{}, ids: map[string]int32{},
		differing: map[[2]string][2]string{}, routes: map[string]Route{}, hosts: map[string]trust{}, stops: map[string]*stopped{},
		bygone: map[string]bygone{}, dead: map[string]time.Time{}, runs: runs{all: map[*Run]struct{}{}},
	}
	h.Registerer.MustRegister(f.slowStart)
	f.again = time.AfterFunc(time.Hour, f.Publish)
	f.again.Stop()
	return f
}

// Load makes the engines of the config, all of them or none. They are in the fleet
// once enter has run.
func (f *Fleet) Load() (enter func(), err error) {
	var all []*instance
	set := f.host.Settings()
	for role, e := range set.Engines.All() {
		in, wrong := f.build(role, e, set)
		err = errors.Join(err, wrong)
		all = append(all, in)
	}
	return func() {
		for _, in := range all {
			f.enter(in)
		}
	}, err
}

// Add registers an engine, which drains no more. One that is known keeps its state.
func (f *Fleet) Add(role string, e config.Engine) error {
	in, err := f.build(role, e, f.host.Settings())
	if err != nil {
		return err
	}
	f.enter(in)
	if f.resume(func(s *stopped) bool { return s.at.Instance == in.key() }) {
		f.Publish()
	}
	return nil
}

// enter takes one engine in.
func (f *Fleet) enter(in *instance) {
	f.learnHosts(in) // before its hand-offs come
	f.mu.Lock()
	if f.instances[in.key()] == nil {
		f.order = append(f.order, in.key())
	}
	f.put(in)
	f.mu.Unlock()
	f.watch()
	f.Publish()
}

// build makes an engine of its description.
func (f *Fleet) build(role string, e config.Engine, set *Settings) (*instance, error) {
	id, err := config.InstanceID(e.URL)
	if err != nil {
		return nil, err
	}
	profile, ok := set.Profiles[e.Profile]
	if !ok {
		return nil, fmt.Errorf("%s engine %s: no profile is named %q", role, id, e.Profile)
	}
	target, err := config.Target(e, profile)
	if err != nil {
		return nil, fmt.Errorf("%s %w", role, err)
	}
	in := &instance{id: id, role: role, engine: target, conf: e, profile: profile}
	if role == Decode && e.Slots == 0 {
		in.conf.Slots = defaultSlots
		f.host.Log.Warn("slots of a decode engine are not set and cannot be discovered; set engines.decode[].slots to its --max-num-seqs",
			zap.String("engine", id), zap.Int("assumed", defaultSlots))
	}
	if role == Decode && profile.AllowLocalPrefill && profile.MaxBatchedTokens == 0 && profile.Connector == mooncake.AscendMooncakeV1 {
		f.host.Log.Warn("decode engines on Ascend are usually started with few tokens a step and without a prefix cache, so that a prompt computed there makes its whole group wait; set max_num_batched_tokens of the profile to theirs, or allow_local_prefill to false",
			zap.String("engine", id), zap.String("profile", e.Profile))
	}
	return in, nil
}

// put takes an engine in, in the place of the one it was before. It is called
// with f.mu held.
func (f *Fleet) put(in *instance) {
	if old, ok := f.instances[in.key()]; ok {
		in.status, in.standing, in.number = old.status, old.standing, old.number
		in.processes = old.processes
		if in.found == (found{}) && !in.own { // an operator describes it anew
			in.found = old.found
		}
		f.distrust(old, false)
	} else {
		f.added++
		in.number = f.added
	}
	f.instances[in.key()] = in
	if in.role == Decode {
		for _, r := range ranksOf(in) { // numbered as configured, whoever comes up first
			f.number(in, in.target(r).ID)
		}
	}
}

// Remove takes an engine out: its requests finish, it gets no new ones.
func (f *Fleet) Remove(role, id string) error {
	f.mu.Lock()
	in, ok := f.instances[role+" "+id]
	if ok {
		f.drop(in, false)
		f.order = slices.DeleteFunc(f.order, func(k string) bool { return k == in.key() })
	}
	f.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: %s %s", ErrNoSuchEngine, role, id)
	}
	f.watch()
	f.Publish()
	return nil
}

// watch gives the monitor the present list.
func (f *Fleet) watch() {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var list []engine.Instance
	for _, k := range f.order {
		in := f.instances[k]
		watched := engine.Instance{ID: k, Role: in.role, Target: in.target(-1), Ready: in.profile.Ready()}
		if in.role == Decode { // the prefill tier tries its own with requests
			watched.Slots = in.conf.Slots
			watched.Canary = in.profile.Canary()
			for _, r := range ranksOf(in) {
				watched.Canaries = append(watched.Canaries, in.target(r))
			}
		}
		list = append(list, watched)
	}
	f.host.Monitor.Set(list)
}

// target addresses one rank of the engine, -1 the engine itself.
func (i *instance) target(rank int) *engine.Target {
	t := *i.engine
	if rank >= 0 {
		t.ID, t.Rank = i.id+"/"+strconv.Itoa(rank), rank
	}
	return &t
}

// OnStatus is the monitor's callback.
func (f *Fleet) OnStatus(key string, s engine.Status) {
	f.mu.Lock()
	in, ok := f.instances[key]
	if ok {
		in.status = s
		f.away(in, s)
	}
	f.mu.Unlock()
	f.started(key, s.StartTime, s.Up && s.Err == nil)
	if ok {
		f.Publish()
	}
}
