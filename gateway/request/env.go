package request

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/delivery"
	"evenkeel/engine"
	"evenkeel/gateway/abort"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/loop"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/service"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// Deps has the parts of the proxy that requests use. Most are concrete types, because nothing else
// could stand for them: a lease, for example, can only come from a prefill.Scheduler.
type Deps struct {
	Context    context.Context // ends when the last answer stream has ended
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Buckets    []float64 // upper bounds of the buckets of histograms, in seconds

	Settings  func() *fleet.Settings // those in force at the call
	Serving   func() context.Context // ends when the shutdown ends requests without an answer
	PromptKey func() []byte          // for hashes of prompts; nil: no predictor needs them

	Client     *engine.Client
	Monitor    Monitor
	Fleet      Fleet
	Engines    func() Engines // as they are at the call
	Prefill    *prefill.Scheduler
	LocalRanks *local.Ranks
	Places     *pool.Semaphore
	Dispatcher Dispatcher
	Journal    *journal.Journal
	Owner      *owner.Set // nil: this proxy is alone, and sends to every engine
	Peers      *geo.Peers // nil: there are no other regions
	Callbacks  *metaserver.Server
	Running    *abort.Running
	Loops      *loop.Set // empty: each streamed answer has a goroutine
}

// Monitor takes reports on whether engines served their requests well.
type Monitor interface {
	handoff.Monitor
	Answered(instance string)
	CheckNow(ctx context.Context, instance string) error
	Accuse(instance string) (settle func())
	Salt(instance string) string
}

// Engines is a view of all engines at one moment.
type Engines interface {
	handoff.Engines
	Ranks(instance string) int
	HostsOf(instance string) func(host string) bool
	GenerationAt(instance string) roster.Generation
	SharingQueueWith(worker int32, list []int32) (sameQueue []int32, othersExist bool)
	OwnsGroupFor(board, model string) bool
	LongestContext(instance string) int
	Withheld(at roster.Location) bool
	HandoffsNameRequests(candidate prefill.Candidate) bool
}

// Fleet tracks the calls under way, and what requests have learnt of engines.
type Fleet interface {
	KnownHost(host string) bool
	TrackProbe(c *prefill.Candidate, call *engine.Call) *fleet.TrackedCall
	Untrack(c *fleet.TrackedCall)
	AnyPrefill(model string) *engine.Target
	DownSince(instance string, at time.Time) bool
	GaveBack(decode string)
	BootstrapInfo(candidate prefill.Candidate) (*mooncake.BootstrapInfo, error)
	NoteHandoff(made roster.Generation, engineID string)
	Track(at roster.Location, call *engine.Call, ends fleet.Until) *fleet.TrackedCall
}

// Dispatcher assigns requests to slots on decode ranks.
type Dispatcher interface {
	handoff.Dispatcher
	// Blocked are prefill engines whose KV lately did not reach a decode engine of the board.
	Blocked(board string) (prefillers []string)
	// Quarantined are those whose KV lately did not reach the slot's decode engine.
	Quarantined(slot *dispatcher.Slot) (prefillers []string)
	// Rerouted says that another prefill engine computes the prompt.
	Rerouted(slot *dispatcher.Slot, prefiller string)
	BlamesRequest(slot *dispatcher.Slot, first, second delivery.Link, since time.Time) bool
	Excuse(slot *dispatcher.Slot, l delivery.Link)
	EnqueueAggregated(entry *pool.Entry, hits []board.Hit) <-chan dispatcher.Result
	EnqueueLocal(entry *pool.Entry, l *board.Local) <-chan dispatcher.Result
	Withdraw(entry *pool.Entry)
	CorrectPrompt(slot *dispatcher.Slot, prompt int)
	Preempted(worker int32)
}

// A Server serves requests that were admitted, and holds the state that they share.
type Server struct {
	Deps
	metrics      *metrics
	Prompts      *prompt.Reader
	discards     *handoff.Discarder
	prefillCalls service.Background // beside their decode calls
	// finishing reads bodies to their ends after the client has its answer, and ends legs after one
	// failed.
	finishing    service.Background
	openRequests atomic.Int64 // client requests being served
	ids          atomic.Uint64
	resumeBytes  atomic.Int64 // bytes kept so that answers can go on at another engine
}

