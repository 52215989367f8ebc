// Package rounds decides which waiting requests are sent now to which ranks of a group that
// prefills and decodes. While one rank computes a prompt, the decodes of all ranks wait. Therefore
// requests are held back for a short time and then sent together, in a round, so that several ranks
// compute prompts in the same steps. The package reads no clock: times are seconds that the caller
// gives.
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
	// Load is the cost of the decodes on the rank, as the number of KV tokens that would make a step
	// longer by the same time.
	Load float64
}

// Hit says that a rank has the first Tokens tokens of a prompt in its prefix cache.
type Hit struct {
	Rank   int32 // index in Group.Ranks
	Tokens int32
}

// Candidate is a waiting request.
type Candidate struct {
	Prompt int32 // length of the prompt, in tokens
	Hits   []Hit // parts of the prompt in prefix caches; at most one for each rank
	// Since is the time at which a rank first had a slot and KV room for the request; NaN: not yet.
	// Decide sets it.
	Since float64
	// Until is the time by which the request must be sent so that its answer comes in time; +Inf: no
	// limit.
	Until  float64
	Urgent bool // sent before all others, and never held back
}

// Group has the ranks, and what the caller has measured on them in the last minute.
type Group struct {
	Ranks    []Rank
	Decoding int // number of requests that decode
	// NotStarted is the mean number of requests that waited for their first token, without those that
	// were held back; below 0: not known.
	NotStarted float64
	// Rate is how many prompt tokens all ranks together computed per second; below 0: not known.
	Rate  float64
	Slots int // slots of all ranks, free or not
	// Own is by how many s one prompt token lengthens a step of its rank; 0: not known, so no request
	// is held back.
	Own float64
	// Request is the cost of one more request, in KV tokens as Rank.Load.
	Request float64
}

// Rule says how long requests may be held back so that they can be sent together.
type Rule struct {
	// Patience is by how many percent the time to first token may rise for each percent by which the
	// time per token falls.
	Patience float64
	MaxHold  float64 // longest time for which a request is held back, in s
}

// Default is the rule that gave the best results on randomly drawn loads.
var Default = Rule{Patience: 2.5, MaxHold: 5}

// mostShare is the most that the sum of the holds may be, as a share of the time that all decodes
// together save by the round. If less than half of the slots decode, the bound is lower in
// proportion.
const mostShare = 0.25

// Pick says that a candidate is sent to a rank, both by index.
type Pick struct{ Candidate, Rank int32 }

// backlogClass is in tokens. Backlogs of the same class count as equal, so that a small difference
// does not decide against a smaller load. Randomly drawn loads were served equally well with any
// value from 1 to 4,096.
const backlogClass = 256

// Planner keeps nothing from earlier decisions except the results of the last one.
type Planner struct {
	ranks       []Rank  // charged with the candidates that are sent or placed
	ranksBefore []Rank  // copy of ranks from before placeAll, for unplace
	order       []int32 // indices of the candidates, in the order of placing
	placed      []int32 // rank of each candidate, or one of the constants below
	picks       []Pick
	heldCount   int     // what Held returns
	heldSeconds float64 // what HeldFor returns
	roundSent   bool    // what Released returns
}

const (
	noRank = -1 // no rank has a slot and KV room, or the candidate is not placed yet
	sent   = -2 // the candidate is in picks
)

// Decide returns the candidates that are sent now, and the time at which to call it again if
// nothing happens before (+Inf: never). waiting is in the order of arrival. The picks are valid
// until the next call.
//
// All candidates that are not urgent are placed as if they were sent now, in one round. If it is
// too early for the round, only those that lengthen no step are sent, and the rest is placed anew.
func (p *Planner) Decide(now float64, g *Group, waiting []Candidate, rule Rule) (picks []Pick, wake float64) {
	p.ranks = append(p.ranks[:0], g.Ranks...)
	p.Forget()
	p.picks = p.picks[:0]
	p.placed = slices.Grow(p.placed[:0], len(waiting))[:len(waiting)]
	for i := range p.placed {
		p.placed[i] = noRank
	}
	p.sendUrgent(g, waiting)
	for {
		p.ranksBefore = append(p.ranksBefore[:0], p.ranks...)
		placed, unevenTokens := p.placeAll(now, g, waiting, rule)
		if placed == 0 { // only an event can change this
			return p.picks, math.Inf(1)
		}
		sendAt := p.sendTime(now, g, waiting, rule, placed, unevenTokens)
		if sendAt <= now {
			p.sendRound()
			return p.picks, math.Inf(1)
		}
		longestHeld := p.longestHeld(now, waiting)
		p.unplace()
		if anySent := p.sendHidden(g, waiting, p.largestBacklog()); !anySent {
			p.heldCount, p.heldSeconds = placed, longestHeld
			return p.picks, sendAt
		}
	}
}

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

