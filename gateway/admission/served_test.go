package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/keys"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/passthrough"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/request"
	"evenkeel/gateway/service"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// house is a door with what is behind it, without sockets: a request that is let in ends where its
// connection is needed.
type house struct {
	*Handler
	t        *testing.T
	now      time.Time
	fleet    *fleet.Fleet
	receipts *receipt.Ring
	ready    bool
	version  string // of engines
}

const (
	prefiller, decoder = "127.0.0.1:3", "127.0.0.1:4"
	letIn              = "500 internal_error" // no connection is watched
)

// build makes one whose config is the usual one but for changes.
func build(t *testing.T, changes ...func(*config.Config)) *house {
	t.Helper()
	cfg := config.Default()
	cfg.GatewayAPI = config.GatewayAPI{Metrics: true, Objectives: map[string]int{"batch": -5}}
	cfg.Profiles = map[string]mooncake.Profile{"pull": {Connector: mooncake.NIXLPull}}
	cfg.Engines.Prefill = []config.Engine{{URL: "http://" + prefiller, Profile: "pull"}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://" + decoder, Profile: "pull", Slots: 8}}
	for _, change := range changes {
		change(cfg)
	}
	cfg.KeysFile = filepath.Join(t.TempDir(), "keys.yaml")
	var list strings.Builder
	list.WriteString("keys:\n")
	for _, one := range []string{
		"plain", "trusted\n    trusted: true\n    priority: 3", "slow\n    rpm: 1", "thrifty\n    tpm: 10", "narrow\n    max_concurrent: 2",
	} {
		name, _, _ := strings.Cut(one, "\n")
		fmt.Fprintf(&list, "  - sha256: %s\n    name: %s\n", keys.Hash("ek-"+name), one)
	}
	require.NoError(t, os.WriteFile(cfg.KeysFile, []byte(list.String()), 0o600))
	require.NoError(t, cfg.Validate())

	h := &house{t: t, now: time.Now(), receipts: receipt.NewRing(100, 1<<20), ready: true, version: "0.30.0"}
	log, reg := zap.NewNop(), prometheus.NewRegistry()
	conf, _, err := reload.New(cfg, reload.Deps{Log: log, Registerer: reg, Started: h.now})
	require.NoError(t, err)
	settings := func() *fleet.Settings { return conf.Settings().Settings }
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	scheduler, err := prefill.New(prefill.Config{Log: log})
	require.NoError(t, err)
	locals := local.New(1 << 20)
	h.fleet = fleet.New(fleet.Deps{
		Context: t.Context(), Serving: t.Context, Started: h.now, Log: log, Settings: settings, Client: client,
		Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: log, HealthInterval: time.Hour,
			FactsInterval: time.Hour}),
		Publish: func(candidates []prefill.Candidate, ranks []local.Rank, _ []board.Worker) {
			scheduler.SetCandidates(candidates)
			locals.Set(ranks)
		},
	})
	h.fleet.Admission = (*owner.Set)(nil)
	enter, err := h.fleet.Load()
	require.NoError(t, err)
	enter()
	told, err := journal.New(journal.Config{Registerer: reg, Log: log, Receipts: h.receipts})
	require.NoError(t, err)
	requests := request.New(request.Deps{
		Context: t.Context(), Log: log, Registerer: reg, Settings: settings, Serving: t.Context, Client: client, Fleet: h.fleet,
		Engines: func() request.Engines { return h.fleet.Now() },
		Prefill: scheduler, LocalRanks: locals, Journal: told,
	})
	h.Handler = New(Deps{
		Started: h.now, Ready: func() (bool, string) { return h.ready, "" }, Loads: func(context.Context) []ModelLoad { return nil },
		Config: conf, Fleet: h.fleet, Requests: requests,
		Service: service.New(service.Deps{Context: t.Context(), Log: log, Grace: func() time.Duration { return 0 },
			EndAll: func() int { return 0 }}),
		Through: passthrough.New(passthrough.Deps{
			Registerer: reg, Settings: settings, Engines: func() passthrough.Engines { return h.fleet.Now() }, Requests: requests,
		}),
	})
	return h
}

