package refengine

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"evenkeel/bench/lab/refengine/bind"
	"evenkeel/bench/lab/reftext"
	"evenkeel/internal/rawjson"
)

// request is a chat or completion request, checked as strictly as an engine does.
type request struct {
	chat   bool
	model  string // as its answer calls it
	leg    string
	id     string // of the answer: prefix and the client's X-Request-Id
	rank   int
	prompt reftext.Prompt
	kv     *kvParams
	room   *bind.Room // where the legs meet; nil: not of SGLang
	reply  *answer    // the one that it gets, once it has begun
	salt   string     // cache_salt: its blocks are its own in prefix caches

	stream, includeUsage, continuousUsage bool
	maxTokens, minTokens                  int
	ignoreEOS, echo, returnIDs            bool
	hideReasoning                         bool
	stop                                  []string
	stopIDs                               []int32
	logprobs                              int // top ones a token, -1 = none
	tool                                  string
	rows                                  bool // logprobs of the prompt's tokens are asked for
	named                                 bool // the request names that tool
	echoText                              string

	troubles troubles
}

// fields reads members of a JSON object and keeps the first error.
type fields struct {
	m     map[string]json.RawMessage
	where string
	err   *apiError
}

// member leaves out nulls, as a Python default of None does.
func (f *fields) member(key string) (json.RawMessage, bool) {
	raw, ok := f.m[key]
	return raw, ok && string(raw) != "null"
}

func (f *fields) fail(key, why string) {
	if f.err == nil {
		f.err = refuse(400, "%s%s: %s", f.where, key, why).of(f.where + key)
	}
}

func read[T any](f *fields, key, why string) (v T) {
	if raw, ok := f.member(key); ok && json.Unmarshal(raw, &v) != nil {
		f.fail(key, why)
	}
	return v
}

func (f *fields) boolean(key string) bool { return read[bool](f, key, "not a boolean") }
func (f *fields) text(key string) string  { return read[string](f, key, "not a string") }
func (f *fields) number(key string) int   { return read[int](f, key, "not an integer") }
func (f *fields) ids(key string) []int32  { return read[[]int32](f, key, "not a list of token ids") }

// between reads an integer in a range; absent is def.
func (f *fields) between(key string, low, high, def int) int {
	if _, ok := f.member(key); !ok {
		return def
	}
	v := f.number(key)
	if v < low || v > high {
		f.fail(key, "out of range")
	}
	return v
}

// real reads a float in a range.
func (f *fields) real(key string, low, high float64) {
	if v := read[float64](f, key, "not a number"); v < low || v > high {
		f.fail(key, "out of range")
	}
}

// parse reads and checks a body.
func (l *life) parse(chat bool, port int, body []byte) (*request, *apiError) {
	cfg := l.engine.cfg
	if !utf8.Valid(body) {
		return nil, refuse(400, "body: not UTF-8").of("body")
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, refuse(400, "body: %v", err).of("body")
	}
	f := &fields{m: m}
	r := &request{chat: chat, leg: LegPlain, logprobs: -1}
	model, listed := f.text("model"), false
	r.model, listed = l.adapters.lists(&cfg, port, model)
	if cfg.Connector == SGLang {
		if err := r.enter(m, cfg.Role); err != nil {
			return nil, err
		}
		adapter, err := l.adapters.adapterOf(&cfg, port, model, f.text("lora_path"))
		if err != nil {
			return nil, err
		}
		if adapter != "" {
			l.engine.count.Adapted.Add(1)
		}
	} else if raw, ok := f.member("kv_transfer_params"); ok && cfg.Role != Aggregated {
		kv, err := readKV(cfg, raw)
		if err != nil {
			return nil, err
		}
		r.setLeg(kv)
	}
	if f.err == nil && !listed {
		return r, noSuchModel(model)
	}
	r.returnIDs = f.boolean("return_token_ids") && !cfg.Answers.NoTokenIDs
	if err := r.render(f, chat); err != nil {
		return nil, err
	}
	if r.salt = f.text("cache_salt"); r.salt == "" {
		if _, given := f.member("cache_salt"); given {
			f.fail("cache_salt", "must be a non-empty string")
		}
	}
	if r.output(f, cfg); r.room != nil && chat && r.stream && r.returnIDs {
		f.fail("return_token_ids", "not supported with streaming on /v1/chat/completions")
	}
	r.sampling(f)
	r.tools(f)
	if f.err != nil {
		return nil, f.err
	}
	if err := r.fit(cfg); err != nil {
		return r, err
	}
	return r, r.check(cfg)
}

