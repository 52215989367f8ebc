// Package peerserver serves the other proxies (peers): those of other regions, and those that share
// the decode groups of this region. It has the listener for their requests, the answers to their
// probes, and the hand-back of regions and groups that a peer should own.
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
	deps        Deps
	peers       *geo.Peers
	server      *edge.Server
	listener    *edge.Listener
	refreshLock chan struct{}                         // a lock for RefreshDecodeLoad, so that older numbers never replace newer ones
	decodeLoads atomic.Pointer[map[string]decodeLoad] // the last result of RefreshDecodeLoad, by model
	shares      shares
	warned      atomic.Int64 // Unix time in ns of the last warning about a peer with another version
}

// Deps is what Peers needs of the proxy.
type Deps struct {
	Context    context.Context // its end means that the proxy ends
	Go         func(func())    // runs a function in the background; the end of the proxy waits for it
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Config     *reload.Reloader
	Service    *service.Service
	Fleet      *fleet.Fleet
	Prefill    *prefill.Scheduler
	Dispatcher *dispatcher.Dispatcher
	Owner      *owner.Set // nil: this proxy owns all engines
	Bodies     *edge.Quota
	Fail       func(*fasthttp.RequestCtx, *openai.Error) // answers a request with an error
	// Serve answers a client's request that another proxy forwarded. The client's identity and
	// permissions are checked already.
	Serve func(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, from *Hop, arrival time.Time)
}

// decodeLoad says how busy the decode ranks of a model are.
type decodeLoad struct {
	leastRunning float64        // number of requests on the least busy rank
	slots        int            // number of slots of all ranks together; 0: no request can be served here
	freeByRegion map[string]int // free slots of ranks that only decode, by region; nil: this proxy uses no such ranks of other regions
}

const (
	refreshEvery = 250 * time.Millisecond // interval of RefreshDecodeLoad
	firstByte    = 120 * time.Second      // limit for the first byte of a forwarded request's answer
)

// New returns the Peers of the config, with the client for calls to other proxies and the server
// for their requests; nil: the config names no other proxies.
func New(d Deps) (*Peers, error) {
	set := d.Config.Settings()
	if !set.Geo.On() {
		return nil, nil
	}
	r := &Peers{deps: d, refreshLock: make(chan struct{}, 1)}
	cfg, err := r.geoConfig(set)
	if err != nil {
		return nil, err
	}
	if r.peers, err = geo.New(cfg); err != nil {
		return nil, err
	}
	d.Owner.SetPeers(r.peers)
	r.decodeLoads.Store(&map[string]decodeLoad{})
	limits := &set.Limits
	r.server = edge.NewServer(edge.Options{
		Handler: r.handle, Log: d.Log, MaxBody: limits.Body, MaxHead: limits.Head,
		Concurrency: limits.Connections + 1, // one more than the listener's own limit, which then is reached first
		ReadTimeout: limits.ReadTimeout, IdleTimeout: limits.IdleTimeout,
		Authenticate: r.checkSender, Answer: r.answerRefused, Bodies: d.Bodies,
	})
	return r, nil
}

// geoConfig returns a copy of the part geo of the config, completed with values of other parts,
// with what peers are told about this proxy, with the keys, and with the way to each peer.
func (r *Peers) geoConfig(set *reload.Settings) (geo.Config, error) {
	d, limits, cfg := &r.deps, &set.Limits, set.Geo
	cfg.FirstByte = firstByte
	cfg.Idle = limits.EventTimeout
	cfg.Connect = limits.ConnectTimeout
	cfg.WholeBytes = limits.AnswerBytes
	cfg.EventBytes = limits.EventBytes
	cfg.Queue = d.Prefill
	cfg.Running = r.leastRunningAndSlots
	cfg.Draining = d.Service.Draining
	cfg.Registerer = d.Registerer
	cfg.Log = d.Log
	if d.Owner != nil { // answers to probes then also say what the proxy that answers owns (its tenure)
		cfg.Tenure = r.probeAnswer
		cfg.OnProbe = r.recordProbe
	}
	if d.Owner.Has(owner.Groups) { // proxies of this region share its decode groups; Has allows a nil Owner
		cfg.Siblings = true
		// Whole limits the wait for the first event of such a proxy, which may queue and prefill the
		// request before this event.
		cfg.Whole = limits.ProbeTimeout + set.Prefill.Queue.Timeout
	}
	var err error
	if cfg.Keys, err = set.Geo.ReadKeys(); err != nil {
		return cfg, err
	}
	cfg.Peers = slices.Clone(set.Geo.Peers) // a copy, because setTarget changes the elements
	for i := range cfg.Peers {
		if err := r.setTarget(&cfg.Peers[i]); err != nil {
			return cfg, err
		}
	}
	return cfg, nil
}

