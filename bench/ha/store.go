package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"evenkeel/bench/world"
)

// isolate cuts a proxy off from the store and from all other proxies, or heals that.
func (w *site) isolate(p *proxy, cut bool) {
	p.store.Hold(cut)
	for _, o := range w.others(p) {
		p.ways[o.Name].Hold(cut)
		o.ways[p.Name].Hold(cut)
	}
}

// playAway takes the store away from all proxies for a minute: with closed membership
// each group stays with its owner, and no request fails.
func playAway(ctx context.Context, w *site, r *world.Report) error {
	scene := fmt.Sprintf("nobody reaches the store for %v", w.absence)
	before := map[string]string{}
	for _, g := range groups {
		if p := w.owner(g); p != nil {
			before[g] = p.Name
		}
	}
	end := w.under(ctx, w.all[:]...)
	for _, p := range w.all {
		p.store.Hold(true)
	}
	pledged, moved := false, ""
	for until := time.Now().Add(w.absence); time.Now().Before(until); {
		if err := world.Pause(ctx, 200*time.Millisecond); err != nil {
			return err
		}
		for _, g := range groups {
			var owners []string
			for _, p := range w.all {
				if p.owns(g) {
					owners = append(owners, p.Name)
				}
				pledged = pledged || p.Metric(fmt.Sprintf("evenkeel_ha_pledged{group=%q}", g)) == 1
			}
			if is := strings.Join(owners, " and "); is != before[g] && moved == "" {
				moved = fmt.Sprintf("%s was %s's and is %q's %v before the store is back", g, before[g], is, time.Until(until).Round(time.Second))
			}
		}
	}
	for _, p := range w.all {
		p.store.Hold(false)
	}
	err := world.Pause(ctx, 2*w.lease)
	got := end()
	r.Add(scene, "every group stays with its owner, which the others promise; clients of all: %s", kinds(got))
	r.Hold(pledged, scene, "no group was held by promises")
	r.Hold(moved == "", scene, "%s", moved)
	r.Hold(got.OK > 0 && len(got.Failures) == 0, scene, "%s", but(got, none))
	w.oneOwner(r, scene)
	if err != nil {
		return err
	}
	return w.rest(ctx)
}

// playCut cuts an owner off from the store and from the other proxies: it stops by
// itself, and another takes its group.
func playCut(ctx context.Context, w *site, r *world.Report) error {
	const scene = "owner cut off from the store and from the others"
	h, err := w.away(ctx, "west", func(p *proxy) { w.isolate(p, true) })
	if h.p != nil {
		w.isolate(h.p, false)
	}
	if err != nil {
		return err
	}
	w.takenOver(r, scene, h, "")
	return w.rest(ctx)
}
