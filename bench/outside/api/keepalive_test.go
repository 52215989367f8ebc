package api

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
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/sse"
)

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
			c := start(t, options{
				connector: refengine.NIXLPull,
				prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: takes, Concurrency: 8},
					Answers: refengine.Answers{PromptTokensDetails: true}}},
				configure: func(cfg *config.Config) { cfg.Limits.KeepAlive = row.span },
			})
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
						Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: param.NewOpt("one two three")},
						MaxTokens: param.NewOpt(int64(300)),
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
					r, body := c.call(http.MethodPost, front+"/v1/messages", wordsOf("one two three", `"stream":true,`))
					if r.StatusCode != http.StatusOK {
						return "", key, fmt.Errorf("%d %s", r.StatusCode, body)
					}
					return answertest.ReadMessage(t, strings.ReplaceAll(body, string(sse.Silence(sse.Messages)), "")).Text(), key, nil
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
