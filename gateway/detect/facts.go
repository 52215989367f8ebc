// Package detect says what is wrong with a proxy: it is told how the proxy stands, keeps the last samples, and groups by its cause
// what it finds. It is a value without a clock, a log and a lock; gateway/watch owns it.
package detect

import (
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/advice"
)

// Facts is how a proxy stands at one instant: all that is judged, and what people are shown beside it. Names end in their unit: Ms, S,
// Tokens, PerS; a Share is of 1. What Watch fills in is marked with (found).
type Facts struct {
	At           time.Time
	Proxy        Proxy
	Certificates []Certificate // of listeners with TLS
	Traffic      Traffic
	Failures     []Failed // (found) how requests failed, by outcome; those of the last seconds first
	Models       []Model
	Prefill      Prefill
	Waiting      []Waiting // for prefill or for a rank, by key, the most first; empty where no receipts are kept
	Engines      []Engine  // as configured, then as added
	Advice       []advice.Advice
	Geo          *Geo // nil: there are no other regions
	Sources      []Source
	Scopes       []Scope
	Twin         bool // the twin replays some policy
}

// Proxy is the process itself.
type Proxy struct {
	ID, Region, Role        string
	UptimeS                 float64
	Ready                   bool
	Why                     string
	Draining                bool
	ConfigError             string
	ReloadedMs              int64
	Policy, PrefillPolicy   string
	Open                    int64
	Places, PlacesUsed      int
	DriftSlots, DriftTokens int64
}

// Certificate is what a listener presents to those who connect.
type Certificate struct {
	Key   string  // of the config
	EndsS float64 // until then; below 0: it has ended
}

// Traffic is what clients get. Rates are of the last ten seconds, latencies of the last minute.
type Traffic struct {
	Rates             // (found)
	FailedOn   string // the host on which an attempt of nearly all requests failed that failed in the last minute
	TTFT, TPOT Latency
}

// Rates are of the last ten seconds.
type Rates struct {
	RequestsPerS float64 // that ended
	FailuresPerS float64 // of them, with a 5xx, a 429 or an error event
	OwnPerS      float64 // of these, by a limit of the caller's key
	TokensPerS   float64 // generated
	Recovered    bool    // none failed for 3 s, and so many went well since then that some of them would have failed if it went on
}

// Latency of the last minute.
type Latency struct {
	P50Ms, P99Ms float64
	Samples      int // 0: nothing is known
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
	Outcome                                             string
	Status                                              int
	Last10S, LastMinute, Last5Min, LastHour, SinceStart uint64
	Why                                                 string
	Own                                                 bool // Why is a limit of one key: others are served
}

// Model is one board: the ranks that serve a model and the pool in front of them.
type Model struct {
	Name       string
	Aggregated bool    // its ranks prefill and decode
	CrowdedS   float64 // (found) for how long it has had no free slot or no KV memory, while so many wait that each waits for about one answer
	Pool       Pool
	Groups     []Group
}

// Pool is what waits for a rank.
type Pool struct {
	Entries       int
	OldestS, TTLS float64
	UpToS         []float64
	Ages          []int
}

// Group is the ranks that step together, or all of a model that have no barrier.
type Group struct {
	board.GroupLoads
	Held                          int
	StepMs, ModelMs               float64
	ModelWhy                      string // there is no step model
	LostShare, LostMs, SyncWaitMs float64
	Law                           Law
	Rounds                        *board.RoundStatus // nil where the ranks do not prefill
	Twin                          *verdict.Twin
	Source                        string  // of the step model; empty: there is none
	OwnMs                         float64 // by the step model, a token of a prompt that the slowest rank computes; 0: unknown
	Ranks                         []Rank
	Said                          []*Gauges // of each of Ranks, by its engine; nil where it is not known

	TokenMs     float64   // (found) the median of the ranks' TokenMs; 0: none has one
	UsualMs     float64   // (found) while steps take much longer than in the last hour: what a step at the present loads took then
	SlowS       float64   // (found) and for how long that has been so
	Differ      []Differs // (found) and which ranks say of themselves what is far above what the others say, the farthest first
	StepTokens  float64   // (found) that a step gives to an answer
	UsualTokens float64   // (found) while that is much less than in the last hour: what it was then
	FewS        float64   // (found) and for how long that has been so
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
	Rank, Gauge   string
	Value, Median float64
	Says          string
}

