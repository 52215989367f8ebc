// Package peerserver serves the other proxies (peers): those of other regions, and those that share the decode groups of this region. It
// has the listener for their requests, the answers to their probes, and the hand-back of regions and groups that a peer should own.
package peerserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/service"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Peers connects this proxy with the other proxies. It is nil if there are none.
type Peers struct {
	deps     Deps
	peers    *geo.Peers
	server   *edge.Server
	listener *edge.Listener
	looking  chan struct{}                       // a lock: at most one Look runs, so that an older look never replaces a newer one
	decoding atomic.Pointer[map[string]decoding] // the last result of Look, by model
	shares   shares
	warned   atomic.Int64 // Unix time in ns of the last warning about a peer with another version
}

// Deps is what Peers needs of the proxy.
type Deps struct {
	Context    context.Context // ends with the proxy
	Go         func(func())    // runs a function, for which the end of the proxy waits
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Config     *reload.Reloader
	Service    *service.Service
	Fleet      *fleet.Fleet
	Prefill    *prefill.Scheduler
	Dispatcher *dispatcher.Dispatcher
	Owner      *owner.Set // nil: this proxy owns all engines
	Bodies     *edge.Quota
	Fail       func(*fasthttp.RequestCtx, *openai.Error) // answers with an error
	// Serve answers a client's request that another dispatcher forwarded. That dispatcher has already checked the client's identity and
	// permissions.
	Serve func(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *Hop, came time.Time)
}

// decoding says how busy the decode ranks of a model are.
type decoding struct {
	running float64        // requests on the least busy rank
	slots   int            // slots of all ranks together
	free    map[string]int // free slots by region; nil: all ranks are in one region
}

const (
	decodingEvery = 250 * time.Millisecond // interval of Look
	firstByte     = 120 * time.Second      // limit for the first byte of a forwarded request's answer
)

