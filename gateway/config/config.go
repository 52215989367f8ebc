// Package config reads evenkeel's configuration file: it has the keys, their defaults,
// a strict parser and the validation. Every error names file, line and column, and
// says what to change. The package opens no socket.
package config

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Config is the whole configuration file. In the file, durations are written as in Go, such as
// 500ms.
type Config struct {
	Listen   string                      `yaml:"listen"`
	TLS      TLS                         `yaml:"tls"`
	Admin    Admin                       `yaml:"admin"`
	KeysFile string                      `yaml:"keys_file"`
	Profiles map[string]mooncake.Profile `yaml:"profiles"`
	Engines  Engines                     `yaml:"engines"`
	Dispatch dispatcher.Config           `yaml:"dispatch"`
	Bind     Bind                        `yaml:"bind"`
	Pool     Pool                        `yaml:"pool"`
	Prefill  prefill.Config              `yaml:"prefill"`
	Health   Health                      `yaml:"health"`
	Limits   Limits                      `yaml:"limits"`
	Log      Log                         `yaml:"log"`
	Tracing  Tracing                     `yaml:"tracing"`
	// ExposeRoute adds x-evenkeel-* headers to answers: the engines, the policy, the prefix hit and
	// the number of attempts.
	ExposeRoute bool `yaml:"expose_route_headers"`
	// SelfTest makes the proxy send, at its start, one small request through each rank, paired with
	// one engine of the other role.
	SelfTest bool `yaml:"self_test"`

	// EventLoops is how many event loops write streamed answers. 0: as many as suit the machine; -1:
	// none, each answer has a goroutine instead.
	EventLoops int `yaml:"event_loops"`

	Predictor board.PredictorConfig `yaml:"predictor"`
	Geo       geo.Config            `yaml:"geo"`
	HA        geo.HA                `yaml:"ha"`
	Advice    Advice                `yaml:"advice"`
	Discovery Discovery             `yaml:"discovery"`

	FleetCall  FleetCall  `yaml:"fleet_call"`
	CORS       CORS       `yaml:"cors"`
	GatewayAPI GatewayAPI `yaml:"gateway_api"`

	source source // where each value is in the file, for the errors of Validate
}

// Admin is the listener for operators.
type Admin struct {
	Listen    string `yaml:"listen"`
	TokenFile string `yaml:"token_file"` // required unless Listen is a loopback address
	TLS       TLS    `yaml:"tls"`
	// WorkerHosts are the hosts whose engines an operator may add while the proxy runs. If the list is
	// empty, any host is allowed, except addresses at which no engine can be (see cannotBeEngine).
	// Engines of the file may have any host.
	WorkerHosts []string `yaml:"worker_hosts"`

	// Receipts is how many receipts, the records of how one request was served, are kept for GET
	// /decisions. 0: none are kept, and the reasons of decisions are not recorded.
	Receipts      int   `yaml:"receipts"`
	ReceiptsBytes int64 `yaml:"receipts_bytes"` // memory that all receipts together may take, in bytes
}

// TLS names the PEM files of a listener's certificate and key. They are read again when they
// change. Without them, the listener speaks clear text.
type TLS struct {
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
}

// On says whether the listener speaks TLS, which needs a certificate.
func (t TLS) On() bool { return t.CertFile != "" }

// Engines lists the engines of the file by their role.
type Engines struct {
	Prefill    []Engine `yaml:"prefill"`
	Decode     []Engine `yaml:"decode"`
	Aggregated []Engine `yaml:"aggregated"` // engines that each both prefill and decode
	// Prefer says which engines serve a model that has both prefill and decode pairs and aggregated
	// engines: pd or aggregated.
	Prefer string `yaml:"prefer"`
}

// The values of engines.prefer: which engines serve a model that has prefill and decode pairs as
// well as aggregated engines.
const (
	PreferPD         = "pd"
	PreferAggregated = "aggregated"
)

// ofRole returns the engines of a role; nil for a text that is not a role.
func (e *Engines) ofRole(role string) []Engine {
	return map[string][]Engine{"prefill": e.Prefill, "decode": e.Decode, "aggregated": e.Aggregated}[role]
}

// Roles are the roles that an engine may have, in the order in which Engines.All yields them.
var Roles = []string{"prefill", "decode", "aggregated"}