// Lately are the whole answers of a rank in the last minute, or in the last five where those are few.
type Lately struct {
	Answers uint64
	Empty   uint64 // those that the engine ended without any text
}

// States of a rank.
const (
	RankUp       = "up"
	RankDraining = "draining" // takes no new requests, an operator said so
	RankOut      = "out"      // its engine answers, but what was sent there failed
	RankDown     = "down"     // its engine does not answer
	RankRemoved  = "removed"  // gone from the fleet, not all its requests ended yet
	RankForeign  = "foreign"  // another dispatcher serves it
)

// Rank is one data-parallel worker.
type Rank struct {
	ID                   int32
	Name                 string // host:port, of several ranks with /rank behind it
	State                string
	Steps                bool // with its group; false: it counts in no sum or mean
	KVTokens, Unread     int64
	Capacity             int64 // 0: not known, or without limit
	Used, Slots, Running int
	Output               int64
	Answers, Empty       uint64
	TokenMs              float64 // (found) between two tokens of an answer, in the mean of the last 20 seconds; 0: too few came to tell
	SlowMs               float64 // (found) the same in those of the last minute's spans in which it was much slower than the others, if they are many; 0: they are few
	OthersMs             float64 // (found) and what the middle one of its group took in these
	Tight                bool
	Lately               Lately // (found)
	Backlog              int64
	Prompts              uint64
}

// Prefill is the prefill tier.
type Prefill struct {
	Policy                            string
	Waiting, QueueMax                 int
	ScrapeEveryMs, HitShare, BacklogS float64
	BusyS                             float64 // (found) for how long prompts have come faster than they are computed
	Batch                             Batch
	Hits                              *Hits     // of the key with the most requests that wait, while the backlog is long
	Heaviest                          *Heaviest // nil: they have no prompt, or no receipts are kept
	Engines                           []PrefillEngine
	Groups                            []PrefillGroup
}

// Batch is what became of requests that take only what others leave.
type Batch struct {
	Waiting int
	Ran     uint64
	HeldS   float64
}

// Hits are the shares of a key's prompt tokens that were in a prefix cache.
type Hits struct {
	Key           string
	Share, Before float64
}

// Heaviest is the key of which most prompt tokens are that prefill engines compute or hold.
type Heaviest struct {
	Key   string  // its name; empty: callers without a key
	Share float64 // of these tokens
	Mean  int     // tokens of its prompts, in the mean
}

// PrefillGroup is a group of ranks that prefill and decode, as the arrival queue sees it.
type PrefillGroup struct {
	ID, State string
	Inflight  int
}

// PrefillEngine is one prefill candidate: an engine, or a rank of one.
type PrefillEngine struct {
	ID, State, Why        string
	KVTokens, Budget      int64
	KVShare, GateShare    float64
	Inflight              int
	NewTokens             int64
	Waiting               float64
	Pooled, Dispatched    int
	HitShare, ScrapeAgeMs float64
}

// Waiting is how many requests of a key wait.
type Waiting struct {
	Key      string // its name; empty: callers without a key, and all the rest behind the first few
	Requests int
}

// Roles of engines.
const (
	prefillRole    = "prefill"
	decodeRole     = "decode"
	aggregatedRole = "aggregated"
)

// Engine is an engine's health.
type Engine struct {
	ID                string // host:port
	Role              string
	Models            []string
	Group, State, Why string
	Hangs             bool
	Moved             *Moved // nil: its name has always had the same address
	SinceS            float64
	Draining          bool
	Share             float64
	Ranks             int
	Version           string
}

// Moved says that the name of an engine has other addresses than before.
type Moved struct {
	From, To string
	AgoS     float64
}

// Source is one that engines are discovered by.
type Source struct {
	Name    string
	Engines int
	Error   string
	Unfit   []Unfit
}

// Unfit is an engine that failed the request it was tried with before its first.
type Unfit struct {
	ID, Role, Why string
}

// Geo is this proxy among those of other regions.
type Geo struct {
	Policy string
	Peers  []Peer
}

// Peer is another region's proxy.
type Peer struct {
	ID, Region   string
	Up, Draining bool
	Fault        string
	RTTMs        float64
	InFlight     int
	Circuit      string
}

// Scope is a region, or a decode group of our own, whose engines this proxy may own.
type Scope struct {
	Region, Group string
	Home          bool
	Phase         string
	Admits        bool
	Holder        string
	Epoch         int64
}
