package fleet

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// A proxy that said it is ready before its dispatcher had heard of the engine would
// answer the first requests with 503.
func TestTheDispatcherKnowsAnEngineBeforeARequestIsLetIn(t *testing.T) {
	f := mixed(t)
	heard := 0
	f.host.Publish = func(_ []prefill.Candidate, _ []local.Rank, workers []board.Worker) {
		for _, w := range workers {
			if _, before := f.Up(); w.Up && before == 0 {
				heard++
				route, _, _ := f.Lookup("one")
				require.False(t, route.Decode)
			}
		}
	}
	f.up("decode 127.0.0.1:3", "one")
	require.Equal(t, 1, heard)
	_, decodes := f.Up()
	require.Equal(t, 1, decodes)
	route, ok, known := f.Lookup("one")
	require.True(t, ok && known && route.Decode)
}
