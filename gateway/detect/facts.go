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
// live page. Names of fields end in their
// unit: Ms, S, Tokens, PerS. A Share is between 0 and 1. A field whose JSON name is "-" is an input of detectors and is not shown. Fields
// marked with (found) are filled in by Watch. ReplaceNilLists makes sure that no list is null in
// JSON.
type Facts struct {
	At       time.Time       `json:"-"`
	Proxy    Proxy           `json:"proxy"`
	Traffic  Traffic         `json:"traffic"`
	Failures []Failed        `json:"failures"` // (found) failures by outcome, the most in the last 10 s first; empty: none since the start
	Models   []Model         `json:"models"`
	Prefill  Prefill         `json:"prefill"`
	Waiting  []Waiting       `json:"waiting"` // waiting requests per API key, the largest count first; empty if no receipts are kept
	Engines  []Engine        `json:"engines"` // engines in the order of the config, then those that were added later
	Advice   []advice.Advice `json:"advice"`  // advice on the number of ranks, one entry per model; empty: none yet, or advice is off
	Geo      *Geo            `json:"geo,omitempty"`
	Sources  []Source        `json:"sources"` // sources of discovered engines; empty: discovery is off
	Scopes   []Scope         `json:"areas"`   // groups or regions whose engines this proxy may serve; empty: no other proxy may serve them
}

// Proxy has the facts about the proxy's own process.
type Proxy struct {
	ID            string  `json:"id"` // value of geo.self.id, else the name of the host
	Region        string  `json:"region,omitempty"`
	Role          string  `json:"role,omitempty"` // among the proxies of the same engines: owner or standby; empty: no other proxy serves them
	Version       string  `json:"version"`
	UptimeS       float64 `json:"uptime_s"`
	Ready         bool    `json:"ready"`
	Why           string  `json:"why,omitempty"` // why the proxy is not ready; empty: it is ready
	Draining      bool    `json:"draining"`
	ConfigError   string  `json:"config_error,omitempty"` // why the last version of the config file is not in force; empty: it is
	ReloadedMs    int64   `json:"reloaded_ms"`            // Unix time when a changed config last came into force; 0: never
	Policy        string  `json:"policy"`                 // decode policy of groups whose ranks step together
	PrefillPolicy string  `json:"prefill_policy"`
	Open          int64   `json:"open_requests"`
	Places        int     `json:"pool_places"` // limit of prefills that run or have finished and wait for a decode rank, together
	PlacesUsed    int     `json:"pool_places_used"`
	DriftSlots    int64   `json:"audit_drift_slots"` // slots by which the audit found the accounts to be wrong; any value but 0 is a bug
	DriftTokens   int64   `json:"audit_drift_tokens"`

	Certificates []Certificate `json:"certificates,omitempty"` // certificates of the listeners with TLS
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
	Key   string  `json:"key"`    // config key of the certificate: tls, admin.tls or geo.tls
	EndsS float64 `json:"ends_s"` // seconds until the certificate expires; below 0: it has expired
}

// Traffic is the service that clients get. Rates cover the last ten seconds, latencies the last
// minute.
type Traffic struct {
	Rates            // (found) rates over the last ten seconds
	FailedOn string  `json:"failed_on,omitempty"` // host on which nearly all requests that failed in the last minute had a failed attempt
	TTFT     Latency `json:"ttft"`
	TPOT     Latency `json:"tpot"` // time per output token: one sample for each request, when it ends
}

// Rates are means per second over the last ten seconds.
type Rates struct {
	RequestsPerS   float64 `json:"requests_per_s"`      // requests that ended
	FailuresPerS   float64 `json:"failures_per_s"`      // ended requests with a 5xx, a 429 or an error event
	ByKeyLimitPerS float64 `json:"-"`                   // failures that were caused by a limit of the caller's key
	TokensPerS     float64 `json:"tokens_per_s"`        // output tokens of all answers
	Recovered      bool    `json:"recovered,omitempty"` // no request failed for 3 s, and enough succeeded to say that the fault is over
}

// Latency has percentiles of a latency over the last minute.
type Latency struct {
	P50Ms   float64 `json:"p50_ms"`
	P99Ms   float64 `json:"p99_ms"`
	Samples int     `json:"samples"` // number of measured requests; 0: the latencies are not known
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
	Status     int    `json:"status"`    // status of the answer
	Last10S    uint64 `json:"last_10_s"` // failures in the last 10 s; the next fields count over longer times
	LastMinute uint64 `json:"last_minute"`
	Last5Min   uint64 `json:"last_5_min"`
	LastHour   uint64 `json:"last_hour"`
	SinceStart uint64 `json:"since_start"`
	Why        string `json:"why,omitempty"` // reason of the last such failure, for operators
	ByKeyLimit bool   `json:"-"`             // the reason (Why) is a limit of one API key: other keys are served
}

