package fleet_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/engine/discover"
	"evenkeel/gateway/admission"
	"evenkeel/gateway/config"
	"evenkeel/gateway/discovery"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/loop"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/passthrough"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/request"
	"evenkeel/gateway/service"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/predictor"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

func TestMain(m *testing.M) { refclient.Main(m, 24, 6) }

const (
	model    = refclient.Model
	patience = refclient.Patience
	streamed = `"stream":true,`
)

// Bodies of requests, and what comes of them.
var (
	chat, talk, completion = refclient.Chat, refclient.Talk, refclient.Completion
	read, whole            = refclient.Read, refclient.Whole
)

type reply = refclient.Reply

// options describe a bed; the zero value is one prefill engine and one decode engine of two ranks,
// all fast.
type options struct {
	prefill, decode []refengine.Config
	mixed           []refengine.Config // engines that prefill and decode; with any, there are no others unless they are named
	profile         mooncake.Profile
	configure       func(*config.Config)
	discover        func(b *bed) []discover.Source // finds the engines, in place of the config
	partly          bool                           // not all engines come up at the start
	// decode engines may pull KV that was given away: the test says that no answer is made of it
	late  bool
	dirty bool // the engines may end with pins or counted faults: the test says which
}

// A bed is a fleet whose engines are watched, with what serves requests there: no operator, no
// page, no peer and no owner.
type bed struct {
	refclient.Client
	refclient.Engines
	cfg      *config.Config
	reg      *prometheus.Registry
	logs     *observer.ObservedLogs
	receipts *receipt.Ring

	conf       *reload.Reloader
	next       atomic.Pointer[config.Config] // what a reload reads
	fleet      *fleet.Fleet
	found      discovery.Deps
	discovery  *discovery.Discovery
	monitor    *engine.Monitor
	scheduler  *prefill.Scheduler
	locals     *local.Ranks
	places     *pool.Semaphore
	dispatcher *dispatcher.Dispatcher
	meta       *metaserver.Server
	requests   *request.Server
}

// start starts everything and waits until all engines are up. At the end of the test it holds that
// nothing was leaked, replayed or left charged.
func start(t *testing.T, o options) *bed {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	b := &bed{cfg: config.Default(), reg: prometheus.NewRegistry(), logs: logs, receipts: receipt.NewRing(1000, 1<<20)}
	b.Client = refclient.Client{
		T: t, HTTP: refclient.NewHTTP(), RequestLog: filepath.Join(t.TempDir(), "requests.jsonl"),
		Page: b.page, Open: func() int64 { return b.requests.Open() },
	}
	b.cfg.Dispatch.Window, b.cfg.Prefill.Retry.Base, b.cfg.Prefill.Scrape.Interval = 200*time.Microsecond, time.Millisecond,
		50*time.Millisecond
	b.cfg.Dispatch.TickLimit = patience                                          // on a busy machine no other policy stands in
	b.cfg.Health.Canary = 0                                                      // a fault would strike it, too
	o.profile.ChatResume = cmp.Or(o.profile.ChatResume, mooncake.ChatResumeNone) // a test whose chats go on says how
	b.cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: o.profile}
	b.Engines = b.Enter(b.cfg, o.prefill, o.decode, o.mixed)
	b.Late = o.late
	if o.discover != nil {
		b.cfg.Engines = config.Engines{}
	}
	if o.configure != nil {
		o.configure(b.cfg)
	}
	require.NoError(t, b.cfg.Validate())
	end := b.serve(zap.New(core), o.discover)
	t.Cleanup(func() {
		if !t.Failed() {
			b.settled(o.dirty)
		}
		b.HTTP.CloseIdleConnections()
		end()
		for _, e := range b.All() {
			e.Close()
		}
		if t.Failed() {
			for _, l := range logs.All() {
				t.Log(l.Level, l.Message, l.ContextMap())
			}
		}
	})
	b.Eventually("requests are served", b.ready)
	if !o.partly {
		listed := &b.cfg.Engines
		b.Eventually("all engines are up, and requests are admitted to them", func() bool {
			prefills, decodes := b.fleet.Now().CountInService()
			both := len(listed.Aggregated) // counted on either side
			return prefills >= len(listed.Prefill)+both && decodes >= len(listed.Decode)+both
		})
	}
	return b
}

