package fit

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"evenkeel/internal/stats"
	"evenkeel/predictor"
)

// When a step model is used, and what counts as a usual step.
const (
	minSteps     = 200
	minStepR     = 0.3
	pauseFactor  = 10.0 // times the median: nobody had work in between
	outlierMADs  = 5.0  // normal deviations from the line; a local prefill, a pause of the host
	outlierFloor = 0.05 // of the median step: never closer to the line than this
	minBound     = 30   // steps a rank must have held up to have a cost of its own
	costDiffers  = 0.03 // from the mean, or all ranks count as equal
	worthCosts   = 0.9  // of what one line leaves unexplained may be left; chance takes a hundredth
)

// StepFit is what a step costs in each group of a trace.
type StepFit struct {
	Groups []GroupFit `json:"groups"`
	Notes  []string   `json:"notes,omitempty"`
	Config string     `json:"config,omitempty"` // lines for serve's config file
	Mirror *Mirror    `json:"mirror,omitempty"`
}

// GroupFit is step time = c0 + c1*M, M the largest load of the group. With
// costs, M is the largest of cost times load.
type GroupFit struct {
	Group   string           `json:"group"`
	Ranks   int              `json:"ranks"`
	Steps   int              `json:"steps"` // in the trace
	N       int              `json:"n"`     // regressed
	C0      predictor.Figure `json:"c0_ms"`
	C1      predictor.Figure `json:"c1_ms"` // a KV token
	R2      predictor.Figure `json:"r2"`
	LeftOut StepsLeft        `json:"left_out"`
	Costs   []RankCost       `json:"costs,omitempty"` // where ranks differ
	Lost    predictor.Figure `json:"lost_share"`      // of the steps' time, to imbalance
	Refused string           `json:"refused,omitempty"`
}

// StepsLeft counts steps without a time, or with one that the load does not explain.
type StepsLeft struct {
	Idle     int `json:"idle"`     // no rank held anything
	Gaps     int `json:"gaps"`     // the next step is not in the trace
	Pauses   int `json:"pauses"`   // nobody had work for a while
	Outliers int `json:"outliers"` // far from the line
}

// RankCost is what a KV token costs on a rank; the group's mean is 1.
type RankCost struct {
	Rank int     `json:"rank"`
	Cost float64 `json:"cost"`
	N    int     `json:"n"` // steps the rank held up; below 30 its cost stays 1
}

// StepModels fits every group of a trace.
func StepModels(t *StepTrace) *StepFit {
	f := &StepFit{}
	if t.Cut {
		f.Notes = append(f.Notes, cutNote)
	}
	for _, g := range t.Groups {
		fit := g.fit()
		f.Groups = append(f.Groups, fit)
		if fit.Refused == "" {
			f.Config += fit.config()
		}
	}
	return f
}

// timed is a step that has a length.
type timed struct {
	loads   []float64 // by index of rank
	largest float64   // cost times load
	bound   int       // index of the rank that has it
	ms      float64
}

func (g *StepGroup) fit() GroupFit {
	out := GroupFit{Group: g.Name, Ranks: len(g.Ranks), Steps: len(g.Steps)}
	steps := g.timed(&out.LeftOut)
	costs := rankCosts(steps, len(g.Ranks))
	bind(steps, costs)
	steps = withoutOutliers(steps, &out.LeftOut)
	line := stats.LeastSquares(points(steps))
	if differ(costs) {
		out.Costs = make([]RankCost, len(costs))
		for i, c := range costs {
			out.Costs[i] = RankCost{Rank: g.Ranks[i], Cost: c}
		}
		for _, s := range steps {
			out.Costs[s.bound].N++
		}
	}
	out.N, out.C0, out.C1, out.R2 = line.N, predictor.Figure(line.Intercept), predictor.Figure(line.Slope), predictor.Figure(line.R2)
	out.Lost = predictor.Figure(lost(steps, costs, line))
	switch {
	case line.N < minSteps:
		out.Refused = fmt.Sprintf("%d steps; %d are needed", line.N, minSteps)
	case line.MaxX == line.MinX:
		out.Refused = fmt.Sprintf("the largest load was always %.0f tokens; it must vary", line.MaxX)
	case line.Slope <= 0:
		out.Refused = fmt.Sprintf("c1 = %.3g ms a token: steps did not grow with the largest load", line.Slope)
	case line.Intercept < 0:
		out.Refused = fmt.Sprintf("c0 = %.2f ms: an empty step would take less than no time", line.Intercept)
	case line.R2 < minStepR:
		out.Refused = fmt.Sprintf("R2 = %.3f; below %.1f the largest load does not explain the step", line.R2, minStepR)
	}
	return out
}

