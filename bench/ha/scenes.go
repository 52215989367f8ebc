package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/process"
	"evenkeel/bench/trace"
)

type scene struct {
	name string
	play func(ctx context.Context, w *world, r *process.Report) error
}

var scenes = []scene{
	{"served by all", playAll},
	{"owner killed", playKill},
	{"owner back", playBack},
	{"owner ended", playEnd},
	{"owner stands still", playStop},
	{"owner cut off", playCut},
	{"store away", playAway},
	{"afterwards", playAfter},
}

// under has the clients of some proxies ask without pause, until the function
// it returns is called, with what they got.
func (w *world) under(ctx context.Context, of ...*proxy) (end func() *load.Result) {
	c := load.Config{
		Model: model, Concurrency: w.clients * len(of), Chat: 0.5, Stream: 0.7, Usage: 0.3, Seed: uint64(time.Now().UnixNano()), Timeout: time.Minute, Duration: time.Hour,
		Backoff: 50 * time.Millisecond, KeepFailures: 1 << 20,
	}
	for _, p := range of {
		c.URLs = append(c.URLs, "http://"+p.clients)
	}
	for i := range 499 {
		c.Requests = append(c.Requests, trace.Request{Prompt: 20 + 7*i%150, Output: 10 + 13*i%90})
	}
	ctx, cancel := context.WithCancel(ctx)
	got := make(chan *load.Result, 1)
	go func() {
		r, err := load.Run(ctx, c)
		if err != nil {
			r = &load.Result{Failures: []load.Failure{{Kind: "load", Detail: err.Error()}}}
		}
		got <- r
	}()
	return func() *load.Result {
		cancel()
		return <-got
	}
}

// others are all proxies but one.
func (w *world) others(p *proxy) []*proxy {
	return slices.DeleteFunc(slices.Clone(w.all[:]), func(o *proxy) bool { return o == p })
}

// kinds says how requests ended that did not end well.
func kinds(r *load.Result) string {
	count := map[string]int{}
	for _, f := range r.Failures {
		kind := string(f.Kind)
		for _, code := range []string{"peer_lost", "draining", "owner_lost", "not_owner"} {
			if strings.Contains(f.Detail, code) {
				kind = "`" + code + "`"
			}
		}
		count[kind]++
	}
	var list []string
	for _, k := range slices.Sorted(maps.Keys(count)) {
		list = append(list, fmt.Sprintf("%d %s", count[k], k))
	}
	return strings.Join(append([]string{fmt.Sprintf("%d right", r.OK)}, list...), ", ")
}

// but are the failures that are none of those, in words.
func but(r *load.Result, allowed func(load.Failure) bool) string {
	var list []string
	for _, f := range r.Failures {
		if !allowed(f) {
			list = append(list, fmt.Sprintf("%s %s: %s (stream %v, %d of %d tokens, after %.0f ms)", f.Request, f.Kind, f.Detail, f.Stream, f.Tokens, f.Output, f.ElapsedMS))
		}
	}
	return strings.Join(list[:min(len(list), 5)], "; ")
}

func none(load.Failure) bool { return false }

// lost is a stream that had begun at a proxy that is gone.
func lost(f load.Failure) bool {
	return f.Kind == load.ErrorEvent && f.Stream && strings.Contains(f.Detail, "peer_lost")
}

// cut is a connection that ended with its proxy.
func cut(f load.Failure) bool {
	return slices.Contains([]load.Kind{load.Connect, load.Reset, load.Truncated, load.Timeout}, f.Kind) || lost(f)
}

func playAll(ctx context.Context, w *world, r *process.Report) error {
	const scene = "all three serve"
	end := w.under(ctx, w.all[:]...)
	err := process.Pause(ctx, w.load)
	got := end()
	forwards := 0.0
	for _, p := range w.all {
		forwards += w.metric(p, `evenkeel_geo_forwards_total{outcome="ok"`)
	}
	r.Add(scene, "%s; %.0f forwarded to an owner, the rest served where they came", kinds(got), forwards)
	r.Hold(got.OK > 0 && len(got.Failures) == 0, scene, "%s", but(got, none))
	r.Hold(forwards > 0, scene, "nothing was forwarded")
	return err
}

