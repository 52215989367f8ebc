package board

import (
	"evenkeel/dispatcher/policy"
)

// charge gives a request a slot and adds the KV of its prompt to the load, until discharge.
func (b *board) charge(r *rank, s slotRecord) (slot int32) {
	t := &b.slots
	s.rank, s.pos = r, len(r.slots)
	if r.group != nil { // nil: not grouped yet
		s.boundAtStep = r.group.lastStep.Number
	}
	slot = t.store(&s)
	t.charged.add(&s)
	r.slots = append(r.slots, slot)
	r.running = append(r.running, policy.Request{Prompt: s.prompt, Age: s.tokensFromEarlierRanks, Key: s.key, ID: s.id, Slot: slot})
	request := &r.running[s.pos]
	if s.engineChoosesRank {
		r.unpinnedSlots++
		r.spreadKV(request) // leaves this rank's part in request.Tokens()
	}
	r.kv += request.Tokens()
	if s.notDecoding { // the KV takes room, but no step reads it yet
		r.notDecodingSlots++
		r.notDecodingKV += int64(s.prompt)
	}
	return slot
}

func (t *slotTable) store(s *slotRecord) (slot int32) {
	n := len(t.freeIndices)
	if n == 0 {
		t.records = append(t.records, *s)
		return int32(len(t.records) - 1)
	}
	slot = t.freeIndices[n-1]
	t.freeIndices = t.freeIndices[:n-1]
	t.records[slot] = *s
	return slot
}

// correctPrompt corrects the prompt length of a slot, which was estimated, in all sums.
func (b *board) correctPrompt(slot, prompt int32) {
	s := &b.slots.records[slot]
	r, difference := s.rank, prompt-s.prompt
	b.slots.charged.kvTokens += int64(difference)
	if s.notDecoding { // notDecodingKV has whole prompts
		r.notDecodingKV += int64(difference)
	}
	if r.Mixed {
		r.correctPromptLeft(s, difference)
	}
	request := &r.running[s.pos]
	partBefore := request.Tokens() // part that is charged to this rank
	s.prompt, request.Prompt = prompt, prompt
	if s.engineChoosesRank {
		r.spreadKV(request)
	}
	r.kv += request.Tokens() - partBefore
}

func (r *rank) correctPromptLeft(s *slotRecord, difference int32) {
	if s.notDecoding { // otherwise the prompt is complete
		promptLeft := max(0, s.promptLeft+difference)
		r.backlog += int64(promptLeft - s.promptLeft)
		s.promptLeft = promptLeft
	}
	// 0 would mean that a prefill engine computes it.
	s.newTokens = max(1, s.newTokens+difference)
}

// discharge frees a slot and its KV. The last request of the rank moves to its index, so that the
// lists have no gaps.
func (b *board) discharge(slot int32) {
	t := &b.slots
	b.dropPromptLeft(t.records[slot].rank, slot)
	s := t.records[slot] // a copy, because the next line clears the record
	t.records[slot] = slotRecord{}
	t.freeIndices = append(t.freeIndices, slot)
	t.released.add(&s)
	r, lastIndex := s.rank, len(s.rank.slots)-1
	r.kv -= r.running[s.pos].Tokens()
	if s.engineChoosesRank {
		r.unpinnedSlots--
		r.chargeOtherRanks(-r.kvPerOtherRank(&r.running[s.pos]))
	}
	if s.notDecoding {
		r.notDecodingSlots--
		r.notDecodingKV -= int64(s.prompt)
	}
	r.slots[s.pos], r.running[s.pos] = r.slots[lastIndex], r.running[lastIndex]
	if s.pos < lastIndex {
		t.records[r.slots[s.pos]].pos = s.pos
	}
	r.slots, r.running = r.slots[:lastIndex], r.running[:lastIndex]
}

// drift is 0 for both unless there is a bug. What was charged in total, less what was released,
// must equal the sum over slots and orphans. kvTokens adds the same difference for kept KV.
func (b *board) drift() (slots, kvTokens int64) {
	var inUse tally
	var keptKV int64
	for _, r := range b.ranks {
		for _, o := range r.orphans { // released only when the engine has surely freed them
			inUse.kvTokens += o.tokens
		}
		keptKV += r.keptKV.SumOfEntries()
	}
	t := &b.slots
	for i := range t.records {
		if isCharged := t.records[i].rank != nil; isCharged {
			inUse.add(&t.records[i])
		}
	}
	slots = t.charged.slots - t.released.slots - inUse.slots
	chargedDrift := t.charged.kvTokens - t.released.kvTokens - inUse.kvTokens
	keptDrift := t.keptTotal - t.freedTotal - keptKV
	return slots, chargedDrift + keptDrift
}

// refreshLoad updates the rank's requests and sums by the Counts, if there are any. If the rank has
// unpinned requests, it also changes kvFromOtherRanks of the other ranks of the engine.
func (b *board) refreshLoad(r *rank) {
	kv := r.Others + r.kvFromOtherRanks // KV of requests without a slot here
	moreForEachOther := int64(0)        // growth of the charge to each other rank of the engine
	for i, slot := range r.slots {
		request := &r.running[i]
		if b.counts != nil {
			generated := b.generated(slot)
			request.Age += generated - request.Generated // Age also counts tokens that other ranks generated
			request.Generated = generated
		}
		if r.unpinnedSlots > 0 && b.slots.records[slot].engineChoosesRank {
			moreForEachOther += r.divideKV(request) // now Tokens() is this rank's part
		}
		kv += request.Tokens()
	}
	r.kv = kv
	r.chargeOtherRanks(moreForEachOther)
	if r.notDecodingSlots > 0 {
		b.markDecoding(r)
	}
	if r.engineQueued > 0 {
		b.countQueued(r)
	}
}

func (b *board) countQueued(r *rank) {
	r.engineQueued = 0
	for _, slot := range r.slots {
		s := &b.slots.records[slot]
		if s.inEngineQueue && b.hasBegun(slot) {
			s.inEngineQueue = false
		}
		if s.inEngineQueue {
			r.engineQueued++
		}
	}
}

func (b *board) refreshGroupLoads(g *group) {
	g.kv, g.largestLoad = 0, 0
	for _, r := range g.steppingRanks {
		b.refreshLoad(r)
	}
	requestWeight := g.knownRequestWeight()
	for _, r := range g.steppingRanks { // a second loop: refreshLoad may charge other ranks
		g.kv += r.kv
		g.largestLoad = max(g.largestLoad, r.stepLoad(requestWeight))
	}
}
