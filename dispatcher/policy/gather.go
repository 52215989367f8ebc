package policy

import (
	"math"
	"slices"

	"evenkeel/dispatcher/rounds"
)

// gather is the part of the evenkeel policy for ranks that prefill and decode. When one rank
// computes a prompt, the decodes of all ranks wait. Therefore requests are held back for a short
// time and sent together, so that fewer steps are slow.
type gather struct {
	planner        rounds.Planner
	group          rounds.Group
	waiting        []rounds.Candidate
	poolIndex      []int32 // index in the pool of each element of waiting
	hits           []rounds.Hit
	firstSendable  []uint64 // IDs of entries, see HoldReport.First
	nextDecisionMs float64  // see HoldReport.NextMs
}

// HoldReport tells about the entries that the last round held back. For ranks that only decode,
// First, Released and HeldS are not set.
type HoldReport struct {
	NextMs   float64  // ms after which the policy wants to decide again even if nothing happens; +Inf: never
	First    []uint64 // IDs of entries that could have been sent for the first time
	Released bool     // held requests were sent together; false: at most requests that are urgent or lengthen no step were sent
	HeldS    float64  // seconds since the first of the entries that are held now could have been sent
	MaxHoldS float64  // longest time for which an entry is held; 0: no entry is ever held
}

// HoldReportOf returns NextMs +Inf, and nothing else, for a policy that never holds entries back.
func HoldReportOf(p Policy) HoldReport {
	e, ok := p.(*evenkeel)
	if !ok {
		return HoldReport{NextMs: math.Inf(1)}
	}
	return HoldReport{
		NextMs: e.gather.nextDecisionMs, First: e.gather.firstSendable, Released: e.gather.planner.Released(),
		HeldS: e.gather.planner.HeldFor(), MaxHoldS: e.set.maxHoldS,
	}
}

func (r *gather) reset() {
	r.firstSendable, r.nextDecisionMs = r.firstSendable[:0], math.Inf(1)
	r.planner.Forget()
}

// isHeld says whether the last round held an entry back although a slot was free for it. It must be
// asked only about entries that the round did not send.
func (r *gather) isHeld(entry int32) bool {
	at := slices.Index(r.poolIndex, entry)
	isCandidate := at >= 0
	// Since is in s, and the time of the snapshot is 0; NaN (no slot was free for it yet) is not <= 0.
	slotWasFree := isCandidate && r.waiting[at].Since <= 0
	return slotWasFree && r.planner.Held() > 0
}

// decideAggregated lets the planner choose which entries are sent now. It prefers ranks with a
// small backlog, so the score of an assignment is the backlog that its rank had before the round.
func (p *evenkeel) decideAggregated(s *Snapshot, dst []Assignment) []Assignment {
	gather := &p.gather
	p.fillGroup(s)
	p.reserveForOverdue(s)
	openSlots := int(p.ranks.openSlots)
	gather.fillCandidates(s, openSlots+openSlots/2) // half as many again as there are free slots, so that the planner has a choice
	const now = 0                                   // the planner's times are in s, from the time of the snapshot
	rule := rounds.Rule{Patience: p.set.patience, MaxHold: p.set.maxHoldS}
	picks, next := gather.planner.Decide(now, &gather.group, gather.waiting, rule)
	gather.nextDecisionMs = next * 1000
	gather.noteFirstSendable(s, now)
	for _, pick := range picks {
		e := &s.Pool[gather.poolIndex[pick.Candidate]]
		stage := stageSubset
		if gather.waiting[pick.Candidate].Urgent {
			stage = stageGuard
		}
		backlog := gather.group.Ranks[pick.Rank].Backlog
		dst = append(dst, Assignment{Entry: e.ID, Worker: s.Workers[pick.Rank].ID, Score: float64(backlog), Stage: stage})
	}
	return dst
}

