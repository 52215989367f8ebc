package gateway

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/admission"
	"evenkeel/gateway/adviser"
	"evenkeel/gateway/discovery"
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
	discovery  *discovery.Discovery // nil: nothing is discovered
	scheduler  *prefill.Scheduler
	rankCaches *local.Ranks // predicts the prefix caches of decode ranks
	places     *pool.Semaphore
	dispatcher *dispatcher.Dispatcher
	owner      *owner.Set         // nil: all engines are served by this proxy alone
	peers      *peerserver.Peers  // nil: there are no other proxies
	callbacks  *metaserver.Server // nil: no decode engine calls back
	journal    *journal.Journal
	loops      loop.Set // event loops that carry streamed answers
	requests   *request.Server
	advice     *adviser.Adviser
	calls      *fleetcall.Caller
	watch      *watch.Watch
	reporters  []reporter    // parts of the proxy that add their own facts for the watch
	slotsTaken atomic.Uint64 // number of slots that the self-test has asked for; TakeSlot makes ids of requests from it

	admission *admission.Handler
	bodies    *edge.Quota
	server    *edge.Server
	listener  *edge.Listener
	admin     net.Listener

	ctx        context.Context // ends after the last stream
	stop       context.CancelFunc
	background sync.WaitGroup // goroutines that end with ctx
}