// Model has the ranks that serve a model, and the pool in front of them. A model that has both
// decode ranks and ranks that prefill and decode has two entries, because each of these kinds has a
// pool of its own.
type Model struct {
	Name       string `json:"name"`                 // name of the model, followed by (aggregated) if its ranks prefill and decode
	Aggregated bool   `json:"aggregated,omitempty"` // each rank of the model prefills and decodes
	// (found) for how many seconds the model has had no free slot or no KV memory while about as many
	// requests waited as ran; 0: not so now, or not for long
	CrowdedS float64 `json:"-"`
	Pool     Pool    `json:"pool"`
	// engines and pairs of engines that lose hand-offs
	Pairs []board.PairStatus `json:"pairs,omitempty"`
	// since when hand-offs are lost and none arrives; zero: some arrive, or none is lost
	NoneArriveSince time.Time `json:"-"`
	Groups          []Group   `json:"groups"`
}

// Pool has the finished prefills that wait for a decode rank, or the requests that wait for a rank
// that does both.
type Pool struct {
	Entries int       `json:"entries"`
	OldestS float64   `json:"oldest_s"`
	TTLS    float64   `json:"ttl_s"`   // seconds that an entry may wait; 0: only the deadline of its hand-off limits the wait
	UpToS   []float64 `json:"up_to_s"` // upper bounds of the age classes in Ages, in seconds
	Ages    []int     `json:"ages"`    // number of entries in each age class; the last class has no upper bound
}

// Group has the ranks that step together, or all ranks of a model that have no barrier.
type Group struct {
	board.GroupLoads
	Rounds *board.RoundStatus `json:"-"` // nil if the ranks of the group do not prefill

	Held    int     `json:"held_entries"`       // pool entries that the policy held back for a later round, although a slot was free
	StepMs  float64 `json:"step_ms"`            // measured mean length of the last steps; 0: unknown
	TokenMs float64 `json:"token_ms,omitempty"` // (found) median of the ranks' token_ms; 0: no rank has one
	// (found) how long a step took at the present load in the last hour; 0: steps are not much longer
	// now
	UsualMs    float64 `json:"usual_ms,omitempty"`
	SlowStepsS float64 `json:"slow_s,omitempty"` // (found) for how many seconds steps have been slow; 0: they are not
	// (found) while steps are slow: ranks with gauges far above those of the other ranks, the farthest
	// first
	Differing   []Differs `json:"differ,omitempty"`
	StepTokens  float64   `json:"step_tokens,omitempty"`       // (found) tokens per step and answer: above 1 with speculative decoding
	UsualTokens float64   `json:"usual_step_tokens,omitempty"` // (found) step_tokens in the last hour; 0: steps do not give far fewer now
	FewTokensS  float64   `json:"few_s,omitempty"`             // (found) for how many seconds steps have given few tokens; 0: they do not
	ModelMs     float64   `json:"model_ms"`                    // step length at the present loads by the step model; 0: no model
	ModelWhy    string    `json:"model_why,omitempty"`         // why there is no step model
	LostShare   float64   `json:"lost_share"`                  // the part of model_ms that imbalance costs
	LostMs      float64   `json:"lost_ms"`                     // the part of model_ms that imbalance costs
	// mean time that a rank waits for the other ranks before a step, measured by its engine between
	// the last two readings; 0: not known, or no step
	SyncWaitMs    float64   `json:"sync_wait_ms,omitempty"`
	StepModel     StepModel `json:"-"`
	PromptTokenMs float64   `json:"-"` // time that a computed prompt token costs the slowest rank, by the step model; 0: unknown
	Ranks         []Rank    `json:"ranks"`
	Gauges        []*Gauges `json:"-"` // for each entry of Ranks, the gauges that its engine reports; nil: not known
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
	Gauge  string  `json:"gauge"` // running, waiting, kv_share, preempted or computed_tokens; the last two count since the previous reading
	Value  float64 `json:"value"`
	Median float64 `json:"median"`
	Says   string  `json:"says"` // the value and the median in words
}

// AnswerCounts counts the complete answers of a rank in the last minute, or in the last five
// minutes if the minute had few.
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

