// Package rounds decides which requests go now to which ranks of a group that prefills and decodes. A prompt that one
// rank computes stops the decodes of all ranks, so prompts are held for a moment until several ranks can compute
// prompts in the same steps. The package reads no clock: times are seconds that the caller gives.
package rounds

import (
	"math"
	"slices"
)

// Rank is one of the ranks that are up.
type Rank struct {
	Slots   int     // free slots
	Room    int64   // KV tokens that are free for prompts
	Backlog int64   // prompt tokens that were sent to the rank, are not in its cache, and are not computed yet
	Load    float64 // what its decodes cost a step, in KV tokens
}

// Hit is a prefix that a rank holds.
type Hit struct {
	Rank   int32
	Tokens int32
}

// Candidate is a request that waits.
type Candidate struct {
	Prompt int32   // tokens
	Hits   []Hit   // at most one for each rank
	Since  float64 // when it could first have been sent, s; NaN: it never could. Decide sets it when a rank has room for it
	Until  float64 // by when it must be sent to be answered in time, s; +Inf: at any time
	Urgent bool    // it is sent before the others, and is not held
}

// Group is what Decide needs to know of the ranks.
type Group struct {
	Ranks    []Rank
	Decoding int     // requests that decode
	Unbegun  float64 // mean number of requests that waited for their first token and were not held, over the last minute; below 0: not known
	Rate     float64 // prompt tokens that all ranks together computed per second, over the last minute; below 0: not known
	Slots    int     // slots of all ranks, free or not
	Own      float64 // seconds of a step that a prompt token takes on its own rank; 0: not known, so no request is held
	Request  float64 // what one more request costs a step, in KV tokens
}

// Rule says how long requests are held.
type Rule struct {
	Patience float64 // by how many percent the time to the first token may rise for each percent by which the time per token falls
	MaxHold  float64 // the longest time that a request is held, s
}

// Default is the rule that did best with loads that were drawn at random.
var Default = Rule{Patience: 2.5, MaxHold: 5}

// mostShare bounds how long requests are held, all together, as a share of the time that holding them spares all decodes. It holds if at
// least half of the slots decode; with fewer decodes, the share is smaller.
const mostShare = 0.25

// Pick sends a candidate to a rank.
type Pick struct{ Candidate, Rank int32 }

// backlogClass is the width in tokens of the classes in which backlogs count as equal, so that small differences do not outweigh the
// load. Loads drawn at random are served equally well with any value from 1 to 4,096.
const backlogClass = 256

// Planner decides. From one decision to the next it only keeps memory, and the result until the next decision.
type Planner struct {
	ranks  []Rank  // the ranks of the group, with the candidates that are sent or placed
	base   []Rank  // a copy of ranks before candidates were placed
	order  []int32 // candidates in the order in which they are placed
	placed []int32 // by candidate: its rank, or one of the constants below
	picks  []Pick
	held   int     // see Held
	oldest float64 // see HeldFor
	round  bool    // see Released
}

const (
	unplaced = -1 // the candidate found no slot or no room, or is not placed
	picked   = -2 // the candidate is in picks already
)

// Decide returns which candidates are sent, and the time at which to call it again if nothing happens before; +Inf: never. waiting is in
// the order of arrival. The picks are valid until the next call.
//
// Decide sends urgent candidates first. It places the others on the ranks as if they were all sent now, and release says until when such
// a round is worth holding. When that time has come, the placed candidates are sent. Otherwise they are held, and only those are sent
// that make no step longer (see ride); the others are then placed anew.
func (p *Planner) Decide(now float64, g *Group, waiting []Candidate, rule Rule) (picks []Pick, wake float64) {
	p.ranks = append(p.ranks[:0], g.Ranks...)
	p.Forget()
	p.picks = p.picks[:0]
	p.placed = slices.Grow(p.placed[:0], len(waiting))[:len(waiting)]
	for i := range waiting {
		p.placed[i] = unplaced
		if waiting[i].Urgent {
			if r := p.bestRank(g, &waiting[i], p.largestBacklog()); r != unplaced {
				p.pick(g, waiting, i, r)
			}
		}
	}
	for {
		p.base = append(p.base[:0], p.ranks...)
		placed, uneven := p.place(now, g, waiting, rule)
		if placed == 0 {
			return p.picks, math.Inf(1)
		}
		sendAt := p.release(now, g, waiting, rule, placed, uneven)
		if p.round = sendAt <= now; p.round {
			for i, r := range p.placed {
				if r >= 0 {
					p.picks = append(p.picks, Pick{int32(i), r})
				}
			}
			return p.picks, math.Inf(1)
		}
		oldest := p.longestHeld(now, waiting)
		p.unplace()
		if !p.ride(g, waiting, p.largestBacklog()) {
			p.held, p.oldest = placed, oldest
			return p.picks, sendAt
		}
	}
}

