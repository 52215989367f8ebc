// Package gateway wires the parts of the proxy: it starts them, gives them a new config,
// shuts them down, and reports their status. Package admission receives requests, and
// package request serves them.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/engine/discover"
	"evenkeel/gateway/abort"
	"evenkeel/gateway/admission"
	"evenkeel/gateway/adviser"
	"evenkeel/gateway/config"
	"evenkeel/gateway/discovery"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/fleetcall"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/loop"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/passthrough"
	"evenkeel/gateway/peerserver"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/request"
	"evenkeel/gateway/service"
	"evenkeel/gateway/watch"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// New wires a proxy from a validated config. No socket is open before Start. If New fails, it ends
// the context of the parts that it has made. Each part is made after the parts that it is given as
// values; a part that is made later is reached through a function. So New makes, in this order: the
// config and the journal, the parts that know the engines and choose among them (makeTiers), owner
// and peers, which share engines with other proxies, the parts that serve requests and watch over
// them, and the server of the listener.
func New(cfg *config.Config, log *zap.Logger) (g *Gateway, err error) {
	g = &Gateway{log: log, started: time.Now(), reg: prometheus.NewRegistry()}
	g.ctx, g.stop = context.WithCancel(context.Background())
	defer func(made *Gateway) { // made is an argument, because g is nil after an error
		if err == nil {
			return
		}
		made.stop()
		if made.journal != nil {
			_ = made.journal.Close() // nothing was written to the request log, so nothing is lost
		}
	}(g)
	g.service = newService(g)
	reloader, fit, err := reload.New(cfg, g.reloadDeps())
	if err != nil {
		return nil, err
	}
	g.config = reloader
	g.journal, err = journal.New(journal.Config{
		File: cfg.Log.Requests, Receipts: receipt.NewRing(cfg.Admin.Receipts, cfg.Admin.ReceiptsBytes), Registerer: g.reg,
		Buckets: secondsBuckets, Log: log,
	})
	if err != nil {
		return nil, fmt.Errorf("log.requests: %w", err)
	}
	beginTraces, err := g.journal.PrepareTracing(&cfg.Tracing)
	if err != nil {
		return nil, err
	}
	decision := cfg.Decision() // the dispatcher's config
	decision.Predictor.Fit = fit
	if err := makeTiers(g, cfg, &decision); err != nil {
		return nil, err
	}
	g.bodies = edge.NewBodies(int64(cfg.Limits.Bodies))
	if g.owner, err = owner.New(cfg, ownerDeps(g)); err != nil {
		return nil, err
	}
	g.fleet.Admission = g.owner // set only here, because the owner needs the fleet; no engine has entered the fleet yet
	g.calls = fleetcall.New(fleetcall.Deps{
		Context: g.ctx, Go: g.background.Go, Log: log, Client: g.client, Settings: g.Config, Fleet: g.fleet, Forget: g.forgetCaches,
	})
	if g.peers, err = peerserver.New(g.peerDeps()); err != nil {
		return nil, err
	}
	g.requests = request.New(g.requestDeps())
	g.advice = adviser.New(adviser.Deps{
		Settings: func() *config.Advice { return &g.conf().Advice }, Fleet: g.fleet, Prefill: g.scheduler, Dispatcher: g.dispatcher,
		Places: g.places,
	})
	g.reg.MustRegister(g.advice)
	g.watch = watch.New(watch.Deps{Sample: observer{g}.Sample, Facts: observer{g}.Facts, Registerer: g.reg})
	g.reporters = []reporter{g.peers, g.owner}
	if err := g.discover(); err != nil {
		return nil, err
	}
	g.admission = admission.New(admissionDeps(g))
	g.registerMetrics()
	g.server = newServer(g, &cfg.Limits)
	return g, beginTraces() // traces begin last, when nothing else can fail any more
}

// newService returns the part that takes the proxy out of service and back.
func newService(g *Gateway) *service.Service {
	// MoveCalls ends the calls to engines. Usually their requests then go on at other engines. But
	// before it calls endAllCalls, the service ends the context that requests need for that, so here
	// they end.
	endAllCalls := func() (calls int) {
		everywhere := func(roster.Location) bool { return true }
		return g.fleet.MoveCalls(everywhere)
	}
	return service.New(service.Deps{
		Context: g.ctx, Log: g.log, Grace: func() time.Duration { return g.conf().Limits.DrainGrace }, EndAll: endAllCalls,
	})
}

