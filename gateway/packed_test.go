package gateway_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

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

// packing is a transport that packs each body, as proxies and agents do that send long histories.
type packing struct {
	t    testing.TB
	how  string
	next http.RoundTripper
}

func (p packing) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		return p.next.RoundTrip(r)
	}
	plain, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	_ = r.Body.Close()
	body := packed(p.t, p.how, string(plain))
	r = r.Clone(r.Context())
	r.Header.Set("Content-Encoding", p.how)
	r.Body, r.ContentLength, r.GetBody = io.NopCloser(strings.NewReader(body)), int64(len(body)), nil
	return p.next.RoundTrip(r)
}

func TestTheOfficialClientMayPackItsRequests(t *testing.T) {
	t.Parallel()
	c := start(t, takesMessages(options{
		prefill: []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}},
		decode:  []refengine.Config{{DPSize: 2, PromptTokensDetails: true}, pooling(), {Model: "ears", Task: plain.Transcription}},
	}))
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	for _, how := range []string{"gzip", "zstd"} {
		t.Run(how, func(t *testing.T) {
			packs := &http.Client{Transport: packing{t, how, c.http.Transport}}
			client := c.client(option.WithHTTPClient(packs))

			whole, err := client.Chat.Completions.New(t.Context(), ask(prompt))
			require.NoError(t, err)
			wholeText(t, key, whole.Choices[0].Message.Content)
			require.EqualValues(t, 300, whole.Usage.PromptTokens)
			stream, text := client.Chat.Completions.NewStreaming(t.Context(), ask(prompt)), ""
			for stream.Next() {
				for _, choice := range stream.Current().Choices {
					text += choice.Delta.Content
				}
			}
			require.NoError(t, stream.Err())
			wholeText(t, key, text)

			completed, err := client.Completions.New(t.Context(), openai.CompletionNewParams{Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String(prompt)}})
			require.NoError(t, err)
			require.NotEmpty(t, completed.Choices[0].Text)
			response, err := client.Responses.New(t.Context(), responses.ResponseNewParams{Model: model, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt)}})
			require.NoError(t, err)
			wholeText(t, key, response.OutputText())

			vectors, err := client.Embeddings.New(t.Context(), openai.EmbeddingNewParams{Model: "emb", Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("one two")}})
			require.NoError(t, err)
			require.InDelta(t, plain.Vector("one two")[0], vectors.Data[0].Embedding[0], 1e-6)
			file := openai.File(strings.NewReader("speech of today"), "speech.wav", "audio/wav")
			heard, err := client.Audio.Transcriptions.New(t.Context(), openai.AudioTranscriptionNewParams{Model: "ears", File: file})
			require.NoError(t, err)
			require.Equal(t, plain.Heard([]byte("speech of today")), heard.Text)

			for path, body := range map[string]string{
				messagesPath: wordsOf(prompt, ""), messagesPath + "/count_tokens": wordsOf(prompt, ""), "/tokenize": completion(prompt, ""),
			} {
				r := c.post(path, packed(t, how, body), "Content-Encoding", how)
				require.Equal(t, http.StatusOK, r.status, "%s: %s", path, r.body)
			}
		})
	}
	c.eventually("no body holds memory any more", func() bool { return c.sum("evenkeel_bodies_bytes") == 0 })
}

func TestAPackedBodyThatIsRefused(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, pooling()}, configure: func(cfg *config.Config) { cfg.Limits.Body = 64 << 10 }})
	long := chat(strings.Repeat("a ", 32<<10), "")
	for _, path := range []string{chatPath, completionPath, messagesPath, responsesPath, "/v1/embeddings", transcriptions} {
		for _, row := range []struct {
			name, how, body string
			status          int
			code            string
		}{
			{"a coding that is not known", "br", chat("a", ""), http.StatusUnsupportedMediaType, "unsupported_encoding"},
			{"two codings", "identity, gzip, zstd", packed(t, "gzip", chat("a", "")), http.StatusUnsupportedMediaType, "unsupported_encoding"},
			{"another coding than it says", "zstd", packed(t, "gzip", chat("a", "")), http.StatusBadRequest, "bad_encoding"},
			{"a body that is cut off", "gzip", packed(t, "gzip", chat("a", ""))[:30], http.StatusBadRequest, "bad_encoding"},
			{"a bomb of gzip", "gzip", packed(t, "gzip", long), http.StatusRequestEntityTooLarge, "body_too_large"},
			{"a bomb of zstd", "zstd", packed(t, "zstd", long), http.StatusRequestEntityTooLarge, "body_too_large"},
		} {
			r := c.post(path, row.body, "Content-Encoding", row.how)
			require.Equal(t, row.status, r.status, "%s, %s: %s", path, row.name, r.body)
			if path != messagesPath { // errors of Anthropic's API have no code
				require.Contains(t, r.body, `"`+row.code+`"`, "%s, %s", path, row.name)
			}
			require.Equal(t, row.status == http.StatusUnsupportedMediaType, r.header.Get("Accept-Encoding") == "gzip, zstd")
			require.NotEmpty(t, r.header.Get("X-Request-Id"))
		}
	}
	require.Equal(t, 200, c.post(chatPath, chat("one", ""), "Content-Encoding", "identity").status)
	require.EqualValues(t, 1, c.prefill[0].Stats().Requests)
}

// What another proxy signs is the body as it is sent.
func TestAnotherProxyMayPackARequest(t *testing.T) {
	t.Parallel()
	c := alone(t, nil)
	keys, err := geo.ParseKeys(geoKey)
	require.NoError(t, err)
	body := packed(t, "gzip", chat("one", ""))
	h := c.hopFrom("eu-1", body)
	r := c.deliver(chatPath, body, append(papers(keys, chatPath, &h), geo.TenantHeader, "t", "Content-Encoding", "gzip")...)
	require.Equal(t, http.StatusOK, r.status, r.body)
}