// All yields each engine with its role: first all prefill engines, then decode, then aggregated.
func (e *Engines) All() iter.Seq2[string, Engine] {
	return func(yield func(string, Engine) bool) {
		for _, role := range Roles {
			for _, one := range e.ofRole(role) {
				if !yield(role, one) {
					return
				}
			}
		}
	}
}

// Engine is one API server. With Ranks > 0, that many DP ranks share its address, and a header of
// each request names the rank.
type Engine struct {
	URL     string `yaml:"url"`
	Profile string `yaml:"profile"`
	Ranks   int    `yaml:"ranks"`
	First   int    `yaml:"first_rank"` // number of the first rank in the rank header; above 0 only on later nodes of dp_mode hybrid
	// Region is another proxy's region. The engine is used while this proxy owns that region, or
	// always if this proxy is geo.central. Empty: the engine is of this proxy's own region.
	Region string `yaml:"region"`
	// The following keys are for prefill engines only. KVEventsPort is the port at which the first
	// rank publishes its KV events. 0: the port that the engine reports, or prefill.kv_events.port if
	// it reports none.
	KVEventsPort int `yaml:"kv_events_port"`
	KVReplayPort int `yaml:"kv_replay_port"`
	// The following keys are for decode and aggregated engines only.
	Group   string `yaml:"group"`
	Barrier string `yaml:"barrier"` // dp: the ranks of the group step together; none: each rank steps by itself
	// Slots is how many requests each rank runs at once, the engine's max_num_seqs. 0: the profile's
	// value, else 32 with a warning.
	Slots int     `yaml:"slots"`
	KV    int64   `yaml:"kv_tokens"` // tokens that a rank's KV cache holds; 0: the profile's value, else what the engine reports
	Cost  float32 `yaml:"cost"`
	// The following keys are for aggregated engines only.
	Budget   int `yaml:"token_budget"`              // largest number of tokens in a step of a rank; 0: the profile's max_num_batched_tokens
	Interval int `yaml:"prefill_schedule_interval"` // a rank computes prompts only in every n-th step; 0: in each step
}

// The values of barrier. With dp, all ranks of a group step together, as slowly as the fullest
// rank. With none, each rank steps by itself.
const (
	BarrierDP   = "dp"
	BarrierNone = "none"
)

// GatewayAPI has the settings for use behind a gateway of Kubernetes' Gateway API with the
// inference extension.
type GatewayAPI struct {
	Metrics    bool           `yaml:"metrics"`    // the client listener serves load gauges under vLLM's names, without an API key
	Objectives map[string]int `yaml:"objectives"` // priority of each InferenceObjective that trusted callers may name
}

// CORS says which web sites' pages may call the client listener from a browser.
type CORS struct {
	Origins []string `yaml:"origins"` // such as https://chat.example, in the form in which browsers send them; *: all origins
}

// Advice has the settings of the advice on how many prefill and decode ranks to run.
type Advice struct {
	Interval time.Duration `yaml:"interval"` // time between two samples of the load; 0: no advice is given
	Target   float64       `yaml:"target"`   // share of the ranks' capacity that should be in use, above 0, at most 1

	// Window and Calm are constants except in tests. The number of needed ranks is a mean over Window,
	// so a shorter peak asks for no engine, because an engine takes longer than a minute to start.
	// Removal of a rank is advised only if the rank was not needed during all of Calm, because a rank
	// that is missed ten minutes later costs more than its removal saves.
	Window time.Duration `yaml:"-"`
	Calm   time.Duration `yaml:"-"`
}

// Pool has the settings of the pool, in which finished prefills wait for a decode rank. Requests
// that are bound to their decode rank before their prefill wait for it in the pool, too.
type Pool struct {
	Size int `yaml:"size"`
	// TTL is the longest wait of a request. 0: while its hand-off is valid, or prefill.queue.timeout
	// if it has no hand-off.
	TTL time.Duration `yaml:"ttl"`
}

// Health has the settings of health checks and of the slow start of an engine that recovers.
type Health struct {
	// Interval is the time between two health checks of an engine. Every tenth check also reads the
	// engine's settings and gauges.
	Interval time.Duration `yaml:"interval"`
	// Canary is the time limit of the request for one token (two from SGLang) that tests whether a
	// suspicious engine still computes. 0: there is no such test.
	Canary    time.Duration `yaml:"canary"`
	SlowStart time.Duration `yaml:"slow_start"` // how long an engine that recovers may use only a part of its slots; 0: it may use all at once
}

