package roster

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/internal/words"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Events in, published lists out. What a row does not name may be anything.
func TestWhatIsPublished(t *testing.T) {
	for _, row := range []struct {
		name, engines, steps string
		want                 string // lines of the lists, each ended by a semicolon
	}{
		// Ranks.
		{"an engine is down until it answers", "p1 d2", "", "prefill p1:80/0"},
		{"it has no board until it names its models", "p1 d2", "p1 up; d2 up", "prefill p1:80/0 live"},
		{"up", "p1 d2", "p1 up m; d2 up m", "prefill p1:80/0 m m live; decode d2:80 #0 m up; model m m prefill decode"},
		{"down after it was up", "p1 d2", "p1 up m; d2 up m; d2 down m; p1 down m", "prefill p1:80/0 m m; decode d2:80 #0 m down down; model m m"},
		{"requests wait for one whose answers do not come", "p1 d2", "p1 up m; d2 up m; p1 late m; d2 late m", "prefill p1:80/0 m m late; decode d2:80 #0 m late down; model m m prefill decode"},
		{"not where it is accused beside another", "p1 p3", "p1 up m; p3 up m; p1 late,accused m", "prefill p1:80/0 m m; prefill p3:80/0 m m live"},
		{"ranks", "d2/2", "d2 up m", "decode d2:80/0 #0 m up; decode d2:80/1 #1 m up"},
		{"a lost rank, and the others go on", "d2/2", "d2 up,lost1 m", "decode d2:80/0 #0 m up; decode d2:80/1 #1 m lost down"},
		{"a halted engine is awaited", "p1 d2", "p1 up m; d2 up m; d2 halted m", "prefill p1:80/0 m m late; decode d2:80 #0 m halted; model m m prefill decode"},
		{"a halted prefill engine, too", "p1 d2", "p1 halted m; d2 up m", "prefill p1:80/0 m m late; decode d2:80 #0 m up"},
		{"no rank is awaited that is lost", "d2/2", "d2 halted,lost1 m", "decode d2:80/0 #0 m halted; decode d2:80/1 #1 m lost down"},

		// Failures.
		{"failed, and another one serves", "d2 d3", "d2 up m; d3 up m; d2 out m", "decode d2:80 #0 m out; decode d3:80 #1 m up"},
		{"failed, and none else serves", "d2 d3", "d2 out m", "decode d2:80 #0 m up"},
		{"failed, and the others have another model", "d2 d3", "d2 out m; d3 up n", "decode d2:80 #0 m up; decode d3:80 #1 n up"},
		{"wedged, and none else serves", "d2", "d2 wedged m", "decode d2:80 #0 m out down"},
		{"accused beside another", "d2 d3", "d3 up m; d2 accused m", "decode d2:80 #0 m paused; decode d3:80 #1 m up"},
		{"accused alone", "d2", "d2 accused m", "decode d2:80 #0 m up"},

		// Drains and discovery.
		{"a drain", "p1 d2", "p1 up m; d2 up m; d2 drains; p1 drains", "prefill p1:80/0 m m; decode d2:80 #0 m draining; model m m"},
		{"it ends", "p1 d2", "p1 up m; d2 up m; d2 drains; p1 drains; d2 resumes; p1 resumes", "prefill p1:80/0 m m live; decode d2:80 #0 m up; model m m prefill decode"},
		{"a drain of a rank", "d2/2", "d2 up m; d2/1 drains", "decode d2:80/0 #0 m up; decode d2:80/1 #1 m draining; model m m decode"},
		{"of each rank", "d2/2", "d2 up m; d2/1 drains; d2/0 drains", "decode d2:80/0 #0 m draining; decode d2:80/1 #1 m draining; model m m"},
		{"one that is halted drains all the same", "d2", "d2 up m; d2 drains; d2 halted m", "decode d2:80 #0 m draining"},
		{"a drain outlives an outage", "d2", "d2 up m; d2 drains; d2 down m; d2 up m", "decode d2:80 #0 m draining"},
		{"an engine that comes in does not drain", "d2", "d2 up m; d2 drains; d2 leaves; d2 enters; d2 up m", "decode d2:80 #0 m up"},
		{"nor after a drain with a deadline", "d2", "d2 up m; d2 drains 10s; d2 leaves; d2 enters; d2 up m", "decode d2:80 #0 m up"},
		{"a source says that it is not ready", "d2", "d2 up m; d2 away", "decode d2:80 #0 m draining"},
		{"and that it is", "d2", "d2 up m; d2 away; d2 back", "decode d2:80 #0 m up"},

		// Identities.
		{"an engine keeps its number while it is away", "d2 d3", "d3 up m; d2 leaves; d2 enters; d2 up m", "decode d3:80 #1 m up; decode d2:80 #0 m up"},
		{"one that is described anew keeps its state", "d2", "d2 up m; d2 enters", "decode d2:80 #0 m up"},

		// Names.
		{"an adapter that the ranks lack is not prefilled", "p1 d2", "p1 up m x; d2 up m y", "prefill p1:80/0 m m live; model m m prefill decode; model x m prefill half; model y m decode half"},
		{"unless one of them has not told what it lists", "p1 d2 d3", "p1 up m x; d2 up m", "prefill p1:80/0 m m,x live behind=x; model x m prefill"},
		{"one that is down lists what it did", "p1 d2 d3", "p1 up m x; d2 up m; d3 up m x; d3 down m x", "prefill p1:80/0 m m,x live behind=x; model x m prefill"},
		{"none decodes now, whatever it lists", "p1 d2 d3", "p1 up m x; d2 down m; d3 down m x", "prefill p1:80/0 m m,x live"},
		{"without the other side nothing is half", "p1 d2", "p1 up m x; d2 up m; d2 leaves", "model m m prefill; model x m prefill"},
		{"of another base model one engine is enough", "p1 d2", "p1 up m; d2 up m; p3 enters; p3 up embed", "model embed embed prefill"},

		// Groups of ranks that prefill and decode.
		{"a group is one candidate", "a1 a2 a3/2+g", "a1 up m; a2 up m; a3 up m", "prefill main of m+aggregated m+aggregated m live; prefill g of m+aggregated m+aggregated m live; decode a1:80 #0 m+aggregated up; decode a3:80/1 #3 m+aggregated up; local a1:80 up; model m m prefill decode alone"},
		{"one rank that is gone stops the others of its group", "a1 a2", "a1 up m; a2 up m; a2 down m", "prefill main of m+aggregated m+aggregated m second idle; decode a1:80 #0 m+aggregated broken; decode a2:80 #1 m+aggregated down down"},
		{"one that is wedged, too", "a1 a2", "a1 up m; a2 up m; a2 wedged m", "decode a1:80 #0 m+aggregated broken"},
		{"not one that was never there", "a1 a2", "a1 up m", "decode a1:80 #0 m+aggregated up"},
		{"nor one that is halted", "a1 a2", "a1 up m; a2 up m; a2 halted m", "prefill main of m+aggregated m+aggregated m live late; decode a1:80 #0 m+aggregated up; decode a2:80 #1 m+aggregated halted"},
		{"without a barrier the others go on", "a1=0 a2=0", "a1 up m; a2 up m; a2 down m", "prefill main of m+aggregated m+aggregated m live; decode a1:80 #0 m+aggregated up"},
		{"a group of its own goes on", "a1 a3/2+g", "a1 up m; a3 up m; a1 down m", "decode a3:80/1 #2 m+aggregated up"},
		{"it comes back with it", "a1 a2", "a1 up m; a2 up m; a2 down m; a2 up m", "decode a1:80 #0 m+aggregated up; decode a2:80 #1 m+aggregated up"},
		{"one that is retired is not waited for", "a1 a2", "a1 up m; a2 up m; a2 retired m; a2 down m", "decode a1:80 #0 m+aggregated up; decode a2:80 #1 m+aggregated down down"},
		{"until it was in the group again", "a1 a2", "a1 up m; a2 up m; a2 retired m; a2 up m; a2 down m", "decode a1:80 #0 m+aggregated broken"},
		{"a group has what one of its ranks lists", "a1=0 a2=0", "a1 up m; a2 up m x", "prefill main of m+aggregated m+aggregated m,x live"},
		{"it comes second for what no rank lists that is up", "a1=0 a2=0", "a1 up m; a2 up m x; a2 down m x", "prefill main of m+aggregated m+aggregated m,x live behind=x"},
		{"until none lists it any more", "a1=0 a2=0", "a1 up m; a2 up m x; a2 up m", "prefill main of m+aggregated m+aggregated m live"},

		// Connectors.
		{"each model has its own connector", "p1 d2 p3~sglang d4~sglang", "p1 up m; d2 up m; p3 up n; d4 up n", "prefill p1:80/0 m m live; prefill p3:80/0 n n live; decode d2:80 #0 m up; decode d4:80 #1 n up"},
		{"what served first has it", "p1 d2 p3~sglang d4~sglang", "d4 up m; d2 up m; p1 up m; p3 up m", "prefill p1:80/0 m m; prefill p3:80/0 m m live; decode d2:80 #0 m odd; decode d4:80 #1 m up"},
		{"until another of that connector serves no more", "p1 d2 p3~sglang d4~sglang", "d4 up m; d2 up m; p1 up m; p3 up m; d4 down; p3 down", "prefill p1:80/0 m m live; decode d2:80 #0 m up"},
		{"connectors that bind late may differ", "p1~opaque d2", "p1 up m; d2 up m", "prefill p1:80/0 m m live; decode d2:80 #0 m up"},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := begin(t, row.engines).steps(row.steps)
			text := s.Text()
			for line := range strings.SplitSeq(row.want, "; ") {
				require.Contains(t, text, line)
			}
		})
	}
}

