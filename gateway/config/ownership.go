package config

import (
	"slices"
	"time"
)

// GeoOwnership says who serves the engines of a region whose dispatcher died.
// The engines of another region are those with engines[].region.
type GeoOwnership struct {
	Engine        string        `yaml:"engine"`         // off, kubernetes, etcd, static
	TakeoverOrder []string      `yaml:"takeover_order"` // ids, for every region; empty: by round trip from the dead one
	Lease         time.Duration `yaml:"lease"`          // who does not renew for so long may lose its region
	StartDelay    time.Duration `yaml:"start_delay"`    // from then until another admits
	MaxShare      float64       `yaml:"max_share"`      // of the slots that a taker uses at first; static: always
	DeadAfter     time.Duration `yaml:"dead_after"`     // static
	Kubernetes    struct {
		Namespace  string            `yaml:"namespace"`  // empty: this pod's own
		Kubeconfig map[string]string `yaml:"kubeconfig"` // by region, to the cluster with its engines; none: this pod's own
	} `yaml:"kubernetes"`
	Etcd Etcd `yaml:"etcd"`
}

// Etcd is where leases are kept.
type Etcd struct {
	Endpoints []string `yaml:"endpoints"`
	Prefix    string   `yaml:"prefix"`
	TLS       GeoTLS   `yaml:"tls"`
}

// Engines of ownership.
const (
	OwnOff        = "off"
	OwnKubernetes = "kubernetes"
	OwnEtcd       = "etcd"
	OwnStatic     = "static"
)

// On says whether regions have owners.
func (o *GeoOwnership) On() bool { return o.Engine != OwnOff }

func defaultOwnership() (o GeoOwnership) {
	o.Engine, o.Lease, o.StartDelay, o.MaxShare, o.DeadAfter = OwnOff, 15*time.Second, 5*time.Second, 0.5, 15*time.Second
	o.Etcd.Prefix = "evenkeel/owner"
	return o
}

func (c *Config) checkOwnership(bad report) {
	o := &c.Geo.Ownership
	if !slices.Contains([]string{OwnOff, OwnKubernetes, OwnEtcd, OwnStatic}, o.Engine) {
		bad("$.geo.ownership.engine", "%q keeps no lease; write off, kubernetes, etcd or static", o.Engine)
	}
	checkLease(bad, "$.geo.ownership", o.Lease, o.StartDelay)
	if !(o.MaxShare > 0 && o.MaxShare <= 1) {
		bad("$.geo.ownership.max_share", "%v is no share of slots; write a number up to 1, such as 0.5", o.MaxShare)
	}
	if least := time.Duration(c.Geo.Probe.Misses) * c.Geo.Probe.Interval; o.DeadAfter < least {
		bad("$.geo.ownership.dead_after", "%v; a peer is only down after %v", o.DeadAfter, least)
	}
	if o.Engine == OwnEtcd && len(o.Etcd.Endpoints) == 0 {
		bad("$.geo.ownership.etcd.endpoints", "none; write the members of the cluster, such as [\"https://etcd-0:2379\"]")
	}
	if o.Engine == OwnKubernetes && len(o.Kubernetes.Kubeconfig) > 0 && o.Kubernetes.Namespace == "" { // two namespaces are two leases, and two owners
		bad("$.geo.ownership.kubernetes.namespace", "none, with leases in other clusters; write the one that every proxy of these regions keeps its lease in")
	}
	if o.On() && !c.Geo.On() {
		bad("$.geo.ownership.engine", "there are no other regions while geo.mode is off")
	}
	known := []string{c.Geo.Self.ID}
	regions := []string{c.Geo.Self.Region}
	for _, p := range c.Geo.Peers {
		known, regions = append(known, p.ID), append(regions, p.Region)
	}
	for _, id := range o.TakeoverOrder {
		if o.On() && !slices.Contains(known, id) {
			bad("$.geo.ownership.takeover_order", "%q is neither geo.self.id nor one of geo.peers", id)
		}
	}
	for side, list := range map[string][]Engine{"prefill": c.Engines.Prefill, "decode": c.Engines.Decode} {
		for _, e := range list {
			switch {
			case e.Region == "":
			case !o.On() && !c.Geo.Leads():
				bad("$.engines."+side, "%s is in region %s; engines of other regions need geo.ownership.engine, or geo.mode central with geo.central this one", e.URL, e.Region)
			case !slices.Contains(regions, e.Region):
				bad("$.engines."+side, "%s: no dispatcher is in region %q; see geo.self and geo.peers", e.URL, e.Region)
			}
		}
	}
}