// says has an engine be up or down, with the models that it serves.
func (h *house) says(role, at string, up bool, models ...string) {
	s := engine.Status{Up: up, Version: h.version}
	for _, m := range models {
		s.Models = append(s.Models, engine.Model{ID: m, MaxModelLen: 50})
	}
	h.fleet.OnStatus(role+" "+at, s)
}

// open is a house whose engines serve m.
func open(t *testing.T, changes ...func(*config.Config)) *house {
	t.Helper()
	h := build(t, changes...)
	h.says(roster.Prefill, prefiller, true, "m")
	h.says(roster.Decode, decoder, true, "m")
	return h
}

// asking is a request with headers, each written as NAME: VALUE.
func asking(method, path, body string, headers ...string) *fasthttp.RequestCtx {
	ctx := &fasthttp.RequestCtx{}
	ctx.Request.Header.SetMethod(method)
	ctx.Request.SetRequestURI(path)
	ctx.Request.SetBodyString(body)
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		ctx.Request.Header.Set(name, value)
	}
	return ctx
}

func by(name string) string { return "Authorization: Bearer ek-" + name }

// got is an answer as a client tells it from others, and the request behind it holds nothing any
// more.
func (h *house) got(ctx *fasthttp.RequestCtx) string {
	h.t.Helper()
	h.Handle(ctx)
	require.Zero(h.t, h.deps.Requests.Open())
	return seen(ctx)
}

func seen(ctx *fasthttp.RequestCtx) string {
	var said struct{ Error struct{ Code string } }
	_ = json.Unmarshal(ctx.Response.Body(), &said)
	words := fmt.Sprint(ctx.Response.StatusCode(), " ", said.Error.Code)
	if after := ctx.Response.Header.Peek("Retry-After"); len(after) > 0 {
		words += ", retry after " + string(after)
	}
	return words
}

const (
	chat     = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	short    = `{"model":"m","prompt":"hi"}`
	messages = `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}`
)

func TestAPathTakesItsMethod(t *testing.T) {
	h := open(t)
	require.Equal(t, "404 not_found", h.got(asking("GET", "/v2/models", "")))
	require.Equal(t, "404 not_found", h.got(asking("GET", "/v1/models/", "")))
	require.Equal(t, "404 not_found", h.got(asking("GET", "/v1/responses/resp_1", "")), "no engine keeps responses")
	for _, route := range h.Routes() {
		method, path, _ := strings.Cut(route, " ")
		path = strings.Replace(path, "{model}", "m", 1)
		ctx := asking("DELETE", path, "")
		h.Handle(ctx)
		require.Equal(t, http.StatusMethodNotAllowed, ctx.Response.StatusCode(), route)
		require.Equal(t, method, string(ctx.Response.Header.Peek("Allow")), route)
		ctx = asking("HEAD", path, "", by("plain"))
		h.Handle(ctx)
		require.Equal(t, method == "GET", ctx.Response.StatusCode() == http.StatusOK, route)
	}
	require.Subset(t, h.Routes(), []string{"POST /v1/chat/completions", "POST /v1/embeddings", "GET /health"})
}

