package scenes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// shard are proxies of one region in front of the same engines.
var shard = kind{
	head: func(w *site) string {
		return fmt.Sprintf("three proxies, two decode groups, `lease: %v`, %d clients each", w.lease, w.clients)
	},
	names: [sides]string{"here-0", "here-1", "here-2"}, leases: true, build: buildShard, settings: shardSettings, settled: rest,
	scenes: []testbed.Scene[*site]{
		{Name: "served by all", Play: playAll},
		{Name: "owner killed", Play: playKill},
		{Name: "owner back", Play: playBack},
		{Name: "owner ended", Play: playEnd},
		{Name: "owner stands still", Play: playStop},
		{Name: "owner cut off", Play: playApart},
		{Name: "store away", Play: playAway},
		{Name: "afterwards", Play: playAfter},
	},
}

var groups = []string{"east", "west"}

func buildShard(w *site) error {
	prefill := refengine.Config{Role: refengine.Prefill, KV: refengine.KV{PrefixCache: 4096, HoldTimeout: hold, RejectReleases: true}}
	decode := refengine.Config{Role: refengine.Decode, DPSize: 2, Slots: 16,
		Steps: refengine.Steps{C0: 5 * time.Millisecond, C1: time.Nanosecond},
		KV:    refengine.KV{RejectReleases: true}}
	for _, decode.Group = range groups {
		p, err := w.here(prefill)
		d, failed := w.here(decode)
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		w.prefill, w.decode = append(w.prefill, p), append(w.decode, d)
	}
	return nil
}

func shardSettings(w *site, p *side) (geo, rest string) {
	return "", fmt.Sprintf(`profiles:
  ascend: {kv_hold_timeout: %v, first_event_timeout: 10s, reject_releases: true}
limits: {connect_timeout: 1s, probe_timeout: 10s, event_timeout: 5s, drain_grace: 1s, drain_timeout: 10s}
ha: {mode: shard, engine: etcd, lease: %v, members: [here-0, here-1, here-2], etcd: {endpoints: [%q]}}
`, hold, w.lease, "http://"+p.store.Address())
}

// owns says whether the proxy admits to a group; one that does not answer owns none.
func (p *side) owns(group string) bool {
	return p.Metric(fmt.Sprintf("evenkeel_ha_owner{group=%q}", group)) == 1
}

// owners are the proxies that admit to a group: none, or one, or by mistake several.
func (w *site) owners(group string) (list []*side) {
	return slices.DeleteFunc(slices.Clone(w.all[:]), func(p *side) bool { return !p.owns(group) })
}

// rest waits until every group is with the proxy that all think should have it. A
// machine that has other work takes longer than for anything else.
func rest(ctx context.Context, w *site) error {
	return testbed.Await(ctx, 3*patience, "all proxies are ready, know each other, and have their groups", func() bool {
		for _, p := range w.all {
			var s struct {
				Ready bool
				HA    struct {
					Members []string
					Groups  []struct {
						Admits bool
						Order  []string
					}
				}
			}
			if !p.Read("/status", &s) || !s.Ready || len(s.HA.Members) < sides {
				return false
			}
			for _, g := range s.HA.Groups {
				if len(g.Order) == 0 || g.Admits != (g.Order[0] == p.Name) {
					return false
				}
			}
		}
		return true
	})
}

// asked has the clients of some proxies ask without pause while act goes on.
func (w *site) asked(ctx context.Context, of []*side, act func() error) ([]*load.Result, error) {
	var list []crowd
	for _, p := range of {
		list = append(list, crowd{p.index, "", w.clients})
	}
	return w.under(ctx, 0, list, act)
}

func playAll(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "all three serve"
	results, err := w.asked(ctx, w.all[:], func() error { return testbed.Pause(ctx, w.load) })
	if err != nil {
		return err
	}
	got, forwards := testbed.Count(testbed.None, results...), 0.0
	for _, p := range w.all {
		forwards += p.Metric(`evenkeel_geo_forwards_total{outcome="ok"`)
	}
	r.Add(scene, "%v; %.0f forwarded to an owner, the rest served where they came", got, forwards)
	got.NoneWrong(r, scene, "")
	r.Hold(got.Right > 0, scene, "nothing was served")
	r.Hold(forwards > 0, scene, "nothing was forwarded")
	return nil
}

