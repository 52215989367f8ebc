package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
	"evenkeel/dispatcher/policy"
)

// figures are idle share in percent and tokens a second.
type figures struct{ idle, throughput float64 }

// referenceRows are the policies of the reference, as a user of evenkeel writes
// them.
var referenceRows = []string{
	"jsq", "jsq-kv", "pjsq-kv", "br0:paper", "br0", "brh:horizon=80", "brh:horizon=80,predictor=oracle",
}

// referenceRun is a scenario with the figures of an independent simulator of the
// same model, one for each of referenceRows.
type referenceRun struct {
	at   func(*policytables.Traces) scenario
	gave []figures
}

var referenceRuns = []referenceRun{
	{
		func(s *policytables.Traces) scenario { return open(s.Mooncake, 8, 0.7) },
		[]figures{{35.8, 932}, {20.9, 933}, {21.6, 933}, {32.4, 934}, {21.6, 933}, {21.2, 933}, {21.2, 933}},
	},
	{
		func(s *policytables.Traces) scenario { return open(s.Mooncake, 8, 0.9) },
		[]figures{{33.8, 1073}, {31.1, 1087}, {32.1, 1092}, {17.1, 1202}, {17.2, 1198}, {17.3, 1197}, {16.8, 1199}},
	},
	{
		func(s *policytables.Traces) scenario {
			return scenario{on: s.Mooncake, ranks: 8, slots: 10, pool: poolOfRank * 8}
		},
		[]figures{{38.0, 818}, {32.8, 830}, {37.1, 822}, {11.5, 949}, {14.3, 935}, {13.8, 937}, {13.4, 936}},
	},
	{
		func(s *policytables.Traces) scenario { return open(s.Azure, 8, 0.9) },
		[]figures{{18.9, 1941}, {13.3, 1940}, {14.1, 1942}, {14.1, 1943}, {11.5, 1943}, {11.9, 1943}, {12.6, 1943}},
	},
	{
		func(s *policytables.Traces) scenario { return closed(s.Azure200, 16) },
		[]figures{{10.1, 4301}, {10.0, 4301}, {10.5, 4299}, {7.0, 4312}, {7.0, 4312}, {6.4, 4314}, {5.6, 4317}},
	},
	{
		wide,
		[]figures{{49.0, 7719}, {34.5, 8489}, {49.2, 7695}, {18.7, 9893}, {20.0, 9811}, {20.2, 9805}, {14.8, 10110}},
	},
}

// wide is a group of 64 with the reference's pool, half as long as ours is for
// fewer ranks.
func wide(s *policytables.Traces) scenario {
	return scenario{on: s.Mooncake, ranks: 64, slots: slotsOfRank, pool: 2 * 64}
}

// referenceGuard is from which wait on the reference serves an entry first, in
// steps; evenkeel's guard counts milliseconds.
const referenceGuard = 1000

// guarded gives a policy that has a guard another age for it.
func guarded(name string, ms int) (string, error) {
	spec, err := policy.ParseSpec(name)
	if err != nil || !spec.Accepts("max_age_ms") {
		return name, err
	}
	_, err = spec.With("max_age_ms", strconv.Itoa(ms))
	if strings.Contains(name, "=") {
		return fmt.Sprintf("%s,max_age_ms=%d", name, ms), err
	}
	return fmt.Sprintf("%s:max_age_ms=%d", name, ms), err
}

// guarded is guarded, of policies that there are.
func (b *book) guarded(name string, ms int) string {
	spec, err := guarded(name, ms)
	if err != nil {
		b.Fail(err)
	}
	return spec
}

// guardOf is the reference's guard in a scenario, in ms by its mean step.
func (b *book) guardOf(sc scenario) int {
	o := b.at(sc, ours)
	if o.Refused != "" {
		return 0
	}
	return 1000 * int(math.Round(referenceGuard*o.Of(ours, report.StepMean).Mean/1000))
}

func (b *book) reference() string {
	if b.Traces.Mooncake == nil {
		return notAsked
	}
	return page.Joined(referenceRuns, b.besideReference)
}

func (b *book) besideReference(r referenceRun) string {
	sc := r.at(b.Traces)
	guard := b.guardOf(sc)
	policies := make([]string, len(referenceRows))
	for i, p := range referenceRows {
		policies[i] = b.guarded(p, guard)
	}
	o := b.at(sc, policies...)
	if o.Refused != "" {
		return policytables.LeftOut(sc, o.Refused)
	}
	show := func(c page.Column) page.Cells[int] {
		return page.Cells[int]{Title: c.Title, Of: func(i int) string { return c.Show(o.Of(policies[i], c.Metric)) }}
	}
	rows := make([]int, len(policies))
	for i := range rows {
		rows[i] = i
	}
	table := page.Rows("policy", rows, func(i int) string { return page.Code(referenceRows[i]) },
		show(idle), page.Cells[int]{Title: "reference", Of: func(i int) string { return fmt.Sprintf("%.1f", r.gave[i].idle) }},
		show(throughput), page.Cells[int]{Title: "reference", Of: func(i int) string { return report.Grouped(r.gave[i].throughput, 0) }},
		show(imbalance), show(longestWait))
	return fmt.Sprintf("**%s; guard of %d steps, `max_age_ms=%d`**\n\n%s%s", sc, referenceGuard, guard, table,
		page.Fenced(b.command(sc, policies)))
}
