// Package live shows a proxy as it is now: one document that is the same for
// the page on the admin listener and for `evenkeel top`, sent once a second to
// those who watch, and the last minutes of what is worth seeing as a line.
//
// Who reads the stream: GET /live answers with events. The first is `history`,
// a History; from then on one `document` a second, a Document, whole each time,
// so that a reader keeps the last one and nothing else, and every five seconds a
// `strip`, a Strip, whole each time, too. GET /live?once answers with one Document,
// GET /live?at= with the Document of a moment of the last 15 minutes. With text, both answer with a page of text.
package live

import (
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/detect"
)

// Form is the number of this form of a Document. Fields may be added under it;
// one that changes its meaning or goes makes another.
const Form = 2

// Document is everything the page shows at one instant. Names end in their unit:
// _ms, _s, _tokens, _per_s; a _share is of 1. Lists are never null.
type Document struct {
	Form      int        `json:"form"`
	AtMs      int64      `json:"at_ms"`    // Unix, by the proxy's clock
	EveryMs   int64      `json:"every_ms"` // between two documents; after three of them without one, what is shown is old
	Proxy     Proxy      `json:"proxy"`
	Incidents []Incident `json:"incidents"` // what is wrong, by cause: those that last, the most harmful first, then those that were resolved in the last 15 minutes
	Failures  []Failed   `json:"failures"`  // how requests failed, by outcome; empty: none has since the start
	Traffic   Traffic    `json:"traffic"`
	Models    []Model    `json:"models"`
	Prefill   Prefill    `json:"prefill"`
	Waiting   []Waiting  `json:"waiting"`   // for prefill or for a rank, by key, the most first; empty where no receipts are kept
	Engines   []Engine   `json:"engines"`   // as configured, then as added
	Decisions []Decision `json:"decisions"` // the last ones, latest first
	Advice    []Advice   `json:"advice"`    // on the number of ranks, one a model; empty: none yet, or off
	Geo       *Geo       `json:"geo,omitempty"`
	Sources   []Source   `json:"sources"` // of engines that are discovered; empty where none are
	Scopes    []Scope    `json:"areas"`   // the groups or regions whose engines this proxy may serve; empty if no other proxy may serve them
}

// Incident is everything that one cause made wrong.
type Incident struct {
	ID       int          `json:"id"`      // while the process lives
	Kind     detect.Kind  `json:"kind"`    // also of evenkeel_incident
	State    detect.State `json:"state"`   // new, lasting, paused or over
	Subject  string       `json:"subject"` // what it was of first, as in evenkeel_incident; empty: the proxy
	Severity string       `json:"severity"`
	Panel    string       `json:"panel"`           // that shows more
	Headline string       `json:"headline"`        // the cause in a few words
	What     string       `json:"what"`            // the cause, a sentence
	Harm     string       `json:"harm,omitempty"`  // what clients have had since it began, in numbers, a sentence; empty: they notice nothing, or it is not known yet
	Where    []string     `json:"where"`           // names of engines, ranks, groups or models, the first ones; empty: the proxy
	Named    string       `json:"named"`           // the same with what they are, as sentences; empty: What names them
	Ranks    []string     `json:"ranks,omitempty"` // that What names beside Where, the first ones
	Count    int          `json:"count"`           // of them in all
	SinceMs  int64        `json:"since_ms"`
	UntilMs  int64        `json:"until_ms"`          // 0: it lasts
	LastMs   int64        `json:"last_ms"`           // when it was found last, of what comes and goes and is away for the moment; 0: it is so now
	Times    int          `json:"times"`             // how often it was: equal ones that are over and worth a look only are told as one, the last
	FirstMs  int64        `json:"first_ms"`          // since_ms of the first of them
	Clients  string       `json:"clients"`           // what they see of it
	Next     string       `json:"next"`              // what to do
	Command  string       `json:"command"`           // to copy; empty: there is none
	Runbook  string       `json:"runbook"`           // entry of the runbook; empty: there is none
	Crowded  bool         `json:"crowded,omitempty"` // many requests wait, as its cause or its effect
}

