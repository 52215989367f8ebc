package scenes

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
)

// promptTokens is how long prompts are, nearly: all cost the same.
const promptTokens = 60

// lengths is a repeatable mix; an answer takes 5 ms a token.
func lengths(low, high int) []trace.Request {
	rng := rand.New(rand.NewPCG(uint64(low), uint64(high)))
	list := make([]trace.Request, 499)
	for i := range list {
		list[i] = trace.Request{Prompt: promptTokens + rng.IntN(8), Output: low + rng.IntN(high-low+1)}
	}
	return list
}

// crowd is a load at one proxy.
type crowd struct {
	at          int
	caller      string // empty: the proxies know no keys
	concurrency int
}

// under loads several proxies at once, for so long, or as long as act takes if that is 0; act is
// what happens meanwhile.
func (w *site) under(ctx context.Context, span time.Duration, list []crowd, act func() error) ([]*load.Result, error) {
	var loads []load.Config
	for _, c := range list {
		loads = append(loads, load.Config{
			URLs: []string{w.all[c.at].URL()}, APIKey: keyOf(c.caller), Model: model, Requests: lengths(20, 100), Duration: span,
			Concurrency: c.concurrency, Chat: 0.5, Stream: 0.8, Usage: 0.3, Seed: uint64(time.Now().UnixNano()), Timeout: 30*time.Second + 4*w.lease,
			Backoff: 100 * time.Millisecond,
		})
	}
	return testbed.Drive(ctx, act, loads...)
}

// says: the failure has the code. A refusal has it in its kind, and an event within
// a stream in its detail.
func says(f load.Failure, code string) bool {
	return strings.HasSuffix(string(f.Kind), "/"+code) || strings.Contains(f.Detail, code)
}

// lost is a stream that had begun at a proxy that is gone.
func lost(f load.Failure) bool {
	return f.Kind == load.ErrorEvent && f.Stream && says(f, "peer_lost")
}

// cut is a connection that ended with its proxy.
func cut(f load.Failure) bool {
	return slices.Contains([]load.Kind{load.Connect, load.Reset, load.Truncated, load.Timeout}, f.Kind) || lost(f)
}

// away takes the store of leases away from all proxies for so long; meanwhile is called now and
// then.
func (w *site) away(ctx context.Context, meanwhile func(left time.Duration)) error {
	gone := func(gone bool) {
		for _, p := range w.all {
			p.store.Hold(gone)
		}
	}
	gone(true)
	defer gone(false)
	for until := time.Now().Add(w.absence); time.Now().Before(until); {
		if err := testbed.Pause(ctx, 200*time.Millisecond); err != nil {
			return err
		}
		meanwhile(time.Until(until))
	}
	return nil
}

// isolate cuts a proxy off from the store of leases and from all other proxies, or heals that.
func (w *site) isolate(p *side, apart bool) {
	p.store.Hold(apart)
	for _, o := range w.others(p) {
		w.cut(p.index, o.index, apart)
	}
}

const afterwards = "after the last request"

// held waits until neither the proxies nor the engines hold anything; its error is what they still
// hold.
func (w *site) held(ctx context.Context) error {
	return testbed.Idle(ctx, patience, func() (held []string) {
		for _, p := range w.all {
			held = append(held, p.Held(p.Name)...)
		}
		for _, e := range slices.Concat(w.prefill, w.decode) {
			s, err := e.stats()
			if err != nil {
				held = append(held, err.Error())
			}
			held = append(held, testbed.HeldBy("the engine at "+e.Address, s)...)
		}
		return held
	})
}