// One question is asked of one picture: what was published never changes.
func TestWhatWasPublishedStays(t *testing.T) {
	s := begin(t, "p1 d2 d3")
	s.steps("p1 up m; d2 up m x")
	was, text := s.Snapshot, s.Text()
	id := was.workers["d2:80"]
	rank := *was.Rank(id)
	s.steps("d2 down m; p1 drains; d3 up m; d2 leaves; wait 1h")
	require.Equal(t, text, was.Text())
	require.Equal(t, rank, *was.Rank(id))
	require.NotNil(t, was.Engine("decode d2:80"))
	require.False(t, was.HasDrain("prefill p1:80"))
}

// A proxy that said it is ready before its dispatcher had heard of an engine would answer the first
// requests with 503. But a slot may be on a rank that only the dispatcher has heard of.
func TestTheDispatcherKnowsAnEngineBeforeARequestIsLetIn(t *testing.T) {
	s := begin(t, "p1 d2").steps("p1 up m")
	before := s.Snapshot
	next := s.steps("d2 up m").WithRoutes(before)
	route, _, _ := next.Lookup("m")
	require.False(t, route.Decode)
	_, decodes := next.CountInService()
	require.Zero(t, decodes)
	require.NotNil(t, next.Rank(0))
	_, decodes = s.CountInService()
	require.Equal(t, 1, decodes)
}

