package dispatcher

import "evenkeel/dispatcher/policy"

// ledger is every charged slot by its dense index, and what was charged and
// released in all. The two are kept apart so that the program can check one
// against the other while it runs.
type ledger struct {
	table    []*Slot // nil where the index is free
	unused   []int32 // free indices, the last is taken first
	charged  tally
	released tally
}

// tally counts slots and the KV tokens they were admitted with.
type tally struct{ slots, kvTokens int64 }

func (t *tally) add(s *Slot) {
	t.slots++
	t.kvTokens += int64(s.prompt)
}

// charge books s on r until discharge.
func (b *board) charge(r *rank, s *Slot) {
	l := &b.ledger
	if n := len(l.unused); n > 0 {
		s.index = l.unused[n-1]
		l.unused = l.unused[:n-1]
		l.table[s.index] = s
	} else {
		s.index = int32(len(l.table))
		l.table = append(l.table, s)
	}
	l.charged.add(s)
	s.rank, s.pos = r, len(r.slots)
	s.pulse, s.pairs = r.group.pulse, b.pairs
	r.slots = append(r.slots, s)
	r.running = append(r.running, policy.Request{Prompt: s.prompt, Age: s.age, Key: s.key, ID: s.id, Slot: s.index})
	r.kv += int64(s.prompt)
}

// recount corrects the prompt that a slot is charged with.
func (b *board) recount(s *Slot, prompt int32) {
	if b.ledger.table[s.index] != s {
		return // given back
	}
	b.ledger.charged.kvTokens += int64(prompt - s.prompt)
	s.rank.kv += int64(prompt - s.prompt)
	s.prompt, s.rank.running[s.pos].Prompt = prompt, prompt
}

func (b *board) discharge(s *Slot) {
	l := &b.ledger
	l.table[s.index] = nil
	l.unused = append(l.unused, s.index)
	l.released.add(s)
	r, last := s.rank, len(s.rank.slots)-1
	r.kv -= int64(s.prompt) + int64(r.running[s.pos].Generated)
	r.slots[s.pos], r.running[s.pos] = r.slots[last], r.running[last]
	r.slots[s.pos].pos = s.pos
	r.slots[last] = nil
	r.slots, r.running = r.slots[:last], r.running[:last]
}

// drift is what the totals say is charged less what the table holds: zero,
// or the bookkeeping is wrong.
func (l *ledger) drift() (slots, kvTokens int64) {
	var held tally
	for _, s := range l.table {
		if s != nil {
			held.add(s)
		}
	}
	return l.charged.slots - l.released.slots - held.slots, l.charged.kvTokens - l.released.kvTokens - held.kvTokens
}
