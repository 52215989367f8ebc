package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
)

// jam is a cluster that serves one request at a time.
func jam(t *testing.T, queue int, keys ...string) *cluster {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, append(keys, "jam ek-jam")...)
	const room = 10 * 128 // an engine has at least as much as its longest request may take
	decode := refengine.Config{Slots: 1, KV: refengine.KV{Tokens: room}, Model: refengine.Model{MaxLen: room}}
	return start(t, options{decode: []refengine.Config{decode}, configure: func(cfg *config.Config) {
		cfg.KeysFile, cfg.Pool.Size, cfg.Prefill.Queue.Max = file, 1, queue
		cfg.GatewayAPI = config.GatewayAPI{Metrics: true, Objectives: map[string]int{"batch": -10}}
		cfg.Prefill.Queue.Timeout = time.Hour // nobody is refused for its wait, however slow the machine
	}})
}

// jammed serves a request until free is called: what comes meanwhile waits in the arrival queue.
// ended are the records of requests that ended since then.
func (c *cluster) jammed() (free func(), ended func() []record) {
	c.Helper()
	before := len(c.Records())
	require.NoError(c, c.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 3_600_000})) // until it is freed
	ctx, leave := context.WithCancel(c.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+refclient.ChatPath, strings.NewReader(chat("jam", "")))
	require.NoError(c, err)
	req.Header.Set("Authorization", "Bearer ek-jam")
	gone := make(chan error, 1)
	go func() {
		resp, err := c.HTTP.Do(req)
		if err == nil {
			_ = resp.Body.Close()
		}
		gone <- err
	}()
	c.Eventually("the only place is taken", func() bool { return c.gw.Status(c.Context()).PoolUsed == 1 })
	free = func() {
		require.NoError(c, c.Prefill[0].SetFaults())
		leave()
		require.Error(c, <-gone)
	}
	return free, func() []record { return c.Records()[before:] }
}

// queued sends a request and returns when it waits.
func (c *cluster) queued(key, body string, header ...string) <-chan reply {
	c.Helper()
	waiting := func() (n float64) {
		for line := range strings.Lines(c.get("/metrics").Body) {
			if rest, ok := strings.CutPrefix(line, "evenkeel_prefill_queue_requests{"); ok {
				n += number(c.T, rest[strings.IndexByte(rest, ' ')+1:])
			}
		}
		return n
	}
	before := c.Metric("evenkeel_prefill_queue_displaced_total") + waiting()
	got := make(chan reply, 1)
	go func() { got <- c.Post(refclient.ChatPath, body, append(header, "Authorization", "Bearer "+key)...) }()
	c.Eventually("it waits", func() bool { return c.Metric("evenkeel_prefill_queue_displaced_total")+waiting() > before })
	return got
}

// allAnswered holds that all were answered, and that nothing is left of them.
func (c *cluster) allAnswered(all []<-chan reply) {
	c.Helper()
	for _, r := range all {
		require.Equal(c.T, 200, (<-r).Status)
	}
	c.settled(false)
}

