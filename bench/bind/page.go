package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"evenkeel/bench/page"
	"evenkeel/bench/report"
	"evenkeel/stats"
)

// book is what was run, and the page of it.
type book struct {
	options
	samples       *samples
	scenarios     []*scenario
	runs, missing int
}

// page is what was found.
func (b *book) page() string {
	var t strings.Builder
	command := "make bind"
	if len(b.given) > 0 {
		command = "go run ./bench/bind " + strings.Join(b.given, " ")
	}
	fmt.Fprintf(&t, `# Ranks that are bound before the prefill

This page is for people who use a connector that needs the decode
[DP rank](../glossary.md#dp-rank) before the prefill. It shows what this early choice costs.
`+"`%s`"+` wrote it, with the barrier simulator.

With most connectors, evenkeel chooses the decode rank last, when the prompt is prefilled. Some
connectors need the rank before the prefill. The request then has its slot and the room for its KV
while it is prefilled. This has two costs:

- Slots stand empty during the prefill. In a closed loop, this lowers the tokens per second.
- evenkeel chooses the rank by loads that change during the prefill. So the choice fits less well
  when the request starts to decode.

You can win back a part of the first cost with requests beyond the slots (`+"`bind.ahead`"+`).
[What empty slots cost](#what-empty-slots-cost) has the figures, and [Engine
versions](../engines.md#what-it-costs) says what to set.

| word | meaning |
|---|---|
| steps | The mean time of a prefill, as a number of decode steps. A step counts as long as the mean step of the same ranks in a run without prefills. A longer prompt takes longer, as in `+"`simulate`"+`, and there are always enough prefill engines. |
| late, arrival | A request is bound to its rank after its prefill (late) or before it (arrival). |
| idle | The share of the decode steps that ranks spend waiting for the fullest one. Slots that stand empty are not in it. |
| kept | How much is left of what `+"`evenkeel`"+` gains over `+"`jsq-kv`"+`: the idle share of `+"`jsq-kv`"+` less that of `+"`evenkeel`"+`, at arrival, as a share of the same difference late. Below 0, `+"`evenkeel`"+` idles more than `+"`jsq-kv`"+`. %s stands where the difference late is below half a point. |
| slots ahead | A rank may have more requests than slots: as many more as wait for their first token in the mean, and at most a quarter of its slots (`+"`bind.ahead: auto`"+`). |
| starts not told | Policies do not know when a request starts to decode. |
| starts off by 1 | Each predicted start is wrong by a factor of its own. The factors are log-normal, and this is the deviation of their logarithm. |
| closed loop, rho 0.9 | In a closed loop, the number of requests in the system stays the same. With rho 0.9, requests arrive at a rate that would keep level ranks busy for 90 %% of the time. |
| ± | The standard deviation between seeds. Each seed has a part of the trace of its own, or draws a trace of its own. |

Read the tables with these facts in mind:

- In a closed loop, requests that are bound late wait in the pool and are already prefilled. So
  their TTFT does not include the prefill. Do not compare TTFT late with TTFT at arrival there.
- `+"`jsq-kv`"+` needs no slots ahead. It sends every request to a rank as soon as it comes, and the
  request is prefilled while it waits there. The KV of ranks is not limited in these runs.
- `+"`evenkeel`"+` does not look ahead, so the starts that it is told change only the step times that it
  learns.
- A policy whose name has no `+"`hold`"+` holds requests back late, and holds none back at arrival.
- All rows of a table get the same requests.

%s
## What was asked, and what came out

The bounds were set before the runs.

%s
![What is kept over the length of a prefill, by load](../img/bind-kept.svg)

![Tokens per second in a closed loop over the length of a prefill, as a share of those of late evenkeel](../img/bind-tokens.svg)

## What is kept

A column is the length of a prefill, in steps.

`, command, unknown, b.extent(), b.verdicts())
	t.WriteString(b.keptTable("evenkeel", nowArms))
	t.WriteString("\nIn the next table, `evenkeel` holds back requests at arrival too (`hold=0.5`), as it does late:\n\n")
	t.WriteString(b.keptTable("evenkeel:hold=0.5", holdArms))
	t.WriteString("\n## What empty slots cost\n\nThis table has the tokens per second that `evenkeel` loses at arrival in a closed loop, in % of\n" +
		"its tokens per second late. Each cell has three figures: the expected loss / the loss / the loss\n" +
		"with slots ahead. The expected loss is the share of the time in which a slot stands empty:\n" +
		"steps / (steps + mean answer).\n\n")
	t.WriteString(b.lossTable())
	t.WriteString("\n## What clients wait for\n\nThis table has the TTFT p99 in an open loop, in seconds. Each cell has four figures: `evenkeel`\n" +
		"late / at arrival / at arrival with slots ahead / `jsq-kv` at arrival. All four include the\n" +
		"prefill. Where the slots that do not stand empty are too few for the arrivals, the queue grows for\n" +
		"as long as the run lasts.\n\n")
	t.WriteString(b.waitTable())
	t.WriteString("\n## From when on late binding is worth a change\n\nWith a connector whose decode engine pulls the KV, ranks are bound late, and none of this is lost.\n" +
		"The table has the shortest prefill, in steps, from which on binding at arrival loses this much. All\n" +
		"longer prefills lose as much or more. – stands where no prefill of the grid loses so much.\n\n")
	t.WriteString(b.worthTable())
	fmt.Fprintf(&t, "\n## Starts that are wrong\n\nHere a prefill takes %d steps. The table compares each policy with the same policy that is not told\n"+
		"the starts: the difference of their idle shares, in points. A figure below 0 is better.\n\n", misjudgedAt)
	t.WriteString(b.misjudgedTable())
	for _, s := range b.scenarios {
		if table := b.table(s); table != "" {
			fmt.Fprintf(&t, "\n## %s\n\n%s", s, table)
		}
	}
	return t.String()
}

