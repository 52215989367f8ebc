package fleet

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/prefill"
)

// A probe at an engine that is halted goes on elsewhere, where there is another engine.
func TestWhichPrefillEnginesAreDeserted(t *testing.T) {
	up := engine.Status{Up: true, Models: []engine.Model{{ID: "m"}}}
	down, halted := up, up
	down.Up, halted.Halt = false, engine.ErrReforming
	for _, row := range []struct {
		is, other engine.Status
		want      uint32
	}{{up, up, stays}, {down, up, died}, {halted, up, drained}, {halted, down, stays}, {halted, halted, stays}} {
		f := empty(t, nil)
		f.instances = map[string]*instance{"a": {role: Prefill, status: row.is}, "b": {role: Prefill, status: row.other}}
		f.desert([]prefill.Candidate{{Models: []string{"m"}, Live: row.other.Up && !row.other.Halted()}})
		require.Equal(t, row.want, f.instances["a"].deserted, "%+v", row)
	}
}

// A pull that is cut leaks KV on both sides, so a call that has to go waits for
// its first event, and goes then.
func TestACallIsMovedOnceThatIsSafe(t *testing.T) {
	drain := func(r *Run) { r.move(drained) }
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	for _, row := range []struct {
		name  string
		steps []func(*Run)
		ended bool
	}{
		{"pulling", []func(*Run){drain}, false},
		{"then its first event comes", []func(*Run){drain, (*Run).Settle}, true},
		{"its first event came before", []func(*Run){(*Run).Settle, drain}, true},
		{"nobody wants it to go", []func(*Run){(*Run).Settle}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			call := client.NewCall(&engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, Rank: -1})
			r := &Run{call: call}
			for _, step := range row.steps {
				step(r)
			}
			_, err := call.Do(http.MethodGet, "/", nil, nil, engine.Deadlines{})
			var failure *engine.Error
			require.ErrorAs(t, err, &failure)
			require.Equal(t, row.ended, failure.Aborted)
		})
	}
}
