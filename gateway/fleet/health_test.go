package fleet_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// engineStatus is what /status says of an engine.
func (b *bed) engineStatus(e *refengine.Engine) roster.EngineStatus {
	b.Helper()
	for _, s := range b.now().Engines {
		if strings.HasSuffix(e.URLs()[0], s.ID) {
			return s
		}
	}
	b.Fatalf("no engine at %s", e.URLs()[0])
	return roster.EngineStatus{}
}

// twoDecodes are engines of one rank each that rr takes in turn.
func twoDecodes(more func(*config.Config)) options {
	return options{
		decode: []refengine.Config{{}, {}}, dirty: true,
		profile: mooncake.Profile{FirstEventTimeout: 3 * time.Second, RejectReleases: new(false)},
		configure: func(cfg *config.Config) {
			cfg.Dispatch.Policy, cfg.Prefill.Retry.Budget = "rr", 1
			cfg.Health.Interval, cfg.Health.Canary, cfg.Health.SlowStart = 20*time.Millisecond, 3*time.Second, 0
			if more != nil {
				more(cfg)
			}
		},
	}
}

// An engine that hangs but answers its health check gets no more requests, and
// serves again once it has healed. What it runs stays charged all the while.
func TestAWedgedEngineIsLeftAndTakenBack(t *testing.T) {
	t.Parallel()
	o := twoDecodes(nil)
	for i := range o.decode {
		o.decode[i].Steps.C0 = 4 * time.Millisecond // streams that run all the while
	}
	o.profile.FirstEventTimeout = patience
	b := start(t, o)
	within := func(limit time.Duration) { // only what hangs is under a short one
		b.reconfigure(func(cfg *config.Config) {
			p := cfg.Profiles[config.DefaultProfile]
			p.FirstEventTimeout = limit
			cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: p}
		})
	}
	bad := b.Decode[0]
	b.Eventually("both are up", func() bool { return b.Sum("evenkeel_engine_up") == 3 })
	held := func() (slots [2]int) {
		for i, w := range b.now().Dispatch.Models[0].Workers {
			slots[i] = w.Used
		}
		return slots
	}
	var leaves []func()
	for slots := held(); min(slots[0], slots[1]) < 2; slots = held() { // streams on both, to be there when health changes
		leaves = append(leaves, b.Endless())
	}
	before := held()

	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Hang, Leg: refengine.LegDecode},
		refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegPlain}))
	within(3 * time.Second)
	for i := 0; b.engineStatus(bad).State != "wedged"; i++ {
		require.Less(t, i, 50)
		b.Judge(fmt.Sprint("prompt ", i), `"stream":true,`)
	}
	within(patience)
	s := b.engineStatus(bad)
	require.True(t, s.Up, "its health check answers 200")
	require.NotEmpty(t, s.Error)
	b.Eventually("health touches no load, and what was drained has left", func() bool { return held() == before })
	decodes := bad.Stats().Decodes
	for i := range 6 {
		require.Equal(t, "right", b.Judge(fmt.Sprint("other ", i), `"stream":true,`))
	}
	require.Equal(t, decodes, bad.Stats().Decodes, "it was left alone")
	require.Equal(t, before, held())

	require.NoError(t, bad.SetFaults())
	b.Eventually("it is back", func() bool { return b.engineStatus(bad).State == "up" })
	require.Positive(t, b.Metric(fmt.Sprintf(`evenkeel_engine_canaries_total{engine="decode %s",outcome="passed"}`, b.engineStatus(bad).ID)))
	b.Eventually("it serves", func() bool {
		require.Equal(t, "right", b.Judge("again", `"stream":true,`))
		return bad.Stats().Decodes > decodes
	})
	for _, leave := range leaves {
		leave()
	}
}

