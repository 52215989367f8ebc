package gateway_test

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

var nextHour = time.Now().Add(time.Hour)

// tlsCluster is a cluster whose listeners have a certificate of the authority.
func tlsCluster(t *testing.T, a *certtest.Authority, configure func(*config.Config)) *cluster {
	certFile, keyFile := a.Issue(t, "proxy", nextHour)
	return start(t, options{ca: a, configure: func(cfg *config.Config) {
		cfg.TLS = config.TLS{CertFile: certFile, KeyFile: keyFile}
		cfg.Admin.TLS = cfg.TLS
		if configure != nil {
			configure(cfg)
		}
	}})
}

// Both listeners have a certificate of an hour.
func TestListenersThatSpeakTLS(t *testing.T) {
	t.Parallel()
	a := certtest.New(t)
	c := tlsCluster(t, a, nil)
	t.Run("both serve, and nothing in clear text or an old version", func(t *testing.T) {
		require.Equal(t, "right", c.Judge("a story over TLS", `"stream":true,`))
		require.Equal(t, "right", c.Judge("and one in one piece", ""))
		require.Equal(t, 200, c.get("/status").Status)

		t.Run("clear text is not served", func(t *testing.T) {
			for _, url := range []string{c.URL + "/health", c.admin + "/livez"} {
				r := c.Ask("GET", "http"+strings.TrimPrefix(url, "https"), "")
				require.True(t, r.Err != nil || r.Status == http.StatusBadRequest, "%+v", r)
			}
		})
		t.Run("TLS 1.1 is not spoken", func(t *testing.T) {
			for _, url := range []string{c.URL, c.admin} {
				_, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{RootCAs: a.Pool(), MaxVersion: tls.VersionTLS11})
				require.Error(t, err)
			}
		})
	})
	t.Run("a client that leaves is noticed", func(t *testing.T) {
		for name, leave := range map[string]func(raw *net.TCPConn, secure *tls.Conn){
			"closed":         func(_ *net.TCPConn, secure *tls.Conn) { _ = secure.Close() },
			"cut":            func(raw *net.TCPConn, _ *tls.Conn) { _ = raw.Close() },
			"reset":          func(raw *net.TCPConn, _ *tls.Conn) { _, _ = raw.SetLinger(0), raw.Close() },
			"TCP half close": func(raw *net.TCPConn, _ *tls.Conn) { _ = raw.CloseWrite() },
		} {
			t.Run(name, func(t *testing.T) {
				raw, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "https://"))
				require.NoError(t, err)
				defer func() { _ = raw.Close() }()
				secure := tls.Client(raw, &tls.Config{RootCAs: a.Pool(), ServerName: "proxy"})
				body := chat("an endless story", `"stream":true,"ignore_eos":true,`)
				_, err = fmt.Fprintf(secure, "POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				require.NoError(t, err)
				resp, err := http.ReadResponse(bufio.NewReader(secure), nil)
				require.NoError(t, err)
				require.Equal(t, 200, resp.StatusCode)
				_, err = resp.Body.Read(make([]byte, 1))
				require.NoError(t, err)
				require.EqualValues(t, 1, c.Decode[0].Stats().Running)
				leave(raw.(*net.TCPConn), secure)
				c.Eventually("the engine notices", func() bool { return c.Decode[0].Stats().Running == 0 })
				_ = resp.Body.Close()
			})
		}
	})
	t.Run("a new certificate is in force within seconds", func(t *testing.T) {
		serial := func(url string) string {
			conn, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{RootCAs: a.Pool(), ServerName: "proxy"})
			require.NoError(t, err)
			defer func() { _ = conn.Close() }()
			return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
		}
		first := serial(c.URL)
		require.Equal(t, first, serial(c.admin))
		leave := c.Endless()
		a.Issue(t, "proxy", nextHour)
		c.Eventually("both listeners have it", func() bool { return serial(c.URL) != first && serial(c.admin) != first })
		require.EqualValues(t, 1, c.Decode[0].Stats().Running, "what runs goes on")
		leave()
		require.NotZero(t, c.logs.FilterMessage("a changed file is in force now").Len())
		require.EqualValues(t, 1, c.Metric(`evenkeel_reloads_total{key="tls",outcome="used"}`))
		require.InDelta(t, nextHour.Unix(), c.Metric(`evenkeel_certificate_expiry_timestamp_seconds{key="admin.tls"}`), 2)
	})
	// What the alerts on certificates page for, the page tells, too.
	t.Run("one that ends is told on the page", func(t *testing.T) {
		incidents := func() string {
			body := c.get("/live?once").Body
			var d struct {
				Incidents []struct{ Severity, What string } `json:"incidents"`
			}
			require.NoError(t, json.Unmarshal([]byte(body), &d), body)
			return fmt.Sprint(d.Incidents)
		}
		for _, want := range []string{"{bad The certificate of tls ends in less than two hours}",
			"{bad The certificate of admin.tls ends in less than two hours}"} {
			c.Eventually(want, func() bool { return strings.Contains(incidents(), want) })
		}
		a.Issue(t, "proxy", time.Now().Add(3*24*time.Hour+time.Minute))
		c.Eventually("days are left", func() bool { return strings.Contains(incidents(), "{warn The certificate of tls ends in 3 days}") })
	})
}

