package gateway_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
)

// oracle is a source that says what a test says.
type oracle struct {
	mu      sync.Mutex
	list    []discover.Engine
	err     error // instead of the list
	changed chan struct{}
}

func newOracle() *oracle { return &oracle{changed: make(chan struct{}, 1)} }

func (o *oracle) Name() string { return "oracle" }

func (o *oracle) Run(ctx context.Context, tell func([]discover.Engine, error)) {
	for {
		select {
		case <-o.changed:
			o.mu.Lock()
			list, err := append([]discover.Engine{}, o.list...), o.err
			o.mu.Unlock()
			tell(list, err)
		case <-ctx.Done():
			return
		}
	}
}

// say puts engines into the list, or describes them anew; gone takes one out.
func (o *oracle) say(engines ...discover.Engine) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range engines {
		o.drop(e)
		o.list = append(o.list, e)
	}
	o.wake()
}

func (o *oracle) gone(e discover.Engine) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop(e)
	o.wake()
}

func (o *oracle) drop(e discover.Engine) {
	kept := o.list[:0]
	for _, old := range o.list {
		if old.Key() != e.Key() {
			kept = append(kept, old)
		}
	}
	o.list = kept
}

func (o *oracle) wake() {
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

// found describes a reference engine as a source would.
func found(e *refengine.Engine, role, incarnation, away string) discover.Engine {
	f := discover.Engine{Role: role, Address: addressOf(e), URL: e.URLs()[0], Incarnation: incarnation, Away: away}
	if role == "decode" {
		f.Slots = e.Config().Slots
	}
	return f
}

// seen is what discovery says of an engine.
func (c *cluster) seen(address string) discover.Found {
	for _, e := range c.gw.Status(context.Background()).Discovery.Engines {
		if e.ID == address {
			return e
		}
	}
	return discover.Found{}
}

func (c *cluster) inUse(e *refengine.Engine) func() bool {
	return func() bool { return c.seen(addressOf(e)).State == discover.InUse && c.status(addressOf(e)).Up }
}

func (c *cluster) status(address string) gateway.EngineStatus {
	for _, e := range c.gw.Status(context.Background()).Engines {
		if e.ID == address {
			return e
		}
	}
	return gateway.EngineStatus{}
}

// load asks without a pause until stop is called, which tells how often.
func (c *cluster) load(clients int) (stop func() int64) {
	done := make(chan struct{})
	var all sync.WaitGroup
	var right atomic.Int64
	for i := range clients {
		all.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-done:
					return
				default:
				}
				if got := c.judge(fmt.Sprintf("client %d request %d", i, k), `"stream":true,`); got != "right" {
					c.Errorf("got %s", got)
					return
				}
				right.Add(1)
			}
		})
	}
	return func() int64 {
		close(done)
		all.Wait()
		return right.Load()
	}
}

// Every engine is replaced by another, one by one and under load, as a rollout
// does: no request is lost, and none reaches an engine that is leaving.
func TestARolloutLosesNothing(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{
		dirty:   true, // what a prefill engine was tried with before there was a decode engine waits for its timeout
		prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{}, {}},
		discover: func(c *cluster) []discover.Source {
			for i := range c.prefill {
				o.say(found(c.prefill[i], "prefill", fmt.Sprintf("p%d", i), ""), found(c.decode[i], "decode", fmt.Sprintf("d%d", i), ""))
			}
			return []discover.Source{o}
		},
	})
	stop := c.load(6)
	replace := func(old *refengine.Engine, role, was string) *refengine.Engine {
		next := c.engine(refengine.Config{Role: refengine.Role(role)})
		o.say(found(next, role, was+"'", ""))
		c.eventually("the new one is in use", c.inUse(next))
		leaving := found(old, role, was, discover.Leaving)
		o.say(leaving)
		c.eventually("the old one has nothing left, and gets nothing", func() bool { return c.released(addressOf(old)) })
		before := old.Stats()
		c.eventually("others go on", func() bool { return next.Stats().Decodes+next.Stats().Probes > 3 })
		require.Equal(c, before.Decodes+before.Probes, old.Stats().Decodes+old.Stats().Probes, "one that leaves gets nothing new")
		old.Kill()
		o.gone(leaving)
		c.eventually("it is gone", func() bool { return c.status(addressOf(old)).ID == "" })
		return next
	}
	for i := range c.prefill {
		c.prefill = append(c.prefill, replace(c.prefill[i], "prefill", fmt.Sprintf("p%d", i)))
		c.decode = append(c.decode, replace(c.decode[i], "decode", fmt.Sprintf("d%d", i)))
	}
	require.Greater(t, stop(), int64(20))
	c.accounted()
	for _, outcome := range c.outcomes() {
		require.Equal(t, "ok", outcome)
	}
	require.EqualValues(t, 8, c.logs.FilterMessage("discovery: engine added").Len())
	require.EqualValues(t, 4, c.logs.FilterMessage("discovery: engine removed").Len())
}

