package gateway_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

const messagesPath = "/v1/messages"

// wordsOf is the body of a message to a prompt, with more members.
func wordsOf(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, more, model, prompt)
}

// takesMessages are engines that take hand-offs of messages.
func takesMessages(o options) options {
	o = nixl(o)
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			if list[i].Version == "" {
				list[i].Version = "0.32.0"
			}
		}
	}
	return o
}

type spent struct {
	Input  int `json:"input_tokens"`
	Output int `json:"output_tokens"`
	Cached int `json:"cache_read_input_tokens"`
}

// message is an answer in one piece, or the sum of a stream's events.
type message struct {
	ID, Type, Role, Model string
	Stop                  string `json:"stop_reason"`
	Usage                 spent
	Content               []struct {
		Type, Text, Thinking, Name, ID string
		Input                          json.RawMessage
	}
	first spent  // of message_start
	args  string // of tools
	kinds []string
	fail  string // type of its error event
}

func (m message) text() (text string) {
	for _, block := range m.Content {
		text += block.Text
	}
	return text
}

// readMessage reads a stream, and holds it to what Anthropic's clients rest on.
func readMessage(t *testing.T, body string) (got message) {
	t.Helper()
	body = strings.ReplaceAll(body, "\r\n", "\n")
	require.True(t, strings.HasSuffix(body, "\n\n"), "it ends behind an event: %q", body)
	require.NotContains(t, body, "[DONE]")
	require.NotContains(t, body, "kv_transfer_params")
	for block := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		for strings.HasPrefix(block, ":") { // a comment
			_, block, _ = strings.Cut(block, "\n")
		}
		if block == "" {
			continue
		}
		head, data, ok := strings.Cut(block, "\ndata: ")
		require.True(t, ok, block)
		var e struct {
			Type    string
			Index   int
			Message json.RawMessage
			Block   json.RawMessage `json:"content_block"`
			Delta   struct {
				Type, Text, Thinking string
				JSON                 string  `json:"partial_json"`
				Stop                 *string `json:"stop_reason"`
			}
			Usage spent
			Error struct{ Type, Message string }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		require.Equal(t, "event: "+e.Type, head)
		require.Equal(t, len(got.kinds) == 0, e.Type == "message_start" || e.Type == "error" && len(got.kinds) == 0, "%s stands first, and once", block)
		got.kinds = append(got.kinds, e.Type)
		switch e.Type {
		case "message_start":
			require.NoError(t, json.Unmarshal(e.Message, &got))
			got.first = got.Usage
		case "content_block_start":
			require.Len(t, got.Content, e.Index)
			got.Content = slices.Grow(got.Content, 1)[:e.Index+1]
			require.NoError(t, json.Unmarshal(e.Block, &got.Content[e.Index]))
		case "content_block_delta":
			got.Content[e.Index].Text += e.Delta.Text
			got.Content[e.Index].Thinking += e.Delta.Thinking
			got.args += e.Delta.JSON
		case "message_delta":
			require.NotNil(t, e.Delta.Stop)
			got.Stop, got.Usage = *e.Delta.Stop, e.Usage
		case "error":
			got.fail = e.Error.Type
			require.NotEmpty(t, e.Error.Message)
		}
	}
	ends := func(kind string) bool { return kind == "message_stop" || kind == "error" }
	require.True(t, ends(got.kinds[len(got.kinds)-1]), "an end that says how it ended: %v", got.kinds)
	require.Len(t, slices.DeleteFunc(slices.Clone(got.kinds), func(kind string) bool { return !ends(kind) }), 1)
	return got
}

func readWholeMessage(t *testing.T, body string) (got message) {
	t.Helper()
	require.NotContains(t, body, "kv_transfer_params")
	require.NoError(t, json.Unmarshal([]byte(body), &got), body)
	require.Equal(t, "message", got.Type)
	require.Equal(t, "assistant", got.Role)
	return got
}

// refused reads an error in Anthropic's shape.
func refused(t *testing.T, body string) (kind, says string) {
	t.Helper()
	var got struct {
		Type  string
		Error struct{ Type, Message string }
	}
	require.NoError(t, json.Unmarshal([]byte(body), &got), body)
	require.Equal(t, "error", got.Type, body)
	require.NotEmpty(t, got.Error.Message)
	return got.Error.Type, got.Error.Message
}