// handover is what became of a group whose owner something was done to.
type handover struct {
	p, taker    *side
	took        time.Duration  // until the taker had the group
	others, own []*load.Result // of the clients of the others, and of its own
}

// handOver does something to the owner of a group under load and measures until
// another has it.
func (w *site) handOver(ctx context.Context, group string, do func(*side)) (h handover, err error) {
	owners := w.owners(group)
	if len(owners) == 0 {
		return h, fmt.Errorf("%s has no owner", group)
	}
	h.p = owners[0]
	others := w.others(h.p)
	results, err := w.asked(ctx, append([]*side{h.p}, others...), func() error {
		if err := testbed.Pause(ctx, w.load); err != nil {
			return err
		}
		at := time.Now()
		do(h.p)
		err := testbed.Await(ctx, 4*w.lease, "another proxy has "+group, func() bool {
			i := slices.IndexFunc(others, func(o *side) bool { return o.owns(group) })
			if i >= 0 {
				h.taker = others[i]
			}
			return i >= 0
		})
		h.took = time.Since(at)
		return errors.Join(err, testbed.Pause(ctx, w.load))
	})
	if err == nil {
		h.own, h.others = results[:1], results[1:]
	}
	return h, err
}

// takenOver adds the row of a handover that a dead owner does not take part in, and
// holds what is promised of it.
func (w *site) takenOver(r *testbed.Report, scene string, h handover, more string) {
	others := testbed.Count(lost, h.others...)
	r.Add(scene, "%s has the group after %.1f s, %.2f leases; clients of the others: %v%s",
		h.taker.Name, h.took.Seconds(), h.took.Seconds()/w.lease.Seconds(), others, more)
	r.Hold(h.took < 2*w.lease, scene, "taken over after %v", h.took)
	others.NoneWrong(r, scene, "clients of the others: ")
	w.oneOwner(r, scene)
}

func playKill(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "owner of a group killed (SIGKILL)"
	h, err := w.handOver(ctx, "east", func(p *side) { _ = p.Signal(os.Kill) })
	if err != nil {
		return err
	}
	<-h.p.Gone()
	own := testbed.Count(cut, h.own...)
	w.takenOver(r, scene, h, fmt.Sprint("; its own: ", own))
	own.NoneWrong(r, scene, "its own clients: ")
	return h.p.Serve()
}

func playBack(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "it is back"
	var took time.Duration
	results, err := w.asked(ctx, w.all[:], func() error {
		at := time.Now()
		err := rest(ctx, w)
		took = time.Since(at)
		return errors.Join(err, testbed.Pause(ctx, w.load))
	})
	if err != nil {
		return err
	}
	got := testbed.Count(func(f load.Failure) bool { // it was not ready yet
		return f.Kind == load.Connect || f.Kind == load.Reset ||
			slices.ContainsFunc([]string{"no_region_available", "prefill_unavailable", "decode_unavailable"},
				func(code string) bool { return says(f, code) })
	}, results...)
	r.Add(scene, "has its groups again after %.1f s, of which it was watched for one lease; clients of all: %v", took.Seconds(), got)
	got.NoneWrong(r, scene, "")
	w.oneOwner(r, scene)
	return nil
}

func playEnd(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "owner ended (SIGTERM)"
	h, err := w.handOver(ctx, "west", func(p *side) { _ = p.Signal(syscall.SIGTERM) })
	if err != nil {
		return err
	}
	<-h.p.Gone()
	others, own := testbed.Count(testbed.None, h.others...), testbed.Count(func(f load.Failure) bool {
		return f.Kind == load.Connect || f.Kind == load.Reset || says(f, "draining")
	}, h.own...)
	r.Add(scene, "%s has the group after %.2f s; clients of the others: %v; its own: %v", h.taker.Name, h.took.Seconds(), others, own)
	r.Hold(h.took < w.lease, scene, "handed over after %v", h.took)
	others.NoneWrong(r, scene, "clients of the others: ")
	own.NoneWrong(r, scene, "its own clients: ")
	w.oneOwner(r, scene)
	return errors.Join(h.p.Serve(), rest(ctx, w))
}

