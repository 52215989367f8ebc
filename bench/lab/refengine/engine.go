// Package refengine is an engine without a model, for prefill, for decode or for both: real HTTP,
// real hand-offs, a step clock with a barrier, and every misbehaviour
// that real engines showed on demand. It answers in the language of package reftext, and
// with wrong text wherever a real engine would read recycled KV, so that a test
// can prove that never happens.
package refengine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/heldport"
	"evenkeel/bench/lab/refengine/pins"
	"evenkeel/bench/lab/refengine/prompts"
	"evenkeel/bench/lab/refengine/stand"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/bench/lab/refengine/wire"
)

// Engine is one deployment: the ranks of a Config.
type Engine struct {
	cfg    Config
	count  counters
	faults faults
	core   stand.Gate // where all waits that the core does
	log    *steplog.Log
	seen   pins.IDs

	mu      sync.Mutex
	rng     *rand.Rand
	addrs   []string   // fixed by the first start
	kvAddrs []string   // of publishers, then of replays; fixed too
	ports   []*os.File // hold those that the kernel chose, also while the engine is dead
	life    *life      // nil after Kill and Close
	closed  bool
	dying   sync.WaitGroup // crashes that a request has caused
}

// life is an engine between a start and its end. What a crash loses is here.
type life struct {
	engine *Engine
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	began  time.Time

	server      wire.Server
	listeners   []net.Listener
	ports       []int
	kvListeners []net.Listener  // of publishers, then of replays
	events      []*cache.Events // of the ranks
	pins        *pins.Pins
	adapters    *adapters
	bound       *bound
	prefills    []*prompts.Rank
	pause       pausing
	group       *group.Group
	halt        func() // ends the steps of the group
	balance     balance
	pull        *http.Client
	frozen      sync.Map // what /metrics last said before it froze, by port
	blockIDs    atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]net.Listener // that they came to; nil: the life is over
}

// Start listens and returns once every rank takes requests.
func Start(cfg Config) (*Engine, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 1))}
	var err error
	ports := cfg.DPSize // or one for all ranks
	if cfg.DPMode == "internal" {
		ports = 1
	}
	if e.addrs, err = heldport.From(cfg.Server.Listen, ports, "listen address"); err != nil {
		return nil, err
	}
	if e.kvAddrs, err = heldport.From(cfg.KVEvents.Address, 2*cfg.DPSize, "KV events address"); err != nil {
		return nil, err
	}
	for _, addrs := range [][]string{e.addrs, e.kvAddrs} {
		if err := e.reserve(addrs); err != nil {
			return nil, err
		}
	}
	e.core.Close(e.faults.set(cfg.Seed, cfg.Faults))
	e.log = steplog.New(cfg.Steps.Log, cfg.Group, cfg.Steps.Trace)
	if err := e.Revive(); err != nil {
		e.log.Close()
		e.freePorts()
		return nil, err
	}
	return e, nil
}

// reserve replaces the addresses whose port is for the kernel to choose by those
// that it chose.
func (e *Engine) reserve(addrs []string) error {
	for i, addr := range addrs {
		if !strings.HasSuffix(addr, ":0") {
			continue
		}
		at, port, err := heldport.Reserve(addr)
		if err != nil {
			e.freePorts()
			return fmt.Errorf("refengine: a port at %s: %w", addr, err)
		}
		addrs[i] = at
		e.ports = append(e.ports, port)
	}
	return nil
}

func (e *Engine) freePorts() {
	for _, p := range e.ports {
		_ = p.Close() // nil: of one that is not held
	}
	e.ports = nil
}

// KVEvents are the addresses of a rank's publisher and of its replays, empty
// when it has none.
func (e *Engine) KVEvents(rank int) (events, replay string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.kvAddrs) == 0 {
		return "", ""
	}
	return e.kvAddrs[rank], e.kvAddrs[e.cfg.DPSize+rank]
}

