package passthrough

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
)

const one = "data: {\"x\":1}\n\n"

func events(all ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, e := range all {
			_, _ = io.WriteString(w, e)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// hang keeps the call open behind what has been answered.
func hang(before http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		before(w, r)
		select {
		case <-r.Context().Done():
			panic(http.ErrAbortHandler) // it notices, and answers no more
		case <-time.After(patience):
		}
	}
}

func silent(http.ResponseWriter, *http.Request) {}

func TestEnginesThatFailAPassedRequest(t *testing.T) {
	t.Parallel()
	o := &odd{}
	p := start(t, func(cfg *config.Config) {
		cfg.Limits.AnswerBytes, cfg.Limits.EventBytes = 4<<10, 1<<10
		cfg.Limits.EventTimeout, cfg.Limits.ProbeTimeout = 3*time.Second, 3*time.Second
	}, o)
	cut := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, `{"data":`)
	}
	for _, row := range []struct {
		name   string
		answer http.HandlerFunc
		status int
		want   string // in the answer
		code   string // outcome
		tokens int    // of the prompt, as the caller pays for them
	}{
		{"its refusal is passed on", says(422, "text/plain", "no"), 422, "no", "engine_refused", 0},
		{"it refuses our credential", says(401, "text/plain", "no"), 502, "refused the proxy's credential", "engine_failed", 0},
		{"it fails", says(500, "text/plain", "secret"), 502, "it answered 500", "engine_failed", 0},
		{"it is overloaded", says(503, "text/plain", "secret"), 503, "overloaded", "engine_unavailable", 0},
		{"it does not know the model", says(404, "application/json", `{"error":{"message":"The model does not exist."}}`), 404, "does not exist", "engine_refused", 0},
		{"it cannot do what this one asks for", says(501, "application/json", `{"error":{"message":"no such dimensions"}}`), 501, "no such dimensions", "engine_refused", 0},
		{"it does not have the model's endpoint", says(404, "application/json", `{"detail":"Not Found","more":1}`), 404, `"more"`, "engine_refused", 0},
		{"its answer is no JSON", says(200, "application/json", `{"data":[`), 502, "not JSON", "engine_failed", 11},
		{"its answer is too large", says(200, "application/json", `"`+strings.Repeat("x", 8<<10)+`"`), 502, "limits.answer_bytes", "engine_failed", 11},
		{"its answer is cut", cut, 502, "connection was lost", "engine_failed", 11},
		{"it is silent", hang(silent), 504, "silent", "engine_timeout", 11},
		{"a list is JSON", says(200, "application/json", `[1,2]`), 200, "[1,2]", "ok", 11},
		{"a text is no JSON", says(200, "text/plain", "hello"), 200, "hello", "ok", 11},
		{"an answer is empty", says(200, "text/plain", ""), 200, "", "ok", 11},
		{"counts are believed", says(200, "application/json", `{"usage":{"prompt_tokens":3,"completion_tokens":4}}`), 200, "usage", "ok", 3},
		{"counts that cannot be are not", says(200, "application/json", `{"usage":{"prompt_tokens":99999999999}}`), 200, "usage", "ok", 11},
		{"a stream without an end of its own is whole", events(one, one), 200, one + one, "ok", 11},
		{"a stream with counts", events(one, "data: {\"usage\":{\"prompt_tokens\":2}}\n\n", "data: [DONE]\n\n"), 200, "[DONE]", "ok", 2},
		{"a stream that fails at once", events("data: {\"error\":{\"message\":\"secret\"}}\n\n"), 502, "with an error", "engine_failed", 11},
		{"a stream that is empty", events(": hello\n\n"), 502, "engine failed", "engine_failed", 11},
		{"a stream that fails later", events(one, "data: {\"error\":{\"message\":\"secret\"}}\n\n"), 200, one + `data: {"error":{"message":"the engine ended its answer with an error`, "engine_failed", 11},
		{"a stream that is cut in an event", events(one, "data: {"), 200, `"code":"upstream_broken"`, "upstream_broken", 11},
		{"a stream that is silent", hang(events(one)), 200, `"code":"upstream_broken"`, "upstream_broken", 11},
		{"a stream that has too much", events(one, "data: "+strings.Repeat("x", 6<<10)+"\n\n"), 200, `"code":"upstream_broken"`, "upstream_broken", 11},
	} {
		t.Run(row.name, func(t *testing.T) {
			o.answers(row.answer) // nothing of it is remembered: the next row asks it again
			p.logs.TakeAll()
			id := strings.ReplaceAll(row.name, " ", "-")
			r := p.post(t.Context(), "/v1/embeddings", `{"model":"emb","input":"a few words of text"}`, id, "")
			require.NoError(t, r.err)
			require.Equal(t, row.status, r.status, r.body)
			require.Contains(t, r.body, row.want)
			require.NotContains(t, r.body, "secret")
			kept := p.receipt(id)
			require.Equal(t, row.code, kept.Outcome)
			require.Equal(t, row.tokens, kept.PromptTokens)
			paid, _ := p.paid.Load(id)
			require.Equal(t, kept.PromptTokens+kept.OutputTokens, paid)
			require.Len(t, kept.Attempts, 1)
			if a := kept.Attempts[0]; row.status != 200 {
				require.Equal(t, a.Engine, a.FailedOn)
			}
			require.Len(t, o.got(), 1, "it was sent once")
			complaints := p.logs.FilterMessage("an engine did not answer a request that was passed through to it").Len()
			require.Equal(t, row.status >= 500, complaints == 1, "what is the engine's fault is in the log")
			if strings.Contains(r.body, "data: ") && row.code != "ok" {
				require.True(t, strings.HasSuffix(r.body, "data: [DONE]\n\n"), r.body)
			}
		})
	}
}