// A socket that never gets as far as a request is a slot of limits.connections.
func TestAHandshakeThatStopsIsClosed(t *testing.T) {
	t.Parallel()
	c := tlsCluster(t, certtest.New(t), func(cfg *config.Config) { cfg.Limits.ReadTimeout = time.Second })
	for name, begin := range map[string]string{
		"nothing":               "",
		"half of a ClientHello": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
		"no TLS at all":         "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "https://"))
			require.NoError(t, err)
			defer func() { _ = raw.Close() }()
			require.NoError(t, raw.SetDeadline(time.Now().Add(patience)))
			_, err = raw.Write([]byte(begin))
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, raw)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "still open")
		})
	}
}

func TestEnginesBehindTLS(t *testing.T) {
	t.Parallel()
	a := certtest.New(t)
	cert, key := a.Issue(t, "proxy", nextHour)
	server := a.Server(t, "engine")
	server.ClientAuth, server.ClientCAs = tls.RequireAndVerifyClientCert, a.Pool()
	front := func(e *config.Engine) { // a terminator before the engine, as a sidecar is
		target, err := url.Parse(e.URL)
		require.NoError(t, err)
		ln, err := tls.Listen("tcp", "127.0.0.1:0", server)
		require.NoError(t, err)
		proxy := httputil.NewSingleHostReverseProxy(target)
		proxy.FlushInterval = -1
		proxy.ErrorLog = log.New(io.Discard, "", 0)
		transport := &http.Transport{DisableCompression: true}
		proxy.Transport = transport
		s := &http.Server{Handler: proxy}
		go func() { _ = s.Serve(ln) }()
		t.Cleanup(func() {
			_ = s.Close()
			transport.CloseIdleConnections()
		})
		e.URL = "https://" + ln.Addr().String()
	}
	c := start(t, options{
		profile: mooncake.Profile{CAFile: a.File, CertFile: cert, KeyFile: key, ServerName: "engine"},
		decode:  []refengine.Config{{}},
		configure: func(cfg *config.Config) {
			front(&cfg.Engines.Prefill[0])
			front(&cfg.Engines.Decode[0])
		},
	})
	require.Equal(t, "right", c.Judge("a story from behind TLS", `"stream":true,`))

	mine, err := os.ReadFile(a.File)
	require.NoError(t, err)
	other, err := os.ReadFile(certtest.New(t).File)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(a.File, []byte("no PEM"), 0o600))
	c.Eventually("a file without an authority is told", func() bool { return c.Metric(`evenkeel_reloads_total{key="ca_file",outcome="refused"}`) == 1 })
	require.Equal(t, "right", c.Judge("and not used", ""))
	require.NoError(t, os.WriteFile(a.File, other, 0o600))
	c.Eventually("an authority that did not sign is not trusted",
		func() bool { return c.get("/readyz").Status == http.StatusServiceUnavailable })
	require.NoError(t, os.WriteFile(a.File, mine, 0o600))
	c.Eventually("and the one that did is again", func() bool { return c.get("/readyz").Status == http.StatusOK })
	require.Equal(t, "right", c.Judge("another story", ""))
}

