package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/trace"
	"evenkeel/bench/world"
)

var scenes = []world.Scene[*site]{
	{Name: "the same bytes", Play: playSame},
	{Name: "first tokens", Play: playFirst},
	{Name: "loss", Play: playLoss},
	{Name: "a region dies", Play: playDeath},
	{Name: "a link is cut", Play: playCut},
	{Name: "afterwards", Play: playAfter},
}

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

// crowd is a load at one region.
type crowd struct {
	at          int
	caller      string
	concurrency int
	stream      float64
}

// crowds load several regions at once; act is what happens meanwhile.
func (w *site) crowds(ctx context.Context, list []crowd, act func() error) ([]*load.Result, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var ended []func() (*load.Result, error)
	for _, c := range list {
		ended = append(ended, load.Start(ctx, load.Config{
			URLs: []string{w.regions[c.at].url()}, APIKey: keyOf(c.caller), Model: model, Requests: lengths(20, 100), Duration: w.load, Concurrency: c.concurrency,
			Chat: 0.5, Stream: c.stream, Usage: 0.3, Seed: uint64(time.Now().UnixNano()), Timeout: 30 * time.Second, Backoff: 100 * time.Millisecond, KeepFailures: 1 << 20,
		}))
	}
	var err error
	if act != nil {
		if err = act(); err != nil {
			stop()
		}
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
	sent, ok, lost int
	wrong          []string
}

// judge sums results. Lost are streams that had begun and ended in the error
// event that says so; everything else that is not right is wrong.
func judge(results ...*load.Result) (s sums) {
	for _, r := range results {
		s.sent += r.Sent
		s.ok += r.OK
		for _, f := range r.Failures {
			if f.Kind == load.ErrorEvent && f.Stream && strings.Contains(f.Detail, "peer_lost") {
				s.lost++
			} else {
				s.wrong = append(s.wrong, f.String())
			}
		}
	}
	return s
}

func (s sums) first(n int) string {
	return fmt.Sprintf("%d requests: %s", len(s.wrong), strings.Join(s.wrong[:min(n, len(s.wrong))], "; "))
}

// forwards is how many requests a region sent to another, and they ended well.
func (w *site) forwards(from, to int) float64 {
	return w.regions[from].Metric(fmt.Sprintf(`evenkeel_geo_forwards_total{outcome="ok",peer="%s-1"}`, names[to]))
}

// playFirst measures what a hop adds to the first token: one request at a time,
// to the region itself and through another, in turn.
func playFirst(ctx context.Context, w *site, r *world.Report) error {
	for _, way := range ways {
		cfg := func(at int, caller string) load.Config {
			return load.Config{
				URLs: []string{w.regions[at].url()}, APIKey: keyOf(caller), Model: model, Requests: lengths(3, 6), Count: w.count / 3, Concurrency: 1,
				Chat: 0.5, Stream: 1, Seed: rand.Uint64(), Timeout: 20 * time.Second,
			}
		}
		var there, here []*load.Result
		before := w.forwards(way.from, way.to)
		for range 3 { // the machine's mood is in both
			a, err := load.Run(ctx, cfg(way.to, "home"))
			if err != nil {
				return err
			}
			b, err := load.Run(ctx, cfg(way.from, way.caller))
			if err != nil {
				return err
			}
			there, here = append(there, a), append(here, b)
		}
		direct, hop := median(there), median(here)
		rtt := 2 * float64(w.delays[link(way.from, way.to)]) / float64(time.Millisecond)
		scene := fmt.Sprintf("first token %v", way)
		row := r.Print
		if w.packets() {
			row = r.Add
		}
		row(scene, "round trip %.0f ms, as probed %.1f ms; at %s %.1f ms, through %s %.1f ms: %.1f ms more, %.2f round trips",
			rtt, w.regions[way.from].seen(w.regions[way.to]).RTTMs, names[way.to], direct, names[way.from], hop, hop-direct, (hop-direct)/rtt)
		s, sent := judge(append(there, here...)...), w.forwards(way.from, way.to)-before
		r.Hold(s.ok == s.sent, scene, "%s, %d lost", s.first(5), s.lost)
		r.Hold(sent > float64(s.sent)/3, scene, "only %.0f of %d were forwarded", sent, s.sent/2) // what the peer is too busy for stays
		// one round trip where a connection is open, two where it is not, and what two busy processes take
		if w.packets() {
			r.Hold(hop-direct >= 0.9*rtt && hop-direct <= 2.5*rtt+25, scene, "a hop over %.0f ms adds %.1f ms", rtt, hop-direct)
		}
	}
	return nil
}

// median is that of the runs' medians, in ms.
func median(runs []*load.Result) float64 {
	a, b, c := runs[0].All.TTFT.P50, runs[1].All.TTFT.P50, runs[2].All.TTFT.P50
	return max(min(a, b), min(max(a, b), c))
}

func playLoss(ctx context.Context, w *site, r *world.Report) error {
	scene := fmt.Sprintf("%g %% of all packets lost", w.loss*100)
	if !w.packets() {
		r.Skip(scene, "TCP hides loss from relays on loopback")
		return nil
	}
	if err := w.lose(w.loss); err != nil {
		return err
	}
	results, err := w.crowds(ctx, []crowd{{us, "to-eu", 6, 0.8}, {us, "to-as", 6, 0.8}, {eu, "to-as", 6, 0.8}}, nil)
	if err != nil {
		return err
	}
	if err := w.lose(0); err != nil {
		return err
	}
	s := judge(results...)
	r.Add(scene, "%d requests, all answered, every token right; TTFT p99 %.0f, %.0f and %.0f ms", s.sent, results[0].All.TTFT.P99, results[1].All.TTFT.P99,
		results[2].All.TTFT.P99)
	r.Hold(s.ok == s.sent && s.sent > 0, scene, "%d of %d right, %d lost, %s", s.ok, s.sent, s.lost, s.first(5))
	return nil
}

// playDeath kills a region's proxy under load, lets its engines be taken over
// where the proxy can, and brings it back.
func playDeath(ctx context.Context, w *site, r *world.Report) error {
	const scene = "eu killed while it answers for us"
	dead, before := w.regions[eu], w.forwards(us, eu)
	results, err := w.crowds(ctx, []crowd{{us, "to-eu", 12, 0.8}, {us, "any", 6, 0.8}, {as, "home", 4, 0.8}}, func() error {
		if err := world.Pause(ctx, w.load/2); err != nil {
			return err
		}
		inflight := func() float64 {
			return w.regions[us].Metric(`evenkeel_geo_forwards_inflight{peer="eu-1"}`)
		}
		for end := time.Now().Add(w.load / 2); time.Now().Before(end) && (w.forwards(us, eu) == before || inflight() < 4); { // the load is over then
			if err := world.Pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
		dead.proxy.Kill()
		return nil
	})
	if err != nil {
		return err
	}
	s, others := judge(results[:2]...), judge(results[2])
	r.Add(scene, "%d requests: %d right, %d streams ended in `peer_lost`; none was lost before its first event", s.sent, s.ok, s.lost)
	r.Hold(len(s.wrong) == 0 && s.ok+s.lost == s.sent && s.lost <= 18, scene, "%s", s.first(5))
	if s.lost == 0 {
		r.Skip("streams that a dead region leaves", "none was under way at eu when it died: this machine is too busy")
	}
	r.Hold(others.ok == others.sent, scene, "as, which has nothing to do with it: %s, %d lost", others.first(5), others.lost)

	if err := playTakeover(ctx, w, r); err != nil {
		return err
	}
	if err := dead.startProxy(); err != nil {
		return err
	}
	return playReturn(ctx, w, r, "eu back", eu)
}

// playReturn waits until a region is used again.
func playReturn(ctx context.Context, w *site, r *world.Report, scene string, back int) error {
	start := time.Now()
	if err := world.Await(ctx, patience, names[back]+" is available again", func() bool {
		return w.regions[us].available(w.regions[back]) && w.regions[as].available(w.regions[back])
	}); err != nil {
		return err
	}
	took := time.Since(start)
	if w.owns && !w.taken(ctx, false) {
		r.Hold(false, scene, "its engines were not handed back")
	}
	before := w.forwards(us, back)
	results, err := w.crowds(ctx, []crowd{{us, "to-" + names[back], 8, 0.8}, {back, "home", 4, 0.8}}, nil)
	if err != nil {
		return err
	}
	s := judge(results...)
	r.Add(scene, "available after %.1f s; %.0f of %d requests at us forwarded, %d at %s, all right", took.Seconds(), w.forwards(us, back)-before, results[0].Sent,
		results[1].Sent, names[back])
	r.Hold(s.ok == s.sent, scene, "%d of %d right, %d lost, %s", s.ok, s.sent, s.lost, s.first(5))
	r.Hold(w.forwards(us, back) > before, scene, "nothing is forwarded to it")
	return nil
}

// taken waits until exactly one living region has eu's engines, or none.
func (w *site) taken(ctx context.Context, taken bool) bool {
	want := map[bool]float64{true: 1}[taken]
	return world.Await(ctx, patience, "one has them", func() bool {
		sum := 0.0
		for _, i := range []int{us, as} {
			sum += w.regions[i].Metric("evenkeel_geo_takeover_active")
		}
		return sum == want
	}) == nil
}

// playTakeover has us, whose own prefill engine is killed as well, serve its
// clients with the engines of eu: those whose requests may be there.
func playTakeover(ctx context.Context, w *site, r *world.Report) error {
	const scene = "eu's engines taken over by us"
	if !w.owns {
		r.Skip(scene, "this proxy has no `geo.ownership`")
		return nil
	}
	start, taker := time.Now(), w.regions[us]
	if !w.taken(ctx, true) {
		r.Add(scene, "nobody took them")
		r.Hold(false, scene, "nobody has them")
		return nil
	}
	took := time.Since(start)
	taker.prefill.Kill()
	const prompts = "vllm:prefix_cache_queries_total" // tokens it was asked to prefill
	before := w.at(w.regions[eu].place.prefill).Metric(prompts)
	if err := world.Await(ctx, patience, "us is ready with eu's engines alone", func() bool {
		a, err := w.post(ctx, taker, "to-eu", "/v1/completions", `{"model":"ref","prompt":"a b c","max_tokens":2}`, false)
		return err == nil && a.Status == 200
	}); err != nil {
		return err
	}
	results, err := w.crowds(ctx, []crowd{{us, "to-eu", 10, 0.8}, {as, "home", 4, 0.8}}, nil)
	if err != nil {
		return err
	}
	s, there := judge(results...), w.at(w.regions[eu].place.prefill).Metric(prompts)-before
	how := fmt.Sprintf("`dead_after: %v`, static", w.deadAfter)
	if w.lease != "" {
		how = "etcd, `lease: 3s`, `start_delay: 1s`"
	}
	r.Add(scene, "%.1f s after the last stream that it answered (%s); us's own prefill engine killed, too: %d of its requests, all right, %.0f prompt tokens prefilled by "+
		"eu's engines",
		took.Seconds(), how, results[0].Sent, there)
	r.Hold(s.ok == s.sent && s.sent > 0, scene, "%d of %d right, %d lost, %s", s.ok, s.sent, s.lost, s.first(5))
	r.Hold(there >= float64(promptTokens*results[0].Sent), scene, "eu's engines prefilled only %.0f tokens", there)
	return taker.startPrefill()
}

// playCut lets nothing pass between us and eu for a while, under load.
func playCut(ctx context.Context, w *site, r *world.Report) error {
	const scene = "us and eu cut off from each other"
	results, err := w.crowds(ctx, []crowd{{us, "to-eu", 12, 0.8}, {us, "to-as", 4, 0.8}, {eu, "to-as", 4, 0.8}}, func() error {
		if err := world.Pause(ctx, w.load/4); err != nil {
			return err
		}
		if err := w.cut(us, eu, true); err != nil {
			return err
		}
		if err := world.Pause(ctx, w.load/2); err != nil {
			return err
		}
		return w.cut(us, eu, false)
	})
	if err != nil {
		return err
	}
	s, others := judge(results[0]), judge(results[1:]...)
	r.Add(scene, "for %v: %d requests for eu: %d right, %d streams ended in `peer_lost`, none lost before its first event; %d for as all right", w.load/2, s.sent, s.ok,
		s.lost, others.sent)
	r.Hold(len(s.wrong) == 0 && s.ok+s.lost == s.sent && s.lost <= 12, scene, "%s", s.first(5))
	r.Hold(others.ok == others.sent, scene, "ways that were not cut: %s, %d lost", others.first(5), others.lost)
	return playReturn(ctx, w, r, "healed", eu)
}

// playAfter holds that nothing is left of all that.
func playAfter(ctx context.Context, w *site, r *world.Report) error {
	const scene = "after the last request"
	err := world.Idle(ctx, patience, func() (held []string) {
		for _, one := range w.regions {
			held = append(held, one.Held(one.name)...)
			for _, at := range []string{one.place.prefill, one.place.decode} {
				if engine := w.at(at); engine.Metric("vllm:num_requests_running")+engine.Metric("vllm:kv_cache_usage_perc") != 0 {
					held = append(held, fmt.Sprintf("%s: the engine %s still runs or holds something", one.name, at))
				}
			}
		}
		return held
	})
	r.Add(scene, "no slot, KV token, hand-off or forward is held, by proxies' books and engines'")
	r.Hold(err == nil, scene, "%v", err)
	return ctx.Err()
}