// serve wires the parts and has clients served until end.
func (b *bed) serve(log *zap.Logger, find func(*bed) []discover.Source) (end func()) {
	var err error
	ctx, stop := context.WithCancel(context.Background())
	started, client, bodies := time.Now(), engine.NewClient(engine.Options{}), edge.NewBodies(int64(b.cfg.Limits.Bodies))
	b.conf, _, err = reload.New(b.cfg, reload.Deps{
		Log: log, Registerer: b.reg, Started: started, Prepare: b.prepare,
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil },
	})
	require.NoError(b, err)
	b.next.Store(b.cfg)
	const noFile = "evenkeel.yaml" // never written, so that only the test causes a reload
	b.conf.SetSource(noFile, func() (*config.Config, error) { return b.next.Load(), b.next.Load().Validate() })
	settings := func() *fleet.Settings { return b.conf.Settings().Settings }
	serving := service.New(service.Deps{
		Context: ctx, Log: log, Grace: func() time.Duration { return 0 },
		EndAll: func() int { return b.fleet.MoveCalls(func(roster.Location) bool { return true }) },
	})
	told, err := journal.New(journal.Config{File: b.RequestLog, Receipts: b.receipts, Registerer: b.reg, Log: log})
	require.NoError(b, err)
	b.locals, b.places = local.New(b.cfg.Prefill.Index.MaxBytes), pool.NewSemaphore(b.cfg.Pool.Size)
	b.monitor = engine.NewMonitor(engine.MonitorConfig{
		Client: client, Registerer: b.reg, Log: log, HealthInterval: b.cfg.Health.Interval, FactsInterval: 10 * b.cfg.Health.Interval,
		Canary: b.cfg.Health.Canary,
	})
	if b.cfg.Bind.Listen != "" {
		b.meta = metaserver.New(metaserver.Config{
			Listen: b.cfg.Bind.Listen, Advertise: func() string { return "" }, Connections: 100, Registerer: b.reg, Log: log,
			Allowed: func(a netip.Addr) bool { return b.fleet.Now().CallsBack(a) },
		})
	}
	b.fleet = fleet.New(fleet.Deps{
		Context: ctx, Serving: serving.Context, Started: started, Log: log, Settings: settings, Client: client,
		Monitor:  b.monitor,
		Dispatch: func(ctx context.Context) board.Status { return b.dispatcher.Status(ctx) },
		Publish: func(candidates []prefill.Candidate, locals []local.Rank, workers []board.Worker) {
			b.scheduler.SetCandidates(candidates)
			b.locals.Set(locals)
			b.dispatcher.SetWorkers(workers)
		},
		Gauged: func(worker int32, kvTokens int64, at time.Time) { b.dispatcher.Gauged(worker, kvTokens, at) },
	})
	b.fleet.Admission = (*owner.Set)(nil)
	b.monitor.OnChange(b.fleet.OnStatus)
	b.monitor.OnSample(b.fleet.OnSample)
	tier := b.conf.Settings().Tier()
	tier.Places, tier.Ranks, tier.Scraper, tier.Registerer, tier.Log = b.places, b.locals, b.fleet.Scrape, b.reg, log
	tier.Free = func(board, model string) (int, bool) { return b.dispatcher.Free(board, model) }
	tier.Decode = func(board, model string, within time.Duration) (int, bool) {
		return b.dispatcher.Room(board, model, within)
	}
	b.scheduler, err = prefill.New(tier)
	require.NoError(b, err)
	b.places.OnFree(b.scheduler.Wake)
	decision := b.cfg.Decision()
	decision.TTL, decision.Registerer, decision.Places, decision.OnRoom, decision.Log = b.conf.Settings().PoolTTL(), b.reg, b.places,
		b.scheduler.Wake, log
	b.dispatcher, err = dispatcher.Start(ctx, decision)
	require.NoError(b, err)
	loops := &loop.Set{}
	b.requests = request.New(request.Deps{
		Context: ctx, Log: log, Registerer: b.reg, Settings: settings, Serving: serving.Context, PromptKey: b.conf.PromptKey,
		Client: client, Monitor: b.monitor, Fleet: b.fleet, Engines: func() request.Engines { return b.fleet.Now() },
		Prefill: b.scheduler, LocalRanks: b.locals, Places: b.places, Dispatcher: b.dispatcher, Journal: told, Callbacks: b.meta, Loops: loops,
	})
	door := admission.New(admission.Deps{
		Started: started, Ready: func() (bool, string) { return b.ready(), "" },
		Loads:  func(context.Context) []admission.ModelLoad { return nil },
		Config: b.conf, Service: serving, Fleet: b.fleet, Requests: b.requests,
		Through: passthrough.New(passthrough.Deps{
			Registerer: b.reg, Settings: settings, Engines: func() passthrough.Engines { return b.fleet.Now() }, Requests: b.requests,
			Bodies: bodies,
		}),
	})
	enter, err := b.fleet.Load()
	require.NoError(b, err)
	enter()
	b.found = discovery.Deps{
		Fleet: b.fleet, Settings: settings, Dispatch: b.dispatcher.Status, Callbacks: b.meta, Registerer: b.reg, Log: log,
	}
	if find != nil {
		b.discovery = discovery.New(&b.found, find(b)...)
		b.conf.OnChange(b.discovery.Refresh)
	}

	limits := &b.cfg.Limits
	ln, err := edge.Listen("127.0.0.1:0", edge.ListenOptions{
		MaxConns: limits.Connections, Log: log, WriteTimeout: limits.WriteTimeout, MaxLag: limits.ClientLag, SendBuffer: limits.ClientBacklog,
	})
	require.NoError(b, err)
	srv := edge.NewServer(edge.Options{
		Handler: door.Handle, Log: log, MaxBody: limits.Body, MaxHead: limits.Head, Concurrency: limits.Connections + 1,
		ReadTimeout: limits.ReadTimeout,
		IdleTimeout: limits.IdleTimeout, Authenticate: door.Authenticate, Caller: door.Caller, Bodies: bodies, Refused: door.CountRefused,
		Answer: door.AnswerRefused,
	})
	require.NoError(b, b.meta.Start())
	require.NoError(b, loops.Start(max(0, loop.Default()), log))
	var background sync.WaitGroup
	background.Go(func() { b.monitor.Run(ctx) })
	background.Go(func() { b.scheduler.Run(ctx) })
	background.Go(func() { b.conf.Watch(ctx) })
	background.Go(func() { <-ctx.Done(); b.locals.Close() })
	if b.discovery != nil {
		background.Go(func() { b.discovery.Run(ctx) })
	}
	background.Go(func() { _ = srv.Serve(ln) })
	b.URL = "http://" + ln.Addr().String()
	return func() {
		limit, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(b, edge.Drain(limit, srv, ln))
		wait := b.requests.Finish(limit)
		stop()
		serving.Close()
		b.fleet.StopTimers()
		wait()
		b.meta.Close()
		background.Wait()
		loops.Close()
		require.NoError(b, told.Close())
		client.Close()
	}
}

