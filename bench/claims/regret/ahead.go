package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
)

// aheads are the default as it is, and without sending ahead.
var aheads = []string{"evenkeel", "evenkeel:ahead=false"}

// spares are how many requests more than slots the engines may run. The first ones pull at once,
// whatever runs.
var spares = []int{-1, 0, 1, 2, 4, 8}

// ahead says what sending ahead gains on engines that pull as vLLM does.
func (o options) ahead(ctx context.Context) (string, error) {
	var loads []*draw.Load
	for number := o.from; len(loads) < o.loads; number++ {
		if l := draw.Judged(o.seed, number); l.Lag() > 0 {
			loads = append(loads, l)
		}
	}
	of := make([][][2]outcome, len(loads)) // by load, then by spare
	_, err := report.Trials(ctx, len(loads), 1, nil, func(ctx context.Context, i int, _ uint64) (struct{}, error) {
		began := time.Now()
		for _, spare := range spares {
			var both [2]outcome
			for k, policy := range aheads {
				plan := loads[i].Plan([]string{policy}, 0)
				if spare >= 0 {
					plan.Fleet.Spare = &spare
				}
				got, err := plan.RunAlone(ctx, 1)
				if err != nil {
					return struct{}{}, fmt.Errorf("load %s: %w", loads[i], err)
				}
				both[k] = outcome(got)
			}
			of[i] = append(of[i], both)
		}
		_, err := fmt.Fprintf(os.Stderr, "%5.1f s  load %s\n", time.Since(began).Seconds(), loads[i])
		return struct{}{}, err
	})
	if err != nil {
		return "", err
	}
	m := page.Markdown{Text: 1, Head: []string{
		"an engine", "`ahead=true` over `ahead=false`: tokens/s, %", "least", "most", "TTFT p99, times", "TPOT p95, %",
		"`ahead=true` over the first row: tokens/s, %",
	}}
	for s, spare := range spares {
		times := func(f figure, k, against, than int) []float64 {
			values := make([]float64, len(loads))
			for i := range values {
				values[i] = of[i][s][k].of(f.metric) / of[i][than][against].of(f.metric)
			}
			return values
		}
		tokens := times(throughput, 0, 1, s)
		least, most := math.Inf(1), math.Inf(-1)
		for _, x := range tokens {
			least, most = min(least, x), max(most, x)
		}
		m.Add(spareName(spare), page.Percents(tokens), fmt.Sprintf("%+.1f", 100*(least-1)), fmt.Sprintf("%+.1f", 100*(most-1)),
			fmt.Sprintf("%.2f", geomean(times(first, 0, 1, s), all(len(loads)))), page.Percents(times(pace, 0, 1, s)),
			page.Percents(times(throughput, 0, 0, 0)))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "`go run ./bench/claims/regret -ahead -seed %d -loads %d`: the first %d loads whose KV takes a step or more to a rank, "+
		"in the geometric mean with the 95 %% interval.\n\n%s",
		o.seed, o.loads, o.loads, m.String())
	return b.String(), nil
}

func spareName(spare int) string {
	switch spare {
	case -1:
		return "pulls at once, and runs `slots` requests"
	case 0:
		return "vLLM, `max_num_seqs` = `slots`"
	default:
		return fmt.Sprintf("vLLM, `max_num_seqs` = `slots` + %d", spare)
	}
}
