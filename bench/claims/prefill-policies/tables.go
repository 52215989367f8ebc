package main

import (
	"fmt"
	"math"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
)

// The scenarios of each table, on one trace: loads, engines that also decode, attention over long
// prompts, an engine that is slower, caches of other sizes and told wrongly, a burst of one class,
// and probes held back.
func loadsOn(s *policytables.Source) []scenario {
	return each(loads, func(x float64) scenario { return scenario{on: s, load: x} })
}

func bothOn(s *policytables.Source) []scenario {
	return each([]float64{0.5, 0.7}, func(x float64) scenario { return scenario{on: s, load: x, both: true} })
}

func curvesOn(s *policytables.Source) []scenario {
	if !s.Shares() {
		return nil
	}
	return each([]float64{0.7, 0.85}, func(x float64) scenario { return scenario{on: s, load: x, beta2: curve} })
}

func slowOn(s *policytables.Source) []scenario {
	return each([]float64{1.5, 3}, func(x float64) scenario { return scenario{on: s, load: 0.7, slow: x} })
}

func cachesOn(s *policytables.Source) (all []scenario) {
	for _, size := range []int64{300_000, 1_000_000, 3_000_000} {
		all = append(all, each([]float64{0.25, 1, 4}, func(x float64) scenario {
			return scenario{on: s, load: 0.7, capacity: size, told: x}
		})...)
	}
	return all
}

// A burst has so many of the requests of one class, in the second third.
const burstShare = 0.6

func burstsOn(s *policytables.Source) []scenario {
	return each(burstLoads, func(x float64) scenario { return scenario{on: s, load: x, burst: burstShare} })
}

// burstsBoth are those with and without the detector.
func burstsBoth(s *policytables.Source) (all []scenario) {
	for _, sc := range burstsOn(s) {
		all = append(all, sc, unwatched(sc))
	}
	return all
}

func unwatched(sc scenario) scenario {
	sc.unwatch = true
	return sc
}

func pushesOn(s *policytables.Source) (all []scenario) {
	for _, load := range []float64{0.7, 0.85} {
		all = append(all, each([]int{1, 2, 8, 1000}, func(x int) scenario { return scenario{on: s, load: load, push: x} })...)
	}
	return all
}

var (
	loads      = []float64{0.5, 0.7, 0.85, 0.95}
	burstLoads = []float64{0.7, 0.85}
)

func each[X, Y any](list []X, of func(X) Y) (all []Y) {
	for _, x := range list {
		all = append(all, of(x))
	}
	return all
}

// tables are a table for each scenario on each trace.
func (b *book) tables(sources []*policytables.Source, on func(*policytables.Source) []scenario,
	policies func(*policytables.Source) []string, columns ...page.Column) string {
	return page.Joined(sources, func(s *policytables.Source) string {
		return page.Joined(on(s), func(sc scenario) string { return b.table(sc, policies(s), columns...) })
	})
}

func these(policies ...string) func(*policytables.Source) []string {
	return func(*policytables.Source) []string { return policies }
}

// side is a column of one policy, with a scenario in each row.
func (b *book) side(title, p string, show func(o *page.Outcome, p string) string, policies []string) page.Cells[scenario] {
	return page.Cells[scenario]{Title: title, Of: func(sc scenario) string {
		o := b.at(sc, policies...)
		if o.Refused != "" {
			return "left out: " + o.Refused
		}
		return show(o, p)
	}}
}

func alone(c page.Column) func(*page.Outcome, string) string {
	return func(o *page.Outcome, p string) string { return c.Alone(o.Of(p, c.Metric)) }
}

func besideLMetric(o *page.Outcome, p string) string { return beside(o, p, "lmetric") }

func (b *book) caches() string {
	policies := []string{"lmetric", "finish"}
	return b.eachSharing(func(s *policytables.Source) string {
		all := cachesOn(s)
		t := page.Rows("tokens an engine holds", all, func(sc scenario) string { return report.Grouped(float64(sc.capacity), 0) },
			page.Cells[scenario]{Title: "told", Of: func(sc scenario) string { return fmt.Sprintf("x %g", sc.told) }},
			page.Cells[scenario]{Title: "load", Of: func(sc scenario) string { return fmt.Sprint(sc.load) }},
			b.side("`lmetric`: "+ttftMean.Title, "lmetric", besideLMetric, policies), b.side(hits.Title, "lmetric", alone(hits), policies),
			b.side("`finish`: "+ttftMean.Title+" (of `lmetric`)", "finish", besideLMetric, policies),
			b.side(hits.Title, "finish", alone(hits), policies),
			b.side(hitError.Title, "finish", alone(hitError), policies))
		return fmt.Sprintf("**%s**\n\n%s%s", s.Name, t, page.Fenced(b.command(all[0], policies)))
	})
}

