package adviser

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/owner"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// advised is a proxy with two prefill engines and two decode engines, of which no monitor hears
// anything: a test says how they are.
type advised struct {
	*Adviser
	t   *testing.T
	set *config.Advice
}

func start(t *testing.T, changes ...func(*config.Config)) *advised {
	t.Helper()
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"pull": {Connector: mooncake.NIXLPull}}
	cfg.Engines.Prefill = []config.Engine{{URL: "http://127.0.0.1:1", Profile: "pull"}, {URL: "http://127.0.0.1:2", Profile: "pull"}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "pull", Slots: 8},
		{URL: "http://127.0.0.1:4", Profile: "pull", Slots: 8}}
	for _, change := range changes {
		change(cfg)
	}
	require.NoError(t, cfg.Validate())
	set, log, reg, places := fleet.NewSettings(cfg), zap.NewNop(), prometheus.NewRegistry(), pool.NewSemaphore(2)
	a := &advised{t: t, set: &config.Advice{Interval: time.Second, Window: 10 * time.Second, Calm: time.Minute, Target: 0.8}}
	scheduler, err := prefill.New(prefill.Config{Push: prefill.PushConfig{MaxUnanswered: 1}, Places: places, Log: log})
	require.NoError(t, err)
	d, err := dispatcher.Start(t.Context(), dispatcher.Config{Config: board.Config{TTL: time.Hour}, Registerer: reg, Places: places, Log: log})
	require.NoError(t, err)
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	f := fleet.New(fleet.Deps{
		Context: t.Context(), Serving: t.Context, Started: time.Now(), Log: log,
		Settings: func() *fleet.Settings { return set }, Client: client,
		Monitor: engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: reg, Log: log, HealthInterval: time.Hour,
			FactsInterval: time.Hour}),
		Publish: func(candidates []prefill.Candidate, _ []local.Rank, workers []board.Worker) {
			scheduler.SetCandidates(candidates)
			d.SetWorkers(workers)
		},
	})
	f.Admission, err = owner.New(cfg,
		owner.Deps{Context: t.Context(), Log: log, Registerer: reg, KVHoldTimeout: func() time.Duration { return time.Minute }})
	require.NoError(t, err)
	t.Cleanup(f.Admission.Close)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	a.Adviser = New(Deps{Settings: func() *config.Advice { return a.set }, Fleet: f, Prefill: scheduler, Dispatcher: d, Places: places})
	for _, one := range []string{"prefill 127.0.0.1:1", "prefill 127.0.0.1:2", "decode 127.0.0.1:3", "decode 127.0.0.1:4"} {
		a.says(one, true)
	}
	return a
}

// says has an engine be up or down. It serves a model and an adapter, which shares the model's
// ranks.
func (a *advised) says(one string, up bool) {
	a.deps.Fleet.OnStatus(one, engine.Status{Up: up, Models: []engine.Model{{ID: "m"}, {ID: "lora", Parent: "m"}}})
}

// ask begins prefills.
func (a *advised) ask(model string, n int) {
	for range n {
		_, err := a.deps.Prefill.Enter(prefill.Request{Model: model, Prompt: prefill.Prompt{Tokens: 100}})
		require.NoError(a.t, err)
	}
}

func TestASampleIsBothSidesOfAModel(t *testing.T) {
	a := start(t)
	d3, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:3", "m", "m")
	d4, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:4", "m", "m")
	m := board.ModelStatus{Model: "m", Pool: 3, OldestSeconds: 1.5, Finished: 5, Cancelled: 6, Failed: 7, Workers: []board.WorkerStatus{
		{ID: d3, Up: true, Slots: 8, Used: 2, KVTokens: 100, Capacity: 1000}, {ID: d4, Down: true, Slots: 8, Used: 1, KVTokens: 50, Capacity: 1000},
	}}
	of := func() *advice.Sample {
		all := a.takeSamples(time.Unix(7, 0), []board.ModelStatus{m, {Model: "gone"}})
		require.Len(t, all, 1, "nothing is advised on a model without ranks")
		return all["m"]
	}
	decode := advice.Decode{Live: 1, Down: 1, Slots: 8, Used: 2, KVTokens: 100, Capacity: 1000, Pool: 3, Oldest: 1500 * time.Millisecond,
		Ended: 18}
	require.Equal(t, &advice.Sample{At: time.Unix(7, 0), Prefill: advice.Prefill{Live: 2}, Decode: decode}, of())

	m.Workers[1].Up, m.Workers[1].Down, m.Workers[1].Capacity = true, false, 0
	require.Equal(t, advice.Decode{Live: 2, Slots: 16, Used: 3, KVTokens: 150, Pool: 3, Oldest: decode.Oldest, Ended: 18}, of().Decode,
		"one that is unknown makes the sum unknown")

	a.says("prefill 127.0.0.1:2", false)
	require.Equal(t, advice.Prefill{Live: 1, Down: 1}, of().Prefill)
	a.ask("m", 1)
	require.Equal(t, 1, of().Prefill.Busy)
	a.ask("m", 1)
	a.ask("lora", 2)
	got := of()
	require.Equal(t, 3, got.Prefill.Requests, "an adapter is a part of its model")
	require.Positive(t, got.Prefill.WaitingSeconds)
}

