package fleet

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// fielded is a fleet of two prefill and two decode engines that are up, and what it logs.
func fielded(t *testing.T, profile mooncake.Profile) (*Fleet, *observer.ObservedLogs) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": profile}
	cfg.Health.SlowStart = 0
	for i, port := range []string{"1", "2", "3", "4"} {
		e := config.Engine{URL: "http://127.0.0.1:" + port, Profile: "a"}
		if i < 2 {
			cfg.Engines.Prefill = append(cfg.Engines.Prefill, e)
		} else {
			cfg.Engines.Decode = append(cfg.Engines.Decode, e)
		}
	}
	f := of(t, cfg)
	core, logs := observer.New(zap.InfoLevel)
	f.deps.Log = zap.New(core)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	for _, key := range []string{p1, p2, d3, d4} {
		f.up(key, "m")
	}
	return f, logs
}

const p1, p2, d3, d4 = "prefill 127.0.0.1:1", "prefill 127.0.0.1:2", "decode 127.0.0.1:3", "decode 127.0.0.1:4"

// call is one that is tracked at an engine and that has not been sent.
func call(f *Fleet, key string, probe bool) *TrackedCall {
	target := f.Now().Engine(key).At(-1)
	if probe {
		return f.TrackProbe(&prefill.Candidate{Instance: key, Target: target}, f.deps.Client.NewCall(target))
	}
	return f.Track(roster.Location{Instance: key, Rank: -1}, f.deps.Client.NewCall(target), Always)
}

func TestTheDeadlineOfADrainEndsWhatRuns(t *testing.T) {
	f, logs := fielded(t, mooncake.Profile{})
	runs, elsewhere := call(f, d3, false), call(f, d4, false)
	require.NoError(t, f.Drain(roster.Decode, "127.0.0.1:3", time.Millisecond))
	require.Eventually(t, runs.MustMove, time.Minute, time.Millisecond)
	require.False(t, elsewhere.MustMove())
	require.True(t, call(f, d3, false).MustMove(), "what comes late goes on elsewhere at once")
	require.Equal(t, 1, logs.FilterMessageSnippet("the drain's deadline has passed").Len())
	require.NoError(t, f.Undrain("", "127.0.0.1:3"))
	require.False(t, call(f, d3, false).MustMove())
	require.ErrorIs(t, f.Undrain("", "127.0.0.1:3"), roster.ErrNoSuchEngine, "it does not drain")
	require.ErrorIs(t, f.Undrain("", "127.0.0.1:9"), roster.ErrNoSuchEngine)
	require.ErrorIs(t, f.Drain("", "127.0.0.1:9", 0), roster.ErrNoSuchEngine)
	f.Untrack(elsewhere)
	require.Equal(t, 3, f.MoveCalls(func(roster.Location) bool { return true }), "three are left")
	require.False(t, elsewhere.MustMove())
	f.StopTimers()
}

// A probe leaves an engine that is down or halted once another one serves its model.
func TestAProbeLeavesAnEngineThatAnotherOneCanStandInFor(t *testing.T) {
	f, _ := fielded(t, mooncake.Profile{})
	models := []engine.Model{{ID: "m"}}
	probe := call(f, p1, true)
	require.False(t, probe.MustMove())
	f.OnStatus(p1, engine.Status{Up: true, Halt: engine.ErrReforming, Models: models})
	require.True(t, probe.MustMove())
	f.OnStatus(p1, engine.Status{Models: models})
	late := call(f, p1, true)
	aborted := &engine.Error{Aborted: true}
	var broke *engine.Error
	require.ErrorAs(t, late.Cause(aborted), &broke)
	require.True(t, !broke.Aborted && !late.MustMove(), "its engine broke the call")
	require.Equal(t, error(aborted), probe.Cause(aborted), "that one was moved")
	f.OnStatus(p2, engine.Status{Models: models})
	alone := call(f, p1, true)
	require.Equal(t, error(aborted), alone.Cause(aborted), "no other engine is up")
}