func TestMessages(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{configure: func(cfg *config.Config) { cfg.ExposeRoute = true }}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	t.Run("not streamed", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, ""))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
		got := readWholeMessage(t, r.body)
		wholeText(t, key, got.text())
		require.Equal(t, "end_turn", got.Stop)
		require.Equal(t, model, got.Model)
		require.Equal(t, spent{Input: 300, Output: natural}, got.Usage)
	})
	t.Run("streamed, with prefill's cached tokens, and both engines had a part in it", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`), "X-Request-Id", "message")
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"))
		require.Equal(t, "text/event-stream; charset=utf-8", r.header.Get("Content-Type"))
		got := readMessage(t, r.body)
		require.Equal(t, []string{"message_start", "content_block_start", "content_block_delta"}, got.kinds[:3])
		require.Equal(t, []string{"content_block_stop", "message_delta", "message_stop"}, got.kinds[len(got.kinds)-3:])
		require.NotEmpty(t, got.ID)
		wholeText(t, key, got.text())
		require.Equal(t, "end_turn", got.Stop)
		require.Equal(t, spent{Input: 300}, got.first, "no engine tells of cached tokens there")
		require.Equal(t, spent{Input: 44, Output: natural, Cached: 256}, got.Usage, "two blocks that the first request left in prefill's prefix cache")
		kept := c.receipt("message")
		require.Equal(t, messagesPath, kept.Endpoint)
		require.Equal(t, 300, kept.PromptTokens)
		require.Equal(t, 256, kept.CachedTokens)
		require.Equal(t, natural, kept.OutputTokens)
	})
	t.Run("an answer that is cut says so, and why", func(t *testing.T) {
		body := strings.Replace(wordsOf(prompt, ""), "4000", "5", 1)
		got := readWholeMessage(t, c.post(messagesPath, body).body)
		require.Equal(t, "max_tokens", got.Stop)
		require.Equal(t, reftext.Text(key, 5), got.text())
		stop := strings.Fields(reftext.Text(key, 5))[2]
		got = readWholeMessage(t, c.post(messagesPath, wordsOf(prompt, fmt.Sprintf(`"stop_sequences":[%q],`, stop))).body)
		require.Equal(t, "stop_sequence", got.Stop)
		require.True(t, strings.HasPrefix(reftext.Text(key, 5), got.text()))
	})
	t.Run("a conversation, and what stands before it", func(t *testing.T) {
		body := fmt.Sprintf(`{"model":%q,"max_tokens":4000,"system":[{"type":"text","text":"be short","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"one two"},{"role":"assistant","content":[{"type":"text","text":"three"}]},{"role":"user","content":[{"type":"text","text":"four"}]}]}`, model)
		p, err := reftext.Render(true, []byte(`{"messages":[{"role":"system","content":"be short"},{"role":"user","content":"one two"},{"role":"assistant","content":"three"},{"role":"user","content":"four"}]}`))
		require.NoError(t, err)
		wholeText(t, p.Answer, readWholeMessage(t, c.post(messagesPath, body).body).text())
	})
	t.Run("tools", func(t *testing.T) {
		tools := `"tools":[{"name":"look_up","input_schema":{"type":"object","properties":{"image_url":{"type":"string"}}}}],"tool_choice":{"type":"tool","name":"look_up"},`
		whole := readWholeMessage(t, c.post(messagesPath, wordsOf(prompt, tools)).body)
		require.Equal(t, "tool_use", whole.Stop)
		require.Equal(t, "look_up", whole.Content[0].Name)
		got := readMessage(t, c.post(messagesPath, wordsOf(prompt, tools+`"stream":true,`)).body)
		require.Equal(t, "tool_use", got.Stop)
		require.Equal(t, "tool_use", got.Content[0].Type)
		require.Equal(t, "look_up", got.Content[0].Name)
		require.JSONEq(t, string(whole.Content[0].Input), got.args)
		back := fmt.Sprintf(`{"model":%q,"max_tokens":9,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"look_up","input":{"source":{"url":"http://10.0.0.1/"}}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"b"}]}]}]}`, model)
		require.Equal(t, http.StatusOK, c.post(messagesPath, back).status, "a URL among a tool's arguments is no medium")
	})
	t.Run("thinking, whose budget no leg of one token has", func(t *testing.T) {
		r := c.post(messagesPath, wordsOf(prompt, `"thinking":{"type":"enabled","budget_tokens":1024},"stream":true,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		wholeText(t, key, readMessage(t, r.body).text())
	})
	t.Run("tokens are counted by one engine", func(t *testing.T) {
		r := c.post(messagesPath+"/count_tokens", fmt.Sprintf(`{"model":%q,"system":"a b","messages":[{"role":"user","content":"c d e"}],"tools":[]}`, model))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Contains(t, r.body, `"input_tokens":`)
		require.Equal(t, "passed-through", r.header.Get("X-Evenkeel-Route"))
	})
}

func TestMessagesThatAreRefused(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{}))
	turn := func(content string) string {
		return `{"model":"ref","max_tokens":5,"messages":[{"role":"user","content":` + content + `}]}`
	}
	for name, row := range map[string]struct{ body, says string }{
		"no JSON":                         {`{`, "not acceptable"},
		"no model":                        {`{"max_tokens":5,"messages":[{"role":"user","content":"a"}]}`, "names no model"},
		"no messages":                     {`{"model":"ref","max_tokens":5}`, `no "messages"`},
		"no turn":                         {`{"model":"ref","max_tokens":5,"messages":[]}`, "at least one"},
		"no length":                       {`{"model":"ref","messages":[{"role":"user","content":"a"}]}`, `no "max_tokens"`},
		"a length of nothing":             {strings.Replace(turn(`"a"`), "5", "0", 1), "an integer"},
		"a length twice":                  {strings.Replace(turn(`"a"`), `"max_tokens":5`, `"max_tokens":5,"max_tokens":6`, 1), "once"},
		"a budget above the length":       {strings.Replace(turn(`"a"`), `"max_tokens"`, `"thinking":{"type":"enabled","budget_tokens":1024},"max_tokens"`, 1), "below"},
		"a budget of little":              {strings.Replace(turn(`"a"`), `"max_tokens"`, `"thinking":{"type":"enabled","budget_tokens":4},"max_tokens"`, 1), "1024"},
		"two ways to think":               {strings.Replace(turn(`"a"`), `"max_tokens"`, `"thinking":{"type":"enabled","type":"disabled"},"max_tokens"`, 1), "thinking.type"},
		"a system of a number":            {strings.Replace(turn(`"a"`), `"max_tokens"`, `"system":5,"max_tokens"`, 1), "a list of blocks"},
		"a template":                      {strings.Replace(turn(`"a"`), `"max_tokens"`, `"chat_template_kwargs":{"chat_template":"x"},"max_tokens"`, 1), "not allowed"},
		"a block of no type":              {turn(`[{"text":"a"}]`), `no "type"`},
		"a block that nobody knows":       {turn(`[{"type":"hologram"}]`), "hologram"},
		"a picture from anywhere":         {turn(`[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]`), "messages[0].content[0].source.url: media must come"},
		"a picture of two places":         {turn(`[{"type":"image","source":{"type":"base64","data":"AA","url":"http://10.0.0.1/"}}]`), "source.url"},
		"a picture that a tool found":     {turn(`[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"x"},{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]}]`), "content[0].content[1].source.url"},
		"a picture before it":             {strings.Replace(turn(`"a"`), `"max_tokens"`, `"system":[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}],"max_tokens"`, 1), "system[0].source.url"},
		"a picture whose tokens to count": {`count` + turn(`[{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}]`), "source.url"},
		"a count of nothing":              {`count{"messages":[]}`, "at least one"},
	} {
		t.Run(name, func(t *testing.T) {
			path := messagesPath
			body, count := strings.CutPrefix(row.body, "count")
			if count {
				path += "/count_tokens"
			}
			r := c.post(path, body)
			require.Equal(t, http.StatusBadRequest, r.status, r.body)
			kind, says := refused(t, r.body)
			require.Equal(t, "invalid_request_error", kind)
			require.Contains(t, says, row.says)
		})
	}
	for name, row := range map[string]struct {
		r    reply
		want int
		kind string
	}{
		"another model":   {c.post(messagesPath, strings.Replace(wordsOf("a", ""), model, "nope", 1)), http.StatusNotFound, "not_found_error"},
		"another method":  {c.ask(http.MethodGet, c.url+messagesPath, ""), http.StatusMethodNotAllowed, "invalid_request_error"},
		"a packed body":   {c.post(messagesPath, wordsOf("a", ""), "Content-Encoding", "br"), http.StatusUnsupportedMediaType, "invalid_request_error"},
		"a body too long": {c.post(messagesPath, strings.Repeat(" ", 33<<20)), http.StatusRequestEntityTooLarge, "request_too_large"},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, row.r.err)
			require.Equal(t, row.want, row.r.status, row.r.body)
			kind, _ := refused(t, row.r.body)
			require.Equal(t, row.kind, kind)
		})
	}
	require.Zero(t, c.prefill[0].Stats().Requests)
}

// An engine before vLLM 0.32 may know no cache_salt at /v1/messages: what is discarded would stay in its prefix cache.
func TestAMessageGoesWholeToAnEngineThatTakesNoHandOffForIt(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{
		decode: []refengine.Config{{Version: "0.31.0"}}, profile: mooncake.Profile{AllowLocalPrefill: true}, configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
	}))
	prompt := reftext.MakePrompt(3, 500)
	r := c.post(messagesPath, wordsOf(prompt, `"stream":true,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "local-prefill", r.header.Get("X-Evenkeel-Route"))
	wholeText(t, reftext.OfUser(prompt).Answer, readMessage(t, r.body).text())
	require.EqualValues(t, 1, c.metric(`evenkeel_local_prefill_requests_total{reason="endpoint"}`))
	require.Zero(t, c.prefill[0].Stats().Requests)
	r = c.post(responsesPath, respond(prompt, ""))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "disaggregated", r.header.Get("X-Evenkeel-Route"), "a response is split as before")
}

// judgeMessage is judge for a message.
func (c *cluster) judgeMessage(prompt string, stream bool) string {
	c.Helper()
	r := c.post(messagesPath, wordsOf(prompt, fmt.Sprintf(`"stream":%t,`, stream)))
	key := reftext.OfUser(prompt).Answer
	require.NoError(c, r.err, "an answer ends as HTTP says, whatever it says")
	if r.status != http.StatusOK {
		require.Contains(c, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.status, r.body)
		refused(c.T, r.body)
		return fmt.Sprint(r.status)
	}
	if !stream {
		got := readWholeMessage(c.T, r.body)
		require.Equal(c, "end_turn", got.Stop)
		wholeText(c.T, key, got.text())
		return "right"
	}
	got := readMessage(c.T, r.body)
	rightText(c.T, key, got.text())
	if got.fail != "" {
		return got.fail
	}
	wholeText(c.T, key, got.text())
	return "right"
}

// Whatever an engine does wrong, on either side: as TestEveryFault, of messages.
func TestEveryFaultOfAMessage(t *testing.T) {
	t.Parallel()
	judgeEveryFault(t, takesMessages, (*cluster).judgeMessage)
}

// An engine says how an answer begins, and is lost before the first token. Another answers, and the client reads one
// beginning. Where an engine has said so much that it did not wait for the token, the answer ends with an error.
func TestAnAnswerThatIsLostBeforeItsFirstTokenBeginsOnce(t *testing.T) {
	t.Parallel()
	begins := func(kind, more string, n int) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf("event: %s\ndata: {\"type\":%q,\"index\":%d,\"sequence_number\":%d%s}\n\n", kind, kind, i, i, more))
		}
		return all
	}
	message := begins("message_start", `,"message":{"id":"x","type":"message","role":"assistant","content":[],"usage":{"input_tokens":4,"output_tokens":0}}`, 1)
	block := `,"content_block":{"type":"text","text":""}`
	response := append(begins("response.created", `,"response":{"id":"x","output":[]}`, 1), begins("response.output_item.added", `,"item":{}`, 1)...)
	for _, row := range []struct {
		name  string
		sent  []string
		judge func(c *cluster, prompt string, stream bool) string
		want  string
	}{
		{"a message", message, (*cluster).judgeMessage, "right"},
		{"a message's block", append(message, begins("content_block_start", block, 1)...), (*cluster).judgeMessage, "right"},
		{"many blocks", append(message, begins("content_block_start", block, 5)...), (*cluster).judgeMessage, "api_error"},
		{"a response", response, (*cluster).judgeResponse, "right"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var birds atomic.Pointer[parrot]
			c := start(t, takesMessages(options{dirty: true, configure: func(cfg *config.Config) { inFront(t, &cfg.Engines.Decode[0], &birds) }}))
			c.allUp()
			var spoke atomic.Bool
			var answered atomic.Int64
			bird := parrot(func(w http.ResponseWriter, body string) bool {
				if !strings.Contains(body, "do_remote_prefill") || !strings.Contains(body, `"stream":true`) || spoke.Swap(true) {
					return false
				}
				w.Header().Set("Content-Type", "text/event-stream")
				for _, event := range row.sent { // each is read by itself
					_, _ = io.WriteString(w, event)
					w.(http.Flusher).Flush()
					time.Sleep(10 * time.Millisecond)
				}
				if row.want != "right" { // it ends once the client has what came, however busy the machine is
					c.eventually("the client has it", func() bool { return c.metric("evenkeel_ttft_seconds_count") > float64(answered.Load()) })
				}
				return true
			})
			birds.Store(&bird)
			for !spoke.Load() {
				got := row.judge(c, fmt.Sprintf("prompt %d", answered.Load()), true)
				answered.Add(1)
				if spoke.Load() {
					require.Equal(t, row.want, got)
				}
			}
		})
	}
}