func TestRanksAreKnownByWhatTheyList(t *testing.T) {
	s := begin(t, "p1 d2 d3").steps("d2 up m x; d3 up m x")
	lists := func(i int) *board.Names { return s.Workers[i].Lists }
	two := lists(0)
	require.Same(t, two, lists(1), "those that list the same have the same value")
	s.tell()
	require.Same(t, two, lists(0), "as long as nothing changes")
	s.steps("d3 up m")
	require.Equal(t, []bool{true, true, false}, []bool{lists(0).Has("x"), lists(1).Has("m"), lists(1).Has("x")})
	for rank, want := range map[string]bool{"d2:80": true, "d3:80": false, "nobody": false} {
		_, ok := s.WorkerByName(rank, "m", "x")
		require.Equal(t, want, ok, "%s may be aimed at", rank)
	}
	s.steps("d2 enters")
	require.Same(t, two, lists(0), "an engine that is described anew lists what it did")
	one, board := s.RankByName("d2:80")
	require.Equal(t, "m", board)
	require.EqualValues(t, 0, one.Worker)
	s.steps("d2 up")
	one, _ = s.RankByName("d2:80")
	require.Nil(t, one, "it serves no model now")
	require.NotNil(t, s.Rank(0), "a request may be on its way there")
	one, _ = s.RankByName("nobody")
	require.Nil(t, one)
}

