package fleet_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
)

// seen is what discovery says of an engine.
func (b *bed) seen(address string) discover.Found {
	for _, e := range b.now().Discovery.Engines {
		if e.ID == address {
			return e
		}
	}
	return discover.Found{}
}

func (b *bed) inUse(e *refengine.Engine) func() bool {
	return func() bool {
		return b.seen(refclient.AddressOf(e)).State == discover.InUse && b.status(refclient.AddressOf(e)).Up
	}
}

func (b *bed) status(address string) roster.EngineStatus {
	for _, e := range b.now().Engines {
		if e.ID == address {
			return e
		}
	}
	return roster.EngineStatus{}
}

// released says whether the engine at an address gets no work and has none.
func (b *bed) released(address string) bool {
	s := b.now()
	if used, _, up := b.used(address); up || used > 0 {
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
func (b *bed) used(address string) (used int, ids []int32, up bool) {
	for _, m := range b.now().Dispatch.Models {
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

// Every engine is replaced by another, one by one and under load, as a rollout
// does: no request is lost, and none reaches an engine that is leaving.
func TestARolloutLosesNothing(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	b := start(t, options{
		dirty:   true, // what a prefill engine was tried with before there was a decode engine waits for its timeout
		prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{}, {}},
		discover: func(b *bed) []discover.Source {
			for i := range b.Prefill {
				o.Say(refclient.Found(b.Prefill[i], "prefill", fmt.Sprintf("p%d", i), ""),
					refclient.Found(b.Decode[i], "decode", fmt.Sprintf("d%d", i), ""))
			}
			return []discover.Source{o}
		},
	})
	stop := b.KeepAsking(6)
	replace := func(old *refengine.Engine, role, was string) *refengine.Engine {
		next := b.Engine(refengine.Config{Role: refengine.Role(role)})
		o.Say(refclient.Found(next, role, was+"'", ""))
		b.Eventually("the new one is in use", b.inUse(next))
		leaving := refclient.Found(old, role, was, discover.Leaving)
		o.Say(leaving)
		b.Eventually("the old one has nothing left, and gets nothing", func() bool { return b.released(refclient.AddressOf(old)) })
		before := old.Stats()
		b.Eventually("others go on", func() bool { return next.Stats().Decodes+next.Stats().Probes > 3 })
		require.Equal(b, before.Decodes+before.Probes, old.Stats().Decodes+old.Stats().Probes, "one that leaves gets nothing new")
		old.Kill()
		o.Gone(leaving)
		b.Eventually("it is gone", func() bool { return b.status(refclient.AddressOf(old)).ID == "" })
		return next
	}
	for i := range b.Prefill {
		b.Prefill = append(b.Prefill, replace(b.Prefill[i], "prefill", fmt.Sprintf("p%d", i)))
		b.Decode = append(b.Decode, replace(b.Decode[i], "decode", fmt.Sprintf("d%d", i)))
	}
	require.Greater(t, stop(), int64(20))
	b.Accounted()
	for _, outcome := range b.Outcomes() {
		require.Equal(t, "ok", outcome)
	}
	require.EqualValues(t, 8, b.logs.FilterMessage("discovery: engine added").Len())
	require.EqualValues(t, 4, b.logs.FilterMessage("discovery: engine removed").Len())
}

// Field complaint U6: a source that forgets an engine for a moment does not make
// us forget what runs there. Another engine at its address begins with nothing.
func TestIdentityAndLoadSurviveARediscovery(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	b := start(t, options{dirty: true, discover: func(b *bed) []discover.Source {
		o.Say(refclient.Found(b.Prefill[0], "prefill", "p", ""), refclient.Found(b.Decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	d := refclient.Found(b.Decode[0], "decode", "d", "")
	leave := b.Endless()
	used, ids, _ := b.used(d.Address)
	require.Equal(t, 1, used)
	require.Len(t, ids, 1)
	for _, away := range []string{discover.NotReady, discover.Leaving} {
		d.Away = away
		o.Say(d)
		b.Eventually("it is away", func() bool { return b.status(d.Address).Away == away })
		require.True(t, b.status(d.Address).Draining)
		used, same, _ := b.used(d.Address)
		require.Equal(t, 1, used, "what runs there goes on")
		require.Equal(t, ids, same)
	}
	d.Away = ""
	for range 2 {
		o.Gone(d)
		b.Eventually("it is forgotten", func() bool { return b.status(d.Address).ID == "" })
		o.Say(d)
		b.Eventually("it is back", b.inUse(b.Decode[0]))
	}
	used, same, _ := b.used(d.Address)
	require.Equal(t, 1, used, "it is the same, and the stream that outlived its absence is counted")
	require.Equal(t, ids, same)

	d.Incarnation = "another"
	o.Say(d)
	b.Eventually("another is there", func() bool {
		return b.seen(d.Address).Incarnation == "another" && b.inUse(b.Decode[0])()
	})
	b.Eventually("with no load", func() bool {
		_, other, _ := b.used(d.Address)
		return len(other) > 0 && other[len(other)-1] != ids[0]
	})
	leave()
}

// The probe of an engine that returns takes a slot like any request: while its
// rank is full it waits.
func TestAnEngineThatReturnsFullIsNotTriedBeyondItsSlots(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	b := start(t, options{dirty: true, decode: []refengine.Config{{Slots: 1}}, discover: func(b *bed) []discover.Source {
		o.Say(refclient.Found(b.Prefill[0], "prefill", "p", ""), refclient.Found(b.Decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	d := refclient.Found(b.Decode[0], "decode", "d", "")
	d.Attributes.Slots = 1
	o.Say(d)
	leave := b.Endless()
	before := b.Decode[0].Stats().Requests
	o.Gone(d)
	b.Eventually("it is forgotten", func() bool { return b.status(d.Address).ID == "" })
	o.Say(d)
	time.Sleep(500 * time.Millisecond) // it would be tried at once
	require.Equal(t, before, b.Decode[0].Stats().Requests, "nothing is asked of a full rank")
	require.Empty(t, b.status(d.Address).ID)
	leave()
	b.Eventually("it is back", b.inUse(b.Decode[0]))
	require.EqualValues(t, 1, b.Decode[0].Stats().Ranks[0].Concurrent)
}

// A finished prefill whose engine was replaced is not offered to decode: whoever
// has the address now never made it.
func TestHandoffsOfAnEngineThatIsNoMoreAreNotUsed(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	b := start(t, options{
		dirty: true, decode: []refengine.Config{{Slots: 1}},
		configure: func(cfg *config.Config) { cfg.Discovery.Probe = false },
		discover: func(b *bed) []discover.Source {
			o.Say(refclient.Found(b.Prefill[0], "prefill", "old", ""), refclient.Found(b.Decode[0], "decode", "d", ""))
			return []discover.Source{o}
		},
	})
	leave := b.Endless()
	got := b.Judging("a prompt that waits", `"stream":true,`)
	b.Eventually("it waits in the pool", func() bool {
		return b.Metric("evenkeel_pool_entries") == 1
	})
	pulls := b.Prefill[0].Stats().Probes
	o.Say(refclient.Found(b.Prefill[0], "prefill", "new", ""))
	b.Eventually("its prefiller is another", func() bool {
		return b.seen(refclient.AddressOf(b.Prefill[0])).Incarnation == "new" && b.inUse(b.Prefill[0])()
	})
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, pulls+1, b.Prefill[0].Stats().Probes, "it was prefilled anew")
	b.settled(true)
	all := b.Records()
	require.Equal(t, 2, all[len(all)-1].Attempts)
}

// An engine that does not do what its profile promises gets no request; it is
// tried again, and used once it does.
func TestAnEngineMustProveItselfFirst(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	b := start(t, options{dirty: true, discover: func(b *bed) []discover.Source {
		o.Say(refclient.Found(b.Prefill[0], "prefill", "", ""))
		for i, u := range b.Decode[0].URLs() {
			d := refclient.Found(b.Decode[0], "decode", "", "")
			d.URL, d.Address = u, strings.TrimPrefix(u, "http://")
			d.Group = fmt.Sprint("g", i)
			o.Say(d)
		}
		return []discover.Source{o}
	}})
	bad := b.Engine(refengine.Config{Role: refengine.Decode})
	b.Decode = append(b.Decode, bad)
	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Internal}))
	o.Say(refclient.Found(bad, "decode", "", ""))
	b.Eventually("it is unfit", func() bool { return b.seen(refclient.AddressOf(bad)).State == discover.Unfit })
	require.Contains(t, b.seen(refclient.AddressOf(bad)).Why, "500")
	require.Empty(t, b.status(refclient.AddressOf(bad)).ID, "it is not in the fleet")
	require.GreaterOrEqual(t, b.Metric(`evenkeel_discovery_probes_total{outcome="failed",role="decode"}`), 1.0)
	require.EqualValues(t, 1, b.Metric(`evenkeel_discovery_engines{source="oracle",state="unfit"}`))
	for i := range 4 {
		require.Equal(t, "right", b.Judge(fmt.Sprint("while it is unfit ", i), `"stream":true,`))
	}
	require.NoError(t, bad.SetFaults())
	b.Eventually("it is in use", b.inUse(bad))

	silent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(`{"data":[{"id":"ref"}],"choices":[{"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":3}}`))
	}))
	defer silent.Close()
	o.Say(discover.Engine{Role: "prefill", Address: strings.TrimPrefix(silent.URL, "http://"), URL: silent.URL})
	b.Eventually("one without hand-offs is unfit, too",
		func() bool { return b.seen(strings.TrimPrefix(silent.URL, "http://")).State == discover.Unfit })
	require.Contains(t, b.seen(strings.TrimPrefix(silent.URL, "http://")).Why, "kv_transfer_params")
}

// A file of engines is followed however it is replaced.
func TestEnginesOfAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "engines.yaml")
	var b *bed
	list := func(engines ...*refengine.Engine) string {
		text := "prefill:\n  - url: " + b.Prefill[0].URLs()[0] + "\ndecode:\n"
		for _, e := range engines {
			text += fmt.Sprintf("  - {url: %q, slots: 16}\n", e.URLs()[0])
		}
		return text
	}
	start(t, options{
		decode: []refengine.Config{{}, {}, {}}, dirty: true, configure: func(cfg *config.Config) { cfg.Discovery.Files = []string{path} },
		discover: func(made *bed) []discover.Source {
			b = made
			require.NoError(t, os.WriteFile(path, []byte(list(b.Decode[0])), 0o600))
			sources, err := b.found.Sources()
			require.NoError(t, err)
			return sources
		},
	})
	only := func(what string, engines ...*refengine.Engine) {
		t.Helper()
		b.Eventually(what, func() bool {
			n := 0
			for _, e := range b.now().Engines {
				if e.Role == "decode" && e.Up {
					n++
				}
			}
			for _, e := range engines {
				if !b.inUse(e)() {
					return false
				}
			}
			return n == len(engines)
		})
		require.Equal(t, "right", b.Judge(what, `"stream":true,`))
	}
	only("the first list", b.Decode[0])

	require.NoError(t, os.WriteFile(path, []byte(list(b.Decode[0], b.Decode[1])), 0o600))
	only("written in place", b.Decode[0], b.Decode[1])

	other := filepath.Join(dir, ".engines.yaml.swp")
	require.NoError(t, os.WriteFile(other, []byte(list(b.Decode[1])), 0o600))
	require.NoError(t, os.Rename(other, path))
	only("renamed over", b.Decode[1])

	for _, bad := range []string{"", "decode: 5", "prefill: [{url: nowhere}]", list(b.Decode[0])[:40] + "\x00"} {
		require.NoError(t, os.WriteFile(path, []byte(bad), 0o600))
		b.Eventually("it is refused", func() bool { return b.now().Discovery.Sources[0].Error != "" })
		require.EqualValues(t, 1, b.Sum("evenkeel_discovery_stale"))
		require.NoError(t, os.WriteFile(path, []byte(list(b.Decode[1])), 0o600))
		b.Eventually("what was good before is good again", func() bool { return b.now().Discovery.Sources[0].Error == "" })
	}
	require.NoError(t, os.Remove(path))
	b.Eventually("it is missed", func() bool { return b.now().Discovery.Sources[0].Error != "" })
	only("one that is deleted changes nothing", b.Decode[1])

	// As a kubelet writes a ConfigMap: ..data points to a directory of a version.
	version := func(name, text string) {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "engines.yaml"), []byte(text), 0o600))
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..v1", list(b.Decode[1], b.Decode[2]))
	require.NoError(t, os.Symlink("..data/engines.yaml", path))
	only("a ConfigMap", b.Decode[1], b.Decode[2])
	version("..v2", list(b.Decode[2]))
	only("another version of it", b.Decode[2])

	require.NoError(t, b.fleet.Add(roster.Decode, config.Engine{URL: b.Decode[2].URLs()[0], Slots: 4, Profile: config.DefaultProfile}))
	require.Equal(t, 4, b.status(refclient.AddressOf(b.Decode[2])).Slots, "an operator's word is the last")
	version("..v3", list(b.Decode[1], b.Decode[2]))
	only("a new word about another engine", b.Decode[1], b.Decode[2])
	require.Equal(t, 4, b.status(refclient.AddressOf(b.Decode[2])).Slots, "which said nothing of this one")
}

// A discovered engine that prefills and decodes is tried alone, and then gets requests.
func TestAnEngineThatDoesBothIsDiscovered(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	var broken discover.Engine
	b := start(t, options{
		mixed: []refengine.Config{{DPSize: 2, DPMode: "internal"}, {}}, partly: true, dirty: true,
		configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
		discover: func(b *bed) []discover.Source {
			good := refclient.Found(b.Decode[0], "aggregated", "a0", "")
			good.Ranks, good.Group, good.Budget = 2, "one", 2048
			broken = refclient.Found(b.Decode[1], "aggregated", "a1", "")
			b.Decode[1].SetFaults(refengine.Rule{Fault: refengine.Busy})
			o.Say(good, broken)
			return []discover.Source{o}
		},
	})
	b.Eventually("it is in use", b.inUse(b.Decode[0]))
	_, route := b.Say(talk(`"stream":true,`, "hello"))
	require.Equal(t, "aggregated", route)
	b.Eventually("the other one has not passed", func() bool { return strings.Contains(b.seen(broken.Address).Why, "answered with 503") })
	b.Decode[1].SetFaults()
	b.Eventually("it is tried again, and in use", b.inUse(b.Decode[1]))
}
