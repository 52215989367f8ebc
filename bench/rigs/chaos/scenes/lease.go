package scenes

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/rigs/testbed"
)

// leased are regions whose engines are taken over by lease.
var leased = kind{
	head: ordered.head, names: ordered.names, leases: true, build: buildRegions, settings: regionSettings, settled: linked,
	scenes: []testbed.Scene[*site]{
		{Name: "a leased region dies", Play: playLeasedDeath},
		{Name: "a leased region's proxy stands still", Play: playLeasedStop},
		{Name: "a leased region's proxy is cut off", Play: playLeasedCut},
		{Name: "the store is away", Play: playLeasedAway},
		{Name: "afterwards", Play: playEmpty},
	},
}

// playLeasedDeath is playDeath with a lease: the engines of the dead region,
// which know their callers by what they sign with, say whether ever two
// dispatchers admitted to them at once.
func playLeasedDeath(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "never two admit to a rank"
	if err := playDeath(ctx, w, r); err != nil {
		return err
	}
	s, err := w.decode[eu].stats()
	if err != nil {
		return err
	}
	r.Add(scene, "eu's decode engine: %d changes of who admits, eu to us and back; %d requests beyond its slots", s.CallerTurns,
		s.OverAdmitted)
	r.Hold(s.CallerTurns == 2 && s.OverAdmitted == 0, scene, "who admits changed %d times, %d requests were beyond the slots", s.CallerTurns,
		s.OverAdmitted)
	r.Hold(s.StaleEpochs == 0, scene, "%d requests of an owner came after those of a later one", s.StaleEpochs)
	return nil
}

// playLeasedStop lets eu's proxy stand still in the middle of its work until its
// engines are another's, and wake then with all that it was about to do.
func playLeasedStop(ctx context.Context, w *site, r *testbed.Report) error {
	_, err := w.apart(ctx, r, "eu's proxy stands still (SIGSTOP) and wakes", func(apart bool) error {
		return w.all[eu].Signal(map[bool]syscall.Signal{true: syscall.SIGSTOP, false: syscall.SIGCONT}[apart])
	})
	return err
}

// playLeasedCut cuts eu's proxy off from the store and from the other proxies. It
// still reaches all engines, as do the others.
func playLeasedCut(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "eu's proxy is cut off from the store and from the others"
	results, err := w.apart(ctx, r, scene, func(apart bool) error {
		w.isolate(w.all[eu], apart)
		return nil
	})
	for _, got := range results {
		r.Hold(got.Wrong == 0, scene, "%d answers were wrong", got.Wrong)
	}
	return err
}

// apart sets eu's proxy apart under load until its engines are another's, and holds
// that they were taken over, are handed back, and never had two that admit to them.
func (w *site) apart(ctx context.Context, r *testbed.Report, scene string, set func(apart bool) error) ([]*load.Result, error) {
	taken := false
	results, err := w.under(ctx, w.load, []crowd{{eu, "home", 8}, {us, "to-eu", 4}}, func() error {
		if err := testbed.Pause(ctx, w.load/4); err != nil {
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
	s, err := w.decode[eu].stats()
	if err != nil {
		return nil, err
	}
	r.Add(scene, "its engines were taken over and handed back; %d requests of an owner after those of a later one, %d beyond the slots",
		s.StaleEpochs, s.OverAdmitted)
	r.Hold(taken, scene, "nobody took its engines over")
	r.Hold(back, scene, "its engines were not handed back")
	r.Hold(s.StaleEpochs == 0 && s.OverAdmitted == 0, scene, "%d stale, %d beyond the slots", s.StaleEpochs, s.OverAdmitted)
	return results, nil
}

// playLeasedAway takes the store away from all proxies. Regions have no promises, as
// decode groups have: each owner stops before its lease ends, its clients wait, and
// all go on once the store is back.
func playLeasedAway(ctx context.Context, w *site, r *testbed.Report) error {
	scene := fmt.Sprintf("nobody reaches the store for %v", w.absence)
	admits := func(p *side) float64 { return p.Metric("evenkeel_geo_owner{") }
	all := func(clients int) []crowd {
		return []crowd{{us, "home", clients}, {eu, "home", clients}, {as, "home", clients}}
	}
	var still, took float64
	during, err := w.under(ctx, w.absence, all(2), func() error {
		err := w.away(ctx, func(time.Duration) {
			still = admits(w.all[us]) + admits(w.all[eu]) + admits(w.all[as])
		})
		began := time.Now()
		if err == nil {
			// Whoever reaches the store first takes what it finds without an owner: for a moment two proxies
			// may have each other's region.
			err = testbed.Await(ctx, patience, "each proxy has its region again, and no other", func() bool {
				return !slices.ContainsFunc(w.all[:], func(p *side) bool {
					return admits(p) != 1 || p.Metric(fmt.Sprintf("evenkeel_geo_owner{region=%q}", p.region)) != 1
				})
			})
		}
		took = time.Since(began).Seconds()
		return err
	})
	if err != nil {
		return err
	}
	after, err := w.under(ctx, w.load, all(4), nil)
	if err != nil {
		return err
	}
	s, then := testbed.Count(lost, during...), testbed.Count(lost, after...)
	r.Add(scene, "no proxy admits without its lease; each has its region again %.1f s after the store is back. %d of %d requests that came "+
		"meanwhile are right, %d of %d "+
		"after that", took, s.Right, s.Sent, then.Right, then.Sent)
	r.Hold(still == 0, scene, "%.0f proxies still admitted in the end", still)
	then.AllRight(r, scene, "afterwards: ")
	for _, got := range during {
		r.Hold(got.Wrong == 0, scene, "%d answers were wrong", got.Wrong)
	}
	for _, e := range w.decode {
		s, err := e.stats()
		if err != nil {
			return err
		}
		r.Hold(s.StaleEpochs == 0 && s.OverAdmitted == 0, scene, "%s's engines: %d stale, %d beyond the slots", e.group, s.StaleEpochs,
			s.OverAdmitted)
	}
	return nil
}