// Two base models may have adapters of one name. KV goes to ranks of the model that computed it.
func TestTheBoardOfAHandOffIsThatOfItsBaseModel(t *testing.T) {
	s := begin(t, "p1 p4 d2 d3").steps("p1 up m x; d2 up m x; p4 up n x; d3 up n x")
	of := func(i int, model string) string { return s.BoardFor(s.Candidates[i], model, "") }
	for i, base := range []string{"m", "n"} {
		require.Equal(t, []string{base, base, base}, []string{of(i, "x"), of(i, base), of(i, "nobody's")})
	}
	s.steps("d3 up other n x") // the same model, with its names in another order
	require.Equal(t, "other", of(1, "n"), "the only one that lists it")
	require.Equal(t, "b", s.BoardFor(prefill.Candidate{Aggregated: true, Board: "b"}, "x", ""))
}

// Prompts wait before their prefill while no decode rank takes any, and go to another region that
// has one.
func TestPromptsWaitWhereDecodeIsHalted(t *testing.T) {
	up, halted, down := board.Worker{Up: true}, board.Worker{Awaited: true}, board.Worker{Down: true}
	for _, row := range []struct {
		name, connector, region string
		workers                 []board.Worker
		live, late              bool
	}{
		{"one of them takes requests", mooncake.NIXLPull, "", []board.Worker{halted, up}, true, false},
		{"none does for now", mooncake.NIXLPull, "", []board.Worker{halted, down}, false, true},
		{"they wait for a rank before the prefill", mooncake.SGLang, "", []board.Worker{halted}, true, false},
		{"none is there", mooncake.NIXLPull, "", []board.Worker{down}, true, false},
		{"one of another region takes requests", mooncake.NIXLPull, "eu", []board.Worker{halted, up}, true, false},
		{"none of another region does for now", mooncake.SGLang, "eu", []board.Worker{halted, down}, false, true},
		{"none of another region is there", mooncake.NIXLPull, "eu", []board.Worker{down}, false, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			for i := range row.workers {
				row.workers[i].Model = BoardIn("m", row.region)
			}
			profile := &mooncake.Profile{Connector: row.connector}
			c := []prefill.Candidate{{Models: []string{"m"}, Region: row.region, Live: true, Profile: profile}}
			elsewhere := board.Worker{Model: BoardIn("m", "us"), Up: true}
			requireDecodeRanks(c, append(row.workers, elsewhere))
			require.Equal(t, [2]bool{row.live, row.late}, [2]bool{c[0].Live, c[0].AnswersLate})
		})
	}
}

// An adapter that is loaded again under its name may have other weights.
func TestAnAdapterThatComesBackHasOtherWeights(t *testing.T) {
	s := begin(t, "p1 d2 d3").steps("p1 up m x y; d2 up m x y; d3 up m x y")
	weights := func(model string) uint32 {
		route, _, listed := s.Lookup(model)
		require.True(t, listed, model)
		return route.Weights
	}
	x, y := weights("x"), weights("y")
	require.NotEqual(t, x, y)
	s.steps("d2 up m y x")
	require.Equal(t, x, weights("x"), "the same names in another order")
	s.steps("d3 up m y")
	second := weights("x")
	require.NotEqual(t, x, second, "an engine has unloaded it")
	s.steps("p1 up m y; d2 up m y")
	s.steps("p1 up m x y; d2 up m x y")
	require.NotContains(t, []uint32{x, y, second}, weights("x"), "no engine had it")
	require.Equal(t, y, weights("y"))
	require.Len(t, s.r.weights, 3)
}

