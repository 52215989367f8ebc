// Package detect finds what is wrong with a proxy. It receives facts about the proxy, keeps samples of the last hour, and
// groups its findings into incidents, one per cause. It has no clock, log or lock: its owner, gateway/watch, has these.
package detect

import (
	"iter"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/advice"
)

// Facts is the state of a proxy at one instant: the input of all detectors, and the content of the live page. Names of fields end
// in their unit: Ms, S, Tokens, PerS. A Share is between 0 and 1. A field without a JSON name is an input of detectors and is
// not shown. Fields marked with (found) are filled in by Watch. Listed makes sure that no list is null in JSON.
type Facts struct {
	At       time.Time       `json:"-"`
	Proxy    Proxy           `json:"proxy"`
	Traffic  Traffic         `json:"traffic"`
	Failures []Failed        `json:"failures"` // (found) failures by outcome, the latest first; empty: none since the start
	Models   []Model         `json:"models"`
	Prefill  Prefill         `json:"prefill"`
	Waiting  []Waiting       `json:"waiting"` // waiting requests per API key, the largest count first; empty if no receipts are kept
	Engines  []Engine        `json:"engines"` // in the order of the config, then those that were added later
	Advice   []advice.Advice `json:"advice"`  // advice on the number of ranks, one entry per model; empty: none yet, or advice is off
	Geo      *Geo            `json:"geo,omitempty"`
	Sources  []Source        `json:"sources"` // sources of discovered engines; empty: discovery is off
	Scopes   []Scope         `json:"areas"`   // the groups or regions whose engines this proxy may serve; empty if no other proxy may serve them
	Twin     bool            `json:"-"`       // for some group, the twin replays the load under another policy
}

// Proxy is the process itself.
type Proxy struct {
	ID            string  `json:"id"` // geo.self.id, else the host's name
	Region        string  `json:"region,omitempty"`
	Role          string  `json:"role,omitempty"` // among the proxies that serve the same engines: owner or standby; empty: it is alone
	Version       string  `json:"version"`
	UptimeS       float64 `json:"uptime_s"`
	Ready         bool    `json:"ready"`
	Why           string  `json:"why,omitempty"` // why it is not ready
	Draining      bool    `json:"draining"`
	ConfigError   string  `json:"config_error,omitempty"` // why the last version of the config file is not in force
	ReloadedMs    int64   `json:"reloaded_ms"`            // Unix time when a changed config last came into force; 0: never
	Policy        string  `json:"policy"`                 // decode policy of barrier groups
	PrefillPolicy string  `json:"prefill_policy"`         // prefill policy
	Open          int64   `json:"open_requests"`
	Places        int     `json:"pool_places"` // limit of finished prefills, including prefills that still run
	PlacesUsed    int     `json:"pool_places_used"`
	DriftSlots    int64   `json:"audit_drift_slots"` // difference found by the audit of the accounts; any value but 0 is a bug
	DriftTokens   int64   `json:"audit_drift_tokens"`

	Certificates []Certificate `json:"certificates,omitempty"` // of listeners with TLS
}

// Certificate is the TLS certificate of a listener.
type Certificate struct {
	Key   string  `json:"key"`    // key of the config: tls, admin.tls or geo.tls
	EndsS float64 `json:"ends_s"` // seconds until it expires; below 0: it has expired
}

// Traffic is the service that clients get. Rates cover the last ten seconds, latencies the last minute.
type Traffic struct {
	Rates            // (found)
	FailedOn string  `json:"failed_on,omitempty"` // host on which nearly all requests that failed in the last minute had a failed attempt
	TTFT     Latency `json:"ttft"`
	TPOT     Latency `json:"tpot"` // one sample for each request, when it ends
}

