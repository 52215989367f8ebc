// Package detect finds what is wrong with a proxy. It receives facts about the proxy, keeps samples
// of the last hour, and groups its findings into incidents, one per cause. It has no clock, log or
// lock: its owner, gateway/watch, has these.
package detect

import (
	"iter"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/advice"
)

// Facts is the state of a proxy at one instant: the input of all detectors, and the content of the
// live page. Names of fields end in their unit: Ms, S, Tokens, PerS. A Share is between 0 and 1. A
// field whose JSON name is "-" is an input of detectors and is not shown. Fields marked with
// (found) are filled in by Watch.
type Facts struct {
	At      time.Time `json:"-"`
	Proxy   Proxy     `json:"proxy"`
	Traffic Traffic   `json:"traffic"`
	// (found) by outcome, the most in the last 10 s first; empty: none since the start
	Failures []Failed `json:"failures"`
	Models   []Model  `json:"models"`
	Prefill  Prefill  `json:"prefill"`
	// per API key, the largest count first; empty if no receipts are kept
	Waiting []Waiting `json:"waiting"`
	// in the order of the config, then those that were added later
	Engines []Engine        `json:"engines"`
	Advice  []advice.Advice `json:"advice"` // one entry per model; empty: none yet, or advice is off
	Geo     *Geo            `json:"geo,omitempty"`
	Sources []Source        `json:"sources"` // of discovered engines; empty: discovery is off
	// groups or regions whose engines this proxy may serve; empty: no other proxy may
	Scopes []Scope `json:"areas"`
}

// Proxy has the facts about the proxy's own process.
type Proxy struct {
	ID     string `json:"id"` // geo.self.id, else the name of the host
	Region string `json:"region,omitempty"`
	// owner or standby; empty: no other proxy serves the same engines
	Role     string  `json:"role,omitempty"`
	Version  string  `json:"version"`
	UptimeS  float64 `json:"uptime_s"`
	Ready    bool    `json:"ready"`
	Why      string  `json:"why,omitempty"` // why it is not ready; empty: it is
	Draining bool    `json:"draining"`
	// why the last version of the config file is not in force
	ConfigError string `json:"config_error,omitempty"`
	// Unix time when a changed config came into force; 0: never
	ReloadedMs    int64  `json:"reloaded_ms"`
	Policy        string `json:"policy"` // of groups whose ranks step together
	PrefillPolicy string `json:"prefill_policy"`
	Open          int64  `json:"open_requests"`
	// limit of prefills that run, or have finished and wait for a decode rank
	Places     int `json:"pool_places"`
	PlacesUsed int `json:"pool_places_used"`
	// by which the audit found the accounts to be wrong; any but 0 is a bug
	DriftSlots  int64 `json:"audit_drift_slots"`
	DriftTokens int64 `json:"audit_drift_tokens"`

	Certificates []Certificate `json:"certificates,omitempty"` // of the listeners with TLS
	Own          Own           `json:"-"`                      // (found)
}

// Own is what the proxy measured of itself in the last 20 seconds.
type Own struct {
	LateShare float64 // by how much its timers fired late, as a share of the time
	LatestMs  float64 // by how much the latest timer was late
	UsedCores float64 // processors that it used in the mean
	Cores     int     // processors that it may use; 0: nothing was measured
}

// Certificate is the TLS certificate of a listener.
type Certificate struct {
	Key   string  `json:"key"`    // tls, admin.tls or geo.tls
	EndsS float64 `json:"ends_s"` // seconds until the certificate expires; below 0: it has expired
}

// Traffic is the service that clients get. Latencies cover the last minute.
type Traffic struct {
	Rates // (found)
	// host on which nearly all requests that failed in the last minute had a failed attempt
	FailedOn string  `json:"failed_on,omitempty"`
	TTFT     Latency `json:"ttft"`
	TPOT     Latency `json:"tpot"` // time per output token: one sample per request, when it ends
}

// Rates are means per second over the last ten seconds.
type Rates struct {
	RequestsPerS float64 `json:"requests_per_s"` // requests that ended
	// ended requests with a 5xx, a 429 or an error event
	FailuresPerS float64 `json:"failures_per_s"`
	// failures that were caused by a limit of the caller's key
	ByKeyLimitPerS float64 `json:"-"`
	TokensPerS     float64 `json:"tokens_per_s"` // output tokens
	// no request failed for 3 s, and enough succeeded to say that the fault is over
	Recovered bool `json:"recovered,omitempty"`
}

