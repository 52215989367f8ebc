package refengine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/lab/refengine/bind"
	"evenkeel/bench/lab/refengine/messages"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/refengine/responses"
	"evenkeel/bench/lab/refengine/tokens"
	"evenkeel/bench/lab/reftext"
	"evenkeel/mooncake"
)

// endpoint is what serves a path.
type endpoint struct {
	method string
	open   bool // asks for no API key
	serve  func(l *life, x *exchange) bool
}

// endpoints are the paths of an engine and, after the blank line, those of the
// reference engine alone.
var endpoints = map[string]endpoint{
	"/v1/chat/completions": {http.MethodPost, false, func(l *life, x *exchange) bool { return l.generate(x, true) }},
	"/v1/completions":      {http.MethodPost, false, func(l *life, x *exchange) bool { return l.generate(x, false) }},
	"/v1/responses": {http.MethodPost, false, func(l *life, x *exchange) bool {
		return l.translate(x, true, responses.Chat,
			&responses.Writer{Model: l.engine.cfg.Model.Name, TellsIncomplete: !l.engine.cfg.before(33)})
	}},
	"/v1/messages": {http.MethodPost, false, func(l *life, x *exchange) bool {
		chat := func(body []byte) ([]byte, error) { return messages.Chat(body, l.engine.cfg.minor()) }
		return l.translate(x, true, chat, &messages.Writer{Before32: l.engine.cfg.before(32)})
	}},
	mooncake.Tokens.Path():      {http.MethodPost, false, serveTokens},
	tokens.AbortPath:            {http.MethodPost, false, serveTokensAbort},
	"/v1/messages/count_tokens": {http.MethodPost, false, (*life).serveCount},
	"/v1/models":                {http.MethodGet, false, (*life).serveModels},
	"/v1/load_lora_adapter":     {http.MethodPost, false, func(l *life, x *exchange) bool { return serveAdapter(l, x, true) }},
	"/v1/unload_lora_adapter":   {http.MethodPost, false, func(l *life, x *exchange) bool { return serveAdapter(l, x, false) }},
	"/health":                   {http.MethodGet, true, (*life).serveHealth},
	"/version":                  {http.MethodGet, true, (*life).serveVersion},
	"/kv_event_sources":         {http.MethodGet, true, serveEventSources},
	scalingPath:                 {http.MethodPost, true, serveScaling},
	"/metrics":                  {http.MethodGet, true, (*life).serveMetrics},
	"/tokenize":                 {http.MethodPost, true, (*life).serveTokenize},
	"/reset_prefix_cache":       {http.MethodPost, true, func(l *life, x *exchange) bool { return l.pause.serveReset(x) }},
	"/pause":                    {http.MethodPost, true, func(l *life, x *exchange) bool { return l.pause.servePause(x) }},
	"/resume":                   {http.MethodPost, true, func(l *life, x *exchange) bool { return l.pause.serveResume(x) }},
	"/is_paused":                {http.MethodGet, true, func(l *life, x *exchange) bool { return l.pause.serveIsPaused(x) }},
	"/update_weights":           {http.MethodPost, true, func(l *life, x *exchange) bool { return l.pause.serveUpdateWeights(x) }},
	"/query":                    {http.MethodGet, true, (*life).serveQuery},

	pullPath:          {http.MethodPost, true, (*life).servePull},
	bind.RegisterPath: {http.MethodPost, true, func(l *life, x *exchange) bool { return l.bound.serveRegister(x) }},
	bind.PushPath:     {http.MethodPost, true, func(l *life, x *exchange) bool { return l.bound.servePush(x) }},
	"/stats":          {http.MethodGet, true, (*life).serveStats},
}