// What an engine refuses reaches the client in the engine's words.
func TestAnEnginesRefusalOfAMessage(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{}))
	r := c.post(messagesPath, wordsOf("a", `"temperature":-1,`))
	require.Equal(t, http.StatusBadRequest, r.status, r.body)
	kind, _ := refused(t, r.body)
	require.Equal(t, "BadRequestError", kind)
}

// A message has no word that keeps an engine from ending at once. vLLM 0.32 hands its prefill off all the same, to a
// decode engine that pulls by NIXL. An engine that does not is asked twice.
func TestAMessageWithAnEmptyAnswer(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		fault   refengine.Fault
		allowed bool // decode ranks may compute prompts
		probes  int64
	}{{"handed off", refengine.EOSFirst, false, 1}, {"whole", refengine.NullHandoff, true, 2}, {"refused", refengine.NullHandoff, false, 0}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, takesMessages(options{dirty: true, profile: mooncake.Profile{AllowLocalPrefill: row.allowed}}))
			require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.EOSFirst}, refengine.Rule{Fault: row.fault}))
			r := c.post(messagesPath, wordsOf("ends at once", `"stream":true,`))
			if row.probes == 0 {
				require.Equal(t, http.StatusBadGateway, r.status, r.body)
				kind, says := refused(t, r.body)
				require.Equal(t, "api_error", kind)
				require.Contains(t, says, "no usable hand-off")
				return
			}
			require.Equal(t, http.StatusOK, r.status, r.body)
			wholeText(t, reftext.OfUser("ends at once").Answer, readMessage(t, r.body).text())
			require.EqualValues(t, row.probes, c.prefill[0].Stats().Probes)
			require.Equal(t, row.allowed, c.metric(`evenkeel_local_prefill_requests_total{reason="ended"}`) == 1)
		})
	}
}

