package board

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher/step"
)

// LeastStep is the shortest time that counts as a step while the steps of a group are not known yet.
const LeastStep = time.Millisecond

// watchHeld sets heldUntil to the earliest time at which a policy wants to look at entries again that it holds back.
func (b *board) watchHeld() {
	for _, g := range b.groups {
		if b.pool.Len() == 0 {
			g.held = 0 // the entries that the last decision held back have left the pool
		}
		if g.held > 0 && !g.wakeHeld.IsZero() && (b.heldUntil.IsZero() || g.wakeHeld.Before(b.heldUntil)) {
			b.heldUntil = g.wakeHeld
		}
	}
}

// stepMs returns how long a step of the group takes, in ms; 0: not known.
func (g *group) stepMs() float32 {
	m, _, _ := g.steps.Model()
	return g.steps.Ms(m, g.largestLoad)
}

// takeSteps takes in new steps of a group, and teaches the step model what the ranks did in the step before.
//
// The board learns which requests a step computed only when the next step is reported: the requests that had got their first token by the
// end of the step, and had not got their last token before it. The charged requests differ from these. A request that was just bound may
// still wait in the engine's queue, and a request that got its last token in the step is still charged when the step is reported.
func (b *board) takeSteps(g *group, reported []Step) {
	if len(reported) == 0 {
		return
	}
	b.refreshGroup(g)
	before := g.tokensAtStep
	g.tokensAtStep = g.generated()
	for _, s := range reported {
		follows := g.last.Number != 0 && s.Number == g.last.Number+1
		if follows && len(reported) == 1 { // else the token counts are sums over several steps
			if requests, sure := b.inStep(g); sure {
				g.steps.Teach(step.Sample{
					Ranks: g.stepRanks, Tokens: float64(g.tokensAtStep-before) / float64(max(1, requests)), Length: g.last.Length})
			}
		}
		g.last = s
		if b.mixed {
			g.recent.add(b.awaiting(g), b.compute(g, s.Number), s.Length)
		}
		g.steps.Add(s.Length)
	}
	for _, r := range g.ranks {
		r.forget(g.last.Number)
	}
	b.emit(Effect{Kind: EffectLeastStep, Group: b.key(g), Duration: max(LeastStep, g.steps.Least())})
	b.stepped = b.stepped || g.held > 0
}

// generated returns how many tokens all requests of the group have got so far.
func (g *group) generated() int64 {
	sum := g.departedTokens
	for _, r := range g.ranks {
		for i := range r.running {
			sum += int64(r.running[i].Generated)
		}
	}
	return sum
}

// inStep writes to g.stepRanks what each rank of the group did in the last step, scaled by the rank's Cost. It returns how many requests
// got a token in this step. sure is false if the board cannot tell how many prompt tokens the step computed.
func (b *board) inStep(g *group) (requests int, sure bool) {
	g.stepRanks, sure = g.stepRanks[:0], true
	for _, r := range g.ranks {
		kv, decodes, prompt := r.Others+r.guests, 0, int64(0)
		addRequest := func(first uint32, tokens int64) {
			requests++
			if !r.Mixed || first != g.last.Number { // else the step computed the request's prompt, and did not decode the request
				kv += tokens
				decodes++
			}
		}
		for i, slot := range r.slots {
			joined := cmp.Or(b.counts.step(slot), b.slots.records[slot].estimated.first)
			if joined != 0 && !laterStep(joined, g.last.Number) { // the request had its first token by the end of the step
				addRequest(joined, r.running[i].Tokens())
			}
			if r.Mixed {
				n, known := b.slots.records[slot].computedIn(g.last.Number, joined)
				prompt, sure = prompt+n, sure && known
			}
		}
		for _, d := range r.departed {
			if begun, over := !laterStep(d.first, g.last.Number), laterStep(g.last.Number, d.last); begun && !over {
				addRequest(d.first, d.kv)
			}
			if d.first == g.last.Number {
				prompt += d.prompt
			}
		}
		g.stepRanks = append(g.stepRanks, step.Rank{
			Requests: float64(decodes) * r.slowness(), KV: float64(r.weigh(kv)),
			Prompt: float64(min(prompt, int64(r.StepBudget()))) * r.slowness(),
		})
	}
	return requests, sure
}

