package live

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/incident"
)

func TestProblemsSayWhatIsWrongAndWhere(t *testing.T) {
	rank := func(d *Document, i int) *Rank { return &d.Models[0].Groups[0].Ranks[i] }
	for name, tt := range map[string]struct {
		change func(*Document)
		want   []Problem
	}{
		"nothing is wrong": {func(*Document) {}, []Problem{}},
		"the proxy cannot serve": {func(d *Document) { d.Proxy.Ready, d.Proxy.Why = false, "no healthy decode engine" },
			[]Problem{{Bad, "proxy", "", "not ready: no healthy decode engine"}}},
		"a proxy that drains is as somebody wants it": {func(d *Document) { d.Proxy.Ready, d.Proxy.Draining, d.Proxy.Why = false, true, "draining" },
			[]Problem{{Warn, "proxy", "", "drains: draining"}}},
		"an audit is never off": {func(d *Document) { d.Proxy.DriftSlots = 1 },
			[]Problem{{Bad, "proxy", "", "the audit is off by 1 slots and 0 KV tokens: a bug, report it"}}},
		"some failures are the world's": {func(d *Document) { d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 100, 1 }, []Problem{}},
		"more are not":                  {func(d *Document) { d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 100, 2 }, []Problem{{Bad, "traffic", "", "2.0 of 100.0 requests/s fail"}}},
		"how they fail": {func(d *Document) {
			d.Traffic.RequestsPerS, d.Traffic.FailuresPerS, d.Failures = 100, 2, []Failed{{Outcome: "queue_full", Last5Min: 9}, {Outcome: "upstream_broken", Last5Min: 2}}
		}, []Problem{{Bad, "traffic", "", "2.0 of 100.0 requests/s fail, most of the last minutes with queue_full"}}},
		"an engine is out, and what is bad comes first": {func(d *Document) {
			rank(d, 3).State = RankDraining
			d.Engines[12].State, d.Engines[12].Why = "out", "three requests failed in a row"
		}, []Problem{
			{Bad, "engines", "10.0.3.10:8000", "decode engine is out: three requests failed in a row"},
			{Warn, "ranks", "dp", "1 rank draining: 10.0.3.10:8000/3"},
		}},
		"ranks are named, the first few": {func(d *Document) {
			for i := range 5 {
				rank(d, i).KVTokens = rank(d, i).Capacity
			}
		}, []Problem{{Warn, "ranks", "dp", "5 ranks with a full KV cache: 10.0.3.10:8000/0, 10.0.3.10:8000/1, 10.0.3.10:8000/2 and 2 more"}}},
		"a prefiller is full": {func(d *Document) { d.Prefill.Engines[1].State, d.Prefill.Engines[1].KVShare = "closed", 0.93 },
			[]Problem{{Warn, "prefill", "10.0.1.11:8000/0", "takes no prompts: its KV cache is 93 % full"}}},
		"nobody prefills": {func(d *Document) {
			d.Prefill.Engines = d.Prefill.Engines[:1]
			d.Prefill.Engines[0].State = "down"
		}, []Problem{{Bad, "prefill", "", "no prefill engine takes prompts"}, {Bad, "prefill", "", "4 requests wait for a prefill engine"}}},
		"the arrival queue is full": {func(d *Document) { d.Prefill.Waiting = 1000 }, []Problem{{Bad, "prefill", "", "the arrival queue is full: 1000 requests"}}},
		"the pool is old":           {func(d *Document) { d.Models[0].Pool.OldestS, d.Models[0].Pool.Entries = 31, 7 }, []Problem{{Bad, "pool", "deepseek-r1", "a finished prefill has waited 31.0 s for a decode rank; 7 wait"}}},
		"the policy is too slow":    {func(d *Document) { d.Models[0].Groups[0].FallbackRounds = 9 }, []Problem{{Warn, "balance", "dp", "the policy was too slow: evenkeel decides for now"}}},
		"imbalance costs":           {func(d *Document) { d.Models[0].Groups[0].LostShare = 0.2 }, []Problem{{Warn, "balance", "dp", "imbalance costs 20 % of every step"}}},
		"the config is refused: what is wrong, without the file's lines": {func(d *Document) { d.Proxy.ConfigError = "ek.yaml:1:2: wrong\n> 1 | x" },
			[]Problem{{Warn, "proxy", "", "the config file was refused and is not in force: ek.yaml:1:2: wrong"}}},
		"a source fails and engines are unfit": {func(d *Document) {
			d.Sources = []Source{
				{Name: "file:a.yaml", Engines: 2, Error: "a.yaml:1:2: wrong\n> 1 | x", Unfit: []Unfit{{"10.0.9.1:8000", "decode", "gives no hand-off"}, {"10.0.9.2:8000", "decode", "is silent"}}},
				{Name: "file:b.yaml", Engines: 1},
			}
		}, []Problem{
			{Warn, "engines", "file:a.yaml", "discovery fails, its last list of 2 engines stays in force: a.yaml:1:2: wrong"},
			{Warn, "engines", "file:a.yaml", "2 engines found and not used: 10.0.9.1:8000, 10.0.9.2:8000; 10.0.9.1:8000: gives no hand-off"},
		}},
		"nobody owns a group": {func(d *Document) {
			d.Areas = []Area{{Group: "dp", Phase: "watching"}, {Group: "other", Holder: "eu-2"}, {Group: "mine", Admits: true}}
		},
			[]Problem{{Bad, "geo", "dp", "no dispatcher owns it, nobody sends its engines requests"}}},
		"a peer is gone": {func(d *Document) { d.Geo = &Geo{Peers: []Peer{{ID: "us-1", Region: "us"}}} }, []Problem{{Warn, "geo", "us-1", "peer in us is not up: no probe was answered"}}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(16)
			f.began = time.Now()
			d := f.Document(t.Context())
			tt.change(&d)
			require.Equal(t, tt.want, problems(findingsOf(&d)))
		})
	}
}

// The default group of every model has the same name.
func TestGroupsAreNamedWithTheirModelWhereThereAreSeveral(t *testing.T) {
	group := func(name string, lost float64) Group {
		return Group{GroupLoads: board.GroupLoads{Name: name, Barrier: name != ""}, LostShare: lost}
	}
	d := Document{Proxy: Proxy{Ready: true}, Models: []Model{
		{Name: "llama", Groups: []Group{group("main", 0.2)}}, {Name: "qwen", Groups: []Group{group("main", 0.3), group("", 0.4)}},
	}}
	where := func() (names []string) {
		for _, p := range problems(findingsOf(&d)) {
			names = append(names, p.Where)
		}
		return names
	}
	require.Equal(t, []string{"llama · main", "qwen · main", "qwen"}, where())
	var b incident.Book
	for range 3 {
		b.Observe(time.Unix(1, 0), findingsOf(&d))
		require.Len(t, b.Incidents(), 3)
	}
	d.Models = d.Models[1:]
	require.Equal(t, []string{"qwen · main", "qwen"}, where())
	d.Models[0].Groups = d.Models[0].Groups[:1]
	require.Equal(t, []string{"main"}, where())
}
