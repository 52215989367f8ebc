package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

func (c *cluster) drains() (list []gateway.DrainStatus) {
	c.Helper()
	var w struct{ Drains []gateway.DrainStatus }
	require.NoError(c, json.Unmarshal([]byte(c.get("/workers").body), &w))
	return w.Drains
}

// A drain that is over as its engine is removed leaves nothing behind; one that
// still has a deadline ends what runs, and then goes, too.
func TestDrainsOfEnginesThatAreRemoved(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, {C0: 50 * time.Millisecond}, {}}})
	first, second := addressOf(c.decode[0]), addressOf(c.decode[1])
	c.ask("POST", c.admin+"/workers/"+first+"/drain", "")
	c.ask("POST", c.admin+"/workers/"+addressOf(c.decode[2])+"/drain", "")
	got := c.judging("a long story", `"stream":true,"max_tokens":300,`)
	c.eventually("it is decoded", func() bool { return c.decode[1].Stats().Running > 0 && c.metric("evenkeel_ttft_seconds_count") > 0 })
	c.ask("DELETE", c.admin+"/workers/"+addressOf(c.decode[2])+"/drain", "")
	c.ask("POST", c.admin+"/workers/"+second+"/drain", `{"deadline":"50ms"}`)
	for _, gone := range []string{first, second} {
		require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/workers/"+gone, "").status)
	}
	c.eventually("no drain is left", func() bool { return len(c.drains()) == 0 })
	<-got
	require.Equal(t, 1.0, c.sum("evenkeel_drained_answers_total"), "the deadline ended it")
}

func addressOf(e *refengine.Engine) string { return strings.TrimPrefix(e.URLs()[0], "http://") }

// paced is a decode engine whose answers last.
func paced() refengine.Config { return refengine.Config{C0: 5 * time.Millisecond} }

// A rank of an engine that fronts several is drained alone, and comes back.
func TestOneRankDrains(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{DPSize: 2, DPMode: "internal"}}, profile: mooncake.Profile{DPMode: mooncake.DPInternal}})
	used := func() map[string]bool {
		before := len(c.records())
		for i := range 8 {
			require.Equal(t, "right", c.judge(fmt.Sprint("story ", before+i), ""))
		}
		c.accounted()
		ranks := map[string]bool{}
		for _, r := range c.records()[before:] {
			ranks[r.Rank] = true
		}
		return ranks
	}
	id := addressOf(c.decode[0])
	for _, path := range []string{id + "/1/drain", id + "%2F1/drain"} {
		require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/workers/"+path, "").status)
		require.Equal(t, map[string]bool{id + "/0": true}, used())
		require.Equal(t, "done", c.drains()[0].State)
		require.Equal(t, id+"/1", c.drains()[0].ID)
		require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/workers/"+path, "").status)
		require.Empty(t, c.drains())
		require.Equal(t, http.StatusNotFound, c.ask("DELETE", c.admin+"/workers/"+path, "").status, "it does not drain any more")
	}
	require.Equal(t, http.StatusNotFound, c.ask("POST", c.admin+"/workers/"+id+"/2/drain", "").status)
	for _, bad := range []string{`{`, `{"deadline":"soon"}`, `{"deadline":"-1s"}`, `{"limit":"1s"}`} {
		require.Equal(t, http.StatusBadRequest, c.ask("POST", c.admin+"/workers/"+id+"/drain", bad).status, bad)
	}
	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/workers/"+id+"/0/drain", "").status)
	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/workers/"+id+"/1/drain", "").status)
	r := c.post(chatPath, chat("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status, "every rank drains")
}

// Prefills under way go to another engine at the deadline, and what a drained
// prefiller has finished is decoded all the same.
func TestADrainedPrefiller(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		prefill: []refengine.Config{{}, {}},
		decode:  []refengine.Config{{Slots: 1, C0: 10 * time.Millisecond}},
	})
	first := addressOf(c.prefill[0])
	c.ask("POST", c.admin+"/workers/"+addressOf(c.prefill[1])+"/drain", "") // found without a role
	leave := c.endless()
	got := make(chan string, 2)
	go func() { got <- c.judge("it waits in the pool", `"stream":true,`) }()
	c.eventually("it is prefilled", func() bool { return c.gw.Status(t.Context()).Prefill[0].Pooled == 1 })
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Count: 1}))
	go func() { got <- c.judge("its prefill hangs", `"stream":true,`) }()
	c.eventually("it hangs", func() bool { return c.gw.Status(t.Context()).Prefill[0].Inflight == 1 })
	c.ask("DELETE", c.admin+"/workers/"+addressOf(c.prefill[1])+"/drain", "")
	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/workers/"+first+"/drain?role=prefill", `{"deadline":"20ms"}`).status)
	c.eventually("the probe is elsewhere", func() bool { return c.prefill[1].Stats().Pins == 1 })
	d := c.drains()[0]
	require.Equal(t, []any{"deadline", 0, 1}, []any{d.State, d.Requests, d.Handoffs}, "what is finished is kept")
	require.NotNil(t, d.Deadline)
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, "right", <-got)
	c.eventually("it is done", func() bool { return c.drains()[0].State == "done" })
}

// Load balancers are told first, clients later.
func TestADrainIsAnnouncedFirst(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Limits.DrainGrace = patience }})
	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/drain", "").status)
	require.Equal(t, http.StatusServiceUnavailable, c.get("/readyz").status)
	require.Equal(t, http.StatusOK, c.ask("GET", c.url+"/v1/models", "").status)
	require.Equal(t, "right", c.judge("its client has not heard of it", `"stream":true,`))
	require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/drain", "").status)
	require.Equal(t, http.StatusOK, c.get("/readyz").status)
}

// What runs has its time, and what comes is refused.
func TestTheProxyDrains(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:    []refengine.Config{{C0: 5 * time.Millisecond, Slots: 2}},
		configure: func(cfg *config.Config) { cfg.Limits.DrainGrace = 100 * time.Millisecond },
	})
	var running sync.WaitGroup
	bodies := make(chan reply, 3)
	for range cap(bodies) { // the last has to wait for a slot
		running.Go(func() {
			bodies <- c.post(completionPath, completion("endless", `"stream":true,"ignore_eos":true,"max_tokens":100000,`))
		})
	}
	c.eventually("two run", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 2 })
	c.eventually("one waits", func() bool { return c.prefill[0].Stats().Pins == 1 })
	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/drain", `{"deadline":"3s"}`).status)
	c.eventually("others are refused", func() bool { return c.post(chatPath, `{`).status == http.StatusServiceUnavailable })
	require.NotEmpty(t, c.post(chatPath, `{`).header.Get("Retry-After"))
	running.Wait()
	cut, refused := 0, 0
	for range cap(bodies) {
		r := <-bodies
		require.NoError(t, r.err)
		if r.status == http.StatusServiceUnavailable {
			refused++
			continue
		}
		a := read(t, r.body)
		require.Equal(t, "draining", a.fail)
		require.True(t, a.done)
		cut++
	}
	require.Equal(t, []int{2, 1}, []int{cut, refused})
	s := c.gw.Status(t.Context()).Drain
	require.NotNil(t, s)
	require.True(t, s.Over)
	require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/drain", "").status)
	require.Equal(t, "right", c.judge("back again", `"stream":true,`))
	require.Nil(t, c.gw.Status(t.Context()).Drain)
}
