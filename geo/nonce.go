package geo

import (
	"container/list"
	"sync"
	"time"
)

// nonces remembers used nonces, so that a recorded hop is not accepted again.
type nonces struct {
	mu      sync.Mutex
	keepFor time.Duration
	known   map[string]*list.Element
	order   list.List // of usedNonce, the oldest first
}

type usedNonce struct {
	nonce string
	at    time.Time
}

// maxNonces bounds the nonces that are remembered. If there are more, the oldest are dropped early.
// A recorded hop with such a nonce is then accepted again until it is older than the skew.
const maxNonces = 100_000

// newNonces returns nonces that remembers each nonce for the time keepFor, which must be at least
// the time for which a hop is accepted.
func newNonces(keepFor time.Duration) *nonces {
	return &nonces{keepFor: keepFor, known: map[string]*list.Element{}}
}

// used reports whether a nonce was used. It does not remember the nonce.
func (n *nonces) used(nonce string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.known[nonce] != nil
}

// remember remembers a nonce, and reports whether it is new. It first drops nonces that are older
// than keepFor or exceed maxNonces.
func (n *nonces) remember(nonce string, now time.Time) (isNew bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for e := n.order.Front(); e != nil; e = n.order.Front() {
		old := e.Value.(usedNonce)
		if now.Sub(old.at) < n.keepFor && len(n.known) < maxNonces {
			break
		}
		n.order.Remove(e)
		delete(n.known, old.nonce)
	}
	if n.known[nonce] != nil {
		return false
	}
	n.known[nonce] = n.order.PushBack(usedNonce{nonce, now})
	return true
}
