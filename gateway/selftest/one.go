package selftest

import (
	"context"
	"fmt"

	"evenkeel/gateway/config"
	"evenkeel/gateway/metaserver"
	"evenkeel/mooncake"
)

// partnersTried is how many engines of the other side a new engine may be tried with.
const partnersTried = 2

// One tries an engine before its first request; the error says what keeps it
// from serving. Its findings are what else was noticed. partners are engines of
// the other side that serve: what they fail at is not held against it.
//
// A prefill engine must return a hand-off that its profile promises; a partner
// decodes it, which frees it. A decode engine must decode a partner's, or, where
// there is none, a short prompt of its own. One that works on a request at the same time as the other side must do so
// with a partner, and where there is none, or nothing hears its callback, it must only answer. An engine that prefills and
// decodes must answer a short prompt.
func One(ctx context.Context, cfg *config.Config, role string, e config.Engine, partners []config.Engine, callbacks *metaserver.Server) ([]Finding, error) {
	t := newTester(cfg, callbacks)
	defer t.client.Close()
	s, err := t.subject(ctx, role, e)
	if err != nil {
		return nil, err
	}
	if role == aggregated {
		return t.findings, t.alone(ctx, s, t.id())
	}
	if t.unpaired(s) {
		return t.findings, nil
	}
	if role == "prefill" && s.profile.HasHandoff() {
		return t.findings, t.onePrefill(ctx, s, partners)
	}
	return t.findings, t.oneWith(ctx, role, s, partners)
}

func (t *tester) onePrefill(ctx context.Context, s subject, partners []config.Engine) error {
	t.learnHosts(ctx, s)
	q, err := prompt(s.models[0], t.id())
	if err != nil {
		return err
	}
	answer, err := t.prefill(ctx, s, q, t.id())
	if err != nil {
		return err
	}
	if d, ok := t.partner(ctx, "decode", s, partners); ok {
		_, _ = t.decode(ctx, d, q, answer, t.id()) // else its hold timeout frees it
	}
	return nil
}

// oneWith tries an engine with the first partners that speak its connector.
func (t *tester) oneWith(ctx context.Context, role string, s subject, partners []config.Engine) error {
	other := "decode"
	if role == other {
		other = "prefill"
	}
	for n := range min(partnersTried, len(partners)) {
		partner, ok := t.partner(ctx, other, s, partners[n:])
		if !ok {
			break
		}
		model, _ := common(partner, s)
		id := fmt.Sprintf("%s-%d", t.id(), n)
		q, err := prompt(model, id)
		if err != nil {
			return err
		}
		p, d := s, partner
		if role == "decode" {
			p, d = partner, s
		}
		together, ever := meets(p, d)
		if !ever {
			continue
		}
		t.learnHosts(ctx, p)
		got := "hand-off"
		if together {
			got = "KV"
			t.learnHosts(ctx, d)
		}
		_, prefill, decode := t.through(ctx, p, d, q, id)
		switch {
		case role == "prefill" && prefill != nil:
			return prefill
		case role == "decode" && decode != nil:
			return fmt.Errorf("with the %s of %s: %w", got, p.name, decode)
		case prefill == nil && decode == nil:
			return nil
		}
	}
	if !s.profile.HasHandoff() {
		return nil
	}
	q, err := prompt(s.models[0], t.id())
	if err != nil {
		return err
	}
	_, err = t.decode(ctx, s, q, mooncake.ProbeAnswer{}, t.id())
	return err
}

// partner is the first of the other side that answers and has a model of s.
func (t *tester) partner(ctx context.Context, role string, s subject, engines []config.Engine) (subject, bool) {
	for _, e := range engines {
		o, err := t.subject(ctx, role, e)
		if err != nil {
			continue
		}
		if _, ok := common(o, s); ok {
			return o, true
		}
	}
	return subject{}, false
}
