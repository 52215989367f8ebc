package recorder

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/go-zeromq/zmq4"

	"evenkeel/bench/rigs/real/recording"
	"evenkeel/bench/rigs/testbed"
)

const (
	chatPath = "/v1/chat/completions"
	textPath = "/v1/completions"
	messages = `"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"what is a proxy?"}]`
	weather  = `{"type":"function","function":{"name":"weather","parameters":{"type":"object",` +
		`"properties":{"city":{"type":"string","enum":["Rome","Oslo"]}},"required":["city"],"additionalProperties":false}}}`
	proxied   = `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"return_token_ids":true}`
	endAtOnce = `"logit_bias":{"2":100}` // </s>
)

// plain records an engine that has no connector.
func (r *recorder) plain(ctx context.Context) {
	chat := func(more string) string {
		return `{"model":"tiny",` + messages + `,"temperature":0,"max_tokens":8` + more + `}`
	}
	text := func(more string) string {
		return `{"model":"tiny","prompt":"hello there","temperature":0,"max_tokens":8` + more + `}`
	}
	for _, s := range []struct{ name, about, path, body string }{
		{"chat", "a chat", chatPath, chat("")},
		{"chat-seeded", "a chat with a seed", chatPath, chat(`,"temperature":1,"seed":5`)},
		{"chat-n", "two choices", chatPath, chat(`,"temperature":1,"seed":5,"n":2`)},
		{"chat-logprobs", "logprobs with two alternatives", chatPath, chat(`,"logprobs":true,"top_logprobs":2`)},
		{"chat-stop", "an answer that a stop string ends", chatPath, chat(`,"stop":["e","a"],"max_tokens":200`)},
		{"chat-penalties", "penalties", chatPath, chat(`,"presence_penalty":0.5,"frequency_penalty":0.5,"repetition_penalty":1.3`)},
		{"chat-structured", "a structured output of two choices", chatPath, chat(`,"structured_outputs":{"choice":["yes","no"]}`)},
		{"chat-json-schema", "a response_format with a schema", chatPath,
			chat(`,"max_tokens":60,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object",` +
				`"properties":{"ok":{"type":"boolean"}},"required":["ok"],"additionalProperties":false}}}`)},
		{"chat-tools-auto", "tools of which the model may choose", chatPath, chat(`,"tools":[` + weather + `],"tool_choice":"auto"`)},
		{"chat-tools-named", "a tool that is named", chatPath, chat(`,"max_tokens":60,"tools":[` + weather + `],"tool_choice":{"type":"function","function":{"name":"weather"}}`)},
		{"chat-tools-required", "a tool that is required", chatPath, chat(`,"max_tokens":120,"tools":[` + weather + `],"tool_choice":"required"`)},
		{"chat-ids", "token ids", chatPath, chat(`,"return_token_ids":true`)},
		{"chat-end", "an answer of nothing but its end", chatPath, chat(`,` + endAtOnce)},
		{"completion", "a completion", textPath, text("")},
		{"completion-long", "enough tokens for some that are half a rune", textPath, text(`,"max_tokens":60,"ignore_eos":true`)},
		{"completion-seeded", "a completion with a seed", textPath, text(`,"temperature":1,"seed":5`)},
		{"completion-n", "two choices", textPath, text(`,"temperature":1,"seed":5,"n":2`)},
		{"completion-logprobs", "logprobs with two alternatives", textPath, text(`,"logprobs":2`)},
		{"completion-echo", "an echo of the prompt", textPath, text(`,"echo":true`)},
		{"completion-echo-ids", "an echo beside token ids", textPath, text(`,"echo":true,"return_token_ids":true`)},
		{"completion-stop", "an answer that a stop string ends", textPath, text(`,"stop":["e","a"],"max_tokens":200`)},
		{"completion-stop-id", "an answer that a stop token ends", textPath, text(`,"stop_token_ids":[2],` + endAtOnce)},
		{"completion-end", "an answer of nothing but its end", textPath, text(`,` + endAtOnce)},
		{"completion-penalties", "penalties", textPath, text(`,"presence_penalty":0.5,"frequency_penalty":0.5,"repetition_penalty":1.3`)},
		{"completion-structured", "a structured output of a pattern", textPath, text(`,"structured_outputs":{"regex":"[0-9]{3}"}`)},
		{"completion-ids", "a prompt of token ids, and token ids in the answer", textPath,
			`{"model":"tiny","prompt":` + tokens(40, 1) + `,"temperature":0,"max_tokens":8,"return_token_ids":true}`},
		{"completion-list", "a list of prompts", textPath, `{"model":"tiny","prompt":["one","two"],"temperature":0,"max_tokens":4}`},
		{"completion-list-ids", "a list of prompts of token ids", textPath,
			`{"model":"tiny","prompt":[` + tokens(4, 2) + `,` + tokens(5, 3) + `],"temperature":0,"max_tokens":4}`},
		{"completion-min-tokens", "at least as many tokens as there may be", textPath, text(`,"min_tokens":8`)},
		{"context-below", "prompt and max_tokens one token below the context", textPath,
			`{"model":"tiny","prompt":` + tokens(2039, 4) + `,"temperature":0,"max_tokens":8,"ignore_eos":true}`},
		{"context-at", "prompt and max_tokens fill the context", textPath,
			`{"model":"tiny","prompt":` + tokens(2040, 5) + `,"temperature":0,"max_tokens":8,"ignore_eos":true}`},
		{"context-beyond", "prompt and max_tokens pass the context", textPath,
			`{"model":"tiny","prompt":` + tokens(2044, 6) + `,"temperature":0,"max_tokens":8,"ignore_eos":true}`},
		{"context-full", "a prompt as long as the context", textPath, `{"model":"tiny","prompt":` + tokens(2048, 7) + `,"temperature":0,"max_tokens":8}`},
		{"context-long-prompt", "a prompt longer than the context", textPath, `{"model":"tiny","prompt":` + tokens(2060, 8) + `,"temperature":0,"max_tokens":8}`},
		{"context-max-tokens", "max_tokens above the whole context", chatPath, chat(`,"max_tokens":5000`)},
		{"unknown-model", "a model that is not served", chatPath, `{"model":"nope",` + messages + `}`},
	} {
		r.both(ctx, "plain", s.name, s.path, s.about, s.body)
	}
	for _, s := range []struct{ name, about, path, body string }{
		{"chat-proxied", "a chat as evenkeel asks a decode engine", chatPath, strings.TrimSuffix(chat(""), "}") + proxied},
		{"chat-tools-proxied", "a named tool as evenkeel asks a decode engine", chatPath,
			strings.TrimSuffix(chat(`,"max_tokens":60,"tools":[`+weather+`],"tool_choice":{"type":"function","function":{"name":"weather"}}`), "}") + proxied},
		{"chat-held-back-proxied", "a stop string that holds text back, as evenkeel asks a decode engine", chatPath,
			strings.TrimSuffix(chat(`,"stop":["zzzz"],"max_tokens":12`), "}") + proxied},
		{"chat-end-proxied", "an answer of nothing but its end, as evenkeel asks a decode engine", chatPath, strings.TrimSuffix(chat(`,`+endAtOnce), "}") + proxied},
		{"completion-proxied", "a completion as evenkeel asks a decode engine", textPath, strings.TrimSuffix(text(""), "}") + proxied},
		{"completion-long-proxied", "runes cut between tokens, as evenkeel asks a decode engine", textPath,
			strings.TrimSuffix(text(`,"max_tokens":60,"ignore_eos":true`), "}") + proxied},
		{"chat-no-usage-stream", "a stream without usage", chatPath, chat(`,"stream":true`)},
		{"completion-no-usage-stream", "a stream without usage", textPath, text(`,"stream":true`)},
		{"error-json", "a body that is no JSON", chatPath, `{"model":"tiny",`},
		{"error-empty", "no body", chatPath, ``},
		{"error-no-messages", "a chat without messages", chatPath, `{"model":"tiny"}`},
		{"error-no-prompt", "a completion without a prompt", textPath, `{"model":"tiny"}`},
		{"error-type", "a value of a wrong type", chatPath, chat(`,"temperature":"hot"`)},
		{"error-range", "a value out of range", chatPath, chat(`,"top_p":7`)},
		{"error-max-tokens", "max_tokens 0", textPath, text(`,"max_tokens":0`)},
		{"error-stream-options", "stream_options without a stream", chatPath, chat(`,"stream_options":{"include_usage":true}`)},
		{"error-logprobs", "more logprobs than the engine gives", textPath, text(`,"logprobs":99`)},
		{"error-schema", "a schema that cannot be compiled", chatPath,
			chat(`,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"nothing"}}}`)},
		{"error-tool", "a named tool that is not among the tools", chatPath, chat(`,"tools":[` + weather + `],"tool_choice":{"type":"function","function":{"name":"nope"}}`)},
		{"error-token-id", "a token id beyond the vocabulary", textPath, `{"model":"tiny","prompt":[5000000],"max_tokens":4}`},
		{"error-min-tokens", "min_tokens above max_tokens", textPath, text(`,"min_tokens":9`)},
		{"error-path", "a path that is not there", "/v1/nothing", `{}`},
		{"tokenize", "the token ids of a prompt", "/tokenize", `{"model":"tiny","prompt":"hello there"}`},
		{"tokenize-chat", "the token ids of a chat", "/tokenize", `{"model":"tiny",` + messages + `}`},
		{"tokenize-error", "a request for token ids of nothing", "/tokenize", `{"model":"tiny"}`},
		{"tokenize-unknown-model", "a request for token ids by a model that is not served", "/tokenize", `{"model":"nope","prompt":"x"}`},
	} {
		r.ask(ctx, "plain", recording.Recording{Name: s.name, About: s.about, Ask: recording.Request{Path: s.path, Body: s.body}}, 0)
	}
	r.ask(ctx, "plain", recording.Recording{Name: "error-method", About: "a method that the path does not take",
		Ask: recording.Request{Method: http.MethodGet, Path: chatPath}}, 0)
	r.pages(ctx, "plain")
	long := `{"model":"tiny","prompt":"hello there","temperature":0,"max_tokens":1500,"ignore_eos":true,"stream":true}`
	r.running(ctx, "plain", long)
	r.ask(ctx, "plain",
		recording.Recording{Name: "abort", About: "a client that leaves in the middle of a stream", Ask: recording.Request{Path: textPath,
			Body: strings.TrimSuffix(text(`,"max_tokens":1500,"ignore_eos":true`), "}") + proxied}}, 5)
	_ = testbed.Pause(ctx, time.Second)
	r.get(ctx, "plain", "metrics-after-abort", "/metrics", "the metrics a second after the client has left")
}