func (l *life) handle(x *exchange) bool {
	path := x.Req.URL.Path
	if told := l.engine.cfg.Hooks.OnRequest; told != nil {
		told(path, x.Req.Header)
	}
	if path == "/faults" { // three methods
		return l.serveFaults(x)
	}
	if says := l.withholds(x, path); says != "" {
		return x.Answer(503, typeJSON, fmt.Appendf(nil, `{"error":%q}`, says))
	}
	to, ok := endpoints[path]
	if path == "/fault_tolerance/status" && l.engine.cfg.FaultTolerance {
		to, ok = endpoint{http.MethodGet, true, (*life).serveFaultStatus}, true
	}
	if own, of := sglangEndpoints[path]; of && l.engine.cfg.Connector == SGLang {
		to, ok = own, own.method != ""
	}
	if serve, has := plain.Has(l.engine.cfg.Model.Task, path); has {
		to, ok = endpoint{http.MethodPost, false, func(l *life, x *exchange) bool { return l.servePlain(x, serve) }}, true
	} else if l.engine.cfg.Model.Task != plain.Generate && (strings.HasPrefix(path, "/v1/chat/") || path == "/v1/completions" ||
		path == "/v1/responses" || strings.HasPrefix(path, "/v1/messages")) {
		ok = false
	}
	switch {
	case !ok:
		return x.Answer(404, typeJSON, []byte(`{"detail":"Not Found"}`))
	case x.Req.Method != to.method && !(to.method == http.MethodGet && x.Req.Method == http.MethodHead):
		return x.Answer(405, typeJSON, []byte(`{"detail":"Method Not Allowed"}`), "allow", to.method)
	case !to.open && l.engine.cfg.Server.APIKey != "" && x.Req.Header.Get("Authorization") != "Bearer "+l.engine.cfg.Server.APIKey:
		return x.Answer(401, typeJSON, []byte(`{"error":"Unauthorized"}`))
	}
	return to.serve(l, x)
}

// withholds is what vLLM's ScalingMiddleware says in place of an answer; empty: nothing.
func (l *life) withholds(x *exchange, path string) string {
	if path == "/stats" || !l.engine.cfg.before(33) && (path == "/health" || path == scalingPath) {
		return ""
	}
	if _, hit := l.engine.faults.now(Retired, x.Port); hit {
		return "This data-parallel rank has been retired and is awaiting shutdown."
	}
	if _, hit := l.engine.faults.now(Scaling, x.Port); hit {
		return "The model is currently scaling. Please try again later."
	}
	return ""
}

// scalingPath tells how far a change of the number of ranks is.
const scalingPath = "/is_scaling_elastic_ep"

// serveScaling tells the phase from 0.33 on, and else only that the number of ranks does not
// change: while it does, nothing is answered. The value of the fault is the number that was asked
// for, and one below 0 says that the commit failed.
func serveScaling(l *life, x *exchange) bool {
	hit, now := l.engine.faults.now(Scaling, x.Port)
	told := map[string]any{"is_scaling_elastic_ep": now}
	if !l.engine.cfg.before(33) {
		told["phase"], told["epoch"], told["error"], told["requested_data_parallel_size"] = "idle", nil, nil, nil
		if now {
			told["phase"] = "committing"
		}
		if now && hit.Value != 0 {
			told["epoch"], told["requested_data_parallel_size"] = "1", math.Abs(hit.Value)
		}
		if hit.Value < 0 {
			told["phase"], told["error"], told["is_scaling_elastic_ep"] = "failed", "rank 3: RuntimeError", false
		}
	}
	return x.answerJSON(told)
}

// serveFaultStatus says whether the core of the port's rank has met a fault.
func (l *life) serveFaultStatus(x *exchange) bool {
	is := map[string]any{"id": l.engine.cfg.DPFirst + x.Port, "status": "healthy"}
	if _, hit := l.engine.faults.now(CoreFault, x.Port); hit {
		is["status"], is["fault_info"] = "unhealthy", "RuntimeError"
	}
	return x.answerJSON(map[string]any{"schema_version": 1, "total_engines": 1, "engines": []any{is}})
}

// translate answers the chat that a request of another endpoint means, in its words.
func (l *life) translate(x *exchange, chat bool, meant func(body []byte) ([]byte, error), in words) bool {
	x.words = in
	body, err := meant(x.Body)
	if err != nil {
		return x.fail(refuse(400, "%v", err).of("input"))
	}
	x.Body = body
	return l.generate(x, chat)
}

