package dispatcher_test

import (
	"context"
	"fmt"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// A finished prefill asks for a rank, runs there and gives its slot back.
func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	d, err := dispatcher.Start(ctx, dispatcher.Config{Config: board.Config{Policy: "pjsq-kv", Window: board.DefaultWindow}})
	if err != nil {
		fmt.Println(err)
		return
	}
	d.SetWorkers([]board.Worker{{ID: 7, Name: "d0", Model: "qwen", Group: "main", Barrier: true, Slots: 16, Up: true}})

	r := <-d.Enqueue(&pool.Entry{ID: 1, Model: "qwen", Prompt: 1200})
	if r.Err != nil {
		fmt.Println(r.Err)
		return
	}
	defer func() {
		d.Release(r.Slot, board.Outcome{Kind: board.Finished, Generated: r.Slot.Generated()})
	}()

	r.Slot.ReportStarted() // the first event of its stream
	r.Slot.Progress(3)     // so many tokens have come
	s := d.Status(ctx).Models[0].Workers[0]
	fmt.Println(r.Slot.WorkerName, "holds", s.KVTokens, "KV tokens of", s.Used, "request")
	// Output: d0 holds 1203 KV tokens of 1 request
}
