package kvevents

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
)

// message is one batch as it came.
type message struct {
	seq     uint64
	payload []byte
}

// messageOf reads a number and a payload. A topic stands before them in a live message, an empty frame in a replayed one, and
// behind that, in the replays of newer engines, the topic too.
func messageOf(frames [][]byte) (m message, ok bool) {
	n := len(frames)
	if n < 3 || n > 4 || len(frames[n-2]) != 8 {
		return m, false
	}
	return message{binary.BigEndian.Uint64(frames[n-2]), frames[n-1]}, true
}

const (
	mostQueued      = 10_000 // batches
	mostQueuedBytes = 64 << 20
)

// queue holds live batches while a replay runs. When it is full it drops all
// and says so, for then the stream has to begin anew.
type queue struct {
	ready chan struct{} // a token: something has changed

	mu    sync.Mutex
	items []message
	bytes int
	over  bool
	err   error // the connection's end
}

func newQueue() *queue { return &queue{ready: make(chan struct{}, 1)} }

func (q *queue) push(m message) {
	q.mu.Lock()
	if len(q.items) >= mostQueued || q.bytes+len(m.payload) > mostQueuedBytes {
		q.items, q.bytes, q.over = nil, 0, true
	}
	q.items = append(q.items, m)
	q.bytes += len(m.payload)
	q.mu.Unlock()
	nudge(q.ready)
}

func (q *queue) end(err error) {
	q.mu.Lock()
	q.err = err
	q.mu.Unlock()
	nudge(q.ready)
}

// nudge puts a token into a channel that holds one.
func nudge(ready chan<- struct{}) {
	select {
	case ready <- struct{}{}:
	default: // there is one
	}
}

// take returns all that is there, whether something before it was dropped, and
// the connection's end.
func (q *queue) take() (items []message, over bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	items, over = q.items, q.over
	q.items, q.bytes, q.over = nil, 0, false
	return items, over, q.err
}

// counters are a stream's, for as long as it lives.
type counters struct {
	batches, replayed, cold      atomic.Int64
	decodeErrors, unknownTypes   atomic.Int64
	unknownParents, skipped      atomic.Int64
	connects, known, lagInMicros atomic.Int64
	block                        atomic.Int64 // tokens of the last stored block
}
