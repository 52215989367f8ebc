package scenes

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/rigs/testbed"
)

// ordered are regions with engines of their own, which are taken over by order.
var ordered = kind{
	head:  func(w *site) string { return "three regions on " + w.words() },
	names: [sides]string{"us-1", "eu-1", "as-1"}, build: buildRegions, settings: regionSettings, settled: linked,
	scenes: []testbed.Scene[*site]{
		{Name: "the same bytes", Play: playSame},
		{Name: "first tokens", Play: playFirst},
		{Name: "loss", Play: playLoss},
		{Name: "a region dies", Play: playDeath},
		{Name: "a link is cut", Play: playCut},
		{Name: "afterwards", Play: playEmpty},
	},
}

const slots = 32 // of a region's decode rank

// Callers, by where their requests may go beside the region they are sent to:
// a region forwards each to the fastest of those, us being slow, eu less and as
// least, as their calibrations have it.
var callers = map[string][]string{"home": {}, "any": {"us", "eu", "as"}, "to-eu": {"eu"}, "to-as": {"as"}}

func keyOf(caller string) string { return "sk-scenes-" + caller }

// buildRegions starts two engines in each region, and writes the callers' keys.
func buildRegions(w *site) error {
	var keys strings.Builder
	keys.WriteString("keys:\n")
	for name := range callers {
		fmt.Fprintf(&keys, "  - {name: %s, sha256: %x, trusted: true}\n", name, sha256.Sum256([]byte(keyOf(name))))
	}
	for i := range w.all {
		p, err := w.there(i, "prefill", w.place(i).prefill, 0)
		d, failed := w.there(i, "decode", w.place(i).decode, slots, "--slots", fmt.Sprint(slots), "--group", names[i], "--c0", "5ms", "--c1",
			"1ns")
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		w.prefill, w.decode = append(w.prefill, p), append(w.decode, d)
	}
	return w.Write("keys.yaml", keys.String())
}

// regionSettings are a region's own. Its own engines are told to be so slow that another stays the
// better place even when the quarter is left of it that corrections leave. And they are told to
// need so much for attention (beta2_ms) that what else takes their time falls with a prompt's
// length: no line of prefill times is like that, so a proxy never learns how fast they really are.
// On a busy machine it did, from prompts that were answered together and count as one of twice the
// length.
func regionSettings(w *site, p *side) (geo, rest string) {
	rest = fmt.Sprintf(`keys_file: %q
expose_route_headers: true
profiles:
  ascend: {kv_hold_timeout: %v, first_event_timeout: 10s, reject_releases: true, api_key_env: %s}
prefill:
  calibration: {tp_ms: %g, t0_ms: %g, beta2_ms: %g}
  scrape: {interval: 200ms}
limits: {connect_timeout: 1s, probe_timeout: 10s, event_timeout: 3s, write_timeout: 3s, drain_timeout: 5s}
`, w.File("keys.yaml"), hold, environ, [...]float64{1, 0.5, 0.01}[p.index], [...]float64{400_000, 2500, 0.1}[p.index], [...]float64{1, 0.5, 0}[p.index])
	engine := "engine: static"
	if w.leases { // a third of the usual times and less
		engine = fmt.Sprintf("engine: etcd, etcd: {endpoints: [%q]}, lease: 3s", "http://"+p.store.Address())
	}
	geo = fmt.Sprintf("  probe: {interval: 200ms, misses: 5}\n  ownership: {%s, takeover_order: [us-1, as-1, eu-1], dead_after: %v}\n  "+
		"residency:\n", engine, w.deadAfter)
	for name, where := range callers {
		geo += fmt.Sprintf("    %s: [%s]\n", name, strings.Join(append([]string{p.region}, where...), ", "))
	}
	return geo, rest
}

// linked waits until every region may forward to each other.
func linked(ctx context.Context, w *site) error {
	for _, p := range w.all {
		if err := testbed.Await(ctx, patience, p.region+" is ready and both its peers are available", func() bool {
			others := w.others(p)
			return p.available(others[0]) && p.available(others[1]) && p.IsReady()
		}); err != nil {
			return err
		}
	}
	return nil
}

// peerStatus is what /geo says of a peer.
type peerStatus struct {
	ID        string            `json:"id"`
	RTTMs     float64           `json:"rtt_ms"`
	Available map[string]string `json:"available"`
}

func (p *side) seen(other *side) (is peerStatus) {
	var status struct {
		Peers []peerStatus `json:"peers"`
	}
	if p.Read("/geo", &status) {
		for _, is := range status.Peers {
			if is.ID == other.Name {
				return is
			}
		}
	}
	return is
}

func (p *side) available(other *side) bool { return p.seen(other).Available[model] == "available" }

// forwards is how many requests a region sent to another, and they ended well.
func (w *site) forwards(from, to int) float64 {
	return w.all[from].Metric(fmt.Sprintf(`evenkeel_geo_forwards_total{outcome="ok",peer=%q}`, w.all[to].Name))
}

