// Package config reads and validates evenkeel's configuration file. Every error names file, line and column, and says what to change.
// Nothing here opens a socket.
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

// Config is the whole file. Durations are written as in Go.
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
	// ExposeRoute puts x-evenkeel-* headers into answers: engine, policy, hit, attempts.
	ExposeRoute bool `yaml:"expose_route_headers"`
	SelfTest    bool `yaml:"self_test"` // send one tiny request through every rank after the start

	// loops that carry streamed answers; 0: as many as suit the machine; -1: none, each answer has a goroutine
	EventLoops int `yaml:"event_loops"`

	Predictor board.PredictorConfig `yaml:"predictor"`
	Geo       geo.Config            `yaml:"geo"`
	HA        geo.HA                `yaml:"ha"`
	Advice    Advice                `yaml:"advice"`
	Discovery Discovery             `yaml:"discovery"`

	FleetCall  FleetCall  `yaml:"fleet_call"`
	CORS       CORS       `yaml:"cors"`
	GatewayAPI GatewayAPI `yaml:"gateway_api"`

	source source // where each value is written, for errors
}

// Admin is the listener for operators.
type Admin struct {
	Listen    string `yaml:"listen"`
	TokenFile string `yaml:"token_file"` // needed on any address but loopback
	TLS       TLS    `yaml:"tls"`
	// WorkerHosts are the hosts at which engines may be added while the proxy runs; empty: anywhere, except where no engine can be. Engines
	// of the file are not restricted.
	WorkerHosts []string `yaml:"worker_hosts"`

	Receipts      int   `yaml:"receipts"`       // kept for GET /decisions; 0: none, and choices are not explained
	ReceiptsBytes int64 `yaml:"receipts_bytes"` // receipts take at most this much memory
}

// TLS is the certificate of a listener: PEM files, which are read again when they change. Without them, the listener speaks clear text.
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
	Aggregated []Engine `yaml:"aggregated"` // they prefill and decode
	Prefer     string   `yaml:"prefer"`     // pd or aggregated: which to use if a model has both
}

// The kinds of engines that a model may have.
const (
	PreferPD         = "pd"
	PreferAggregated = "aggregated"
)

// of returns the engines of a role.
func (e *Engines) of(role string) []Engine {
	return map[string][]Engine{"prefill": e.Prefill, "decode": e.Decode, "aggregated": e.Aggregated}[role]
}

// Roles are the roles of engines, in the order of All.
var Roles = []string{"prefill", "decode", "aggregated"}

// All yields all engines with their role, prefill engines first.
func (e *Engines) All() iter.Seq2[string, Engine] {
	return func(yield func(string, Engine) bool) {
		for _, role := range Roles {
			for _, one := range e.of(role) {
				if !yield(role, one) {
					return
				}
			}
		}
	}
}

// Engine is one API server. With Ranks > 0 it serves that many DP ranks, and a header selects one of them.
type Engine struct {
	URL     string `yaml:"url"`
	Profile string `yaml:"profile"`
	Ranks   int    `yaml:"ranks"`
	First   int    `yaml:"first_rank"` // the header's value for the first of its ranks
	Region  string `yaml:"region"`     // region of another dispatcher; used only while this proxy owns that region; empty: our own
	// Prefill only.
	// port of the first rank, before the one the engine reports; 0: prefill.kv_events.port, after the one it reports
	KVEventsPort int `yaml:"kv_events_port"`
	KVReplayPort int `yaml:"kv_replay_port"`
	// For nixl-push with bind: arrival: where decode engines reach this one; empty: its first answer says it.
	KVEngineID string `yaml:"kv_engine_id"`
	KVHost     string `yaml:"kv_host"`
	KVPort     int    `yaml:"kv_port"`  // of its side channel
	TPSize     int    `yaml:"tp_size"`  // 0: 1
	PPSize     int    `yaml:"pp_size"`  // 0: 1
	DCPSize    int    `yaml:"dcp_size"` // 0: 1
	// Decode and aggregated only.
	Group   string  `yaml:"group"`
	Barrier string  `yaml:"barrier"`   // dp: the group steps together; none: dense ranks
	Slots   int     `yaml:"slots"`     // per rank, the engine's max_num_seqs; 0: the profile's, else 32 with a warning
	KV      int64   `yaml:"kv_tokens"` // per rank; 0: the profile's, else what the engine reports
	Cost    float32 `yaml:"cost"`
	// Aggregated only.
	Budget   int `yaml:"token_budget"`              // tokens that a rank computes per step; 0: the profile's max_num_batched_tokens
	Interval int `yaml:"prefill_schedule_interval"` // prompts are computed in every so many steps; 0: in each
}

