package fleet

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// listing is a fleet whose engines list names.
type listing struct {
	*together
	workers map[string]board.Worker
}

func lists(t *testing.T, change func(*config.Config)) *listing {
	l := &listing{together: aggregates(t, change), workers: map[string]board.Worker{}}
	publish := l.host.Publish
	l.host.Publish = func(c []prefill.Candidate, r []local.Rank, ws []board.Worker) {
		publish(c, r, ws)
		clear(l.workers)
		for _, w := range ws {
			l.workers[w.Name] = w
		}
	}
	return l
}

// of has an engine list names, the first of them its base model.
func (l *listing) of(key string, up bool, names ...string) {
	var all []engine.Model
	for i, name := range names {
		m := engine.Model{ID: name}
		if i > 0 {
			m.Parent = names[0]
		}
		all = append(all, m)
	}
	l.OnStatus(key, engine.Status{Up: up, Models: all})
}

func pairs(c *config.Config) {
	c.Engines = config.Engines{
		Prefill: []config.Engine{{URL: "http://127.0.0.1:1"}},
		Decode:  []config.Engine{{URL: "http://127.0.0.1:2"}, {URL: "http://127.0.0.1:3"}},
	}
}

func TestRanksAreKnownByWhatTheyList(t *testing.T) {
	l := lists(t, pairs)
	l.of("decode 127.0.0.1:2", true, "m", "x")
	l.of("decode 127.0.0.1:3", true, "m", "x")
	two, three := l.workers["127.0.0.1:2"].Lists, l.workers["127.0.0.1:3"].Lists
	require.Same(t, two, three, "who lists the same has the same value")
	l.Publish()
	require.Same(t, two, l.workers["127.0.0.1:2"].Lists, "as long as nothing changes")
	l.of("decode 127.0.0.1:3", true, "m")
	require.Equal(t, []bool{true, true, false}, []bool{
		l.workers["127.0.0.1:2"].Lists.Has("x"), l.workers["127.0.0.1:3"].Lists.Has("m"), l.workers["127.0.0.1:3"].Lists.Has("x"),
	})
	for rank, want := range map[string]bool{"127.0.0.1:2": true, "127.0.0.1:3": false} {
		_, ok := l.RankOf(rank, "m", "x")
		require.Equal(t, want, ok, "%s may be aimed at", rank)
	}
	anew := l.instances["decode 127.0.0.1:2"].conf
	anew.Slots = 7
	require.NoError(t, l.Add(Decode, anew))
	require.Same(t, two, l.workers["127.0.0.1:2"].Lists, "an engine that is described anew lists what it did")
}

// What nobody can complete is no model: a name that engines of one side list, and none of the other.
func TestANameThatOnlyOneSideLists(t *testing.T) {
	l := lists(t, pairs)
	half := func(name string) bool {
		r, ok, known := l.Lookup(name)
		require.True(t, ok && known, name)
		return r.Half
	}
	const p, d2, d3 = "prefill 127.0.0.1:1", "decode 127.0.0.1:2", "decode 127.0.0.1:3"
	l.of(p, true, "m", "x")
	l.of(d2, true, "m", "y")
	require.False(t, half("x"), "one has not told what it lists")
	require.Equal(t, []string{"m", "x"}, l.candidates["127.0.0.1:1/0"].Models)
	l.of(d3, true, "m")
	require.Equal(t, []bool{false, true, true}, []bool{half("m"), half("x"), half("y")})
	require.Equal(t, []string{"m"}, l.candidates["127.0.0.1:1/0"].Models, "no prompt is prefilled that nobody would decode")
	names := []string{}
	for _, r := range l.Models() {
		names = append(names, r.Name)
	}
	require.Equal(t, []string{"m"}, names)
	l.of(d3, false, "m", "x")
	require.False(t, half("x"), "one that is down lists what it did")
	require.Equal(t, []string{"m", "x"}, l.candidates["127.0.0.1:1/0"].Models)
	require.Equal(t, []string{"x"}, l.candidates["127.0.0.1:1/0"].Behind)
	l.of(d2, false, "m")
	require.Empty(t, l.candidates["127.0.0.1:1/0"].Behind, "none decodes now, whatever it lists")
	require.NoError(t, l.Remove(Decode, "127.0.0.1:2"))
	require.NoError(t, l.Remove(Decode, "127.0.0.1:3"))
	require.False(t, half("m"), "there is no other side")
}

// Ranks that do both are a candidate for all that one of them lists, and come second for what none of them lists that is up.
func TestAGroupIsACandidateForWhatItsRanksList(t *testing.T) {
	l := lists(t, func(c *config.Config) {
		c.Engines = config.Engines{}
		for _, port := range []string{"1", "2"} {
			c.Engines.Aggregated = append(c.Engines.Aggregated, config.Engine{URL: "http://127.0.0.1:" + port, Barrier: config.BarrierNone})
		}
	})
	l.of("aggregated 127.0.0.1:1", true, "m")
	l.of("aggregated 127.0.0.1:2", true, "m", "x")
	group := func() prefill.Candidate { return l.candidates["main of m+aggregated"] }
	require.Equal(t, []string{"m", "x"}, group().Models)
	require.Empty(t, group().Behind)
	l.of("aggregated 127.0.0.1:2", false, "m", "x")
	require.Equal(t, []string{"x"}, group().Behind)
	require.True(t, group().Live)
	l.of("aggregated 127.0.0.1:2", true, "m")
	require.Equal(t, []string{"m"}, group().Models)
}

// Two base models may have adapters of one name. KV goes to ranks of the model that computed it.
func TestTheBoardOfAHandOffIsThatOfItsBaseModel(t *testing.T) {
	l := lists(t, func(c *config.Config) {
		pairs(c)
		c.Engines.Prefill = append(c.Engines.Prefill, config.Engine{URL: "http://127.0.0.1:4"})
	})
	for key, base := range map[string]string{"prefill 127.0.0.1:1": "m", "decode 127.0.0.1:2": "m", "prefill 127.0.0.1:4": "n", "decode 127.0.0.1:3": "n"} {
		l.of(key, true, base, "x")
	}
	for port, base := range map[string]string{"1": "m", "4": "n"} {
		c := l.candidates[fmt.Sprintf("127.0.0.1:%s/0", port)]
		require.Equal(t, base, l.BoardFor(c, "x", ""))
		require.Equal(t, base, l.BoardFor(c, base, ""))
		require.Equal(t, base, l.BoardFor(c, "nobody's", ""))
	}
	l.of("decode 127.0.0.1:3", true, "other", "n", "x") // the same model, with its names in another order
	require.Equal(t, "other", l.BoardFor(l.candidates["127.0.0.1:4/0"], "n", ""), "the only one that lists it")
	both := prefill.Candidate{Mixed: true, Board: "b"}
	require.Equal(t, "b", l.BoardFor(both, "x", ""))
}
