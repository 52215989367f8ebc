package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/mixed"
	"evenkeel/bench/tools/page"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/step"
	"evenkeel/internal/stats"
)

// after are numbers of steps after which one looks at what was learned.
var after = [...]int{500, 2000, 5000, 20_000}

// looks is how many rounds there are from one look to the next.
const looks = 20

// What is learned of a group of decode ranks, and of one whose ranks compute prompts.
const (
	ofStep = iota
	ofRequest
	ofOwn
	ofPrompt
)

var quantities = [...]string{ofStep: "a step", ofRequest: "weight of a request", ofOwn: "a prompt's own part", ofPrompt: "a prompt in all"}

// lessons are what is learned, by how many steps there were.
type lessons struct {
	off [len(quantities)][len(after)]float64 // multiples of what is true, by quantity
	way [len(after)]told                     // who pays for requests
}

// told is whether steps tell something.
type told int

const (
	unseen told = iota
	untold
	rightly
	wrongly
)

// slot is where a quantity of so many steps is kept; false: there were too few.
func slot(steps uint64) (at int, ok bool) {
	at, found := slices.BinarySearch(after[:], int(steps))
	if !found {
		at--
	}
	return at, at >= 0
}

// learnedOf plays a load of each kind under a truth, and says what the default policy learns of it;
// 0 where it was not played for so long.
func (g *gate) learnedOf(ctx context.Context, i int, truth step.Form) (e lessons, _ error) {
	law, l := g.onDecode(i)
	plan := l.Plan([]string{"evenkeel"}, 0)
	plan.Fleet.Groups = slices.Clone(plan.Fleet.Groups)
	of := in(law, truth)
	plan.Fleet.Groups[0].Law = of
	n := 0
	plan.Watch = func(b *board.Boards, now time.Time) {
		if n++; n%looks > 0 {
			return
		}
		s := b.Status(now)
		m := &s.Models[0]
		if got := m.Groups[0].Step; got != nil {
			e.see(got, m.Groups[0].Steps.Count, of, m.Workers)
		}
	}
	if _, err := plan.RunAlone(ctx, 1); err != nil {
		return e, fmt.Errorf("load %s: %w", l, err)
	}
	law, both := g.onBoth(i)
	both.Law = *in(law, truth)
	run, err := mixed.New(both, mixed.Contender{Spec: "evenkeel", Learn: true})
	if err != nil {
		return e, err
	}
	n = 0
	run.Before = func() {
		if n++; n%looks == 0 {
			e.prompts(run, &both.Law)
		}
	}
	_, err = run.Do(ctx)
	return e, err
}

// see keeps the first look after each number of steps.
func (e *lessons) see(got *board.StepStatus, steps uint64, law *step.Law, ranks []board.WorkerStatus) {
	at, ok := slot(steps)
	if !ok {
		return
	}
	if e.way[at] == unseen {
		switch got.Bottleneck {
		case law.Form.Bottleneck():
			e.way[at] = rightly
		case step.UnknownBottleneck:
			e.way[at] = untold
		default:
			e.way[at] = wrongly
		}
		level := law.Level()
		e.off[ofRequest][at] = max(1, float64(got.RequestTokens)) / level.Weight()
	}
	if e.off[ofStep][at] == 0 && got.C1Ms > 0 {
		var list []step.Rank
		for i := range ranks {
			list = append(list, step.Rank{Requests: float64(ranks[i].Running), KV: float64(ranks[i].KVTokens)})
		}
		m := step.Model{C0Ms: got.C0Ms, C1Ms: got.C1Ms, RequestMs: got.RequestMs}
		e.off[ofStep][at] = m.Ms(list) / law.Ms(list)
	}
}

// prompts does the same for what a token of a prompt costs.
func (e *lessons) prompts(run *mixed.Run, law *step.Law) {
	s := run.Boards.Status(run.Instant(run.Now))
	g := &s.Models[0].Groups[0]
	got := g.Step
	at, ok := slot(g.Steps.Count)
	if !ok || got == nil || got.OwnPromptMs+got.SharedPromptMs <= 0 || e.off[ofOwn][at] > 0 {
		return
	}
	e.off[ofOwn][at] = got.OwnPromptMs / law.OwnPromptMs
	e.off[ofPrompt][at] = (got.OwnPromptMs + got.SharedPromptMs) / (law.OwnPromptMs + law.SharedPromptMs)
}

// learnedTable is what learned laws are off by after so many steps, in each truth.
func (g *gate) learnedTable(ctx context.Context) (string, error) {
	all := make([][len(step.Forms)]lessons, g.mixed)
	_, err := report.Trials(ctx, g.mixed, 1, nil, func(ctx context.Context, i int, _ uint64) (struct{}, error) {
		for truth := range step.Forms {
			e, err := g.learnedOf(ctx, i, step.Form(truth))
			if err != nil {
				return struct{}{}, err
			}
			all[i][truth] = e
		}
		_, err := fmt.Fprintf(os.Stderr, "learned of load %d\n", i)
		return struct{}{}, err
	})
	if err != nil {
		return "", err
	}
	head := []string{"what is learned", "steps really are"}
	for _, n := range after {
		head = append(head, fmt.Sprintf("%s steps", stats.Grouped(n)))
	}
	t := page.Markdown{Head: head, Text: 2}
	for q, of := range quantities {
		for truth, name := range step.Forms {
			row := []string{of, name}
			for at := range after {
				var list []float64
				for i := range all {
					if x := all[i][truth].off[q][at]; x > 0 {
						list = append(list, math.Abs(math.Log(x)))
					}
				}
				row = append(row, offBy(list))
			}
			t.Add(row...)
		}
	}
	for truth, name := range step.Forms {
		row := []string{"who pays for requests", name}
		for at := range after {
			var n [wrongly + 1]int
			for i := range all {
				n[all[i][truth].way[at]]++
			}
			row = append(row, fmt.Sprintf("%d of %d, %d wrong", n[rightly], g.mixed-n[unseen], n[wrongly]))
		}
		t.Add(row...)
	}
	return fmt.Sprintf("**What learned laws are off by**, in the median of %d loads, as a factor, and of how many of them it is known. "+
		"A step is one at the loads of the moment; a request begins at %s KV tokens.\n\n%s",
		g.mixed, stats.Grouped(step.UsualWeight), t.String()), nil
}

// offBy is the median of errors, and how many there are.
func offBy(list []float64) string {
	if len(list) == 0 {
		return "–"
	}
	slices.Sort(list)
	return fmt.Sprintf("%.2f (%d)", math.Exp(list[len(list)/2]), len(list))
}
