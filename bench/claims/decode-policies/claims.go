package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
)

// reported stands in place of a verdict where none is given.
const reported = "reported"

// claims holds every claim of the policies against what was simulated, also those
// that do not come out.
func (b *book) claims() string {
	items := []func() string{
		b.shortestQueueLoses, b.lookingAheadHelps, b.imbalanceGrows, b.weightsMatterLittle, baselinesStand, b.defaultHolds,
		b.lookingAheadAsPublished,
	}
	return page.Joined(items, func(item func() string) string { return item() })
}

// closedLoops are all closed loops that are judged.
func (b *book) closedLoops() []scenario {
	var all []scenario
	for _, s := range b.Traces.Real {
		for _, g := range b.sizes() {
			all = append(all, closed(s, g))
		}
	}
	if b.Traces.Mooncake != nil {
		all = append(all, wide(b.Traces), scenario{on: b.Traces.Mooncake, ranks: 8, slots: 10, pool: poolOfRank * 8},
			closed(b.Traces.Azure200, 8), closed(b.Traces.Azure200, 16))
	}
	for _, s := range b.Traces.Drawn {
		all = append(all, closed(s, 8))
	}
	if b.Traces.Code != nil {
		all = append(all, closed(b.Traces.Code, 64))
	}
	return all
}

// openLoops are all open loops that are judged.
func (b *book) openLoops() []scenario {
	var all []scenario
	for _, s := range slices.Concat(b.Traces.Real, b.Traces.Drawn) {
		for _, rho := range rhos {
			all = append(all, open(s, 8, rho))
		}
	}
	for _, s := range b.Traces.Real {
		all = append(all, open(s, 32, 0.8))
	}
	return all
}

// shortestQueueLoses is line 1: BR-0 against the shortest queue.
func (b *book) shortestQueueLoses() string {
	t := page.Markdown{Head: []string{"closed loop", "imbalance of `br0` / `jsq`", "at most", "verdict"}, Text: 1}
	for _, sc := range b.closedLoops() {
		o := b.at(sc, "jsq", "br0")
		if o.Refused != "" {
			continue
		}
		most := 0.75
		if sc.on == b.Traces.Mooncake {
			most = 0.35
		}
		x := o.Ratio("br0", "jsq", report.Imbalance)
		t.Add(sc.String(), page.Ratio(x), page.Ratio(most), policytables.Verdict(x <= most))
	}
	return "**1. BR-0 has at most 0.75 of the imbalance of the shortest queue, 0.35 on Mooncake.** (Paper: 0.24 and 0.52.)\n\n" + t.String()
}

// lookingAheadHelps is line 2: perfect foresight against none. No gain is
// expected on Mooncake at G = 8.
func (b *book) lookingAheadHelps() string {
	t := page.Markdown{Head: []string{"closed loop", "imbalance of `brh:predictor=oracle` / `br0`", "idle, `br0`, %", "idle, oracle, %",
		"verdict"}, Text: 1}
	add := func(sc scenario, judge func(x float64) string) {
		o := b.at(sc, "br0", "brh:predictor=oracle")
		if o.Refused != "" {
			return
		}
		x := o.Ratio("brh:predictor=oracle", "br0", report.Imbalance)
		t.Add(sc.String(), page.Ratio(x), idle.Show(o.Of("br0", idle.Metric)), idle.Show(o.Of("brh:predictor=oracle", idle.Metric)), judge(x))
	}
	below := func(x float64) string { return policytables.Verdict(x < 1) }
	only := func(float64) string { return reported }
	var scenarios []scenario
	judges := map[scenario]func(float64) string{}
	for _, s := range b.Traces.Real {
		scenarios = append(scenarios, closed(s, 8), closed(s, 64))
		judges[closed(s, 8)], judges[closed(s, 64)] = only, below
	}
	if b.Traces.Mooncake != nil {
		eight := closed(b.Traces.Mooncake, 8)
		judges[eight] = func(x float64) string { return fmt.Sprintf("%s (no gain expected: 1.03 ± 0.1)", reported) }
		for _, sc := range []scenario{closed(b.Traces.Azure200, 16), wide(b.Traces)} {
			scenarios = append(scenarios, sc)
			judges[sc] = below
		}
		short := closed(b.Traces.Code, 8)
		scenarios = append(scenarios, short)
		judges[short] = only
	}
	for _, sc := range scenarios {
		add(sc, judges[sc])
	}
	return "**2. BR-H that knows every end has less imbalance than BR-0 on Azure's long answers, and wherever ranks are many.** (Reference: " +
		"0.79 and 0.72.) " +
		"It need not with few ranks, where its figures are shown without a verdict.\n\n" + t.String()
}

