package gateway_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// absent is a dispatcher us-1 that answers once it is back.
func absent(t *testing.T) (at string, back func()) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var alive atomic.Bool
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q struct{ Seq uint64 }
		if !alive.Load() || r.URL.Path != geo.ProbePath || json.NewDecoder(r.Body).Decode(&q) != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintf(w, `{"v":"1.0","id":"us-1","region":"us","boot":"b","seq":%d,"proc_us":5,"models":{}}`, q.Seq)
	})}
	go func() { _ = s.Serve(ln) }()
	t.Cleanup(func() { _ = s.Close() })
	return ln.Addr().String(), func() { alive.Store(true) }
}

// adopter is eu-1 with engines of its own, the first of each kind, and those of
// us, whose dispatcher is gone until it is back.
func adopter(t *testing.T, prefill, decode []refengine.Config, more func(*config.Config)) (c *cluster, back func()) {
	at, back := absent(t)
	c = start(t, options{dirty: true, prefill: prefill, decode: decode, configure: func(cfg *config.Config) {
		region(t, cfg, "eu-1", "127.0.0.1:0", "us-1", at)
		cfg.Geo.Policy, cfg.Geo.Probe.Interval, cfg.Geo.Probe.Misses = "local-only", 50*time.Millisecond, 2
		o := &cfg.Geo.Ownership
		o.Engine, o.DeadAfter, o.TakeoverOrder, o.MaxShare = geo.OwnStatic, 100*time.Millisecond, []string{"eu-1"}, 1
		cfg.Engines.Prefill[1].Region, cfg.Engines.Decode[1].Region = "us", "us"
		cfg.Prefill.Policy, cfg.Health.SlowStart = "round-robin", 0
		if more != nil {
			more(cfg)
		}
	}})
	c.Eventually("the engines of us are served", func() bool { return c.Metric(`evenkeel_prefill_candidates{state="open"}`) == 2 })
	return c, back
}

// at says whether an engine's address is in what a record names.
func at(e *refengine.Engine, id string) bool {
	return strings.HasPrefix(id, strings.TrimPrefix(e.URLs()[0], "http://"))
}

func TestAHandOffThatIsHandedBackIsPrefilledAgainAtHome(t *testing.T) {
	t.Parallel()
	c, back := adopter(t, []refengine.Config{{}, {}}, []refengine.Config{{Slots: 1}, {Slots: 1}}, nil)
	var leave []func()
	for full := range 2 { // the second goes where the first is not
		c.Eventually("slots are counted", func() bool { return c.decodeFull() == full })
		leave = append(leave, c.Endless())
	}
	c.Eventually("slots are counted", func() bool { return c.decodeFull() == 2 })
	require.Len(t, c.running(c.Decode[1]), 1, "one of each region's ranks is taken")
	results := make(chan reply, 2)
	for range cap(results) {
		go func() { results <- c.Post(refclient.ChatPath, chat("one two three", `"max_tokens":3,`)) }()
	}
	c.Eventually("one waits for each", func() bool {
		return c.Metric("evenkeel_pool_entries") == 2 && c.Prefill[0].Stats().Probes == 2 && c.Prefill[1].Stats().Probes == 2
	})
	back()
	c.Eventually("both wait at home", func() bool { return c.Metric("evenkeel_pool_entries") == 2 && c.Prefill[0].Stats().Probes == 3 })
	require.Len(t, c.running(c.Decode[1]), 1, "what runs there runs on")
	for _, end := range leave {
		end()
	}
	for range cap(results) {
		got := <-results
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		for _, a := range c.receipt(got.Header.Get("X-Request-Id")).Attempts {
			if a.Again {
				require.Equal(t, board.ErrWithdrawn.Error(), a.Cause, "as soon as us-1 is back, not when its ranks have been gone for long")
			}
		}
	}
	c.Accounted()
	var attempts []int
	for _, r := range c.Records() {
		if r.Outcome == "ok" {
			require.True(t, at(c.Prefill[0], r.Prefill) && at(c.Decode[0], r.Rank), "%s, %s", r.Prefill, r.Rank)
			attempts = append(attempts, r.Attempts)
		}
	}
	require.ElementsMatch(t, []int{1, 2}, attempts)
}

// decodeFull counts the prefillers of whose region the decode slots are taken.
func (c *cluster) decodeFull() (n int) {
	for _, p := range c.gw.Prefill().Status() {
		if p.DecodeFull {
			n++
		}
	}
	return n
}

// running are the requests that an engine's ranks decode, one entry each.
func (c *cluster) running(e *refengine.Engine) (list []string) {
	for _, m := range c.gw.Status(c.Context()).Dispatch.Models {
		for _, w := range m.Workers {
			for range w.Used {
				if at(e, w.Name) {
					list = append(list, w.Name)
				}
			}
		}
	}
	return list
}

// rank is the first of an engine's ranks.
func (c *cluster) rank(e *refengine.Engine) (w board.WorkerStatus) {
	for _, m := range c.gw.Status(c.Context()).Dispatch.Models {
		for _, w := range m.Workers {
			if at(e, w.Name) {
				return w
			}
		}
	}
	return w
}

func TestATakerCountsWhatRunsThereAlready(t *testing.T) {
	t.Parallel()
	us := start(t, options{dirty: true, decode: []refengine.Config{{Slots: 8}}})
	leave := us.Endless()
	us.Endless()
	c, _ := adopter(t, []refengine.Config{{}, {}}, []refengine.Config{{Slots: 8}, {Slots: 8}}, func(cfg *config.Config) {
		cfg.Geo.Ownership.MaxShare = 0.5
		cfg.Engines.Prefill[1].URL, cfg.Engines.Decode[1].URL = us.Prefill[0].URLs()[0], us.Decode[0].URLs()[0]
	})
	rank := func() board.WorkerStatus { return c.rank(us.Decode[0]) }
	c.Eventually("both are counted", func() bool { w := rank(); return w.Limit == 4 && w.Others > 0 })
	for range 3 {
		us.Endless()
	}
	c.Eventually("five leave three slots", func() bool { return rank().Limit == 3 })
	require.Zero(t, rank().KVTokens, "none of them is ours")
	leave()
	c.Eventually("one that ended is read off", func() bool { return rank().Limit == 4 })
}

func TestWhereNothingCanBeDecodedNothingIsPrefilled(t *testing.T) {
	t.Parallel()
	c, _ := adopter(t, []refengine.Config{{}, {}}, []refengine.Config{{Slots: 1}, {Slots: 16}}, nil)
	c.Eventually("all slots of us may be used: it is one before it is known what runs there",
		func() bool { return c.rank(c.Decode[1]).Limit == 16 })
	for {
		leave := c.Endless()
		if len(c.running(c.Decode[0])) > 0 {
			break
		}
		leave() // it would keep a slot of the other region, which the requests below need
	}
	c.Eventually("that is known", func() bool { return c.decodeFull() == 1 })
	for range 6 { // in turn, were it not for the slots
		require.Equal(t, http.StatusOK, c.Post(refclient.ChatPath, chat("one two three", `"max_tokens":3,`)).Status)
	}
	c.Eventually("all six are logged", func() bool {
		return len(slices.DeleteFunc(c.Outcomes(), func(o string) bool { return o != "ok" })) == 6
	})
	for _, r := range c.Records() {
		require.True(t, at(c.Prefill[1], r.Prefill) && at(c.Decode[1], r.Rank), "%s, %s", r.Prefill, r.Rank)
	}
}
