package ledger

// Holder stands for one attempt to serve a request, from its turn to its end. The
// attempt must make the last call on the charges that name its Holder, so the audit
// sees a charge that was lost on the way.
type Holder struct {
	charges int // that it has to make its last call on
	ended   bool
}

// Ended says that a holder makes no more calls, and how many charges it still holds.
// They stay, because the engine may hold the KV, and count as drift in the audit.
func (l *Ledger) Ended(h *Holder) (lost int) {
	if !h.ended {
		h.ended = true
		l.unheld += h.charges
	}
	return h.charges
}

// PassOn says that other code than the charge's holder makes the last call.
func (c *Charge) PassOn() {
	h := c.holder
	if h == nil {
		return
	}
	c.holder = nil
	h.charges--
	if h.ended {
		c.account.ledger.unheld--
	}
}