// makeTiers makes the parts that know the engines, and the prefill tier and the dispatcher, which
// choose among them. decision is the dispatcher's config, which makeTiers completes.
func makeTiers(g *Gateway, cfg *config.Config, decision *dispatcher.Config) (err error) {
	g.client = engine.NewClient(engine.Options{})
	g.rankCaches = local.New(cfg.Prefill.Index.MaxBytes) // predicts the prefix caches of decode ranks
	g.places = pool.NewSemaphore(cfg.Pool.Size)
	g.monitor = engine.NewMonitor(engine.MonitorConfig{
		Client: g.client, Registerer: g.reg, Log: g.log,
		HealthInterval: cfg.Health.Interval, FactsInterval: 10 * cfg.Health.Interval, Canary: cfg.Health.Canary,
	})
	g.callbacks = g.newMetaserver()
	g.fleet = fleet.New(fleetDeps(g))
	g.monitor.OnChange(g.fleet.OnStatus)
	g.monitor.OnSample(g.fleet.OnSample)
	if g.scheduler, err = prefill.New(g.prefillConfig(g.conf())); err != nil {
		return err
	}
	g.places.OnFree(g.scheduler.Wake)
	completeDispatcherConfig(g, decision, cfg.RecordsReasons())
	g.dispatcher, err = dispatcher.Start(g.ctx, *decision)
	return err
}

// ownerDeps returns what the set of scopes, which this proxy may share with other proxies, needs
// from the other parts of this proxy.
func ownerDeps(g *Gateway) owner.Deps {
	return owner.Deps{
		Context: g.ctx, Log: g.log, Registerer: g.reg, Buckets: secondsBuckets,
		KVHoldTimeout: func() time.Duration { return g.conf().HoldTimeout() }, Leaving: g.service.Draining,
		Engines: func() map[string]owner.EngineCounts { return g.fleet.Now().CountByScope() },
		Load:    g.fleet.LoadOf, Publish: g.publishOwners,
	}
}

// admissionDeps returns what the admission, which receives the requests of clients, needs from the
// other parts of this proxy.
func admissionDeps(g *Gateway) admission.Deps {
	return admission.Deps{
		Started: g.started, Ready: g.Ready, Loads: g.modelLoads, Config: g.config, Service: g.service, Fleet: g.fleet, Requests: g.requests,
		Through: passthrough.New(passthrough.Deps{
			Registerer: g.reg, Buckets: secondsBuckets, Settings: func() *fleet.Settings { return g.conf().Settings },
			Engines: func() passthrough.Engines { return g.fleet.Now() }, Requests: g.requests, Bodies: g.bodies,
		}),
	}
}

// fleetDeps returns what the fleet needs from the other parts of this proxy.
func fleetDeps(g *Gateway) fleet.Deps {
	return fleet.Deps{
		Context: g.ctx, Serving: g.service.Context, Started: g.started, Log: g.log,
		Settings: func() *fleet.Settings { return g.conf().Settings }, Client: g.client, Monitor: g.monitor,
		Dispatch: func(ctx context.Context) board.Status { return g.dispatcher.Status(ctx) },
		Publish:  g.publish, Gauged: func(worker int32, kvTokens int64, at time.Time) { g.dispatcher.Gauged(worker, kvTokens, at) },
	}
}

// completeDispatcherConfig sets in the dispatcher's config the parts of this proxy that the
// dispatcher uses. explain says that the dispatcher records the reasons of its decisions.
func completeDispatcherConfig(g *Gateway, c *dispatcher.Config, explain bool) {
	c.TTL = g.conf().PoolTTL()
	c.Explain = explain
	c.Places = g.places
	c.OnRoom = g.scheduler.Wake
	c.OnLosses = g.scheduler.AvoidFor
	c.Registerer, c.Log = g.reg, g.log
	c.EngineMetrics = func(worker int32) (metrics dispatcher.EngineMetrics, ok bool) {
		r := g.fleet.Now().Rank(worker)
		if r == nil { // the rank has left the fleet
			return metrics, false
		}
		gauges, ok := g.monitor.Gauges(r.Instance, r.Target.Rank)
		return dispatcher.EngineMetrics{Running: gauges.Running, Waiting: gauges.Waiting, KVShare: gauges.KVShare}, ok
	}
}

// newServer returns the server of the public listener. It hands each request to the admission.
func newServer(g *Gateway, limits *config.Limits) *edge.Server {
	return edge.NewServer(edge.Options{
		Handler: g.admission.Handle, Log: g.log, MaxBody: limits.Body, MaxHead: limits.Head,
		Concurrency: limits.Connections + 1, // one more than the listener's own limit, which then is reached first, and does not block accept
		ReadTimeout: limits.ReadTimeout, IdleTimeout: limits.IdleTimeout,
		Authenticate: g.admission.Authenticate, Caller: g.admission.Caller, Bodies: g.bodies, Refused: g.admission.CountRefused,
		Answer: g.admission.AnswerRefused,
	})
}