// pages records what an engine shows while nothing runs.
func (r *recorder) pages(ctx context.Context, engine string) {
	r.get(ctx, engine, "metrics-idle", "/metrics", "the metrics while nothing runs")
	r.get(ctx, engine, "version", "/version", "the version")
	r.get(ctx, engine, "models", "/v1/models", "the models")
	r.get(ctx, engine, "health", "/health", "the health check")
}

// pair records a prefill and a decode engine with NixlConnector, and the KV events of the first.
func (r *recorder) pair(ctx context.Context) {
	sub := zmq4.NewSub(ctx)
	defer func() { _ = sub.Close() }()
	if r.err = sub.Dial("tcp://" + r.Events); r.err != nil {
		return
	}
	if r.err = sub.SetOption(zmq4.OptionSubscribe, ""); r.err != nil {
		return
	}
	live := make(chan [][]byte, 4096)
	go func() {
		for {
			msg, err := sub.Recv()
			if err != nil {
				return
			}
			live <- msg.Frames
		}
	}()
	_ = testbed.Pause(ctx, 2*time.Second) // the subscription has no answer
	r.ask(ctx, "prefill",
		recording.Recording{Name: "prefill-reset", About: "the prefix cache is emptied", Ask: recording.Request{Path: "/reset_prefix_cache"}}, 0)

	long := func(n, start int, more string) string {
		return fmt.Sprintf(`{"model":"tiny","prompt":%s,"temperature":0,"max_tokens":8%s}`, tokens(n, start), more)
	}
	chat := `{"model":"tiny",` + messages + `,"temperature":0,"max_tokens":8}`
	chatTools := `{"model":"tiny",` + messages + `,"temperature":0,"max_tokens":60,"tools":[` + weather + `],"tool_choice":{"type":"function","function":{"name":"weather"}}}`
	var prompts []string
	split := func(name, path, about, client string, stream bool) json.RawMessage {
		kv := r.probe(ctx, name, path, about+": prefill", client)
		prompts = append(prompts, "prefill-"+name)
		r.decode(ctx, name, path, about+": decode", client, kv, stream)
		return kv
	}
	split("chat", chatPath, "a chat", chat, true)
	split("chat-whole", chatPath, "a chat that is not streamed", chat, false)
	split("chat-tools", chatPath, "a chat with a named tool", chatTools, true)
	split("completion-short", textPath, "a prompt of one block", long(5, 20, ""), true)
	split("completion", textPath, "a prompt of some blocks", long(200, 21, ""), true)
	split("completion-logprobs", textPath, "a completion with logprobs", long(100, 22, `,"logprobs":2`), true)
	kv := split("completion-again", textPath, "a prompt that both engines have cached", long(200, 21, ""), true)
	r.decode(ctx, "completion-twice", textPath, "a hand-off that was used before", long(200, 21, ""), kv, true)
	split("context-at", textPath, "prompt and max_tokens fill the context", long(2040, 23, `,"ignore_eos":true`), true)
	split("context-beyond", textPath, "prompt and max_tokens pass the context", long(2044, 24, `,"ignore_eos":true`), true)
	r.probe(ctx, "context-full", textPath, "a prompt as long as the context", long(2048, 25, ""))
	r.probe(ctx, "unknown-model", textPath, "a model that is not served", `{"model":"nope","prompt":"x"}`)
	r.ask(ctx, "prefill", recording.Recording{Name: "prefill-local", About: "a request without a hand-off on a prefill engine",
		Ask: recording.Request{Path: textPath,
			Body: strings.TrimSuffix(long(40, 26, ""), "}") + proxied}}, 0)
	prompts = append(prompts, "prefill-local")
	r.ask(ctx, "decode", recording.Recording{Name: "decode-local", About: "a request without a hand-off on a decode engine",
		Ask: recording.Request{Path: textPath,
			Body: strings.TrimSuffix(long(40, 26, ""), "}") + proxied}}, 0)
	r.ask(ctx, "prefill", recording.Recording{Name: "prefill-end", About: "a probe whose first token ends the answer: no hand-off",
		Ask: recording.Request{Path: textPath,
			Body: `{"model":"tiny","prompt":` + tokens(70, 27) + `,"temperature":0,"max_tokens":1,"logit_bias":{"2":100},` +
				`"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`}}, 0)
	prompts = append(prompts, "prefill-end")

	late := r.probe(ctx, "expired", textPath, "a prompt whose hand-off waits too long: prefill", long(200, 28, ""))
	prompts = append(prompts, "prefill-expired")
	_ = testbed.Pause(ctx, leaseTime)
	for i := range 3 { // the cache of 90 blocks is written anew
		name := fmt.Sprintf("overwrite-%d", i)
		r.probe(ctx, name, textPath, "a long prompt", long(1900, 30+i, ""))
		prompts = append(prompts, "prefill-"+name)
	}
	r.decode(ctx, "expired", textPath, "a hand-off whose blocks the prefill engine has given to others", long(200, 28, ""), late, true)
	r.pages(ctx, "prefill")
	r.pages(ctx, "decode")
	running := `{"model":"tiny","prompt":"hello there","temperature":0,"max_tokens":1500,"ignore_eos":true,"stream":true}`
	r.running(ctx, "prefill", running)
	r.running(ctx, "decode", running)
	_ = testbed.Pause(ctx, time.Second)
	r.ask(ctx, "prefill", recording.Recording{Name: "prefill-reset-again", About: "the prefix cache is emptied once more",
		Ask: recording.Request{Path: "/reset_prefix_cache"}}, 0)
	_ = testbed.Pause(ctx, 2*time.Second)
	events := &recording.Events{About: "what the prefill engine published from the emptying of its cache to the next one", Requests: prompts}
	for len(live) > 0 {
		events.Live = append(events.Live, <-live)
	}
	if r.err == nil {
		r.err = r.replay(ctx, events)
	}
	r.saveEvents(events)
	r.lost(ctx)
}