// serveTokens answers a completion by its token ids, if the engine was started for that.
func serveTokens(l *life, x *exchange) bool {
	cfg := &l.engine.cfg
	if cfg.Answers.NoScaleOut {
		return x.Answer(http.StatusForbidden, typeJSON, []byte(tokens.Disabled))
	}
	w := &tokens.Writer{Minor: cfg.minor()}
	return l.translate(x, false, func(body []byte) ([]byte, error) { return w.Completion(body, cfg.Model.MaxLen) }, w)
}

// serveTokensAbort ends the requests with these ids, each with what it has so far.
func serveTokensAbort(l *life, x *exchange) bool {
	ids, says := tokens.ReadAbort(x.Body)
	switch {
	case l.engine.cfg.Answers.NoScaleOut:
		return x.Answer(http.StatusForbidden, typeJSON, []byte(tokens.Disabled))
	case says != "":
		return x.Answer(http.StatusBadRequest, typeJSON, fmt.Appendf(nil, `{"detail":%q}`, says))
	}
	for _, id := range ids {
		l.bound.rids.Abort(id)
	}
	return serveOK(l, x)
}

// serveCount counts the tokens of the chat that a message means.
func (l *life) serveCount(x *exchange) bool {
	x.words = new(messages.Writer)
	body, err := messages.Count(x.Body)
	if err != nil {
		return x.fail(refuse(400, "%v", err))
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return x.fail(refuse(400, "body: %v", err))
	}
	p, err := reftext.RenderMembers(true, members)
	if err != nil {
		return x.fail(refuse(400, "%v", err))
	}
	n := p.Tokens()
	if l.engine.cfg.Connector == SGLang {
		return x.answerJSON(map[string]any{"input_tokens": n})
	}
	return x.answerJSON(map[string]any{"input_tokens": n, "context_management": map[string]int{"original_input_tokens": n}})
}

// servePlain answers a request that makes no completion. It takes as long as the prefill of
// as many tokens.
func (l *life) servePlain(x *exchange, serve func(plain.Request) plain.Answer) bool {
	a := serve(plain.Request{Model: l.engine.cfg.Model.Name, Names: append(l.adapters.of(x.Port), l.engine.cfg.Model.Aliases...),
		Header: x.Req.Header, Body: x.Body})
	if path := x.Req.URL.Path; a.Status == http.StatusOK && path != "/detokenize" &&
		!x.Pause(l.engine.cfg.Prompts.Base+time.Duration(a.Tokens)*l.engine.cfg.Prompts.PerToken) {
		return false
	}
	if a.Events == nil {
		return x.Answer(a.Status, a.Type, a.Body, a.Header...)
	}
	if !x.Stream(a.Type) {
		return false
	}
	for _, e := range append(a.Events, "[DONE]") {
		event := func(dst []byte) []byte { return append(append(append(dst, "data: "...), e...), "\n\n"...) }
		if !x.Event(event) || !x.Pause(l.engine.cfg.Steps.C0) {
			return false
		}
	}
	return x.EndStream()
}

func (l *life) serveHealth(x *exchange) bool { return l.holdPage(x) && serveOK(l, x) }

// holdPage waits as long as a busy API server takes to answer a page; false: the
// client has left.
func (l *life) holdPage(x *exchange) bool {
	busy := false
	for i := range l.prefills {
		r := l.rankStats(i)
		busy = busy || r.Running+r.Waiting > 0
	}
	if !busy {
		return true
	}
	hit := l.engine.faults.strike(func(r Rule) bool { return r.Fault == SlowPages && r.isAt(x.Port) })
	return len(hit) == 0 || x.Pause(hit[0].delay())
}

func serveOK(_ *life, x *exchange) bool { return x.Answer(200, "", nil) }

func (x *exchange) answerJSON(v any) bool {
	body, err := json.Marshal(v)
	if err != nil {
		return x.fail(refuse(500, "%v", err))
	}
	return x.Answer(200, typeJSON, body)
}

func (l *life) serveVersion(x *exchange) bool {
	return x.answerJSON(map[string]string{"version": l.engine.cfg.Version})
}

