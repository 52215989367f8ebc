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

// lookup finds the addresses behind a name, each as host:port.
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

// follow looks up an entry's name every resolveEvery. It begins to probe new dispatchers, and removes a dispatcher whose
// address is gone. If the name cannot be resolved, nothing changes.
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

// replaceFound replaces the peers of an entry by the dispatchers at these addresses. A peer whose address is still there stays as
// it is. What was spent on a removed peer is kept for the rest of the day.
func (ps *Peers) syncDiscovered(c *PeerConfig, addresses []string) {
	wanted := map[string]bool{}
	for _, a := range addresses {
		wanted[c.ID+"@"+a] = true
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var gone []*peer
	ps.peers = slices.DeleteFunc(ps.peers, func(p *peer) bool {
		if p.conf != c || wanted[p.id] {
			delete(wanted, p.id) // only new dispatchers remain in wanted
			return false
		}
		ps.stopProbing(p)
		p.removed, gone = true, append(gone, p)
		return true
	})
	today := ps.clock.Now()
	maps.DeleteFunc(ps.removedEgress, func(_ string, s *spending) bool { return s.add(0, today) == 0 }) // nothing was spent today
	for _, p := range gone {
		ps.removedEgress[p.id] = p.egress
		ps.dropRemovedSeries(p)
	}
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		target := *c.Target
		target.ID, target.URL = id, &url.URL{Scheme: c.Target.URL.Scheme, Host: strings.TrimPrefix(id, c.ID+"@")}
		p := ps.newPeer(c, id, &target)
		if spent := ps.removedEgress[id]; spent != nil { // otherwise its budget of the day would begin again
			p.egress = spent
			delete(ps.removedEgress, id)
		}
		ps.peers = append(ps.peers, p)
		ps.startProber(p)
		ps.cfg.Log.Info("another proxy was found", zap.String("peer", id))
	}
	for _, s := range ps.models {
		s.round = 0 // no round has this number: the next decision begins with the new peers
	}
}