func TestOnlyACallerWithAKeyIsLetIn(t *testing.T) {
	h := open(t)
	const refused, in, coded, broken = "401 invalid_api_key", letIn, "415 unsupported_encoding", "400 bad_encoding"
	for _, c := range []struct {
		name    string
		headers []string
		want    string
		caller  string
	}{
		{"no key", nil, refused, ""},
		{"an unknown key", []string{by("nobody")}, refused, ""},
		{"a key", []string{by("plain")}, in, "plain"},
		{"a key in another scheme", []string{"Authorization: Basic ek-plain"}, refused, ""},
		{"as Anthropic's clients send it", []string{"X-Api-Key: ek-plain"}, in, "plain"},
		{"an unknown one", []string{"X-Api-Key: ek-nobody"}, refused, ""},
		{"none of it", []string{"X-Api-Key: "}, refused, ""},
		{"with a scheme", []string{"X-Api-Key: Bearer ek-plain"}, refused, ""},
		{"an Authorization counts before it", []string{"X-Api-Key: ek-plain", by("nobody")}, refused, ""},
		{"and so it does where it is right", []string{"X-Api-Key: anything", by("plain")}, in, "plain"},
		{"a body in a coding that is not read", []string{by("plain"), "Content-Encoding: br"}, coded, "plain"},
		{"a body that is not packed as it says", []string{by("plain"), "Content-Encoding: gzip"}, broken, "plain"},
		{"a stranger's body is not unpacked", []string{by("nobody"), "Content-Encoding: gzip"}, refused, ""},
		{"a body that says that it is not compressed", []string{by("plain"), "Content-Encoding: Identity"}, in, "plain"},
	} {
		for path, body := range map[string]string{chatPath: chat, messagesPath: messages, countPath: messages, embeddingsPath: `{"model":"m","input":"hi"}`} {
			t.Run(c.name+" "+path, func(t *testing.T) {
				ctx := asking("POST", path, body, append(c.headers, "X-Request-Id: theirs")...)
				head := &ctx.Request.Header
				require.Equal(t, c.caller, h.Caller(head))
				refusal := h.Authenticate(head)
				require.Equal(t, c.caller == "", refusal != nil)
				got := h.got(ctx)
				require.Equal(t, "theirs", string(ctx.Response.Header.Peek("X-Request-Id")))
				if strings.HasPrefix(path, messagesPath) { // whose errors have a kind and no code
					require.Equal(t, c.want[:4], got[:4])
					kind, _ := answertest.Refused(t, string(ctx.Response.Body()))
					require.Equal(t, refusal != nil, kind == "authentication_error")
				} else {
					require.Equal(t, c.want, got)
				}
				if refusal != nil {
					require.Equal(t, refused, fmt.Sprint(refusal.Status, " ", refusal.Code))
					require.Equal(t, "Bearer", string(ctx.Response.Header.Peek("WWW-Authenticate")))
					require.Equal(t, refused, h.got(asking("GET", "/v1/models", "", c.headers...)))
				}
			})
		}
	}
	ctx := asking("POST", chatPath, chat)
	h.Handle(ctx)
	require.Regexp(t, "^[0-9a-f]{32}$", string(ctx.Response.Header.Peek("X-Request-Id")), "one of ours, where the client sends none")
	require.Equal(t, "200 ", h.got(asking("GET", "/health", "")), "health asks for no key")
}

// A minute of a key, and its answers at once, are taken by whatever it sends, and given back at the
// end.
func TestAKeyIsHeldToItsLimits(t *testing.T) {
	h := open(t)
	post := func(key, body string) string { return h.got(asking("POST", "/v1/completions", body, by(key))) }
	require.Equal(t, letIn, post("slow", short))
	require.Equal(t, "429 rate_limit_exceeded, retry after 60", post("slow", short))
	require.Equal(t, "429 rate_limit_exceeded, retry after 60", h.got(asking("GET", "/v1/models", "", by("slow"))))

	for range 3 {
		require.Equal(t, letIn, post("narrow", `{"model":"m","prompt":"hi","n":2}`), "the answers of the one before were given back")
		require.Equal(t, "400 too_many_answers", post("narrow", `{"model":"m","prompt":"hi","n":3}`))
	}
	key, _ := h.deps.Config.Keys().Authenticate([]byte("Bearer ek-narrow"))
	require.True(t, key.Acquire(1))
	require.Equal(t, "429 queue_full, retry after 1", post("narrow", `{"model":"m","prompt":"hi","n":2}`), "another request has one of them")
	key.Release(1)

	require.Equal(t, letIn, post("thrifty", `{"model":"m","prompt":"`+strings.Repeat("a", 30)+`"}`))
	require.Equal(t, letIn, post("thrifty", `{"model":"m","prompt":"`+strings.Repeat("a", 30)+`"}`), "it used none of the tokens that it took")
	tokens := func(n int) string {
		return `{"model":"m","prompt":[` + strings.TrimSuffix(strings.Repeat("1,", n), ",") + `]}`
	}
	require.Equal(t, letIn, post("thrifty", tokens(10)))
	thrifty, _ := h.deps.Config.Keys().Authenticate([]byte("Bearer ek-thrifty"))
	_, ok := thrifty.TakeTokens(time.Now(), 10)
	require.True(t, ok)
	require.Equal(t, "429 rate_limit_exceeded, retry after 6", post("thrifty", tokens(1)), "a tenth of a minute")
}

