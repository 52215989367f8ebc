package refengine

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/refengine/pins"
	"evenkeel/bench/lab/reftext"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// quick is an engine whose times do not hold a test up.
func quick(c Config) Config {
	c.Steps.C0 = cmp.Or(c.Steps.C0, 200*time.Microsecond)
	c.Steps.C1 = cmp.Or(c.Steps.C1, time.Nanosecond)
	c.Prompts.Base = cmp.Or(c.Prompts.Base, 100*time.Microsecond)
	c.Prompts.PerToken = cmp.Or(c.Prompts.PerToken, time.Nanosecond)
	c.KV.TransferBase = cmp.Or(c.KV.TransferBase, 100*time.Microsecond)
	c.KV.TransferPer = cmp.Or(c.KV.TransferPer, time.Nanosecond)
	return c
}

func start(t testing.TB, c Config) *Engine {
	t.Helper()
	e, err := Start(quick(c))
	require.NoError(t, err)
	t.Cleanup(e.Close)
	return e
}

// client has its own connections, closed at the end of the test.
func client(t testing.TB) *http.Client {
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 2000}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// reply is what came for a request.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // of the transport, also in the middle of the body
}

func do(c *http.Client, method, url, body string, header ...string) reply {
	return doContext(context.Background(), c, method, url, body, header...)
}

func doContext(ctx context.Context, c *http.Client, method, url, body string, header ...string) reply {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
}

// chatBody is a chat request with more members put in front.
func chatBody(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":"ref","messages":[{"role":"user","content":%q}]}`, more, prompt)
}

func completionBody(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":"ref","prompt":%q}`, more, prompt)
}

const probeKV = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null},`
const probeMore = `"stream":false,"max_tokens":1,"min_tokens":1,"return_token_ids":true,` + probeKV

// probe prefills a chat prompt and returns its hand-off.
func probe(t testing.TB, c *http.Client, e *Engine, prompt string) json.RawMessage {
	t.Helper()
	r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody(prompt, probeMore))
	require.NoError(t, r.err)
	require.Equal(t, 200, r.status, r.body)
	return handoffIn(t, r.body)
}

func handoffIn(t testing.TB, body string) json.RawMessage {
	t.Helper()
	var got struct {
		KV json.RawMessage `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal([]byte(body), &got), body)
	return got.KV
}

func decodeMore(kv json.RawMessage, more string) string {
	return more + `"kv_transfer_params":` + string(kv) + `,`
}

// stream is a parsed event stream.
type stream struct {
	events           []string // data of each
	content          string
	reasoning        string
	arguments        string
	finish, stop     string
	ids              []int32
	promptIDs        []int32
	usage            *usage
	usages           int
	done             bool
	errorMessage     string
	toolName         string
	contentEvents    int
	logprobs         int
	comments         int
	id               string
	role             bool
	unknownEventText string
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type chunk struct {
	ID      string `json:"id"`
	Choices []struct {
		Text  string `json:"text"`
		Delta struct {
			Role      string `json:"role"`
			Content   string `json:"content"`
			Reasoning string `json:"reasoning"`
			ToolCalls []struct {
				Function struct {
					Name      string `json:"name"`
					Arguments string `json:"arguments"`
				} `json:"function"`
			} `json:"tool_calls"`
		} `json:"delta"`
		Logprobs *struct {
			Content []json.RawMessage `json:"content"`
			Tokens  []string          `json:"tokens"`
		} `json:"logprobs"`
		Finish    *string         `json:"finish_reason"`
		Stop      json.RawMessage `json:"stop_reason"`
		IDs       []int32         `json:"token_ids"`
		PromptIDs []int32         `json:"prompt_token_ids"`
	} `json:"choices"`
	PromptIDs []int32         `json:"prompt_token_ids"`
	Usage     *usage          `json:"usage"`
	Error     json.RawMessage `json:"error"`
	Object    string          `json:"object"`
	Message   string          `json:"message"`
}

func parseStream(t testing.TB, body string) stream {
	t.Helper()
	var s stream
	body = strings.ReplaceAll(body, "\r\n", "\n")
	for event := range strings.SplitSeq(body, "\n\n") {
		switch {
		case event == "":
		case strings.HasPrefix(event, ":"):
			s.comments++
		case event == "data: [DONE]":
			s.done = true
		case strings.HasPrefix(event, "data: "):
			s.add(t, event[len("data: "):])
		default:
			s.unknownEventText += event
		}
	}
	return s
}

func (s *stream) add(t testing.TB, data string) {
	t.Helper()
	s.events = append(s.events, data)
	var c chunk
	require.NoError(t, json.Unmarshal([]byte(data), &c), data)
	s.id = c.ID
	if len(c.Error) > 0 || c.Object == "error" {
		s.errorMessage = string(c.Error) + c.Message
	}
	if c.Usage != nil {
		s.usage = c.Usage
		s.usages++
	}
	s.promptIDs = append(s.promptIDs, c.PromptIDs...)
	for _, choice := range c.Choices {
		s.promptIDs = append(s.promptIDs, choice.PromptIDs...)
		s.role = s.role || choice.Delta.Role == "assistant"
		piece := choice.Text + choice.Delta.Content
		s.content += piece
		s.reasoning += choice.Delta.Reasoning
		for _, call := range choice.Delta.ToolCalls {
			s.toolName += call.Function.Name
			s.arguments += call.Function.Arguments
		}
		if piece+choice.Delta.Reasoning != "" {
			s.contentEvents++
		}
		if choice.Finish != nil {
			s.finish, s.stop = *choice.Finish, string(choice.Stop)
		}
		if choice.Logprobs != nil {
			s.logprobs += len(choice.Logprobs.Content) + len(choice.Logprobs.Tokens)
		}
		s.ids = append(s.ids, choice.IDs...)
	}
}

// streamOf posts a request that must get 200 and parses what comes until the
// end, or until the connection breaks.
func streamOf(t testing.TB, c *http.Client, url, body string, header ...string) (stream, reply) {
	t.Helper()
	r := do(c, "POST", url, body, header...)
	require.Equal(t, 200, r.status, "%v %s", r.err, r.body)
	return parseStream(t, r.body[:strings.LastIndex(r.body, "\n\n")+min(2, len(r.body))]), r
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, time.Minute, 2*time.Millisecond, what)
}