// A call to an engine that is paused goes on elsewhere if it ends meanwhile: the pause is why.
func TestACallToAnEngineThatIsPausedMayMove(t *testing.T) {
	f, _ := fielded(t, mooncake.Profile{})
	f.OnStatus(p1, engine.Status{Up: true, Models: []engine.Model{{ID: "m"}}})
	decode := call(f, p1, false)
	require.False(t, decode.MustMove())
	f.Pause("", "/pause")
	require.True(t, decode.MustMove())
	require.True(t, f.deps.Monitor.Status(p1).Halted() || f.Now().Engine(p1).Status.Halted())
	f.Resume("", []string{p1})
	require.True(t, decode.MustMove(), "its engine did not resume")
	f.Resume("", nil)
	require.False(t, decode.MustMove())
}

// A restart that shows in metrics or hand-offs is told of once, and what was learned of the process
// before is forgotten.
func TestARestartIsToldOfOnce(t *testing.T) {
	f, logs := fielded(t, mooncake.Profile{})
	c := prefill.Candidate{ID: "127.0.0.1:1/0", Instance: p1}
	f.bootstrapAnswers.Store(c.ID, bootstrapAnswer{})
	for _, id := range []string{"a", "a", "b"} {
		f.NoteHandoff(f.Now().GenerationAt(p1), id)
	}
	require.Equal(t, 1, logs.FilterMessageSnippet("may have restarted").Len())
	_, known := f.bootstrapAnswers.Load(c.ID)
	require.False(t, known)
	f.OnStatus(p1, engine.Status{Err: syscall.ECONNREFUSED})
	f.OnStatus(p1, engine.Status{Err: syscall.ECONNREFUSED})
	require.Equal(t, 1, logs.FilterMessageSnippet("a prefill engine has restarted").Len())
	require.True(t, f.DownSince(p1, time.Now()), "the monitor does not run")
	require.Equal(t, "127.0.0.1:2", f.AnyPrefill("m").ID)
}

// What many requests meet at once is told once.
func TestANewIDIsToldOnceByHoweverManyHandOffs(t *testing.T) {
	f, _ := fielded(t, mooncake.Profile{})
	published := 0
	f.deps.Publish = func([]prefill.Candidate, []local.Rank, []board.Worker) { published++ }
	made := f.Now().GenerationAt(p1)
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() { f.NoteHandoff(made, "a") })
	}
	all.Wait()
	require.Equal(t, 1, published)
}

func TestWhatIsLoggedOfEngines(t *testing.T) {
	f, logs := fielded(t, mooncake.Profile{Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)})
	f.GaveBack(d3)
	f.GaveBack(d3)
	require.Equal(t, 1, logs.FilterMessageSnippet("ALARM: a decode engine gave a request back").Len())
	set := *f.deps.Settings()
	cfg := *set.Config
	cfg.Health.SlowStart = time.Hour
	cfg.Profiles = map[string]mooncake.Profile{"a": set.Config.Profiles["a"], "b": mooncake.Profile{Connector: mooncake.SGLang}.WithDefaults()}
	next := NewSettings(&cfg)
	f.deps.Settings, f.deps.Started = func() *Settings { return next }, time.Now().Add(-2*time.Hour)
	f.OnStatus(d4, engine.Status{})
	f.up(d4, "m")
	require.Equal(t, 1, logs.FilterMessageSnippet("its share of the load grows step by step").Len())
	require.NoError(t, f.Add(roster.Decode, config.Engine{URL: "http://127.0.0.1:5", Profile: "b", Slots: 1}))
	f.up("decode 127.0.0.1:5", "m")
	require.Equal(t, 1, logs.FilterMessageSnippet("an engine is refused: its connector is sglang").Len())
	for _, port := range []string{"6", "7"} {
		require.NoError(t,
			f.Add(roster.Aggregated, config.Engine{URL: "http://127.0.0.1:" + port, Profile: "a", Slots: 1, Group: "g", Barrier: config.BarrierDP}))
		f.up("aggregated 127.0.0.1:"+port, "m")
	}
	f.OnStatus("aggregated 127.0.0.1:6", engine.Status{})
	require.Equal(t, 1, logs.FilterMessageSnippet("the other ranks of its group get no requests").Len())
}

