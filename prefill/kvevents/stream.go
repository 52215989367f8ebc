package kvevents

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"

	"evenkeel/prefill/index"
)

// Place is where a rank publishes its KV events.
type Place struct {
	Events string // host:port of the rank's publisher, see Endpoint
	Replay string // for missed batches; empty: any gap drops all known blocks of the candidate
}

// Finder finds where a rank publishes now, in the order in which a stream tries the places. With an
// error it returns the places that it knows without the engine.
type Finder interface {
	Places(ctx context.Context) ([]Place, error)
}

type Config struct {
	Place
	Finder Finder // asked before each connection, because a restarted engine may have new ports; nil: only Place is used
	Slot   index.Slot
	Scope  index.Scope // of the candidate's blocks; each event adds the name of its LoRA
	Sink   Sink

	ReplayTimeout time.Duration // silence after which a replay has failed, default 2 s
}

// Endpoint is the address at which a rank publishes: its port is the port of rank 0 plus the rank.
func Endpoint(host string, port, rank int) string {
	return net.JoinHostPort(host, strconv.Itoa(port+rank))
}

const (
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 5 * time.Second
	longReplay   = 15 // a whole replay may take this many times ReplayTimeout
	// maxSilence is how long after an answer an event about its new blocks may come. After that, the
	// events are not precise.
	maxSilence = 30 * time.Second
)

// Stream follows one rank's events until it is closed.
type Stream struct {
	cfg      Config
	cancel   context.CancelFunc
	done     chan struct{}
	resync   chan struct{} // holds a token after a call of Resync, until run carries it out
	counters counters

	connected  atomic.Bool  // and the replay is applied
	unreadable atomic.Bool  // the last batch could not be read
	complete   atomic.Bool  // the events have named all blocks that the engine holds
	resyncs    atomic.Int64 // calls of Resync
	resynced   atomic.Int64 // calls of Resync that were carried out
	// eventExpectedSince is the first ExpectEvent since the last batch, in Unix nanoseconds; 0: none.
	eventExpectedSince atomic.Int64
	failure            atomic.Pointer[string]
	place              atomic.Pointer[Place] // of the last connection

	// Only the goroutine of run uses these.
	follower follower
	mirror   mirror
	decode   *decoder
}

// Start follows a rank's events on a goroutine that Close ends.
func Start(cfg Config) *Stream {
	cfg.ReplayTimeout = cmp.Or(cfg.ReplayTimeout, 2*time.Second)
	ctx, cancel := context.WithCancel(context.Background())
	if cfg.Finder == nil {
		cfg.Finder = fixedPlace(cfg.Place)
	}
	s := &Stream{cfg: cfg, cancel: cancel, done: make(chan struct{}), resync: make(chan struct{}, 1), decode: newDecoder()}
	s.mirror = mirror{slot: cfg.Slot, scope: cfg.Scope, sink: cfg.Sink, maxHashes: maxKnownHashes, counters: &s.counters,
		known: map[engineHash]block{}, hashesOf: map[index.Key]int32{}}
	s.follower = follower{apply: s.apply, dropAll: s.dropAll, counters: &s.counters,
		replay: func(from uint64, yield func(uint64, []byte) bool) error { return s.replay(ctx, from, yield) }}
	s.place.Store(&cfg.Place) // until the first connection
	go s.run(ctx)
	return s
}

type fixedPlace Place

func (p fixedPlace) Places(context.Context) ([]Place, error) { return []Place{Place(p)}, nil }

// Close ends the stream. After it returns, the sink is not called any more. The blocks that the
// sink received stay.
func (s *Stream) Close() {
	s.cancel()
	<-s.done
}

// Resync makes the stream start anew and pass on all blocks again, because the sink has dropped
// them.
func (s *Stream) Resync() {
	s.resyncs.Add(1)
	nudge(s.resync)
}

// ExpectEvent notes that the engine has computed a new block: an event should follow.
func (s *Stream) ExpectEvent(now time.Time) { s.eventExpectedSince.CompareAndSwap(0, now.UnixNano()) }

