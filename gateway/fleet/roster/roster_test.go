package roster

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/kvevents"
)

// drawn is an event about an engine of a drawn scene.
func drawn(t *rapid.T, s *scene, name string) Event {
	switch rapid.IntRange(0, 7).Draw(t, "event") {
	case 0:
		return Stopped{Drain{Role: roleOf(name), ID: name + ":80", At: Location{key(name), -1}, Since: s.now,
			Deadline: s.now.Add(time.Duration(rapid.IntRange(1, 30).Draw(t, "seconds")) * time.Second)}}
	case 1:
		return Resumed{key(name)}
	case 2:
		return Turned{key(name), Found{Away: rapid.SampledFrom([]string{"", "not ready"}).Draw(t, "away")}}
	}
	words := rapid.SampledFrom([]string{"up", "down", "late", "late,accused", "halted", "out", "wedged", "accused", "retired", "up,lost1",
		"restarted"}).Draw(t, "health")
	return Health{Key: key(name), Status: health(words, rapid.SampledFrom([][]string{nil, {"m"}, {"m", "x"}, {"n"}}).Draw(t, "lists")...),
		IsRefused: words == "down"}
}

func roleOf(name string) string { return described(name).Role }

// somewhere is a scene after events that were drawn.
func somewhere(t *rapid.T, outer testing.TB) *scene {
	s := begin(outer, "p1 p2~sglang d3/2 d4+g a5 a6 d7@eu")
	s.tell(Terms{SlowStart: 10 * time.Second, ProbeTimeout: time.Minute, Prefer: "pd", Started: s.now.Add(-time.Hour)})
	for range rapid.IntRange(0, 30).Draw(t, "before") {
		s.tell(drawn(t, s, rapid.SampledFrom(allNames).Draw(t, "engine")))
		s.now = s.now.Add(time.Second)
	}
	return s
}

var allNames = []string{"p1", "p2", "d3", "d4", "a5", "a6", "d7"}

// Whatever happens, a rank is in one state, which came about legally, and nothing is published that
// its state forbids.
func TestNothingIsPublishedThatItsStateForbids(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := somewhere(rt, t)
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			before, was, text := s.states(), s.Snapshot, s.Text()
			name := rapid.SampledFrom(allNames).Draw(rt, "engine")
			switch rapid.IntRange(0, 12).Draw(rt, "kind") {
			case 0:
				s.tell(Removed{key(name)})
			case 1:
				s.tell(Entered{Engine: described(name)})
			case 2:
				s.tell(Owners{Kind: owner.Groups, Scopes: map[string]Owned{"main": {Admits: rapid.Bool().Draw(rt, "admits")}}})
			case 3:
				s.tell(Owners{})
			case 4:
				s.tell(PauseBegun{rapid.SampledFrom([]string{"", "main", "g"}).Draw(rt, "group"), "/pause"})
			case 5:
				s.tell(PauseEnded{rapid.SampledFrom([]string{"", "main", "g"}).Draw(rt, "group"),
					rapid.SliceOf(rapid.Map(rapid.SampledFrom(allNames), key)).Draw(rt, "left")})
			default:
				s.tell(drawn(rt, s, name))
			}
			s.now = s.now.Add(time.Duration(rapid.IntRange(0, 10).Draw(rt, "seconds")) * time.Second)
			require.Equal(rt, text, was.Text(), "what was published never changes")
			for rank, state := range s.states() {
				if _, there := before[rank]; !there {
					require.Equal(rt, Down, state, "%s comes in", rank)
				}
			}
			for _, w := range s.Workers {
				state := s.Rank(w.ID).State
				require.Equal(rt, state == Up, w.Up, "%s is %s", w.Name, state)
				require.Equal(rt, state == Halted, w.Awaited, "%s is %s", w.Name, state)
				require.False(rt, w.Up && w.Down, "%s is %s", w.Name, state)
				require.Equal(rt, w.Name, s.Rank(w.ID).Target.ID)
			}
			for id, rank := range s.ranks {
				now, there := s.workers[rank.Target.ID]
				require.Equal(rt, !there || now != id, rank.State == Absent, "%s is %s", rank.Target.ID, rank.State)
			}
			for _, c := range s.Candidates {
				require.False(rt, c.Live && c.AnswersLate && !c.Aggregated, c.ID)
				if e := s.engines[c.Instance]; e != nil {
					require.True(rt, !c.Live || e.state.in(Up, Starting), "%s is %s", c.ID, e.state)
					require.True(rt, !c.AnswersLate || e.state.awaited() || e.state == Up, "%s is %s", c.ID, e.state)
				}
			}
			prefills, decodes := s.CountInService()
			all, those := s.CountKnown()
			require.True(rt, prefills <= all && decodes <= those)
		}
	})
}

