// Package pins holds the KV that finished prefills keep for decode engines, and remembers
// what became of it.
package pins

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Pin is KV that a finished prefill keeps for a decode engine.
type Pin struct {
	ID     string
	Name   string // by which alone a heartbeat finds it; empty: its ID
	Engine string // id of the rank's engine
	Key    uint64 // of the content
	Blocks []int
	Tokens int
	Free   func() // gives the blocks back to the rank
	timer  *time.Timer
	until  time.Time // the timeout, renewals and all
}

// Pins are the hand-offs of one prefill engine. Only a pull, a release or the
// timeout ends one; what it was is remembered, so that a late or second pull
// is told from one of an unknown id.
type Pins struct {
	hold    time.Duration
	count   Counts
	unnamed bool // hand-offs do not name their request

	mu    sync.Mutex
	live  map[string]*Pin
	past  Recent[State]
	total int // tokens pinned
}

// State is what a decode engine gets for its pull. On real engines it would not
// learn: expired and replayed read recycled blocks and look like success.
type State string

// The states.
const (
	OK       State = "ok"
	Unknown  State = "unknown"
	Expired  State = "expired"
	Replayed State = "replayed"
)

// Counts are told what happens to pins.
type Counts struct {
	Leaks, Pulls, Releases, Renewals                *atomic.Int64
	Replays, ExpiredPulls, SpentDrains, WrongBlocks *atomic.Int64
	OutlivedWrites                                  *atomic.Int64
}

// New keeps pins for the time of hold. unnamed: hand-offs do not name their request.
func New(hold time.Duration, unnamed bool, count Counts) *Pins {
	return &Pins{hold: hold, count: count, unnamed: unnamed, live: map[string]*Pin{}}
}

// Add keeps a pin until it is pulled, released or too old.
func (p *Pins) Add(k *Pin) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.live[k.ID]; old != nil { // the same transfer id twice: the first is stranded
		p.end(old, Expired)
		p.count.Leaks.Add(1)
	}
	p.live[k.ID] = k
	p.total += k.Tokens
	k.until = time.Now().Add(p.hold)
	k.timer = time.AfterFunc(p.hold, func() { p.expire(k) })
}

func (p *Pins) expire(k *Pin) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.live[k.ID] == k {
		p.end(k, Expired)
		p.count.Leaks.Add(1)
	}
}

// end needs the lock.
func (p *Pins) end(k *Pin, as State) {
	k.timer.Stop()
	delete(p.live, k.ID)
	p.total -= k.Tokens
	p.past.Put(k.ID, as)
	k.Free()
}

// Pull is a decode engine's read and its DONE in one. engine must be the id of
// the rank that holds the pin, ids its blocks; empty and nil are not compared.
// A late or second pull of a drain does no harm: its text is thrown away, and its
// cache_salt keeps the blocks from every other request.
func (p *Pins) Pull(id, engine string, ids []int, drain bool) (State, uint64) {
	return p.read(id, engine, ids, drain, p.count.ExpiredPulls)
}

// Written is the end of a write that began while the pin was kept. engine is as for Pull.
func (p *Pins) Written(id, engine string) State {
	state, _ := p.read(id, engine, nil, false, p.count.OutlivedWrites)
	return state
}

// read counts in expired that the pin has timed out.
func (p *Pins) read(id, engine string, ids []int, drain bool, expired *atomic.Int64) (State, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.live[id]; k != nil {
		if engine != "" && engine != k.Engine {
			return Unknown, 0
		}
		p.end(k, Replayed)
		if ids != nil && !slices.Equal(ids, k.Blocks) {
			p.count.WrongBlocks.Add(1)
			return OK, ^k.Key
		}
		p.count.Pulls.Add(1)
		return OK, k.Key
	}
	if p.unnamed {
		for _, k := range p.live { // the blocks are read by their numbers; the id that comes with them frees nothing
			if slices.Equal(ids, k.Blocks) {
				return OK, k.Key
			}
		}
	}
	state, ok := p.past.Get(id)
	switch {
	case !ok:
		return Unknown, 0
	case drain:
		p.count.SpentDrains.Add(1)
	case state == Expired:
		expired.Add(1)
	default:
		p.count.Replays.Add(1)
	}
	return state, 0
}

// Renew lets a pin live for two thirds of the hold from now on, or for what is left
// of it if that is longer.
func (p *Pins) Renew(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.live[id]
	for _, other := range p.live {
		if other.Name == id {
			k = other
		}
	}
	if k == nil || k.Name != "" && k.Name != id {
		return
	}
	if until := time.Now().Add(p.hold / 3 * 2); until.After(k.until) {
		k.until = until
		k.timer.Reset(time.Until(until))
		p.count.Renewals.Add(1)
	}
}

// Release frees a pin without reading it: what a decode engine does when it
// rejects the request (vllm#41269).
func (p *Pins) Release(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.live[id]; k != nil {
		p.end(k, Replayed)
		p.count.Releases.Add(1)
	}
}

// Held counts the pins and their tokens.
func (p *Pins) Held() (handoffs, tokens int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.live), p.total
}

// Close forgets everything, as a restart does.
func (p *Pins) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.live {
		k.timer.Stop()
	}
	p.live, p.total = map[string]*Pin{}, 0
}