func TestKeysOfCallers(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, "team ek-one , max_concurrent: 2", "ops ek-ops , trusted: true", "lists ek-lists , rpm: 2",
		"large ek-large , rpm: 2", "greedy ek-greedy", "modest ek-modest")
	c := start(t, options{configure: func(cfg *config.Config) {
		cfg.KeysFile, cfg.Limits.Body, cfg.Limits.Bodies = file, 1<<20, 2<<20
		cfg.Limits.ReadTimeout = time.Hour // a body that stops is held for as long as a busy machine takes to refuse others
	}})
	t.Run("a stranger's body is not read", func(t *testing.T) {
		conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "http://"))
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ek-wrong\r\nContent-Length: 30000000\r\n\r\n",
			refclient.ChatPath)
		require.NoError(t, err)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil) // not a byte of the body was sent
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusUnauthorized, resp.StatusCode, "not 413, and at once")
		require.Equal(t, "Bearer", resp.Header.Get("WWW-Authenticate"))
		require.EqualValues(t, 1, c.Metric(`evenkeel_requests_total{outcome="invalid_api_key"}`), "counted, though no handler saw it")
		require.Equal(t, 200, c.Post(refclient.ChatPath, chat(strings.Repeat("a ", 10_000), ""), "Authorization", "Bearer ek-one").Status)
	})
	t.Run("a trusted caller may ask for the way in headers", func(t *testing.T) {
		ask := func(key, body string) reply {
			return c.Post(refclient.ChatPath, body, "Authorization", "Bearer "+key, "X-Evenkeel-Explain", "true")
		}
		body := chat("hi", `"max_tokens":2,`)
		r := ask("ek-ops", body)
		got := c.receipt(r.Header.Get("X-Request-Id"))
		require.Equal(t, got.Attempts[0].Prefill.Candidate, r.Header.Get("X-Evenkeel-Prefill"))
		require.Equal(t, got.Attempts[0].Decode.Rank, r.Header.Get("X-Evenkeel-Decode"))
		require.Regexp(t, `^queue;dur=[0-9.]+, probe;dur=[0-9.]+, pool;dur=[0-9.]+, transfer;dur=[0-9.]+$`, r.Header.Get("X-Evenkeel-Waits"))
		require.Equal(t, "model_not_found", ask("ek-ops", strings.Replace(body, model, "none", 1)).Header.Get("X-Evenkeel-Reason"))
		for name := range ask("ek-one", body).Header {
			require.NotContains(t, strings.ToLower(name), "evenkeel", "names of engines are addresses")
		}
		for name := range c.Post(refclient.ChatPath, body, "Authorization", "Bearer ek-ops").Header {
			require.NotContains(t, strings.ToLower(name), "evenkeel", "nobody asked")
		}
	})
	t.Run("two keys are one too many", func(t *testing.T) {
		before := c.Prefill[0].Stats().Requests
		body := chat("a", "")
		for _, keys := range []string{"ek-one ek-two", "ek-two ek-one", "ek-one ek-one"} {
			first, second, _ := strings.Cut(keys, " ")
			conn := c.raw(strings.TrimPrefix(c.URL, "http://"),
				fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nauthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s",
					refclient.ChatPath, first, second, len(body), body))
			require.Equal(t, 400, status(t, conn))
		}
		require.Equal(t, before, c.Prefill[0].Stats().Requests)
	})
	// A request counts in its key's minute wherever it is refused.
	t.Run("what no handler serves counts in the minute of its key", func(t *testing.T) {
		addr := strings.TrimPrefix(c.URL, "http://")

		for range 2 {
			require.Equal(t, 200, c.Ask("GET", c.URL+"/v1/models", "", "Authorization", "Bearer ek-lists").Status)
		}
		r := c.Ask("GET", c.URL+"/v1/models", "", "Authorization", "Bearer ek-lists")
		require.Equal(t, 429, r.Status)
		code, _, _ := refclient.Failure(t, r)
		require.Equal(t, "rate_limit_exceeded", code)
		require.NotEmpty(t, r.Header.Get("Retry-After"))

		for range 2 {
			conn := c.raw(addr,
				"POST "+refclient.ChatPath+" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ek-large\r\nContent-Length: 1048577\r\n\r\n")
			require.Equal(t, 413, status(t, conn))
		}
		require.Equal(t, 429, c.Post(refclient.ChatPath, chat("a", ""), "Authorization", "Bearer ek-large").Status)
	})
	// A key that fills its share of the memory for bodies leaves room for others.
	t.Run("a key holds its share of bodies", func(t *testing.T) {
		body := strings.Repeat("x", 1<<20)
		head := func(key string) string {
			return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n", refclient.ChatPath, key,
				len(body))
		}
		c.raw(strings.TrimPrefix(c.URL, "http://"), head("ek-greedy")+body[1:])
		c.Eventually("one body is all but whole", func() bool { return c.Metric("evenkeel_bodies_bytes") == 1<<20 })
		for range 64 {
			conn := c.raw(strings.TrimPrefix(c.URL, "http://"), head("ek-greedy")+"hello")
			require.Equal(t, http.StatusServiceUnavailable, status(t, conn))
		}
		require.Equal(t, 200, c.Post(refclient.ChatPath, chat(strings.Repeat("a ", 10_000), ""), "Authorization", "Bearer ek-modest").Status)
	})
	t.Run("the file changes", func(t *testing.T) {
		status := func(key, more string) int {
			return c.Post(refclient.ChatPath, chat("a", more), "Authorization", "Bearer "+key).Status
		}
		require.Equal(t, 200, status("ek-one", ""))
		leave := c.Endless("Authorization", "Bearer ek-one")

		require.NoError(t, os.WriteFile(file, []byte("keys: []\n"), 0o600))
		c.Eventually("a file without keys is told", func() bool { return c.logs.FilterMessageSnippet("is not used").Len() == 1 })
		require.Equal(t, 200, status("ek-one", ""), "and not used")
		require.EqualValues(t, 1, c.Metric(`evenkeel_reloads_total{key="keys_file",outcome="refused"}`))

		refclient.KeyFile(t, file, "team ek-two , max_concurrent: 2", "other ek-other")
		c.Eventually("the new key is known", func() bool { return status("ek-two", "") == 200 })
		require.Equal(t, http.StatusUnauthorized, status("ek-one", ""), "the old one is not")
		require.Equal(t, 200, status("ek-other", ""))
		require.Equal(t, http.StatusTooManyRequests, status("ek-two", `"n":2,`), "one runs since before the change")
		require.Equal(t, http.StatusBadRequest, status("ek-two", `"n":3,`), "never")
		require.EqualValues(t, 1, c.Decode[0].Stats().Running, "what ran goes on")
		leave()
		c.settled(false)
		require.Equal(t, 200, status("ek-two", `"n":2,`))
		c.settled(false)
		require.Equal(t, 200, status("ek-two", `"n":2,`), "both places came back")
	})
}

