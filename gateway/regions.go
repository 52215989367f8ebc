package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/reload"
	"evenkeel/geo"
)

// regions is this proxy among those of other regions; a Gateway without others
// has none, and nothing of it costs anything then.
type regions struct {
	gw       *Gateway
	node     *geo.Node
	server   *edge.Server
	listener *edge.Listener
	decoding atomic.Pointer[map[string]decoding] // by model
	shares   shares
	warned   atomic.Int64 // Unix ns of the last warning about another version
}

// decoding is how busy the ranks of a model are.
type decoding struct {
	running float64        // requests on the rank that has fewest
	slots   int            // of all ranks
	free    map[string]int // of them, by region; nil: all are of one
}

const (
	decodingEvery = 250 * time.Millisecond
	firstByte     = 120 * time.Second // of a forward
	wholeAnswer   = 16 << 20          // bytes of one that is not streamed
)

// newRegions wires the node; nil without other regions.
func newRegions(g *Gateway) (*regions, error) {
	c := &g.conf().Geo
	if !c.On() {
		return nil, nil
	}
	r := &regions{gw: g}
	var err error
	limits, cfg := &g.conf().Limits, *c
	cfg.FirstByte, cfg.Idle, cfg.Connect, cfg.WholeBytes, cfg.EventBytes = firstByte, limits.EventTimeout, limits.ConnectTimeout, wholeAnswer, limits.EventBytes
	cfg.Tier, cfg.Running, cfg.Draining = g.tier, r.running, g.service.Draining
	cfg.Registerer, cfg.Log = g.reg, g.log
	if g.owner != nil {
		cfg.Tenure, cfg.Heard = r.tenure, r.hear
	}
	if g.owner.Has(owner.Groups) {
		cfg.Siblings, cfg.Whole = true, limits.ProbeTimeout+g.conf().Prefill.Queue.Timeout
	}
	if cfg.Keys, err = c.ReadKeys(); err != nil {
		return nil, err
	}
	cfg.Peers = slices.Clone(c.Peers)
	for i := range cfg.Peers {
		if err := r.reach(&cfg.Peers[i]); err != nil {
			return nil, err
		}
	}
	if r.node, err = geo.New(cfg); err != nil {
		return nil, err
	}
	g.owner.Join(r.node)
	r.decoding.Store(&map[string]decoding{})
	r.server = edge.NewServer(edge.Options{
		Handler: r.handle, Log: g.log, MaxBody: limits.Body, MaxHead: limits.Head, Concurrency: limits.Connections + 1,
		ReadTimeout: limits.ReadTimeout, IdleTimeout: limits.IdleTimeout, Stranger: r.stranger, Answer: r.turnedAway, Bodies: g.bodies,
	})
	return r, nil
}

// reach fills in how calls to a peer are made.
func (r *regions) reach(p *geo.PeerConfig) error {
	u, err := url.Parse(p.URL)
	if err != nil {
		return fmt.Errorf("geo.peers: %s: %w", p.ID, err)
	}
	p.Target = &engine.Target{ID: p.ID, URL: &url.URL{Scheme: u.Scheme, Host: u.Host}, Rank: -1}
	if a := r.gw.config.Authority(); u.Scheme == "https" && a != nil {
		p.Target.TLS = r.gw.config.Certificate(reload.Peers).MutualClient(a, u.Hostname(), p.SANs())
	}
	return nil
}