// Events about different engines that come at one moment lead to the same lists, in whatever order
// they come.
func TestTheOrderOfIndependentEventsDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := somewhere(rt, t)
		var events []Event
		for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom(allNames), 2, 5, rapid.ID).Draw(rt, "engines") {
			events = append(events, drawn(rt, s, name))
		}
		other := s.copied()
		s.tell(events...)
		slices.Reverse(events)
		other.tell(events...)
		require.Equal(rt, s.Text(), other.Text())
	})
}

// copied is a scene that goes on by itself.
func (s *scene) copied() *scene {
	r := *s.r
	r.engines, r.drains, r.hosts = map[string]*Engine{}, map[string]*Drain{}, map[string]trust{}
	r.workerIDs, r.revivableIDs = map[string]int32{}, map[string]revivableID{}
	r.departedRanks = map[int32]departedRank{}
	for k, e := range s.r.engines {
		r.engines[k] = new(*e)
	}
	for k, stop := range s.r.drains {
		r.drains[k] = stop
	}
	r.pauses, r.paused = maps.Clone(s.r.pauses), maps.Clone(s.r.paused)
	for k, id := range s.r.workerIDs {
		r.workerIDs[k] = id
	}
	r.order = slices.Clone(s.r.order)
	return &scene{t: s.t, r: &r, now: s.now}
}

// Hand-offs may point only at hosts of engines that are there, and for as long as an answer of one
// that was there may be on its way.
func TestHostsAreTrustedWhileAnEngineStandsForThem(t *testing.T) {
	s := begin(t, "p1 d2~ascend-layerwise")
	later := s.now.Add(time.Minute)
	s.steps("p1 enters; p1 leaves")
	require.True(t, s.KnownHost("p1", s.now), "a probe of it may still be answered")
	require.False(t, s.KnownHost("p1", later))
	require.False(t, s.KnownHost("d2", s.now), "no hand-off may point there")
	require.True(t, s.HostsOf("decode d2:80")("d2"))
	require.False(t, s.HostsOf("decode d2:80")("p1") || s.HostsOf("nobody")("nobody"))
	numbered := described("d4~ascend-layerwise")
	numbered.Hosts = []string{"10.0.0.4"}
	s.tell(Entered{Engine: numbered})
	require.True(t, s.CallsBack(netip.MustParseAddr("::ffff:10.0.0.4")))
	require.False(t, s.CallsBack(netip.MustParseAddr("10.0.0.5")))
	s.now = later
	pod := described("p4")
	pod.Found = Found{Source: "kubernetes", Incarnation: "u1"}
	s.tell(Entered{Engine: pod})
	require.True(t, s.KnownHost("p4", s.now))
	s.tell(Left{pod.Key(), "u0"}, Turned{pod.Key(), Found{Incarnation: "u0", Away: "leaving"}})
	require.Equal(t, "", s.Engine(pod.Key()).Away, "what is said of another one")
	made := s.GenerationAt(pod.Key())
	s.tell(Left{pod.Key(), "u1"})
	require.Equal(t, []What{Forgotten}, s.whats())
	require.Empty(t, s.r.hosts, "a pod that is no more answers nothing")
	doubt, gone := s.KVInDoubt(made)
	require.True(t, doubt && gone)
	s.tell(Entered{Engine: described("p4")})
	s.now = s.now.Add(time.Hour)
	s.steps("p4 leaves")
	require.Len(t, s.r.departed, 1, "the time of others is over")
}

