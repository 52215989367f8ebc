// Package rounds decides which waiting requests are sent now to a group of ranks that prefill and decode, and to which rank each of them
// goes. While one rank computes a prompt, the decodes of all ranks wait. Therefore requests are held back for a short time and then sent
// together, in a round, so that several ranks compute prompts in the same steps. The package reads no clock: times are seconds that the
// caller gives.
package rounds

import (
	"math"
	"slices"
)

// Rank describes one rank of the group that is up.
type Rank struct {
	Slots   int   // free slots of the rank
	Room    int64 // free KV room for prompts, in KV tokens
	Backlog int64 // prompt tokens that the rank has yet to compute
	// Load is the cost of the decodes on the rank, as the number of KV tokens that would make a step longer by the same time.
	Load float64
}

// Hit says that a rank has the first Tokens tokens of a prompt in its prefix cache. Rank is an index in Group.Ranks.
type Hit struct {
	Rank   int32
	Tokens int32
}

// Candidate is a waiting request, which Decide may send now or hold back.
type Candidate struct {
	Prompt int32 // length of the prompt, in tokens
	Hits   []Hit // which ranks have a part of the prompt in their prefix caches; at most one Hit for each rank
	// Since is the time at which a rank first had a slot and KV room for the request, in s; NaN: no rank had both yet. Decide sets it.
	Since float64
	// Until is the time by which the request must be sent so that its answer comes in time, in s; +Inf: no limit.
	Until  float64
	Urgent bool // the request is sent before all that are not urgent, and never held back
}

// Group describes the ranks, and what the caller has measured on them in the last minute.
type Group struct {
	Ranks    []Rank
	Decoding int // number of requests on the ranks that decode
	// NotStarted is the mean number of requests that waited for their first token in the last minute, without those that were held
	// back; below 0: not known.
	NotStarted float64
	// Rate is the number of prompt tokens that all ranks together computed per second, in the last minute; below 0: not known.
	Rate  float64
	Slots int // slots of all ranks, free or not
	// Own is the time in s that one prompt token adds to a step of its rank; 0: not known, so no request is held back.
	Own float64
	// Request is the cost of one more request, as the number of KV tokens that would make a step longer by the same time.
	Request float64
}

// Rule says how long requests may be held back so that they can be sent together.
type Rule struct {
	// Patience is by how many percent the time to first token may rise for each percent by which the time per token falls.
	Patience float64
	MaxHold  float64 // longest time for which a request is held back, in s
}

// Default is the rule that gave the best results on randomly drawn loads.
var Default = Rule{Patience: 2.5, MaxHold: 5}

// mostShare bounds how long requests are held back. Sending them together saves each running decode some time. The sum of the holds is at
// most this share of the sum of these savings. If less than half of the slots decode, the bound is lower in proportion.
const mostShare = 0.25

// Pick says that a candidate is sent to a rank: an index in the list of candidates, and one in Group.Ranks.
type Pick struct{ Candidate, Rank int32 }

// backlogClass is the width of a class of backlogs, in tokens. Backlogs of the same class count as equal, so that a small difference of
// backlogs does not decide against a smaller load. Randomly drawn loads were served equally well with any value from 1 to 4,096.
const backlogClass = 256

// Planner decides which candidates are sent now. It keeps nothing from earlier decisions except the results of the last one.
type Planner struct {
	ranks       []Rank  // ranks of the group, charged with the candidates that are sent or placed
	ranksBefore []Rank  // copy of ranks from before placeAll, so that unplace can restore them
	order       []int32 // indices of the candidates, in the order in which placeAll places them
	placed      []int32 // rank on which each candidate is placed, or one of the constants below
	picks       []Pick
	heldCount   int     // what the method Held returns
	heldSeconds float64 // what HeldFor returns, in s
	roundSent   bool    // what Released returns
}