// extent says what was run.
func (b *book) extent() string {
	var t strings.Builder
	for _, p := range b.parts {
		requests := "as many requests as the ranks need"
		if p.requests > 0 {
			requests = report.Grouped(float64(p.requests), 0) + " requests"
		}
		seeds := "one seed"
		if p.seeds > 1 {
			seeds = fmt.Sprintf("%d seeds", p.seeds)
		}
		fmt.Fprintf(&t, "- %s; %s ranks x %s slots; loads %s; prefills of %s steps; %s of %s\n",
			strings.Join(p.traces, ", "), list(p.ranks), list(p.slots), strings.Join(p.loads, ", "), strings.ReplaceAll(list(p.steps), ",", ", "), seeds, requests)
	}
	what, rest := "All", ""
	if b.missing > 0 {
		what = fmt.Sprintf("**%s**", report.Grouped(float64(b.runs-b.missing), 0))
		rest = " Each row below says of how many seeds it is. A scenario without a row was not run."
	}
	return fmt.Sprintf("%s of the %s runs of this grid were done.%s\n\n%s", what, report.Grouped(float64(b.runs), 0), rest, t.String())
}

// unknown stands where nothing can be said.
const unknown = "–"

// leastDifference of idle shares is one that a share is taken of.
const leastDifference = 0.005

// means are those of a metric of some arms, over the seeds that all of them have.
func (b *book) means(s *scenario, steps float64, m report.Metric, which ...int) (of []float64, ok bool) {
	of = make([]float64, len(which))
	n := 0
	for seed := 1; seed <= s.seeds; seed++ {
		var values []float64
		for _, arm := range which {
			c := s.cell(steps, arm)
			c.Seed = seed
			if v, ok := b.samples.of[c][m]; ok {
				values = append(values, v)
			}
		}
		if len(values) < len(which) {
			continue
		}
		n++
		for i, v := range values {
			of[i] += v
		}
	}
	for i := range of {
		of[i] /= float64(n)
	}
	return of, n > 0
}

// four arms that kept compares.
type four struct{ lateKV, late, arrivalKV, arrival int }

var (
	nowArms  = four{lateKV, lateNow, arrivalKV, arrivalNow}
	holdArms = four{lateKV, lateNow, arrivalKV, arrivalHold}
)

// gains are by how much a policy is less idle than jsq-kv, late and at arrival.
func (b *book) gains(s *scenario, steps float64, f four) (late, arrival float64, ok bool) {
	idle, ok := b.means(s, steps, report.IdleShare, f.lateKV, f.late, f.arrivalKV, f.arrival)
	if !ok {
		return 0, 0, false
	}
	return idle[0] - idle[1], idle[2] - idle[3], true
}

