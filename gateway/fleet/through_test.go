package fleet_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
)

// form is a request to transcribe a file.
func form(t *testing.T, file string, fields ...string) (body, kind string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(fields); i += 2 {
		require.NoError(t, w.WriteField(fields[i], fields[i+1]))
	}
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, err = io.WriteString(part, file)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String(), w.FormDataContentType()
}

func TestRequestsOfOneEngine(t *testing.T) {
	t.Parallel()
	b := start(t, options{
		decode:    []refengine.Config{{}, pooling(), {Model: refengine.Model{Name: "ears", Task: plain.Transcription}}},
		configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
	})
	b.served("emb", 1)
	b.served("ears", 1)
	// bench/outside/api has the official client ask for embeddings, transcriptions and translations.
	t.Run("are passed through", func(t *testing.T) {
		vector := func(text string) string {
			b, err := json.Marshal(plain.Vector(text))
			require.NoError(t, err)
			return string(b)
		}
		for _, row := range []struct {
			name, path, body, want string
			prompt                 int // tokens, as told
		}{
			{"a text is counted", "/tokenize", `{"model":"ref","prompt":"one two three"}`, `"count":3`, 0},
			{"a chat is counted", "/tokenize", `{"model":"ref","messages":[{"role":"user","content":"one two"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"image_url":{"type":"string"}}}}}]}`, `"count":`, 0},
			{"a message is counted", "/v1/messages/count_tokens", `{"model":"ref","system":"a b","messages":[{"role":"user","content":"b d e"}],"tools":[]}`, `"input_tokens":`, 0},
			{"ids become text", "/detokenize", fmt.Sprintf(`{"model":"ref","tokens":[%d]}`, reftext.FirstAnswerID), `"prompt":"`, 0},
			{"a model without a prefill engine is embedded", "/v1/embeddings", `{"model":"emb","input":"one two"}`, vector("one two"), 2},
			{"several texts are embedded", "/v1/embeddings", `{"model":"emb","input":["one","two"]}`, vector("two"), 2},
			{"documents are put in an order", "/v1/rerank", `{"model":"emb","query":"q","documents":["a","b","c"]}`, `"relevance_score":`, 4},
			{"texts are compared", "/v1/score", `{"model":"emb","text_1":"a","text_2":"b"}`, fmt.Sprintf(`"score":%v`, plain.Alike("a", "b")), 2},
			{"documents by the second name", "/v2/rerank", `{"model":"emb","query":"q","documents":["a","b","c"]}`, `"relevance_score":`, 4},
			{"documents by the short name", "/rerank", `{"model":"emb","query":"q","documents":["a","b","c"]}`, `"relevance_score":`, 4},
			{"texts by the short name", "/score", `{"model":"emb","text_1":"a","text_2":"b"}`, fmt.Sprintf(`"score":%v`, plain.Alike("a", "b")), 2},
			{"a text is classified", "/classify", `{"model":"emb","input":"a"}`, `"num_classes":2`, 1},
			{"a text is pooled", "/pooling", `{"model":"emb","input":"a b c"}`, vector("a b c"), 3},
			{"embeddings come as base64", "/v1/embeddings", `{"model":"emb","input":"a","encoding_format":"base64"}`, `"embedding":"`, 1},
		} {
			t.Run(row.name, func(t *testing.T) {
				id := strings.ReplaceAll(row.name, " ", "-")
				r := b.Post(row.path, row.body, "X-Request-Id", id)
				require.Equal(t, http.StatusOK, r.Status, r.Body)
				require.Contains(t, r.Body, row.want)
				require.Equal(t, "application/json", r.Header.Get("Content-Type"))
				require.Equal(t, "passed-through", r.Header.Get("X-Evenkeel-Route"))
				require.NotEmpty(t, r.Header.Get("X-Evenkeel-Engine"))
				require.Equal(t, "1", r.Header.Get("X-Evenkeel-Attempts"))
				kept := b.receipt(id)
				require.Equal(t, "ok", kept.Outcome)
				require.Equal(t, row.path, kept.Endpoint)
				require.Equal(t, "passed-through", kept.Route)
				require.Equal(t, row.prompt, kept.PromptTokens)
				require.Len(t, kept.Attempts, 1)
				require.Equal(t, r.Header.Get("X-Evenkeel-Engine"), kept.Attempts[0].Engine)
			})
		}
		t.Run("bytes come with the header that says what they are", func(t *testing.T) {
			r := b.Post("/v1/embeddings", `{"model":"emb","input":"a b","encoding_format":"bytes"}`, "X-Request-Id", "bytes")
			require.Equal(t, http.StatusOK, r.Status)
			require.Equal(t, "application/octet-stream", r.Header.Get("Content-Type"))
			require.Len(t, r.Body, 16)
			require.Contains(t, r.Header.Get("Metadata"), `"prompt_tokens":2`)
			require.Equal(t, 2, b.receipt("bytes").PromptTokens)
		})
		t.Run("a transcription is streamed", func(t *testing.T) {
			body, kind := form(t, "speech", "model", "ears", "stream", "true")
			r := b.Post(transcriptions, body, "Content-Type", kind, "X-Request-Id", "streamed")
			require.Equal(t, http.StatusOK, r.Status, r.Body)
			require.NoError(t, r.Err)
			require.Contains(t, r.Header.Get("Content-Type"), "text/event-stream")
			require.Equal(t, 7, strings.Count(r.Body, "data: "))
			require.True(t, strings.HasSuffix(r.Body, "data: [DONE]\n\n"))
			require.True(t, b.receipt("streamed").Stream)
		})
		b.Eventually("each is in the request log", func() bool { return len(b.Outcomes()) >= 16 })
		for _, outcome := range b.Outcomes() {
			require.Equal(t, "ok", outcome)
		}
		require.EqualValues(t, 4, b.Metric(`evenkeel_passed_seconds_count{endpoint="/v1/embeddings"}`))
		require.EqualValues(t, 1, b.Metric(`evenkeel_passed_seconds_count{endpoint="/v1/audio/transcriptions"}`))
	})
	// A client of HTTP/1.0, such as many reverse proxies, never gets a Transfer-Encoding, in whatever
	// way it is answered.
	t.Run("clients of HTTP/1.0 get them, and others, in no chunks", func(t *testing.T) {
		heard, kind := form(t, "speech", "model", "ears", "stream", "true")
		for _, row := range []struct {
			name, method, path, body, kind string
			status                         int
			stream                         bool
		}{
			{"an answer that is streamed", "POST", refclient.ChatPath, chat("one two", `"stream":true,"max_tokens":20,`), "", 200, true},
			{"a short answer that is streamed", "POST", refclient.ChatPath, chat("one two", `"stream":true,"max_tokens":2,`), "", 200, true},
			{"several answers that are streamed", "POST", refclient.ChatPath, chat("one two", `"stream":true,"n":2,"max_tokens":20,`), "", 200, true},
			{"a whole answer", "POST", refclient.ChatPath, chat("one two", `"max_tokens":20,`), "", 200, false},
			{"a refused request", "POST", refclient.ChatPath, `{`, "", 400, false},
			{"a list", "GET", "/v1/models", "", "", 200, false},
			{"a path that is not there", "GET", "/other", "", "", 404, false},
			{"a whole answer that is passed through", "POST", "/v1/embeddings", embedding, "", 200, false},
			{"a streamed answer that is passed through", "POST", transcriptions, heard, kind, 200, true},
			{"a refusal of an engine", "POST", "/v1/embeddings", `{"model":"emb"}`, "", 400, false},
		} {
			t.Run(row.name, func(t *testing.T) {
				if row.kind == "" {
					row.kind = "application/json"
				}
				conn := b.raw(fmt.Sprintf("%s %s HTTP/1.0\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", row.method, row.path, row.kind,
					len(row.body), row.body))
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				require.NoError(t, err)
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.Equal(t, row.status, resp.StatusCode, string(body))
				require.Empty(t, resp.TransferEncoding)
				require.Equal(t, row.stream, strings.HasSuffix(string(body), "data: [DONE]\n\n"), string(body))
				require.Equal(t, row.stream, resp.ContentLength < 0)
				if row.stream {
					require.True(t, resp.Close)
				}
				_, err = conn.Read(make([]byte, 1))
				require.ErrorIs(t, err, io.EOF, "the connection ends with the answer")
			})
		}
		b.Eventually("nothing runs any more", func() bool { return b.Metric("evenkeel_requests_open") == 0 })
	})
}

// served waits until an engine of the model is up.
func (b *bed) served(model string, engines int) {
	b.Helper()
	b.Eventually("engines of "+model+" are up", func() bool { return b.Sum("evenkeel_engine_up") >= float64(2+engines) })
	b.Eventually(model+" is listed", func() bool {
		return strings.Contains(b.Ask(http.MethodGet, b.URL+"/v1/models", "").Body, `"`+model+`"`)
	})
}

const embedding = `{"model":"emb","input":"a"}`

// raw sends text on a connection of its own and leaves it open.
func (b *bed) raw(text string) net.Conn {
	conn, err := net.Dial("tcp", strings.TrimPrefix(b.URL, "http://"))
	require.NoError(b, err)
	b.Cleanup(func() { _ = conn.Close() })
	require.NoError(b, conn.SetDeadline(time.Now().Add(patience)))
	_, _ = io.WriteString(conn, text) // an answer that came before the end may be a reset here
	return conn
}

const transcriptions = "/v1/audio/transcriptions"
