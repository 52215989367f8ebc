package geo

import (
	"context"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
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
func (n *Peers) follow(c *PeerConfig) {
	tick := time.NewTicker(resolveEvery)
	defer tick.Stop()
	for {
		ctx, cancel := context.WithTimeout(n.ctx, resolveEvery/2)
		found, err := n.cfg.Lookup(ctx, c.Discover, c.Target.URL.Hostname(), c.Target.URL.Port())
		cancel()
		switch {
		case n.ctx.Err() != nil:
			return
		case err != nil:
			n.cfg.Log.Warn("a name of peers does not resolve; the proxies that it gave before stay", zap.String("peer", c.ID), zap.Error(err))
		default:
			n.found(c, found)
		}
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// found replaces the peers of an entry by the dispatchers at these addresses.
func (n *Peers) found(c *PeerConfig, addresses []string) {
	wanted := map[string]bool{}
	for _, a := range addresses {
		wanted[c.ID+"@"+a] = true
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var gone []*peer
	n.peers = slices.DeleteFunc(n.peers, func(p *peer) bool {
		if p.conf != c || wanted[p.id] {
			delete(wanted, p.id)
			return false
		}
		n.stopProbing(p)
		p.gone, gone = true, append(gone, p)
		return true
	})
	today := n.clock.Now()
	maps.DeleteFunc(n.spent, func(_ string, s *spending) bool { return s.add(0, today) == 0 })
	for _, p := range gone {
		n.spent[p.id] = p.spent
		n.forgetGone(p)
	}
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		target := *c.Target
		target.ID, target.URL = id, &url.URL{Scheme: c.Target.URL.Scheme, Host: id[len(c.ID)+1:]}
		p := n.newPeer(c, id, &target)
		if spent := n.spent[id]; spent != nil { // otherwise its budget of the day would begin again
			p.spent = spent
			delete(n.spent, id)
		}
		n.peers = append(n.peers, p)
		n.probeLoop(p)
		n.cfg.Log.Info("another proxy was found", zap.String("peer", id))
	}
	for _, s := range n.models {
		s.round = 0
	}
}
