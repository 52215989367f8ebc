package roster

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
)

// step is one thing that an engine's address shows.
type step struct {
	id      string  // a hand-off of that engine
	early   bool    // whose probe, or the question for the start time, was sent before anything else happened
	start   float64 // a start time that was read
	listens bool    // a connection was taken
	refuses bool    // it was refused
	moves   bool    // its name led to another address
	empties bool    // the engine dropped its KV, and goes on with the same id
}

// take applies a step. by is the process that made the hand-off; -1: it is none.
func take(p *Processes, s step, now time.Time) (next *Processes, by int, sign string) {
	switch {
	case s.id != "":
		sent := p.Newest()
		if s.early {
			sent = 0
		}
		return p.RecordHandoff(sent, "candidate", s.id, now)
	case s.start != 0:
		asked := now.Add(time.Millisecond)
		if s.early {
			asked = time.Time{}
		}
		next, sign = p.RecordStartRead(s.start, asked)
	case s.empties:
		next = p.withoutKV()
	default:
		next, sign = p.RecordConnection(s.moves, s.refuses, now)
	}
	return next, -1, sign
}

// Several engines may answer behind one address, each with an engine id of its own. A new id alone is then no restart: the hand-offs
// before it are kept from decode engines as long as that is not clear, and stay on the engine's account.
func TestWhatBecomesOfHandOffs(t *testing.T) {
	refused, taken, moved, emptied := step{refuses: true}, step{listens: true}, step{moves: true}, step{empties: true}
	late := step{start: 1, early: true} // an answer that is on its way for long
	for name, row := range map[string]struct {
		steps []step
		want  []Fate // of the processes that made the hand-offs
	}{
		"ranks of one server":                            {[]step{{id: "e_dp0"}, {id: "e_dp1"}, {id: "e_dp11"}}, []Fate{Known, Known, Known}},
		"another server":                                 {[]step{{id: "e_dp0"}, {id: "f_dp0"}}, []Fate{Doubted, Known}},
		"a name that ends like a rank's":                 {[]step{{id: "_dp"}, {id: "x_dp"}}, []Fate{Doubted, Known}},
		"ids that alternate":                             {[]step{{id: "a"}, {id: "b"}, {id: "a"}, {id: "b"}, {id: "c"}}, []Fate{Known, Known, Known, Known, Known}},
		"an old id in an answer that was on its way":     {[]step{{id: "a"}, {id: "b"}, {id: "a", early: true}}, []Fate{Doubted, Known, Doubted}},
		"alternating after a restart":                    {[]step{{id: "a"}, {id: "b"}, {id: "c"}, {id: "b"}}, []Fate{Doubted, Known, Known, Known}},
		"the same start time after both":                 {[]step{{start: 1}, {id: "a"}, {id: "b"}, {start: 1}}, []Fate{Known, Known}},
		"a start time that was not read before":          {[]step{{id: "a"}, {start: 2}, {id: "b"}, {start: 2}}, []Fate{Doubted, Known}},
		"an older start time, which was read before":     {[]step{{start: 2}, {id: "a"}, {start: 1}}, []Fate{Known}},
		"another start time, then another id":            {[]step{{start: 1}, {id: "a"}, {start: 2}, {id: "b"}}, []Fate{Gone, Known}},
		"another id, then another start time":            {[]step{{start: 1}, {id: "a"}, {id: "b"}, {start: 2}, {start: 2}}, []Fate{Gone, Doubted}},
		"and the id once more":                           {[]step{{start: 1}, {id: "a"}, {id: "b"}, {start: 2}, {id: "b"}, {start: 2}}, []Fate{Gone, Known, Known}},
		"alternating ids, then another start time":       {[]step{{start: 1}, {id: "a"}, {id: "b"}, {id: "a"}, {start: 2}, {id: "c"}}, []Fate{Gone, Gone, Gone, Known}},
		"a refused connection":                           {[]step{{id: "a"}, refused, {id: "b"}}, []Fate{Gone, Known}},
		"one outage refuses several":                     {[]step{refused, {id: "a"}, refused, refused}, []Fate{Known}},
		"the start time of what a refusal told of":       {[]step{{start: 1}, {id: "a"}, refused, taken, {id: "b"}, {start: 2}}, []Fate{Gone, Known}},
		"a start time that was read during the outage":   {[]step{{start: 1}, refused, {start: 2}, refused, {id: "a"}, taken, {id: "a"}}, []Fate{Known, Known}},
		"two outages":                                    {[]step{{id: "a"}, refused, taken, {id: "b"}, refused}, []Fate{Gone, Gone}},
		"a configured id, in an answer from before":      {[]step{{id: "a"}, refused, taken, {id: "a"}, {id: "a", early: true}}, []Fate{Gone, Known, Gone}},
		"an answer from before the cache was emptied":    {[]step{{id: "a"}, emptied, {id: "a"}, {id: "a", early: true}}, []Fate{Gone, Known, Gone}},
		"another address":                                {[]step{{start: 1}, {id: "a"}, moved, {id: "b"}, {start: 2}}, []Fate{Gone, Known}},
		"another address, where nothing listens yet":     {[]step{{id: "a"}, {moves: true, refuses: true}, {id: "b"}, refused}, []Fate{Gone, Known}},
		"more ids than one process after another can be": {append(ids(mostEngineIDs), step{id: "last"}, step{id: "0"}), append(doubts(mostEngineIDs-1), Known, Known, Known)},
		"an answer from before a refusal, read late": {
			[]step{{start: 1}, {id: "a"}, refused, late, taken, {id: "b"}, {start: 2}}, []Fate{Gone, Known},
		},
		"the first of all answers, read late": {
			[]step{{id: "a"}, refused, late, taken, {id: "b"}, {start: 2}}, []Fate{Gone, Known},
		},
		"an answer from the address before, read late": {
			[]step{{start: 1}, {id: "a"}, moved, late, {id: "b"}, {start: 2}}, []Fate{Gone, Known},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, now := &Processes{}, time.Unix(100, 0)
			var made []int
			for _, s := range row.steps {
				var by int
				if p, by, _ = take(p, s, now); by >= 0 {
					made = append(made, by)
				}
			}
			var got []Fate
			for _, by := range made {
				got = append(got, p.Fate(by))
			}
			require.Equal(t, row.want, got)
		})
	}
}