// Revive starts a killed engine again on the same ports: empty, but its
// counters, step log and faults go on.
func (e *Engine) Revive() error {
	e.dying.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life != nil || e.closed {
		return fmt.Errorf("refengine: running or closed; only a killed engine can be revived")
	}
	l := &life{engine: e, began: time.Now(), conns: map[net.Conn]net.Listener{}, balance: balance{flying: make([]int, e.cfg.DPSize)},
		adapters: newAdapters(e.cfg, len(e.addrs))}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	shape := e.cfg.Answers.ErrorShape
	l.server = wire.Server{
		KeepAlive: e.cfg.Server.KeepAlive, MaxBody: e.cfg.Server.MaxBody,
		Handle: func(x *wire.Exchange) bool { return l.handle(&exchange{Exchange: x, shape: shape}) },
		TooLarge: func(x *wire.Exchange) {
			(&exchange{Exchange: x, shape: shape}).fail(refuse(413, "Request body is larger than %d bytes.", e.cfg.Server.MaxBody))
		},
	}
	var err error
	if l.listeners, err = heldport.Listen(e.addrs); err != nil {
		l.end(false)
		return fmt.Errorf("refengine: rank %d: %w; choose another listen address", len(l.listeners), err)
	}
	if l.kvListeners, err = heldport.Listen(e.kvAddrs); err != nil {
		l.end(false)
		return fmt.Errorf("refengine: KV events of rank %d: %w; choose another address", len(l.kvListeners)%e.cfg.DPSize, err)
	}
	for _, ln := range l.listeners {
		l.ports = append(l.ports, ln.Addr().(*net.TCPAddr).Port)
	}
	c := &e.count
	l.pins = pins.New(e.cfg.KV.HoldTimeout, !e.cfg.namesRequests(),
		pins.Counts{Leaks: &c.Leaks, Pulls: &c.Pulls, Releases: &c.Releases, Renewals: &c.Renewals,
			Replays: &c.Replays, ExpiredPulls: &c.ExpiredPulls, SpentDrains: &c.SpentDrains, WrongBlocks: &c.WrongBlocks,
			OutlivedWrites: &c.OutlivedWrites})
	caches := make([]*cache.Cache, e.cfg.DPSize)
	decodes, computes := e.cfg.group(), e.cfg.prompts()
	decodes.Core, computes.Core = &e.core, &e.core
	l.group = group.New(decodes, group.Counts{OverAdmitted: &c.OverAdmitted, Preemptions: &c.Preemptions, LocalPrefills: &c.LocalPrefills,
		Tokens: &c.Tokens}, e.log, caches)
	l.pull = &http.Client{Transport: &http.Transport{IdleConnTimeout: e.cfg.Server.KeepAlive / 2, MaxIdleConnsPerHost: 64,
		DisableCompression: true}}
	l.bound = newBound(l)
	l.pause.life = l
	for rank := range e.cfg.DPSize {
		var events *cache.Events
		if len(e.kvAddrs) > 0 {
			events = &cache.Events{Rank: rank, Maps: e.cfg.KVEvents.Encoding == "map", HWM: e.cfg.KVEvents.HWM, Delay: e.cfg.KVEvents.Delay}
		}
		rank := prompts.New(computes, events)
		l.prefills = append(l.prefills, rank)
		caches[len(l.prefills)-1] = rank.Cache
		l.events = append(l.events, events)
	}
	l.start()
	e.life = l
	return nil
}

func (l *life) start() {
	steps, halt := context.WithCancel(l.ctx)
	l.halt = halt
	l.wg.Go(func() { l.group.Run(steps) })
	for _, r := range l.prefills {
		for range l.engine.cfg.Prompts.Concurrency {
			l.wg.Go(func() { r.Run(l.ctx) })
		}
	}
	for i, ln := range l.listeners {
		l.wg.Go(func() { l.accept(ln, func(conn net.Conn) func() { return l.client(conn, i) }) })
	}
	for i, ln := range l.kvListeners {
		events := l.events[i%len(l.events)]
		serve := events.Publish
		if i >= len(l.events) {
			serve = events.Replay
		}
		l.wg.Go(func() { l.accept(ln, func(conn net.Conn) func() { return func() { serve(conn) } }) })
	}
}

// accept opens connections until the end of this life.
func (l *life) accept(ln net.Listener, open func(conn net.Conn) (serve func())) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(5 * time.Millisecond) // out of descriptors: wait for some to close
			continue
		}
		if serve := open(conn); serve != nil && !l.track(conn, ln, serve) {
			return
		}
	}
}

// client opens a connection of the listener with that index.
func (l *life) client(conn net.Conn, port int) (serve func()) {
	if l.engine.faults.strike(func(r Rule) bool { return r.Phase == PhaseAccept && r.isAt(port) }) != nil {
		wire.Reset(conn)
		return nil
	}
	return func() { l.server.Serve(l.ctx, conn, port) }
}

// track serves a connection until the end of this life, and reports whether
// that is still to come.
func (l *life) track(conn net.Conn, from net.Listener, serve func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		_ = conn.Close()
		return false
	}
	l.conns[conn] = from
	l.wg.Go(func() {
		serve()
		_ = conn.Close()
		l.mu.Lock()
		delete(l.conns, conn)
		l.mu.Unlock()
	})
	return true
}

