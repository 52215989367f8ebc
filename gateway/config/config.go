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

// Config is the whole file. Durations are written as in Go, such as 500ms.
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
	// ExposeRoute adds x-evenkeel-* headers to answers: engine, policy, hit, attempts.
	ExposeRoute bool `yaml:"expose_route_headers"`
	SelfTest    bool `yaml:"self_test"` // at the start, send one tiny request through every rank, each with one partner

	EventLoops int `yaml:"event_loops"` // write streamed answers; 0: as many as suit the machine; -1: none, a goroutine per answer instead

	Predictor board.PredictorConfig `yaml:"predictor"`
	Geo       geo.Config            `yaml:"geo"`
	HA        geo.HA                `yaml:"ha"`
	Advice    Advice                `yaml:"advice"`
	Discovery Discovery             `yaml:"discovery"`

	FleetCall  FleetCall  `yaml:"fleet_call"`
	CORS       CORS       `yaml:"cors"`
	GatewayAPI GatewayAPI `yaml:"gateway_api"`

	source source // positions of the values, for the errors of Validate
}

// Admin is the listener for operators.
type Admin struct {
	Listen    string `yaml:"listen"`
	TokenFile string `yaml:"token_file"` // required unless Listen is a loopback address
	TLS       TLS    `yaml:"tls"`
	// WorkerHosts are the hosts of engines that may be added while the proxy runs;
	// empty: all hosts, except addresses that no engine has (see cannotBeEngine). Engines of the file may be anywhere.
	WorkerHosts []string `yaml:"worker_hosts"`

	// Receipts is the number of receipts that are kept for GET /decisions; 0: none, and reasons of choices are not recorded.
	Receipts      int   `yaml:"receipts"`
	ReceiptsBytes int64 `yaml:"receipts_bytes"` // memory that receipts may take
}

// TLS has the certificate of a listener and its key, in PEM files that are read again when they
// change. Without them, the listener speaks clear text.
type TLS struct {
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
}

// On says whether the listener speaks TLS.
func (t TLS) On() bool { return t.CertFile != "" }

// Engines lists the engines by their role.
type Engines struct {
	Prefill    []Engine `yaml:"prefill"`
	Decode     []Engine `yaml:"decode"`
	Aggregated []Engine `yaml:"aggregated"` // engines that both prefill and decode
	Prefer     string   `yaml:"prefer"`     // pd or aggregated: which engines serve a model that has both
}

// Values of engines.prefer.
const (
	PreferPD         = "pd"
	PreferAggregated = "aggregated"
)

// ofRole returns the engines of a role.
func (e *Engines) ofRole(role string) []Engine {
	return map[string][]Engine{"prefill": e.Prefill, "decode": e.Decode, "aggregated": e.Aggregated}[role]
}

// Roles are the roles of engines.
var Roles = []string{"prefill", "decode", "aggregated"}

// All yields the engines with their role, the prefill side first.
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

// Engine is one API server. With Ranks > 0 it fronts that many DP ranks, and a header of each request
// says which rank is meant.
type Engine struct {
	URL     string `yaml:"url"`
	Profile string `yaml:"profile"`
	Ranks   int    `yaml:"ranks"`
	First   int    `yaml:"first_rank"` // number of the first rank in this header
	Region  string `yaml:"region"`     // region of another proxy: used only while this proxy owns it; empty: the own region
	// Prefill only.
	// KVEventsPort is that of its first rank, and overrides the port that the engine reports; 0: the latter, else prefill.kv_events.port.
	KVEventsPort int `yaml:"kv_events_port"`
	KVReplayPort int `yaml:"kv_replay_port"`
	// For connector nixl-push with bind: arrival: where decode engines reach this one; empty: its first answer says it.
	KVEngineID string `yaml:"kv_engine_id"`
	KVHost     string `yaml:"kv_host"`
	KVPort     int    `yaml:"kv_port"`  // port of NIXL's side channel
	TPSize     int    `yaml:"tp_size"`  // 0: 1
	PPSize     int    `yaml:"pp_size"`  // 0: 1
	DCPSize    int    `yaml:"dcp_size"` // 0: 1
	// Decode and aggregated only.
	Group   string  `yaml:"group"`
	Barrier string  `yaml:"barrier"`   // dp: the ranks of the group step together; none: each rank steps by itself
	Slots   int     `yaml:"slots"`     // per rank, the engine's max_num_seqs; 0: the profile's, else 32 with a warning
	KV      int64   `yaml:"kv_tokens"` // per rank; 0: the profile's, else what the engine reports
	Cost    float32 `yaml:"cost"`
	// Aggregated only.
	Budget   int `yaml:"token_budget"`              // largest number of tokens in a step of a rank; 0: the profile's max_num_batched_tokens
	Interval int `yaml:"prefill_schedule_interval"` // prompts are computed only in every n-th step; 0: in each step
}

