// Package dns finds engines by the A, AAAA or SRV records of a name. It looks them up at intervals,
// because Go's resolver does not report how long an answer is valid.
//
// Resolvers may fail, or return no or only some records. So a look-up that finds nothing changes
// nothing, and an engine is removed only after several answers in a row without it.
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

// Types of DNS records.
const (
	TypeA   = "A" // A and AAAA, which have no port
	TypeSRV = "SRV"
)

// Config needs Host, Role, Interval and Misses.
type Config struct {
	Host     string
	Type     string
	Role     string
	Scheme   string // empty: http
	Port     int    // for type A; an SRV record has its own
	Interval time.Duration
	Misses   int      // answers in a row without an engine, until it is removed
	Resolver Resolver // nil: the system's
	Attributes
}

// Attributes are shared by all engines of a Source.
type Attributes = discover.Attributes

// Resolver is what a Source uses of net.Resolver.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (cname string, srvs []*net.SRV, err error)
}

// timeout bounds one look-up.
const timeout = 5 * time.Second

var errNothing = errors.New("the name has no such records; no engine is removed for this reason; remove the entry from discovery.dns if " +
	"there are to be none")

// Source looks up one name.
type Source struct {
	cfg     Config
	missing map[string]int // by address: answers in a row without it
}

var _ discover.Source = (*Source)(nil)

// New makes no request; Run does.
func New(cfg Config) *Source {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	return &Source{cfg: cfg, missing: map[string]int{}}
}

// Name returns "dns:", the host and the role.
func (s *Source) Name() string { return "dns:" + s.cfg.Host + " " + s.cfg.Role }

// Run reports the engines after each look-up, also those that only the last few answers lacked.
// Intervals vary by up to 10 %, so that several proxies do not ask at the same times.
func (s *Source) Run(ctx context.Context, report func([]discover.Engine, error)) {
	for {
		found, err := s.lookup(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			report(nil, fmt.Errorf("look up %s records of %s: %w", s.cfg.Type, s.cfg.Host, err))
		} else {
			report(s.withRecentlyFound(found), nil)
		}
		select {
		case <-time.After(time.Duration(float64(s.cfg.Interval) * (0.9 + 0.2*rand.Float64()))):
		case <-ctx.Done():
			return
		}
	}
}

// lookup returns each record as host:port.
func (s *Source) lookup(ctx context.Context) (found []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if s.cfg.Type == TypeSRV {
		_, records, err := s.cfg.Resolver.LookupSRV(ctx, "", "", s.cfg.Host)
		for _, r := range records { // an error with records only means that the resolver left some out
			host := strings.ToLower(strings.TrimSuffix(r.Target, "."))
			if host != "" && r.Port != 0 { // the target "." says that there is no such service
				found = append(found, net.JoinHostPort(host, strconv.Itoa(int(r.Port))))
			}
		}
		return found, errUnlessFound(found, err)
	}
	addrs, err := s.cfg.Resolver.LookupNetIP(ctx, "ip", s.cfg.Host)
	for _, a := range addrs {
		found = append(found, net.JoinHostPort(a.Unmap().String(), strconv.Itoa(s.cfg.Port)))
	}
	return found, errUnlessFound(found, err)
}

func errUnlessFound(found []string, err error) error {
	if len(found) > 0 {
		return nil
	}
	return cmp.Or(err, errNothing)
}

// withRecentlyFound forgets an address that Config.Misses answers in a row lacked.
func (s *Source) withRecentlyFound(found []string) (list []discover.Engine) {
	for _, address := range found {
		s.missing[address] = -1 // the next loop raises it to 0
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