// Precise reports whether the events are reliable. While they are not, the index should learn from
// answers.
func (s *Stream) Precise(now time.Time) bool {
	expectedSince := s.eventExpectedSince.Load() // 0: no event is expected
	silentTooLong := expectedSince != 0 && now.UnixNano()-expectedSince >= int64(maxSilence)
	return s.connected.Load() && !s.unreadable.Load() && !silentTooLong
}

// Complete reports whether the events have named all blocks that the engine holds. After a gap, and
// until a Resync is carried out, the index should also learn from answers.
func (s *Stream) Complete() bool { return s.resynced.Load() == s.resyncs.Load() && s.complete.Load() }

// BlockTokens is 0 until the engine has stored a block.
func (s *Stream) BlockTokens() int { return int(s.counters.blockTokens.Load()) }

// Status is the state of a candidate's stream of KV events, for the admin API.
type Status struct {
	Source         string  `json:"source"`
	Connected      bool    `json:"connected"`
	Failure        string  `json:"failure,omitempty"` // why the stream is not connected
	Complete       bool    `json:"complete"`          // all blocks that the engine holds are known
	Batches        int64   `json:"batches"`
	GapsReplayed   int64   `json:"gaps_replayed"`
	GapsCold       int64   `json:"gaps_cold"`
	DecodeErrors   int64   `json:"decode_errors"`   // batches and events that cannot be read
	UnknownTypes   int64   `json:"unknown_types"`   // events of a type that evenkeel does not know
	UnknownParents int64   `json:"unknown_parents"` // stored events whose parent block is not known
	Skipped        int64   `json:"skipped_blocks"`  // blocks that depend on more than tokens
	Blocks         int64   `json:"blocks"`          // block hashes that the engine holds, as its events say
	BlockTokens    int     `json:"block_tokens"`
	LagMs          float64 `json:"lag_ms"`
}

// Status may be called from any goroutine.
func (s *Stream) Status() Status {
	c := &s.counters
	status := Status{
		Source: s.place.Load().Events, Complete: s.Complete(), Batches: c.batches.Load(),
		GapsReplayed: c.gapsReplayed.Load(), GapsCold: c.gapsCold.Load(),
		DecodeErrors: c.decodeErrors.Load(), UnknownTypes: c.unknownTypes.Load(), UnknownParents: c.unknownParents.Load(),
		Skipped: c.skipped.Load(), Blocks: c.blocks.Load(), BlockTokens: s.BlockTokens(),
		LagMs: float64(c.lagInMicros.Load()) / 1000,
	}
	if why := s.failure.Load(); why != nil {
		status.Failure = *why
	}
	status.Connected = status.Failure == "" && c.connects.Load() > 0 // without a connect, the stream still tries for the first time
	return status
}

func (s *Stream) run(ctx context.Context) {
	defer close(s.done)
	backoff := firstBackoff
	for {
		began := time.Now()
		err := s.session(ctx)
		s.connected.Store(false)
		if time.Since(began) > lastBackoff { // the connection worked for a while
			backoff = firstBackoff
		}
		if ctx.Err() != nil {
			return
		}
		failure := err.Error()
		s.failure.Store(&failure)
		select {
		case <-time.After(backoff):
		case <-ctx.Done():
			return
		}
		backoff = min(2*backoff, lastBackoff)
	}
}