// New registers the metrics of requests.
func New(deps Deps) *Server {
	srv := &Server{Deps: deps}
	srv.Prompts = prompt.NewReader(prompt.Config{Client: deps.Client, Fleet: deps.Fleet, Prefill: deps.Prefill, Settings: deps.Settings,
		Registerer: deps.Registerer, Log: deps.Log})
	srv.discards = handoff.NewDiscarder(handoff.Config{
		Context: deps.Context, Settings: deps.Settings, Client: deps.Client, Monitor: deps.Monitor,
		Engines: func() handoff.Engines { return deps.Engines() }, Places: deps.Places, Dispatcher: deps.Dispatcher,
		NextID: srv.nextID, Registerer: deps.Registerer, Log: deps.Log,
	})
	srv.metrics = newMetrics(deps.Registerer, deps.Buckets, &srv.openRequests)
	return srv
}

// Open is how many client requests are being served.
func (srv *Server) Open() int64 { return srv.openRequests.Load() }

// Finish waits until the background work of finished requests has ended, or until ctx is done. No
// new work begins. The returned function waits for the rest.
func (srv *Server) Finish(ctx context.Context) (wait func()) {
	var ends []<-chan struct{} // each is closed when all work of one kind has ended
	for _, background := range []*service.Background{&srv.finishing, &srv.discards.Background, &srv.prefillCalls} {
		workEnded := background.Close()
		select {
		case <-workEnded:
		case <-ctx.Done():
		}
		ends = append(ends, workEnded)
	}
	return func() {
		for _, workEnded := range ends {
			<-workEnded
		}
	}
}

func (srv *Server) nextID() uint64 { return srv.ids.Add(1) }

type metrics struct {
	itl                                  prometheus.Observer    // seconds between two events with tokens
	recomputes, losses, movedAnswers     *prometheus.CounterVec // by tier: how a lost answer went on
	ignoredCloses, latePulls, miscounted prometheus.Counter

	drains, rebinds *prometheus.CounterVec // bound to a decode rank before their prefill

	localRequests                *prometheus.CounterVec
	localFailures, localDeclined prometheus.Counter
}

// newMetrics: buckets are upper bounds in seconds, and open counts the client requests being
// served.
func newMetrics(reg prometheus.Registerer, buckets []float64, open *atomic.Int64) *metrics {
	auto := promauto.With(reg)
	auto.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_requests_open",
		Help: "Client requests that are being served now, from the first byte of the request to the last byte of the answer.",
	}, func() float64 { return float64(open.Load()) })
	m := &metrics{itl: auto.NewHistogram(prometheus.HistogramOpts{Name: "evenkeel_itl_seconds",
		Help: "Time between two events that carry tokens.", Buckets: buckets})}
	maker := counterMaker{auto}
	m.makeLossCounters(maker)
	m.makeAnswerCounters(maker)
	m.makeEarlyBindCounters(maker)
	m.makeLocalCounters(maker)
	return m
}

type counterMaker struct{ auto promauto.Factory }

