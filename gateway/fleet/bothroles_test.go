package fleet_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// oneStandstill is an engine of both roles whose first decode call gets no event. It keeps the
// prefill calls that it was sent.
type oneStandstill struct {
	recorder
	probes [][]byte
	stood  bool
}

func (e *oneStandstill) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	e.mu.Lock()
	isProbe, isStream := bytes.Contains(body, []byte(`"do_remote_decode":true`)), bytes.Contains(body, []byte(`"stream":true`))
	if isProbe {
		e.probes = append(e.probes, body)
	}
	standsStill := isStream && !e.stood
	e.stood = e.stood || standsStill
	e.mu.Unlock()
	if standsStill {
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return
	}
	e.recorder.ServeHTTP(w, r)
}

// An engine of both roles that read KV too late may have another prompt's KV in its prefix cache.
// Its prefill calls must not find it there
// either: they would hand it over to a decode engine.
func TestAPrefillDoesNotFindWhatItsEngineReadTooLate(t *testing.T) {
	t.Parallel()
	const hold = 2 * time.Second
	e := &oneStandstill{recorder: recorder{bodies: map[string][]byte{}, header: map[string]http.Header{}}}
	engine := httptest.NewServer(e)
	defer engine.Close()
	b := start(t, options{
		dirty: true, profile: mooncake.Profile{KVHoldTimeout: hold}, prefill: []refengine.Config{}, decode: []refengine.Config{},
		configure: func(cfg *config.Config) {
			cfg.Prefill.Scrape.Interval = 0 // this engine has no metrics
			cfg.Engines.Prefill = []config.Engine{{URL: engine.URL}}
			cfg.Engines.Decode = []config.Engine{{URL: engine.URL, Slots: 1}}
		},
	})
	r := b.Post(refclient.ChatPath, chat("a", streamed))
	require.Equal(t, 200, r.Status, r.Body)
	e.mu.Lock()
	defer e.mu.Unlock()
	require.Len(t, e.probes, 2, "the answer that did not begin in time is withheld, and its prompt prefilled again")
	var before, after struct {
		Salt string `json:"cache_salt"`
	}
	require.NoError(t, json.Unmarshal(e.probes[0], &before))
	require.NoError(t, json.Unmarshal(e.probes[1], &after))
	require.NotEmpty(t, before.Salt, "another process of the proxy may have had it read something too late")
	require.NotEmpty(t, after.Salt)
	require.NotEqual(t, before.Salt, after.Salt)
}
