package main

import (
	"context"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// aheadOfItsSlot has a rank get a request more than the engine runs at once, as policies send one
// while an answer ends. docs/engines.md says what it does there: vLLM looks at nobody who waits
// while max_num_seqs requests run, so it pulls nothing before one of these has ended.
func aheadOfItsSlot(ctx context.Context, w *site) (outcome, error) {
	s := w.usual()
	s.decode, s.slots = s.decode[:1], slots+1
	if err := w.evenkeel(ctx, s); err != nil {
		return outcome{}, err
	}
	d0 := w.engines["d0"]
	at := func() (running, waiting, pulled float64, err error) {
		series, err := d0.series(ctx)
		return gauge(series, "num_requests_running"), gauge(series, "num_requests_waiting"), gauge(series, "nixl_xfer_time_seconds_count"), err
	}
	const watched = 3 * time.Second
	list := prompts(slots, 400, 140)
	ninth := prompts(1, 20, 141)
	if err := w.know(ctx, ninth); err != nil {
		return outcome{}, err
	}
	asking, leave := context.WithCancel(ctx)
	defer leave()
	got := make(chan answer, 1)
	var before, early float64
	looks := 0
	t, err := w.under(ctx, list, func() (err error) {
		if _, _, before, err = at(); err != nil {
			return err
		}
		go func() { got <- ask(asking, "POST", w.proxy.URL()+ninth[0].path, ninth[0].body) }()
		if err := testbed.Await(ctx, time.Minute, "a request waits in the engine", func() bool {
			running, waiting, _, err := at()
			return err == nil && running == slots && waiting == 1
		}); err != nil {
			return err
		}
		for until := time.Now().Add(watched); time.Now().Before(until); looks++ {
			running, waiting, pulled, err := at()
			if err != nil {
				return err
			}
			if running < slots || waiting < 1 {
				break // one has ended
			}
			early = max(early, pulled-before)
			if err := testbed.Pause(ctx, 50*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return outcome{}, err
	}
	last := w.count(ctx, ninth, []answer{<-got})
	if err := w.settled(ctx, t, w.behind...); err != nil {
		return failed("%v", err), nil
	}
	_, _, after, err := at()
	if err != nil {
		return outcome{}, err
	}
	if !last.all() || looks < 5 || early != 0 || after-before < 1 {
		return failed("while %d ran and one waited, in %d looks, the KV of %.0f was pulled, and of %.0f in the end; %v", slots, looks, early,
			after-before, last), nil
	}
	return passed("while %d ran, the engine pulled nothing for the next one in %d looks; it did when one had ended", slots, looks), nil
}
