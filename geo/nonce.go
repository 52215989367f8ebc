package geo

import (
	"container/list"
	"sync"
	"time"
)

// nonces remembers which nonces were used, so that a hop that somebody
// recorded is not believed again.
type nonces struct {
	mu    sync.Mutex
	keep  time.Duration
	known map[string]*list.Element
	order list.List // of spent, oldest first
}

type spent struct {
	nonce string
	at    time.Time
}

// maxNonces is how many are remembered: beyond it the oldest are forgotten
// before their time, and the skew alone guards them.
const maxNonces = 100_000

// newNonces remembers each for as long as its hop's time is believed.
func newNonces(keep time.Duration) *nonces {
	return &nonces{keep: keep, known: map[string]*list.Element{}}
}

// used says whether a nonce is known, and notes nothing.
func (n *nonces) used(nonce string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.known[nonce] != nil
}

// first notes a nonce and says whether it had not been used before.
func (n *nonces) first(nonce string, now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for e := n.order.Front(); e != nil; e = n.order.Front() {
		old := e.Value.(spent)
		if now.Sub(old.at) < n.keep && len(n.known) < maxNonces {
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
