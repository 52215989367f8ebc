package prefill

import "go.uber.org/zap"

// Holder stands for one attempt to serve a request, from its turn to its end. The
// attempt must make the last call on the leases that name its Holder, so the audit
// sees a lease that was lost on the way.
type Holder struct {
	leases int // that it has to make its last call on
	ended  bool
}

// Ended says that a holder makes no more calls. Leases that it still holds stay
// charged, because the engine may hold the KV, and count as drift in the audit.
func (t *Tier) Ended(h *Holder) {
	t.mu.Lock()
	lost := h.leases
	if !h.ended {
		h.ended = true
		t.unheld += lost
	}
	t.mu.Unlock()
	if lost > 0 {
		t.cfg.Log.Error("a request ended and left prefill leases behind; this is a bug, please report it", zap.Int("leases", lost))
	}
}

// PassOn says that other code than the lease's holder makes the last call.
func (l *Lease) PassOn() {
	l.tier.mu.Lock()
	defer l.tier.mu.Unlock()
	l.unhold()
}

// unhold takes the lease off its holder's.
func (l *Lease) unhold() {
	h := l.holder
	if h == nil {
		return
	}
	l.holder = nil
	h.leases--
	if h.ended {
		l.tier.unheld--
	}
}
