package refengine

import (
	"slices"
	"sync"
	"time"
)

// pin is KV that a finished prefill keeps for a decode engine.
type pin struct {
	id     string
	engine string // id of the rank's engine
	key    uint64 // of the content
	blocks []int
	tokens int
	free   func() // gives the blocks back to the rank
	timer  *time.Timer
	until  time.Time // the timeout, renewals and all
}

// pins are the hand-offs of one prefill engine. Only a pull, a release or the
// timeout ends one; what it was is remembered, so that a late or second pull
// is told from one of an unknown id.
type pins struct {
	hold    time.Duration
	count   *counters
	unnamed bool // hand-offs do not name their request

	mu    sync.Mutex
	live  map[string]*pin
	past  recent[pullState]
	total int // tokens pinned
}

// pullState is what a decode engine gets for its pull. On real engines it would not
// learn: expired and replayed read recycled blocks and look like success.
type pullState string

const (
	pullOK       pullState = "ok"
	pullUnknown  pullState = "unknown"
	pullExpired  pullState = "expired"
	pullReplayed pullState = "replayed"
)

func newPins(cfg Config, count *counters) *pins {
	return &pins{hold: cfg.KVHoldTimeout, count: count, unnamed: !cfg.namesRequests(), live: map[string]*pin{}}
}

func (p *pins) add(k *pin) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.live[k.id]; old != nil { // the same transfer id twice: the first is stranded
		p.end(old, pullExpired)
		p.count.Leaks.Add(1)
	}
	p.live[k.id] = k
	p.total += k.tokens
	k.until = time.Now().Add(p.hold)
	k.timer = time.AfterFunc(p.hold, func() { p.expire(k) })
}

func (p *pins) expire(k *pin) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.live[k.id] == k {
		p.end(k, pullExpired)
		p.count.Leaks.Add(1)
	}
}

// end needs the lock.
func (p *pins) end(k *pin, as pullState) {
	k.timer.Stop()
	delete(p.live, k.id)
	p.total -= k.tokens
	p.past.put(k.id, as)
	k.free()
}

// pull is a decode engine's read and its DONE in one. engine must be the id of
// the rank that holds the pin, ids its blocks; empty and nil are not compared.
// A late or second pull of a drain does no harm: its text is thrown away, and its
// cache_salt keeps the blocks from every other request.
func (p *pins) pull(id, engine string, ids []int, drain bool) (pullState, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.live[id]; k != nil {
		if engine != "" && engine != k.engine {
			return pullUnknown, 0
		}
		p.end(k, pullReplayed)
		if ids != nil && !slices.Equal(ids, k.blocks) {
			p.count.WrongBlocks.Add(1)
			return pullOK, ^k.key
		}
		p.count.Pulls.Add(1)
		return pullOK, k.key
	}
	if p.unnamed {
		for _, k := range p.live { // the blocks are read by their numbers; the id that comes with them frees nothing
			if slices.Equal(ids, k.blocks) {
				return pullOK, k.key
			}
		}
	}
	state, ok := p.past.get(id)
	switch {
	case !ok:
		return pullUnknown, 0
	case drain:
		p.count.SpentDrains.Add(1)
	case state == pullExpired:
		p.count.ExpiredPulls.Add(1)
	default:
		p.count.Replays.Add(1)
	}
	return state, 0
}

// renew lets a pin live for two thirds of the hold from now on, or for what is left
// of it if that is longer.
func (p *pins) renew(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.live[id]
	if k == nil {
		return
	}
	if until := time.Now().Add(p.hold / 3 * 2); until.After(k.until) {
		k.until = until
		k.timer.Reset(time.Until(until))
		p.count.Renewals.Add(1)
	}
}

// release frees a pin without reading it: what a decode engine does when it
// rejects the request (vllm#41269).
func (p *pins) release(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.live[id]; k != nil {
		p.end(k, pullReplayed)
		p.count.Releases.Add(1)
	}
}

func (p *pins) held() (handoffs, tokens int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.live), p.total
}

// close forgets everything, as a restart does.
func (p *pins) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.live {
		k.timer.Stop()
	}
	p.live, p.total = map[string]*pin{}, 0
}