// drains says whether this is a decode whose one token is not read and whose
// blocks no other request finds.
func (r *request) drains() bool {
	return r.leg == LegDecode && !r.stream && r.maxTokens == 1 && r.salt != ""
}

func (r *request) setLeg(kv *kvParams) {
	if kv == nil {
		return
	}
	r.kv = kv
	switch {
	case kv.produce:
		r.leg = LegProbe
	case kv.consume:
		r.leg = LegDecode
	}
}

func (r *request) render(f *fields, chat bool) *apiError {
	prompt, err := reftext.RenderMembers(chat, f.m)
	if err != nil {
		why := strings.TrimPrefix(err.Error(), "reftext: ")
		param, _, _ := strings.Cut(why, ":")
		return refuse(400, "%s", why).of(param)
	}
	if r.kv != nil && len(r.kv.promptIDs) > 0 { // the client's template and text are left out (vllm#48145)
		var seed *int64
		if _, ok := f.member("seed"); ok {
			v := read[int64](f, "seed", "not an integer")
			seed = &v
		}
		prompt = reftext.OfIDs(r.kv.promptIDs, seed)
	}
	r.prompt = prompt
	r.echo = f.boolean("echo") && !chat
	if r.echo && (!r.returnIDs || r.room != nil) { // vLLM leaves the text of the prompt out beside its ids
		_ = json.Unmarshal(f.m["prompt"], &r.echoText) // a list of ids has no text to echo
	}
	return nil
}

