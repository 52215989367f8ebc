package roster

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
)

// status is what is shown of an engine.
func (s *scene) status(name string) EngineStatus {
	for _, e := range s.Statuses() {
		if e.Role+" "+e.ID == key(name) {
			return e
		}
	}
	s.t.Fatalf("there is no %s", name)
	return EngineStatus{}
}

// paused are the engines to which nothing is sent because they are paused.
func (s *scene) paused() (all []string) {
	for _, e := range s.Engines() {
		if held := e.HeldByPause(); held != nil {
			all = append(all, e.ID[:2])
			require.True(s.t, s.Paused(e.Key()) && (!e.Status.Up || e.state == Halted), "%s is %s", e.ID, e.state)
		}
	}
	return all
}

func TestWhoIsPaused(t *testing.T) {
	for _, row := range []struct {
		name   string
		events []Event
		steps  string // between the last two events, and with one event after it
		want   []string
	}{
		{"all engines", []Event{PauseBegun{Path: "/pause"}}, "", []string{"p1", "d2", "a3", "a4"}},
		{"a group, which has no engine that only prefills", []Event{PauseBegun{"main", "/pause"}}, "", []string{"d2", "a3"}},
		{"a group that there is not", []Event{PauseBegun{"x", "/pause"}}, "", nil},
		{"no engine after the end", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", nil}}, "", nil},
		{"another group goes on alone", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"other", nil}}, "", []string{"d2", "a3"}},
		{"no engine after an end for all", []Event{PauseBegun{"main", "/pause"}, PauseBegun{"other", "/pause"}, PauseEnded{}}, "", nil},
		{"an engine that does not resume", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", []string{"aggregated a3:80", "aggregated a4:80"}}}, "", []string{"a3"}},
		{"until it does", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", []string{"aggregated a3:80"}}, PauseEnded{"main", nil}}, "", nil},
		{
			"an engine that resumes with its group, and did not with all",
			[]Event{PauseBegun{Path: "/pause"}, PauseEnded{Unresumed: []string{"decode d2:80", "aggregated a4:80"}}, PauseEnded{"main", nil}}, "",
			[]string{"a4"},
		},
		{"until it starts anew", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", []string{"aggregated a3:80"}}}, "a3 restarted m", nil},
		{"until it leaves", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", []string{"aggregated a3:80"}}}, "a3 leaves", nil},
		{"not only while it is down", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", []string{"aggregated a3:80"}}}, "a3 down; a3 up m", []string{"a3"}},
		{"and with its group again", []Event{PauseBegun{"main", "/pause"}, PauseEnded{"main", []string{"aggregated a3:80"}}, PauseBegun{"main", "/pause"}}, "", []string{"d2", "a3"}},
		{"an engine that starts anew is paused with its group", []Event{PauseBegun{"main", "/pause"}}, "a3 down; a3 restarted m", []string{"d2", "a3"}},
		{"so is one that comes in", []Event{PauseBegun{"main", "/pause"}}, "a3 leaves; a3 enters; a3 up m", []string{"d2", "a3"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := begin(t, "p1 d2 a3 a4+other").steps("p1 up m; d2 up m; a3 up m; a4 up m")
			for _, e := range row.events {
				s.tell(e)
			}
			require.ElementsMatch(t, row.want, s.steps(row.steps).paused())
			for _, e := range s.Engines() {
				require.Equal(t, e.state == Up, !s.Paused(e.Key()), "%s is %s", e.ID, e.state)
			}
		})
	}
}

// Requests wait for what is paused, and everybody who asks why is told.
func TestRequestsWaitForWhatIsPaused(t *testing.T) {
	s := begin(t, "p1 d2").steps("p1 up m; d2 up m")
	s.tell(PauseBegun{Path: "/pause"})
	prefills, decodes := s.CountInService()
	require.Equal(t, [2]int{1, 1}, [2]int{prefills, decodes}, "requests are let in")
	require.True(t, s.Candidates[0].AnswersLate && !s.Candidates[0].Live && s.Workers[0].Awaited && !s.Workers[0].Up && !s.Workers[0].Down)
	for _, name := range []string{"p1", "d2"} {
		is := s.status(name)
		require.Equal(t, "halted", is.State)
		require.Equal(t, "paused through POST /admin/fleet/call (/pause) at 1970-01-01T00:16:40Z", is.Error)
	}
	require.Contains(t, s.do, Effect{What: WatchEngines}, "the monitor is told")
	was := s.Pauses()
	s.now = s.now.Add(time.Minute)
	s.tell(PauseBegun{Path: "/sleep"})
	require.Equal(t, was, s.Pauses(), "it is the same pause")
	s.steps("d2 halted m")
	require.Contains(t, s.status("d2").Error, "re-forms", "that is more than the pause")
	s.steps("d2 up m; d2 down m")
	require.Equal(t, "down", s.status("d2").State)
	s.steps("d2 up m")
	s.tell(PauseEnded{})
	require.Equal(t, "up", s.status("d2").State)
	require.Empty(t, s.status("d2").Error)
	require.Len(t, was, 1, "what was published never changes")

	s.steps("d2 up m")
	told := health("up", "m")
	told.Halt = &engine.Held{Why: "paused"}
	s.tell(Health{Key: key("d2"), Status: told})
	require.Equal(t, "up", s.status("d2").State, "the monitor has not heard of the end yet")
}

// What an engine made before its cache was emptied is worth nothing, also what comes later of a
// prefill that was begun before.
func TestNothingIsLeftOfAnEngineThatWasEmptied(t *testing.T) {
	s := begin(t, "p1/2 d2/2").steps("p1 up m; d2 up m")
	candidates, workers := s.Caches([]string{key("p1"), key("d2")})
	require.Equal(t, []string{"p1:80/0", "p1:80/1"}, candidates)
	require.Len(t, workers, 2)
	before := s.GenerationAt(key("p1"))
	s.tell(Handed{before, "x"})
	s.tell(Emptied{[]string{key("p1"), key("d2"), "prefill nobody:80"}})
	doubt, gone := s.KVInDoubt(before)
	require.True(t, doubt && !gone, "engines keep the KV of hand-offs when they drop their caches")
	after := s.GenerationAt(key("p1"))
	s.tell(Handed{after, "x"})
	s.steps("p1 up m")
	doubt, _ = s.KVInDoubt(after)
	require.False(t, doubt, "it is the same process, with the same name")
	require.Equal(t, "up", s.status("p1").State)
}

// An engine that leaves while it empties its cache has none any more.
func TestAnEngineThatHasLeftHasNoCache(t *testing.T) {
	s := begin(t, "")
	candidates, workers := s.Caches([]string{"prefill gone:80"})
	require.Empty(t, candidates)
	require.Empty(t, workers)
}
