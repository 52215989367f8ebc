package fleet

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/geo"
	"evenkeel/mooncake"
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

// Which engines run a response on the rank that it names is known by their version, where several ranks are behind one
// address; one whose version cannot be read may not.
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
		f.host.Publish = func(_ []prefill.Candidate, _ []local.Rank, workers []board.Worker) { heard = workers }
		f.OnStatus("decode 127.0.0.1:3", engine.Status{Up: true, Version: c.version, Models: []engine.Model{{ID: "one"}}})
		require.Len(t, heard, max(1, c.ranks))
		for _, w := range heard {
			require.Equal(t, c.strays, w.Strays, "%+v", c)
			require.Equal(t, cfg.Dispatch.Beyond, w.Beyond, "its own queue renews the hold of hand-offs")
			rank, _ := f.Named(w.Name)
			require.Equal(t, !c.strays, rank.Heeds(mooncake.Responses))
			require.True(t, rank.Heeds(mooncake.Messages))
		}
	}
}

// together is a fleet of aggregated engines at these ports, and what was published of it last.
type together struct {
	*testing.T
	*Fleet
	candidates map[string]prefill.Candidate
	up         map[string]bool // by rank
}

func aggregates(t *testing.T, configure func(*config.Config)) *together {
	cfg := config.Default()
	configure(cfg)
	l := &together{T: t, Fleet: of(t, cfg)}
	l.host.Publish = func(candidates []prefill.Candidate, _ []local.Rank, workers []board.Worker) {
		l.candidates, l.up = map[string]prefill.Candidate{}, map[string]bool{}
		for _, c := range candidates {
			l.candidates[c.ID] = c
		}
		for _, w := range workers {
			l.up[w.Name] = w.Up
		}
	}
	enter, err := l.Load()
	require.NoError(t, err)
	enter()
	return l
}

func (l *together) is(engineKey string, up bool) {
	l.OnStatus(engineKey, engine.Status{Up: up, Models: []engine.Model{{ID: "m"}}})
}

func TestAGroupOfRanksThatPrefillAndDecodeIsOneCandidate(t *testing.T) {
	l := aggregates(t, func(c *config.Config) {
		c.Engines.Aggregated = []config.Engine{{URL: "http://127.0.0.1:1", Slots: 4, Budget: 2048}, {URL: "http://127.0.0.1:2", Slots: 4}, {URL: "http://127.0.0.1:3", Ranks: 2, Slots: 4}}
	})
	for _, port := range []string{"1", "2", "3"} {
		l.is("aggregated 127.0.0.1:"+port, true)
	}
	require.Equal(t, map[string]bool{"127.0.0.1:1": true, "127.0.0.1:2": true, "127.0.0.1:3/0": true, "127.0.0.1:3/1": true}, l.up)
	require.Len(t, l.candidates, 2, "one address with several ranks is a group of its own")
	one, other := l.candidates["main of m+aggregated"], l.candidates["127.0.0.1:3 of m+aggregated"]
	require.True(t, one.Live && other.Live && one.Mixed && !one.Second)
	require.Equal(t, []string{"m"}, one.Models)
	require.Equal(t, "m+aggregated", one.Board)
}

// One rank that is gone stops the others of its group, whatever they say of themselves.
func TestAGroupIsOutWithOneOfItsEngines(t *testing.T) {
	for barrier, want := range map[string]bool{config.BarrierDP: false, config.BarrierNone: true} {
		l := aggregates(t, func(c *config.Config) {
			c.Engines.Aggregated = []config.Engine{{URL: "http://127.0.0.1:1", Barrier: barrier}, {URL: "http://127.0.0.1:2", Barrier: barrier}, {URL: "http://127.0.0.1:3", Ranks: 2}}
		})
		l.is("aggregated 127.0.0.1:1", true)
		require.True(t, l.up["127.0.0.1:1"], "the other one has never been there")
		l.is("aggregated 127.0.0.1:2", true)
		l.is("aggregated 127.0.0.1:3", true)
		l.is("aggregated 127.0.0.1:2", false)
		require.Equal(t, want, l.up["127.0.0.1:1"])
		require.Equal(t, want, l.candidates["main of m+aggregated"].Live)
		require.True(t, l.up["127.0.0.1:3/1"])
		l.is("aggregated 127.0.0.1:2", true)
		require.True(t, l.up["127.0.0.1:1"], "it comes back with it")
	}
}

// The operator ends the process of a rank that vLLM has taken out of its group, and the others go on.
func TestAGroupGoesOnWithoutARankThatIsRetired(t *testing.T) {
	l := aggregates(t, func(c *config.Config) {
		for _, port := range []string{"1", "2"} {
			c.Engines.Aggregated = append(c.Engines.Aggregated, config.Engine{URL: "http://127.0.0.1:" + port, Barrier: config.BarrierDP})
		}
	})
	l.is("aggregated 127.0.0.1:1", true)
	l.is("aggregated 127.0.0.1:2", true)
	for _, why := range []error{engine.ErrRetired, syscall.ECONNREFUSED} {
		l.OnStatus("aggregated 127.0.0.1:2", engine.Status{Err: why, Models: []engine.Model{{ID: "m"}}})
		require.Equal(t, map[string]bool{"127.0.0.1:1": true, "127.0.0.1:2": false}, l.up, why)
	}
	l.is("aggregated 127.0.0.1:2", true)
	l.is("aggregated 127.0.0.1:2", false)
	require.False(t, l.up["127.0.0.1:1"], "it was in the group again")
}

