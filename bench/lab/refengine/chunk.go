package refengine

import (
	"strconv"
	"time"
	"unicode/utf8"

	"evenkeel/bench/lab/refengine/bind"
	"evenkeel/bench/lab/reftext"
	"evenkeel/internal/rawjson"
)

// writer holds the parts of a request's JSON that do not change from chunk to chunk.
type writer struct {
	head    []byte // `data: {"id":...,"choices":[`
	cached  int    // tokens the prefix cache had
	details bool   // report them
	field   string // of reasoning
	kv      bool   // each chunk with tokens has kv_transfer_params, which decode engines leave null
	created int64
	model   string
	scratch []byte
}

func newWriter(cfg Config, r *request) writer {
	w := writer{kv: !cfg.before(33) && cfg.Connector != SGLang, details: cfg.Answers.PromptTokensDetails, field: cfg.Answers.ReasoningField,
		created: time.Now().Unix(), model: r.model}
	if r.leg == LegDecode {
		w.cached = r.prompt.Tokens() // a decode engine counts pulled KV as cached
	}
	object := "text_completion"
	if r.chat {
		object = "chat.completion.chunk"
	}
	w.head = w.appendHead([]byte("data: "), r, object)
	return w
}

func (w *writer) appendHead(dst []byte, r *request, object string) []byte {
	dst = append(rawjson.AppendEscaped(append(dst, `{"id":"`...), r.id), `","object":"`...)
	dst = append(append(dst, object...), `","created":`...)
	dst = append(strconv.AppendInt(dst, w.created, 10), `,"model":"`...)
	return append(rawjson.AppendEscaped(dst, w.model), `","choices":[`...)
}

func appendInt(dst []byte, n int) []byte { return strconv.AppendInt(dst, int64(n), 10) }

// appendList is a JSON list of the items [from, to).
func appendList(dst []byte, from, to int, item func(dst []byte, i int) []byte) []byte {
	dst = append(dst, '[')
	for i := from; i < to; i++ {
		if i > from {
			dst = append(dst, ',')
		}
		dst = item(dst, i)
	}
	return append(dst, ']')
}

// appendRole is the first chunk of a chat; it comes with the first engine output.
func (a *answer) appendRole(dst []byte) []byte {
	dst = append(append(dst, a.head...), `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null`...)
	if a.sglang() {
		return a.endChunk(append(dst, `,"matched_stop":null}]`...), 0)
	}
	dst = append(a.appendChunkUsage(append(dst, "}]"...), 0), ',')
	return append(a.appendPromptIDs(dst, a.r.returnIDs), `,"prompt_text":null}`+"\n\n"...)
}

func (a *answer) appendPromptIDs(dst []byte, told bool) []byte {
	if a.sglang() && (a.r.chat || !told) {
		return dst[:len(dst)-1] // it has no such member: the comma in front of it goes
	}
	if !told {
		return append(dst, `"prompt_token_ids":null`...)
	}
	ids := a.r.prompt.IDs
	return appendList(append(dst, `"prompt_token_ids":`...), 0, len(ids), func(dst []byte, i int) []byte { return appendInt(dst, int(ids[i])) })
}

// endChunk closes an event of which made tokens are told so far.
func (a *answer) endChunk(dst []byte, made int) []byte {
	return append(a.appendChunkUsage(dst, made), "}\n\n"...)
}

func (a *answer) appendChunkUsage(dst []byte, made int) []byte {
	switch {
	case a.usageAll && (made > a.sent || !a.sglang()): // of SGLang only chunks with content have it
		dst = a.appendUsageObject(append(dst, `,"usage":`...), made, false)
	case a.sglang():
		dst = append(dst, `,"usage":null`...)
	}
	return dst
}

func (a *answer) appendUsageObject(dst []byte, made int, final bool) []byte {
	prompt := a.prompt
	dst = appendInt(append(dst, `{"prompt_tokens":`...), prompt)
	dst = appendInt(append(dst, `,"total_tokens":`...), prompt+made)
	dst = appendInt(append(dst, `,"completion_tokens":`...), made)
	switch {
	case a.sglang():
		return a.appendSGLangUsage(dst, made, final)
	case final && a.details && a.r.chat:
		dst = append(appendInt(append(dst, `,"prompt_tokens_details":{"cached_tokens":`...), a.cached), `,"created_cache_tokens":0}`...)
	case final && a.details:
		dst = append(appendInt(append(dst, `,"prompt_tokens_details":{"cached_tokens":`...), a.cached), '}')
	case !final && a.r.chat:
		dst = append(dst, `,"completion_tokens_details":null`...)
	}
	return append(dst, '}')
}

// appendUsage is the last event before [DONE], without choices.
func (a *answer) appendUsage(dst []byte) []byte {
	dst = append(append(dst, a.head...), `],"usage":`...)
	dst = a.appendUsageObject(dst, a.sent, true)
	if !a.sglang() {
		dst = append(dst, fingerprint...)
	}
	return append(dst, "}\n\n"...)
}