func TestKeysThatNoClientSetsReachNoEngine(t *testing.T) {
	t.Parallel()
	o := &odd{answer: says(200, "application/json", `{"usage":{"prompt_tokens":1}}`)}
	p := start(t, nil, o)
	body := `{ "model" : "emb", "request_id":"x","input":  ["a"],"kv_transfer_params":{"a":1},"data_parallel_rank":3, "unknown":{"b": 2}}`
	require.Equal(t, http.StatusOK, p.post(t.Context(), "/v1/embeddings", body, "keys", "").status)
	require.Equal(t, []string{`{ "model" : "emb","input":  ["a"], "unknown":{"b": 2}}`}, o.got())
}

func TestNoEngineServesAPassedRequest(t *testing.T) {
	t.Parallel()
	lacks := &odd{answer: says(404, "application/json", `{"detail":"Not Found"}`)}
	p := start(t, nil, lacks)
	for range 2 { // the second time it is not even asked
		r := p.ask("/classify", "lacks")
		require.Equal(t, http.StatusNotFound, r.status)
		require.Contains(t, r.body, `"no_such_route"`)
	}
	require.Len(t, lacks.got(), 1)
	p.engines.list = nil
	r := p.ask("/classify", "none")
	require.Contains(t, r.body, `"engine_unavailable"`)
	require.Equal(t, "1", r.header.Get("Retry-After"))
	p.engines.paired = true
	for _, path := range []string{"/v1/score", "/v1/rerank", "/v1/embeddings", "/classify", "/pooling"} {
		r := p.ask(path, "paired"+path)
		require.Contains(t, r.body, `"no_such_route"`, path)
		require.Contains(t, r.body, "no engine of this model computes", path)
	}
	require.Empty(t, lacks.got()[1:], "nobody is asked")
}

