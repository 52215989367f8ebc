// Package detect says what is wrong with a proxy: it is told how the proxy stands, keeps the last samples, and groups by its cause
// what it finds. It is a value without a clock, a log and a lock; gateway/watch owns it.
package detect

import (
	"iter"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/advice"
)

// Facts is how a proxy stands at one instant: all that is judged, and what people are shown beside it. Go names end in their unit, Ms, S,
// Tokens, PerS, as their JSON names do; a Share is of 1. A field without a JSON name is for those who judge only. What Watch fills in is
// marked with (found). Lists that are shown are never null: Listed sees to it.
type Facts struct {
	At       time.Time       `json:"-"`
	Proxy    Proxy           `json:"proxy"`
	Traffic  Traffic         `json:"traffic"`
	Failures []Failed        `json:"failures"` // (found) how requests failed, by outcome, those of the last seconds first; empty: none has since the start
	Models   []Model         `json:"models"`
	Prefill  Prefill         `json:"prefill"`
	Waiting  []Waiting       `json:"waiting"` // for prefill or for a rank, by key, the most first; empty where no receipts are kept
	Engines  []Engine        `json:"engines"` // as configured, then as added
	Advice   []advice.Advice `json:"advice"`  // on the number of ranks, one a model; empty: none yet, or off
	Geo      *Geo            `json:"geo,omitempty"`
	Sources  []Source        `json:"sources"` // of engines that are discovered; empty where none are
	Scopes   []Scope         `json:"areas"`   // the groups or regions whose engines this proxy may serve; empty if no other proxy may serve them
	Twin     bool            `json:"-"`       // the twin replays some policy
}

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

// Traffic is what clients get. Rates are of the last ten seconds, latencies of the last minute.
type Traffic struct {
	Rates            // (found)
	FailedOn string  `json:"failed_on,omitempty"` // the host on which an attempt of nearly all requests failed that failed in the last minute
	TTFT     Latency `json:"ttft"`
	TPOT     Latency `json:"tpot"` // one sample a request, when it ends
}

// Rates are of the last ten seconds.
type Rates struct {
	RequestsPerS float64 `json:"requests_per_s"`      // that ended
	FailuresPerS float64 `json:"failures_per_s"`      // of them, with a 5xx, a 429 or an error event
	OwnPerS      float64 `json:"-"`                   // of these, by a limit of the caller's key
	TokensPerS   float64 `json:"tokens_per_s"`        // generated
	Recovered    bool    `json:"recovered,omitempty"` // none failed for 3 s, and so many went well since then that some of them would have failed if it went on
}

// Latency of the last minute.
type Latency struct {
	P50Ms   float64 `json:"p50_ms"`
	P99Ms   float64 `json:"p99_ms"`
	Samples int     `json:"samples"` // 0: nothing is known
}

// Outcome is how requests fail: with a name of a fixed set, and a status.
type Outcome struct {
	Name   string
	Status int
}