// setTarget fills in how calls to a peer are made: the address, and the certificates of both sides.
func (r *Peers) setTarget(p *geo.PeerConfig) error {
	u, err := url.Parse(p.URL)
	if err != nil {
		return fmt.Errorf("geo.peers: %s: %w", p.ID, err)
	}
	// A proxy is called as a whole, so the target has no rank.
	p.Target = &engine.Target{ID: p.ID, URL: &url.URL{Scheme: u.Scheme, Host: u.Host}, Rank: roster.NoRank}
	if a := r.deps.Config.Authority(); u.Scheme == "https" && a != nil { // nil: no authority signs the certificates of proxies
		p.Target.TLS = r.deps.Config.Certificate(reload.Peers).MutualClient(a, u.Hostname(), p.SANs())
	}
	return nil
}

// Start opens the listener for other proxies and begins to probe them.
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
	if a := d.Config.Authority(); a != nil { // other proxies must then present a certificate, too
		ln = certificate.MutualListener(r.listener, a)
	}
	d.Go(func() {
		if err := r.server.Serve(ln); err != nil && !errors.Is(err, net.ErrClosed) {
			d.Log.Error("the listener for other proxies has failed", zap.Error(err))
		}
	})
	d.Go(func() { r.refreshRegularly(d.Context) })
	r.peers.Start()
	if d.Owner != nil {
		d.Go(func() { d.Owner.Run(d.Context) })
	}
	d.Log.Info("listening for other proxies", zap.String("geo", r.listener.Addr().String()), zap.String("id", r.peers.ID()),
		zap.Int("peers", len(set.Geo.Peers)))
	return nil
}