// requestDeps returns what the server of requests needs from the other parts of this proxy.
func (g *Gateway) requestDeps() request.Deps {
	return request.Deps{
		Context: g.ctx, Log: g.log, Registerer: g.reg, Buckets: secondsBuckets,
		Settings: func() *fleet.Settings { return g.conf().Settings }, Serving: g.service.Context, PromptKey: g.config.PromptKey,
		Client: g.client, Monitor: g.monitor, Fleet: g.fleet, Engines: func() request.Engines { return g.fleet.Now() }, Prefill: g.scheduler,
		LocalRanks: g.rankCaches, Places: g.places, Dispatcher: g.dispatcher, Journal: g.journal,
		Owner: g.owner, Peers: g.peers.Geo(), Callbacks: g.callbacks, Running: new(abort.Running), Loops: &g.loops,
	}
}

// discover makes the discovery of engines from the sources that the config names and those of a
// test, and starts no source yet. Without any source, g.discovery stays nil. The discovery adds the
// engines that it finds to the fleet.
func (g *Gateway) discover(ofTest ...discover.Source) error {
	deps := &discovery.Deps{
		Fleet: g.fleet, Settings: func() *fleet.Settings { return g.conf().Settings }, Dispatch: g.dispatcher.Status, Callbacks: g.callbacks,
		Registerer: g.reg, Log: g.log,
	}
	sources, err := deps.Sources()
	if err != nil {
		return err
	}
	if g.discovery = discovery.New(deps, append(sources, ofTest...)...); g.discovery != nil {
		g.reporters = append(g.reporters, g.discovery)
		g.config.OnChange(g.discovery.Refresh)
	}
	return nil
}

// Callbacks is the server to which decode engines report where the KV of a request goes; nil: no
// decode engine calls back.
func (g *Gateway) Callbacks() *metaserver.Server { return g.callbacks }

// newMetaserver makes the server to which decode engines report where the KV of a request goes;
// nil: the config has no address for it. The server accepts callbacks from the addresses in
// bind.allow; if there are none, from the decode engines of the fleet.
func (g *Gateway) newMetaserver() *metaserver.Server {
	cfg := g.conf()
	if cfg.Bind.Listen == "" {
		return nil
	}
	return metaserver.New(metaserver.Config{
		Listen: cfg.Bind.Listen, Advertise: func() string { return g.conf().Bind.Advertise }, Connections: cfg.Limits.Connections,
		Allowed: func(a netip.Addr) bool {
			if b := &g.conf().Bind; len(b.Allow) > 0 {
				return b.Allows(a)
			}
			return g.fleet.Now().CallsBack(a)
		},
		Registerer: g.reg, Log: g.log,
	})
}

// publish gives the lists of engines and ranks to the prefill tier, the prefix index of decode
// ranks and the dispatcher.
func (g *Gateway) publish(candidates []prefill.Candidate, locals []local.Rank, workers []board.Worker) {
	g.scheduler.SetCandidates(candidates)
	g.rankCaches.Set(locals)
	g.dispatcher.SetWorkers(workers)
}

