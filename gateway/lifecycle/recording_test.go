package lifecycle

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var recordings = flag.String("recording", "", "a pattern of files that `go run ./bench/rigs/chaos -record FILE` wrote: their lives are "+
	"driven, and with -update they become testdata/recording.txt")

// The lives of real requests, as chaos runs recorded them, do again what they did, and so does a
// copy taken in the middle of each. testdata/recording.txt has each distinct life once; `make
// recording` makes it anew. Where lives are meant to do something else than they did, -update
// writes what they do now. What no run has met is printed: that is what the properties of this
// package are for.
func TestRecordedLivesDoAgainWhatTheyDid(t *testing.T) {
	const file = "testdata/recording.txt"
	w := readWords(t)
	head, lives := w.fromRuns(t, *recordings)
	if *recordings == "" {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		head, lives = w.read(t, string(text))
	}
	seen, distinct := met{states: map[string]int{}, ends: map[CallEnd]int{}}, map[string]int{}
	for _, p := range lives {
		distinct[strings.Join(w.drive(t, p, &seen), "\n")] += p.times
	}
	t.Log(strings.Join(append(head, seen.report(w)...), "\n"))
	if *recordings != "" {
		head = append(head, fmt.Sprintf("%d of them are distinct", len(distinct)))
	}
	if *update {
		require.NoError(t, os.WriteFile(file, write(head, distinct), 0o644)) //nolint:gosec // test data
	}
}

// played is a life as it was recorded, and how often it came.
type played struct {
	times int
	steps []step
}

// A step is how a value begins, or a life goes on, or else what it was told, and what it said to
// that.
type step struct {
	begin *beginning
	event *Event
	do    []Effect
}

// beginning is how a life stands when its request begins, or when its answer was lost and is to go
// on.
type beginning struct {
	Bound, Alone bool
	History      routing
}

// take drives a life by one step.
func take(t *testing.T, l *Lifecycle, s step, first bool) (do []Effect) {
	if s.begin == nil {
		return l.Step(*s.event, nil)
	}
	if l.MustServeHere, l.NoHandOff = s.begin.Bound, s.begin.Alone; first {
		l.routing = s.begin.History
	}
	require.Equal(t, l.routing, s.begin.History)
	return nil
}

// twinOf is a copy of a life that shares nothing with it.
func twinOf(l *Lifecycle) Lifecycle {
	twin := *l
	twin.held.maybeReadHandOffs, twin.pairs = slices.Clone(l.held.maybeReadHandOffs), slices.Clone(l.pairs)
	twin.tries.brokenConns = slices.Clone(l.tries.brokenConns)
	return twin
}

// drive holds what a value says against what it said then. It returns each step as a text.
func (w *words) drive(t *testing.T, p played, seen *met) (texts []string) {
	var l, twin Lifecycle
	half := len(p.steps) / 2
	for i, s := range p.steps {
		if i == half {
			twin = twinOf(&l)
		}
		where := w.where(&l, s)
		did := s
		s.do = take(t, &l, s, i == 0)
		text := where + " | " + w.step(s)
		if !slices.Equal(s.do, did.do) {
			require.True(t, *update && *recordings == "", "a life does not do what it did\nafter  %s\nit did %s\nnow    %s",
				strings.Join(texts, "\n       "), w.step(did), w.step(s))
		}
		if i >= half {
			require.Equal(t, s.do, take(t, &twin, s, i == 0), "a copy from the middle")
		}
		texts = append(texts, text)
		seen.note(where, w, s, p.times)
	}
	require.Equal(t, fmt.Sprint(l), fmt.Sprint(twin))
	return texts
}

// where is the state in which something is told.
func (w *words) where(l *Lifecycle, s step) string {
	if s.event != nil && s.event.Pair > 0 {
		return w.whereOf(l.Pair(s.event.Pair))
	}
	return w.of("State", int(l.state))
}

func (w *words) whereOf(p *Pair) string {
	return w.of("prefilling", int(p.prefill)) + " " + w.of("decoding", int(p.decode))
}

