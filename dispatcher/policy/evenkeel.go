package policy

import (
	"errors"
	"math"
)

// evenkeel places all entries of a round together, against the cost itself: the
// tokens all ranks lack to the fullest one, now and at a grid of steps ahead,
// over sampled ends of every request.
type evenkeel struct {
	name string
	set  settings

	// Of the round.
	look  lookahead
	cols  columns
	ranks ranks
	pick  candidates
	start starts
	climb climb
	late  []wait

	wanted int         // placements: as many as there are slots and entries
	placed []placement // in the order of placement
	spare  []int32     // candidates not placed, oldest first after the overdue ones

	hold  []Placed
	loads []int64 // at a step of the grid, see loadsAt
	held  []heldBack
}

// placement is a candidate on a rank.
type placement struct{ who, rank int32 }

// heldBack is an entry that waits for a better moment.
type heldBack struct {
	entry         int32   // index in the pool
	adds, worthMs float64 // ms of every step
}

// fewEvaluations is the tick budget below which looking ahead costs more than
// it can bring.
const fewEvaluations = 500

func newEvenkeel(name string, v *settings) Policy { return &evenkeel{name: name, set: *v} }

func checkEvenkeel(v *settings) error {
	switch v.predictor {
	case "oracle":
		return errors.New("want survival, exact or none; who knows the end has mode=oracle")
	case "exact": // with mode=now it does nothing, of which Notes tells
		if v.mode != modeSampled && v.mode != modeNow {
			return errors.New("predictor=exact needs mode=sampled")
		}
	}
	return nil
}

func (p *evenkeel) Name() string      { return p.name }
func (p *evenkeel) Immediate() bool   { return false }
func (p *evenkeel) MaxAgeMs() float32 { return float32(p.set.maxAgeMs) }

func (p *evenkeel) needs(Outlook) Needs {
	n := Needs{StepModel: true, Holds: p.set.hold > 0}
	switch {
	case p.set.mode == modeOracle:
		n.Outlook = "oracle"
	case p.set.predictor != "none":
		n.Outlook = p.set.predictor
	}
	return n
}

func (p *evenkeel) limits() limits {
	return limits{
		watermark: p.set.watermark, ahead: p.set.ahead, reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor, held: p.held,
	}
}

// Decide places, improves, and holds back what is better placed later.
func (p *evenkeel) Decide(s *Snapshot, dst []Assignment) []Assignment {
	if !p.measure(s) {
		return dst
	}
	p.place(s)
	p.improve(p.budget(s))
	p.fillUp(s)
	p.holdBack(s)
	return p.bind(s, dst)
}

// measure builds the columns; it reports whether there is anything to decide.
func (p *evenkeel) measure(s *Snapshot) bool {
	p.held, p.placed = p.held[:0], p.placed[:0]
	p.ranks.reserved, p.ranks.reservedFor = none, none
	open := false
	for g := range s.Workers {
		open = open || s.Workers[g].Up && s.Workers[g].Free > 0
	}
	if !open || len(s.Pool) == 0 {
		return false
	}
	p.look.resolve(&p.set, s)
	p.cols.build(s, &p.look)
	p.ranks.load(s, p.cols.held, p.set.watermark, 0)
	return true
}

func (p *evenkeel) budget(s *Snapshot) int {
	if s.Budget > 0 {
		return min(int(s.Budget), p.set.budget)
	}
	return p.set.budget
}

// stepMs is the mean step, by the model of the group where nobody measured it;
// 0 = unknown.
func (p *evenkeel) stepMs(s *Snapshot) float64 {
	if s.StepMs > 0 || s.C1Ms <= 0 {
		return float64(s.StepMs)
	}
	return float64(s.C0Ms) + float64(s.C1Ms)*float64(p.cols.fullest())
}

// add places candidate who on rank g.
func (p *evenkeel) add(who int32, g int) {
	c := &p.pick.all[who]
	in, sum := p.pick.on(&p.cols, who, g, p.pick.buffer(0))
	p.ranks.charge(g, c.tokens)
	p.cols.shift(g, in, p.pick.nothing, sum)
	p.placed = append(p.placed, placement{who, int32(g)})
	c.placed = true
}

