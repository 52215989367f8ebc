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

// grain is the width in tokens of the classes in which backlogs count as equal, so that small differences do not outweigh the load. Loads
// drawn at random are served equally well with any value from 1 to 4,096.
const grain = 256

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
	waits = -1 // the candidate found no slot or no room, or is not placed
	gone  = -2 // the candidate is in picks already
)

// Decide returns which candidates are sent, and the time at which to call it again if nothing happens before; +Inf: never. waiting is in
// the order of arrival. The picks are valid until the next call.
func (p *Planner) Decide(now float64, g *Group, waiting []Candidate, rule Rule) (picks []Pick, wake float64) {
	p.ranks = append(p.ranks[:0], g.Ranks...)
	p.Forget()
	p.picks = p.picks[:0]
	p.placed = slices.Grow(p.placed[:0], len(waiting))[:len(waiting)]
	for i := range waiting {
		p.placed[i] = waits
		if waiting[i].Urgent {
			if r := p.least(g, &waiting[i], p.largest()); r != waits {
				p.send(g, waiting, i, r)
			}
		}
	}
	for {
		p.base = append(p.base[:0], p.ranks...)
		n, uneven := p.place(now, g, waiting, rule)
		if n == 0 {
			return p.picks, math.Inf(1)
		}
		at := p.release(now, g, waiting, rule, n, uneven)
		if p.round = at <= now; p.round {
			for i, r := range p.placed {
				if r >= 0 {
					p.picks = append(p.picks, Pick{int32(i), r})
				}
			}
			return p.picks, math.Inf(1)
		}
		oldest := p.longest(now, waiting)
		p.unplace()
		if !p.ride(g, waiting, p.largest()) {
			p.held, p.oldest = n, oldest
			return p.picks, at
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

// place finds ranks for as many candidates as there are slots. Candidates that were held for MaxHold come first, so that larger
// ones do not take their room; the others come by their uncached tokens, largest first. n is how many candidates found a rank. uneven
// is by how many tokens the largest backlog grows more than the backlogs do on average.
func (p *Planner) place(now float64, g *Group, waiting []Candidate, rule Rule) (n int, uneven float64) {
	slots, largest, sum := 0, int64(0), int64(0)
	for i := range p.ranks {
		slots += p.ranks[i].Slots
		largest, sum = max(largest, p.ranks[i].Backlog), sum+p.ranks[i].Backlog
	}
	p.order = p.order[:0]
	for i := range waiting {
		if len(p.order) == slots {
			break
		}
		if p.placed[i] != gone {
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
		return int(y.least()) - int(x.least())
	})
	top := largest
	for _, i := range p.order {
		c := &waiting[i]
		r := p.least(g, c, top)
		p.placed[i] = r
		if r == waits {
			continue
		}
		p.charge(g, c, r)
		top = max(top, p.ranks[r].Backlog)
		if !(c.Since <= now) { // it could never be sent before (NaN), or the clock went back
			c.Since = now
		}
		n++
	}
	more := int64(0)
	for i := range p.ranks {
		more += p.ranks[i].Backlog
	}
	return n, float64(top-largest) - float64(more-sum)/float64(max(1, len(p.ranks)))
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
	most := mostShare * decoding * min(1, decoding/(float64(g.Slots)/2))
	if g.Unbegun >= 0 || rule.Patience == 0 {
		most = min(most, rule.Patience*g.Unbegun)
		if g.Rate >= 0 {
			most *= min(1, 2*rule.Patience*g.Unbegun*g.Own*g.Rate)
		}
	}
	worth := most * g.Own * uneven // request-seconds
	if worth <= 0 {
		return now
	}
	at, held := math.Inf(1), 0.0
	for i, r := range p.placed {
		if r >= 0 {
			c := &waiting[i]
			held += now - c.Since
			at = min(at, c.Since+rule.MaxHold, c.Until)
		}
	}
	return min(at, now+max(0, worth-held)/float64(n))
}

// longest returns how many seconds ago the first of the placed candidates could have been sent.
func (p *Planner) longest(now float64, waiting []Candidate) (most float64) {
	for i, r := range p.placed {
		if r >= 0 {
			most = max(most, now-waiting[i].Since)
		}
	}
	return most
}

// ride sends the candidates, oldest first, that fit a rank without making its backlog larger than the largest one: the rank computes them
// while another rank computes more, so they make no step longer. It says whether there were some.
func (p *Planner) ride(g *Group, waiting []Candidate, largest int64) (some bool) {
	for i := range waiting {
		if p.placed[i] == gone {
			continue
		}
		best := int32(waits)
		for r := range p.ranks {
			if p.fits(int32(r), &waiting[i]) && p.ranks[r].Backlog+int64(waiting[i].uncached(int32(r))) <= largest &&
				(best == waits || p.ranks[r].Backlog < p.ranks[best].Backlog) {
				best = int32(r)
			}
		}
		if best != waits {
			p.send(g, waiting, i, best)
			some = true
		}
	}
	return some
}

// unplace takes back what place did. Candidates that are in picks stay there.
func (p *Planner) unplace() {
	copy(p.ranks, p.base)
	for i := range p.placed {
		if p.placed[i] != gone {
			p.placed[i] = waits
		}
	}
}

func (p *Planner) send(g *Group, waiting []Candidate, i int, r int32) {
	p.charge(g, &waiting[i], r)
	p.placed[i] = gone
	p.picks = append(p.picks, Pick{int32(i), r})
}

// least returns the rank with the least backlog that has a slot and room; among equal backlogs, the one with the least load. A rank that
// holds a prefix of the prompt is taken instead if the tokens that this saves are at least as many as those by which the largest backlog
// grows.
func (p *Planner) least(g *Group, c *Candidate, largest int64) int32 {
	best := int32(waits)
	for i := range p.ranks {
		if r := int32(i); p.fits(r, c) && (best == waits || p.before(r, best)) {
			best = r
		}
	}
	if best == waits {
		return best
	}
	saves, other := int64(0), best
	for _, h := range c.Hits {
		if int(h.Rank) >= len(p.ranks) || !p.fits(h.Rank, c) {
			continue
		}
		u := int64(c.uncached(h.Rank))
		saved := int64(c.uncached(best)) - u
		if grows := max(0, p.ranks[h.Rank].Backlog+u-largest); saved > saves && grows <= saved {
			saves, other = saved, h.Rank
		}
	}
	return other
}

func (p *Planner) before(a, b int32) bool {
	x, y := &p.ranks[a], &p.ranks[b]
	if x.Backlog/grain != y.Backlog/grain {
		return x.Backlog < y.Backlog
	}
	return x.Load < y.Load
}

func (p *Planner) fits(r int32, c *Candidate) bool {
	return p.ranks[r].Slots > 0 && p.ranks[r].Room >= int64(c.Prompt)
}

func (p *Planner) charge(g *Group, c *Candidate, r int32) {
	k := &p.ranks[r]
	k.Slots--
	k.Room -= int64(c.Prompt)
	k.Backlog += int64(c.uncached(r))
	k.Load += float64(c.Prompt) + g.Request
}

func (p *Planner) largest() (most int64) {
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

// least returns how many tokens of the prompt have to be computed on the rank that holds most of it.
func (c *Candidate) least() int32 {
	u := c.Prompt
	for _, h := range c.Hits {
		u = min(u, max(1, c.Prompt-h.Tokens))
	}
	return u
}
