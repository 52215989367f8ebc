package gateway_test

import (
	"bufio"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
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

func TestBothListenersSpeakTLS(t *testing.T) {
	t.Parallel()
	a := certtest.New(t)
	c := tlsCluster(t, a, nil)
	require.Equal(t, "right", c.judge("a story over TLS", `"stream":true,`))
	require.Equal(t, "right", c.judge("and one in one piece", ""))
	require.Equal(t, 200, c.get("/status").status)

	t.Run("clear text is not served", func(t *testing.T) {
		for _, url := range []string{c.url + "/health", c.admin + "/livez"} {
			r := c.ask("GET", "http"+strings.TrimPrefix(url, "https"), "")
			require.True(t, r.err != nil || r.status == http.StatusBadRequest, "%+v", r)
		}
	})
	t.Run("TLS 1.1 is not spoken", func(t *testing.T) {
		for _, url := range []string{c.url, c.admin} {
			_, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{RootCAs: a.Pool(), MaxVersion: tls.VersionTLS11})
			require.Error(t, err)
		}
	})
}

func TestAClientThatLeavesThroughTLSIsNoticed(t *testing.T) {
	t.Parallel()
	a := certtest.New(t)
	c := tlsCluster(t, a, nil)
	for name, leave := range map[string]func(raw *net.TCPConn, secure *tls.Conn){
		"closed":         func(_ *net.TCPConn, secure *tls.Conn) { _ = secure.Close() },
		"cut":            func(raw *net.TCPConn, _ *tls.Conn) { _ = raw.Close() },
		"reset":          func(raw *net.TCPConn, _ *tls.Conn) { _, _ = raw.SetLinger(0), raw.Close() },
		"TCP half close": func(raw *net.TCPConn, _ *tls.Conn) { _ = raw.CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := net.Dial("tcp", strings.TrimPrefix(c.url, "https://"))
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
			require.EqualValues(t, 1, c.decode[0].Stats().Running)
			leave(raw.(*net.TCPConn), secure)
			c.eventually("the engine notices", func() bool { return c.decode[0].Stats().Running == 0 })
			_ = resp.Body.Close()
		})
	}
}