// holdBack drops entries that would lengthen every step by more than their use. Each is weighed
// at the step of the grid that is nearest to its start.
func (p *evenkeel) holdBack(s *Snapshot) {
	rule := HoldRule{C0Ms: float64(s.C0Ms), C1Ms: float64(s.C1Ms), Share: p.set.hold, Steps: p.set.holdSteps}
	if rule.Share == 0 || rule.C1Ms <= 0 {
		return
	}
	for g := range s.Workers {
		for i := range s.Workers[g].Running {
			if s.Workers[g].Running[i].Generated > 0 {
				rule.Running++
			}
		}
	}
	step := p.stepMs(s)
	for at, left := 0, len(p.placed); left > 0; at++ {
		p.hold = p.hold[:0]
		for _, a := range p.placed {
			e := &s.Pool[p.pick.all[a.who].entry]
			if p.look.nearest(e.Start) != at {
				continue
			}
			h := Placed{Rank: int(a.rank), Tokens: p.cols.scaled(int(a.rank), int64(e.Prompt)), Overdue: isOverdue(s, e)}
			if step > 0 {
				h.WaitedSteps = float64(e.WaitMs) / step
			}
			p.hold = append(p.hold, h)
		}
		if left -= len(p.hold); len(p.hold) > 0 && rule.Apply(p.loadsAt(s, at), p.hold) > 0 {
			p.dropHeld(s, at)
		}
	}
}

// loadsAt are the loads of all ranks at a step of the grid, without the entries that are weighed there. What starts
// at once is weighed against what decodes now.
func (p *evenkeel) loadsAt(s *Snapshot, at int) []int64 {
	if at == 0 {
		return p.cols.now
	}
	n := len(p.look.steps)
	weight := p.look.weight[at] * int64(p.look.scenarios)
	p.loads = sized(p.loads, p.cols.ranks)
	for g := range p.loads {
		p.loads[g] = 0
		for c := at; c < p.cols.n; c += n {
			p.loads[g] += p.cols.row(g)[c]
		}
	}
	for _, a := range p.placed {
		if p.look.nearest(s.Pool[p.pick.all[a.who].entry].Start) == at {
			own, _ := p.pick.on(&p.cols, a.who, int(a.rank), p.pick.buffer(0))
			for c := at; c < p.cols.n; c += n {
				p.loads[a.rank] -= own[c]
			}
		}
	}
	for g := range p.loads {
		p.loads[g] /= weight
	}
	return p.loads
}

// dropHeld takes the placements back that are held, of those that were weighed at a step of the grid.
func (p *evenkeel) dropHeld(s *Snapshot, at int) {
	kept, weighed := p.placed[:0], 0
	for _, a := range p.placed {
		entry := p.pick.all[a.who].entry
		if p.look.nearest(s.Pool[entry].Start) != at {
			kept = append(kept, a)
			continue
		}
		h := &p.hold[weighed]
		weighed++
		if !h.Held {
			kept = append(kept, a)
			continue
		}
		p.held = append(p.held, heldBack{entry, h.AddsMs, h.WorthMs})
		out, sum := p.pick.on(&p.cols, a.who, int(a.rank), p.pick.buffer(0))
		p.cols.shift(int(a.rank), p.pick.nothing, out, -sum)
	}
	p.placed = kept
}

// bind writes the placements. The score is how many tokens of cost an entry
// saves where it is.
func (p *evenkeel) bind(s *Snapshot, dst []Assignment) []Assignment {
	group := int64(len(s.Workers))
	for _, a := range p.placed {
		c := &p.pick.all[a.who]
		g := int(a.rank)
		u, _ := p.pick.on(&p.cols, a.who, g, p.pick.buffer(0))
		without := p.cols.peakWithout(g, u)
		stage := stageSubset
		if c.late {
			stage = stageGuard
		}
		dst = append(dst, Assignment{
			Entry: s.Pool[c.entry].ID, Worker: s.Workers[g].ID, Stage: stage,
			Score: math.Ldexp(float64(c.sum-group*(p.cols.peak-without)), -fixedBits),
		})
	}
	return dst
}
