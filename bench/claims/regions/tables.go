package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/regions"
	"evenkeel/bench/tools/page"
)

var (
	presets  = []string{"l4-llama8b", "l4-llama8b-24k", "a100-mistral7b"}
	crossed  = []string{"multi-turn", "multi-turn-uneven", "tot", "skew", "diurnal"}
	original = []string{"l4-llama8b", "a100-mistral7b"} // with the source's KV
)

const (
	ours   = "finish"
	skylb  = "skylb:push=sp-p"
	blind  = "finish:push=blind"
	seldom = "finish:probe_ms=2000"

	// SkyLB's own choice of a replica, the longest match, in place of the server's.
	match      = "skylb:push=sp-p,prefill=bailian:lambda=1"
	blindMatch = "skylb:push=blind,prefill=bailian:lambda=1"
)

// defaults holds our default against what it must beat.
func (b *book) defaults() string {
	var rows [][]string
	arms := []string{ours, skylb, "region-local", "skylb-local", blind, seldom}
	for _, name := range []string{"skew", "diurnal", "multi-turn"} {
		for _, preset := range presets {
			o := b.on(name, preset, arms...)
			add := func(o *page.Outcome, what, other string, want target) {
				met, ttft, tokens := "met", o.Ratio(ours, other, report.TTFTMean), o.Ratio(ours, other, report.TokensPerS)
				if !want.met(ttft, tokens) {
					met = "**not met**"
				}
				rows = append(rows, []string{name, preset, what, page.Ratio(ttft), page.Ratio(tokens), want.String(), met})
			}
			if name == "multi-turn" {
				for _, other := range []string{"region-local", "skylb-local"} {
					add(o, other, other, target{mostTTFT: 1, leastTokens: 0.98})
				}
			} else {
				for _, as := range []string{name, name + ", " + inPrefill} {
					add(b.on(as, preset, ours, skylb), strings.Replace(as, name, skylb, 1), skylb, target{mostTTFT: 0.75, leastTokens: 1.05})
				}
			}
			add(o, blind, blind, target{leastTTFT: 0.97, mostTTFT: 1.03, leastTokens: 0.97, mostTokens: 1.03})
			add(o, "itself, probed every 2 s instead of 0.5", seldom, target{leastTTFT: 0.87})
		}
	}
	return b.command("skew", presets[0], arms...) + "\n\n" +
		table("scenario | engines | `finish` against | mean TTFT, times | tokens/s, times | target | verdict", rows)
}

// target is what two ratios must keep to; 0: no limit.
type target struct{ leastTTFT, mostTTFT, leastTokens, mostTokens float64 }

// met holds the ratios, as they are printed, against the limits.
func (t target) met(ttft, tokens float64) bool {
	within := func(v, least, most float64) bool {
		v = page.Rounded(v, 2)
		return v >= least && (most == 0 || v <= most)
	}
	return within(ttft, t.leastTTFT, t.mostTTFT) && within(tokens, t.leastTokens, t.mostTokens)
}

func (t target) String() string {
	limits := func(least, most float64) string {
		switch {
		case least > 0 && most > 0:
			return fmt.Sprintf("%.2f to %.2f", least, most)
		case least > 0:
			return fmt.Sprintf("≥ %.2f", least)
		case most > 0:
			return fmt.Sprintf("≤ %.2f", most)
		}
		return "any"
	}
	return limits(t.leastTTFT, t.mostTTFT) + ", " + limits(t.leastTokens, t.mostTokens)
}

// Variants that are also held against claims.
const (
	inPrefill = "a request pending until it is prefilled"
	onePass   = "one prefill for all that wait"
	pauses    = "300 ms between turns"
)

// variant is a scenario with something else in it.
type variant struct {
	name   string
	change func(s *regions.Scenario)
}

// variants are what the sources leave open, each chosen differently.
var variants = []variant{
	{inPrefill, func(s *regions.Scenario) { s.Engine.PrefillPends = true }},
	{onePass, func(s *regions.Scenario) { s.Engine.OnePass = true }},
	{pauses, ofLoads(func(l *regions.Load) { l.ThinkMs = 300 })},
}

func ofLoads(change func(l *regions.Load)) func(s *regions.Scenario) {
	return func(s *regions.Scenario) {
		for i := range s.Regions {
			change(&s.Regions[i].Load)
		}
	}
}

