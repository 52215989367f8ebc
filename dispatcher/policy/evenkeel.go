package policy

// evenkeel is the default policy. It places all entries of a round together, so as to minimize the
// cost: the sum over the ranks of the KV tokens by which each is below the fullest rank, for which
// it waits in each step.
type evenkeel struct {
	name string
	set  settings

	// The state of the current round.
	loads          loads
	ranks          ranks
	candidates     candidates
	start          starts
	search         search
	overdueEntries []wait

	wanted   int         // placements to make: free slots or entries, whichever is less
	placed   []placement // placements of this round, in the order in which they were made
	unplaced []int32     // candidates that are not placed: overdue ones first, then the others, oldest first

	rows     rows     // used if the rank with most requests makes steps longer, see Snapshot.RowTokens
	tight    tight    // used if KV room is short
	gather   gather   // used if the ranks prefill
	heldBack heldBack // used if the ranks only decode
}

// placement puts a candidate on a rank. Both are indices: in candidates.all, and in
// Snapshot.Workers.
type placement struct{ candidate, rank int32 }

func newEvenkeel(name string, v *settings) Policy { return &evenkeel{name: name, set: *v} }

func (p *evenkeel) Name() string      { return p.name }
func (p *evenkeel) Immediate() bool   { return false }
func (p *evenkeel) MaxAgeMs() float32 { return float32(p.set.maxAgeMs) }

func (p *evenkeel) requirements(float64) Requirements { return Requirements{MeanOutput: true} }

func (p *evenkeel) limits() limits {
	return limits{
		watermark: p.set.watermark, sendsAhead: p.set.sendsAhead, reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor,
		gather: &p.gather, heldBack: &p.heldBack,
	}
}

func (p *evenkeel) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.gather.reset()
	p.heldBack.reset()
	if !p.beginRound(s) {
		return dst
	}
	if s.Aggregated {
		return p.decideAggregated(s, dst)
	}
	// If the KV room will be full before the slots are, present loads do not show which rank will then
	// be the slowest. There is no search then that would tell which rank gets most requests.
	if meanPrompt, scarce := p.roomIsScarce(s); scarce {
		p.loads.build(s, requestTokensWithPadding(p, s))
		p.placeForFullRanks(s, meanPrompt)
		return p.appendAssignments(s, dst)
	}
	p.holdBack(s)
	arrange(p, s)
	return p.appendAssignments(s, dst)
}

// beginRound returns false if no rank has a free slot or no entry waits.
func (p *evenkeel) beginRound(s *Snapshot) bool {
	p.placed = p.placed[:0]
	p.ranks.reserved, p.ranks.reservedFor = none, none
	anySlot := false
	for g := range s.Workers {
		anySlot = anySlot || s.Workers[g].Up && s.Workers[g].Free > 0
	}
	if !anySlot || len(s.Pool) == 0 {
		return false
	}
	requestTokens := p.requestTokens(s) // without RowTokens, which arrange counts for the rank with most requests
	if s.Aggregated {                   // arrange does not run for ranks that also prefill
		requestTokens = requestTokensWithPadding(p, s)
	}
	p.loads.build(s, requestTokens)
	p.ranks.load(s, p.loads.heldTokens, p.set.watermark, noExtraSlots)
	return true
}

// requestTokens returns how many KV tokens each request counts for, because it lengthens a step.
func (p *evenkeel) requestTokens(s *Snapshot) int64 {
	if !p.set.countRequests {
		return 0
	}
	return s.RequestTokens
}

// requestTokensWithPadding is for rounds that cannot tell which rank will have most requests, so
// RowTokens counts on every rank.
func requestTokensWithPadding(p *evenkeel, s *Snapshot) int64 {
	if !p.set.countRequests {
		return 0
	}
	return s.RequestTokens + s.RowTokens
}

func (p *evenkeel) budget(s *Snapshot) int {
	if s.Budget > 0 {
		return min(int(s.Budget), p.set.budget)
	}
	return p.set.budget
}

// If no step was measured, stepMs is computed from the step model and the largest load; 0: unknown.
func (p *evenkeel) stepMs(s *Snapshot) float64 {
	if noModel := s.C1Ms <= 0; s.StepMs > 0 || noModel {
		return float64(s.StepMs)
	}
	return float64(s.C0Ms) + float64(s.C1Ms)*float64(p.loads.fullest())
}

func (p *evenkeel) placeOn(candidate int32, g int) {
	c := &p.candidates.all[candidate]
	p.ranks.charge(g, c.tokens)
	p.loads.changeLoad(g, p.candidates.loadOn(&p.loads, candidate, g))
	p.placed = append(p.placed, placement{candidate, int32(g)})
	c.placed = true
}

// appendAssignments appends the placements. The score of each is by how many KV tokens it lowers
// the cost, given all other placements.
func (p *evenkeel) appendAssignments(s *Snapshot, dst []Assignment) []Assignment {
	for _, placed := range p.placed {
		c := &p.candidates.all[placed.candidate]
		stage := stageSubset
		if c.overdue {
			stage = stageGuard
		}
		dst = append(dst, Assignment{
			Entry: s.Pool[c.entry].ID, Worker: s.Workers[placed.rank].ID, Stage: stage,
			Score: p.loads.tokensSaved(c.load, p.loads.peak(), peakWithout(p, placed)),
		})
	}
	return dst
}

// peakWithout returns the peak without this placement.
func peakWithout(p *evenkeel, placed placement) int64 {
	g := int(placed.rank)
	loadWithout := p.loads.load[g] - p.candidates.loadOn(&p.loads, placed.candidate, g)
	return max(p.loads.without(g).largest, loadWithout)
}
