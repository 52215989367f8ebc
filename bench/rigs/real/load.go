package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/mooncake"
)

// scene is a row whose steps may fail.
func scene(name string, engines []string, run func(ctx context.Context, w *site) (outcome, error)) row {
	return row{name: name, engines: engines, run: func(ctx context.Context, w *site) outcome {
		o, err := run(ctx, w)
		if err != nil {
			return failed("%v", err)
		}
		return o
	}}
}

// usually is a scene before evenkeel with the usual setting.
func usually(name string, run func(ctx context.Context, w *site) (outcome, error)) row {
	return before(name, false, run)
}

// inOnePiece is one where engines answer in one piece if the client wants no stream.
func inOnePiece(name string, run func(ctx context.Context, w *site) (outcome, error)) row {
	return before(name, true, run)
}

func before(name string, onePiece bool, run func(ctx context.Context, w *site) (outcome, error)) row {
	return scene(name, everyone, func(ctx context.Context, w *site) (outcome, error) {
		s := w.usual()
		s.onePiece = onePiece
		if err := w.evenkeel(ctx, s); err != nil {
			return outcome{}, err
		}
		return run(ctx, w)
	})
}

var loads = []row{
	usually("40 at once", fortyAtOnce),
	usually("clients that leave in every phase", cancels),
}

var leases = []row{
	scene("waits longer than the lease of 30 s", everyone, longWaits),
}

func fortyAtOnce(ctx context.Context, w *site) (outcome, error) {
	list := prompts(40, 100, 40)
	for i := range list {
		switch i % 4 {
		case 1: // an answer in one piece
			delete(list[i].body, "stream")
			delete(list[i].body, "stream_options")
		case 2:
			list[i].path = chat
			delete(list[i].body, "prompt")
			list[i].body["messages"] = []body{{"role": "user", "content": fmt.Sprintf("say %d words about proxies", i)}}
		}
	}
	t, err := w.served(ctx, list)
	if err != nil {
		return outcome{}, err
	}
	return passed("%v; nothing is held behind them", t), nil
}

// left is the metric that counts the clients that left in a phase.
const left = "evenkeel_cancel_release_seconds_count{"

// leaving is clients that leave: after a while, and until something is so (nil: no longer). Engines
// that stall stand still meanwhile.
type leaving struct {
	list  []question
	stall []*engine
	stay  time.Duration
	until func() bool
}

var errLeave = errors.New("all clients leave")

// cancels has clients leave in each phase. Engines that stand still make the
// short phases long.
func cancels(ctx context.Context, w *site) (outcome, error) {
	long := func(n int, seed uint64) []question { // prompts that fill the prefill engine's KV cache soon
		list := prompts(n, 400, seed)
		for i := range list {
			list[i].body["prompt"] = ids(1500, seed*1000+uint64(i))
		}
		return list
	}
	decode := []*engine{w.engines["d0"], w.engines["d1"]}
	stages := []leaving{
		{prompts(6, 50, 51), decode, 2500 * time.Millisecond, nil}, // transfer
		{prompts(10, 1200, 52), nil, 3 * time.Second, nil},         // streaming
		{long(48, 53), nil, 4 * time.Second, w.pools},              // all: 16 stream, the pool fills up, the rest is queued
		{long(48, 54), nil, 4 * time.Second, nil},
	}
	phases := []string{"queued", "prefill", "pooled", "transfer", "streaming"}
	if w.connector == mooncake.None {
		phases = slices.DeleteFunc(phases, func(p string) bool { return p == "transfer" }) // there is none
		// soon the engines count as down, and then the requests are queued again
		stages[0].stay = time.Second
	} else {
		stages = append(stages, leaving{list: prompts(6, 50, 50), stall: []*engine{w.engines["p0"]}, stay: 1500 * time.Millisecond})
	}
	before := w.books()
	for _, s := range stages {
		for i := range s.list {
			if i%3 == 0 { // an answer in one piece, which is put together for a client that has left
				delete(s.list[i].body, "stream")
				delete(s.list[i].body, "stream_options")
			}
		}
		for _, e := range s.stall {
			e.Signal(syscall.SIGSTOP)
		}
		_, _ = askAll(ctx, w.proxy.URL(), s.list, new(atomic.Int64), func() error {
			_ = testbed.Pause(ctx, s.stay) // an error: the row is over
			if s.until != nil {
				_ = testbed.Await(ctx, 3*time.Minute, "requests wait for a slot", s.until)
			}
			return errLeave
		})
		for _, e := range s.stall {
			e.Signal(syscall.SIGCONT)
		}
		if err := testbed.Pause(ctx, time.Second); err != nil {
			return outcome{}, err
		}
	}
	if err := w.idle(ctx, w.behind...); err != nil {
		return failed("%v", err), nil
	}
	var seen, never []string
	after := w.books()
	for _, phase := range phases {
		key := left + fmt.Sprintf("phase=%q}", phase)
		n := after[key] - before[key]
		seen = append(seen, fmt.Sprintf("%.0f %s", n, phase))
		if n == 0 {
			never = append(never, phase)
		}
	}
	if never != nil {
		return failed("no client left while its request was %s; %s", strings.Join(never, ", "), strings.Join(seen, ", ")), nil
	}
	list := prompts(8, 40, 55)
	t, err := w.crowd(ctx, list, nil)
	if err != nil {
		return outcome{}, err
	}
	if !t.all() {
		return failed("afterwards: %v", t), nil
	}
	return passed("left: %s; then running, waiting and KV of all engines are 0, and the next %v", strings.Join(seen, ", "), t), nil
}

// pools says whether requests wait because no rank has a slot: that they pass through the pool is
// not enough.
func (w *site) pools() bool {
	books, free := w.books(), 0.0
	for name, v := range books {
		if strings.HasPrefix(name, "evenkeel_rank_slots{") && strings.Contains(name, `state="free"`) {
			free += v
		}
	}
	return books["evenkeel_pool_entries"] > 0 && free == 0
}

// longWaits has one slot per decode engine and enough long answers that the last
// ones wait for longer than a prefill engine keeps their KV.
func longWaits(ctx context.Context, w *site) (outcome, error) {
	s := w.usual()
	s.slots = 1
	if err := w.evenkeel(ctx, s); err != nil {
		return outcome{}, err
	}
	const lease, tokens = 30 * time.Second, 1900
	one := prompts(2, tokens, 60)
	if err := w.know(ctx, one); err != nil { // which takes no part in the time
		return outcome{}, err
	}
	began := time.Now()
	if t, err := w.crowd(ctx, one, nil); err != nil || !t.all() {
		return failed("two long answers: %v, %v", t, err), nil
	}
	each := time.Since(began)
	const most = 40 // of them, so that the row ends on a machine that is too fast for it; it fails then
	rounds := min(int((lease+10*time.Second)/each)+2, most)
	list := prompts(2*rounds, tokens, 61)
	t, err := w.served(ctx, list)
	if err != nil {
		return outcome{}, err
	}
	if t.longest < lease {
		return failed("%v; the longest wait was %.0f s", t, t.longest.Seconds()), nil
	}
	return passed("%d long answers on two slots: %v; the longest wait was %.0f s", len(list), t, t.longest.Seconds()), nil
}
