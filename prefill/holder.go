package prefill

import "go.uber.org/zap"

// Holder is who makes the last call on leases: one attempt of a request to be
// served, from its turn to its end. Its leases are those that name it, so the
// audit sees one that was lost on the way.
type Holder struct {
	leases int // that it has to make its last call on
	ended  bool
}

// Ended says that a holder makes no more calls. What it still holds stays
// charged, for the engine may hold the KV, and is drift in the audit.
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

// PassOn says that somebody else than its holder makes the last call.
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