// Limits bound the memory and the time that a client or an engine can take from the proxy.
type Limits struct {
	Body int `yaml:"body_bytes"`
	// Bodies bounds the bytes of all request bodies that no engine has taken yet, and of all
	// answers in one piece that clients have not read yet. 0: no limit.
	Bodies         int           `yaml:"bodies_bytes"`
	Head           int           `yaml:"head_bytes"`
	Connections    int           `yaml:"connections"`
	PerIP          int           `yaml:"connections_per_ip"` // open connections per client address; 0: unlimited
	ReadTimeout    time.Duration `yaml:"read_timeout"`       // time for a request to arrive, from its first byte to its last
	IdleTimeout    time.Duration `yaml:"idle_timeout"`       // how long a connection may wait for its next request
	WriteTimeout   time.Duration `yaml:"write_timeout"`      // how long one write may wait for a client that does not read
	ConnectTimeout time.Duration `yaml:"connect_timeout"`    // time to connect to an engine
	ProbeTimeout   time.Duration `yaml:"probe_timeout"`      // time for a whole prefill; long prompts take minutes
	ProbeGrace     time.Duration `yaml:"probe_grace"`        // time that a prefill may go on after its client has left; 0: aborted at once
	EventTimeout   time.Duration `yaml:"event_timeout"`      // longest time between two events of a decode stream
	KeepAlive      time.Duration `yaml:"keep_alive"`         // a client that waits this long for an event gets an SSE comment; 0: it gets none
	DrainGrace     time.Duration `yaml:"drain_grace"`        // after SIGTERM, /readyz fails for this long before requests are refused
	DrainTimeout   time.Duration `yaml:"drain_timeout"`      // after DrainGrace, running streams may go on for this long
	EventBytes     int           `yaml:"event_bytes"`
	AnswerBytes    int           `yaml:"answer_bytes"` // bytes of one answer that is collected from events, because its client wants no stream
	// ResumeBytes bounds the bytes of bodies and token ids that are kept to resume running requests.
	// 0: none are kept.
	ResumeBytes  int      `yaml:"resume_bytes"`
	ChatTemplate bool     `yaml:"allow_chat_template"`
	MediaHosts   []string `yaml:"media_hosts"` // hosts that media URLs in requests may name; other http and https URLs are refused

	// Answers, AnswersPerPrompt and StopStrings limit one request. PassedThrough limits how many
	// requests are passed through at once.
	Answers          int `yaml:"answers"` // number of answers to all prompts of one request together
	AnswersPerPrompt int `yaml:"answers_per_prompt"`
	StopStrings      int `yaml:"stop_strings"`
	PassedThrough    int `yaml:"passed_through"`

	// ClientLag and ClientBacklog are constants except in tests. ClientLag bounds how long all writes
	// of one answer together may wait for the client, because a slow client keeps its slot from other
	// requests. ClientBacklog bounds the bytes that the kernel buffers for a slow client. It has room
	// for about a thousand events. By default, the kernel would buffer megabytes per client.
	ClientLag     time.Duration `yaml:"-"`
	ClientBacklog int           `yaml:"-"`
}

// Log has the level of the log, and the name of the file that gets one line per request.
type Log struct {
	Level    string `yaml:"level"`
	Requests string `yaml:"requests"` // file that gets one JSON line per request; "-": stdout; empty: no such lines
}

