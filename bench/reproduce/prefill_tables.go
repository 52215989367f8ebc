package main

import (
	"fmt"
	"math"

	"evenkeel/bench/report"
)

func (b *book) prefillLoads() string {
	return joined(b.prefillSources(), func(s *source) string {
		return joined(prefillLoads, func(load float64) string {
			return b.prefillTable(prefillScenario{on: s, load: load}, b.prefillPolicies(s), prefillCols...)
		})
	})
}

var curveLoads = []float64{0.7, 0.85}

func (b *book) prefillCurve() string {
	policies := []string{"lmetric", "bailian", "ttft-sim", "gorgo", "finish"}
	return joined(b.prefillSources(), func(s *source) string {
		if !s.shares() {
			return ""
		}
		return joined(curveLoads, func(load float64) string {
			return b.prefillTable(prefillScenario{on: s, load: load, beta2: curve}, policies, prefillCols...)
		})
	})
}

var slownesses = []float64{1.5, 3}

func (b *book) prefillSlow() string {
	policies := []string{"lmetric", "vllm-queue", "ttft-sim", "finish"}
	return b.eachSharing(func(s *source) string {
		return joined(slownesses, func(slow float64) string {
			return b.prefillTable(prefillScenario{on: s, load: 0.7, slow: slow}, policies, prefillCols...)
		})
	})
}

// Sizes of caches, and by how much the tier is told wrongly.
var (
	cacheSizes = []int64{300_000, 1_000_000, 3_000_000}
	wrongly    = []float64{0.25, 1, 4}
)

func (b *book) prefillCaches() string {
	policies := []string{"lmetric", "finish"}
	return b.eachSharing(func(s *source) string {
		t := report.Markdown{Head: []string{"tokens an engine holds", "told", "load", "`lmetric`: " + prefillMean.title, "hits, %",
			"`finish`: " + prefillMean.title + " (of `lmetric`)", "hits, %", hitError.title}}
		for _, size := range cacheSizes {
			for _, told := range wrongly {
				sc := prefillScenario{on: s, load: 0.7, capacity: size, told: told}
				o := b.prefill(sc, policies...)
				if o.refused != "" {
					t.Add(report.Grouped(float64(size), 0), "left out: "+o.refused, "", "", "", "", "", "")
					break
				}
				hits := prefillCols[3]
				t.Add(report.Grouped(float64(size), 0), fmt.Sprintf("x %g", told), fmt.Sprint(sc.load),
					prefillMean.show(o.of("lmetric", report.TTFTMean)), hits.alone(o.of("lmetric", hits.metric)),
					beside(o, "finish", "lmetric"), hits.alone(o.of("finish", hits.metric)), hitError.alone(o.of("finish", hitError.metric)))
			}
		}
		return fmt.Sprintf("**%s**\n\n%s%s", s.name, &t, fenced(b.prefillCommand(prefillScenario{on: s, load: 0.7, capacity: cacheSizes[0], told: wrongly[0]}, policies)))
	})
}

// burstShare is how many of the requests are of one class in the second third.
const burstShare = 0.6

var burstLoads = []float64{0.7, 0.85}

var inBurst = []string{"lmetric", "finish", "ttft-sim", "bailian", "aibrix-filter", own}

func (b *book) prefillBurst() string {
	return b.eachSharing(func(s *source) string {
		return joined(burstLoads, func(load float64) string {
			on, off := b.burst(s, load)
			if on.refused != "" {
				return "Left out: " + on.refused + ".\n"
			}
			t := report.Markdown{Head: []string{"policy", prefillMean.title + ", no detector (of `lmetric`)", "with it (of `lmetric`)", "of that", "p99, no detector", "with it",
				burstTTFT.title + ", no detector", "with it"}}
			for _, p := range inBurst {
				t.Add("`"+p+"`", beside(off, p, "lmetric"), beside(on, p, "lmetric"),
					fmt.Sprintf("%.2f", on.of(p, report.TTFTMean).Mean/off.of(p, report.TTFTMean).Mean),
					prefillP99.alone(off.of(p, prefillP99.metric)), prefillP99.alone(on.of(p, prefillP99.metric)),
					burstTTFT.alone(off.of(p, burstTTFT.metric)), burstTTFT.alone(on.of(p, burstTTFT.metric)))
			}
			sc := prefillScenario{on: s, load: load, burst: burstShare}
			return fmt.Sprintf("**%s**\n\n%s%s", sc, &t, fenced(b.prefillCommand(sc, inBurst)))
		})
	})
}

func (b *book) burst(s *source, load float64) (on, off *outcome) {
	on = b.prefill(prefillScenario{on: s, load: load, burst: burstShare}, inBurst...)
	return on, b.prefill(prefillScenario{on: s, load: load, burst: burstShare, unwatch: true}, inBurst...)
}

var bothLoads = []float64{0.5, 0.7}

func (b *book) prefillBoth() string {
	return joined(b.prefillSources(), func(s *source) string {
		return joined(bothLoads, func(load float64) string {
			return b.prefillTable(prefillScenario{on: s, load: load, both: true}, b.prefillPolicies(s),
				prefillCols[0], prefillCols[2], tpotMean, tpot, prefillCols[3], prefillCols[4])
		})
	})
}

// How many unanswered probes an engine may have, and at which loads.
var (
	pushes    = []int{1, 2, 8, 1000}
	pushLoads = []float64{0.7, 0.85}
)

