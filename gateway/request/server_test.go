package request

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// newServer serves requests with a default config's parts, a profile, and no engines.
func newServer(t *testing.T) *Server {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	set, reg, log, client := fleet.NewSettings(cfg), prometheus.NewRegistry(), zap.NewNop(), engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	env := Env{
		Context: t.Context(), Log: log, Registerer: reg,
		Settings: func() *fleet.Settings { return set }, Serving: t.Context, PromptKey: func() []byte { return nil },
		Client: client, Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: log}),
		Locals: local.New(set.Prefill.Index.MaxBytes), Places: pool.NewPlaces(set.Pool.Size),
	}
	env.Fleet = fleet.New(fleet.Host{
		Context: t.Context(), Serving: t.Context, Started: time.Now(), Log: log, Registerer: reg, Settings: env.Settings, Monitor: env.Monitor,
		Publish: func([]prefill.Candidate, []local.Rank, []board.Worker) {},
	})
	env.Fleet.Admission = env.Owner
	var err error
	env.Journal, err = journal.New(journal.Config{Registerer: reg, Log: log})
	require.NoError(t, err)
	c := set.Prefill
	c.Places, c.Registerer, c.Log = env.Places, reg, log
	c.Decode = func(board string, within time.Duration) int { return env.Dispatcher.Room(board, within) }
	c.Scraper = func(context.Context, prefill.Candidate) (prefill.Sample, error) {
		return prefill.Sample{}, context.Canceled
	}
	env.Tier, err = prefill.New(c)
	require.NoError(t, err)
	env.Dispatcher, err = dispatcher.Start(t.Context(), dispatcher.Config{
		Config:     board.Config{Policy: set.Dispatch.Policy, Window: set.Dispatch.Window, TickLimit: set.Dispatch.TickLimit, TTL: set.PoolTTL()},
		Registerer: reg, Places: env.Places, OnRoom: env.Tier.Wake, Log: log,
	})
	require.NoError(t, err)
	return New(env)
}