// Values of barrier. With dp, all ranks of a group step together, as slowly as the fullest one.
// With none, each rank steps by itself.
const (
	BarrierDP   = "dp"
	BarrierNone = "none"
)

// GatewayAPI has settings for a gateway of Kubernetes' Gateway API with the inference extension.
type GatewayAPI struct {
	Metrics    bool           `yaml:"metrics"`    // vLLM's gauges of load, at the client listener, without an API key
	Objectives map[string]int `yaml:"objectives"` // priority of each InferenceObjective that trusted callers may name
}

// CORS says pages of which sites may call the client listener from a browser.
type CORS struct {
	Origins []string `yaml:"origins"` // in the form in which browsers send them, such as https://chat.example; *: all
}

// Advice has the settings of the advice on how many prefill and decode ranks to run.
type Advice struct {
	Interval time.Duration `yaml:"interval"` // time between two samples; 0: there is no advice
	Target   float64       `yaml:"target"`   // share of their capacity that ranks should use

	// Window and Calm are constants except in tests. Needs are means over Window, so that a shorter peak asks for no engine: an engine
	// takes longer than a minute to start. Ranks may be removed if they were not needed in all of Calm. To remove a rank that is missed
	// ten minutes later costs more than it saves.
	Window time.Duration `yaml:"-"`
	Calm   time.Duration `yaml:"-"`
}

// Pool has the settings of the pool, in which finished prefills wait for a decode rank. Requests that get their rank before
// their prefill wait in it, too.
type Pool struct {
	Size int           `yaml:"size"`
	TTL  time.Duration `yaml:"ttl"` // longest wait; 0: while its hand-off is valid, or prefill.queue.timeout without a hand-off
}

// Health has the settings of health checks, and how fast an engine that comes back gets its full load.
type Health struct {
	Interval  time.Duration `yaml:"interval"`   // between two health checks of an engine; every tenth also reads its facts and gauges
	Canary    time.Duration `yaml:"canary"`     // time limit of the one-token request that tests a suspicious engine; 0: no test
	SlowStart time.Duration `yaml:"slow_start"` // time until an engine that comes back may use all its slots; 0: at once
}

// Limits bound the memory and the time that a client or an engine may cost the proxy.
type Limits struct {
	Body           int           `yaml:"body_bytes"`
	Bodies         int           `yaml:"bodies_bytes"` // requests that no engine has taken yet, and answers passed through; 0: no limit
	Head           int           `yaml:"head_bytes"`
	Connections    int           `yaml:"connections"`
	PerIP          int           `yaml:"connections_per_ip"` // 0: unlimited
	ReadTimeout    time.Duration `yaml:"read_timeout"`       // from the first byte of a request to its last
	IdleTimeout    time.Duration `yaml:"idle_timeout"`       // for the next request on a connection
	WriteTimeout   time.Duration `yaml:"write_timeout"`      // for one write to a client that does not read
	ConnectTimeout time.Duration `yaml:"connect_timeout"`    // to an engine
	ProbeTimeout   time.Duration `yaml:"probe_timeout"`      // for a whole prefill: long prompts take minutes
	ProbeGrace     time.Duration `yaml:"probe_grace"`        // a prefill may still end this long after its client left; 0: it is aborted at once
	EventTimeout   time.Duration `yaml:"event_timeout"`      // between two events of a decode stream
	KeepAlive      time.Duration `yaml:"keep_alive"`         // a client that waits this long for an event gets a comment; 0: it gets none
	DrainGrace     time.Duration `yaml:"drain_grace"`        // after SIGTERM, /readyz fails for this long before requests are refused
	DrainTimeout   time.Duration `yaml:"drain_timeout"`      // after DrainGrace, streams may finish for this long
	EventBytes     int           `yaml:"event_bytes"`
	AnswerBytes    int           `yaml:"answer_bytes"` // events of one answer that is collected, because its client does not want a stream
	ResumeBytes    int           `yaml:"resume_bytes"` // bodies and token ids of all running requests, kept to resume them
	ChatTemplate   bool          `yaml:"allow_chat_template"`
	MediaHosts     []string      `yaml:"media_hosts"` // hosts of media URLs in requests; other http and https URLs are refused

	// The first three are limits of one request, the last one of all requests that are passed through at the same time.
	Answers          int `yaml:"answers"` // answers to all its prompts together
	AnswersPerPrompt int `yaml:"answers_per_prompt"`
	StopStrings      int `yaml:"stop_strings"`
	PassedThrough    int `yaml:"passed_through"`

	// ClientLag and ClientBacklog are constants except in tests. ClientLag bounds the time of all writes of one answer together, because a
	// slow client keeps its slot from other requests. ClientBacklog bounds the bytes that are buffered for a slow client. It is room for
	// about a thousand events; the kernel's buffers would take megabytes per client.
	ClientLag     time.Duration `yaml:"-"`
	ClientBacklog int           `yaml:"-"`
}

