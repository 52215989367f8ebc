package request

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/abort"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/receipt"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// A server is one of a test. Its tier and its dispatcher are real ones, for only they can make a
// lease and a slot. Its fleet and its monitor are what the test says, and tell it what they were
// told.
type server struct {
	*Server
	Dispatcher *dispatcher.Dispatcher
	engines    *engines
	monitor    *monitor
	registry   *prometheus.Registry
	logs       *observer.ObservedLogs
}

// newServer serves requests with a default config's parts, a profile, and no engines. changes is
// what of that is otherwise.
func newServer(t *testing.T, changes ...func(*config.Config, *Deps)) *server {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	core, logs := observer.New(zap.DebugLevel)
	reg, log, client := prometheus.NewRegistry(), zap.New(core), engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	s := &server{engines: &engines{calls: calls(t)}, monitor: &monitor{}, registry: reg, logs: logs}
	deps := Deps{
		Context: t.Context(), Log: log, Registerer: reg, Serving: t.Context, PromptKey: func() []byte { return nil },
		Client: client, Running: new(abort.Running), Monitor: s.monitor, Fleet: s.engines, Engines: func() Engines { return s.engines },
	}
	for _, change := range changes {
		change(cfg, &deps)
	}
	set := fleet.NewSettings(cfg)
	deps.Settings, deps.LocalRanks, deps.Places = func() *fleet.Settings { return set }, local.New(set.Prefill.Index.MaxBytes),
		pool.NewSemaphore(set.Pool.Size)
	var err error
	deps.Journal, err = journal.New(journal.Config{Registerer: reg, Log: log, Receipts: receipt.NewRing(1000, 1<<20)})
	require.NoError(t, err)
	c := set.Tier()
	c.Places, c.Registerer, c.Log = deps.Places, reg, log
	c.Decode = func(board, model string, within time.Duration) (int, bool) {
		return s.Dispatcher.Room(board, model, within)
	}
	c.Scraper = func(context.Context, prefill.Candidate) (prefill.Sample, error) {
		return prefill.Sample{}, context.Canceled
	}
	deps.Prefill, err = prefill.New(c)
	require.NoError(t, err)
	s.Dispatcher, err = dispatcher.Start(t.Context(), dispatcher.Config{
		Config: board.Config{
			Policy: set.Dispatch.Policy, Window: set.Dispatch.Window, TickLimit: set.Dispatch.TickLimit, TTL: set.PoolTTL(),
			Predictor: set.Predictor,
		},
		Registerer: reg, Places: deps.Places, OnRoom: deps.Prefill.Wake, Log: log,
	})
	require.NoError(t, err)
	deps.Dispatcher = s.Dispatcher
	s.Server = New(deps)
	return s
}

