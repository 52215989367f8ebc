// Package dns finds engines by the A, AAAA or SRV records of a name. It looks them up at intervals, because Go's resolver does
// not report how long an answer is valid.
//
// Resolvers may fail, or return no records or only some of them. A look-up that fails or finds nothing therefore changes nothing, and
// an engine is removed only after several answers in a row without it.
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

// Types of DNS records by which a Source finds engines.
const (
	TypeA   = "A" // look up A and AAAA records, which have no port
	TypeSRV = "SRV"
)

// Config has the settings of a Source. Host, Role, Interval and Misses are required.
type Config struct {
	Host     string
	Type     string
	Role     string
	Scheme   string // scheme of the engines' URLs; empty: http
	Port     int    // port of the engines for type A; an SRV record has its own port
	Interval time.Duration
	Misses   int      // an engine that is missing from so many answers in a row is removed
	Resolver Resolver // answers the look-ups; nil: the system's resolver
	Attributes
}

// Attributes are settings that all engines of a Source share, because DNS does not report them.
type Attributes = discover.Attributes

// Resolver has the methods of net.Resolver that a Source uses, so that another resolver can take its place.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (cname string, srvs []*net.SRV, err error)
}

// timeout bounds one look-up. A look-up that takes longer counts as failed, and no engine is removed.
const timeout = 5 * time.Second

var errNothing = errors.New("the name has no such records; no engine is removed for this reason; remove the entry from discovery.dns if " +
	"there are to be none")

// Source looks up one name. It implements discover.Source.
type Source struct {
	cfg     Config
	missing map[string]int // by address: number of answers in a row that lacked it
}

var _ discover.Source = (*Source)(nil)

// New returns a source, which looks nothing up until Run is called.
func New(cfg Config) *Source {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	return &Source{cfg: cfg, missing: map[string]int{}}
}

// Name returns "dns:", the host and the role.
func (s *Source) Name() string { return "dns:" + s.cfg.Host + " " + s.cfg.Role }

// Run looks up the name until ctx ends. After each look-up it reports the engines, or why the look-up failed. A resolver may leave out some
// records of an answer. Therefore the report also has the engines that only the last few answers lacked. Each interval varies at random by
// up to 10 %, so that several proxies do not ask at the same times.
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

// lookup returns the addresses of the name's records, each as host:port, or an error if there are none.
func (s *Source) lookup(ctx context.Context) (found []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if s.cfg.Type == TypeSRV {
		_, records, err := s.cfg.Resolver.LookupSRV(ctx, "", "", s.cfg.Host)
		for _, r := range records { // an error that comes with records means only that the resolver left some out
			host := strings.ToLower(strings.TrimSuffix(r.Target, "."))
			if host != "" && r.Port != 0 { // a record with the target "." says that there is no such service
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

// errUnlessFound returns nil if addresses were found. Otherwise it returns err or, if err is nil, errNothing.
func errUnlessFound(found []string, err error) error {
	if len(found) > 0 {
		return nil
	}
	return cmp.Or(err, errNothing)
}

// withRecentlyFound returns engines for the addresses in found, and for those that only the last few answers lacked. It counts for each
// known address how many answers in a row lacked it, and forgets an address that Config.Misses of them lacked.
func (s *Source) withRecentlyFound(found []string) (list []discover.Engine) {
	for _, address := range found {
		s.missing[address] = -1 // the next loop raises it to 0: the address is missing from no answer
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
