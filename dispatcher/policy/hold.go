package policy

import (
	"cmp"
	"slices"
)

// heldBack holds entries back on ranks that only decode. A long prompt may make one rank much
// fuller than the others, and then every step is longer for every request. But requests end all the
// time, so a few steps later a rank may be empty enough to take it.
type heldBack struct {
	isHeld       []bool    // by index in the pool: held back by the last round; empty: none was
	count        int       // number of entries that the last round held back
	stepGrowthMs []float32 // by index in the pool: by how much the entry would have lengthened each step

	// The fields below are used while holdBack tries which ranks take the entries.
	order []int32 // indices in the pool, the longest prompt first
	loads []int64 // by rank: load in KV tokens, with the entries that it would take
	slots []int32 // by rank: slots that are free after these entries
}

// maxWaitingToHold bounds the work of holdBack: with more entries, it holds none back.
const maxWaitingToHold = 256

// holdCheckSteps is after how many step times held entries are looked at again if no step was
// reported.
const holdCheckSteps = 1.5

func (h *heldBack) reset() { h.isHeld, h.count = h.isHeld[:0], 0 }

// reason returns how many ms longer each step would have become if this entry had not been held
// back.
func (h *heldBack) reason(entry int) (stepGrowthMs float64, held bool) {
	if entry >= len(h.isHeld) || !h.isHeld[entry] {
		return 0, false
	}
	return float64(h.stepGrowthMs[entry]), true
}

// holdBack decides which entries wait for a later round. It tries the entries on the least loaded
// ranks, the longest prompt first. An entry is held back if it would make each step longer, and
// this costs more than its wait.
//
// Both costs are in ms that requests wait for a token. If a step becomes longer by x ms, each of
// the n running requests waits x ms longer in each step, as long as the rank stays the fullest,
// assumed to be p.set.holdSteps steps. If the entry is held back for one more step instead, only
// the entry waits. But an entry that has waited for w steps in vain will probably wait for about as
// many again, so its wait is counted as 1+w steps.
//
// If the others take all free slots, nothing is held back: the search then chooses among more
// entries than there are slots.
func (p *evenkeel) holdBack(s *Snapshot) {
	stepMs := p.stepMs(s)
	if !mayHoldBack(p, s, stepMs) {
		return
	}
	h := &p.heldBack
	// Only requests that decode wait longer if a step becomes longer.
	running := 0
	for g := range s.Workers {
		running += s.Workers[g].decoding()
	}
	h.prepare(s, p)
	peak := slices.Max(h.loads)
	for _, entry := range h.order {
		e := &s.Pool[entry]
		g := p.leastLoadedForHold(int64(e.Prompt))
		if g == none { // the entry finds no slot or no room, so it waits in any case
			continue
		}
		load := h.loads[g] + p.loads.scaled(g, int64(e.Prompt))
		stepGrowthMs := float64(s.C1Ms) * float64(max(0, load-peak))
		nextStepMs := float64(s.C0Ms) + float64(s.C1Ms)*float64(peak)   // length of a step without the entry
		othersLose := stepGrowthMs * p.set.holdSteps * float64(running) // ms of waits if the entry is placed now
		entryLoses := nextStepMs * (1 + float64(e.WaitMs)/stepMs)       // ms of waits if it is held back
		if mayWait(p, s, e) && othersLose > entryLoses {
			h.isHeld[entry] = true
			h.stepGrowthMs[entry] = float32(stepGrowthMs)
			h.count++
			continue
		}
		h.loads[g] = load
		h.slots[g]--
		peak = max(peak, load)
	}
	if others := int64(len(s.Pool) - h.count); p.ranks.openSlots <= others {
		h.reset()
	}
	if h.count > 0 {
		p.gather.nextDecisionMs = holdCheckSteps * stepMs
	}
}

func mayHoldBack(p *evenkeel, s *Snapshot, stepMs float64) bool {
	lengthKnown, prefilled := s.C1Ms > 0 && stepMs > 0, !s.Early
	return p.set.holdSteps != 0 && lengthKnown && prefilled && len(s.Pool) <= maxWaitingToHold
}

func mayWait(p *evenkeel, s *Snapshot, e *Entry) bool {
	return float64(e.WaitMs) < 1000*p.set.maxHoldS && !e.Express && !isOverdue(s, e)
}

// prepare leaves the values of stepGrowthMs undefined, because they are read only for entries that
// are held back.
func (h *heldBack) prepare(s *Snapshot, p *evenkeel) {
	h.isHeld, h.stepGrowthMs = sized(h.isHeld, len(s.Pool)), sized(h.stepGrowthMs, len(s.Pool))
	clear(h.isHeld)
	h.order = h.order[:0]
	for i := range s.Pool {
		h.order = append(h.order, int32(i))
	}
	slices.SortFunc(h.order, func(a, b int32) int {
		return cmp.Or(cmp.Compare(s.Pool[b].Prompt, s.Pool[a].Prompt), cmp.Compare(a, b))
	})
	h.loads = append(h.loads[:0], p.loads.initialLoadTokens...)
	h.slots = append(h.slots[:0], p.ranks.free...)
}

// leastLoadedForHold returns a rank with a free slot and room, or none. The loads and slots in
// p.heldBack count the entries that holdBack has placed so far on trial; the room does not.
func (p *evenkeel) leastLoadedForHold(tokens int64) int {
	h, best := &p.heldBack, none
	for _, rank := range p.ranks.hadSlots {
		g := int(rank)
		fits := h.slots[g] > 0 && tokens <= p.ranks.room[g]
		if fits && (best == none || h.loads[g] < h.loads[best]) {
			best = g
		}
	}
	return best
}
