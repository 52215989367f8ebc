package api

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

func documented(t *testing.T) *openapi3.T {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromFile("../../../docs/openapi.yaml")
	require.NoError(t, err)
	require.NoError(t, doc.Validate(t.Context()))
	return doc
}

// The tags, which say whose listener a path is on.
const clients, operators = "For clients", "For operators"

// operations lists what the document has of a listener, as GET /path.
func operations(doc *openapi3.T, tag string) (all []string) {
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			if slices.Contains(op.Tags, tag) {
				all = append(all, method+" "+path)
			}
		}
	}
	return all
}

// region gives a proxy a peer that is nowhere.
func region(t *testing.T) func(*config.Config) {
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte("k1 "+strings.Repeat("0f", 32)+"\n"), 0o600))
	return func(cfg *config.Config) {
		g := &cfg.Geo
		g.Mode, g.Listen, g.HMAC.KeysFile = geo.Distributed, "127.0.0.1:0", file
		g.Self = geo.Self{ID: "us-1", Region: "us"}
		g.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", URL: "http://127.0.0.1:1"}}
	}
}

// embeds adds an engine of an embedding model.
func embeds(t *testing.T, configure func(*config.Config)) func(*config.Config) {
	e, err := refengine.Start(refengine.Config{Model: refengine.Model{Name: "emb", Task: plain.Pooling},
		Prompts: refengine.Prompts{Base: time.Millisecond}})
	require.NoError(t, err)
	t.Cleanup(e.Close)
	return func(cfg *config.Config) {
		configure(cfg)
		cfg.Engines.Decode = append(cfg.Engines.Decode, config.Engine{URL: e.URLs()[0], Slots: 4})
	}
}

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
	aChat          = `{"model":"ref","messages":[{"role":"user","content":"one two three"}],"max_tokens":4}`
	aCompletion    = `{"model":"ref","prompt":"one two three","max_tokens":4}`
)

// sent is one call: the operation of the document, the URL where it has
// parameters, a body, what should come.
type sent struct {
	operation, url, body string
	status               int
	code                 string // of an error
}

