package gateway

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

// publishPatience bounds the wait until the dispatcher has taken up who owns what.
const publishPatience = time.Second

// ownerHost is what owners need to know of this proxy.
func (g *Gateway) ownerHost() owner.Host {
	return owner.Host{
		Context: g.ctx, Log: g.log, Registerer: g.reg, Buckets: secondsBuckets, Hold: g.holdTimeout(),
		Leaving: g.service.Draining,
		Engines: g.fleet.Areas, Load: g.loadOf, Publish: g.publishOwners,
	}
}

// holdTimeout is the longest that a prefiller keeps KV blocks for somebody.
func (g *Gateway) holdTimeout() (longest time.Duration) {
	for _, p := range g.conf().Profiles {
		longest = max(longest, p.KVHoldTimeout)
	}
	return longest
}

// publishOwners has all that binds requests take up who admits to what.
func (g *Gateway) publishOwners(ctx context.Context) {
	g.fleet.Publish()
	ctx, cancel := context.WithTimeout(ctx, publishPatience)
	defer cancel()
	g.regions.look(ctx) // the dispatcher has taken the news up once it answers
	g.tier.Wake()
}

// loadOf is what our own requests hold of an area's ranks, and with ask what its
// engines say that runs there.
func (g *Gateway) loadOf(ctx context.Context, area string, ask bool) (ours, all []geo.Resident, silent []string) {
	for _, m := range g.dispatcher.Status(ctx).Models {
		for _, w := range m.Workers {
			if r := g.fleet.Rank(w.ID); w.Used > 0 && r != nil && r.Area != nil && r.Area.Name == area {
				ours = append(ours, geo.Resident{ID: w.Name, Requests: w.Used, KVTokens: w.KVTokens})
			}
		}
	}
	if ask {
		all, silent = g.fleet.Residents(ctx, area)
	}
	return ours, all, silent
}

// Owners lists the regions whose engines this proxy may serve; none without
// ownership.
func (g *Gateway) Owners() []owner.RegionStatus { return g.owner.RegionsStatus() }

// HA says which decode groups this proxy owns; nil: it is alone.
func (g *Gateway) HA() *owner.HAStatus { return g.owner.GroupsStatus() }

// handBack stops what we admit to an area that another should have, says what of
// ours still runs there, and lets the lease go.
func (g *Gateway) handBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	a, done, err := g.owner.Yield(sender, ask)
	if err != nil {
		return h, err
	}
	defer done()
	if ask.Group != "" {
		g.finish(g.ctx, a.Name)
	}
	return g.owner.HandBack(a, ask)
}

// finish has what was begun here come to a rank before the group goes, where no
// other group of ours could decode it: what does not is prefilled again, and its
// first hand-off stays with the prefiller until the hold timeout.
func (g *Gateway) finish(ctx context.Context, group string) {
	ctx, cancel := context.WithTimeout(ctx, g.conf().HA.Lease/6) // who asks waits for twice as long
	defer cancel()
	g.regions.look(ctx) // from here on what comes waits, or goes elsewhere
	boards := slices.DeleteFunc(g.fleet.BoardsOf(group), g.fleet.Begins)
	for len(boards) > 0 && ctx.Err() == nil && g.underWay(boards) {
		time.Sleep(finishEvery)
	}
}

const finishEvery = 5 * time.Millisecond

// underWay says whether something is prefilled here, or waits for a rank, that
// would be decoded on one of the boards.
func (g *Gateway) underWay(boards []string) bool {
	return slices.ContainsFunc(g.tier.Status(), func(c prefill.CandidateStatus) bool {
		return c.Inflight+c.Pooled > 0 && slices.ContainsFunc(c.Models, func(m string) bool {
			r, _, _ := g.fleet.Lookup(m)
			return slices.Contains(boards, r.Board)
		})
	})
}

// tenure is what probes tell our peers.
func (r *regions) tenure() geo.Tenure {
	t := r.gw.owner.Tenure()
	if r.gw.owner.Has(owner.Groups) {
		t.Decodes, t.Prefill = r.decodes(), r.gw.tier.Shares()
	}
	return t
}

// hear takes what a peer's probe told.
func (r *regions) hear(h geo.Heard) {
	if r.gw.owner.Has(owner.Groups) && h.Region == r.gw.conf().Geo.Self.Region {
		r.share(h.Peer, h.Prefill)
	}
	r.gw.owner.Hear(h)
}

// shares is what siblings have on the prefill engines, by their names.
type shares struct {
	mu sync.Mutex
	of map[string]map[string]prefill.Share
}

// share takes what a sibling has.
func (r *regions) share(id string, has map[string]prefill.Share) {
	r.shares.mu.Lock()
	if r.shares.of == nil {
		r.shares.of = map[string]map[string]prefill.Share{}
	}
	if r.shares.of[id] = has; has == nil {
		delete(r.shares.of, id)
	}
	all := slices.Collect(maps.Values(r.shares.of))
	r.shares.mu.Unlock()
	r.gw.tier.SetShares(all...)
}

// forgetShares drops those of siblings that are gone.
func (r *regions) forgetShares() {
	live, _ := r.node.Siblings()
	r.shares.mu.Lock()
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(r.shares.of)), func(id string) bool { return slices.Contains(live, id) })
	r.shares.mu.Unlock()
	for _, id := range gone {
		r.share(id, nil)
	}
}
