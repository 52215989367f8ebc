package geo

import (
	"slices"
)

// A sibling is a peer of our own region: another dispatcher for the same engines.
// Which of them admits to a decode group is told in probes, and what nobody here
// decodes goes to one who does, wherever a policy would have sent it.

// Siblings are those that live, by the names they give themselves, and of these
// those that do not leave.
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

// sibling says whether a dispatcher of that id may be one.
func (n *Node) sibling(id string) bool {
	return n.cfg.Siblings &&
		slices.ContainsFunc(n.cfg.Peers, func(c PeerConfig) bool { return c.Region == n.cfg.Self.Region && c.AnswersTo(id) })
}

// decodes says whether a peer decodes a model now. Those of other regions would
// not offer it else.
func (p *peer) decodes(model string) bool {
	return !p.sibling || slices.Contains(p.decoded, model)
}

// disown notes that a sibling is no owner, or none that answers, until its next
// probe says what it is. Called with the node's lock held.
func (p *peer) disown() { p.decoded = nil }
