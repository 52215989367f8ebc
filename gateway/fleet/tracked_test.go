package fleet

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
	drain := func(c *TrackedCall) { c.leaveEngine(drained) }
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	for _, row := range []struct {
		name  string
		steps []func(*TrackedCall)
		ended bool
	}{
		{"pulling", []func(*TrackedCall){drain}, false},
		{"then its first event comes", []func(*TrackedCall){drain, (*TrackedCall).AllowAbort}, true},
		{"its first event came before", []func(*TrackedCall){(*TrackedCall).AllowAbort, drain}, true},
		{"nobody wants it to go", []func(*TrackedCall){(*TrackedCall).AllowAbort}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			call := client.NewCall(&engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, Rank: -1})
			c := &TrackedCall{call: call}
			for _, step := range row.steps {
				step(c)
			}
			_, err := call.Do(http.MethodGet, "/", nil, nil, engine.Deadlines{})
			var failure *engine.Error
			require.ErrorAs(t, err, &failure)
			require.Equal(t, row.ended, failure.Aborted)
		})
	}
}