// Rates cover the last ten seconds.
type Rates struct {
	RequestsPerS   float64 `json:"requests_per_s"`      // requests that ended
	FailuresPerS   float64 `json:"failures_per_s"`      // ended requests with a 5xx, a 429 or an error event
	ByKeyLimitPerS float64 `json:"-"`                   // failures that were caused by a limit of the caller's key
	TokensPerS     float64 `json:"tokens_per_s"`        // generated
	Recovered      bool    `json:"recovered,omitempty"` // no request failed for 3 s, and enough succeeded to say that the fault is over
}

// Latency covers the last minute.
type Latency struct {
	P50Ms   float64 `json:"p50_ms"`
	P99Ms   float64 `json:"p99_ms"`
	Samples int     `json:"samples"` // 0: the latencies are not known
}

// Outcome is a way in which requests fail: a name from a fixed set, and the HTTP status.
type Outcome struct {
	Name   string
	Status int
}

// Why is the reason of a failure, for operators.
type Why struct {
	Text       string
	ByKeyLimit bool // a limit of one API key caused it
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
	Why        string `json:"why,omitempty"` // reason of the last one, for operators
	ByKeyLimit bool   `json:"-"`             // Why is a limit of one key: other keys are served
}

// Model has the ranks that serve a model, and the pool in front of them. A model that has both decode ranks and ranks that prefill and
// decode has two entries, because each of these kinds has a pool of its own.
type Model struct {
	Name       string `json:"name"`                 // followed by (aggregated) if its ranks prefill and decode
	Aggregated bool   `json:"aggregated,omitempty"` // its ranks prefill and decode
	// (found) how long it has had no free slot or KV memory while about as many requests waited as ran; 0: not now, or not for long
	CrowdedS float64 `json:"-"`
	Pool     Pool    `json:"pool"`
	Groups   []Group `json:"groups"`
}

// Pool has the finished prefills that wait for a decode rank, or the requests that wait for a rank that does both.
type Pool struct {
	Entries int       `json:"entries"`
	OldestS float64   `json:"oldest_s"`
	TTLS    float64   `json:"ttl_s"`   // how long an entry may wait; 0: only the limit of its hand-off counts
	UpToS   []float64 `json:"up_to_s"` // upper bounds of the age classes in Ages
	Ages    []int     `json:"ages"`    // number of entries in each age class; the last class has no upper bound
}

// Group has the ranks that step together, or all ranks of a model that have no barrier.
type Group struct {
	board.GroupLoads
	board.GroupReports `json:"-"`

	Held    int     `json:"held_entries"`       // pool entries that the policy held back for a later round, although a slot was free
	StepMs  float64 `json:"step_ms"`            // mean of the last steps, as measured; 0: unknown
	TokenMs float64 `json:"token_ms,omitempty"` // (found) median of the ranks' token_ms; 0: no rank has one
	// (found) how long a step took at the present load in the last hour; 0: steps are not much longer now
	UsualMs    float64 `json:"usual_ms,omitempty"`
	SlowStepsS float64 `json:"slow_s,omitempty"` // (found) for how long steps have been slow
	// (found) while steps are slow: ranks with gauges far above those of the other ranks, the farthest first
	Differing   []Differs `json:"differ,omitempty"`
	StepTokens  float64   `json:"step_tokens,omitempty"`       // (found) tokens per step and answer: above 1 with speculative decoding
	UsualTokens float64   `json:"usual_step_tokens,omitempty"` // (found) step_tokens in the last hour; 0: they are not far fewer now
	FewTokensS  float64   `json:"few_s,omitempty"`             // (found) for how long steps have given few tokens
	ModelMs     float64   `json:"model_ms"`                    // step length at the present loads by the step model; 0: there is no model
	ModelWhy    string    `json:"model_why,omitempty"`         // why there is no model
	LostShare   float64   `json:"lost_share"`                  // the part of model_ms that imbalance costs
	LostMs      float64   `json:"lost_ms"`                     // the part of model_ms that imbalance costs
	// mean time that a rank waits for the other ranks before a step, measured by its engine between the last two readings; 0: not
	// known, or no step
	SyncWaitMs    float64   `json:"sync_wait_ms,omitempty"`
	StepModel     StepModel `json:"-"`
	Source        string    `json:"-"` // source of the step model; empty: there is none
	PromptTokenMs float64   `json:"-"` // time that a computed prompt token costs the slowest rank, by the step model; 0: unknown
	Ranks         []Rank    `json:"ranks"`
	Gauges        []*Gauges `json:"-"` // gauges of each of Ranks, as its engine reports them; nil: not known
}

