package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// engineStatus is what /status says of an engine.
func (c *cluster) engineStatus(e *refengine.Engine) gateway.EngineStatus {
	c.Helper()
	for _, s := range c.gw.Status(c.Context()).Engines {
		if strings.HasSuffix(e.URLs()[0], s.ID) {
			return s
		}
	}
	c.Fatalf("no engine at %s", e.URLs()[0])
	return gateway.EngineStatus{}
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
		o.decode[i].C0 = 4 * time.Millisecond // streams that run all the while
	}
	silence := patience
	o.profile.FirstEventTimeout = silence
	o.later = func(cfg *config.Config) {
		p := cfg.Profiles[config.DefaultProfile]
		p.FirstEventTimeout = silence
		cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: p}
	}
	c := start(t, o)
	within := func(limit time.Duration) { // only what hangs is under a short one
		silence = limit
		r, _ := c.reload("")
		require.Equal(t, "used", r.Outcome, r.Error)
		require.Empty(t, r.Restart)
	}
	bad := c.decode[0]
	c.eventually("both are up", func() bool { return c.sum("evenkeel_engine_up") == 3 })
	held := func() (slots [2]int) {
		for i, w := range c.gw.Status(t.Context()).Dispatch.Models[0].Workers {
			slots[i] = w.Used
		}
		return slots
	}
	var leaves []func()
	for slots := held(); min(slots[0], slots[1]) < 2; slots = held() { // streams on both, to be there when health changes
		leaves = append(leaves, c.endless())
	}
	before := held()

	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Hang, Leg: refengine.LegDecode}, refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegPlain}))
	within(3 * time.Second)
	for i := 0; c.engineStatus(bad).State != "wedged"; i++ {
		require.Less(t, i, 50)
		c.judge(fmt.Sprint("prompt ", i), `"stream":true,`)
	}
	within(patience)
	s := c.engineStatus(bad)
	require.True(t, s.Up, "its health check answers 200")
	require.NotEmpty(t, s.Error)
	c.eventually("health touches no load, and what was drained has left", func() bool { return held() == before })
	decodes := bad.Stats().Decodes
	for i := range 6 {
		require.Equal(t, "right", c.judge(fmt.Sprint("other ", i), `"stream":true,`))
	}
	require.Equal(t, decodes, bad.Stats().Decodes, "it was left alone")
	require.Equal(t, before, held())

	require.NoError(t, bad.SetFaults())
	c.eventually("it is back", func() bool { return c.engineStatus(bad).State == "up" })
	require.Positive(t, c.metric(fmt.Sprintf(`evenkeel_engine_canaries_total{engine="decode %s",outcome="passed"}`, c.engineStatus(bad).ID)))
	c.eventually("it serves", func() bool {
		require.Equal(t, "right", c.judge("again", `"stream":true,`))
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
	for _, row := range []struct {
		name  string
		rule  refengine.Rule
		both  bool // engines do it
		state string
	}{
		{"503", refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegDecode}, false, "out"},
		{"a connection that is reset", refengine.Rule{Fault: refengine.Reset, Leg: refengine.LegDecode}, false, "out"},
		{"a stream that ends before it began", refengine.Rule{Fault: refengine.SilentEnd, Leg: refengine.LegDecode}, false, "out"},
		{"an error event", refengine.Rule{Fault: refengine.ErrorEvent, Leg: refengine.LegDecode}, false, "out"},
		{"500 where another engine answers", refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}, false, "out"},
		{"500 that every engine gives: the request's", refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegDecode}, true, "up"},
		{"400", refengine.Rule{Fault: refengine.Reject, Leg: refengine.LegDecode}, false, "up"},
		{"422", refengine.Rule{Fault: refengine.Status, Value: 422, Leg: refengine.LegDecode}, false, "up"},
		{"429", refengine.Rule{Fault: refengine.Throttle, Leg: refengine.LegDecode}, false, "up"},
		{"an engine without memory for it", refengine.Rule{Fault: refengine.Recomputed, Leg: refengine.LegDecode}, false, "up"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, twoDecodes(nil))
			c.eventually("both are up", func() bool { return c.sum("evenkeel_engine_up") == 3 })
			require.NoError(t, c.decode[0].SetFaults(row.rule))
			if row.both {
				require.NoError(t, c.decode[1].SetFaults(row.rule))
			}
			out := func() float64 { return c.sum("evenkeel_engine_outages_total") }
			for i := 0; i < 16 && out() == 0; i++ {
				c.judge(fmt.Sprint("prompt ", i), `"stream":true,`)
			}
			if row.state == "out" {
				require.Positive(t, out())
			} else {
				require.Zero(t, out())
				require.Equal(t, "up", c.engineStatus(c.decode[0]).State)
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
	c := start(t, o)
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegDecode}))
	for i := 0; c.engineStatus(c.decode[0]).State == "up"; i++ {
		require.Less(t, i, 50)
		require.NotEqual(t, "right", c.judge(fmt.Sprint("prompt ", i), `"stream":true,`))
	}
	require.NoError(t, c.decode[0].SetFaults())
	require.Equal(t, "right", c.judge("at once", `"stream":true,`))
	c.eventually("an answer closes the circuit", func() bool { return c.engineStatus(c.decode[0]).State == "up" })
}