// Another region refuses the whole answer to a probe if one name in it is too long.
func TestAFullNameOfAnAdapterIsANameToo(t *testing.T) {
	long := strings.Repeat("x", words.MaxName)
	models := []engine.Model{{ID: "m"}, {ID: "a", Parent: "m"}, {ID: long, Parent: "m"}}
	require.Equal(t, append(slices.Clone(models), engine.Model{ID: "m:a", Parent: "m", Adapter: "a"}), addFullNames(models))
}

func TestWhichKindOfEnginesComesFirst(t *testing.T) {
	for _, row := range []struct {
		prefer, steps string
		pair, group   bool // come second
	}{
		{config.PreferPD, "", false, true},
		{config.PreferPD, "d2 down m", true, false},
		{config.PreferPD, "p1 down m", true, false},
		{config.PreferPD, "a3 down m", false, true},
		{config.PreferAggregated, "", true, false},
		{config.PreferAggregated, "a3 down m", false, true},
	} {
		s := begin(t, "p1 d2 a3/2")
		s.tell(Terms{Prefer: row.prefer})
		s.steps("p1 up m; d2 up m; a3 up m").steps(row.steps)
		second := func(id string) bool {
			i := slices.IndexFunc(s.Candidates, func(c prefill.Candidate) bool { return c.ID == id })
			return s.Candidates[i].Fallback
		}
		require.Equal(t, [2]bool{row.pair, row.group}, [2]bool{second("p1:80/0"), second("main of m+aggregated")}, "%+v", row)
	}
}

// A probe at an engine that is down or halted goes on elsewhere, where there is another engine.
func TestWhichPrefillEnginesAreDeserted(t *testing.T) {
	for steps, want := range map[string]bool{
		"p1 up m; p3 up m": false, "p1 down m; p3 up m": true, "p1 halted m; p3 up m": true, "p1 halted m; p3 down m": false, "p1 halted m; p3 halted m": false,
	} {
		require.Equal(t, want, begin(t, "p1 p3").steps(steps).Engine(key("p1")).Deserted, steps)
	}
}

// The ranks beside one that failed are those that a request keeps off. It keeps off a whole host
// only where the board has a rank of another one: else it would come back to the very rank that
// failed.
func TestARequestKeepsOffAHostWhereAnotherOneTakesIt(t *testing.T) {
	for steps, whole := range map[string]bool{
		"": true, "d3 down m": false, "d3 out m": false, "d3 accused m": false, "d3 halted m": false, "d3 up": false, "d3 up n": false,
		"d3 drains": false, "d3 drains; d3 resumes": true, "d3 leaves": false,
	} {
		s := begin(t, "d1/2 d3")
		other := described("d1")
		other.ID, other.Target.ID = "d1:81", "d1:81"
		s.tell(Entered{Engine: other})
		s.steps("d1 up m; d3 up m")
		s.tell(Health{Key: "decode d1:81", Status: health("up", "m")})
		s.steps(steps)
		id := func(name string) int32 {
			worker, ok := s.workers[name]
			require.True(t, ok, name)
			return worker
		}
		engine := []int32{id("d1:80/0"), id("d1:80/1")}
		require.ElementsMatch(t, engine, s.FailingWith(engine[0], false, nil), "it has crashed, and the other engines of its host are well")
		if whole {
			engine = append(engine, id("d1:81"))
		}
		list := s.FailingWith(engine[0], true, nil)
		require.ElementsMatch(t, engine, list, steps)
		if whole {
			require.ElementsMatch(t, append(list, id("d3:80")), s.FailingWith(id("d3:80"), true, list), "no other host is left")
		}
	}
	require.Empty(t, begin(t, "").FailingWith(7, true, nil))
}