func TestOpenAPIAnswersAreAsDocumented(t *testing.T) {
	doc := documented(t)
	p := start(t, options{configure: embeds(t, region(t))})
	id := strings.TrimPrefix(p.decode[0].URLs()[0], "http://")
	for _, ask := range [][2]string{{chatPath, aChat}, {"/v1/embeddings", `{"model":"emb","input":"one"}`}} {
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			resp, _ := p.call(http.MethodPost, p.url+ask[0], ask[1])
			if resp.StatusCode == http.StatusOK {
				break
			}
			require.True(t, time.Now().Before(end), ask[0])
		}
	}
	seen := map[string]bool{"GET /debug/pprof/profile": true, "GET /debug/pprof/trace": true} // take seconds
	for _, s := range []sent{
		{"POST " + chatPath, "", aChat, 200, ""},
		{"POST " + chatPath, "", strings.Replace(aChat, `"max`, `"stream":true,"max`, 1), 200, ""},
		{"POST " + chatPath, "", `{`, 400, "invalid_json"},
		{"POST " + chatPath, "", `{"model":"ref"}`, 400, "missing_required_parameter"},
		{"POST " + completionPath, "", aCompletion, 200, ""},
		{"POST " + completionPath, "", strings.Replace(aCompletion, "ref", "gone", 1), 503, "no_region_available"},
		{"POST " + completionPath, "", strings.Replace(aCompletion, "4", `"4"`, 1), 400, "invalid_type"},
		{"POST " + completionPath, "", strings.Replace(aCompletion, "4", "4000000", 1), 400, "context_length_exceeded"},
		{"POST /v1/responses", "", `{"model":"ref","input":"one"}`, 404, "no_such_route"},
		{"POST /v1/responses", "", `{"model":"ref","input":"one","store":true}`, 400, "unsupported_parameter"},
		{"POST /v1/messages", "", `{"model":"ref","max_tokens":5,"messages":[{"role":"user","content":"one"}]}`, 404, ""},
		{"POST /v1/messages", "", `{"model":"ref","messages":[]}`, 400, ""},
		{"POST /v1/messages/count_tokens", "", `{"model":"ref","messages":[{"role":"user","content":"one"}]}`, 200, ""},
		{"POST /v1/messages/count_tokens", "", `{"messages":[{"role":"user","content":"one"}]}`, 400, ""},
		{"POST /inference/v1/generate", "", `{"model":"ref","token_ids":[1,2],"sampling_params":{}}`, 404, "no_such_route"}, // of vllm-ascend
		{"POST /inference/v1/generate", "", `{"model":"ref","token_ids":[],"sampling_params":{}}`, 400, "invalid_value"},
		{"POST /inference/v1/abort_requests", "", `{"request_ids":["generate-tokens-gone"]}`, 200, ""},
		{"POST /inference/v1/abort_requests", "", `{}`, 400, "missing_required_parameter"},
		{"POST /generate", "", `{"model":"ref","input_ids":[1,2]}`, 404, "no_such_route"},
		{"POST /generate", "", `{"model":"ref","sampling_params":{}}`, 400, "missing_required_parameter"},
		{"POST /abort_request", "", `{"rid":"gone"}`, 200, ""},
		{"POST /tokenize", "", `{"model":"ref","prompt":"one two"}`, 200, ""},
		{"POST /tokenize", "", `{"prompt":"one two"}`, 400, "missing_required_parameter"},
		{"POST /detokenize", "", `{"model":"ref","tokens":[1]}`, 200, ""},
		{"POST /v1/embeddings", "", `{"model":"emb","input":"one"}`, 200, ""},
		{"POST /v1/embeddings", "", `{"model":"emb","input":"one","encoding_format":"bytes"}`, 200, ""},
		{"POST /v1/embeddings", "", `{"model":"ref","input":"one"}`, 404, "no_such_route"},
		{"POST /v1/rerank", "", `{"model":"emb","query":"one","documents":["two"]}`, 200, ""},
		{"POST /v2/rerank", "", `{"model":"emb","query":"one","documents":["two"]}`, 200, ""},
		{"POST /rerank", "", `{"model":"emb","query":"one","documents":["two"]}`, 200, ""},
		{"POST /score", "", `{"model":"emb","text_1":"one","text_2":"two"}`, 200, ""},
		{"POST /v1/score", "", `{"model":"emb","text_1":"one","text_2":"two"}`, 200, ""},
		{"POST /classify", "", `{"model":"emb","input":"one"}`, 200, ""},
		{"POST /pooling", "", `{"model":"emb","input":"one"}`, 200, ""},
		{"POST /v1/audio/transcriptions", "", `{"model":"emb"}`, 400, "invalid_type"},
		{"POST /v1/audio/translations", "", `{"model":"emb"}`, 400, "invalid_type"},
		{"GET /v1/models", "", "", 200, ""},
		{"GET /v1/models/{model}", "/v1/models/ref", "", 200, ""},
		{"GET /v1/models/{model}", "/v1/models/gone", "", 404, "model_not_found"},
		{"GET /health", "", "", 200, ""},
		{"GET /healthcheck", "", "", 200, ""},

		{"GET /livez", "", "", 200, ""},
		{"GET /readyz", "", "", 200, ""},
		{"GET /", "", "", 200, ""},
		{"GET /live.js", "", "", 200, ""},
		{"GET /live.css", "", "", 200, ""},
		{"GET /live.svg", "", "", 200, ""},
		{"GET /page/{module}", "/page/words.js", "", 200, ""},
		{"GET /page/{module}", "/page/live.css", "", 404, ""},
		{"GET /runbook.md", "", "", 200, ""},
		{"GET /live", "/live?once", "", 200, ""},
		{"GET /live", "/live?once&text&width=80", "", 200, ""},
		{"GET /live", "/live?once&text&width=1", "", 400, "bad_query"},
		{"GET /live", "/live?at=1", "", 404, "not_found"},
		{"GET /live", "/live?at=noon", "", 400, "bad_query"},
		{"GET /metrics", "", "", 200, ""},
		{"GET /status", "", "", 200, ""},
		{"GET /workers", "", "", 200, ""},
		{"GET /policy", "", "", 200, ""},
		{"PUT /policy", "", `{"policy":"br0"}`, 200, ""},
		{"PUT /policy", "", `{"policy":"best"}`, 400, "bad_policy"},
		{"PUT /policy", "", `{"name":"br0"}`, 400, "bad_body"},
		{"GET /prefill", "", "", 200, ""},
		{"PUT /prefill/policy", "", `{"policy":"lmetric"}`, 200, ""},
		{"PUT /prefill/policy", "", `{"policy":"best"}`, 400, "bad_policy"},
		{"POST /prefill/score", "", aChat, 200, ""},
		{"POST /prefill/score", "", `{"model":"ref"}`, 400, "bad_request"},
		{"GET /prefill/hotspots", "", "", 200, ""},
		{"DELETE /prefill/index", "/prefill/index?candidate=nobody", "", 404, "not_found"},
		{"DELETE /prefill/index", "", "", 204, ""},
		{"GET /decisions", "", "", 200, ""},
		{"GET /decisions", "/decisions?outcome=failed&brief=1&slow_ms=2.5&find=a&key=k&engine=d&model=ref", "", 200, ""},
		{"GET /decisions", "/decisions?n=0", "", 400, "bad_query"},
		{"GET /decisions", "/decisions?slow_ms=NaN", "", 400, "bad_query"},
		{"GET /decisions", "/decisions?id=none", "", 404, "not_found"},
		{"GET /geo", "", "", 200, ""},
		{"PUT /geo", "", `{"load":40}`, 200, ""},
		{"PUT /geo", "", `{"policy":"best"}`, 400, "bad_policy"},
		{"GET /geo/receipts", "", "", 200, ""},
		{"GET /geo/receipts", "/geo/receipts?n=x", "", 400, "bad_query"},
		{"POST /reload", "", "", 200, ""}, // there is no file, so nothing changed
		{"POST /reload", "/reload?dry=maybe", "", 400, "bad_query"},
		{"POST /workers", "", `{"url":"http://127.77.0.1:9","role":"decode","slots":4}`, 201, ""},
		{"POST /workers", "", `{"url":"x"}`, 400, "bad_worker"},
		{"DELETE /workers/{id}", "/workers/127.77.0.1:9", "", 204, ""},
		{"DELETE /workers/{id}", "/workers/127.77.0.1:9", "", 404, "not_found"},
		{"POST /workers/{id}/drain", "/workers/" + id + "/drain", `{"deadline":"5m"}`, 204, ""},
		{"GET /workers", "", "", 200, ""},
		{"POST /workers/{id}/drain", "/workers/" + id + "/drain", `{"deadline":"5"}`, 400, "bad_deadline"},
		{"DELETE /workers/{id}/drain", "/workers/" + id + "/drain", "", 204, ""},
		{"POST /workers/{id}/{rank}/drain", "/workers/" + id + "/9/drain", "", 404, "not_found"},
		{"DELETE /workers/{id}/{rank}/drain", "/workers/" + id + "/9/drain", "", 404, "not_found"},
		{"POST /instances/add", "", `{"type":"decode","instances":"127.77.0.1:9"}`, 200, ""},
		{"POST /instances/remove", "", `{"type":"decode","instances":["127.77.0.1:9"]}`, 200, ""},
		{"POST /instances/remove", "", `{"type":"decode","instances":["127.77.0.1:9"]}`, 404, "not_found"},
		{"POST /instances/add", "", `{"type":"cook","instances":[]}`, 400, "bad_instances"},
		{"POST /reset_prefix_cache", "", "", 200, ""},
		{"POST /admin/fleet/call", "", `{"path":"/pause"}`, 200, ""},
		{"POST /admin/fleet/call", "", `{"path":"/resume","group":"main"}`, 409, "call_refused"},
		{"POST /admin/fleet/call", "", `{"path":"/resume"}`, 200, ""},
		{"POST /admin/fleet/call", "", `{"path":"/resume","method":"TRACE"}`, 400, "bad_body"},
		{"POST /admin/fleet/call", "", `{"path":"/nothing"}`, 404, "not_found"},
		{"GET /debug/pprof/{profile}", "/debug/pprof/", "", 200, ""},
		{"GET /debug/pprof/{profile}", "/debug/pprof/goroutine?debug=1", "", 200, ""},
		{"GET /debug/pprof/cmdline", "", "", 200, ""},
		{"GET /debug/pprof/symbol", "", "", 200, ""},
		{"POST /drain", "", `{"deadline":"5m"}`, 204, ""},
		{"GET /status", "", "", 200, ""},
		{"DELETE /drain", "", "", 204, ""},
	} {
		p.holds(doc, s)
		seen[s.operation] = true
	}
	for _, op := range slices.Concat(operations(doc, clients), operations(doc, operators)) {
		require.True(t, seen[op], "%s is never called", op)
	}
}

