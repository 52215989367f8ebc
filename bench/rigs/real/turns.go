package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// decodeEngines are those behind the usual setting.
var decodeEngines = [...]string{"d0", "d1"}

// furtherTurn has a chat go on whose first turn was sent to the second engine, because the first one was busy. When both are idle,
// a new prompt would go to the first. The further turn goes to the second, which pulls only what is new.
func furtherTurn(ctx context.Context, w *site) (outcome, error) {
	busy, leave := context.WithCancel(ctx)
	defer leave()
	left := make(chan answer, 1)
	go func() {
		left <- ask(busy, http.MethodPost, w.proxy.URL()+completions,
			greedy.With(body{"prompt": ids(300, 9700), "max_tokens": 1500, "ignore_eos": true, "stream": true}))
	}()
	var first, second string
	if err := testbed.Await(ctx, time.Minute, "a request runs", func() bool {
		for i, name := range decodeEngines {
			series, err := w.engines[name].series(ctx)
			if err == nil && gauge(series, "num_requests_running") == 1 {
				first, second = decodeEngines[i], decodeEngines[1-i]
			}
		}
		return first != ""
	}); err != nil {
		return outcome{}, err
	}
	pulled := func(name string) (bytes float64, err error) {
		series, err := w.engines[name].series(ctx)
		return gauge(series, "nixl_bytes_transferred_sum"), err
	}
	turn := func(tokens int) (bytes float64, err error) {
		before, err := pulled(second)
		if err != nil {
			return 0, err
		}
		b := greedy.With(body{"prompt": ids(tokens, 9701), "max_tokens": 16})
		a := ask(ctx, http.MethodPost, w.proxy.URL()+completions, b)
		doc, err := documentOf(a)
		if err != nil {
			return 0, err
		}
		plain, err := documentOf(ask(ctx, http.MethodPost, w.engines["plain"].url()+completions, b))
		if err != nil {
			return 0, err
		}
		if different, _ := compare(plain, doc); len(different) > 0 {
			return 0, fmt.Errorf("it is not what the plain engine says: %v", different[0])
		}
		err = testbed.Await(ctx, time.Minute, "the engine has told of what it pulled", func() bool {
			after, err := pulled(second)
			bytes = after - before
			return err == nil && bytes > 0
		})
		return bytes, err
	}
	whole, err := turn(1280)
	if err != nil {
		return outcome{}, err
	}
	leave()
	<-left
	if err := w.idle(ctx, w.behind...); err != nil {
		return failed("%v", err), nil
	}
	elsewhere, err := pulled(first)
	if err != nil {
		return outcome{}, err
	}
	rest, err := turn(1600)
	if err != nil {
		return failed("the further turn: %v", err), nil
	}
	after, err := pulled(first)
	switch {
	case err != nil:
		return outcome{}, err
	case after != elsewhere:
		return failed("the further turn went to the engine that holds nothing of it"), nil
	case whole <= 0 || rest <= 0 || rest > whole/2:
		return failed("of 1,280 tokens the engine pulled %.0f KB, and %.0f KB of 320 more", whole/1e3, rest/1e3), nil
	}
	return passed("of 1,280 tokens the engine pulled %.0f KB, and of a turn with 320 more %.0f KB", whole/1e3, rest/1e3), nil
}
