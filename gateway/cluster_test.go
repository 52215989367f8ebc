package gateway_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
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

type (
	reply  = refclient.Reply
	record = refclient.Record
)

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
	refclient.Client
	refclient.Engines
	gw     *gateway.Gateway
	admin  string // URL
	token  string
	logs   *observer.ObservedLogs
	config string // file; empty: none
}

// start starts everything and waits until the proxy is ready and all engines are up: the
// proxy is ready as soon as one of each role is. At the end of the
// test it holds that nothing was leaked, replayed or left charged.
func start(t *testing.T, o options) *cluster {
	t.Helper()
	level := zap.InfoLevel
	if o.debug {
		level = zap.DebugLevel
	}
	core, logs := observer.New(level)
	c := &cluster{logs: logs, token: o.token}
	c.Client = refclient.Client{
		T: t, HTTP: refclient.NewHTTP(), RequestLog: filepath.Join(t.TempDir(), "requests.jsonl"),
		Page: func() string { return c.get("/metrics").Body }, Open: func() int64 { return c.account().Open },
	}
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Log.Requests = c.RequestLog
	cfg.Dispatch.Window, cfg.Dispatch.TickLimit = 200*time.Microsecond, patience // on a busy machine no other policy stands in
	cfg.Prefill.Scrape.Interval = 50 * time.Millisecond
	cfg.Prefill.Retry.Base = time.Millisecond
	cfg.Health.Canary = 0                                                        // a fault would strike it, too
	o.profile.ChatResume = cmp.Or(o.profile.ChatResume, mooncake.ChatResumeNone) // a test whose chats go on says how
	cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: o.profile}
	c.Engines = c.Enter(cfg, o.prefill, o.decode, o.mixed)
	c.Late = o.late
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
		c.gw.Reloader().SetSource(c.config, func() (*config.Config, error) { return config.Load(c.config) })
	}
	if o.later != nil {
		c.config = filepath.Join(t.TempDir(), "evenkeel.yaml")
		c.write("later\n")
		c.gw.Reloader().SetSource(c.config, func() (*config.Config, error) {
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
	c.URL, c.admin = "http://"+c.gw.Addr(), "http://"+c.gw.AdminAddr()
	if o.ca != nil {
		c.URL, c.admin = "https://"+c.gw.Addr(), "https://"+c.gw.AdminAddr()
		c.HTTP.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: o.ca.Pool()}
	}
	t.Cleanup(func() {
		up := c.get("/livez").Err == nil // else the test has shut it down
		if up && !t.Failed() {
			c.settled(o.dirty)
		}
		c.HTTP.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if up {
			require.NoError(t, c.gw.Shutdown(ctx))
		}
		for _, e := range c.All() {
			e.Close()
		}
		if t.Failed() {
			for _, l := range logs.All() {
				t.Log(l.Level, l.Message, l.ContextMap())
			}
		}
	})
	c.Eventually("the proxy is ready", func() bool { return c.get("/readyz").Status == http.StatusOK })
	if !o.partly {
		engines := len(cfg.Engines.Prefill) + len(cfg.Engines.Decode) + len(cfg.Engines.Aggregated)
		c.Eventually("all engines are up", func() bool {
			up := 0
			for _, e := range c.gw.Status(t.Context()).Engines {
				if e.Up {
					up++
				}
			}
			return up >= engines
		})
	}
	return c
}

// turns takes engines one after the other, on both sides.
func turns(cfg *config.Config) { cfg.Prefill.Policy, cfg.Dispatch.Policy = "round-robin", "rr" }

// probes are how many prefills the engines were asked for.
func (c *cluster) probes() (n int64) {
	for _, e := range c.Prefill {
		n += e.Stats().Probes
	}
	return n
}

// account is what the proxy says of itself.
func (c *cluster) account() refclient.Account {
	s := c.gw.Status(context.Background())
	return refclient.Account{Callbacks: c.gw.Callbacks().Expected(), Open: s.Open, Places: s.PoolUsed, Dispatch: s.Dispatch,
		Prefill: s.Prefill}
}

// settled waits until nothing is under way and checks every account.
func (c *cluster) settled(dirty bool) {
	c.Helper()
	engines := c.Engines
	engines.Dirty = dirty
	c.Settled(&engines, c.account)
}

// allUp waits until every engine of the cluster takes requests.
func (c *cluster) allUp() {
	c.Helper()
	c.AllUp(&c.Engines, c.account)
}

// get asks the admin listener.
func (c *cluster) get(path string) reply {
	return c.Ask(http.MethodGet, c.admin+path, "", "Authorization", "Bearer "+c.token)
}

// early is a proxy in front of engines whose connector wants the decode rank before the prefill.
func early(t *testing.T, connector refengine.Connector, o options) *cluster {
	t.Helper()
	o.prefill, o.decode, o.configure = refclient.Early(t, connector, o.prefill, o.decode, o.configure)
	return start(t, o)
}

// together is a cluster whose ranks do both.
func together(more func(*config.Config)) options {
	return options{mixed: refclient.Cached(), configure: refclient.Exposed(more)}
}

// conditional is a cluster whose decode ranks may compute short prompts.
func conditional(more func(*config.Config)) options {
	return options{profile: mooncake.Profile{AllowLocalPrefill: true}, decode: refclient.Cached(), configure: refclient.Conditional(more)}
}

// slow keeps the answer's beginning from coming in one read, before which all
// begins anew; halting, all of it.
var (
	slow    = refengine.Rule{Fault: refengine.Slow, DelayMS: 120, Tokens: 6, Leg: refengine.LegDecode}
	halting = refengine.Rule{Fault: refengine.Slow, DelayMS: 250, Leg: refengine.LegDecode}
)

// busy lists what is not given back yet.
func (c *cluster) busy(dirty bool) []string {
	engines := c.Engines
	engines.Dirty = dirty
	return engines.Held(c.account())
}