// Five failures in a row take an engine out for a second; what clients cause
// does not, however often.
func TestWhatCountsAgainstADecodeEngine(t *testing.T) {
	t.Parallel()
	const lost = "quarantined" // only another engine's answers show that this one is to blame
	for _, row := range []struct {
		name  string
		rule  refengine.Rule
		both  bool // engines do it
		state string
	}{
		{"503", refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegDecode}, false, "out"},
		{"a connection that is reset", refengine.Rule{Fault: refengine.Reset, Leg: refengine.LegDecode}, false, lost},
		{"a stream that ends before it began", refengine.Rule{Fault: refengine.SilentEnd, Leg: refengine.LegDecode}, false, lost},
		{"an error event", refengine.Rule{Fault: refengine.ErrorEvent, Leg: refengine.LegDecode}, false, lost},
		{"500 where another engine answers", refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}, false, lost},
		{"500 that every engine gives: the request's", refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}, true, "up"},
		{"400", refengine.Rule{Fault: refengine.Reject, Leg: refengine.LegDecode}, false, "up"},
		{"422", refengine.Rule{Fault: refengine.Status, Value: 422, Leg: refengine.LegDecode}, false, "up"},
		{"429", refengine.Rule{Fault: refengine.Throttle, Leg: refengine.LegDecode}, false, "up"},
		{"an engine without memory for it", refengine.Rule{Fault: refengine.Recomputed, Leg: refengine.LegDecode}, false, "up"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, twoDecodes(nil))
			b.Eventually("both are up", func() bool { return b.Sum("evenkeel_engine_up") == 3 })
			require.NoError(t, b.Decode[0].SetFaults(row.rule))
			if row.both {
				require.NoError(t, b.Decode[1].SetFaults(row.rule))
			}
			out := func() float64 { return b.Sum("evenkeel_engine_outages_total") }
			quarantines := func() float64 {
				return b.Metric(fmt.Sprintf(`evenkeel_pair_quarantines_total{engine=%q,prefiller=""}`, refclient.AddressOf(b.Decode[0])))
			}
			for i := 0; i < 16 && out()+quarantines() == 0; i++ {
				b.Judge(fmt.Sprint("prompt ", i), `"stream":true,`)
			}
			switch row.state {
			case "out":
				require.Positive(t, out())
			case lost:
				require.Positive(t, quarantines(), "hand-offs that it loses, and another one gets, take it out")
			default:
				require.Zero(t, out())
				require.Zero(t, quarantines())
				require.Equal(t, "up", b.engineStatus(b.Decode[0]).State)
			}
		})
	}
}

// The only engine of a model is not taken from it on suspicion: a canary that
// passes proves that it computes.
func TestTheOnlyEngineStaysUntilACanaryFails(t *testing.T) {
	t.Parallel()
	o := twoDecodes(func(cfg *config.Config) { cfg.Prefill.Retry.Attempts = 1 })
	o.decode = []refengine.Config{{}}
	b := start(t, o)
	require.NoError(t, b.Decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegDecode}))
	for i := 0; b.engineStatus(b.Decode[0]).State == "up"; i++ {
		require.Less(t, i, 50)
		require.NotEqual(t, "right", b.Judge(fmt.Sprint("prompt ", i), `"stream":true,`))
	}
	require.NoError(t, b.Decode[0].SetFaults())
	require.Equal(t, "right", b.Judge("at once", `"stream":true,`))
	b.Eventually("an answer closes the circuit", func() bool { return b.engineStatus(b.Decode[0]).State == "up" })
}