const (
	noRank = -1 // the candidate is on no rank: none has a slot and KV room for it, or it is not placed yet
	sent   = -2 // the candidate is sent: it is in picks
)

// Decide returns the candidates that are sent now (picks), and the time at which to call it again if nothing happens before (wake); +Inf:
// never. waiting is in the order of arrival. The picks are valid until the next call.
//
// Decide sends urgent candidates first. For the others it repeats three things. First, it places them on ranks as if all were sent now, in
// one round. Second, it sends this round if it is time: until the time that sendTime returns, holding the round back saves more than it
// costs. Third, if it is too early, it takes the candidates off the ranks again, and sends only those that lengthen no step. If it sent
// any, it begins again with the rest. Otherwise it holds the rest back. The methods Held, HeldFor and Released tell the caller what it did.
func (p *Planner) Decide(now float64, g *Group, waiting []Candidate, rule Rule) (picks []Pick, wake float64) {
	p.ranks = append(p.ranks[:0], g.Ranks...)
	p.Forget() // what the three methods return for the last decision
	p.picks = p.picks[:0]
	p.placed = slices.Grow(p.placed[:0], len(waiting))[:len(waiting)]
	for i := range p.placed {
		p.placed[i] = noRank
	}
	p.sendUrgent(g, waiting)
	for {
		// First, place the candidates that are not sent.
		p.ranksBefore = append(p.ranksBefore[:0], p.ranks...) // for unplace; with the candidates that are sent already
		placed, unevenTokens := p.placeAll(now, g, waiting, rule)
		if placed == 0 { // no candidate is left, or no rank has room: only an event can change this
			return p.picks, math.Inf(1)
		}
		// Second, send the round if it is time.
		sendAt := p.sendTime(now, g, waiting, rule, placed, unevenTokens)
		if sendAt <= now {
			p.sendRound()
			return p.picks, math.Inf(1)
		}
		// Third, hold the round back, except for candidates that lengthen no step.
		longestHeld := p.longestHeld(now, waiting)
		p.unplace()
		if anySent := p.sendHidden(g, waiting, p.largestBacklog()); !anySent {
			p.heldCount, p.heldSeconds = placed, longestHeld
			return p.picks, sendAt
		}
	}
}

// sendUrgent sends each urgent candidate to the best rank that has a slot and KV room for it. If there is none, the candidate stays
// unplaced, and placeAll tries it again.
func (p *Planner) sendUrgent(g *Group, waiting []Candidate) {
	for i := range waiting {
		if !waiting[i].Urgent {
			continue
		}
		if r := p.bestRank(g, &waiting[i], p.largestBacklog()); r != noRank {
			p.send(g, waiting, i, r)
		}
	}
}

// sendRound sends all candidates that are placed, each to its rank.
func (p *Planner) sendRound() {
	p.roundSent = true
	for i, r := range p.placed {
		if r >= 0 { // otherwise it was sent before, or has no rank
			p.picks = append(p.picks, Pick{int32(i), r})
		}
	}
}

// Forget resets the results of the last decision: Held and HeldFor then return 0, and Released returns false.
func (p *Planner) Forget() { p.heldCount, p.heldSeconds, p.roundSent = 0, 0, false }

// Held returns the number of candidates that the last decision held back although a slot was free for them.
func (p *Planner) Held() int { return p.heldCount }

// HeldFor returns for how many seconds the oldest held candidate has been held back.
func (p *Planner) HeldFor() float64 { return p.heldSeconds }

// Released says whether the last decision sent a round. It is false if the decision sent only urgent candidates and candidates that
// lengthen no step.
func (p *Planner) Released() bool { return p.roundSent }