// Latency has percentiles of a latency over the last minute.
type Latency struct {
	P50Ms   float64 `json:"p50_ms"`
	P99Ms   float64 `json:"p99_ms"`
	Samples int     `json:"samples"` // measured requests; 0: the latencies are not known
}

// Outcome is a way in which requests fail: a name from a fixed set, and the HTTP status.
type Outcome struct {
	Name   string
	Status int
}

// Why is the reason of a failure, for operators.
type Why struct {
	Text       string
	ByKeyLimit bool // by a limit of one API key
	At         time.Time
}

// Failed counts the requests that failed in one way.
type Failed struct {
	Outcome    string `json:"outcome"`
	Status     int    `json:"status"`
	Last10S    uint64 `json:"last_10_s"`
	LastMinute uint64 `json:"last_minute"`
	Last5Min   uint64 `json:"last_5_min"`
	LastHour   uint64 `json:"last_hour"`
	SinceStart uint64 `json:"since_start"`
	Why        string `json:"why,omitempty"` // of the last such failure, for operators
	ByKeyLimit bool   `json:"-"`             // Why is a limit of one API key: other keys are served
}

// Model has the ranks that serve a model, and the pool in front of them. A model with both decode
// ranks and aggregated ranks has two entries, because each kind has its own pool.
type Model struct {
	// followed by (aggregated) if its ranks prefill and decode
	Name       string `json:"name"`
	Aggregated bool   `json:"aggregated,omitempty"` // each rank prefills and decodes
	// (found) for how long there was no free slot or no KV memory while about as many requests waited
	// as ran; 0: not now, or not for long
	CrowdedS float64 `json:"-"`
	Pool     Pool    `json:"pool"`
	// those that lose hand-offs
	Pairs []board.PairStatus `json:"pairs,omitempty"`
	// since when hand-offs are lost and none arrives; zero: some arrive, or none is lost
	NoneArriveSince time.Time `json:"-"`
	Groups          []Group   `json:"groups"`
}

// Pool has the finished prefills that wait for a decode rank, or the requests that wait for an
// aggregated one.
type Pool struct {
	Entries int     `json:"entries"`
	OldestS float64 `json:"oldest_s"`
	// how long an entry may wait; 0: only the deadline of its hand-off limits it
	TTLS  float64   `json:"ttl_s"`
	UpToS []float64 `json:"up_to_s"` // upper bounds of the age classes in Ages
	Ages  []int     `json:"ages"`    // entries in each age class; the last one has no upper bound
}

// Group has the ranks that step together, or all ranks of a model that have no barrier.
type Group struct {
	board.GroupLoads
	Rounds *board.RoundStatus `json:"-"` // nil if the ranks do not prefill

	// pool entries that the policy held back for a later round, although a slot was free
	Held    int     `json:"held_entries"`
	StepMs  float64 `json:"step_ms"`            // measured mean of the last steps; 0: unknown
	TokenMs float64 `json:"token_ms,omitempty"` // (found) median of the ranks; 0: none has one
	// (found) length of a step at the present load in the last hour; 0: steps are not slow now
	UsualMs float64 `json:"usual_ms,omitempty"`
	// (found) for how long steps have been slow; 0: they are not
	SlowStepsS float64 `json:"slow_s,omitempty"`
	// (found) while steps are slow: gauges far above those of the other ranks, the farthest first
	Differing []Differs `json:"differ,omitempty"`
	// (found) tokens per step and answer: above 1 with speculative decoding
	StepTokens float64 `json:"step_tokens,omitempty"`
	// (found) step_tokens in the last hour; 0: steps do not give far fewer now
	UsualTokens float64 `json:"usual_step_tokens,omitempty"`
	// (found) for how long steps have given few tokens; 0: they do not
	FewTokensS float64 `json:"few_s,omitempty"`
	// step length at the present loads by the step model; 0: no model
	ModelMs   float64 `json:"model_ms"`
	ModelWhy  string  `json:"model_why,omitempty"` // why there is no step model
	LostShare float64 `json:"lost_share"`          // the part of model_ms that imbalance costs
	LostMs    float64 `json:"lost_ms"`
	// mean time that a rank waits for the other ranks before a step, measured by its engine between
	// the last two readings; 0: not known, or no step
	SyncWaitMs float64   `json:"sync_wait_ms,omitempty"`
	StepModel  StepModel `json:"-"`
	// time that a computed prompt token costs the slowest rank, by the step model; 0: unknown
	PromptTokenMs float64   `json:"-"`
	Ranks         []Rank    `json:"ranks"`
	Gauges        []*Gauges `json:"-"` // by index in Ranks; nil: not known
}

