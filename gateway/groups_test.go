package gateway_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/selftest"
	"evenkeel/geo"
)

// haLease is the lease of these tests: the shortest there is.
const haLease = 3 * time.Second

// family are proxies of one region before the same engines.
type family struct {
	*testing.T
	all   []*cluster // the first one's engines are everybody's
	store []*wire    // of each to the store
	peers []*wire    // of the others to each
	dead  []bool
}

// proxies starts n of them, with one decode engine for each of the groups.
func proxies(t *testing.T, mode string, n int, groups ...string) *family {
	store := etcdServer(t)
	at := freePorts(t, n)
	f := &family{T: t, dead: make([]bool, n)}
	var engines config.Engines
	for i := range n {
		f.store, f.peers = append(f.store, newWire(t, store)), append(f.peers, newWire(t, at[i]))
	}
	for i := range n {
		o := options{dirty: true, prefill: []refengine.Config{}, decode: []refengine.Config{}}
		if i == 0 {
			o.prefill = nil
			for range groups {
				o.decode = append(o.decode, refengine.Config{DPSize: 2, Answers: refengine.Answers{PromptTokensDetails: true},
					Steps: refengine.Steps{C0: 3 * time.Millisecond}, Slots: 8})
			}
		}
		o.configure = func(cfg *config.Config) {
			if i > 0 {
				cfg.Engines = config.Engines{Prefill: slices.Clone(engines.Prefill), Decode: slices.Clone(engines.Decode)}
			} else {
				for g := range groups {
					for r := range 2 {
						cfg.Engines.Decode[2*g+r].Group = groups[g]
					}
				}
				engines = config.Engines{Prefill: slices.Clone(cfg.Engines.Prefill), Decode: slices.Clone(cfg.Engines.Decode)}
			}
			var peers []string
			for j := range n {
				if j != i {
					peers = append(peers, proxyName(j), f.peers[j].at)
				}
			}
			region(t, cfg, proxyName(i), at[i], peers...)
			cfg.Geo.Probe.Interval = 500 * time.Millisecond // so that others learn soon who the owner is
			h := &cfg.HA
			h.Mode, h.Engine, h.Lease = mode, geo.OwnEtcd, haLease
			h.Etcd.Endpoints = []string{"http://" + f.store[i].at}
			cfg.Health.SlowStart = 0
			cfg.Limits.DrainGrace = 12 * time.Second // a busy machine takes long to hand over
		}
		f.all = append(f.all, start(t, o))
	}
	return f
}

func proxyName(i int) string { return fmt.Sprintf("here-%c", 'a'+i) }

func groupOf(c *cluster, name string) owner.GroupStatus {
	for _, g := range c.gw.HA().Groups {
		if g.Group == name {
			return g
		}
	}
	return owner.GroupStatus{}
}

// owner is the proxy that admits to a group, -1 for none.
func (f *family) owner(group string) int {
	for i, c := range f.all {
		if !f.dead[i] && groupOf(c, group).Admits {
			return i
		}
	}
	return -1
}

func (f *family) owned(group string) (owner int) {
	f.all[0].Eventually(group+" has an owner", func() bool { owner = f.owner(group); return owner >= 0 })
	return owner
}

// rests says whether a group is with the proxy that all think should have it.
func (f *family) rests(group string) bool {
	owner := f.owner(group)
	for i, c := range f.all {
		if order := groupOf(c, group).Order; !f.dead[i] &&
			(owner < 0 || len(order) == 0 || order[0] != proxyName(owner) || len(c.gw.HA().Members) < len(f.all)) {
			return false
		}
	}
	return true
}

// watch holds that no group has two owners, until it is ended.
func (f *family) watch(groups ...string) (end func()) {
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
			for _, g := range groups {
				var all []string
				for _, c := range f.all {
					if groupOf(c, g).Admits {
						all = append(all, c.gw.Geo().ID())
					}
				}
				if len(all) > 1 {
					two = g + ": " + strings.Join(all, " and ")
				}
			}
		}
	}()
	return sync.OnceFunc(func() {
		close(done)
		<-ended
		require.Empty(f, two, "admit to one group at once")
	})
}