// appendTokens is a chunk with the tokens from sent to to.
func (a *answer) appendTokens(dst []byte, to int, reasoning bool, finish string) []byte {
	dst = append(dst, a.head...)
	switch {
	case !a.r.chat:
		dst = append(dst, `{"index":0,"text":"`...)
	case reasoning:
		dst = append(append(append(dst, `{"index":0,"delta":{"`...), a.field...), `":"`...)
	default:
		dst = append(dst, `{"index":0,"delta":{"content":"`...)
	}
	if a.r.echo && a.sent == 0 { // the prompt's text stands before the first token's
		dst = rawjson.AppendEscaped(dst, a.r.echoText)
	}
	if !reasoning || !a.r.hideReasoning {
		dst = a.appendText(dst, a.sent, to)
	}
	dst = append(dst, '"')
	if a.r.chat {
		dst = append(dst, '}')
	}
	dst = a.appendLogprobs(append(dst, `,"logprobs":`...), a.sent, to)
	dst = a.appendReason(dst, finish, a.stopReason, !a.r.chat)
	if !a.r.chat { // an echo of vLLM has the prompt's ids even if they were not asked for
		dst = a.appendPromptIDs(append(dst, ','), a.sent == 0 && (a.r.returnIDs || a.r.echo && !a.sglang()))
	}
	dst = a.endChoice(a.appendIDs(append(dst, ','), a.sent, to), finish)
	switch {
	case a.kv && finish != "" && a.handBack != nil:
		dst = a.appendHandBack(append(dst, `,"kv_transfer_params":`...), to)
	case a.kv:
		dst = append(dst, `,"kv_transfer_params":null`...)
	}
	return a.endChunk(dst, to)
}

// fingerprint names an engine's version and setup.
const fingerprint = `,"system_fingerprint":"vllm-reference"`

// endChoice closes the choice, and with it the list. The fingerprint stands in the last event of a
// stream.
func (a *answer) endChoice(dst []byte, finish string) []byte {
	dst = append(dst, "}]"...)
	if finish != "" && !a.r.includeUsage && !a.sglang() {
		dst = append(dst, fingerprint...)
	}
	return dst
}

// appendReason tells why the answer ends. In the chunks of a chat before the end, there is no
// stop_reason.
func (a *answer) appendReason(dst []byte, finish, stopReason string, always bool) []byte {
	if a.sglang() {
		return bind.AppendReason(dst, finish, stopReason)
	}
	dst = append(dst, `,"finish_reason":`...)
	if finish == "" {
		dst = append(dst, "null"...)
		if always {
			dst = append(dst, `,"stop_reason":null`...)
		}
		return dst
	}
	dst = append(append(append(dst, '"'), finish...), `","stop_reason":`...)
	return append(dst, stopReason...)
}

// appendText is the visible text of the tokens [from, to).
func (a *answer) appendText(dst []byte, from, to int) []byte {
	if a.ends != nil {
		start := 0
		if from > 0 {
			start = a.visible(from)
		}
		return rawjson.AppendEscaped(dst, a.text[start:a.visible(to)])
	}
	for i := from; i < to; i++ {
		if a.breaks && a.rule.Fault == Recomputed && a.rule.Text && i == a.rule.AfterTokens-1 {
			break // comes with the finish chunk
		}
		dst = reftext.AppendTokenJSON(dst, a.token(i))
	}
	return dst
}

func (a *answer) token(i int) int32 {
	key := a.plan.answer
	if a.spoilt != nil && a.spoilt.Load() {
		key ^= badKV
	}
	return reftext.TokenID(key, a.from+i)
}

// heldBack is the text that a recomputed request's last chunk flushes.
func (a *answer) heldBack() string {
	if !a.rule.Text || a.rule.AfterTokens < 1 || a.ends != nil {
		return ""
	}
	return string(reftext.AppendToken(nil, a.token(a.rule.AfterTokens-1)))
}

func (a *answer) appendIDs(dst []byte, from, to int) []byte {
	if a.sglang() && !a.r.returnIDs {
		return dst[:len(dst)-1] // as in appendPromptIDs
	}
	if !a.r.returnIDs {
		return append(dst, `"token_ids":null`...)
	}
	if rule, hit := a.r.troubles.find(Swallow, ""); hit && from == rule.AfterTokens {
		from = to - 1 // the parser's chunk has the ids of its own token only
	}
	return appendList(append(dst, `"token_ids":`...), from, to, func(dst []byte, i int) []byte { return appendInt(dst, int(a.token(i))) })
}