func TestAPromptGoesFromPrefillToDecodeOverRealSockets(t *testing.T) {
	for _, connector := range []Connector{AscendMooncake, NIXLPull, Opaque} {
		t.Run(string(connector), func(t *testing.T) {
			p, d := start(t, Config{Role: Prefill, Connector: connector}), start(t, Config{Role: Decode, Connector: connector})
			c := client(t)
			prompt := reftext.MakePrompt(1, 700)
			kv := probe(t, c, p, prompt)
			require.Equal(t, 1, p.Stats().Pins)
			require.Equal(t, 700, p.Stats().PinnedTokens)

			s, r := streamOf(t, c, d.URLs()[0]+"/v1/chat/completions", chatBody(prompt, decodeMore(kv,
				`"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"return_token_ids":true,`)), "X-Request-Id", "one")
			require.NoError(t, r.err)
			key := reftext.OfUser(prompt).Answer
			n, err := reftext.Check(key, 0, s.content)
			require.NoError(t, err)
			require.Equal(t, reftext.NaturalLength(key), n)
			require.Equal(t, "stop", s.finish)
			require.Equal(t, "null", s.stop)
			require.True(t, s.done && s.role)
			require.Equal(t, "chatcmpl-one", s.id)
			require.Equal(t, usage{Prompt: 700, Completion: n, Total: 700 + n}, *s.usage)
			require.Equal(t, n+2, s.usages, "role chunk, every token, final event")
			require.Len(t, s.ids, n)
			require.Equal(t, reftext.OfUser(prompt).IDs, s.promptIDs)
			require.Equal(t, "text/event-stream; charset=utf-8", r.header.Get("Content-Type"))

			got := p.Stats()
			require.Equal(t, []int64{1, 0, 0, 0}, []int64{got.Pulls, int64(got.Pins), got.Leaks, got.KVUsed})
			got = d.Stats()
			require.Equal(t, []int64{1, 0, 0, 0, 0}, []int64{got.Decodes, got.LocalPrefills, got.Unknown, got.KVUsed, got.Running})
		})
	}
}