func (r *gather) noteFirstSendable(s *Snapshot, now float64) {
	for i := range r.waiting {
		at := r.poolIndex[i]
		sendableBefore := s.Waits[at].HeldMs >= 0
		sendableSinceNow := r.waiting[i].Since == now // the planner sets Since when it first finds a rank
		if sendableSinceNow && !sendableBefore {
			r.firstSendable = append(r.firstSendable, s.Pool[at].ID)
		}
	}
}

// reserveForOverdue reserves a rank for the first overdue entry that no rank has room for, and
// shows the planner no slots on it.
func (p *evenkeel) reserveForOverdue(s *Snapshot) {
	for i := range s.Pool {
		if !isOverdue(s, &s.Pool[i]) {
			continue
		}
		fits := false
		for _, rank := range p.gather.group.Ranks {
			fits = fits || rank.Slots > 0 && int64(s.Pool[i].Prompt) <= rank.Room
		}
		if !fits {
			p.ranks.reserveOnce(s, i)
			if p.ranks.reserved != none { // none: no rank is up
				p.gather.group.Ranks[p.ranks.reserved].Slots = 0
			}
			return // at most one rank is reserved per round
		}
	}
}

// fillGroup fills in what the planner knows about the group. p.ranks must have the free slots and
// rooms already.
func (p *evenkeel) fillGroup(s *Snapshot) {
	group := &p.gather.group
	*group = rounds.Group{
		Ranks: sized(group.Ranks, len(s.Workers)), Own: float64(s.OwnPromptMs) / 1000, Request: float64(p.loads.requestWeight),
		NotStarted: float64(s.NotStarted), Rate: float64(s.PromptRate),
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		decoding := w.decoding()
		load := float64(p.loads.initialLoadTokens[i])
		rank := rounds.Rank{Slots: int(p.ranks.free[i]), Room: p.ranks.room[i], Backlog: w.Backlog, Load: load}
		if decoding > 0 { // room for one mean answer, because running answers grow until one of them ends
			rank.Room -= int64(s.MeanOutput)
		}
		group.Ranks[i] = rank
		group.Decoding += decoding
		group.Slots += len(w.Running) + max(0, int(w.Free))
	}
}

// fillCandidates fills in the oldest requests, at most limit, and all urgent requests.
func (r *gather) fillCandidates(s *Snapshot, limit int) {
	noSlotYet, noLimit := math.NaN(), math.Inf(1) // values of Since and Until, as the planner reads them
	r.waiting, r.poolIndex, r.hits = r.waiting[:0], r.poolIndex[:0], r.hits[:0]
	room := int64(math.MinInt64) // largest KV room of a rank with a free slot
	for _, rank := range r.group.Ranks {
		if rank.Slots > 0 {
			room = max(room, rank.Room)
		}
	}
	for i := range s.Pool {
		e, d := &s.Pool[i], &s.Waits[i]
		if int64(e.Prompt) > room { // no rank has room; as a candidate it could keep a slot free that a younger request can use
			continue
		}
		c := rounds.Candidate{Prompt: e.Prompt, Since: noSlotYet, Until: noLimit, Urgent: e.Express || isOverdue(s, e)}
		if !c.Urgent { // urgent requests do not count towards the limit
			if limit == 0 {
				continue
			}
			limit--
		}
		// The planner's time 0 is the time of the snapshot.
		if d.HeldMs >= 0 {
			c.Since = -d.HeldMs / 1000
		}
		if d.UrgentInMs > 0 {
			c.Until = d.UrgentInMs / 1000
		}
		from := len(r.hits)
		for _, h := range d.Hits {
			if g, ok := s.index(h.Worker); ok { // not ok: the rank is not in the snapshot
				r.hits = append(r.hits, rounds.Hit{Rank: int32(g), Tokens: int32(min(max(0, h.Tokens), int(e.Prompt)))})
			}
		}
		c.Hits = r.hits[from:len(r.hits):len(r.hits)] // capped, so that it cannot grow into the hits of the next candidate
		r.waiting, r.poolIndex = append(r.waiting, c), append(r.poolIndex, int32(i))
	}
}