// kept is a share, if there is something to keep.
func (b *book) kept(s *scenario, steps float64, f four) (share float64, ok bool) {
	late, arrival, ok := b.gains(s, steps, f)
	return arrival / late, ok && late >= leastDifference
}

// lost is the share of the late tokens/s that an arm is below.
func (b *book) lost(s *scenario, steps float64, arm int) (share float64, ok bool) {
	of, ok := b.means(s, steps, report.TokensPerS, lateNow, arm)
	if !ok {
		return 0, false
	}
	return 1 - of[1]/of[0], true
}

// foreseen is the share of the time in which a slot is said to stand empty.
func foreseen(s *scenario, steps float64) float64 {
	src, err := source(s.trace)
	if err != nil {
		return math.NaN()
	}
	return steps / (steps + src.output)
}

// steps are the lengths of prefills of all scenarios, without none.
func (b *book) steps() (all []float64) {
	for _, s := range b.scenarios {
		all = append(all, s.steps...)
	}
	slices.Sort(all)
	all = slices.Compact(all)
	return slices.DeleteFunc(all, func(steps float64) bool { return steps == 0 })
}

// across is a table of scenarios over the lengths of prefills; rows without anything are left out.
func (b *book) across(head string, want func(*scenario) bool, cell func(s *scenario, steps float64) (string, bool)) string {
	t := page.Markdown{Head: []string{head}}
	for _, steps := range b.steps() {
		t.Head = append(t.Head, fmt.Sprint(steps))
	}
	for _, s := range b.scenarios {
		row, some := []string{s.String()}, false
		for _, steps := range b.steps() {
			text, ok := "", false
			if slices.Contains(s.steps, steps) {
				text, ok = cell(s, steps)
			}
			if !ok {
				text = unknown
			}
			some = some || ok
			row = append(row, text)
		}
		if some && want(s) {
			t.Add(row...)
		}
	}
	return t.String()
}

func (b *book) keptTable(policy string, f four) string {
	return b.across("`"+policy+"`, steps", func(*scenario) bool { return true }, func(s *scenario, steps float64) (string, bool) {
		share, ok := b.kept(s, steps, f)
		return fmt.Sprintf("%.0f %%", 100*share), ok
	})
}

func (b *book) lossTable() string {
	return b.across("steps", func(s *scenario) bool { return s.load == closed }, func(s *scenario, steps float64) (string, bool) {
		plain, ok := b.lost(s, steps, arrivalNow)
		ahead, also := b.lost(s, steps, arrivalAhead)
		return fmt.Sprintf("%.1f / %.1f / %.1f", 100*foreseen(s, steps), 100*plain, 100*ahead), ok && also
	})
}

func (b *book) waitTable() string {
	return b.across("steps", func(s *scenario) bool { return s.load != closed }, func(s *scenario, steps float64) (string, bool) {
		of, ok := b.means(s, steps, report.TTFTP99, lateNow, arrivalNow, arrivalAhead, arrivalKV)
		return fmt.Sprintf("%.1f / %.1f / %.1f / %.1f", of[0]/1000, of[1]/1000, of[2]/1000, of[3]/1000), ok
	})
}

// Where late binding is worth a change.
const (
	muchLost   = 0.01 // of the tokens/s
	littleKept = 0.5
)

// from is the shortest prefill from which on something holds of all that were measured.
func (b *book) from(s *scenario, holds func(steps float64) (holds, ok bool)) string {
	found, known := math.NaN(), 0.0
	for _, steps := range s.steps {
		if steps == 0 {
			continue
		}
		yes, ok := holds(steps)
		switch {
		case !ok:
			continue
		case !yes:
			found = math.NaN()
		case math.IsNaN(found):
			found = steps
		}
		known = steps
	}
	switch {
	case known == 0:
		return unknown
	case math.IsNaN(found):
		return fmt.Sprintf("> %g", known)
	}
	return fmt.Sprintf("%g", found)
}

