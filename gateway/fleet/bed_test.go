package fleet_test

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/engine/discover"
	"evenkeel/gateway/admission"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/loop"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/passthrough"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/request"
	"evenkeel/gateway/service"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/predictor"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

func TestMain(m *testing.M) {
	parallel := "24" // these tests wait more than they compute
	if race.Enabled {
		parallel = "6" // not so here: more at once would run into each other's deadlines
	}
	if err := flag.Set("test.parallel", parallel); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),    // one for the process
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2")) // ends up to 10 s after its server
}

const (
	model    = "ref"
	streamed = `"stream":true,`
)

// patience is how long a test waits for what takes milliseconds, unless the machine has much else to do.
const patience = time.Minute

// options describe a bed; the zero value is one prefill engine and one decode engine of two ranks, all fast.
type options struct {
	prefill, decode []refengine.Config
	mixed           []refengine.Config // engines that prefill and decode; with any, there are no others unless they are named
	profile         mooncake.Profile
	configure       func(*config.Config)
	discover        func(b *bed) []discover.Source // finds the engines, in place of the config
	partly          bool                           // not all engines come up at the start
	late            bool                           // decode engines may pull KV that was given away: the test says that no answer is made of it
	dirty           bool                           // the engines may end with pins or counted faults: the test says which
}

// A bed is a fleet whose engines are watched, with what serves requests there: no operator, no page, no peer and no owner.
type bed struct {
	*testing.T
	prefill, decode []*refengine.Engine
	cfg             *config.Config
	reg             *prometheus.Registry
	logs            *observer.ObservedLogs
	requestLog      string
	receipts        *receipt.Ring
	late            bool // as in options
	url             string
	http            *http.Client

	conf       *reload.Reloader
	fleet      *fleet.Fleet
	discovery  *fleet.Discovery
	monitor    *engine.Monitor
	tier       *prefill.Tier
	locals     *local.Ranks
	places     *pool.Places
	dispatcher *dispatcher.Dispatcher
	meta       *metaserver.Server
	requests   *request.Server
}

// start starts everything and waits until all engines are up. At the end of the test it holds that nothing was leaked, replayed or
// left charged.
func start(t *testing.T, o options) *bed {
	t.Helper()
	if o.prefill == nil && o.mixed == nil {
		o.prefill = []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}}
	}
	if o.decode == nil && o.mixed == nil {
		o.decode = []refengine.Config{{DPSize: 2, PromptTokensDetails: true}}
	}
	core, logs := observer.New(zap.InfoLevel)
	b := &bed{T: t, cfg: config.Default(), reg: prometheus.NewRegistry(), logs: logs, requestLog: filepath.Join(t.TempDir(), "requests.jsonl"), late: o.late, receipts: receipt.NewRing(1000, 1<<20)}
	b.cfg.Dispatch.Window, b.cfg.Prefill.Retry.Base, b.cfg.Prefill.Scrape.Interval = 200*time.Microsecond, time.Millisecond, 50*time.Millisecond
	b.cfg.Health.Canary = 0                                                      // a fault would strike it, too
	o.profile.ChatResume = cmp.Or(o.profile.ChatResume, mooncake.ChatResumeNone) // a test whose chats go on says how
	b.cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: o.profile}
	b.enter(o)
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
		b.http.CloseIdleConnections()
		end()
		for _, e := range append(b.prefill, b.decode...) {
			e.Close()
		}
		if t.Failed() {
			for _, l := range logs.All() {
				t.Log(l.Level, l.Message, l.ContextMap())
			}
		}
	})
	b.eventually("requests are served", b.ready)
	if !o.partly {
		engines := len(b.cfg.Engines.Prefill) + len(b.cfg.Engines.Decode) + len(b.cfg.Engines.Aggregated)
		b.eventually("all engines are up", func() bool {
			up := 0
			for _, e := range b.fleet.Now().Statuses() {
				if e.Up {
					up++
				}
			}
			return up >= engines
		})
	}
	return b
}

