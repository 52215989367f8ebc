package owner

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/lease"
)

// New returns the Set of the scopes to which the config gives owners, regions or decode groups, and registers its metrics; nil: the
// config gives owners to neither.
func New(c *config.Config, deps Deps) (*Set, error) {
	regionOwnership, ha := &c.Geo.Ownership, &c.HA
	s := &Set{
		deps: deps, conf: c, log: deps.Log, region: c.Geo.Self.Region, ctx: deps.Context,
		checkNow: make(chan struct{}, 1), claimFailures: map[string]claimFailure{}, leavingScopes: map[string]*Scope{}, lost: make(chan struct{}),
	}
	s.all.Store(&map[string]*Scope{})
	switch {
	case ha.On():
		s.kind, s.members = Groups, ha.MemberList()
		s.leases = newLeases(ha.Engine, ha.Lease, ha.Kubernetes.Namespace, ha.Etcd, c.Geo.Self.ID, s.members, s.log)
		s.openLease = func(name string) (lease.Engine, error) {
			return s.leases.open(groupLeaseName(name), ha.Kubernetes.Kubeconfig, name)
		}
		s.times = ha.Times()
		if self := c.Geo.Self.ID; len(s.members) > 0 && !slices.Contains(s.members, self) {
			s.log.Warn("this proxy is not in ha.members: it never owns a decode group, and forwards all requests", zap.String("id", self),
				zap.Strings("members", s.members))
		}
		s.succession = &siblings{set: s, members: lease.NewMembers(c.Geo.Self.ID, ha.Mode == geo.HAShard, ha.Lease)}
		// Groups become known only later, with their engines. Opening a lease without a name already shows a wrong setting of the store.
		if _, err := s.openLease(""); err != nil {
			return nil, fmt.Errorf("ha: %w", err)
		}
	case c.Geo.On() && regionOwnership.On():
		s.kind = Regions
		s.leases = newLeases(regionOwnership.Engine, regionOwnership.Lease, regionOwnership.Kubernetes.Namespace, regionOwnership.Etcd,
			c.Geo.Self.ID, nil, s.log) // no list of members: every proxy may own a region
		s.openLease = func(name string) (lease.Engine, error) {
			return s.leases.open(regionLeaseName(name), regionOwnership.Kubernetes.Kubeconfig[name], name)
		}
		s.times = regionOwnership.Times()
		regions := &neighbours{set: s, roundTrips: map[string]map[string]map[string]float64{}}
		s.succession = regions
		if err := regions.createScopes(); err != nil {
			return nil, err
		}
	default:
		return nil, nil
	}
	s.metrics = newMetrics(s)
	return s, deps.Registerer.Register(s.metrics)
}
