package board

// Early ranks. Some connectors of engines must know the decode rank before the prefill begins. A
// request for such a rank takes its slot and its KV room before its prefill. But the load in a step
// counts the request only after its first event, because no decode step reads its KV before.

// AheadAuto is a value of Config.BindAhead: the boards learn the number (prefillDelay).
const AheadAuto = -1

// markDecoding counts the requests whose first event has come as decoding.
func (b *board) markDecoding(r *rank) {
	for i, slot := range r.slots {
		s := &b.slots.records[slot]
		// A preempted request had its first event before. It decodes again once its answer has more
		// tokens.
		stillPreempted := s.tokensBeforePreemption > 0 && r.running[i].Generated <= s.tokensBeforePreemption
		if !s.notDecoding || !b.hasBegun(slot) || stillPreempted {
			continue
		}
		s.notDecoding = false
		r.notDecodingSlots--
		r.notDecodingKV -= int64(s.prompt)
		b.dropPromptLeft(r, slot)
	}
}
