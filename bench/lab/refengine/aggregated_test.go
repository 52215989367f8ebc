package refengine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/bench/lab/reftext"
	"evenkeel/dispatcher/step"
)

// ranks is one server with aggregated ranks.
func ranks(c Config) Config {
	c.Role, c.DPMode = Aggregated, "internal"
	if c.DPSize == 0 {
		c.DPSize = 2
	}
	return c
}

// A prompt that was computed in chunks beside others has the text that it has alone.
func TestAnAggregatedEngineAnswersAsAPlainOne(t *testing.T) {
	moment := regexp.MustCompile(`"created(_at)?":\d+`)
	plain := start(t, Config{Answers: Answers{PromptTokensDetails: true}})
	engine := start(t, ranks(Config{Answers: Answers{PromptTokensDetails: true}, Prompts: Prompts{MaxBatchedTokens: 64}}))
	c := client(t)
	prompt := reftext.MakePrompt(3, 500)
	message, streamed := fmt.Sprintf(`[{"role":"user","content":%q}]`, prompt), `"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"return_token_ids":true,`
	for name, ask := range map[string]struct{ path, body string }{
		"completion":             {"/v1/completions", completionBody(prompt, `"max_tokens":9,"logprobs":2,`)},
		"stream of a completion": {"/v1/completions", completionBody(prompt, `"max_tokens":30,`+streamed)},
		"token ids":              {"/v1/completions", `{"model":"ref","prompt":[300,301,302],"max_tokens":9}`},
		"chat":                   {"/v1/chat/completions", chatBody(prompt, "")},
		"stream of a chat":       {"/v1/chat/completions", chatBody(prompt, streamed)},
		"tool":                   {"/v1/chat/completions", chatBody(prompt, `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`+streamed)},
		"message":                {"/v1/messages", `{"model":"ref","max_tokens":20,"messages":` + message + `}`},
		"stream of a message":    {"/v1/messages", `{"model":"ref","max_tokens":20,"stream":true,"messages":` + message + `}`},
		"response":               {"/v1/responses", `{"model":"ref","max_output_tokens":20,"input":` + message + `}`},
		"stream of a response":   {"/v1/responses", `{"model":"ref","max_output_tokens":20,"stream":true,"input":` + message + `}`},
		"several answers":        {"/v1/completions", completionBody(prompt, `"n":2,`)},
		"a bad request":          {"/v1/completions", completionBody(prompt, `"max_tokens":-1,`)},
	} {
		t.Run(name, func(t *testing.T) {
			var wg sync.WaitGroup
			for i := range 3 { // others beside it
				wg.Go(func() {
					do(c, "POST", engine.URLs()[0]+"/v1/completions", completionBody(reftext.MakePrompt(uint64(i), 300), `"max_tokens":20,"ignore_eos":true,`))
				})
			}
			defer wg.Wait()
			want := do(c, "POST", plain.URLs()[0]+ask.path, ask.body, "X-Request-Id", name)
			got := do(c, "POST", engine.URLs()[0]+ask.path, ask.body, "X-Request-Id", name)
			require.Equal(t, want.status, got.status)
			require.Equal(t, moment.ReplaceAllString(want.body, ""), moment.ReplaceAllString(got.body, ""))
		})
	}
	require.Zero(t, engine.Stats().LocalPrefills, "to compute a prompt is what it is for")
}

func TestAnAggregatedEngineHasNoConnector(t *testing.T) {
	e := start(t, ranks(Config{}))
	for _, kv := range []string{
		`{"do_remote_decode":true,"do_remote_prefill":false}`,
		`{"do_remote_prefill":true,"remote_engine_id":"x","remote_block_ids":[1],"remote_host":"203.0.113.7","remote_port":1,"remote_request_id":"y"}`,
	} {
		r := do(client(t), "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a b", `"max_tokens":3,"kv_transfer_params":`+kv+`,`))
		require.Equal(t, 200, r.status, r.body)
		require.Equal(t, "null", string(handoffIn(t, r.body)))
	}
	require.EqualValues(t, 2, e.Stats().Plain)
}

