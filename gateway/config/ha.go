package config

import (
	"fmt"
	"slices"
	"time"
)

// HA says which of a region's dispatchers admits to which decode group. Those of
// geo.peers that are in our region are the others.
type HA struct {
	Mode       string        `yaml:"mode"`        // off, standby, shard
	Engine     string        `yaml:"engine"`      // kubernetes, etcd
	Lease      time.Duration `yaml:"lease"`       // who does not renew for so long may lose its groups
	StartDelay time.Duration `yaml:"start_delay"` // from then until another admits
	Members    []string      `yaml:"members"`     // ids of all that may ever own a group; none: any proxy of the region
	Kubernetes struct {
		Namespace  string `yaml:"namespace"`  // empty: this pod's own, or the kubeconfig's
		Kubeconfig string `yaml:"kubeconfig"` // empty: this pod's own
	} `yaml:"kubernetes"`
	Etcd Etcd `yaml:"etcd"`
}

// Modes of ha.
const (
	HAOff     = "off"
	HAStandby = "standby" // one has all groups, the others forward
	HAShard   = "shard"   // each group has its own owner
)

// MemberList is members in order, as proxies compare it.
func (h *HA) MemberList() []string { return slices.Sorted(slices.Values(h.Members)) }

// On says whether decode groups have owners.
func (h *HA) On() bool { return h.Mode != HAOff }

func defaultHA() (h HA) {
	h.Mode, h.Engine, h.Lease, h.StartDelay = HAOff, OwnKubernetes, 15*time.Second, 5*time.Second
	h.Etcd.Prefix = "evenkeel/group"
	return h
}

func (c *Config) checkHA(bad report) {
	h := &c.HA
	if !slices.Contains([]string{HAOff, HAStandby, HAShard}, h.Mode) {
		bad("$.ha.mode", "%q is no mode; write off, standby or shard", h.Mode)
	}
	if !slices.Contains([]string{OwnKubernetes, OwnEtcd}, h.Engine) {
		bad("$.ha.engine", "%q keeps no lease; write kubernetes or etcd", h.Engine)
	}
	checkLease(bad, "$.ha", h.Lease, h.StartDelay)
	if !h.On() {
		return
	}
	switch list := h.MemberList(); {
	case len(list) == 0:
	case len(slices.Compact(slices.Clone(list))) < len(list):
		bad("$.ha.members", "one of them stands there twice; write each id once")
	case len(list) == 1:
		bad("$.ha.members", "%q alone; write the ids of all proxies that may own groups, or none", list[0])
	default:
		for i, id := range h.Members {
			if !validName(id) {
				bad(fmt.Sprintf("$.ha.members[%d]", i), "%q cannot name a dispatcher; write up to 64 letters, digits, dots and dashes", id)
			}
		}
	}
	if h.Engine == OwnEtcd && len(h.Etcd.Endpoints) == 0 {
		bad("$.ha.etcd.endpoints", "none; write the members of the cluster, such as [\"https://etcd-0:2379\"]")
	}
	switch g := &c.Geo; {
	case g.Mode != GeoDistributed:
		bad("$.ha.mode", "dispatchers of one region talk over geo's listener, and geo.mode is %s; set it to distributed, with the others under geo.peers in the region of geo.self", g.Mode)
	case g.Ownership.On():
		bad("$.ha.mode", "geo.ownership.engine is %s: either regions have owners or decode groups; turn one off", g.Ownership.Engine)
	case !slices.ContainsFunc(g.Peers, func(p GeoPeer) bool { return p.Region == g.Self.Region }):
		bad("$.ha.mode", "none of geo.peers is in region %q; list the other dispatchers of this region", g.Self.Region)
	}
}

// checkLease checks the times of a lease.
func checkLease(bad report, path string, lease, startDelay time.Duration) {
	if lease < 3*time.Second || lease%time.Second != 0 {
		bad(path+".lease", "%v; write whole seconds, 3s or more", lease)
	}
	if startDelay < lease/3 {
		bad(path+".start_delay", "%v is too short for clocks that differ; write a third of the lease or more, %v", startDelay, lease/3)
	}
}