// Start puts the engines of the config into the fleet, opens all listeners and begins to watch the
// engines. It returns once clients can connect; /readyz says when they can be served. admin answers
// the requests at the listener for operators. After an error, nothing of the proxy runs or is open
// any more, so that the caller can try again with a new proxy.
func (g *Gateway) Start(admin http.Handler) (err error) {
	defer func() {
		if err != nil {
			g.discard()
		}
	}()
	adminServer, err := newAdminServer(g, admin)
	if err != nil {
		return err
	}
	addEnginesToFleet, err := g.fleet.Load() // builds the engines, which may fail
	if err != nil {
		return err
	}
	addEnginesToFleet()
	const filesPerRequest = 2 // a client's connection and an engine's
	if _, err := edge.RaiseFileLimit(g.log, uint64(filesPerRequest*g.conf().Limits.Connections)); err != nil {
		g.log.Warn("the limit of open files could not be raised", zap.Error(err))
	}
	if err := openListeners(g); err != nil {
		return err
	}
	if err := g.callbacks.Start(); err != nil { // nil callbacks start nothing
		return err
	}
	if g.callbacks != nil {
		g.log.Info("decode engines call back, and must reach this URL", zap.String("metaserver", g.callbacks.URL()),
			zap.Strings("decode", g.conf().CallbackHosts()))
	}
	loops := g.conf().EventLoops
	if loops == 0 { // 0: the config does not set event_loops
		loops = loop.Default()
	}
	if err := g.loops.Start(max(0, loops), g.log); err != nil { // -1 in the config means no loops
		return fmt.Errorf("event_loops: %w", err)
	}
	if g.peers != nil {
		if err := g.peers.Start(); err != nil { // last, because from then on the proxy claims engines and answers other proxies
			return err
		}
	}
	runParts(g) // starts what works in the background, such as the health checks of engines
	g.background.Go(func() {
		if err := g.server.Serve(g.config.Certificate(reload.Public).Listener(g.listener)); err != nil && !errors.Is(err, net.ErrClosed) {
			g.log.Error("the public listener has failed", zap.Error(err))
		}
	})
	serveAdmin(g, adminServer)
	g.log.Info("listening", zap.String("public", g.Addr()), zap.String("admin", g.AdminAddr()),
		zap.Int("prefill", len(g.conf().Engines.Prefill)), zap.Int("decode", len(g.conf().Engines.Decode)),
		zap.Int("aggregated", len(g.conf().Engines.Aggregated)), zap.String("policy", g.dispatcher.Policy()))
	return nil
}

// openListeners opens the listener for clients and the one for operators. After an error, the first
// one may be open.
func openListeners(g *Gateway) (err error) {
	limits := &g.conf().Limits
	g.listener, err = edge.Listen(g.conf().Listen, edge.ListenOptions{
		WriteTimeout: limits.WriteTimeout, MaxConns: limits.Connections, MaxConnsPerIP: limits.PerIP,
		MaxLag: limits.ClientLag, SendBuffer: limits.ClientBacklog,
		TLS: g.config.Certificate(reload.Public) != nil, Log: g.log,
	})
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if g.admin, err = net.Listen("tcp", g.conf().Admin.Listen); err != nil {
		return fmt.Errorf("admin.listen: %w", edge.ListenError(g.conf().Admin.Listen, err))
	}
	return nil
}

// runParts starts the goroutines of the parts that work until g.ctx ends.
func runParts(g *Gateway) {
	g.background.Go(func() { g.monitor.Run(g.ctx) })
	g.background.Go(func() { g.scheduler.Run(g.ctx) })
	g.background.Go(func() {
		<-g.ctx.Done()
		g.rankCaches.Close()
	})
	g.background.Go(func() { g.config.Watch(g.ctx) })
	g.background.Go(func() { g.advice.Run(g.ctx) })
	g.background.Go(func() { g.watch.Run(g.ctx) })
	g.background.Go(func() { g.logReadiness(g.ctx) })
	if g.discovery != nil {
		g.background.Go(func() { g.discovery.Run(g.ctx) })
	}
}

// newAdminServer returns the server of the admin listener.
func newAdminServer(g *Gateway, admin http.Handler) (*http.Server, error) {
	errorLog, err := zap.NewStdLogAt(g.log, zap.DebugLevel) // net/http logs failed TLS handshakes, which mostly come from port scanners
	return &http.Server{
		Handler: admin, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: errorLog,
	}, err
}

// serveAdmin serves the admin listener until g.ctx ends. It warns if the admin token can be read on
// the network.
func serveAdmin(g *Gateway, adminServer *http.Server) {
	g.background.Go(func() {
		err := adminServer.Serve(g.config.Certificate(reload.Admin).Listener(g.admin))
		closedByExit := errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed)
		if err != nil && !closedByExit {
			g.log.Error("the admin listener has failed", zap.Error(err))
		}
	})
	g.background.Go(func() {
		<-g.ctx.Done()
		_ = adminServer.Close()
	})
	host, _, err := net.SplitHostPort(g.conf().Admin.Listen)
	reachableByOthers := err == nil && !config.Loopback(host)
	if reachableByOthers && g.config.Certificate(reload.Admin) == nil { // nil: the listener has no TLS
		g.log.Warn("the admin token crosses the network in clear text; set admin.tls, or keep others off that network",
			zap.String("admin", g.conf().Admin.Listen))
	}
}

// Addr returns the address (host:port) of the listener for clients.
func (g *Gateway) Addr() string { return g.listener.Addr().String() }

// AdminAddr returns the address (host:port) of the listener for operators.
func (g *Gateway) AdminAddr() string { return g.admin.Addr().String() }

// CutTime bounds how long Shutdown may still take after it has stopped waiting for streams.
const CutTime = 15 * time.Second