// An incarnation that comes back has its number, and another one at the same address has another.
func TestNumbersOfRanks(t *testing.T) {
	s := begin(t, "")
	is := func(incarnation string) int32 {
		e := described("d2")
		e.Incarnation = incarnation
		s.tell(Entered{Engine: e})
		id := s.workers["d2:80"]
		s.tell(Left{e.Key(), incarnation})
		return id
	}
	require.Equal(t, []int32{0, 1, 0, 1, 2}, []int32{is("u1"), is("u2"), is("u1"), is("u2"), is("u3")})
	s.now = s.now.Add(rankMemory + 1)
	is("u3")
	require.EqualValues(t, 3, is("u1"), "it was away for too long")
}

// Engines of two roles may share an address, one after the other or at once. No rank is taken for
// another one.
func TestEnginesAtOneAddressHaveRanksOfTheirOwn(t *testing.T) {
	s := begin(t, "d1")
	pod, both := described("d2"), described("a2")
	pod.Incarnation, both.ID, both.Target.ID = "u1", pod.ID, pod.ID
	s.tell(Entered{Engine: pod}, Entered{Engine: both})
	up := health("up", "m")
	s.tell(Health{Key: key("d1"), Status: up}, Health{Key: pod.Key(), Status: up}, Health{Key: both.Key(), Status: up})
	numbers := func() (all []int32) {
		for _, w := range s.Workers {
			all = append(all, w.ID)
			require.Equal(t, w.Model, s.Rank(w.ID).Board)
			require.Equal(t, w.Name, s.Rank(w.ID).Target.ID)
		}
		return all
	}
	require.Equal(t, []int32{0, 1, 2}, numbers())
	s.tell(Left{pod.Key(), "u1"})
	require.Equal(t, []int32{0, 2}, numbers())
	require.Equal(t, Absent, s.Rank(1).State, "an assignment may be on its way there")
	s.tell(Entered{Engine: pod})
	require.Equal(t, []int32{0, 2, 1}, numbers())
}

// An engine that is described anew keeps what is known of it, and ranks that it has no more are
// remembered for a while.
func TestAnEngineIsDescribedAnew(t *testing.T) {
	s := begin(t, "p1 d2/3").steps("p1 up m; d2 up m; d2 drains; d2/0 drains; d2/2 drains")
	again := func(e *Engine, anew bool) { s.tell(Entered{Engine: e, EndDrains: anew}) }
	again(described("d2/2"), false)
	require.Equal(t, Absent, s.Rank(2).State, "an assignment may be on its way there")
	require.Equal(t, []bool{true, true, false}, []bool{s.HasDrain(key("d2")), s.HasDrain(key("d2") + "/0"), s.HasDrain(key("d2") + "/2")})
	s.steps("d2 resumes")
	again(described("d2"), false)
	require.True(t, s.HasDrain(key("d2")) && !s.HasDrain(key("d2")+"/0"), "its only rank is the engine itself")
	require.Equal(t, []string{"d2:80 #3 m draining"}, s.shows("decode"))
	again(described("d2"), true)
	require.Equal(t, []string{"d2:80 #3 m up"}, s.shows("decode"), "an operator who adds it wants it")
	s.steps("d2 drains; d2 leaves")
	require.False(t, s.HasDrain(key("d2")), "there is nothing to drain")

	pod := described("p3")
	pod.Found = Found{Source: "kubernetes", Incarnation: "u1", Away: "leaving"}
	again(pod, false)
	s.steps("p3 up m")
	again(described("p3"), true)
	require.Equal(t, pod.Found, s.Engine(pod.Key()).Found, "a source goes on speaking of it")
	own := described("p3")
	own.FromNewEntry = true
	again(own, false)
	require.Zero(t, s.Engine(pod.Key()).Found, "it is the config's now")
}

