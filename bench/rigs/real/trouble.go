package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"evenkeel/bench/rigs/testbed"
)

var troubles = []row{
	usually("SIGTERM of evenkeel under load", proxyEnds),
	usually("SIGSTOP of a decode engine for 20 s", standing(72, "d0")),
	usually("SIGSTOP of all decode engines for 20 s", standing(81, "d0", "d1")),
	usually("kill -9 of a decode engine under streams, and its restart", decodeDies),
}

var prefillTroubles = []row{
	usually("SIGSTOP of the only prefill engine for 20 s", standing(74, "p0")),
	usually("the core of a decode engine stands still for 40 s, longer than the lease", coreStands(90, 0, "d0")),
	usually("the cores of all decode engines stand still for 40 s, longer than the lease", coreStands(92, 0, "d0", "d1")),
	usually("the core of a decode engine stands still for 40 s, from the middle of its pulls on", coreStands(194, pulling, "d0")),
	inOnePiece("the core of a decode engine stands still for 40 s, answers in one piece", coreStands(196, 0, "d0")),
	inOnePiece("the core of a decode engine stands still for 40 s, from the middle of its pulls on, in one piece",
		coreStands(198, pulling, "d0")),
	usually("kill -9 of the only prefill engine, and its restart", prefillDies),
}

func proxyEnds(ctx context.Context, w *site) (outcome, error) {
	var late answer
	old := w.proxy.Process
	t, err := w.under(ctx, prompts(16, 500, 70), func() error {
		if err := w.proxy.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		// limits.drain_grace is 2 s.
		if err := testbed.Pause(ctx, 2500*time.Millisecond); err != nil {
			return err
		}
		late = ask(ctx, "POST", w.proxy.URL()+completions, completes(nil))
		return nil
	})
	if err != nil {
		return outcome{}, err
	}
	select {
	case <-old.Gone():
	case <-time.After(30 * time.Second):
		return failed("%v; 30 s after the last answer evenkeel still runs", t), nil
	}
	if late.Status == 200 {
		return failed("%v; a request behind the signal was answered", t), nil
	}
	said := fmt.Sprint(late.Status)
	if late.Err != nil {
		said = "a refused connection"
	}
	if err := w.evenkeel(ctx, w.usual()); err != nil {
		return outcome{}, err
	}
	if err := w.idle(ctx, w.behind...); err != nil {
		return failed("%v; %v", t, err), nil
	}
	if exit := fmt.Sprint(old.Err()); !t.all() || exit != "<nil>" {
		return failed("%v; exit: %s", t, exit), nil
	}
	return passed("streams under way: %v; a new request: %s; exit status 0; nothing is held", t, said), nil
}

// standing is a scene in which engines are stopped under streams, more is asked
// meanwhile, and they go on. All decode engines at once are what a machine looks like
// that is far too busy: every engine is late with its health check, and none refuses
// anything.
func standing(seed uint64, names ...string) func(ctx context.Context, w *site) (outcome, error) {
	return func(ctx context.Context, w *site) (outcome, error) {
		signal := func(s syscall.Signal) {
			for _, name := range names {
				w.engines[name].Signal(s)
			}
		}
		others := prompts(8, 60, seed+1)
		if err := w.know(ctx, others); err != nil {
			return outcome{}, err
		}
		defer signal(syscall.SIGCONT)
		var meanwhile *tally
		streams, err := w.under(ctx, prompts(8, 400, seed), func() (err error) {
			signal(syscall.SIGSTOP)
			goOn := time.AfterFunc(20*time.Second, func() { signal(syscall.SIGCONT) })
			defer goOn.Stop()
			if err := testbed.Pause(ctx, time.Second); err != nil {
				return err
			}
			if meanwhile, err = w.crowd(ctx, others, nil); err != nil {
				return err
			}
			return testbed.Pause(ctx, 20*time.Second)
		})
		if err := errors.Join(err, ctx.Err()); err != nil {
			return outcome{}, err
		}
		if err := errors.Join(w.ready(ctx), w.idle(ctx, w.behind...)); err != nil {
			return failed("streams: %v; asked meanwhile: %v; %v", streams, meanwhile, err), nil
		}
		if !streams.all() || !meanwhile.all() {
			return failed("streams: %v; asked meanwhile: %v", streams, meanwhile), nil
		}
		return passed("streams: %v; asked meanwhile: %v (the longest wait was %.0f s)", streams, meanwhile, meanwhile.longest.Seconds()), nil
	}
}

// pulling is how long after their requests cores stop that stop in the middle of the pulls: some
// requests are being prefilled then, and the KV of others is pulled or waits for it.
const pulling = 400 * time.Millisecond

