package request

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
)

// A pull that is cut leaks KV on both sides, so a call that has to go waits for
// its first event, and goes then.
func TestACallIsMovedOnceThatIsSafe(t *testing.T) {
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	for _, row := range []struct {
		name  string
		steps []func(*run)
		ended bool
	}{
		{"pulling", []func(*run){(*run).move}, false},
		{"then its first event comes", []func(*run){(*run).move, (*run).settle}, true},
		{"its first event came before", []func(*run){(*run).settle, (*run).move}, true},
		{"nobody wants it to go", []func(*run){(*run).settle}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := &run{call: client.NewCall(&engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, Rank: -1})}
			for _, step := range row.steps {
				step(r)
			}
			_, err := r.call.Do(http.MethodGet, "/", nil, nil, engine.Deadlines{})
			var failure *engine.Error
			require.ErrorAs(t, err, &failure)
			require.Equal(t, row.ended, failure.Aborted)
		})
	}
}