// kill ends a proxy as a signal would that it cannot catch: nobody is told.
func (f *family) kill(i int) (at time.Time) {
	f.store[i].set(true)
	f.peers[i].set(true)
	at = time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	f.dead[i] = true
	_ = f.all[i].gw.Shutdown(ctx)
	return at
}

// under has clients of some proxies ask without pause until end, and checks
// every token.
func (f *family) under(of ...int) (end func() *load.Result) {
	cfg := load.Config{
		Model: model, Concurrency: 4 * len(of), Chat: 0.5, Stream: 0.7, Seed: 7, Timeout: 40 * time.Second, Duration: time.Minute,
		Backoff: 20 * time.Millisecond, KeepFailures: 1000,
	}
	for _, i := range of {
		cfg.URLs = append(cfg.URLs, f.all[i].URL)
	}
	for i := range 97 {
		cfg.Requests = append(cfg.Requests, trace.Request{Prompt: 20 + i, Output: 5 + 11*i%60})
	}
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan *load.Result, 1)
	go func() {
		r, err := load.Run(ctx, cfg)
		if err != nil {
			f.Error(err)
		}
		got <- r
	}()
	f.Cleanup(cancel)
	return func() *load.Result {
		cancel()
		return <-got
	}
}

// oneOwner holds what the engines saw: after the first request of an owner none
// came of an earlier one, and no rank had more than its slots.
func (f *family) oneOwner() {
	f.Helper()
	for _, e := range f.all[0].Decode {
		s := e.Stats()
		require.Zero(f, s.StaleEpochs, "requests of an owner after those of a later one")
		require.Positive(f, s.Epoch)
	}
	for i, c := range f.all {
		if !f.dead[i] {
			c.Eventually("nothing is held", func() bool { return len(c.busyAlone()) == 0 })
			for _, kind := range []string{"slots", "kv_tokens", "handoffs"} {
				require.Zero(f, c.Metric(fmt.Sprintf("evenkeel_audit_drift{kind=%q}", kind)), proxyName(i))
			}
			require.Zero(f, c.Metric("evenkeel_double_releases_total"))
			require.Zero(f, c.Metric("evenkeel_prefill_double_releases_total"))
		}
	}
}

// busyAlone is busy without the engines, which others use, too, and prefillers'
// KV of hand-offs that nobody could pull any more.
func (c *cluster) busyAlone() (held []string) {
	return slices.DeleteFunc(c.busy(true),
		func(s string) bool { return strings.HasPrefix(s, "requests on ") || strings.HasPrefix(s, "pins on ") })
}

// serves waits until the proxy has answered so many more requests.
func (c *cluster) serves(n float64) {
	c.Helper()
	const whole = `evenkeel_requests_total{outcome="ok"}`
	before := c.Metric(whole)
	c.Eventually("it serves", func() bool { return c.Metric(whole) >= before+n })
}

// onlyLost fails for every request that went wrong in another way than that a stream which had
// begun was lost with its proxy. If the process was woken so late that leases ran out meanwhile, no
// proxy could admit to their groups, and requests for them are refused.
func onlyLost(t *testing.T, r *load.Result, most int, late time.Duration) {
	t.Helper()
	lost := 0
	for _, x := range r.Failures {
		if x.Kind == load.ErrorEvent && strings.Contains(x.Detail, "peer_lost") {
			lost++
			continue
		}
		if late > haLease/2 && strings.HasPrefix(string(x.Kind), "http_503/") {
			continue
		}
		t.Errorf("%s %s: %s (stream %v, %d of %d tokens, after %.0f ms)", x.Request, x.Kind, x.Detail, x.Stream, x.Tokens, x.Output, x.ElapsedMS)
	}
	require.LessOrEqual(t, lost, most)
	require.Positive(t, r.OK)
}