func TestTheHeaderChoosesAnAggregatedRank(t *testing.T) {
	e := start(t, ranks(Config{DPSize: 3}))
	c := client(t)
	ask := func(path, rank string) int {
		return do(c, "POST", e.URLs()[0]+path, `{"model":"ref","prompt":"a","input":"a","max_tokens":1}`, "X-data-parallel-rank", rank).status
	}
	require.Equal(t, 200, ask("/v1/completions", "2"))
	require.EqualValues(t, 1, e.Stats().Ranks[2].Concurrent)
	require.Equal(t, 400, ask("/v1/completions", "3"))
	require.Equal(t, 400, ask("/v1/completions", "-1"))
	require.Zero(t, e.Stats().Unpinned)
	require.Equal(t, 200, ask("/v1/completions", "two"), "it is ignored")
	require.EqualValues(t, 1, e.Stats().Unpinned)
	require.EqualValues(t, 1, e.Stats().Ranks[0].Concurrent)
	require.Equal(t, 200, ask("/v1/responses", "1"), "this version does not look at it")
	require.Zero(t, e.Stats().Ranks[1].Concurrent)
}

// waiters are requests that an engine does not answer until it is killed.
func waiters(t *testing.T, e *Engine, n int, header ...string) {
	c := client(t)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a", ""), header...) })
	}
	t.Cleanup(func() { e.Kill(); wg.Wait() })
}

// Only the first request is running: the others came in the middle of its step.
func TestRequestsAreBalancedByCounts(t *testing.T) {
	e := start(t, ranks(Config{DPSize: 3, Steps: Steps{C0: time.Hour}, Slots: 8}))
	waiters(t, e, 3, "X-data-parallel-rank", "1")
	eventually(t, "they are on their rank", func() bool { r := e.Stats().Ranks[1]; return r.Running+r.Waiting == 3 })
	waiters(t, e, 7)
	eventually(t, "the others fill up the ranks", func() bool { s := e.Stats(); return s.Running+s.Waiting == 10 })
	var present []int64
	for _, r := range e.Stats().Ranks {
		present = append(present, r.Running+r.Waiting)
	}
	require.Equal(t, []int64{4, 3, 3}, present)
}

// Above half of the KV cache, each request that waits weighs more, as vLLM 0.32 has it.
func TestARankThatIsShortOfKVGetsLess(t *testing.T) {
	waiting, kv := []int64{0, 2}, []float64{0, 0.5}
	stats := func(rank int) (int64, int64, float64) { return []int64{3, 0}[rank], waiting[rank], kv[rank] }
	b := balance{flying: []int{0, 0}}
	take := func() int { rank, landed := b.take(anyRank, stats); landed(); return rank }
	require.Equal(t, 1, take())
	kv[1] = 0.6
	require.Equal(t, 0, take(), "3 against 2 + 2*6*0.1")
	waiting[1] = 0
	require.Equal(t, 1, take())
	b.flying[1] = 4
	require.Equal(t, 0, take(), "what it has sent counts before the rank reports it")
}

func TestGaugesOfAggregatedRanks(t *testing.T) {
	e := start(t, ranks(Config{Steps: Steps{C0: time.Hour}, Slots: 1, KV: KV{Tokens: 1280}, DPFirst: 4}))
	waiters(t, e, 2, "X-data-parallel-rank", "0")
	eventually(t, "one runs, one waits", func() bool { s := e.Stats(); return s.Running == 1 && s.Waiting == 1 })
	page := do(client(t), "GET", e.URLs()[0]+"/metrics", "").body
	require.Equal(t, []float64{1, 0}, gauge(t, page, "vllm:num_requests_running"))
	require.Equal(t, []float64{1, 0}, gauge(t, page, "vllm:num_requests_waiting"))
	require.Equal(t, []float64{0.1, 0}, gauge(t, page, "vllm:kv_cache_usage_perc"))
	for i := range 2 {
		require.Contains(t, page, `vllm:num_requests_running{engine="`+strconv.Itoa(4+i)+`"`, "the number of the rank in the deployment")
	}
}

func TestAFullQueueOfAnAggregatedRankAnswers503(t *testing.T) {
	e := start(t, ranks(Config{Steps: Steps{C0: time.Hour}, Slots: 1, MaxQueued: 1}))
	waiters(t, e, 2, "X-data-parallel-rank", "0")
	eventually(t, "one runs, one waits", func() bool { s := e.Stats(); return s.Running == 1 && s.Waiting == 1 })
	require.Equal(t, 503, do(client(t), "POST", e.URLs()[0]+"/v1/completions", completionBody("a", ""), "X-data-parallel-rank", "0").status)
}

