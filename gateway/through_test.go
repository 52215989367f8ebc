package gateway_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

const transcriptions = "/v1/audio/transcriptions"

// pooling is an engine of an embedding model, which has no prefill engine.
func pooling() refengine.Config { return refengine.Config{Model: "emb", Task: plain.Pooling} }

// form is a request to transcribe a file.
func form(t *testing.T, file string, fields ...string) (body, kind string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(fields); i += 2 {
		require.NoError(t, w.WriteField(fields[i], fields[i+1]))
	}
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, err = io.WriteString(part, file)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String(), w.FormDataContentType()
}

// bench/outside/api has the official client ask for embeddings, transcriptions and translations.
func TestPassedThrough(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:    []refengine.Config{{}, pooling(), {Model: "ears", Task: plain.Transcription}},
		configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
	})
	vector := func(text string) string {
		b, err := json.Marshal(plain.Vector(text))
		require.NoError(t, err)
		return string(b)
	}
	for _, row := range []struct {
		name, path, body, want string
		prompt                 int // tokens, as told
	}{
		{"a text is counted", "/tokenize", `{"model":"ref","prompt":"one two three"}`, `"count":3`, 0},
		{"a chat is counted", "/tokenize", `{"model":"ref","messages":[{"role":"user","content":"one two"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"image_url":{"type":"string"}}}}}]}`, `"count":`, 0},
		{"ids become text", "/detokenize", fmt.Sprintf(`{"model":"ref","tokens":[%d]}`, reftext.FirstAnswerID), `"prompt":"`, 0},
		{"a model without a prefill engine is embedded", "/v1/embeddings", `{"model":"emb","input":"one two"}`, vector("one two"), 2},
		{"several texts are embedded", "/v1/embeddings", `{"model":"emb","input":["one","two"]}`, vector("two"), 2},
		{"documents are put in an order", "/v1/rerank", `{"model":"emb","query":"q","documents":["a","b","c"]}`, `"relevance_score":`, 4},
		{"texts are compared", "/v1/score", `{"model":"emb","text_1":"a","text_2":"b"}`, fmt.Sprintf(`"score":%v`, plain.Alike("a", "b")), 2},
		{"documents by the second name", "/v2/rerank", `{"model":"emb","query":"q","documents":["a","b","c"]}`, `"relevance_score":`, 4},
		{"documents by the short name", "/rerank", `{"model":"emb","query":"q","documents":["a","b","c"]}`, `"relevance_score":`, 4},
		{"texts by the short name", "/score", `{"model":"emb","text_1":"a","text_2":"b"}`, fmt.Sprintf(`"score":%v`, plain.Alike("a", "b")), 2},
		{"a text is classified", "/classify", `{"model":"emb","input":"a"}`, `"num_classes":2`, 1},
		{"a text is pooled", "/pooling", `{"model":"emb","input":"a b c"}`, vector("a b c"), 3},
		{"embeddings come as base64", "/v1/embeddings", `{"model":"emb","input":"a","encoding_format":"base64"}`, `"embedding":"`, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			id := strings.ReplaceAll(row.name, " ", "-")
			r := c.post(row.path, row.body, "X-Request-Id", id)
			require.Equal(t, http.StatusOK, r.status, r.body)
			require.Contains(t, r.body, row.want)
			require.Equal(t, "application/json", r.header.Get("Content-Type"))
			require.Equal(t, "passed-through", r.header.Get("X-Evenkeel-Route"))
			require.NotEmpty(t, r.header.Get("X-Evenkeel-Engine"))
			require.Equal(t, "1", r.header.Get("X-Evenkeel-Attempts"))
			kept := c.receipt(id)
			require.Equal(t, "ok", kept.Outcome)
			require.Equal(t, row.path, kept.Endpoint)
			require.Equal(t, "passed-through", kept.Route)
			require.Equal(t, row.prompt, kept.PromptTokens)
			require.Len(t, kept.Attempts, 1)
			require.Equal(t, r.header.Get("X-Evenkeel-Engine"), kept.Attempts[0].Engine)
		})
	}
	t.Run("bytes come with the header that says what they are", func(t *testing.T) {
		r := c.post("/v1/embeddings", `{"model":"emb","input":"a b","encoding_format":"bytes"}`, "X-Request-Id", "bytes")
		require.Equal(t, http.StatusOK, r.status)
		require.Equal(t, "application/octet-stream", r.header.Get("Content-Type"))
		require.Len(t, r.body, 16)
		require.Contains(t, r.header.Get("Metadata"), `"prompt_tokens":2`)
		require.Equal(t, 2, c.receipt("bytes").PromptTokens)
	})
	t.Run("a transcription is streamed", func(t *testing.T) {
		body, kind := form(t, "speech", "model", "ears", "stream", "true")
		r := c.post(transcriptions, body, "Content-Type", kind, "X-Request-Id", "streamed")
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.NoError(t, r.err)
		require.Contains(t, r.header.Get("Content-Type"), "text/event-stream")
		require.Equal(t, 7, strings.Count(r.body, "data: "))
		require.True(t, strings.HasSuffix(r.body, "data: [DONE]\n\n"))
		require.True(t, c.receipt("streamed").Stream)
	})
	c.eventually("each is in the request log", func() bool { return len(c.outcomes()) >= 15 })
	for _, outcome := range c.outcomes() {
		require.Equal(t, "ok", outcome)
	}
	require.EqualValues(t, 4, c.metric(`evenkeel_passed_seconds_count{endpoint="/v1/embeddings"}`))
	require.EqualValues(t, 1, c.metric(`evenkeel_passed_seconds_count{endpoint="/v1/audio/transcriptions"}`))
}

