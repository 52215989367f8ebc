package fleet

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// empty is a fleet without engines that no one reads from.
func empty(t testing.TB, set func() *Settings) *Fleet {
	reg := prometheus.NewRegistry()
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	f := New(Deps{
		Context: t.Context(), Started: time.Now(), Log: zap.NewNop(), Settings: set, Client: client,
		Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: zap.NewNop(), HealthInterval: time.Second,
			FactsInterval: time.Second}),
		Publish: func([]prefill.Candidate, []local.Rank, []board.Worker) {}, Serving: t.Context,
	})
	f.Admission = (*owner.Set)(nil)
	return f
}

// of is one that has a config's profiles.
func of(t *testing.T, cfg *config.Config) *Fleet {
	require.NoError(t, cfg.Validate())
	set := NewSettings(cfg)
	return empty(t, func() *Settings { return set })
}

// worker is the number of a rank.
func (f *Fleet) worker(rank string) int32 {
	for _, e := range f.Now().Engines() {
		for _, r := range e.Ranks() {
			if at, _ := f.Now().RankByName(e.At(r).ID); at != nil && e.At(r).ID == rank {
				return at.Worker
			}
		}
	}
	return -1
}

// An engine that leaves takes its metric page along.
func TestThePageOfAnEngineThatHasLeftIsForgotten(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	f := of(t, cfg)
	for _, port := range []string{"1", "2"} {
		require.NoError(t, f.Add(roster.Prefill, config.Engine{URL: "http://127.0.0.1:" + port, Profile: "a"}))
		f.pages.Store("prefill 127.0.0.1:"+port, &metricPage{})
	}
	require.NoError(t, f.Remove(roster.Prefill, "127.0.0.1:1"))
	_, left := f.pages.Load("prefill 127.0.0.1:1")
	_, stays := f.pages.Load("prefill 127.0.0.1:2")
	require.Equal(t, []bool{false, true}, []bool{left, stays})
}
