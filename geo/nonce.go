package geo

import (
	"container/list"
	"sync"
	"time"
)

// nonces remembers which nonces were used, so that a recorded hop
// is not accepted again.
type nonces struct {
	mu      sync.Mutex
	keepFor time.Duration
	known   map[string]*list.Element
	order   list.List // of spent, oldest first
}

type spent struct {
	nonce string
	at    time.Time
}

// maxNonces is how many nonces are remembered. If there are more, the oldest are forgotten
// early, and a recorded hop with such a nonce is refused only once it is older than the skew.
const maxNonces = 100_000

// newNonces returns nonces that remembers each nonce for keep: as long as the hop's time is accepted.
func newNonces(keep time.Duration) *nonces {
	return &nonces{keepFor: keep, known: map[string]*list.Element{}}
}

// used says whether a nonce was used, and does not remember it.
func (n *nonces) used(nonce string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.known[nonce] != nil
}

// remember remembers a nonce, and says whether it was not used before. It first forgets the nonces that are old enough,
// or more than maxNonces.
func (n *nonces) remember(nonce string, now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for e := n.order.Front(); e != nil; e = n.order.Front() {
		old := e.Value.(spent)
		if now.Sub(old.at) < n.keepFor && len(n.known) < maxNonces {
			break
		}
		n.order.Remove(e)
		delete(n.known, old.nonce)
	}
	if n.known[nonce] != nil {
		return false
	}
	n.known[nonce] = n.order.PushBack(spent{nonce, now})
	return true
}