// Forget resets the results of the last decision: Held and HeldFor then return 0, and Released returns false.
func (p *Planner) Forget() { p.held, p.oldest, p.round = 0, 0, false }

// Held returns how many candidates the last decision held although they had a slot.
func (p *Planner) Held() int { return p.held }

// HeldFor returns how many seconds ago the first of the held candidates could have been sent.
func (p *Planner) HeldFor() float64 { return p.oldest }

// Released says whether the last decision sent a round, not only requests that go beside one.
func (p *Planner) Released() bool { return p.round }

// place finds ranks for as many candidates as there are slots, and charges the ranks with them. Candidates that were held for MaxHold
// come first, so that larger ones do not take their room; the others come by their uncached tokens, largest first. n is how many
// candidates found a rank. uneven is by how many tokens the largest backlog grows more than the backlogs do on average: so many tokens
// one rank computes while the others wait.
func (p *Planner) place(now float64, g *Group, waiting []Candidate, rule Rule) (n int, uneven float64) {
	slots, largestBefore, sumBefore := 0, int64(0), int64(0)
	for i := range p.ranks {
		slots += p.ranks[i].Slots
		largestBefore, sumBefore = max(largestBefore, p.ranks[i].Backlog), sumBefore+p.ranks[i].Backlog
	}
	p.order = p.order[:0]
	for i := range waiting {
		if len(p.order) == slots {
			break
		}
		if p.placed[i] != picked {
			p.order = append(p.order, int32(i))
		}
	}
	slices.SortStableFunc(p.order, func(a, b int32) int {
		x, y := &waiting[a], &waiting[b]
		switch late := now-x.Since >= rule.MaxHold; {
		case late != (now-y.Since >= rule.MaxHold) && late:
			return -1
		case late != (now-y.Since >= rule.MaxHold):
			return 1
		}
		return int(y.leastUncached()) - int(x.leastUncached())
	})
	largest := largestBefore
	for _, i := range p.order {
		c := &waiting[i]
		r := p.bestRank(g, c, largest)
		p.placed[i] = r
		if r == unplaced {
			continue
		}
		p.charge(g, c, r)
		largest = max(largest, p.ranks[r].Backlog)
		if !(c.Since <= now) { // it could never be sent before (NaN), or the clock went back
			c.Since = now
		}
		n++
	}
	sum := int64(0)
	for i := range p.ranks {
		sum += p.ranks[i].Backlog
	}
	return n, float64(largest-largestBefore) - float64(sum-sumBefore)/float64(max(1, len(p.ranks)))
}

// release returns when the placed candidates are sent: when they have been held, all together, for as long as that is worth.
//
// Let prompts come at a rate r, each of which takes its rank the time a, and let k of them be sent together. Then the decodes stand
// still for r*a/k of the time, and a request is held for about (k-1)/2r. One prompt more in each round spares the decodes a
// share of r*a/k^2, and adds 1/2r to a time to the first token of T. With the rule's patience p the former is worth the latter as long as
// k^2 < 2p * r*a * r*T. Here r*T is how many requests wait for their first token, whatever the rate, and until then the requests of a
// round have been held for k^2/2r in all: for p * r*T times the time a. A round that fills every rank is worth no wait, so a is what it is
// not level by. Where 2p * r*a * r*T is only x, which is less than 1, no second prompt is expected to come meanwhile: then a request is
// held for x times that long.
func (p *Planner) release(now float64, g *Group, waiting []Candidate, rule Rule, n int, uneven float64) float64 {
	decoding := float64(g.Decoding)
	// How many request-seconds of holding it is worth if all decodes are spared a stop of one second.
	worthPerSecond := mostShare * decoding * min(1, decoding/(float64(g.Slots)/2))
	if g.Unbegun >= 0 || rule.Patience == 0 {
		worthPerSecond = min(worthPerSecond, rule.Patience*g.Unbegun)
		if g.Rate >= 0 {
			worthPerSecond *= min(1, 2*rule.Patience*g.Unbegun*g.Own*g.Rate)
		}
	}
	worth := worthPerSecond * g.Own * uneven // request-seconds: the n placed candidates together may be held for so long
	if worth <= 0 {
		return now
	}
	sendAt, heldSoFar := math.Inf(1), 0.0
	for i, r := range p.placed {
		if r >= 0 {
			c := &waiting[i]
			heldSoFar += now - c.Since
			sendAt = min(sendAt, c.Since+rule.MaxHold, c.Until)
		}
	}
	return min(sendAt, now+max(0, worth-heldSoFar)/float64(n))
}

