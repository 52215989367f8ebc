package geo

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/lease"
)

// Ownership is the section `geo.ownership` of the config file. It configures which proxy serves the
// engines of a region whose own proxy has died. Engines with engines[].region belong to another
// region.
type Ownership struct {
	// Engine is the store of leases, kubernetes or etcd; static: fixed order, no leases; off.
	Engine string `yaml:"engine"`
	// TakeoverOrder has ids, the preferred one first; empty: the nearest to the dead proxy first.
	TakeoverOrder []string `yaml:"takeover_order"`
	lease.Waits   `yaml:",inline"`
	// MaxShare of slots is used after a takeover: only at first, or always with static.
	MaxShare float64 `yaml:"max_share"`
	// DeadAfter, with static: a proxy that was not seen for this time counts as dead.
	DeadAfter  time.Duration `yaml:"dead_after"`
	Kubernetes struct {
		Namespace string `yaml:"namespace"` // empty: the namespace of this pod
		// Kubeconfig has, by region, the kubeconfig file of the cluster that keeps the region's lease. A
		// region without an entry uses the cluster of this pod.
		Kubeconfig map[string]string `yaml:"kubeconfig"`
	} `yaml:"kubernetes"`
	Etcd Etcd `yaml:"etcd"`
}

// HA is the section `ha` of the config file. It configures which of a region's proxies admits
// requests to which decode group. The other proxies are the entries of geo.peers in the own region.
type HA struct {
	Mode        string `yaml:"mode"`
	Engine      string `yaml:"engine"` // the store of the leases: kubernetes or etcd
	lease.Waits `yaml:",inline"`
	// Members are all proxies that may ever own a group; empty: any of the region.
	Members    []string `yaml:"members"`
	Kubernetes struct {
		Namespace  string `yaml:"namespace"`  // empty: the namespace of this pod, or of the kubeconfig
		Kubeconfig string `yaml:"kubeconfig"` // empty: the cluster of this pod
	} `yaml:"kubernetes"`
	Etcd Etcd `yaml:"etcd"`
}

// Etcd describes the etcd cluster that keeps the leases.
type Etcd struct {
	Endpoints []string `yaml:"endpoints"`
	Prefix    string   `yaml:"prefix"`
	TLS       TLS      `yaml:"tls"`
}

// The engines of ownership: what decides which proxy owns a region.
const (
	OwnOff        = "off"
	OwnKubernetes = "kubernetes"
	OwnEtcd       = "etcd"
	OwnStatic     = "static"
)

// Modes of ha.
const (
	HAOff     = "off"
	HAStandby = "standby" // one proxy owns all groups, and the others forward requests to it
	HAShard   = "shard"   // each group has its own owner
)

// defaultOwnership returns the Ownership of an empty config file.
func defaultOwnership() Ownership {
	return Ownership{
		Engine: OwnOff, Waits: lease.DefaultWaits(), MaxShare: 0.5, DeadAfter: lease.DefaultTimes.Duration, Etcd: Etcd{Prefix: "evenkeel/owner"},
	}
}

// DefaultHA returns the HA of an empty config file.
func DefaultHA() HA {
	return HA{Mode: HAOff, Engine: OwnKubernetes, Waits: lease.DefaultWaits(), Etcd: Etcd{Prefix: "evenkeel/group"}}
}

// On reports whether regions have owners.
func (o *Ownership) On() bool { return o.Engine != OwnOff }

// On reports whether decode groups have owners.
func (h *HA) On() bool { return h.Mode != HAOff }

// MemberList returns Members in order, because proxies compare their lists.
func (h *HA) MemberList() []string { return slices.Sorted(slices.Values(h.Members)) }

