package request

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
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

// Env is what requests need of the proxy that serves them. What has no socket and no peer of its own is
// the thing itself: a lease can only come from a Tier.
type Env struct {
	Context    context.Context // ends when the last stream has
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Buckets    []float64 // of histograms of seconds

	Settings  func() *fleet.Settings // in force now
	Serving   func() context.Context // ends when what has no answer yet must end, because the proxy shuts down
	PromptKey func() []byte          // of hashes that tell prompts apart; nil: nobody does

	Client     *engine.Client
	Monitor    Monitor
	Fleet      Fleet
	Engines    func() Engines // as they are now
	Tier       *prefill.Tier
	Locals     *local.Ranks
	Places     *pool.Places
	Dispatcher Dispatcher
	Journal    *journal.Journal
	Owner      *owner.Set // nil: everything is ours
	Node       *geo.Node  // nil: there are no other regions
	Meta       *metaserver.Server
	Loops      *loop.Set // that carry streamed answers; empty: each has a goroutine
}

// Monitor is told how engines did.
type Monitor interface {
	handoff.Monitor
	Answered(instance string)
	Accuse(instance string) (settle func())
}

// Engines is which engines there are, and what is known of them at a moment.
type Engines interface {
	handoff.Engines
	Ranks(instance string) int
	HostsOf(instance string) func(host string) bool
	Born(instance string) fleet.Birth
	Around(worker int32, list []int32) (around []int32, others bool)
	Owned(board, model string) bool
	Context(instance string) int
	NamesRequests(c prefill.Candidate) bool
}

// Fleet keeps the calls, and is told of engines.
type Fleet interface {
	KnownHost(host string) bool
	Coordinates(c prefill.Candidate) *mooncake.Coordinates
	Learn(c prefill.Candidate, b fleet.Birth, at *mooncake.Coordinates)
	TrackProbe(c *prefill.Candidate, call *engine.Call) *fleet.Run
	Untrack(r *fleet.Run)
	AnyPrefill(model string) *engine.Target
	DownSince(instance string, at time.Time) bool
	GaveBack(decode string)
	Exchange(c prefill.Candidate) (*mooncake.Exchange, error)
	Made(b fleet.Birth, c prefill.Candidate, id string) fleet.Birth
	Track(at fleet.Place, call *engine.Call, safe bool) *fleet.Run
}

// Dispatcher gives slots on decode ranks.
type Dispatcher interface {
	handoff.Dispatcher
	Blocked(board string) (prefillers []string)       // from which KV lately did not arrive at every decode engine
	Shunned(s *dispatcher.Slot) (prefillers []string) // from which it did not arrive at this one
	Rerouted(s *dispatcher.Slot, prefiller string)    // another one prefills for a slot
	EnqueueMixed(e *pool.Entry, hits []board.Hit) <-chan dispatcher.Result
	EnqueueLocal(e *pool.Entry, l *board.Local) <-chan dispatcher.Result
	Withdraw(e *pool.Entry)
	Counted(s *dispatcher.Slot, prompt int)
	Preempted(worker int32)
}

// A Server serves requests that were admitted. It has what they share.
type Server struct {
	Env
	metrics     *metrics
	Prompts     *prompt.Reader
	discards    *handoff.Discarder
	legs        service.Leftovers // prefill legs that run beside a decode leg
	tails       service.Leftovers // of engines whose client has its answer: ends of bodies, legs beside one that failed
	open        atomic.Int64      // client requests being served
	ids         atomic.Uint64
	resumeBytes atomic.Int64 // kept for answers that may have to go on elsewhere
}

// New makes the server of a proxy.
func New(env Env) *Server {
	srv := &Server{Env: env}
	srv.Prompts = prompt.NewReader(prompt.Config{Client: env.Client, Fleet: env.Fleet, Tier: env.Tier, Settings: env.Settings, Registerer: env.Registerer, Log: env.Log})
	srv.discards = handoff.NewDiscarder(handoff.Config{
		Context: env.Context, Settings: env.Settings, Client: env.Client, Monitor: env.Monitor,
		Engines: func() handoff.Engines { return env.Engines() }, Places: env.Places, Dispatcher: env.Dispatcher,
		NextID: srv.nextID, Registerer: env.Registerer, Log: env.Log,
	})
	srv.metrics = newMetrics(env.Registerer, env.Buckets, &srv.open)
	return srv
}

// Open is how many client requests are being served.
func (srv *Server) Open() int64 { return srv.open.Load() }

// Finish begins nothing more for requests that are over, and waits until what runs for
// them has ended, or ctx has. The returned function waits for the rest.
func (srv *Server) Finish(ctx context.Context) (wait func()) {
	var all []<-chan struct{}
	for _, g := range []*service.Leftovers{&srv.tails, &srv.discards.Leftovers, &srv.legs} {
		over := g.Close()
		select {
		case <-over:
		case <-ctx.Done():
		}
		all = append(all, over)
	}
	return func() {
		for _, over := range all {
			<-over
		}
	}
}

func (srv *Server) nextID() uint64 { return srv.ids.Add(1) }
