package board

import (
	"evenkeel/dispatcher/policy"
)

// charge adds c to the requests of r until discharge, and returns its index in the table.
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
	q := &r.running[c.pos]
	if c.strays {
		r.strays++
		r.lend(r.share(q))
	}
	r.kv += q.Tokens()
	if c.unread {
		r.early++
		r.later += int64(c.prompt)
	}
	return slot
}

// recount corrects the prompt that a slot is charged with.
func (b *board) recount(slot, prompt int32) {
	c := &b.ledger.table[slot]
	b.ledger.charged.kvTokens += int64(prompt - c.prompt)
	q := &c.rank.running[c.pos]
	was := q.Tokens()
	if c.unread {
		c.rank.later += int64(prompt - c.prompt)
		if c.rank.Mixed {
			left := max(0, c.left+prompt-c.prompt)
			c.rank.backlog += int64(left - c.left)
			c.left = left
		}
	}
	if c.rank.Mixed {
		c.newTokens = max(1, c.newTokens+prompt-c.prompt)
	}
	c.prompt, q.Prompt = prompt, prompt
	if c.strays {
		c.rank.lend(c.rank.share(q))
	}
	c.rank.kv += q.Tokens() - was
}

func (b *board) discharge(slot int32) {
	l := &b.ledger
	b.finish(l.table[slot].rank, slot)
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
		r.early--
		r.later -= int64(c.prompt)
	}
	r.slots[c.pos], r.running[c.pos] = r.slots[last], r.running[last]
	if c.pos < last {
		l.table[r.slots[c.pos]].pos = c.pos
	}
	r.slots, r.running = r.slots[:last], r.running[:last]
}

// drift compares the totals with the single accounts: what was charged less what was released must be what the
// table and the orphans hold, and likewise for the KV that engines keep. Any result but zero is a bug.
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

// refresh updates the rank's requests and loads from the Counts. Without Counts, the tokens that were counted last stand.
func (b *board) refresh(r *rank) {
	kv, lent := r.Others+r.guests, int64(0)
	for i, slot := range r.slots {
		q := &r.running[i]
		if b.counts != nil {
			generated := b.generated(slot)
			q.Age += generated - q.Generated
			q.Generated = generated
		}
		if r.strays > 0 && b.ledger.table[slot].strays {
			lent += r.share(q)
		}
		kv += q.Tokens()
	}
	r.kv = kv
	r.lend(lent)
	if r.Early || r.early > 0 {
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

func (b *board) refreshGroup(g *group) {
	g.kv, g.most = 0, 0
	for _, r := range g.ranks {
		b.refresh(r)
	}
	request := g.known()
	for _, r := range g.ranks {
		g.kv += r.kv
		g.most = max(g.most, r.cost(request))
	}
}