// unowned waits until another than p admits to a group, for how long.
func (w *world) unowned(ctx context.Context, group string, p *proxy, since time.Time) (taker *proxy, took time.Duration, err error) {
	err = process.Await(ctx, 4*w.lease, "another proxy has "+group, func() bool {
		for _, o := range w.others(p) {
			if w.metric(o, fmt.Sprintf("evenkeel_ha_owner{group=%q}", group)) == 1 {
				taker = o
			}
		}
		return taker != nil
	})
	return taker, time.Since(since), err
}

// away does something to the owner of a group under load and measures until
// another has it.
func (w *world) away(ctx context.Context, group string, do func(*proxy)) (p, taker *proxy, took time.Duration, others, own *load.Result, err error) {
	if p = w.owner(group); p == nil {
		return p, nil, 0, nil, nil, fmt.Errorf("%s has no owner", group)
	}
	endOthers, endOwn := w.under(ctx, w.others(p)...), w.under(ctx, p)
	if err = process.Pause(ctx, w.load); err == nil {
		at := time.Now()
		do(p)
		taker, took, err = w.unowned(ctx, group, p, at)
	}
	if err == nil {
		err = process.Pause(ctx, w.load)
	}
	return p, taker, took, endOthers(), endOwn(), err
}

func playKill(ctx context.Context, w *world, r *process.Report) error {
	const scene = "owner of a group killed (SIGKILL)"
	p, taker, took, others, own, err := w.away(ctx, "east", func(p *proxy) { p.signal(os.Kill) })
	if err != nil {
		return err
	}
	<-p.process.Gone()
	r.Add(scene, "%s has the group after %.1f s, %.2f leases; clients of the others: %s; its own: %s", taker.name, took.Seconds(), took.Seconds()/w.lease.Seconds(), kinds(others), kinds(own))
	r.Hold(took < 2*w.lease, scene, "taken over after %v", took)
	r.Hold(but(others, lost) == "", scene, "clients of the others: %s", but(others, lost))
	r.Hold(but(own, cut) == "", scene, "its own clients: %s", but(own, cut))
	w.oneOwner(r, scene)
	return w.begin(p)
}

func playBack(ctx context.Context, w *world, r *process.Report) error {
	const scene = "it is back"
	end := w.under(ctx, w.all[0], w.all[1], w.all[2])
	at := time.Now()
	err := w.rest(ctx)
	took := time.Since(at)
	if err == nil {
		err = process.Pause(ctx, w.load)
	}
	got := end()
	r.Add(scene, "has its groups again after %.1f s, of which it was watched for one lease; clients of all: %s", took.Seconds(), kinds(got))
	starting := func(f load.Failure) bool { // it was not ready yet
		return f.Kind == load.Connect || f.Kind == load.Reset || slices.ContainsFunc([]string{"no_region_available", "prefill_unavailable", "decode_unavailable"}, func(code string) bool {
			return strings.Contains(string(f.Kind), code)
		})
	}
	r.Hold(but(got, starting) == "", scene, "%s", but(got, starting))
	w.oneOwner(r, scene)
	return err
}

func playEnd(ctx context.Context, w *world, r *process.Report) error {
	const scene = "owner ended (SIGTERM)"
	p, taker, took, others, own, err := w.away(ctx, "west", func(p *proxy) { p.signal(syscall.SIGTERM) })
	if err != nil {
		return err
	}
	<-p.process.Gone()
	r.Add(scene, "%s has the group after %.2f s; clients of the others: %s; its own: %s", taker.name, took.Seconds(), kinds(others), kinds(own))
	r.Hold(took < w.lease, scene, "handed over after %v", took)
	r.Hold(len(others.Failures) == 0, scene, "clients of the others: %s", but(others, none))
	leaving := func(f load.Failure) bool {
		return f.Kind == load.Connect || f.Kind == load.Reset || strings.Contains(f.Detail, "draining")
	}
	r.Hold(but(own, leaving) == "", scene, "its own clients: %s", but(own, leaving))
	w.oneOwner(r, scene)
	if err := w.begin(p); err != nil {
		return err
	}
	return w.rest(ctx)
}

