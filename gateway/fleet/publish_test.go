package fleet

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// A proxy that said it is ready before its dispatcher had heard of the engine would
// answer the first requests with 503.
func TestTheDispatcherKnowsAnEngineBeforeARequestIsLetIn(t *testing.T) {
	f := mixed(t)
	heard := 0
	f.deps.Publish = func(_ []prefill.Candidate, _ []local.Rank, workers []board.Worker) {
		for _, w := range workers {
			require.NotNil(t, f.Now().Rank(w.ID), "what is bound there at once finds it")
			if _, before := f.Now().CountInService(); w.Up && before == 0 {
				heard++
				route, _, _ := f.Now().Lookup("one")
				require.False(t, route.Decode)
			}
		}
	}
	f.up("decode 127.0.0.1:3", "one")
	require.Equal(t, 1, heard)
	_, decodes := f.Now().CountInService()
	require.Equal(t, 1, decodes)
	route, ok, known := f.Now().Lookup("one")
	require.True(t, ok && known && route.Decode)
}

// Which engines run a response on the rank that it names is known by their version, where several
// ranks are behind one address; one whose version cannot be read may not.
func TestResponsesStrayOnEnginesThatDoNotHeedTheirRank(t *testing.T) {
	for _, c := range []struct {
		version string
		ranks   int
		strays  bool
	}{
		{"0.32.1", 2, true}, {"v0.33.0", 2, false}, {"1.0.0", 2, false}, {"", 2, true}, {"dev", 2, true}, {"0.32.1", 0, false},
	} {
		cfg, mode := config.Default(), mooncake.DPInternal
		if c.ranks == 0 {
			mode = mooncake.DPExternal
		}
		cfg.Profiles = map[string]mooncake.Profile{"pull": {Connector: mooncake.NIXLPull, DPMode: mode}}
		cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "pull", Ranks: c.ranks}}
		f := of(t, cfg)
		enter, err := f.Load()
		require.NoError(t, err)
		enter()
		var heard []board.Worker
		f.deps.Publish = func(_ []prefill.Candidate, _ []local.Rank, workers []board.Worker) { heard = workers }
		f.OnStatus("decode 127.0.0.1:3", engine.Status{Up: true, Version: c.version, Models: []engine.Model{{ID: "one"}}})
		require.Len(t, heard, max(1, c.ranks))
		for _, w := range heard {
			require.Equal(t, c.strays, w.Unpinned, "%+v", c)
			rank, _ := f.Now().RankByName(w.Name)
			require.Equal(t, !c.strays, rank.EngineHonoursRank(mooncake.Responses))
			require.True(t, rank.EngineHonoursRank(mooncake.Messages))
		}
	}
}

func TestHowABoardIsCalled(t *testing.T) {
	for board, want := range map[string]string{
		"m": "m", "m@eu": "m@eu", "m+aggregated": "m (aggregated)", "m+aggregated@eu": "m@eu (aggregated)", "main of m+aggregated": "main of m (aggregated)",
		"m+aggregated-7b": "m+aggregated-7b", "p0:8100/0": "p0:8100/0",
	} {
		name, aggregated := roster.DisplayName(board)
		require.Equal(t, want, name)
		require.Equal(t, want != board, aggregated, board)
	}
}
