package fit

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sort"
	"strings"
	"text/tabwriter"

	"evenkeel/internal/stats"
	"evenkeel/predictor"
)

// Mirror is how far evenkeel's own account of KV tokens, from which it
// decides, was from what the engines held (paper D.5).
type Mirror struct {
	Groups []GroupMirror `json:"groups"`
	Notes  []string      `json:"notes,omitempty"`
}

// GroupMirror is one group. A sample is a rank at a tick: what the mirror held
// before the tick's own admissions, against the rank's line of the step that
// was running. Relative errors are of ranks that held anything.
type GroupMirror struct {
	Group   string           `json:"group"`
	Ticks   int              `json:"ticks"`   // in the decision log
	Matched int              `json:"matched"` // of them within a step of the trace
	Samples int              `json:"samples"`
	Mean    predictor.Figure `json:"mean_relative"`
	P99     predictor.Figure `json:"p99_relative"`
	Tokens  predictor.Figure `json:"mean_tokens"` // absolute, over all samples
	Bias    predictor.Figure `json:"bias_tokens"` // mean of mirror less engine
	Largest predictor.Figure `json:"largest_mean_relative"`
}

// tick is what a line of the decision log says of one group's ranks.
type tick struct {
	at    float64
	loads map[int]int // by worker id
}

// firstUnixMs tells wall clocks (Unix milliseconds, as in the decision log)
// from clocks that start with the program: 2001-09-09.
const firstUnixMs = 1e12