func ids(n int) (all []step) {
	for i := range n {
		all = append(all, step{id: fmt.Sprint(i)})
	}
	return all
}

func doubts(n int) []Fate {
	all := make([]Fate, n)
	for i := range all {
		all[i] = Doubted
	}
	return all
}

func TestFatesOfProcesses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, now := &Processes{}, time.Unix(100, 0)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			s := step{early: rapid.Bool().Draw(t, "early")}
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0, 1:
				s.id = rapid.SampledFrom([]string{"a", "b", "c", "d_dp0", "d_dp1"}).Draw(t, "id")
			case 2:
				s.start = float64(rapid.IntRange(1, 4).Draw(t, "start"))
			default:
				s.refuses, s.moves = rapid.Bool().Draw(t, "refused"), rapid.IntRange(0, 4).Draw(t, "moved") == 0
			}
			now = now.Add(time.Second)
			was, before := p, fmt.Sprintf("%+v", *p)
			next, by, sign := take(p, s, now)
			require.Equal(t, before, fmt.Sprintf("%+v", *was), "a value does not change")
			require.Equal(t, next != was, fmt.Sprintf("%+v", *next) != before, "it is another pointer if something was learned")
			require.Equal(t, Known, next.Fate(next.Newest()), "the newest is there")
			require.Equal(t, sign != "", next.Newest() == was.Newest()+1, "a sign tells of one more process")
			for i := range next.Newest() + 1 {
				if was.Fate(i) == Gone {
					require.Equal(t, Gone, next.Fate(i), "none comes back")
				}
				if i > 0 && next.Fate(i) == Gone {
					require.Equal(t, Gone, next.Fate(i-1), "an older one is gone before")
				}
				if i < next.Newest() && (sign == evidenceAddress || sign == evidenceRefused) {
					require.Equal(t, Gone, next.Fate(i), "nothing is there but the newest")
				}
			}
			if s.id != "" {
				again, by2, sign2 := next.RecordHandoff(by, "candidate", s.id, now)
				require.True(t, again == next && by2 == by && sign2 == "", "the same hand-off tells nothing more")
			}
			p = next
		}
	})
}

