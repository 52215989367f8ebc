package gateway

import (
	"context"
	"time"

	"evenkeel/geo"
)

// room is what a decode rank of that region has for us: of its slots as many as
// a cautious owner uses, 0 being all, and the KV tokens of others' requests. Of
// a rank that nobody has looked at yet it is one slot (geo R35).
func (o *owners) room(region, rank string, slots int) (limit int, others int64) {
	if o == nil {
		return 0, 0
	}
	a := o.of(region)
	if a == nil {
		return 0, 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.cautious(time.Now()) {
		return 0, 0
	}
	r, known := a.residents[rank]
	if !known {
		return 1, 0
	}
	limit = slots - r.Requests
	if !a.home {
		limit = min(limit, int(a.share*float64(slots)))
	}
	return max(1, limit), r.KVTokens
}

// cautious says whether others' requests may still run on the engines. Called
// with a.mu held.
func (a *area) cautious(now time.Time) bool {
	switch {
	case a.adopted.IsZero():
		return false
	case a.hold == 0: // static: another may believe itself the owner at any time
		return !a.home
	}
	return now.Before(a.adopted.Add(a.hold))
}

// scrapeResidents reads what runs on the area's ranks and is not ours. It falls
// with what is read alone; a rank that does not tell keeps what it had.
func (o *owners) scrapeResidents(ctx context.Context, a *area) {
	found, silent := o.gw.others(ctx, func(in *instance) bool { return o.of(in.conf.Region) == a }, o.running(ctx, a.region))
	a.mu.Lock()
	defer a.mu.Unlock()
	note(a.residents, found, silent)
}

// others is what runs on the ranks of decode engines and is not ours; silent are
// the ranks that do not tell.
func (g *Gateway) others(ctx context.Context, meant func(*instance) bool, running []geo.Resident) (found []geo.Resident, silent []string) {
	ours := map[string]geo.Resident{}
	for _, r := range running {
		ours[r.ID] = r
	}
	found, silent = g.residents(ctx, g.fleet.decodes(meant))
	for i, r := range found {
		found[i] = geo.Resident{ID: r.ID, Requests: max(0, r.Requests-ours[r.ID].Requests), KVTokens: max(0, r.KVTokens-ours[r.ID].KVTokens)}
	}
	return found, silent
}

// note keeps what was found, and of a rank that does not tell what it had.
func note(residents map[string]geo.Resident, found []geo.Resident, silent []string) {
	for _, r := range found {
		residents[r.ID] = r
	}
	for _, id := range silent {
		if _, known := residents[id]; !known {
			residents[id] = geo.Resident{ID: id}
		}
	}
}

// running is what our own requests hold of a region's ranks.
func (o *owners) running(ctx context.Context, region string) (list []geo.Resident) {
	for _, m := range o.gw.dispatcher.Status(ctx).Models {
		for _, w := range m.Workers {
			if w.Used > 0 && o.of(o.gw.fleet.regionOf(w.ID)) == o.areas[region] {
				list = append(list, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	return list
}