func (p *Planner) sendRound() {
	p.roundSent = true
	for i, r := range p.placed {
		if r >= 0 {
			p.picks = append(p.picks, Pick{int32(i), r})
		}
	}
}

// Forget resets the results of the last decision.
func (p *Planner) Forget() { p.heldCount, p.heldSeconds, p.roundSent = 0, 0, false }

// Held returns how many candidates were held back although a slot was free for them.
func (p *Planner) Held() int { return p.heldCount }

// HeldFor returns for how many seconds the oldest held candidate has waited.
func (p *Planner) HeldFor() float64 { return p.heldSeconds }

// Released is false if only urgent candidates and candidates that lengthen no step were sent.
func (p *Planner) Released() bool { return p.roundSent }

// placeAll finds ranks for as many candidates as there are free slots, and charges them.
// unevenTokens is the growth of the largest backlog less the mean growth: while one rank computes
// these tokens, the others wait.
func (p *Planner) placeAll(now float64, g *Group, waiting []Candidate, rule Rule) (placed int, unevenTokens float64) {
	freeSlots, largestBefore, sumBefore := 0, int64(0), int64(0)
	for i := range p.ranks {
		freeSlots += p.ranks[i].Slots
		largestBefore, sumBefore = max(largestBefore, p.ranks[i].Backlog), sumBefore+p.ranks[i].Backlog
	}
	largest := largestBefore
	for _, i := range p.placingOrder(now, waiting, rule, freeSlots) {
		c := &waiting[i]
		r := p.bestRank(g, c, largest)
		p.placed[i] = r
		if r == noRank {
			continue
		}
		p.charge(g, c, r)
		largest = max(largest, p.ranks[r].Backlog)
		if !(c.Since <= now) { // Since is NaN at first, or the clock went back
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

// placingOrder returns the oldest candidates that are not sent, one for each free slot. Candidates
// that were held back for MaxHold come first, because others could take their room. Then come those
// with most tokens to compute, because small numbers fill the differences that large ones leave.
// The result is valid until the next call.
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

// sendTime returns the time at which the round is sent: the earliest of
//
//	now + (holdBudget - sum of the holds so far) / placed
//	Since + MaxHold of a candidate
//	Until of a candidate
//
// In each further second, the sum of the holds grows by as many seconds as candidates are placed.
func (p *Planner) sendTime(now float64, g *Group, waiting []Candidate, rule Rule, placed int, unevenTokens float64) float64 {
	holdBudget := rule.holdPerSecondSaved(g) * g.Own * unevenTokens // Own*unevenTokens is the stop of all decodes that the round saves, in s
	if holdBudget <= 0 {
		return now // holding back does not pay, or its gain is not known
	}
	earliestLimit, heldSoFar := math.Inf(1), 0.0
	for i, r := range p.placed {
		if r >= 0 {
			c := &waiting[i]
			heldSoFar += now - c.Since
			earliestLimit = min(earliestLimit, c.Since+rule.MaxHold, c.Until)
		}
	}
	return min(earliestLimit, now+max(0, holdBudget-heldSoFar)/float64(placed))
}

// holdPerSecondSaved returns for how many seconds requests may be held back, all holds of a round
// added up, to save all decodes a stop of one second. It is the smaller one of two bounds:
//
//	mostShare*Decoding       less in proportion if less than half of the slots decode
//	Patience*NotStarted
//
// times x = 2*Patience*NotStarted*Own*Rate if this is below 1. What is not known sets no bound.
//
// The first bound: one second less saves as many seconds as there are decodes, and the holds may
// cost the share mostShare of that.
//
// The second bound: let r be the rate at which prompts come, a the seconds that a rank takes to
// compute one, T the time to the first token, and p the patience. If k prompts are sent together,
// the decodes stand still for the share r*a/k of the time, and a request is held back for about
// (k-1)/2r. One more prompt in each round saves the decodes the share r*a/k^2, and adds 1/2r to T.
// By the rule, this pays as long as k^2 is less than x = 2p * r*T * r*a. At the largest such k, the
// holds of a round add up to k^2/2r = (p * r*T) * a. For a, sendTime takes the time of the uneven
// tokens, because tokens that are equally many on all ranks make no rank wait. If x is less than 1,
// no second prompt is expected to come in time.
func (rule Rule) holdPerSecondSaved(g *Group) float64 {
	decoding := float64(g.Decoding)
	hold := mostShare * decoding * min(1, decoding/(float64(g.Slots)/2))
	if g.NotStarted >= 0 || rule.Patience == 0 { // patience 0 holds nothing back, even while NotStarted is not known
		hold = min(hold, rule.Patience*g.NotStarted) // NotStarted is r*T
		if g.Rate >= 0 {
			x := 2 * rule.Patience * g.NotStarted * g.Own * g.Rate // Own*Rate is r*a
			hold *= min(1, x)
		}
	}
	return hold
}

func (p *Planner) longestHeld(now float64, waiting []Candidate) (longest float64) {
	for i, r := range p.placed {
		if r >= 0 {
			longest = max(longest, now-waiting[i].Since)
		}
	}
	return longest
}

// sendHidden sends each candidate, oldest first, that fits a rank without making its backlog larger
// than largest. Such candidates lengthen no step: their rank computes them while another rank
// computes more tokens.
func (p *Planner) sendHidden(g *Group, waiting []Candidate, largest int64) (anySent bool) {
	for i := range waiting {
		if p.isSent(i) {
			continue
		}
		best := int32(noRank) // the one with the smallest backlog
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

func (p *Planner) isSent(i int) bool { return p.placed[i] == sent }

// unplace takes the candidates that are not sent off their ranks. Their Since stays set: from then
// on, they are held back.
func (p *Planner) unplace() {
	copy(p.ranks, p.ranksBefore)
	for i := range p.placed {
		if !p.isSent(i) {
			p.placed[i] = noRank
		}
	}
}

func (p *Planner) send(g *Group, waiting []Candidate, i int, r int32) {
	p.charge(g, &waiting[i], r)
	p.placed[i] = sent
	p.picks = append(p.picks, Pick{int32(i), r})
}

// bestRank takes the rank with the smallest backlog, and then with the smallest load. It prefers a
// rank that holds a prefix of the prompt if the prefix saves at least as many tokens as this choice
// adds to the largest backlog of the group (largest, before the choice).
func (p *Planner) bestRank(g *Group, c *Candidate, largest int64) int32 {
	best := int32(noRank)
	for i := range p.ranks {
		if r := int32(i); p.fits(r, c) && (best == noRank || p.isLessLoaded(r, best)) {
			best = r
		}
	}
	if best == noRank {
		return best
	}
	mostSaved, chosen := int64(0), best
	for _, h := range c.Hits {
		if int(h.Rank) >= len(p.ranks) || !p.fits(h.Rank, c) { // the group has no such rank, or no room on it
			continue
		}
		uncached := int64(c.uncached(h.Rank))
		saved := int64(c.uncached(best)) - uncached
		growth := max(0, p.ranks[h.Rank].Backlog+uncached-largest) // by how much this choice makes the largest backlog larger
		if saved > mostSaved && growth <= saved {
			mostSaved, chosen = saved, h.Rank
		}
	}
	return chosen
}

func (p *Planner) isLessLoaded(a, b int32) bool {
	x, y := &p.ranks[a], &p.ranks[b]
	if x.Backlog/backlogClass != y.Backlog/backlogClass {
		return x.Backlog < y.Backlog
	}
	return x.Load < y.Load
}

// The whole prompt needs room, even the part that is in the prefix cache.
func (p *Planner) fits(r int32, c *Candidate) bool {
	return p.ranks[r].Slots > 0 && p.ranks[r].Room >= int64(c.Prompt)
}

func (p *Planner) charge(g *Group, c *Candidate, r int32) {
	rank := &p.ranks[r]
	rank.Slots--
	rank.Room -= int64(c.Prompt)
	rank.Backlog += int64(c.uncached(r))
	rank.Load += float64(c.Prompt) + g.Request
}

func (p *Planner) largestBacklog() (largest int64) {
	for i := range p.ranks {
		largest = max(largest, p.ranks[i].Backlog)
	}
	return largest
}

// uncached returns how many tokens of the prompt rank r would have to compute. It is at least 1
// even with a hit, because an engine always computes the last token.
func (c *Candidate) uncached(r int32) int32 {
	for _, h := range c.Hits {
		if h.Rank == r {
			return max(1, c.Prompt-h.Tokens)
		}
	}
	return c.Prompt
}

func (c *Candidate) leastUncached() int32 {
	fewest := c.Prompt
	for _, h := range c.Hits {
		fewest = min(fewest, max(1, c.Prompt-h.Tokens))
	}
	return fewest
}