// claims are C1 to C11.
func (b *book) claims() string {
	var rows [][]string
	add := func(id, source, want, measured string, ok, asPublished bool) {
		said := verdict(ok)
		if ok && !asPublished {
			said = weaker
		}
		rows = append(rows, []string{id, source, want, measured, said})
	}
	balancers := []string{"rr", "central-least-load", "ch", "prefix-blind"}
	all := append([]string{ours, skylb}, balancers...)
	var overRR, overLL, overPrefix, best, worst, theirs span
	var pausedRR, pausedLL, pausedBest, pausedWorst span
	var roomyBest, roomyWorst span // where memory is not short in all regions
	for _, name := range crossed {
		for _, preset := range presets {
			o := b.on(name, preset, all...)
			overRR.add(o.Ratio(skylb, "rr", report.TokensPerS))
			overLL.add(o.Ratio(skylb, "central-least-load", report.TokensPerS))
			overPrefix.add(o.Ratio(skylb, "prefix-blind", report.TokensPerS))
			least, most := extremes(o, balancers)
			mine := o.Of(ours, report.TTFTMean).Mean
			best.add(least / mine)
			worst.add(most / mine)
			if slices.Contains(original, preset) {
				roomyBest.add(least / mine)
				roomyWorst.add(most / mine)
			}
			theirs.add(least / o.Of(skylb, report.TTFTMean).Mean)

			o = b.on(name+", "+pauses, preset, all...)
			pausedRR.add(o.Ratio(skylb, "rr", report.TokensPerS))
			pausedLL.add(o.Ratio(skylb, "central-least-load", report.TokensPerS))
			least, most = extremes(o, balancers)
			mine = o.Of(ours, report.TTFTMean).Mean
			pausedBest.add(least / mine)
			pausedWorst.add(most / mine)
		}
	}
	add("C1", "S0: 1.12 to 2.06 times the throughput of single balancers", "skylb ≥ 1.05 of rr and ≥ 0.95 of least-load, in each of 15 cells",
		fmt.Sprintf("%s of rr, %s of least-load; %s of prefix-blind (no target). With %s %s of rr, %s of least-load", overRR, overLL, overPrefix,
			pauses, pausedRR, pausedLL),
		overRR.least() >= 1.05 && overLL.least() >= 0.95, overRR.least() >= 1.12)
	add("C2", "S0: 1.74 to 6.30 times lower latency", "TTFT of the best single balancer ≥ 1.2 times that of finish, of the worst ≥ 2",
		fmt.Sprintf("best %s, worst %s (best over skylb: %s); without the 24k engines best %s, worst %s. With %s best %s, worst %s", best, worst,
			theirs, roomyBest, roomyWorst,
			pauses, pausedBest, pausedWorst), best.least() >= 1.2 && worst.least() >= 2, best.least() >= 1.74)

	var p90, p90OnePass span
	for _, preset := range original {
		o, together := b.on("tot", preset, ours, "rr", "prefix-blind"), b.on("tot, "+onePass, preset, ours, "rr", "prefix-blind")
		for _, a := range []string{"rr", "prefix-blind"} {
			p90.add(o.Ratio(ours, a, report.TTFTP90))
			p90OnePass.add(together.Ratio(ours, a, report.TTFTP90))
		}
	}
	add("C3", "S0: P90 TTFT is 10 to 23 % of the baselines'", "finish ≤ 0.50 of rr and prefix-blind on tot",
		fmt.Sprintf("%s; with %s %s", p90, onePass, p90OnePass),
		p90.most() <= 0.5, p90.most() <= 0.23)

	one := []string{blindMatch, match, "finish:push=blind", "finish:push=sp-p", "finish:push=sp-e", "finish:push=sp-o,max_outstanding=8",
		"prefix-blind"}
	alone := b.on("one-region", presets[0], one...)
	to := func(a, c string) float64 { return alone.Ratio(a, c, report.TokensPerS) }
	spp, spe, spo8 := to("finish:push=sp-p", "finish:push=blind"), to("finish:push=sp-e", "finish:push=sp-p"),
		to("finish:push=sp-p", "finish:push=sp-o,max_outstanding=8")
	add("C4", "S0: SP-P has 1.27 times the throughput of blind, 1.4 times that of SP-O; P90 TTFT 18 times lower than blind",
		"4 replicas, 30 clients, one region, local choice as in finish: SP-P within 10 % of blind, SP-E ≥ 0.98 of SP-P, SP-P ≥ 1.1 of SP-O(8)",
		fmt.Sprintf("%.2f, %.2f, %.2f. With the longest match alone as local choice SP-P has %.2f times blind's throughput, and %.2f times that "+
			"of SGLang's router",
			spp, spe, spo8, to(match, blindMatch), to(match, "prefix-blind")), spp >= 0.9 && spp <= 1.1 && spe >= 0.98 && spo8 >= 1.1, spp >= 1.27 &&
			spo8 >= 1.4)

	sk := b.on("skew", presets[0], skylb, "skylb-local", "region-local", "finish:replicas=9").Ratio
	gain := sk(skylb, "skylb-local", report.TokensPerS)
	p, tokens := sk("finish:replicas=9", "region-local", report.TTFTP90), sk("finish:replicas=9", "region-local", report.TokensPerS)
	add("C5", "S0: 1.07 to 1.18 over region-local; 9 replicas do as 12",
		"skew: skylb ≥ 1.03 of itself without peers; finish on 9: P90 TTFT ≤ region-local's on 12, tokens/s ≥ 0.84",
		fmt.Sprintf("%.2f; on 9: P90 TTFT %.2f, tokens/s %.2f", gain, p, tokens), gain >= 1.03 && p <= 1 && tokens >= 0.84, gain >= 1.07)

	var apart, apartOnePass span
	for _, preset := range original {
		for scenario, to := range map[string]*span{"tot-uniform": &apart, "tot-uniform, " + onePass: &apartOnePass} {
			to.add(b.on(scenario, preset, ours, "ch").Ratio("ch", ours, report.TokensPerS))
		}
	}
	add("C6", "S0: uniform trees favour consistent hashing by 2 %", "ch within 10 % of finish in tokens/s",
		fmt.Sprintf("%s; with %s %s", apart, onePass, apartOnePass),
		apart.least() >= 0.9 && apart.most() <= 1.1, true)

	share := b.peaks()
	rows = append(rows, []string{
		"C7", "S0: provisioning for the global peak saves 40.5 %", "no target: the sinusoids were made so",
		fmt.Sprintf("%.1f %% fewer clients at the peak of all than at all peaks", 100*(1-share)), "–",
	})

	g := b.on("gorgo", "a100-mistral7b", ours, "gorgo", "central-gorgo", "central-least-load").Ratio
	central, mine := g("central-least-load", "central-gorgo", report.TTFTP50), g("central-least-load", ours, report.TTFTP50)
	add("C8", "S1: a central GORGO has 2.5 times lower median TTFT", "least-load over central-gorgo ≥ 1.2, over finish ≥ 2",
		fmt.Sprintf("%.2f, %.2f", central, mine),
		central >= 1.2 && mine >= 2, central >= 2.5)
	mean, p99, rate := g("central-least-load", "gorgo", report.TTFTMean), g("central-least-load", "gorgo", report.TTFTP99),
		g("gorgo", "central-least-load", report.TokensPerS)
	add("C9", "S1: distributed GORGO has 4.0 times lower mean, 15 times lower P99 TTFT, and 43 % fewer requests done",
		"both ≥ 2, tokens/s ≥ 1.00 at equal limits", fmt.Sprintf("mean %.2f, P99 %.2f, tokens/s %.2f", mean, p99, rate), mean >= 2 && p99 >= 2 &&
			rate >= 1, mean >= 4 && p99 >= 15)

	var noWait, noRTT span
	for _, preset := range presets {
		for _, name := range []string{"skew", "diurnal"} {
			noWait.add(b.on(name, preset, ours, "finish:without=wait").Ratio("finish:without=wait", ours, report.TTFTMean))
		}
		noRTT.add(b.on("multi-turn", preset, ours, "finish:without=rtt").Ratio("finish:without=rtt", ours, report.TTFTMean))
	}
	add("C10", "ours: the peer's wait and the round trip belong into the cost",
		"without the wait TTFT ≥ 2 times on skew and diurnal; without the round trip ≥ 1.01 times on multi-turn",
		fmt.Sprintf("without wait %s, without RTT %s", noWait, noRTT), noWait.least() >= 2 && noRTT.least() >= 1.01, true)
	var faster, more span
	for _, preset := range presets {
		o := b.on("skew", preset, "gorgo", skylb)
		faster.add(o.Ratio("gorgo", skylb, report.TTFTMean))
		more.add(o.Ratio("gorgo", skylb, report.TokensPerS))
	}
	rows = append(rows, []string{
		"C11", "none: neither paper has the other's balancer", "no target: both on skew, skylb with push=sp-p",
		fmt.Sprintf("gorgo over skylb: mean TTFT %s, tokens/s %s", faster, more), "–",
	})
	return fmt.Sprintf("`make claim NAME=regions`, %d seeds\n\n", b.Seeds) + table("claim | source | in shape if | measured | verdict", rows)
}