// placeAll finds ranks for as many candidates as there are free slots, and charges the ranks with them. It sets Since of each candidate
// that finds a rank for the first time. placed is the number of candidates that found a rank. unevenTokens is the growth of the largest
// backlog less the mean growth of all backlogs: while one rank computes these tokens, the others wait.
func (p *Planner) placeAll(now float64, g *Group, waiting []Candidate, rule Rule) (placed int, unevenTokens float64) {
	freeSlots, largestBefore, sumBefore := 0, int64(0), int64(0)
	for i := range p.ranks {
		freeSlots += p.ranks[i].Slots
		largestBefore, sumBefore = max(largestBefore, p.ranks[i].Backlog), sumBefore+p.ranks[i].Backlog
	}
	largest := largestBefore // largest backlog of any rank so far
	for _, i := range p.placingOrder(now, waiting, rule, freeSlots) {
		c := &waiting[i]
		r := p.bestRank(g, c, largest)
		p.placed[i] = r
		if r == noRank {
			continue
		}
		p.charge(g, c, r)
		largest = max(largest, p.ranks[r].Backlog)
		if !(c.Since <= now) { // Since is NaN because no rank had room for the candidate before, or the clock went back
			c.Since = now
		}
		placed++
	}
	sum := int64(0)
	for i := range p.ranks {
		sum += p.ranks[i].Backlog
	}
	return placed, float64(largest-largestBefore) - float64(sum-sumBefore)/float64(max(1, len(p.ranks)))
}

// placingOrder returns the oldest candidates that are not sent, one for each free slot, in the order in which placeAll places them.
// Candidates that were held back for MaxHold come first, because others could take their room. The others are sorted by how many tokens
// must be computed on the rank that has most of the prompt in its prefix cache, the largest number first, because small numbers fill the
// differences that large ones leave. Since is when a rank first had room for a candidate, and its hold began; NaN: none had room yet. The
// result is valid until the next call.
func (p *Planner) placingOrder(now float64, waiting []Candidate, rule Rule, freeSlots int) []int32 {
	p.order = p.order[:0]
	for i := range waiting {
		if len(p.order) == freeSlots {
			break
		}
		if !p.isSent(i) {
			p.order = append(p.order, int32(i))
		}
	}
	slices.SortStableFunc(p.order, func(a, b int32) int {
		x, y := &waiting[a], &waiting[b]
		xLate, yLate := now-x.Since >= rule.MaxHold, now-y.Since >= rule.MaxHold // false if Since is NaN
		switch {
		case xLate && !yLate:
			return -1
		case yLate && !xLate:
			return 1
		}
		return int(y.leastUncached()) - int(x.leastUncached())
	})
	return p.order
}

// sendTime returns the time at which the placed candidates are sent together, as a round: the earliest of
//
//	now + (holdBudget - sum of the holds so far) / placed
//	Since + MaxHold of a candidate, after which it is held back no longer
//	Until of a candidate, by which it must be sent
//
// holdBudget is for how many seconds the candidates may be held back, all holds added up. placed is the number of the candidates: in each
// further second, the sum of their holds grows by so many seconds. unevenTokens comes from placeAll: while one rank computes these tokens,
// the decodes of all ranks stop. The longer this stop, which the round saves, the larger the budget.
func (p *Planner) sendTime(now float64, g *Group, waiting []Candidate, rule Rule, placed int, unevenTokens float64) float64 {
	holdBudget := rule.holdPerSecondSaved(g) * g.Own * unevenTokens // Own*unevenTokens is the stop that the round saves, in s
	if holdBudget <= 0 {
		return now // holding back does not pay, or its gain is not known
	}
	earliestLimit, heldSoFar := math.Inf(1), 0.0
	for i, r := range p.placed {
		if r >= 0 { // the candidate is placed on rank r
			c := &waiting[i]
			heldSoFar += now - c.Since
			earliestLimit = min(earliestLimit, c.Since+rule.MaxHold, c.Until)
		}
	}
	return min(earliestLimit, now+max(0, holdBudget-heldSoFar)/float64(placed))
}