// ready says whether an engine of each kind is up that there is to be.
func (b *bed) ready() bool {
	p, d := b.fleet.Now().CountInService()
	known, _ := b.fleet.Now().CountKnown()
	return d > 0 && (p > 0 || known == 0 && b.discovery == nil)
}

// prepare has the fleet take up another config, and nothing else.
func (b *bed) prepare(old, next *reload.Settings, _ *predictor.Fit) (apply func(commit func()) error, err error) {
	plan, err := b.fleet.Plan(old.Settings, next.Settings)
	return func(commit func()) error {
		commit()
		b.fleet.Apply(plan)
		return nil
	}, err
}

// reconfigure has another config in force, as far as the fleet goes by it.
func (b *bed) reconfigure(change func(*config.Config)) {
	b.Helper()
	next := *b.cfg
	change(&next)
	b.next.Store(&next)
	got := b.conf.Reload(false)
	require.Empty(b, got.Error)
	require.Empty(b, got.Restart)
}

// page is the page of metrics.
func (b *bed) page() string {
	b.Helper()
	families, err := b.reg.Gather()
	require.NoError(b, err)
	var text bytes.Buffer
	for _, f := range families {
		_, err := expfmt.MetricFamilyToText(&text, f)
		require.NoError(b, err)
	}
	return text.String()
}