func TestTheHandoffHasTheShapeOfRealEngines(t *testing.T) {
	p := start(t, Config{Role: Prefill, Server: Server{Advertise: "127.0.0.1"}})
	var got map[string]any
	require.NoError(t, json.Unmarshal(probe(t, client(t), p, reftext.MakePrompt(1, 300)), &got))
	for _, key := range []string{"remote_engine_id", "remote_request_id", "remote_pcp_size", "last_token_id",
		"remote_multi_nodes_meta_mapping"} {
		require.Contains(t, got, key)
	}
	require.Equal(t, []any{[]any{0.0, 1.0, 2.0}}, got["remote_block_ids"], "nested, one list a KV cache group")
	require.Regexp(t, `^chatcmpl-[0-9a-f]+-[0-9a-f]{8}$`, got["remote_request_id"])
	require.Equal(t, "127.0.0.1", got["remote_host"])

	flat := start(t, Config{Role: Prefill, KV: KV{FlatBlockIDs: true}})
	require.NoError(t, json.Unmarshal(probe(t, client(t), flat, "a b"), &got))
	require.Equal(t, []any{0.0}, got["remote_block_ids"])
}

func TestMooncakeUpstreamFindsItsTransfer(t *testing.T) {
	p, d := start(t, Config{Role: Prefill, Connector: VLLMMooncake}), start(t, Config{Role: Decode, Connector: VLLMMooncake})
	c := client(t)
	var ranks map[string]struct {
		EngineID string `json:"engine_id"`
	}
	require.NoError(t, json.Unmarshal([]byte(do(c, "GET", p.URLs()[0]+"/query", "").body), &ranks))
	r := do(c, "POST", p.URLs()[0]+"/v1/chat/completions", chatBody("a b c", `"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-1"},`))
	require.Equal(t, 200, r.status, r.body)
	require.Equal(t, "null", string(handoffIn(t, r.body)))
	kv := fmt.Appendf(nil, `{"do_remote_prefill":true,"transfer_id":"xfer-1","remote_bootstrap_addr":%q,"remote_engine_id":%q}`, p.URLs()[0], ranks["0"].EngineID)
	s, _ := streamOf(t, c, d.URLs()[0]+"/v1/chat/completions", chatBody("a b c", decodeMore(kv, `"stream":true,`)))
	_, err := reftext.Check(reftext.OfUser("a b c").Answer, 0, s.content)
	require.NoError(t, err)
	require.EqualValues(t, 1, p.Stats().Pulls)
}

func TestAHandoffThatIsNotFreshGivesWrongText(t *testing.T) {
	p := start(t, Config{Role: Prefill})
	brief := start(t, Config{Role: Prefill, KV: KV{HoldTimeout: time.Millisecond}})
	d := start(t, Config{Role: Decode})
	c := client(t)
	ask := func(prompt string, kv json.RawMessage) (int, error) {
		s, _ := streamOf(t, c, d.URLs()[0]+"/v1/chat/completions", chatBody(prompt, decodeMore(kv, `"stream":true,"max_tokens":8,`)))
		require.NotEmpty(t, s.finish)
		return reftext.Check(reftext.OfUser(prompt).Answer, 0, s.content)
	}
	kv := probe(t, c, p, "a b c")
	_, err := ask("a b c", kv)
	require.NoError(t, err)
	_, err = ask("a b c", kv)
	require.Error(t, err, "replayed")
	require.EqualValues(t, 1, p.Stats().Replays)

	kv = probe(t, c, brief, "a b c")
	eventually(t, "the pin times out", func() bool { return brief.Stats().Leaks == 1 })
	_, err = ask("a b c", kv)
	require.Error(t, err, "expired")
	require.EqualValues(t, 1, brief.Stats().ExpiredPulls)
	require.Zero(t, brief.Stats().Pins)

	_, err = ask("a b d", probe(t, c, p, "a b c"))
	require.Error(t, err, "another prompt's KV")
	require.EqualValues(t, 1, d.Stats().KeyMismatches)

	kv = probe(t, c, p, "a b c")
	p.Kill()
	require.NoError(t, p.Revive())
	_, err = ask("a b c", kv)
	require.NoError(t, err, "an id the prefill never knew is recomputed")
	require.EqualValues(t, 1, d.Stats().Unknown)
	require.EqualValues(t, 1, d.Stats().LocalPrefills)

	kv = probe(t, c, p, "a b c")
	_, err = ask("a b c", bytes.Replace(kv, []byte("[[0]]"), []byte("[[77]]"), 1))
	require.Error(t, err, "other blocks")
	require.EqualValues(t, 1, p.Stats().WrongBlocks)
}

func TestAPrefillThatCannotBeReached(t *testing.T) {
	p, d := start(t, Config{Role: Prefill}), start(t, Config{Role: Decode})
	c := client(t)
	kv := probe(t, c, p, "a b")
	p.Kill()
	s, _ := streamOf(t, c, d.URLs()[0]+"/v1/chat/completions", chatBody("a b", decodeMore(kv, `"stream":true,"max_tokens":8,"ignore_eos":true,`)))
	require.Contains(t, s.errorMessage, "KV load failure")
	require.True(t, s.done)
	require.EqualValues(t, 1, d.Stats().FailedPulls)
}