// coreStands is a scene in which engines with requests compute nothing for longer than a
// prefill engine keeps KV without a sign of them, while their API servers answer on. They stop
// before the requests come, or some time after. The prefill engine gives the blocks to other
// prompts meanwhile. An answer is right or refused, later answers are right, whatever KV the
// engines have kept. What the prefill engine counts as reported after it had freed the KV, evenkeel
// has withheld: an engine that goes on also reports requests that were aborted meanwhile, of which
// it has read nothing (vLLM 0.32, nixl/pull_scheduler.py, request_finished).
func coreStands(seed uint64, after time.Duration, names ...string) func(ctx context.Context, w *site) (outcome, error) {
	return func(ctx context.Context, w *site) (outcome, error) {
		signal := func(s syscall.Signal) (err error) {
			for _, name := range names {
				err = errors.Join(err, w.engines[name].SignalCore(s))
			}
			return err
		}
		list := prompts(8, 60, seed)
		if w.now.onePiece {
			for i := range list {
				delete(list[i].body, "stream")
				delete(list[i].body, "stream_options")
			}
		}
		if err := w.know(ctx, list); err != nil {
			return outcome{}, err
		}
		lateBefore, err := w.reportedLate(ctx)
		if err != nil {
			return outcome{}, err
		}
		withheldBefore := w.books()[latePulls]
		if after == 0 {
			if err := signal(syscall.SIGSTOP); err != nil {
				return outcome{}, err
			}
		}
		defer signal(syscall.SIGCONT) //nolint:errcheck // an engine that is gone cannot go on
		others := 0
		during := func() error {
			if after > 0 {
				if err := errors.Join(testbed.Pause(ctx, after), signal(syscall.SIGSTOP)); err != nil {
					return err
				}
			}
			if err := testbed.Pause(ctx, 2*time.Second); err != nil {
				return err
			}
			// They pass through every block that the engine has.
			for end := time.Now().Add(38 * time.Second); time.Now().Before(end) && ctx.Err() == nil; others++ {
				other := greedy.With(body{"prompt": ids(600, seed*100_000+uint64(others)), "max_tokens": 2})
				if got := ask(ctx, "POST", w.engines["p0"].url()+completions, other); got.Status != 200 {
					return fmt.Errorf("the prefill engine answered %v", got)
				}
			}
			return signal(syscall.SIGCONT)
		}
		t, err := w.crowd(ctx, list, during)
		if err := errors.Join(err, ctx.Err()); err != nil {
			return outcome{}, err
		}
		if err := w.ready(ctx); err != nil { // where all stood still, evenkeel refuses until one of them computes again
			return failed("%v; %v", t, err), nil
		}
		again, err := w.crowd(ctx, list, nil)
		if err := errors.Join(err, ctx.Err()); err != nil {
			return outcome{}, err
		}
		late, err := w.reportedLate(ctx)
		if err != nil {
			return outcome{}, err
		}
		late, withheld := late-lateBefore, w.books()[latePulls]-withheldBefore
		said := fmt.Sprintf("%v; the prefill engine computed %d other prompts meanwhile, and counts %.0f hand-offs "+
			"that were reported after it had freed them, of which evenkeel has withheld %.0f; the same prompts again: %v",
			t, others, late, withheld, again)
		if err := w.idle(ctx, w.behind...); err != nil {
			return failed("%s; %v", said, err), nil
		}
		if late > withheld || len(t.Wrong) > 0 || !again.all() || len(names) == 1 && !t.all() {
			return failed("%s", said), nil
		}
		return passed("%s", said), nil
	}
}

const latePulls = "evenkeel_late_pulls_total"

// reportedLate is how many hand-offs were reported after the prefill engine had freed them, as it
// counts.
func (w *site) reportedLate(ctx context.Context) (float64, error) {
	series, err := w.engines["p0"].series(ctx)
	return gauge(series, "nixl_num_notifications_after_expiry_total"), err
}

// back restarts an engine at its address and shows that it is used again.
func back(ctx context.Context, w *site, name string, seed uint64) (*tally, error) {
	if err := w.need(ctx, name); err != nil {
		return nil, err
	}
	if err := w.ready(ctx); err != nil {
		return nil, err
	}
	list := prompts(16, 60, seed) // more than one decode engine has slots for
	t, err := w.crowd(ctx, list, nil)
	if err != nil {
		return nil, err
	}
	series, err := w.engines[name].series(ctx)
	if err != nil {
		return nil, err
	}
	if served := gauge(series, "request_success_total"); served == 0 {
		return t, fmt.Errorf("%s is back and gets no requests", name)
	}
	return t, w.idle(ctx, w.behind...)
}

func decodeDies(ctx context.Context, w *site) (outcome, error) {
	t, err := w.under(ctx, prompts(14, 250, 76), func() error { w.engines["d1"].Kill(); return nil })
	if err != nil {
		return outcome{}, err
	}
	again, err := back(ctx, w, "d1", 77)
	if err != nil {
		return failed("streams: %v; %v", t, err), nil
	}
	if !t.all() || !again.all() {
		return failed("streams: %v; after the restart: %v", t, again), nil
	}
	return passed("streams: %v; after the restart: %v", t, again), nil
}

func prefillDies(ctx context.Context, w *site) (outcome, error) {
	others := prompts(6, 40, 79)
	if err := w.know(ctx, others); err != nil {
		return outcome{}, err
	}
	var meanwhile *tally
	t, err := w.under(ctx, prompts(10, 250, 78), func() (err error) {
		w.engines["p0"].Kill()
		meanwhile, err = w.crowd(ctx, others, nil)
		return err
	})
	if err != nil {
		return outcome{}, err
	}
	again, err := back(ctx, w, "p0", 80)
	if err != nil {
		return failed("streams: %v; asked while there was none: %v; %v", t, meanwhile, err), nil
	}
	if !t.all() || !again.all() || len(meanwhile.Wrong) > 0 {
		return failed("streams: %v; asked while there was none: %v; after the restart: %v", t, meanwhile, again), nil
	}
	return passed("streams: %v; asked while there was none: %v; after the restart: %v", t, meanwhile, again), nil
}
