package fleet

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// Whoever looks after claims asks engines what runs on them. One that hangs must
// not keep it from that.
func TestAnEngineThatHangsHoldsNobodyUp(t *testing.T) {
	hangs := make(chan struct{})
	page := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hangs }))
	defer page.Close()
	defer close(hangs)
	f := empty(t, nil)
	var all []*instance
	for range 8 {
		profile := &mooncake.Profile{}
		target, err := config.Target(config.Engine{URL: page.URL}, profile)
		require.NoError(t, err)
		all = append(all, &instance{id: target.ID, role: Decode, engine: target, profile: profile})
	}
	done := make(chan int)
	go func() {
		_, silent := f.residents(t.Context(), all)
		done <- len(silent)
	}()
	select {
	case n := <-done:
		require.Equal(t, 8, n)
	case <-time.After(time.Minute):
		require.Fail(t, "it waits for ever")
	}
}