// StepModel predicts a step: BaseMs, plus PerTokenMs per KV token and PerRequestMs per request of
// the fullest rank. If these could not be learned, because steps hardly depend on the load, BaseMs
// is a step that was measured at one load, and the others are 0.
type StepModel struct {
	BaseMs, PerTokenMs, PerRequestMs float64

	MeasuredTokens  int64 // of the fullest rank at the measured step; 0: the model was learned
	MeasuredRunning int   // of the rank with the most requests
}

// ms: where only one load was measured, a step at a larger load may take longer, at most in
// proportion (longestMs).
func (m StepModel) ms(tokens int64, running int) (ms, longestMs float64) {
	ms = m.BaseMs + m.PerTokenMs*float64(tokens) + m.PerRequestMs*float64(running)
	if m.MeasuredTokens == 0 { // learned, so it holds at every load
		return ms, ms
	}
	tokenGrowth := float64(tokens) / float64(m.MeasuredTokens)
	requestGrowth := float64(running) / float64(max(1, m.MeasuredRunning))
	return ms, ms * max(1, tokenGrowth, requestGrowth)
}

// Gauges are what an engine reports of one rank; below 0: not known.
type Gauges struct {
	Running, Waiting float64 // requests
	KVShare          float64
	Preempted        float64 // requests that were preempted since the previous reading
	// prompt tokens computed since the previous reading, because their KV did not come
	Computed float64
}

// Differs is a gauge of a rank's engine that is far above the median of its group.
type Differs struct {
	Rank   string  `json:"rank"`
	Gauge  string  `json:"gauge"` // running, waiting, kv_share, preempted or computed_tokens
	Value  float64 `json:"value"`
	Median float64 `json:"median"`
	Says   string  `json:"says"` // the value and the median in words
}

// AnswerCounts counts complete answers of the last minute, or of five minutes if it had few.
type AnswerCounts struct {
	Answers uint64 `json:"answers"`
	Empty   uint64 `json:"empty_answers"` // answers that the engine ended without any text
}

// States of a rank.
const (
	RankUp       = "up"
	RankDraining = "draining" // by an operator or discovery
	RankOut      = "out"      // its engine answers, but it takes no requests
	RankDown     = "down"     // its engine does not answer, or has lost it
	RankRemoved  = "removed"  // it has left the fleet, but some of its requests still run
	RankForeign  = "foreign"  // another proxy serves it
)

// Rank is one data-parallel worker.
type Rank struct {
	ID   int32  `json:"id"`   // unique while the proxy runs; the history of the live page uses it
	Name string `json:"name"` // host:port; with several ranks, with /rank behind it
	// group of the engine in the config, of ranks that have no barrier and are of several groups: they
	// are one group here
	Group string `json:"group,omitempty"`
	State string `json:"state"`
	Why   string `json:"why,omitempty"` // why it takes no requests
	// takes part in the steps of its group; else no sum or mean includes it
	InSteps  bool  `json:"steps"`
	KVTokens int64 `json:"kv_tokens"`
	// the part of kv_tokens for prompts that are not computed yet, so no step reads it; the group's
	// sum includes it, but not the mean, the least and the most of its ranks
	Unread   int64 `json:"unread_kv_tokens,omitempty"`
	Capacity int64 `json:"capacity_tokens"` // 0: not known, or not limited
	Used     int   `json:"slots_used"`
	// that may be used now: fewer than all while the rank is new, none while it is not up
	Slots int `json:"slots"`
	// requests that decode; requests in the other used slots wait for their KV
	Running int    `json:"running"`
	Output  int64  `json:"output_tokens"` // since the proxy's start
	Answers uint64 `json:"answers"`       // complete ones, since the proxy's start
	// complete answers of the rank without any text, since the proxy's start
	Empty   uint64  `json:"empty_answers"`
	TokenMs float64 `json:"token_ms,omitempty"` // (found) mean of the last 20 s; 0: too few tokens
	// (found) mean token time in the 2 s spans of the last minute in which the rank was much slower
	// than the others; 0: too few spans
	SlowMs float64 `json:"-"`
	// (found) mean token time of the group's median rank in the spans of slow_ms
	OthersMs float64 `json:"-"`
	// the engine preempted requests, so the rank is kept emptier for a while
	Tight         bool         `json:"tight,omitempty"`
	RecentAnswers AnswerCounts `json:"lately"` // (found)
	// prompt tokens still to compute, if it prefills
	Backlog int64  `json:"backlog_tokens,omitempty"`
	Prompts uint64 `json:"prompts,omitempty"` // sent to it since the proxy's start, if it prefills
	// of ended answers, kept for the next turns of their chats; not part of kv_tokens
	Kept int64 `json:"kept_kv_tokens,omitempty"`
}

