package board

// Early ranks. Some connectors of engines must know the decode rank before the prefill begins. A request for such a rank is bound before
// its prefill: its slot and its KV room are taken at once, and policies count them at once. But the load in a step counts the request only
// after its first event, because no decode step reads its KV before it starts to decode.

// AheadAuto is a value of Config.BindAhead: the boards then learn how many requests an early rank may have beyond its slots. The type
// prefillDelay learns this number from ended requests: how many of a rank's requests wait for their first token, on average.
const AheadAuto = -1

// markDecoding finds the requests of a rank whose first event has come, and counts them as decoding from now on. It also takes the rest of
// their prompts out of the rank's backlog, because these prompts are complete. On a rank that computes no prompts, this rest is 0.
func (b *board) markDecoding(r *rank) {
	for i, slot := range r.slots {
		s := &b.slots.records[slot]
		// A preempted request had its first event before. It decodes again once its answer has more tokens than before the preemption.
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