// How the ranks of a group run: in common steps that last as long as the fullest rank needs, or independently.
const (
	BarrierDP   = "dp"
	BarrierNone = "none"
)

// GatewayAPI is what a gateway of Kubernetes' Gateway API with its inference extension needs.
type GatewayAPI struct {
	Metrics    bool           `yaml:"metrics"`    // the client listener also tells, without a key and in vLLM's names, how busy the proxy is
	Objectives map[string]int `yaml:"objectives"` // priority per name of an InferenceObjective, for requests of trusted callers
}

// CORS says which pages of other sites may call the client listener from a browser.
type CORS struct {
	Origins []string `yaml:"origins"` // as browsers send them, such as https://chat.example; *: all
}

// Advice is for advice on the number of ranks of each side.
type Advice struct {
	Interval time.Duration `yaml:"interval"` // between two samples; 0: no advice is given
	Target   float64       `yaml:"target"`   // share of the ranks' capacity that should be used

	// Window and Calm are constants except in tests. A need that is shorter than Window is ignored, because an engine takes longer than a
	// minute to start. A rank is spare only if nothing needed it during Calm: removing a rank that is missed ten minutes later costs more
	// than it saves.
	Window time.Duration `yaml:"-"`
	Calm   time.Duration `yaml:"-"`
}

// Pool has the requests that wait for a decode rank: after their prefill, or before it if the rank is chosen first.
type Pool struct {
	Size int           `yaml:"size"`
	TTL  time.Duration `yaml:"ttl"` // 0: the hold budget of the hand-off; before the prefill: prefill.queue.timeout
}

// Health is how engines are watched, and how fast a recovered engine gets its load back.
type Health struct {
	Interval  time.Duration `yaml:"interval"`   // between two health checks; facts and gauges are read every tenth
	Canary    time.Duration `yaml:"canary"`     // time limit of the one-token request that is sent to a suspicious engine; 0: none is sent
	SlowStart time.Duration `yaml:"slow_start"` // until a recovered engine has all its slots; 0: at once
}

