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

// limit is the largest size of the callback, in bytes.
func (w *Wanted) limit() int {
	if w.Limit > 0 {
		return w.Limit
	}
	return mooncake.MaxCallback(0, 0)
}

// Callback is a callback that has come. If Err is set it cannot be used, and no other callback for the request will be accepted.
type Callback struct {
	mooncake.Callback
	Err error
}

// PendingCallback waits for one callback.
type PendingCallback struct {
	URL string // the URL that the decode engine is given

	desk      *desk
	key       key
	wanted    Wanted
	came      chan Callback
	forgotten chan struct{}
	timer     *time.Timer // ends the expectation; nil: Forget was not called with a grace
	reading   int         // connections from which the callback is being read
	spent     bool        // a callback was handed over
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
	mu      sync.Mutex
	pending map[key]*PendingCallback
	short   map[string]bool // ranks for which the log has said that they cut request ids
	keys    map[string]bool // unknown keys of callbacks that the log has named; at most mostKeys
	closed  bool
}

func newDesk() desk {
	return desk{pending: map[key]*PendingCallback{}, short: map[string]bool{}, keys: map[string]bool{}}
}

var (
	errSpent   = errors.New("metaserver: the callback of this request has come before")
	errUnknown = errors.New("metaserver: no request waits for this callback")
)

// Expect returns an expectation with a new URL for one callback. The callback may come as soon as the decode engine has the URL. After
// Close, the expectation has ended at once.
func (s *Server) Expect(w Wanted) *PendingCallback {
	var random [tokenBytes]byte
	_, _ = rand.Read(random[:]) // never fails, by its documentation
	token := hex.EncodeToString(random[:])
	p := &PendingCallback{
		URL: s.URL() + path + token, desk: &s.desk, key: keyOf(token), wanted: w,
		came: make(chan Callback, 1), forgotten: make(chan struct{}),
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	if s.desk.closed {
		close(p.forgotten)
		return p
	}
	s.desk.pending[p.key] = p
	return p
}

// Came delivers the callback, at most once.
func (p *PendingCallback) Received() <-chan Callback { return p.came }

// Forgotten is closed when no callback can come any more. It stays open if a callback came within the grace of Forget.
func (p *PendingCallback) Ended() <-chan struct{} { return p.forgotten }

// Forget ends the expectation after a grace, within which a callback is still handed over. If the callback has come, it ends the
// expectation at once. A later call with a grace of 0 also ends it at once.
func (p *PendingCallback) StopWaiting(grace time.Duration) {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	switch {
	case p.spent || grace <= 0:
		p.forget()
	case p.timer == nil && p.desk.pending[p.key] == p: // no grace runs yet, and the expectation has not ended
		p.timer = time.AfterFunc(grace, func() { p.StopWaiting(0) })
	}
}

// forget ends the expectation, and closes Forgotten unless a callback still waits in Came. It is called with the desk's mu held. For an
// expectation that has ended it does nothing.
func (p *PendingCallback) forget() {
	if p.desk.pending[p.key] != p {
		return
	}
	p.drop()
	if len(p.came) == 0 {
		close(p.forgotten)
	}
}

// drop removes the expectation from the desk. It is called with the desk's mu held.
func (p *PendingCallback) drop() {
	delete(p.desk.pending, p.key)
	if p.timer != nil {
		p.timer.Stop()
	}
}

// find returns the expectation of a token. It returns errUnknown if there is none, and errSpent if its callback has come or mostTries
// connections already bring it. The caller must call doneReading when it has read the callback, or has failed to read it.
func (d *desk) find(token string) (*PendingCallback, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.pending[keyOf(token)]
	switch {
	case p == nil:
		return nil, errUnknown
	case p.spent || p.reading == mostTries:
		return nil, errSpent
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
// that Forget was called before, i.e. the request was given up; the expectation then ends.
func (p *PendingCallback) handOver(c Callback) (late bool, err error) {
	p.desk.mu.Lock()
	defer p.desk.mu.Unlock()
	switch {
	case p.desk.pending[p.key] != p:
		return false, errUnknown
	case p.spent:
		return false, errSpent
	}
	p.spent = true
	p.came <- c // does not block, because the channel has room for one callback
	if late = p.timer != nil; late {
		p.drop() // no second callback is expected
	}
	return late, nil
}

// firstShortID says whether a rank cuts request ids for the first time, and remembers the rank.
func (d *desk) firstShortID(rank string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen := d.short[rank]
	d.short[rank] = true
	return !seen
}

// mostKeys is how many unknown keys of callbacks the log names.
const mostKeys = 32

// newKeys returns the unknown keys of a callback that the log should name. full says that the log has now named mostKeys, and names no
// more.
func (d *desk) newKeys(keys []string) (named []string, full bool) {
	if len(keys) == 0 {
		return nil, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, key := range keys {
		if len(d.keys) < mostKeys && !d.keys[key] {
			d.keys[key] = true
			named = append(named, key)
		}
	}
	return named, len(named) > 0 && len(d.keys) == mostKeys
}

// close ends all expectations. Later expectations end as soon as they are made.
func (d *desk) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, p := range d.pending {
		p.forget()
	}
}

// Expected is how many callbacks the proxy would accept now.
func (s *Server) Expected() int {
	if s == nil {
		return 0
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	return len(s.desk.pending)
}