// serveEventSources says where the ranks of the port publish their KV events, as vLLM does from
// 0.32 on.
func serveEventSources(l *life, x *exchange) bool {
	cfg := l.engine.cfg
	if cfg.Connector == SGLang || cfg.before(32) {
		return x.Answer(404, typeJSON, []byte(`{"detail":"Not Found"}`))
	}
	first, last := x.Port, x.Port
	if cfg.DPMode == "internal" {
		first, last = 0, cfg.DPSize-1
	}
	told := map[string]any{}
	for rank := first; rank <= last; rank++ {
		if events, replay := l.engine.KVEvents(rank); events != "" {
			told[strconv.Itoa(cfg.DPFirst+rank)] = map[string]any{
				"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://" + events, "replay_endpoint": "tcp://" + replay,
				"buffer_steps": 10_000, "hwm": cfg.KVEvents.HWM, "max_queue_size": 100_000, "topic": "",
			}
		}
	}
	return x.answerJSON(told)
}

func (l *life) serveTokenize(x *exchange) bool {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(x.Body, &members); err != nil {
		return x.fail(refuse(400, "body: %v", err).of("body"))
	}
	f := &fields{m: members}
	if model := f.text("model"); model != "" {
		if _, ok := l.adapters.lists(&l.engine.cfg, x.Port, model); !ok {
			return x.fail(noSuchModel(model))
		}
	}
	_, chat := members["messages"]
	p, err := reftext.RenderMembers(chat, members)
	if err != nil {
		return x.fail(refuse(400, "%v", err).of("prompt"))
	}
	ids := appendList(nil, 0, len(p.IDs), func(dst []byte, i int) []byte { return appendInt(dst, int(p.IDs[i])) })
	return x.Answer(200, typeJSON,
		fmt.Appendf(nil, `{"count":%d,"max_model_len":%d,"tokens":%s,"token_strs":null}`, p.Tokens(), l.engine.cfg.Model.MaxLen, ids))
}

// serveQuery is the bootstrap server of vllm-mooncake.
func (l *life) serveQuery(x *exchange) bool {
	if l.engine.cfg.Connector != VLLMMooncake {
		return x.Answer(404, typeJSON, []byte(`{"detail":"Not Found"}`))
	}
	ranks := map[string]any{}
	for rank := range l.engine.cfg.DPSize {
		ranks[strconv.Itoa(rank)] = map[string]any{"engine_id": l.engineID(rank),
			"worker_addr": map[string]any{"0": map[string]string{"0": fmt.Sprintf("tcp://%s:%d", l.engine.cfg.Server.Advertise,
				l.ports[l.portOf(rank)])}}}
	}
	return x.answerJSON(ranks)
}

func (l *life) serveStats(x *exchange) bool { return x.answerJSON(l.engine.Stats()) }

// serveFaults reads, replaces and clears the rules: GET, POST, DELETE.
func (l *life) serveFaults(x *exchange) bool {
	e := l.engine
	switch x.Req.Method {
	case http.MethodGet:
		return x.answerJSON(map[string]any{"rules": e.faults.list(), "names": slices.Concat(faultNames, boundFaultNames, groupFaultNames)})
	case http.MethodDelete:
		_ = e.SetFaults() // no rule, no error
		return x.answerJSON(map[string]any{"rules": []Rule{}})
	case http.MethodPost:
	default:
		return x.Answer(405, typeJSON, []byte(`{"detail":"Method Not Allowed"}`), "allow", "GET, POST, DELETE")
	}
	var ask struct {
		Rules []Rule `json:"rules"`
	}
	dec := json.NewDecoder(bytes.NewReader(x.Body))
	dec.DisallowUnknownFields()
	var into any = &ask
	if bytes.HasPrefix(bytes.TrimSpace(x.Body), []byte("[")) {
		into = &ask.Rules
	}
	err := dec.Decode(into)
	if err == nil {
		err = e.SetFaults(ask.Rules...)
	}
	if err != nil {
		return x.fail(refuse(400, "faults: %v", err))
	}
	return x.answerJSON(map[string]any{"rules": e.faults.list()})
}