// One prefiller's hand-offs hang on one engine, while both serve others: the
// pair is avoided, no engine is taken out.
func TestAPairThatFailsIsAvoided(t *testing.T) {
	t.Parallel()
	o := twoDecodes(func(cfg *config.Config) { cfg.Prefill.Policy = "round-robin" })
	o.prefill = []refengine.Config{{}, {}}
	var strikes atomic.Int64
	o.decode[0].Hooks.OnStrike = func(uint64, refengine.Rule) { strikes.Add(1) }
	configure := o.configure
	o.configure = func(cfg *config.Config) { configure(cfg); cfg.Dispatch.Policy = "prandom" }
	b := start(t, o)
	b.Eventually("all are up", func() bool { return b.Sum("evenkeel_engine_up") == 4 })
	require.NoError(t,
		b.Decode[0].SetFaults(refengine.Rule{Fault: refengine.SilentEnd, From: strings.TrimPrefix(b.Prefill[0].URLs()[0], "http://")}))
	burst := func(n int) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { b.Judge(fmt.Sprint("prompt ", i), `"stream":true,`) })
		}
		wg.Wait()
	}
	for i := 0; b.Metric("evenkeel_pairs_quarantined") == 0; i++ {
		require.Less(t, i, 50)
		burst(8)
	}
	trials := func() int64 { return int64(b.Sum("evenkeel_pair_quarantines_total")) } // each that fails begins another quarantine
	lost, tried := strikes.Load(), trials()
	burst(16)
	if b.Metric("evenkeel_pairs_quarantined") == 1 {
		require.LessOrEqual(t, strikes.Load()-lost, trials()-tried, "hand-offs of one prefiller went on to die there")
	}
	b.Eventually("hand-offs are moved to the other engine", func() bool {
		burst(4) // the pair's time may have been over at the last one
		return b.Metric(`evenkeel_pair_assignments_total{outcome="moved"}`) > 0
	})
	for _, e := range b.Decode {
		require.Equal(t, "up", b.engineStatus(e).State, "neither engine is to blame")
	}
	require.NoError(t, b.Decode[0].SetFaults())
	b.Eventually("the pair works again", func() bool {
		burst(4)
		return b.Metric("evenkeel_pairs_quarantined") == 0
	})
}

// An engine that returns to a running fleet gets its slots step by step.
func TestAnEngineThatReturnsStartsSlowly(t *testing.T) {
	t.Parallel()
	o := twoDecodes(func(cfg *config.Config) { cfg.Health.SlowStart = patience }) // a busy machine looks before it is over
	b := start(t, o)
	b.Eventually("both are up", func() bool { return b.Sum("evenkeel_engine_up") == 3 })
	require.EqualValues(t, 1, b.engineStatus(b.Decode[0]).Share, "the first start of the proxy is no return")
	b.Decode[0].Kill()
	b.Eventually("it is down", func() bool { return b.engineStatus(b.Decode[0]).State == "down" })
	require.NoError(t, b.Decode[0].Revive())
	b.Eventually("it is up, and the dispatcher knows", func() bool {
		return b.engineStatus(b.Decode[0]).State == "up" && b.now().Dispatch.Models[0].Workers[0].Up
	})
	share := b.engineStatus(b.Decode[0]).Share
	require.Less(t, share, 1.0)
	require.EqualValues(t, 1, b.engineStatus(b.Decode[1]).Share)
	w := b.now().Dispatch.Models[0].Workers[0]
	require.Less(t, w.Limit, w.Slots)
	b.reconfigure(func(cfg *config.Config) { cfg.Health.SlowStart = 2 * time.Second })
	b.Eventually("it has all its slots", func() bool {
		w := b.now().Dispatch.Models[0].Workers[0]
		return b.engineStatus(b.Decode[0]).Share == 1 && w.Limit == w.Slots
	})
}

// The only prefill engine of a model stands still until its health check has missed
// twice. Requests wait for it, and none is refused.
func TestRequestsWaitForTheOnlyPrefillEngineThatStandsStill(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes the time of two health checks")
	}
	b := start(t, options{dirty: true, prefill: []refengine.Config{{Prompts: refengine.Prompts{PerToken: 10 * time.Millisecond,
		Concurrency: 8}}}})
	b.allUp()
	require.NoError(t, b.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.SlowPages, DelayMS: 3_600_000}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() { // half a minute of prefill, so that the engine has work and its pages are slow
		defer close(left)
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, b.URL+refclient.CompletionPath,
			strings.NewReader(completion(reftext.MakePrompt(1, 3000), "")))
		if resp, err := b.HTTP.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	b.Eventually("it is down", func() bool { return b.engineStatus(b.Prefill[0]).State == "down" })
	answers := make(chan string)
	const asked = 4
	for i := range asked {
		go func() { answers <- b.Judge(fmt.Sprint("prompt ", i), "") }()
	}
	b.Eventually("they wait", func() bool { return b.Sum("evenkeel_prefill_queue_requests") >= asked })
	require.NoError(t, b.Prefill[0].SetFaults())
	leave()
	<-left
	for range asked {
		require.Equal(t, "right", <-answers)
	}
}

