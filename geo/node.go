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

// New returns a node. It probes no peer before Start.
func New(cfg Config) (*Peers, error) {
	cfg = cfg.withDefaults()
	n := &Peers{
		cfg: cfg, clock: cfg.Clock, started: cfg.Clock.Now(), models: map[string]*modelState{}, text: cfg.Policy,
		settings: cfg.Settings(), spent: map[string]*spending{},
		traffic: engine.NewClient(engine.Options{IdleTimeout: trafficIdle}),
	}
	var err error
	if n.policy, err = n.settings.Parse(cfg.Policy); err != nil {
		return nil, fmt.Errorf("geo.policy: %w", err)
	}
	n.snapshot, _ = cfg.SnapshotBytes()
	n.process = newProcess(n.started, cfg.HMAC.Skew)
	n.verifier = &Verifier{self: cfg.Self.ID, process: n.process, maxHops: cfg.MaxHops, skew: cfg.HMAC.Skew,
		nonces: newNonces(3 * cfg.HMAC.Skew), known: n.known}
	n.verifier.keys.Store(cfg.Keys)
	n.metrics = newMetrics(n)
	n.metrics.createSeries()
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(n.metrics); err != nil {
			return nil, err
		}
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	for i := range cfg.Peers {
		if c := &n.cfg.Peers[i]; c.Discover == Static {
			n.peers = append(n.peers, n.newPeer(c, c.ID, c.Target))
		}
	}
	return n, nil
}

// trafficIdle is how long an idle connection to a peer is kept for the next request. It is less than the time for which the
// peer's listener keeps the connection.
const trafficIdle = 60 * time.Second

// Start begins to probe the peers.
func (n *Peers) Start() {
	n.mu.Lock()
	for _, p := range n.peers {
		n.probeLoop(p)
	}
	n.mu.Unlock()
	for i := range n.cfg.Peers {
		if c := &n.cfg.Peers[i]; c.Discover != Static {
			n.running.Go(func() { n.follow(c) })
		}
	}
}

// Close ends the probing. Forwards under way continue.
func (n *Peers) Close() {
	n.mu.Lock()
	n.stop()
	for _, p := range n.peers {
		if p.link != nil {
			n.stopProbing(p)
		}
	}
	n.mu.Unlock()
	n.running.Wait()
	n.traffic.Close()
}

// SetKeys replaces the keys between dispatchers.
func (n *Peers) SetKeys(k *Keys) {
	n.verifier.keys.Store(k)
}

// Verifier returns the verifier of requests from peers.
func (n *Peers) Verifier() *Verifier { return n.verifier }

// ID is the id of this dispatcher.
func (n *Peers) ID() string { return n.cfg.Self.ID }

// known returns, for the Verifier, the names that a peer's certificate may have; ok is false if no peer has that id.
func (n *Peers) known(id string) (sans []string, ok bool) {
	for i := range n.cfg.Peers {
		if c := &n.cfg.Peers[i]; c.AnswersTo(id) && id != n.cfg.Self.ID {
			sans, ok = append(sans, c.SANs()...), true
		}
	}
	return sans, ok
}

// Offered reports whether any usable peer serves the model.
func (n *Peers) Offered(model string) bool {
	return n.offered(model, func(*peer) bool { return true })
}

// OfferedTo is Offered, but counts only peers in regions to which residency lets the tenant's requests go.
func (n *Peers) OfferedTo(tenant, model string) bool {
	may := n.May(tenant, model)
	return n.offered(model, func(p *peer) bool { return may == nil || may(p.conf.Region) })
}

func (n *Peers) offered(model string, by func(*peer) bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.peers, func(p *peer) bool {
		_, ok := p.offers[model]
		return ok && p.usable() && !p.draining && p.decodes(model) && by(p)
	})
}

// AllUp reports whether every peer is usable. If so, a model that no peer offers is served by no region.
func (n *Peers) AllUp() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !slices.ContainsFunc(n.peers, func(p *peer) bool { return !p.usable() && !p.itself })
}

// Models lists the models of all usable peers.
func (n *Peers) Models() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := map[string]policy.Offer{}
	for _, p := range n.peers {
		if p.usable() {
			maps.Copy(all, p.offers)
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// Tuning changes settings while the node runs. A nil field changes nothing.
type Tuning struct {
	Policy  *string  `json:"policy"`
	QS      *float64 `json:"qs"`
	W       *float64 `json:"w"`
	Load    *float64 `json:"load"`
	MinGain *float64 `json:"min_gain_ms"`
}

// ErrTuning is the error for an invalid Tuning.
var ErrTuning = errors.New("geo: nothing was changed")

// Tune changes the policy and its weights from the next round on.
func (n *Peers) Tune(t Tuning) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	set, text := n.settings, n.text
	for _, v := range []struct {
		key  string
		from *float64
		to   *float64
	}{{"qs", t.QS, &set.QS}, {"w", t.W, &set.W}, {"load", t.Load, &set.Load}, {"min_gain_ms", t.MinGain, &set.MinGainMs}} {
		if v.from == nil {
			continue
		}
		if !(*v.from >= 0 && *v.from <= 1e6) {
			return fmt.Errorf("%w: %s is %v; write a number from 0 to 1e6", ErrTuning, v.key, *v.from)
		}
		*v.to = *v.from
	}
	if t.Policy != nil {
		text = *t.Policy
	}
	parsed, err := set.Parse(text)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrTuning, err)
	}
	n.settings, n.text, n.policy = set, text, parsed
	for _, s := range n.models {
		s.policy, s.round = *parsed, 0
	}
	return nil
}

// PolicyText is the text of the present policy.
func (n *Peers) PolicyText() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text
}

// Receipts returns the receipts of the last forwards, at most so many, the latest first.
func (n *Peers) Receipts(most int) []Receipt { return n.receipts.last(most) }

// Accepts reports whether one more request that the peer from forwards may wait here. waiting requests wait already.
func (n *Peers) Accepts(from string, waiting int) bool {
	if n.cfg.Central == n.cfg.Self.ID || n.sibling(from) { // this dispatcher has the only queue for such requests
		return true
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.policy.Settings().Accepts(waiting)
}

// rttAlpha is the weight of a new round trip in the average. With it, the average follows a changed route within a few seconds
// of probes, and a single slow answer has little effect.
const rttAlpha = 0.3

// withDefaults returns the config with defaults for the fields that are not set.
func (c Config) withDefaults() Config {
	if c.Mode != Central { // in other modes no dispatcher decides for another one
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