// CompareMirror reads a decision log and compares. shift is added to the
// trace's times, in ms: 0 where both are Unix time.
func CompareMirror(t *StepTrace, decisions string, shift float64) (*Mirror, error) {
	ticks := map[string][]tick{}
	cut, err := readLines(decisions, func(line []byte) error {
		group, k, err := tickLine(line)
		if err == nil {
			ticks[group] = append(ticks[group], k)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(ticks) == 0 {
		return nil, errors.New(decisions + ": no ticks; is it a decision log?")
	}
	m := &Mirror{}
	if cut {
		m.Notes = append(m.Notes, decisions+": "+cutNote)
	}
	for _, g := range t.Groups {
		of := ticks[g.Name]
		if len(t.Groups) == 1 && len(ticks) == 1 { // one group each: their names need not agree
			for _, only := range ticks {
				of = only
			}
		}
		if len(of) == 0 {
			m.Notes = append(m.Notes,
				fmt.Sprintf("group %s has no ticks in %s, which has %s", g.Name, decisions, strings.Join(slices.Sorted(maps.Keys(ticks)), ", ")))
			continue
		}
		got, err := g.compare(of, shift)
		if err != nil {
			return nil, fmt.Errorf("%s: group %s: %w", decisions, g.Name, err)
		}
		m.Groups = append(m.Groups, got)
	}
	if len(m.Groups) == 0 {
		return nil, fmt.Errorf("%s: no group of the trace is in it; it has %s", decisions, strings.Join(slices.Sorted(maps.Keys(ticks)), ", "))
	}
	return m, nil
}

func tickLine(line []byte) (group string, k tick, err error) {
	var l struct {
		At    *float64 `json:"t_ms"`
		Group string   `json:"group"`
		In    *struct {
			Workers []struct {
				ID      int `json:"id"`
				Others  int `json:"others_tokens"`
				Running []struct {
					Prompt    int `json:"prompt"`
					Generated int `json:"generated"`
					Away      int `json:"away"` // of these tokens, those that others_tokens of other workers have
				} `json:"running"`
			} `json:"workers"`
		} `json:"in"`
	}
	if err := decode(line, &l, "a decision log"); err != nil {
		return "", tick{}, err
	}
	if l.At == nil || l.In == nil {
		return "", tick{}, errors.New("not a line of a decision log: it has tick, t_ms, group, in and assign")
	}
	k = tick{at: *l.At, loads: make(map[int]int, len(l.In.Workers))}
	for _, w := range l.In.Workers {
		sum := w.Others
		for _, r := range w.Running {
			sum += r.Prompt + r.Generated - r.Away
		}
		k.loads[w.ID] = sum
	}
	return l.Group, k, nil
}

// compare matches ticks to steps by time, and ranks to workers by their order:
// the lowest worker id of the group is its lowest rank.
func (g *StepGroup) compare(ticks []tick, shift float64) (GroupMirror, error) {
	out := GroupMirror{Group: g.Name, Ticks: len(ticks)}
	slices.SortStableFunc(ticks, func(a, b tick) int { return cmp.Compare(a.at, b.at) })
	first, last := g.Steps[0].At+shift, g.Steps[len(g.Steps)-1].At+shift
	if wall := ticks[0].at >= firstUnixMs; wall != (first >= firstUnixMs) {
		return out, fmt.Errorf("the decision log's t_ms begin at %.0f and the trace's at %.0f: one counts from 1970, the other from its start; "+
			"give --shift, the start in "+
			"Unix ms", ticks[0].at, first)
	}
	ids := map[int]bool{}
	for _, k := range ticks {
		for id := range k.loads {
			ids[id] = true
		}
	}
	workers := slices.Sorted(maps.Keys(ids))
	if len(workers) != len(g.Ranks) {
		return out, fmt.Errorf("%d workers, the trace has %d ranks; a rank that never ran writes no line: take a trace in which all did",
			len(workers), len(g.Ranks))
	}
	var relative, absolute, largest []float64
	bias := 0.0
	for _, k := range ticks {
		i := sort.Search(len(g.Steps), func(i int) bool { return g.Steps[i].At+shift > k.at }) - 1
		if i < 0 || i+1 >= len(g.Steps) || !follows(g.Steps[i], g.Steps[i+1]) {
			continue // before the trace, after it, or in a gap
		}
		out.Matched++
		s, most := g.Steps[i], 0
		for r, rank := range g.Ranks {
			held, mirrored := s.kvTokens(rank), k.loads[workers[r]]
			most = max(most, mirrored)
			away := float64(mirrored - held)
			bias += away
			absolute = append(absolute, math.Abs(away))
			if held > 0 {
				relative = append(relative, math.Abs(away)/float64(held))
			}
		}
		if held := s.largest().KVTokens; held > 0 {
			largest = append(largest, math.Abs(float64(most-held))/float64(held))
		}
	}
	if out.Matched == 0 {
		return out, fmt.Errorf("no tick lies within the trace: ticks from %.0f to %.0f ms, steps from %.0f to %.0f", ticks[0].at,
			ticks[len(ticks)-1].at, first, last)
	}
	out.Samples = len(absolute)
	mean := func(values []float64) predictor.Figure { return predictor.Figure(stats.Mean(values)) } // NaN of none is null in JSON
	out.Mean, out.Tokens, out.Largest = mean(relative), mean(absolute), mean(largest)
	out.Bias = predictor.Figure(bias / float64(len(absolute)))
	slices.Sort(relative)
	out.P99 = predictor.Figure(stats.Percentile(relative, 0.99))
	return out, nil
}

func (m *Mirror) writeText(out io.Writer) error {
	fmt.Fprintln(out, "\nmirror of KV tokens against the trace:")
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "group\tticks\tin the trace\tmean error\tp99\tlargest rank\tmean tokens\tbias tokens\t")
	for _, g := range m.Groups {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\t%.1f\t%+.1f\t\n", g.Group, g.Ticks, g.Matched,
			percent(g.Mean), percent(g.P99), percent(g.Largest), float64(g.Tokens), float64(g.Bias))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	writeNotes(out, m.Notes)
	return nil
}

func percent(f predictor.Figure) string {
	if !f.Defined() {
		return "-"
	}
	return fmt.Sprintf("%.3f %%", 100*float64(f))
}
