package policy

import (
	"math"
	"slices"

	"evenkeel/dispatcher/rounds"
)

// gather is what evenkeel does where ranks prefill and decode: a prompt that one rank computes stops the decodes of
// all, so prompts are held for a moment and sent in rounds.
type gather struct {
	planner rounds.Planner
	group   rounds.Group
	waiting []rounds.Candidate
	at      []int32 // of waiting, by index in the pool
	hits    []rounds.Hit
	first   []uint64
	nextMs  float64
}

// Gathered is what a policy tells of a round on ranks that prefill and decode.
type Gathered struct {
	NextMs   float64  // until it wants to be asked again though nothing happens; +Inf: it does not
	First    []uint64 // entries that could have been sent for the first time
	Released bool     // a round was sent, not only requests that go beside one
	HeldS    float64  // how long the first of those that are held could have been sent
	MaxHoldS float64  // for longer none is; 0: none ever is
}

// GatheredBy tells of p's last round.
func GatheredBy(p Policy) Gathered {
	e, ok := p.(*evenkeel)
	if !ok {
		return Gathered{NextMs: math.Inf(1)}
	}
	return Gathered{
		NextMs: e.gather.nextMs, First: e.gather.first, Released: e.gather.planner.Released(),
		HeldS: e.gather.planner.HeldFor(), MaxHoldS: e.set.maxHold,
	}
}

func (r *gather) begin() {
	r.first, r.nextMs = r.first[:0], math.Inf(1)
	r.planner.Forget()
}

// holds says whether the last round held an entry although it had a slot.
func (r *gather) holds(entry int32) bool {
	at := slices.Index(r.at, entry)
	return r.planner.Held() > 0 && at >= 0 && r.waiting[at].Since <= 0
}

// inRounds decides where ranks prefill. The snapshot is of the instant 0 of the planner.
func (p *evenkeel) inRounds(s *Snapshot, dst []Assignment) []Assignment {
	r := &p.gather
	p.reserveForOverdue(s)
	p.tellRanks(s)
	r.tellWaiting(s, int(p.ranks.open+p.ranks.open/2))
	picks, next := r.planner.Decide(0, &r.group, r.waiting, rounds.Rule{Patience: p.set.patience, MaxHold: p.set.maxHold})
	r.nextMs = next * 1000
	for i := range r.waiting {
		if at := r.at[i]; s.Waits[at].HeldMs < 0 && r.waiting[i].Since == 0 {
			r.first = append(r.first, s.Pool[at].ID)
		}
	}
	for _, k := range picks {
		e := &s.Pool[r.at[k.Candidate]]
		stage := stageSubset
		if r.waiting[k.Candidate].Urgent {
			stage = stageGuard
		}
		dst = append(dst, Assignment{Entry: e.ID, Worker: s.Workers[k.Rank].ID, Score: float64(r.group.Ranks[k.Rank].Backlog), Stage: stage})
	}
	return dst
}

// reserveForOverdue keeps a rank for the first overdue entry that finds room nowhere.
func (p *evenkeel) reserveForOverdue(s *Snapshot) {
	for i := range s.Pool {
		if !isOverdue(s, &s.Pool[i]) {
			continue
		}
		fits := false
		for _, g := range p.ranks.some {
			fits = fits || p.ranks.fits(int(g), int64(s.Pool[i].Prompt))
		}
		if !fits {
			p.ranks.reserve(s, i)
			return
		}
	}
}

// tellRanks expects what is free on the ranks.
func (p *evenkeel) tellRanks(s *Snapshot) {
	g := &p.gather.group
	*g = rounds.Group{
		Ranks: sized(g.Ranks, len(s.Workers)), Own: float64(s.OwnMs) / 1000, Request: float64(p.loads.request),
		Unbegun: float64(s.Unbegun), Rate: float64(s.PromptRate),
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		decoding := 0
		for k := range w.Running {
			if w.Running[k].Generated > 0 {
				decoding++
			}
		}
		k := rounds.Rank{Slots: int(p.ranks.free[i]), Room: p.ranks.room[i], Backlog: w.Backlog, Load: float64(p.loads.now[i])}
		if decoding > 0 { // answers grow until the next one ends
			k.Room -= int64(s.MeanOutput)
		}
		g.Ranks[i] = k
		g.Decoding += decoding
		g.Slots += len(w.Running) + max(0, int(w.Free))
	}
}

// tellWaiting has so many requests for candidates, and those that are not held besides.
func (r *gather) tellWaiting(s *Snapshot, most int) {
	r.waiting, r.at, r.hits = r.waiting[:0], r.at[:0], r.hits[:0]
	for i := range s.Pool {
		e, w := &s.Pool[i], &s.Waits[i]
		c := rounds.Candidate{Prompt: e.Prompt, Since: math.NaN(), Until: math.Inf(1), Urgent: w.Express || isOverdue(s, e)}
		if !c.Urgent {
			if most == 0 {
				continue
			}
			most--
		}
		if w.HeldMs >= 0 {
			c.Since = -w.HeldMs / 1000
		}
		if w.UrgentInMs > 0 {
			c.Until = w.UrgentInMs / 1000
		}
		from := len(r.hits)
		for _, h := range w.Hits {
			if g, ok := s.index(h.Worker); ok {
				r.hits = append(r.hits, rounds.Hit{Rank: int32(g), Tokens: int32(min(max(0, h.Tokens), int(e.Prompt)))})
			}
		}
		c.Hits = r.hits[from:len(r.hits):len(r.hits)]
		r.waiting, r.at = append(r.waiting, c), append(r.at, int32(i))
	}
}
