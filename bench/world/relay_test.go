package world

import (
	"io"
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
