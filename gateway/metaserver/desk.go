package metaserver

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"sync"
	"time"

	"evenkeel/mooncake"
)

// Wanted is the callback that an attempt waits for.
type Wanted struct {
	Rank  string // the decode rank that will call, for the log
	Limit int    // bytes; 0: for a prompt of unknown length
	Read  func([]byte) (mooncake.Callback, error)
}

func (w *Wanted) limit() int {
	if w.Limit > 0 {
		return w.Limit
	}
	const unknown = 0
	return mooncake.MaxCallback(unknown, unknown)
}

// Callback is one that has come. If Err is set it cannot be used, and no other will be accepted for
// the request.
type Callback struct {
	mooncake.Callback
	Err error
}

// PendingCallback is the expectation of one callback.
type PendingCallback struct {
	URL string // URL to which the decode engine is to send the callback

	desk       *desk
	key        key
	wanted     Wanted
	received   chan Callback
	ended      chan struct{}
	timer      *time.Timer // ends the expectation; nil: StopWaiting was not called with a grace
	reading    int         // connections from which the callback is being read
	handedOver bool        // a callback was handed over, so no other will be accepted
}

// tokenBytes are random, and enough that a token cannot be guessed.
const tokenBytes = 16

// mostTries is how many connections at once may bring a callback. An engine makes three tries, and
// may begin the next one before the proxy notices that the last connection broke. It ignores the
// answers (vllm-ascend 182b75ea, mooncake_layerwise_connector.py).
const mostTries = 4

// key is the hash of a token. Tokens are looked up by their hash, so that the time that a look-up
// takes reveals nothing about valid tokens.
type key [sha256.Size]byte

func keyOf(token string) key { return sha256.Sum256([]byte(token)) }

type desk struct {
	mu           sync.Mutex
	pending      map[key]*PendingCallback
	shortIDRanks map[string]bool // ranks for which the log has said that they cut request ids
	loggedKeys   map[string]bool // unknown keys of callbacks that the log has named; at most mostKeys
	closed       bool
}

func newDesk() desk {
	return desk{pending: map[key]*PendingCallback{}, shortIDRanks: map[string]bool{}, loggedKeys: map[string]bool{}}
}

var (
	errCameBefore = errors.New("metaserver: the callback of this request has come before")
	errUnknown    = errors.New("metaserver: no request waits for this callback")
)

// Expect makes a new URL for one callback, which may come as soon as the decode engine has it.
// After Close, the expectation has ended at once.
func (s *Server) Expect(w Wanted) *PendingCallback {
	var random [tokenBytes]byte
	_, _ = rand.Read(random[:]) // never fails, by its documentation
	token := hex.EncodeToString(random[:])
	p := &PendingCallback{
		URL: s.URL() + path + token, desk: &s.desk, key: keyOf(token), wanted: w,
		received: make(chan Callback, 1), ended: make(chan struct{}),
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	if s.desk.closed {
		close(p.ended)
		return p
	}
	s.desk.pending[p.key] = p
	return p
}

// Received delivers the callback, at most once.
func (p *PendingCallback) Received() <-chan Callback { return p.received }

// Ended is closed when no callback can come any more. It stays open if one came within the grace of
// StopWaiting.
func (p *PendingCallback) Ended() <-chan struct{} { return p.ended }

// StopWaiting still accepts a callback within the grace. If it has come, or the grace is 0, the
// expectation ends at once.
func (p *PendingCallback) StopWaiting(grace time.Duration) {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	switch {
	case p.handedOver || grace <= 0:
		p.stopWaiting()
	case p.timer == nil && p.desk.pending[p.key] == p:
		p.timer = time.AfterFunc(grace, func() { p.StopWaiting(0) })
	}
}

// stopWaiting closes Ended unless a callback still waits in Received. The caller holds the desk's
// mu, also for removeFromDesk.
func (p *PendingCallback) stopWaiting() {
	if p.desk.pending[p.key] != p {
		return
	}
	p.removeFromDesk()
	if len(p.received) == 0 {
		close(p.ended)
	}
}

func (p *PendingCallback) removeFromDesk() {
	delete(p.desk.pending, p.key)
	if p.timer != nil {
		p.timer.Stop()
	}
}

// After a success, the caller must call doneReading, whether it could read the callback or not.
func (d *desk) beginReading(token string) (*PendingCallback, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.pending[keyOf(token)]
	switch {
	case p == nil:
		return nil, errUnknown
	case p.handedOver || p.reading == mostTries:
		return nil, errCameBefore // it has come, or is being read on other connections
	}
	p.reading++
	return p, nil
}

func (p *PendingCallback) doneReading() {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	p.reading--
}

// handOver gives a callback to its request. late says that the request was given up (StopWaiting);
// the expectation then ends.
func (p *PendingCallback) handOver(c Callback) (late bool, err error) {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	switch {
	case p.desk.pending[p.key] != p:
		return false, errUnknown
	case p.handedOver:
		return false, errCameBefore
	}
	p.handedOver = true
	p.received <- c // has room for one
	if late = p.timer != nil; late {
		p.removeFromDesk()
	}
	return late, nil
}

func (d *desk) noteFirstShortID(rank string) (isFirst bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	isKnown := d.shortIDRanks[rank]
	d.shortIDRanks[rank] = true
	return !isKnown
}

// mostKeys bounds the unknown keys that the log names.
const mostKeys = 32

// full says that the log has now named mostKeys, and names no more.
func (d *desk) markKeysLogged(keys []string) (named []string, full bool) {
	if len(keys) == 0 { // most callbacks, which need no lock
		return nil, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, key := range keys {
		if len(d.loggedKeys) < mostKeys && !d.loggedKeys[key] {
			d.loggedKeys[key] = true
			named = append(named, key)
		}
	}
	return named, len(named) > 0 && len(d.loggedKeys) == mostKeys
}

// Expectations that are made after close have ended at once.
func (d *desk) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, p := range d.pending {
		p.stopWaiting()
	}
}

// Expected is how many callbacks would be accepted now.
func (s *Server) Expected() int {
	if s == nil {
		return 0
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	return len(s.desk.pending)
}
