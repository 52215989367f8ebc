package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
)

func parseLoad(t *testing.T, args ...string) *loadCmd {
	t.Helper()
	var c loadCmd
	parser, err := kong.New(&c)
	require.NoError(t, err)
	_, err = parser.Parse(append([]string{"--url=http://127.0.0.1:1"}, args...))
	require.NoError(t, err)
	return &c
}

func TestLoadFlagsThatDoNotGoTogetherAreBothNamed(t *testing.T) {
	for _, row := range []struct {
		args []string
		want []string
	}{
		{[]string{"--rate=1", "--concurrency=2"}, []string{"--rate", "--concurrency"}},
		{[]string{"--concurrency=2", "--max-outstanding=9"}, []string{"--concurrency", "--max-outstanding"}},
		{nil, []string{"--trace", "--rate", "--concurrency"}},
		{[]string{"--rate=1", "--format=azure"}, []string{"--format", "--trace"}},
		{[]string{"--rate=1", "--share-prefixes"}, []string{"--share-prefixes", "--trace"}},
		{[]string{"--rate=1", "--cancel-phases=pooled"}, []string{"--cancel-phases", "--cancel"}},
		{[]string{"--rate=1", "--prompt-tokens=5"}, []string{"--prompt-tokens", "--output-tokens"}},
		{[]string{"--trace=x", "--prompt-tokens=5", "--output-tokens=5"}, []string{"--trace", "--prompt-tokens"}},
		{[]string{"--rate=1", "--api-key-env=EVENKEEL_NO_SUCH_KEY"}, []string{"--api-key-env", "not set"}},
	} {
		_, _, err := parseLoad(t, row.args...).config()
		for _, flag := range row.want {
			require.ErrorContains(t, err, flag)
		}
	}
}

func TestLoadDefaults(t *testing.T) {
	cfg, _, err := parseLoad(t, "--concurrency=4").config()
	require.NoError(t, err)
	require.Equal(t, 1000, cfg.Count)
	require.Len(t, cfg.Requests, 1000, "of the embedded trace")
	require.Empty(t, cfg.Model, "auto")

	cfg, _, err = parseLoad(t, "--rate=4", "--duration=5s", "--cancel=0.1", "--cancel-phases=pooled,streaming").config()
	require.NoError(t, err)
	require.Zero(t, cfg.Count, "no end but the duration's")
	require.Equal(t, 5*time.Second, cfg.Duration)
	require.Equal(t, []load.Phase{load.Pooled, load.Streaming}, cfg.Cancel.Phases)

	cfg, _, err = parseLoad(t, "--rate=4", "--prompt-tokens=7", "--output-tokens=9").config()
	require.NoError(t, err)
	require.Equal(t, 7, cfg.Requests[0].Prompt)
	require.Equal(t, 9, cfg.Requests[0].Output)
}

func TestLoadFailsIfARequestDid(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request) {
		http.Error(w, "no", http.StatusTooManyRequests)
	}))
	defer srv.Close()
	c := parseLoad(t, "--concurrency=1", "--requests=2", "--model=m", "--json")
	c.URL = []string{srv.URL}
	var out, progress bytes.Buffer
	require.ErrorIs(t, c.Run(streams{&out, &progress}), errFailed)
	require.Contains(t, out.String(), `"http_429": 2`)
}
