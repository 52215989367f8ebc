package policy

import (
	"fmt"
	"math"
)

// Unplaced is an entry that the round left without a rank, with the reason in words.
type Unplaced struct {
	Entry uint64 `json:"entry"`
	Why   string `json:"why"`
}

// limits are the slots and the KV room that a policy may fill, and what its last round kept free or
// held back.
type limits struct {
	watermark             float64   // share of a rank's KV capacity that is kept empty
	extraSlots            int32     // entries that a rank may get beyond its free slots
	sendsAhead            bool      // the policy may fill slots that are not free yet, but probably will be when the KV has been copied
	reserved, reservedFor int       // the reserved rank, and the overdue entry for which it is kept free; or none
	gather                *gather   // entries held back to be sent together; nil: never
	heldBack              *heldBack // entries held back because they would make each step much longer; nil: never
}

type limited interface{ limits() limits }

func (p *greedy) limits() limits {
	return limits{watermark: p.watermark, sendsAhead: p.sendsAhead, reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor}
}

func (p *firstCome) limits() limits {
	return limits{
		watermark: p.watermark, sendsAhead: p.sendsAhead, extraSlots: p.extraSlots,
		reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor,
	}
}

// Watermark returns the share of a rank's KV capacity that the policy keeps empty, 0 to 1.
func Watermark(p Policy) float64 {
	if l, ok := p.(limited); ok {
		return l.limits().watermark
	}
	return 0
}

// SendsAhead says whether the policy may fill a slot that is not free yet, but probably will be
// when the request's KV has been copied to the rank.
func SendsAhead(p Policy) bool {
	l, ok := p.(limited)
	return ok && l.limits().sendsAhead
}

// Explain runs one round, and gives the reason for every entry that was not placed. It derives the
// reasons from the snapshot and the result, so that Decide spends no time on them.
func Explain(p Policy, s *Snapshot) ([]Assignment, []Unplaced) {
	assigned := p.Decide(s, nil)
	if len(assigned) == len(s.Pool) {
		return assigned, nil
	}
	lim := limits{reserved: none, reservedFor: none} // for a policy without limits
	if withLimits, ok := p.(limited); ok {
		lim = withLimits.limits()
	}
	after := s.ranksAfter(assigned)
	placed := make(map[uint64]bool, len(assigned))
	for _, a := range assigned {
		placed[a.Entry] = true
	}
	var unplaced []Unplaced
	for i := range s.Pool {
		if e := &s.Pool[i]; !placed[e.ID] {
			unplaced = append(unplaced, Unplaced{e.ID, lim.reasonFor(s, after, i)})
		}
	}
	return assigned, unplaced
}

type rankLoad struct {
	free int32
	held int64
}

// ranksAfter returns, by worker ID, what each rank has when the assignments are bound.
func (s *Snapshot) ranksAfter(assigned []Assignment) map[int32]rankLoad {
	ranks := make(map[int32]rankLoad, len(s.Workers))
	for g := range s.Workers {
		w := &s.Workers[g]
		ranks[w.ID] = rankLoad{w.Free, w.KVTokens()}
	}
	prompt := make(map[uint64]int64, len(s.Pool))
	for i := range s.Pool {
		prompt[s.Pool[i].ID] = int64(s.Pool[i].Prompt)
	}
	for _, a := range assigned {
		r := ranks[a.Worker]
		ranks[a.Worker] = rankLoad{r.free - 1, r.held + prompt[a.Entry]}
	}
	return ranks
}

// reasonFor returns the first reason that applies: what was held back on purpose, then what no
// round could change, then what the round has left.
func (l limits) reasonFor(s *Snapshot, after map[int32]rankLoad, entry int) string {
	if reason := l.holdReason(entry); reason != "" {
		return reason
	}
	tokens := int64(s.Pool[entry].Prompt)
	remaining := l.leftoverFor(s, after, tokens)
	switch {
	case !remaining.anyUp:
		return "no rank is up"
	case !remaining.fitsIdleRank:
		return fmt.Sprintf("larger than the KV budget of every rank: %d tokens", tokens)
	case entry == l.reservedFor:
		return fmt.Sprintf("overdue, but fits no rank with a free slot; worker %d is reserved for it", s.Workers[l.reserved].ID)
	case !remaining.anySlotBefore:
		return "no free slot"
	case remaining.fitsReserved: // without the reservation, the entry could have been placed
		return fmt.Sprintf("worker %d is reserved for an overdue entry, %d", s.Workers[l.reserved].ID, s.Pool[l.reservedFor].ID)
	case !remaining.anySlotAfter: // at most the reserved rank has one
		return "no free slot left"
	default:
		return fmt.Sprintf("fits no rank's room: %d tokens, the largest room beside a free slot is %d", tokens, remaining.largestRoom)
	}
}

func (l limits) holdReason(entry int) string {
	if l.gather != nil && l.gather.isHeld(int32(entry)) { // held so that several entries are sent together
		return fmt.Sprintf("held for a round: it goes in %.3g ms, or sooner with others", l.gather.nextDecisionMs)
	}
	if l.heldBack != nil { // held because the entry would make one rank much fuller than the others
		if stepGrowthMs, held := l.heldBack.reason(entry); held {
			return fmt.Sprintf("held back: each step would become %.3g ms longer", stepGrowthMs)
		}
	}
	return ""
}

// leftover is what reasonFor must know of the ranks that are up. A rank that may get more entries
// than its free slots (extraSlots) counts as having a slot.
type leftover struct {
	anyUp         bool
	fitsIdleRank  bool  // the entry would fit some rank if that rank were idle
	anySlotBefore bool  // some rank had a slot before the round
	anySlotAfter  bool  // some rank that is not reserved has a slot after it
	largestRoom   int64 // largest KV room of these ranks, in tokens
	fitsReserved  bool  // the reserved rank could take the entry
}

func (l limits) leftoverFor(s *Snapshot, after map[int32]rankLoad, tokens int64) leftover {
	remaining := leftover{largestRoom: math.MinInt64}
	for g := range s.Workers {
		w := &s.Workers[g]
		if !w.Up {
			continue
		}
		remaining.anyUp = true
		budget := KVBudget(w.Capacity, l.watermark)
		remaining.fitsIdleRank = remaining.fitsIdleRank || tokens <= budget
		remaining.anySlotBefore = remaining.anySlotBefore || w.Free+l.extraSlots > 0
		rankAfter := after[w.ID]
		if rankAfter.free+l.extraSlots <= 0 { // room on a rank without a slot is of no use
			continue
		}
		room := budget
		if w.Capacity != 0 { // otherwise the budget is unlimited
			room -= rankAfter.held
		}
		if g == l.reserved {
			remaining.fitsReserved = tokens <= room
			continue
		}
		remaining.anySlotAfter = true
		remaining.largestRoom = max(remaining.largestRoom, room)
	}
	return remaining
}