// A rank that fails every request at once is always free, while the others are
// full. It must not draw the requests that come, nor those it has failed.
func TestARankThatFailsAtOnceDrawsNoTraffic(t *testing.T) {
	t.Parallel()
	var struck atomic.Int64
	b := start(t, options{dirty: true,
		decode: []refengine.Config{{Slots: 1}, {Slots: 1, Hooks: refengine.Hooks{OnStrike: func(uint64, refengine.Rule) { struck.Add(1) }}},
			{Slots: 1}}})
	bad := b.Decode[1]
	stop := b.KeepAsking(8) // every answer must be right
	b.Eventually("all are busy", func() bool {
		for _, d := range b.Decode {
			if d.Stats().Decodes < 3 {
				return false
			}
		}
		return true
	})
	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}))
	before := b.Decode[0].Stats().Decodes
	b.Eventually("the others serve on", func() bool { return b.Decode[0].Stats().Decodes > before+40 })
	outages := 0.0
	b.Eventually("it is out", func() bool { outages = b.Sum("evenkeel_pair_quarantines_total"); return outages > 0 })
	require.LessOrEqual(t, float64(struck.Load()), 10*outages, "each time that it is tried again it gets no more than tell what it is")
	require.Positive(t, stop())
}

// Whether a rank of SGLang computes is tried with SGLang's fake host: a request without a room is
// refused whatever the rank does, or ends the whole server.
func TestACanaryOfSGLangIsComputed(t *testing.T) {
	t.Parallel()
	for _, balance := range []string{"round_robin", "follow_bootstrap_room"} {
		t.Run(balance, func(t *testing.T) {
			t.Parallel()
			b := early(t, refengine.SGLang, options{
				dirty: true, decode: []refengine.Config{{DPSize: 2, DPMode: "internal", SGLang: refengine.SGLangOptions{LoadBalance: balance}}},
				configure: func(cfg *config.Config) {
					if balance != "round_robin" { // the server chooses the rank of each request
						cfg.Engines.Decode[0].Ranks = 0
					}
					cfg.Prefill.Retry.Attempts = 1
					cfg.Health.Interval, cfg.Health.Canary, cfg.Health.SlowStart = 20*time.Millisecond, 3*time.Second, 0
				},
			})
			d := b.Decode[0]
			canaries := func(outcome string) float64 {
				return b.Metric(fmt.Sprintf(`evenkeel_engine_canaries_total{engine=%q,outcome=%q}`, "decode "+refclient.AddressOf(d), outcome))
			}
			require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.Reset, Leg: refengine.LegDecode}))
			b.Eventually("a canary fails", func() bool {
				require.Zero(t, canaries("passed"), "no rank computes")
				require.NotEqual(t, "right", b.Judge("a prompt", `"stream":true,`))
				return canaries("failed") > 0
			})
			require.NoError(t, d.SetFaults())
			b.Eventually("a canary brings it back", func() bool {
				_, decodes := b.fleet.Now().CountInService() // its state is told a moment before requests are admitted to it
				return canaries("passed") > 0 && b.engineStatus(d).State == "up" && decodes == 1
			})
			require.Zero(t, d.Stats().Crashes)
			require.Equal(t, "right", b.Judge("one two three", `"stream":true,`))
		})
	}
}

func TestNobodyToServe(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		engine func(*bed) *refengine.Engine
		code   string
	}{
		"no prefill engine": {func(b *bed) *refengine.Engine { return b.Prefill[0] }, "prefill_unavailable"},
		"no decode engine":  {func(b *bed) *refengine.Engine { return b.Decode[0] }, "decode_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, options{dirty: true})
			row.engine(b).Kill()
			for range 2 { // first found out by the request itself, then known
				r := b.Post(refclient.ChatPath, chat("a", `"stream":true,`))
				require.Equal(t, http.StatusServiceUnavailable, r.Status, r.Body)
				code, _, kind := refclient.Failure(t, r)
				require.Equal(t, row.code, code)
				require.Equal(t, "server_error", kind)
				require.NotEmpty(t, r.Header.Get("Retry-After"))
				b.Eventually("not ready any more", func() bool { return !b.ready() })
			}
			require.Equal(t, http.StatusServiceUnavailable, b.Ask("GET", b.URL+"/health", "").Status)
			require.NoError(t, row.engine(b).Revive())
			b.Eventually("all is well again", func() bool { return b.Judge("one two", "") == "right" })
		})
	}
}

