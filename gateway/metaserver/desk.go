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

// Wanted is the callback that an attempt of a request waits for.
type Wanted struct {
	Rank  string                                  // that will call, for the log
	Limit int                                     // most bytes that the callback may have; 0: the limit for a prompt of unknown length
	Read  func([]byte) (mooncake.Callback, error) // judges it
}

// limit is how many bytes the callback may have.
func (w *Wanted) limit() int {
	if w.Limit > 0 {
		return w.Limit
	}
	return mooncake.MaxCallback(0, 0)
}

// Callback is one that came. If Err is set it cannot be used, and no other one will come.
type Callback struct {
	mooncake.Callback
	Err error
}

// Expectation waits for one callback.
type Expectation struct {
	URL string // that the decode engine is told

	desk      *desk
	key       key
	wanted    Wanted
	came      chan Callback
	forgotten chan struct{}
	timer     *time.Timer // forgets it; nil: nobody has asked for that
	reading   int         // connections from which the callback is being read
	spent     bool        // a callback was handed over
}

// tokenBytes makes a token that nobody guesses.
const tokenBytes = 16

// mostTries is how many connections may bring the callback of one token: an engine makes
// three tries, and may make the next before we know that the last one broke. It looks at no answer
// (vllm-ascend 182b75ea, mooncake_layerwise_connector.py).
const mostTries = 4

// key is the hash of a token. Tokens are looked up by their hash, so that the time of a look-up tells
// a caller nothing of the tokens that there are.
type key [sha256.Size]byte

func keyOf(token string) key { return sha256.Sum256([]byte(token)) }

// desk is where callbacks meet the requests that wait for them.
type desk struct {
	mu       sync.Mutex
	expected map[key]*Expectation
	short    map[string]bool // ranks of which it was said that they cut ids
	keys     map[string]bool // unknown keys of callbacks that were named in the log; at most mostKeys
	closed   bool
}

func newDesk() desk {
	return desk{expected: map[key]*Expectation{}, short: map[string]bool{}, keys: map[string]bool{}}
}

var (
	errSpent   = errors.New("metaserver: the callback of this request has come before")
	errUnknown = errors.New("metaserver: no request waits for this callback")
)

// Expect makes a URL for one callback. It must be called before the decode engine is told the URL,
// because the callback may come at once.
func (s *Server) Expect(w Wanted) *Expectation {
	var random [tokenBytes]byte
	_, _ = rand.Read(random[:]) // never fails, by its documentation
	token := hex.EncodeToString(random[:])
	e := &Expectation{
		URL: s.URL() + path + token, desk: &s.desk, key: keyOf(token), wanted: w,
		came: make(chan Callback, 1), forgotten: make(chan struct{}),
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	if s.desk.closed {
		close(e.forgotten)
		return e
	}
	s.desk.expected[e.key] = e
	return e
}

// Came is where the callback is told. At most one is.
func (e *Expectation) Came() <-chan Callback { return e.came }

// Forgotten is closed when no callback can come any more. It stays open if the last one came in the time of grace.
func (e *Expectation) Forgotten() <-chan struct{} { return e.forgotten }

// Forget ends the expectation after a time of grace, in which a callback is still handed over. It ends
// at once if the callback has come. A later call can only make it end sooner.
func (e *Expectation) Forget(grace time.Duration) {
	e.desk.mu.Lock()
	defer e.desk.mu.Unlock()
	switch {
	case e.spent || grace <= 0:
		e.forget()
	case e.timer == nil && e.desk.expected[e.key] == e:
		e.timer = time.AfterFunc(grace, func() { e.Forget(0) })
	}
}

// forget ends the expectation, and tells those who wait that no callback comes. It is called with the desk's mu held.
func (e *Expectation) forget() {
	if e.desk.expected[e.key] != e {
		return
	}
	e.drop()
	if len(e.came) == 0 { // else a callback waits to be taken
		close(e.forgotten)
	}
}

// drop takes the expectation off the desk. It is called with the desk's mu held.
func (e *Expectation) drop() {
	delete(e.desk.expected, e.key)
	if e.timer != nil {
		e.timer.Stop()
	}
}

// find returns the expectation of a token. The caller must call doneReading when it has read the callback, or could not.
func (d *desk) find(token string) (*Expectation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.expected[keyOf(token)]
	switch {
	case e == nil:
		return nil, errUnknown
	case e.spent || e.reading == mostTries:
		return nil, errSpent
	}
	e.reading++
	return e, nil
}

// doneReading says that a connection is not read any more, so that another one may bring the callback.
func (e *Expectation) doneReading() {
	e.desk.mu.Lock()
	defer e.desk.mu.Unlock()
	e.reading--
}

// handOver hands a callback to its request. It returns an error if another callback came first or the request is forgotten.
// late says that the request was given up before.
func (e *Expectation) handOver(c Callback) (late bool, err error) {
	e.desk.mu.Lock()
	defer e.desk.mu.Unlock()
	switch {
	case e.desk.expected[e.key] != e:
		return false, errUnknown
	case e.spent:
		return false, errSpent
	}
	e.spent = true
	e.came <- c                      // it has room for one
	if late = e.timer != nil; late { // the expectation waits for nothing else
		e.drop()
	}
	return late, nil
}

// firstShortID says whether this is the first time that a rank is seen to cut ids, and remembers the rank.
func (d *desk) firstShortID(rank string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen := d.short[rank]
	d.short[rank] = true
	return !seen
}

// mostKeys is how many unknown keys of callbacks the log names.
const mostKeys = 32

// newKeys returns the unknown keys of a callback that the log is to name, and whether it names no key after these.
func (d *desk) newKeys(keys []string) (named []string, last bool) {
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

// close forgets all expectations, and those that come later at once.
func (d *desk) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, e := range d.expected {
		e.forget()
	}
}

// Expected is how many callbacks are not forgotten.
func (s *Server) Expected() int {
	if s == nil {
		return 0
	}
	s.desk.mu.Lock()
	defer s.desk.mu.Unlock()
	return len(s.desk.expected)
}