// What goes to one engine as it came is on the account of its key, too, and to count tokens costs
// none.
func TestAKeyPaysForWhatIsPassedThrough(t *testing.T) {
	h := open(t)
	text := `{"model":"m","input":"` + strings.Repeat("w ", 30) + `","prompt":"a"}`
	post := func(key, path string) string { return h.got(asking("POST", path, text, by(key))) }
	require.Equal(t, letIn, post("slow", "/tokenize"))
	require.Equal(t, "429 rate_limit_exceeded, retry after 60", post("slow", "/tokenize"))

	require.Equal(t, letIn, post("thrifty", embeddingsPath))
	require.Equal(t, letIn, post("thrifty", embeddingsPath), "it used none of the tokens that it took")
	thrifty, _ := h.deps.Config.Keys().Authenticate([]byte("Bearer ek-thrifty"))
	_, ok := thrifty.TakeTokens(time.Now(), 10)
	require.True(t, ok)
	require.Contains(t, post("thrifty", embeddingsPath), "429 rate_limit_exceeded")
	require.Equal(t, letIn, post("thrifty", "/tokenize"))
	ctx := asking("POST", messagesPath, messages, "X-Api-Key: ek-thrifty")
	require.Contains(t, h.got(ctx), "429 , retry after")
	kind, _ := answertest.Refused(t, string(ctx.Response.Body()))
	require.Equal(t, "rate_limit_error", kind)

	narrow, _ := h.deps.Config.Keys().Authenticate([]byte("Bearer ek-narrow"))
	require.True(t, narrow.Acquire(2))
	require.Equal(t, "429 queue_full, retry after 1", post("narrow", embeddingsPath))
	narrow.Release(2)
	require.Equal(t, letIn, post("narrow", embeddingsPath))
}

// What a request may ask for is in the config.
func TestAnOperatorSaysWhatARequestMayAskFor(t *testing.T) {
	h := open(t, func(c *config.Config) { c.Limits.Answers, c.Limits.AnswersPerPrompt, c.Limits.StopStrings = 40, 30, 20 })
	stops := strings.Repeat(`"zzz",`, 19) + `"z"`
	for more, want := range map[string]string{
		`"n":30`: letIn, `"n":31`: "400 invalid_value", `"stop":[` + stops + `]`: letIn, `"stop":[` + stops + `,"y"]`: "400 invalid_value",
		`"prompt":["a","b"],"n":20`: letIn, `"prompt":["a","b"],"n":21`: "400 invalid_value",
	} {
		body := `{"model":"m",` + more + `}`
		if !strings.Contains(more, "prompt") {
			body = `{"model":"m","prompt":"a",` + more + `}`
		}
		require.Equal(t, want, h.got(asking("POST", completionPath, body, by("plain"))), more)
	}
}

