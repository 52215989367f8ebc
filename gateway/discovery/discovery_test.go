package discovery

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/engine/discover"
	"evenkeel/gateway/config"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// hosted is a proxy with one decode engine in its config, whose fleet nobody reads from.
func hosted(t *testing.T, change func(*config.Config)) *Deps {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "a"}}
	change(cfg)
	require.NoError(t, cfg.Validate())
	set, client := fleet.NewSettings(cfg), engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	d := &Deps{Settings: func() *fleet.Settings { return set }, Registerer: prometheus.NewRegistry(), Log: zap.NewNop()}
	d.Fleet = fleet.New(fleet.Deps{
		Context: t.Context(), Started: time.Now(), Log: d.Log, Settings: d.Settings, Client: client,
		Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: d.Registerer, Log: d.Log, HealthInterval: time.Second,
			FactsInterval: time.Second}),
		Publish: func([]prefill.Candidate, []local.Rank, []board.Worker) {}, Serving: t.Context,
	})
	d.Fleet.Admission = (*owner.Set)(nil)
	enter, err := d.Fleet.Load()
	require.NoError(t, err)
	enter()
	return d
}

func TestDiscoveryTurnsAndRemovesItsOwnEngines(t *testing.T) {
	deps := hosted(t, func(*config.Config) {})
	d := discovered{deps}
	pod := discover.Engine{Role: discover.Decode, Address: "127.0.0.1:8", URL: "http://127.0.0.1:8", Source: "s",
		Attributes: discover.Attributes{Profile: "a", Slots: 3}}
	require.NoError(t, d.Put(pod))
	require.Equal(t, "s", deps.Fleet.Now().Engine(pod.Key()).Source)
	pod.Away = discover.NotReady
	d.SetAway(pod)
	require.Equal(t, discover.NotReady, deps.Fleet.Now().Engine(pod.Key()).Away)
	listed := discover.Engine{Role: discover.Decode, Address: "127.0.0.1:3"}
	d.Remove(listed)
	require.NotNil(t, deps.Fleet.Now().Engine(listed.Key()), "it stands in the config")
	d.Remove(pod)
	require.Nil(t, deps.Fleet.Now().Engine(pod.Key()))
	pod.Attributes.Profile = "unknown"
	require.Error(t, d.Put(pod))
	require.Error(t, deps.tryEngine(t.Context(), pod), "its profile is unknown")
}

// A trial waits for a slot of the rank on which the engine is tried. An engine that answers nothing
// has failed it.
func TestATrialWaitsForASlot(t *testing.T) {
	d := hosted(t, func(*config.Config) {})
	d.Dispatch = func(context.Context) board.Status {
		return board.Status{Models: []board.ModelStatus{{Workers: []board.WorkerStatus{{Name: "127.0.0.1:8/0", Used: 3, Slots: 3}}}}}
	}
	ctx, stop := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer stop()
	full := config.Engine{URL: "http://127.0.0.1:8", Ranks: 2}
	require.ErrorIs(t, d.awaitSlot(ctx, full), context.DeadlineExceeded, "its rank is full")
	require.NoError(t, d.awaitSlot(t.Context(), config.Engine{URL: "http://127.0.0.1:9"}))
	for _, role := range []string{discover.Prefill, discover.Decode} {
		e := discover.Engine{Role: role, Address: "127.0.0.1:1", URL: "http://127.0.0.1:1", Attributes: discover.Attributes{Profile: "a"}}
		require.Error(t, d.tryEngine(t.Context(), e))
	}
}

func TestAFileThatListsEngines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "engines.yaml")
	deps := hosted(t, func(cfg *config.Config) { cfg.Discovery.Files = []string{path} })
	sources, err := deps.Sources()
	require.NoError(t, err)
	d := New(deps, sources...)
	require.Equal(t, "file:"+path, sources[0].Name())
	told := make(chan int)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sources[0].Run(ctx, func(list []discover.Engine, err error) {
			if err != nil {
				told <- -1
				return
			}
			told <- len(list)
		})
	}()
	require.Equal(t, -1, <-told, "it is not there yet")
	require.NoError(t, os.WriteFile(path, []byte("decode: [{url: http://127.0.0.1:8, profile: a}]"), 0o600))
	d.Refresh()
	require.Equal(t, 1, <-told)
	require.NoError(t, os.Truncate(path, config.MaxFile+1))
	_, _, err = (&fileSource{settings: deps.Settings, path: path}).readIfChanged()
	require.ErrorContains(t, err, "larger than 16777216 bytes")
	stop()
	<-ended
	require.Nil(t, (*Discovery)(nil).State())
	var facts detect.Facts
	d.Facts(&facts)
	require.Equal(t, []detect.Source{{Name: "file:" + path}}, facts.Sources)
	require.Empty(t, d.Failure(), "nothing has run")
	require.Nil(t, New(deps))
}

// The nodes of a hybrid deployment count their ranks from another number than 0, in a file as in
// the config.
func TestWhatAFileSaysOfAnEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "engines.yaml")
	d := hosted(t, func(cfg *config.Config) {
		cfg.Profiles["h"] = mooncake.Profile{Connector: mooncake.None, DPMode: mooncake.DPHybrid}
		cfg.Profiles["n"] = mooncake.Profile{Connector: mooncake.NIXLPush}
		cfg.Discovery.Files = []string{path}
	})
	sources, err := d.Sources()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, []byte("aggregated: [{url: http://127.0.0.1:8, profile: h, ranks: 4, first_rank: 4, region: r, "+
		"group: g, barrier: none, slots: 8, kv_tokens: 9, cost: 2, kv_events_port: 5557, kv_replay_port: 5558, token_budget: 2048, "+
		"prefill_schedule_interval: 3}]\n"+
		"prefill: [{url: http://127.0.0.1:9, profile: n}]"), 0o600))
	list, _, err := sources[0].(*fileSource).readIfChanged()
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.Equal(t, config.Engine{URL: "http://127.0.0.1:9", Profile: "n"}, engineOf(list[0]))
	require.Equal(t, config.Engine{URL: "http://127.0.0.1:8", Profile: "h", Ranks: 4, First: 4, Region: "r", Group: "g", Barrier: "none",
		Slots: 8, KV: 9, Cost: 2, KVEventsPort: 5557, KVReplayPort: 5558, Budget: 2048, Interval: 3}, engineOf(list[1]))
}

// A file says of an engine what the config may say of it: no key is lost on the way.
func TestAFileLosesNoKeyOfAnEngine(t *testing.T) {
	var e config.Engine
	for i, field := range reflect.ValueOf(&e).Elem().Fields() {
		n := len(i.Name) + i.Index[0]
		switch field.Kind() {
		case reflect.String:
			field.SetString(i.Name)
		case reflect.Float32:
			field.SetFloat(float64(n))
		default:
			field.SetInt(int64(n))
		}
	}
	require.Equal(t, e, engineOf(discover.Engine{URL: e.URL, Attributes: attributesOf(e)}))
}