func (s *Stream) session(ctx context.Context) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	if err := conn.SendMsg(zmq4.NewMsg([]byte{1})); err != nil { // the byte 1 without a topic subscribes to every topic
		conn.close()
		return fmt.Errorf("kvevents: subscribing at %s: %w", s.place.Load().Events, err)
	}
	s.counters.connects.Add(1)
	batches := newQueue()
	var reader sync.WaitGroup
	reader.Go(func() { batches.end(s.read(conn, batches)) }) // read returns when the connection ends
	defer reader.Wait()
	defer conn.close()

	s.follower.resumeOrRestart() // after the subscription, so that no batch is missed between the replay and the first live batch
	s.failure.Store(nil)
	s.connected.Store(true)
	for {
		items, overflowed, connErr := batches.take()
		if overflowed {
			s.follower.dropAfterGap()
			s.follower.restart()
		}
		for _, m := range items {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.follower.receiveLive(m.seq, m.payload)
		}
		if connErr != nil {
			return connErr
		}
		select {
		case <-batches.ready:
		case <-s.resync:
			calls := s.resyncs.Load() // later calls need a further restart
			s.follower.restart()
			s.resynced.Store(calls)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Stream) connect(ctx context.Context) (*wire, error) {
	places, firstErr := s.cfg.Finder.Places(ctx) // also returns places together with an error
	for _, p := range places {
		w, err := dial(ctx, zmq4.Sub, p.Events)
		if err == nil {
			s.place.Store(&p)
			return w, nil
		}
		firstErr = cmp.Or(firstErr, err)
	}
	return nil, cmp.Or(firstErr, errNowhere)
}

var errNowhere = errors.New("kvevents: nothing tells where the rank publishes")

func (s *Stream) read(w *wire, q *queue) error {
	for {
		frames, err := w.frames()
		if err != nil {
			return fmt.Errorf("kvevents: %s: %w", s.place.Load().Events, err)
		}
		if m, ok := messageOf(frames); ok {
			q.push(m)
		} else {
			s.counters.decodeErrors.Add(1)
		}
	}
}

// replay calls yield for each batch from sequence number `from` on. It fails if there is no replay
// address, or if the publisher stops before its end marker.
func (s *Stream) replay(ctx context.Context, from uint64, yield func(uint64, []byte) bool) error {
	place := s.place.Load()
	if place.Replay == "" {
		return fmt.Errorf("kvevents: %s has no replay endpoint", place.Events)
	}
	ctx, cancel := context.WithTimeout(ctx, longReplay*s.cfg.ReplayTimeout)
	defer cancel()
	conn, err := dial(ctx, zmq4.Dealer, place.Replay)
	if err != nil {
		return err
	}
	defer conn.close()
	request := zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, from)) // an empty frame, and the number
	if err := conn.SendMsg(request); err != nil {
		return fmt.Errorf("kvevents: asking %s: %w", place.Replay, err)
	}
	for {
		_ = conn.raw.SetReadDeadline(time.Now().Add(s.cfg.ReplayTimeout))
		frames, err := conn.frames()
		if err != nil {
			return fmt.Errorf("kvevents: replay of %s: %w", place.Replay, err)
		}
		message, ok := messageOf(frames)
		if !ok {
			return fmt.Errorf("kvevents: replay of %s: a message of %d frames", place.Replay, len(frames))
		}
		if message.seq == endOfReplay || !yield(message.seq, message.payload) {
			return nil
		}
	}
}

// apply applies one batch. A batch that cannot be read drops all known blocks, because it may have
// contained removals. Any batch ends the wait for an event (ExpectEvent).
func (s *Stream) apply(payload []byte) {
	isFirstBatch := s.follower.nextSeq == s.follower.firstSeq+1 // nextSeq is behind it already
	if isFirstBatch {
		s.complete.Store(s.follower.firstSeq == 0) // nothing was stored before the publisher's batch 0
	}
	ts, err := s.decode.decodeBatch(payload, func(e *event) {
		s.mirror.apply(e)
		if e.kind == allCleared { // the cache is empty now
			s.complete.Store(true)
		}
	})
	s.unreadable.Store(err != nil)
	s.eventExpectedSince.Store(0)
	switch {
	case err != nil:
		s.counters.decodeErrors.Add(1)
		s.dropAll()
	case s.mirror.overfull():
		s.dropAll()
	}
	s.counters.blocks.Store(int64(len(s.mirror.known)))
	// After the blocks, so that a reader who sees the batch counted also sees its blocks counted.
	s.counters.batches.Add(1)
	if ts > 0 && ts < math.MaxInt64/1e6 { // other times do not fit into an int64
		lag := time.Since(time.UnixMicro(int64(ts * 1e6)))
		s.counters.lagInMicros.Store(max(0, lag.Microseconds()))
	}
}

func (s *Stream) dropAll() {
	s.complete.Store(false)
	s.mirror.dropAll(index.Cold) // the content of the cache is not known now
	s.counters.blocks.Store(0)
}