// A scrape reads the page of an engine once for all of its ranks, and tells of its process.
func TestAScrapeTellsOfTheProcess(t *testing.T) {
	start, reads := "1", 0
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reads++
		_, _ = w.Write([]byte("process_start_time_seconds " + start +
			"\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:num_requests_running{engine=\"0\"} 3\n"))
	}))
	defer page.Close()
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	cfg.Engines.Prefill = []config.Engine{{URL: page.URL, Profile: "a"}}
	cfg.Prefill.Scrape.Interval = time.Hour
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	e := f.Now().Engines()[0]
	c := prefill.Candidate{ID: e.ID + "/0", Instance: e.Key(), Target: e.At(-1), Profile: e.Profile}
	s, err := f.Scrape(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, []float64{0.25, 3, 1}, []float64{s.KVUsage, s.Running, s.StartTime})
	made := f.Now().GenerationAt(e.Key())
	start = "2"
	_, err = f.Scrape(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, 1, reads, "the page is fresh")
	f.pages.Clear()
	_, err = f.Scrape(t.Context(), c)
	require.NoError(t, err)
	doubt, gone := f.Now().KVInDoubt(made)
	require.True(t, doubt && gone)
	page.Close()
	f.pages.Clear()
	_, err = f.Scrape(t.Context(), c)
	require.Error(t, err)
}

// A candidate that leaves ends its scrape in the middle. The other ranks of its engine take no
// failure of the engine from that.
func TestAScrapeThatItsCallerEndsFailsForNoOtherRank(t *testing.T) {
	asked, ends := make(chan struct{}), make(chan struct{})
	var reads atomic.Int32
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if reads.Add(1) == 1 {
			close(asked)
			<-ends
			return
		}
		_, _ = w.Write([]byte("vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n"))
	}))
	defer page.Close()
	defer close(ends)
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	cfg.Engines.Prefill = []config.Engine{{URL: page.URL, Profile: "a", Ranks: 2}}
	cfg.Prefill.Scrape.Interval = time.Hour
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	e := f.Now().Engines()[0]
	rank := func(r int) prefill.Candidate {
		return prefill.Candidate{ID: e.At(r).ID, Instance: e.Key(), Target: e.At(r), Profile: e.Profile}
	}
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		<-asked
		leave()
	}()
	_, err = f.Scrape(ctx, rank(0))
	require.Error(t, err)
	s, err := f.Scrape(t.Context(), rank(1))
	require.NoError(t, err)
	require.InDelta(t, 0.5, s.KVUsage, 0)
}

// What an engine holds that is not in the fleet counts for no scope.
func TestTheLoadOfAScopeIsThatOfItsRanks(t *testing.T) {
	f, _ := fielded(t, mooncake.Profile{})
	f.deps.Dispatch = func(context.Context) board.Status {
		return board.Status{Models: []board.ModelStatus{{Workers: []board.WorkerStatus{{Name: "127.0.0.1:8/0", Used: 3, Slots: 3}}}}}
	}
	ours, all, silent := f.LoadOf(t.Context(), "main", false)
	require.True(t, ours == nil && all == nil && silent == nil)
}

// Requests may ask while engines change, and what they hear fits together.
func TestRequestsAskWhileEnginesChange(t *testing.T) {
	f, _ := fielded(t, mooncake.Profile{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 200 {
			f.OnStatus(d3, engine.Status{})
			f.up(d3, "m")
		}
	}()
	for {
		now := f.Now()
		for _, w := range now.Workers {
			rank, _ := now.RankByName(w.Name)
			require.Equal(t, w.ID, rank.Worker)
			require.Equal(t, w.Up, now.Engine(rank.Instance).Serves())
		}
		select {
		case <-done:
			require.Equal(t, roster.Decode, f.Now().Engine(d3).Role)
			return
		default:
		}
	}
}