// released says whether the engine at an address gets no work and has none.
func (c *cluster) released(address string) bool {
	s := c.gw.Status(context.Background())
	if used, _, up := c.used(address); up || used > 0 {
		return false
	}
	for _, p := range s.Prefill {
		if strings.HasPrefix(p.ID, address+"/") && (p.State != "down" || p.Inflight+p.Pooled+p.Dispatched > 0) {
			return false
		}
	}
	return true
}

// used is the slots in use of the ranks at an address, their ids, and whether
// any takes more.
func (c *cluster) used(address string) (used int, ids []int32, up bool) {
	for _, m := range c.gw.Status(context.Background()).Dispatch.Models {
		for _, w := range m.Workers {
			if strings.HasPrefix(w.Name, address) {
				used += w.Used
				ids = append(ids, w.ID)
				up = up || w.Up
			}
		}
	}
	return used, ids, up
}

// Field complaint U6: a source that forgets an engine for a moment does not make
// us forget what runs there. Another engine at its address begins with nothing.
func TestIdentityAndLoadSurviveARediscovery(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{dirty: true, discover: func(c *cluster) []discover.Source {
		o.say(found(c.prefill[0], "prefill", "p", ""), found(c.decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	d := found(c.decode[0], "decode", "d", "")
	leave := c.endless()
	used, ids, _ := c.used(d.Address)
	require.Equal(t, 1, used)
	require.Len(t, ids, 1)
	for _, away := range []string{discover.NotReady, discover.Leaving} {
		d.Away = away
		o.say(d)
		c.eventually("it is away", func() bool { return c.status(d.Address).Away == away })
		require.True(t, c.status(d.Address).Draining)
		used, same, _ := c.used(d.Address)
		require.Equal(t, 1, used, "what runs there goes on")
		require.Equal(t, ids, same)
	}
	d.Away = ""
	for range 2 {
		o.gone(d)
		c.eventually("it is forgotten", func() bool { return c.status(d.Address).ID == "" })
		o.say(d)
		c.eventually("it is back", c.inUse(c.decode[0]))
	}
	used, same, _ := c.used(d.Address)
	require.Equal(t, 1, used, "it is the same, and the stream that outlived its absence is counted")
	require.Equal(t, ids, same)

	d.Incarnation = "another"
	o.say(d)
	c.eventually("another is there", func() bool {
		return c.seen(d.Address).Incarnation == "another" && c.inUse(c.decode[0])()
	})
	c.eventually("with no load", func() bool {
		_, other, _ := c.used(d.Address)
		return len(other) > 0 && other[len(other)-1] != ids[0]
	})
	leave()
}

// The probe of an engine that returns takes a slot like any request: while its
// rank is full it waits.
func TestAnEngineThatReturnsFullIsNotTriedBeyondItsSlots(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{dirty: true, decode: []refengine.Config{{Slots: 1}}, discover: func(c *cluster) []discover.Source {
		o.say(found(c.prefill[0], "prefill", "p", ""), found(c.decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	d := found(c.decode[0], "decode", "d", "")
	d.Attributes.Slots = 1
	o.say(d)
	leave := c.endless()
	before := c.decode[0].Stats().Requests
	o.gone(d)
	c.eventually("it is forgotten", func() bool { return c.status(d.Address).ID == "" })
	o.say(d)
	time.Sleep(500 * time.Millisecond) // it would be tried at once
	require.Equal(t, before, c.decode[0].Stats().Requests, "nothing is asked of a full rank")
	require.Empty(t, c.status(d.Address).ID)
	leave()
	c.eventually("it is back", c.inUse(c.decode[0]))
	require.EqualValues(t, 1, c.decode[0].Stats().Ranks[0].Concurrent)
}

// A finished prefill whose engine was replaced is not offered to decode: whoever
// has the address now never made it.
func TestHandoffsOfAnEngineThatIsNoMoreAreNotUsed(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{
		dirty: true, decode: []refengine.Config{{Slots: 1}},
		configure: func(cfg *config.Config) { cfg.Discovery.Probe = false },
		discover: func(c *cluster) []discover.Source {
			o.say(found(c.prefill[0], "prefill", "old", ""), found(c.decode[0], "decode", "d", ""))
			return []discover.Source{o}
		},
	})
	leave := c.endless()
	got := c.judging("a prompt that waits", `"stream":true,`)
	c.eventually("it waits in the pool", func() bool {
		return c.metric("evenkeel_pool_entries") == 1
	})
	pulls := c.prefill[0].Stats().Probes
	o.say(found(c.prefill[0], "prefill", "new", ""))
	c.eventually("its prefiller is another", func() bool {
		return c.seen(addressOf(c.prefill[0])).Incarnation == "new" && c.inUse(c.prefill[0])()
	})
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, pulls+1, c.prefill[0].Stats().Probes, "it was prefilled anew")
	c.settled(true)
	all := c.records()
	require.Equal(t, 2, all[len(all)-1].Attempts)
}

// An engine that does not do what its profile promises gets no request; it is
// tried again, and used once it does.
func TestAnEngineMustProveItselfFirst(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{dirty: true, discover: func(c *cluster) []discover.Source {
		o.say(found(c.prefill[0], "prefill", "", ""))
		for i, u := range c.decode[0].URLs() {
			d := found(c.decode[0], "decode", "", "")
			d.URL, d.Address = u, strings.TrimPrefix(u, "http://")
			d.Group = fmt.Sprint("g", i)
			o.say(d)
		}
		return []discover.Source{o}
	}})
	bad := c.engine(refengine.Config{Role: refengine.Decode})
	c.decode = append(c.decode, bad)
	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Internal}))
	o.say(found(bad, "decode", "", ""))
	c.eventually("it is unfit", func() bool { return c.seen(addressOf(bad)).State == discover.Unfit })
	require.Contains(t, c.seen(addressOf(bad)).Why, "500")
	require.Empty(t, c.status(addressOf(bad)).ID, "it is not in the fleet")
	var page struct{ Discovery discover.Status }
	require.NoError(t, json.Unmarshal([]byte(c.get("/workers").body), &page))
	require.Contains(t, c.get("/workers").body, discover.Unfit)
	require.GreaterOrEqual(t, c.metric(`evenkeel_discovery_probes_total{outcome="failed",role="decode"}`), 1.0)
	require.EqualValues(t, 1, c.metric(`evenkeel_discovery_engines{source="oracle",state="unfit"}`))
	c.eventually("the page says so, too", func() bool {
		return strings.Contains(c.get("/live?once").body, "1 engine of oracle is not used: decode engine "+addressOf(bad))
	})
	for i := range 4 {
		require.Equal(t, "right", c.judge(fmt.Sprint("while it is unfit ", i), `"stream":true,`))
	}
	require.NoError(t, bad.SetFaults())
	c.eventually("it is in use", c.inUse(bad))

	silent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(`{"data":[{"id":"ref"}],"choices":[{"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":3}}`))
	}))
	defer silent.Close()
	o.say(discover.Engine{Role: "prefill", Address: strings.TrimPrefix(silent.URL, "http://"), URL: silent.URL})
	c.eventually("one without hand-offs is unfit, too", func() bool { return c.seen(strings.TrimPrefix(silent.URL, "http://")).State == discover.Unfit })
	require.Contains(t, c.seen(strings.TrimPrefix(silent.URL, "http://")).Why, "kv_transfer_params")
}