func TestClientsThatLeaveAMessage(t *testing.T) {
	t.Parallel()
	long := "a long answer"
	for i := 0; reftext.NaturalLength(reftext.OfUser(long).Answer) < 60; i++ {
		long = fmt.Sprintf("a long answer %d", i)
	}
	for _, stream := range []bool{true, false} {
		more := fmt.Sprintf(`"stream":%t,`, stream)
		t.Run(fmt.Sprintf("in prefill, streamed %t", stream), func(t *testing.T) {
			t.Parallel()
			c := start(t, takesMessages(options{prefill: []refengine.Config{{PrefillBase: time.Hour}}}))
			leave, wait := c.sendTo(messagesPath, wordsOf(long, more))
			c.eventually("it is prefilled", func() bool { return c.prefill[0].Stats().Probes == 1 })
			leave()
			wait()
			c.eventually("it is over", func() bool { return c.metric(`evenkeel_cancels_total{phase="prefill"}`) == 1 })
		})
		t.Run(fmt.Sprintf("in the pool, streamed %t", stream), func(t *testing.T) {
			t.Parallel()
			c := start(t, takesMessages(options{decode: []refengine.Config{{Slots: 1}}}))
			blocker := c.endless()
			leave, wait := c.sendTo(messagesPath, wordsOf("to be thrown away", more+`"thinking":{"type":"enabled","budget_tokens":1024},"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"f"},`))
			c.eventually("it is pooled", func() bool { return c.metric("evenkeel_pool_entries") == 1 })
			leave()
			wait()
			blocker()
			c.eventually("it is discarded", func() bool { return c.metric(`evenkeel_drains_total{outcome="drained"}`) == 1 })
			require.Zero(t, c.prefill[0].Stats().Pins)
			require.EqualValues(t, 1, c.metric(`evenkeel_cancels_total{phase="pooled"}`))
		})
		t.Run(fmt.Sprintf("in its answer, streamed %t", stream), func(t *testing.T) {
			t.Parallel()
			c := start(t, takesMessages(options{profile: mooncake.Profile{FirstEventTimeout: 2 * time.Second}, decode: []refengine.Config{{C0: 50 * time.Millisecond}}})) // an answer in one piece is left after that time
			leave, wait := c.sendTo(messagesPath, wordsOf(long, more))
			c.eventually("it runs", func() bool { return c.decode[0].Stats().Running == 1 })
			if stream {
				c.eventually("it has begun", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 1 })
			}
			leave()
			wait()
			c.eventually("it is over", func() bool { return c.sum("evenkeel_cancels_total") == 1 })
		})
	}
}