// appendFinish is a chunk without tokens that says how the answer ends.
func (a *answer) appendFinish(dst []byte, finish, stopReason, text string) []byte {
	dst = append(dst, a.head...)
	if a.r.chat {
		dst = append(dst, `{"index":0,"delta":{`...)
		if text != "" {
			dst = append(rawjson.AppendEscaped(append(dst, `"content":"`...), text), '"')
		}
		dst = append(dst, `},"logprobs":null`...)
	} else {
		dst = append(rawjson.AppendEscaped(append(dst, `{"index":0,"text":"`...), text), `","logprobs":null`...)
	}
	dst = a.appendReason(dst, finish, stopReason, true)
	if !a.r.chat {
		dst = a.appendPromptIDs(append(dst, ','), false)
	}
	dst = a.appendIDs(append(dst, ','), a.sent, a.sent)
	dst = a.endChoice(dst, finish)
	if a.kv && a.handBack != nil {
		dst = a.appendHandBack(append(dst, `,"kv_transfer_params":`...), a.sent)
	}
	return a.endChunk(dst, a.sent)
}

func (a *answer) appendToolHead(dst []byte) []byte {
	dst = append(append(dst, a.head...), `{"index":0,"delta":{"content":null,"tool_calls":[{"id":"call_`...)
	dst = append(rawjson.AppendEscaped(dst, a.r.id), `","type":"function","index":0,"function":{"name":"`...)
	dst = append(rawjson.AppendEscaped(dst, a.r.tool), `"}}]},"logprobs":null,"finish_reason":null,`...)
	dst = append(a.appendIDs(dst, a.sent, a.sent), "}]"...)
	return a.endChunk(dst, a.sent)
}

func (a *answer) appendToolTokens(dst []byte, to int, last bool) []byte {
	dst = append(append(dst, a.head...), `{"index":0,"delta":{"content":null,"tool_calls":[{"index":0,"function":{"arguments":"`...)
	dst = a.appendArguments(dst, a.sent, to, last)
	dst = append(dst, `"}}]}`...)
	dst = a.appendLogprobs(append(dst, `,"logprobs":`...), a.sent, to)
	dst = a.appendIDs(append(dst, `,"finish_reason":null,`...), a.sent, to)
	return a.endChunk(append(dst, "}]"...), to)
}

// appendArguments is a piece of the arguments: JSON inside a JSON string.
func (a *answer) appendArguments(dst []byte, from, to int, last bool) []byte {
	s := a.scratch[:0]
	if from == a.reasoningEnd() {
		s = append(s, reftext.ToolPrefix...)
	}
	s = a.appendText(s, from, to)
	if last {
		s = append(s, reftext.ToolSuffix...)
	}
	a.scratch = s
	return rawjson.AppendEscaped(dst, string(s))
}

// appendLogprobs tells probabilities that are made up but the same every time.
func (a *answer) appendLogprobs(dst []byte, from, to int) []byte {
	if a.r.logprobs < 0 {
		return append(dst, "null"...)
	}
	if !a.r.chat {
		return a.appendCompletionLogprobs(dst, from, to)
	}
	dst = appendList(append(dst, `{"content":`...), from, to, func(dst []byte, i int) []byte {
		dst = append(appendLogprob(dst, a.token(i), 0), `,"top_logprobs":`...)
		dst = appendList(dst, 0, a.r.logprobs, func(dst []byte, k int) []byte { return append(appendLogprob(dst, a.token(i), k), '}') })
		return append(dst, '}')
	})
	return append(dst, '}')
}

// appendLogprob is a token's entry, left open. Alternative k is less likely.
func appendLogprob(dst []byte, id int32, k int) []byte {
	alternative := reftext.FirstAnswerID + (id-reftext.FirstAnswerID+int32(k))%(reftext.VocabSize-reftext.FirstAnswerID)
	dst = append(reftext.AppendTokenJSON(append(dst, `{"token":"`...), alternative), `","logprob":`...)
	dst = append(strconv.AppendFloat(dst, logprob(id, k), 'f', 4, 64), `,"bytes":`...)
	text := reftext.AppendToken(nil, alternative)
	return appendList(dst, 0, len(text), func(dst []byte, i int) []byte { return appendInt(dst, int(text[i])) })
}

func logprob(id int32, k int) float64 { return -float64(id%1000)/1000 - float64(k) }

func (a *answer) appendCompletionLogprobs(dst []byte, from, to int) []byte {
	at := 0 // in runes
	length := func(i int) int { return utf8.RuneCount(reftext.AppendToken(nil, a.token(i))) }
	for i := range from {
		at += length(i)
	}
	token := func(dst []byte, i int) []byte {
		return append(reftext.AppendTokenJSON(append(dst, '"'), a.token(i)), '"')
	}
	prob := func(dst []byte, i int) []byte { return strconv.AppendFloat(dst, logprob(a.token(i), 0), 'f', 4, 64) }
	dst = appendList(append(dst, `{"text_offset":`...), from, to, func(dst []byte, i int) []byte {
		dst = appendInt(dst, at)
		at += length(i)
		return dst
	})
	dst = appendList(append(dst, `,"token_logprobs":`...), from, to, prob)
	dst = appendList(append(dst, `,"tokens":`...), from, to, token)
	dst = appendList(append(dst, `,"top_logprobs":`...), from, to, func(dst []byte, i int) []byte {
		return append(prob(append(token(append(dst, '{'), i), ':'), i), '}')
	})
	return append(dst, '}')
}
