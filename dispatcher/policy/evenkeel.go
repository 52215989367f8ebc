package policy

// evenkeel is the default policy. It places all entries of a round together, so as to minimize the cost: the sum over the ranks of the KV
// tokens by which each rank is below the fullest rank. In each step, these ranks wait for the fullest one.
type evenkeel struct {
	name string
	set  settings

	// The fields below hold the state of the current round.
	loads          loads
	ranks          ranks
	candidates     candidates
	start          starts
	search         search
	overdueEntries []wait

	wanted   int         // number of placements to make: the number of free slots or of entries, whichever is less
	placed   []placement // placements of this round, in the order in which they were made
	unplaced []int32     // indices of candidates that are not placed: overdue ones first, then the others, oldest first

	rows     rows     // used if the rank with most requests makes steps longer, see Snapshot.RowTokens
	tight    tight    // used if KV room is short
	gather   gather   // used if the ranks prefill
	heldBack heldBack // used if the ranks only decode
}

// placement puts a candidate on a rank. Both are indices: in candidates.all, and in Snapshot.Workers.
type placement struct{ candidate, rank int32 }

func newEvenkeel(name string, v *settings) Policy { return &evenkeel{name: name, set: *v} }

func (p *evenkeel) Name() string      { return p.name }
func (p *evenkeel) Immediate() bool   { return false }
func (p *evenkeel) MaxAgeMs() float32 { return float32(p.set.maxAgeMs) }

func (p *evenkeel) requirements(float64) Requirements { return Requirements{MeanOutput: true} }

// limits returns which slots and how much KV room the policy may fill, the rank that its last round reserved, and the entries that it held
// back: in gather on ranks that prefill, in heldBack on ranks that only decode.
func (p *evenkeel) limits() limits {
	return limits{
		watermark: p.set.watermark, sendsAhead: p.set.sendsAhead, reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor,
		gather: &p.gather, heldBack: &p.heldBack,
	}
}

// Decide places the entries of a round on ranks that only decode, as follows. It holds back entries
// that would make steps longer by more than they gain. It places the others, and improves the
// placements by a search. Rounds with scarce KV room, and ranks that also prefill, are decided in
// other ways.
func (p *evenkeel) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.gather.reset() // drops the last round's report of entries that were held back
	p.heldBack.reset()
	if !p.beginRound(s) { // no slot is free, or no entry waits
		return dst
	}
	if s.Aggregated { // ranks that also prefill have their own algorithm
		return p.decideAggregated(s, dst)
	}
	// If the KV room will be full before the slots are, present loads do not show which rank will then be the slowest. Therefore
	// entries are placed by the loads that full ranks will have. There is no search then that would tell which rank gets most requests.
	if meanPrompt, scarce := p.roomIsScarce(s); scarce {
		p.loads.build(s, requestTokensWithPadding(p, s))
		p.placeForFullRanks(s, meanPrompt)
		return p.appendAssignments(s, dst)
	}
	p.holdBack(s)
	arrange(p, s) // places the entries, and improves the placements by a search
	return p.appendAssignments(s, dst)
}

// beginRound drops the placements and the reservation of the last round, and computes the loads, slots and room of the ranks. If no rank
// has a free slot or no entry waits, it computes nothing and returns false.
func (p *evenkeel) beginRound(s *Snapshot) bool {
	p.placed = p.placed[:0]
	p.ranks.reserved, p.ranks.reservedFor = none, none
	anySlot := false
	for g := range s.Workers {
		anySlot = anySlot || s.Workers[g].Up && s.Workers[g].Free > 0
	}
	if !anySlot || len(s.Pool) == 0 { // there is nothing to decide
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

// requestTokens returns how many KV tokens each request counts for in a load, in addition to those that it holds, because a request itself
// makes a step longer; 0 if the setting requests is off.
func (p *evenkeel) requestTokens(s *Snapshot) int64 {
	if !p.set.countRequests {
		return 0
	}
	return s.RequestTokens
}

// requestTokensWithPadding returns requestTokens plus RowTokens, the cost of one more request on the rank with most requests: some engines
// pad the batches of all ranks to the largest batch. It is for rounds that cannot tell which rank will have most requests, so RowTokens
// counts on every rank. It returns 0 if the setting requests is off.
func requestTokensWithPadding(p *evenkeel, s *Snapshot) int64 {
	if !p.set.countRequests {
		return 0
	}
	return s.RequestTokens + s.RowTokens
}

// budget returns how many changes of placements the search may try in this round: the setting, or Snapshot.Budget if that is set (above 0)
// and less.
func (p *evenkeel) budget(s *Snapshot) int {
	if s.Budget > 0 {
		return min(int(s.Budget), p.set.budget)
	}
	return p.set.budget
}

// stepMs returns the mean step time in ms. If none was measured (StepMs 0), it is computed from the step model and the largest load; 0:
// neither is known.
func (p *evenkeel) stepMs(s *Snapshot) float64 {
	if noModel := s.C1Ms <= 0; s.StepMs > 0 || noModel {
		return float64(s.StepMs)
	}
	return float64(s.C0Ms) + float64(s.C1Ms)*float64(p.loads.fullest())
}

// placeOn places a candidate (an index in p.candidates.all) on rank g, takes a slot and KV room for it, and adds it to the rank's load.
func (p *evenkeel) placeOn(candidate int32, g int) {
	c := &p.candidates.all[candidate]
	p.ranks.charge(g, c.tokens)
	p.loads.changeLoad(g, p.candidates.loadOn(&p.loads, candidate, g))
	p.placed = append(p.placed, placement{candidate, int32(g)})
	c.placed = true
}

// appendAssignments appends the placements to dst as assignments. The score of an assignment is by how many KV tokens it lowers the cost
// (see tokensSaved), given all other placements.
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

// peakWithout returns the largest load that a rank would have without this placement.
func peakWithout(p *evenkeel, placed placement) int64 {
	g := int(placed.rank)
	loadWithout := p.loads.load[g] - p.candidates.loadOn(&p.loads, placed.candidate, g)
	return max(p.loads.without(g).largest, loadWithout)
}
