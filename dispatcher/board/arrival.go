package board

// Early ranks. Some connectors need the decode rank before the prefill begins. A
// request is then bound while it waits for its prefill: its slot and the room for its KV are taken
// at once, but no step reads that KV before the request starts to decode. So the load of steps
// counts the request only from its first event on. Policies count it at once.

// AheadAuto as Config.BindAhead has the number learned: as many requests beyond the slots as, on average, a rank
// has on their way to their first token. It is learned from the last requests that ended, see ahead.Lead.
const AheadAuto = -1

// seeStarts counts those requests of a rank as decoding whose first event has come.
func (b *board) seeStarts(r *rank) {
	for i, slot := range r.slots {
		if c := &b.ledger.table[slot]; c.unread && b.started(slot) && (c.tokensBefore == 0 || r.running[i].Generated > c.tokensBefore) {
			c.unread = false
			r.unreadSlots--
			r.unreadKV -= int64(c.prompt)
			b.dropPrompt(r, slot)
		}
	}
}
