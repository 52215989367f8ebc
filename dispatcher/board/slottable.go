package board

import (
	"evenkeel/dispatcher/policy"
)

// charge gives a request (s) a slot of rank r, adds the KV of its prompt to the rank's load, and returns the index of the slot. The slot is
// taken until discharge.
func (b *board) charge(r *rank, s slotRecord) (slot int32) {
	t := &b.slots
	s.rank, s.pos = r, len(r.slots)
	if r.group != nil { // a rank without a group has left the fleet, and no step of it can have been reported
		s.boundAtStep = r.group.lastStep.Number
	}
	slot = t.store(&s)
	t.charged.add(&s)
	r.slots = append(r.slots, slot)
	// Age is how many tokens the answer has so far: at the start, those that earlier ranks generated.
	r.running = append(r.running, policy.Request{Prompt: s.prompt, Age: s.tokensFromEarlierRanks, Key: s.key, ID: s.id, Slot: slot})
	request := &r.running[s.pos]
	if s.engineChoosesRank { // the engine may run the request on any of its ranks, so each of them is charged with an equal part
		r.unpinnedSlots++
		r.spreadKV(request) // charges the other ranks with their parts, and leaves this rank's part in request.Tokens()
	}
	r.kv += request.Tokens()
	if s.notDecoding { // the KV takes room, but no decode step reads it yet
		r.notDecodingSlots++
		r.notDecodingKV += int64(s.prompt)
	}
	return slot
}

// store stores a record at an index that no request uses, and returns the index. An index that was freed last is used first.
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

// correctPrompt corrects the prompt length that a slot is charged with, and all sums that include it. The proxy had estimated the length
// when the slot was bound; prompt is the number of tokens that an engine has counted.
func (b *board) correctPrompt(slot, prompt int32) {
	s := &b.slots.records[slot]
	r, difference := s.rank, prompt-s.prompt // difference is below 0 if the prompt is shorter than estimated
	b.slots.charged.kvTokens += int64(difference)
	if s.notDecoding { // notDecodingKV has whole prompts, as charge has added them
		r.notDecodingKV += int64(difference)
	}
	if r.Mixed {
		r.correctPromptLeft(s, difference)
	}
	request := &r.running[s.pos]
	partBefore := request.Tokens() // part of the KV that is charged to this rank: usually all
	s.prompt, request.Prompt = prompt, prompt
	if s.engineChoosesRank { // each rank of the engine is charged with an equal part of the KV
		r.spreadKV(request) // charges the other ranks with the change, and leaves this rank's part in request.Tokens()
	}
	r.kv += request.Tokens() - partBefore
}

// correctPromptLeft corrects how many tokens of a request's prompt a mixed rank, which computes prompts itself, has to compute.
func (r *rank) correctPromptLeft(s *slotRecord, difference int32) {
	if s.notDecoding { // otherwise the answer has begun, so no token of the prompt is left to compute
		promptLeft := max(0, s.promptLeft+difference)
		r.backlog += int64(promptLeft - s.promptLeft)
		s.promptLeft = promptLeft
	}
	s.newTokens = max(1, s.newTokens+difference) // at least 1, because 0 would mean that the KV comes from a prefill engine
}

// discharge takes the request of a slot off its rank, and frees the slot and the request's KV. In the lists of the rank, the last request
// moves to the index of the removed one, so that the lists have no gaps.
func (b *board) discharge(slot int32) {
	t := &b.slots
	b.dropPromptLeft(t.records[slot].rank, slot) // a mixed rank will not compute the rest of the prompt
	s := t.records[slot]                         // a copy, because the next line clears the record
	t.records[slot] = slotRecord{}
	t.freeIndices = append(t.freeIndices, slot)
	t.released.add(&s) // total of all released slots, by which drift checks the accounts
	r, lastIndex := s.rank, len(s.rank.slots)-1
	r.kv -= r.running[s.pos].Tokens()
	if s.engineChoosesRank { // each rank of the engine was charged with an equal part of the KV
		r.unpinnedSlots--
		r.chargeOtherRanks(-r.kvPerOtherRank(&r.running[s.pos])) // takes their parts off the other ranks
	}
	if s.notDecoding {
		r.notDecodingSlots--
		r.notDecodingKV -= int64(s.prompt)
	}
	r.slots[s.pos], r.running[s.pos] = r.slots[lastIndex], r.running[lastIndex]
	if s.pos < lastIndex { // otherwise the removed request was the last one
		t.records[r.slots[s.pos]].pos = s.pos
	}
	r.slots, r.running = r.slots[:lastIndex], r.running[:lastIndex]
}

// drift checks the accounts of slots and KV tokens. What was charged in total, less what was released in total, must equal the sum over the
// slots in the table and the orphans. The same holds for the KV that engines keep of ended answers; kvTokens adds up both differences. Both
// results are 0 unless there is a bug. An orphan is a request that has given its slot back, but whose KV the engine may still hold.
func (b *board) drift() (slots, kvTokens int64) {
	var inUse tally
	var keptKV int64
	for _, r := range b.ranks {
		for _, o := range r.orphans { // its tokens count as released only once the engine has surely freed them (forgetOrphans)
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

// refreshLoad updates the tokens of the rank's requests, and the sums of them, by the Counts, which the owner of the board may send before
// an event. Without Counts, each request keeps the number of tokens that it had last. Requests that have begun since the last refresh then
// count as decoding, and no longer as waiting in the engine's queue.
//
// An engine may run an unpinned request on any of its ranks, so each of them is charged with an equal part of its KV. The other ranks have
// their parts in kvFromOtherRanks. When the KV of the request grows, so do these parts. Therefore the refresh of a rank with unpinned
// requests also changes the loads of the other ranks of its engine.
func (b *board) refreshLoad(r *rank) {
	kv := r.Others + r.kvFromOtherRanks // KV of requests without a slot here: of other proxies, and of unpinned ones on other ranks
	moreForEachOther := int64(0)        // KV tokens by which the charge to each other rank of the engine grows
	for i, slot := range r.slots {
		request := &r.running[i]
		if b.counts != nil {
			generated := b.generated(slot)
			request.Age += generated - request.Generated // Age also counts tokens that other ranks generated before
			request.Generated = generated
		}
		if r.unpinnedSlots > 0 && b.slots.records[slot].engineChoosesRank {
			moreForEachOther += r.divideKV(request) // from here on, request.Tokens() is only the part of this rank
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

// countQueued counts the requests that wait in the engine's queue. A request whose first event has come is not waiting there any more.
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

// refreshGroupLoads refreshes all stepping ranks of a group, and computes the sum of their KV tokens and their largest load in a step.
func (b *board) refreshGroupLoads(g *group) {
	g.kv, g.largestLoad = 0, 0
	for _, r := range g.steppingRanks {
		b.refreshLoad(r)
	}
	requestWeight := g.knownRequestWeight() // KV tokens that lengthen a step as much as one more request; 0: not known
	for _, r := range g.steppingRanks {     // in a second loop: the refresh of a rank may charge KV to other ranks (unpinned.go)
		g.kv += r.kv
		g.largestLoad = max(g.largestLoad, r.stepLoad(requestWeight))
	}
}
