package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/regions"
	"evenkeel/internal/namedargs"
)

// defaultGeoPolicies is the default of --policies for --tier geo.
const defaultGeoPolicies = "skylb:push=sp-p,finish,gorgo,skylb-ch,region-local,central-least-load,rr"

// simulateGeo compares policies that choose between regions on a scenario, and prints a table or
// JSON.
func (c *simulateCmd) simulateGeo(ctx context.Context, std streams) error {
	c.Scenario, c.Policies = cmp.Or(c.Scenario, "skew"), cmp.Or(c.Policies, defaultGeoPolicies)
	scenario, err := regions.Read(c.Scenario, c.Geo.Preset)
	if err != nil {
		return fmt.Errorf("--scenario: %w", err)
	}
	show := newLineProgress(std.err)
	plan := &regions.Plan{Scenario: scenario, Arms: namedargs.List(c.Policies), Seeds: c.Seeds, Progress: func(done, total int) {
		show.update(done, total, fmt.Sprintf("%d of %d runs done", done, total))
	}}
	began := time.Now()
	runs, err := plan.Run(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return (&report.Report{Runs: runs, Bound: report.Metrics{}}).JSON(std.out)
	}
	var b bytes.Buffer
	geoTable(&b, runs, c.Seeds)
	fmt.Fprintf(&b, "\n%.0f s in all. Again: %s\n", time.Since(began).Seconds(), c.geoCommandLine())
	writeWrapped(&b, "± is the 95 % interval of the mean over seeds. Clients send a request when the one before it is answered: throughput "+
		"follows latency. "+
		"TTFT and E2E are as a client sees them, its own round trip counted. Measured after the warm-up.")
	_, err = b.WriteTo(std.out)
	return err
}

// geoTable writes the table of the results: the columns of the tables in docs/results/regions.md,
// and columns and lines for what went wrong.
func geoTable(b *bytes.Buffer, runs []report.Run, seeds int) {
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "policy\ttokens/s\tTTFT mean\tp50\tp90\tp99, ms\tE2E mean, s\tp99\thits\tforwards\tegress, MB\tUSD\tspread\tfell "+
		"back\tlost\tfailed\tviolations\t")
	for _, r := range runs {
		m := r.Metrics
		// show returns a metric times scale as text; "-": it was not measured. The two main metrics get
		// their interval, too.
		show := func(name report.Metric, scale float64, digits int) string {
			v, ok := m[name]
			if !ok {
				return "-"
			}
			text := fmt.Sprintf("%.*f", digits, v.Mean*scale)
			if name == report.TokensPerS || name == report.TTFTMean {
				text += fmt.Sprintf(" ± %.*f", digits, v.Interval(seeds)*scale)
			}
			return text
		}
		fmt.Fprintln(w, strings.Join([]string{
			r.Policy, show(report.TokensPerS, 1, 0), show(report.TTFTMean, 1, 0), show(report.TTFTP50, 1, 0), show(report.TTFTP90, 1, 0),
			show(report.TTFTP99, 1, 0),
			show(regions.E2EMean, 1e-3, 1), show(report.E2EP99, 1e-3, 1), show(report.HitRatio, 1, 2), show(regions.Forwards, 1, 0),
			show(regions.Egress, 1e-6, 1),
			show(regions.EgressUSD, 1, 5), show(regions.Spread, 1, 2), show(regions.Fallbacks, 1, 0),
			show(regions.Lost, 1, 0), show(report.Failed, 1, 0), show(regions.Violations, 1, 0),
		}, "\t")+"\t")
	}
	_ = w.Flush() // writing to a buffer cannot fail
	for _, r := range runs {
		if v := r.Metrics[regions.Violations].Mean; v > 0 || math.IsNaN(v) { // NaN must not pass for none
			fmt.Fprintf(b, "%s broke an invariant: a request ended twice or never, was forwarded twice, or ran three times.\n", r.Policy)
		}
	}
}

// geoCommandLine returns the command line that gives the same numbers again.
func (c *simulateCmd) geoCommandLine() string {
	line := "evenkeel simulate --tier geo --scenario " + c.Scenario
	if c.Geo.Preset != "" {
		line += " --preset " + c.Geo.Preset
	}
	return fmt.Sprintf("%s --policies %s --seeds %d", line, c.Policies, c.Seeds)
}
