package owner

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/lease"
)

// New returns nil if the config gives owners to neither regions nor decode groups.
func New(c *config.Config, deps Deps) (*Set, error) {
	s := &Set{
		deps: deps, conf: c, log: deps.Log, region: c.Geo.Self.Region, ctx: deps.Context,
		checkNow: make(chan struct{}, 1), claimFailures: map[string]claimFailure{}, leavingScopes: map[string]*Scope{}, lost: make(chan struct{}),
	}
	s.all.Store(&map[string]*Scope{})
	switch {
	case c.HA.On():
		if err := s.initGroups(); err != nil {
			return nil, err
		}
	case c.Geo.On() && c.Geo.Ownership.On():
		if err := s.initRegions(); err != nil {
			return nil, err
		}
	default:
		return nil, nil
	}
	s.metrics = newMetrics(s)
	return s, deps.Registerer.Register(s.metrics)
}

// The groups become known only later, with their engines.
func (s *Set) initGroups() error {
	ha, self := &s.conf.HA, s.conf.Geo.Self.ID
	s.kind, s.configMembers = Groups, ha.MemberList()
	s.leases = newLeases(ha.Engine, ha.Lease, ha.Kubernetes.Namespace, ha.Etcd, self, s.configMembers, s.log)
	s.openLease = func(name string) (lease.Engine, error) {
		return s.leases.open(groupLeaseName(name), ha.Kubernetes.Kubeconfig, name)
	}
	s.times = ha.Times()
	if len(s.configMembers) > 0 && !slices.Contains(s.configMembers, self) {
		s.log.Warn("this proxy is not in ha.members: it never owns a decode group, and forwards all requests", zap.String("id", self),
			zap.Strings("members", s.configMembers))
	}
	// In mode shard each proxy should own some of the groups, otherwise one proxy all.
	spread, settleTime := ha.Mode == geo.HAShard, ha.Lease
	s.succession = &siblings{set: s, live: lease.NewMembers(self, spread, settleTime)}
	if _, err := s.openLease(""); err != nil { // only to find wrong settings at the start
		return fmt.Errorf("ha: %w", err)
	}
	return nil
}

func (s *Set) initRegions() error {
	ownership := &s.conf.Geo.Ownership
	s.kind = Regions
	var members []string // every proxy may own a region
	s.leases = newLeases(ownership.Engine, ownership.Lease, ownership.Kubernetes.Namespace, ownership.Etcd, s.conf.Geo.Self.ID, members, s.log)
	s.openLease = func(name string) (lease.Engine, error) {
		return s.leases.open(regionLeaseName(name), ownership.Kubernetes.Kubeconfig[name], name)
	}
	s.times = ownership.Times()
	regions := &neighbours{set: s, roundTrips: roundTrips{}}
	s.succession = regions
	return regions.createScopes()
}
