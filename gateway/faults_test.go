package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// harmless are faults that a client must not notice.
var harmless = []refengine.Fault{refengine.MissingDone, refengine.FrozenGauges, refengine.SlowPages, refengine.Slow, refengine.Swallow, refengine.Comments,
	refengine.CRLF, refengine.SplitBytes, refengine.UsageAlways, refengine.EOSFirst}

// Whatever an engine does wrong, on either side: the client gets the right text
// whole, or is told that it did not.
func TestEveryFault(t *testing.T) {
	t.Parallel()
	for _, name := range refengine.FaultNames() {
		fault := refengine.Fault(name)
		if fault == refengine.WrongKey {
			continue // KV of another prompt: only the engine could tell
		}
		for i, rule := range fault.Forms() {
			for _, side := range []string{"prefill", "decode"} {
				t.Run(fmt.Sprintf("%s %d on %s", name, i, side), func(t *testing.T) {
					t.Parallel()
					within := func(silence time.Duration) func(*config.Config) {
						return func(cfg *config.Config) {
							cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {FirstEventTimeout: silence, RejectReleases: new(true)}}
							cfg.Limits.ProbeTimeout, cfg.Limits.EventTimeout = silence, silence
						}
					}
					o := options{dirty: true, configure: within(patience)}
					if fault == refengine.Hang { // an answer that is right needs its time, too: later
						o.configure, o.later = within(250*time.Millisecond), within(patience)
					}
					c := start(t, o)
					e := map[string]*refengine.Engine{"prefill": c.prefill[0], "decode": c.decode[0]}[side]
					for j, more := range []string{`"stream":true,`, ``, `"stream":true,"n":2,"seed":5,`, `"n":2,"seed":5,`} {
						rule := rule
						rule.Count = 1 + j%2 // once, and on the retry as well
						require.NoError(t, e.SetFaults(rule))
						got := c.judge(fmt.Sprintf("p%d words to prefill", j), more)
						if slices.Contains(harmless, fault) {
							require.Equal(t, "right", got)
						}
					}
					require.NoError(t, e.SetFaults())
					if o.later != nil {
						r, _ := c.reload("")
						require.Equal(t, "used", r.Outcome, r.Error)
						require.Empty(t, r.Restart)
					}
					c.eventually("all is well again", func() bool { return c.judge("and now", `"stream":true,`) == "right" })
				})
			}
		}
	}
}

// judging has judge ask, and gives what it says. The channel is closed without a verdict if it fails.
func (c *cluster) judging(prompt, more string) <-chan string {
	got := make(chan string, 1)
	go func() {
		defer close(got)
		got <- c.judge(prompt, more)
	}()
	return got
}

// judge asks and fails if what came is wrong, or looks whole and is not. It
// says "right", or what the client was told.
func (c *cluster) judge(prompt, more string) string {
	c.Helper()
	body := chat(prompt, more)
	var all []uint64 // answers: without a seed, and those of two seeds
	for _, seed := range []string{"", `"seed":5,`, `"seed":6,`} {
		p, err := reftext.Render(true, []byte(chat(prompt, seed)))
		require.NoError(c, err)
		all = append(all, p.Answer)
	}
	keys := all[:1]
	if strings.Contains(more, `"n":2`) {
		keys = all[1:]
	}
	r := c.post(chatPath, body)
	require.NoError(c, r.err, "an answer ends as HTTP says, whatever it says")
	if r.status != http.StatusOK {
		require.Contains(c, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.status, r.body)
		c.Logf("%d: %s", r.status, r.body)
		return fmt.Sprint(r.status)
	}
	if r.header.Get("Content-Type") == "application/json" {
		for i, text := range whole(c.T, r.body) {
			wholeText(c.T, keys[i], text)
		}
		return "right"
	}
	got := read(c.T, r.body)
	require.True(c, got.done)
	for i, key := range keys {
		rightText(c.T, key, got.text[i])
		if got.fail == "" {
			require.NotEmpty(c, got.finish[i], "an end without a reason: %s", r.body)
			wholeText(c.T, key, got.text[i])
		}
	}
	if got.fail != "" {
		return got.fail
	}
	return "right"
}

// accounted waits until every request is in the request log and in all counts: a client has the last byte of
// its answer a moment before.
func (c *cluster) accounted() {
	c.Helper()
	c.eventually("all requests are accounted for", func() bool { return c.gw.Status(context.Background()).Open == 0 })
}

// settledRequests waits for the request log.
func (c *cluster) settledRequests(n int) {
	c.Helper()
	c.eventually("the request is logged", func() bool { return len(c.records()) == n })
}

// With hand-offs that live for a moment and slots that are always taken, many
// requests wait too long. They are refused; none is decoded from expired KV.
func TestExpiredHandoffsAreNeverDecoded(t *testing.T) {
	t.Parallel()
	const hold, margin = 13 * time.Second, 12 * time.Second // a second in the pool; the pull has its time on a busy machine, too
	c := start(t, options{
		dirty:   true, // what cannot be drained in time the engine frees by itself
		profile: mooncake.Profile{KVHoldTimeout: hold, HoldMargin: margin},
		prefill: []refengine.Config{{KVHoldTimeout: hold, PrefillConcurrency: 8}},
		decode:  []refengine.Config{{Slots: 2, DPSize: 2, C0: 8 * time.Millisecond}},
		// Only the pool refuses: in the queue before prefill all wait as long as a slow machine takes.
		configure: func(cfg *config.Config) { cfg.Prefill.Queue.Timeout = time.Hour },
	})
	results := make(chan string, 60)
	for i := range cap(results) {
		go func() { results <- c.judge(fmt.Sprint("prompt ", i), `"stream":true,`) }()
	}
	count := map[string]int{}
	for range cap(results) {
		count[<-results]++
	}
	require.Positive(t, count["right"])
	asked := cap(results)
	for tries := 0; count["503"] == 0; tries++ { // slots came free soon enough for all: more at once
		require.Less(t, tries, 5)
		more := 60 << tries
		for i := range more {
			go func() { results <- c.judge(fmt.Sprint("another ", tries, " prompt ", i), `"stream":true,`) }()
		}
		for range more {
			count[<-results]++
		}
		asked += more
	}
	require.Equal(t, asked, count["right"]+count["503"], "%v", count)
	c.settled(true) // no replay, no expired pull
	require.EqualValues(t, count["right"], c.metric(`evenkeel_requests_total{outcome="ok"}`))
	require.EqualValues(t, count["503"], c.metric(`evenkeel_requests_total{outcome="pool_timeout"}`), "%v", c.outcomes())
}

// A decode engine that reads the KV too late reads somebody else's by then, and
// answers 200. Nobody gets to see that.
func TestALatePullIsNotBelieved(t *testing.T) {
	t.Parallel()
	const hold = 2 * time.Second
	c := start(t, options{
		dirty:     true,
		profile:   mooncake.Profile{KVHoldTimeout: hold},
		prefill:   []refengine.Config{{KVHoldTimeout: hold}},
		decode:    []refengine.Config{{TransferBase: hold + time.Second}},
		configure: func(cfg *config.Config) { cfg.Prefill.Retry.Attempts = 1 },
	})
	require.Equal(t, "504", c.judge("a prompt", `"stream":true,`))
	require.Equal(t, "504", c.judge("another", ""))
	require.EqualValues(t, 2, c.metric("evenkeel_late_pulls_total"))
}