// imbalanceGrows is the first half of line 3. The sum over more ranks grows by itself, so a rank's
// share of it is judged.
func (b *book) imbalanceGrows() string {
	sizes := b.sizes()
	t := page.Markdown{Head: []string{"trace", "ranks", "grows least", "grows most", "verdict"}, Text: 2}
	for _, s := range b.Traces.Real {
		var fits []int
		for _, g := range sizes {
			if b.at(closed(s, g), foreseeing...).Refused == "" {
				fits = append(fits, g)
			}
		}
		if len(fits) < 2 {
			continue
		}
		few, many := fits[0], fits[len(fits)-1]
		growth := func(policy string) float64 {
			rankOf := func(g int) float64 {
				return imbalance.Shown(b.at(closed(s, g), foreseeing...).Of(policy, report.Imbalance)) / float64(g)
			}
			return page.Rounded(rankOf(many)/rankOf(few), 2)
		}
		byGrowth := func(p, q string) int { return cmp.Compare(growth(p), growth(q)) }
		least, most := slices.MinFunc(foreseeing, byGrowth), slices.MaxFunc(foreseeing, byGrowth)
		t.Add(s.Name, fmt.Sprintf("%d to %d", few, many), fmt.Sprintf("%.2f times, `%s`", growth(least), least),
			fmt.Sprintf("%.2f times, `%s`", growth(most), most), policytables.Verdict(growth(least) > 1))
	}
	return "**3a. Imbalance grows faster than the number of ranks**: a rank's share of it is larger with many ranks than with few, under " +
		"every policy. (Paper: JSQ 2.3 times, BR-0 5.5, from 4 " +
		"to 16 ranks.)\n\n" + t.String()
}

// pointsOfSweep is how far idle time may move over the sweep.
const pointsOfSweep = 1

// weightsMatterLittle is the second half of line 3.
func (b *book) weightsMatterLittle() string {
	t := page.Markdown{Head: []string{"closed loop", "idle over the sweep, %", "points", "tokens/s over the sweep", "idle, `jsq-kv`, %",
		"verdict"}, Text: 1}
	for _, s := range b.Traces.Real {
		for _, g := range b.sweepSizes() {
			sc := closed(s, g)
			o := b.at(sc, append(sweep(), baseline)...)
			if o.Refused != "" {
				continue
			}
			lo, hi := o.Of(sweep()[0], report.IdleShare), o.Of(sweep()[0], report.IdleShare)
			slow, fast := o.Of(sweep()[0], report.TokensPerS), o.Of(sweep()[0], report.TokensPerS)
			for _, p := range sweep()[1:] {
				x, y := o.Of(p, report.IdleShare), o.Of(p, report.TokensPerS)
				lo.Mean, hi.Mean = min(lo.Mean, x.Mean), max(hi.Mean, x.Mean)
				slow.Mean, fast.Mean = min(slow.Mean, y.Mean), max(fast.Mean, y.Mean)
			}
			points := page.Rounded(idle.Shown(hi)-idle.Shown(lo), idle.Digits)
			t.Add(sc.String(), idle.Alone(lo)+" to "+idle.Alone(hi), fmt.Sprintf("%.*f", idle.Digits, points),
				throughput.Alone(slow)+" to "+throughput.Alone(fast),
				idle.Show(o.Of(baseline, idle.Metric)), policytables.Verdict(points < pointsOfSweep))
		}
	}
	return "**3b. beta from 8 to 96 and gamma from 0.5 to 1 move idle time by little**: by less than one point.\n\n" + t.String()
}

