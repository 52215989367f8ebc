package decode_test

import (
	"context"
	"fmt"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
)

// Eight ranks of sixteen slots on a real trace, as many requests in the system
// as there are slots and 32 more.
func ExamplePlan() {
	plan := decode.Plan{
		Source:   decode.Source{Trace: trace.Azure()},
		Requests: 3000,
		Fleet:    decode.Uniform(8, 16, 0),
		Load:     decode.Load{Pool: 32},
		Policies: []string{"jsq", "br0"},
		Seeds:    2,
	}
	result, err := plan.Run(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	jsq, br0 := result.Runs[0].Metrics[report.Imbalance].Mean, result.Runs[1].Metrics[report.Imbalance].Mean
	fmt.Println("br0 has less than half of the imbalance:", br0 < jsq/2)
	// Output: br0 has less than half of the imbalance: true
}

func ExampleParseScenario() {
	fleet, err := decode.ParseScenario([]byte(`
groups:
  - name: main
    ranks:
      - {count: 6}
      - {count: 2, slots: 8, cost: 1.5} # slower ones
      - {joins: 90s, leaves: step 20000}
`), decode.Uniform(1, 16, 0))
	if err != nil {
		fmt.Println(err)
		return
	}
	last := fleet.Groups[0].Ranks[8]
	fmt.Println(fleet.Ranks(), "ranks; the last joins after", last.Join.Ms/1000, "s and leaves at step", last.Leave.Step)
	// Output: 9 ranks; the last joins after 90 s and leaves at step 20000
}
