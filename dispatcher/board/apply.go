package board

import (
	"slices"
	"time"
)

func (e Enqueue) apply(b *Boards) {
	b.enqueue(entrant{entry: e.Entry, local: e.Local, trace: e.Trace, output: e.Output, hits: e.Hits})
}

func (e Withdraw) apply(b *Boards) { b.withdraw(e.Entry) }

func (e *Release) apply(b *Boards) {
	m := b.boards[e.Model]
	m.ledger.table[e.Slot].unheard.most = e.Unheard
	generated, first, last := e.Generated, e.First, e.Last
	if c := &m.ledger.table[e.Slot]; c.unheard.first != 0 && c.rank.group != nil {
		generated, first, last = int32(c.unheard.tokens), c.unheard.first, c.rank.group.last.Number
	}
	m.depart(e.Slot, generated, first, last)
	m.release(e.Slot, e.Outcome, e.Generated, e.Started, b.now)
}

func (e Recount) apply(b *Boards) { b.boards[e.Model].recount(e.Slot, tokens(e.Prompt)) }

func (e Rerouted) apply(b *Boards) { b.boards[e.Model].rerouted(e.Slot, e.Prefiller, b.now) }

func (e Reached) apply(b *Boards) {
	m := b.boards[e.Model]
	c := &m.ledger.table[e.Slot]
	m.took(c)
	if c.prefiller != "" {
		m.reached(c.pair(), b.now)
	}
}

func (e *Steps) apply(b *Boards) {
	if m, g := b.group(e.Group); g != nil {
		m.hear(g, e.List)
	}
}

func (e Law) apply(b *Boards) {
	if _, g := b.group(e.Group); g != nil {
		g.steps.Law, g.told = e.StepModel, &e.Weights
	}
}

func (e SetWorkers) apply(b *Boards) { b.setWorkers(e.Workers) }

func (e Preempted) apply(b *Boards) { b.preempted(e.Worker) }

func (e Learned) apply(b *Boards) { b.subjects[e.Subject].Tables = e.Tables }

func (e SetPolicy) apply(b *Boards) { b.reject(b.setPolicy(e.Spec)) }

func (e SetFit) apply(b *Boards) { b.setFit(e.Fit) }

func (s Settings) apply(b *Boards) { b.reject(b.configure(s)) }

func (e *Counts) apply(b *Boards) {
	if m := b.boards[e.Model]; m != nil {
		m.counts = e
		m.listen(b.now)
	}
}

func (e *Tick) apply(b *Boards) {
	m := b.boards[e.Model]
	if m == nil {
		return
	}
	m.advance(b.now)
	if m.empty() {
		b.remove(m)
		b.emit(Effect{Kind: EffectGone, Group: GroupKey{Model: e.Model}})
	}
}

func (Decide) apply(b *Boards) {
	if b.round = b.decides(); b.round != nil {
		b.round.decide(b.now)
	}
}

func (e *Decided) apply(b *Boards) {
	if m := b.round; m != nil {
		b.round = nil
		m.decided(e.Took, b.now)
	}
}

func (Shutdown) apply(b *Boards) {
	b.draining = true
	b.answerAll(ErrDraining)
}

// reject emits an effect for an event whose settings cannot work.
func (b *Boards) reject(err error) {
	if err != nil {
		b.emit(Effect{Kind: EffectRejected, Err: err})
	}
}

// Keeps says whether the engine of a rank may keep KV for requests that have ended.
func (l *Boards) Keeps(worker int32) bool {
	return slices.ContainsFunc(l.inOrder, func(b *board) bool {
		r := b.ranks[worker]
		return r != nil && (len(r.orphans) > 0 || r.kept.Tokens() > 0)
	})
}

func (e Gauged) apply(l *Boards) {
	if l.now.Sub(e.At) > gaugeLife {
		return
	}
	for _, b := range l.inOrder {
		if r := b.ranks[e.Worker]; r != nil && len(r.orphans) > 0 {
			b.gauged(r, e)
		} else if r != nil && r.kept.Tokens() > 0 {
			b.gaugedKept(r, e)
		}
	}
}

// Apply changes the boards by one event and returns what must be done now. The effects are
// valid until the next Apply. While Deciding returns true, the next two events must be
// Decide and then Decided.
func (l *Boards) Apply(e Event, now time.Time) []Effect {
	clear(l.effects) // so that they keep no entries alive
	l.effects, l.now = l.effects[:0], now
	e.apply(l)
	if _, told := e.(*Counts); !told {
		l.forgetCounts()
	}
	return l.effects
}

// Looks says whether a Tick now would look at what the ranks of a model hold. If so, the caller
// applies Counts before it.
func (l *Boards) Looks(model string, now time.Time) bool {
	b := l.boards[model]
	return b != nil && b.looks(now)
}

// decides returns the first board that has a round to decide; nil: no board has.
func (l *Boards) decides() *board {
	for _, b := range l.inOrder {
		if b.deciding() {
			return b
		}
	}
	return nil
}

// Deciding says whether any board has a round to decide.
func (l *Boards) Deciding() bool { return l.decides() != nil }

// forgetCounts drops the Counts of boards that have no round to decide: Counts hold for one event and for
// the rounds that follow from it.
func (l *Boards) forgetCounts() {
	for _, b := range l.inOrder {
		if b != l.round && !b.deciding() {
			b.counts = nil
		}
	}
}
