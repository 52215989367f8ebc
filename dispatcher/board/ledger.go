package board

import (
	"time"

	"evenkeel/dispatcher/policy"
)

// charge is a request's place on a rank, from its admission until its release.
type charge struct {
	rank        *rank // nil: the index is free
	pos         int   // in rank.slots and rank.running
	id, key     uint64
	prefiller   string
	prompt, age int32
	newTokens   int32 // of the prompt that the rank has to compute
	discard     bool
	strays      bool // its engine runs it on any of its ranks: its KV stands on all of them
	started     bool // its first event has come, as was told last
	waits       bool // in the engine's queue, beyond the rank's slots or KV room
	since       time.Time
	bound       uint32        // number of the step that was told last before it
	early       bool          // it was bound before its prefill
	first       time.Time     // predicted, of its first token; zero: it has come, or nobody knows
	lead        time.Duration // until then, as predicted at the bind; 0: nobody knew
}

// ledger is every charge by its dense index, and what was charged and
// released in all. The two are kept apart so that the program can check one
// against the other while it runs.
type ledger struct {
	table    []charge
	unused   []int32 // free indices, the last is taken first
	charged  tally
	released tally
}

// tally counts slots and the KV tokens they were admitted with.
type tally struct{ slots, kvTokens int64 }

func (t *tally) add(c *charge) {
	t.slots++
	t.kvTokens += int64(c.prompt)
}

// charge books c on r until discharge, and returns its index.
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
	if !c.first.IsZero() {
		r.early++
		r.later += int64(c.prompt)
		q.Start = 1
	}
	return slot
}

// recount corrects the prompt that a slot is charged with.
func (b *board) recount(slot, prompt int32) {
	c := &b.ledger.table[slot]
	b.ledger.charged.kvTokens += int64(prompt - c.prompt)
	q := &c.rank.running[c.pos]
	was := q.Tokens()
	if !c.first.IsZero() {
		c.rank.later += int64(prompt - c.prompt)
	}
	c.prompt, q.Prompt = prompt, prompt
	if c.strays {
		c.rank.lend(c.rank.share(q))
	}
	c.rank.kv += q.Tokens() - was
}

func (b *board) discharge(slot int32) {
	l := &b.ledger
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
	if !c.first.IsZero() {
		r.early--
		r.later -= int64(c.prompt)
	}
	r.slots[c.pos], r.running[c.pos] = r.slots[last], r.running[last]
	if c.pos < last {
		l.table[r.slots[c.pos]].pos = c.pos
	}
	r.slots, r.running = r.slots[:last], r.running[:last]
}

// drift is what the totals say is charged less what the table holds, and what
// orphans have: zero, or the bookkeeping is wrong.
func (b *board) drift() (slots, kvTokens int64) {
	var held tally
	for _, r := range b.ranks {
		for _, o := range r.orphans {
			held.kvTokens += o.tokens
		}
	}
	l := &b.ledger
	for i := range l.table {
		if l.table[i].rank != nil {
			held.add(&l.table[i])
		}
	}
	return l.charged.slots - l.released.slots - held.slots, l.charged.kvTokens - l.released.kvTokens - held.kvTokens
}
