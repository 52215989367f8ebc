package board

// Early ranks. Some connectors want to know the decode rank before the prefill begins. A
// request is then bound while it waits for its prefill: its slot and the room for its KV are taken
// at once, but no step reads that KV before the request starts to decode. What the rank's steps
// feel counts it from its first event on. Policies count it at once.

// AheadAuto as Config.BindAhead: as many requests beyond the slots as are on their way to their first
// token, in the mean, if a slot's time goes by as that of the last requests did.
const AheadAuto = -1

// seeStarts counts the requests of a rank as decoding whose first event has come.
func (b *board) seeStarts(r *rank) {
	for i, slot := range r.slots {
		if c := &b.ledger.table[slot]; c.unread && b.started(slot) && (c.had == 0 || r.running[i].Generated > c.had) {
			c.unread = false
			r.early--
			r.later -= int64(c.prompt)
			b.finish(r, slot)
		}
	}
}