// Failed is how many requests failed in one way.
type Failed struct {
	Outcome    string `json:"outcome"`
	Status     int    `json:"status"`    // of the answer
	Last10S    uint64 `json:"last_10_s"` // of the last 10 s
	LastMinute uint64 `json:"last_minute"`
	Last5Min   uint64 `json:"last_5_min"`
	LastHour   uint64 `json:"last_hour"`
	SinceStart uint64 `json:"since_start"`
	Why        string `json:"why,omitempty"` // of the last one, for operators
	Own        bool   `json:"-"`             // that is a limit of one key: others are served
}

// Waiting is how many requests of a key wait.
type Waiting struct {
	Key      string `json:"key"` // its name; empty: callers without a key, and all the rest behind the first few
	Requests int    `json:"requests"`
}

// Lately are the whole answers of a rank in the last minute, or in the last five where those are few.
type Lately struct {
	Answers uint64 `json:"answers"`
	Empty   uint64 `json:"empty_answers"` // those that the engine ended without any text
}

// Hits are the shares of a key's prompt tokens that were in a prefix cache.
type Hits struct {
	Key    string  `json:"key"` // its name; empty: callers without a key
	Share  float64 `json:"share"`
	Before float64 `json:"share_before"` // in the quarter of an hour before the last minute
}

// Advice tells what to do about a model's ranks.
type Advice = advice.Advice

// Proxy is the process itself.
type Proxy struct {
	ID            string  `json:"id"` // geo.self.id, else the host's name
	Region        string  `json:"region,omitempty"`
	Role          string  `json:"role,omitempty"` // among the proxies that serve the same engines: owner or standby; empty: it is alone
	Version       string  `json:"version"`
	UptimeS       float64 `json:"uptime_s"`
	Ready         bool    `json:"ready"`
	Why           string  `json:"why,omitempty"` // not ready
	Draining      bool    `json:"draining"`
	ConfigError   string  `json:"config_error,omitempty"` // why the last version of the config file is not in force
	ReloadedMs    int64   `json:"reloaded_ms"`            // Unix, when another config came into force last; 0: never
	Policy        string  `json:"policy"`                 // of decode, barrier groups
	PrefillPolicy string  `json:"prefill_policy"`         // of prefill
	Open          int64   `json:"open_requests"`
	Places        int     `json:"pool_places"` // finished prefills there may be at once, those on their way included
	PlacesUsed    int     `json:"pool_places_used"`
	DriftSlots    int64   `json:"audit_drift_slots"` // anything but 0 is a bug
	DriftTokens   int64   `json:"audit_drift_tokens"`

	Certificates []Certificate `json:"certificates,omitempty"` // of listeners with TLS
}

// Certificate is what a listener presents to those who connect.
type Certificate struct {
	Key   string  `json:"key"`    // of the config: tls, admin.tls or geo.tls
	EndsS float64 `json:"ends_s"` // until then; below 0: it has ended
}

// Traffic is what clients get. Rates are of the last ten seconds, latencies of
// the last minute.
type Traffic struct {
	RequestsPerS float64 `json:"requests_per_s"`      // that ended
	FailuresPerS float64 `json:"failures_per_s"`      // of them, with a 5xx, a 429 or an error event
	Recovered    bool    `json:"recovered,omitempty"` // none failed for 3 s, and so many went well since then that some of them would have failed if it went on
	FailedOn     string  `json:"failed_on,omitempty"` // the host on which an attempt of nearly all requests failed that failed in the last minute
	TokensPerS   float64 `json:"tokens_per_s"`        // generated
	TTFT         Latency `json:"ttft"`
	TPOT         Latency `json:"tpot"` // one sample a request, when it ends
}

// Latency of the last minute.
type Latency struct {
	P50Ms   float64 `json:"p50_ms"`
	P99Ms   float64 `json:"p99_ms"`
	Samples int     `json:"samples"` // 0: nothing is known
}

// Model is one board: the ranks that serve a model and the pool in front of them. A model has a board for its decode ranks, and
// one for its ranks that prefill and decode.
type Model struct {
	Name       string  `json:"name"`                 // with (aggregated) behind it where its ranks prefill and decode
	Aggregated bool    `json:"aggregated,omitempty"` // its ranks prefill and decode
	Pool       Pool    `json:"pool"`
	Groups     []Group `json:"groups"`
}