// fromRuns reads what runs have written. A count of tokens becomes its rank among those of the same
// life, for only what is more matters, and engines become numbers of their life.
func (w *words) fromRuns(t *testing.T, pattern string) (head []string, lives []played) {
	if pattern == "" {
		return nil, nil
	}
	files, err := filepath.Glob(pattern)
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		tapes := map[int64]*played{}
		for line := range bytes.Lines(text) {
			var l struct {
				ID    int64
				Value string
				Event *Event
				Do    []Effect
			}
			require.NoError(t, json.Unmarshal(line, &l), "%s: %s", file, line)
			s := step{event: l.Event, do: l.Do}
			if l.Value != "" {
				s.begin = new(beginning)
				_, err := fmt.Sscanf(l.Value, "{%t %t %d %d ", &s.begin.Bound, &s.begin.Alone, new(State), &s.begin.History)
				require.NoError(t, err, l.Value)
			}
			if tapes[l.ID] == nil {
				tapes[l.ID] = &played{times: 1}
			}
			tapes[l.ID].steps = append(tapes[l.ID].steps, s)
		}
		for _, id := range slices.Sorted(maps.Keys(tapes)) {
			rank(tapes[id].steps)
			rename(tapes[id].steps)
			lives = append(lives, *tapes[id])
		}
		head = append(head, fmt.Sprintf("%s: %d lives", strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)), len(tapes)))
	}
	return head, lives
}

func rank(steps []step) {
	counts := []int{0}
	for _, s := range steps {
		if s.event != nil {
			counts = append(counts, s.event.Prompt)
		}
	}
	slices.Sort(counts)
	counts = slices.Compact(counts)
	for _, s := range steps {
		if s.event != nil {
			s.event.Prompt = slices.Index(counts, s.event.Prompt)
		}
	}
}

func rename(steps []step) {
	names := map[string]string{"": ""}
	of := func(engine *string) {
		if names[*engine] == "" && *engine != "" {
			role, _, _ := strings.Cut(*engine, " ")
			names[*engine] = fmt.Sprint(role, " ", len(names))
		}
		*engine = names[*engine]
	}
	for _, s := range steps {
		if s.event != nil {
			of(&s.event.Engine)
			of(&s.event.BrokenConn.Engine)
			for i := range s.event.Down {
				of(&s.event.Down[i])
			}
		}
	}
}

// the parts of the file: where it comes from, the steps, and the lives as numbers of steps, behind
// how often each came
const between = "--\n"

func write(head []string, distinct map[string]int) []byte {
	all := map[string]int{}
	for life := range distinct {
		for text := range strings.SplitSeq(life, "\n") {
			all[text] = 0
		}
	}
	var b bytes.Buffer
	b.WriteString(strings.Join(head, "\n") + "\n" + between)
	for i, text := range slices.Sorted(maps.Keys(all)) {
		all[text] = i + 1
		fmt.Fprintf(&b, "%d %s\n", i+1, text)
	}
	b.WriteString(between)
	byTimes := slices.SortedFunc(maps.Keys(distinct), func(a, c string) int {
		return cmp.Or(cmp.Compare(distinct[c], distinct[a]), cmp.Compare(a, c))
	})
	for _, life := range byTimes {
		fmt.Fprintf(&b, "%d:", distinct[life])
		for text := range strings.SplitSeq(life, "\n") {
			fmt.Fprintf(&b, " %d", all[text])
		}
		b.WriteString("\n")
	}
	return b.Bytes()
}

func (w *words) read(t *testing.T, text string) (head []string, lives []played) {
	parts := strings.Split(text, between)
	require.Len(t, parts, 3)
	var steps []step
	for line := range strings.Lines(parts[1]) {
		_, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		steps = append(steps, w.parse(t, text))
	}
	for line := range strings.Lines(parts[2]) {
		times, numbers, _ := strings.Cut(line, ":")
		p := played{times: number(t, times)}
		for _, n := range strings.Fields(numbers) {
			p.steps = append(p.steps, steps[number(t, n)-1])
		}
		lives = append(lives, p)
	}
	return strings.Split(strings.TrimSpace(parts[0]), "\n"), lives
}