// enter starts the engines and writes them into the config.
func (b *bed) enter(o options) {
	for _, p := range o.prefill {
		p.Role = refengine.Prefill
		e := b.engine(p)
		b.prefill = append(b.prefill, e)
		events, replay := kvPorts(e)
		b.cfg.Engines.Prefill = append(b.cfg.Engines.Prefill, config.Engine{URL: e.URLs()[0], KVEventsPort: events, KVReplayPort: replay})
	}
	decodes := func(list *[]config.Engine, d refengine.Config) {
		e := b.engine(d)
		b.decode = append(b.decode, e)
		urls, ranks := e.URLs(), 0
		if e.Config().DPMode == "internal" {
			urls, ranks = urls[:1], e.Config().DPSize
		}
		for _, u := range urls {
			one := config.Engine{URL: u, Ranks: ranks, Slots: e.Config().Slots}
			if d.Role == refengine.Aggregated {
				one.KVEventsPort, one.KVReplayPort = kvPorts(e)
			}
			*list = append(*list, one)
		}
	}
	for _, d := range o.decode {
		d.Role = refengine.Decode
		decodes(&b.cfg.Engines.Decode, d)
	}
	for _, m := range o.mixed {
		m.Role = refengine.Aggregated
		decodes(&b.cfg.Engines.Aggregated, m)
	}
}

func (b *bed) engine(c refengine.Config) *refengine.Engine {
	b.Helper()
	e, err := refengine.Start(c.Quick())
	require.NoError(b, err)
	return e
}

// kvPorts are where an engine publishes KV events, 0 where it does not.
func kvPorts(e *refengine.Engine) (events, replay int) {
	port := func(address string) (n int) {
		if _, p, err := net.SplitHostPort(address); err == nil {
			n, _ = strconv.Atoi(p)
		}
		return n
	}
	at, again := e.KVEvents(0)
	return port(at), port(again)
}

