package board

import (
	"evenkeel/dispatcher/policy"
)

// charge adds a request (c) to those of rank r, and returns the index of its slot in the table. The slot is taken until discharge.
func (b *board) charge(r *rank, c charge) (slot int32) {
	l := &b.ledger
	c.rank, c.pos = r, len(r.slots)
	if r.group != nil {
		c.bound = r.group.last.Number
	}
	if n := len(l.unused); n > 0 {
		slot = l.unused[n-1]
		l.unused = l.unused[:n-1]
		l.table[slot] = c
	} else {
		slot = int32(len(l.table))
		l.table = append(l.table, c)
	}
	l.charged.add(&c)
	r.slots = append(r.slots, slot)
	r.running = append(r.running, policy.Request{Prompt: c.prompt, Age: c.age, Key: c.key, ID: c.id, Slot: slot})
	request := &r.running[c.pos]
	if c.strays {
		r.strays++
		r.lend(r.share(request))
	}
	r.kv += request.Tokens()
	if c.unread {
		r.unreadSlots++
		r.unreadKV += int64(c.prompt)
	}
	return slot
}

// recount corrects the prompt length that a slot is charged with, and all sums that it is part of. The length was an estimate when the
// slot was bound; prompt is the number of tokens that an engine has counted.
func (b *board) recount(slot, prompt int32) {
	c := &b.ledger.table[slot]
	r, longer := c.rank, prompt-c.prompt // longer is below 0 if the prompt is shorter than was assumed
	b.ledger.charged.kvTokens += int64(longer)
	request := &r.running[c.pos]
	before := request.Tokens()
	if c.unread {
		r.unreadKV += int64(longer)
	}
	if r.Mixed { // the rank computes the prompt itself, so the number of tokens that it has to compute changes, too
		if c.unread { // else the answer has begun, so no token of the prompt is left to compute
			left := max(0, c.promptLeft+longer)
			r.backlog += int64(left - c.promptLeft)
			c.promptLeft = left
		}
		c.newTokens = max(1, c.newTokens+longer)
	}
	c.prompt, request.Prompt = prompt, prompt
	if c.strays { // each other rank of the engine is charged with a part of the difference
		r.lend(r.share(request))
	}
	r.kv += request.Tokens() - before // Tokens leaves out the parts of the other ranks
}

// discharge takes the request of a slot off its rank, and frees the slot. In the lists of the rank, the last request moves to the index
// that the request had, so that the lists have no gaps.
func (b *board) discharge(slot int32) {
	l := &b.ledger
	b.dropPrompt(l.table[slot].rank, slot)
	c := l.table[slot]
	l.table[slot] = charge{}
	l.unused = append(l.unused, slot)
	l.released.add(&c)
	r, last := c.rank, len(c.rank.slots)-1
	r.kv -= r.running[c.pos].Tokens()
	if c.strays {
		r.strays--
		r.lend(-r.each(&r.running[c.pos]))
	}
	if c.unread {
		r.unreadSlots--
		r.unreadKV -= int64(c.prompt)
	}
	r.slots[c.pos], r.running[c.pos] = r.slots[last], r.running[last]
	if c.pos < last {
		l.table[r.slots[c.pos]].pos = c.pos
	}
	r.slots, r.running = r.slots[:last], r.running[:last]
}

// drift checks the accounts. The total that was charged less the total that was released must equal the sum over the charges in the table
// and the orphans, and the same holds for the KV that engines keep of answers. Any result but zero is a bug.
func (b *board) drift() (slots, kvTokens int64) {
	var held tally
	var kept int64
	for _, r := range b.ranks {
		for _, o := range r.orphans {
			held.kvTokens += o.tokens
		}
		kept += r.kept.Sum()
	}
	l := &b.ledger
	for i := range l.table {
		if l.table[i].rank != nil {
			held.add(&l.table[i])
		}
	}
	return l.charged.slots - l.released.slots - held.slots,
		l.charged.kvTokens - l.released.kvTokens - held.kvTokens + l.kept - l.givenUp - kept
}

// refresh updates the rank's requests and loads by the Counts. Without Counts, each request keeps the number of tokens that it had last.
func (b *board) refresh(r *rank) {
	kv, lent := r.Others+r.guests, int64(0)
	for i, slot := range r.slots {
		request := &r.running[i]
		if b.counts != nil {
			generated := b.generated(slot)
			request.Age += generated - request.Generated
			request.Generated = generated
		}
		if r.strays > 0 && b.ledger.table[slot].strays {
			lent += r.share(request)
		}
		kv += request.Tokens()
	}
	r.kv = kv
	r.lend(lent)
	if r.Early || r.unreadSlots > 0 {
		b.seeStarts(r)
	}
	if r.queued == 0 {
		return
	}
	r.queued = 0
	for _, slot := range r.slots {
		if c := &b.ledger.table[slot]; c.waits && b.started(slot) {
			c.waits = false
		} else if c.waits {
			r.queued++
		}
	}
}

// refreshGroup refreshes the ranks of a group, and sums up their KV tokens and finds the largest load in a step.
func (b *board) refreshGroup(g *group) {
	g.kv, g.largestLoad = 0, 0
	for _, r := range g.ranks {
		b.refresh(r)
	}
	weight := g.knownWeight()
	for _, r := range g.ranks {
		g.kv += r.kv
		g.largestLoad = max(g.largestLoad, r.stepLoad(weight))
	}
}