// Rank is one data-parallel worker. It takes requests while it is up.
type Rank struct {
	ID   int32  `json:"id"`   // unique while the proxy runs; the history of the live page uses it
	Name string `json:"name"` // host:port; if there are several ranks, with /rank behind it
	// group of the engine in the config, of ranks that have no barrier and are of several groups: they
	// are one group here
	Group string `json:"group,omitempty"`
	State string `json:"state"`
	Why   string `json:"why,omitempty"` // why the rank takes no requests; empty: it takes requests
	// the rank takes part in the steps of its group; false: its engine is down or the rank is removed,
	// so no sum or mean includes it
	InSteps  bool  `json:"steps"`
	KVTokens int64 `json:"kv_tokens"`
	// the part of kv_tokens for prompts that are not computed yet, so no step reads it; the sum of the
	// group's KV tokens includes this part, but the mean, the least and the most KV tokens of its
	// ranks do not
	Unread   int64 `json:"unread_kv_tokens,omitempty"`
	Capacity int64 `json:"capacity_tokens"` // KV tokens that the rank can hold; 0: not known, or not limited
	Used     int   `json:"slots_used"`
	// slots that may be used now: fewer than all while the rank is new in service, none while it is
	// not up
	Slots   int     `json:"slots"`
	Running int     `json:"running"`            // requests that decode; requests in the other used slots wait for their KV
	Output  int64   `json:"output_tokens"`      // output tokens of the rank since the proxy's start
	Answers uint64  `json:"answers"`            // complete answers of the rank since the proxy's start
	Empty   uint64  `json:"empty_answers"`      // complete answers of the rank without any text, since the proxy's start
	TokenMs float64 `json:"token_ms,omitempty"` // (found) mean time between two tokens of an answer in the last 20 s; 0: too few tokens
	// (found) mean token time in the 2 s spans of the last minute in which the rank was much slower
	// than the others; 0: too few spans
	SlowMs        float64      `json:"-"`
	OthersMs      float64      `json:"-"`                        // (found) mean token time of the group's median rank in the spans of slow_ms
	Tight         bool         `json:"tight,omitempty"`          // the engine preempted requests, so the rank is kept emptier for a while
	RecentAnswers AnswerCounts `json:"lately"`                   // (found) counts of the last minute, or of five minutes if it had few
	Backlog       int64        `json:"backlog_tokens,omitempty"` // prompt tokens that the rank still has to compute, if it prefills
	Prompts       uint64       `json:"prompts,omitempty"`        // prompts that were sent to the rank since the proxy's start, if it prefills
	// KV tokens of ended answers, which the engine keeps for the next turns of their chats; not part
	// of kv_tokens
	Kept int64 `json:"kept_kv_tokens,omitempty"`
}

// Prefill has the facts about the prefill tier: the arrival queue, and the engines that compute
// prompts.
type Prefill struct {
	Policy        string          `json:"policy"`
	Waiting       int             `json:"waiting_requests"` // requests in the arrival queue, without batch requests
	Batch         BatchStatus     `json:"batch"`
	QueueMax      int             `json:"queue_max"`
	ScrapeEveryMs float64         `json:"scrape_every_ms"`  // interval in which engines are asked for their load; 0: never
	HitShare      float64         `json:"hit_share"`        // share of all prompt tokens since the start that were found in a prefix cache
	BacklogS      float64         `json:"backlog_s"`        // wait of a new prompt for its prefill, for the slowest model; 0: unknown
	LongBacklogS  float64         `json:"busy_s,omitempty"` // (found) for how many seconds the backlog has been long; 0: it is not
	Hits          *Hits           `json:"hits,omitempty"`   // while the backlog is long: hits of the key with the most waiting requests
	Heaviest      *Heaviest       `json:"-"`                // key with the most prompt tokens; nil: none has any, or no receipts are kept
	Engines       []PrefillEngine `json:"engines"`
	Groups        []PrefillGroup  `json:"groups"` // groups of aggregated ranks, which take prompts, too
}

// BatchStatus counts batch requests, which run only on capacity that other requests leave free.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // batch requests that were let through since the proxy's start
	HeldS   float64 `json:"held_s"`       // total wait of the requests in ran_requests, in s
}

// Hits says what share of an API key's prompt tokens was found in a prefix cache, in the last
// minute and before.
type Hits struct {
	Key    string  `json:"key"` // name of the API key; empty: callers without a key
	Share  float64 `json:"share"`
	Before float64 `json:"share_before"` // the same share in the quarter of an hour before the last minute
}

// Heaviest is the API key with the most prompt tokens that prefill engines compute or hold.
type Heaviest struct {
	Key   string  // empty: callers without a key
	Share float64 // of the prompt tokens of all keys
	Mean  int     // tokens per prompt
}