// Pool is the finished prefills that wait for a decode rank, or the requests that wait for a rank that does both.
type Pool struct {
	Entries int       `json:"entries"`
	OldestS float64   `json:"oldest_s"`
	TTLS    float64   `json:"ttl_s"`   // they wait no longer; 0: no limit but the hand-off's own
	UpToS   []float64 `json:"up_to_s"` // bounds of the classes of Ages
	Ages    []int     `json:"ages"`    // entries of each class, and one more for the older ones
}

// Group is the ranks that step together, or all of a model that have no barrier.
type Group struct {
	board.GroupLoads
	Held            int              `json:"held_entries"`                // the last decision held for a round though they had a slot
	StepMs          float64          `json:"step_ms"`                     // measured, mean of the last steps; 0: unknown
	TokenMs         float64          `json:"token_ms,omitempty"`          // the median of the ranks' token_ms; 0: none has one
	UsualMs         float64          `json:"usual_ms,omitempty"`          // while steps take much longer than they did in the last hour: what a step at the present loads took then
	SlowS           float64          `json:"slow_s,omitempty"`            // and for how long that has been so
	Differ          []Differs        `json:"differ,omitempty"`            // and which ranks say of themselves what is far above what the others say, the farthest first
	StepTokens      float64          `json:"step_tokens,omitempty"`       // that a step gives to an answer: more than one with speculative decoding
	UsualTokens     float64          `json:"usual_step_tokens,omitempty"` // while that is much less than in the last hour: what it was then
	FewS            float64          `json:"few_s,omitempty"`             // and for how long that has been so
	ModelMs         float64          `json:"model_ms"`                    // a step at the present loads by the step model; 0: there is no model
	ModelWhy        string           `json:"model_why,omitempty"`         // there is no model
	LostShare       float64          `json:"lost_share"`                  // the part of model_ms that imbalance costs
	LostMs          float64          `json:"lost_ms"`                     // the part of model_ms that imbalance costs
	SyncWaitMs      float64          `json:"sync_wait_ms,omitempty"`      // that a rank waits for the others before a step by its engine's own clock, in the mean between the last two readings; 0: no engine tells it, or no step fell between them
	Rounds          *Rounds          `json:"rounds,omitempty"`            // nil where the ranks do not prefill
	Twin            Twin             `json:"twin"`
	Counterfactuals []Counterfactual `json:"ghosts"` // where other policies would have the line, the lowest first; empty while there is no verdict that claims a difference
	Ranks           []Rank           `json:"ranks"`
}

// Differs is a gauge of a rank's engine that is far above that of the middle rank of its group.
type Differs struct {
	Rank   string  `json:"rank"`
	Gauge  string  `json:"gauge"` // running, waiting, kv_share, preempted or computed_tokens; the last two since the reading before
	Value  float64 `json:"value"`
	Median float64 `json:"median"`
	Says   string  `json:"says"` // the same in words
}

// Rounds is how a group that prefills and decodes gets its prompts. A round of the last second is one by which Sent grew since the
// document before, and it went to the ranks whose Prompts grew.
type Rounds struct {
	Sent         uint64  `json:"sent"`          // so far; policies that know no rounds send none
	RanksFilled  float64 `json:"ranks_filled"`  // that had a prompt to compute when a round was sent, in the mean since the start
	PrefillShare float64 `json:"prefill_share"` // of all steps since the start, those in which a rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`   // of the ranks, in the latter: those that computed none
	HeldS        float64 `json:"held_s"`        // for how long the first of the held entries is held; 0: none is
	MaxHoldS     float64 `json:"max_hold_s"`    // the policy holds no request longer than this
	Says         string  `json:"says"`          // the same in words
}

// Twin is what the last minutes of a group would have been under other policies, in words and in numbers.
type Twin struct {
	Says    []string      `json:"says"`              // a sentence for each policy of dispatch.twin; empty while there is no verdict
	Note    string        `json:"note"`              // which minutes were replayed, and how far the replay is from what was; or why there is no verdict; empty without barrier
	Verdict *verdict.Twin `json:"verdict,omitempty"` // nil while there is none
}

