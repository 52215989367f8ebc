package gateway_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

// damaged is the body of a stream in which one event is not a JSON object.
type damaged struct {
	io.ReadCloser
	after  int // events
	pieces io.Reader
}

func (d *damaged) Read(p []byte) (int, error) {
	if d.pieces == nil {
		all, err := io.ReadAll(d.ReadCloser)
		if err != nil {
			return 0, err
		}
		events := bytes.SplitAfter(all, []byte("\n\n"))
		at := min(d.after, len(events))
		bad := [][]byte{[]byte("data: {\"choices\":[{\"ind\n\n")}
		d.pieces = io.MultiReader(bytes.NewReader(bytes.Join(events[:at], nil)), bytes.NewReader(bad[0]), bytes.NewReader(bytes.Join(events[at:], nil)))
	}
	return d.pieces.Read(p)
}

// An answer in which an event is damaged goes on elsewhere, like an answer that broke, and its client sees no damage.
func TestADamagedEventBreaksItsAnswer(t *testing.T) {
	t.Parallel()
	var damage atomic.Int64 // behind so many events; 0: never
	c := start(t, options{dirty: true, decode: []refengine.Config{{}}, configure: func(cfg *config.Config) {
		target, err := url.Parse(cfg.Engines.Decode[0].URL)
		require.NoError(t, err)
		through := httputil.NewSingleHostReverseProxy(target)
		through.FlushInterval = -1
		through.ModifyResponse = func(r *http.Response) error {
			if after := damage.Load(); r.Request.Method == http.MethodPost && after > 0 {
				damage.Store(0)
				r.Body = &damaged{ReadCloser: r.Body, after: int(after)}
			}
			return nil
		}
		front := httptest.NewServer(through)
		t.Cleanup(front.Close)
		cfg.Engines.Decode[0].URL = front.URL
	}})
	c.allUp()
	for _, row := range []struct {
		name, more string
		after      int64
	}{
		{"a stream", `"stream":true,`, 8},
		{"a stream at its beginning", `"stream":true,`, 1},
		{"a whole answer", "", 8},
	} {
		damage.Store(row.after)
		require.Equal(t, "right", c.judge("a long story of "+row.name, row.more), row.name)
		require.Zero(t, damage.Load(), row.name)
	}
}