// New returns the Peers of the config, with the client for calls to other proxies (node) and the server for their requests; nil: the config
// names no other proxies.
func New(d Deps) (*Peers, error) {
	set := d.Config.Settings()
	c := &set.Geo
	if !c.On() {
		return nil, nil
	}
	r := &Peers{deps: d, looking: make(chan struct{}, 1)}
	var err error
	limits, cfg := &set.Limits, *c
	cfg.FirstByte = firstByte
	cfg.Idle = limits.EventTimeout
	cfg.Connect = limits.ConnectTimeout
	cfg.WholeBytes = limits.AnswerBytes
	cfg.EventBytes = limits.EventBytes
	cfg.Queue = d.Prefill
	cfg.Running = r.running
	cfg.Draining = d.Service.Draining
	cfg.Registerer = d.Registerer
	cfg.Log = d.Log
	if d.Owner != nil {
		cfg.Tenure = r.tenure
		cfg.OnProbe = r.hear
	}
	if d.Owner.Has(owner.Groups) {
		cfg.Siblings = true
		cfg.Whole = limits.ProbeTimeout + set.Prefill.Queue.Timeout
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
	if r.peers, err = geo.New(cfg); err != nil {
		return nil, err
	}
	d.Owner.Join(r.peers)
	r.decoding.Store(&map[string]decoding{})
	r.server = edge.NewServer(edge.Options{
		Handler: r.handle, Log: d.Log, MaxBody: limits.Body, MaxHead: limits.Head, Concurrency: limits.Connections + 1,
		ReadTimeout: limits.ReadTimeout, IdleTimeout: limits.IdleTimeout, Authenticate: r.stranger, Answer: r.turnedAway, Bodies: d.Bodies,
	})
	return r, nil
}

// reach fills in how calls to a peer are made: the address, and the certificates of both sides.
func (r *Peers) reach(p *geo.PeerConfig) error {
	u, err := url.Parse(p.URL)
	if err != nil {
		return fmt.Errorf("geo.peers: %s: %w", p.ID, err)
	}
	p.Target = &engine.Target{ID: p.ID, URL: &url.URL{Scheme: u.Scheme, Host: u.Host}, Rank: -1}
	if a := r.deps.Config.Authority(); u.Scheme == "https" && a != nil {
		p.Target.TLS = r.deps.Config.Certificate(reload.Peers).MutualClient(a, u.Hostname(), p.SANs())
	}
	return nil
}

// Start opens the listener for other dispatchers and begins to probe them.
func (r *Peers) Start() error {
	d, set := &r.deps, r.deps.Config.Settings()
	limits, certificate := &set.Limits, d.Config.Certificate(reload.Peers)
	var err error
	r.listener, err = edge.Listen(set.Geo.Listen, edge.ListenOptions{
		WriteTimeout: limits.WriteTimeout, MaxConns: limits.Connections, MaxLag: limits.ClientLag, SendBuffer: limits.ClientBacklog,
		TLS: certificate != nil, Log: d.Log,
	})
	if err != nil {
		return fmt.Errorf("geo.listen: %w", err)
	}
	ln := certificate.Listener(r.listener)
	if a := d.Config.Authority(); a != nil {
		ln = certificate.MutualListener(r.listener, a)
	}
	d.Go(func() {
		if err := r.server.Serve(ln); err != nil && !errors.Is(err, net.ErrClosed) {
			d.Log.Error("the listener for other proxies has failed", zap.Error(err))
		}
	})
	d.Go(func() { r.followDecoding(d.Context) })
	r.peers.Start()
	if d.Owner != nil {
		d.Go(func() { d.Owner.Run(d.Context) })
	}
	d.Log.Info("listening for other proxies", zap.String("geo", r.listener.Addr().String()), zap.String("id", r.peers.ID()),
		zap.Int("peers", len(set.Geo.Peers)))
	return nil
}

// followDecoding calls Look at a regular interval. Decisions about regions need its result under the lock of the prefill tier, and the
// dispatcher must not be asked under this lock.
func (r *Peers) followDecoding(ctx context.Context) {
	tick := time.NewTicker(decodingEvery)
	defer tick.Stop()
	for {
		r.Look(ctx)
		r.forgetShares()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Look reads how busy the decode ranks of each model are now, for decisions about regions. It tells the prefill scheduler the free slots
// by region, and wakes it if a model can be decoded here again. If ctx ends first, Look changes nothing.
func (r *Peers) Look(ctx context.Context) {
	select {
	case r.looking <- struct{}{}:
		defer func() { <-r.looking }()
	case <-ctx.Done():
		return
	}
	status := r.deps.Dispatcher.Status(ctx)
	if ctx.Err() != nil { // the status may be empty, which would say that no rank decodes anything
		return
	}
	boards := map[string][]alike{}
	for _, m := range status.Models {
		boards[m.Model] = byLists(m.Workers)
	}
	all := map[string]decoding{}
	engines := r.deps.Fleet.Now()
	for _, route := range engines.Models() {
		d := decodingOfModel(boards, route.Board, route.Name)
		if !engines.Begins(route.Board, route.Name) { // new requests for the model may not begin here
			d.slots = 0
		}
		all[route.Name] = d
		hadFree := (*r.decoding.Load())[route.Name].free != nil // the scheduler must then be told that free is nil now
		if d.free != nil || hadFree {
			r.deps.Prefill.SetSlots(route.Name, d.free)
		}
	}
	before := r.decoding.Swap(&all)
	for name, now := range all {
		if now.slots > 0 && (*before)[name].slots == 0 { // requests for the model can be served here again
			r.deps.Prefill.Wake()
			return
		}
	}
}

// decodingOfModel sums up the ranks that list a model. They are on its board, on the board of ranks that prefill and decode, and on such
// boards of other regions whose engines this proxy uses.
func decodingOfModel(boards map[string][]alike, board, model string) decoding {
	d, free := decodingFor(boards[board], model)
	both, _ := decodingFor(boards[board+roster.AggregatedMark], model)
	d.add(both)
	for name, kinds := range boards {
		there, freeThere := decodingFor(kinds, model)
		region, decodesOnly := strings.CutPrefix(name, board+roster.RegionMark)
		switch {
		case strings.HasPrefix(name, board+roster.AggregatedMark+roster.RegionMark):
			d.add(there)
		case decodesOnly:
			if d.free == nil {
				d.free = map[string]int{"": free}
			}
			d.free[region] = freeThere
			d.add(there)
		}
	}
	return d
}

// alike are ranks of a board that list the same models.
type alike struct {
	lists *board.Names
	decoding
	free int
}

// byLists sums up the ranks of a board, with one entry for all ranks that list the same models.
func byLists(workers []board.WorkerStatus) (kinds []alike) {
	byList := map[*board.Names][]board.WorkerStatus{}
	for i := range workers {
		byList[workers[i].Lists] = append(byList[workers[i].Lists], workers[i])
	}
	for lists, ranks := range byList {
		kinds = append(kinds, alike{lists, decodingOf(ranks), freeSlots(ranks)})
	}
	return kinds
}

// decodingFor sums up the ranks that list a model. free is how many more requests these ranks take now.
func decodingFor(kinds []alike, model string) (d decoding, free int) {
	for i := range kinds {
		if k := &kinds[i]; k.lists.Has(model) {
			d.add(k.decoding)
			free += k.free
		}
	}
	return d, free
}

// add adds the slots of other ranks of the same model. running becomes that of the others if their least busy rank is less busy. Ranks
// without slots do not change running.
func (d *decoding) add(other decoding) {
	lessBusy := other.slots > 0 && other.running < d.running
	if d.slots == 0 || lessBusy {
		d.running = other.running
	}
	d.slots += other.slots
}

// decodingOf sums up the ranks that are up: their slots, and the requests on the least busy one.
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

// freeSlots is how many more requests the ranks that are up take now.
func freeSlots(workers []board.WorkerStatus) (n int) {
	for _, w := range workers {
		if w.Up {
			n += max(0, w.Limit-w.Used)
		}
	}
	return n
}

// running returns how many requests run on the least busy rank of a model, and how many slots all ranks of the model have.
func (r *Peers) running(model string) (perReplica float64, seqs int) {
	d := (*r.decoding.Load())[model]
	return d.running, d.slots
}

// decodes lists the models for which decode ranks take requests here now.
func (r *Peers) decodes() (models []string) {
	for name, d := range *r.decoding.Load() {
		if d.slots > 0 {
			models = append(models, name)
		}
	}
	return models
}

// Drain ends the listener for other proxies, once their requests have ended or ctx has.
func (r *Peers) Drain(ctx context.Context) error {
	err := edge.Drain(ctx, r.server, r.listener)
	_ = r.listener.Close() // the server does not close it if it was stopped before it accepted a connection
	return err
}

// Geo returns the node that decides which request goes to which peer; nil: there are no other proxies.
func (r *Peers) Geo() *geo.Peers {
	if r == nil {
		return nil
	}
	return r.peers
}

// Facts fills in what is known of the peers in other regions.
func (r *Peers) Facts(f *detect.Facts) {
	peers := r.Geo()
	if peers == nil {
		return
	}
	s := peers.Status()
	f.Geo = &detect.Geo{Policy: s.Policy}
	for _, o := range s.Peers {
		f.Geo.Peers = append(f.Geo.Peers, detect.Peer{
			ID: o.ID, Region: o.Region, Up: o.Up, Draining: o.Draining, Fault: o.Fault, RTTMs: o.RTTMs, InFlight: o.InFlight, Circuit: o.Circuit,
		})
	}
}

// Addr is the address to which other dispatchers connect; empty: the proxy does not listen for them.
func (r *Peers) Addr() string {
	if r == nil || r.listener == nil {
		return ""
	}
	return r.listener.Addr().String()
}

// giveBack gives a scope to the dispatcher that should own it. It stops admission to the scope, lists this proxy's requests that still run
// there, and releases the lease.
func (r *Peers) giveBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	a, done, err := r.deps.Owner.Yield(sender, ask)
	if err != nil {
		return h, err
	}
	defer done()
	if ask.Group != "" {
		r.finish(r.deps.Context, a.Name)
	}
	return r.deps.Owner.HandBack(a, ask)
}

// finish runs before a group goes to another proxy. It waits until the prompts that have begun here are on a decode rank, unless another
// group of this proxy can decode them. A prompt that gets no rank in time is prefilled again, and the KV of its first prefill stays on the
// engine until the hold timeout.
func (r *Peers) finish(ctx context.Context, group string) {
	// A sixth of the lease is half of the time that the asking dispatcher waits.
	ctx, cancel := context.WithTimeout(ctx, r.deps.Config.Settings().HA.Lease/6)
	defer cancel()
	r.Look(ctx) // from now on new requests for the group wait, or go to another proxy
	engines := r.deps.Fleet.Now()
	boards := slices.DeleteFunc(engines.BoardsOf(group), func(board string) bool { return engines.Begins(board, "") })
	for len(boards) > 0 && ctx.Err() == nil && r.underWay(boards) {
		time.Sleep(finishEvery)
	}
}

const finishEvery = 5 * time.Millisecond // interval at which finish checks again

// underWay says whether a prompt for one of the boards is being prefilled here, or waits for a decode rank.
func (r *Peers) underWay(boards []string) bool {
	return slices.ContainsFunc(r.deps.Prefill.Status(), func(c prefill.CandidateStatus) bool {
		return c.Inflight+c.Pooled > 0 && slices.ContainsFunc(c.Models, func(m string) bool {
			route, _, _ := r.deps.Fleet.Now().Lookup(m)
			return slices.Contains(boards, route.Board)
		})
	})
}

// tenure is what this proxy's answers to probes say: what it owns, which models it decodes, and its load on the prefill engines.
func (r *Peers) tenure() geo.Tenure {
	t := r.deps.Owner.Tenure()
	if r.deps.Owner.Has(owner.Groups) {
		t.Prefill = r.deps.Prefill.Shares()
		if !r.refusing() {
			t.Decodes = r.decodes()
		}
	}
	return t
}

// hear records what a peer's answer to a probe says.
func (r *Peers) hear(h geo.ProbeReport) {
	if r.deps.Owner.Has(owner.Groups) && h.Region == r.deps.Config.Settings().Geo.Self.Region {
		r.setShare(h.Peer, h.Prefill)
	}
	r.deps.Owner.OnProbe(h)
}

// shares holds the load of siblings, i.e. other proxies of this region, on the prefill engines.
type shares struct {
	mu        sync.Mutex
	bySibling map[string]map[string]prefill.Share
}

// setShare stores the load of a sibling on the prefill engines; nil: it has none, or is gone.
func (r *Peers) setShare(id string, load map[string]prefill.Share) {
	r.shares.mu.Lock()
	defer r.shares.mu.Unlock() // only after SetShares, so that an earlier call does not replace what a later one has set
	if r.shares.bySibling == nil {
		r.shares.bySibling = map[string]map[string]prefill.Share{}
	}
	r.shares.bySibling[id] = load
	if load == nil {
		delete(r.shares.bySibling, id)
	}
	r.deps.Prefill.SetShares(slices.Collect(maps.Values(r.shares.bySibling))...)
}

// forgetShares drops the shares of siblings that are gone.
func (r *Peers) forgetShares() {
	live, _ := r.peers.Siblings()
	r.shares.mu.Lock()
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(r.shares.bySibling)), func(id string) bool { return slices.Contains(live, id) })
	r.shares.mu.Unlock()
	for _, id := range gone {
		r.setShare(id, nil)
	}
}