// Why is what an operator is told of a failure.
type Why struct {
	Text string
	Own  bool // it is a limit of one key
	At   time.Time
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

// Model is one board: the ranks that serve a model and the pool in front of them. A model has a board for its decode ranks, and
// one for its ranks that prefill and decode.
type Model struct {
	Name       string  `json:"name"`                 // with (aggregated) behind it where its ranks prefill and decode
	Aggregated bool    `json:"aggregated,omitempty"` // its ranks prefill and decode
	CrowdedS   float64 `json:"-"`                    // (found) for how long it has had no free slot or no KV memory, while so many wait that each waits for about one answer
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
	Held        int                `json:"held_entries"`                // the last decision held for a round though they had a slot
	StepMs      float64            `json:"step_ms"`                     // measured, mean of the last steps; 0: unknown
	TokenMs     float64            `json:"token_ms,omitempty"`          // (found) the median of the ranks' token_ms; 0: none has one
	UsualMs     float64            `json:"usual_ms,omitempty"`          // (found) while steps take much longer than they did in the last hour: what a step at the present loads took then
	SlowS       float64            `json:"slow_s,omitempty"`            // (found) and for how long that has been so
	Differ      []Differs          `json:"differ,omitempty"`            // (found) and which ranks say of themselves what is far above what the others say, the farthest first
	StepTokens  float64            `json:"step_tokens,omitempty"`       // (found) that a step gives to an answer: more than one with speculative decoding
	UsualTokens float64            `json:"usual_step_tokens,omitempty"` // (found) while that is much less than in the last hour: what it was then
	FewS        float64            `json:"few_s,omitempty"`             // (found) and for how long that has been so
	ModelMs     float64            `json:"model_ms"`                    // a step at the present loads by the step model; 0: there is no model
	ModelWhy    string             `json:"model_why,omitempty"`         // there is no model
	LostShare   float64            `json:"lost_share"`                  // the part of model_ms that imbalance costs
	LostMs      float64            `json:"lost_ms"`                     // the part of model_ms that imbalance costs
	SyncWaitMs  float64            `json:"sync_wait_ms,omitempty"`      // that a rank waits for the others before a step by its engine's own clock, in the mean between the last two readings; 0: no engine tells it, or no step fell between them
	Law         Law                `json:"-"`
	Rounds      *board.RoundStatus `json:"-"` // nil where the ranks do not prefill
	Twin        *verdict.Twin      `json:"-"`
	Source      string             `json:"-"` // of the step model; empty: there is none
	OwnMs       float64            `json:"-"` // by the step model, a token of a prompt that the slowest rank computes; 0: unknown
	Ranks       []Rank             `json:"ranks"`
	Said        []*Gauges          `json:"-"` // of each of Ranks, by its engine; nil where it is not known
}

// Law is what a step takes: ms; a KV token and a request of the fullest rank. Where none could be learned, because steps hardly follow
// the load, it is what a step took at a load.
type Law struct {
	C0, C1, Each float64
	Tokens       int64 // of the fullest rank at the time, where there was no law; 0: there was one
	Running      int   // likewise
}

// ms is what a step takes by the law, and at most. A step that was timed once takes longer where the load is larger, but no more so
// than the load is.
func (l Law) ms(tokens int64, running int) (ms, most float64) {
	ms = l.C0 + l.C1*float64(tokens) + l.Each*float64(running)
	if l.Tokens == 0 {
		return ms, ms
	}
	return ms, ms * max(1, float64(tokens)/float64(l.Tokens), float64(running)/float64(max(1, l.Running)))
}

// Gauges are what an engine tells of one of its ranks. One that is not known is below 0.
type Gauges struct {
	Running, Waiting float64 // requests
	KVShare          float64
	Preempted        float64 // requests, since the reading before
	Computed         float64 // prompt tokens whose KV it did not get, since the reading before
}

// Differs is a gauge of a rank's engine that is far above that of the middle rank of its group.
type Differs struct {
	Rank   string  `json:"rank"`
	Gauge  string  `json:"gauge"` // running, waiting, kv_share, preempted or computed_tokens; the last two since the reading before
	Value  float64 `json:"value"`
	Median float64 `json:"median"`
	Says   string  `json:"says"` // the same in words
}

// Lately are the whole answers of a rank in the last minute, or in the last five where those are few.
type Lately struct {
	Answers uint64 `json:"answers"`
	Empty   uint64 `json:"empty_answers"` // those that the engine ended without any text
}

// States of a rank.
const (
	RankUp       = "up"
	RankDraining = "draining" // takes no new requests, an operator said so
	RankOut      = "out"      // its engine answers, and all the same it takes nothing
	RankDown     = "down"     // its engine does not answer, or goes on without it
	RankRemoved  = "removed"  // gone from the fleet, not all its requests ended yet
	RankForeign  = "foreign"  // another dispatcher serves it
)

// Rank is one data-parallel worker. It takes requests when it is up.
type Rank struct {
	ID       int32   `json:"id"`   // while the process lives; the history of the live page names it so
	Name     string  `json:"name"` // host:port, of several ranks with /rank behind it
	State    string  `json:"state"`
	Why      string  `json:"why,omitempty"` // it takes nothing
	Steps    bool    `json:"steps"`         // it steps with its group; false: its engine is down or it is removed, and it counts in no sum or mean
	KVTokens int64   `json:"kv_tokens"`
	Unread   int64   `json:"unread_kv_tokens,omitempty"` // of KVTokens, those of prompts that are not computed yet: no step reads them, and they are not in the loads of the group but its sum
	Capacity int64   `json:"capacity_tokens"`            // 0: not known, or without limit
	Used     int     `json:"slots_used"`
	Slots    int     `json:"slots"`                    // slots that may be used now: fewer than it has while it is fresh in service, none while it is not up
	Running  int     `json:"running"`                  // the rest of Used waits for its KV
	Output   int64   `json:"output_tokens"`            // of all its answers so far
	Answers  uint64  `json:"answers"`                  // of them, those that were whole
	Empty    uint64  `json:"empty_answers"`            // of these, those that the engine ended without any text
	TokenMs  float64 `json:"token_ms,omitempty"`       // (found) between two tokens of an answer, in the mean of the last 20 seconds; 0: too few came to tell
	SlowMs   float64 `json:"-"`                        // (found) the same in those of the last minute's spans in which it was much slower than the others, if they are many; 0: they are few
	OthersMs float64 `json:"-"`                        // (found) and what the middle one of its group took in these
	Tight    bool    `json:"tight,omitempty"`          // its engine preempted: kept emptier for a while
	Lately   Lately  `json:"lately"`                   // (found)
	Backlog  int64   `json:"backlog_tokens,omitempty"` // prompt tokens that it has yet to compute, where it prefills
	Prompts  uint64  `json:"prompts,omitempty"`        // that were sent to it so far, where it prefills
	Kept     int64   `json:"kept_kv_tokens,omitempty"` // not in KVTokens: of answers that have ended, which its engine keeps for the next turns of their chats
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
	BusyS         float64         `json:"busy_s,omitempty"` // (found) for how long that has been long
	Hits          *Hits           `json:"hits,omitempty"`   // of the key with the most requests that wait, while the backlog is long
	Heaviest      *Heaviest       `json:"-"`                // nil: they have no prompt, or no receipts are kept
	Engines       []PrefillEngine `json:"engines"`
	Groups        []PrefillGroup  `json:"groups"` // of ranks that prefill and decode, which take prompts, too
}

// BatchStatus is what became of requests that take only what others leave.
type BatchStatus struct {
	Waiting int     `json:"waiting_requests"`
	Ran     uint64  `json:"ran_requests"` // so far
	HeldS   float64 `json:"held_s"`       // that these waited, all of them together
}

// Hits are the shares of a key's prompt tokens that were in a prefix cache.
type Hits struct {
	Key    string  `json:"key"` // its name; empty: callers without a key
	Share  float64 `json:"share"`
	Before float64 `json:"share_before"` // in the quarter of an hour before the last minute
}

// Heaviest is the key of which most prompt tokens are that prefill engines compute or hold.
type Heaviest struct {
	Key   string  // its name; empty: callers without a key
	Share float64 // of these tokens
	Mean  int     // tokens of its prompts, in the mean
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

// Waiting is how many requests of a key wait.
type Waiting struct {
	Key      string `json:"key"` // its name; empty: callers without a key, and all the rest behind the first few
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
	Models   []string `json:"models"` // at most so many, and other
	Group    string   `json:"group,omitempty"`
	State    string   `json:"state"`            // up, out, wedged, halted, down
	Why      string   `json:"why,omitempty"`    // it is not up, or what is amiss though it is
	Paused   bool     `json:"paused,omitempty"` // by POST /admin/fleet/call; it is halted, and why says since when
	Hangs    bool     `json:"hangs,omitempty"`  // its port takes connections, but its last health check got no answer
	Moved    *Moved   `json:"-"`                // nil: its name has always had the same address
	SinceS   float64  `json:"since_s"`          // how long it has been so
	Draining bool     `json:"draining"`
	Share    float64  `json:"share"` // of its slots that may be used; below 1 while it is fresh in service
	Ranks    int      `json:"ranks"`
	Version  string   `json:"version,omitempty"`
}

// Moved says that the name of an engine has other addresses than before.
type Moved struct {
	From, To string
	AgoS     float64
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

// Scope is a region, or a decode group of our own, whose engines this proxy may own.
type Scope struct {
	Region string `json:"region"`
	Group  string `json:"group,omitempty"` // empty: all of the region
	Home   bool   `json:"home"`
	Phase  string `json:"phase"`
	Admits bool   `json:"admits"` // we send its engines requests
	Holder string `json:"holder"` // id of the proxy that owns it; empty: no proxy does
	Epoch  int64  `json:"epoch"`
}

// groups are all groups with their names.
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

// Listed makes lists of what is shown that are nil empty: JSON writes null for the former.
func (f *Facts) Listed() {
	list(&f.Failures)
	list(&f.Models)
	list(&f.Waiting)
	list(&f.Engines)
	list(&f.Advice)
	list(&f.Sources)
	list(&f.Scopes)
	list(&f.Prefill.Engines)
	list(&f.Prefill.Groups)
	for i := range f.Engines {
		list(&f.Engines[i].Models)
	}
	for i := range f.Sources {
		list(&f.Sources[i].Unfit)
	}
	for i := range f.Models {
		list(&f.Models[i].Groups)
		list(&f.Models[i].Pool.Ages)
	}
	for _, g := range f.groups() {
		list(&g.Ranks)
	}
	if f.Geo != nil {
		list(&f.Geo.Peers)
	}
}

func list[T any](l *[]T) {
	if *l == nil {
		*l = []T{}
	}
}
