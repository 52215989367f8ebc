package scenes

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/rigs/testbed"
)

// program is what all tests run.
var program testbed.Program

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = program.Remove()
		os.Exit(code)
	}))
}

// short is `make regions` in a few seconds.
func short(t *testing.T, on string) options {
	t.Helper()
	o := ofRegions
	var err error
	o.Bin, err = program.Binary()
	require.NoError(t, err)
	o.on, o.load, o.count, o.deadAfter, o.absence = on, time.Second, 6, 2*time.Second, 6*time.Second
	o.delays = [3]time.Duration{5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond}
	return o
}

// The longest begins first: all of these mostly wait, and so run side by side.
func TestOwnersComeAndGo(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 70 s")
	}
	t.Parallel()
	binary, err := program.Binary()
	require.NoError(t, err)
	o := options{Options: testbed.Options{Bin: binary}, lease: 3 * time.Second, load: time.Second, absence: 15 * time.Second, clients: 4,
		on: onLoopback}
	r, err := play(t.Context(), o, shard)
	require.NoError(t, err)
	r.Write(t.Output())
	require.Empty(t, r.Breaches)
}

func TestThreeRegionsOnLoopback(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s")
	}
	t.Parallel()
	r, err := play(t.Context(), short(t, onLoopback), ordered)
	require.NoError(t, err)
	r.Write(t.Output())
	require.Empty(t, r.Breaches)
	require.Greater(t, len(r.Rows), 8)
}

func TestARegionThatIsOwnedByLease(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s")
	}
	t.Parallel()
	r, err := play(t.Context(), short(t, onLoopback), leased)
	require.NoError(t, err)
	r.Write(t.Output())
	require.Empty(t, r.Breaches)
}

func TestThreeRegionsInNamespaces(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 10 s")
	}
	t.Parallel()
	two := ordered
	two.scenes = []testbed.Scene[*site]{{Name: "the same bytes", Play: playSame}, {Name: "loss", Play: playLoss}}
	r, err := play(t.Context(), short(t, "netns"), two)
	if errors.Is(err, errForbidden) {
		t.Skip(err)
	}
	require.NoError(t, err)
	r.Write(t.Output())
	require.Empty(t, r.Breaches)
}

func TestWrongFlagsAreSaid(t *testing.T) {
	_, err := HA(t.Context(), []string{"-nonsense"}, nil)
	require.Error(t, err)
	_, err = Regions(t.Context(), []string{"-on", "nonsense"}, nil)
	require.ErrorContains(t, err, "auto, netns or loopback")
}

func TestJudgeTellsALostStreamFromALostRequest(t *testing.T) {
	stream := load.Failure{Kind: load.ErrorEvent, Detail: `type "server_error", code "peer_lost": upstream region lost`, Stream: true, Tokens: 3}
	whole := stream
	whole.Stream = false
	other := stream
	other.Detail = `type "server_error", code "engine_lost"`
	refused := load.Failure{Kind: "http_503/no_region_available"}
	for _, row := range []struct {
		name        string
		failed      load.Failure
		lost, wrong int
	}{
		{"a stream that had begun may end in the error event", stream, 1, 0},
		{"an answer in one piece had not begun", whole, 0, 1},
		{"another error is not the peer's", other, 0, 1},
		{"a refusal is a request lost", refused, 0, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := testbed.Count(lost, &load.Result{Sent: 5, OK: 4, Failures: []load.Failure{row.failed}})
			require.Equal(t, row.lost, len(s.Told))
			require.Len(t, s.Wrong, row.wrong)
		})
	}
}