// A request that no handler saw, because its head or body was wrong, counts in its key's minute all
// the same.
func TestARefusalByTheEdgeCounts(t *testing.T) {
	h := open(t)
	r := edge.Refusal{Status: 413, Code: "body_too_large", Message: "too large"}
	ctx := asking("POST", "/v1/completions", short, by("slow"))
	h.CountRefused(&ctx.Request.Header, r)
	require.Equal(t, "429 rate_limit_exceeded, retry after 60", h.got(ctx))

	for path, want := range map[string]string{"/v1/completions": "body_too_large", "/v1/messages": ""} {
		ctx := asking("POST", path, "")
		h.AnswerRefused(ctx, r)
		require.Equal(t, "413 "+want, seen(ctx))
	}
	ctx = asking("POST", "/v1/messages", "")
	h.AnswerRefused(ctx, r)
	require.Contains(t, string(ctx.Response.Body()), `"type":"error"`, "in Anthropic's words")
}

// What nobody can serve is refused before it waits for anybody.
func TestARequestIsLetInWhereItCanBeServed(t *testing.T) {
	for _, c := range []struct {
		name string
		than func(*house) // what is other than in a proxy whose engines serve m; nil: nothing
		path string
		body string
		want string
	}{
		{"a chat", nil, "/v1/chat/completions", chat, letIn},
		{"a text", nil, "/v1/completions", short, letIn},
		{"messages, whose engines drop hand-offs there", func(h *house) {
			h.version = "0.26.0"
			h.says(roster.Prefill, prefiller, true, "m")
			h.says(roster.Decode, decoder, true, "m")
		}, "/v1/messages", messages, "404 no_such_route"},
		{"messages", func(h *house) {
			h.version = "0.32.1"
			h.says(roster.Prefill, prefiller, true, "m")
			h.says(roster.Decode, decoder, true, "m")
		}, "/v1/messages", messages, letIn},
		{"responses", nil, "/v1/responses", `{"model":"m","input":"hi"}`, letIn},
		{"responses that are not kept", nil, "/v1/responses", `{"model":"m","input":"hi","background":false,"store":null,"previous_response_id":null}`, letIn},
		{"embeddings", nil, "/v1/embeddings", `{"model":"m","input":"hi"}`, letIn},
		{"no JSON", nil, "/v1/chat/completions", "hi", "400 invalid_json"},
		{"embeddings of no JSON", nil, "/v1/embeddings", "hi", "400 invalid_json"},
		{"another model", nil, "/v1/chat/completions", strings.Replace(chat, `"m"`, `"x"`, 1), "404 model_not_found"},
		{"responses of another model", nil, "/v1/responses", `{"model":"x","input":"hi"}`, "404 model_not_found"},
		{"embeddings of another model", nil, "/v1/embeddings", `{"model":"x","input":"hi"}`, "404 model_not_found"},
		{"longer than the context", nil, "/v1/completions", `{"model":"m","prompt":[1,2,3],"max_tokens":48}`, "400 context_length_exceeded"},
		{"no engine has told its models", func(h *house) {
			h.says(roster.Prefill, prefiller, false)
			h.says(roster.Decode, decoder, false)
		}, "/v1/chat/completions", chat, "503 prefill_unavailable, retry after 1"},
		{"no prefill engine is up", func(h *house) { h.says(roster.Prefill, prefiller, false, "m") },
			"/v1/chat/completions", chat, "503 prefill_unavailable, retry after 1"},
		{"no decode engine is up", func(h *house) { h.says(roster.Decode, decoder, false, "m") },
			"/v1/chat/completions", chat, "503 decode_unavailable, retry after 1"},
		{"the proxy ends", func(h *house) { h.deps.Service.Drain(0) }, "/v1/chat/completions", chat, "503 draining, retry after 1"},
		{"the proxy ends, embeddings", func(h *house) { h.deps.Service.Drain(0) },
			"/v1/embeddings", `{"model":"m","input":"hi"}`, "503 draining, retry after 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := open(t)
			if c.than != nil {
				c.than(h)
			}
			ctx := asking("POST", c.path, c.body, by("plain"))
			got := h.got(ctx)
			told := h.receipts.Last(1, receipt.Filter{}, false)
			require.Len(t, told, 1)
			if openai.IsAnthropicPath(c.path) { // whose errors have no code
				got += told[0].Outcome
			}
			require.Equal(t, c.want, got)
			require.Equal(t, strings.Contains(c.want, "draining"), ctx.Response.ConnectionClose(),
				"the next request goes where the load balancer sends it")
			require.Equal(t, []any{"plain", c.path, ctx.Response.StatusCode()}, []any{told[0].Key, told[0].Endpoint, told[0].Status})
		})
	}
}

