package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// drainLeavesNothing has evenkeel drain a hand-off that a decode engine has
// consumed and whose blocks hold other prompts since, and looks into the prefix
// caches then. A relay keeps the engine's answer back and cuts the connection, so
// that evenkeel has to prefill anew and to drain. vLLM itself does not check
// whether a hand-off was consumed: it pulls what stands in the blocks, and answers.
func drainLeavesNothing(ctx context.Context, w *site) (outcome, error) {
	var relays []*testbed.Relay
	s := w.usual()
	for i, name := range []string{"d0", "d1"} {
		r, err := testbed.NewRelay(fmt.Sprintf("127.0.0.1:%d", w.engines[name].port), 0)
		if err != nil {
			return outcome{}, err
		}
		defer r.Close()
		relays, s.decode[i] = append(relays, r), "http://"+r.Address()
	}
	if err := w.evenkeel(ctx, s); err != nil {
		return outcome{}, err
	}
	before := w.books()
	const drained = `evenkeel_drains_total{outcome="drained"}`
	victim := question{path: completions, body: greedy.With(body{"prompt": ids(1000, 120), "max_tokens": 30, "ignore_eos": true})}
	list := []question{victim}
	if err := w.know(ctx, list); err != nil {
		return outcome{}, err
	}
	for _, r := range relays {
		r.Withhold(true)
	}
	t, err := w.crowd(ctx, list, func() error {
		if err := testbed.Await(ctx, time.Minute, "a decode engine has answered",
			func() bool { return relays[0].Withheld()+relays[1].Withheld() > 0 }); err != nil {
			return err
		}
		err := overwrite(ctx, w, 121)
		for _, r := range relays {
			r.Withhold(false) // and cut what was kept
		}
		return err
	})
	if err != nil {
		return outcome{}, err
	}
	if err := testbed.Await(ctx, 20*time.Second, "evenkeel has drained the first hand-off",
		func() bool { return w.books()[drained] > before[drained] }); err != nil {
		return failed("%v; %v", t, err), nil
	}
	if err := w.idle(ctx, w.behind...); err != nil {
		return failed("%v; %v", t, err), nil
	}
	// The victim itself may be cached on the engine that answered; a wrong text there
	// would be the drain's.
	direct := func(when string) (bad []string) {
		for _, name := range []string{"d0", "d1"} {
			doc, err := documentOf(ask(ctx, "POST", w.engines[name].url()+victim.path, victim.body))
			if err != nil {
				return []string{err.Error()}
			}
			if different, _ := compare(list[0].want, doc); len(different) > 0 {
				bad = append(bad, fmt.Sprintf("%s %s: %s", name, when, some(different)))
			}
		}
		return bad
	}
	if bad := direct("after the drain"); bad != nil || !t.all() {
		return failed("the request: %v; %v", t, bad), nil
	}
	// The same without evenkeel and without a salt shows that it would be seen.
	poisoned, err := poison(ctx, w)
	if err != nil {
		return outcome{}, err
	}
	return passed("the request was prefilled again: %v; both decode engines answer the prompt as the plain engine does; the same hand-off "+
		"without a cache_salt: %s", t,
		poisoned), nil
}

// overwrite has the prefill engine compute other prompts in all of its blocks.
func overwrite(ctx context.Context, w *site, seed uint64) error {
	for i := range blocks*blockSize/1900 + 1 {
		a := ask(ctx, "POST", w.engines["p0"].url()+completions, greedy.With(body{"prompt": ids(1900, seed*100+uint64(i)), "max_tokens": 1}))
		if a.Status != 200 {
			return fmt.Errorf("the prefill engine answered %v", a)
		}
	}
	return nil
}

// poison does what evenkeel must not: it sends a consumed hand-off once more,
// without a salt, and says what the engine answers to its prompt then.
func poison(ctx context.Context, w *site) (string, error) {
	b := greedy.With(body{"prompt": ids(1000, 130), "max_tokens": 30, "ignore_eos": true})
	list := []question{{path: completions, body: b}}
	if err := w.know(ctx, list); err != nil {
		return "", err
	}
	handoff, err := w.handoff(ctx, b)
	if err != nil {
		return "", err
	}
	used := b.With(body{"kv_transfer_params": handoff})
	if a := ask(ctx, "POST", w.engines["d0"].url()+completions, used); a.Status != 200 {
		return "", fmt.Errorf("d0 answered %v", a)
	}
	if err := overwrite(ctx, w, 131); err != nil {
		return "", err
	}
	if a := ask(ctx, "POST", w.engines["d1"].url()+completions, used.With(body{"max_tokens": 1})); a.Status != 200 {
		return fmt.Sprintf("refused with %d", a.Status), nil
	}
	doc, err := documentOf(ask(ctx, "POST", w.engines["d1"].url()+completions, b))
	if err != nil {
		return "", err
	}
	if different, _ := compare(list[0].want, doc); len(different) > 0 {
		return "a wrong text for the prompt from then on", nil
	}
	return "the right text", nil
}

// handoff has the prefill engine compute a prompt, without evenkeel.
func (w *site) handoff(ctx context.Context, b body) (json.RawMessage, error) {
	var probe struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	a := ask(ctx, "POST", w.engines["p0"].url()+completions,
		body{"model": model, "prompt": b["prompt"], "max_tokens": 1, "kv_transfer_params": body{
			"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil,
			"remote_port": nil}})
	if err := json.Unmarshal(a.Body, &probe); err != nil || probe.Params == nil {
		return nil, fmt.Errorf("the prefill engine made no hand-off: %v", a)
	}
	return probe.Params, nil
}
