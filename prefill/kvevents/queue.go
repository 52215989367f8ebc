package kvevents

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
)

// message is one batch as it was received.
type message struct {
	seq     uint64
	payload []byte
}

// messageOf reads the last two frames. A topic stands before them in a live message, and an empty
// frame in a replayed one; newer engines add the topic after the empty frame.
func messageOf(frames [][]byte) (m message, ok bool) {
	n := len(frames)
	if n < 3 || n > 4 {
		return m, false
	}
	if len(frames[n-2]) != 8 { // a sequence number
		return m, false
	}
	return message{binary.BigEndian.Uint64(frames[n-2]), frames[n-1]}, true
}

const (
	maxQueued      = 10_000   // batches
	maxQueuedBytes = 64 << 20 // payload
)

// queue holds live batches while a replay runs. A full queue drops all its batches, and take
// reports this, because the stream must then start anew.
type queue struct {
	ready chan struct{} // holds a token after each push and at the end of the connection

	mu         sync.Mutex
	items      []message
	bytes      int
	overflowed bool  // batches were dropped since the last take
	err        error // with which the connection ended; nil: it has not
}

func newQueue() *queue { return &queue{ready: make(chan struct{}, 1)} }

// push drops all batches of a full queue: once one is lost, the stream cannot use the others
// either.
func (q *queue) push(m message) {
	q.mu.Lock()
	if len(q.items) >= maxQueued || q.bytes+len(m.payload) > maxQueuedBytes {
		q.items, q.bytes, q.overflowed = nil, 0, true
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

// nudge puts a token into a channel of capacity one, unless it holds one.
func nudge(ready chan<- struct{}) {
	select {
	case ready <- struct{}{}:
	default:
	}
}

func (q *queue) take() (items []message, overflowed bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	items, overflowed = q.items, q.overflowed
	q.items, q.bytes, q.overflowed = nil, 0, false
	return items, overflowed, q.err
}

// counters are for Status. Most count since the start of the stream.
type counters struct {
	batches, gapsReplayed, gapsCold atomic.Int64
	decodeErrors, unknownTypes      atomic.Int64
	unknownParents, skipped         atomic.Int64
	connects, blocks, lagInMicros   atomic.Int64
	blockTokens                     atomic.Int64 // of the longest block
}