// replay asks for the first batches again.
func (r *recorder) replay(ctx context.Context, events *recording.Events) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	ask := zmq4.NewDealer(ctx)
	defer func() { _ = ask.Close() }()
	if err := ask.Dial("tcp://" + r.Replay); err != nil {
		return err
	}
	if err := ask.Send(zmq4.NewMsgFrom(nil, make([]byte, 8))); err != nil {
		return err
	}
	for {
		msg, err := ask.Recv()
		if err != nil {
			return fmt.Errorf("replay of KV events: %w", err)
		}
		events.Replay = append(events.Replay, msg.Frames)
		if n := len(msg.Frames); n > 1 && string(msg.Frames[n-2]) == strings.Repeat("\xff", 8) {
			return nil
		}
	}
}

// lost records a hand-off of a prefill engine that nobody reaches. It is the last, because engines
// have hung over it.
func (r *recorder) lost(ctx context.Context) {
	client := fmt.Sprintf(`{"model":"tiny","prompt":%s,"temperature":0,"max_tokens":8}`, tokens(200, 40))
	kv := r.probe(ctx, "lost", textPath, "a prompt whose hand-off is changed to point to nobody: prefill", client)
	var members map[string]json.RawMessage
	if r.err != nil {
		return
	}
	if r.err = json.Unmarshal(kv, &members); r.err != nil {
		return
	}
	members["remote_engine_id"], members["remote_port"] = json.RawMessage(`"00000000-0000-0000-0000-000000000000"`), json.RawMessage(`9`)
	kv, r.err = json.Marshal(members)
	r.decode(ctx, "lost", textPath, "a hand-off of an engine that cannot be reached", client, kv, true)
}