// tokenIsAskedFor has a proxy whose token is sesame, by this file, asked by others. It has another
// token then.
func (c *cluster) tokenIsAskedFor(t *testing.T, file string) {
	t.Run("any name will do, where there is a token", func(t *testing.T) {
		const token = "Bearer sesame"
		require.Equal(t, 200, c.Ask("GET", c.admin+"/status", "", "Authorization", token, "Host", "proxy.pd.internal").Status)
		require.Equal(t, 403, c.Ask("POST", c.admin+"/drain", "", "Authorization", token, "Origin", "https://evil.example").Status)
		require.Equal(t, 200, c.Ask("GET", c.admin+"/status", "", "Authorization", "bearer sesame").Status, "schemes have no case")
		for _, header := range []string{"sesame", "Bearersesame", "Basic sesame", "Token sesame", "Bearer  sesame"} {
			require.Equal(t, 401, c.Ask("GET", c.admin+"/status", "", "Authorization", header).Status, header)
		}
		require.Equal(t, 401, c.Ask("POST", c.admin+"/workers", strings.Repeat("x", 8<<20), "Content-Type", "text/plain").Status,
			"the token comes first")
	})
	t.Run("each route but those of kubelets wants it, and it can be changed", func(t *testing.T) {
		without := func(method, path string, header ...string) int {
			req, err := http.NewRequestWithContext(t.Context(), method, c.admin+path, nil)
			require.NoError(t, err)
			if len(header) > 0 {
				req.Header.Set("Authorization", header[0])
			}
			resp, err := c.HTTP.Do(req)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			return resp.StatusCode
		}
		for _, path := range []string{"/livez", "/readyz"} {
			require.Equal(t, 200, without("GET", path), "kubelets have no token")
		}
		for path, method := range map[string]string{"/metrics": "GET", "/status": "GET", "/workers": "POST", "/policy": "PUT", "/drain": "POST",
			"/debug/pprof/": "GET", "/reset_prefix_cache": "POST", "/admin/fleet/call": "POST", "/instances/add": "POST"} {
			require.Equal(t, http.StatusUnauthorized, without(method, path), path)
			require.Equal(t, http.StatusUnauthorized, without(method, path, "Bearer ses"), path)
		}
		require.Equal(t, 200, without("GET", "/status", "Bearer sesame"))

		for _, empty := range []string{"", " \n"} {
			require.NoError(t, os.WriteFile(file, []byte(empty), 0o600))
			cfg := config.Default()
			cfg.Admin.TokenFile = file
			require.NoError(t, cfg.Validate())
			_, err := gateway.New(cfg, zap.NewNop())
			require.ErrorContains(t, err, "write the token")
		}
		c.Eventually("it is told", func() bool { return c.logs.FilterMessageSnippet("is not used").Len() >= 1 })
		require.Equal(t, 200, without("GET", "/status", "Bearer sesame"), "an empty file changes nothing")
		require.NoError(t, os.WriteFile(file, []byte("close sesame\n"), 0o600))
		c.Eventually("the new token is known", func() bool { return without("GET", "/status", "Bearer close sesame") == 200 })
		require.Equal(t, http.StatusUnauthorized, without("GET", "/status", "Bearer sesame"), "the old one is not")
		c.token = "close sesame"
	})
}