// options are what a request asks for in its headers, or the code of its refusal.
func (h *house) options(body string, headers ...string) (*requestContext, string) {
	h.t.Helper()
	ctx := asking("POST", "/v1/chat/completions", body, headers...)
	in := h.newIncoming(journal.LogEntry{ID: "x", Arrival: h.now})
	refused := ""
	h.serveOrRefuse(ctx, in, func() (fail *openai.Error) {
		if fail = h.checkSender(ctx, mooncake.Chat.Path(), in); fail == nil {
			parsed, err := mooncake.ScanBody([]byte(body), 0)
			require.NoError(h.t, err)
			m, _, _ := h.fleet.Now().Lookup("m")
			fail = h.readRoutingHeaders(ctx, in, m, &parsed)
			in.readLocality(ctx, false)
		}
		if fail != nil {
			refused = fail.Code
		}
		return fail
	})
	return in, refused
}

// Only a trusted caller steers. What others write is not read, so that it cannot be wrong either.
func TestOnlyATrustedCallerSteers(t *testing.T) {
	h := open(t)
	for _, c := range []struct {
		header, refused string
		is              func(*requestContext) bool
	}{
		{"X-Evenkeel-Priority: -7", "", func(in *requestContext) bool { return in.Priority == -7 }},
		{"X-Evenkeel-Priority: 101", "bad_priority", nil},
		{"X-Evenkeel-Priority: -101", "bad_priority", nil},
		{"X-Evenkeel-Priority: high", "bad_priority", nil},
		{"X-Evenkeel-Priority: 1.5", "bad_priority", nil},
		{"X-Evenkeel-Priority: 99999999999999999999", "bad_priority", nil},
		{"X-Evenkeel-Priority: 0x1", "bad_priority", nil},
		{"X-Evenkeel-Priority: +7", "", func(in *requestContext) bool { return in.Priority == 7 }},
		{"X-Evenkeel-Class: batch", "", func(in *requestContext) bool { return in.Batch }},
		{"X-Evenkeel-Class: online", "", func(in *requestContext) bool { return !in.Batch }},
		{"X-Evenkeel-Class: flex", "bad_class", nil},
		{"X-Evenkeel-Deadline-Ms: 1500", "", func(in *requestContext) bool { return in.Deadline.Equal(h.now.Add(1500 * time.Millisecond)) }},
		{"X-Evenkeel-Deadline-Ms: 0", "bad_deadline", nil},
		{"X-Evenkeel-Deadline-Ms: 1.5", "bad_deadline", nil},
		{"X-Evenkeel-Deadline-Ms: 86400001", "bad_deadline", nil},
		{"X-Gateway-Inference-Objective: batch", "", func(in *requestContext) bool { return in.Priority == -5 }},
		{"X-Gateway-Inference-Objective: other", "", func(in *requestContext) bool { return in.Priority == 3 }},
		{"X-Gateway-Inference-Fairness-Id: u", "", func(in *requestContext) bool { return strings.HasPrefix(in.Flow, "trusted\x00") }},
		{"X-Evenkeel-Explain: true", "", func(in *requestContext) bool { return in.Explain }},
		{"X-Evenkeel-Disaggregate: never", "", func(in *requestContext) bool { return in.Disaggregate == "never" }},
		{"X-Evenkeel-Disaggregate: perhaps", "bad_target", nil},
		{"X-Evenkeel-Policy: round-robin", "", func(in *requestContext) bool { return in.PrefillPolicy == "round-robin" }},
		{"X-Evenkeel-Policy: luck", "bad_policy", nil},
		{"X-Evenkeel-Target-Prefill: " + prefiller + "/0", "", func(in *requestContext) bool { return in.ToPrefill == prefiller+"/0" }},
		{"X-Evenkeel-Target-Prefill: elsewhere", "bad_target", nil},
		{"X-Evenkeel-Target-Decode: " + decoder, "", func(in *requestContext) bool { return slices.Equal(in.ToDecode, []int32{h.rank()}) }},
		{"X-Evenkeel-Target-Decode: elsewhere", "bad_target", nil},
	} {
		t.Run(c.header, func(t *testing.T) {
			in, refused := h.options(chat, by("trusted"), c.header)
			require.Equal(t, c.refused, refused)
			if c.is != nil {
				require.True(t, c.is(in))
			}
			in, refused = h.options(chat, by("plain"), c.header)
			require.Empty(t, refused)
			require.Zero(t, in.Options)
			require.Zero(t, in.Priority)
			require.False(t, in.Batch)
			require.Zero(t, in.Deadline)
			require.Empty(t, in.Flow)
		})
	}
	in, _ := h.options(chat, by("trusted"))
	require.Equal(t, 3, in.Priority, "that of its key")
}