// One prefiller's hand-offs hang on one engine, while both serve others: the
// pair is avoided, no engine is taken out.
func TestAPairThatFailsIsAvoided(t *testing.T) {
	t.Parallel()
	o := twoDecodes(func(cfg *config.Config) { cfg.Prefill.Policy = "round-robin" })
	o.prefill = []refengine.Config{{}, {}}
	var strikes atomic.Int64
	o.decode[0].OnStrike = func(uint64, refengine.Rule) { strikes.Add(1) }
	configure := o.configure
	o.configure = func(cfg *config.Config) { configure(cfg); cfg.Dispatch.Policy = "prandom" }
	c := start(t, o)
	c.eventually("all are up", func() bool { return c.sum("evenkeel_engine_up") == 4 })
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.SilentEnd, From: strings.TrimPrefix(c.prefill[0].URLs()[0], "http://")}))
	burst := func(n int) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { c.judge(fmt.Sprint("prompt ", i), `"stream":true,`) })
		}
		wg.Wait()
	}
	for i := 0; c.metric("evenkeel_pairs_quarantined") == 0; i++ {
		require.Less(t, i, 50)
		burst(8)
	}
	trials := func() int64 { return int64(c.sum("evenkeel_pair_quarantines_total")) } // each that fails begins another quarantine
	lost, tried := strikes.Load(), trials()
	burst(16)
	if c.metric("evenkeel_pairs_quarantined") == 1 {
		require.LessOrEqual(t, strikes.Load()-lost, trials()-tried, "hand-offs of one prefiller went on to die there")
	}
	c.eventually("hand-offs are moved to the other engine", func() bool {
		burst(4) // the pair's time may have been over at the last one
		return c.metric(`evenkeel_pair_assignments_total{outcome="moved"}`) > 0
	})
	for _, e := range c.decode {
		require.Equal(t, "up", c.engineStatus(e).State, "neither engine is to blame")
	}
	require.NoError(t, c.decode[0].SetFaults())
	c.eventually("the pair works again", func() bool {
		burst(4)
		return c.metric("evenkeel_pairs_quarantined") == 0
	})
}

// An engine that returns to a running fleet gets its slots step by step.
func TestAnEngineThatReturnsStartsSlowly(t *testing.T) {
	t.Parallel()
	o := twoDecodes(func(cfg *config.Config) { cfg.Health.SlowStart = 2 * time.Second })
	c := start(t, o)
	c.eventually("both are up", func() bool { return c.sum("evenkeel_engine_up") == 3 })
	require.EqualValues(t, 1, c.engineStatus(c.decode[0]).Share, "the first start of the proxy is no return")
	c.decode[0].Kill()
	c.eventually("it is down", func() bool { return c.engineStatus(c.decode[0]).State == "down" })
	require.NoError(t, c.decode[0].Revive())
	c.eventually("it is up", func() bool { return c.engineStatus(c.decode[0]).State == "up" })
	share := c.engineStatus(c.decode[0]).Share
	require.Less(t, share, 1.0)
	require.EqualValues(t, 1, c.engineStatus(c.decode[1]).Share)
	w := c.gw.Status(t.Context()).Dispatch.Models[0].Workers[0]
	require.Less(t, w.Limit, w.Slots)
	c.eventually("it has all its slots", func() bool {
		w := c.gw.Status(t.Context()).Dispatch.Models[0].Workers[0]
		return c.engineStatus(c.decode[0]).Share == 1 && w.Limit == w.Slots
	})
}

// The only prefill engine of a model stands still until its health check has missed
// twice. Requests wait for it, and none is refused.
func TestRequestsWaitForTheOnlyPrefillEngineThatStandsStill(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes the time of two health checks")
	}
	c := start(t, options{dirty: true, prefill: []refengine.Config{{PrefillPerToken: 10 * time.Millisecond, PrefillConcurrency: 8}}})
	c.allUp()
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.SlowPages, DelayMS: 3_600_000}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() { // half a minute of prefill, so that the engine has work and its pages are slow
		defer close(left)
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, c.url+completionPath, strings.NewReader(completion(reftext.MakePrompt(1, 3000), "")))
		if resp, err := c.http.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	c.eventually("it is down", func() bool { return c.engineStatus(c.prefill[0]).State == "down" })
	answers := make(chan string)
	const asked = 4
	for i := range asked {
		go func() { answers <- c.judge(fmt.Sprint("prompt ", i), "") }()
	}
	c.eventually("they wait", func() bool { return c.sum("evenkeel_prefill_queue_requests") >= asked })
	require.NoError(t, c.prefill[0].SetFaults())
	leave()
	<-left
	for range asked {
		require.Equal(t, "right", <-answers)
	}
}