// A socket that never gets as far as a request is a slot of limits.connections.
func TestAHandshakeThatStopsIsClosed(t *testing.T) {
	t.Parallel()
	c := tlsCluster(t, certtest.New(t), func(cfg *config.Config) { cfg.Limits.ReadTimeout = 200 * time.Millisecond })
	for name, begin := range map[string]string{
		"nothing":               "",
		"half of a ClientHello": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
		"no TLS at all":         "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := net.Dial("tcp", strings.TrimPrefix(c.url, "https://"))
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

func TestANewCertificateIsInForceWithinSeconds(t *testing.T) {
	t.Parallel()
	a := certtest.New(t)
	c := tlsCluster(t, a, nil)
	serial := func(url string) string {
		conn, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{RootCAs: a.Pool(), ServerName: "proxy"})
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	first := serial(c.url)
	require.Equal(t, first, serial(c.admin))
	leave := c.endless()
	a.Issue(t, "proxy", nextHour)
	c.eventually("both listeners have it", func() bool { return serial(c.url) != first && serial(c.admin) != first })
	require.EqualValues(t, 1, c.decode[0].Stats().Running, "what runs goes on")
	leave()
	require.NotZero(t, c.logs.FilterMessage("a changed file is in force now").Len())
	require.EqualValues(t, 1, c.metric(`evenkeel_reloads_total{key="tls",outcome="used"}`))
	require.InDelta(t, nextHour.Unix(), c.metric(`evenkeel_certificate_expiry_timestamp_seconds{key="admin.tls"}`), 2)
}

// What the alerts on certificates page for, the page tells, too.
func TestACertificateThatEndsIsToldOnThePage(t *testing.T) {
	t.Parallel()
	a := certtest.New(t)
	c := tlsCluster(t, a, nil) // with certificates of an hour
	incidents := func() string {
		body := c.get("/live?once").body
		var d struct {
			Incidents []struct{ Severity, What string } `json:"incidents"`
		}
		require.NoError(t, json.Unmarshal([]byte(body), &d), body)
		return fmt.Sprint(d.Incidents)
	}
	for _, want := range []string{"{bad The certificate of tls ends in less than two hours}", "{bad The certificate of admin.tls ends in less than two hours}"} {
		c.eventually(want, func() bool { return strings.Contains(incidents(), want) })
	}
	a.Issue(t, "proxy", time.Now().Add(3*24*time.Hour+time.Minute))
	c.eventually("days are left", func() bool { return strings.Contains(incidents(), "{warn The certificate of tls ends in 3 days}") })
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
	require.Equal(t, "right", c.judge("a story from behind TLS", `"stream":true,`))

	mine, err := os.ReadFile(a.File)
	require.NoError(t, err)
	other, err := os.ReadFile(certtest.New(t).File)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(a.File, []byte("no PEM"), 0o600))
	c.eventually("a file without an authority is told", func() bool { return c.metric(`evenkeel_reloads_total{key="ca_file",outcome="refused"}`) == 1 })
	require.Equal(t, "right", c.judge("and not used", ""))
	require.NoError(t, os.WriteFile(a.File, other, 0o600))
	c.eventually("an authority that did not sign is not trusted", func() bool { return c.get("/readyz").status == http.StatusServiceUnavailable })
	require.NoError(t, os.WriteFile(a.File, mine, 0o600))
	c.eventually("and the one that did is again", func() bool { return c.get("/readyz").status == http.StatusOK })
	require.Equal(t, "right", c.judge("another story", ""))
}

func keyFile(t *testing.T, file string, entries ...string) {
	t.Helper()
	text := "keys:\n"
	for _, e := range entries {
		name, rest, _ := strings.Cut(e, " ")
		key, more, _ := strings.Cut(rest, " ")
		sum := sha256.Sum256([]byte(key))
		text += fmt.Sprintf("  - {name: %s, sha256: %s%s}\n", name, hex.EncodeToString(sum[:]), more)
	}
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
}

func TestAKeyFileThatChanges(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "team ek-one , max_concurrent: 2")
	c := start(t, options{configure: func(cfg *config.Config) { cfg.KeysFile = file }})
	status := func(key, more string) int {
		return c.post(chatPath, chat("a", more), "Authorization", "Bearer "+key).status
	}
	require.Equal(t, 200, status("ek-one", ""))
	leave := c.endless("Authorization", "Bearer ek-one")

	require.NoError(t, os.WriteFile(file, []byte("keys: []\n"), 0o600))
	c.eventually("a file without keys is told", func() bool { return c.logs.FilterMessageSnippet("is not used").Len() == 1 })
	require.Equal(t, 200, status("ek-one", ""), "and not used")
	require.EqualValues(t, 1, c.metric(`evenkeel_reloads_total{key="keys_file",outcome="refused"}`))

	keyFile(t, file, "team ek-two , max_concurrent: 2", "other ek-other")
	c.eventually("the new key is known", func() bool { return status("ek-two", "") == 200 })
	require.Equal(t, http.StatusUnauthorized, status("ek-one", ""), "the old one is not")
	require.Equal(t, 200, status("ek-other", ""))
	require.Equal(t, http.StatusTooManyRequests, status("ek-two", `"n":2,`), "one runs since before the change")
	require.Equal(t, http.StatusBadRequest, status("ek-two", `"n":3,`), "never")
	require.EqualValues(t, 1, c.decode[0].Stats().Running, "what ran goes on")
	leave()
	c.settled(false)
	require.Equal(t, 200, status("ek-two", `"n":2,`))
	c.settled(false)
	require.Equal(t, 200, status("ek-two", `"n":2,`), "both places came back")
}