// Shutdown takes no new requests, and waits for streams and for hand-offs that are being released.
// Streams that still run at ctx's deadline end with an error event. If ctx is cancelled before its
// deadline, their connections are cut. Shutdown returns an error in both cases. All goroutines have
// ended when it returns.
func (g *Gateway) Shutdown(ctx context.Context) error {
	g.owner.HandOver(ctx) // other proxies take over the decode groups; until then this one serves the requests that they forward
	g.service.RefuseForExit()
	// When cut ends, connections that are still open are cut.
	cut, cutNow := context.WithCancel(context.WithoutCancel(ctx))
	defer cutNow()
	awaitRest, err := finishRequests(ctx, cut, g, cutNow)
	g.owner.ReleaseAll(cut) // the leases that no other proxy has taken over
	g.stop()                // tells the background work of all parts to end
	if g.peers != nil {
		g.peers.Geo().Close()
	}
	g.service.Close()
	g.fleet.StopTimers()
	awaitRest()         // waits for work that finished requests have left; g.stop has told it to end
	g.callbacks.Close() // closed only now, because until here requests may wait for callbacks of decode engines
	g.background.Wait()
	g.loops.Close()
	// The parts above may use these until they end, so these are closed last.
	err = errors.Join(err, g.journal.Close())
	g.owner.Close()
	g.client.Close()
	return err
}

// finishRequests waits until all requests have finished, those of clients and those that other
// proxies forward. If ctx ends before, it ends the requests that remain (endRemaining), and err
// says how many these were. cutNow ends the context cut, and so cuts the connections that are still
// open.
//
// Background work of finished requests goes on, such as freeing KV that no engine fetched.
// finishRequests waits for it, too, but not beyond the end of cut. awaitRest waits for what is left
// then. The caller calls it after g.stop, which tells that work to end.
func finishRequests(ctx, cut context.Context, g *Gateway, cutNow func()) (awaitRest func(), err error) {
	var remaining int64 // requests that were ended, because ctx ended before they had finished; valid once ended is closed
	ended := make(chan struct{})
	cancelForcedEnd := context.AfterFunc(ctx, func() {
		defer close(ended)
		remaining = endRemaining(ctx, g, cutNow)
	})
	err = edge.Drain(cut, g.server, g.listener)
	_ = g.listener.Close() // a server that has not accepted any connection yet does not close its listener
	if g.peers != nil {
		err = errors.Join(err, g.peers.Drain(cut))
	}
	awaitRest = g.requests.Finish(cut)
	if finishedBefore := cancelForcedEnd(); !finishedBefore { // ctx ended first, so endRemaining runs or has run
		<-ended
		if remaining > 0 {
			err = errors.Join(fmt.Errorf("shutdown: %w: %d requests had not finished and were ended; "+
				"allow more time if they mattered", ctx.Err(), remaining), err)
		}
	}
	return awaitRest, err
}

// endRemaining is called when ctx has ended before all requests have finished. It ends those that
// remain, and returns how many these are. Their clients then have endGrace to read an error event
// before cutNow is called. If ctx was cancelled, cutNow is called at once.
func endRemaining(ctx context.Context, g *Gateway, cutNow func()) (remaining int64) {
	remaining = g.requests.Open()
	if cancelled := !errors.Is(ctx.Err(), context.DeadlineExceeded); cancelled {
		cutNow()
	}
	g.service.EndAll()
	time.AfterFunc(endGrace, cutNow)
	return remaining
}

// endGrace is how long clients have to read the error event that ends their answer.
const endGrace = 5 * time.Second

// Check does what a start does before it opens the first socket. It returns the error that
// would end the start, and the warnings that the start would log.
func Check(cfg *config.Config) ([]reload.Warning, error) {
	return reload.Check(cfg, func(cfg *config.Config, log *zap.Logger) error {
		g, err := New(cfg, log)
		if err == nil {
			_, err = g.fleet.Load()
			g.discard()
		}
		return err
	})
}

// discard ends the goroutines, and closes the listeners and files, of a proxy that New has made and
// that serves nothing: it is never started, or its start has failed.
func (g *Gateway) discard() {
	g.stop()
	if g.listener != nil {
		_ = g.listener.Close()
	}
	if g.admin != nil {
		_ = g.admin.Close()
	}
	if g.peers != nil {
		g.peers.Geo().Close()
	}
	g.fleet.StopTimers()
	g.rankCaches.Close()
	g.callbacks.Close()
	g.background.Wait()
	g.loops.Close()
	_ = g.journal.Close() // nothing was written to the request log, so nothing is lost
	g.owner.Close()
	g.client.Close()
}
