package geo

import (
	"context"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
)

// resolveEvery is the time between two look-ups of a peer's name.
const resolveEvery = 30 * time.Second

// lookup finds the addresses behind a name, each as host:port: by SRV records, which have the
// ports, or by the addresses of host, with the given port.
func lookup(ctx context.Context, d Discovery, host, port string) ([]string, error) {
	var found []string
	if d == BySRV {
		_, records, err := net.DefaultResolver.LookupSRV(ctx, "", "", host)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			found = append(found, net.JoinHostPort(r.Target, strconv.Itoa(int(r.Port))))
		}
		return found, nil
	}
	addresses, err := net.DefaultResolver.LookupHost(ctx, host)
	for _, a := range addresses {
		found = append(found, net.JoinHostPort(a, port))
	}
	return found, err
}

// followName looks up an entry's name every resolveEvery. It begins to probe new proxies, and
// removes a proxy whose address is gone. If the name cannot be resolved, nothing changes.
func (ps *Peers) followName(c *PeerConfig) {
	tick := time.NewTicker(resolveEvery)
	defer tick.Stop()
	for {
		ctx, cancel := context.WithTimeout(ps.ctx, resolveEvery/2)
		found, err := ps.cfg.Lookup(ctx, c.Discover, c.Target.URL.Hostname(), c.Target.URL.Port())
		cancel()
		switch {
		case ps.ctx.Err() != nil:
			return
		case err != nil:
			ps.cfg.Log.Warn("a name of peers does not resolve; the proxies that it gave before stay", zap.String("peer", c.ID), zap.Error(err))
		default:
			ps.syncDiscovered(c, found)
		}
		select {
		case <-ps.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// syncDiscovered makes the peers of an entry those at the addresses that were found. It removes the
// others, and begins to probe the new ones. A peer whose address is still there stays as it is.
func (ps *Peers) syncDiscovered(c *PeerConfig, addresses []string) {
	// By the id of a proxy at these addresses. Those that are peers already are deleted below.
	toAdd := map[string]bool{}
	for _, a := range addresses {
		toAdd[c.ID+"@"+a] = true
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var gone []*peer
	ps.peers = slices.DeleteFunc(ps.peers, func(p *peer) bool {
		if p.conf != c || toAdd[p.id] { // it belongs to another entry, or its address is still there
			delete(toAdd, p.id)
			return false
		}
		ps.stopProbing(p)
		p.removed, gone = true, append(gone, p)
		return true
	})
	// A peer that comes back today does not get a new egress budget for the day.
	keepEgress(ps.removedEgress, gone, ps.clock.Now())
	// A removed peer's series in the metrics stay while another peer of ps.peers has its name, so they
	// are dropped after ps.peers was changed.
	for _, p := range gone {
		ps.dropRemovedSeries(p)
	}
	for _, id := range slices.Sorted(maps.Keys(toAdd)) {
		addDiscovered(ps, c, id)
	}
	for _, s := range ps.models {
		s.round = 0 // no round has the number 0, so the next decision begins a round with the new peers
	}
}

// addDiscovered adds a proxy that was found for the entry c to the peers, and begins to probe it.
// Its id is the entry's id, @ and its address. addDiscovered is called with ps.mu held.
func addDiscovered(ps *Peers, c *PeerConfig, id string) {
	target := *c.Target
	target.ID, target.URL = id, &url.URL{Scheme: c.Target.URL.Scheme, Host: strings.TrimPrefix(id, c.ID+"@")}
	p := ps.newPeer(c, id, &target)
	// Otherwise its budget of the day would begin again.
	if spent := ps.removedEgress[id]; spent != nil {
		p.egress = spent
		delete(ps.removedEgress, id)
	}
	ps.peers = append(ps.peers, p)
	ps.startProber(p)
	ps.cfg.Log.Info("another proxy was found", zap.String("peer", id))
}

// keepEgress adds to spentByID what was spent on removed peers today. A peer's id contains its
// address, which may come back. The peer that is then added has the same id, and goes on with what
// is left of the day's egress budget. keepEgress first drops the ids for which nothing was spent
// today.
func keepEgress(spentByID map[string]*spending, removed []*peer, now time.Time) {
	maps.DeleteFunc(spentByID, func(_ string, s *spending) bool { return s.today(now) == 0 })
	for _, p := range removed {
		spentByID[p.id] = p.egress
	}
}