// timed are the steps that a next one follows, but for pauses.
func (g *StepGroup) timed(left *StepsLeft) []timed {
	var steps []timed
	var lengths []float64
	for i, s := range g.Steps {
		if s.largest().KVTokens == 0 {
			left.Idle++
			continue
		}
		if i+1 == len(g.Steps) || !follows(s, g.Steps[i+1]) {
			left.Gaps++
			continue
		}
		t := timed{loads: make([]float64, len(g.Ranks)), ms: g.Steps[i+1].At - s.At}
		for r, rank := range g.Ranks {
			t.loads[r] = float64(s.kvTokens(rank))
		}
		steps, lengths = append(steps, t), append(lengths, t.ms)
	}
	longest := pauseFactor * median(lengths)
	all := len(steps)
	steps = slices.DeleteFunc(steps, func(t timed) bool { return t.ms > longest })
	left.Pauses += all - len(steps)
	return steps
}

// bind finds who held up each step.
func bind(steps []timed, costs []float64) {
	for i := range steps {
		s := &steps[i]
		s.largest = -1
		for r, load := range s.loads {
			if c := costs[r] * load; c > s.largest {
				s.largest, s.bound = c, r
			}
		}
	}
}

func points(steps []timed) []stats.Point {
	out := make([]stats.Point, len(steps))
	for i, s := range steps {
		out[i] = stats.Point{X: s.largest, Y: s.ms}
	}
	return out
}

// withoutOutliers drops, once, what lies far from the line of all.
func withoutOutliers(steps []timed, left *StepsLeft) []timed {
	line := stats.LeastSquares(points(steps))
	var away, lengths []float64
	for _, s := range steps {
		away = append(away, math.Abs(s.ms-line.At(s.largest)))
		lengths = append(lengths, s.ms)
	}
	most := max(outlierMADs*1.4826*median(away), outlierFloor*median(lengths)) // 1.4826 median deviations are a normal one
	kept := steps[:0]
	for i, s := range steps {
		if away[i] <= most {
			kept = append(kept, s)
		}
	}
	left.Outliers += len(steps) - len(kept)
	return kept
}

// rankCosts alternates: who holds up a step follows from the costs, the costs
// from a line for each rank through the steps it held up, all from one c0.
// All are 1 unless ranks clearly differ, and that explains the steps better.
func rankCosts(steps []timed, ranks int) []float64 {
	equal := ones(ranks)
	bind(steps, equal)
	plain := stats.LeastSquares(points(steps))
	if plain.Slope <= 0 || ranks == 1 {
		return equal
	}
	costs := equal
	for range 20 {
		next := sharedIntercept(steps, ranks)
		if next == nil {
			return equal
		}
		bind(steps, next)
		moved := 0.0
		for r := range costs {
			moved = max(moved, math.Abs(next[r]-costs[r]))
		}
		if costs = next; moved < 1e-4 {
			break
		}
	}
	if better := stats.LeastSquares(points(steps)); !differ(costs) || 1-better.R2 > worthCosts*(1-plain.R2) {
		return equal
	}
	return costs
}

