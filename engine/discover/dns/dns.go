// Package dns finds engines by the A, AAAA or SRV records of a name. It asks at intervals, because Go's resolver does
// not say how long an answer is valid.
//
// Resolvers fail, or answer with no records or only some of them. So a lookup that fails or finds nothing changes
// nothing, and an engine is gone only when several answers in a row were without it.
package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/engine/discover"
)

// Types of records.
const (
	TypeA   = "A" // and AAAA
	TypeSRV = "SRV"
)

// Config of a Source. Resolver is nil for the system's.
type Config struct {
	Host     string
	Type     string
	Role     string
	Scheme   string // empty: http
	Port     int    // of type A; SRV records have theirs
	Interval time.Duration
	Misses   int // answers in a row that an engine must be missing from
	Resolver Resolver
	Attributes
}

// Attributes are the attributes of every engine of the name.
type Attributes = discover.Attributes

// Resolver has the methods of net.Resolver that a Source uses.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (cname string, srvs []*net.SRV, err error)
}

// timeout is the time limit of a lookup.
const timeout = 5 * time.Second

var errNothing = errors.New("the name has no such records; no engine is removed for this reason; remove the entry from discovery.dns if " +
	"there are to be none")

// Source asks for one name. It implements discover.Source.
type Source struct {
	cfg     Config
	missing map[string]int // for each known address, answers in a row without it
}

var _ discover.Source = (*Source)(nil)

// New returns a source that has not asked yet.
func New(cfg Config) *Source {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	return &Source{cfg: cfg, missing: map[string]int{}}
}

// Name is "dns:", the name and the role.
func (s *Source) Name() string { return "dns:" + s.cfg.Host + " " + s.cfg.Role }

// Run asks until ctx ends. Intervals vary by a tenth, so that proxies do not ask
// in step.
func (s *Source) Run(ctx context.Context, tell func([]discover.Engine, error)) {
	for {
		found, err := s.lookup(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			tell(nil, fmt.Errorf("look up %s records of %s: %w", s.cfg.Type, s.cfg.Host, err))
		} else {
			tell(s.present(found), nil)
		}
		select {
		case <-time.After(time.Duration(float64(s.cfg.Interval) * (0.9 + 0.2*rand.Float64()))):
		case <-ctx.Done():
			return
		}
	}
}

// lookup returns at least one host:port, or an error.
func (s *Source) lookup(ctx context.Context) (found []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if s.cfg.Type == TypeSRV {
		_, records, err := s.cfg.Resolver.LookupSRV(ctx, "", "", s.cfg.Host)
		for _, r := range records { // records are used even with an error, which only says that some were left out
			if host := strings.ToLower(strings.TrimSuffix(r.Target, ".")); host != "" && r.Port != 0 {
				found = append(found, net.JoinHostPort(host, strconv.Itoa(int(r.Port))))
			}
		}
		return found, orNothing(found, err)
	}
	addrs, err := s.cfg.Resolver.LookupNetIP(ctx, "ip", s.cfg.Host)
	for _, a := range addrs {
		found = append(found, net.JoinHostPort(a.Unmap().String(), strconv.Itoa(s.cfg.Port)))
	}
	return found, orNothing(found, err)
}

// orNothing returns the error of a lookup that found no address: err, or errNothing if err is nil. It is nil if
// addresses were found.
func orNothing(found []string, err error) error {
	if len(found) > 0 {
		return nil
	}
	return cmp.Or(err, errNothing)
}

// present counts the answers that each address is missing from, and lists the addresses that are not gone.
func (s *Source) present(found []string) (list []discover.Engine) {
	for _, address := range found {
		s.missing[address] = -1
	}
	for address := range s.missing {
		if s.missing[address]++; s.missing[address] >= s.cfg.Misses {
			delete(s.missing, address)
		}
	}
	for address := range s.missing {
		list = append(list, discover.Engine{
			Role: s.cfg.Role, Address: address, URL: cmp.Or(s.cfg.Scheme, "http") + "://" + address, Attributes: s.cfg.Attributes,
		})
	}
	slices.SortFunc(list, func(a, b discover.Engine) int { return strings.Compare(a.Address, b.Address) })
	return list
}
