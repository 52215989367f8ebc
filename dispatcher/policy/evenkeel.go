package policy

import "math"

// evenkeel places all entries of a round together. It minimizes the cost itself: the sum over the
// ranks of the KV tokens by which each is below the fullest rank.
type evenkeel struct {
	name string
	set  settings

	// Values of the current round.
	loads      loads
	ranks      ranks
	candidates candidates
	start      starts
	climb      climb
	late       []wait

	wanted   int         // number of placements wanted: that of the free slots, or of the entries if that is less
	placed   []placement // in the order of placement
	unplaced []int32     // candidates that are not placed: the overdue ones, then the others by age

	rows   rows      // used where the rank with most requests makes steps longer, see Snapshot.RowTokens
	tight  tight     // used where KV room is short
	gather gather    // used where ranks prefill
	byRank residents // used by stayNear
}

// placement puts a candidate on a rank. Both are indices: in candidates.all, and in Snapshot.Workers.
type placement struct{ candidate, rank int32 }

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

// Decide places the entries, improves the placements by a search, and then moves entries to ranks that hold a part of their prompts if
// that costs next to nothing.
func (p *evenkeel) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.gather.reset()
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

// measure computes the loads of the ranks. It returns false if no rank has a free slot or no entry waits.
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

// requestTokens returns what a request counts as in a load, in KV tokens. all adds RowTokens: for rounds that do not look at the
// rank with most requests by itself.
func (p *evenkeel) requestTokens(s *Snapshot, all bool) int64 {
	switch {
	case !p.set.requests:
		return 0
	case all:
		return s.RequestTokens + s.RowTokens
	}
	return s.RequestTokens
}

// budget returns how many evaluations the search of this round may spend: the setting, or less if the board says so.
func (p *evenkeel) budget(s *Snapshot) int {
	if s.Budget > 0 {
		return min(int(s.Budget), p.set.budget)
	}
	return p.set.budget
}

// stepMs returns the mean step time in ms, from the step model if it was not measured;
// 0: unknown.
func (p *evenkeel) stepMs(s *Snapshot) float64 {
	if s.StepMs > 0 || s.C1Ms <= 0 {
		return float64(s.StepMs)
	}
	return float64(s.C0Ms) + float64(s.C1Ms)*float64(p.loads.fullest())
}

// add places candidate who (an index) on rank g.
func (p *evenkeel) add(who int32, g int) {
	c := &p.candidates.all[who]
	p.ranks.charge(g, c.tokens)
	p.loads.shift(g, p.candidates.loadOn(&p.loads, who, g))
	p.placed = append(p.placed, placement{who, int32(g)})
	c.placed = true
}

// bind appends the placements to dst as assignments. The score of an assignment is by how many KV tokens its placement lowers the cost (see
// Cost). The largest load counts once for each rank in the cost, so the score is the entry's own load, less the product of the number of
// ranks and the rise of the largest load.
func (p *evenkeel) bind(s *Snapshot, dst []Assignment) []Assignment {
	rankCount := int64(len(s.Workers))
	for _, a := range p.placed {
		c := &p.candidates.all[a.candidate]
		g := int(a.rank)
		others := p.loads.without(g)
		peakWithout := max(others.largest, p.loads.load[g]-p.candidates.loadOn(&p.loads, a.candidate, g))
		stage := stageSubset
		if c.overdue {
			stage = stageGuard
		}
		saved := c.load - rankCount*(p.loads.peak()-peakWithout) // in units of 2^-fixedBits tokens
		dst = append(dst, Assignment{
			Entry: s.Pool[c.entry].ID, Worker: s.Workers[g].ID, Stage: stage, Score: math.Ldexp(float64(saved), -fixedBits),
		})
	}
	return dst
}
