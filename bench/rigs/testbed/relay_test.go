package testbed

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAWayWithholdsAnswersToPosts(t *testing.T) {
	answered := make(chan struct{}, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Method)
		if r.Method == http.MethodPost {
			answered <- struct{}{}
		}
	}))
	defer server.Close()
	way, err := NewRelay(server.Listener.Addr().String(), 0)
	require.NoError(t, err)
	defer way.Close()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func(method string) (Answer, error) {
		return Do(t.Context(), client, method, "http://"+way.Address(), nil)
	}
	got, err := ask(http.MethodPost)
	require.NoError(t, err)
	require.Equal(t, "POST", string(got.Body))
	<-answered

	way.Withhold(true)
	failed := make(chan error, 1)
	go func() {
		_, err := ask(http.MethodPost)
		failed <- err
	}()
	<-answered
	require.NoError(t, Await(t.Context(), time.Minute, "the answer is kept back", func() bool { return way.Withheld() == 1 }))
	got, err = ask(http.MethodGet)
	require.NoError(t, err)
	require.Equal(t, "GET", string(got.Body), "questions pass")
	way.Withhold(false)
	require.Error(t, <-failed, "the connection is cut")
	require.Zero(t, way.Withheld())
	_, err = ask(http.MethodPost)
	require.NoError(t, err)
}

func TestARelayHoldsWhatComesWhileItIsCut(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	r, err := NewRelay(ln.Addr().String(), time.Millisecond)
	require.NoError(t, err)
	defer r.Close()
	near, err := net.Dial("tcp", r.Address())
	require.NoError(t, err)
	defer near.Close()
	far, err := ln.Accept()
	require.NoError(t, err)

	r.Hold(true)
	_, err = near.Write([]byte("held"))
	require.NoError(t, err)
	require.NoError(t, far.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = far.Read(make([]byte, 1))
	require.ErrorContains(t, err, "timeout")
	r.Hold(false)
	require.NoError(t, far.SetReadDeadline(time.Time{}))
	got := make([]byte, 4)
	_, err = io.ReadFull(far, got)
	require.NoError(t, err)
	require.Equal(t, "held", string(got))

	require.NoError(t, far.Close())
	_, err = near.Read(got)
	require.ErrorIs(t, err, io.EOF, "the end passes, too")
}