// StepModel predicts the length of a step: BaseMs, plus PerTokenMs per KV token and PerRequestMs per request of the fullest rank. If these
// three could not be learned, because steps hardly depend on the load, BaseMs is the length of a step that was measured at one load, and
// the other two are 0.
type StepModel struct {
	BaseMs, PerTokenMs, PerRequestMs float64 // all in ms

	MeasuredTokens  int64 // KV tokens of the fullest rank when the one step was measured; 0: the model was learned
	MeasuredRunning int   // requests of the rank with the most requests at that time
}

// ms returns how long a step takes by the model, and how long it may take at most, for the fullest rank's KV tokens and requests. Where
// only one load was measured, a step at a larger load may take longer, at most in proportion to the load.
func (m StepModel) ms(tokens int64, running int) (ms, most float64) {
	ms = m.BaseMs + m.PerTokenMs*float64(tokens) + m.PerRequestMs*float64(running)
	if m.MeasuredTokens == 0 {
		return ms, ms
	}
	return ms, ms * max(1, float64(tokens)/float64(m.MeasuredTokens), float64(running)/float64(max(1, m.MeasuredRunning)))
}

// Gauges are what an engine reports of one of its ranks. A value that is not known is below 0.
type Gauges struct {
	Running, Waiting float64 // requests
	KVShare          float64
	Preempted        float64 // requests, since the reading before
	Computed         float64 // prompt tokens it had to compute since the reading before, because the KV it was to get did not come
}

// Differs is a gauge of a rank's engine that is far above the median of its group.
type Differs struct {
	Rank   string  `json:"rank"`
	Gauge  string  `json:"gauge"` // running, waiting, kv_share, preempted or computed_tokens; the last two count since the reading before
	Value  float64 `json:"value"`
	Median float64 `json:"median"`
	Says   string  `json:"says"` // the same in words
}

// AnswerCounts counts the complete answers of a rank in the last minute, or in the last five minutes if the minute had few.
type AnswerCounts struct {
	Answers uint64 `json:"answers"`
	Empty   uint64 `json:"empty_answers"` // answers that the engine ended without any text
}

// States of a rank.
const (
	RankUp       = "up"
	RankDraining = "draining" // it takes no new requests, because an operator said so
	RankOut      = "out"      // its engine answers, but it takes no requests
	RankDown     = "down"     // its engine does not answer, or goes on without it
	RankRemoved  = "removed"  // it has left the fleet, and not all its requests have ended
	RankForeign  = "foreign"  // another dispatcher serves it
)