// PrefillGroup is a group of ranks that prefill and decode, as the arrival queue sees it.
type PrefillGroup struct {
	ID       string `json:"id"`                // name of the group, with its model
	State    string `json:"state"`             // open, out, unknown (the models are not known yet), down, removed
	Inflight int    `json:"inflight_requests"` // requests that have left the arrival queue and have no first token yet
}

// PrefillEngine is one prefill candidate: an engine, or one of its ranks.
type PrefillEngine struct {
	ID         string  `json:"id"`                // host:port/rank
	State      string  `json:"state"`             // open, closed (KV cache too full), out, unknown (models not known), down, removed
	Why        string  `json:"why,omitempty"`     // the last failure, if state is out
	KVTokens   int64   `json:"kv_tokens"`         // KV tokens that this proxy's requests hold on the candidate
	Budget     int64   `json:"budget_tokens"`     // KV tokens from which on the candidate gets no prompts; 0: its capacity is not known
	KVShare    float64 `json:"kv_share"`          // share of the KV cache in use: the larger of the proxy's accounts and the engine's gauge
	GateShare  float64 `json:"gate_share"`        // KV share from which on the candidate gets no prompts
	Inflight   int     `json:"inflight_requests"` // prompts that were sent to the candidate and have no answer yet
	NewTokens  int64   `json:"queued_new_tokens"` // tokens of unanswered prompts that are still to be computed
	Waiting    float64 `json:"waiting"`           // requests in the engine's own queue, as scraped
	Pooled     int     `json:"pooled"`            // finished prefills that have no decode rank yet
	Dispatched int     `json:"dispatched"`        // finished prefills that were sent to a decode rank, which fetches their KV
	HitShare   float64 `json:"hit_share"`         // share of recent prompt tokens that were found in the candidate's prefix cache
	// its hand-offs do not arrive, so it gets no prompts but a trial
	LosesHandoffs bool    `json:"loses_handoffs,omitempty"`
	ScrapeAgeMs   float64 `json:"scrape_age_ms"` // age of the last metrics that were read, in ms; -1: none were read yet
}

// Waiting counts the waiting requests of an API key.
type Waiting struct {
	Key      string `json:"key"` // name of the key; empty: callers without a key, and the sum of all keys that are not listed
	Requests int    `json:"requests"`
}

const (
	prefillRole    = "prefill"
	decodeRole     = "decode"
	aggregatedRole = "aggregated"
)

// Engine describes an engine and its health.
type Engine struct {
	ID       string   `json:"id"` // host:port
	Role     string   `json:"role"`
	Models   []string `json:"models"` // the first 16 names; if there are more, the last entry is "other"
	Group    string   `json:"group,omitempty"`
	State    string   `json:"state"`            // up, out, wedged (it computes nothing), halted, odd (its connector differs), down
	Why      string   `json:"why,omitempty"`    // why the engine is not up, or what is wrong although it is up
	Paused   bool     `json:"paused,omitempty"` // paused by POST /admin/fleet/call: the engine is halted, and why says since when
	Hangs    bool     `json:"hangs,omitempty"`  // the engine's port takes connections, but the last health check got no answer
	Moved    *Moved   `json:"-"`                // last change of the engine's address; nil: its name always led to the same one
	SinceS   float64  `json:"since_s"`          // for how many seconds the engine has been in its present state
	Draining bool     `json:"draining"`
	Share    float64  `json:"share"` // share of the engine's slots that may be used: below 1 while it is new in service
	Ranks    int      `json:"ranks"`
	Version  string   `json:"version,omitempty"`

	OwnedByOther bool `json:"-"` // another proxy owns the engine's region, and only that proxy sends it requests

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
	Name    string  `json:"name"`
	Engines int     `json:"engines"`         // number of engines in the source's last list
	Error   string  `json:"error,omitempty"` // why the source fails; its last list stays in force
	Unfit   []Unfit `json:"unfit"`           // engines of the source's last list that are not used, because they failed a trial
}

// Unfit is an engine that failed its trial before its first request.
type Unfit struct {
	ID   string `json:"id"` // host:port
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

// Scope is a region, or a decode group of this proxy's region, whose engines this proxy may own.
type Scope struct {
	Region string `json:"region"`
	Group  string `json:"group,omitempty"` // name of the decode group; empty: the scope is the whole region
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"` // this proxy may send requests to the scope's engines
	Holder string `json:"holder"` // id of the proxy that owns the scope; empty: no proxy does
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
