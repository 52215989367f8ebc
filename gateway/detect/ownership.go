package detect

import (
	"cmp"
)

// Kinds of findings about other proxies, and about the ownership of engines.
const (
	PeerDown Kind = "peer_down"
	NoOwner  Kind = "no_owner"
)

var ownerDetectors = []Detector{
	{
		Kind: PeerDown, find: findPeerDown,
		harm: nothing, headline: "Peer outage", pluralText: "are not up", runbook: "peer_down", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/geo" | jq .peers`,
		clients: "Requests of clients stay in this region, or go to others.",
		next:    "Look whether the other proxy is alive, and then at the link.",
	},
	{
		Kind: NoOwner, find: findNoOwner,
		harm: failing, headline: "No owner", pluralText: "have no owner, so that their engines get no requests", runbook: "no_owner", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq .areas`,
		clients: "Clients of these engines wait or are refused.",
		next:    "Look whether the lease store answers, and which proxies are alive.",
	},
}

func findPeerDown(v *view, report reportFunc) {
	if v.Geo == nil {
		return
	}
	for _, peer := range v.Geo.Peers {
		if !peer.Up {
			where, why := place{"peer", peer.ID, "geo"}, cmp.Or(peer.Fault, "it answered no probe")
			report(where, peer.Fault, "Peer %s in region %s is not up: %s", peer.ID, peer.Region, why)
		}
	}
}

func findNoOwner(v *view, report reportFunc) {
	for _, a := range v.Scopes {
		if a.Holder != "" || a.Admits { // the engines get requests
			continue
		}
		where := place{"region", a.Region, "geo"}
		if a.Group != "" {
			where.kind, where.name = "group", a.Group
		}
		report(where, noReason, "%s has no owner, so that its engines get no requests", where.capitalized())
	}
}
