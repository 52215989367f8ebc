// Command regret says how far each policy is from the best one on loads that are drawn at random:
// every property of a load is drawn from a range, and a fixed set of policies serves the
// same requests in the barrier simulator. The same seed gives the same table to the bit,
// but for what a tick costs.
package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
)

// set is what the best is taken of: the policies with a guard, under which no request waits for
// ever.
var set = []string{"br0", "br0:window=64", "brh", "brh:window=64", "evenkeel"}

// beside the set are what people run, BalanceRoute's own form, and the default without some of its
// parts.
var beside = []string{vllmOwn, sglangOwn, "jsq-kv", "br0:paper", "evenkeel:ahead=false", "evenkeel:hold=0", "evenkeel:requests=false"}

// What engines do by themselves, or a router that counts requests: vLLM gives a request to the rank
// with fewest, SGLang to one after the other.
const vllmOwn, sglangOwn = "jsq", "rr"

// judgement is the seed of the tables in the docs. Policies are developed on other ones.
const judgement = 20261130

type options struct {
	seed  uint64
	loads int
	from  int
	out   string
	csv   string
	with  []string // policies beside the set
	lead  bool     // what sending ahead gains is judged, and nothing else
	rule  bool     // the rule of docs/fit.md is judged, and nothing else
}

func main() {
	testbed.Main("regret", testbed.Page(testbed.Parsed(parse, options.run), []string{"-out", document},
		[]string{"-ahead", "-loads", "48", "-out", document}, []string{"-rule", "-out", document}))
}

const document = "docs/results/regret.md"

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("regret", flag.ContinueOnError)
	f.Uint64Var(&o.seed, "seed", judgement, "of the loads")
	f.IntVar(&o.loads, "loads", 64, "how many")
	f.IntVar(&o.from, "from", 0, "number of the first load")
	f.StringVar(&o.out, "out", "", "document to write the tables into; empty: they are printed")
	f.StringVar(&o.csv, "csv", "", "file for what each policy made of each load")
	with := f.String("with", "", "more policies to judge beside the set, separated by blanks; none of them counts for what is best")
	f.BoolVar(&o.lead, "ahead", false,
		"only: what sending ahead gains on engines that pull KV as vLLM does, with more or fewer requests than slots")
	f.BoolVar(&o.rule, "rule", false, "only: how far the lowest of three rows is from what a load gains")
	if err := testbed.Parse(f, args); err != nil {
		return o, err
	}
	o.with = strings.Fields(*with)
	if o.loads < 1 {
		return o, fmt.Errorf("-loads %d: there must be one", o.loads)
	}
	return o, nil
}

// outcome is what a policy made of a load.
type outcome report.Metrics

func (o outcome) of(m report.Metric) float64 {
	if v, ok := o[m]; ok {
		return v.Mean
	}
	return math.NaN()
}

// trials are all policies on all loads.
type trials struct {
	seed     uint64
	policies []string
	shifts   []string // the policies that are run once more on each load, begun elsewhere
	loads    []*draw.Load
	of       [][]outcome // by load, then by policy
	shifted  [][]outcome // the same requests, begun elsewhere, under those
	known    map[share][]float64
}

// begunElsewhere are the policies that the page tells how much chance does to.
var begunElsewhere = []string{"jsq-kv", "evenkeel"}

func (o options) run(ctx context.Context, out io.Writer) error {
	switch {
	case o.lead:
		table, err := o.ahead(ctx)
		return o.print(out, "ahead", "Sending ahead", table, err)
	case o.rule:
		table, err := o.lowest(ctx)
		return o.print(out, "rule", "The lowest of three rows", table, err)
	}
	t := &trials{known: map[share][]float64{}, seed: o.seed, policies: slices.Concat(set, beside, o.with), shifts: begunElsewhere}
	for i := range o.loads {
		t.loads = append(t.loads, draw.Judged(o.seed, o.from+i))
	}
	if p := t.loads[0].Plan(t.policies, 0); p.Validate() != nil {
		return p.Validate() // such as a policy that there is not
	}
	if err := t.try(ctx, os.Stderr); err != nil {
		return err
	}
	if o.csv != "" {
		if err := t.raw(o.csv); err != nil {
			return err
		}
	}
	if o.out != "" {
		return t.write(o.out)
	}
	_, err := fmt.Fprintln(out, t.tables())
	return err
}

// print writes a table into its place in the document, or prints it where there is no document.
func (o options) print(out io.Writer, marker, title, table string, err error) error {
	if err != nil || o.out == "" {
		_, said := fmt.Fprintln(out, table)
		return errors.Join(err, said)
	}
	return page.Write(o.out, "claim NAME=regret", marker, title, table)
}

// try runs all, as many at once as there are processors.
func (t *trials) try(ctx context.Context, progress io.Writer) error {
	t.of, t.shifted = make([][]outcome, len(t.loads)), make([][]outcome, len(t.loads))
	_, err := report.Trials(ctx, len(t.loads), 1, nil, func(ctx context.Context, i int, _ uint64) (struct{}, error) {
		start := time.Now()
		if err := t.tryLoad(ctx, i); err != nil {
			return struct{}{}, fmt.Errorf("load %s: %w", t.loads[i], err)
		}
		_, err := fmt.Fprintf(progress, "%5.1f s  load %s\n", time.Since(start).Seconds(), t.loads[i])
		return struct{}{}, err
	})
	return err
}

func (t *trials) tryLoad(ctx context.Context, i int) error {
	for _, run := range []struct {
		policies []string
		shift    float64
		to       *[]outcome
	}{{t.policies, 0, &t.of[i]}, {t.shifts, 0.5, &t.shifted[i]}} {
		plan := t.loads[i].Plan(run.policies, run.shift)
		for _, p := range run.policies {
			one := plan
			one.Policies = []string{p}
			got, err := one.RunAlone(ctx, 1)
			if err != nil {
				return err
			}
			*run.to = append(*run.to, outcome(got))
		}
	}
	return nil
}

// write puts the tables into a page, and the plot into the folder img beside the folder of the
// page.
func (t *trials) write(path string) error {
	picture, err := t.plot()
	if err != nil {
		return err
	}
	pictures := filepath.Join(filepath.Dir(path), "..", "img")
	if err := os.MkdirAll(pictures, 0o755); err != nil {
		return err
	}
	if err := report.Replace(filepath.Join(pictures, "regret.svg"), picture); err != nil {
		return err
	}
	return page.Write(path, "claim NAME=regret", "regret", "Policies on random loads", t.tables())
}

// raw writes what each policy made of each load.
func (t *trials) raw(path string) error {
	var b bytes.Buffer
	w := csv.NewWriter(&b)
	head := []string{"load", "properties", "policy"}
	for _, m := range rawMetrics {
		head = append(head, string(m))
	}
	_ = w.Write(head) // into memory
	for i, l := range t.loads {
		for p, name := range t.policies {
			row := []string{strconv.Itoa(l.Number), l.String(), name}
			for _, m := range rawMetrics {
				row = append(row, strconv.FormatFloat(t.of[i][p].of(m), 'g', 6, 64))
			}
			_ = w.Write(row)
		}
	}
	w.Flush()
	return report.Replace(path, b.Bytes())
}

var rawMetrics = []report.Metric{
	report.TokensPerS, report.TPOTP50, report.TPOTP95, report.TTFTP50, report.TTFTP99, report.IdleShare, report.Imbalance, report.StepMean,
	report.Steps, report.OK,
	report.Preempted, report.Failed, report.TickMean, report.KVShare,
}