// The ranks around one that refuses requests are those of its group, or, where there is no other
// group, those of its engine.
func TestWhichRanksRefuseTogether(t *testing.T) {
	for _, row := range []struct {
		name, engines, down string
		list, around        []string // engines whose ranks these are
		others              bool
	}{
		{"two groups", "a1/2+x a2/2+x a3/2+y", "", nil, []string{"a1", "a2"}, true},
		{"two groups, one of which is down", "a1/2+x a2/2+x a3/2+y", "a3", nil, []string{"a1"}, true},
		{"two groups, one of which has refused", "a1/2+x a2/2+x a3/2+y", "", []string{"a3"}, []string{"a1", "a2"}, false},
		{"one group of two engines", "a1/2+x a2/2+x", "", nil, []string{"a1"}, true},
		{"one engine", "a1/2+x", "", nil, nil, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := begin(t, row.engines)
			for e := range strings.FieldsSeq(row.engines) {
				if name, _, _ := strings.Cut(e, "/"); name != row.down {
					s.steps(name + " up m")
				}
			}
			ranks := func(engines ...string) (all []int32) {
				for _, e := range engines {
					for _, r := range []string{"0", "1"} {
						id := s.workers[e+":80/"+r]
						all = append(all, id)
					}
				}
				return all
			}
			around, others := s.SharingQueueWith(ranks("a1")[0], ranks(row.list...))
			require.ElementsMatch(t, ranks(row.around...), around)
			require.Equal(t, row.others, others)
		})
	}
	around, others := begin(t, "").SharingQueueWith(7, nil)
	require.True(t, around == nil && !others)
}

// What a process did in spite of its profile counts until another process is there, whatever the
// config says meanwhile.
func TestAnAnswerThatWasGivenBackCountsUntilTheEngineStartsAnew(t *testing.T) {
	never := func(name string) *Engine {
		e := described(name)
		e.Profile = &mooncake.Profile{Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)}
		return e
	}
	s := begin(t, "")
	s.tell(Entered{Engine: never("d2")}, Entered{Engine: never("a3")})
	s.steps("d2 up m")
	blind := func() bool { r, _, _ := s.Lookup("m"); return r.GivesBackUnseen }
	require.True(t, !blind() && s.Engine("decode d2:80").MustNotGiveBack())
	s.tell(GaveBack{"decode d2:80"}, GaveBack{"aggregated a3:80"}, GaveBack{"nobody"})
	require.Equal(t, []What{GaveBackAnyway}, s.whats())
	require.True(t, blind() && !s.Engine("decode d2:80").MustNotGiveBack())
	s.tell(Entered{Engine: never("d2")})
	require.True(t, blind(), "a reload is no start")
	s.steps("d2 restarted m")
	require.False(t, blind())
}

func TestRanksOfEnginesThatAreGoneAreForgotten(t *testing.T) {
	s := begin(t, "d1 d2").steps("d1 up m; d2 up m; d2 leaves")
	s.now = s.now.Add(rankMemory)
	s.tell()
	require.NotNil(t, s.Rank(1), "an assignment may be on its way")
	require.Equal(t, Absent, s.Rank(1).State)
	require.Equal(t, []int32{1}, s.FailingWith(1, true, nil))
	s.now = s.now.Add(1)
	s.tell()
	require.Nil(t, s.Rank(1))
	require.NotNil(t, s.Rank(0))
	require.Empty(t, s.FailingWith(1, true, nil))
}

// SGLang reads the rooms of responses and messages for sure from 0.5.23 on.
func TestWhichVersionsOfSGLangTakeHandOffsEverywhere(t *testing.T) {
	for version, want := range map[string]bool{
		"0.5.23": true, "v0.5.23": true, "0.5.23.post1": true, "0.5.24.dev3+g1": true, "0.6.0": true, "0.6": true, "1.0.0": true,
		"0.5.22": false, "0.5.9": false, "0.4.9.post6": false, "0.5": false, "main": false, "": false,
	} {
		e := &Engine{Profile: &mooncake.Profile{Connector: mooncake.SGLang}, Status: engine.Status{Version: version}}
		for _, ep := range []mooncake.Endpoint{mooncake.Responses, mooncake.Messages} {
			require.Equal(t, want, e.takesHandOff(ep), version)
		}
		require.True(t, e.takesHandOff(mooncake.Chat), version)
	}
}

