package admin

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// A tool that reads errors as JSON gets JSON for a wrong method or path, too.
func TestWhatNoRouteTakesIsAnsweredAsJSON(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /policy", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("PUT /policy", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("DELETE /workers/{id}", func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Id", r.PathValue("id")) })
	h := answerUnknownRoutes(mux)
	for _, tt := range []struct {
		method, path string
		status       int
		code, says   string
	}{
		{"POST", "/policy", http.StatusMethodNotAllowed, "method_not_allowed", "/policy takes GET, HEAD, PUT, not POST"},
		{"GET", "/workers/a:1", http.StatusMethodNotAllowed, "method_not_allowed", "/workers/a:1 takes DELETE, not GET"},
		{"GET", "/polcy", http.StatusNotFound, "not_found", "nothing at /polcy"},
	} {
		w := ask(h, tt.method, tt.path, "")
		require.Equal(t, tt.status, w.Code)
		require.Equal(t, "application/json", w.Header().Get("Content-Type"))
		require.Equal(t, tt.status == http.StatusMethodNotAllowed, w.Header().Get("Allow") != "")
		var answer struct {
			Error struct{ Message, Code string }
		}
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer), w.Body.String())
		require.Equal(t, tt.code, answer.Error.Code)
		require.Contains(t, answer.Error.Message, tt.says)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodDelete, "/workers/a:1", nil))
	require.Equal(t, "a:1", w.Header().Get("Id"), "routes see their paths")
}
