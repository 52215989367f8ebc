package main

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

// TestTheExampleProxysCommandLinesRun replays lines for vllm-ascend's example
// proxy as users write them, `python3 load_balance_proxy_server_example.py`
// swapped for `evenkeel`: each comes up and answers right. A test needs free
// ports besides, which users do not ask for.
func TestTheExampleProxysCommandLinesRun(t *testing.T) {
	_, p, d := cluster(t, time.Millisecond)
	port := func(e *refengine.Engine, rank int) string {
		return e.URLs()[rank][strings.LastIndexByte(e.URLs()[rank], ':')+1:]
	}
	ports := strings.NewReplacer("P0", port(p, 0), "D0", port(d, 0), "D1", port(d, 1))
	for i, tc := range []struct{ name, line string }{
		{"as its documents have it", "--host 127.0.0.1 --port 0 --prefiller-hosts 127.0.0.1 --prefiller-ports P0 --decoder-hosts 127.0.0.1 127.0.0.1 --decoder-ports D0 D1"},
		{
			"a script with a line a host", `--prefiller-hosts
				127.0.0.1
			--prefiller-ports
				P0
			--decoder-hosts
				127.0.0.1
				127.0.0.1
			--decoder-ports
				D0 D1
			--host 127.0.0.1
			--port 0`,
		},
		{"letters left out, retries and a log level", "--port 0 --host 127.0.0.1 --prefiller-host 127.0.0.1 --prefiller-port P0 --decoder-host 127.0.0.1 --decoder-port D1 --max-retries 3 --retry-delay 0.001 --log-level WARNING"},
		{"the command's own name first", "serve --host=127.0.0.1 --port=0 --prefiller-hosts=127.0.0.1 --prefiller-ports=P0 --decoder-hosts=127.0.0.1 --decoder-ports=D0 --workers 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			words := append(strings.Fields(ports.Replace(tc.line)), "--admin", "127.0.0.1:0", "--log-level", "info")
			proxy := start(t, words...)
			prompt := reftext.MakePrompt(uint64(i), 40)
			rest, err := io.ReadAll(proxy.stream(t, prompt, 20))
			require.NoError(t, err)
			require.Equal(t, reftext.Text(reftext.Of(prompt).Key, 20), text(t, rest))
			status, _ := proxy.get(proxy.public + "/healthcheck")
			require.Equal(t, http.StatusOK, status)
		})
	}
}