// holds makes a call and holds the answer against the document.
func (p *proxy) holds(doc *openapi3.T, s sent) (*http.Response, string) {
	p.Helper()
	method, path, _ := strings.Cut(s.operation, " ")
	item := doc.Paths.Value(path)
	require.NotNil(p, item, s.operation)
	at := p.url
	if len(item.Servers) > 0 {
		at = p.admin
	}
	if s.url == "" {
		s.url = path
	}
	resp, body := p.call(method, at+s.url, s.body)
	require.Equal(p, s.status, resp.StatusCode, "%s: %s", s.operation, body)
	p.valid(doc, s.operation, resp, body)
	if s.code != "" {
		var e struct{ Error struct{ Code string } }
		require.NoError(p, json.Unmarshal([]byte(body), &e), "%s", body)
		require.Equal(p, s.code, e.Error.Code, s.operation)
	}
	return resp, body
}

func (p *proxy) valid(doc *openapi3.T, operation string, resp *http.Response, body string) {
	p.Helper()
	method, path, _ := strings.Cut(operation, " ")
	item := doc.Paths.Value(path)
	require.NoError(p, openapi3filter.ValidateResponse(p.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{
			Request: resp.Request,
			Route:   &routers.Route{Spec: doc, Path: path, PathItem: item, Method: method, Operation: item.GetOperation(method)},
		},
		Status: resp.StatusCode, Header: resp.Header, Body: io.NopCloser(strings.NewReader(body)),
		Options: &openapi3filter.Options{IncludeResponseStatus: true},
	}), "%s: %s", operation, body)
}