// Counterfactual is where the fullest rank would stand under a policy that the twin replayed,
// by the step model: as much higher as its steps are longer.
type Counterfactual struct {
	Policy     string  `json:"policy"`
	MostTokens int64   `json:"most_tokens"`
	SavedMs    float64 `json:"saved_ms"` // how much longer its steps are; below 0: shorter
}

// States of a rank.
const (
	RankUp       = detect.RankUp
	RankDraining = detect.RankDraining
	RankOut      = detect.RankOut
	RankDown     = detect.RankDown
	RankRemoved  = detect.RankRemoved
	RankForeign  = detect.RankForeign
)

// Rank is one data-parallel worker. It takes requests when it is up.
type Rank struct {
	ID       int32   `json:"id"`   // while the process lives; History names it so
	Name     string  `json:"name"` // host:port, of several ranks with /rank behind it
	State    string  `json:"state"`
	Steps    bool    `json:"steps"` // it steps with its group; false: its engine is down or it is removed, and it counts in no sum or mean
	KVTokens int64   `json:"kv_tokens"`
	Unread   int64   `json:"unread_kv_tokens,omitempty"` // of KVTokens, those of prompts that are not computed yet: no step reads them, and they are not in the loads of the group but its sum
	Capacity int64   `json:"capacity_tokens"`            // 0: not known, or without limit
	Used     int     `json:"slots_used"`
	Slots    int     `json:"slots"`              // slots that may be used now: fewer than it has while it is fresh in service, none while it is not up
	Running  int     `json:"running"`            // the rest of Used waits for its KV
	Output   int64   `json:"output_tokens"`      // of all its answers so far
	Answers  uint64  `json:"answers"`            // of them, those that were whole
	Empty    uint64  `json:"empty_answers"`      // of these, those that the engine ended without any text
	TokenMs  float64 `json:"token_ms,omitempty"` // between two tokens of an answer, in the mean of the last 20 seconds; 0: too few came to tell
	Tight    bool    `json:"tight,omitempty"`    // its engine preempted: kept emptier for a while
	Lately   Lately  `json:"lately"`
	Backlog  int64   `json:"backlog_tokens,omitempty"` // prompt tokens that it has yet to compute, where it prefills
	Prompts  uint64  `json:"prompts,omitempty"`        // that were sent to it so far, where it prefills
}

// Prefill is the prefill tier.
type Prefill struct {
	Policy        string          `json:"policy"`
	Waiting       int             `json:"waiting_requests"` // in the arrival queue, without batch
	Batch         BatchStatus     `json:"batch"`
	QueueMax      int             `json:"queue_max"`
	ScrapeEveryMs float64         `json:"scrape_every_ms"`  // engines are asked for their load; 0: never
	HitShare      float64         `json:"hit_share"`        // of all prompt tokens so far, found in a prefix cache
	BacklogS      float64         `json:"backlog_s"`        // until a prompt that comes now would begin, where that is the longest; 0: unknown
	BusyS         float64         `json:"busy_s,omitempty"` // for how long that has been long
	Hits          *Hits           `json:"hits,omitempty"`   // of the key with the most requests that wait, while the backlog is long
	Engines       []PrefillEngine `json:"engines"`
	Groups        []PrefillGroup  `json:"groups"` // of ranks that prefill and decode, which take prompts, too
}

// BatchStatus is what became of requests that take only what others leave.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // so far
	HeldS   float64 `json:"held_s"`       // that these waited, all of them together
}

// PrefillGroup is a group of ranks that prefill and decode, as the arrival queue sees it.
type PrefillGroup struct {
	ID       string `json:"id"`                // the group, and its model
	State    string `json:"state"`             // open, out, unknown (its models), down, removed
	Inflight int    `json:"inflight_requests"` // that the queue has let go, and that have no first token yet
}