// refreshRegularly calls RefreshDecodeLoad and dropOldShares at a regular interval until ctx ends.
// Decisions about regions need the decode load under the lock of the prefill tier, and the
// dispatcher must not be asked under this lock.
func (r *Peers) refreshRegularly(ctx context.Context) {
	tick := time.NewTicker(refreshEvery)
	defer tick.Stop()
	for {
		r.RefreshDecodeLoad(ctx)
		r.dropOldShares()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// RefreshDecodeLoad asks the dispatcher how busy the decode ranks of each model are now, and stores
// the answer for decisions about regions. It passes the free slots on to the prefill tier, and
// wakes the prefill tier if requests for a model can be served here again. If ctx ends first, it
// changes nothing. The dispatcher answers only after it has read the lists of ranks that were
// published to it before.
func (r *Peers) RefreshDecodeLoad(ctx context.Context) {
	select {
	case r.refreshLock <- struct{}{}: // takes the lock, which is a channel, so that the end of ctx ends the wait
		defer func() { <-r.refreshLock }()
	case <-ctx.Done():
		return
	}
	status := r.deps.Dispatcher.Status(ctx)
	if ctx.Err() != nil { // the status may be empty, which would say that no rank decodes anything
		return
	}
	boards := map[string][]ranksByModels{}
	for _, m := range status.Models {
		boards[m.Model] = groupByModels(m.Workers)
	}
	loads := map[string]decodeLoad{}
	engines := r.deps.Fleet.Now()
	for _, route := range engines.Models() {
		load := decodeLoadOfModel(boards, route.Board, route.Name)
		if !engines.AcceptsNew(route.Board, route.Name) { // another proxy owns the ranks, or will soon
			load.slots = 0
		}
		loads[route.Name] = load
		// The prefill tier needs the free slots by region only to choose among regions. If other regions
		// no longer count (nil now, but not before), it is told so once.
		hadRegions := (*r.decodeLoads.Load())[route.Name].freeByRegion != nil
		if load.freeByRegion != nil || hadRegions {
			r.deps.Prefill.SetSlots(route.Name, load.freeByRegion)
		}
	}
	before := r.decodeLoads.Swap(&loads)
	for name, now := range loads {
		if now.slots > 0 && (*before)[name].slots == 0 { // requests for the model can be served here again
			r.deps.Prefill.Wake() // once is enough for all models
			return
		}
	}
}

// decodeLoadOfModel sums up the ranks that list a model. The dispatcher has these ranks on several
// boards: the model's own, that of aggregated ranks, which prefill and decode, and the same two of
// each other region whose engines this proxy uses. If ranks of other regions decode hand-offs of
// the model, freeByRegion has the free slots of each region. Aggregated ranks take no hand-offs, so
// freeByRegion leaves them out.
func decodeLoadOfModel(boards map[string][]ranksByModels, board, model string) decodeLoad {
	const ownRegion = ""
	aggregatedBoard := board + roster.AggregatedMark
	load, freeHere := loadOfRanksListing(boards[board], model)
	aggregated, _ := loadOfRanksListing(boards[aggregatedBoard], model)
	load.add(aggregated)
	for name, ranks := range boards {
		there, freeThere := loadOfRanksListing(ranks, model)
		region, decodesOnly := otherRegionOf(name, board)
		_, isAggregated := otherRegionOf(name, aggregatedBoard)
		switch {
		case isAggregated:
			load.add(there)
		case decodesOnly:
			if load.freeByRegion == nil {
				load.freeByRegion = map[string]int{ownRegion: freeHere}
			}
			load.freeByRegion[region] = freeThere
			load.add(there)
		}
	}
	return load
}

// otherRegionOf says whether a board is the one with the name home in another region (ok), and in
// which region: its name is home@region.
func otherRegionOf(board, home string) (region string, ok bool) {
	return strings.CutPrefix(board, home+roster.RegionMark)
}

// ranksByModels has the sums over the ranks of a board that list the same models.
type ranksByModels struct {
	lists *board.Names // the models that all these ranks list
	decodeLoad
	free int // how many more requests the ranks take now
}

// groupByModels sums up the ranks of a board, with one entry for all ranks that list the same
// models. Equal lists share one *board.Names, so their pointers can stand for the lists.
func groupByModels(workers []board.WorkerStatus) (groups []ranksByModels) {
	byList := map[*board.Names][]board.WorkerStatus{}
	for i := range workers {
		byList[workers[i].Lists] = append(byList[workers[i].Lists], workers[i])
	}
	for lists, ranks := range byList {
		groups = append(groups, ranksByModels{lists, loadOfRanks(ranks), freeSlots(ranks)})
	}
	return groups
}

// loadOfRanksListing sums up the ranks that list a model. free is how many more requests these
// ranks take now.
func loadOfRanksListing(groups []ranksByModels, model string) (load decodeLoad, free int) {
	for i := range groups {
		if g := &groups[i]; g.lists.Has(model) {
			load.add(g.decodeLoad)
			free += g.free
		}
	}
	return load, free
}

// add adds the slots of other ranks of the same model. leastRunning becomes that of the other ranks
// if it is lower. Ranks without slots do not change leastRunning.
func (d *decodeLoad) add(other decodeLoad) {
	otherIsLessBusy := other.slots > 0 && other.leastRunning < d.leastRunning
	if d.slots == 0 || otherIsLessBusy {
		d.leastRunning = other.leastRunning
	}
	d.slots += other.slots
}

// loadOfRanks sums up the ranks that are up: their slots, and the requests on the least busy one.
func loadOfRanks(workers []board.WorkerStatus) (d decodeLoad) {
	first := true
	for _, w := range workers {
		if !w.Up {
			continue
		}
		d.slots += w.Slots
		if first || float64(w.Used) < d.leastRunning {
			d.leastRunning, first = float64(w.Used), false
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

// leastRunningAndSlots returns how many requests run on the least busy rank of a model, and how
// many slots all ranks of the model have.
func (r *Peers) leastRunningAndSlots(model string) (leastRunning float64, slots int) {
	load := (*r.decodeLoads.Load())[model]
	return load.leastRunning, load.slots
}

// decodableModels lists the models for which decode ranks take requests here now.
func (r *Peers) decodableModels() (models []string) {
	for name, d := range *r.decodeLoads.Load() {
		if d.slots > 0 {
			models = append(models, name)
		}
	}
	return models
}

// Drain ends the listener for other proxies, once their requests have ended or ctx has ended.
func (r *Peers) Drain(ctx context.Context) error {
	err := edge.Drain(ctx, r.server, r.listener)
	_ = r.listener.Close() // the server does not close the listener if it was stopped before it accepted a connection
	return err
}

// Geo returns the node that decides which request goes to which peer; nil: there are no other
// proxies.
func (r *Peers) Geo() *geo.Peers {
	if r == nil {
		return nil
	}
	return r.peers
}

// Facts fills in what is known of the peers in other regions.
func (r *Peers) Facts(f *detect.Facts) {
	peers := r.Geo()
	if peers == nil { // there are no other proxies
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

// Addr is the address to which other proxies connect; empty: the proxy does not listen for them.
func (r *Peers) Addr() string {
	if r == nil || r.listener == nil {
		return ""
	}
	return r.listener.Addr().String()
}

// giveBack gives a scope (a region or a group) to the proxy that asks for it and should own it
// (sender). Meanwhile no new request begins for the scope. For a group, giveBack first waits, for a
// limited time, until the prompts that are prefilled for it are on its decode ranks, because
// afterwards this proxy may send nothing to them. It then stops admission to the scope, lists this
// proxy's requests that still run there, and releases the lease.
func (r *Peers) giveBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	scope, done, err := r.deps.Owner.AllowHandBack(sender, ask) // until done, the scope takes no new requests
	if err != nil {
		return h, err
	}
	defer done()
	if ask.Group != "" {
		r.waitForDecodeRanks(r.deps.Context, scope.Name)
	}
	return r.deps.Owner.HandBack(scope, ask)
}

// waitForDecodeRanks runs before a group goes to another proxy, while the group takes no new
// requests (Scope.AcceptsNew). It waits until the prompts that have begun here are on a decode
// rank, unless another group of this proxy can decode them. A prompt that gets no rank in time is
// prefilled again, and the KV of its first prefill stays on the engine until the hold timeout.
func (r *Peers) waitForDecodeRanks(ctx context.Context, group string) {
	askLimit := r.deps.Config.Settings().HA.Lease / 3 // so long the asking proxy waits for an answer (limit of a call in package lease)
	ctx, cancel := context.WithTimeout(ctx, askLimit/2)
	defer cancel()
	// The group takes no new requests, so the new decode loads count no slots for it. Requests then
	// wait or go to another proxy.
	r.RefreshDecodeLoad(ctx)
	engines := r.deps.Fleet.Now()
	const anyModel = ""
	// The boards for which this proxy has no other group that could decode the prompts.
	boards := slices.DeleteFunc(engines.BoardsOf(group), func(board string) bool { return engines.AcceptsNew(board, anyModel) })
	for len(boards) > 0 && ctx.Err() == nil && r.anyPrefilling(boards) {
		time.Sleep(decodeRanksCheckEvery)
	}
}

const decodeRanksCheckEvery = 5 * time.Millisecond // interval at which waitForDecodeRanks checks again

// anyPrefilling says whether a prompt for one of the boards is being prefilled by this proxy, or
// waits for a decode rank.
func (r *Peers) anyPrefilling(boards []string) bool {
	isOfBoards := func(model string) bool {
		route, _, _ := r.deps.Fleet.Now().Lookup(model)
		return slices.Contains(boards, route.Board)
	}
	return slices.ContainsFunc(r.deps.Prefill.Status(), func(c prefill.CandidateStatus) bool {
		return c.Inflight+c.Pooled > 0 && slices.ContainsFunc(c.Models, isOfBoards)
	})
}

// probeAnswer is what this proxy's answers to probes say: what it owns, which models it decodes,
// and its load on the prefill engines.
func (r *Peers) probeAnswer() geo.Tenure {
	t := r.deps.Owner.Tenure()
	if r.deps.Owner.Has(owner.Groups) { // other proxies of this region share the prefill engines, and may send requests here
		t.Prefill = r.deps.Prefill.Shares()
		if !r.refusing() {
			t.Decodes = r.decodableModels()
		}
	}
	return t
}

// recordProbe records what a peer's answer to a probe says about ownership and, if the peer is a
// proxy of this region, about its load on the prefill engines.
func (r *Peers) recordProbe(h geo.ProbeReport) {
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

// setShare stores the load of a sibling on the prefill engines; nil: the sibling has no load, or is
// gone.
func (r *Peers) setShare(id string, load map[string]prefill.Share) {
	r.shares.mu.Lock()
	defer r.shares.mu.Unlock() // unlocked only after SetShares, so that an earlier call does not replace the shares of a later one
	if r.shares.bySibling == nil {
		r.shares.bySibling = map[string]map[string]prefill.Share{}
	}
	r.shares.bySibling[id] = load
	if load == nil {
		delete(r.shares.bySibling, id)
	}
	r.deps.Prefill.SetShares(slices.Collect(maps.Values(r.shares.bySibling))...)
}

// dropOldShares drops the load of siblings that are gone, here and in the prefill tier.
func (r *Peers) dropOldShares() {
	live, _ := r.peers.Siblings()
	r.shares.mu.Lock()
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(r.shares.bySibling)), func(id string) bool { return slices.Contains(live, id) })
	r.shares.mu.Unlock()
	for _, id := range gone {
		r.setShare(id, nil)
	}
}