// A busy engine answers requests while its metrics and its health check take
// seconds. It serves on.
func TestEnginesWhosePagesAreSlowServeOn(t *testing.T) {
	if testing.Short() {
		t.Skip("takes the time of some health checks")
	}
	t.Parallel()
	slow := refengine.Rule{Fault: refengine.SlowPages, DelayMS: 8000}
	b := start(t, options{
		// Pages are slow only while an engine has requests: prefills take so long that it always has.
		prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: time.Second}}, {Prompts: refengine.Prompts{Base: time.Second}}},
		decode:  []refengine.Config{{Steps: refengine.Steps{C0: 5 * time.Millisecond}}},
		configure: func(cfg *config.Config) {
			cfg.Health.Interval, cfg.Prefill.Scrape.Timeout = 100*time.Millisecond, 500*time.Millisecond
		},
	})
	engines := slices.Concat(b.Prefill[:2], b.Decode)
	for _, e := range engines {
		require.NoError(t, e.SetFaults(slow))
	}
	stop := b.KeepAsking(8) // every answer must be right
	stale := func() (n int) {
		for _, p := range b.candidates() {
			if p.Stale {
				n++
			}
		}
		return n
	}
	mostStale := 0
	b.Eventually("their health checks come too late", func() bool {
		mostStale = max(mostStale, stale())
		for _, e := range engines {
			s := b.engineStatus(e)
			require.True(t, s.Up, s.Error)
		}
		return b.Sum("evenkeel_engine_late_checks_total") >= 5 && mostStale == 2
	})
	require.True(t, b.ready())
	require.Positive(t, stop())
	require.Positive(t, b.Sum("evenkeel_prefill_scrape_misses_total"))
	for _, e := range engines {
		require.NoError(t, e.SetFaults())
	}
	b.Eventually("they tell their gauges again", func() bool { return stale() == 0 })
	require.Empty(t, b.logs.FilterMessage("an engine is down").All())
}

// Where each engine prefills and decodes, no answer speaks of engines that there are not.
func TestWithoutPairsNobodyIsToldOfThem(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"one group": {mixed: []refengine.Config{{DPSize: 2, DPMode: "internal"}}, dirty: true},
		"nobody has told its model": {mixed: []refengine.Config{{DPSize: 2, DPMode: "internal", Model: refengine.Model{Name: "other"}}},
			dirty: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, o)
			told := func(r reply, status int, code string) {
				t.Helper()
				require.Equal(t, status, r.Status, r.Body)
				require.NotContains(t, r.Body, "prefill")
				require.NotContains(t, r.Body, "decode")
				require.Contains(t, r.Body, code)
			}
			if name == "one group" {
				require.NoError(t, b.Decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
				told(b.Post(refclient.ChatPath, chat("a", "")), http.StatusServiceUnavailable, `"engine_unavailable"`)
				require.NoError(t, b.Decode[0].SetFaults(refengine.Rule{Fault: refengine.Internal}))
				told(b.Post(refclient.ChatPath, chat("a", "")), http.StatusBadGateway, `"engine_failed"`)
				require.NoError(t, b.Decode[0].SetFaults())
			}
			b.Decode[0].Kill()
			b.Eventually("the proxy is not ready", func() bool { return !b.ready() })
			for path, body := range map[string]string{refclient.ChatPath: chat("a", ""), refclient.CompletionPath: completion("a", `"stream":true,`), refclient.ResponsesPath: refclient.Response("a", ""), refclient.MessagesPath: refclient.Message("a", "")} {
				r := b.Post(path, body)
				if name != "one group" {
					require.Equal(t, http.StatusNotFound, r.Status, r.Body)
					continue
				}
				if told(r, http.StatusServiceUnavailable, "(down)"); path != refclient.MessagesPath {
					require.Contains(t, r.Body, `"engine_unavailable"`)
				}
			}
			require.Equal(t, roster.Aggregated, b.fleet.Now().RoleText(roster.Prefill))
		})
	}
}