// PrefillEngine is one prefill candidate: an engine, or a rank of one.
type PrefillEngine struct {
	ID          string  `json:"id"`                // host:port/rank
	State       string  `json:"state"`             // open, closed (its gate), out, unknown (its models), down, removed
	Why         string  `json:"why,omitempty"`     // what failed there last, where that took it out
	KVTokens    int64   `json:"kv_tokens"`         // by our accounts
	Budget      int64   `json:"budget_tokens"`     // at which the gate closes; 0: capacity is not known
	KVShare     float64 `json:"kv_share"`          // of its cache, the larger of our accounts and what it says
	GateShare   float64 `json:"gate_share"`        // at which the gate closes
	Inflight    int     `json:"inflight_requests"` // our probes it has not answered
	NewTokens   int64   `json:"queued_new_tokens"` // they make it compute
	Waiting     float64 `json:"waiting"`           // in the engine's own queue, as scraped
	Pooled      int     `json:"pooled"`            // finished, not yet given to a rank
	Dispatched  int     `json:"dispatched"`        // on their way to a rank
	HitShare    float64 `json:"hit_share"`         // of prompt tokens, lately
	ScrapeAgeMs float64 `json:"scrape_age_ms"`     // -1: never scraped
}

// Engine is an engine's health.
type Engine struct {
	ID       string   `json:"id"` // host:port
	Role     string   `json:"role"`
	Models   []string `json:"models"` // at most so many, and other
	Group    string   `json:"group,omitempty"`
	State    string   `json:"state"`           // up, out, wedged, halted, down
	Why      string   `json:"why,omitempty"`   // it is not up, or what is amiss though it is
	Hangs    bool     `json:"hangs,omitempty"` // its port takes connections, but its last health check got no answer
	SinceS   float64  `json:"since_s"`         // how long it has been so
	Draining bool     `json:"draining"`
	Share    float64  `json:"share"` // of its slots that may be used; below 1 while it is fresh in service
	Ranks    int      `json:"ranks"`
	Version  string   `json:"version,omitempty"`
}

// Source is one that engines are discovered by.
type Source struct {
	Name    string  `json:"name"`
	Engines int     `json:"engines"`         // in its last list
	Error   string  `json:"error,omitempty"` // it fails, and the list stays in force
	Unfit   []Unfit `json:"unfit"`           // of them, not used
}

// Unfit is an engine that failed the request it was tried with before its first.
type Unfit struct {
	ID   string `json:"id"` // host:port
	Role string `json:"role"`
	Why  string `json:"why"`
}

// Decision is where one request went, and why in short.
type Decision struct {
	ID      string  `json:"id"` // of the request; GET /decisions?id= has all of it
	AtMs    int64   `json:"at_ms"`
	Model   string  `json:"model"`
	Prompt  int     `json:"prompt_tokens"`
	Prefill string  `json:"prefill"` // engine; empty: none, or the rank does both
	Rank    string  `json:"rank"`    // where it is answered; empty: none
	WaitMs  float64 `json:"wait_ms"` // time in the pool; up to now while rank is empty
	Outcome string  `json:"outcome"` // empty while it runs
	Why     string  `json:"why"`
}

// Geo is this proxy among those of other regions.
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

// Scope is a region, or a decode group of our own, whose engines this proxy may
// own.
type Scope struct {
	Region string `json:"region"`
	Group  string `json:"group,omitempty"` // empty: all of the region
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"` // we send its engines requests
	Holder string `json:"holder"` // id of the proxy that owns it; empty: no proxy does
	Epoch  int64  `json:"epoch"`
}

// History is the last minutes, one sample every EveryMs, oldest first. Every
// line has as many values as AtMs; -1 stands where there was nothing.
type History struct {
	Form    int           `json:"form"`
	EveryMs int64         `json:"every_ms"`
	AtMs    []int64       `json:"at_ms"` // Unix, of each sample
	Ranks   []RankLine    `json:"ranks"`
	Lines   []NumbersLine `json:"lines"`
}

// RankLine is the load of a rank over time.
type RankLine struct {
	ID       int32   `json:"id"` // Rank.ID
	KVTokens []int64 `json:"kv_tokens"`
}

// NumbersLine is one of Lines over time.
type NumbersLine struct {
	Name   string  `json:"name"`
	Values []int64 `json:"values"`
}

// lineNames are the names of NumbersLine, with their units. requests_per_ks are requests
// in 1000 s: a whole number says enough.
var lineNames = [...]string{"pool_entries", "requests_per_ks", "tokens_per_s", "tpot_p50_us", "tpot_p99_us", "ttft_p50_us", "ttft_p99_us"}
