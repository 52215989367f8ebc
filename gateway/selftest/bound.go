package selftest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
)

var (
	errCallback = errors.New("its callback")
	errLeg      = errors.New("the other engine failed")
)

// bound sends one prompt through two engines that work on it at the same time. The error of the engine that failed
// first is returned, and only that: the other one was told to end.
func (t *tester) bound(ctx context.Context, p, d subject, q *query, id string) (got pairAnswer, prefill, decode error) {
	m := upstream.Meet(id, q.endpoint, p.profile, p.target, p.ranks, d.profile, d.target)
	var callback <-chan metaserver.Callback
	if p.profile.Connector != mooncake.SGLang {
		expected := t.callbacks.Expect(metaserver.Wanted{Rank: d.target.ID, Read: func(body []byte) (mooncake.Callback, error) {
			return d.profile.ReadCallback(body, m.RequestID, 0, 0, func(host string) bool { return t.hosts[host] })
		}})
		defer expected.Forget(0)
		m.Metaserver, callback = expected.URL, expected.Came()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if got.ProbeAnswer, prefill = t.boundPrefill(ctx, p, d, q, m, callback); prefill != nil {
			cancel(errLeg)
		}
	}()
	got.decoded, decode = t.answer(ctx, d, q, id, d.profile.EarlyDecode(&q.body, q.leg, m, "", true, nil))
	if decode != nil {
		cancel(errLeg)
	}
	<-ended
	switch {
	case errors.Is(prefill, errCallback): // which is the decode engine's
		prefill, decode = nil, prefill
	case errors.Is(decode, errLeg):
		decode = nil
	case errors.Is(prefill, errLeg):
		prefill = nil
	}
	if (prefill != nil || decode != nil) && p.profile.Connector == mooncake.SGLang { // whose engines may not notice that we have left
		_ = upstream.Abort(t.client, p.target, id, zap.NewNop())
		_ = upstream.Abort(t.client, d.target, id, zap.NewNop())
	}
	return got, prefill, decode
}

// boundPrefill sends the prefill leg, once the decode engine has called back if it does, and reads its answer to the end.
func (t *tester) boundPrefill(ctx context.Context, p, d subject, q *query, m *mooncake.Meeting, callback <-chan metaserver.Callback) (none mooncake.ProbeAnswer, err error) {
	if callback != nil {
		select {
		case came := <-callback:
			if came.Err != nil {
				return none, fmt.Errorf("%w is of no use: %w", errCallback, came.Err)
			}
			for _, key := range came.Unknown {
				t.report(d.name, Warn, "its callback has the key %q, which this evenkeel does not know; it holds no address, and the prefill engine gets it as it is", key)
			}
			m.Callback = came.KV
		case <-time.After(t.cfg.Bind.CallbackTimeout):
			return none, fmt.Errorf("%w did not come within %v; it must reach %s, see bind.advertise", errCallback, t.cfg.Bind.CallbackTimeout, t.callbacks.URL())
		case <-ctx.Done():
			return none, context.Cause(ctx)
		}
	}
	text, err := t.probe(ctx, p, q, m.RID, p.profile.EarlyProbe(&q.body, q.leg, m, true, nil))
	if err != nil {
		return none, err
	}
	return p.profile.ReadEarlyProbe(text, func(host string) bool { return t.hosts[host] })
}

// listen has decode engines call back to us, where the config says and no proxy runs.
func (t *tester) listen(ctx context.Context) (end func()) {
	layerwise := func(name string) bool {
		p := t.cfg.Profiles[name]
		return p.Connector == mooncake.AscendLayerwise
	}
	if t.callbacks != nil || t.cfg.Bind.Listen == "" || !slices.ContainsFunc(t.cfg.ProfilesInUse("decode"), layerwise) {
		return func() {}
	}
	allowed := map[netip.Addr]bool{}
	for _, host := range t.cfg.Callers() {
		addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", host) // one that has no address does not call
		for _, a := range addrs {
			allowed[a.Unmap()] = true
		}
	}
	s := metaserver.New(metaserver.Config{
		Listen: t.cfg.Bind.Listen, Advertise: func() string { return t.cfg.Bind.Advertise }, Connections: t.cfg.Limits.Connections,
		Allowed:    func(a netip.Addr) bool { return t.cfg.Bind.Allows(a) || len(t.cfg.Bind.Allow) == 0 && allowed[a] },
		Registerer: prometheus.NewRegistry(), Log: zap.NewNop(),
	})
	if err := s.Start(); err != nil {
		t.deaf = err
		return func() {}
	}
	t.callbacks = s
	return s.Close
}

// unpaired says, and reports, that no prompt is sent through an engine, because nobody would
// hear its callback.
func (t *tester) unpaired(s subject) bool {
	if s.profile.Connector != mooncake.AscendLayerwise || t.callbacks != nil {
		return false
	}
	why := "nothing listens at bind.listen for a test"
	if t.deaf != nil {
		why = fmt.Sprintf("callbacks cannot be heard (%v); a proxy that runs there tests its engines itself when it starts", t.deaf)
	}
	t.report(s.name, OK, "answers; no prompt was sent, because its decode rank would call back, and %s", why)
	return true
}