// Another proxy may admit to a region, or to a decode group.
func TestWhoAdmits(t *testing.T) {
	s := begin(t, "p1 d2 d3+g d4@eu").steps("p1 up m; d2 up m; d3 up m; d4 up m")
	s.tell(Owners{Kind: owner.Groups, Scopes: map[string]Owned{"main": {Admits: true}},
		Quotas: map[string]RankQuota{"d2:80": {Limit: 3, Others: 70}}})
	require.Equal(t, []string{"d2:80 #0 m up limit=3 others=70", "d3:80 #1 m unowned", "d4:80 #2 m@eu up"}, s.shows("decode"))
	require.Equal(t, []string{"p1:80/0 m m live"}, s.shows("prefill"), "a group is one of ranks that decode")
	require.Equal(t, map[string]owner.EngineCounts{"main": {All: 2, Up: 2}, "g": {All: 1, Up: 1}}, s.CountByScope())
	require.False(t, s.OwnsGroupFor("m", "m") || s.AcceptsNew("m", ""), "no fence is there")
	require.True(t, s.Admits(0))
	s.tell(Owners{Kind: owner.Regions, Scopes: map[string]Owned{"eu": {Admits: true}}})
	require.Equal(t, []string{"d2:80 #0 m unowned", "d3:80 #1 m unowned", "d4:80 #2 m@eu up"}, s.shows("decode"))
	require.Equal(t, []string{"p1:80/0 m m"}, s.shows("prefill"))
	require.Equal(t, map[string]owner.EngineCounts{"": {All: 3, Up: 3}, "eu": {All: 1, Up: 1}}, s.CountByScope())
	require.True(t, s.OwnsGroupFor("m", "m"))
	require.Len(t, s.Missing(), 3)
	s.tell(Owners{})
	require.Equal(t, []string{"m"}, s.BoardsOf("main"))
}

// An engine of a region that another proxy owns is up, and nothing of it is taken out of service.
func TestWhatAnotherProxyOwnsDoesNotDrain(t *testing.T) {
	s := begin(t, "d2 d3 d4@eu").steps("d2 up m; d3 up m; d4 up m; d3 drains")
	s.tell(Owners{Kind: owner.Regions, Scopes: map[string]Owned{"eu": {Admits: true}}})
	drains, isOther := map[string]bool{}, map[string]bool{}
	for _, e := range s.Statuses() {
		require.Equal(t, "up", e.State, e.ID)
		drains[e.ID], isOther[e.ID] = e.Draining, e.OwnedByOther
	}
	require.Equal(t, map[string]bool{"d2:80": false, "d3:80": true, "d4:80": false}, drains)
	require.Equal(t, map[string]bool{"d2:80": true, "d3:80": false, "d4:80": false}, isOther)
}

// An engine that comes back gets its share of the load step by step, where others carry the load
// meanwhile.
func TestASlowStart(t *testing.T) {
	s := begin(t, "p1 p3 d2 d4")
	s.tell(Terms{SlowStart: 30 * time.Second, Started: s.now})
	s.steps("p1 up m; p3 up m; d2 up m; d4 up m")
	require.Zero(t, s.r.Next(s.now), "the proxy itself has just begun")
	s.steps("d2 down m; d2 up m; p1 restarted m")
	require.Equal(t, []string{"d2:80 #0 m up limit=2", "d4:80 #1 m up"}, s.shows("decode"))
	require.Equal(t, []string{"p1:80/0 m m live limit=1", "p3:80/0 m m live"}, s.shows("prefill"))
	require.Equal(t, time.Second, s.r.Next(s.now))
	s.steps("wait 15s")
	require.Equal(t, "d2:80 #0 m up limit=11", s.shows("decode")[0])
	s.steps("wait 15s")
	require.Equal(t, "d2:80 #0 m up", s.shows("decode")[0])
	require.Zero(t, s.r.Next(s.now))
	s.steps("d2 down m; d4 down m; d4 up m")
	require.Equal(t, "d4:80 #1 m up", s.shows("decode")[1], "none would carry the load")
}