// Log has the level of the log, and the file for one line per request.
type Log struct {
	Level    string `yaml:"level"`
	Requests string `yaml:"requests"` // file for one JSON line per request; "-": stdout; empty: none
}

// Default returns the configuration of an empty file.
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
		Tracing:  Tracing{Sample: 0.1, Timeout: 10 * time.Second},
		SelfTest: true,
	}
	c.Prefill = prefill.Default()
	c.Prefill.Policy = ""                                         // Validate chooses it, because it depends on the engines
	c.Prefill.Calibration.TPMs, c.Prefill.Calibration.T0Ms = 0, 0 // the engines' speed is not known
	return c
}

// Decision returns `dispatch`, with the settings of the dispatcher that have keys elsewhere in the file.
func (c *Config) Decision() dispatcher.Config {
	d := c.Dispatch
	d.Predictor, d.TTL, d.BindAhead = c.Predictor, c.Pool.TTL, c.Bind.BoardAhead()
	return d
}

// DefaultProfile is the profile of engines that name none. It exists even if
// the file does not have it.
const DefaultProfile = "ascend"

// DefaultAggregated is the same for engines that prefill and decode.
const DefaultAggregated = "aggregated"

// ProfilesInUse returns the profiles that engines of a role may have, sorted. An empty role stands for all roles. With discovery by files
// or Kubernetes, engines may name any profile of the file.
func (c *Config) ProfilesInUse(role string) []string {
	used := map[string]bool{}
	add := func(ofRole, profile string) {
		fromPods := ofRole == "" || ofRole == "both" // each pod says its own role, or has two
		if role == "" || ofRole == role || fromPods {
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
		add(k.Role, cmp.Or(k.Profile, DefaultProfile)) // addNameable adds DefaultAggregated, which aggregated pods get
	}
	if len(c.Discovery.Files)+len(c.Discovery.Kubernetes) > 0 {
		c.addNameable(role, used)
	}
	return slices.Sorted(maps.Keys(used))
}

// addNameable adds the profiles that discovered engines of a role may name. It adds DefaultProfile only if the file has no other profile
// for pairs of prefill and decode, and DefaultAggregated only for the role aggregated.
func (c *Config) addNameable(role string, used map[string]bool) {
	pairsWritten := false // the file has a profile for pairs
	for name, p := range c.Profiles {
		switch forPairs := p.Connector != mooncake.None; {
		case name == DefaultProfile: // see below
		case name == DefaultAggregated:
			if role == "aggregated" {
				used[name] = true
			}
		case forPairs || role == "" || role == "aggregated":
			used[name] = true
			pairsWritten = pairsWritten || forPairs
		}
	}
	if !pairsWritten {
		used[DefaultProfile] = true
	}
}

// On says whether the config has any source of engines.
func (d *Discovery) On() bool { return len(d.Files)+len(d.DNS)+len(d.Kubernetes) > 0 }
