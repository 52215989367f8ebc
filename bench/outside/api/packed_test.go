package api

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
	c := start(t, options{
		connector: refengine.NIXLPull,
		decode:    []refengine.Config{{DPSize: 2, Answers: refengine.Answers{PromptTokensDetails: true}}, pooling, ears},
	})
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

			completed, err := client.Completions.New(t.Context(),
				openai.CompletionNewParams{Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String(prompt)}})
			require.NoError(t, err)
			require.NotEmpty(t, completed.Choices[0].Text)
			response, err := client.Responses.New(t.Context(),
				responses.ResponseNewParams{Model: model, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt)}})
			require.NoError(t, err)
			wholeText(t, key, response.OutputText())

			vectors, err := client.Embeddings.New(t.Context(),
				openai.EmbeddingNewParams{Model: "emb", Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("one two")}})
			require.NoError(t, err)
			require.InDelta(t, plain.Vector("one two")[0], vectors.Data[0].Embedding[0], 1e-6)
			file := openai.File(strings.NewReader("speech of today"), "speech.wav", "audio/wav")
			heard, err := client.Audio.Transcriptions.New(t.Context(), openai.AudioTranscriptionNewParams{Model: "ears", File: file})
			require.NoError(t, err)
			require.Equal(t, plain.Heard([]byte("speech of today")), heard.Text)
		})
	}
}