// The owner of a group is killed under load: another has it in less than two
// leases, what its clients had not seen the beginning of is answered all the
// same, and the engines see one owner after the other.
func shardsTakeOver(t *testing.T) {
	f := proxies(t, geo.HAShard, 3, "east", "west")
	f.all[0].Eventually("groups have come to rest", func() bool {
		return f.rests("east") && f.rests("west")
	})
	t.Run("the self-test leaves others' groups alone", f.seatsOfGroups)
	victim := f.owned("east")
	endWatch := f.watch("east", "west")
	defer endWatch()
	var others []int
	for i := range f.all {
		if i != victim {
			others = append(others, i)
		}
	}
	end := f.under(others...)
	served := func() float64 { return f.all[others[0]].Sum("evenkeel_geo_forwards_total") }
	f.all[others[0]].Eventually("requests are forwarded", func() bool { return served() > 0 })

	late := refclient.Lateness(t)
	at := f.kill(victim)
	endWatch() // it would call what is shut down
	taker := f.owned("east")
	took, stood := time.Since(at), late()
	t.Logf("taken over after %.2f s, %.2f leases; the machine was late by %.2f s", took.Seconds(), took.Seconds()/haLease.Seconds(),
		stood.Seconds())
	require.NotEqual(t, victim, taker)
	require.Less(t, took, 2*haLease+stood)
	f.all[taker].serves(30)
	onlyLost(t, end(), 8, late())
	f.oneOwner()
	require.Positive(t, f.all[taker].Metric("evenkeel_ha_takeover_seconds_count"))
}