func TestAPassedRequestThatIsRefused(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, pooling()}, configure: func(cfg *config.Config) { cfg.Limits.Body = 64 << 10; cfg.Limits.Bodies = 1 << 20 }})
	plainForm := func(fields ...string) [2]string { b, k := form(t, "x", fields...); return [2]string{b, k} }
	big, bigKind := form(t, strings.Repeat("x", 65<<10), "model", "emb")
	withModel := plainForm("model", "emb")
	priority := plainForm("model", "emb", "priority", "-1")
	twice := plainForm("model", "emb", "model", "ref")
	for _, row := range []struct {
		name, path, body, kind string
		status                 int
		code                   string
	}{
		{"no JSON", "/tokenize", `{"model":`, "", 400, "invalid_json"},
		{"no model", "/v1/embeddings", `{"input":"a"}`, "", 400, "missing_required_parameter"},
		{"a model that is no text", "/v1/embeddings", `{"model":1,"input":"a"}`, "", 400, "invalid_type"},
		{"a model twice", "/v1/embeddings", `{"model":"emb","model":"ref","input":"a"}`, "", 400, "duplicate_key"},
		{"a key of ours twice", "/v1/embeddings", `{"model":"emb","request_id":1,"request_id":2,"input":"a"}`, "", 400, "duplicate_key"},
		{"a model that nobody has", "/v1/embeddings", `{"model":"other","input":"a"}`, "", 404, "model_not_found"},
		{"an endpoint that no engine of the model has", "/classify", `{"model":"ref","input":"a"}`, "", 404, "no_such_route"},
		{"an endpoint of completions for an embedding model", "/v1/chat/completions", `{"model":"emb","messages":[{"role":"user","content":"a"}]}`, "", 503, "prefill_unavailable"},
		{"a turn before others", "/v1/embeddings", `{"model":"emb","input":"a","priority":-5}`, "", 400, "invalid_value"},
		{"a template of the client's", "/tokenize", `{"model":"ref","messages":[],"chat_template":"x"}`, "", 400, "unsupported_parameter"},
		{"a medium that the engine would fetch", "/v1/embeddings", `{"model":"emb","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]}`, "", 400, "invalid_value"},
		{"a medium deep in a query", "/v1/score", `{"model":"emb","data_1":{"content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]},"data_2":"a"}`, "", 400, "invalid_value"},
		{"an address for a plugin", "/pooling", `{"model":"emb","data":{"data":["http://10.0.0.1/"],"data_format":"url"}}`, "", 400, "invalid_value"},
		{"what the engine refuses", "/v1/embeddings", `{"model":"emb"}`, "", 400, "400"},
		{"JSON where a form belongs", transcriptions, `{"model":"emb"}`, "", 400, "invalid_type"},
		{"a form without a model", transcriptions, plainForm()[0], plainForm()[1], 400, "missing_required_parameter"},
		{"a form that is cut", transcriptions, withModel[0][:len(withModel[0])-70], withModel[1], 400, "invalid_value"},
		{"a form with a field of ours", transcriptions, priority[0], priority[1], 400, "unsupported_parameter"},
		{"a form with two models", transcriptions, twice[0], twice[1], 400, "duplicate_key"},
		{"a form for a model that hears nothing", transcriptions, withModel[0], withModel[1], 404, "no_such_route"},
		{"a form that is too large", transcriptions, big, bigKind, 413, "body_too_large"},
		{"a body in another coding", "/tokenize", `x`, "gzip", 400, "bad_encoding"},
	} {
		t.Run(row.name, func(t *testing.T) {
			header := []string{"Content-Type", row.kind}
			switch row.kind {
			case "":
				header = nil
			case "gzip":
				header = []string{"Content-Encoding", "gzip"}
			}
			r := c.post(row.path, row.body, header...)
			require.Equal(t, row.status, r.status, r.body)
			var e struct {
				Error struct {
					Message string `json:"message"`
					Code    any    `json:"code"`
				} `json:"error"`
			}
			require.NoError(t, json.Unmarshal([]byte(r.body), &e), r.body)
			require.Equal(t, row.code, fmt.Sprint(e.Error.Code), r.body)
			require.NotEmpty(t, e.Error.Message)
		})
	}
	r := c.ask(http.MethodGet, c.url+"/v1/embeddings", "")
	require.Equal(t, http.StatusMethodNotAllowed, r.status)
	require.Equal(t, http.MethodPost, r.header.Get("Allow"))
}

