package plain

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEndpointsBelongToTasks(t *testing.T) {
	for path, tasks := range map[string][]Task{
		"/detokenize": Tasks, "/v1/embeddings": {Pooling}, "/v1/audio/transcriptions": {Transcription}, "/v1/chat/completions": nil,
	} {
		for _, task := range Tasks {
			_, ok := Has(task, path)
			require.Equal(t, strings.Contains(string(mustJSON(t, tasks)), string(mustJSON(t, task))), ok, "%s of %q", path, task)
		}
	}
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	require.NoError(t, err)
	return b
}

func TestAnswersFollowFromTheInput(t *testing.T) {
	ask := func(path, body string) Answer {
		serve, ok := Has(Pooling, path)
		require.True(t, ok)
		return serve(Request{Model: "emb", Body: []byte(body)})
	}
	one, same, other := ask("/v1/embeddings", `{"input":"a"}`), ask("/v1/embeddings", `{"input":"a"}`), ask("/v1/embeddings", `{"input":"b"}`)
	require.Equal(t, string(one.Body), string(same.Body))
	require.NotEqual(t, string(one.Body), string(other.Body))
	require.Equal(t, 1, one.Tokens)
	require.Equal(t, http.StatusNotFound, ask("/v1/embeddings", `{"model":"other","input":"a"}`).Status)
	require.Equal(t, http.StatusBadRequest, ask("/v1/score", `{`).Status)
	require.Equal(t, http.StatusBadRequest, ask("/v1/embeddings", `{}`).Status)
}