func (r *request) output(f *fields, cfg Config) {
	r.stream = f.boolean("stream")
	if raw, ok := f.member("stream_options"); ok {
		if !r.stream {
			f.fail("stream_options", "only allowed when stream is true")
		}
		options := &fields{where: "stream_options."}
		if json.Unmarshal(raw, &options.m) != nil {
			f.fail("stream_options", "not an object")
		}
		r.includeUsage = options.boolean("include_usage")
		r.continuousUsage = r.includeUsage && options.boolean("continuous_usage_stats") && !cfg.Answers.NoContinuousUsage
		if f.err == nil {
			f.err = options.err
		}
	}
	if _, ok := f.member("include_reasoning"); ok {
		r.hideReasoning = !f.boolean("include_reasoning")
	}
	if n := f.between("n", 1, math.MaxInt32, 1); n != 1 {
		f.fail("n", "only 1 is supported")
	}
	def := 16
	if r.chat {
		def = cfg.Model.MaxLen - r.prompt.Tokens()
	}
	least := 1
	if !r.chat && r.echo { // one is computed, and left out
		least = 0
	}
	r.maxTokens = max(1, f.between("max_tokens", least, math.MaxInt32, def))
	if r.chat {
		r.maxTokens = f.between("max_completion_tokens", 1, math.MaxInt32, r.maxTokens)
	}
	r.minTokens = f.between("min_tokens", 0, math.MaxInt32, 0)
	r.ignoreEOS = f.boolean("ignore_eos")
	rows, asked := f.member("prompt_logprobs")
	r.rows = asked && string(rows) != "null"
	if r.rows && r.stream && string(rows) != "0" {
		f.fail("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
	}
	if !r.chat {
		r.logprobs = f.between("logprobs", 0, 20, -1)
		r.rows = r.rows || r.echo && r.logprobs >= 0
		return
	}
	top := f.between("top_logprobs", 0, 20, 0)
	if f.boolean("logprobs") {
		r.logprobs = top
	} else if top > 0 {
		f.fail("top_logprobs", "needs logprobs to be true")
	}
}

func (r *request) sampling(f *fields) {
	f.real("temperature", 0, math.MaxFloat64)
	f.real("top_p", 0, 1)
	f.real("min_p", 0, 1)
	f.real("presence_penalty", -2, 2)
	f.real("frequency_penalty", -2, 2)
	if raw, ok := f.member("stop"); ok {
		var one string
		if json.Unmarshal(raw, &one) == nil {
			r.stop = []string{one}
		} else {
			r.stop = read[[]string](f, "stop", "not a string or a list of strings")
		}
		for _, s := range r.stop {
			if s == "" {
				f.fail("stop", "an empty string")
			}
		}
	}
	r.stopIDs = read[[]int32](f, "stop_token_ids", "not a list of token ids")
	read[map[string]float64](f, "logit_bias", "not an object of numbers")
}

// tool is a function that an answer may call.
type tool struct {
	Function struct {
		Name string `json:"name"`
	} `json:"function"`
}

// tools decides whether the answer is a tool call: when one is required or named.
func (r *request) tools(f *fields) {
	raw, ok := f.member("tools")
	if !ok || !r.chat {
		return
	}
	var tools []tool
	if json.Unmarshal(raw, &tools) != nil || len(tools) == 0 {
		f.fail("tools", "not a list of tools")
		return
	}
	choice, ok := f.member("tool_choice")
	if !ok {
		return
	}
	var word string
	if json.Unmarshal(choice, &word) == nil {
		switch word {
		case "required":
			r.tool = tools[0].Function.Name
		case "auto", "none":
		default:
			f.fail("tool_choice", "not auto, none, required or a function")
		}
		return
	}
	var named tool
	if json.Unmarshal(choice, &named) != nil {
		f.fail("tool_choice", "not a string or an object")
		return
	}
	for _, t := range tools {
		if t.Function.Name == named.Function.Name {
			r.tool, r.named = t.Function.Name, true
		}
	}
	if r.tool == "" {
		f.fail("tool_choice", "names no tool of the request")
	}
}

// fit checks prompt and answer against the context. From 0.32 on vLLM cuts what is
// asked for to what the prompt leaves; before, that is an error.
func (r *request) fit(cfg Config) *apiError {
	n := r.prompt.Tokens()
	switch most := cfg.Model.MaxLen; {
	case cfg.before(32) && (n+r.maxTokens > most || r.maxTokens < 1):
		return refuse(400, "This model's maximum context length is %d tokens. However, you requested %d tokens in the messages and %d for the "+
			"completion.",
			most, n, r.maxTokens)
	case r.maxTokens > most:
		return refuse(400, "max_tokens=%d cannot be greater than max_model_len=%d. Please request fewer output tokens.", r.maxTokens,
			most).of("max_tokens")
	case n > most:
		return refuse(400, "This model's maximum context length is %d tokens. However, your prompt contains %d input tokens, which exceeds this "+
			"limit even without any "+
			"output tokens.", most, n).of("input_tokens")
	case n == most:
		return refuse(400, "max_tokens must be at least 1, got 0.").of("max_tokens")
	}
	r.maxTokens = min(r.maxTokens, cfg.Model.MaxLen-n)
	return nil
}

// check holds what is wrong only in combination.
func (r *request) check(cfg Config) *apiError {
	if r.minTokens > r.maxTokens {
		return refuse(400, "min_tokens: must be less than or equal to max_tokens=%d, got %d.", r.maxTokens, r.minTokens)
	}
	if blocks(r.prompt.Tokens()+cfg.Steps.TokensPerChunk) > cfg.KV.Tokens/blockSize {
		return refuse(400, "the prompt's %d tokens do not fit the KV cache of %d.", r.prompt.Tokens(), cfg.KV.Tokens)
	}
	switch {
	case r.leg == LegProbe && cfg.Role == Decode:
		return refuse(400, "kv_transfer_params: do_remote_decode on a decode engine")
	case r.leg == LegDecode && cfg.Role == Prefill:
		return refuse(400, "kv_transfer_params: do_remote_prefill on a prefill engine")
	case r.leg == LegProbe && r.stream && r.room == nil:
		return refuse(400, "stream: a probe's hand-off does not come with a stream")
	}
	return nil
}

// plan is how an answer goes.
type plan struct {
	answer     uint64
	from       int // index of its first token, > 0 when it resumes another
	want       int // tokens
	finish     string
	core       string // the same without stop strings, which the engine's core does not see: it decides on the hand-off
	noCall     bool   // a stop string leaves nothing of the tool's arguments
	stopReason string // JSON
	text       string // all visible text, only with stop strings
	ends       []int  // bytes of text that tokens 1..i make, only with stop strings
	holdBack   int    // bytes of text that may be the start of a stop string
}

// plan follows the order of the engine's stop check: min_tokens, EOS, stop
// token, length; stop strings are the detokeniser's.
func (r *request) plan(answer uint64) plan {
	p := plan{answer: answer, from: r.prompt.Resumed, want: r.maxTokens, finish: "length", stopReason: "null"}
	natural := max(1, r.minTokens, reftext.NaturalLength(answer)-p.from)
	early := natural < p.want || r.minTokens < p.want // up to min_tokens no end of sequence is drawn: the length ends the answer then
	if !r.ignoreEOS && natural <= p.want && early {
		p.want, p.finish = natural, "stop"
	}
	for i := max(0, r.minTokens-1); i < p.want && len(r.stopIDs) > 0; i++ {
		for _, id := range r.stopIDs {
			if reftext.TokenID(answer, p.from+i) == id {
				p.want, p.finish, p.stopReason = i+1, "stop", string(appendInt(nil, int(id)))
			}
		}
	}
	p.core = p.finish
	if len(r.stop) > 0 {
		want := p.want
		p.stopAt(r.stop, r.minTokens)
		if r.tool != "" && slices.Contains(r.stop, reftext.ToolPrefix[:1]) { // nothing of the call is left
			p.want, p.finish, p.stopReason, p.noCall = 1, "stop", `"`+reftext.ToolPrefix[:1]+`"`, true
		}
		if p.want < want {
			p.core = "stop"
		}
	}
	if r.tool != "" && p.finish == "stop" && !p.noCall {
		p.finish = "tool_calls"
	}
	return p
}

// stopAt cuts the text before the first stop string that comes after min tokens.
func (p *plan) stopAt(stops []string, least int) {
	var text []byte
	for i := range p.want {
		before := len(text)
		text = reftext.AppendToken(text, reftext.TokenID(p.answer, p.from+i))
		p.ends = append(p.ends, len(text))
		for _, s := range stops {
			p.holdBack = max(p.holdBack, len(s)-1)
			first := max(0, before-len(s)+1) // a match must end in this token
			if at := strings.Index(string(text[first:]), s); at >= 0 && i+1 >= least {
				p.want, p.finish, p.text = i+1, "stop", string(text[:first+at])
				p.stopReason = `"` + string(rawjson.AppendEscaped(nil, s)) + `"`
				return
			}
		}
	}
	p.text = string(text)
}

// visible is how much of the text may be shown after n tokens.
func (p *plan) visible(n int) int {
	switch {
	case n >= p.want:
		return len(p.text)
	case n == 0:
		return 0
	}
	end := min(len(p.text), max(0, p.ends[n-1]-p.holdBack))
	for end > 0 && end < len(p.text) && !utf8.RuneStart(p.text[end]) {
		end--
	}
	return end
}