// baselinesStand is line 4, which cannot fail: a test holds it.
func baselinesStand() string {
	return "**4. `jsq-kv` and `pjsq-kv` stand in every table of policies**, whatever the sign. The tables are made so; there is nothing to " +
		"judge.\n"
}

// rivals are what the default must not lose to.
var rivals = []string{"br0", "brh"}

// judged are the policies of line 5 as they ran in a scenario.
type judged struct {
	sc      scenario
	o       *page.Outcome
	ours    string
	rivals  []string
	guardMs float64
	tail    string // what the line says beside the scenario
}

// judge runs the policies of line 5; a guard of 0 is their own.
func (b *book) judge(sc scenario, guard int) *judged {
	j := &judged{sc: sc, ours: ours, rivals: rivals, guardMs: ownGuardMs}
	if guard > 0 {
		j.guardMs, j.tail = float64(guard), fmt.Sprintf(", guard %d s", guard/1000)
		j.rivals = make([]string, len(rivals))
		for i, r := range rivals {
			j.rivals[i] = b.guarded(r, guard)
		}
		j.ours = b.guarded(ours, guard)
	}
	j.o = b.at(sc, append([]string{j.ours, baseline}, j.rivals...)...)
	return j
}

// defaultHolds is line 5: the product's default against the rest.
func (b *book) defaultHolds() string {
	t := page.Markdown{Head: []string{
		"load", "idle, `evenkeel`, %", "`jsq-kv`", "`br0`", "`brh`", "imbalance / `br0`", "/ `brh`", "longest wait, s", "bound, s", "verdict",
	}, Text: 1}
	add := func(sc scenario, guard int) {
		j := b.judge(sc, guard)
		o := j.o
		if o.Refused != "" {
			return
		}
		t.Add(sc.String()+j.tail, idle.Show(o.Of(j.ours, idle.Metric)), idle.Show(o.Of(baseline, idle.Metric)),
			idle.Show(o.Of(j.rivals[0], idle.Metric)), idle.Show(o.Of(j.rivals[1], idle.Metric)),
			page.Ratio(o.Ratio(j.ours, j.rivals[0], report.Imbalance)), page.Ratio(o.Ratio(j.ours, j.rivals[1], report.Imbalance)),
			longestWait.Alone(o.Of(j.ours, report.WaitMax)), longestWait.Alone(j.waitBound()), j.faults())
	}
	for _, sc := range slices.Concat(b.closedLoops(), b.openLoops()) {
		add(sc, 0)
	}
	if b.Traces.Mooncake != nil {
		sc := wide(b.Traces)
		guard := b.guardOf(sc)
		add(sc, guard)
	}
	return "**5. The default, `evenkeel`:** idle share at most 0.7 of that of `jsq-kv` in a closed loop and not above it in an open one; " +
		"not above `br0` and `brh`; " +
		"at G = 64 at most 0.75 of their imbalance. " +
		"Above means by more than a deviation between seeds, the larger of the two. The longest wait stays within the guard's age (30 s, or " +
		"six mean waits) and a mean service " +
		"time. All of that is judged on the figures as they stand here.\n\n" + t.String()
}

// published is what BalanceRoute's paper has on 8 ranks: by how much BR-H has less imbalance than
// BR-0, by who tells it how long answers get (table 1, heavy load).
var published = []struct {
	by                 string
	proprietary, azure float64 // the trace of the first has prompts that recur
}{{"survival", 0.78, 0.81}, {"exact", 0.70, 0.71}, {"oracle", 0.45, 0.65}}

