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

// New returns a node; nothing is probed before Start.
func New(cfg Config) (*Node, error) {
	cfg = cfg.withDefaults()
	n := &Node{
		cfg: cfg, clock: cfg.Clock, boot: newBoot(), started: cfg.Clock.Now(), models: map[string]*modelState{}, text: cfg.Policy,
		settings: cfg.Settings(),
		traffic:  engine.NewClient(engine.Options{IdleTimeout: trafficIdle}),
	}
	var err error
	if n.policy, err = n.settings.Parse(cfg.Policy); err != nil {
		return nil, fmt.Errorf("geo.policy: %w", err)
	}
	n.snapshot, _ = cfg.SnapshotBytes()
	n.verifier = &Verifier{self: cfg.Self.ID, boot: n.boot, maxHops: cfg.MaxHops, skew: cfg.HMAC.Skew, nonces: newNonces(2 * cfg.HMAC.Skew),
		known: n.known}
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

// trafficIdle is how long an idle connection to a peer is kept for its next request:
// less than the peer's listener keeps it.
const trafficIdle = 60 * time.Second

// Start begins to probe the peers.
func (n *Node) Start() {
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

// Close ends the probing; forwards under way go on.
func (n *Node) Close() {
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
func (n *Node) SetKeys(k *Keys) {
	n.verifier.keys.Store(k)
}

// Verifier decides which requests of peers may come in.
func (n *Node) Verifier() *Verifier { return n.verifier }

// ID is how other dispatchers know this one.
func (n *Node) ID() string { return n.cfg.Self.ID }

// known returns, for the Verifier, the names that a peer's certificate may have; ok is false if no peer has that id.
func (n *Node) known(id string) (sans []string, ok bool) {
	for i := range n.cfg.Peers {
		if c := &n.cfg.Peers[i]; c.AnswersTo(id) && id != n.cfg.Self.ID {
			sans, ok = append(sans, c.SANs()...), true
		}
	}
	return sans, ok
}

// Offered says whether some peer that is up serves a model.
func (n *Node) Offered(model string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.peers, func(p *peer) bool {
		_, ok := p.offers[model]
		return ok && p.up && !p.draining && p.decodes(model)
	})
}

// AllUp says whether every peer answers. Then a model that none of them serves is
// served nowhere.
func (n *Node) AllUp() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !slices.ContainsFunc(n.peers, func(p *peer) bool { return !p.up && !p.itself })
}

// Models lists the models that peers which are up serve.
func (n *Node) Models() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := map[string]policy.Offer{}
	for _, p := range n.peers {
		if p.up {
			maps.Copy(all, p.offers)
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// Tuning is what may be changed while the node runs; nil leaves a value as it is.
type Tuning struct {
	Policy  *string  `json:"policy"`
	QS      *float64 `json:"qs"`
	W       *float64 `json:"w"`
	Load    *float64 `json:"load"`
	MinGain *float64 `json:"min_gain_ms"`
}

// ErrTuning says that a change is not possible.
var ErrTuning = errors.New("geo: nothing was changed")

// Tune changes policy and weights, from the next round on.
func (n *Node) Tune(t Tuning) error {
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

// PolicyText is the policy in force.
func (n *Node) PolicyText() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text
}

// Receipts returns up to n of the last forwards, the latest first.
func (n *Node) Receipts(most int) []Receipt { return n.receipts.last(most) }

// Accepts says whether one more request that a peer forwards may wait here.
func (n *Node) Accepts(from string, waiting int) bool {
	if n.cfg.Central == n.cfg.Self.ID || n.sibling(from) { // the request belongs to the one queue that this dispatcher holds for all
		return true
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.policy.Settings().Accepts(waiting)
}

// rttAlpha is how much a new round trip weighs: a route that has changed is known after some seconds of probes, and one slow
// answer hardly counts.
const rttAlpha = 0.3

// withDefaults returns the config with what the caller of New left out. Only in mode central does another dispatcher
// decide.
func (c Config) withDefaults() Config {
	if c.Mode != Central { // in other modes, no dispatcher decides for another
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
