package top

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// listener answers as a handler does.
func listener(t *testing.T, answer http.HandlerFunc) (s *Source, srv *httptest.Server) {
	srv = httptest.NewServer(answer)
	s = NewSource(srv.URL+"/", "")
	s.Client.Transport = &http.Transport{DisableKeepAlives: true}
	t.Cleanup(srv.Close)
	return s, srv
}

func TestThePageIsWhatTheListenerWrites(t *testing.T) {
	text := func(w http.ResponseWriter, says string) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = io.WriteString(w, says)
	}
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "loopback addresses only", code) }
	}
	for name, tt := range map[string]struct {
		answer      http.HandlerFunc
		token       string
		width       int
		want, fails string
	}{
		"with the token and the width": {answer: func(w http.ResponseWriter, r *http.Request) {
			text(w, r.Header.Get("Authorization")+" "+r.URL.RequestURI())
		}, token: "secret", width: 120, want: "Bearer secret /live?once&text&width=120"},
		"without a token, of a narrow terminal": {answer: func(w http.ResponseWriter, r *http.Request) { text(w, r.Header.Get("Authorization")+r.URL.RawQuery) }, width: 1, want: "once&text&width=40"},
		"of a wide terminal":                    {answer: func(w http.ResponseWriter, r *http.Request) { text(w, r.URL.RawQuery) }, width: 999, want: "once&text&width=400"},
		"speaks to the terminal":                {answer: func(w http.ResponseWriter, _ *http.Request) { text(w, "a\x1b[2J\r\x9b\u202e\nb █") }, want: "a�[2J���\nb █"},
		"no token, but one is asked for":        {answer: status(401), fails: "name the file with --token-file"},
		"another token":                         {answer: status(401), token: "wrong", fails: "another token"},
		"elsewhere":                             {answer: status(404), fails: "admin.listen"},
		"from a host that may not":              {answer: status(403), fails: "loopback addresses only"},
		"a redirect": {answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
		}, token: "secret", fails: "302 Found"},
		"an older version": {answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, "{}")
		}, fails: "of this version or a later one"},
		"a body without end": {answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			for line := bytes.Repeat([]byte("x"), 1<<16); ; {
				if _, err := w.Write(line); err != nil {
					return
				}
			}
		}, fails: "has no page of text"},
		"a body that is cut": {answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			text(w, "a")
		}, fails: "ended its answer too early"},
	} {
		s, _ := listener(t, tt.answer)
		s.Token = tt.token
		page, err := s.Page(t.Context(), tt.width)
		if tt.fails != "" {
			require.ErrorContains(t, err, tt.fails, name)
		} else {
			require.NoError(t, err, name)
		}
		require.Equal(t, tt.want, page, name)
	}
	s, _ := listener(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	s.Client.Timeout = time.Millisecond
	_, err := s.Page(t.Context(), 80)
	require.ErrorContains(t, err, "does not answer: nothing came within")
	s = NewSource("http://127.0.0.1:1", "")
	_, err = s.Page(t.Context(), 80)
	require.ErrorContains(t, err, "http://127.0.0.1:1 does not answer: dial")
	require.ErrorContains(t, err, "admin.listen")
}

func TestRunGoesOnWhileTheProxyIsGone(t *testing.T) {
	var n atomic.Int32
	s, srv := listener(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		fmt.Fprintf(w, "page %d\nits rest\n", n.Add(1))
	})
	ctx, cancel := context.WithCancel(t.Context())
	out, tick, done := &bytes.Buffer{}, make(chan time.Time), make(chan error, 1)
	go func() { done <- runOn(ctx, s, out, func() (int, int) { return 80, 24 }, tick) }()
	// A tick is taken when the screen before it is complete.
	turn := func() { tick <- time.Time{} }
	turn()
	turn()
	srv.Close()
	turn()
	turn()
	cancel()
	require.NoError(t, <-done)
	text := out.String()
	begins := cutLines + strings.Repeat("\n", 24) + firstLine + "page 1" + nextLine + "its rest" + nextLine + clearBelow +
		firstLine + "page 2" + nextLine
	require.True(t, strings.HasPrefix(text, begins), "%q", text)
	require.True(t, strings.HasSuffix(text, wrapLines), "the terminal is as it was")
	require.Contains(t, text, "OLD: this page is ")
}

func TestTheScreen(t *testing.T) {
	now := time.Unix(1000, 0)
	var s screen
	s.update("", errors.New("refused\x1b[2J\nby it"), now)
	require.Equal(t, []string{"There is no page yet; evenkeel top asks again every second: refused�[2J by it", ""}, s.lines(100, 24, now),
		"and no page")
	s.update("a\nb\nc\n", nil, now)
	require.Equal(t, []string{"a", "b", "c"}, s.lines(80, 3, now))
	require.Equal(t, []string{"a", "2 more lines: use a higher terminal, or evenkeel top --once | less"}, s.lines(80, 2, now))
	s.update("", errors.New("refused"), now.Add(time.Second))
	require.Equal(t, []string{"OLD: this page is 9 s old; evenke", "el top asks again every second: r", "efused", "", "a", "b", "c"},
		s.lines(33, 24, now.Add(9*time.Second)))
}