// A file of engines is followed however it is replaced.
func TestEnginesOfAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "engines.yaml")
	var c *cluster
	list := func(engines ...*refengine.Engine) string {
		text := "prefill:\n  - url: " + c.prefill[0].URLs()[0] + "\ndecode:\n"
		for _, e := range engines {
			text += fmt.Sprintf("  - {url: %q, slots: 16}\n", e.URLs()[0])
		}
		return text
	}
	c = start(t, options{decode: []refengine.Config{{}, {}, {}}, dirty: true, file: func(made *cluster) string {
		c = made
		require.NoError(t, os.WriteFile(path, []byte(list(c.decode[0])), 0o600))
		return fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: \"127.0.0.1:0\"}\nlog: {requests: %q}\ndiscovery: {files: [%q]}\n", c.requestLog, path)
	}})
	only := func(what string, engines ...*refengine.Engine) {
		t.Helper()
		c.eventually(what, func() bool {
			n := 0
			for _, e := range c.gw.Status(t.Context()).Engines {
				if e.Role == "decode" && e.Up {
					n++
				}
			}
			for _, e := range engines {
				if !c.inUse(e)() {
					return false
				}
			}
			return n == len(engines)
		})
		require.Equal(t, "right", c.judge(what, `"stream":true,`))
	}
	only("the first list", c.decode[0])

	require.NoError(t, os.WriteFile(path, []byte(list(c.decode[0], c.decode[1])), 0o600))
	only("written in place", c.decode[0], c.decode[1])

	other := filepath.Join(dir, ".engines.yaml.swp")
	require.NoError(t, os.WriteFile(other, []byte(list(c.decode[1])), 0o600))
	require.NoError(t, os.Rename(other, path))
	only("renamed over", c.decode[1])

	for _, bad := range []string{"", "decode: 5", "prefill: [{url: nowhere}]", list(c.decode[0])[:40] + "\x00"} {
		require.NoError(t, os.WriteFile(path, []byte(bad), 0o600))
		c.eventually("it is refused", func() bool { return c.gw.Status(t.Context()).Discovery.Sources[0].Error != "" })
		require.EqualValues(t, 1, c.sum("evenkeel_discovery_stale"))
		require.NoError(t, os.WriteFile(path, []byte(list(c.decode[1])), 0o600))
		c.eventually("what was good before is good again", func() bool { return c.gw.Status(t.Context()).Discovery.Sources[0].Error == "" })
	}
	require.NoError(t, os.Remove(path))
	c.eventually("it is missed", func() bool { return c.gw.Status(t.Context()).Discovery.Sources[0].Error != "" })
	only("one that is deleted changes nothing", c.decode[1])

	// As a kubelet writes a ConfigMap: ..data points to a directory of a version.
	version := func(name, text string) {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "engines.yaml"), []byte(text), 0o600))
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..v1", list(c.decode[1], c.decode[2]))
	require.NoError(t, os.Symlink("..data/engines.yaml", path))
	only("a ConfigMap", c.decode[1], c.decode[2])
	version("..v2", list(c.decode[2]))
	only("another version of it", c.decode[2])

	require.Equal(t, http.StatusCreated, c.ask("POST", c.admin+"/workers", fmt.Sprintf(`{"url":%q,"slots":4}`, c.decode[2].URLs()[0])).status)
	require.Equal(t, 4, c.status(addressOf(c.decode[2])).Slots, "an operator's word is the last")
	version("..v3", list(c.decode[1], c.decode[2]))
	only("a new word about another engine", c.decode[1], c.decode[2])
	require.Equal(t, 4, c.status(addressOf(c.decode[2])).Slots, "which said nothing of this one")
}

// Where engines are to be found and their source fails, that is why there are
// none.
func TestReadinessTellsThatDiscoveryFails(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{dirty: true, discover: func(c *cluster) []discover.Source {
		o.say(found(c.prefill[0], "prefill", "p", ""), found(c.decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	o.gone(found(c.prefill[0], "prefill", "p", ""))
	c.eventually("there is no prefill engine", func() bool {
		r := c.get("/readyz")
		return r.status == http.StatusServiceUnavailable && strings.Contains(r.body, "no healthy prefill engine")
	})
	require.NotContains(t, c.get("/readyz").body, "discovery")
	o.mu.Lock()
	o.err = errors.New("pods is forbidden: User \"evenkeel\" cannot list resource \"pods\"")
	o.wake()
	o.mu.Unlock()
	c.eventually("why is told", func() bool {
		return strings.Contains(c.get("/readyz").body, "no healthy prefill engine; discovery by oracle fails: pods is forbidden: User ")
	})
}
