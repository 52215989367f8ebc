package roster

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine"
)

// An operator's call has paused the process at an address, whatever a reload makes of its entry.
func TestAPauseBelongsToTheAddress(t *testing.T) {
	for _, row := range []struct {
		name  string
		after string   // what happens in the pause of group main
		ends  []Event  // how the pause ends
		want  []string // who is paused then
	}{
		{"a reload gives the engines another group", "d2+x enters; a3+x enters", nil, []string{"d2", "a3"}},
		{"a resume of their new group ends it", "d2+x enters; a3+x enters", []Event{PauseEnded{Group: "x"}}, nil},
		{"a resume of their old group does not reach them", "d2+x enters", []Event{PauseEnded{Group: "main"}}, []string{"d2"}},
		{"an engine leaves and comes back to another group", "a3 leaves; a3+x enters; a3 up m", nil, []string{"d2", "a3"}},
		{"another process comes back to another group", "a3 leaves; a3+x enters; a3 restarted m", nil, []string{"d2"}},
		{"an engine that comes back after the resume is still paused", "a3 leaves",
			[]Event{PauseEnded{Group: "main"}, Entered{Engine: described("a3")}}, []string{"a3"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := begin(t, "p1 d2 a3 a4+other").steps("p1 up m; d2 up m; a3 up m; a4 up m")
			s.tell(PauseBegun{Group: "main", Path: "/pause"})
			s.steps(row.after)
			for _, e := range row.ends {
				s.tell(e)
			}
			paused := []string{}
			for _, e := range s.Engines() {
				if s.Paused(e.Key()) {
					paused = append(paused, strings.Replace(e.ID, ":80", "", 1))
				}
			}
			require.ElementsMatch(t, row.want, paused)
		})
	}
}

// Whatever happens to the engines, what an operator has stopped gets nothing until the operator, or
// another process, ends it.
func TestWhatAnOperatorStopsStaysStopped(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		names := []string{"p1", "d2", "d5", "a3", "a4"}
		s := begin(t, "p1 d2 d5 a3 a4+other")
		for _, n := range names {
			s.steps(n + " up m")
		}
		paused, drained := map[string]bool{}, map[string]bool{} // by name, and what the operator has stopped
		var did []string
		step := func(text string) { did = append(did, text); s.steps(text) }
		groups := map[string]string{"d2": "main", "d5": "main", "a3": "main", "a4": "other"}
		moved := 0
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			n := rapid.SampledFrom(names).Draw(rt, "engine")
			switch what := rapid.SampledFrom([]string{
				"pause", "drain", "resume drain", "down", "late", "up", "moved", "reload", "leave and come back",
			}).Draw(rt, "what"); what {
			case "pause":
				group := rapid.SampledFrom([]string{"main", "other"}).Draw(rt, "group")
				did = append(did, "pause "+group)
				s.tell(PauseBegun{Group: group, Path: "/pause"})
				for name, g := range groups {
					paused[name] = paused[name] || g == group
				}
			case "drain":
				drained[n] = true
				step(n + " drains")
			case "resume drain":
				drained[n] = false
				step(n + " resumes")
			case "down", "late", "up":
				step(n + " " + what + " m")
			case "moved":
				moved++
				did = append(did, n+" moved")
				status := health("up", "m")
				status.Moved = engine.Moved{From: "1.1.1.1", To: fmt.Sprint("1.1.1.", moved), At: s.now}
				s.tell(Health{Key: key(n), Status: status})
			case "reload":
				group := rapid.SampledFrom([]string{"main", "other"}).Draw(rt, "group")
				did = append(did, n+" gets group "+group)
				s.tell(Planned{Set: []*Engine{described(n + "+" + group)}, Order: s.r.order})
				if n != "p1" {
					groups[n] = group
					paused[n] = paused[n] || anyPaused(s, group) // it came into a group that is paused
				}
			case "leave and come back": // it ends a drain, as a removal always does
				drained[n] = false
				step(n + " leaves")
				did = append(did, n+" enters")
				s.tell(Entered{Engine: described(n + "+" + groups[n])})
				step(n + " up m")
			}
			for _, n := range names {
				e := s.Engine(key(n))
				if paused[n] {
					require.True(rt, s.Paused(e.Key()) && !e.state.in(Up, Starting), "%s is %s, after %q", n, e.state, did)
				}
				if drained[n] {
					require.False(rt, e.state.in(Up, Starting), "%s is %s, after %q", n, e.state, did)
				}
			}
		}
	})
}

// anyPaused says whether a group is paused as a whole.
func anyPaused(s *scene, group string) bool {
	return slices.ContainsFunc(s.Pauses(), func(p Pause) bool { return p.Group == group })
}

// A call leaves an engine that does nothing if another engine can do its work. A paused server of
// SGLang answers no health check.
func TestWhatCallsLeave(t *testing.T) {
	for _, row := range []struct {
		name, engines, before, after, engine string
		leaves                               bool
	}{
		{"a halted engine beside another", "a1 a2+g", "a1 up m; a2 up m", "a1 halted m", "a1", true},
		{"a halted engine alone", "a1", "a1 up m", "a1 halted m", "a1", false},
		{"beside an engine of another model", "a1 a2+g", "a1 up m; a2 up n", "a1 halted m", "a1", false},
		{"beside one that is halted, too", "a1 a2+g", "a1 up m; a2 halted m", "a1 halted m", "a1", false},
		{"an engine that is down", "a1 a2+g", "a1 up m; a2 up m", "a1 down m", "a1", true},
		{"an engine that is late stays awaited", "a1 a2+g", "a1 up m; a2 up m", "a1 late m", "a1", false},
		{"beside the rest of its group, which waits for it", "a1 a2", "a1 up m; a2 up m", "a1 down m", "a1", false},
		{"a decode engine", "p1 d2 d3+g", "p1 up m; d2 up m; d3 up m", "d2 halted m", "d2", true},
		{"the only decode engine", "p1 d2", "p1 up m; d2 up m", "d2 halted m", "d2", false},
		{"a prefill engine", "p1 p2 d3", "p1 up m; p2 up m; d3 up m", "p1 halted m", "p1", true},
		{"what serves", "a1 a2+g", "a1 up m; a2 up m", "", "a1", false},
	} {
		s := begin(t, row.engines).steps(row.before + ";" + row.after)
		require.Equal(t, row.leaves, s.Engine(key(row.engine)).Deserted, row.name)
	}
}