// The three kinds of events of GET /live have schemas, too.
func TestOpenAPIHasTheLiveEvents(t *testing.T) {
	doc := documented(t)
	p := start(t, options{})
	p.call(http.MethodPost, p.url+chatPath, aChat)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.admin+"/live", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewReader(resp.Body)
	for _, want := range []struct{ event, schema string }{{"history", "LiveHistory"}, {"document", "LiveDocument"}, {"strip", "LiveStrip"},
		{"document", "LiveDocument"}} {
		name, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "event: "+want.event+"\n", name)
		data, err := lines.ReadString('\n')
		require.NoError(t, err)
		var value any
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(data, "data: ")), &value))
		require.NoError(t, doc.Components.Schemas[want.schema].Value.VisitJSON(value), want.event)
		_, err = lines.ReadString('\n')
		require.NoError(t, err)
	}
}

func TestOpenAPITellsRefusedOperators(t *testing.T) {
	doc := documented(t)
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("open sesame\n"), 0o600))
	p := start(t, options{configure: func(cfg *config.Config) { cfg.Admin.TokenFile = file }})
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			if op.Tags[0] != operators {
				continue
			}
			resp, body := p.call(method, p.admin+strings.NewReplacer("{id}", "a:1", "{rank}", "0").Replace(path), "")
			wants := op.Security != nil && len(*op.Security) > 0
			require.Equal(t, wants, resp.StatusCode == http.StatusUnauthorized, "%s %s: %d", method, path, resp.StatusCode)
			p.valid(doc, method+" "+path, resp, body)
		}
	}
}