// extremes are the least and the most mean TTFT of these arms.
func extremes(o *page.Outcome, arms []string) (least, most float64) {
	least = math.Inf(1)
	for _, a := range arms {
		v := o.Of(a, report.TTFTMean).Mean
		least, most = min(least, v), max(most, v)
	}
	return least, most
}

// peaks is the peak of all clients over the sum of the regions' peaks.
func (b *book) peaks() float64 {
	s, err := regions.Named("diurnal", presets[0])
	if err != nil {
		b.Fail(err)
		return 0
	}
	most, sum := s.Peaks()
	return float64(most) / float64(sum)
}

// sweeps are the policies that forward, and the parameters that C10 wants printed.
func (b *book) sweeps() string {
	var out strings.Builder
	for _, arms := range [][]string{
		{ours, "gorgo", skylb},
		{"finish:probe_ms=100", ours, seldom, "skylb:push=sp-p,probe_ms=100", skylb, "skylb:push=sp-p,probe_ms=2000"},
		{"skylb:push=sp-p,tau=0", skylb, "skylb:push=sp-p,tau=16", "skylb:push=sp-p,tau=1000"},
		{"finish:max_unanswered=2", "finish:max_unanswered=4", ours, "finish:max_unanswered=16", blind, "finish:push=sp-o,max_outstanding=24", "finish:push=sp-o"},
		{"finish:load=0", ours, "finish:b_ms=0.3", "finish:w=2", "finish:min_gain_ms=0", "finish:min_gain_ms=100"},
	} {
		var rows [][]string
		for _, preset := range original {
			o := b.on("skew", preset, arms...)
			for _, a := range arms {
				v := func(m report.Metric) string { return fmt.Sprintf("%.0f", o.Of(a, m).Mean) }
				rows = append(rows, []string{preset, page.Code(a), v(report.TTFTMean), v(report.TokensPerS), v(regions.Forwards)})
			}
		}
		out.WriteString("\n" + b.command("skew", presets[0], arms...) + "\n\n" +
			table("engines | policy | TTFT mean, ms | tokens/s | forwards", rows))
	}
	return out.String()
}