// status is how the proxy is, as far as there is one.
type status struct {
	Open      int64
	PoolUsed  int
	Engines   []roster.EngineStatus
	Prefill   []prefill.CandidateStatus
	Dispatch  board.Status
	Discovery *discover.Status
	Drains    []roster.DrainStatus
}

func (b *bed) now() status {
	s := status{
		Open: b.requests.Open(), PoolUsed: b.places.Used(), Engines: b.fleet.Now().Statuses(), Prefill: b.scheduler.Status(),
		Dispatch: b.dispatcher.Status(context.Background()), Discovery: b.discovery.State(),
	}
	s.Drains = b.fleet.Now().DrainStatuses(s.Dispatch, s.Prefill)
	return s
}

// account is what the parts say of themselves.
func (b *bed) account() refclient.Account {
	return refclient.Account{
		Callbacks: b.meta.Expected(), Open: b.requests.Open(), Places: b.places.Used(), Dispatch: b.dispatcher.Status(context.Background()),
		Prefill: b.scheduler.Status(),
	}
}

// settled waits until nothing is under way and checks every account.
func (b *bed) settled(dirty bool) {
	b.Helper()
	engines := b.Engines
	engines.Dirty = dirty
	b.Settled(&engines, b.account)
}

// allUp waits until every engine takes requests.
func (b *bed) allUp() {
	b.Helper()
	b.AllUp(&b.Engines, b.account)
}

// early is a bed of engines whose connector wants the decode rank before the prefill.
func early(t *testing.T, connector refengine.Connector, o options) *bed {
	t.Helper()
	o.prefill, o.decode, o.configure = refclient.Early(t, connector, o.prefill, o.decode, o.configure)
	return start(t, o)
}

// together is a bed whose ranks do both.
func together(more func(*config.Config)) options {
	return options{mixed: refclient.Cached(), configure: refclient.Exposed(more)}
}

// conditional is a bed whose decode ranks may compute short prompts.
func conditional(more func(*config.Config)) options {
	return options{profile: mooncake.Profile{AllowLocalPrefill: true}, decode: refclient.Cached(), configure: refclient.Conditional(more)}
}

// settledRequests waits for the request log.
func (b *bed) settledRequests(n int) {
	b.Helper()
	b.Eventually("the request is logged", func() bool { return len(b.Records()) == n })
}

func (b *bed) models() (ids []string) {
	b.Helper()
	r := b.Ask("GET", b.URL+"/v1/models", "")
	require.Equal(b, 200, r.Status)
	var list struct {
		Object string
		Data   []struct {
			ID, Object string
		}
	}
	require.NoError(b, json.Unmarshal([]byte(r.Body), &list))
	require.Equal(b, "list", list.Object)
	for _, m := range list.Data {
		require.Equal(b, "model", m.Object)
		ids = append(ids, m.ID)
	}
	return ids
}

// receipt waits until a request has ended and returns what was kept of it.
func (b *bed) receipt(id string) (r *receipt.Receipt) {
	b.Helper()
	b.Eventually("the receipt of "+id+" is closed", func() bool {
		all := b.receipts.Find(id, 1)
		if len(all) == 0 {
			return false
		}
		r = all[0]
		return r.State == receipt.Ended
	})
	return r
}