func TestAnotherEngineServesAPassedRequest(t *testing.T) {
	t.Parallel()
	broken, good := &odd{answer: hangUp}, &odd{answer: says(200, "application/json", `{"ok":true}`)}
	p := start(t, nil, broken, good)
	for name, row := range map[string]struct {
		path, answer string
		status       int
	}{
		"where one does not have the endpoint":         {"/v1/embeddings", `{"detail":"Not Found"}`, 404},
		"where the router of one takes another method": {"/pooling", `{"detail":"Method Not Allowed"}`, 405},
	} {
		t.Run(name, func(t *testing.T) {
			broken.answers(says(row.status, "application/json", row.answer))
			for range 20 {
				require.Equal(t, http.StatusOK, p.ask(row.path, "lacks").status)
			}
			require.LessOrEqual(t, len(broken.got()), 1, "it is asked once")
		})
	}
	t.Run("where one does not have the model any more", func(t *testing.T) {
		gone := "{\"error\":{\"message\":\"The model `emb` does not exist.\",\"type\":\"NotFoundError\",\"param\":\"model\",\"code\":404}}"
		broken.answers(says(404, "application/json", gone))
		p.logs.TakeAll()
		for range 20 {
			require.Equal(t, http.StatusOK, p.ask("/classify", "unlisted").status)
		}
		require.NotEmpty(t, broken.got())
		require.Zero(t, p.logs.Len(), "nobody is blamed")
		good.answers(says(404, "application/json", gone))
		defer good.answers(says(200, "application/json", `{"ok":true}`))
		r := p.ask("/classify", "unlisted-by-all")
		require.Equal(t, http.StatusNotFound, r.status)
		require.Equal(t, gone, r.body, "as the engine says it")
		require.Len(t, p.receipt("unlisted-by-all").Attempts, 2)
	})
	t.Run("where one is overloaded, and the receipt says so", func(t *testing.T) {
		broken.answers(says(503, "text/plain", ""))
		two := 0
		for i := range 20 {
			id := fmt.Sprintf("overloaded-%d", i)
			require.Equal(t, http.StatusOK, p.ask("/tokenize", id).status)
			kept := p.receipt(id)
			if len(kept.Attempts) == 2 {
				two++
				require.True(t, kept.Attempts[0].Again)
				require.Equal(t, 503, kept.Attempts[0].Status)
			}
		}
		require.Equal(t, len(broken.got()), two)
	})
	t.Run("where one cannot be reached", func(t *testing.T) {
		nowhere, err := url.Parse("http://127.0.0.1:1")
		require.NoError(t, err)
		all := slices.Clone(p.engines.list)
		defer func() { p.engines.list = all }()
		p.engines.list = slices.Clone(all)
		p.engines.list[0].Target = &engine.Target{ID: "127.0.0.1:1", URL: nowhere, Rank: -1}
		for range 10 {
			require.Equal(t, http.StatusOK, p.ask("/v1/embeddings", "nowhere").status)
		}
	})
	t.Run("but what one lacks is not why the other failed", func(t *testing.T) {
		broken.answers(says(405, "application/json", `{"detail":"Method Not Allowed"}`))
		good.answers(says(503, "text/plain", ""))
		p.AddRunning(p.engines.list[0].Instance, 1) // so that the good one is asked first
		defer p.AddRunning(p.engines.list[0].Instance, -1)
		r := p.ask("/v1/score", "overloaded-and-lacks")
		require.Equal(t, http.StatusServiceUnavailable, r.status)
		require.Contains(t, r.body, `"engine_unavailable"`)
		require.Len(t, broken.got(), 1)
	})
	t.Run("but none is left", func(t *testing.T) {
		broken.answers(says(503, "text/plain", ""))
		good.answers(says(503, "text/plain", ""))
		require.Equal(t, http.StatusServiceUnavailable, p.ask("/tokenize", "both").status)
		kept := p.receipt("both")
		require.Len(t, kept.Attempts, 2)
		require.True(t, kept.Attempts[0].Again)
		require.False(t, kept.Attempts[1].Again, "no other attempt follows")
	})
}

// inTurn answers one way after the other; the last one stays.
func inTurn(all ...http.HandlerFunc) http.HandlerFunc {
	var mu sync.Mutex
	return func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		f := all[0]
		all = all[min(1, len(all)-1):]
		mu.Unlock()
		f(w, r)
	}
}

// An engine that ends a connection that was kept alive gets the request once more. Then it may have
// died of the request.
func TestAConnectionThatHasEndedIsReplacedOnce(t *testing.T) {
	t.Parallel()
	well, full := says(200, "application/json", `{"by":"first"}`), says(503, "text/plain", "")
	for _, row := range []struct {
		name     string
		then     []http.HandlerFunc // after an answer that was well
		status   int
		want     string
		first    int // requests that the first engine gets then
		attempts int
	}{
		{"it answers then", []http.HandlerFunc{hangUp, well}, 200, "first", 2, 2},
		{"it answers then, behind a reset", []http.HandlerFunc{reset, well}, 200, "first", 2, 2},
		{"it ends with the request", []http.HandlerFunc{ends}, 502, "engine_failed", 1, 2},
		{"it hangs up again", []http.HandlerFunc{hangUp, hangUp}, 502, "engine_failed", 2, 2},
		{"it is full then, and another one is asked", []http.HandlerFunc{hangUp, full}, 200, "second", 2, 3},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			first, second := &odd{answer: well}, &odd{answer: says(200, "application/json", `{"by":"second"}`)}
			p := start(t, nil, first, second)
			p.AddRunning(p.engines.list[1].Instance, 1) // so that the first one is chosen
			defer p.AddRunning(p.engines.list[1].Instance, -1)
			require.Equal(t, http.StatusOK, p.ask("/v1/embeddings", "before").status)
			first.answers(inTurn(row.then...))
			r := p.ask("/v1/embeddings", "after")
			require.Equal(t, row.status, r.status)
			require.Contains(t, r.body, row.want)
			require.Len(t, first.got(), row.first)
			require.Equal(t, row.want == "second", len(second.got()) > 0)
			require.Len(t, p.receipt("after").Attempts, row.attempts)
		})
	}
}