// Prefill has the facts about the prefill tier: the arrival queue, and the engines that compute
// prompts.
type Prefill struct {
	Policy string `json:"policy"`
	// in the arrival queue, without batch requests
	Waiting  int         `json:"waiting_requests"`
	Batch    BatchStatus `json:"batch"`
	QueueMax int         `json:"queue_max"`
	// interval in which engines are asked for their load; 0: never
	ScrapeEveryMs float64 `json:"scrape_every_ms"`
	// share of all prompt tokens since the start that were found in a prefix cache
	HitShare float64 `json:"hit_share"`
	// wait of a new prompt, for the slowest model; 0: unknown
	BacklogS float64 `json:"backlog_s"`
	// (found) for how long the backlog has been long; 0: it is not
	LongBacklogS float64 `json:"busy_s,omitempty"`
	// while the backlog is long: of the key with the most waiting requests
	Hits     *Hits           `json:"hits,omitempty"`
	Heaviest *Heaviest       `json:"-"` // nil: no key has any prompt tokens, or no receipts are kept
	Engines  []PrefillEngine `json:"engines"`
	Groups   []PrefillGroup  `json:"groups"` // of aggregated ranks, which take prompts, too
}

// BatchStatus counts batch requests, which run only on capacity that others leave free.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // since the proxy's start
	HeldS   float64 `json:"held_s"`       // total wait of ran_requests
}

// Hits says what share of an API key's prompt tokens was found in a prefix cache, in the last
// minute and before.
type Hits struct {
	Key    string  `json:"key"` // empty: callers without a key
	Share  float64 `json:"share"`
	Before float64 `json:"share_before"` // in the quarter of an hour before the last minute
}

// Heaviest is the API key with the most prompt tokens that prefill engines compute or hold.
type Heaviest struct {
	Key   string  // empty: callers without a key
	Share float64 // of the prompt tokens of all keys
	Mean  int     // tokens per prompt
}

// PrefillGroup is a group of ranks that prefill and decode, as the arrival queue sees it.
type PrefillGroup struct {
	ID string `json:"id"` // group with its model
	// open, out, unknown (models not known yet), down, removed
	State string `json:"state"`
	// requests that have left the arrival queue and have no first token yet
	Inflight int `json:"inflight_requests"`
}

// PrefillEngine is one prefill candidate: an engine, or one of its ranks.
type PrefillEngine struct {
	ID string `json:"id"`
	// open, closed (KV cache too full), out, unknown (models not known), down, removed
	State    string `json:"state"`
	Why      string `json:"why,omitempty"` // last failure, if state is out
	KVTokens int64  `json:"kv_tokens"`     // of this proxy's requests
	// KV tokens from which on the candidate gets no prompts; 0: its capacity is not known
	Budget int64 `json:"budget_tokens"`
	// share of the KV cache in use: the larger of the proxy's accounts and the engine's gauge
	KVShare float64 `json:"kv_share"`
	// KV share from which on the candidate gets no prompts
	GateShare float64 `json:"gate_share"`
	Inflight  int     `json:"inflight_requests"` // prompts without an answer
	// tokens of unanswered prompts that are still to be computed
	NewTokens  int64   `json:"queued_new_tokens"`
	Waiting    float64 `json:"waiting"`    // requests in the engine's own queue, as scraped
	Pooled     int     `json:"pooled"`     // finished prefills without a decode rank
	Dispatched int     `json:"dispatched"` // finished prefills whose KV a decode rank fetches
	// share of recent prompt tokens that were found in the candidate's prefix cache
	HitShare float64 `json:"hit_share"`
	// its hand-offs do not arrive, so it gets no prompts but a trial
	LosesHandoffs bool    `json:"loses_handoffs,omitempty"`
	ScrapeAgeMs   float64 `json:"scrape_age_ms"` // of the last metrics; -1: none were read yet
}

// Waiting counts the waiting requests of an API key.
type Waiting struct {
	Key      string `json:"key"` // empty: callers without a key, and all keys that are not listed
	Requests int    `json:"requests"`
}

const (
	prefillRole    = "prefill"
	decodeRole     = "decode"
	aggregatedRole = "aggregated"
)