// playStop lets an owner stand still in the middle of its work until its groups
// are another's, and wake then with all that it was about to do.
func playStop(ctx context.Context, w *world, r *process.Report) error {
	const scene = "owner stands still (SIGSTOP)"
	p, taker, took, others, own, err := w.away(ctx, "east", func(p *proxy) { p.signal(syscall.SIGSTOP) })
	if p != nil {
		p.signal(syscall.SIGCONT)
	}
	if err != nil {
		return err
	}
	endOthers := w.under(ctx, w.others(p)...)
	if err := w.rest(ctx); err != nil {
		return err
	}
	after := endOthers()
	r.Add(scene, "%s has the group after %.1f s, %.2f leases; clients of the others: %s; its own: %s; after it woke: %s", taker.name, took.Seconds(), took.Seconds()/w.lease.Seconds(), kinds(others), kinds(own), kinds(after))
	r.Hold(took < 2*w.lease, scene, "taken over after %v", took)
	r.Hold(but(others, lost) == "", scene, "clients of the others: %s", but(others, lost))
	r.Hold(len(after.Failures) == 0, scene, "after it woke: %s", but(after, none))
	w.oneOwner(r, scene)
	return nil
}

// oneOwner holds what the engines saw.
func (w *world) oneOwner(r *process.Report, scene string) {
	for i, e := range w.decode {
		s := e.Stats()
		r.Hold(s.StaleEpochs == 0, scene, "%s saw %d requests of an owner after those of a later one", groups[i], s.StaleEpochs)
		r.Hold(s.DuplicateIDs == 0 && s.Replays == 0 && s.WrongBlocks == 0 && s.KeyMismatches == 0, scene, "%s: %+v", groups[i], s)
	}
}

// playAfter holds that nothing is left of all that.
func playAfter(ctx context.Context, w *world, r *process.Report) error {
	const scene = "after the last request"
	var held string
	err := process.Await(ctx, 20*time.Second, "nothing is held", func() bool {
		held = ""
		for _, p := range w.all {
			for _, series := range []string{"evenkeel_requests_open", "evenkeel_pool_entries", "evenkeel_rank_kv_tokens", "evenkeel_rank_running", "evenkeel_handoffs{", "evenkeel_geo_forwards_inflight", "evenkeel_audit_drift", "evenkeel_double_releases_total"} {
				if v := w.metric(p, series); v != 0 {
					held += fmt.Sprintf("%s: %s %v; ", p.name, series, v)
				}
			}
		}
		for _, e := range append(slices.Clone(w.prefill), w.decode...) {
			if s := e.Stats(); s.Running+s.Waiting+s.KVUsed != 0 {
				held += fmt.Sprintf("engine %s still has %d requests and %d KV tokens; ", e.URLs()[0], s.Running+s.Waiting, s.KVUsed)
			}
		}
		return held == ""
	})
	over, epochs := int64(0), []string{}
	for i, e := range w.decode {
		s := e.Stats()
		over += s.OverAdmitted
		epochs = append(epochs, fmt.Sprintf("%s %d", groups[i], s.Epoch))
	}
	r.Add(scene, "audits 0, no slot, KV token or hand-off is held, by proxies' books and engines'; 0 requests of an earlier owner after those of a later one (epochs: %s); %d requests found a rank full", strings.Join(epochs, ", "), over)
	r.Hold(err == nil, scene, "%s", held)
	w.oneOwner(r, scene)
	return ctx.Err()
}