// The first request is computed in a long step, and the others wait.
func TestAClientThatLeavesAnAggregatedRank(t *testing.T) {
	e := start(t, ranks(Config{DPSize: 1, Steps: Steps{C0: time.Millisecond}, Prompts: Prompts{Base: time.Hour}}))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	for range 3 {
		wg.Go(func() {
			doContext(ctx, client(t), "POST", e.URLs()[0]+"/v1/completions", completionBody("a", `"stream":true,"ignore_eos":true,"max_tokens":100000,`))
		})
	}
	eventually(t, "they are there", func() bool { s := e.Stats(); return s.Running+s.Waiting == 3 })
	cancel()
	eventually(t, "nothing is held", func() bool {
		s := e.Stats()
		return s.Running+s.Waiting+s.KVUsed == 0 && s.Aborted == 3
	})
}

func TestAnAggregatedRankKeepsPrefixes(t *testing.T) {
	e := start(t, ranks(Config{KV: KV{PrefixCache: 64}, Answers: Answers{PromptTokensDetails: true}, Prompts: Prompts{MaxBatchedTokens: 128},
		KVEvents: KVEvents{Address: "127.0.0.1:0"}}))
	c := client(t)
	cached := func(rank, tokens int) int {
		r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody(reftext.MakePrompt(1, tokens), `"max_tokens":1,`), "X-data-parallel-rank", strconv.Itoa(rank))
		var got struct{ Usage usage }
		require.NoError(t, json.Unmarshal([]byte(r.body), &got), r.body)
		return got.Usage.Details.Cached
	}
	require.Equal(t, 0, cached(1, 700))
	require.EqualValues(t, 5, e.Stats().Ranks[1].KVBatches, "an event for each chunk that fills a block")
	require.Equal(t, 640, cached(1, 700))
	require.Equal(t, 0, cached(0, 700), "each rank has a cache of its own")
	page := do(c, "GET", e.URLs()[0]+"/metrics", "").body
	require.Contains(t, page, `vllm:prefix_cache_queries_total{engine="1",model_name="ref"} 1400`)
	require.Contains(t, page, `vllm:prefix_cache_hits_total{engine="1",model_name="ref"} 640`)
	require.Contains(t, page, `vllm:external_prefix_cache_queries_total{engine="1",model_name="ref"} 0`)
}

// The step trace tells what a rank computes.
func TestStepsOfAnAggregatedEngineTellOfPrompts(t *testing.T) {
	var trace bytes.Buffer
	e := start(t, ranks(Config{Prompts: Prompts{MaxBatchedTokens: 128}, Steps: Steps{Trace: &trace}}))
	r := do(client(t), "POST", e.URLs()[0]+"/v1/completions", completionBody(reftext.MakePrompt(1, 200), `"max_tokens":2,"ignore_eos":true,`), "X-data-parallel-rank", "1")
	require.Equal(t, 200, r.status, r.body)
	var loads []steplog.RankLoad
	for _, s := range e.Steps() {
		require.Zero(t, s.Ranks[0])
		loads = append(loads, s.Ranks[1])
	}
	require.Equal(t, []steplog.RankLoad{{Prefill: 128}, {Prefill: 72}, {Running: 1, KVTokens: 201}}, loads)
	e.Close()
	require.Contains(t, trace.String(), `"rank":1,"step":2,"running":0,"kv_tokens":0,"prefill_tokens":72}`)
	require.Contains(t, trace.String(), `"rank":1,"step":3,"running":1,"kv_tokens":201}`, "without a prompt there is no such member")
}

// A request that breaks an assertion of the engine's core ends the server.
const deadly = `"max_tokens":2,"min_tokens":1,"stop_token_ids":[-1],`

func TestARankThatDiesTakesItsServerWithIt(t *testing.T) {
	e := start(t, ranks(Config{}))
	c := client(t)
	ask := func(more string) reply {
		return do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a b", more), "X-data-parallel-rank", "1")
	}
	require.Error(t, ask(deadly).err, "it gets no answer")
	require.EqualValues(t, 1, e.Stats().Crashes)
	eventually(t, "no port answers", func() bool { return do(c, "GET", e.URLs()[0]+"/health", "").err != nil })
	require.NoError(t, e.Revive())
	require.Equal(t, 200, ask(`"max_tokens":2,`).status)
}