func TestHandoffsADecodeRefuses(t *testing.T) {
	d := start(t, Config{Role: Decode})
	c := client(t)
	post := func(kv string) reply {
		return do(c, "POST", d.URLs()[0]+"/v1/chat/completions", chatBody("a", decodeMore(json.RawMessage(kv), `"stream":true,"max_tokens":3,`)))
	}
	require.Equal(t, 400, post(`{"do_remote_prefill":true,"remote_block_ids":["1"]}`).status, "string ids")
	require.Equal(t, 400, post(`7`).status)
	require.Equal(t, 400, post(`{"do_remote_prefill":"yes"}`).status)
	r := post(`{"do_remote_prefill":true,"remote_block_ids":[[]],"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_request_id":"r"}`)
	require.Equal(t, 500, r.status, "no blocks kills a real engine")
	require.EqualValues(t, 1, d.Stats().Crashes)
	require.Equal(t, 200, post(`{"do_remote_prefill":true,"remote_block_ids":[[1]]}`).status, "missing fields: recomputed")
	require.EqualValues(t, 1, d.Stats().Unknown)
	require.Equal(t, 400, do(c, "POST", d.URLs()[0]+"/v1/chat/completions", chatBody("a", probeMore)).status, "a probe on a decode engine")
}

func TestANullHandoff(t *testing.T) {
	p := start(t, Config{Role: Prefill, Faults: []Rule{{Fault: EOSFirst}}})
	c := client(t)
	for more, null := range map[string]bool{"": true, `"min_tokens":1,`: false, `"ignore_eos":true,`: false} {
		r := do(c, "POST", p.URLs()[0]+"/v1/chat/completions", chatBody("a b", `"max_tokens":1,`+more+probeKV))
		require.Equal(t, null, string(handoffIn(t, r.body)) == "null", more)
		require.Equal(t, null, strings.Contains(r.body, `"finish_reason":"stop"`), more)
	}
	require.Equal(t, 2, p.Stats().Pins)
}

func TestAClientThatLeavesInTransferLeaksThePin(t *testing.T) {
	p, d := start(t, Config{Role: Prefill}), start(t, Config{Role: Decode, KV: KV{TransferBase: time.Hour}})
	c := client(t)
	kv := probe(t, c, p, "a b")
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", d.URLs()[0]+"/v1/chat/completions", strings.NewReader(chatBody("a b", decodeMore(kv, `"stream":true,`))))
	require.NoError(t, err)
	resp, err := c.Do(req)
	require.NoError(t, err, "200 goes out before the pull")
	require.Equal(t, 200, resp.StatusCode)
	eventually(t, "the request holds KV", func() bool { return d.Stats().KVUsed == blockSize })
	cancel()
	_ = resp.Body.Close()
	eventually(t, "the decode engine lets go", func() bool { return d.Stats().InTransfer == 1 && d.Stats().KVUsed == 0 })
	require.Equal(t, 1, p.Stats().Pins, "until its timeout")
}

// Who sees that an engine has let go of a request may have its hand-off pulled by another: no pull
// comes after that.
func TestAPullUnderWayEndsBeforeItsRequestIsLetGo(t *testing.T) {
	asked, leave := make(chan struct{}), make(chan struct{})
	var pulled atomic.Bool
	p := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(asked)
		<-leave
		pulled.Store(true)
		_, _ = fmt.Fprintf(w, `{"state":%q,"key":"1"}`, pins.OK)
	}))
	defer p.Close()
	at := p.Listener.Addr().(*net.TCPAddr)
	d := start(t, Config{Role: Decode})
	body := chatBody("a b", decodeMore(fmt.Appendf(nil, `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_host":%q,"remote_port":%d,"remote_request_id":"r"}`, at.IP, at.Port), `"stream":true,`))
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.URLs()[0], "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn,
		"POST /v1/chat/completions HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	require.NoError(t, err)
	<-asked
	before := make(chan bool, 1)
	go func() {
		_, _ = io.Copy(io.Discard, conn)
		before <- pulled.Load()
	}()
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	time.Sleep(50 * time.Millisecond) // for the engine to notice
	close(leave)
	require.True(t, <-before, "the connection ends after the pull")
	eventually(t, "the KV is free", func() bool { return d.Stats().KVUsed == 0 })
}

