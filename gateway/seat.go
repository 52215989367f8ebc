package gateway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/admission"
	"evenkeel/gateway/adviser"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleetcall"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/loop"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/peerserver"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/request"
	"evenkeel/gateway/selftest"
	"evenkeel/gateway/service"
	"evenkeel/gateway/watch"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// Gateway is one running proxy.
type Gateway struct {
	log     *zap.Logger
	reg     *prometheus.Registry
	started time.Time

	config     *reload.Reloader
	service    *service.Service
	client     *engine.Client
	monitor    *engine.Monitor
	fleet      *fleet.Fleet
	discovery  *fleet.Discovery // nil: nothing is discovered
	tier       *prefill.Tier
	locals     *local.Ranks
	places     *pool.Places
	dispatcher *dispatcher.Dispatcher
	owner      *owner.Set         // nil: everything is ours
	peers      *peerserver.Peers  // nil: there are no others
	meta       *metaserver.Server // nil: no decode engine calls back
	journal    *journal.Journal
	loops      loop.Set // that carry streamed answers
	requests   *request.Server
	advice     *adviser.Adviser
	calls      *fleetcall.Caller
	watch      *watch.Watch
	seats      atomic.Uint64 // how many were asked for; their ids have the highest bit, and no request's id has it

	door     *admission.Handler
	bodies   *edge.Account
	server   *edge.Server
	listener *edge.Listener
	admin    net.Listener

	ctx        context.Context // ends when the last stream has
	stop       context.CancelFunc
	background sync.WaitGroup // loops that end with ctx
}

// seatPatience is how long a test waits for a slot of a rank.
const seatPatience = 10 * time.Second

// seatLook is the time between two checks whether a rank has a free slot.
const seatLook = 100 * time.Millisecond

// Seat takes a slot of a decode rank for a request of the self-test, as clients' requests have one: it is charged, counted
// and sent with the epoch of our ownership. If another proxy sends requests to the rank, the error is selftest.ErrNotOurs.
func (g *Gateway) Seat(ctx context.Context, name string, tokens int) (selftest.Seat, error) {
	look := time.NewTicker(seatLook)
	defer look.Stop()
	for end := time.Now().Add(seatPatience); ; {
		rank, serves := g.fleet.Now().Named(name)
		switch {
		case rank == nil:
			return selftest.Seat{}, fmt.Errorf("rank %s serves no requests now", name)
		case rank.Scope.Ours() != nil:
			return selftest.Seat{}, selftest.ErrNotOurs
		}
		rule := &board.Local{Ranks: []board.LocalRank{{Worker: rank.Worker, Tokens: tokens}}, Threshold: tokens, InFlight: math.MaxInt}
		got := <-g.dispatcher.EnqueueLocal(&pool.Entry{ID: 1<<63 | g.seats.Add(1), Model: serves, Prompt: tokens, Arrival: time.Now()}, rule)
		switch {
		case got.Err == nil:
			return selftest.Seat{Scope: rank.Scope, Leave: func() {
				g.dispatcher.Release(got.Slot, board.Outcome{Kind: board.Cancelled}) // nothing is learned from it
			}}, nil
		case !errors.Is(got.Err, board.ErrNotLocal):
			return selftest.Seat{}, got.Err
		case time.Now().After(end):
			return selftest.Seat{}, fmt.Errorf("rank %s has no free slot", name)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return selftest.Seat{}, ctx.Err()
		}
	}
}
