package roster

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine"
)

// What is told of an engine puts the KV that it made before in doubt, and proves it gone only if no
// engine could still have it.
func TestWhatPutsKVInDoubt(t *testing.T) {
	refused := Health{Key: key("p1"), IsRefused: true, Status: engine.Status{StartTime: 1}}
	moved := started(1).(Health)
	moved.Status.Moved = engine.Moved{From: "10.0.0.1", To: "10.0.0.2", At: begin(t, "").now}
	down, again := started(1).(Health), described("p1")
	down.Status.Up = false
	leaves, back := Left{Key: key("p1")}, Entered{Engine: described("p1")}
	pod := func(incarnation string) Entered {
		e := described("p1")
		e.Incarnation = incarnation
		return Entered{Engine: e}
	}
	shared := described("p1")
	shared.Profile.SharedAddress = true
	for name, row := range map[string]struct {
		first, then []Event
		doubt, gone bool
	}{
		"nothing new":                               {nil, []Event{started(1), Lived{key("p1"), 1}}, false, false},
		"a start time that was read before":         {nil, []Event{Lived{key("p1"), 0.5}}, false, false},
		"another start time":                        {nil, []Event{started(2)}, true, true},
		"another start time on the page of metrics": {nil, []Event{Lived{key("p1"), 2}}, true, true},
		"a refused connection":                      {nil, []Event{refused}, true, true},
		"it goes down":                              {nil, []Event{down}, false, false},
		"it comes up":                               {nil, []Event{down, started(1)}, true, false},
		"another address behind its name":           {nil, []Event{moved}, true, false},
		"it leaves":                                 {nil, []Event{leaves}, true, false},
		"it leaves and comes back":                  {nil, []Event{leaves, back, started(1)}, true, false},
		"another one comes to its address":          {nil, []Event{leaves, back, started(2)}, true, true},
		"an operator removes it":                    {nil, []Event{Removed{key("p1")}}, true, false},
		"a reload describes it anew":                {nil, []Event{Planned{Set: []*Engine{again}}}, true, false},
		"it is emptied":                             {nil, []Event{Emptied{[]string{key("p1")}}}, true, false},
		"its pod ends":                              {[]Event{pod("u1")}, []Event{Left{key("p1"), "u1"}}, true, true},
		"its pod ends after an operator has removed it": {
			[]Event{pod("u1")}, []Event{Removed{key("p1")}, Left{key("p1"), "u1"}}, true, true,
		},
		"another pod gets its address":      {[]Event{pod("u1")}, []Event{Removed{key("p1")}, pod("u2")}, true, true},
		"discovery does not find it":        {[]Event{pod("u1")}, []Event{Left{key("p1"), "u0"}}, false, false},
		"the config lists what a pod was":   {[]Event{pod("u1")}, []Event{back}, true, false},
		"a hand-off names another engine":   {nil, []Event{named("a_dp0"), named("b_dp0")}, true, false},
		"hand-offs name ranks of it":        {nil, []Event{named("a_dp0"), named("a_dp1"), named("a_dp11")}, false, false},
		"several engines share its address": {[]Event{Entered{Engine: shared}}, []Event{named("a"), named("b")}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, "p1")
			s.tell(append(row.first, started(1))...)
			made := s.GenerationAt(key("p1"))
			for _, e := range row.then {
				if h, ok := e.(Handed); ok {
					h.Made = s.GenerationAt(key("p1"))
					e = h
				}
				s.tell(e)
			}
			doubt, gone := s.KVInDoubt(made)
			require.Equal(t, []bool{row.doubt, row.gone}, []bool{doubt, gone})
			doubt, _ = s.KVInDoubt(s.GenerationAt(key("p1")))
			require.Equal(t, s.Engine(key("p1")) == nil, doubt, "what it makes from now on is good")
		})
	}
}

func named(id string) Event { return Handed{ID: id} }

func started(at float64) Event {
	status := health("up", "m")
	status.StartTime = at
	return Health{Key: key("p1"), Status: status}
}

// A prefilled is a prefill call of the property, and the hand-off that it brings.
type prefilled struct {
	generation Generation // read before the call was written
	process    int        // got the call, and makes the KV
}

// An engine restarts, drops its KV, comes and goes, is described anew and found again in any order,
// and prefills are answered in between. Once anything has been told of a process's end, no hand-off
// with its KV is used. Without a restart, no KV counts as gone.
func TestKVOfAnEndedProcessIsNeverUsed(test *testing.T) {
	rapid.Check(test, func(t *rapid.T) {
		s := begin(test, "p1")
		process, told := 1, 1
		tell := func(events ...Event) { s.tell(events...) }
		status := func(up bool) Health {
			h := started(float64(process)).(Health)
			h.Status.Up = up
			return h
		}
		tell(status(true))
		var under, made []prefilled // calls that are under way, and those that were answered
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			switch step := rapid.IntRange(0, 9).Draw(t, "step"); step {
			case 0, 1: // a prefill call is written
				under = append(under, prefilled{s.GenerationAt(key("p1")), process})
			case 2, 3: // an answer comes; its engine may have ended since it was sent
				if len(under) > 0 {
					i := rapid.IntRange(0, len(under)-1).Draw(t, "answered")
					made = append(made, under[i])
					h := Handed{under[i].generation, fmt.Sprintf("%d_dp%d", under[i].process, rapid.IntRange(0, 1).Draw(t, "rank"))}
					if under = append(under[:i:i], under[i+1:]...); !s.NamesNothingNew(h.Made, h.ID) {
						tell(h)
					}
				}
			case 4: // it is away for a moment, and nothing has happened
				tell(status(false), status(true))
			case 5:
				if e := described("p1"); rapid.Bool().Draw(t, "found again") {
					tell(Left{Key: key("p1")}, Entered{Engine: e}, status(true))
				} else {
					tell(Planned{Set: []*Engine{e}})
				}
			case 6: // a page that was asked for before arrives late
				tell(Lived{key("p1"), float64(rapid.IntRange(1, process).Draw(t, "start"))})
				told = process
				if s.r.engines[key("p1")].kv.start < float64(process) {
					told = 0 // it was another process's page
				}
			default: // it restarts, and one thing tells of it
				process++
				switch sign := rapid.IntRange(0, 4).Draw(t, "sign"); sign {
				case 0:
					tell(Health{Key: key("p1"), IsRefused: true}, status(true))
				case 1:
					tell(status(true))
				case 2:
					tell(Lived{key("p1"), float64(process)})
				case 3:
					tell(status(false), status(true))
				case 4:
					tell(Emptied{[]string{key("p1")}})
				}
				told = process
			}
			for _, h := range made {
				doubt, gone := s.KVInDoubt(h.generation)
				if told == process && h.process < process {
					require.True(t, doubt, "%+v of %d", h, process)
				}
				require.False(t, gone && process == 1, "it is still there: %+v", h)
			}
		}
	})
}

// What a request asks of this costs it no memory.
func TestAHandOffThatNamesTheKnownEngineAllocatesNothing(t *testing.T) {
	s := begin(t, "p1")
	s.tell(started(1))
	made := s.GenerationAt(key("p1"))
	s.tell(Handed{made, "engine_dp0"})
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if doubt, _ := s.KVInDoubt(made); doubt || !s.NamesNothingNew(made, "engine_dp3") {
			t.Fatal("it is not known")
		}
	}))
}
