package fleet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/prefill/kvevents"
)

const publisherTimeout = 2 * time.Second

// Places returns where the rank may publish its KV events, the likeliest first. It asks the engine,
// which may have been restarted with other ports. A port that the config sets for this engine comes
// first, because an engine does not know how its ports are mapped. One for all engines comes last.
func (p publisher) Places(ctx context.Context) ([]kvevents.Place, error) {
	e := p.fleet.Now().Engine(p.key)
	if e == nil {
		return nil, fmt.Errorf("engine %s is gone", p.key)
	}
	configured := roster.ConfiguredEvents(e, p.rank, p.fleet.deps.Settings().Prefill.KVEvents)
	target, ranks := e.At(roster.NoRank), max(1, e.Conf.Ranks)
	hosts := append([]string{e.Target.URL.Hostname()}, e.Profile.KVHosts...)
	ctx, stop := context.WithTimeout(ctx, publisherTimeout)
	defer stop()
	places := []kvevents.Place{configured}
	publishers, err := engine.Publishers(ctx, p.fleet.deps.Client, target)
	if err != nil || len(publishers) == 0 { // no answer, or it does not know where it publishes
		return places, err
	}
	answered, err := placeOf(ctx, publishers, p.rank, ranks, hosts)
	switch hasOwnPort := e.Conf.KVEventsPort != 0; {
	case err != nil:
		return places, fmt.Errorf("engine %s: %w", p.key, err)
	case answered == configured:
		return places, nil
	case hasOwnPort:
		return []kvevents.Place{configured, answered}, nil
	}
	return []kvevents.Place{answered, configured}, nil
}

// placeOf: the engine numbers its ranks as the whole deployment does, so its first number may be
// above 0. hosts begins with the host of the engine's URL.
func placeOf(ctx context.Context, all []engine.Publisher, rank, ranks int, hosts []string) (kvevents.Place, error) {
	hasRank := rank < len(all) && all[rank].Rank == all[0].Rank+rank // without gaps
	if !hasRank || len(all) < ranks {
		return kvevents.Place{}, fmt.Errorf("GET /kv_event_sources tells of %d ranks, and the config of %d", len(all), ranks)
	}
	var place kvevents.Place
	for _, socket := range []struct {
		engine.HostPort
		into *string
	}{{all[rank].Events, &place.Events}, {all[rank].Replay, &place.Replay}} {
		switch {
		case socket.Port == 0: // e.g. because the rank replays no events
			continue
		case socket.Host == "":
			socket.Host = hosts[0]
		case !isOneOf(ctx, socket.Host, hosts):
			return kvevents.Place{}, fmt.Errorf("a rank publishes KV events at %s, which is no address of the engine that the proxy knows; "+
				"if it is one, write it into kv_hosts of the engine's profile", net.JoinHostPort(socket.Host, strconv.Itoa(socket.Port)))
		}
		*socket.into = net.JoinHostPort(socket.Host, strconv.Itoa(socket.Port))
	}
	return place, nil
}

// isOneOf also resolves names in hosts.
func isOneOf(ctx context.Context, host string, hosts []string) bool {
	if slices.Contains(hosts, host) {
		return true
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	for _, h := range hosts {
		found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", h)
		if err == nil && slices.ContainsFunc(found, func(a netip.Addr) bool { return a.Unmap() == addr.Unmap() }) {
			return true
		}
	}
	return false
}