// serve wires the parts and has clients served until end.
func (b *bed) serve(log *zap.Logger, find func(*bed) []discover.Source) (end func()) {
	var err error
	ctx, stop := context.WithCancel(context.Background())
	started, client, bodies := time.Now(), engine.NewClient(engine.Options{}), edge.NewBodies(int64(b.cfg.Limits.Bodies))
	b.conf, _, err = reload.New(b.cfg, reload.Host{
		Log: log, Registerer: b.reg, Started: started, Prepare: b.prepare,
		ReloadTrust: func(func(string) bool) (bool, error) { return false, nil }, LookAtEngines: func() { b.discovery.LookAtFiles() },
	})
	require.NoError(b, err)
	settings := func() *fleet.Settings { return b.conf.Settings().Settings }
	serving := service.New(service.Host{
		Context: ctx, Log: log, Grace: func() time.Duration { return 0 }, EndAll: func() int { return b.fleet.Move(func(fleet.Place) bool { return true }) },
	})
	told, err := journal.New(journal.Config{File: b.requestLog, Receipts: b.receipts, Registerer: b.reg, Log: log})
	require.NoError(b, err)
	b.locals, b.places = local.New(b.cfg.Prefill.Index.MaxBytes), pool.NewPlaces(b.cfg.Pool.Size)
	b.monitor = engine.NewMonitor(engine.MonitorConfig{
		Client: client, Registerer: b.reg, Log: log, HealthInterval: b.cfg.Health.Interval, FactsInterval: 10 * b.cfg.Health.Interval, Canary: b.cfg.Health.Canary,
	})
	if b.cfg.Bind.Listen != "" {
		b.meta = metaserver.New(metaserver.Config{
			Listen: b.cfg.Bind.Listen, Advertise: func() string { return "" }, Connections: 100, Registerer: b.reg, Log: log,
			Allowed: func(a netip.Addr) bool { return b.fleet.Now().CallsBack(a) },
		})
	}
	b.fleet = fleet.New(fleet.Host{
		Context: ctx, Serving: serving.Context, Started: started, Log: log, Registerer: b.reg, Settings: settings, Client: client, Monitor: b.monitor,
		Dispatch: func(ctx context.Context) board.Status { return b.dispatcher.Status(ctx) },
		Publish: func(candidates []prefill.Candidate, locals []local.Rank, workers []board.Worker) {
			b.tier.SetCandidates(candidates)
			b.locals.Set(locals)
			b.dispatcher.SetWorkers(workers)
		},
		Callbacks: b.meta,
		Gauged:    func(worker int32, kvTokens int64, at time.Time) { b.dispatcher.Gauged(worker, kvTokens, at) },
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
	b.tier, err = prefill.New(tier)
	require.NoError(b, err)
	b.places.OnFree(b.tier.Wake)
	decision := b.cfg.Decision()
	decision.TTL, decision.Registerer, decision.Places, decision.OnRoom, decision.Log = b.conf.Settings().PoolTTL(), b.reg, b.places, b.tier.Wake, log
	b.dispatcher, err = dispatcher.Start(ctx, decision)
	require.NoError(b, err)
	loops := &loop.Set{}
	b.requests = request.New(request.Env{
		Context: ctx, Log: log, Registerer: b.reg, Settings: settings, Serving: serving.Context, PromptKey: b.conf.PromptKey,
		Client: client, Monitor: b.monitor, Fleet: b.fleet, Engines: func() request.Engines { return b.fleet.Now() },
		Tier: b.tier, Locals: b.locals, Places: b.places, Dispatcher: b.dispatcher, Journal: told, Meta: b.meta, Loops: loops,
	})
	door := admission.New(admission.Host{
		Started: started, Ready: func() (bool, string) { return b.ready(), "" }, Loads: func(context.Context) []admission.ModelLoad { return nil },
		Config: b.conf, Service: serving, Fleet: b.fleet, Requests: b.requests,
		Through: passthrough.New(passthrough.Env{
			Registerer: b.reg, Settings: settings, Engines: func() passthrough.Engines { return b.fleet.Now() }, Requests: b.requests, Bodies: bodies,
		}),
	})
	enter, err := b.fleet.Load()
	require.NoError(b, err)
	enter()
	if find != nil {
		b.discovery = fleet.NewDiscovery(b.fleet, find(b)...)
	}

	limits := &b.cfg.Limits
	ln, err := edge.Listen("127.0.0.1:0", edge.ListenOptions{
		MaxConns: limits.Connections, Log: log, WriteTimeout: limits.WriteTimeout, MaxLag: limits.ClientLag, SendBuffer: limits.ClientBacklog,
	})
	require.NoError(b, err)
	srv := edge.NewServer(edge.Options{
		Handler: door.Handle, Log: log, MaxBody: limits.Body, MaxHead: limits.Head, Concurrency: limits.Connections + 1, ReadTimeout: limits.ReadTimeout,
		IdleTimeout: limits.IdleTimeout, Stranger: door.Stranger, Caller: door.Caller, Bodies: bodies, Refused: door.Refused, Answer: door.TurnAway,
	})
	require.NoError(b, b.meta.Start())
	require.NoError(b, loops.Start(max(0, loop.Default()), log))
	var background sync.WaitGroup
	background.Go(func() { b.monitor.Start(ctx) })
	background.Go(func() { b.tier.Run(ctx) })
	background.Go(func() { b.conf.Watch(ctx) })
	background.Go(func() { <-ctx.Done(); b.locals.Close() })
	if b.discovery != nil {
		background.Go(func() { b.discovery.Run(ctx) })
	}
	background.Go(func() { _ = srv.Serve(ln) })
	b.url = "http://" + ln.Addr().String()
	b.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2000, DisableCompression: true}}
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
	p, d := b.fleet.Now().Up()
	known, _ := b.fleet.Now().Count()
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
	file := filepath.Join(b.TempDir(), "evenkeel.yaml")
	require.NoError(b, os.WriteFile(file, []byte("another\n"), 0o600))
	next := *b.cfg
	change(&next)
	b.conf.ReadsFrom(file, func() (*config.Config, error) { return &next, next.Validate() })
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
	Engines   []fleet.EngineStatus
	Prefill   []prefill.CandidateStatus
	Dispatch  board.Status
	Discovery *discover.Status
	Drains    []fleet.DrainStatus
}