// longestHeld returns how many seconds ago the first of the placed candidates could have been sent.
func (p *Planner) longestHeld(now float64, waiting []Candidate) (most float64) {
	for i, r := range p.placed {
		if r >= 0 {
			most = max(most, now-waiting[i].Since)
		}
	}
	return most
}

// ride sends the candidates, oldest first, that fit a rank without making its backlog larger than the given largest one: the rank
// computes them while another rank computes more, so they make no step longer. sent says whether there were some.
func (p *Planner) ride(g *Group, waiting []Candidate, largest int64) (sent bool) {
	for i := range waiting {
		if p.placed[i] == picked {
			continue
		}
		best := int32(unplaced)
		for r := range p.ranks {
			if p.fits(int32(r), &waiting[i]) && p.ranks[r].Backlog+int64(waiting[i].uncached(int32(r))) <= largest &&
				(best == unplaced || p.ranks[r].Backlog < p.ranks[best].Backlog) {
				best = int32(r)
			}
		}
		if best != unplaced {
			p.pick(g, waiting, i, best)
			sent = true
		}
	}
	return sent
}

// unplace takes back what place did. Candidates that are in picks stay there.
func (p *Planner) unplace() {
	copy(p.ranks, p.base)
	for i := range p.placed {
		if p.placed[i] != picked {
			p.placed[i] = unplaced
		}
	}
}

// pick sends a candidate to rank r: it charges the rank and adds the candidate to the picks.
func (p *Planner) pick(g *Group, waiting []Candidate, i int, r int32) {
	p.charge(g, &waiting[i], r)
	p.placed[i] = picked
	p.picks = append(p.picks, Pick{int32(i), r})
}

// bestRank returns the rank for a candidate; unplaced: no rank has a slot and room. It is the rank with the least backlog or, among
// equal backlogs, with the least load. A rank that holds a prefix of the prompt is taken instead if the tokens that this saves are at
// least as many as those by which the largest backlog grows.
func (p *Planner) bestRank(g *Group, c *Candidate, largest int64) int32 {
	best := int32(unplaced)
	for i := range p.ranks {
		if r := int32(i); p.fits(r, c) && (best == unplaced || p.lighter(r, best)) {
			best = r
		}
	}
	if best == unplaced {
		return best
	}
	mostSaved, chosen := int64(0), best
	for _, h := range c.Hits {
		if int(h.Rank) >= len(p.ranks) || !p.fits(h.Rank, c) {
			continue
		}
		uncached := int64(c.uncached(h.Rank))
		saved := int64(c.uncached(best)) - uncached
		if grows := max(0, p.ranks[h.Rank].Backlog+uncached-largest); saved > mostSaved && grows <= saved {
			mostSaved, chosen = saved, h.Rank
		}
	}
	return chosen
}

// lighter says whether rank a has a smaller backlog than rank b or, if the backlogs count as equal, a smaller load.
func (p *Planner) lighter(a, b int32) bool {
	x, y := &p.ranks[a], &p.ranks[b]
	if x.Backlog/backlogClass != y.Backlog/backlogClass {
		return x.Backlog < y.Backlog
	}
	return x.Load < y.Load
}

// fits says whether rank r has a slot and KV room for the prompt of a candidate.
func (p *Planner) fits(r int32, c *Candidate) bool {
	return p.ranks[r].Slots > 0 && p.ranks[r].Room >= int64(c.Prompt)
}

// charge takes a slot and room of rank r for a candidate, and adds to its backlog and load.
func (p *Planner) charge(g *Group, c *Candidate, r int32) {
	rank := &p.ranks[r]
	rank.Slots--
	rank.Room -= int64(c.Prompt)
	rank.Backlog += int64(c.uncached(r))
	rank.Load += float64(c.Prompt) + g.Request
}

// largestBacklog returns the largest backlog of a rank, with the candidates that are sent or placed.
func (p *Planner) largestBacklog() (most int64) {
	for i := range p.ranks {
		most = max(most, p.ranks[i].Backlog)
	}
	return most
}

// uncached returns how many tokens of the prompt rank r would have to compute. An engine always computes the last token.
func (c *Candidate) uncached(r int32) int32 {
	for _, h := range c.Hits {
		if h.Rank == r {
			return max(1, c.Prompt-h.Tokens)
		}
	}
	return c.Prompt
}

// leastUncached returns how many tokens of the prompt would have to be computed on the rank that holds most of it.
func (c *Candidate) leastUncached() int32 {
	fewest := c.Prompt
	for _, h := range c.Hits {
		fewest = min(fewest, max(1, c.Prompt-h.Tokens))
	}
	return fewest
}