// Rank is one data-parallel worker. It takes requests while it is up.
type Rank struct {
	ID    int32  `json:"id"`   // unique while the process lives; the history of the live page uses it
	Name  string `json:"name"` // host:port; if there are several ranks, with /rank behind it
	State string `json:"state"`
	Why   string `json:"why,omitempty"` // why it takes no requests
	// the rank takes part in the steps of its group; false: its engine is down or the rank is removed, so no sum or mean includes it
	InSteps  bool  `json:"steps"`
	KVTokens int64 `json:"kv_tokens"`
	// part of kv_tokens: prompts that are not computed yet, so no step reads them; of the group's loads only the sum includes them
	Unread   int64 `json:"unread_kv_tokens,omitempty"`
	Capacity int64 `json:"capacity_tokens"` // 0: not known, or not limited
	Used     int   `json:"slots_used"`
	// slots that may be used now: fewer than all while the rank is new in service, none while it is not up
	Slots   int     `json:"slots"`
	Running int     `json:"running"`            // requests that decode; the other used slots wait for their KV
	Output  int64   `json:"output_tokens"`      // tokens of all its answers since the start
	Answers uint64  `json:"answers"`            // its complete answers since the start
	Empty   uint64  `json:"empty_answers"`      // complete answers that the engine ended without any text
	TokenMs float64 `json:"token_ms,omitempty"` // (found) mean time between two tokens of an answer in the last 20 s; 0: too few tokens
	// (found) mean token time in the 2 s spans of the last minute in which the rank was much slower than the others; 0: too few spans
	SlowMs        float64      `json:"-"`
	OthersMs      float64      `json:"-"`                        // (found) token time of the group's median rank in these spans
	Tight         bool         `json:"tight,omitempty"`          // its engine preempted requests, so it is kept emptier for a while
	RecentAnswers AnswerCounts `json:"lately"`                   // (found)
	Backlog       int64        `json:"backlog_tokens,omitempty"` // prompt tokens that it still has to compute, if it prefills
	Prompts       uint64       `json:"prompts,omitempty"`        // prompts that were sent to it since the start, if it prefills
	// KV of ended answers, kept for the next turns of their chats; not part of kv_tokens
	Kept int64 `json:"kept_kv_tokens,omitempty"`
}

// Prefill is the prefill tier.
type Prefill struct {
	Policy        string          `json:"policy"`
	Waiting       int             `json:"waiting_requests"` // in the arrival queue, without batch requests
	Batch         BatchStatus     `json:"batch"`
	QueueMax      int             `json:"queue_max"`
	ScrapeEveryMs float64         `json:"scrape_every_ms"`  // interval in which engines are asked for their load; 0: never
	HitShare      float64         `json:"hit_share"`        // share of all prompt tokens since the start that were found in a prefix cache
	BacklogS      float64         `json:"backlog_s"`        // longest wait over models of a new prompt for its prefill; 0: unknown
	LongBacklogS  float64         `json:"busy_s,omitempty"` // (found) for how long the backlog has been long
	Hits          *Hits           `json:"hits,omitempty"`   // while the backlog is long: of the key with the most waiting requests
	Heaviest      *Heaviest       `json:"-"`                // nil: the waiting requests have no prompt, or no receipts are kept
	Engines       []PrefillEngine `json:"engines"`
	Groups        []PrefillGroup  `json:"groups"` // groups of ranks that prefill and decode, because they take prompts, too
}

// BatchStatus counts batch requests, which run only on capacity that other requests leave free.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // since the start
	HeldS   float64 `json:"held_s"`       // total wait of these requests, in s
}

// Hits says what share of a key's prompt tokens was found in a prefix cache, now and before.
type Hits struct {
	Key    string  `json:"key"` // its name; empty: callers without a key
	Share  float64 `json:"share"`
	Before float64 `json:"share_before"` // in the quarter of an hour before the last minute
}

// Heaviest is the key with the most prompt tokens that prefill engines compute or hold.
type Heaviest struct {
	Key   string  // its name; empty: callers without a key
	Share float64 // its share of these tokens
	Mean  int     // mean number of tokens of its prompts
}

// PrefillGroup is a group of ranks that prefill and decode, as the arrival queue sees it.
type PrefillGroup struct {
	ID       string `json:"id"`                // the group, and its model
	State    string `json:"state"`             // open, out, unknown (its models), down, removed
	Inflight int    `json:"inflight_requests"` // requests that have left the arrival queue and have no first token yet
}