// Default returns the configuration of an empty file. Validate sets the defaults that depend on
// other keys.
func Default() *Config {
	c := &Config{
		Listen:    ":8000",
		Admin:     Admin{Listen: "127.0.0.1:9090", Receipts: 10_000, ReceiptsBytes: 64 << 20},
		Dispatch:  dispatcher.Default(),
		Predictor: board.PredictorConfig{Kind: board.DefaultPredictor},
		Geo:       geo.Default(),
		HA:        geo.DefaultHA(),
		Advice:    Advice{Interval: 5 * time.Second, Window: time.Minute, Calm: 10 * time.Minute, Target: 0.8},
		Discovery: Discovery{Probe: true},
		Bind:      defaultBind(),
		Pool:      Pool{Size: 1024},
		Health:    Health{Interval: time.Second, Canary: 10 * time.Second, SlowStart: 30 * time.Second},
		Limits: Limits{
			Body:           32 << 20,
			Bodies:         2 << 30,
			Head:           16 << 10,
			Connections:    65_536,
			ReadTimeout:    30 * time.Second,
			IdleTimeout:    90 * time.Second,
			WriteTimeout:   30 * time.Second,
			ClientLag:      5 * time.Minute,
			ClientBacklog:  256 << 10,
			ConnectTimeout: 3 * time.Second,
			ProbeTimeout:   10 * time.Minute,
			ProbeGrace:     time.Second,
			EventTimeout:   2 * time.Minute,
			DrainGrace:     2 * time.Second,
			DrainTimeout:   5 * time.Minute,
			EventBytes:     8 << 20,
			AnswerBytes:    64 << 20,
			ResumeBytes:    256 << 20,

			Answers: 128, AnswersPerPrompt: 8, StopStrings: 16, PassedThrough: 2048,
		},
		FleetCall: FleetCall{Timeout: 5 * time.Minute},

		Log:      Log{Level: "info"},
		Tracing:  Tracing{Sample: 0.1},
		SelfTest: true,
	}
	c.Prefill = prefill.Default()
	c.Prefill.Policy = ""                                         // Validate chooses the policy, because the choice depends on the engines
	c.Prefill.Calibration.TPMs, c.Prefill.Calibration.T0Ms = 0, 0 // 0: the engines' speed is not known yet
	return c
}

// Decision returns the settings of `dispatch`, together with the dispatcher's settings that have
// keys elsewhere in the file.
func (c *Config) Decision() dispatcher.Config {
	d := c.Dispatch
	d.Predictor, d.TTL, d.BindAhead = c.Predictor, c.Pool.TTL, c.Bind.BoardAhead()
	return d
}

// DefaultProfile is the profile of prefill and decode engines that name none. It exists even if the
// file does not define it.
const DefaultProfile = "ascend"

// DefaultAggregated is the profile of aggregated engines that name none. It exists even if the file
// does not define it.
const DefaultAggregated = "aggregated"

// ProfilesInUse returns the names of the profiles that engines of a role may have, sorted. An empty
// role stands for all roles. With discovery by files or Kubernetes, discovered engines may name any
// profile of the file.
func (c *Config) ProfilesInUse(role string) []string {
	used := map[string]bool{}
	// add adds the profile of an engine, or of a source that discovers engines; ofRole is its role.
	add := func(ofRole, profile string) {
		mayHaveAnyRole := ofRole == "" || ofRole == "both" // only pods: each names its role, or is prefill and decode engine
		if role == "" || ofRole == role || mayHaveAnyRole {
			used[profile] = true
		}
	}
	for ofRole, e := range c.Engines.All() {
		add(ofRole, e.Profile)
	}
	for _, d := range c.Discovery.DNS {
		add(d.Role, d.Profile)
	}
	for _, k := range c.Discovery.Kubernetes {
		// Without a profile, there is no role either: each pod names its role, and gets the default
		// profile of that role. DefaultAggregated, that of aggregated pods, is added by addNameable.
		add(k.Role, cmp.Or(k.Profile, DefaultProfile))
	}
	if len(c.Discovery.Files)+len(c.Discovery.Kubernetes) > 0 { // these engines may name any profile of the file
		c.addNameable(role, used)
	}
	return slices.Sorted(maps.Keys(used))
}

// addNameable adds to used, the set of profiles that engines may have, those that discovered
// engines of a role may name; an empty role stands for all roles. The two default profiles exist in
// every config, also if no engine can have them, so each is added in one case only:
// DefaultAggregated if role asks for aggregated engines alone, and DefaultProfile, for any role, if
// the file has no other profile for prefill and decode engines.
func (c *Config) addNameable(role string, used map[string]bool) {
	hasPairProfile := false // the file has a profile for prefill and decode engines besides DefaultProfile
	for name, p := range c.Profiles {
		forPairs := p.Connector != mooncake.None // engines with a connector hand KV over, so the profile is for prefill and decode engines
		mayBeNamed := forPairs || role == "" || role == "aggregated"
		switch {
		case name == DefaultProfile: // added below, if the file has no other
		case name == DefaultAggregated:
			if role == "aggregated" {
				used[name] = true
			}
		case mayBeNamed:
			used[name] = true
			hasPairProfile = hasPairProfile || forPairs
		}
	}
	if !hasPairProfile {
		used[DefaultProfile] = true
	}
}

// On says whether the config has any source of engines besides its own list.
func (d *Discovery) On() bool { return len(d.Files)+len(d.DNS)+len(d.Kubernetes) > 0 }