func (c counterMaker) counter(name, help string) prometheus.Counter {
	return c.auto.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

// counters makes a counter for each of these values of a label.
func (c counterMaker) counters(name, help, label string, values []string) *prometheus.CounterVec {
	vec := c.auto.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	for _, value := range values {
		vec.WithLabelValues(value)
	}
	return vec
}

func (m *metrics) makeLossCounters(c counterMaker) {
	m.recomputes = c.counters("evenkeel_recomputes_total",
		"Requests that a decode engine gave back because it had no KV memory left, by how they went on. 0: from the start, "+
			"because the client had nothing of the answer yet. 1: a completion or a generate request, by its token ids. 2: a "+
			"chat, by its token ids. 3: by its text, which is not exact to the token. 4: not at all, it ended with an error. "+
			"finished: no token was left to compute.", "tier", lifecycle.Tiers)
	m.losses = c.counters("evenkeel_decode_losses_total",
		"Answers whose decode engine died or failed after the client had a part of them, by how they went on. The tiers are those "+
			"of evenkeel_recomputes_total.", "tier", lifecycle.Tiers)
	m.movedAnswers = c.counters("evenkeel_drained_answers_total",
		"Answers that ran on a rank at the deadline of its drain, by how they went on. The tiers are those of "+
			"evenkeel_recomputes_total.", "tier", lifecycle.Tiers)
}

func (m *metrics) makeAnswerCounters(c counterMaker) {
	m.ignoredCloses = c.counter("evenkeel_heedless_engines_total",
		"Decode calls that the proxy closed and that the engine had not closed 250 ms later. Their slots were given to others all "+
			"the same, so a rank may have had one request too many.")
	m.latePulls = c.counter("evenkeel_late_pulls_total",
		"Answers that were withheld because they had not begun when the prefill engine may have freed their KV. A later answer "+
			"could be made of another request's KV.")
	m.miscounted = c.counter("evenkeel_miscounted_answers_total",
		"Answers whose tokens, as counted while the answer came, differ by more than 1 % from the engine's final usage. This "+
			"count is the load of decode ranks.")
}

// A drain is here a prefill that runs only so that its end frees KV blocks of the decode engine.
func (m *metrics) makeEarlyBindCounters(c counterMaker) {
	m.drains = c.counters("evenkeel_bind_drains_total",
		"Prefills that ran although no client waits for the answer any more, because only the end of the prefill frees the blocks "+
			"of the decode engine that the request was bound to. client_left: the client left. late_callback: the request was "+
			"given up before its callback came.", "cause", []string{drainLeft, drainLate})
	m.rebinds = c.counters("evenkeel_bind_rebinds_total",
		"Requests that were bound to a decode rank before their prefill and lost it before their first token. decode: the decode "+
			"engine refused or broke off. prefill: the prefill engine did. callback: no callback came, or a bad one. silent: "+
			"the prefill ended, and no event came.", "cause",
		[]string{causeDecode, causePrefill, causeCallback, causeSilent})
}

func (m *metrics) makeLocalCounters(c counterMaker) {
	m.localRequests = c.counters("evenkeel_local_prefill_requests_total",
		"Requests that a decode rank got without a hand-off. short: little of the prompt was new there. asked: a trusted caller "+
			"wanted it. ended: probes return no hand-off. endpoint: an engine takes no hand-off at this endpoint.", "reason",
		[]string{localShort, localAsked, localNoHandOff, localEndpoint})
	m.localFailures = c.counter("evenkeel_local_prefill_failures_total",
		"Requests that a decode rank got without a hand-off and that failed before their first event. A prefill engine gets them "+
			"then.")
	m.localDeclined = c.counter("evenkeel_local_prefill_declined_total",
		"Requests that were short enough for a decode rank to compute, but no rank had room or could be reached.")
}

// Label values of drains, rebinds and localRequests, whose help texts explain them.
const (
	drainLeft, drainLate                                  = "client_left", "late_callback"
	causeDecode, causePrefill, causeCallback, causeSilent = "decode", "prefill", "callback", "silent"
	localShort, localAsked, localEndpoint, localNoHandOff = "short", "asked", "endpoint", "ended"
)

// countRebind counts a request that lost its decode rank before the first token. endedBy is why one
// call of the pair has ended the other; nil: the decode call ended by itself.
func (m *metrics) countRebind(endedBy *failure.Fault) {
	cause := causePrefill
	switch {
	case endedBy == nil:
		cause = causeDecode
	case endedBy.Verdict().Next == lifecycle.Over: // it is bound to no other rank
		return
	case endedBy.Reason == lifecycle.Unbegun:
		cause = causeSilent
	case endedBy.Call == lifecycle.Decode: // no other fault of a decode call ends both
		cause = causeCallback
	}
	m.rebinds.WithLabelValues(cause).Inc()
}
