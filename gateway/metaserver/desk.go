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

// Wanted describes the callback that an attempt of a request waits for.
type Wanted struct {
	Rank  string                                  // the decode rank that will call, for the log
	Limit int                                     // largest size of the callback in bytes; 0: the limit for a prompt of unknown length
	Read  func([]byte) (mooncake.Callback, error) // parses and checks the callback
}

// limit is the largest size of the callback, in bytes. It is never 0.
func (w *Wanted) limit() int {
	if w.Limit > 0 {
		return w.Limit
	}
	const unknown = 0
	return mooncake.MaxCallback(unknown, unknown) // the largest size for a prompt and KV blocks of unknown length
}

// Callback is a callback that has come. If Err is set it cannot be used, and no other callback for the request will be accepted.
type Callback struct {
	mooncake.Callback
	Err error
}

// PendingCallback is the expectation of one callback from a decode engine.
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

// tokenBytes is the number of random bytes of a token: enough that it cannot be guessed.
const tokenBytes = 16

// mostTries is how many connections at once may bring the callback of one token. An engine makes three tries, and may begin the next one
// before the proxy notices that the last connection broke. The engine ignores the answers (vllm-ascend 182b75ea,
// mooncake_layerwise_connector.py).
const mostTries = 4

// key is the hash of a token. Tokens are looked up by their hash, so that the time that a look-up takes reveals nothing about valid tokens.
type key [sha256.Size]byte

func keyOf(token string) key { return sha256.Sum256([]byte(token)) }

// desk holds the expectations of requests, and hands callbacks to them.
type desk struct {
	mu           sync.Mutex
	pending      map[key]*PendingCallback
	shortIDRanks map[string]bool // ranks for which the log has said that they cut request ids
	loggedKeys   map[string]bool // unknown keys of callbacks that the log has named; at most mostKeys
	closed       bool
}

// newDesk returns a desk without expectations.
func newDesk() desk {
	return desk{pending: map[key]*PendingCallback{}, shortIDRanks: map[string]bool{}, loggedKeys: map[string]bool{}}
}

var (
	errCameBefore = errors.New("metaserver: the callback of this request has come before")
	errUnknown    = errors.New("metaserver: no request waits for this callback")
)

// Expect returns an expectation with a new URL for one callback. The callback may come as soon as the decode engine has the URL. After
// Close, the expectation has ended at once.
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
	if s.desk.closed { // no callback can come any more
		close(p.ended)
		return p
	}
	s.desk.pending[p.key] = p
	return p
}

// Received delivers the callback, at most once.
func (p *PendingCallback) Received() <-chan Callback { return p.received }

// Ended is closed when no callback can come any more. It stays open if a callback came within the grace of StopWaiting.
func (p *PendingCallback) Ended() <-chan struct{} { return p.ended }

// StopWaiting ends the expectation after a grace, within which a callback is still handed over. If the callback has come, it ends the
// expectation at once. A later call with a grace of 0 also ends it at once.
func (p *PendingCallback) StopWaiting(grace time.Duration) {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	switch {
	case p.handedOver || grace <= 0:
		p.stopWaiting()
	case p.timer == nil && p.desk.pending[p.key] == p: // no grace runs yet, and the expectation has not ended
		p.timer = time.AfterFunc(grace, func() { p.StopWaiting(0) })
	}
}

// stopWaiting ends the expectation, and closes Ended unless a callback still waits in Received. The caller holds the desk's mu. For an
// expectation that has ended it does nothing.
func (p *PendingCallback) stopWaiting() {
	if p.desk.pending[p.key] != p {
		return
	}
	p.removeFromDesk()
	if len(p.received) == 0 {
		close(p.ended)
	}
}

// removeFromDesk removes the expectation from the desk, and stops its timer. The caller holds the desk's mu.
func (p *PendingCallback) removeFromDesk() {
	delete(p.desk.pending, p.key)
	if p.timer != nil {
		p.timer.Stop()
	}
}

// beginReading returns the expectation of a token, and counts the connection from which its callback is read. It returns errUnknown if
// there is no expectation, and errCameBefore if its callback has come or mostTries connections already bring it. The caller must call
// doneReading when it has read the callback, or has failed to read it.
func (d *desk) beginReading(token string) (*PendingCallback, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.pending[keyOf(token)]
	switch {
	case p == nil:
		return nil, errUnknown
	case p.handedOver || p.reading == mostTries:
		return nil, errCameBefore // the callback has come, or is being read on other connections
	}
	p.reading++
	return p, nil
}

// doneReading says that a connection is not read any more, so that another connection may bring the callback.
func (p *PendingCallback) doneReading() {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	p.reading--
}

// handOver hands a callback to its request. It returns an error if another callback came first, or if the expectation has ended. late says
// that StopWaiting was called before, i.e. the request was given up; the expectation then ends.
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
	p.received <- c                  // does not block, because the channel has room for one callback
	if late = p.timer != nil; late { // the request was given up, and the grace of StopWaiting runs
		p.removeFromDesk() // no second callback is expected
	}
	return late, nil
}

// noteFirstShortID remembers that a rank cuts request ids. isFirst says that this had not been remembered before.
func (d *desk) noteFirstShortID(rank string) (isFirst bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	isKnown := d.shortIDRanks[rank]
	d.shortIDRanks[rank] = true
	return !isKnown
}

// mostKeys is how many unknown keys of callbacks the log names.
const mostKeys = 32

// markKeysLogged returns those of the unknown keys of a callback that the log should name, and remembers them as named. full says that the
// log has now named mostKeys, and names no more.
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

// close ends all expectations. Later expectations end as soon as they are made.
func (d *desk) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, p := range d.pending {
		p.stopWaiting()
	}
}

// Expected is how many callbacks the proxy would accept now; 0 for a nil Server.
func (s *Server) Expected() int {
	if s == nil {
		return 0
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	return len(s.desk.pending)
}