// playFirst measures what a hop adds to the first token: one request at a time,
// to the region itself and through another, in turn.
func playFirst(ctx context.Context, w *site, r *testbed.Report) error {
	for _, way := range ways {
		cfg := func(at int, caller string) load.Config {
			return load.Config{
				URLs: []string{w.all[at].URL()}, APIKey: keyOf(caller), Model: model, Requests: lengths(3, 6),
				Count: max(1, w.count/3), Concurrency: 1, Chat: 0.5, Stream: 1, Seed: rand.Uint64(), Timeout: 20 * time.Second,
			}
		}
		var all []*load.Result
		var atPeer, through []float64
		before := w.forwards(way.from, way.to)
		for range 3 { // the machine's mood is in both
			there, err := testbed.Drive(ctx, nil, cfg(way.to, "home"))
			if err != nil {
				return err
			}
			here, err := testbed.Drive(ctx, nil, cfg(way.from, way.caller))
			if err != nil {
				return err
			}
			all = slices.Concat(all, there, here)
			atPeer, through = append(atPeer, there[0].All.TTFT.P50), append(through, here[0].All.TTFT.P50)
		}
		direct, hop := testbed.Median(atPeer), testbed.Median(through)
		rtt := 2 * float64(w.delays[link(way.from, way.to)]) / float64(time.Millisecond)
		scene := fmt.Sprintf("first token %v", way)
		row := r.Print
		if w.packets() {
			row = r.Add
		}
		row(scene, "round trip %.0f ms, as probed %.1f ms; at %s %.1f ms, through %s %.1f ms: %.1f ms more, %.2f round trips",
			rtt, w.all[way.from].seen(w.all[way.to]).RTTMs, names[way.to], direct, names[way.from], hop, hop-direct, (hop-direct)/rtt)
		s, sent := testbed.Count(lost, all...), w.forwards(way.from, way.to)-before
		s.AllRight(r, scene, "")
		r.Hold(sent > float64(s.Sent)/3, scene, "only %.0f of %d were forwarded", sent, s.Sent/2) // what the peer is too busy for stays
		// one round trip where a connection is open, two where it is not, and what two busy processes
		// take
		if w.packets() {
			r.Hold(hop-direct >= 0.9*rtt && hop-direct <= 2.5*rtt+25, scene, "a hop over %.0f ms adds %.1f ms", rtt, hop-direct)
		}
	}
	return nil
}

func playLoss(ctx context.Context, w *site, r *testbed.Report) error {
	scene := fmt.Sprintf("%g %% of all packets lost", w.loss*100)
	if !w.packets() {
		r.Skip(scene, "TCP hides loss from relays on loopback")
		return nil
	}
	w.lose(w.loss)
	results, err := w.under(ctx, w.load, []crowd{{us, "to-eu", 6}, {us, "to-as", 6}, {eu, "to-as", 6}}, nil)
	w.lose(0)
	if err != nil {
		return err
	}
	s := testbed.Count(lost, results...)
	r.Add(scene, "%d requests, all answered, every token right; TTFT p99 %.0f, %.0f and %.0f ms", s.Sent, results[0].All.TTFT.P99,
		results[1].All.TTFT.P99,
		results[2].All.TTFT.P99)
	s.AllRight(r, scene, "")
	return nil
}

