// Package selftest sends tiny requests through prefill and decode engines, and through engines that
// do both, and reports where the engines do not behave as their profiles say. It uses the same
// request bodies and readers as serve.
package selftest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/metaserver"
	"evenkeel/mooncake"
)

// Options says what Run tests, and what it uses of a running proxy.
type Options struct {
	// Callbacks receives the callbacks of decode engines; nil: the test listens for them itself while
	// it runs.
	Callbacks *metaserver.Server
	// EveryPair tries every prefill engine with every decode engine. Without it each rank has one
	// partner. An aggregated rank has no partner: it is tried alone.
	EveryPair bool
	// Resumes also finds out how engines can continue a chat whose answer broke off, which decode
	// engines keep the KV of answers, and how long the longest prompt takes to be pulled. The requests
	// for this take no slots.
	Resumes bool
	// TakeSlot takes a slot of a decode rank before a request of the test is sent there. Without
	// TakeSlot, no slots are taken.
	TakeSlot func(ctx context.Context, rank string, tokens int) (Slot, error)
}

// Run sends tiny requests through pairs of a prefill and a decode engine, and to each aggregated
// rank, and returns its findings. It ends when ctx does, and then reports how much it has left out.
// The config must be valid.
func Run(ctx context.Context, cfg *config.Config, o Options) []Finding {
	t := newTester(cfg, o.Callbacks)
	t.takeSlot = o.TakeSlot
	defer t.client.Close()
	defer t.listen(ctx)()
	prefills := t.testedRanks(ctx, "prefill", cfg.Engines.Prefill)
	decodes := t.testedRanks(ctx, "decode", cfg.Engines.Decode)
	aggregatedRanks := t.testedRanks(ctx, aggregated, cfg.Engines.Aggregated)
	t.compareModels(firstRanks(prefills), firstRanks(decodes))
	t.compareModels(firstRanks(decodes), firstRanks(prefills))
	for _, s := range append(firstRanks(prefills), firstRanks(decodes)...) {
		t.learnHosts(ctx, s)
	}
	sortFrom := len(t.findings) // later findings are sorted by engine, because the pairs are tried in another order
	prefills, decodes = slices.DeleteFunc(prefills, t.skipUntestable), slices.DeleteFunc(decodes, t.skipUntestable)
	if o.EveryPair {
		rounds, leftOut := everyPair(prefills, decodes)
		t.tryRounds(ctx, rounds)
		if leftOut > 0 {
			t.report("engines", Warn, "%d pairs are tried at most; %d others were not", maxPairs, leftOut)
		}
	} else {
		t.tryRounds(ctx, partners(prefills, decodes))
	}
	if o.Resumes {
		t.tryResumes(ctx, prefills, decodes)
		t.findKVKeepers(ctx, prefills, decodes)
		t.timePulls(ctx, prefills, decodes)
	}
	t.tryRounds(ctx, eachAlone(aggregatedRanks))
	place := map[string]int{} // findings are sorted by the order of the ranks in the config
	for i, s := range slices.Concat(prefills, decodes, aggregatedRanks) {
		place[s.name] = i
		t.reportUnreported(s)
	}
	slices.SortStableFunc(t.findings[sortFrom:], func(a, b Finding) int { return place[a.Engine] - place[b.Engine] })
	if ctx.Err() != nil {
		t.report("engines", Warn, "the test had to end before all was tried (%v); it left out at least %d requests",
			context.Cause(ctx), t.leftOut)
	}
	return t.findings
}

// testedRanks returns the ranks of the engines that answer, with the models that they serve. It
// reports engines that do not answer, and problems with the metrics and settings of the other
// engines.
func (t *tester) testedRanks(ctx context.Context, role string, engines []config.Engine) (ranks []testedRank) {
	// Even if engines is empty, aggregated engines or engines that discovery finds later may serve
	// requests.
	othersServe := len(t.cfg.Engines.Aggregated) > 0 || t.cfg.Discovery.On()
	if len(engines) == 0 && role != aggregated && !othersServe {
		t.report(role, Warn, "the config lists none; until some are added nothing can be served")
	}
	for _, e := range engines {
		s, err := t.firstRank(ctx, role, e)
		if err != nil {
			t.report(s.name, Bad, "%v", err)
			continue
		}
		sample := t.metrics(ctx, role, e, s)
		// fixRankNumber sends a request without a slot, so it leaves decode ranks alone if requests of
		// the test have to take slots.
		if role == "prefill" || t.takeSlot == nil {
			t.fixRankNumber(ctx, &s, e, sample)
		}
		t.compareSettings(ctx, role, s, e)
		ranks = append(ranks, s)
		for rank := 1; rank < e.Ranks; rank++ { // s is rank 0
			ranks = append(ranks, s.otherRank(rank))
		}
	}
	return ranks
}

