package detect

import (
	"cmp"
)

// Kinds.
const (
	PeerDown Kind = "peer_down"
	NoOwner  Kind = "no_owner"
)

var ownerDetectors = []Detector{
	{
		Kind: PeerDown, find: findPeerDown,
		harm: nothing, headline: "Peer outage", many: "are not up", runbook: "peer_down", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/geo" | jq .peers`,
		clients: "Clients notice nothing, as long as this region has room.",
		next:    "Look whether the other proxy is alive, and then at the link.",
	},
	{
		Kind: NoOwner, find: findNoOwner,
		harm: failing, headline: "No owner", many: "have no owner, so that their engines get no requests", runbook: "no_owner", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq .areas`,
		clients: "Clients of these engines wait or are refused.",
		next:    "Look whether the lease store answers, and which proxies are alive.",
	},
}

func findPeerDown(v *view, say say) {
	if v.Geo == nil {
		return
	}
	for _, peer := range v.Geo.Peers {
		if !peer.Up {
			say(at{"peer", peer.ID, "geo"}, peer.Fault, "Peer %s in region %s is not up: %s", peer.ID, peer.Region,
				cmp.Or(peer.Fault, "it answered no probe"))
		}
	}
}

func findNoOwner(v *view, say say) {
	for _, a := range v.Scopes {
		if a.Holder != "" || a.Admits { // its engines get requests, from its owner or from this proxy
			continue
		}
		where := at{"region", a.Region, "geo"}
		if a.Group != "" {
			where.of, where.where = "group", a.Group
		}
		say(where, "", "%s has no owner, so that its engines get no requests", where.begin())
	}
}