// laterStep says whether step number x is later than y. Numbers begin anew after the largest uint32.
func laterStep(x, y uint32) bool { return int32(x-y) > 0 }

// depart remembers a request that is about to be released, because the step model still needs it for steps that are not complete. It also
// teaches lag or lead how long the request had no token. The list of remembered requests (departed) never grows beyond its capacity, which
// has room for the rank's slots: the tick must not allocate. If more requests leave in one step, the list is cleared, because the model can
// learn little from such a step.
func (b *board) depart(slot, generated int32, first, last uint32) {
	if first == 0 {
		return // it was in no step
	}
	s := &b.slots.records[slot]
	if g := s.rank.group; g != nil {
		g.departedTokens += int64(generated)
		if s.early {
			g.lead.ended(s.bound, first, last)
		} else {
			g.lag.ended(s.bound, first, last)
		}
	}
	r, kv := s.rank, int64(s.prompt)+int64(generated)
	if s.strays { // only this rank's part counts; in this one step, the parts of the other ranks are missing
		kv /= r.parts
	}
	if len(r.departed) == cap(r.departed) {
		r.departed = r.departed[:0]
	}
	prompt := int64(0)
	if r.Mixed {
		prompt, _ = s.computedIn(first, first)
	}
	r.departed = append(r.departed, departed{first: first, last: last, kv: kv, prompt: prompt})
}

// forget drops the departed requests that got their last token before the step with this number.
func (r *rank) forget(number uint32) {
	remaining := r.departed[:0]
	for _, d := range r.departed {
		if !laterStep(number, d.last) {
			remaining = append(remaining, d)
		}
	}
	r.departed = remaining
}

// rest ends the current step of a group if none of its requests decodes any more: the next step then follows no other, so its length is not
// known.
func (b *board) rest(g *group) {
	if !g.barrier || len(g.members) == 0 { // the group has no common steps, or has left the board
		return
	}
	for _, r := range g.ranks {
		if r.unreadSlots > 0 {
			b.seeStarts(r)
		}
		if len(r.slots) > r.unreadSlots {
			return
		}
	}
	b.emit(Effect{Kind: EffectGroupIdle, Group: b.key(g)})
	g.last = Step{}
	for _, r := range g.ranks {
		r.departed = r.departed[:0]
	}
}

// decoding returns the KV tokens that the rank's steps read. Those of requests that have not begun to decode are left out.
func (r *rank) decoding() int64 { return r.kv - r.unreadKV }

// stepLoad returns the load of the rank in the group's steps, in KV tokens: the tokens that its steps read plus weight tokens for each
// request that decodes, times the rank's Cost.
func (r *rank) stepLoad(weight int64) int64 {
	return r.weigh(r.decoding() + weight*int64(len(r.slots)-r.unreadSlots))
}

// weigh multiplies KV tokens by what a KV token costs on the rank.
func (r *rank) weigh(kv int64) int64 {
	if r.Cost == 0 || r.Cost == 1 {
		return kv
	}
	return int64(float64(kv) * float64(r.Cost))
}

// slowness returns what a KV token costs on the rank, 1 = the group's mean.
func (r *rank) slowness() float64 { return float64(cmp.Or(r.Cost, 1)) }

// requestWeight returns how many KV tokens lengthen a step as much as one request does. The number may be an assumption.
func (g *group) requestWeight() int64 { return int64(math.Round(g.steps.Weight())) }

// knownWeight returns requestWeight as far as it was measured or configured, without assumptions. The status and the estimates of a step's
// length use it.
func (g *group) knownWeight() int64 { return int64(math.Round(g.steps.Known())) }

// ownMs returns how many ms a prompt token adds to a step on the rank that computes it: step.UsualOwnMs while neither the steps nor the
// config give the number.
func (g *group) ownMs(m *step.Model) float64 {
	if g.lawWeights != nil {
		return m.OwnMs
	}
	return cmp.Or(m.OwnMs, step.UsualOwnMs)
}

// weights returns how many KV tokens policies count for a request, beside its own: on its rank, and on the rank with most requests.
func (g *group) weights() step.RequestCost {
	if g.lawWeights != nil {
		return *g.lawWeights
	}
	return step.Halves(g.steps.Weight())
}