// start opens the listener for other dispatchers and begins to probe them.
func (r *regions) start() error {
	g := r.gw
	limits := &g.conf().Limits
	certificate := g.config.Certificate(reload.Peers)
	var err error
	r.listener, err = edge.Listen(g.conf().Geo.Listen, edge.ListenOptions{
		WriteTimeout: limits.WriteTimeout, MaxConns: limits.Connections, MaxLag: limits.ClientLag, SendBuffer: limits.ClientBacklog,
		TLS: certificate != nil, Log: g.log,
	})
	if err != nil {
		return fmt.Errorf("geo.listen: %w", err)
	}
	ln := certificate.Listener(r.listener)
	if a := g.config.Authority(); a != nil {
		ln = certificate.MutualListener(r.listener, a)
	}
	g.background.Go(func() {
		if err := r.server.Serve(ln); err != nil && !errors.Is(err, net.ErrClosed) {
			g.log.Error("peer listener", zap.Error(err))
		}
	})
	g.background.Go(func() { r.followDecoding(g.ctx) })
	r.node.Start()
	if g.owner != nil {
		g.background.Go(func() { g.owner.Run(g.ctx) })
	}
	g.log.Info("listening for other dispatchers", zap.String("geo", r.listener.Addr().String()), zap.String("id", r.node.ID()), zap.Int("peers", len(g.conf().Geo.Peers)))
	return nil
}

// followDecoding keeps what decisions need of the dispatcher: it must not be
// asked under the tier's lock.
func (r *regions) followDecoding(ctx context.Context) {
	tick := time.NewTicker(decodingEvery)
	defer tick.Stop()
	for {
		r.look(ctx)
		r.forgetShares()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (r *regions) look(ctx context.Context) {
	boards, free := map[string]decoding{}, map[string]int{}
	for _, m := range r.gw.dispatcher.Status(ctx).Models {
		boards[m.Model], free[m.Model] = decodingOf(m.Workers), freeSlots(m.Workers)
	}
	all := map[string]decoding{}
	for _, route := range r.gw.fleet.Models() {
		d := boards[route.Board]
		for board, of := range boards { // of other regions whose engines are ours
			if strings.HasPrefix(board, route.Board+fleet.RegionMark) {
				if d.free == nil {
					d.free = map[string]int{"": free[route.Board]}
				}
				d.free[strings.TrimPrefix(board, route.Board+fleet.RegionMark)] = free[board]
				d.add(of)
			}
		}
		if !r.gw.fleet.Begins(route.Board) {
			d.slots = 0
		}
		all[route.Name] = d
		if d.free != nil || (*r.decoding.Load())[route.Name].free != nil {
			r.gw.tier.SetSlots(route.Name, d.free)
		}
	}
	before := r.decoding.Swap(&all)
	for name, now := range all {
		if now.slots > 0 && (*before)[name].slots == 0 { // it can be served here again
			r.gw.tier.Wake()
			return
		}
	}
}

// add takes in the ranks of another board.
func (d *decoding) add(o decoding) {
	if d.slots == 0 || o.slots > 0 && o.running < d.running {
		d.running = o.running
	}
	d.slots += o.slots
}

func decodingOf(workers []board.WorkerStatus) (d decoding) {
	first := true
	for _, w := range workers {
		if !w.Up {
			continue
		}
		d.slots += w.Slots
		if first || float64(w.Used) < d.running {
			d.running, first = float64(w.Used), false
		}
	}
	return d
}

// freeSlots is how many requests the ranks take at once before one ends.
func freeSlots(workers []board.WorkerStatus) (n int) {
	for _, w := range workers {
		if w.Up {
			n += max(0, w.Limit-w.Used)
		}
	}
	return n
}

func (r *regions) running(model string) (perReplica float64, seqs int) {
	d := (*r.decoding.Load())[model]
	return d.running, d.slots
}

// decodes are the models that something decodes here now.
func (r *regions) decodes() (models []string) {
	for name, d := range *r.decoding.Load() {
		if d.slots > 0 {
			models = append(models, name)
		}
	}
	return models
}

// drain ends the listener, as Shutdown does that of clients.
func (r *regions) drain(ctx context.Context) error {
	err := edge.Drain(ctx, r.server, r.listener)
	_ = r.listener.Close() // a server that is stopped before it accepts anything does not
	return err
}

// Geo is this proxy among others, for operators; nil without others.
func (g *Gateway) Geo() *geo.Node {
	if g.regions == nil {
		return nil
	}
	return g.regions.node
}

// GeoAddr is where other dispatchers connect; empty without others.
func (g *Gateway) GeoAddr() string {
	if g.regions == nil || g.regions.listener == nil {
		return ""
	}
	return g.regions.listener.Addr().String()
}
