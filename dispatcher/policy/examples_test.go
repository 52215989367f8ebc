package policy_test

import (
	"fmt"

	"evenkeel/dispatcher/policy"
)

func ExampleParse() {
	p, err := policy.Parse("br0:theta=0")
	if err != nil {
		fmt.Println(err)
		return
	}
	s := policy.Snapshot{
		Workers: []policy.Worker{
			{ID: 0, Free: 1, Up: true, Running: []policy.Request{{Prompt: 4000, Generated: 120}}},
			{ID: 1, Free: 1, Up: true, Running: []policy.Request{{Prompt: 900, Generated: 20}}},
		},
		Pool: []policy.Entry{{ID: 1, Prompt: 300}, {ID: 2, Prompt: 3100}},
	}
	for _, a := range p.Decide(&s, nil) {
		fmt.Printf("entry %d to worker %d\n", a.Entry, a.Worker)
	}
	// Output:
	// entry 2 to worker 1
	// entry 1 to worker 0
}

func ExampleMeasure() {
	b := policy.Measure([]int64{40_000, 25_000, 35_000})
	fmt.Printf("imbalance %d tokens, %.0f %% idle\n", b.Imbalance(), 100*b.IdleShare())
	// Output: imbalance 20000 tokens, 17 % idle
}

func ExampleParseSpec() {
	_, err := policy.ParseSpec("jsq:window=4")
	fmt.Println(err)
	// Output: policy jsq: unknown key "window"; it takes none
}