// holdPerSecondSaved returns for how many seconds requests may be held back, all holds of a round added up, if this saves all decodes a
// stop of one second. It is the smaller one of two bounds:
//
//	mostShare*Decoding       less in proportion if less than half of the slots decode
//	Patience*NotStarted
//
// It is x times that if x = 2*Patience*NotStarted*Own*Rate is below 1. What is not known sets no bound.
//
// The first bound says: if the decodes stop for a second less, they save as many seconds together as there are decodes, and the holds may
// cost the share mostShare of that.
//
// The second bound follows from a model. Let r be the rate at which prompts come, a the seconds that a rank takes to compute one, T the
// time to the first token, and p the patience. If k prompts are sent together, the decodes stand still for the share r*a/k of the time, and
// a request is held back for about (k-1)/2r. One more prompt in each round saves the decodes the share r*a/k^2 of their time, and adds 1/2r
// to T. By the rule, one more prompt pays as long as k^2 is less than x = 2p * r*T * r*a. At the largest such k, the holds of a round add
// up to k^2/2r = (p * r*T) * a. For a, sendTime takes the time of the uneven tokens, because tokens that are equally many on all ranks make
// no rank wait. So p * r*T is the bound for one second. If x is less than 1, no second prompt is expected to come in time.
func (rule Rule) holdPerSecondSaved(g *Group) float64 {
	decoding := float64(g.Decoding)
	hold := mostShare * decoding * min(1, decoding/(float64(g.Slots)/2))
	if g.NotStarted >= 0 || rule.Patience == 0 { // with patience 0, nothing is held back, even while NotStarted is not known
		hold = min(hold, rule.Patience*g.NotStarted) // r*T is NotStarted, the number of requests that wait for their first token
		if g.Rate >= 0 {
			x := 2 * rule.Patience * g.NotStarted * g.Own * g.Rate // r*a is Own*Rate: s per token, times tokens per s
			hold *= min(1, x)
		}
	}
	return hold
}

// longestHeld returns for how many seconds the placed candidates have been held back, at most. These are the candidates of the planned
// round, of which nothing is sent yet. Since is when a rank first had room for a candidate, so that it could have been sent.
func (p *Planner) longestHeld(now float64, waiting []Candidate) (longest float64) {
	for i, r := range p.placed {
		if r >= 0 { // the candidate is placed on rank r
			longest = max(longest, now-waiting[i].Since)
		}
	}
	return longest
}

// sendHidden sends each candidate, oldest first, that fits a rank without making its backlog larger than largest, the largest backlog of
// any rank. Such candidates lengthen no step: their rank computes them while another rank computes more tokens, so their time is hidden
// behind that of the other rank. anySent says whether sendHidden sent any.
func (p *Planner) sendHidden(g *Group, waiting []Candidate, largest int64) (anySent bool) {
	for i := range waiting {
		if p.isSent(i) {
			continue
		}
		best := int32(noRank) // of the ranks on which the candidate lengthens no step, the one with the smallest backlog
		for r := range int32(len(p.ranks)) {
			lengthensNoStep := p.fits(r, &waiting[i]) && p.ranks[r].Backlog+int64(waiting[i].uncached(r)) <= largest
			if lengthensNoStep && (best == noRank || p.ranks[r].Backlog < p.ranks[best].Backlog) {
				best = r
			}
		}
		if best != noRank {
			p.send(g, waiting, i, best)
			anySent = true
		}
	}
	return anySent
}

// isSent says whether candidate i is sent already, so that it is one of the picks.
func (p *Planner) isSent(i int) bool { return p.placed[i] == sent }

// unplace takes all candidates off the ranks on which placeAll has placed them, so that they can be placed anew. Candidates that are sent
// stay on their ranks. placeAll has also set the time Since of a candidate when a rank first had room for it. From then on, the candidate
// is held back. This time stays set, because the next decisions compute from it for how long the candidate has been held.
func (p *Planner) unplace() {
	copy(p.ranks, p.ranksBefore) // the ranks as they were before placeAll, when the sent candidates had been charged already
	for i := range p.placed {
		if !p.isSent(i) {
			p.placed[i] = noRank
		}
	}
}