// end stops everything of this life and waits for its goroutines.
func (l *life) end(abrupt bool) {
	l.cancel()
	for _, ln := range append(l.listeners, l.kvListeners...) {
		_ = ln.Close()
	}
	l.mu.Lock()
	for conn := range l.conns {
		if abrupt {
			wire.Reset(conn)
		} else {
			_ = conn.Close()
		}
	}
	l.conns = nil
	l.mu.Unlock()
	l.wg.Wait()
	if l.pull != nil {
		l.pull.CloseIdleConnections()
	}
	if l.pins != nil {
		l.pins.Close()
	}
}

func (e *Engine) stop(abrupt bool) bool {
	e.mu.Lock()
	l := e.life
	e.life = nil
	e.mu.Unlock()
	if l != nil {
		l.end(abrupt)
		l.pause.resume() // the next life is not paused
	}
	return l != nil
}

// Kill crashes the engine: connections are reset, requests, pins and caches are lost.
func (e *Engine) Kill() { e.stop(true) }

// KillRank crashes one rank. A server of several ranks exits with it. If each rank has a server of
// its own, the others hang in their next step until the engine is killed, and their API servers
// answer on.
func (e *Engine) KillRank(rank int) {
	if e.cfg.DPMode == "internal" || e.cfg.DPSize == 1 {
		e.Kill()
		return
	}
	e.mu.Lock()
	l := e.life
	e.mu.Unlock()
	if l == nil {
		return
	}
	l.halt()
	gone := []net.Listener{l.listeners[rank]}
	if len(l.kvListeners) > 0 {
		gone = append(gone, l.kvListeners[rank], l.kvListeners[e.cfg.DPSize+rank])
	}
	for _, ln := range gone {
		_ = ln.Close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for conn, from := range l.conns {
		if slices.Contains(gone, from) {
			wire.Reset(conn)
		}
	}
}

// die has a request crash its rank. It gets no answer.
func (e *Engine) die(x *exchange, rank int) bool {
	e.count.Crashes.Add(1)
	e.dying.Go(func() { e.KillRank(rank) })
	return x.Hang()
}

// Close ends the engine for good. Every goroutine has ended and the step
// trace is written when it returns.
func (e *Engine) Close() {
	e.stop(false)
	e.dying.Wait()
	e.mu.Lock()
	e.closed = true
	e.freePorts()
	e.mu.Unlock()
	e.log.Close()
}

// URLs are the base URLs of the ranks, in order: the same one for all under
// internal balancing.
func (e *Engine) URLs() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	urls := make([]string, e.cfg.DPSize)
	for i := range urls {
		_, port, _ := net.SplitHostPort(e.addrs[min(i, len(e.addrs)-1)]) // it came from a listener
		urls[i] = "http://" + net.JoinHostPort(e.cfg.Server.Advertise, port)
	}
	return urls
}

// Config is what the engine runs with, defaults filled in.
func (e *Engine) Config() Config { return e.cfg }

// SetFaults replaces the rules in force; without any the engine behaves.
func (e *Engine) SetFaults(rules ...Rule) error {
	for i, r := range rules {
		if err := r.Validate(); err != nil {
			return fmt.Errorf("refengine: fault %d: %w", i, err)
		}
	}
	stands := e.faults.set(e.cfg.Seed, rules)
	e.core.Close(stands)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life == nil {
		return nil
	}
	e.life.frozen.Clear()
	for rank := range e.cfg.DPSize {
		if _, fault := e.faults.now(CoreFault, rank); fault || rank >= e.ranks() {
			e.life.bound.rids.Abort(ridOf(rank))
		}
	}
	return nil
}

// ranks is how many there are behind its port.
func (e *Engine) ranks() int {
	if r, fewer := e.faults.now(FewerRanks, 0); fewer {
		return int(r.Value)
	}
	return e.cfg.DPSize
}

// ridOf is how the requests of a rank are called that nobody but the engine aborts.
func ridOf(rank int) string { return fmt.Sprintf("rank %d.", rank) }

// StandStill makes the engine's core stand still for so long from now on, like the fault of that
// name.
func (e *Engine) StandStill(d time.Duration) { e.core.Close(d) }

// Steps are the last steps of the decode group, oldest first.
func (e *Engine) Steps() []steplog.Step { return e.log.All() }

// jitter is how long a request is on its way to the scheduler.
func (e *Engine) jitter() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cfg.Jitter/10 + time.Duration(e.rng.Int64N(int64(e.cfg.Jitter-e.cfg.Jitter/10)+1))
}

// suffix is what engines append to a request id to make it their own.
func (e *Engine) suffix() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return fmt.Sprintf("%08x", e.rng.Uint32())
}

func (l *life) engineID(rank int) string {
	return fmt.Sprintf("ref-%d-%x_dp%d", l.ports[0], l.began.UnixNano(), rank)
}

// portOf is the listener that serves a rank.
func (l *life) portOf(rank int) int { return min(rank, len(l.ports)-1) }