func TestARequestThatMayHaveKilledAnEngineGoesToNoOther(t *testing.T) {
	t.Parallel()
	first, second := &odd{answer: hangUp}, &odd{answer: hangUp}
	p := start(t, nil, first, second)
	r := p.ask("/v1/embeddings", "deadly")
	require.Equal(t, http.StatusBadGateway, r.status)
	require.Contains(t, r.body, "connection was lost")
	require.Equal(t, 1, len(first.got())+len(second.got()))
}

func TestADrainEndsCallsThatArePassedThrough(t *testing.T) {
	t.Parallel()
	first, second := &odd{answer: hang(silent)}, &odd{answer: says(200, "application/json", `{"by":"second"}`)}
	p := start(t, nil, first, second)
	p.AddRunning(p.engines.list[1].Instance, 1) // so that the first one is chosen
	defer p.AddRunning(p.engines.list[1].Instance, -1)
	got := make(chan reply, 1)
	go func() { got <- p.ask("/v1/embeddings", "moved") }()
	p.eventually("it runs", func() bool { return len(first.got()) == 1 })
	require.Equal(t, 1, p.engines.MoveCalls(func(at roster.Location) bool { return at.Instance == p.engines.list[0].Instance }))
	require.Contains(t, (<-got).body, "second")
	require.Len(t, p.receipt("moved").Attempts, 2)

	p.engines.list = p.engines.list[:1]
	go func() { got <- p.ask("/v1/embeddings", "stays") }()
	p.eventually("it runs", func() bool { return len(first.got()) == 2 })
	p.engines.MoveCalls(func(roster.Location) bool { return true })
	r := <-got
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Contains(t, r.body, `"engine_drained"`)
	require.Equal(t, "1", r.header.Get("Retry-After"))

	first.answers(hang(events(one)))
	go func() { got <- p.ask("/v1/embeddings", "streams") }()
	p.eventually("it streams", func() bool {
		found := p.receipts.Find("streams", 1)
		return len(found) == 1 && found[0].State == "streaming"
	})
	require.Zero(t, p.Bodies.Held(), "no engine is sent its body any more")
	p.engines.MoveCalls(func(roster.Location) bool { return true })
	r = <-got
	require.Contains(t, r.body, one)
	require.Contains(t, r.body, `"engine_drained"`)
}

// A form with speech takes tokens of its key's minute by its bytes, a text by fewer of them, and to
// count tokens costs none.
func TestWhatARequestIsTakenForBeforeItIsCounted(t *testing.T) {
	t.Parallel()
	for path, tokens := range map[string]int{"/v1/audio/transcriptions": 50, "/v1/embeddings": 12800, "/tokenize": 0} {
		require.Equal(t, tokens, Estimate(path, &openai.Request{PromptBytes: 50 << 10}), path)
	}
}

// What an engine may have computed is not free, although its client has left.
func TestAClientThatLeavesPaysForWhatMayBeComputed(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{}, 2)
	o := &odd{}
	p := start(t, nil, o)
	for state, answer := range map[string]http.HandlerFunc{"transfer": silent, "streaming": events(one)} {
		o.answers(func(w http.ResponseWriter, r *http.Request) {
			answer(w, r)
			<-r.Context().Done()
			ended <- struct{}{}
			panic(http.ErrAbortHandler)
		})
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			p.post(ctx, "/v1/embeddings", `{"model":"emb","input":"`+strings.Repeat("w ", 50)+`"}`, state, "")
		}()
		p.eventually("it has come so far", func() bool {
			found := p.receipts.Find(state, 1)
			return len(o.got()) == 1 && len(found) == 1 && found[0].State == state
		})
		leave()
		<-gone
		<-ended // the engine hears of it
		kept := p.receipt(state)
		require.Equal(t, "client_closed", kept.Outcome)
		require.Len(t, kept.Attempts, 1)
		require.Equal(t, 31, kept.PromptTokens)
		paid, _ := p.paid.Load(state)
		require.Equal(t, 31, paid)
		require.InDelta(t, 1, p.cancels(state), 0)
	}
}