var inBurst = []string{"lmetric", "finish", "ttft-sim", "bailian", "aibrix-filter", own}

func (b *book) burst() string {
	return b.eachSharing(func(s *policytables.Source) string {
		return page.Joined(burstsOn(s), func(sc scenario) string {
			on, off := b.at(sc, inBurst...), b.at(unwatched(sc), inBurst...)
			if on.Refused != "" {
				return "Left out: " + on.Refused + ".\n"
			}
			cells := func(title string, of func(p string) string) page.Cells[string] {
				return page.Cells[string]{Title: title, Of: of}
			}
			columns := []page.Cells[string]{
				cells(ttftMean.Title+", no detector (of `lmetric`)", func(p string) string { return besideLMetric(off, p) }),
				cells("with it (of `lmetric`)", func(p string) string { return besideLMetric(on, p) }),
				cells("of that", func(p string) string {
					return page.Ratio(on.Of(p, report.TTFTMean).Mean / off.Of(p, report.TTFTMean).Mean)
				}),
			}
			for _, c := range []page.Column{ttftP99, burstTTFT} {
				columns = append(columns, cells(c.Title+", no detector", func(p string) string { return c.Alone(off.Of(p, c.Metric)) }),
					cells("with it", func(p string) string { return c.Alone(on.Of(p, c.Metric)) }))
			}
			return fmt.Sprintf("**%s**\n\n%s%s", sc, page.Rows("policy", inBurst, page.Code, columns...), page.Fenced(b.command(sc, inBurst)))
		})
	})
}

func (b *book) push() string {
	policies := []string{"lmetric", "finish", "bailian", "round-robin"}
	return b.eachSharing(func(s *policytables.Source) string {
		all := pushesOn(s)
		columns := []page.Cells[scenario]{{Title: "load", Of: func(sc scenario) string { return fmt.Sprint(sc.load) }}}
		for _, p := range policies {
			columns = append(columns, b.side(page.Code(p)+", "+ttftMean.Title, p, besideLMetric, policies))
		}
		t := page.Rows("probes an engine may have", all, func(sc scenario) string { return fmt.Sprint(sc.push) }, columns...)
		return fmt.Sprintf("**%s**\n\n%s%s", s.Name, t, page.Fenced(b.command(all[len(all)-1], policies)))
	})
}

// least is what must come out on a trace whose prompts share blocks: the mean TTFT of finish as
// a share of lmetric's.
var least = []struct{ load, most float64 }{{0.7, 0.93}, {0.85, 0.95}}

// surely is what the lower end of an interval of that share must not pass in any row.
const surely = 1.02

// claims holds what is promised against what came out.
func (b *book) claims() string {
	return b.eachSharing(func(s *policytables.Source) string {
		t := page.Markdown{Head: []string{"claim", "came out", ""}, Text: 2}
		for _, c := range least {
			o := b.at(scenario{on: s, load: c.load}, "lmetric", "finish")
			if o.Refused != "" {
				return "Left out: " + o.Refused + ".\n"
			}
			ratio := o.Ratio("finish", "lmetric", report.TTFTMean)
			low, high := o.Interval("finish", "lmetric", report.TTFTMean)
			t.Add(fmt.Sprintf("load %g: mean TTFT of `finish` at most %.2f of `lmetric`'s", c.load, c.most),
				fmt.Sprintf("%.2f (%.2f to %.2f)", ratio, low, high), policytables.Verdict(ratio <= c.most))
			tail := o.Ratio("finish", "lmetric", report.TTFTP99)
			t.Add(fmt.Sprintf("load %g: and its p99 at most 1.00", c.load), page.Ratio(tail), policytables.Verdict(tail <= 1))
		}
		for _, sc := range burstsOn(s) {
			on, off := b.at(sc, inBurst...), b.at(unwatched(sc), inBurst...)
			change := func(p string, digits int) float64 {
				return page.Rounded(100*(on.Of(p, report.TTFTMean).Mean/off.Of(p, report.TTFTMean).Mean-1), digits)
			}
			t.Add(fmt.Sprintf("load %g, a burst of %.0f %%: the detector takes 30 %% or more off the mean of `bailian`", sc.load, 100*burstShare),
				fmt.Sprintf("%+.0f %%", change("bailian", 0)), policytables.Verdict(change("bailian", 0) <= -30))
			for _, p := range []string{"finish", "lmetric"} {
				t.Add(fmt.Sprintf("load %g, a burst: and moves `%s` by less than 5 %%", sc.load, p), fmt.Sprintf("%+.1f %%", change(p, 1)),
					policytables.Verdict(math.Abs(change(p, 1)) < 5))
			}
		}
		return fmt.Sprintf("**%s**\n\n%s", s.Name, &t)
	}) + "\n" + b.claimsOfAllRows()
}