func TestWhoIsServedNext(t *testing.T) {
	t.Parallel()
	c := jam(t, 100, "crowd ek-crowd", "one ek-one", "ops ek-ops , trusted: true", "batch ek-batch , priority: -10", "team ek-team",
		"gateway ek-gateway , trusted: true")
	t.Run("by priority, and keys take turns", func(t *testing.T) {
		free, ended := c.jammed()
		body := chat("a", `"max_tokens":2,`)
		var all []<-chan reply
		send := func(key string, header ...string) { all = append(all, c.queued(key, body, header...)) }
		send("ek-batch")
		for range 4 {
			send("ek-crowd", "X-Evenkeel-Priority", "50") // not trusted: without effect
		}
		send("ek-one")
		send("ek-ops", "X-Evenkeel-Priority", "-50")
		send("ek-ops", "X-Evenkeel-Priority", "+7")
		require.EqualValues(t, 5, c.Metric(`evenkeel_prefill_queue_requests{priority="0"}`))
		require.EqualValues(t, 1, c.Metric(`evenkeel_prefill_queue_requests{priority="7"}`))
		free()
		c.allAnswered(all)
		var order []string
		for _, r := range ended() {
			order = append(order, r.Key)
		}
		require.Equal(t, []string{"jam", "ops", "crowd", "one", "crowd", "crowd", "crowd", "batch", "ops"}, order)
	})
	// A gateway in front of the proxy says what a request is: its objective stands for a priority, and
	// flows take turns as keys do.
	t.Run("as a trusted gateway says", func(t *testing.T) {
		free, ended := c.jammed()
		var all []<-chan reply
		send := func(tokens int, key string, header ...string) {
			all = append(all, c.queued(key, chat("a", fmt.Sprintf(`"max_tokens":%d,"ignore_eos":true,`, tokens)), header...))
		}
		const objective, flow = "X-Gateway-Inference-Objective", "X-Gateway-Inference-Fairness-Id"
		send(2, "ek-gateway", objective, "batch", flow, "b")
		send(3, "ek-gateway", flow, "a")
		send(4, "ek-gateway", flow, "a", objective, "nobody knows it")
		send(5, "ek-gateway", "X-Llm-D-Inference-Fairness-Id", "a", objective, "batch", "X-Evenkeel-Priority", "0")
		send(6, "ek-gateway", flow, "b")
		send(7, "ek-team", objective, "batch", flow, "a") // not trusted: without effect
		page := c.Ask("GET", c.URL+"/metrics", "")
		require.Equal(t, 200, page.Status)
		require.Contains(t, page.Body, "vllm:num_requests_waiting{model_name=\""+model+"\"} 6\n")
		require.Contains(t, page.Body, "vllm:num_requests_running{model_name=\""+model+"\"} 1\n", "the one that is prefilled")
		free()
		c.allAnswered(all)
		var order []int
		for _, r := range ended() {
			order = append(order, r.OutputTokens)
		}
		require.Equal(t, []int{0, 3, 6, 7, 4, 5, 2}, order)
	})
	// The earliest deadline is served first, and a request whose deadline passes ends before anything
	// is computed for it.
	t.Run("by deadline", func(t *testing.T) {
		free, ended := c.jammed()
		const header = "X-Evenkeel-Deadline-Ms"
		late := c.Post(refclient.ChatPath, chat("a", ""), "Authorization", "Bearer ek-ops", header, "50")
		require.Equal(t, http.StatusServiceUnavailable, late.Status)
		code, _, _ := refclient.Failure(t, late)
		require.Equal(t, "deadline_unmet", code)
		require.Equal(t, "1", late.Header.Get("Retry-After"))
		var all []<-chan reply
		send := func(tokens int, key string, header ...string) {
			all = append(all, c.queued(key, chat("a", fmt.Sprintf(`"max_tokens":%d,"ignore_eos":true,`, tokens)), header...))
		}
		send(2, "ek-ops")
		send(3, "ek-team", header, "1") // not trusted: without effect
		send(4, "ek-ops", header, "80000000")
		send(5, "ek-ops", header, "70000000")
		free()
		c.allAnswered(all)
		var order []int
		for _, r := range ended() {
			order = append(order, r.OutputTokens)
		}
		require.Equal(t, []int{0, 0, 5, 4, 3, 2}, order, "then it is the turn of the other key")
		require.EqualValues(t, 1, c.Metric(`evenkeel_requests_total{outcome="deadline_unmet"}`))
	})
	// Pickers of endpoints read how busy the proxy is.
	t.Run("is told to pickers", func(t *testing.T) {
		leave, _ := c.SendTo(refclient.ChatPath, chat(reftext.MakePrompt(1, 600), `"stream":true,"ignore_eos":true,`), "Authorization", "Bearer ek-jam")
		page := func() string { return c.Ask("GET", c.URL+"/metrics", "").Body }
		c.Eventually("it runs", func() bool { return strings.Contains(page(), `vllm:num_requests_running{model_name="`+model+`"} 1`) })
		c.Eventually("its KV is in use", func() bool {
			_, after, _ := strings.Cut(page(), "\nvllm:kv_cache_usage_perc{model_name=\""+model+"\"} ")
			kv := number(t, after)
			return kv > 0.4 && kv < 1
		})
		leave()
		c.settled(false)
	})
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	require.NoError(t, err)
	return n
}