// An engine that is down is said to be down, whatever else holds.
func TestAnEngineThatIsDownIsDown(t *testing.T) {
	s := begin(t, "p1 d2 d3~sglang").steps("p1 up m; d2 up m; d3 up m; d2 away; d2 down m; d3 down m")
	require.Equal(t, []string{"decode d2:80 is down: 500", "decode d3:80 is down: 500"}, s.Missing())
	require.True(t, s.Statuses()[1].Draining, "and it drains besides")
	s.tell(Owners{Kind: owner.Regions})
	require.Equal(t, []string{"d2:80 #0 m down down", "d3:80 #1 m down down"}, s.shows("decode"))
	s.steps("d2 up m")
	require.Equal(t, "d2:80 #0 m draining", s.shows("decode")[0])
}

// A reload leaves what it does not speak of as it is.
func TestAPlan(t *testing.T) {
	s := begin(t, "p1 d2 d3").steps("d2 up m; d3 up m; d2 drains 10s; d3 drains")
	s.tell(Removed{key("d2")}, Planned{Set: []*Engine{described("d4"), described("d3"), described("d2")},
		Remove: []string{key("p1"), "nobody"}, Order: []string{key("d4"), key("d2")}})
	require.Equal(t, []string{key("d4"), key("d2"), key("d3")}, s.r.order)
	s.tell(Entered{Engine: described("d9")}, Entered{Engine: described("d1")}, Planned{Order: []string{key("d3")}})
	require.Equal(t, []string{key("d3"), key("d4"), key("d2"), key("d9"), key("d1")}, s.r.order, "those of the file, then as they came")
	require.True(t, s.HasDrain(key("d3")) && !s.HasDrain(key("d2")), "one that comes in does not drain")
	require.Contains(t, s.shows("decode"), "d3:80 #1 m draining")
}

func TestWhatIsToldOfRestarts(t *testing.T) {
	s := begin(t, "p1 d2").steps("p1 up m")
	made := s.GenerationAt(key("p1"))
	require.False(t, s.NamesNothingNew(made, "a"))
	s.tell(Handed{made, "a"})
	require.Empty(t, s.whats())
	require.True(t, s.NamesNothingNew(made, "a"))
	s.tell(Handed{made, "b"})
	require.Equal(t, []What{MayHaveRestarted}, s.whats())
	s.tell(Handed{made, "c"})
	require.Empty(t, s.whats(), "it was made before")
	require.True(t, s.Engine(key("p1")).StartIsNews(2))
	s.tell(Lived{key("p1"), 1}, Lived{key("p1"), 2})
	require.Equal(t, []What{Restarted}, s.whats())
	require.False(t, s.Engine(key("p1")).StartIsNews(2) || s.Engine(key("d2")).StartIsNews(2))
	s.tell(Health{Key: key("p1"), Status: engine.Status{StartTime: 2, Moved: engine.Moved{To: "10.0.0.2", At: s.now}}}, Health{Key: "nobody"},
		Lived{"nobody", 1}, Handed{Made: Generation{Key: "nobody"}})
	require.Equal(t, []What{MayHaveRestarted}, s.whats())
	require.Equal(t, "10.0.0.2", s.Statuses()[0].Moved.To)
	require.True(t, s.NamesNothingNew(Generation{Key: "nobody"}, "a"))
}

// An engine that is not there yet when the proxy starts has not restarted.
func TestAnEngineThatWasNeverThereHasNotRestarted(t *testing.T) {
	s := begin(t, "p1 d2")
	s.tell(Health{Key: key("p1"), IsRefused: true})
	require.Equal(t, []What{Forgotten}, s.whats())
	s.tell(Health{Key: key("p1"), Status: engine.Status{Up: true, StartTime: 5}}, Health{Key: key("p1"), IsRefused: true})
	require.Equal(t, []What{Restarted}, s.whats())
}

