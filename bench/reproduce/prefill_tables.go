package main

import (
	"fmt"
	"math"

	"evenkeel/bench/prefillsim"
	"evenkeel/bench/report"
)

func (b *book) prefillLoads() string {
	return b.eachPrefill(func(s *source) string {
		return joined(prefillLoads, func(load float64) string {
			return b.prefillTable(prefillScenario{on: s, load: load}, append(prefillsim.Policies(), own), prefillCols...)
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
	return b.eachPrefill(func(s *source) string {
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

var inBurst = []string{"lmetric", "finish", "ttft-sim", "bailian", "aibrix-filter", own}

func (b *book) prefillBurst() string {
	return b.eachPrefill(func(s *source) string {
		return joined([]float64{0.7, 0.85}, func(load float64) string {
			on, off := b.burst(s, load)
			if on.refused != "" {
				return "Left out: " + on.refused + ".\n"
			}
			t := report.Markdown{Head: []string{"policy", prefillMean.title + ", no detector", "with it", "of that", "p99, no detector", "with it",
				burstTTFT.title + ", no detector", "with it"}}
			for _, p := range inBurst {
				t.Add("`"+p+"`", prefillMean.show(off.of(p, report.TTFTMean)), prefillMean.show(on.of(p, report.TTFTMean)),
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

func (b *book) prefillBoth() string {
	return b.eachPrefill(func(s *source) string {
		return joined([]float64{0.5, 0.7}, func(load float64) string {
			return b.prefillTable(prefillScenario{on: s, load: load, both: true}, append(prefillsim.Policies(), own),
				prefillCols[0], prefillCols[2], tpotMean, tpot, prefillCols[3], prefillCols[4])
		})
	})
}

func (b *book) prefillPush() string {
	policies := []string{"lmetric", "finish", "bailian", "round-robin"}
	return b.eachPrefill(func(s *source) string {
		t := report.Markdown{Head: []string{"probes an engine may have", "load"}}
		for _, p := range policies {
			t.Head = append(t.Head, "`"+p+"`, "+prefillMean.title)
		}
		last := prefillScenario{on: s}
		for _, load := range []float64{0.7, 0.85} {
			for _, push := range []int{1, 2, 8, 1000} {
				last.load, last.push = load, push
				o := b.prefill(last, policies...)
				if o.refused != "" {
					return "Left out: " + o.refused + ".\n"
				}
				row := []string{fmt.Sprint(push), fmt.Sprint(load)}
				for _, p := range policies {
					row = append(row, prefillMean.show(o.of(p, report.TTFTMean)))
				}
				t.Add(row...)
			}
		}
		return fmt.Sprintf("**%s**\n\n%s%s", s.name, &t, fenced(b.prefillCommand(last, policies)))
	})
}

// prefillClaims holds what prefill.md and the issue expect against what came out.
func (b *book) prefillClaims() string {
	return b.eachPrefill(func(s *source) string {
		t := report.Markdown{Head: []string{"claim", "came out", ""}, Text: 2}
		for _, c := range []struct{ load, most float64 }{{0.7, 0.97}, {0.85, 0.95}} {
			o := b.prefill(prefillScenario{on: s, load: c.load}, "lmetric", "finish")
			if o.refused != "" {
				return "Left out: " + o.refused + ".\n"
			}
			ratio := func(m report.Metric) float64 { return o.ratioOf("finish", "lmetric", m) }
			t.Add(fmt.Sprintf("load %g: mean TTFT of `finish` at most %g of `lmetric`'s", c.load, c.most), fmt.Sprintf("%.3f", ratio(report.TTFTMean)),
				verdict(ratio(report.TTFTMean) <= c.most))
			t.Add(fmt.Sprintf("load %g: and its p99 not above", c.load), fmt.Sprintf("%.3f", ratio(report.TTFTP99)), verdict(ratio(report.TTFTP99) <= 1))
		}
		for _, load := range []float64{0.7, 0.85} {
			on, off := b.burst(s, load)
			change := func(p string) float64 { return on.of(p, report.TTFTMean).Mean/off.of(p, report.TTFTMean).Mean - 1 }
			t.Add(fmt.Sprintf("load %g, a burst of %.0f %%: the detector takes 30 %% or more off the mean of `bailian`", load, 100*burstShare),
				fmt.Sprintf("%+.0f %%", 100*change("bailian")), verdict(change("bailian") <= -0.3))
			for _, p := range []string{"finish", "lmetric"} {
				t.Add(fmt.Sprintf("load %g, a burst: and moves `%s` by less than 5 %%", load, p), fmt.Sprintf("%+.1f %%", 100*change(p)), verdict(math.Abs(change(p)) < 0.05))
			}
		}
		return fmt.Sprintf("**%s**\n\n%s", s.name, &t)
	})
}
