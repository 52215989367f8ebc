package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/refengine"
	"evenkeel/bench/world"
	"evenkeel/bench/world/store"
)

// leased are the scenes of regions that are owned by lease.
var leased = []world.Scene[*site]{
	{Name: "a leased region dies", Play: playLeasedDeath},
	{Name: "a leased region's proxy stands still", Play: playLeasedStop},
	{Name: "a leased region's proxy is cut off", Play: playLeasedCut},
	{Name: "the store is away", Play: playLeasedAway},
	{Name: "afterwards", Play: playAfter},
}

// playLeased plays them, on loopback: all proxies reach the store that this
// process runs.
func playLeased(ctx context.Context, o options) (*world.Report, error) {
	folder, err := os.MkdirTemp("", "evenkeel-regions-etcd-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	etcd, err := store.Open(folder)
	if err != nil {
		return nil, err
	}
	defer etcd.Close()
	o.on, o.lease = "loopback", store.Address(etcd)
	return play(ctx, o, leased)
}

// playLeasedDeath is playDeath with a lease: the engines of the dead region,
// which know their callers by what they sign with, say whether ever two
// dispatchers admitted to them at once.
func playLeasedDeath(ctx context.Context, w *site, r *world.Report) error {
	const scene = "never two admit to a rank"
	if err := playDeath(ctx, w, r); err != nil {
		return err
	}
	s, err := w.stats(eu)
	if err != nil {
		return err
	}
	r.Add(scene, "eu's decode engine: %d changes of who admits, eu to us and back; %d requests beyond its slots", s.CallerTurns, s.OverAdmitted)
	r.Hold(s.CallerTurns == 2 && s.OverAdmitted == 0, scene, "who admits changed %d times, %d requests were beyond the slots", s.CallerTurns, s.OverAdmitted)
	r.Hold(s.StaleEpochs == 0, scene, "%d requests of an owner came after those of a later one", s.StaleEpochs)
	return nil
}

// playLeasedStop lets eu's proxy stand still in the middle of its work until its
// engines are another's, and wake then with all that it was about to do.
func playLeasedStop(ctx context.Context, w *site, r *world.Report) error {
	_, err := w.apart(ctx, r, "eu's proxy stands still (SIGSTOP) and wakes", func(apart bool) error {
		return w.regions[eu].proxy.Signal(map[bool]syscall.Signal{true: syscall.SIGSTOP, false: syscall.SIGCONT}[apart])
	})
	return err
}

// playLeasedCut cuts eu's proxy off from the store and from the other proxies. It
// still reaches all engines, as do the others.
func playLeasedCut(ctx context.Context, w *site, r *world.Report) error {
	const scene = "eu's proxy is cut off from the store and from the others"
	results, err := w.apart(ctx, r, scene, func(apart bool) error {
		w.stores[eu].Hold(apart)
		return errors.Join(w.cut(us, eu, apart), w.cut(as, eu, apart))
	})
	for _, got := range results {
		r.Hold(got.Wrong == 0, scene, "%d answers were wrong", got.Wrong)
	}
	return err
}

// apart sets eu's proxy apart under load until its engines are another's, and holds
// that they were taken over, are handed back, and never had two that admit to them.
func (w *site) apart(ctx context.Context, r *world.Report, scene string, set func(apart bool) error) ([]*load.Result, error) {
	taken := false
	results, err := w.crowds(ctx, []crowd{{eu, "home", 8, 0.8}, {us, "to-eu", 4, 0.8}}, func() error {
		if err := world.Pause(ctx, w.load/4); err != nil {
			return err
		}
		if err := set(true); err != nil {
			return err
		}
		taken = w.taken(ctx, true)
		return set(false)
	})
	if err != nil {
		return nil, err
	}
	back := w.taken(ctx, false)
	s, err := w.stats(eu)
	if err != nil {
		return nil, err
	}
	r.Add(scene, "its engines were taken over and handed back; %d requests of an owner after those of a later one, %d beyond the slots", s.StaleEpochs, s.OverAdmitted)
	r.Hold(taken, scene, "nobody took its engines over")
	r.Hold(back, scene, "its engines were not handed back")
	r.Hold(s.StaleEpochs == 0 && s.OverAdmitted == 0, scene, "%d stale, %d beyond the slots", s.StaleEpochs, s.OverAdmitted)
	return results, nil
}

// playLeasedAway takes the store away from all proxies. Regions have no promises, as
// decode groups have: each owner stops before its lease ends, its clients wait, and
// all go on once the store is back.
func playLeasedAway(ctx context.Context, w *site, r *world.Report) error {
	scene := fmt.Sprintf("nobody reaches the store for %v", w.absence)
	admits := func(one *region) float64 { return one.Metric("evenkeel_geo_owner{") }
	longer := *w
	longer.load = w.absence
	var still, took float64
	during, err := longer.crowds(ctx, []crowd{{us, "home", 2, 0.8}, {eu, "home", 2, 0.8}, {as, "home", 2, 0.8}}, func() error {
		for _, s := range w.stores {
			s.Hold(true)
		}
		err := world.Pause(ctx, w.absence)
		for _, one := range w.regions {
			still += admits(one)
		}
		for _, s := range w.stores {
			s.Hold(false)
		}
		began := time.Now()
		if err == nil {
			err = world.Await(ctx, patience, "each proxy has its region again", func() bool {
				return !slices.ContainsFunc(w.regions[:], func(one *region) bool { return admits(one) != 1 })
			})
		}
		took = time.Since(began).Seconds()
		return err
	})
	if err != nil {
		return err
	}
	after, err := w.crowds(ctx, []crowd{{us, "home", 4, 0.8}, {eu, "home", 4, 0.8}, {as, "home", 4, 0.8}}, nil)
	if err != nil {
		return err
	}
	s, then := judge(during...), judge(after...)
	r.Add(scene, "no proxy admits without its lease; each has its region again %.1f s after the store is back. %d of %d requests that came meanwhile are right, %d of %d "+
		"after that", took, s.ok, s.sent, then.ok, then.sent)
	r.Hold(still == 0, scene, "%.0f proxies still admitted in the end", still)
	r.Hold(then.ok == then.sent && then.sent > 0, scene, "afterwards: %s, %d lost", then.first(5), then.lost)
	for _, got := range during {
		r.Hold(got.Wrong == 0, scene, "%d answers were wrong", got.Wrong)
	}
	for i, one := range w.regions {
		s, err := w.stats(i)
		if err != nil {
			return err
		}
		r.Hold(s.StaleEpochs == 0 && s.OverAdmitted == 0, scene, "%s's engines: %d stale, %d beyond the slots", one.name, s.StaleEpochs, s.OverAdmitted)
	}
	return nil
}

// stats is what a region's decode engine counted.
func (w *site) stats(region int) (s refengine.Stats, err error) {
	at := w.regions[region].place.decode
	if !w.at(at).Read("/stats", &s) {
		return s, fmt.Errorf("the engine at %s does not tell what it counted", at)
	}
	return s, nil
}