// Without a token the admin listener is open to this machine, and so to every
// page its user visits. None of them may use it.
func TestPagesOfOtherSitesCannotUseTheAdminListener(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	port := c.admin[strings.LastIndexByte(c.admin, ':'):]
	const policy = `{"policy":"jsq"}`
	for _, tt := range []struct {
		name, method, path, body string
		header                   []string
		want                     int
		code                     string
	}{
		{"curl", "GET", "/status", "", nil, 200, ""},
		{"curl, writing", "PUT", "/policy", policy, nil, 200, ""},
		{"curl, by the name localhost", "GET", "/status", "", []string{"Host", "localhost" + port}, 200, ""},
		{"curl, by its IPv6 address", "GET", "/status", "", []string{"Host", "[::1]" + port}, 200, ""},
		{"our own page", "PUT", "/policy", policy, []string{"Origin", c.admin, "Sec-Fetch-Site", "same-origin"}, 200, ""},
		{"an address that was typed", "GET", "/status", "", []string{"Sec-Fetch-Site", "none", "Sec-Fetch-Mode", "navigate"}, 200, ""},
		{"a link that was followed", "GET", "/status", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 200, ""},
		{"a form of another site", "POST", "/drain", "", []string{"Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403, "cross_site"},
		{"a script of another site", "POST", "/drain", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"}, 403, "cross_site"},
		{"a browser that says no more than the origin", "POST", "/drain", "", []string{"Origin", "https://evil.example"}, 403, "cross_site"},
		{"a sandboxed page", "POST", "/drain", "", []string{"Origin", "null"}, 403, "cross_site"},
		{"a page on another port of this host", "POST", "/drain", "", []string{"Origin", "http://127.0.0.1:1"}, 403, "cross_site"},
		{"a picture of another site", "GET", "/debug/pprof/profile?seconds=60", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"}, 403, "cross_site"},
		{"a read of another site", "GET", "/status", "", []string{"Origin", "https://evil.example"}, 403, "cross_site"},
		{"the same, said to be a link", "GET", "/status", "", []string{"Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403, "cross_site"},
		{"a frame of another site", "GET", "/status", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}, 403, "cross_site"},
		{"a link to a profile", "GET", "/debug/pprof/profile?seconds=60", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}, 403, "cross_site"},
		{"an operator's profile", "GET", "/debug/pprof/cmdline", "", nil, 200, ""},
		{"brackets in brackets", "GET", "/status", "", []string{"Host", "[[127.0.0.1]]" + port}, 403, "wrong_host"},
		{"brackets around what needs none", "GET", "/status", "", []string{"Host", "[127.0.0.1]" + port}, 403, "wrong_host"},
		{"brackets without a port", "GET", "/status", "", []string{"Host", "[::1]"}, 200, ""},
		{"a name that leads here", "GET", "/status", "", []string{"Host", "evil.example" + port}, 403, "wrong_host"},
		{"a name that begins well", "GET", "/status", "", []string{"Host", "127.0.0.1.evil.example"}, 403, "wrong_host"},
		{"the same, as the browser's own site", "POST", "/drain", "", []string{"Host", "evil.example", "Origin", "http://evil.example", "Sec-Fetch-Site", "same-origin"}, 403, "wrong_host"},
		{"plain text, which needs no leave", "PUT", "/policy", policy, []string{"Content-Type", "text/plain"}, 415, "wrong_content_type"},
		{"a form", "POST", "/workers", "url=x", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "wrong_content_type"},
		{"JSON with a charset", "PUT", "/policy", policy, []string{"Content-Type", "application/json; charset=utf-8"}, 200, ""},
		{"kubelets use any name", "GET", "/readyz", "", []string{"Host", "proxy.pd.internal"}, 200, ""},
		{"more than any body", "PUT", "/policy", `{"policy":"` + strings.Repeat("x", 2<<20) + `"}`, nil, 400, "bad_body"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := c.ask(tt.method, c.admin+tt.path, tt.body, tt.header...)
			require.NoError(t, r.err)
			require.Equal(t, tt.want, r.status, r.body)
			require.Empty(t, r.header.Get("Access-Control-Allow-Origin"))
			if tt.code != "" {
				code, _, _ := failure(t, r)
				require.Equal(t, tt.code, code)
			}
		})
	}
	require.Equal(t, 200, c.get("/readyz").status, "nobody drained it")
}

func TestWithATokenTheAdminListenerAnswersToAnyName(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("sesame\n"), 0o600))
	c := start(t, options{token: "sesame", configure: func(cfg *config.Config) { cfg.Admin.TokenFile = file }})
	const token = "Bearer sesame"
	require.Equal(t, 200, c.ask("GET", c.admin+"/status", "", "Authorization", token, "Host", "proxy.pd.internal").status)
	require.Equal(t, 403, c.ask("POST", c.admin+"/drain", "", "Authorization", token, "Origin", "https://evil.example").status)
	require.Equal(t, 200, c.ask("GET", c.admin+"/status", "", "Authorization", "bearer sesame").status, "schemes have no case")
	for _, header := range []string{"sesame", "Bearersesame", "Basic sesame", "Token sesame", "Bearer  sesame"} {
		require.Equal(t, 401, c.ask("GET", c.admin+"/status", "", "Authorization", header).status, header)
	}
	require.Equal(t, 401, c.ask("POST", c.admin+"/workers", strings.Repeat("x", 8<<20), "Content-Type", "text/plain").status, "the token comes first")
}

func TestAStrangersBodyIsNotRead(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "team ek-one")
	c := start(t, options{configure: func(cfg *config.Config) { cfg.KeysFile = file }})
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ek-wrong\r\nContent-Length: 30000000\r\n\r\n", chatPath)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil) // not a byte of the body was sent
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusUnauthorized, resp.StatusCode, "not 413, and at once")
	require.Equal(t, "Bearer", resp.Header.Get("WWW-Authenticate"))
	require.EqualValues(t, 1, c.metric(`evenkeel_requests_total{outcome="invalid_api_key"}`), "counted, though no handler saw it")
	require.Equal(t, 200, c.post(chatPath, chat(strings.Repeat("a ", 10_000), ""), "Authorization", "Bearer ek-one").status)
}

