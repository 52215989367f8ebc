package gateway_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
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

const model = "ref"

// options describe a cluster; the zero value is one prefill engine and one
// decode engine of two ranks, all fast.
type options struct {
	prefill   []refengine.Config
	decode    []refengine.Config
	mixed     []refengine.Config // engines that prefill and decode; with any, there are no others unless they are named
	profile   mooncake.Profile
	configure func(*config.Config)
	later     func(*config.Config)               // what a reload makes of that, each time; nil: it stays
	file      func(c *cluster) string            // the config, in place of what configure makes; c.config names its file
	discover  func(c *cluster) []discover.Source // finds the engines, in place of the config
	token     string                             // of the admin listener
	ca        *certtest.Authority                // of the listeners' certificates; nil: clear text
	debug     bool                               // keep debug lines, too
	partly    bool                               // not all engines come up at the start
	late      bool                               // decode engines may pull KV that was given away: the test says that no answer is made of it
	dirty     bool                               // the engines may end with pins or counted faults: the test says which
}

// cluster is a proxy in front of reference engines, over real sockets.
type cluster struct {
	*testing.T
	prefill, decode []*refengine.Engine
	gw              *gateway.Gateway
	url, admin      string
	token           string
	http            *http.Client
	logs            *observer.ObservedLogs
	requestLog      string
	late            bool   // as in options
	config          string // file; empty: none
}

// start starts everything and waits until the proxy is ready and all engines are up: the
// proxy is ready as soon as one of each role is. At the end of the
// test it holds that nothing was leaked, replayed or left charged.
func start(t *testing.T, o options) *cluster {
	t.Helper()
	if o.prefill == nil && o.mixed == nil {
		o.prefill = []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}}
	}
	if o.decode == nil && o.mixed == nil {
		o.decode = []refengine.Config{{DPSize: 2, PromptTokensDetails: true}}
	}
	level := zap.InfoLevel
	if o.debug {
		level = zap.DebugLevel
	}
	core, logs := observer.New(level)
	c := &cluster{T: t, logs: logs, token: o.token, requestLog: filepath.Join(t.TempDir(), "requests.jsonl"), late: o.late}
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Log.Requests = c.requestLog
	cfg.Dispatch.Window = 200 * time.Microsecond
	cfg.Prefill.Scrape.Interval = 50 * time.Millisecond
	cfg.Prefill.Retry.Base = time.Millisecond
	cfg.Health.Canary = 0                                                        // a fault would strike it, too
	o.profile.ChatResume = cmp.Or(o.profile.ChatResume, mooncake.ChatResumeNone) // a test whose chats go on says how
	cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: o.profile}
	for _, p := range o.prefill {
		p.Role = refengine.Prefill
		e := c.engine(p)
		c.prefill = append(c.prefill, e)
		events, replay := kvPorts(e)
		cfg.Engines.Prefill = append(cfg.Engines.Prefill, config.Engine{URL: e.URLs()[0], KVEventsPort: events, KVReplayPort: replay})
	}
	decodes := func(list *[]config.Engine, d refengine.Config) {
		e := c.engine(d)
		c.decode = append(c.decode, e)
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
		decodes(&cfg.Engines.Decode, d)
	}
	for _, m := range o.mixed {
		m.Role = refengine.Aggregated
		decodes(&cfg.Engines.Aggregated, m)
	}
	if o.discover != nil {
		cfg.Engines = config.Engines{}
	}
	if o.configure != nil {
		o.configure(cfg)
	}
	later := *cfg
	var err error
	if o.file != nil {
		c.config = filepath.Join(t.TempDir(), "evenkeel.yaml")
		c.write(o.file(c))
		cfg, err = config.Load(c.config)
		require.NoError(t, err)
	}
	require.NoError(t, cfg.Validate())
	c.gw, err = gateway.New(cfg, zap.New(core))
	require.NoError(t, err)
	if c.config != "" {
		c.gw.Reloader().ReadsFrom(c.config, func() (*config.Config, error) { return config.Load(c.config) })
	}
	if o.later != nil {
		c.config = filepath.Join(t.TempDir(), "evenkeel.yaml")
		c.write("later\n")
		c.gw.Reloader().ReadsFrom(c.config, func() (*config.Config, error) {
			next := later
			o.later(&next)
			return &next, next.Validate()
		})
	}
	if o.discover != nil {
		c.gw.DiscoverWith(o.discover(c)...)
	}
	handler, err := admin.New(c.gw, admin.Options{Log: zap.New(core)})
	require.NoError(t, err)
	require.NoError(t, c.gw.Start(handler))
	c.url, c.admin = "http://"+c.gw.Addr(), "http://"+c.gw.AdminAddr()
	transport := &http.Transport{MaxIdleConnsPerHost: 2000, DisableCompression: true}
	if o.ca != nil {
		c.url, c.admin = "https://"+c.gw.Addr(), "https://"+c.gw.AdminAddr()
		transport.TLSClientConfig = &tls.Config{RootCAs: o.ca.Pool()}
	}
	c.http = &http.Client{Transport: transport}
	t.Cleanup(func() {
		up := c.get("/livez").err == nil // else the test has shut it down
		if up && !t.Failed() {
			c.settled(o.dirty)
			require.Zero(t, c.metric(`evenkeel_tick_fallbacks_total{reason="panic"}`), "a policy that fails is stood in for, and nobody else would notice")
		}
		transport.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if up {
			require.NoError(t, c.gw.Shutdown(ctx))
		}
		for _, e := range append(c.prefill, c.decode...) {
			e.Close()
		}
		if t.Failed() {
			for _, l := range logs.All() {
				t.Log(l.Level, l.Message, l.ContextMap())
			}
		}
	})
	c.eventually("the proxy is ready", func() bool { return c.get("/readyz").status == http.StatusOK })
	if !o.partly {
		engines := len(cfg.Engines.Prefill) + len(cfg.Engines.Decode) + len(cfg.Engines.Aggregated)
		c.eventually("all engines are up", func() bool { return c.sum("evenkeel_engine_up") >= float64(engines) })
	}
	return c
}

