// Command deployments says what evenkeel gains in front of models on GPUs, beside what their
// engines do by themselves: loads that are drawn at random are served by virtual ranks that step as
// those of each deployment. The same seed gives the same table to the bit.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
)

// judgement is the seed of the tables in the docs. Policies are developed on other ones.
const judgement = 20261128

const (
	document = "docs/results/deployments.md"
	readme   = "README.md"
	target   = "claim NAME=deployments"
)

type options struct {
	seed   uint64
	loads  int
	out    string
	readme string
}

func main() {
	testbed.Main("deployments", testbed.Page(testbed.Parsed(parse, options.run), []string{"-out", document, "-readme", readme}))
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("deployments", flag.ContinueOnError)
	f.Uint64Var(&o.seed, "seed", judgement, "of the loads")
	f.IntVar(&o.loads, "loads", 32, "how many for each deployment")
	f.StringVar(&o.out, "out", "", "document to write the table into; empty: it is printed")
	f.StringVar(&o.readme, "readme", "", "document to write its short form into; empty: none")
	if err := testbed.Parse(f, args); err != nil {
		return o, err
	}
	if o.loads < 1 {
		return o, fmt.Errorf("-loads %d: there must be one", o.loads)
	}
	return o, nil
}

// row is a deployment of the table. These were chosen before any of them was simulated: models that
// many serve, both engines, both kinds of ranks, GPUs of each generation, and one with sparse
// attention. No decode rank is one of SGLang: its pairs need the rank before the prefill, and how
// that is, the claim bind says.
type row struct {
	law  string
	both bool // its ranks prefill and decode
}

var rows = []row{
	{"DeepSeek-V3,vllm,H200,32", false},
	{"DeepSeek-V3,vllm,GB200,32", false},
	{"DeepSeek-V3.2,vllm,B200,16", false},
	{"Qwen3-235B-A22B-FP8,vllm,H200,8", false},
	{"Qwen3-235B-A22B-FP8,vllm,H200,8", true},
	{"gpt-oss-120b,vllm,B200,8", true},
	{"DeepSeek-V3,sglang,H200,16", true},
	{"Kimi-K2.5,vllm,GB200,16", true},
}

// pair is what both make of a load.
type pair struct {
	number       int
	load         fmt.Stringer
	theirs, ours report.Sample
}

func (o options) run(ctx context.Context, out io.Writer) error {
	all := make([]judged, len(rows))
	for i, r := range rows {
		e, err := laws.Find(r.law)
		if err != nil {
			return err
		}
		all[i] = judged{row: r, law: e}
	}
	if err := tune(ctx, all, os.Stderr); err != nil {
		return err
	}
	got, err := report.Trials(ctx, len(rows), o.loads, func(done, total int) {
		fmt.Fprintf(os.Stderr, "%d of %d loads\n", done, total)
	}, func(ctx context.Context, i int, seed uint64) ([]pair, error) {
		if all[i].both {
			return prefillsToo(ctx, o.seed, int(seed)-1, all[i].law, 1, all[i].plan.all()...)
		}
		p, err := decodes(ctx, o.seed, int(seed)-1, all[i].law, ours)
		return []pair{p, p, p}, err // no flag of these engines changes what a rank that decodes gets
	})
	if err != nil {
		return err
	}
	for i := range all {
		for _, of := range got[i] {
			for k, p := range of {
				if p.ours[report.TokensPerS] <= 0 || p.theirs[report.TokensPerS] <= 0 {
					return fmt.Errorf("load %s: one of both made no token", p.load)
				}
				all[i].pairs[k] = append(all[i].pairs[k], p)
			}
		}
	}
	if _, err := report.Trials(ctx, len(all), 1, nil, func(ctx context.Context, i int, _ uint64) (struct{}, error) {
		return struct{}{}, all[i].playAgain(ctx, o.seed)
	}); err != nil {
		return err
	}
	err = page.Show(out, o.out, target, "deployments", "Models on GPUs", tables(all, o.seed))
	if o.readme != "" {
		err = errors.Join(err, page.Write(o.readme, target, "deployments", "Models on GPUs", short(all)))
	}
	return err
}

// playAgain plays the load with the least gain once more. On ranks that decode, less of the KV
// stays free for requests that grow. On ranks that do both, the load lasts longer: where more comes
// than the ranks can do, the beginning and the end count for much.
func (j *judged) playAgain(ctx context.Context, seed uint64) (err error) {
	number := j.worst().number
	if j.both {
		j.changed = fmt.Sprintf("%d times as long", longer)
		var again []pair
		if again, err = prefillsToo(ctx, seed, number, j.law, longer, j.plan.atTheirs); err == nil {
			j.again = again[0]
		}
	} else {
		j.changed = page.Code(lessFree)
		j.again, err = decodes(ctx, seed, number, j.law, lessFree)
	}
	return err
}

const (
	longer   = 4
	lessFree = ours + ":watermark=0.02"
)

// decodes plays a load to ranks that decode, and that get a request after its prefill.
func decodes(ctx context.Context, seed uint64, number int, e *laws.Entry, policy string) (pair, error) {
	l := draw.Served(seed, number, e)
	p := pair{number: number, load: l}
	for _, side := range []struct {
		policy string
		into   *report.Sample
	}{{e.Balances(), &p.theirs}, {policy, &p.ours}} {
		plan := l.Plan([]string{side.policy}, 0)
		got, err := plan.RunAlone(ctx, 1)
		if err != nil {
			return p, fmt.Errorf("%s: %w", l, err)
		}
		*side.into = report.Sample{}
		for m, v := range got {
			(*side.into)[m] = v.Mean
		}
	}
	return p, nil
}

const ours = "evenkeel"