// metric is the value of a series of one label at most; of a histogram, how many values it has.
func (s *server) metric(t *testing.T, name, value string) float64 {
	all, err := s.registry.Gather()
	require.NoError(t, err)
	for _, family := range all {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if len(m.GetLabel()) == 0 || m.GetLabel()[0].GetValue() == value {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	t.Fatalf("no series %s of %q", name, value)
	return 0
}

// engines is a fleet of a test. It does not know anything of engines but what the test says.
type engines struct {
	Fleet    // what no test expects to be asked
	ranks    map[int32]*roster.Rank
	unowned  bool   // the decode group is another proxy's
	region   string // of all prefill engines
	context  int    // tokens of each engine's model
	named    bool   // hand-offs of each prefill engine name their request
	nameless error  // why a prefill engine cannot be named
	down     []string
	frees    bool
	prefills int            // ranks of each prefill engine; 0: one
	counts   *engine.Target // is asked how long prompts are; nil: none is
	withheld bool           // every engine drains

	calls *fleet.Fleet // keeps the calls, and knows no engine

	mu       sync.Mutex
	shunned  []string // ranks, or the hosts of ranks
	gaveBack []string // engines that gave an answer back
}

func (f *engines) Rank(worker int32) *roster.Rank   { return f.ranks[worker] }
func (f *engines) RegionFor(string) string          { return f.region }
func (f *engines) OwnsGroupFor(string, string) bool { return !f.unowned }
func (f *engines) BoardFor(c prefill.Candidate, model, region string) string {
	if c.Aggregated {
		return c.Board
	}
	return roster.BoardIn(cmp.Or(model, "m"), region)
}

func (f *engines) LongestContext(string) int                   { return f.context }
func (f *engines) HandoffsNameRequests(prefill.Candidate) bool { return f.named }
func (f *engines) KnownHost(host string) bool                  { return host == "127.0.0.1" }
func (f *engines) HostsOf(string) func(string) bool {
	return f.KnownHost
}
func (f *engines) Ranks(string) int { return max(1, f.prefills) }
func (f *engines) GenerationAt(key string) roster.Generation {
	return roster.Generation{Key: key}
}
func (f *engines) KVInDoubt(roster.Generation) (inDoubt, gone bool) { return false, false }
func (f *engines) RejectionFrees(*roster.Rank) bool                 { return f.frees }
func (f *engines) Withheld(roster.Location) bool                    { return f.withheld }
func (f *engines) AnyPrefill(string) *engine.Target                 { return f.counts }
func (f *engines) DownSince(engine string, _ time.Time) bool        { return slices.Contains(f.down, engine) }
func (f *engines) NoteHandoff(roster.Generation, string)            {}

// BootstrapInfo asks a prefill engine anew each time.
func (f *engines) BootstrapInfo(c prefill.Candidate) (*mooncake.BootstrapInfo, error) {
	if c.Profile == nil || c.Profile.Connector != mooncake.VLLMMooncake || f.nameless != nil {
		return nil, f.nameless
	}
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	info, err := engine.Bootstrap(context.Background(), client, c.Target, c.Profile.BootstrapPort)
	return &info, err
}

func (f *engines) GaveBack(decode string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gaveBack = append(f.gaveBack, decode)
}

func (f *engines) FailingWith(worker int32, host bool, list []int32) []int32 {
	f.mu.Lock()
	f.shunned = append(f.shunned, map[bool]string{true: "the host of ", false: ""}[host]+f.ranks[worker].Target.ID)
	f.mu.Unlock()
	if slices.Contains(list, worker) {
		return list
	}
	return append(list, worker)
}

// Around knows the ranks of a group and those of an engine, and not whether they take requests.
func (f *engines) SharingQueueWith(worker int32, list []int32) (around []int32, others bool) {
	one := f.ranks[worker]
	for _, beside := range []func(*roster.Rank) bool{
		func(r *roster.Rank) bool { return r.Group == one.Group }, func(r *roster.Rank) bool { return r.Instance == one.Instance },
	} {
		around, others = nil, false
		for id, r := range f.ranks {
			if beside(r) {
				around = append(around, id)
			} else {
				others = others || !slices.Contains(list, id)
			}
		}
		if len(around) < len(f.ranks) && one.Group != "" {
			return around, others
		}
	}
	return nil, false
}

func (f *engines) Track(at roster.Location, call *engine.Call, ends fleet.Until) *fleet.TrackedCall {
	return f.calls.Track(at, call, ends)
}

func (f *engines) TrackProbe(c *prefill.Candidate, call *engine.Call) *fleet.TrackedCall {
	return f.calls.TrackProbe(c, call)
}

func (f *engines) Untrack(c *fleet.TrackedCall) { f.calls.Untrack(c) }

// calls is a fleet that keeps calls, and can end them as a drain does.
func calls(t *testing.T) *fleet.Fleet {
	return fleet.New(fleet.Deps{Serving: t.Context})
}

// monitor notes what it is told of engines.
type monitor struct {
	mu      sync.Mutex
	judged  map[string][]engine.Verdict
	broken  []string // engines whose calls broke
	accused int
	expired float64 // hand-offs that each prefill engine had given away when it is asked again
	counts  bool    // prefill engines tell that
	ill     error   // what each check that is asked for finds
}

func (m *monitor) Answered(string) {}

func (m *monitor) Salt(string) string { return "" }

func (m *monitor) ReportFailure(id string, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.broken = append(m.broken, id)
}

func (m *monitor) RecordOutcome(id string, v engine.Verdict, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.judged == nil {
		m.judged = map[string][]engine.Verdict{}
	}
	m.judged[id] = append(m.judged[id], v)
}

func (m *monitor) Accuse(string) (settle func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.accused++
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.accused--
	}
}

func (m *monitor) CheckNow(context.Context, string) error { return m.ill }

func (m *monitor) Expiries(string) engine.Expiries { return engine.Expiries{Known: m.counts} }

func (m *monitor) ExpiriesNow(context.Context, string) engine.Expiries {
	m.mu.Lock()
	defer m.mu.Unlock()
	return engine.Expiries{HandOffs: m.expired, Known: m.counts}
}

// gaveAway has prefill engines say that they have given away so many hand-offs.
func (m *monitor) gaveAway(n float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expired = n
}
