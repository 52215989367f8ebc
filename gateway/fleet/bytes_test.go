package fleet_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
)

// recorder is an engine of both roles that keeps what it was sent.
type recorder struct {
	mu     sync.Mutex
	bodies map[string][]byte // by leg: probe, decode
	header map[string]http.Header
}

func (rec *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/health":
		return
	case "/v1/models":
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"ref","max_model_len":1000000},{"id":"tuned","parent":"ref","max_model_len":1000000}]}`)
		return
	case refclient.ChatPath:
	default:
		http.NotFound(w, r)
		return
	}
	body, _ := io.ReadAll(r.Body)
	leg := "decode"
	if bytes.Contains(body, []byte(`"do_remote_decode":true`)) {
		leg = "probe"
	}
	rec.mu.Lock()
	rec.bodies[leg], rec.header[leg] = body, r.Header.Clone()
	rec.mu.Unlock()
	if leg == "probe" {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"p","choices":[{"index":0,"finish_reason":"length"}],"usage":{"prompt_tokens":7},"kv_transfer_params":`+handoffOnTheWire+`}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, `data: {"id":"d","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}`+"\n\ndata: [DONE]\n\n")
}

// An engine's hand-off goes to the other engine as it came: odd spaces, numbers
// beyond 2^53 and fields nobody knows included.
const handoffOnTheWire = `{"do_remote_prefill" : true,"do_remote_decode":false,"remote_block_ids":[[1, 2],[3]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1,"epoch":12345678901234567890123,"new":{"x":[1.50e1]}}`

func TestEnginesGetTheClientsBytes(t *testing.T) {
	t.Parallel()
	rec := &recorder{bodies: map[string][]byte{}, header: map[string]http.Header{}}
	engine := httptest.NewServer(rec)
	defer engine.Close()
	b := start(t, options{dirty: true, prefill: []refengine.Config{}, decode: []refengine.Config{}, configure: func(cfg *config.Config) {
		cfg.Prefill.Scrape.Interval = 0 // this engine has no metrics
		cfg.Engines = config.Engines{Prefill: []config.Engine{{URL: engine.URL}}, Decode: []config.Engine{{URL: engine.URL, Slots: 1}}}
	}})

	// What stands between the keys that we own; they are in front of each piece.
	long := strings.Repeat(`{"role" : "user", "content":"a \"quoted\" \\ \u00e9 \ud83d\udea2 é 🚢 tab\t`+reftext.MakePrompt(7, 5000)+`"},`+"\n\t", 20)
	owned := []string{`"stream":true`, `"max_tokens" : 77`, `"stream_options":{"include_usage":true}`, `"kv_transfer_params":{"evil":1}`, `"\u0073ession_id":"s"`}
	kept := []string{
		"\"model\" : \"ref\" ,\r\n  \"messages\":[" + long + `{"role":"assistant","content":null}]`,
		`"metadata":{"huge":12345678901234567890123, "tiny" : 1e-400,"big":1E400}`,
		`"Stream":"another key"  ,  "unknown_\u00fcmlaut":[ 1,2 , [ ] ,{ } ]`,
		`"tools":[{"type":"function","function":{"name":"f","parameters":{"a":{"b":[true,false,null]}}}}]`,
		`"temperature":0.10000000000000000000001`,
	}
	body := "{\n"
	for i := range owned {
		body += owned[i] + " , " + kept[i]
		if i < len(owned)-1 {
			body += "\n,"
		}
	}
	body += " }  "
	require.True(t, json.Valid([]byte(body)))
	require.Greater(t, len(body), 400_000)

	r := b.Post(refclient.ChatPath, body, "X-Data-Parallel-Rank", "3", "X-Request-Id", "mine", "x-evenkeel-policy", "jsq", "Authorization",
		"Bearer mine")
	require.Equal(t, 200, r.Status, r.Body)
	ours := map[string]map[string]string{
		"probe":  {"stream": "false", "max_tokens": "1", "min_tokens": "1", "return_token_ids": "true"},
		"decode": {"stream": "true", "max_tokens": "77", "return_token_ids": "true", "kv_transfer_params": handoffOnTheWire},
	}
	for leg, want := range ours {
		got := rec.bodies[leg]
		at := 0
		for i, piece := range kept {
			next := bytes.Index(got[at:], []byte(piece))
			require.GreaterOrEqual(t, next, 0, "%s: piece %d is changed or out of place", leg, i)
			at += next + len(piece)
		}
		var members map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(got, &members))
		require.NotContains(t, members, "session_id")
		for key, value := range want {
			require.Equal(t, value, string(members[key]), "%s: %s", leg, key)
			require.Equal(t, 1, bytes.Count(got, []byte(`"`+key+`":`))+bytes.Count(got, []byte(`"`+key+`" :`)), "%s: %s once", leg, key)
		}
		require.NotContains(t, string(got), "evil")
		h := rec.header[leg]
		require.Regexp(t, `^ek-[0-9a-f]{32}-[pd]1$`, h.Get("X-Request-Id"))
		for _, name := range []string{"X-Data-Parallel-Rank", "X-Evenkeel-Policy", "Authorization"} {
			require.Empty(t, h.Values(name), "a client's %s stays here", name)
		}
		require.Equal(t, fmt.Sprint(len(got)), h.Get("Content-Length"))
	}

	// So they do if the body was packed on its way.
	sent := map[string]string{"probe": string(rec.bodies["probe"]), "decode": string(rec.bodies["decode"])}
	for _, how := range []string{"gzip", "zstd"} {
		clear(rec.bodies)
		r = b.Post(refclient.ChatPath, packed(t, how, body), "Content-Encoding", how)
		require.Equal(t, 200, r.Status, r.Body)
		for leg, want := range sent {
			require.Equal(t, want, string(rec.bodies[leg]), "%s by %s", leg, how)
			require.Empty(t, rec.header[leg].Values("Content-Encoding"), "%s by %s", leg, how)
		}
	}

	// An adapter's requests go by its own name to the ranks of its base model.
	r = b.Post(refclient.ChatPath, `{"model":"tuned","messages":[{"role":"user","content":"a"}]}`)
	require.Equal(t, 200, r.Status, r.Body)
	for leg, got := range rec.bodies {
		require.Contains(t, string(got), `"model":"tuned"`, leg)
	}
	require.Equal(t, []string{"ref", "tuned"}, b.models())
	boards := b.now().Dispatch.Models
	require.Len(t, boards, 1)
	require.Equal(t, "ref", boards[0].Model)
}

// packed is a body in a content coding.
func packed(t testing.TB, how, body string) string {
	var b bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&b)
	if how == "zstd" {
		z, err := zstd.NewWriter(&b)
		require.NoError(t, err)
		w = z
	}
	_, err := io.WriteString(w, body)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}
