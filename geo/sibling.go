package geo

import (
	"slices"
)

// A sibling is a peer of our own region: another dispatcher for the same engines.
// Probes say which of them admits to a decode group. A request whose model this dispatcher does not
// decode goes to a sibling that does, wherever a policy would have sent it.

// Siblings returns the siblings that live, by the names that they give themselves, and of these
// the siblings that do not leave.
func (n *Node) Siblings() (live, stay []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.peers {
		if !p.sibling || !p.up || p.name == "" || slices.Contains(live, p.name) {
			continue
		}
		if live = append(live, p.name); !p.draining {
			stay = append(stay, p.name)
		}
	}
	return live, stay
}

// sibling says whether a dispatcher with that id may be a sibling.
func (n *Node) sibling(id string) bool {
	return n.cfg.Siblings &&
		slices.ContainsFunc(n.cfg.Peers, func(c PeerConfig) bool { return c.Region == n.cfg.Self.Region && c.AnswersTo(id) })
}

// decodes says whether a peer decodes a model now. A peer of another region decodes every model that
// it offers.
func (p *peer) decodes(model string) bool {
	return !p.sibling || slices.Contains(p.decoded, model)
}

// disown notes that a sibling owns no decode group, or does not answer, until its next
// probe says otherwise. It is called with the node's lock held.
func (p *peer) disown() { p.decoded = nil }