func TestNoCallerHoldsAllTheMemoryOfAnswers(t *testing.T) {
	t.Parallel()
	o := &odd{}
	// a KiB for the requests' own bodies
	p := start(t, func(cfg *config.Config) { cfg.Limits.Bodies, cfg.Limits.AnswerBytes = 257<<10, 256<<10 }, o)
	ask := func(caller string) reply { return p.post(t.Context(), "/v1/embeddings", embedding, caller, caller) }
	text := func(n int) string { return `"` + strings.Repeat("x", n) + `"` }
	sent, ended := make(chan struct{}), make(chan struct{})
	end := sync.OnceFunc(func() { close(ended) })
	t.Cleanup(end)
	o.answers(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, text(100 << 10)[:100<<10])
		_ = http.NewResponseController(w).Flush()
		close(sent)
		<-ended
		_, _ = io.WriteString(w, `xx"`)
	})
	got := make(chan reply, 1)
	go func() { got <- ask("greedy") }()
	<-sent
	p.eventually("it is on the account of bodies", func() bool { return p.Bodies.Held() >= 100<<10 })
	o.answers(says(200, "application/json", text(100<<10)))
	r := ask("greedy")
	require.Equal(t, http.StatusServiceUnavailable, r.status, "the greedy caller has its share")
	require.Contains(t, r.body, `"overloaded"`)
	o.answers(says(200, "application/json", text(40<<10)))
	require.Equal(t, http.StatusOK, ask("other").status, "there is room for another one")
	o.answers(says(200, "application/json", text(100)))
	require.Equal(t, http.StatusOK, ask("greedy").status, "and for what is small")
	end()
	first := <-got
	require.Equal(t, http.StatusOK, first.status)
	require.Len(t, first.body, 100<<10+3)
	p.eventually("its memory is given back", func() bool { return p.Bodies.Held() == 0 })
	o.answers(says(200, "application/json", text(100<<10)))
	for range 5 {
		require.Equal(t, http.StatusOK, ask("greedy").status, "all is given back")
	}
}

func TestNoCallerHasAllPlacesForPassedRequests(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	end := sync.OnceFunc(func() { close(ended) })
	t.Cleanup(end)
	p := start(t, nil, &odd{answer: func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/embeddings" {
			<-ended
		}
		says(200, "application/json", `{}`)(w, r)
	}})
	ask := func(path, caller string) reply { return p.post(t.Context(), path, embedding, caller, caller) }
	const share, over = 1024, 16
	refused, answered := make(chan reply, share+over), make(chan reply, share+over)
	for range share + over {
		go func() {
			r := ask("/v1/embeddings", "greedy")
			if r.status == http.StatusTooManyRequests {
				refused <- r
				return
			}
			answered <- r
		}()
	}
	for range over {
		require.Contains(t, (<-refused).body, `"queue_full"`)
	}
	p.eventually("the greedy caller has its share", func() bool { return p.seats.Held() == share })
	require.Equal(t, http.StatusOK, ask("/tokenize", "other").status)
	end()
	for range share {
		require.Equal(t, http.StatusOK, (<-answered).status)
	}
	require.Equal(t, http.StatusOK, ask("/tokenize", "greedy").status)
}

// A panic gives back what the request holds, in whatever it happens.
func TestAPanicHoldsNothing(t *testing.T) {
	t.Parallel()
	p := start(t, nil, &odd{answer: says(200, "application/json", `{}`)})
	list := p.engines.list
	p.engines.list = []roster.SoleEngine{{Instance: list[0].Instance, Traffic: list[0].Traffic}} // without a target, as a bug would
	require.Equal(t, http.StatusInternalServerError, p.ask("/v1/embeddings", "panics").status)
	require.Zero(t, p.seats.Held())
	p.mu.Lock()
	require.Empty(t, p.runningCalls)
	p.mu.Unlock()
	p.engines.list = list
	require.Equal(t, http.StatusOK, p.ask("/v1/embeddings", "goes on").status)
}

// An engine of a group that refuses requests is as good as all of it, so that the second engine
// that is asked is one of another group.
func TestAfterARefusalAnotherGroupIsAsked(t *testing.T) {
	t.Parallel()
	var all []*odd
	for range 4 {
		all = append(all, &odd{answer: says(503, "text/plain", "")})
	}
	well := &odd{answer: says(200, "application/json", "{}")}
	p := start(t, nil, append(all, well)...)
	for i := range p.engines.list {
		p.engines.list[i].Group = map[bool]string{true: "refuses", false: "is well"}[i < len(all)]
	}
	for i := range 30 {
		id := fmt.Sprint("request-", i)
		require.Equal(t, http.StatusOK, p.ask("/tokenize", id).status)
		require.LessOrEqual(t, len(p.receipt(id).Attempts), 2)
	}
}