// claimsOfAllRows are those on every row of every table that has both policies.
func (b *book) claimsOfAllRows() string {
	worst, rows, where := 0.0, 0, ""
	both, tokens := 0.0, 0.0
	for _, sc := range b.scenarios() {
		o := b.at(sc, "lmetric", "finish")
		if o.Refused != "" {
			continue
		}
		rows++
		if low, _ := o.Interval("finish", "lmetric", report.TTFTMean); low > worst {
			worst, where = low, sc.String()
		}
		if sc.both {
			both, tokens = max(both, o.Ratio("finish", "lmetric", report.TTFTMean)), max(tokens, o.Ratio("finish", "lmetric", report.TPOTMean))
		}
	}
	t := page.Markdown{Head: []string{"claim", "came out", ""}, Text: 2}
	t.Add(fmt.Sprintf("in none of %d rows does the lower end of the interval of `finish` pass %.2f of `lmetric`", rows, surely),
		fmt.Sprintf("%.2f (%s)", worst, where), policytables.Verdict(worst <= surely))
	t.Add("engines that also decode: mean TTFT of `finish` at most 1.00 of `lmetric`'s in every row", fmt.Sprintf("%.2f at most", both),
		policytables.Verdict(both <= 1))
	t.Add("engines that also decode: and its mean TPOT at most 1.00", fmt.Sprintf("%.2f at most", tokens), policytables.Verdict(tokens <= 1))
	b.headline(&t)
	return "**all tables**\n\n" + t.String()
}

// headline is what LMetric's paper (arXiv 2603.15202) says of real workloads: by how much its mean
// TTFT and TPOT are less than those of vLLM's router and of a scheduler in production, in whose
// place Bailian's stands.
func (b *book) headline(t *page.Markdown) {
	for _, h := range []struct {
		rival, what string
		of          report.Metric
		percent     float64
	}{
		{"vllm-queue", "mean TTFT", report.TTFTMean, 92}, {"bailian", "mean TTFT", report.TTFTMean, 52},
		{"vllm-queue", "mean TPOT", report.TPOTMean, 21}, {"bailian", "mean TPOT", report.TPOTMean, 20},
	} {
		least, most := math.Inf(1), math.Inf(-1)
		for _, sc := range b.scenarios() {
			if !sc.both {
				continue
			}
			if o := b.at(sc, "lmetric", h.rival); o.Refused == "" {
				less := 100 * (1 - o.Ratio("lmetric", h.rival, h.of))
				least, most = min(least, less), max(most, less)
			}
		}
		if math.IsInf(least, 1) {
			continue
		}
		verdict := policytables.Pass
		switch {
		case most <= 0:
			verdict = policytables.Verdict(false)
		case most < h.percent:
			verdict = policytables.Weaker
		case least < h.percent:
			verdict = policytables.Weaker + ", but for the best row"
		}
		t.Add(fmt.Sprintf("engines that also decode, LMetric's paper: %s of `lmetric` %.0f %% less than that of `%s`",
			h.what, h.percent, h.rival),
			fmt.Sprintf("%.0f to %.0f %% less", least, most), verdict)
	}
}

// scenarios are those of all tables.
func (b *book) scenarios() (all []scenario) {
	add := func(sources []*policytables.Source, tables ...func(*policytables.Source) []scenario) {
		for _, s := range sources {
			for _, on := range tables {
				all = append(all, on(s)...)
			}
		}
	}
	add(b.sources(), loadsOn, bothOn, curvesOn)
	add(b.sharing(), slowOn, cachesOn, burstsBoth, pushesOn)
	return all
}