// firstRank returns the first rank of an engine, with the models that the engine serves, for which
// it asks the engine. The error says why the engine cannot be tested. s has its name even then.
func (t *tester) firstRank(ctx context.Context, role string, e config.Engine) (s testedRank, err error) {
	id, err := config.InstanceID(e.URL)
	if err != nil {
		return s, err // a valid config has no URL that fails here
	}
	p := t.cfg.Profiles[e.Profile]
	if role == aggregated { // the engine serves requests without a partner
		p = p.Alone()
	}
	s = testedRank{name: role + " " + id, ranks: e.Ranks, profile: &p}
	if s.target, err = config.Target(e, &p); err != nil {
		return s, err
	}
	// With VLLMMooncake, a prefill engine needs the rank header even for its only rank.
	if e.Ranks > 0 || p.Connector == mooncake.VLLMMooncake {
		s.target.Rank = 0
	}
	s.rosterName = id
	if e.Ranks > 0 { // the roster names every rank that has a number
		s.rosterName += "/0"
	}
	if e.Ranks > 1 { // findings name the rank only if the engine has several
		s.name += "/0"
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	models, err := engine.Models(ctx, t.client, s.target)
	if pageErr, ok := errors.AsType[*engine.PageError](err); ok { // only the context lengths are unknown
		t.report(s.name, Warn, "does not tell how long a context its models take: %v", pageErr)
		err = nil
	}
	s.listed = models
	for _, m := range models {
		s.models = append(s.models, m.ID)
	}
	if err == nil && len(models) == 0 {
		err = fmt.Errorf("engine %s serves no model", s.target.ID)
	}
	return s, err
}

// metrics reads the metrics of an engine, and reports which of the metrics that evenkeel uses are
// missing. It returns nil if there are no metrics.
func (t *tester) metrics(ctx context.Context, role string, e config.Engine, s testedRank) *engine.Sample {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	sample, err := engine.MetricNames(s.profile.Metrics).Scrape(ctx, t.client, s.target)
	if err != nil {
		t.report(s.name, Warn, "no metrics: %v; only our own requests count towards its KV then", err)
		return nil
	}
	if _, known := sample.KVUsage(s.target.Rank); !known && role == "prefill" { // the choice of a prefill engine looks at this
		t.report(s.name, Warn, "no KV usage under a known metric name; set the profile's metrics.kv_usage")
	}
	t.reportMemory(s, e, sample.Memories(s.listed).Of(s.target.Rank))
	return sample
}

// reportMemory reports how many KV tokens a rank holds, and from where that is known.
func (t *tester) reportMemory(s testedRank, e config.Engine, m engine.Memory) {
	configured := cmp.Or(e.KV, s.profile.KVTokensPerRank)
	blocks := ""
	if m.Block.Tokens > 0 {
		blocks = fmt.Sprintf(", in blocks of %d (%s)", m.Block.Tokens, m.Block.From)
	}
	switch {
	case configured != 0 && m.Capacity.Tokens != 0:
		t.report(s.name, OK, "may hold %d KV tokens per rank by the config; its metrics say %d (%s)%s", configured, m.Capacity.Tokens,
			m.Capacity.From, blocks)
	case configured != 0:
		t.report(s.name, OK, "may hold %d KV tokens per rank by the config; its metrics do not say how many fit%s", configured, blocks)
	case m.Capacity.Tokens != 0:
		t.report(s.name, OK, "holds %d KV tokens per rank (%s)%s", m.Capacity.Tokens, m.Capacity.From, blocks)
	case m.Misread.Tokens != 0:
		t.report(s.name, Warn, "its metrics seem to say that %d KV tokens fit (%s), which is less than one request of its max_model_len %d; "+
			"this number means something else, so evenkeel does not use it; set the profile's kv_tokens_per_rank to the KV cache size that the "+
			"engine logs at its start, or only slots limit what it is given", m.Misread.Tokens, m.Misread.From, m.Context)
	default:
		t.report(s.name, Warn,
			"its KV capacity is not in its metrics; set the profile's kv_tokens_per_rank, or only slots limit what it is given")
	}
}

// compareModels reports engines that cannot work with the other side. One case is an engine that
// shares no model with the other side. The other case is an engine that shares one model with an
// engine of the other side, but lacks another of its models: requests for both models may get this
// pair.
func (t *tester) compareModels(side, others []testedRank) {
	for _, s := range side {
		sharesModel := false
		var missing []string // models of the other side that this engine lacks
		for _, other := range others {
			if _, ok := commonModel(s, other); !ok { // the two never get a request together
				continue
			}
			sharesModel = true
			for _, m := range other.models {
				if !slices.Contains(s.models, m) && !slices.Contains(missing, m) {
					missing = append(missing, m)
					t.report(s.name, Warn, "does not serve %q, which %s does; requests for it will fail here", m, other.name)
				}
			}
		}
		if !sharesModel && len(others) > 0 {
			t.report(s.name, Bad, "serves %s, and no engine of the other side does", strings.Join(s.models, ", "))
		}
	}
}

// learnHosts finds the hosts that hand-offs may name. Like serve, the test refuses a hand-off that
// names any other host.
func (t *tester) learnHosts(ctx context.Context, p testedRank) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for _, host := range append([]string{p.target.URL.Hostname()}, p.profile.KVHosts...) {
		t.hosts[host] = true
		addresses, err := net.DefaultResolver.LookupHost(ctx, host)
		if err != nil {
			t.report(p.name, Warn, "%s does not resolve (%v); a hand-off that names its address will be refused", host, err)
		}
		for _, address := range addresses {
			t.hosts[address] = true
		}
	}
}