// check calls bad for every setting that cannot work, with its key below geo.ownership.
func (o *Ownership) check(c *Config, bad report) {
	if !slices.Contains([]string{OwnOff, OwnKubernetes, OwnEtcd, OwnStatic}, o.Engine) {
		bad("engine", "%q keeps no lease; write off, kubernetes, etcd or static", o.Engine)
	}
	o.Waits.Check(bad)
	if !(o.MaxShare > 0 && o.MaxShare <= 1) { // this form also refuses NaN
		bad("max_share", "%v is no share of slots; write a number up to 1, such as 0.5", o.MaxShare)
	}
	if least := time.Duration(c.Probe.Misses) * c.Probe.Interval; o.DeadAfter < least {
		bad("dead_after", "%v is too short, because a peer counts as down only after %v; write that or more", o.DeadAfter, least)
	}
	checkEtcd(bad, o.Engine, &o.Etcd)
	// There could be two leases, and two owners.
	namespacesMayDiffer := len(o.Kubernetes.Kubeconfig) > 0 && o.Kubernetes.Namespace == ""
	if o.Engine == OwnKubernetes && namespacesMayDiffer {
		bad("kubernetes.namespace",
			"it is empty although leases are in other clusters; write the namespace in which every proxy of these regions keeps its lease")
	}
	if o.On() && !c.On() {
		bad("engine", "there are no other regions while geo.mode is off")
	}
	for _, id := range o.TakeoverOrder {
		isKnown := id == c.Self.ID || slices.ContainsFunc(c.Peers, func(p PeerConfig) bool { return p.ID == id })
		if o.On() && !isKnown {
			bad("takeover_order", "%q is neither geo.self.id nor one of geo.peers", id)
		}
	}
}

// Check calls bad for every setting that cannot work, with its key below ha.
func (h *HA) Check(c *Config, bad report) {
	if !slices.Contains([]string{HAOff, HAStandby, HAShard}, h.Mode) {
		bad("mode", "%q is no mode; write off, standby or shard", h.Mode)
	}
	if !slices.Contains([]string{OwnKubernetes, OwnEtcd}, h.Engine) {
		bad("engine", "%q keeps no lease; write kubernetes or etcd", h.Engine)
	}
	h.Waits.Check(bad)
	if !h.On() {
		return
	}
	switch sorted := h.MemberList(); {
	case len(sorted) == 0: // any proxy of the region may own a group
	case len(slices.Compact(slices.Clone(sorted))) < len(sorted):
		// Compact drops an id that equals the one before it.
		bad("members", "one of them is listed twice; write each id once")
	case len(sorted) == 1:
		bad("members", "the list has only %q; write the ids of all proxies that may own groups, or none", sorted[0])
	default:
		for i, id := range h.Members { // not sorted: i is the place in the config file
			checkName(bad, fmt.Sprintf("members[%d]", i), id, "a proxy")
		}
	}
	checkEtcd(bad, h.Engine, &h.Etcd)
	switch {
	case c.Mode != Distributed:
		bad("mode", "proxies of one region talk over geo's listener, and geo.mode is %s; set it to distributed, with the other proxies under "+
			"geo.peers in the region of geo.self", c.Mode)
	case c.Ownership.On():
		bad("mode", "geo.ownership.engine is %s; either regions or decode groups can have owners, not both; turn one off", c.Ownership.Engine)
	case !slices.ContainsFunc(c.Peers, func(p PeerConfig) bool { return p.Region == c.Self.Region }):
		bad("mode", "no entry of geo.peers is in region %q; list the other proxies of this region", c.Self.Region)
	}
}

// checkEtcd calls bad if etcd keeps the leases and no endpoint is given.
func checkEtcd(bad report, engine string, e *Etcd) {
	if engine == OwnEtcd && len(e.Endpoints) == 0 {
		bad("etcd.endpoints", "none; write the members of the cluster, such as [\"https://etcd-0:2379\"]")
	}
}

// checkName calls bad if a name is not valid, or has one of the characters ":/@", which only
// addresses have. It reports whether the name is good.
func checkName(bad report, key, name, what string) (ok bool) {
	ok = ValidName(name) && !strings.ContainsAny(name, ":/@")
	if !ok {
		bad(key, "%q cannot name %s; write up to 64 letters, digits, dots and dashes", name, what)
	}
	return ok
}

type report = func(key, format string, args ...any)