// An operator drains a prefill engine that answers: nothing is to be mended there.
func TestAPrefillRankThatDrainsIsNotDown(t *testing.T) {
	a := start(t)
	d3, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:3", "m", "m")
	of := func() advice.Prefill {
		workers := []board.WorkerStatus{{ID: d3, Up: true, Slots: 8}}
		return a.takeSamples(time.Now(), []board.ModelStatus{{Model: "m", Workers: workers}})["m"].Prefill
	}
	require.NoError(t, a.deps.Fleet.Drain(roster.Prefill, "127.0.0.1:2", 0))
	require.Equal(t, advice.Prefill{Live: 1, OutOfService: 1}, of())
	a.says("prefill 127.0.0.1:2", false)
	require.Equal(t, advice.Prefill{Live: 1, Down: 1}, of(), "it does not answer while it drains")
	a.says("prefill 127.0.0.1:2", true)
	require.NoError(t, a.deps.Fleet.Undrain(roster.Prefill, "127.0.0.1:2"))
	require.Equal(t, advice.Prefill{Live: 2}, of())
	failing := engine.Status{Up: true, Out: errors.New("its requests fail"), Models: []engine.Model{{ID: "m"}}}
	a.deps.Fleet.OnStatus("prefill 127.0.0.1:2", failing)
	require.Equal(t, advice.Prefill{Live: 1, Down: 1}, of(), "it answers its health check, and fails every request")
}

// A decode rank that drains, or whose engine is halted, answers and takes no requests. Its side has
// fewer live ranks for a while, which says nothing about how many are needed. A rank that has left
// the fleet does not come back, so it is not counted.
func TestADecodeRankThatDrainsIsOutOfService(t *testing.T) {
	a := start(t)
	d3, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:3", "m", "m")
	d4, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:4", "m", "m")
	for _, row := range []struct {
		other board.WorkerStatus
		want  advice.Decode
	}{
		{board.WorkerStatus{ID: d4, Up: true, Slots: 8, Used: 3}, advice.Decode{Live: 2, Slots: 16, Used: 3}},
		{board.WorkerStatus{ID: d4, Slots: 8, Used: 3}, advice.Decode{Live: 1, OutOfService: 1, Slots: 8}},
		{board.WorkerStatus{ID: d4, Down: true, Slots: 8, Used: 3}, advice.Decode{Live: 1, Down: 1, Slots: 8}},
		{board.WorkerStatus{ID: d4, Removed: true, Slots: 8, Used: 3}, advice.Decode{Live: 1, Slots: 8}},
		{board.WorkerStatus{ID: d4, Removed: true, Down: true, Slots: 8, Used: 3}, advice.Decode{Live: 1, Slots: 8}},
	} {
		workers := []board.WorkerStatus{{ID: d3, Up: true, Slots: 8}, row.other}
		require.Equal(t, row.want, a.takeSamples(time.Now(), []board.ModelStatus{{Model: "m", Workers: workers}})["m"].Decode, "%+v", row.other)
	}
	failing := engine.Status{Up: true, Out: errors.New("its requests fail"), Models: []engine.Model{{ID: "m"}}}
	a.deps.Fleet.OnStatus("decode 127.0.0.1:4", failing)
	workers := []board.WorkerStatus{{ID: d3, Up: true, Slots: 8}, {ID: d4, Slots: 8}}
	require.Equal(t, advice.Decode{Live: 1, Down: 1, Slots: 8},
		a.takeSamples(time.Now(), []board.ModelStatus{{Model: "m", Workers: workers}})["m"].Decode,
		"it answers its health check, and fails every request")
}

// Of ranks that prefill and decode there is no other side, and they are no prefill ranks of the
// model's pairs.
func TestRanksThatDoBothAreLeftOut(t *testing.T) {
	a := start(t, func(cfg *config.Config) {
		cfg.Engines.Aggregated = []config.Engine{{URL: "http://127.0.0.1:5", Slots: 8, Ranks: 2}}
	})
	a.says("aggregated 127.0.0.1:5", true)
	d3, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:3", "m", "m")
	both, ok := a.deps.Fleet.Now().WorkerByName("127.0.0.1:5/0", "m", "m")
	require.True(t, ok)
	all := a.takeSamples(time.Now(), []board.ModelStatus{
		{Model: "m", Workers: []board.WorkerStatus{{ID: d3, Up: true, Slots: 8}}},
		{Model: "m" + roster.AggregatedMark, Pool: 9, Workers: []board.WorkerStatus{{ID: both, Up: true, Slots: 8}}},
	})
	require.Len(t, all, 1)
	require.Equal(t, 2, all["m"].Prefill.Live)
}