func number(t *testing.T, text string) int {
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// met is what the lives of a recording have met, and how often.
type met struct {
	states map[string]int  // by state, and what was told in it
	ends   map[CallEnd]int // of legs; without what else is known
}

func (m *met) note(where string, w *words, s step, times int) {
	var end *CallEnd
	if s.event != nil {
		m.states[where+" "+w.of("EventKind", int(s.event.Kind))] += times
		if s.event.Kind == CallFailed || s.event.Kind == PrefillFailed {
			end = &s.event.End
		}
	}
	if end != nil {
		m.ends[CallEnd{Call: end.Call, Progress: end.Progress, Reason: end.Reason}] += times
	}
}

// report lists what was met and what was not, of all that may be.
func (m *met) report(w *words) []string {
	lines := []string{"states and what was told in them:"}
	possible := map[string]bool{}
	list := func(of []string) {
		var was, never []string
		for _, pair := range of {
			if possible[pair] = true; m.states[pair] > 0 {
				was = append(was, fmt.Sprintf("%s %d", pair, m.states[pair]))
			} else {
				never = append(never, pair)
			}
		}
		lines = append(lines, "  met: "+strings.Join(was, ", "), "  never: "+strings.Join(never, ", "))
	}
	for state := range Done {
		var pairs []string
		for _, what := range append(slices.Clone(answers[state]), Panicked) {
			pairs = append(pairs, w.of("State", int(state))+" "+w.of("EventKind", int(what)))
		}
		list(pairs)
	}
	lines = append(lines, "of two legs:")
	list(w.pairsOfLegs())
	lines = append(lines, "cells of the tables of verdict.go:")
	for leg, rows := range [][reasons]row{prefills, decodes} {
		hit, all := 0, 0
		var never []string
		for why := range reasons {
			for progress := range Through + 1 {
				if rows[why].kv[progress] == unsaid {
					continue
				}
				if all++; m.ends[CallEnd{Call: CallKind(leg), Progress: progress, Reason: why}] > 0 { //nolint:gosec // 0 or 1
					hit++
				} else {
					never = append(never, w.of("Reason", int(why))+" "+w.of("Progress", int(progress)))
				}
			}
		}
		lines = append(lines, fmt.Sprintf("  %s: %d of %d met; never: %s", w.of("CallKind", leg), hit, all, strings.Join(never, ", ")))
	}
	return lines
}

// pairsOfLegs are all states that two legs may come to in the world of legs_test.go, with what may
// be told in them.
func (w *words) pairsOfLegs() (all []string) {
	pairs := map[string]bool{}
	for _, t := range traitsByName {
		begin := twoLegs{legs: newPair(t, false, false), leases: 1}
		known, todo := map[twoLegs]bool{begin: true}, []twoLegs{begin}
		for len(todo) > 0 {
			at := todo[0]
			todo = todo[1:]
			for _, what := range at.mayCome() {
				pairs[w.whereOf(&at.legs)+" "+w.of("EventKind", int(what))] = true
				for _, e := range variants(what) {
					next := at
					next.tell(panics{}, e)
					next.ended, next.hungUp = 0, 0
					if !known[next] {
						known[next] = true
						todo = append(todo, next)
					}
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(pairs))
}

// variants are events of a kind that differ in what they lead to.
func variants(what EventKind) (all []Event) {
	switch what {
	case PrefillFailed, NotFound:
		for _, why := range []Reason{Busy, Broke} {
			all = append(all, Event{Kind: what, Again: true, End: CallEnd{Progress: Headed, Reason: why}})
		}
	case Began, PrefillDone, Confirmed:
		all = append(all, Event{Kind: what, Prompt: 5}, Event{Kind: what, Prompt: 10})
	case DecodeFailed:
		all = append(all, Event{Kind: what, Reason: Died}, Event{Kind: what, Reason: Refused})
	default:
		all = append(all, Event{Kind: what})
	}
	return all
}

// panics has what is required end the test by a panic.
type panics struct{}

func (panics) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (panics) FailNow()                          {}