// send makes candidate i one of the picks for rank r, and charges the rank with it.
func (p *Planner) send(g *Group, waiting []Candidate, i int, r int32) {
	p.charge(g, &waiting[i], r)
	p.placed[i] = sent
	p.picks = append(p.picks, Pick{int32(i), r})
}

// bestRank returns the rank for a candidate; noRank: no rank has a slot and KV room. It takes the rank with the smallest backlog or,
// among equal backlogs, with the smallest load. It prefers a rank that holds a prefix of the prompt if the prefix saves at least as many
// tokens as this choice adds to the largest backlog of the group. largest is that backlog before the choice.
func (p *Planner) bestRank(g *Group, c *Candidate, largest int64) int32 {
	best := int32(noRank)
	for i := range p.ranks {
		if r := int32(i); p.fits(r, c) && (best == noRank || p.isLessLoaded(r, best)) {
			best = r
		}
	}
	if best == noRank {
		return best // no rank has a slot and room, not even one with a prefix
	}
	mostSaved, chosen := int64(0), best
	for _, h := range c.Hits {
		if int(h.Rank) >= len(p.ranks) || !p.fits(h.Rank, c) { // the group has no such rank, or the rank has no slot or no room
			continue
		}
		uncached := int64(c.uncached(h.Rank))
		saved := int64(c.uncached(best)) - uncached                // prompt tokens that need not be computed thanks to this choice
		growth := max(0, p.ranks[h.Rank].Backlog+uncached-largest) // by how much this choice makes the largest backlog larger
		if saved > mostSaved && growth <= saved {
			mostSaved, chosen = saved, h.Rank
		}
	}
	return chosen
}

// isLessLoaded says whether rank a has a smaller backlog than rank b or, if both backlogs are in the same class (backlogClass), a smaller
// load.
func (p *Planner) isLessLoaded(a, b int32) bool {
	x, y := &p.ranks[a], &p.ranks[b]
	if x.Backlog/backlogClass != y.Backlog/backlogClass {
		return x.Backlog < y.Backlog
	}
	return x.Load < y.Load
}

// fits says whether rank r has a slot and KV room for a candidate. The whole prompt needs room, even the part that is in the prefix cache.
func (p *Planner) fits(r int32, c *Candidate) bool {
	return p.ranks[r].Slots > 0 && p.ranks[r].Room >= int64(c.Prompt)
}

// charge takes a slot and room of rank r for a candidate, and adds the candidate to the rank's backlog and load.
func (p *Planner) charge(g *Group, c *Candidate, r int32) {
	rank := &p.ranks[r]
	rank.Slots--
	rank.Room -= int64(c.Prompt)
	rank.Backlog += int64(c.uncached(r))
	rank.Load += float64(c.Prompt) + g.Request // in KV tokens: those of the prompt, and so many as cost as much as one more request
}

// largestBacklog returns the largest backlog of any rank, which includes the candidates that are sent or placed.
func (p *Planner) largestBacklog() (largest int64) {
	for i := range p.ranks {
		largest = max(largest, p.ranks[i].Backlog)
	}
	return largest
}

// uncached returns how many tokens of the prompt rank r would have to compute: those that its prefix cache does not have. It is at least 1
// on a rank with a hit, because an engine always computes the last token.
func (c *Candidate) uncached(r int32) int32 {
	for _, h := range c.Hits {
		if h.Rank == r {
			return max(1, c.Prompt-h.Tokens)
		}
	}
	return c.Prompt
}

// leastUncached returns how many tokens of the prompt must be computed on the rank that has most of the prompt in its prefix cache.
func (c *Candidate) leastUncached() int32 {
	fewest := c.Prompt
	for _, h := range c.Hits {
		fewest = min(fewest, max(1, c.Prompt-h.Tokens))
	}
	return fewest
}