// Limits bound what a client or an engine may cost the proxy.
type Limits struct {
	Body           int           `yaml:"body_bytes"`
	Bodies         int           `yaml:"bodies_bytes"` // of all requests that no engine has taken over yet, and of whole answers passed through; 0: unlimited
	Head           int           `yaml:"head_bytes"`
	Connections    int           `yaml:"connections"`
	PerIP          int           `yaml:"connections_per_ip"` // 0: unlimited
	ReadTimeout    time.Duration `yaml:"read_timeout"`       // first byte of a request to its last
	IdleTimeout    time.Duration `yaml:"idle_timeout"`       // keep-alive
	WriteTimeout   time.Duration `yaml:"write_timeout"`      // one write to a client that does not read
	ConnectTimeout time.Duration `yaml:"connect_timeout"`    // to an engine
	ProbeTimeout   time.Duration `yaml:"probe_timeout"`      // whole prefill; long prompts take minutes
	ProbeGrace     time.Duration `yaml:"probe_grace"`        // a prefill may still end this long after its client left; 0: it is aborted at once
	EventTimeout   time.Duration `yaml:"event_timeout"`      // between two events of a decode stream
	KeepAlive      time.Duration `yaml:"keep_alive"`         // a client that waits this long for an event gets a comment; 0: it gets none
	DrainGrace     time.Duration `yaml:"drain_grace"`        // SIGTERM: /readyz is false this long before requests are refused
	DrainTimeout   time.Duration `yaml:"drain_timeout"`      // then streams may finish this long
	EventBytes     int           `yaml:"event_bytes"`
	AnswerBytes    int           `yaml:"answer_bytes"` // of the events from which an answer that is not streamed is built
	// memory for bodies and token ids of running requests, from which they can be resumed
	ResumeBytes  int      `yaml:"resume_bytes"`
	ChatTemplate bool     `yaml:"allow_chat_template"`
	MediaHosts   []string `yaml:"media_hosts"` // hosts that media URLs (http, https) may name; others are refused

	// The first three are per request, PassedThrough is for all requests together.
	Answers          int `yaml:"answers"` // to all its prompts together
	AnswersPerPrompt int `yaml:"answers_per_prompt"`
	StopStrings      int `yaml:"stop_strings"`
	PassedThrough    int `yaml:"passed_through"`

	// ClientLag and ClientBacklog are constants except in tests. All writes of one answer together may wait this long for its client,
	// because a slow client keeps its slot from others. The backlog holds about a thousand events for a client that reads too slowly; the
	// kernel would hold megabytes.
	ClientLag     time.Duration `yaml:"-"`
	ClientBacklog int           `yaml:"-"`
}

// Log is what the proxy writes, and where.
type Log struct {
	Level    string `yaml:"level"`
	Requests string `yaml:"requests"` // JSON lines, one a request; "-" is stdout, empty is off
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
	c.Prefill.Policy = ""                                         // finish chooses it by the engines
	c.Prefill.Calibration.TPMs, c.Prefill.Calibration.T0Ms = 0, 0 // no calibration is assumed
	return c
}

// Decision returns dispatch, completed with those values of other keys that the dispatcher needs.
func (c *Config) Decision() dispatcher.Config {
	d := c.Dispatch
	d.Predictor, d.TTL, d.BindAhead = c.Predictor, c.Pool.TTL, c.Bind.Beyond()
	return d
}

// DefaultProfile is the profile of an engine that names none. It exists even if the file does not define it.
const DefaultProfile = "ascend"

// DefaultAggregated is the default profile of engines that prefill and decode.
const DefaultAggregated = "aggregated"

// ProfilesInUse returns the profiles that an engine of a role may have; an empty role stands for all roles. Discovered engines may name any
// profile that the file defines.
func (c *Config) ProfilesInUse(role string) []string {
	used := map[string]bool{}
	note := func(ofRole, profile string) {
		if role == "" || ofRole == role || ofRole == "" || ofRole == "both" {
			used[profile] = true
		}
	}
	for ofRole, e := range c.Engines.All() {
		note(ofRole, e.Profile)
	}
	for _, d := range c.Discovery.DNS {
		note(d.Role, d.Profile)
	}
	for _, k := range c.Discovery.Kubernetes {
		note(k.Role, cmp.Or(k.Profile, DefaultProfile)) // an aggregated pod without a profile gets DefaultAggregated
	}
	if len(c.Discovery.Files)+len(c.Discovery.Kubernetes) > 0 {
		pairsWritten := false // the file defines a profile for engine pairs other than the default
		for name, p := range c.Profiles {
			switch pairs := p.Connector != mooncake.None; {
			case name == DefaultProfile:
			case name == DefaultAggregated:
				if role == "aggregated" {
					used[name] = true
				}
			case pairs || role == "" || role == "aggregated":
				used[name] = true
				pairsWritten = pairsWritten || pairs
			}
		}
		if !pairsWritten {
			used[DefaultProfile] = true
		}
	}
	return slices.Sorted(maps.Keys(used))
}

// On says whether there is anything to discover.
func (d *Discovery) On() bool { return len(d.Files)+len(d.DNS)+len(d.Kubernetes) > 0 }