func TestWhatEnginesMissRequests(t *testing.T) {
	s := begin(t, "p1 d2 d3 d4 d5~sglang p6").steps("p1 up m; d2 up m; d2 drains; d3 up; d4 up m; d4 away; d5 up m; p6 down m")
	require.Equal(t, []string{
		"decode d2:80 is draining: it drains", "decode d3:80 is starting: its engine has not named its models yet",
		"decode d4:80 is draining: where it was discovered, it is said to be not ready",
		"decode d5:80 is odd: its connector is sglang (profile a), and prefill engine p1:80, which has model m too, has nixl-pull (profile a); " +
			"all engines of a model share one connector",
		"prefill p6:80 is down: 500",
	}, s.Missing())
	require.Equal(t, []string{"draining, odd", "up, down", "starting, draining, odd"},
		[]string{s.EngineStates("m", true), s.EngineStates("m", false), s.EngineStates("n", true)})
	for state := range RankState(len(states)) {
		require.Equal(t, state == Up, state.Why() == "", state)
	}
	s = begin(t, "d1 d2 d3 d4 d5 d6 d7 d8 d9 d0")
	require.Equal(t, "and 2 more", s.Missing()[mostMissing])
	for _, e := range begin(t, "d1 d2").steps("d1 up,lost1 m; d2 halted m").Statuses() {
		require.NotEmpty(t, e.Error)
	}
}

func TestWhatIsAskedOfEngines(t *testing.T) {
	s := begin(t, "p1/2 d2 d3@eu")
	_, ok, known := s.Lookup("m")
	require.False(t, ok || known)
	require.Equal(t, "prefill", s.RoleText(Prefill))
	s.steps("p1 up m x; d2 up m; d3 up m")
	for _, e := range s.r.engines {
		for i := range e.Status.Models {
			e.Status.Models[i].MaxModelLen = 100
		}
	}
	s.tell()
	for _, row := range []struct {
		offered []string // by other regions
		sole    string
	}{{nil, "m"}, {[]string{"m"}, "m"}, {[]string{"m", "n"}, ""}, {[]string{"n"}, ""}} {
		require.Equal(t, row.sole, s.SoleModel(row.offered), "%v", row.offered)
	}
	none := begin(t, "p1")
	require.Equal(t, []string{"", "n", ""}, []string{none.SoleModel(nil), none.SoleModel([]string{"n"}), none.SoleModel([]string{"n", "o"})})
	require.Equal(t, []int{100, 0}, []int{s.LongestContext(key("p1")), s.LongestContext("nobody")})
	require.Equal(t, []int{2, 1, 1}, []int{s.Ranks(key("p1")), s.Ranks(key("d2")), s.Ranks("nobody")})
	require.Equal(t, []string{"eu", "", ""}, []string{s.RegionFor(key("d3")), s.RegionFor(key("p1")), s.RegionFor("nobody")})
	require.Len(t, s.Engines(), 3)
	require.Len(t, s.Models(), 1, "x is half")
	require.Equal(t, "p1:80", s.AnyPrefill("x", 7).ID)
	require.Nil(t, s.AnyPrefill("n", 1))
	require.True(t, s.Engine(key("p1")).Serves())
	rank, _ := s.RankByName("d2:80")
	require.False(t, s.RejectionFrees(rank))
	rank = &Rank{Profile: &mooncake.Profile{RejectReleases: new(true)}}
	require.True(t, s.RejectionFrees(rank))
	require.False(t, s.HandoffsNameRequests(s.Candidates[0]))
	list, paired := s.SoleEngines("m", true)
	require.True(t, list == nil && paired)
	list, paired = s.SoleEngines("m", false)
	require.True(t, len(list) == 2 && !paired, "not the one of another region")
	s.steps("a4 enters; a4 up m; d5~sglang enters; d5 up n; d6 enters; d6 up o; d7 enters; d7 up p; d7 drains")
	list, _ = s.SoleEngines("m", true)
	require.Equal(t, "main of m+aggregated", list[0].Group)
	for model, want := range map[string][2]bool{"n": {false, true}, "o": {true, false}, "p": {false, false}, "q": {false, false}} {
		list, paired = s.SoleEngines(model, true)
		require.Equal(t, want, [2]bool{len(list) > 0, paired}, model)
	}
	half := described("p8")
	half.Profile.PassThrough = true
	s.tell(Entered{Engine: half})
	s.steps("d9 enters; d9 up r; p8 up r")
	list, paired = s.SoleEngines("r", true)
	require.True(t, len(list) == 1 && list[0].ID == "p8:80" && !paired, "the one whose profile says that it may")
	require.Equal(t, []string{"prefill or aggregated", "", "aggregated"},
		[]string{s.RoleText(Prefill), s.SoleModel([]string{"m"}), begin(t, "a1").RoleText(Decode)})
	r, ok, _ := begin(t, "a1").Lookup("m")
	require.True(t, r.AllAggregated && !ok)
}