// playStop lets an owner stand still in the middle of its work until its groups
// are another's, and wake then with all that it was about to do.
func playStop(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "owner stands still (SIGSTOP)"
	h, err := w.handOver(ctx, "east", func(p *side) { _ = p.Signal(syscall.SIGSTOP) })
	if h.p != nil {
		_ = h.p.Signal(syscall.SIGCONT)
	}
	if err != nil {
		return err
	}
	results, err := w.asked(ctx, w.others(h.p), func() error { return rest(ctx, w) })
	if err != nil {
		return err
	}
	after := testbed.Count(testbed.None, results...)
	own := testbed.Count(func(load.Failure) bool { return true }, h.own...) // it stood still under them
	w.takenOver(r, scene, h, fmt.Sprintf("; its own: %v; after it woke: %v", own, after))
	after.NoneWrong(r, scene, "after it woke: ")
	return nil
}

// playApart cuts an owner off from the store and from the other proxies: it stops by
// itself, and another takes its group.
func playApart(ctx context.Context, w *site, r *testbed.Report) error {
	h, err := w.handOver(ctx, "west", func(p *side) { w.isolate(p, true) })
	if h.p != nil {
		w.isolate(h.p, false)
	}
	if err != nil {
		return err
	}
	w.takenOver(r, "owner cut off from the store and from the others", h, "")
	return rest(ctx, w)
}

// playAway takes the store away from all proxies for a minute: with closed membership
// each group stays with its owner, and no request fails.
func playAway(ctx context.Context, w *site, r *testbed.Report) error {
	scene := fmt.Sprintf("nobody reaches the store for %v", w.absence)
	owners := func(group string) string {
		var list []string
		for _, p := range w.owners(group) {
			list = append(list, p.Name)
		}
		return strings.Join(list, " and ")
	}
	before := []string{owners(groups[0]), owners(groups[1])}
	pledged, moved := false, ""
	results, err := w.asked(ctx, w.all[:], func() error {
		err := w.away(ctx, func(left time.Duration) {
			for i, g := range groups {
				for _, p := range w.all {
					pledged = pledged || p.Metric(fmt.Sprintf("evenkeel_ha_pledged{group=%q}", g)) == 1
				}
				if now := owners(g); now != before[i] && moved == "" {
					moved = fmt.Sprintf("%s was %s's and is %q's %v before the store is back", g, before[i], now, left.Round(time.Second))
				}
			}
		})
		return errors.Join(err, testbed.Pause(ctx, 2*w.lease))
	})
	if err != nil {
		return err
	}
	got := testbed.Count(testbed.None, results...)
	r.Add(scene, "every group stays with its owner, which the others promise; clients of all: %v", got)
	r.Hold(pledged, scene, "no group was held by promises")
	r.Hold(moved == "", scene, "%s", moved)
	r.Hold(got.Right > 0, scene, "nothing was served")
	got.NoneWrong(r, scene, "")
	w.oneOwner(r, scene)
	return rest(ctx, w)
}

// oneOwner holds what the decode engines saw.
func (w *site) oneOwner(r *testbed.Report, scene string) {
	for _, e := range w.decode {
		s, err := e.stats()
		r.Hold(err == nil, scene, "%v", err)
		r.Hold(s.StaleEpochs == 0, scene, "%s saw %d requests of an owner after those of a later one", e.group, s.StaleEpochs)
		r.Hold(s.DuplicateIDs == 0 && s.Replays == 0 && s.WrongBlocks == 0 && s.KeyMismatches == 0, scene, "%s: %+v", e.group, s)
	}
}

// playAfter holds that nothing is left of all that.
func playAfter(ctx context.Context, w *site, r *testbed.Report) error {
	held, over, epochs := w.held(ctx), int64(0), []string{}
	for _, e := range w.decode {
		s, err := e.stats()
		if err != nil {
			return err
		}
		epochs, over = append(epochs, fmt.Sprintf("%s %d", e.group, s.Epoch)), over+s.OverAdmitted
	}
	r.Add(afterwards, "audits 0, no slot, KV token or hand-off is held, by proxies' books and engines'; "+
		"0 requests of an earlier owner after those of a later one (epochs: %s); %d requests found a rank full", strings.Join(epochs, ", "), over)
	r.Hold(held == nil, afterwards, "%v", held)
	w.oneOwner(r, afterwards)
	return ctx.Err()
}