// served waits until an engine of the model is up.
func (c *cluster) served(model string, engines int) {
	c.Helper()
	c.eventually("engines of "+model+" are up", func() bool { return c.sum("evenkeel_engine_up") >= float64(2+engines) })
	c.eventually(model+" is listed", func() bool {
		return strings.Contains(c.ask(http.MethodGet, c.url+"/v1/models", "").body, `"`+model+`"`)
	})
}

const embedding = `{"model":"emb","input":"a"}`

func TestAKeyPaysForPassedRequests(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "rare ek-rare , rpm: 2", "short ek-short , tpm: 40", "one ek-one , max_concurrent: 1")
	slow := pooling()
	slow.Model, slow.PrefillBase = "slow", time.Hour
	c := start(t, options{decode: []refengine.Config{{}, pooling(), slow}, configure: func(cfg *config.Config) { cfg.KeysFile = file }})
	ask := func(key, path, body string) (int, string) {
		r := c.post(path, body, "Authorization", "Bearer "+key)
		code := ""
		if r.status != http.StatusOK {
			code, _, _ = failure(t, r)
		}
		return r.status, code
	}
	status, code := ask("ek-nobody", "/v1/embeddings", embedding)
	require.Equal(t, "401 invalid_api_key", fmt.Sprint(status, " ", code))
	for range 2 {
		status, _ = ask("ek-rare", "/tokenize", `{"model":"ref","prompt":"a"}`)
		require.Equal(t, http.StatusOK, status)
	}
	_, code = ask("ek-rare", "/tokenize", `{"model":"ref","prompt":"a"}`)
	require.Equal(t, "rate_limit_exceeded", code)

	status, _ = ask("ek-short", "/v1/embeddings", `{"model":"emb","input":"`+strings.Repeat("w ", 30)+`"}`)
	require.Equal(t, http.StatusOK, status, "22 tokens by estimate, 30 as counted")
	_, code = ask("ek-short", "/v1/embeddings", `{"model":"emb","input":"`+strings.Repeat("w ", 30)+`"}`)
	require.Equal(t, "rate_limit_exceeded", code)
	status, _ = ask("ek-short", "/tokenize", `{"model":"ref","prompt":"`+strings.Repeat("w ", 300)+`"}`)
	require.Equal(t, http.StatusOK, status, "to count tokens costs none")

	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/embeddings", strings.NewReader(`{"model":"slow","input":"a"}`))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer ek-one")
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := c.http.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	c.eventually("it runs", func() bool { return c.metric("evenkeel_requests_open") == 1 })
	_, code = ask("ek-one", "/v1/embeddings", embedding)
	require.Equal(t, "queue_full", code)
	leave()
	<-gone
	c.eventually("it has given its place back", func() bool { status, _ := ask("ek-one", "/v1/embeddings", embedding); return status == http.StatusOK })
}

func TestADrainMovesAPassedRequest(t *testing.T) {
	t.Parallel()
	slow, quick := pooling(), pooling()
	slow.PrefillBase = time.Hour
	c := start(t, options{decode: []refengine.Config{{}, slow}, profile: mooncake.Profile{}})
	c.served("emb", 1)
	answer := make(chan reply, 1)
	go func() { answer <- c.post("/v1/embeddings", embedding, "X-Request-Id", "moved") }()
	c.eventually("it runs", func() bool { return c.metric("evenkeel_requests_open") == 1 })
	other := c.engine(quick)
	t.Cleanup(other.Close)
	r := c.ask(http.MethodPost, c.admin+"/workers", fmt.Sprintf(`{"role":"decode","url":%q,"slots":4}`, other.URLs()[0]))
	require.Less(t, r.status, 300, r.body)
	c.eventually("the other one is up", func() bool { return c.sum("evenkeel_engine_up") >= 4 })
	require.Equal(t, http.StatusNoContent, c.ask(http.MethodPost, c.admin+"/workers/"+addressOf(c.decode[1])+"/drain", `{"deadline":"10ms"}`).status)
	got := <-answer
	require.Equal(t, http.StatusOK, got.status, got.body)
	require.Len(t, c.receipt("moved").Attempts, 2)

	require.Equal(t, http.StatusNoContent, c.ask(http.MethodPost, c.admin+"/workers/"+addressOf(other)+"/drain", "").status)
	r = c.post("/v1/embeddings", embedding)
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	code, _, _ := failure(t, r)
	require.Equal(t, "engine_unavailable", code)
	require.Equal(t, "1", r.header.Get("Retry-After"))
}
