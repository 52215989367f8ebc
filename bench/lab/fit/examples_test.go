package fit_test

import (
	"fmt"

	"evenkeel/bench/lab/fit"
)

func ExamplePrefillLines() {
	log := &fit.RequestLog{}
	for tokens := 1000; tokens <= 5000; tokens += 200 {
		log.Requests = append(log.Requests, fit.Request{
			Model: "m", Prefill: "p0", Prompt: tokens, Attempts: 1, ProbeMs: 150 + 0.1*float64(tokens), Outcome: "ok",
		})
	}
	lines, err := fit.PrefillLines(log)
	if err != nil {
		fmt.Println(err)
		return
	}
	p0 := lines.Fits[0]
	fmt.Printf("%s: %.0f ms + %.2f ms/token, R2 %.2f, %d probes\n", p0.Prefill, p0.A, p0.B, p0.R2, p0.N)
	// Output: p0: 150 ms + 0.10 ms/token, R2 1.00, 21 probes
}