// playDeath kills a region's proxy under load, lets its engines be taken over
// where the proxy can, and brings it back.
func playDeath(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "eu killed while it answers for us"
	dead, before := w.all[eu], w.forwards(us, eu)
	results, err := w.under(ctx, w.load, []crowd{{us, "to-eu", 12}, {us, "any", 6}, {as, "home", 4}}, func() error {
		if err := testbed.Pause(ctx, w.load/2); err != nil {
			return err
		}
		inflight := func() float64 {
			return w.all[us].Metric(`evenkeel_geo_forwards_inflight{peer="eu-1"}`)
		}
		// the load is over then
		for end := time.Now().Add(w.load / 2); time.Now().Before(end) && (w.forwards(us, eu) == before || inflight() < 4); {
			if err := testbed.Pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
		dead.Kill()
		return nil
	})
	if err != nil {
		return err
	}
	s, others := testbed.Count(lost, results[:2]...), testbed.Count(lost, results[2])
	r.Add(scene, "%d requests: %d right, %d streams ended in `peer_lost`; none was lost before its first event",
		s.Sent, s.Right, len(s.Told))
	r.Hold(len(s.Wrong) == 0 && s.Right+len(s.Told) == s.Sent && len(s.Told) <= 18, scene, "%s", s.First())
	if len(s.Told) == 0 {
		r.Skip("streams that a dead region leaves", "none was under way at eu when it died: this machine is too busy")
	}
	r.Hold(others.All(), scene, "as, which has nothing to do with it: %s, %d lost", others.First(), len(others.Told))

	if err := playTakeover(ctx, w, r); err != nil {
		return err
	}
	if err := dead.Serve(); err != nil {
		return err
	}
	return playReturn(ctx, w, r, "eu back", eu)
}

// playReturn waits until a region is used again.
func playReturn(ctx context.Context, w *site, r *testbed.Report, scene string, back int) error {
	start := time.Now()
	if err := testbed.Await(ctx, patience, names[back]+" is available again", func() bool {
		return w.all[us].available(w.all[back]) && w.all[as].available(w.all[back])
	}); err != nil {
		return err
	}
	took := time.Since(start)
	if !w.taken(ctx, false) {
		r.Hold(false, scene, "its engines were not handed back")
	}
	before := w.forwards(us, back)
	results, err := w.under(ctx, w.load, []crowd{{us, "to-" + names[back], 8}, {back, "home", 4}}, nil)
	if err != nil {
		return err
	}
	s := testbed.Count(lost, results...)
	r.Add(scene, "available after %.1f s; %.0f of %d requests at us forwarded, %d at %s, all right", took.Seconds(),
		w.forwards(us, back)-before, results[0].Sent,
		results[1].Sent, names[back])
	s.AllRight(r, scene, "")
	r.Hold(w.forwards(us, back) > before, scene, "nothing is forwarded to it")
	return nil
}

// taken waits until exactly one living region has eu's engines, or none.
func (w *site) taken(ctx context.Context, taken bool) bool {
	want := map[bool]float64{true: 1}[taken]
	return testbed.Await(ctx, patience, "one has them", func() bool {
		sum := 0.0
		for _, i := range []int{us, as} {
			sum += w.all[i].Metric("evenkeel_geo_takeover_active")
		}
		return sum == want
	}) == nil
}

// playTakeover has us, whose own prefill engine is killed as well, serve its
// clients with the engines of eu: those whose requests may be there.
func playTakeover(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "eu's engines taken over by us"
	start, taker := time.Now(), w.all[us]
	if !w.taken(ctx, true) {
		r.Add(scene, "nobody took them")
		r.Hold(false, scene, "nobody has them")
		return nil
	}
	took := time.Since(start)
	w.prefill[us].Kill()
	const prompts = "vllm:prefix_cache_queries_total" // tokens it was asked to prefill
	before := w.prefill[eu].Metric(prompts)
	if err := testbed.Await(ctx, patience, "us is ready with eu's engines alone", func() bool {
		a, err := w.post(ctx, taker, "to-eu", "/v1/completions", `{"model":"ref","prompt":"a b c","max_tokens":2}`, false)
		return err == nil && a.Status == 200
	}); err != nil {
		return err
	}
	results, err := w.under(ctx, w.load, []crowd{{us, "to-eu", 10}, {as, "home", 4}}, nil)
	if err != nil {
		return err
	}
	s, there := testbed.Count(lost, results...), w.prefill[eu].Metric(prompts)-before
	how := fmt.Sprintf("`dead_after: %v`, static", w.deadAfter)
	if w.leases {
		how = "etcd, `lease: 3s`"
	}
	r.Add(scene, "%.1f s after the last stream that it answered (%s); us's own prefill engine killed, too: "+
		"%d of its requests, all right, %.0f prompt tokens prefilled by eu's engines",
		took.Seconds(), how, results[0].Sent, there)
	s.AllRight(r, scene, "")
	r.Hold(there >= float64(promptTokens*results[0].Sent), scene, "eu's engines prefilled only %.0f tokens", there)
	return w.prefill[us].start()
}

// playCut lets nothing pass between us and eu for a while, under load.
func playCut(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "us and eu cut off from each other"
	results, err := w.under(ctx, w.load, []crowd{{us, "to-eu", 12}, {us, "to-as", 4}, {eu, "to-as", 4}}, func() error {
		if err := testbed.Pause(ctx, w.load/4); err != nil {
			return err
		}
		w.cut(us, eu, true)
		defer w.cut(us, eu, false)
		return testbed.Pause(ctx, w.load/2)
	})
	if err != nil {
		return err
	}
	s, others := testbed.Count(lost, results[0]), testbed.Count(lost, results[1:]...)
	r.Add(scene, "for %v: %d requests for eu: %d right, %d streams ended in `peer_lost`, none lost before its first event; %d for as all "+
		"right", w.load/2, s.Sent, s.Right,
		len(s.Told), others.Sent)
	r.Hold(len(s.Wrong) == 0 && s.Right+len(s.Told) == s.Sent && len(s.Told) <= 12, scene, "%s", s.First())
	r.Hold(others.All(), scene, "ways that were not cut: %s, %d lost", others.First(), len(others.Told))
	return playReturn(ctx, w, r, "healed", eu)
}

// playEmpty holds that nothing is left of all that.
func playEmpty(ctx context.Context, w *site, r *testbed.Report) error {
	held := w.held(ctx)
	r.Add(afterwards, "no slot, KV token, hand-off or forward is held, by proxies' books and engines'")
	r.Hold(held == nil, afterwards, "%v", held)
	return ctx.Err()
}