// partnersTried is the largest number of partners of the other side with which a new engine is
// tried.
const partnersTried = 2

// TryEngine tries an engine before its first request. The error says why the engine cannot serve;
// findings are smaller observations. partners are engines of the other side that serve already: a
// failure of a partner does not count against the engine.
//
// A prefill engine must return a hand-off as its profile says; a partner decodes the hand-off,
// which frees the KV. A decode engine must decode a partner's hand-off, or a short prompt by itself
// if there is no partner. An engine whose connector runs prefill and decode at the same time must
// do so with a partner. If there is no partner, or nothing receives its callback, it only has to
// answer. An engine that prefills and decodes must answer a short prompt.
func TryEngine(ctx context.Context, cfg *config.Config, role string, e config.Engine, partners []config.Engine,
	callbacks *metaserver.Server) ([]Finding, error) {
	t := newTester(cfg, callbacks)
	defer t.client.Close()
	s, err := t.firstRank(ctx, role, e)
	switch {
	case err != nil:
		return nil, err
	case role == aggregated:
		err = t.tryAlone(ctx, s, t.id())
	case !t.skipUntestable(s): // an untestable engine has answered, which is enough
		err = t.tryWithPartners(ctx, role, s, partners)
	}
	return t.findings, err
}

// tryWithPartners tries an engine with up to partnersTried partners, until a request has gone
// through both engines. The error is that of the engine itself: a failure of a partner does not
// count. If no partner can serve, an engine that uses hand-offs gets a prompt all the
// same: a decode engine computes the prompt itself. A prefill engine then keeps the KV until its hold timeout, because no decode engine
// fetches the KV.
func (t *tester) tryWithPartners(ctx context.Context, role string, s testedRank, partners []config.Engine) error {
	other := map[string]string{"prefill": "decode", "decode": "prefill"}[role]
	for n := range partnersTried {
		partner, model, following, ok := t.partner(ctx, other, s, partners)
		if !ok { // no other engine of the other side can be a partner
			break
		}
		partners = following
		id := fmt.Sprintf("%s-%d", t.id(), n)
		q := newQuery(mooncake.Completions, model, id, shortPrompt)
		p, d := s, partner
		if role == "decode" {
			p, d = partner, s
		}
		concurrent, compatible := compatibility(p, d)
		if !compatible {
			continue
		}
		t.learnHosts(ctx, p)
		received := "hand-off"
		if concurrent { // the decode engine may call back, and name its own host
			received = "KV"
			t.learnHosts(ctx, d)
		}
		_, prefillErr, decodeErr := t.sendThroughPair(ctx, p, d, q, id)
		switch {
		case role == "prefill" && prefillErr != nil:
			return prefillErr
		case role == "decode" && decodeErr != nil:
			return fmt.Errorf("with the %s of %s: %w", received, p.name, decodeErr)
		case prefillErr == nil && (decodeErr == nil || !concurrent): // a hand-off shows that a prefill engine works, whoever decodes it
			return nil
		}
	}
	if !s.profile.HasHandoff() { // without a partner, such an engine cannot serve a request, but it has answered
		return nil
	}
	q := newQuery(mooncake.Completions, s.models[0], t.id(), shortPrompt)
	if role == "decode" {
		_, err := t.decode(ctx, s, q, mooncake.ProbeAnswer{}, t.id())
		return err
	}
	t.learnHosts(ctx, s)
	_, err := t.prefill(ctx, s, q, t.id())
	return err
}

// partner finds the first engine of the other side that answers and serves a model of s. It returns
// that engine, the model, and the engines that follow in the list. role is the role of the other
// side.
func (t *tester) partner(ctx context.Context, role string, s testedRank, engines []config.Engine) (o testedRank, model string,
	following []config.Engine, ok bool) {
	for i, e := range engines {
		var err error
		if o, err = t.firstRank(ctx, role, e); err == nil {
			if model, ok = commonModel(o, s); ok {
				return o, model, engines[i+1:], true
			}
		}
	}
	return o, "", nil, false
}