func (b *book) worthTable() string {
	t := page.Markdown{Head: []string{"", "mean answer", "1 % of tokens/s", "with slots ahead", "half of what is to be kept"}}
	for _, s := range b.scenarios {
		src, err := source(s.trace)
		if err != nil {
			continue // it was not run either
		}
		loses := func(arm int) string {
			if s.load != closed {
				return unknown // they follow the arrivals
			}
			return b.from(s, func(steps float64) (bool, bool) {
				lost, ok := b.lost(s, steps, arm)
				return lost > muchLost, ok
			})
		}
		kept := b.from(s, func(steps float64) (bool, bool) {
			share, ok := b.kept(s, steps, nowArms)
			return share < littleKept, ok
		})
		if row := []string{loses(arrivalNow), loses(arrivalAhead), kept}; slices.ContainsFunc(row, func(cell string) bool { return cell != unknown }) {
			t.Add(append([]string{s.String(), fmt.Sprintf("%.0f", src.output)}, row...)...)
		}
	}
	return t.String()
}

// misjudgedRows are the arms whose starts are wrong, each beside the one that is told nothing.
var misjudgedRows = []struct{ arm, beside int }{
	{arrivalNow, untoldNow}, {nowMisjudged, untoldNow},
}

func (b *book) misjudgedTable() string {
	t := page.Markdown{Head: []string{"", "scenarios", "idle, points (95 % interval)", "least", "most", "tokens/s, %"}}
	for _, r := range misjudgedRows {
		idle, tokens := b.differences(misjudgedAt, r.arm, r.beside)
		if len(idle) == 0 {
			continue
		}
		low, high := interval(idle)
		t.Add(arms[r.arm].name, fmt.Sprint(len(idle)), fmt.Sprintf("%+.2f (%+.2f to %+.2f)", stats.Mean(idle), low, high),
			fmt.Sprintf("%+.2f", slices.Min(idle)), fmt.Sprintf("%+.2f", slices.Max(idle)), fmt.Sprintf("%+.2f", stats.Mean(tokens)))
	}
	return t.String()
}

// differences are those of an arm and another, of each scenario: of idle shares in points, and of tokens/s in %.
func (b *book) differences(steps float64, arm, beside int) (idle, tokens []float64) {
	for _, s := range b.scenarios {
		i, ok := b.means(s, steps, report.IdleShare, arm, beside)
		k, also := b.means(s, steps, report.TokensPerS, arm, beside)
		if ok && also {
			idle, tokens = append(idle, 100*(i[0]-i[1])), append(tokens, 100*(k[0]/k[1]-1))
		}
	}
	return idle, tokens
}

// interval is where the mean of values lies with 95 %, if they are independent.
func interval(values []float64) (low, high float64) {
	wide := 1.96 * stats.Deviation(values) / math.Sqrt(float64(len(values)))
	return stats.Mean(values) - wide, stats.Mean(values) + wide
}

// columns of a scenario's table.
var columns = []struct {
	head   string
	metric report.Metric
	scale  float64
	digits int
}{
	{"idle %", report.IdleShare, 100, 1},
	{"tokens/s", report.TokensPerS, 1, 0},
	{"TPOT p95 ms", report.TPOTP95, 1, 1},
	{"TTFT p50 ms", report.TTFTP50, 1, 0},
	{"TTFT p99 ms", report.TTFTP99, 1, 0},
}

// table has all arms of a scenario. What is bound late in a closed loop has one row, for all prefills.
func (b *book) table(s *scenario) string {
	t := page.Markdown{Head: []string{"steps, bound, policy", "seeds"}}
	for _, c := range columns {
		t.Head = append(t.Head, c.head)
	}
	rows := 0
	for _, steps := range s.steps {
		for i, a := range arms {
			var found []report.Sample
			for c := s.cell(steps, i); c.Seed < s.seeds; {
				c.Seed++
				if sample, ok := b.samples.of[c]; ok && c.Steps == steps {
					found = append(found, sample)
				}
			}
			if len(found) == 0 {
				continue
			}
			of := report.Summarize(found...)
			row := []string{fmt.Sprintf("%g, %s", steps, a.name), fmt.Sprint(len(found))}
			for _, c := range columns {
				v, ok := of[c.metric]
				if !ok {
					row = append(row, unknown)
					continue
				}
				cell := report.Grouped(v.Mean*c.scale, c.digits)
				if v.SD > 0 {
					cell += " ± " + report.Grouped(v.SD*c.scale, c.digits)
				}
				row = append(row, cell)
			}
			t.Add(row...)
			rows++
		}
	}
	if rows == 0 {
		return ""
	}
	return t.String()
}
