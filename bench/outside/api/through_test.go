package api

import (
	"io"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
)

// Engines of models that have no prefill engine.
var (
	pooling = refengine.Config{Model: refengine.Model{Name: "emb", Task: plain.Pooling}}
	ears    = refengine.Config{Model: refengine.Model{Name: "ears", Task: plain.Transcription}}
)

func TestPassedThrough(t *testing.T) {
	t.Parallel()
	c := start(t, options{decode: []refengine.Config{{}, pooling, ears}})
	client := c.client()
	t.Run("embeddings and a transcription", func(t *testing.T) {
		got, err := client.Embeddings.New(t.Context(),
			openai.EmbeddingNewParams{Model: "emb", Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("one two")}})
		require.NoError(t, err)
		require.Len(t, got.Data, 1)
		require.InDelta(t, plain.Vector("one two")[0], got.Data[0].Embedding[0], 1e-6)
		require.EqualValues(t, 2, got.Usage.PromptTokens)

		file := func() io.Reader { return openai.File(strings.NewReader("speech of today"), "speech.wav", "audio/wav") }
		heard, err := client.Audio.Transcriptions.New(t.Context(), openai.AudioTranscriptionNewParams{Model: "ears", File: file()})
		require.NoError(t, err)
		require.Equal(t, plain.Heard([]byte("speech of today")), heard.Text)
	})
	t.Run("a translation", func(t *testing.T) {
		file := openai.File(strings.NewReader("speech of today"), "speech.wav", "audio/wav")
		params := openai.AudioTranslationNewParams{Model: "ears", File: file}
		said, err := client.Audio.Translations.New(t.Context(), params) //nolint:staticcheck // OpenAI calls it deprecated, and vLLM serves it
		require.NoError(t, err)
		require.Equal(t, plain.Heard([]byte("speech of today")), said.Text)
	})
}