// kvPorts are where an engine publishes KV events, 0 where it does not.
func kvPorts(e *refengine.Engine) (events, replay int) {
	port := func(address string) (n int) {
		if _, p, err := net.SplitHostPort(address); err == nil {
			n, _ = strconv.Atoi(p)
		}
		return n
	}
	a, b := e.KVEvents(0)
	return port(a), port(b)
}

func (c *cluster) engine(cfg refengine.Config) *refengine.Engine {
	c.Helper()
	e, err := refengine.Start(cfg.Quick())
	require.NoError(c, err)
	return e
}

// settled waits until nothing is under way and checks every account.
func (c *cluster) settled(dirty bool) {
	c.Helper()
	var busy []string
	idle := func() bool {
		busy = c.busy(dirty)
		return len(busy) == 0
	}
	for end := time.Now().Add(patience); !idle(); time.Sleep(2 * time.Millisecond) {
		require.True(c, time.Now().Before(end), "still held: %v", busy)
	}
	s := c.gw.Status(context.Background())
	require.Zero(c, s.Dispatch.Drift.Slots)
	require.Zero(c, s.Dispatch.Drift.KVTokens)
	page := c.get("/metrics").body // read once: a page costs milliseconds, and each test ends here
	for _, series := range []string{
		`evenkeel_audit_drift{kind="slots"}`, `evenkeel_audit_drift{kind="kv_tokens"}`, `evenkeel_audit_drift{kind="handoffs"}`,
		"evenkeel_double_releases_total", "evenkeel_prefill_double_releases_total", "evenkeel_requests_open",
	} {
		require.Zero(c, valueOf(c.T, page, series), series)
	}
	locals := int64(sumOf(c.T, page, "evenkeel_local_prefill_requests_total"))
	surplus := int64(0)
	for _, e := range append(c.prefill, c.decode...) {
		st := e.Stats()
		if e.Config().Role != refengine.Prefill { // one that prefills may answer a request alone
			locals -= st.LocalPrefills
		}
		surplus += st.OverAdmitted
		type harm struct{ Replays, ExpiredPulls, WrongBlocks, Crashes, DuplicateIDs, RankMismatch int64 }
		if c.late {
			st.ExpiredPulls = 0
		}
		require.Zero(c, harm{st.Replays, st.ExpiredPulls, st.WrongBlocks, st.Crashes, st.DuplicateIDs, st.RankMismatch})
		if !dirty {
			type loss struct{ Leaks, Unknown, KeyMismatches, InTransfer, Unpinned int64 }
			require.Zero(c, loss{st.Leaks, st.Unknown, st.KeyMismatches, st.InTransfer, st.Unpinned})
		}
	}
	require.True(c, dirty || locals >= 0, "decode engines prefilled %d prompts that the proxy did not count", -locals)
	if !dirty && surplus > 0 {
		require.LessOrEqual(c, float64(surplus), c.metric("evenkeel_heedless_engines_total"), "over-admitted by engines that had let go in time")
	}
}