// Anthropic's clients send their key as x-api-key.
func TestTheKeyOfAMessage(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "team ek-team , rpm: 4")
	c := start(t, takesMessages(options{configure: func(cfg *config.Config) { cfg.KeysFile = file }}))
	for name, header := range map[string][]string{
		"no key": nil, "an unknown one": {"X-Api-Key", "ek-teat"}, "none of it": {"X-Api-Key", ""}, "with a scheme": {"X-Api-Key", "Bearer ek-team"},
		"another Authorization counts": {"X-Api-Key", "ek-team", "Authorization", "Bearer wrong"},
	} {
		for _, body := range []string{wordsOf("a", ""), wordsOf(strings.Repeat("a", 10<<10), "")} { // a long one is refused by its head
			r := c.post(messagesPath, body, header...)
			require.Equal(t, http.StatusUnauthorized, r.status, name)
			kind, _ := refused(t, r.body)
			require.Equal(t, "authentication_error", kind)
		}
	}
	require.Equal(t, http.StatusOK, c.post(messagesPath, wordsOf("a", ""), "X-Api-Key", "ek-team").status)
	require.Equal(t, http.StatusOK, c.post(messagesPath, wordsOf("a", ""), "Authorization", "Bearer ek-team", "X-Api-Key", "anything").status)
	require.Equal(t, http.StatusOK, c.post(chatPath, chat("a", ""), "X-Api-Key", "ek-team").status)
	require.Equal(t, http.StatusOK, c.post(messagesPath+"/count_tokens", wordsOf("a", ""), "X-Api-Key", "ek-team").status)
	r := c.post(messagesPath, wordsOf("a", ""), "X-Api-Key", "ek-team")
	require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
	kind, _ := refused(t, r.body)
	require.Equal(t, "rate_limit_error", kind)
	require.NotEmpty(t, r.header.Get("Retry-After"))
}

// A message that vllm-ascend gives back for want of memory cannot be told from a whole one.
func TestEnginesOfAscendDoNotServeMessages(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	r := c.post(messagesPath, wordsOf("a", ""))
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	kind, says := refused(t, r.body)
	require.Equal(t, "not_found_error", kind)
	require.Equal(t, `/v1/messages is not served for "ref": it needs engines of vLLM, and this model has engines of vllm-ascend; `+
		"use /v1/chat/completions, or ask the operator whether the connector of the engines is right", says)
	require.Zero(t, c.prefill[0].Stats().Requests)
}
