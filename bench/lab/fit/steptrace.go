package fit

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"evenkeel/internal/stats"
)

// StepTrace is a step trace by barrier group.
type StepTrace struct {
	Groups []StepGroup // by name
	Cut    bool        // the last line was not finished
}

// StepGroup is the steps of the ranks that step together.
type StepGroup struct {
	Name  string
	Ranks []int // ascending
	Steps []GroupStep
}

// GroupStep is one step: what the ranks held when it began.
type GroupStep struct {
	At    float64 // ms, of the first rank's line
	Loads []RankLoad
}

// RankLoad is one line of the trace. A rank without a line ran nothing: an
// engine that waits for the others writes none.
type RankLoad struct {
	Rank     int
	Step     int64 // as the rank counts
	At       float64
	Running  int
	KVTokens int
}

// largest returns the fullest rank; ties go to the lower one.
func (s GroupStep) largest() (full RankLoad) {
	for i, l := range s.Loads {
		if i == 0 || l.KVTokens > full.KVTokens {
			full = l
		}
	}
	return full
}

// kvTokens is what a rank held; 0 for a rank without a line.
func (s GroupStep) kvTokens(rank int) int {
	for _, l := range s.Loads {
		if l.Rank == rank {
			return l.KVTokens
		}
	}
	return 0
}

// ReadStepTrace reads a step trace, gzipped or not.
func ReadStepTrace(path string) (*StepTrace, error) {
	lines := map[string][]RankLoad{}
	cut, err := readLines(path, func(line []byte) error {
		group, l, err := stepLine(line)
		if err == nil {
			lines[group] = append(lines[group], l)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(lines) == 0 {
		return nil, errors.New(path + ": no steps; `evenkeel engine --step-trace FILE` and configs/vllm/evenkeel_step_trace.py write step traces")
	}
	t := &StepTrace{Cut: cut}
	for _, name := range slices.Sorted(maps.Keys(lines)) {
		g, err := newStepGroup(name, lines[name])
		if err != nil {
			return nil, fmt.Errorf("%s: group %s: %w", path, name, err)
		}
		t.Groups = append(t.Groups, g)
	}
	return t, nil
}

func stepLine(line []byte) (group string, load RankLoad, err error) {
	var l struct {
		At       *float64 `json:"t_ms"`
		Group    string   `json:"group"`
		Rank     *int     `json:"rank"`
		Step     *int64   `json:"step"`
		Running  int      `json:"running"`
		KVTokens *int     `json:"kv_tokens"`
	}
	if err := decode(line, &l, "a step trace"); err != nil {
		return "", RankLoad{}, err
	}
	if l.At == nil || l.Rank == nil || l.Step == nil || l.KVTokens == nil {
		return "", RankLoad{}, errors.New("not a line of a step trace: it has t_ms, group, rank, step, running and kv_tokens")
	}
	if *l.At < 0 || *l.Rank < 0 || l.Running < 0 || *l.KVTokens < 0 {
		return "", RankLoad{}, errors.New("a negative number; t_ms, rank, running and kv_tokens count from 0")
	}
	return l.Group, RankLoad{Rank: *l.Rank, Step: *l.Step, At: *l.At, Running: l.Running, KVTokens: *l.KVTokens}, nil
}

// newStepGroup puts the lines of the ranks together into steps. Time tells
// which belong together, not their step numbers: a rank that waits with
// nothing to run writes no line and counts no step. A step is over when a rank
// comes again, or half a usual step after its first line.
func newStepGroup(name string, lines []RankLoad) (StepGroup, error) {
	g := StepGroup{Name: name}
	last := map[int]RankLoad{}
	var gaps []float64
	for _, l := range lines {
		before, seen := last[l.Rank]
		if seen && l.At < before.At-clockSlack {
			return g, fmt.Errorf("rank %d: t_ms goes back from %.3f to %.3f; are these two traces in one file? fit them one by one", l.Rank,
				before.At, l.At)
		}
		if seen && l.Step == before.Step+1 {
			gaps = append(gaps, l.At-before.At)
		}
		last[l.Rank] = l
	}
	slices.SortStableFunc(lines, func(a, b RankLoad) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Step, b.Step))
	})
	g.Ranks = slices.Sorted(maps.Keys(last))
	half := median(gaps) / 2
	in := map[int]int{} // rank -> number of the step it was last seen in
	for _, l := range lines {
		n := len(g.Steps)
		if n == 0 || in[l.Rank] == n || l.At-g.Steps[n-1].At > half {
			g.Steps = append(g.Steps, GroupStep{At: l.At})
			n++
		}
		s := &g.Steps[n-1]
		s.Loads = append(s.Loads, l)
		in[l.Rank] = n
	}
	return g, nil
}

const clockSlack = 1000 // ms that a host's clock may be set back

// follows tells whether b is the step after a: no rank in both has a step
// missing in between, and there is one to tell by.
func follows(a, b GroupStep) bool {
	known := false
	for _, l := range a.Loads {
		for _, m := range b.Loads {
			if l.Rank == m.Rank {
				if m.Step != l.Step+1 {
					return false
				}
				known = true
			}
		}
	}
	return known
}

// median of values in any order.
func median(values []float64) float64 {
	return stats.Percentile(slices.Sorted(slices.Values(values)), 0.5)
}