// noFinder finds nothing.
type noFinder struct{ kvevents.Finder }

func TestWhereKVEventsArePublished(t *testing.T) {
	s := begin(t, "a2")
	e := described("p1")
	e.Conf.KVReplayPort = 9
	e.Finder = func(int) kvevents.Finder { return noFinder{} }
	s.tell(Terms{KVEvents: prefill.KVEventsConfig{Enabled: true, Port: 5, ReplayPort: 6}}, Entered{Engine: e})
	s.steps("p1 up m; a2 up m; d3 enters; d3 up m")
	require.Equal(t, kvevents.Place{Events: "p1:5", Replay: "p1:9"}, s.Candidates[1].Events.Place)
	require.Equal(t, noFinder{}, s.Candidates[1].Events.Finder)
	require.Equal(t, kvevents.Place{Events: "a2:5", Replay: "a2:6"}, s.Locals[0].Events.Place)
}

func TestWhatAReloadSpeaksOf(t *testing.T) {
	s := begin(t, "p1 d2 d3")
	listed := func(names ...string) (all map[string]Listed, order []string) {
		all = map[string]Listed{}
		for _, name := range names {
			e := described(name)
			all[e.Key()] = Listed{e.Role, e.Conf}
			order = append(order, e.Key())
		}
		return all, order
	}
	before, _ := listed("p1", "d2")
	after, order := listed("d4", "d2+other")
	kept := *s.Engine(key("d3")).Profile
	same := func(*Engine) *mooncake.Profile { return &kept }
	c, err := s.Compare(before, after, order, same)
	require.NoError(t, err)
	require.Equal(t, Changes{Listed: []Listed{after[key("d4")], after[key("d2")]}, Removed: []string{key("p1")}}, c)
	c, err = s.Compare(before, before, nil, same)
	require.NoError(t, err)
	require.Equal(t, Changes{}, c, "nothing is another one")
	kept.MaxModelLen = 9
	c, err = s.Compare(before, before, nil, same)
	require.NoError(t, err)
	require.Len(t, c.Rebuild, 3, "the profile is")
	_, err = s.Compare(before, after, order, func(*Engine) *mooncake.Profile { return nil })
	require.ErrorContains(t, err, "profiles.a is missing, but decode engine d3:80")
	require.NotContains(t, err.Error(), "d2:80", "the config speaks of it")
}

// From vllm-ascend 0.14 on, hand-offs name the request that made them. Of a version that cannot be
// read, nothing is known.
func TestWhichHandOffsNameTheirRequest(t *testing.T) {
	for version, want := range map[string]bool{"0.13.0": false, "0.14.0rc1": true, "0.23.0": true, "main": false, "": false} {
		s := begin(t, "p1~ascend-mooncake-v1")
		status := health("up", "m")
		status.Version = version
		s.tell(Health{Key: key("p1"), Status: status})
		require.Equal(t, want, s.HandoffsNameRequests(s.Candidates[0]), version)
	}
}
