package gateway_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/gateway/config"
)

// What a page of a listed site may read: each kind of answer, and each kind of refusal. A page of another site, and
// every page where none is listed, may read nothing.
func TestAPageReadsWhatItsSiteMay(t *testing.T) {
	t.Parallel()
	const ours, theirs = "https://chat.example", "https://other.example"
	for name, row := range map[string]struct{ origins, may, mayNot []string }{
		"no site":   {nil, nil, []string{ours, theirs, "null"}},
		"two sites": {[]string{ours, "http://localhost:3000"}, []string{ours, "http://localhost:3000"}, []string{theirs, "null", "https://chat.example.evil", "http://chat.example"}},
		"all sites": {[]string{"*"}, []string{ours, theirs, "null"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{decode: []refengine.Config{{}, {Model: "emb", Task: plain.Pooling}}, configure: func(cfg *config.Config) {
				cfg.CORS.Origins, cfg.Limits.Body = row.origins, 64<<10
			}})
			listed := len(row.origins) > 0 && row.origins[0] != "*"
			long := strings.Repeat("a", 70<<10)
			for _, ask := range []struct {
				method, path, body string
				status             int
				header             []string
			}{
				{"POST", chatPath, chat("a", ""), 200, nil},
				{"POST", chatPath, chat("a", `"stream":true,`), 200, nil},
				{"POST", chatPath, chat("a", `"stream":true,"n":2,`), 200, nil},
				{"POST", "/v1/embeddings", `{"model":"emb","input":"a"}`, 200, nil},
				{"GET", "/v1/models", "", 200, nil},
				{"GET", "/health", "", 200, nil},
				{"POST", chatPath, "{", 400, nil},
				{"POST", chatPath, chat(long, ""), 413, nil},
				{"POST", chatPath, chat("a", ""), 415, []string{"Content-Encoding", "br"}},
				{"POST", messagesPath, "{", 400, nil},
				{"GET", chatPath, "", 405, nil},
				{"GET", "/nowhere", "", 404, nil},
				{"POST", chatPath, strings.Replace(chat("a", ""), model, "gone", 1), 404, nil},
			} {
				for _, origin := range append(append([]string{""}, row.may...), row.mayNot...) {
					header := ask.header
					if origin != "" {
						header = append([]string{"Origin", origin}, ask.header...)
					}
					r := c.ask(ask.method, c.url+ask.path, ask.body, header...)
					require.NoError(t, r.err)
					require.Equal(t, ask.status, r.status, "%s %s: %s", ask.method, ask.path, r.body)
					at, want, exposed := ask.method+" "+ask.path+" from "+origin, []string(nil), []string(nil)
					for _, may := range row.may {
						if origin == may {
							want, exposed = []string{may}, []string{"*"}
							if !listed {
								want = []string{"*"}
							}
						}
					}
					require.Equal(t, want, r.header.Values("Access-Control-Allow-Origin"), at)
					require.Equal(t, exposed, r.header.Values("Access-Control-Expose-Headers"), at)
					require.Equal(t, listed, strings.Contains(strings.Join(r.header.Values("Vary"), ","), "Origin"), at)
					require.Empty(t, r.header.Values("Access-Control-Allow-Credentials"), at)
				}
			}
			for _, origin := range append(append([]string{}, row.may...), row.mayNot...) {
				r := c.ask(http.MethodOptions, c.url+chatPath, "", "Origin", origin, "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization,content-type")
				if allowed := r.header.Get("Access-Control-Allow-Origin"); allowed == "" {
					require.Contains(t, row.mayNot, origin)
					require.Equal(t, http.StatusMethodNotAllowed, r.status)
					require.Empty(t, r.header.Values("Access-Control-Allow-Headers"))
					continue
				}
				require.Contains(t, row.may, origin)
				require.Equal(t, http.StatusNoContent, r.status, "without a key")
				require.Equal(t, []string{"POST", "authorization,content-type", "600"},
					[]string{r.header.Get("Access-Control-Allow-Methods"), r.header.Get("Access-Control-Allow-Headers"), r.header.Get("Access-Control-Max-Age")})
				require.Equal(t, http.StatusMethodNotAllowed, c.ask(http.MethodOptions, c.url+chatPath, "", "Origin", origin).status, "that is no preflight")
				require.Equal(t, http.StatusNotFound, c.ask(http.MethodOptions, c.url+"/nowhere", "", "Origin", origin, "Access-Control-Request-Method", "POST").status)
			}
		})
	}
}