// lookingAheadAsPublished is line 6: what looking ahead brings in the paper's own forms of both
// policies.
func (b *book) lookingAheadAsPublished() string {
	t := page.Markdown{Head: []string{
		"closed loop", "lengths are told by", "imbalance of `brh:paper` / `br0:paper`", "paper", "tokens/s, %", "verdict",
	}, Text: 2}
	recurs := func(s *policytables.Source) bool { return s.Name == trace.SynthPrefix+"recurrent" }
	for _, on := range slices.Concat(b.Traces.Drawn, b.Traces.Real) {
		if on != b.Traces.Azure && !recurs(on) {
			continue
		}
		for _, p := range published {
			sc, name := closed(on, 8), "brh:paper,predictor="+p.by
			o := b.at(sc, "br0:paper", name)
			if o.Refused != "" {
				continue
			}
			claimed := p.azure
			if recurs(on) {
				claimed = p.proprietary
			}
			x := page.Rounded(o.Ratio(name, "br0:paper", report.Imbalance), 2)
			verdict := "reproduced"
			switch {
			case x >= 1:
				verdict = policytables.Verdict(false)
			case x > claimed+0.05:
				verdict = policytables.Weaker
			}
			t.Add(sc.String(), p.by, page.Ratio(x), page.Ratio(claimed),
				fmt.Sprintf("%+.1f", 100*(o.Ratio(name, "br0:paper", report.TokensPerS)-1)), verdict)
		}
	}
	if len(t.Rows) == 0 {
		return "**6.** " + notAsked
	}
	return "**6. BR-H has less imbalance than BR-0 by as much as the paper says**, both in the paper's forms, on 8 ranks. " +
		"The paper has a proprietary trace whose prompts recur, in whose " +
		"place `synth:recurrent` stands, and Azure's of 2024. More than 0.05 above its figure is weaker.\n\n" + t.String()
}

// manyRanks is from where on imbalance must be clearly lower.
const manyRanks = 64

// faults says which parts of line 5 a load does not show.
func (j *judged) faults() string {
	var found []string
	mine := j.o.Of(j.ours, report.IdleShare)
	theirs := j.o.Of(baseline, report.IdleShare)
	share := page.Rounded(idle.Shown(mine)/idle.Shown(theirs), 2)
	switch {
	case j.sc.rho == 0 && share > 0.7:
		found = append(found, fmt.Sprintf("idle %.2f of `%s`", share, baseline))
	case j.sc.rho > 0 && above(mine, theirs):
		found = append(found, "idles above `"+baseline+"`")
	}
	for i, r := range j.rivals {
		if above(mine, j.o.Of(r, report.IdleShare)) {
			found = append(found, "idles above `"+rivals[i]+"`")
		}
		if x := j.o.Ratio(j.ours, r, report.Imbalance); j.sc.ranks >= manyRanks && x > 0.75 {
			found = append(found, fmt.Sprintf("imbalance %.2f of `%s`", x, rivals[i]))
		}
	}
	if longestWait.Shown(j.o.Of(j.ours, report.WaitMax)) > longestWait.Shown(j.waitBound()) {
		found = append(found, "waits too long")
	}
	if found == nil {
		return policytables.Pass
	}
	return policytables.Verdict(false) + ": " + strings.Join(found, "; ")
}

// above is to idle by more than a deviation.
func above(x, y report.Value) bool {
	return idle.Shown(x) > page.Rounded(idle.Shown(y)+max(idle.Deviation(x), idle.Deviation(y)), idle.Digits)
}

// The guard's age: max_age_ms by default, or so many mean waits where those are
// longer.
const (
	ownGuardMs = 30_000
	guardWaits = 6
)

// waitBound is how long a request may wait at most, in ms, where KV is plenty.
func (j *judged) waitBound() report.Value {
	guard := max(j.guardMs, guardWaits*j.o.Of(j.ours, report.WaitMean).Mean)
	return report.Value{Mean: guard + j.sc.on.MeanOutput*j.o.Of(j.ours, report.StepMean).Mean}
}
