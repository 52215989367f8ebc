package geo

import (
	"slices"
)

// A sibling is a peer of the own region: another proxy for the same engines. Each decode group has
// one owner among the siblings, which alone admits requests to it; the answers to probes name the
// owner. If this proxy owns no group that decodes a request's model, the request goes to a sibling
// that does, without asking the policy.

// Siblings returns the names of the siblings that are up, and the names of those among them that do
// not drain.
func (ps *Peers) Siblings() (live, staying []string) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.peers {
		isLive := p.sibling && p.up && p.name != ""
		alreadyListed := slices.Contains(live, p.name) // a proxy may have several addresses
		if !isLive || alreadyListed {
			continue
		}
		if live = append(live, p.name); !p.draining {
			staying = append(staying, p.name)
		}
	}
	return live, staying
}

// mayBeSibling reports whether a proxy with this id may be a sibling, by the config.
func (ps *Peers) mayBeSibling(id string) bool {
	return ps.cfg.Siblings &&
		slices.ContainsFunc(ps.cfg.Peers, func(c PeerConfig) bool { return c.Region == ps.cfg.Self.Region && c.AnswersTo(id) })
}

// decodesModel reports whether a peer decodes a model now. A sibling decodes the models of the
// decode groups that it owns; a peer of another region decodes every model that it offers.
func (p *peer) decodesModel(model string) bool {
	return !p.sibling || slices.Contains(p.decodedModels, model)
}

// assumeNoGroups notes that a sibling probably owns no decode group any more, because it did not
// serve a request. Its next answer to a probe corrects this. assumeNoGroups is called with the lock
// of Peers held.
func (p *peer) assumeNoGroups() { p.decodedModels = nil }