// Two proxies of one region have one group: one of them owns it, and the other one forwards.
func standbys(t *testing.T) {
	f := proxies(t, geo.HAStandby, 2, "main")
	a, b := f.all[0], f.all[1]
	a.Eventually("a owns all", func() bool { return f.owner("main") == 0 })
	t.Run("what a standby answers is right, and so are its status and readiness", func(t *testing.T) {
		require.Equal(t, "standby", b.gw.HA().Role)
		require.Equal(t, "owner", a.gw.HA().Role)
		require.Equal(t, http.StatusOK, b.get("/readyz").Status)
		b.Eventually("b knows its owner", func() bool { return b.availability("here-a") == "available" || b.availability("here-a") == "" })
		got := b.Post("/v1/chat/completions", chat("one two", `"stream":true,`))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"))
		got = b.Post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":["a b","c d"]}`, model))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Len(t, whole(t, got.Body), 2, "of several prompts, too")
		require.Equal(t, http.StatusBadRequest, b.Post("/v1/chat/completions", chat("one", `"temperature":"hot",`)).Status)
		require.Equal(t, http.StatusOK, b.Post("/v1/chat/completions", chat("one", ""), "X-Evenkeel-Geo", "local").Status,
			"it stays in the region")
	})
	t.Run("its metrics are documented", func(t *testing.T) {
		exists, docs := b.described(), metricsDoc(t)
		maps.DeleteFunc(exists, func(name string, _ []string) bool { return !strings.HasPrefix(name, haMetrics) })
		maps.DeleteFunc(docs, func(name string, _ documented) bool { return !strings.HasPrefix(name, haMetrics) })
		require.Equal(t, keysSorted(docs), keysSorted(exists), "documented, and there")
		b.asDocumented(exists, docs)
	})
	// A drain hands all over at once and loses nothing. An owner that cannot renew stops by itself.
	t.Run("it takes over", func(t *testing.T) {
		endWatch := f.watch("main")
		end := f.under(0, 1)
		a.Eventually("it has load", func() bool { return a.Sum("evenkeel_rank_running") > 2 })
		a.gw.Service().Drain(0)
		at := time.Now()
		b.Eventually("b owns all", func() bool { return f.owner("main") == 1 })
		t.Logf("handed over after %.2f s", time.Since(at).Seconds())
		a.gw.Service().Undrain()
		a.Eventually("a has it back", func() bool { return f.owner("main") == 0 })

		late := refclient.Lateness(t)
		f.store[0].set(true)
		cut := time.Now()
		a.Eventually("it stops by itself", func() bool { return groupOf(a, "main").Phase == "fenced" })
		stopped := time.Since(cut)
		b.Eventually("b takes over", func() bool { return f.owner("main") == 1 })
		took, stood := time.Since(cut), late()
		t.Logf("cut off: stopped after %.2f s, taken over after %.2f s; the machine was late by %.2f s", stopped.Seconds(), took.Seconds(),
			stood.Seconds())
		require.Less(t, took, 2*haLease+stood)
		b.serves(20)
		r := end()
		f.store[0].set(false)
		onlyLost(t, r, 0, late())
		endWatch()
		f.oneOwner()
	})
	// Where no proxy can own the engines, requests could only wait. Then no proxy is ready, each says
	// why, and they are ready again with the next owner.
	t.Run("without any owner no proxy is ready", func(t *testing.T) {
		f.owned("main")
		for _, w := range f.store {
			w.set(true)
		}
		for _, c := range f.all {
			var last reply
			c.Eventually("it is not ready any more", func() bool {
				last = c.get("/readyz")
				return last.Status == http.StatusServiceUnavailable
			})
			require.Contains(t, last.Body, "no proxy owns a decode group, for the store of leases does not answer")
			require.False(t, groupOf(c, "main").Admits)
		}
		for _, w := range f.store {
			w.set(false)
		}
		for _, c := range f.all {
			c.Eventually("it is ready again", func() bool { return c.get("/readyz").Status == http.StatusOK })
		}
	})
	// It refuses clients, and serves requests that the others forward until one of them can take over.
	t.Run("an owner that ends waits for the next", func(t *testing.T) {
		a.Eventually("a has it back", func() bool { return f.owner("main") == 0 })
		b.Eventually("b knows its owner", func() bool { return b.Post(refclient.ChatPath, chat("one", "")).Status == http.StatusOK })
		f.store[1].set(true)
		b.Eventually("b cannot take anything", func() bool { return groupOf(b, "main").StoreAway })
		endWatch := f.watch("main")
		a.gw.Service().Drain(0)
		a.Eventually("a refuses clients", func() bool { return a.gw.Service().Refusing() })
		ended := make(chan error, 1)
		go func() { ended <- a.gw.Shutdown(context.Background()) }()
		require.Equal(t, http.StatusServiceUnavailable, a.Post(refclient.ChatPath, chat("one", "")).Status)
		got := b.Post(refclient.ChatPath, chat("one two", ""))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"), "to a, which drains")
		f.store[1].set(false)
		b.Eventually("b owns all", func() bool { return groupOf(b, "main").Admits })
		endWatch()
		f.dead[0] = true
		require.NoError(t, <-ended)
		require.Equal(t, http.StatusOK, b.Post(refclient.ChatPath, chat("one two", "")).Status)
	})
}

// seatsOfGroups holds that each proxy tests only the ranks of its own groups, with the epoch of its
// ownership.
func (f *family) seatsOfGroups(t *testing.T) {
	for i, group := range []string{"east", "west"} {
		theirs := f.owned(group)
		rank := nameOf(t, f.all[0].Decode[i].URLs()[1])
		s, err := f.all[theirs].gw.TakeSlot(t.Context(), rank, 100)
		require.NoError(t, err)
		require.Equal(t, []engine.Header{{Name: owner.EpochHeader, Value: strconv.FormatInt(groupOf(f.all[theirs], group).Epoch, 10)}},
			s.Scope.AppendEpochHeader(nil))
		s.Release()
		_, err = f.all[(theirs+1)%len(f.all)].gw.TakeSlot(t.Context(), rank, 100)
		require.ErrorIs(t, err, selftest.ErrNotOwned)
	}
}