func (h *house) rank() int32 {
	worker, ok := h.fleet.Now().WorkerByName(decoder, "m", "m")
	require.True(h.t, ok)
	return worker
}

// Anybody may name a session, in a header or as OpenAI's clients do, and nobody gets into another
// caller's.
func TestASessionBelongsToItsCaller(t *testing.T) {
	h := open(t)
	of := func(caller, more string, headers ...string) uint64 {
		in, refused := h.options(strings.Replace(chat, "{", "{"+more, 1), append(headers, by(caller))...)
		require.Empty(t, refused)
		return in.Session
	}
	require.Zero(t, of("plain", ""))
	named := of("plain", "", "X-Evenkeel-Session: a")
	require.NotZero(t, named)
	require.Equal(t, named, of("plain", "", "X-Evenkeel-Session: a"))
	require.NotEqual(t, named, of("plain", "", "X-Evenkeel-Session: b"))
	require.NotEqual(t, named, of("trusted", "", "X-Evenkeel-Session: a"))
	require.Equal(t, named, of("plain", `"user":"u",`, "X-Evenkeel-Session: a"), "the header counts first")
	key := of("plain", `"prompt_cache_key":"a",`)
	require.NotZero(t, key)
	require.Equal(t, key, of("plain", `"user":"u","prompt_cache_key":"a",`), "then the key of the cache")
	require.NotEqual(t, key, of("plain", `"user":"u",`))
	require.NotZero(t, of("plain", `"user":"u",`))
	require.Zero(t, of("plain", `"user":"",`))
	require.Zero(t, of("plain", `"user":null,`))
	for said, want := range map[string][2]any{"true": {true, ""}, "false": {false, ""}, "soon": {false, "bad_session_end"}} {
		in, refused := h.options(chat, by("plain"), "X-Evenkeel-Session: a", "X-Evenkeel-Session-End: "+said)
		require.Equal(t, want, [2]any{in.EndsSession, refused}, said)
	}
}

