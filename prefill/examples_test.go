package prefill_test

import (
	"context"
	"fmt"
	"time"

	"evenkeel/prefill"
)

// One request: a place on a prefiller, its probe, the wait for a decode rank.
func Example() {
	scheduler, err := prefill.New(prefill.Config{Policy: "round-robin"})
	if err != nil {
		fmt.Println(err)
		return
	}
	scheduler.SetCandidates([]prefill.Candidate{
		{ID: "p0/0", Instance: "p0", Models: []string{"dsv3"}, CapacityTokens: 200_000, Live: true},
		{ID: "p1/0", Instance: "p1", Models: []string{"dsv3"}, CapacityTokens: 200_000, Live: true},
	})

	lease, err := scheduler.Acquire(context.Background(), prefill.Request{ID: "r1", Model: "dsv3", PromptTokens: 1000})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("probe on", lease.Candidate.ID)
	lease.Answered(prefill.Usage{PromptTokens: 1024}, time.Now().Add(480*time.Second))
	lease.Dispatched()
	fmt.Println("held there:", scheduler.Status()[0].KVTokens)
	lease.Release() // the first decode event came
	fmt.Println("held there:", scheduler.Status()[0].KVTokens)

	// Output:
	// probe on p0/0
	// held there: 1024
	// held there: 0
}
