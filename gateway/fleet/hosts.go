package fleet

import (
	"context"
	"net"
	"slices"
	"time"

	"go.uber.org/zap"
)

// trust is why a hand-off may point decode engines at a host.
type trust struct {
	by    int       // prefill engines that stand for it
	until time.Time // and after the last of them
}

// learnHosts finds the names and addresses a prefiller's hand-offs may point
// decode engines at, and trusts them while the engine is there. Any other host
// in a hand-off is refused.
func (f *Fleet) learnHosts(in *instance) {
	hosts := append([]string{in.engine.URL.Hostname()}, in.profile.KVHosts...)
	ctx, cancel := context.WithTimeout(f.host.Context, 2*time.Second)
	defer cancel()
	for _, h := range slices.Clone(hosts) {
		addrs, err := net.DefaultResolver.LookupHost(ctx, h)
		if err != nil {
			f.host.Log.Warn("name of a prefill engine does not resolve; its hand-offs are accepted by name only", zap.String("host", h), zap.Error(err))
		}
		hosts = append(hosts, addrs...)
	}
	slices.Sort(hosts)
	in.hosts = slices.Compact(hosts)
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

// KnownHost says whether a hand-off may point decode engines at a host.
func (f *Fleet) KnownHost(host string) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	t := f.hosts[host]
	return t.by > 0 || time.Now().Before(t.until)
}