// Whether a region has enough engines is for the proxy to say that owns them.
func TestEnginesOfAnotherAreLeftOut(t *testing.T) {
	a := start(t, func(cfg *config.Config) {
		cfg.Geo.Mode, cfg.Geo.Self, cfg.Geo.HMAC.KeysFile = geo.Distributed, geo.Self{ID: "us-1", Region: "us"}, "keys"
		cfg.Geo.Peers = []geo.PeerConfig{{ID: "eu-1", Region: "eu", URL: "http://127.0.0.1:9", PriceOut: 0.02}}
		cfg.Geo.Ownership.Engine, cfg.Geo.Ownership.DeadAfter = geo.OwnStatic, time.Hour
		cfg.Engines.Prefill[1].Region, cfg.Engines.Decode[1].Region = "eu", "eu"
	})
	ours, _ := a.deps.Fleet.Now().RankByName("127.0.0.1:3")
	theirs, _ := a.deps.Fleet.Now().RankByName("127.0.0.1:4")
	all := a.takeSamples(time.Now(), []board.ModelStatus{
		{Model: "m", Workers: []board.WorkerStatus{{ID: ours.Worker, Up: true, Slots: 8}}}, {Model: "m@eu", Workers: []board.WorkerStatus{{ID: theirs.Worker, Slots: 8}}},
	})
	require.Len(t, all, 1)
	require.Equal(t, 1, all["m"].Prefill.Live)

	mixed := []board.WorkerStatus{{ID: ours.Worker, Up: true, Slots: 8}, {ID: theirs.Worker, Slots: 8}}
	all = a.takeSamples(time.Now(), []board.ModelStatus{{Model: "m", Workers: mixed}})
	require.Zero(t, all["m"].Decode.OutOfService, "a rank to which another proxy admits requests does not drain")
}

// What waits for a prefill engine because hand-offs have all places needs decode ranks, not prefill
// ranks.
func TestAFullPoolIsTold(t *testing.T) {
	a := start(t)
	d3, _ := a.deps.Fleet.Now().WorkerByName("127.0.0.1:3", "m", "m")
	full := func(pooled int) bool {
		return a.takeSamples(time.Now(),
			[]board.ModelStatus{{Model: "m", Pool: pooled, Workers: []board.WorkerStatus{{ID: d3, Up: true}}}})["m"].PoolFull
	}
	a.ask("m", 3)
	require.Equal(t, 2, a.deps.Places.Used())
	require.False(t, full(2), "prefills have the places")
	require.True(t, full(3))
	a.deps.Places.Release()
	require.False(t, full(3), "there is a place")
}

// RunningSeconds is the probe that runs, and WaitingSeconds what stands behind it; what others sent
// is theirs.
func TestAPrefillRankIsCountedByWhatIsOurs(t *testing.T) {
	var p advice.Prefill
	addPrefill(&p, &prefill.CandidateStatus{Inflight: 4, BacklogMs: 9000, OthersMs: 1000, KVTokens: 10, CapacityTokens: 100})
	addPrefill(&p, &prefill.CandidateStatus{BacklogMs: 5000, KVTokens: 10})
	require.Equal(t, advice.Prefill{Live: 2, Busy: 1, RunningSeconds: 2, WaitingSeconds: 6, KVTokens: 10, Capacity: 100}, p)
}

// Advice is given at each interval, kept for metrics, and forgotten with its model.
func TestAdviceIsGivenUntilItsModelIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t)
		require.Empty(t, a.Latest())
		ctx, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() { defer close(over); a.Run(ctx) }()
		time.Sleep(time.Second + time.Millisecond)
		synctest.Wait()
		require.Len(t, a.Latest(), 1)
		one := a.Latest()[0]
		require.Equal(t, "m", one.Model)
		require.Equal(t, []advice.Step{{Kind: advice.None, Reason: advice.ReasonTooLittleData}}, one.Steps)
		require.NoError(t, testutil.CollectAndCompare(a, strings.NewReader(`
# HELP evenkeel_live_ranks Ranks of the side that answer and take requests.
# TYPE evenkeel_live_ranks gauge
evenkeel_live_ranks{model="m",role="decode"} 2
evenkeel_live_ranks{model="m",role="prefill"} 2
`), "evenkeel_live_ranks"))
		require.Equal(t, len(advice.Steps()), testutil.CollectAndCount(a, "evenkeel_advice"), "what is not advised is 0")
		problems, err := testutil.CollectAndLint(a)
		require.NoError(t, err)
		require.Empty(t, problems)

		a.deps.Dispatcher.SetWorkers(nil)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Empty(t, a.Latest())
		require.Empty(t, a.advisors)
		cancel()
		<-over
		a.set = &config.Advice{}
		a.Run(t.Context()) // returns at once
	})
}