// PrefillEngine is one prefill candidate: an engine, or one of its ranks.
type PrefillEngine struct {
	ID          string  `json:"id"`                // host:port/rank
	State       string  `json:"state"`             // open, closed (its gate), out, unknown (its models), down, removed
	Why         string  `json:"why,omitempty"`     // if its state is out: the last failure
	KVTokens    int64   `json:"kv_tokens"`         // by the proxy's own accounts
	Budget      int64   `json:"budget_tokens"`     // KV tokens at which the gate closes; 0: the capacity is not known
	KVShare     float64 `json:"kv_share"`          // share of its cache in use: the larger of the proxy's accounts and the engine's gauge
	GateShare   float64 `json:"gate_share"`        // share at which the gate closes
	Inflight    int     `json:"inflight_requests"` // prompts sent to it without an answer yet
	NewTokens   int64   `json:"queued_new_tokens"` // tokens of these prompts that it still has to compute
	Waiting     float64 `json:"waiting"`           // requests in the engine's own queue, as scraped
	Pooled      int     `json:"pooled"`            // finished prompts that have no rank yet
	Dispatched  int     `json:"dispatched"`        // finished prompts on their way to a rank
	HitShare    float64 `json:"hit_share"`         // share of recent prompt tokens that were in its prefix cache
	ScrapeAgeMs float64 `json:"scrape_age_ms"`     // -1: never scraped
}

// Waiting counts the requests of a key that wait.
type Waiting struct {
	Key      string `json:"key"` // name of the key; empty: callers without a key, and the sum of all keys that are not listed
	Requests int    `json:"requests"`
}

// Roles of engines.
const (
	prefillRole    = "prefill"
	decodeRole     = "decode"
	aggregatedRole = "aggregated"
)

// Engine is an engine's health.
type Engine struct {
	ID       string   `json:"id"` // host:port
	Role     string   `json:"role"`
	Models   []string `json:"models"` // the first few; if there are more, the last entry is "other"
	Group    string   `json:"group,omitempty"`
	State    string   `json:"state"`            // up, out, wedged, halted, down
	Why      string   `json:"why,omitempty"`    // why it is not up, or what is wrong although it is up
	Paused   bool     `json:"paused,omitempty"` // paused by POST /admin/fleet/call: the engine is halted, and why says since when
	Hangs    bool     `json:"hangs,omitempty"`  // its port takes connections, but its last health check got no answer
	Moved    *Moved   `json:"-"`                // change of its address; nil: its name always led to the same one
	SinceS   float64  `json:"since_s"`          // for how long it has been in this state
	Draining bool     `json:"draining"`
	Share    float64  `json:"share"` // share of its slots that may be used: below 1 while the engine is new in service
	Ranks    int      `json:"ranks"`
	Version  string   `json:"version,omitempty"`
}

// Moved says that the name of an engine leads to a new address, and for how long it has done so.
type Moved struct {
	From, To string
	AgoS     float64
}

// Source is a source by which engines are discovered.
type Source struct {
	Name    string  `json:"name"`
	Engines int     `json:"engines"`         // in its last list
	Error   string  `json:"error,omitempty"` // why it fails; its last list stays in force
	Unfit   []Unfit `json:"unfit"`           // engines of this list that are not used
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

// Peer is another region's proxy.
type Peer struct {
	ID       string  `json:"id"`
	Region   string  `json:"region"`
	Up       bool    `json:"up"`
	Draining bool    `json:"draining"`
	Fault    string  `json:"fault,omitempty"`
	RTTMs    float64 `json:"rtt_ms"`
	InFlight int     `json:"in_flight"`
	Circuit  string  `json:"circuit"` // closed, or open
}

// Scope is a region, or a decode group of our own, whose engines this proxy may own.
type Scope struct {
	Region string `json:"region"`
	Group  string `json:"group,omitempty"` // empty: the whole region
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"` // this proxy may send requests to the scope's engines
	Holder string `json:"holder"` // id of the proxy that owns it; empty: no proxy does
	Epoch  int64  `json:"epoch"`
}

// groups returns all groups with their names.
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

// running is how many requests run on the ranks of a group.
func (g *Group) running() (n int) {
	for i := range g.Ranks {
		n += g.Ranks[i].Running
	}
	return n
}

// ReplaceNilLists replaces each nil list that is shown by an empty one, because JSON writes null for nil.
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

// replaceNil replaces a nil list by an empty one.
func replaceNil[T any](l *[]T) {
	if *l == nil {
		*l = []T{}
	}
}
