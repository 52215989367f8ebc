package abroad

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"evenkeel/gateway/owner"
	"evenkeel/geo"
	"evenkeel/prefill"
)

// giveBack stops what we admit to an area that another should have, says what of
// ours still runs there, and lets the lease go.
func (r *Peers) giveBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	a, done, err := r.host.Owner.Yield(sender, ask)
	if err != nil {
		return h, err
	}
	defer done()
	if ask.Group != "" {
		r.finish(r.host.Context, a.Name)
	}
	return r.host.Owner.HandBack(a, ask)
}

// finish has what was begun here come to a rank before the group goes, where no
// other group of ours could decode it: what does not is prefilled again, and its
// first hand-off stays with the prefiller until the hold timeout.
func (r *Peers) finish(ctx context.Context, group string) {
	ctx, cancel := context.WithTimeout(ctx, r.host.Config.Settings().HA.Lease/6) // who asks waits for twice as long
	defer cancel()
	r.Look(ctx) // from here on what comes waits, or goes elsewhere
	boards := slices.DeleteFunc(r.host.Fleet.BoardsOf(group), r.host.Fleet.Begins)
	for len(boards) > 0 && ctx.Err() == nil && r.underWay(boards) {
		time.Sleep(finishEvery)
	}
}

const finishEvery = 5 * time.Millisecond

// underWay says whether something is prefilled here, or waits for a rank, that
// would be decoded on one of the boards.
func (r *Peers) underWay(boards []string) bool {
	return slices.ContainsFunc(r.host.Tier.Status(), func(c prefill.CandidateStatus) bool {
		return c.Inflight+c.Pooled > 0 && slices.ContainsFunc(c.Models, func(m string) bool {
			route, _, _ := r.host.Fleet.Lookup(m)
			return slices.Contains(boards, route.Board)
		})
	})
}

// tenure is what probes tell our peers.
func (r *Peers) tenure() geo.Tenure {
	t := r.host.Owner.Tenure()
	if r.host.Owner.Has(owner.Groups) {
		if t.Prefill = r.host.Tier.Shares(); !r.refusing() {
			t.Decodes = r.decodes()
		}
	}
	return t
}

// hear takes what a peer's probe told.
func (r *Peers) hear(h geo.Heard) {
	if r.host.Owner.Has(owner.Groups) && h.Region == r.host.Config.Settings().Geo.Self.Region {
		r.share(h.Peer, h.Prefill)
	}
	r.host.Owner.Hear(h)
}

// shares is what siblings have on the prefill engines, by their names.
type shares struct {
	mu sync.Mutex
	of map[string]map[string]prefill.Share
}

// share takes what a sibling has.
func (r *Peers) share(id string, has map[string]prefill.Share) {
	r.shares.mu.Lock()
	if r.shares.of == nil {
		r.shares.of = map[string]map[string]prefill.Share{}
	}
	if r.shares.of[id] = has; has == nil {
		delete(r.shares.of, id)
	}
	all := slices.Collect(maps.Values(r.shares.of))
	r.shares.mu.Unlock()
	r.host.Tier.SetShares(all...)
}

// forgetShares drops those of siblings that are gone.
func (r *Peers) forgetShares() {
	live, _ := r.node.Siblings()
	r.shares.mu.Lock()
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(r.shares.of)), func(id string) bool { return slices.Contains(live, id) })
	r.shares.mu.Unlock()
	for _, id := range gone {
		r.share(id, nil)
	}
}