func TestWhatGetsNoNewRequests(t *testing.T) {
	for steps, want := range map[string][]bool{ // of the ranks of d2, and of d4
		"":                      {false, false, false},
		"d2 drains":             {true, true, false},
		"d2/1 drains":           {false, true, false},
		"d2 drains; d2 resumes": {false, false, false},
		"d2 away":               {true, true, false},
		"d2 away; d2 back":      {false, false, false},
		"d2 leaves":             {false, false, false},
	} {
		s := begin(t, "d2/2 d4").steps("d2 up m; d4 up m;" + steps)
		at := []Location{{"decode d2:80", 0}, {"decode d2:80", 1}, {"decode d4:80", NoRank}}
		for i, want := range want {
			require.Equal(t, want, s.Withheld(at[i]), "%s: %v", steps, at[i])
		}
		s.tell(PauseBegun{Path: "/pause"})
		require.True(t, s.Withheld(at[2]), "all are paused")
	}
}

func TestTheDeadlineOfADrain(t *testing.T) {
	s := begin(t, "d2/2 p1").steps("d2 up m; p1 up m; d2/1 drains 10s")
	at := Location{"decode d2:80", 1}
	require.Equal(t, 10*time.Second, s.r.Next(s.now))
	require.False(t, s.Overdue(at))
	s.steps("p1 drains 3s")
	require.Equal(t, 3*time.Second, s.r.Next(s.now), "the first deadline")
	s.steps("p1 resumes")
	began := s.now
	s.steps("wait 4s; d2/1 drains 10s; wait 9s")
	require.Equal(t, began, s.DrainStatuses(board.Status{}, nil)[0].Since)
	require.False(t, s.Overdue(at), "the second one counts")
	s.steps("wait 1s")
	require.Equal(t, []What{DrainOverdue}, s.whats())
	require.True(t, s.do[0].Drain.Covers(at))
	require.True(t, s.Overdue(at) && !s.Overdue(Location{"decode d2:80", 0}))
	s.steps("wait 1s")
	require.Empty(t, s.whats(), "once")
	require.Zero(t, s.r.Next(s.now))
	s.steps("p1 drains 5s; p1 leaves; wait 6s")
	require.Equal(t, []What{DrainOverdue}, s.whats(), "what still runs on an engine that left ends, too")
	require.False(t, s.HasDrain("prefill p1:80"))
	s.steps("d2/0 drains; p1 enters; p1 drains")
	decode := board.Status{Models: []board.ModelStatus{{Workers: []board.WorkerStatus{{Name: "d2:80/0", Used: 2, KVTokens: 30},
		{Name: "d2:80/1", Used: 1}}}}}
	tier := []prefill.CandidateStatus{{ID: "p1:80/0", Instance: "prefill p1:80", Inflight: 1, KVTokens: 5, Pooled: 1}}
	states := map[string]string{}
	for _, d := range s.DrainStatuses(decode, tier) {
		states[d.ID] = d.State
	}
	require.Equal(t, map[string]string{"d2:80/1": drainOverdue, "d2:80/0": drainRuns, "p1:80": drainRuns}, states)
	require.Equal(t, drainEnded, s.DrainStatuses(board.Status{}, nil)[0].State)
	for _, id := range []string{"x:80", "d2:80/2"} {
		_, err := s.NewDrain("", id, s.now)
		require.ErrorIs(t, err, ErrNoSuchEngine)
	}
	drain, err := s.NewDrain("", "p1:80/0", s.now)
	require.NoError(t, err)
	require.Equal(t, "prefill p1:80", drain.Key(), "its only rank is the engine")
}

// With balance scheduling all ranks of vllm-ascend admit nothing while one of them has no free
// slot, so one slot stays free.
func TestASlotStaysFreeOnRanksOfAscendThatDoBoth(t *testing.T) {
	s := begin(t, "a1~ascend-mooncake-v1 a2").steps("a1 up m; a2 up n")
	require.Equal(t, []int{19, 20}, []int{s.Workers[0].Slots, s.Workers[1].Slots})
}
