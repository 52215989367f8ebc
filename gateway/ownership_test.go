package gateway_test

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/server/v3/embed"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/geo"
)

// Owners of regions and of decode groups live on leases of seconds. So these tests wait together,
// and run beside no other one, which could keep an owner from renewing its lease.
func TestOwners(t *testing.T) {
	for name, run := range map[string]func(*testing.T){
		"another proxy takes a dead one's groups": shardsTakeOver,
		"standbys":                                      standbys,
		"a region is taken over and handed back":        regionIsTakenOver,
		"static owners take a share":                    staticOwners,
		"engines of a region that is not ours are none": regionIsReleased,
		"a proxy that ends gives its decode group back": groupIsReleased,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t)
		})
	}
}

// etcdServer runs etcd in this process and returns its address.
func etcdServer(t *testing.T) string {
	if testing.Short() {
		t.Skip("needs an etcd and leases of seconds; run without -short")
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.LogOutputs = t.TempDir(), "error", []string{"/dev/null"}
	local := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenClientUrls, cfg.ListenPeerUrls = []url.URL{local}, []url.URL{local}
	cfg.TickMs, cfg.ElectionMs, cfg.UnsafeNoFsync = 10, 100, true
	e, err := embed.StartEtcd(cfg)
	require.NoError(t, err)
	t.Cleanup(e.Close)
	<-e.Server.ReadyNotify()
	return e.Clients[0].Addr().String()
}

// wire is a way to an address that can be cut.
type wire struct {
	at    string
	ln    net.Listener
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func newWire(t *testing.T, to string) *wire {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w := &wire{at: ln.Addr().String(), ln: ln}
	t.Cleanup(func() { _ = ln.Close(); w.set(true) })
	go func() {
		for {
			from, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			w.mu.Lock()
			if w.cut || err != nil {
				_ = from.Close()
				if err == nil {
					_ = far.Close()
				}
			} else {
				w.conns = append(w.conns, from, far)
				go func() { _, _ = io.Copy(far, from); _ = far.Close() }()
				go func() { _, _ = io.Copy(from, far); _ = from.Close() }()
			}
			w.mu.Unlock()
		}
	}()
	return w
}

func (w *wire) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut = cut; cut {
		for _, c := range w.conns {
			_ = c.Close()
		}
		w.conns = nil
	}
}

// tenants are three regions, whose dispatchers may take over the engines of us.
type tenants struct {
	*testing.T
	us, eu, as *cluster
}

func (t *tenants) scope(c *cluster) owner.RegionStatus {
	for _, a := range c.gw.Owners() {
		if a.Region == "us" {
			return a
		}
	}
	return owner.RegionStatus{}
}

// threeRegions starts them. Nobody forwards anything: whose engines serve is
// what is looked at.
func threeRegions(t *testing.T, ownership func(*geo.Ownership)) *tenants {
	at := freePorts(t, 3)
	ids := []string{"us-1", "eu-1", "as-1"}
	var engines config.Engines
	var all [3]*cluster
	for i, id := range ids {
		all[i] = start(t,
			options{dirty: true, decode: []refengine.Config{{DPSize: 2, Answers: refengine.Answers{PromptTokensDetails: true}, Slots: 4}},
				configure: func(cfg *config.Config) {
					var peers []string
					for j, other := range ids {
						if j != i {
							peers = append(peers, other, at[j])
						}
					}
					region(t, cfg, id, at[i], peers...)
					cfg.Geo.Probe.Interval = 500 * time.Millisecond // three misses before dead_after
					cfg.Geo.Policy = "local-only"
					o := &cfg.Geo.Ownership
					o.Lease, o.DeadAfter, o.TakeoverOrder = 3*time.Second, 2*time.Second, []string{"eu-1", "as-1"}
					ownership(o)
					cfg.Health.SlowStart, cfg.Prefill.Policy = 0, "round-robin" // near and far alike
					if i == 0 {
						engines = cfg.Engines
						return
					}
					adopt := func(to *[]config.Engine, from []config.Engine) {
						for _, e := range from {
							e.Region = "us"
							*to = append(*to, e)
						}
					}
					adopt(&cfg.Engines.Prefill, engines.Prefill)
					adopt(&cfg.Engines.Decode, engines.Decode)
				}})
	}
	return &tenants{T: t, us: all[0], eu: all[1], as: all[2]}
}

// watchOwners holds that never two of them admit to the engines of us.
func (t *tenants) watchOwners(all ...*cluster) (end func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	two := ""
	go func() {
		defer close(ended)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			owner := ""
			for _, c := range all {
				if a := t.scope(c); a.Admits {
					if owner != "" {
						two = owner + " and " + c.gw.Geo().ID()
					}
					owner = c.gw.Geo().ID()
				}
			}
		}
	}()
	return func() {
		close(done)
		<-ended
		require.Empty(t, two, "admitted at once")
	}
}