func (b *book) prefillPush() string {
	policies := []string{"lmetric", "finish", "bailian", "round-robin"}
	return b.eachSharing(func(s *source) string {
		t := report.Markdown{Head: []string{"probes an engine may have", "load"}}
		for _, p := range policies {
			t.Head = append(t.Head, "`"+p+"`, "+prefillMean.title)
		}
		last := prefillScenario{on: s}
		for _, load := range pushLoads {
			for _, push := range pushes {
				last.load, last.push = load, push
				o := b.prefill(last, policies...)
				if o.refused != "" {
					return "Left out: " + o.refused + ".\n"
				}
				row := []string{fmt.Sprint(push), fmt.Sprint(load)}
				for _, p := range policies {
					row = append(row, beside(o, p, policies[0]))
				}
				t.Add(row...)
			}
		}
		return fmt.Sprintf("**%s**\n\n%s%s", s.name, &t, fenced(b.prefillCommand(last, policies)))
	})
}

// least is what must come out on a trace whose prompts share blocks: the mean TTFT of finish as
// a share of lmetric's.
var least = []struct{ load, most float64 }{{0.7, 0.93}, {0.85, 0.95}}

// surely is what the lower end of an interval of that share must not pass in any row.
const surely = 1.02

// prefillClaims holds what is promised against what came out.
func (b *book) prefillClaims() string {
	return b.eachSharing(func(s *source) string {
		t := report.Markdown{Head: []string{"claim", "came out", ""}, Text: 2}
		for _, c := range least {
			o := b.prefill(prefillScenario{on: s, load: c.load}, "lmetric", "finish")
			if o.refused != "" {
				return "Left out: " + o.refused + ".\n"
			}
			ratio, low, high := o.versus("finish", "lmetric")
			t.Add(fmt.Sprintf("load %g: mean TTFT of `finish` at most %.2f of `lmetric`'s", c.load, c.most), fmt.Sprintf("%.2f (%.2f to %.2f)", ratio, low, high), verdict(ratio <= c.most))
			tail := o.ratioOf("finish", "lmetric", report.TTFTP99)
			t.Add(fmt.Sprintf("load %g: and its p99 at most 1.00", c.load), fmt.Sprintf("%.2f", tail), verdict(tail <= 1))
		}
		for _, load := range burstLoads {
			on, off := b.burst(s, load)
			change := func(p string, digits int) float64 {
				return rounded(100*(on.of(p, report.TTFTMean).Mean/off.of(p, report.TTFTMean).Mean-1), digits)
			}
			t.Add(fmt.Sprintf("load %g, a burst of %.0f %%: the detector takes 30 %% or more off the mean of `bailian`", load, 100*burstShare),
				fmt.Sprintf("%+.0f %%", change("bailian", 0)), verdict(change("bailian", 0) <= -30))
			for _, p := range []string{"finish", "lmetric"} {
				t.Add(fmt.Sprintf("load %g, a burst: and moves `%s` by less than 5 %%", load, p), fmt.Sprintf("%+.1f %%", change(p, 1)), verdict(math.Abs(change(p, 1)) < 5))
			}
		}
		return fmt.Sprintf("**%s**\n\n%s", s.name, &t)
	}) + "\n" + b.claimsOfAllRows()
}

// claimsOfAllRows are those on every row of every table that has both policies.
func (b *book) claimsOfAllRows() string {
	worst, rows, where := 0.0, 0, ""
	both, tokens := 0.0, 0.0
	for _, sc := range b.prefillScenarios() {
		o := b.prefill(sc, "lmetric", "finish")
		if o.refused != "" {
			continue
		}
		rows++
		ratio, low, _ := o.versus("finish", "lmetric")
		if low > worst {
			worst, where = low, sc.String()
		}
		if sc.both {
			both, tokens = max(both, ratio), max(tokens, o.ratioOf("finish", "lmetric", report.TPOTMean))
		}
	}
	t := report.Markdown{Head: []string{"claim", "came out", ""}, Text: 2}
	t.Add(fmt.Sprintf("in none of %d rows does the lower end of the interval of `finish` pass %.2f of `lmetric`", rows, surely), fmt.Sprintf("%.2f (%s)", worst, where), verdict(worst <= surely))
	t.Add("engines that also decode: mean TTFT of `finish` at most 1.00 of `lmetric`'s in every row", fmt.Sprintf("%.2f at most", both), verdict(both <= 1))
	t.Add("engines that also decode: and its mean TPOT at most 1.00", fmt.Sprintf("%.2f at most", tokens), verdict(tokens <= 1))
	return "**all tables**\n\n" + t.String()
}

// prefillScenarios are those of all tables.
func (b *book) prefillScenarios() (all []prefillScenario) {
	for _, s := range b.prefillSources() {
		for _, load := range prefillLoads {
			all = append(all, prefillScenario{on: s, load: load})
		}
		for _, load := range bothLoads {
			all = append(all, prefillScenario{on: s, load: load, both: true})
		}
		for _, load := range curveLoads {
			if s.shares() {
				all = append(all, prefillScenario{on: s, load: load, beta2: curve})
			}
		}
	}
	for _, s := range b.sharing() {
		for _, slow := range slownesses {
			all = append(all, prefillScenario{on: s, load: 0.7, slow: slow})
		}
		for _, size := range cacheSizes {
			for _, told := range wrongly {
				all = append(all, prefillScenario{on: s, load: 0.7, capacity: size, told: told})
			}
		}
		for _, load := range burstLoads {
			all = append(all, prefillScenario{on: s, load: load, burst: burstShare}, prefillScenario{on: s, load: load, burst: burstShare, unwatch: true})
		}
		for _, load := range pushLoads {
			for _, push := range pushes {
				all = append(all, prefillScenario{on: s, load: load, push: push})
			}
		}
	}
	return all
}
