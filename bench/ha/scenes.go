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
	"evenkeel/bench/trace"
	"evenkeel/bench/world"
)

var scenes = []world.Scene[*site]{
	{Name: "served by all", Play: playAll},
	{Name: "owner killed", Play: playKill},
	{Name: "owner back", Play: playBack},
	{Name: "owner ended", Play: playEnd},
	{Name: "owner stands still", Play: playStop},
	{Name: "owner cut off", Play: playCut},
	{Name: "store away", Play: playAway},
	{Name: "afterwards", Play: playAfter},
}

// under has the clients of some proxies ask without pause, until the function
// it returns is called, with what they got.
func (w *site) under(ctx context.Context, of ...*proxy) (end func() *load.Result) {
	c := load.Config{
		Model: model, Concurrency: w.clients * len(of), Chat: 0.5, Stream: 0.7, Usage: 0.3, Seed: uint64(time.Now().UnixNano()), Timeout: time.Minute, Duration: time.Hour,
		Backoff: 50 * time.Millisecond, KeepFailures: 1 << 20,
	}
	for _, p := range of {
		c.URLs = append(c.URLs, p.URL())
	}
	for i := range 499 {
		c.Requests = append(c.Requests, trace.Request{Prompt: 20 + 7*i%150, Output: 10 + 13*i%90})
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := load.Start(ctx, c)
	return func() *load.Result {
		cancel()
		r, err := ended()
		if err != nil {
			return &load.Result{Failures: []load.Failure{{Kind: "load", Detail: err.Error()}}}
		}
		return r
	}
}

// others are all proxies but one.
func (w *site) others(p *proxy) []*proxy {
	return slices.DeleteFunc(slices.Clone(w.all[:]), func(o *proxy) bool { return o == p })
}

// kinds says how requests ended that did not end well.
func kinds(r *load.Result) string {
	count := map[string]int{}
	for _, f := range r.Failures {
		kind := string(f.Kind)
		for _, code := range []string{"peer_lost", "draining", "owner_lost", "not_owner"} {
			if says(f, code) {
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
			list = append(list, f.String())
		}
	}
	return strings.Join(list[:min(len(list), 5)], "; ")
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

func playAll(ctx context.Context, w *site, r *world.Report) error {
	const scene = "all three serve"
	end := w.under(ctx, w.all[:]...)
	err := world.Pause(ctx, w.load)
	got := end()
	forwards := 0.0
	for _, p := range w.all {
		forwards += p.Metric(`evenkeel_geo_forwards_total{outcome="ok"`)
	}
	r.Add(scene, "%s; %.0f forwarded to an owner, the rest served where they came", kinds(got), forwards)
	r.Hold(got.OK > 0 && len(got.Failures) == 0, scene, "%s", but(got, none))
	r.Hold(forwards > 0, scene, "nothing was forwarded")
	return err
}

// handover is what became of a group whose owner something was done to.
type handover struct {
	p, taker    *proxy
	took        time.Duration // until the taker had the group
	others, own *load.Result  // of the clients of the others, and of its own
}

// away does something to the owner of a group under load and measures until
// another has it.
func (w *site) away(ctx context.Context, group string, do func(*proxy)) (h handover, err error) {
	if h.p = w.owner(group); h.p == nil {
		return h, fmt.Errorf("%s has no owner", group)
	}
	endOthers, endOwn := w.under(ctx, w.others(h.p)...), w.under(ctx, h.p)
	if err = world.Pause(ctx, w.load); err == nil {
		at := time.Now()
		do(h.p)
		err = world.Await(ctx, 4*w.lease, "another proxy has "+group, func() bool {
			for _, o := range w.others(h.p) {
				if o.owns(group) {
					h.taker = o
				}
			}
			return h.taker != nil
		})
		h.took = time.Since(at)
	}
	if err == nil {
		err = world.Pause(ctx, w.load)
	}
	h.others, h.own = endOthers(), endOwn()
	return h, err
}

// takenOver adds the row of a handover that a dead owner does not take part in, and
// holds what is promised of it.
func (w *site) takenOver(r *world.Report, scene string, h handover, more string) {
	r.Add(scene, "%s has the group after %.1f s, %.2f leases; clients of the others: %s%s", h.taker.Name, h.took.Seconds(),
		h.took.Seconds()/w.lease.Seconds(), kinds(h.others), more)
	r.Hold(h.took < 2*w.lease, scene, "taken over after %v", h.took)
	r.Hold(but(h.others, lost) == "", scene, "clients of the others: %s", but(h.others, lost))
	w.oneOwner(r, scene)
}

func playKill(ctx context.Context, w *site, r *world.Report) error {
	const scene = "owner of a group killed (SIGKILL)"
	h, err := w.away(ctx, "east", func(p *proxy) { _ = p.Signal(os.Kill) })
	if err != nil {
		return err
	}
	<-h.p.Gone()
	w.takenOver(r, scene, h, "; its own: "+kinds(h.own))
	r.Hold(but(h.own, cut) == "", scene, "its own clients: %s", but(h.own, cut))
	return h.p.Serve()
}

func playBack(ctx context.Context, w *site, r *world.Report) error {
	const scene = "it is back"
	end := w.under(ctx, w.all[0], w.all[1], w.all[2])
	at := time.Now()
	err := w.rest(ctx)
	took := time.Since(at)
	if err == nil {
		err = world.Pause(ctx, w.load)
	}
	got := end()
	r.Add(scene, "has its groups again after %.1f s, of which it was watched for one lease; clients of all: %s", took.Seconds(), kinds(got))
	starting := func(f load.Failure) bool { // it was not ready yet
		return f.Kind == load.Connect || f.Kind == load.Reset || slices.ContainsFunc([]string{"no_region_available", "prefill_unavailable", "decode_unavailable"},
			func(code string) bool { return says(f, code) })
	}
	r.Hold(but(got, starting) == "", scene, "%s", but(got, starting))
	w.oneOwner(r, scene)
	return err
}

func playEnd(ctx context.Context, w *site, r *world.Report) error {
	const scene = "owner ended (SIGTERM)"
	h, err := w.away(ctx, "west", func(p *proxy) { _ = p.Signal(syscall.SIGTERM) })
	if err != nil {
		return err
	}
	<-h.p.Gone()
	r.Add(scene, "%s has the group after %.2f s; clients of the others: %s; its own: %s", h.taker.Name, h.took.Seconds(), kinds(h.others), kinds(h.own))
	r.Hold(h.took < w.lease, scene, "handed over after %v", h.took)
	r.Hold(len(h.others.Failures) == 0, scene, "clients of the others: %s", but(h.others, none))
	leaving := func(f load.Failure) bool {
		return f.Kind == load.Connect || f.Kind == load.Reset || says(f, "draining")
	}
	r.Hold(but(h.own, leaving) == "", scene, "its own clients: %s", but(h.own, leaving))
	w.oneOwner(r, scene)
	if err := h.p.Serve(); err != nil {
		return err
	}
	return w.rest(ctx)
}

// playStop lets an owner stand still in the middle of its work until its groups
// are another's, and wake then with all that it was about to do.
func playStop(ctx context.Context, w *site, r *world.Report) error {
	const scene = "owner stands still (SIGSTOP)"
	h, err := w.away(ctx, "east", func(p *proxy) { _ = p.Signal(syscall.SIGSTOP) })
	if h.p != nil {
		_ = h.p.Signal(syscall.SIGCONT)
	}
	if err != nil {
		return err
	}
	endOthers := w.under(ctx, w.others(h.p)...)
	if err := w.rest(ctx); err != nil {
		return err
	}
	after := endOthers()
	w.takenOver(r, scene, h, "; its own: "+kinds(h.own)+"; after it woke: "+kinds(after))
	r.Hold(len(after.Failures) == 0, scene, "after it woke: %s", but(after, none))
	return nil
}

// oneOwner holds what the engines saw.
func (w *site) oneOwner(r *world.Report, scene string) {
	for i, e := range w.decode {
		s := e.Stats()
		r.Hold(s.StaleEpochs == 0, scene, "%s saw %d requests of an owner after those of a later one", groups[i], s.StaleEpochs)
		r.Hold(s.DuplicateIDs == 0 && s.Replays == 0 && s.WrongBlocks == 0 && s.KeyMismatches == 0, scene, "%s: %+v", groups[i], s)
	}
}

// playAfter holds that nothing is left of all that.
func playAfter(ctx context.Context, w *site, r *world.Report) error {
	const scene = "after the last request"
	err := world.Idle(ctx, 20*time.Second, func() []string {
		held := world.HeldBy(slices.Concat(w.prefill, w.decode)...)
		for _, p := range w.all {
			held = append(held, p.Held(p.Name)...)
		}
		return held
	})
	over, epochs := int64(0), []string{}
	for i, e := range w.decode {
		s := e.Stats()
		over += s.OverAdmitted
		epochs = append(epochs, fmt.Sprintf("%s %d", groups[i], s.Epoch))
	}
	r.Add(scene, "audits 0, no slot, KV token or hand-off is held, by proxies' books and engines'; 0 requests of an earlier owner after those of a later one (epochs: "+
		"%s); %d requests found a rank full", strings.Join(epochs, ", "), over)
	r.Hold(err == nil, scene, "%v", err)
	w.oneOwner(r, scene)
	return ctx.Err()
}