// Engine describes an engine and its health.
type Engine struct {
	ID     string   `json:"id"`
	Role   string   `json:"role"`
	Models []string `json:"models"` // the first 16; if there are more, the last entry is "other"
	Group  string   `json:"group,omitempty"`
	// up, out, wedged (it computes nothing), halted, odd (its connector differs), down
	State string `json:"state"`
	Why   string `json:"why,omitempty"` // why it is not up, or what is wrong although it is
	// by POST /admin/fleet/call: it is halted, and why says since when
	Paused bool `json:"paused,omitempty"`
	// its port takes connections, but the last health check got no answer
	Hangs    bool    `json:"hangs,omitempty"`
	Moved    *Moved  `json:"-"`       // nil: its name always led to the same address
	SinceS   float64 `json:"since_s"` // in the present state
	Draining bool    `json:"draining"`
	// share of the engine's slots that may be used: below 1 while it is new in service
	Share   float64 `json:"share"`
	Ranks   int     `json:"ranks"`
	Version string  `json:"version,omitempty"`

	OwnedByOther bool `json:"-"` // only the owner of the region sends it requests

	ReadLate *ReadLate `json:"-"` // nil: none
}

// ReadLate says that decode engines have read KV that a prefill engine had freed already, as it
// counts itself.
type ReadLate struct {
	HandOffs float64 // since the start of its process
	AgoS     float64 // for how many seconds there was no further one
}

// Moved says that the name of an engine leads to a new address, and for how long it has done so.
type Moved struct {
	From, To string
	AgoS     float64
}

// Source is a source of discovery, such as Kubernetes, which lists engines.
type Source struct {
	Name    string `json:"name"`
	Engines int    `json:"engines"`         // in its last list
	Error   string `json:"error,omitempty"` // why it fails; its last list stays in force
	// engines of the last list that are not used, because they failed a trial
	Unfit []Unfit `json:"unfit"`
}

// Unfit is an engine that failed its trial before its first request.
type Unfit struct {
	ID   string `json:"id"`
	Role string `json:"role"`
	Why  string `json:"why"`
}

// Geo has the proxies of other regions, and the policy that chooses among regions.
type Geo struct {
	Policy string `json:"policy"`
	Peers  []Peer `json:"peers"`
}

// Peer is another region's proxy, to which this proxy may forward requests.
type Peer struct {
	ID       string  `json:"id"`
	Region   string  `json:"region"`
	Up       bool    `json:"up"`
	Draining bool    `json:"draining"`
	Fault    string  `json:"fault,omitempty"`
	RTTMs    float64 `json:"rtt_ms"`
	InFlight int     `json:"in_flight"`
	Circuit  string  `json:"circuit"` // closed (requests go there), or open
}

// Scope is a region, or a decode group of this region, whose engines this proxy may own.
type Scope struct {
	Region string `json:"region"`
	Group  string `json:"group,omitempty"` // empty: the whole region
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"` // this proxy may send requests there
	Holder string `json:"holder"` // id of the owner; empty: none
	Epoch  int64  `json:"epoch"`
}

func (f *Facts) groups() iter.Seq2[GroupName, *Group] {
	return func(yield func(GroupName, *Group) bool) {
		for i := range f.Models {
			m := &f.Models[i]
			for j := range m.Groups {
				if !yield(GroupName{m.Name, m.Groups[j].Name}, &m.Groups[j]) {
					return
				}
			}
		}
	}
}

func (g *Group) running() (requests int) {
	for i := range g.Ranks {
		requests += g.Ranks[i].Running
	}
	return requests
}

// ReplaceNilLists makes empty lists of nil ones, for which encoding/json writes null.
func (f *Facts) ReplaceNilLists() {
	replaceNil(&f.Failures)
	replaceNil(&f.Models)
	replaceNil(&f.Waiting)
	replaceNil(&f.Engines)
	replaceNil(&f.Advice)
	replaceNil(&f.Sources)
	replaceNil(&f.Scopes)
	replaceNil(&f.Prefill.Engines)
	replaceNil(&f.Prefill.Groups)
	for i := range f.Engines {
		replaceNil(&f.Engines[i].Models)
	}
	for i := range f.Sources {
		replaceNil(&f.Sources[i].Unfit)
	}
	for i := range f.Models {
		replaceNil(&f.Models[i].Groups)
		replaceNil(&f.Models[i].Pool.Ages)
	}
	for _, g := range f.groups() {
		replaceNil(&g.Ranks)
	}
	if f.Geo != nil {
		replaceNil(&f.Geo.Peers)
	}
}

func replaceNil[T any](l *[]T) {
	if *l == nil {
		*l = []T{}
	}
}
