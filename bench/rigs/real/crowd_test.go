package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/mooncake"
)

// Two servers that answer the same but for what spoils one of them: the plain engine, and what
// stands for evenkeel.
func TestACrowdIsJudgedByThePlainEngine(t *testing.T) {
	serve := func(spoil func(w http.ResponseWriter, seed int, text string) bool) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var b struct{ Seed int }
			_ = json.NewDecoder(r.Body).Decode(&b)
			text := "data: " + fmt.Sprintf(`{"choices":[{"index":0,"text":"answer %d"}]}`, b.Seed) + "\n\ndata: [DONE]\n\n"
			w.Header().Set("Content-Type", "text/event-stream")
			if !spoil(w, b.Seed, text) {
				_, _ = w.Write([]byte(text))
			}
		}))
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
	plain := serve(func(http.ResponseWriter, int, string) bool { return false })
	acted := make(chan struct{})
	through := serve(func(w http.ResponseWriter, seed int, text string) bool {
		_, _ = w.Write([]byte(": begun\n\n"))
		w.(http.Flusher).Flush()
		<-acted // so none ends before act, which comes once all have begun
		switch seed {
		case 1:
			_, _ = w.Write([]byte(strings.Replace(text, "answer", "answes", 1)))
			return true
		case 2:
			panic(http.ErrAbortHandler)
		}
		return false
	})
	_, port, err := net.SplitHostPort(plain)
	require.NoError(t, err)
	at, err := strconv.Atoi(port)
	require.NoError(t, err)
	w := &site{World: &testbed.World{Dir: t.TempDir()}, options: options{connector: mooncake.NIXLPull},
		proxy: &testbed.Proxy{Clients: through}, engines: map[string]*engine{"plain": {port: at}}}
	var list []question
	for i := range 5 {
		list = append(list, question{path: completions, body: body{"seed": i, "stream": true}})
	}
	got, err := w.under(t.Context(), list, func() error { close(acted); return nil })
	require.NoError(t, err)
	require.Equal(t, 5, got.Sent)
	require.Equal(t, 3, got.Right)
	require.Len(t, got.Wrong, 2)
	require.False(t, got.all())
	require.Contains(t, got.String(), "3 right, 2 wrong: ")
	require.Contains(t, got.String(), `question 1 unlike the plain engine's: body.choices[0].text: "answes 1", not "answer 1"`)
	require.Contains(t, got.String(), "question 2 broken: 200 ")

	w.proxy.Clients = serve(func(w http.ResponseWriter, seed int, _ string) bool {
		if seed > 0 {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(`{"error":{"code":"queue_full"}}`))
		return true
	})
	got, err = w.crowd(t.Context(), list, nil)
	require.NoError(t, err)
	require.Equal(t, "4 right, 1 refused with 503 queue_full", got.String())
	require.False(t, got.all())
	got, err = w.crowd(t.Context(), list[1:], nil)
	require.NoError(t, err)
	require.True(t, got.all())
}
