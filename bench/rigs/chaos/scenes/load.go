package scenes

import (
	"cmp"
	"context"
	"fmt"
	"maps"
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

// under loads several proxies at once, for so long, or as long as act takes if that is 0; act is what happens
// meanwhile.
func (w *site) under(ctx context.Context, span time.Duration, list []crowd, act func() error) ([]*load.Result, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var ended []func() (*load.Result, error)
	for _, c := range list {
		ended = append(ended, load.Start(ctx, load.Config{
			URLs: []string{w.all[c.at].URL()}, APIKey: keyOf(c.caller), Model: model, Requests: lengths(20, 100), Duration: cmp.Or(span, time.Hour),
			Concurrency: c.concurrency, Chat: 0.5, Stream: 0.8, Usage: 0.3, Seed: uint64(time.Now().UnixNano()), Timeout: 30*time.Second + 4*w.lease,
			Backoff: 100 * time.Millisecond, KeepFailures: 1 << 20,
		}))
	}
	var err error
	if act != nil {
		err = act()
	}
	if err != nil || span == 0 {
		stop()
	}
	results := make([]*load.Result, len(list))
	for i, end := range ended {
		var failed error
		if results[i], failed = end(); err == nil {
			err = failed
		}
	}
	return results, err
}

// sums is several results as one.
type sums struct {
	sent, ok, allowed int
	kinds             map[string]int // of what did not end well
	wrong             []string       // what is not allowed, in words
}

// judge sums results. A scene allows some failures; everything else that is not right is wrong.
func judge(allowed func(load.Failure) bool, results ...*load.Result) sums {
	s := sums{kinds: map[string]int{}}
	for _, r := range results {
		s.sent += r.Sent
		s.ok += r.OK
		for _, f := range r.Failures {
			kind := string(f.Kind)
			for _, code := range []string{"peer_lost", "draining", "owner_lost", "not_owner"} {
				if says(f, code) {
					kind = "`" + code + "`"
				}
			}
			s.kinds[kind]++
			if allowed(f) {
				s.allowed++
			} else {
				s.wrong = append(s.wrong, f.String())
			}
		}
	}
	return s
}

// first are the first of the wrong ones.
func (s sums) first() string {
	return fmt.Sprintf("%d requests: %s", len(s.wrong), strings.Join(s.wrong[:min(5, len(s.wrong))], "; "))
}

// allRight holds that every request was answered as it should be.
func (s sums) allRight(r *testbed.Report, scene, who string) {
	r.Hold(s.ok == s.sent && s.sent > 0, scene, "%s%d of %d right, %d lost, %s", who, s.ok, s.sent, s.allowed, s.first())
}

// noneWrong holds that no request ended in a way that is not allowed.
func (s sums) noneWrong(r *testbed.Report, scene, who string) {
	r.Hold(len(s.wrong) == 0, scene, "%s%s", who, s.first())
}

// String says how the requests ended.
func (s sums) String() string {
	list := []string{fmt.Sprintf("%d right", s.ok)}
	for _, k := range slices.Sorted(maps.Keys(s.kinds)) {
		list = append(list, fmt.Sprintf("%d %s", s.kinds[k], k))
	}
	return strings.Join(list, ", ")
}

func none(load.Failure) bool { return false }

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

// away takes the store of leases away from all proxies for so long; meanwhile is called now and then.
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

// held waits until neither the proxies nor the engines hold anything; its error is what they still hold.
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