// Prompts wait before their prefill while no decode rank takes any, and go to another region that has one.
func TestPromptsWaitWhereDecodeIsHalted(t *testing.T) {
	up, halted, down := board.Worker{Up: true}, board.Worker{Awaited: true}, board.Worker{Down: true}
	for _, row := range []struct {
		name, bind, region string
		workers            []board.Worker
		live, late         bool
	}{
		{"one of them takes requests", mooncake.BindLate, "", []board.Worker{halted, up}, true, false},
		{"none does for now", mooncake.BindLate, "", []board.Worker{halted, down}, false, true},
		{"they wait for a rank before the prefill", mooncake.BindArrival, "", []board.Worker{halted}, true, false},
		{"none is there", mooncake.BindLate, "", []board.Worker{down}, true, false},
		{"one of another region takes requests", mooncake.BindLate, "eu", []board.Worker{halted, up}, true, false},
		{"none of another region does for now", mooncake.BindArrival, "eu", []board.Worker{halted, down}, false, true},
		{"none of another region is there", mooncake.BindLate, "eu", []board.Worker{down}, false, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			for i := range row.workers {
				row.workers[i].Model = BoardIn("m", row.region)
			}
			profile := &mooncake.Profile{Connector: mooncake.NIXLPush, Bind: row.bind}
			c := []prefill.Candidate{{Models: []string{"m"}, Region: row.region, Live: true, Profile: profile}}
			elsewhere := board.Worker{Model: BoardIn("m", "us"), Up: true}
			onlyWhereDecoded(c, append(row.workers, elsewhere))
			require.Equal(t, [2]bool{row.live, row.late}, [2]bool{c[0].Live, c[0].Late})
		})
	}
}

func TestWhichKindOfEnginesComesFirst(t *testing.T) {
	for _, row := range []struct {
		prefer                    string
		prefill, decode, together bool
		pair, group               bool // come second
	}{
		{config.PreferPD, true, true, true, false, true},
		{config.PreferPD, true, false, true, true, false},
		{config.PreferPD, false, true, true, true, false},
		{config.PreferPD, true, true, false, false, true},
		{config.PreferAggregated, true, true, true, true, false},
		{config.PreferAggregated, true, true, false, false, true},
	} {
		l := aggregates(t, func(c *config.Config) {
			c.Engines = config.Engines{
				Prefill: []config.Engine{{URL: "http://127.0.0.1:1"}}, Decode: []config.Engine{{URL: "http://127.0.0.1:2"}}, Aggregated: []config.Engine{{URL: "http://127.0.0.1:3", Ranks: 2}}, Prefer: row.prefer,
			}
		})
		for _, name := range []string{"prefill 127.0.0.1:1", "decode 127.0.0.1:2", "aggregated 127.0.0.1:3"} {
			l.is(name, true)
		}
		l.is("prefill 127.0.0.1:1", row.prefill)
		l.is("decode 127.0.0.1:2", row.decode)
		l.is("aggregated 127.0.0.1:3", row.together)
		require.Equal(t, row.pair, l.candidates["127.0.0.1:1/0"].Second, "%+v", row)
		require.Equal(t, row.group, l.candidates["127.0.0.1:3 of m+aggregated"].Second, "%+v", row)
	}
}

func TestHowABoardIsCalled(t *testing.T) {
	for board, want := range map[string]string{
		"m": "m", "m@eu": "m@eu", "m+aggregated": "m (aggregated)", "m+aggregated@eu": "m@eu (aggregated)", "main of m+aggregated": "main of m (aggregated)",
		"m+aggregated-7b": "m+aggregated-7b", "p0:8100/0": "p0:8100/0",
	} {
		name, aggregated := Called(board)
		require.Equal(t, want, name)
		require.Equal(t, want != board, aggregated, board)
	}
}

