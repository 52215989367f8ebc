package admin

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
)

// bodies are the calls that read one.
var bodies = []struct{ method, path string }{
	{http.MethodPost, "/workers"}, {http.MethodPut, "/policy"}, {http.MethodPost, "/instances/add"}, {http.MethodPost, "/instances/remove"},
	{http.MethodPost, "/workers/127.77.0.1:9/drain"}, {http.MethodPost, "/workers/127.77.0.1:9/0/drain"},
}

// Whatever is sent to the admin listener is taken or refused in words, and what
// was added can be found and removed.
func FuzzBodies(f *testing.F) {
	for i, seeds := range [][]string{
		{`{"url":"http://127.77.0.1:9"}`, `{"role":"prefill","url":"127.77.0.2:80","ranks":4,"slots":1,"cost":2}`, `{"url":"http://127.77.0.3:9","group":"g","barrier":"none","kv_tokens":-1}`, `{"url":"http://8.8.8.8"}`, `{"URL":1}`},
		{`{"policy":"br0:window=3"}`, `{"policy":""}`, `{"policy":"brh,br0"}`, `{"policies":1}`},
		{`{"type":"decode","instances":"127.77.0.1:9"}`, `{"type":"prefill","instances":["127.77.0.1:9","127.77.0.1:9",""]}`, `{"type":"x","instances":[1]}`},
		{`{"type":"decode","instances":["127.77.0.1:9"]}`},
		{`{"deadline":"5m"}`, `{"deadline":"-1s"}`, `{"deadline":9}`, ``, `{} {}`},
		{`{"deadline":"1ns"}`},
	} {
		for _, s := range seeds {
			f.Add(uint8(i), []byte(s))
		}
	}
	_, h := nowhere(f)
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		to := bodies[int(which)%len(bodies)]
		known := engines(t, h)
		w := ask(h, to.method, to.path, string(body))
		switch {
		case w.Code/100 == 2:
		case w.Code/100 == 4:
			var said struct {
				Error struct{ Message, Code string }
			}
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &said), "%q", w.Body)
			require.NotEmpty(t, said.Error.Message)
			require.NotEmpty(t, said.Error.Code)
		default:
			t.Fatalf("%s %s %q: status %d: %s", to.method, to.path, body, w.Code, w.Body)
		}
		now := engines(t, h)
		for id := range known {
			require.True(t, now[id] || to.path == "/instances/remove", "%s is gone", id)
		}
		for id := range now {
			if id == "decode 127.77.0.1:9" || id == "prefill 127.77.0.1:9" {
				continue // the file's
			}
			role, address, _ := strings.Cut(id, " ")
			w := ask(h, http.MethodDelete, "/workers/"+address+"?role="+role, "")
			require.Equal(t, http.StatusNoContent, w.Code, "%s was added and cannot be removed: %s", id, w.Body)
		}
		for _, role := range []string{"decode", "prefill"} {
			if !now[role+" 127.77.0.1:9"] {
				w := ask(h, http.MethodPost, "/workers", `{"role":"`+role+`","url":"http://127.77.0.1:9"}`)
				require.Equal(t, http.StatusCreated, w.Code, "%s", w.Body)
			}
		}
	})
}

// nowhere is a proxy whose engines are nowhere, and its listener: nobody listens on
// these addresses, and no others may be added.
func nowhere(t testing.TB) (*gateway.Gateway, http.Handler) {
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen, cfg.Admin.WorkerHosts = "127.0.0.1:0", "127.0.0.1:0", []string{"127.77.0.0/16"}
	cfg.Engines.Prefill = []config.Engine{{URL: "http://127.77.0.1:9"}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.77.0.1:9", Slots: 1}}
	require.NoError(t, cfg.Validate())
	g, err := gateway.New(cfg, zap.NewNop())
	require.NoError(t, err)
	h, err := New(g, Options{Log: zap.NewNop()})
	require.NoError(t, err)
	require.NoError(t, g.Start(h))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, g.Shutdown(ctx))
	})
	return g, h
}

func ask(h http.Handler, method, path, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Host = "localhost"
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// engines are those there are, "role host:port".
func engines(t *testing.T, h http.Handler) map[string]bool {
	w := ask(h, http.MethodGet, "/status", "")
	require.Equal(t, http.StatusOK, w.Code)
	var s struct{ Engines []struct{ ID, Role string } }
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &s))
	all := map[string]bool{}
	for _, e := range s.Engines {
		require.False(t, all[e.Role+" "+e.ID], "%s %s is there twice", e.Role, e.ID)
		all[e.Role+" "+e.ID] = true
	}
	return all
}