// cost is how many replicas give the same latency.
func (b *book) cost() string {
	var out strings.Builder
	alone := []int{9, 12, 15, 18, 21, 24, 27, 30}
	together := []int{6, 7, 8, 9, 10, 11, 12}
	arms := func(name string, counts []int) (list []string) {
		for _, n := range counts {
			list = append(list, fmt.Sprintf("%s:replicas=%d", name, n))
		}
		return list
	}
	for _, name := range []string{"skew", "diurnal"} {
		local, shared := arms("region-local", alone), arms(ours, together)
		o := b.on(name, presets[0], slices.Concat(local, shared)...)
		p90Of := func(a string) float64 { return o.Of(a, report.TTFTP90).Mean }
		var rows [][]string
		for i, a := range shared {
			p90 := p90Of(a)
			same := fmt.Sprintf("more than %d", alone[len(alone)-1])
			saved := "-"
			for k, l := range local {
				if p90Of(l) <= p90 {
					same, saved = fmt.Sprint(alone[k]), fmt.Sprintf("%.0f %%", 100*(1-float64(together[i])/float64(alone[k])))
					break
				}
			}
			rows = append(rows,
				[]string{fmt.Sprint(together[i]), fmt.Sprintf("%.0f", p90), fmt.Sprintf("%.0f", o.Of(a, report.TokensPerS).Mean), same, saved})
		}
		var others []string
		for k, l := range local {
			others = append(others, fmt.Sprintf("%d: %.0f ms", alone[k], p90Of(l)))
		}
		out.WriteString("\n" + b.command(name, presets[0], slices.Concat(shared, local)...) + "\n\n" +
			table("replicas with `finish` | TTFT p90, ms | tokens/s | `region-local` needs | saved", rows) +
			"\nTTFT p90 of `region-local` by replicas: " + strings.Join(others, ", ") + ".\n")
	}
	return out.String()
}

// faults are what breaks, and that no invariant does.
func (b *book) faults() string {
	arms := []string{ours, "gorgo", skylb}
	var rows [][]string
	for _, name := range []string{"dies", "partition", "drains", "version"} {
		o := b.on(name, presets[0], arms...)
		for _, a := range arms {
			v := func(m report.Metric) string { return fmt.Sprintf("%.1f", o.Of(a, m).Mean) }
			rows = append(rows, []string{name, page.Code(a), v(report.OK), v(regions.Forwards), v(regions.Fallbacks), v(report.Failed),
				v(regions.Lost), v(regions.Violations)})
		}
	}
	return b.command("dies", presets[0], arms...) + "\n\n" +
		table("fault of region b | policy | answered | forwards | fell back | failed | lost | invariants broken", rows)
}
