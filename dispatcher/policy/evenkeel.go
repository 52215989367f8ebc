package policy

import "math"

// evenkeel places all entries of a round together, against the cost itself: the
// tokens all ranks lack to the fullest one.
type evenkeel struct {
	name string
	set  settings

	// Of the round.
	loads loads
	ranks ranks
	pick  candidates
	start starts
	climb climb
	late  []wait

	wanted int         // placements: as many as there are slots and entries
	placed []placement // in the order of placement
	spare  []int32     // candidates not placed, oldest first after the overdue ones

	rows   rows   // where requests count whatever their KV
	tight  tight  // where KV room is short
	gather gather // where ranks prefill
	near   residents
}

// placement is a candidate on a rank.
type placement struct{ who, rank int32 }

func newEvenkeel(name string, v *settings) Policy { return &evenkeel{name: name, set: *v} }

func (p *evenkeel) Name() string      { return p.name }
func (p *evenkeel) Immediate() bool   { return false }
func (p *evenkeel) MaxAgeMs() float32 { return float32(p.set.maxAgeMs) }

func (p *evenkeel) needs(float64) Needs {
	return Needs{MeanOutput: true, Hits: p.set.near > 0}
}

func (p *evenkeel) limits() limits {
	return limits{
		watermark: p.set.watermark, ahead: p.set.ahead, reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor, gather: &p.gather,
	}
}

// Decide places the entries, improves that, and puts prompts on ranks that hold them where that costs nothing.
func (p *evenkeel) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.gather.begin()
	if !p.measure(s) {
		return dst
	}
	if s.Mixed {
		return p.inRounds(s, dst)
	}
	if mean, short := p.shortOfRoom(s); short {
		p.loads.build(s, p.requestTokens(s, true))
		p.placeTight(s, mean)
		return p.bind(s, dst)
	}
	arrange(p, s)
	p.stayNear(s)
	return p.bind(s, dst)
}

// measure takes the loads; it reports whether there is anything to decide.
func (p *evenkeel) measure(s *Snapshot) bool {
	p.placed = p.placed[:0]
	p.ranks.reserved, p.ranks.reservedFor = none, none
	open := false
	for g := range s.Workers {
		open = open || s.Workers[g].Up && s.Workers[g].Free > 0
	}
	if !open || len(s.Pool) == 0 {
		return false
	}
	p.loads.build(s, p.requestTokens(s, s.Mixed))
	p.ranks.load(s, p.loads.held, p.set.watermark, 0)
	return true
}

// requestTokens is what a request counts as in a load. Where the rank with most requests is not looked at by itself, all of it
// counts there.
func (p *evenkeel) requestTokens(s *Snapshot, all bool) int64 {
	switch {
	case !p.set.requests:
		return 0
	case all:
		return s.RequestTokens + s.RowTokens
	}
	return s.RequestTokens
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
	return float64(s.C0Ms) + float64(s.C1Ms)*float64(p.loads.fullest())
}

// add places candidate who on rank g.
func (p *evenkeel) add(who int32, g int) {
	c := &p.pick.all[who]
	p.ranks.charge(g, c.tokens)
	p.loads.shift(g, p.pick.on(&p.loads, who, g))
	p.placed = append(p.placed, placement{who, int32(g)})
	c.placed = true
}

// bind writes the placements. The score is how many tokens of cost an entry
// saves where it is.
func (p *evenkeel) bind(s *Snapshot, dst []Assignment) []Assignment {
	group := int64(len(s.Workers))
	for _, a := range p.placed {
		c := &p.pick.all[a.who]
		g := int(a.rank)
		rest := p.loads.without(g)
		without := max(rest.most, p.loads.x[g]-p.pick.on(&p.loads, a.who, g))
		stage := stageSubset
		if c.late {
			stage = stageGuard
		}
		dst = append(dst, Assignment{
			Entry: s.Pool[c.entry].ID, Worker: s.Workers[g].ID, Stage: stage,
			Score: math.Ldexp(float64(c.load-group*(p.loads.peak()-without)), -fixedBits),
		})
	}
	return dst
}