// What a probe asks of these costs it no memory.
func TestAHandOffOfAKnownProcessAllocatesNothing(t *testing.T) {
	p, _, _ := new(Processes).RecordHandoff(0, "c", "engine_dp3", time.Unix(1, 0))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if next, by, _ := p.RecordHandoff(0, "c", "engine_dp3", time.Unix(1, 0)); next != p || p.Fate(by) != Known {
			t.Fatal("it is not known")
		}
	}))
}

// A pod leaves the list of its source for a moment, and comes back with its UID. What it makes from then on is good.
func TestAnIncarnationThatComesBackIsNotDead(t *testing.T) {
	for _, address := range []string{"p1", "p2"} { // the same address, or another one after a restart of the node
		s := begin(t, "")
		pod := described("p1")
		pod.Incarnation = "u1"
		s.tell(Entered{Engine: pod})
		old := s.ProcessAt(pod.Key())
		s.tell(Left{pod.Key(), "u1"})
		back := described(address)
		back.Incarnation = "u1"
		s.tell(Entered{Engine: back})
		gone, sure := s.ProcessGone(old)
		require.True(t, gone && sure, "what it made before is gone")
		gone, _ = s.ProcessGone(s.ProcessAt(back.Key()))
		require.False(t, gone, "what it makes now is good")
		s.now = s.now.Add(24 * time.Hour)
		s.tell()
		gone, _ = s.ProcessGone(s.ProcessAt(back.Key()))
		require.False(t, gone, "and a day later")
	}
}

// An operator removes an engine, and then its pod ends. Another pod may get the address, so what the first one made is gone.
func TestAPodThatEndsAfterAnOperatorHasRemovedItIsDead(t *testing.T) {
	s := begin(t, "")
	pod, next := described("p1"), described("p1")
	pod.Incarnation, next.Incarnation = "u1", "u2"
	s.tell(Entered{Engine: pod})
	made := s.ProcessAt(pod.Key())
	s.tell(Removed{pod.Key()})
	gone, _ := s.ProcessGone(made)
	require.False(t, gone, "its process still runs")
	for _, e := range []Event{Left{pod.Key(), "u1"}, Entered{Engine: next}} {
		s.tell(e)
		gone, sure := s.ProcessGone(made)
		require.True(t, gone && sure)
	}
	gone, _ = s.ProcessGone(s.ProcessAt(next.Key()))
	require.False(t, gone)
}

// A reload shortens the hold of a profile. What a pod made before is kept from decode engines for as long as it was to be held when it was
// made, because another pod may have the address when it is used.
func TestAReloadDoesNotShortenTheMemoryOfADeadPod(t *testing.T) {
	s := begin(t, "d1")
	pod := func(hold time.Duration) *Engine {
		e := described("p1")
		e.Incarnation, e.Profile = "u1", new(mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: hold}.WithDefaults())
		return e
	}
	s.tell(Entered{Engine: pod(8 * time.Minute)})
	made := s.ProcessAt(key("p1"))
	s.tell(Planned{Set: []*Engine{pod(30 * time.Second)}})
	s.tell(Planned{Set: []*Engine{pod(20 * time.Second)}})
	s.tell(Removed{key("p1")}, Entered{Engine: pod(20 * time.Second)}) // an operator takes the pod off the list for a moment
	s.tell(Left{key("p1"), "u1"})
	s.now = s.now.Add(5 * time.Minute)
	s.tell(Removed{key("d1")}) // the roster now forgets what is old
	gone, sure := s.ProcessGone(made)
	require.True(t, gone && sure)
}