// under asks a proxy for short answers until it is ended; failures are counted.
func under(c *cluster) (end func() (ok, failed int)) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	var mu sync.Mutex
	ok, failed := 0, 0
	for range 3 {
		all.Go(func() {
			for ctx.Err() == nil {
				got := c.Post("/v1/completions", completion("some words to begin with", `"max_tokens":20,"stream":true,`))
				a := refclient.Answer{}
				if got.Status == http.StatusOK {
					a = read(c.T, got.Body)
				}
				mu.Lock()
				if got.Status == http.StatusOK && a.Whole(0) {
					ok++
				} else {
					failed++
				}
				mu.Unlock()
			}
		})
	}
	return func() (int, int) {
		cancel()
		all.Wait()
		return ok, failed
	}
}

func (t *tenants) slotsKept(what string) {
	t.Helper()
	for _, e := range t.us.Decode {
		require.Zero(t, e.Stats().OverAdmitted, what)
	}
}

// Killed, taken over by the first in order, cut off, handed back: with a lease
// never two admit, and no rank gets more than its slots.
func regionIsTakenOver(t *testing.T) {
	store := etcdServer(t)
	w := newWire(t, store)
	first := true
	all := threeRegions(t, func(o *geo.Ownership) {
		o.Engine, o.Etcd.Endpoints = geo.OwnEtcd, []string{"http://" + store}
		if first {
			o.Etcd.Endpoints, first = []string{"http://" + w.at}, false
		}
	})
	us, eu, as := all.us, all.eu, all.as
	us.Eventually("us-1 owns its region", func() bool { return all.scope(us).Admits })
	endWatch := all.watchOwners(us, eu, as)
	endLoad := under(eu)

	epoch := all.scope(us).Epoch
	leave := us.Endless()
	w.set(true) // us-1 reaches the store no more
	us.Eventually("us-1 stops what is new", func() bool { a := all.scope(us); return !a.Admits && a.Phase == "fenced" })
	require.Positive(t, us.Sum("evenkeel_rank_running"), "streams run on")
	eu.Eventually("eu-1 takes it over", func() bool { return all.scope(eu).Admits })
	require.Greater(t, all.scope(eu).Epoch, epoch)
	require.EqualValues(t, 1, eu.Metric(`evenkeel_geo_takeover_active{region="us"}`))
	require.False(t, all.scope(as).Admits)
	served := func() int64 { return all.us.Decode[0].Stats().Requests }
	before := served()
	eu.Eventually("eu-1 uses what it has taken over, and says by its epoch that it is the owner", func() bool {
		return served() > before && all.us.Decode[0].Stats().Epoch == all.scope(eu).Epoch
	})
	leave()

	w.set(false)
	us.Eventually("us-1 has its region back", func() bool { return all.scope(us).Admits })
	require.Equal(t, "us-1", all.scope(us).Holder)
	ok, failed := endLoad()
	require.Positive(t, ok)
	require.LessOrEqual(t, failed, 3, "of eu-1's three clients, through takeover and hand-back: what was between prefill and decode there")
	eu.Eventually("eu-1 has nothing there any more", func() bool { return eu.Metric(`evenkeel_geo_takeover_active{region="us"}`) == 0 })

	dead, cut := context.WithCancel(context.Background())
	cut() // killed: nothing is released
	_ = us.gw.Shutdown(dead)
	eu.Eventually("eu-1 takes it over again", func() bool { return all.scope(eu).Admits })
	endWatch()
	all.slotsKept("two owners, one after the other")
	for _, e := range us.Decode {
		require.Zero(t, e.Stats().StaleEpochs, "requests of an owner after those of a later one")
	}
}

// Without a lease the order decides, and a taker uses half of the slots.
func staticOwners(t *testing.T) {
	all := threeRegions(t, func(o *geo.Ownership) { o.Engine = geo.OwnStatic })
	us, eu, as := all.us, all.eu, all.as
	require.True(t, all.scope(us).Admits)
	require.Equal(t, 1, us.logs.FilterMessageSnippet("ownership is static").Len(), "warned at the start")
	dead, cut := context.WithCancel(context.Background())
	cut()
	_ = us.gw.Shutdown(dead)
	eu.Eventually("eu-1 takes us over", func() bool { return all.scope(eu).Admits })
	require.False(t, all.scope(as).Admits)
	eu.Eventually("it uses all of its own slots, and half of those once it has looked what runs there", func() bool {
		limits := map[int]int{}
		for _, m := range eu.gw.Status(context.Background()).Dispatch.Models {
			for _, w := range m.Workers {
				require.LessOrEqual(t, w.Limit, 4)
				limits[w.Limit]++
			}
		}
		return maps.Equal(map[int]int{4: 2, 2: 2}, limits)
	})
	_ = eu.gw.Shutdown(dead)
	as.Eventually("as-1 is next in order", func() bool { return all.scope(as).Admits })
	require.EqualValues(t, 1, as.Metric(`evenkeel_geo_takeover_active{region="us"}`))
}
