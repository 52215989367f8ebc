package fleet_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/real/recording"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// recorded answers as a real engine did: pages always, a request with the recording that is set.
type recorded struct {
	engine string
	pages  map[string]*recording.Recording // by path
	next   atomic.Pointer[recording.Recording]
	asked  atomic.Pointer[string] // the last request's body
}

func (e *recorded) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r := e.pages[req.URL.Path]
	if req.Method == http.MethodPost {
		body, _ := io.ReadAll(req.Body) // a client that left gets no answer either
		text := string(body)
		e.asked.Store(&text)
		r = e.next.Load()
	}
	if r == nil {
		http.NotFound(w, req)
		return
	}
	for _, line := range r.Head {
		if key, value, _ := strings.Cut(line, ": "); !strings.EqualFold(key, "transfer-encoding") { // the server's own business
			w.Header().Set(key, value)
		}
	}
	w.WriteHeader(r.Status)
	for _, piece := range r.Pieces {
		_, _ = io.WriteString(w, piece)
		_ = http.NewResponseController(w).Flush()
	}
}

// TestRecordedEnginesServe runs requests past the answers of a real prefill and a real decode
// engine: the hand-off reaches the decode engine byte for byte, the client gets the decode engine's
// text and reasons and the prefill engine's cached tokens, and refusals come as the engine said
// them.
func TestRecordedEnginesServe(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	byName := map[string]*recording.Recording{}
	engines := map[string]*recorded{}
	for _, name := range []string{"prefill", "decode"} {
		engines[name] = &recorded{engine: name, pages: map[string]*recording.Recording{}}
	}
	for _, r := range all {
		byName[r.Name] = r
		if e := engines[r.Engine]; e != nil && r.Ask.Method == http.MethodGet {
			e.pages[r.Ask.Path] = r
		}
	}
	p, d := engines["prefill"], engines["decode"]
	prefill, decode := httptest.NewServer(p), httptest.NewServer(d)
	t.Cleanup(prefill.Close)
	t.Cleanup(decode.Close)
	b := start(t, options{prefill: []refengine.Config{}, decode: []refengine.Config{}, profile: mooncake.Profile{Connector: mooncake.NIXLPull},
		dirty: true, configure: func(cfg *config.Config) {
			cfg.Engines.Prefill = []config.Engine{{URL: prefill.URL}}
			cfg.Engines.Decode = []config.Engine{{URL: decode.URL, Slots: 8}}
		}})

	served := 0
	for _, leg := range all {
		name, ok := strings.CutPrefix(leg.Name, "decode-")
		before := byName["prefill-"+name]
		if !ok || before == nil || leg.Client == "" || !leg.Streams() || name == "lost" {
			continue
		}
		served++
		p.next.Store(before)
		d.next.Store(leg)
		want := spokenBy(t, string(leg.Body()))
		t.Run(name, func(t *testing.T) {
			streamed := b.Post(leg.Ask.Path, strings.TrimSuffix(leg.Client, "}")+`,"stream":true,"stream_options":{"include_usage":true}}`)
			require.Equal(t, http.StatusOK, streamed.Status, streamed.Body)
			got := spokenBy(t, streamed.Body)
			require.Equal(t, want.text, got.text)
			require.Equal(t, want.finish, got.finish)
			require.Equal(t, want.usage.Completion, got.usage.Completion)
			require.NotContains(t, streamed.Body, "token_ids\":[", "nobody asked for ids")
			var answer struct {
				KV    json.RawMessage `json:"kv_transfer_params"`
				Usage usageOf         `json:"usage"`
			}
			require.NoError(t, json.Unmarshal(before.Body(), &answer))
			require.Equal(t, answer.Usage.Details.Cached, got.usage.Details.Cached, "by the prefill engine")
			require.Contains(t, *d.asked.Load(), `"kv_transfer_params":`+string(answer.KV))

			if strings.Contains(leg.Client, `"tools"`) {
				return // in one piece its answer is the engine's own, and none is recorded that a hand-off began
			}
			whole := b.Post(leg.Ask.Path, leg.Client)
			require.Equal(t, http.StatusOK, whole.Status, whole.Body)
			require.Equal(t, want.text, textOf(t, whole.Body))
		})
	}
	require.Greater(t, served, 6)

	client := byName["decode-completion"].Client
	p.next.Store(byName["prefill-lost"])
	d.next.Store(byName["decode-lost"])
	lost := b.Post("/v1/completions", client)
	require.GreaterOrEqual(t, lost.Status, 500, lost.Body)
	require.Contains(t, lost.Body, `"error"`)

	for _, r := range all {
		if r.Status < 400 || r.Status >= 500 || !strings.HasPrefix(r.Name, "error-") || r.Ask.Method != http.MethodPost ||
			!strings.Contains(r.Ask.Path, "completions") {
			continue
		}
		p.next.Store(r)
		refused := b.Post("/v1/completions", client)
		require.Equal(t, r.Status, refused.Status, r.Name)
		require.Equal(t, string(r.Body()), refused.Body, r.Name)
	}
}

type usageOf struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type spoken struct {
	text, finish string // text: also the arguments of tool calls
	usage        usageOf
}

func spokenBy(t *testing.T, stream string) (s spoken) {
	for part := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		data := strings.TrimPrefix(part, "data: ")
		if data == "[DONE]" {
			continue
		}
		var e struct {
			Usage   *usageOf `json:"usage"`
			Choices []struct {
				Finish string `json:"finish_reason"`
				said
			} `json:"choices"`
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Usage != nil {
			s.usage = *e.Usage
		}
		for _, choice := range e.Choices {
			s.text += choice.all()
			s.finish = choice.Finish
		}
	}
	return s
}

// said is what a choice says, in a stream or whole.
type said struct {
	Text           string `json:"text"`
	Delta, Message struct {
		Content string `json:"content"`
		Calls   []struct {
			Function struct{ Name, Arguments string } `json:"function"`
		} `json:"tool_calls"`
	}
}

func (s said) all() string {
	text := s.Text + s.Delta.Content + s.Message.Content
	for _, call := range append(s.Delta.Calls, s.Message.Calls...) {
		text += call.Function.Name + call.Function.Arguments
	}
	return text
}

func textOf(t *testing.T, answer string) string {
	var whole struct {
		Choices []said `json:"choices"`
	}
	require.NoError(t, json.Unmarshal([]byte(answer), &whole), answer)
	require.Len(t, whole.Choices, 1, strconv.Quote(answer))
	return whole.Choices[0].all()
}
