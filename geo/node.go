package geo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo/policy"
)

// New probes no peer before Start.
func New(cfg Config) (*Peers, error) {
	cfg = cfg.withDefaults()
	ps := &Peers{
		cfg: cfg, clock: cfg.Clock, started: cfg.Clock.Now(), models: map[string]*modelState{}, policyText: cfg.Policy,
		settings: cfg.Settings(), removedEgress: map[string]*spending{},
		traffic: engine.NewClient(engine.Options{IdleTimeout: trafficIdle}),
	}
	var err error
	if ps.policy, err = ps.settings.Parse(cfg.Policy); err != nil {
		return nil, fmt.Errorf("geo.policy: %w", err)
	}
	ps.maxPromptBytes = cfg.PromptIndexBytes
	ps.process = newProcess(ps.started, cfg.HMAC.Skew)
	ps.verifier = &Verifier{self: cfg.Self.ID, process: ps.process, maxHops: cfg.MaxHops, skew: cfg.HMAC.Skew,
		// A hop is accepted for twice the skew, and the clock may be set back by one.
		nonces:           newNonces(3 * cfg.HMAC.Skew),
		certificateNames: ps.certificateNames}
	ps.verifier.keys.Store(cfg.Keys)
	ps.metrics = newMetrics(ps)
	ps.metrics.createSeries()
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(ps.metrics); err != nil {
			return nil, err
		}
	}
	ps.ctx, ps.stop = context.WithCancel(context.Background())
	for i := range cfg.Peers {
		if c := &ps.cfg.Peers[i]; c.Discover == Static {
			ps.peers = append(ps.peers, ps.newPeer(c, c.ID, c.Target))
		}
	}
	return ps, nil
}

// trafficIdle is how long an idle connection is kept: less than the peer's listener keeps it.
const trafficIdle = 60 * time.Second

// Start begins to probe the peers, and to look up names. It returns at once.
func (ps *Peers) Start() {
	ps.mu.Lock()
	for _, p := range ps.peers {
		ps.startProber(p)
	}
	ps.mu.Unlock()
	for i := range ps.cfg.Peers {
		if c := &ps.cfg.Peers[i]; c.Discover != Static {
			ps.running.Go(func() { ps.followName(c) })
		}
	}
}

// Close waits until all probers and goroutines of Peers have ended. Forwards continue.
func (ps *Peers) Close() {
	ps.mu.Lock()
	ps.stop()
	for _, p := range ps.peers {
		if p.link != nil { // Start was not called
			ps.stopProbing(p)
		}
	}
	ps.mu.Unlock()
	ps.running.Wait()
	ps.traffic.Close()
}

// SetKeys replaces the signing keys; nil: no signature is needed.
func (ps *Peers) SetKeys(k *Keys) {
	ps.verifier.keys.Store(k)
}

// Verifier is for the peer listener.
func (ps *Peers) Verifier() *Verifier { return ps.verifier }

// ID is the id of this proxy.
func (ps *Peers) ID() string { return ps.cfg.Self.ID }

// certificateNames are those that a peer's certificate may have, by all entries to which the id
// belongs; ok is false without one.
func (ps *Peers) certificateNames(id string) (sans []string, ok bool) {
	for i := range ps.cfg.Peers {
		// An entry with discover may match this proxy's id.
		if c := &ps.cfg.Peers[i]; c.AnswersTo(id) && id != ps.cfg.Self.ID {
			sans, ok = append(sans, c.SANs()...), true
		}
	}
	return sans, ok
}

// Offered reports whether any usable peer serves the model.
func (ps *Peers) Offered(model string) bool {
	return ps.anyPeerServes(model, func(*peer) bool { return true })
}

// OfferedTo counts only regions that residency allows.
func (ps *Peers) OfferedTo(tenant, model string) bool {
	allowed := ps.RegionFilter(tenant, model)
	return ps.anyPeerServes(model, func(p *peer) bool { return allowed == nil || allowed(p.conf.Region) })
}

func (ps *Peers) anyPeerServes(model string, isAllowed func(*peer) bool) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return slices.ContainsFunc(ps.peers, func(p *peer) bool {
		_, offersModel := p.offers[model]
		// A sibling may offer a model whose decode groups another one owns.
		servesModel := offersModel && p.decodesModel(model)
		takesRequests := p.usable() && !p.draining
		return servesModel && takesRequests && isAllowed(p)
	})
}

// AllUp ignores this proxy's own address. If it is true, a model that no peer offers is served by
// no region.
func (ps *Peers) AllUp() bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return !slices.ContainsFunc(ps.peers, func(p *peer) bool { return !p.usable() && !p.isSelf })
}

// Models lists those of all usable peers.
func (ps *Peers) Models() []string {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	all := map[string]policy.Offer{}
	for _, p := range ps.peers {
		if p.usable() {
			maps.Copy(all, p.offers)
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// Tuning changes settings while evenkeel runs. A nil field changes nothing.
type Tuning struct {
	Policy  *string  `json:"policy"`
	QS      *float64 `json:"qs"`
	W       *float64 `json:"w"`
	Load    *float64 `json:"load"`
	MinGain *float64 `json:"min_gain_ms"`
}

// ErrTuning is for an invalid Tuning.
var ErrTuning = errors.New("geo: nothing was changed")

// Tune applies from the next round on. If any value is not valid, it changes nothing.
func (ps *Peers) Tune(t Tuning) error {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	set, text := ps.settings, ps.policyText
	for _, v := range []struct {
		key string
		new *float64
		set *float64
	}{
		{"qs", t.QS, &set.WaitWeight},
		{"w", t.W, &set.PrefillWeight},
		{"load", t.Load, &set.BatchWeight},
		{"min_gain_ms", t.MinGain, &set.MinGainMs},
	} {
		if v.new == nil {
			continue
		}
		if !(*v.new >= 0 && *v.new <= 1e6) { // refuses NaN, too
			return fmt.Errorf("%w: %s is %v; write a number from 0 to 1e6", ErrTuning, v.key, *v.new)
		}
		*v.set = *v.new
	}
	if t.Policy != nil {
		text = *t.Policy
	}
	parsed, err := set.Parse(text)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrTuning, err)
	}
	ps.settings, ps.policyText, ps.policy = set, text, parsed
	for _, s := range ps.models {
		s.policy = *parsed
		s.round = 0 // no round has the number 0, so the next decision begins one
	}
	return nil
}

// PolicyText is what policy.Settings.Parse reads.
func (ps *Peers) PolicyText() string {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.policyText
}

// Receipts returns the last ones, the latest first.
func (ps *Peers) Receipts(most int) []Receipt { return ps.receipts.last(most) }

// Accepts reports whether one more request, of the proxy from, may wait here besides those that
// wait.
func (ps *Peers) Accepts(from string, waiting int) bool {
	isCentral := ps.cfg.Central == ps.cfg.Self.ID
	if isCentral { // it decides for all regions, so requests must wait here
		return true
	}
	if ps.mayBeSibling(from) { // only this proxy admits to the decode groups that it owns
		return true
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.policy.Settings().AcceptsForward(waiting)
}

// rttAlpha is the weight of a new round trip: the average follows a changed route within seconds,
// and a single slow answer has little effect.
const rttAlpha = 0.3

func (c Config) withDefaults() Config {
	if c.Mode != Central { // no proxy decides for another one
		c.Central = ""
	}
	if c.Lookup == nil {
		c.Lookup = lookup
	}
	if c.Clock == nil {
		c.Clock = wallClock{}
	}
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	return c
}
