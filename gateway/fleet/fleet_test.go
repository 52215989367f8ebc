package fleet

import (
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// empty is a fleet without engines that no one reads from.
func empty(t *testing.T, set func() *Settings) *Fleet {
	reg := prometheus.NewRegistry()
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	f := New(Host{
		Context: t.Context(), Started: time.Now(), Log: zap.NewNop(), Registerer: reg, Settings: set, Client: client,
		Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: zap.NewNop(), HealthInterval: time.Second, FactsInterval: time.Second}),
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

// What a process did in spite of its profile counts until another process is there, whatever the config says meanwhile.
func TestAnAnswerThatWasGivenBackCountsUntilTheEngineStartsAnew(t *testing.T) {
	f := of(t, config.Default())
	one := func() *instance {
		return &instance{id: "d", role: Decode, engine: &engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}}, profile: &mooncake.Profile{Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)}}
	}
	f.mu.Lock()
	f.put(one())
	f.instances["decode d"].status.StartTime = 5
	f.mu.Unlock()
	require.False(t, f.instances["decode d"].mayGiveBack())
	f.GaveBack("decode d")
	require.True(t, f.instances["decode d"].mayGiveBack())
	f.mu.Lock()
	f.put(one())
	f.mu.Unlock()
	require.True(t, f.instances["decode d"].mayGiveBack(), "a reload is no start")
	f.instances["decode d"].status.StartTime = 6
	require.False(t, f.instances["decode d"].mayGiveBack())
	f.mu.Lock()
	f.put(&instance{id: "m", role: Aggregated, engine: one().engine, profile: one().profile})
	f.mu.Unlock()
	f.GaveBack("aggregated m")
	require.Nil(t, f.instances["aggregated m"].gaveBack)
}