// The OpenAI libraries say how long they wait. No answer is worth computing that begins later.
func TestAClientsPatienceIsRead(t *testing.T) {
	h := open(t)
	for _, c := range []struct {
		headers []string
		want    time.Duration // 0: unknown
	}{
		{nil, 0},
		{[]string{"X-Stainless-Timeout: 600"}, 600 * time.Second},
		{[]string{"X-Stainless-Timeout: 600", "X-Stainless-Read-Timeout: 1.5"}, 1500 * time.Millisecond},
		{[]string{"X-Stainless-Timeout: 600", "X-Stainless-Read-Timeout: soon"}, 600 * time.Second},
		{[]string{"X-Stainless-Timeout: 0"}, 0},
		{[]string{"X-Stainless-Timeout: -1"}, 0},
		{[]string{"X-Stainless-Timeout: NaN"}, 0},
		{[]string{"X-Stainless-Timeout: 1e300"}, 0},
	} {
		in, refused := h.options(chat, append(c.headers, by("plain"))...)
		require.Empty(t, refused)
		if c.want == 0 {
			require.Zero(t, in.ClientGivesUpAt, c.headers)
		} else {
			require.Equal(t, h.now.Add(c.want), in.ClientGivesUpAt, c.headers)
		}
	}
	ctx := asking("POST", "/v1/chat/completions", chat, "X-Stainless-Timeout: 600", "X-Evenkeel-Geo: local")
	in := &requestContext{Incoming: &request.Incoming{Record: &journal.Record{}, From: &geo.Hop{}}}
	in.readLocality(ctx, true)
	require.Zero(t, in.ClientGivesUpAt, "another proxy sends no such header, and its signature would not cover it")
	require.True(t, in.NeverForward)
}

func TestTheListOfModelsIsWhatIsServed(t *testing.T) {
	h := open(t)
	h.says(roster.Prefill, prefiller, true, "m", "org/m", "half")
	h.says(roster.Decode, decoder, true, "m", "org/m")
	read := func(path string, into any) int {
		ctx := asking("GET", path, "", by("plain"))
		h.Handle(ctx)
		if into != nil {
			require.NoError(t, json.Unmarshal(ctx.Response.Body(), into))
		}
		return ctx.Response.StatusCode()
	}
	var list struct {
		Object  string
		Data    []servedModel
		HasMore *bool  `json:"has_more"`
		FirstID string `json:"first_id"`
		LastID  string `json:"last_id"`
	}
	require.Equal(t, http.StatusOK, read("/v1/models", &list))
	require.Equal(t, "list", list.Object)
	names := make([]string, len(list.Data))
	for i, m := range list.Data {
		names[i] = m.ID
	}
	require.Equal(t, []string{"m", "org/m"}, names)
	require.Equal(t, []any{new(false), "m", "org/m"}, []any{list.HasMore, list.FirstID, list.LastID}, "the only page, for Anthropic's clients")
	var one servedModel
	require.Equal(t, http.StatusOK, read("/v1/models/org/m", &one))
	require.Equal(t, list.Data[1], one)
	require.Equal(t, []any{"model", h.now.Unix(), "evenkeel"}, []any{one.Object, one.Created, one.OwnedBy})
	require.Equal(t, []any{"model", "org/m", h.now.UTC().Format(time.RFC3339), "active"},
		[]any{one.Type, one.DisplayName, one.CreatedAt, one.Lifecycle})
	require.Equal(t, http.StatusNotFound, read("/v1/models/x", nil))
	require.Equal(t, http.StatusNotFound, read("/v1/models/half", nil), "no decode engine has it")
}

func TestHealthIsThatOfTheProxy(t *testing.T) {
	h := open(t)
	h.says(roster.Decode, decoder, false, "m")
	for _, ready := range []bool{true, false} {
		h.ready = ready
		want, word := http.StatusOK, "ok"
		if !ready {
			want, word = http.StatusServiceUnavailable, "unavailable"
		}
		ctx := asking("GET", "/health", "")
		h.Handle(ctx)
		require.Equal(t, want, ctx.Response.StatusCode())
		ctx = asking("GET", "/healthcheck", "")
		h.Handle(ctx)
		require.Equal(t, want, ctx.Response.StatusCode())
		require.JSONEq(t, `{"status":"`+word+`","prefill_instances":1,"decode_instances":1}`, string(ctx.Response.Body()))
	}
}