// What hides a second request in the first must reach no engine, whichever way a
// proxy in front of us read it.
func TestHiddenRequestsReachNoEngine(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	body := chat("a", "")
	hidden := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	head := "POST " + chatPath + " HTTP/1.1\r\nHost: x\r\n"
	for name, in := range map[string]string{
		"CL.TE":                          head + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%s", len(hidden)+5, hidden),
		"TE.CL":                          head + fmt.Sprintf("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(hidden), hidden),
		"TE.TE, one of them in disguise": head + "Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n0\r\n\r\n" + hidden,
		"a coding behind a tab":          head + "Transfer-Encoding:\tchunked, identity\r\n\r\n0\r\n\r\n" + hidden,
		"a coding with a vertical tab":   head + "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n" + hidden,
		"two lengths":                    head + fmt.Sprintf("Content-Length: 0\r\nContent-Length: %d\r\n\r\n%s", len(hidden), hidden),
		"a folded length":                head + fmt.Sprintf("Content-Length: 0\r\nX: y\r\n Content-Length: %d\r\n\r\n%s", len(hidden), hidden),
		"a chunk line that ends in LF":   head + "Transfer-Encoding: chunked\r\n\r\n0;a\n\r\n" + hidden,
		"a bare CR in a chunk extension": head + "Transfer-Encoding: chunked\r\n\r\n0;a\rb\r\n\r\n" + hidden,
		"a space in a chunk size":        head + "Transfer-Encoding: chunked\r\n\r\n0 0\r\n\r\n" + hidden,
		"a chunk longer than it says":    head + "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n" + hidden,
		"a trailer that is framing":      head + "Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n" + hidden,
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
			require.NoError(t, err)
			defer func() { _ = conn.Close() }()
			require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
			_, err = io.WriteString(conn, in)
			require.NoError(t, err)
			answer, err := io.ReadAll(conn)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection is not used again")
			require.True(t, strings.HasPrefix(string(answer), "HTTP/1.1 400 "), "%s", answer)
			require.Equal(t, 1, strings.Count(string(answer), "HTTP/1.1 "), "one answer")
			require.Zero(t, c.prefill[0].Stats().Requests)
		})
	}
}

func TestFilesThatCannotBeReadKeepTheProxyFromStarting(t *testing.T) {
	t.Parallel()
	nowhere := filepath.Join(t.TempDir(), "none.pem")
	for want, set := range map[string]func(*config.Config){
		"tls: certificate: open":       func(cfg *config.Config) { cfg.TLS = config.TLS{CertFile: nowhere, KeyFile: nowhere} },
		"admin.tls: certificate: open": func(cfg *config.Config) { cfg.Admin.TLS = config.TLS{CertFile: nowhere, KeyFile: nowhere} },
		"key file: open":               func(cfg *config.Config) { cfg.KeysFile = nowhere },
	} {
		cfg := config.Default()
		set(cfg)
		require.NoError(t, cfg.Validate())
		_, err := gateway.New(cfg, zap.NewNop())
		require.ErrorContains(t, err, want)
	}
}