// Where each rank has a server of its own, the others hang in their next step, and say that they
// are well.
func TestTheOtherRanksHangWhenOneHasDied(t *testing.T) {
	e := start(t, Config{Role: Aggregated, DPSize: 2})
	c := client(t)
	ask := func(rank int, more string) reply {
		return do(c, "POST", e.URLs()[rank]+"/v1/completions", completionBody("a b", more))
	}
	require.Equal(t, 200, ask(0, `"max_tokens":2,`).status)
	require.Error(t, ask(1, deadly).err)
	eventually(t, "its port refuses", func() bool { return do(c, "GET", e.URLs()[1]+"/health", "").err != nil })
	require.Equal(t, 200, do(c, "GET", e.URLs()[0]+"/health", "").status)
	answered := make(chan reply, 1)
	go func() { answered <- ask(0, `"max_tokens":2,`) }()
	select {
	case r := <-answered:
		t.Fatalf("it answered %d %s", r.status, r.body)
	case <-time.After(50 * time.Millisecond):
	}
	e.Kill()
	require.Error(t, (<-answered).err)
	require.NoError(t, e.Revive())
	for rank := range 2 {
		require.Equal(t, 200, ask(rank, `"max_tokens":2,`).status, "rank %d", rank)
	}
}

func TestAnAggregatedEngineWhoseCoreStandsStill(t *testing.T) {
	e := start(t, ranks(Config{}))
	c := client(t)
	e.StandStill(time.Hour)
	answered := make(chan reply, 1)
	go func() {
		answered <- do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a b", `"max_tokens":2,`))
	}()
	require.Equal(t, 200, do(c, "GET", e.URLs()[0]+"/health", "").status)
	select {
	case r := <-answered:
		t.Fatalf("it answered %d %s", r.status, r.body)
	case <-time.After(50 * time.Millisecond):
	}
	e.StandStill(0)
	require.Equal(t, 200, (<-answered).status)
}

func TestAggregatedConfigsThatCannotWork(t *testing.T) {
	for want, c := range map[string]Config{
		"speaks as vLLM":           {Connector: SGLang},
		"one token of each":        {Steps: Steps{TokensPerChunk: 2}},
		"at the step's end":        {Steps: Steps{Spread: true}},
		"computes what it has":     {Steps: Steps{Recompute: true}},
		"each of the 32 slots":     {Prompts: Prompts{MaxBatchedTokens: 31}},
		"max batched tokens is -1": {Prompts: Prompts{MaxBatchedTokens: -1}},
		"prefill interval":         {Prompts: Prompts{Interval: -1}},
		"prefill delayer":          {Prompts: Prompts{Delayer: -1}},
		"cr is":                    {Steps: Steps{CR: -1}},
		"cm is":                    {Steps: Steps{CM: -1}},
		"cs is":                    {Steps: Steps{CS: -1}},
		"captured is -1":           {Steps: Steps{Captured: -1}},
		"has no graphs":            {Steps: Steps{Form: step.Masked}},
		"prefill shared":           {Prompts: Prompts{Shared: -1}},
		"jitter":                   {Jitter: -1},
	} {
		_, err := Start(ranks(c))
		require.ErrorContains(t, err, want)
	}
}

// A request is seen later than it came, and one that has left by then is not seen at all.
func TestARequestIsSeenAfterItsJitter(t *testing.T) {
	tokenizer := &Engine{cfg: Config{Jitter: 20 * time.Millisecond}, rng: rand.New(rand.NewPCG(1, 1))}
	for range 100 {
		d := tokenizer.jitter()
		require.GreaterOrEqual(t, d, 2*time.Millisecond)
		require.LessOrEqual(t, d, 20*time.Millisecond)
	}
	e := start(t, ranks(Config{Jitter: time.Hour}))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan reply, 1)
	go func() {
		done <- doContext(ctx, client(t), "POST", e.URLs()[0]+"/v1/completions", completionBody("a", ""))
	}()
	eventually(t, "it is there", func() bool { return e.Stats().Requests == 1 })
	cancel()
	require.Error(t, (<-done).err)
	eventually(t, "it has left", func() bool { return e.Stats().Aborted == 1 })
	require.Empty(t, e.Steps())
}

// Each part of the law can be 0, as it is when real engines are fitted.
func TestAggregatedStepsNeedNoFixedCostOfPrompts(t *testing.T) {
	require.Zero(t, Config{Role: Aggregated}.WithDefaults().Prompts.Base)
	require.NotZero(t, Config{}.WithDefaults().Prompts.Base)
}