func (b *bed) now() status {
	s := status{
		Open: b.requests.Open(), PoolUsed: b.places.Used(), Engines: b.fleet.Now().Statuses(), Prefill: b.tier.Status(),
		Dispatch: b.dispatcher.Status(context.Background()), Discovery: b.discovery.State(),
	}
	s.Drains = b.fleet.Now().DrainStatuses(s.Dispatch, s.Prefill)
	return s
}

// settled waits until nothing is under way and checks every account.
func (b *bed) settled(dirty bool) {
	b.Helper()
	var busy []string
	idle := func() bool {
		busy = b.busy(dirty)
		return len(busy) == 0
	}
	for end := time.Now().Add(patience); !idle(); time.Sleep(2 * time.Millisecond) {
		require.True(b, time.Now().Before(end), "still held: %v", busy)
	}
	require.Zero(b, b.dispatcher.Status(context.Background()).Drift)
	page := b.page()
	for _, series := range []string{
		`evenkeel_audit_drift{kind="slots"}`, `evenkeel_audit_drift{kind="kv_tokens"}`, `evenkeel_audit_drift{kind="handoffs"}`,
		"evenkeel_double_releases_total", "evenkeel_prefill_double_releases_total", "evenkeel_requests_open", `evenkeel_tick_fallbacks_total{reason="panic"}`,
	} {
		require.Zero(b, valueOf(b.T, page, series), series)
	}
	locals := int64(sumOf(b.T, page, "evenkeel_local_prefill_requests_total"))
	surplus := int64(0)
	for _, e := range append(b.prefill, b.decode...) {
		st := e.Stats()
		if e.Config().Role != refengine.Prefill { // one that prefills may answer a request alone
			locals -= st.LocalPrefills
		}
		surplus += st.OverAdmitted
		type harm struct{ Replays, ExpiredPulls, WrongBlocks, Crashes, DuplicateIDs, RankMismatch int64 }
		if b.late {
			st.ExpiredPulls = 0
		}
		require.Zero(b, harm{st.Replays, st.ExpiredPulls, st.WrongBlocks, st.Crashes, st.DuplicateIDs, st.RankMismatch})
		if !dirty {
			type loss struct{ Leaks, Unknown, KeyMismatches, InTransfer, Unpinned int64 }
			require.Zero(b, loss{st.Leaks, st.Unknown, st.KeyMismatches, st.InTransfer, st.Unpinned})
		}
	}
	require.True(b, dirty || locals >= 0, "decode engines prefilled %d prompts that nobody counted", -locals)
	if !dirty && surplus > 0 {
		require.LessOrEqual(b, float64(surplus), b.metric("evenkeel_heedless_engines_total"), "over-admitted by engines that had let go in time")
	}
}

// busy lists what is not given back yet.
func (b *bed) busy(dirty bool) (held []string) {
	note := func(what string, n int64) {
		if n != 0 {
			held = append(held, fmt.Sprintf("%s %d", what, n))
		}
	}
	note("callbacks expected", int64(b.meta.Expected()))
	note("open requests", b.requests.Open())
	note("places", int64(b.places.Used()))
	for _, m := range b.dispatcher.Status(context.Background()).Models {
		note("pooled", int64(m.Pool))
		for _, w := range m.Workers {
			note("slots of "+w.Name, int64(w.Used))
		}
	}
	for _, p := range b.tier.Status() {
		note("leases of "+p.ID, int64(p.Inflight+p.Pooled+p.Dispatched))
		if !dirty {
			note("KV tokens charged to "+p.ID, p.KVTokens)
		}
	}
	for _, e := range append(b.prefill, b.decode...) {
		st := e.Stats()
		note("requests on "+e.URLs()[0], st.Running+st.Waiting)
		if !dirty {
			note("pins on "+e.URLs()[0], int64(st.Pins))
		}
	}
	return held
}

func (b *bed) eventually(what string, ok func() bool) {
	b.Helper()
	pause := time.Millisecond
	for end := time.Now().Add(patience); !ok(); pause = min(pause*5/4, 20*time.Millisecond) {
		require.True(b, time.Now().Before(end), "in vain: %s", what)
		time.Sleep(pause)
	}
}
