package gateway_test

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// alive has clients that wait get comments.
func alive(after time.Duration) func(*config.Config) {
	return func(cfg *config.Config) { cfg.Limits.KeepAlive = after }
}

// slowPrefills are engines whose prompts take so long.
func slowPrefills(d time.Duration) []refengine.Config {
	return []refengine.Config{{PrefillBase: d, PrefillConcurrency: 8, PromptTokensDetails: true}}
}

// Comments go over TLS, come from ranks that do both, and come while another region serves the request: from the proxy whose
// client it is, whatever that region has in its config.
func TestCommentsOnEveryWay(t *testing.T) {
	t.Parallel()
	const span, takes = 20 * time.Millisecond, 300 * time.Millisecond
	hears := func(t *testing.T, c *cluster) {
		t.Helper()
		r := c.post(chatPath, chat("one two three", `"stream":true,`))
		require.NoError(t, r.err)
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.True(t, strings.HasPrefix(r.body, ": keep-alive\n\n"), r.body)
		require.Empty(t, r.header.Get("X-Evenkeel-Route"), "the head was out before the way was known")
		got := read(t, r.body)
		require.Empty(t, got.fail)
		key := reftext.OfUser("one two three").Answer
		wholeText(t, key, got.text[0])
		r = c.post(chatPath, chat("one two three", ""))
		require.True(t, strings.HasPrefix(r.body, "{"), r.body)
	}
	t.Run("TLS", func(t *testing.T) {
		t.Parallel()
		a := certtest.New(t)
		certFile, keyFile := a.Issue(t, "proxy", nextHour)
		c := start(t, options{ca: a, prefill: slowPrefills(takes), configure: func(cfg *config.Config) {
			cfg.TLS, cfg.Limits.KeepAlive = config.TLS{CertFile: certFile, KeyFile: keyFile}, span
			cfg.Admin.TLS = cfg.TLS
		}})
		hears(t, c)
	})
	t.Run("ranks that do both", func(t *testing.T) {
		t.Parallel()
		c := start(t, options{mixed: slowPrefills(takes), configure: alive(span)})
		hears(t, c)
	})
	for name, theirs := range map[string]time.Duration{"another region": 0, "another region with the key": span} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			us, eu := pair(t, options{configure: func(cfg *config.Config) { remote(cfg); alive(span)(cfg) }}, options{
				prefill: slowPrefills(takes), configure: func(cfg *config.Config) { cfg.Geo.Policy = "local-only"; alive(theirs)(cfg) },
			})
			hears(t, us)
			us.accounted()
			eu.accounted()
			require.EqualValues(t, 2, us.metric(`evenkeel_geo_forwards_total{outcome="ok",peer="eu-1"}`))
		})
	}
}

// A proxy in front that closes what is silent for too long: streams pass it with comments only.
func TestStreamsPassAProxyThatClosesSilentConnections(t *testing.T) {
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		t.Skip("no nginx here: apt-get install nginx-light")
	}
	if testing.Short() {
		t.Skip("takes seconds, as the proxy's timeout does")
	}
	t.Parallel()
	const silence, takes = 2 * time.Second, 5 * time.Second
	for _, row := range []struct {
		name    string
		span    time.Duration
		through string // how nginx speaks to the proxy
	}{
		{"comments, HTTP/1.0 as by default", silence / 10, ""},
		{"comments, HTTP/1.1", silence / 10, `proxy_http_version 1.1; proxy_set_header Connection "";`},
		{"no comments", 0, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, options{prefill: slowPrefills(takes), profile: mooncake.Profile{Connector: mooncake.NIXLPull}, configure: alive(row.span)})
			front := behindNginx(t, nginx, c.gw.Addr(), silence, row.through)
			client := openai.NewClient(option.WithBaseURL(front+"/v1"), option.WithAPIKey("any"), option.WithMaxRetries(0))
			key := reftext.OfUser("one two three").Answer
			for name, asks := range map[string]func(t *testing.T) (text string, key uint64, err error){
				"chat": func(t *testing.T) (text string, _ uint64, err error) {
					s := client.Chat.Completions.NewStreaming(t.Context(), ask("one two three"))
					for s.Next() {
						for _, choice := range s.Current().Choices {
							text += choice.Delta.Content
						}
					}
					return text, key, s.Err()
				},
				"completions": func(t *testing.T) (text string, _ uint64, err error) {
					s := client.Completions.NewStreaming(t.Context(), openai.CompletionNewParams{
						Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: param.NewOpt("one two three")}, MaxTokens: param.NewOpt(int64(300)),
					})
					for s.Next() {
						for _, choice := range s.Current().Choices {
							text += choice.Text
						}
					}
					return text, reftext.Of("one two three").Answer, s.Err()
				},
				"responses": func(t *testing.T) (text string, _ uint64, err error) {
					s := client.Responses.NewStreaming(t.Context(), responses.ResponseNewParams{
						Model: model, Input: responses.ResponseNewParamsInputUnion{OfString: param.NewOpt("one two three")},
					})
					for s.Next() {
						text += s.Current().AsResponseOutputTextDelta().Delta
					}
					return text, key, s.Err()
				},
				"messages": func(t *testing.T) (text string, _ uint64, err error) {
					r := c.ask(http.MethodPost, front+messagesPath, wordsOf("one two three", `"stream":true,`))
					if r.err != nil || r.status != http.StatusOK {
						return "", key, fmt.Errorf("%d %s %w", r.status, r.body, r.err)
					}
					return answertest.ReadMessage(t, strings.ReplaceAll(r.body, string(sse.Silence(sse.Messages)), "")).Text(), key, nil
				},
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					text, key, err := asks(t)
					if row.span == 0 {
						require.ErrorContains(t, err, "504")
						return
					}
					require.NoError(t, err)
					wholeText(t, key, text)
				})
			}
		})
	}
}

// behindNginx runs an nginx in front of a proxy, and returns its URL.
func behindNginx(t *testing.T, nginx, proxy string, silence time.Duration, through string) string {
	t.Helper()
	dir := t.TempDir()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := ln.Addr().String()
	require.NoError(t, ln.Close())
	file := filepath.Join(dir, "nginx.conf")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/error.log;
events {}
http {
	access_log off; client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
	server { listen %[2]s; location / { proxy_pass http://%[3]s; proxy_read_timeout %[4]ds; %[5]s } }
}
`, dir, at, proxy, int(silence.Seconds()), through), 0o600))
	cmd := exec.Command(nginx, "-c", file, "-p", dir)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		conn, err := net.Dial("tcp", at)
		if err == nil {
			require.NoError(t, conn.Close())
			return "http://" + at
		}
		require.True(t, time.Now().Before(end), "nginx does not listen: %v", err)
	}
}