// An engine that no source tells apart from another at its address leaves the list and comes back. If it has another process by then, what
// the process before made is gone.
func TestAnEngineThatComesBackMayHaveAnotherProcess(t *testing.T) {
	leave, back := Left{Key: key("p1")}, Entered{Engine: described("p1")}
	for name, row := range map[string]struct {
		events []Event
		gone   bool
	}{
		"the same process":             {[]Event{leave, back, started(1)}, false},
		"another, since it is back":    {[]Event{leave, back, started(1), started(2)}, true},
		"another, while it was away":   {[]Event{leave, back, started(2)}, true},
		"another, before it left":      {[]Event{started(2), leave, back, started(2)}, true},
		"another, and it is not back":  {[]Event{started(2), leave}, true},
		"another, removed by a reload": {[]Event{Planned{Remove: []string{key("p1")}}, back, started(2)}, true},
		"it leaves and is not back":    {[]Event{leave}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, "p1")
			s.tell(started(1))
			made := s.ProcessAt(key("p1"))
			s.tell(row.events...)
			gone, sure := s.ProcessGone(made)
			require.Equal(t, row.gone, gone)
			require.Equal(t, row.gone, sure)
		})
	}
	s := begin(t, "p1")
	made := s.ProcessAt(key("p1"))
	s.tell(leave)
	s.now = s.now.Add(24 * time.Hour)
	s.tell(Entered{Engine: described("p2")}, Left{Key: key("p2")})
	require.Len(t, s.r.departed, 1, "the first is forgotten")
	s.tell(back)
	require.NotEqual(t, made, s.ProcessAt(key("p1")), "what was learned of a process before does not hold for this one")
}

// goneByARestart says that what a process made is there until a later process has started.
func goneByARestart(t *testing.T, s *scene, made ProcessID) {
	t.Helper()
	gone, _ := s.ProcessGone(made)
	require.False(t, gone, "its process still runs")
	s.tell(started(2))
	gone, sure := s.ProcessGone(made)
	require.True(t, gone && sure, "it has restarted")
}

// A reload lists an engine that discovery has found. The engine loses its incarnation, and what it made before is still followed.
func TestAFoundEngineThatTheConfigListsNow(t *testing.T) {
	s := begin(t, "")
	pod, listed := described("p1"), described("p1")
	pod.Incarnation, listed.FromNewEntry = "u1", true
	s.tell(Entered{Engine: pod}, started(1))
	made := s.ProcessAt(key("p1"))
	s.tell(Planned{Set: []*Engine{listed}, Order: []string{key("p1")}})
	goneByARestart(t, s, made)
}

// A reload no longer lists an engine, and discovery then finds it. What the engine made while it had no incarnation is still followed.
func TestAnEngineThatDiscoveryFindsOnceTheConfigDoesNotListIt(t *testing.T) {
	s := begin(t, "p1")
	s.tell(started(1))
	made := s.ProcessAt(key("p1"))
	pod := described("p1")
	pod.Incarnation = "u1"
	s.tell(Planned{Remove: []string{key("p1")}}, Entered{Engine: pod}, started(1))
	goneByARestart(t, s, made)
}

// An engine that got an incarnation, or lost it, leaves. What it made before is as gone as what it made since.
func TestAnEngineLeavesThatHadAnotherIncarnation(t *testing.T) {
	for _, isFoundFirst := range []bool{true, false} {
		s := begin(t, "")
		pod, listed := described("p1"), described("p1")
		pod.Incarnation, listed.FromNewEntry = "u1", true
		found, lists := Entered{Engine: pod}, Planned{Set: []*Engine{listed}, Order: []string{key("p1")}}
		unlists := Planned{Remove: []string{key("p1")}}
		first, leaves := []Event{found}, []Event{lists, started(2), unlists} // it restarts while it is listed
		if !isFoundFirst {
			first, leaves = []Event{lists}, []Event{unlists, found, Left{key("p1"), "u1"}}
		}
		s.tell(append(first, started(1))...)
		made := s.ProcessAt(key("p1"))
		s.tell(leaves...)
		gone, sure := s.ProcessGone(made)
		require.True(t, gone && sure, isFoundFirst)
	}
}

func started(at float64) Event {
	status := health("up", "m")
	status.StartTime = at
	return Health{Key: key("p1"), Status: status}
}
