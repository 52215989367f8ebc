package fleet

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
)

// learnHosts finds the names and addresses a prefiller's hand-offs may point
// decode engines at, and trusts them while the engine is there. Any other host
// in a hand-off is refused. What a decode engine tells may name its own hosts.
func (f *Fleet) learnHosts(in *instance) {
	if in.decodes() && !in.callsBack() {
		return
	}
	hosts := append([]string{in.engine.URL.Hostname()}, in.profile.KVHosts...)
	ctx, cancel := context.WithTimeout(f.host.Context, 2*time.Second)
	defer cancel()
	for _, h := range slices.Clone(hosts) {
		addrs, err := net.DefaultResolver.LookupHost(ctx, h)
		if err != nil {
			f.host.Log.Warn("the name of an engine does not resolve; hand-offs may name it only by this name, and its callbacks are refused unless bind.allow has its address", zap.String("engine", in.key()), zap.String("host", h), zap.Error(err))
		}
		hosts = append(hosts, addrs...)
	}
	slices.Sort(hosts)
	in.hosts = slices.Compact(hosts)
	if in.decodes() {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range in.hosts {
		t := f.hosts[h]
		t.by++
		f.hosts[h] = t
	}
}

// distrust forgets the hosts that only this engine stood for: at once where the
// engine is known to be no more, else once its last probe can have answered. It
// is called with f.mu held.
func (f *Fleet) distrust(in *instance, dead bool) {
	if in.decodes() {
		return
	}
	now := time.Now()
	for _, h := range in.hosts {
		t := f.hosts[h]
		t.by--
		if !dead {
			t.until = now.Add(f.host.Settings().Limits.ProbeTimeout)
		}
		f.hosts[h] = t
	}
	for h, t := range f.hosts {
		if t.by == 0 && !now.Before(t.until) {
			delete(f.hosts, h)
		}
	}
}

// HostsOf returns which hosts are those of an engine: what it calls back may name no other.
func (f *Fleet) HostsOf(key string) func(host string) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	in := f.instances[key]
	if in == nil {
		return func(string) bool { return false }
	}
	hosts := in.hosts // never changed
	return func(host string) bool { return slices.Contains(hosts, host) }
}

// CallsBack says whether a decode engine that calls back has an address.
func (f *Fleet) CallsBack(a netip.Addr) bool {
	address := a.Unmap().WithZone("").String()
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.callsBack() && slices.Contains(in.hosts, address) {
			return true
		}
	}
	return false
}

// KnownHost says whether a hand-off may point decode engines at a host.
func (f *Fleet) KnownHost(host string) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	t := f.hosts[host]
	return t.by > 0 || time.Now().Before(t.until)
}