// busy lists what is not given back yet.
func (c *cluster) busy(dirty bool) (held []string) {
	note := func(what string, n int64) {
		if n != 0 {
			held = append(held, fmt.Sprintf("%s %d", what, n))
		}
	}
	note("callbacks expected", int64(c.gw.Callbacks().Expected()))
	s := c.gw.Status(context.Background())
	note("open requests", s.Open)
	note("places", int64(s.PoolUsed))
	for _, m := range s.Dispatch.Models {
		note("pooled", int64(m.Pool))
		for _, w := range m.Workers {
			note("slots of "+w.Name, int64(w.Used))
		}
	}
	for _, p := range s.Prefill {
		note("leases of "+p.ID, int64(p.Inflight+p.Pooled+p.Dispatched))
		if !dirty {
			note("KV tokens charged to "+p.ID, p.KVTokens)
		}
	}
	for _, e := range append(c.prefill, c.decode...) {
		st := e.Stats()
		note("requests on "+e.URLs()[0], st.Running+st.Waiting)
		if !dirty {
			note("pins on "+e.URLs()[0], int64(st.Pins))
		}
	}
	return held
}

// patience is how long a test waits for what should be there in milliseconds:
// nobody waits so long but on a machine that has much else to do.
const patience = time.Minute

func (c *cluster) eventually(what string, ok func() bool) {
	c.Helper()
	pause := time.Millisecond // most reads are whole pages of metrics, and other tests want the processor, too
	for end := time.Now().Add(patience); !ok(); pause = min(pause*5/4, 20*time.Millisecond) {
		require.True(c, time.Now().Before(end), "in vain: %s", what)
		time.Sleep(pause)
	}
}

// turns takes engines one after the other, on both sides.
func turns(cfg *config.Config) { cfg.Prefill.Policy, cfg.Dispatch.Policy = "round-robin", "rr" }

// allUp waits until every engine of the cluster takes requests.
func (c *cluster) allUp() {
	c.Helper()
	c.eventually("all engines are up", func() bool {
		s, up := c.gw.Status(c.Context()), 0
		for _, m := range s.Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					up++
				}
			}
		}
		want := len(c.prefill)
		for _, d := range c.decode {
			want += d.Config().DPSize
		}
		return float64(up)+c.metric(`evenkeel_prefill_candidates{state="open"}`) == float64(want)
	})
}

// probes are how many prefills the engines were asked for.
func (c *cluster) probes() (n int64) {
	for _, e := range c.prefill {
		n += e.Stats().Probes
	}
	return n
}