// sharedIntercept fits ms = c0 + slope[rank]*load by least squares, and
// returns the slopes over their mean. A rank that held up too few steps to
// tell has cost 1; nil: no line.
func sharedIntercept(steps []timed, ranks int) []float64 {
	n, x, y, xx, xy := make([]float64, ranks), make([]float64, ranks), make([]float64, ranks), make([]float64, ranks), make([]float64, ranks)
	for _, s := range steps {
		r, load := s.bound, s.loads[s.bound]
		n[r]++
		x[r] += load
		y[r] += s.ms
		xx[r] += load * load
		xy[r] += load * s.ms
	}
	var up, down float64
	for r := range ranks {
		if n[r] >= minBound {
			up += y[r] - xy[r]*x[r]/xx[r]
			down += n[r] - x[r]*x[r]/xx[r]
		}
	}
	if down <= 0 {
		return nil
	}
	c0 := up / down
	slopes, mean, told := ones(ranks), 0.0, 0.0
	for r := range ranks {
		if n[r] >= minBound {
			slopes[r] = (xy[r] - c0*x[r]) / xx[r]
			mean += slopes[r]
			told++
		}
	}
	if mean /= told; !(mean > 0) {
		return nil
	}
	for r := range ranks {
		if n[r] >= minBound {
			slopes[r] /= mean
		}
		if slopes[r] <= 0 {
			return nil
		}
	}
	return slopes
}

func differ(costs []float64) bool {
	return slices.ContainsFunc(costs, func(c float64) bool { return math.Abs(c-1) > costDiffers })
}

func ones(n int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = 1
	}
	return v
}

// lost is the share of the steps' time that imbalance took:
// c1*(M - mean load) over c0 + c1*M.
func lost(steps []timed, costs []float64, line stats.Line) float64 {
	var waste, whole float64
	for _, s := range steps {
		sum := 0.0
		for r, load := range s.loads {
			sum += costs[r] * load
		}
		waste += line.Slope * (s.largest - sum/float64(len(s.loads)))
		whole += line.At(s.largest)
	}
	return waste / whole
}

func (f *GroupFit) config() string {
	s := fmt.Sprintf("# group %s: %d steps, R2 %.3f\ndispatch:\n  step_model: {c0_ms: %.4g, c1_ms: %.4g}\n", f.Group, f.N, float64(f.R2),
		float64(f.C0), float64(f.C1))
	if len(f.Costs) > 0 {
		s += "# and at the engines of these ranks:\n"
		for _, c := range f.Costs {
			s += fmt.Sprintf("#   cost: %.3g   # rank %d, by %d steps\n", c.Cost, c.Rank, c.N)
		}
	}
	return s
}

// WriteText prints the tables, why fits are refused, and config lines.
func (f *StepFit) WriteText(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "group\tranks\tn\tc0 ms\tc1 ms/token\tR2\tlost to imbalance\t")
	for _, g := range f.Groups {
		fmt.Fprintf(w, "%s\t%d\t%d\t%.3f\t%.4g\t%.4f\t%.1f %%\t\n", g.Group, g.Ranks, g.N, float64(g.C0), float64(g.C1), float64(g.R2),
			100*float64(g.Lost))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, g := range f.Groups {
		l := g.LeftOut
		fmt.Fprintf(out, "group %s: %d steps; left out: %d idle, %d before a gap, %d pauses, %d outliers\n", g.Group, g.Steps, l.Idle, l.Gaps,
			l.Pauses, l.Outliers)
		for _, c := range g.Costs {
			fmt.Fprintf(out, "  rank %d: cost %.3f (held up %d steps)\n", c.Rank, c.Cost, c.N)
		}
		if g.Refused != "" {
			fmt.Fprintf(out, "  not used: %s\n", g.Refused)
		}
	}
	if f.Mirror != nil {
		if err := f.Mirror.writeText(out); err != nil {
			return err
		}
	}
	writeNotes(out, f.Notes)
	writeConfig(out, f.Config)
	return nil
}