func TestAClientThatLeavesFreesItsSlot(t *testing.T) {
	e := start(t, Config{Slots: 1, Steps: Steps{C0: 2 * time.Millisecond}})
	c := client(t)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", e.URLs()[0]+"/v1/completions", strings.NewReader(completionBody("a", `"stream":true,"max_tokens":100000,"ignore_eos":true,`)))
	require.NoError(t, err)
	resp, err := c.Do(req)
	require.NoError(t, err)
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "text_completion")
	cancel()
	_ = resp.Body.Close()
	s, _ := streamOf(t, c, e.URLs()[0]+"/v1/completions", completionBody("b", `"stream":true,"max_tokens":2,"ignore_eos":true,`))
	require.Equal(t, "length", s.finish)
	eventually(t, "it is counted once its handler has returned", func() bool { return e.Stats().Aborted == 1 })
}

func TestAKilledEngineComesBackOnItsPortsEmpty(t *testing.T) {
	e := start(t, Config{DPSize: 2})
	c := client(t)
	urls := e.URLs()
	probe(t, c, e, "a b")
	e.Kill()
	require.Error(t, do(c, "GET", urls[0]+"/health", "").err)
	require.NoError(t, e.Revive())
	require.Error(t, e.Revive(), "running already")
	require.Equal(t, urls, e.URLs())
	require.Zero(t, e.Stats().Pins)
	require.Equal(t, 200, do(c, "GET", urls[1]+"/health", "").status)
}

func TestAnIdleConnectionIsClosed(t *testing.T) {
	e := start(t, Config{Server: Server{KeepAlive: 20 * time.Millisecond}})
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	require.Equal(t, 200, do(&http.Client{Transport: tr}, "GET", e.URLs()[0]+"/health", "").status)
	eventually(t, "no connection is left", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.life.mu.Lock()
		defer e.life.mu.Unlock()
		return len(e.life.conns) == 0
	})
}

func TestAPreemptedRequestIsGivenBack(t *testing.T) {
	// Steps are long beside the time in which the second request comes after the first.
	e := start(t, Config{KV: KV{Tokens: 3 * blockSize}, Steps: Steps{Recompute: true, C0: 2 * time.Millisecond}})
	c := client(t)
	type outcome struct {
		s stream
		p reftext.Prompt
	}
	got := make(chan outcome, 2)
	for i := range 2 {
		prompt := reftext.MakePrompt(uint64(i), 100)
		go func() {
			s, _ := streamOf(t, c, e.URLs()[0]+"/v1/completions", completionBody(prompt, `"stream":true,"ignore_eos":true,"max_tokens":200,"stream_options":{"include_usage":true},`))
			got <- outcome{s, reftext.Of(prompt)}
		}()
	}
	givenBack := 0
	for range 2 {
		o := <-got
		n, err := reftext.Check(o.p.Answer, 0, o.s.content)
		require.NoError(t, err)
		require.Equal(t, n, o.s.usage.Completion)
		require.True(t, o.s.done)
		if o.s.stop == `"recomputed"` {
			givenBack++
			require.Equal(t, "stop", o.s.finish)
			require.Less(t, n, 200)
		}
	}
	require.Equal(t, 1, givenBack)
	require.EqualValues(t, 1, e.Stats().Preemptions)
}

func TestAWildcardIsNotAdvertised(t *testing.T) {
	p := start(t, Config{Server: Server{Listen: ":0"}})
	require.Contains(t, string(probe(t, client(t), p, "a")), `"remote_host":"127.0.0.1"`)
	require.True(t, strings.HasPrefix(p.URLs()[0], "http://127.0.0.1:"))
}

func TestAHandoffForAnotherEngineIsUnknown(t *testing.T) {
	p, d := start(t, Config{Role: Prefill}), start(t, Config{Role: Decode})
	c := client(t)
	kv := bytes.Replace(probe(t, c, p, "a b"), []byte(`_dp0`), []byte(`_dp1`), 1)
	s, _ := streamOf(t, c, d.URLs()[0]+"/v1/chat/completions", chatBody("a b", decodeMore(kv, `"stream":true,`)))
	_, err := reftext.Check(reftext.OfUser("a b").Answer, 0, s.content)
	require.NoError(t, err)
	require.EqualValues(t, 1, d.Stats().Unknown)
	require.Equal(t, 1, p.Stats().Pins)
}