// The ranks beside one that failed are those that a request keeps off. It keeps off a whole host only where the board has a rank of
// another one: else it would come back to the very rank that failed.
func TestARequestKeepsOffAHostWhereAnotherOneTakesIt(t *testing.T) {
	other := "decode 10.0.0.2:80"
	status := func(change func(*engine.Status)) func(*Fleet) {
		return func(f *Fleet) {
			s := engine.Status{Up: true, Models: []engine.Model{{ID: "m"}}}
			change(&s)
			f.OnStatus(other, s)
		}
	}
	for name, tt := range map[string]struct {
		other func(*Fleet) // what it is
		whole bool
	}{
		"takes requests":     {func(*Fleet) {}, true},
		"is down":            {status(func(s *engine.Status) { s.Up = false }), false},
		"failed at requests": {status(func(s *engine.Status) { s.Out = errors.New("500") }), false},
		"is paused":          {status(func(s *engine.Status) { s.Accused = errors.New("500") }), false},
		"is halted":          {status(func(s *engine.Status) { s.Halt = errors.New("its group re-forms") }), false},
		"has lost its rank":  {status(func(s *engine.Status) { s.Lost = map[int]string{0: "retired"} }), false},
		"lost its model":     {status(func(s *engine.Status) { s.Models = nil }), false},
		"has another model":  {status(func(s *engine.Status) { s.Models = []engine.Model{{ID: "other"}} }), false},
		"drains":             {func(f *Fleet) { require.NoError(t, f.Drain(Decode, "10.0.0.2:80", 0)) }, false},
		"has another owner":  {func(f *Fleet) { f.Admission = unowned(t); f.Publish() }, false},
		"was drained and not": {func(f *Fleet) {
			require.NoError(t, f.Drain(Decode, "10.0.0.2:80", 0))
			require.NoError(t, f.Undrain(Decode, "10.0.0.2:80"))
		}, true},
	} {
		t.Run("another one "+name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Profiles = map[string]mooncake.Profile{"a": {}}
			for _, url := range []string{"http://10.0.0.1:80", "http://10.0.0.1:81", "http://10.0.0.2:80"} {
				cfg.Engines.Decode = append(cfg.Engines.Decode, config.Engine{URL: url, Profile: "a"})
			}
			f := of(t, cfg)
			enter, err := f.Load()
			require.NoError(t, err)
			enter()
			for key := range f.instances {
				f.up(key, "m")
			}
			tt.other(f)
			one, beside := f.ids["10.0.0.1:80"], []int32{f.ids["10.0.0.1:80"]}
			require.Equal(t, beside, f.Beside(one, false, nil), "it has crashed, and the other engines of its host are well")
			if tt.whole {
				beside = append(beside, f.ids["10.0.0.1:81"])
			}
			list := f.Beside(one, true, nil)
			require.ElementsMatch(t, beside, list)
			if tt.whole {
				require.ElementsMatch(t, append(list, f.ids["10.0.0.2:80"]), f.Beside(f.ids["10.0.0.2:80"], true, list), "no other host is left")
			}
		})
	}
}

// The ranks around one that refuses requests are those of its group, or, where there is no other group, those of its engine.
func TestWhichRanksRefuseTogether(t *testing.T) {
	at := func(engines ...string) (all []config.Engine) { // "host group"
		for _, e := range engines {
			host, group, _ := strings.Cut(e, " ")
			all = append(all, config.Engine{URL: "http://" + host + ":80", Group: group, Ranks: 2})
		}
		return all
	}
	for name, row := range map[string]struct {
		engines []config.Engine
		down    []string // engines
		list    []string // engines of whose ranks the request keeps off
		around  []string
		others  bool
	}{
		"two groups":                           {at("a x", "b x", "c y"), nil, nil, []string{"a", "b"}, true},
		"two groups, one of which is down":     {at("a x", "b x", "c y"), []string{"c"}, nil, []string{"a"}, true},
		"two groups, one of which has refused": {at("a x", "b x", "c y"), nil, []string{"c"}, []string{"a", "b"}, false},
		"one group of two engines":             {at("a x", "b x"), nil, nil, []string{"a"}, true},
		"one engine":                           {at("a x"), nil, nil, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Engines.Aggregated = row.engines
			f := of(t, cfg)
			enter, err := f.Load()
			require.NoError(t, err)
			enter()
			for key := range f.instances {
				if !slices.ContainsFunc(row.down, func(host string) bool { return strings.HasSuffix(key, " "+host+":80") }) {
					f.up(key, "m")
				}
			}
			ranks := func(hosts []string) (all []int32) {
				for _, h := range hosts {
					for r := range 2 {
						all = append(all, f.ids[fmt.Sprintf("%s:80/%d", h, r)])
					}
				}
				return all
			}
			around, others := f.Around(ranks([]string{"a"})[0], ranks(row.list))
			require.ElementsMatch(t, ranks(row.around), around)
			require.Equal(t, row.others, others)
		})
	}
}

// unowned are scopes of which this proxy has none.
func unowned(t *testing.T) *owner.Set {
	cfg := config.Default()
	cfg.Geo.Mode, cfg.Geo.Self = geo.Distributed, geo.Self{ID: "us-1", Region: "us"}
	own := &cfg.Geo.Ownership
	own.Engine, own.Etcd.Endpoints = geo.OwnEtcd, []string{"http://127.0.0.1:1"} // which no claim asks
	scopes, err := owner.New(cfg, owner.Host{Context: t.Context(), Log: zap.NewNop(), Registerer: prometheus.NewRegistry(), Hold: func() time.Duration { return time.Minute }})
	require.NoError(t, err)
	t.Cleanup(scopes.Close)
	return scopes
}
