package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/outside/browser"
	"evenkeel/bench/rigs/testbed"
)

const (
	ranks    = 32
	slots    = 12 // of a rank
	prefills = 4
	waiting  = 96 // requests in the system beyond the slots
	lost     = 21 // the rank that goes down
)

// drawLive runs a proxy in front of 32 decode ranks, kills one of them, and takes
// pictures of what an operator sees then.
func drawLive(ctx context.Context, o options, w *testbed.World, b *browser.Browser, out io.Writer) (err error) {
	s, err := setUp(ctx, w)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "a proxy and %d ranks under load for %v\n", ranks, o.duration)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.load(ctx) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-ended)
	}()
	for _, part := range []struct {
		lasts time.Duration
		then  func()
	}{{o.duration * 6 / 7, s.lost.Kill}, {o.duration / 7, func() {}}} {
		select {
		case <-time.After(part.lasts):
			part.then()
		case err := <-ended:
			ended <- nil
			return err
		}
	}
	page := "http://" + s.Address + "/"
	for _, scheme := range []string{"light", "dark"} {
		if err := b.Visit(page, scheme, 1280, 1040); err != nil {
			return err
		}
		if err := b.Await("evenkeel.document && document.querySelectorAll('canvas.map').length > 0 && evenkeel.frames.length > 2"); err != nil {
			return err
		}
		if err := b.Shoot(filepath.Join(o.out, "page-"+scheme+".png"), false, out); err != nil {
			return err
		}
	}
	return drawTop(ctx, o, w, page, b, out)
}

// setting is a proxy, and the engine that is to be lost.
type setting struct {
	*testbed.Proxy
	lost *refengine.Engine
}

// setUp returns when the proxy is ready.
func setUp(ctx context.Context, w *testbed.World) (*setting, error) {
	prefill := refengine.Config{
		Role: refengine.Prefill, Prompts: refengine.Prompts{Base: 20 * time.Millisecond, PerToken: 25 * time.Microsecond},
		KV:      refengine.KV{PrefixCache: 2048},
		Answers: refengine.Answers{PromptTokensDetails: true},
	}
	decode := refengine.Config{Role: refengine.Decode, DPSize: ranks - 1, Slots: slots,
		Steps: refengine.Steps{C0: 50 * time.Millisecond, C1: time.Microsecond}}
	alone := decode // with the same clock
	alone.DPSize = 1
	engines, err := w.Engines(append(slices.Repeat([]refengine.Config{prefill}, prefills), decode, alone)...)
	if err != nil {
		return nil, err
	}
	s := &setting{Proxy: w.Proxies("live")[0], lost: engines[prefills+1]}
	var urls []string
	for _, e := range engines[:prefills] {
		urls = append(urls, e.URLs()...)
	}
	ranks := slices.Insert(engines[prefills].URLs(), lost, s.lost.URLs()...)
	return s, s.ServeWith(ctx, fmt.Sprintf(`listen: %q
admin: {listen: %q}
self_test: false
health: {slow_start: 0s}
dispatch: {step_model: {c0_ms: 50, c1_ms: 0.001}}
%s`, s.Clients, s.Address, testbed.Engines(testbed.EnginesAt(urls, ""), testbed.EnginesAt(ranks, ", slots: %d, kv_tokens: 40000", slots))))
}

// load has clients talk until ctx ends: a real trace, in sessions that share
// the first half of their prompts. They ask for completions, which go on
// elsewhere when their rank is lost.
func (s *setting) load(ctx context.Context) error {
	requests := trace.Azure().Requests[:8000]
	for i := range requests {
		for b := range requests[i].Prompt / 256 {
			requests[i].HashIDs = append(requests[i].HashIDs, uint64((i%50)*1000+b))
		}
	}
	got, err := load.Run(ctx, load.Config{
		URLs: []string{s.URL()}, Requests: requests, Duration: time.Hour, SharePrefixes: true, MaxPrompt: 6000,
		Concurrency: ranks*slots + waiting, Stream: 1, Cancel: load.Cancel{Share: 0.02}, Seed: 1, Backoff: 100 * time.Millisecond,
	})
	if err != nil && ctx.Err() == nil {
		return err
	}
	if got != nil && got.Failed > got.OK/100 {
		return fmt.Errorf("%d requests failed beside %d that did not: the pictures show something else than one rank that is down: %v",
			got.Failed, got.OK, got.Kinds)
	}
	return nil
}
