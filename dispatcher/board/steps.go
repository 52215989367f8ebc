package board

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher/step"
)

// LeastStep is the shortest step of an engine we believe in at first.
const LeastStep = time.Millisecond

// watchHeld has a tick when a policy that holds entries for a round wants to look at them again.
func (b *board) watchHeld() {
	for _, g := range b.groups {
		if b.pool.Len() == 0 {
			g.held = 0
		}
		if g.held > 0 && !g.wake.IsZero() && (b.heldUntil.IsZero() || g.wake.Before(b.heldUntil)) {
			b.heldUntil = g.wake
		}
	}
}

// stepMs is how long a step of the group takes, 0 where nobody knows.
func (g *group) stepMs() float32 {
	m, _, _ := g.steps.Model()
	return g.steps.Ms(m, g.most)
}

// hear takes in the steps of a group that its streams told of. Which requests a
// step was made for is known when the next one is told: those that had got their
// first token by its end, and had not got their last one before. What is charged
// is another matter: a request that was just bound is still on its way into the
// engine or waits in its queue, and one that got its last token is still charged
// when the first stream speaks.
func (b *board) hear(g *group, told []Step) {
	if len(told) == 0 {
		return
	}
	b.refreshGroup(g)
	before := g.tokens
	g.tokens = g.generated()
	for _, s := range told {
		if g.last.Number != 0 && s.Number == g.last.Number+1 && len(told) == 1 { // else nobody looked in between
			if requests, sure := b.inStep(g); sure {
				g.steps.Teach(step.Sample{Ranks: g.had, Tokens: float64(g.tokens-before) / float64(max(1, requests)), Length: g.last.Length})
			}
		}
		g.last = s
		if b.mixed {
			g.lately.add(b.awaiting(g), b.compute(g, s.Number), s.Length)
		}
		g.steps.Add(s.Length)
	}
	for _, r := range g.ranks {
		r.forget(g.last.Number)
	}
	b.emit(Effect{Kind: EffectLeastStep, Group: b.key(g), Lasts: max(LeastStep, g.steps.Least())})
	b.stepped = b.stepped || g.held > 0
}

// generated is how many tokens the requests of the group have got so far.
func (g *group) generated() int64 {
	sum := g.gone
	for _, r := range g.ranks {
		for i := range r.running {
			sum += int64(r.running[i].Generated)
		}
	}
	return sum
}

// inStep writes what each rank of the group had in its last step, by what it cost, and counts the requests that
// all ranks had in it. It is not sure where prompts were computed when nobody expected that.
func (b *board) inStep(g *group) (requests int, sure bool) {
	g.had, sure = g.had[:0], true
	for _, r := range g.ranks {
		kv, decode, prompt := r.Others+r.guests, 0, int64(0)
		had := func(first uint32, tokens int64) {
			requests++
			if !r.Mixed || first != g.last.Number { // else its prompt was computed in the step
				kv += tokens
				decode++
			}
		}
		for i, slot := range r.slots {
			joined := cmp.Or(b.counts.step(slot), b.ledger.table[slot].unheard.first)
			if joined != 0 && !later(joined, g.last.Number) {
				had(joined, r.running[i].Tokens())
			}
			if r.Mixed {
				n, known := b.ledger.table[slot].computedIn(g.last.Number, joined)
				prompt, sure = prompt+n, sure && known
			}
		}
		for _, d := range r.left {
			if !later(d.first, g.last.Number) && !later(g.last.Number, d.last) {
				had(d.first, d.kv)
			}
			if d.first == g.last.Number {
				prompt += d.prompt
			}
		}
		g.had = append(g.had, step.Rank{
			Requests: float64(decode) * r.slowness(), KV: float64(r.weigh(kv)), Prompt: float64(min(prompt, int64(r.StepBudget()))) * r.slowness(),
		})
	}
	return requests, sure
}

// later compares numbers of steps, which begin anew after the largest.
func later(x, y uint32) bool { return int32(x-y) > 0 }

// depart remembers a request that is about to be released for the step that is not
// known whole yet. It keeps to the room that the rank's slots needed: if more leave
// in one step, the step teaches little.
func (b *board) depart(slot, generated int32, first, last uint32) {
	if first == 0 {
		return // it was in no step
	}
	c := &b.ledger.table[slot]
	if g := c.rank.group; g != nil {
		g.gone += int64(generated)
		if c.early {
			g.lead.Ended(c.bound, first, last)
		} else {
			g.lag.Ended(c.bound, first, last)
		}
	}
	r, kv := c.rank, int64(c.prompt)+int64(generated)
	if c.strays { // what the other ranks had of it is left out of the one step
		kv /= r.parts
	}
	if len(r.left) == cap(r.left) {
		r.left = r.left[:0]
	}
	prompt := int64(0)
	if r.Mixed {
		prompt, _ = c.computedIn(first, first)
	}
	r.left = append(r.left, departed{first: first, last: last, kv: kv, prompt: prompt})
}

// forget drops the departed that were in no step from this one on.
func (r *rank) forget(number uint32) {
	kept := r.left[:0]
	for _, d := range r.left {
		if !later(number, d.last) {
			kept = append(kept, d)
		}
	}
	r.left = kept
}

// rest ends the step under way when nothing of the group runs any more.
func (b *board) rest(g *group) {
	if !g.barrier || len(g.members) == 0 {
		return
	}
	for _, r := range g.ranks {
		if r.early > 0 {
			b.seeStarts(r)
		}
		if len(r.slots) > r.early {
			return
		}
	}
	b.emit(Effect{Kind: EffectRest, Group: b.key(g)})
	g.last = Step{}
	for _, r := range g.ranks {
		r.left = r.left[:0]
	}
}

// decoding are the KV tokens that the rank's steps read: not those that only have their room.
func (r *rank) decoding() int64 { return r.kv - r.later }

// cost is what the rank decodes as its group's barrier feels it: KV tokens, and so many for each
// request, more on a rank that is slower than the others.
func (r *rank) cost(request int64) int64 {
	return r.weigh(r.decoding() + request*int64(len(r.slots)-r.early))
}

func (r *rank) weigh(kv int64) int64 {
	if r.Cost == 0 || r.Cost == 1 {
		return kv
	}
	return int64(float64(kv) * float64(r.Cost))
}

// slowness is what a KV token costs on the rank, 1 = the group's mean.
func (r *rank) slowness() float64 { return float64(cmp.Or(r.Cost, 1)) }

// request is how many KV tokens a request weighs as much as in the group's steps.
func (g *group) request() int64 { return int64(math.Round(g.steps.Weight())) }

// known is the same for what is said of steps, which is not made of what is only assumed.
func (g *group) known() int64 { return int64(math.Round(g.steps.Known())) }

// ownMs is what a token of a prompt takes its own rank: what is usual, until steps or the config tell.
func (g *group) ownMs(m *step.Model) float64 {
	if g.told != nil {
		return m.OwnMs
	}
	return cmp.Or(m.OwnMs, step.UsualOwnMs)
}

// weights are by what policies decide.
func (g *group) weights() step.Weights {
	if g.told != nil {
		return *g.told
	}
	return step.Halves(g.steps.Weight())
}
