package board

import (
	"math"

	"evenkeel/dispatcher/policy"
)

// Grounds are what a rank was chosen on: the round as it was, and the best of
// the ranks that could have had the entry. Slots have them with Config.Explain.
type Grounds struct {
	Tick     uint64
	Waiting  int   // entries of the pool the round saw, this one among them
	KVTokens int64 // of the chosen rank before the round
	Fullest  int64 // KV tokens of the group's fullest rank then
	Able     int   // ranks that could have had it
	Less     bool  // smaller scores are better

	best  [mostWeighed]Weighed
	count int
}

// Weighed is a rank as the policy compared it, others of its round being where
// they were put.
type Weighed struct {
	Worker   int32
	Name     string
	Score    float64 // NaN: the policy does not compare, or a round was too large to ask about
	KVTokens int64   // before the round
	Free     int32   // slots then
}

// mostWeighed are the ranks that grounds name.
const mostWeighed = 8

// mostAsked bounds the ranks that a policy is asked about after one round: a
// tick must not be longer for being explained than for being decided. A group of
// 144 ranks has 16 of its entries compared, the others have the loads alone.
const mostAsked = 16 * 144

// Best are the ranks that could have had it, the best first; the chosen one is
// among them, or the assignment was moved off a pair that fails.
func (g *Grounds) Best() []Weighed {
	if g == nil {
		return nil
	}
	return g.best[:g.count]
}

// explain fills in the grounds of a round's assignments, before they are bound.
// It allocates nothing: the callers of Enqueue have made the room.
func (b *board) explain(g *group, p *decider) {
	if !b.cfg.Explain {
		return
	}
	s := &b.snapshot
	fullest := int64(0)
	for _, r := range g.ranks {
		fullest = max(fullest, r.kv)
	}
	if cap(b.weights) < len(s.Workers) {
		b.weights = make([]float64, len(s.Workers))
	}
	weigher, _ := p.Policy.(policy.Weigher)
	left := mostAsked
	for i, a := range b.assignments {
		w, ok := b.waiting[a.Entry]
		if !ok || w.grounds == nil {
			continue
		}
		scores, less := b.weights[:len(s.Workers)], true
		if left -= len(scores); weigher == nil || left < 0 {
			weigher = nil
		} else if less, ok = weigher.Weigh(s, i, a, int64(w.prompt()), scores); !ok {
			weigher = nil
		}
		if weigher == nil {
			scores, less = nil, true
		}
		grounds := w.grounds
		*grounds = Grounds{Tick: b.ticks, Waiting: len(s.Pool), Fullest: fullest, Less: less}
		grounds.rank(g, p.Immediate(), s, a.Worker, scores)
	}
}

// rank puts the ranks in order: by score, without scores by KV tokens.
func (o *Grounds) rank(g *group, immediate bool, s *policy.Snapshot, chosen int32, scores []float64) {
	for i, r := range g.ranks {
		worker := &s.Workers[i]
		if r.ID == chosen {
			o.KVTokens = r.kv
		}
		able := worker.Up && (immediate || worker.Free > 0)
		if scores != nil {
			able = !math.IsNaN(scores[i])
		}
		if !able {
			continue
		}
		o.Able++
		c := Weighed{Worker: r.ID, Name: r.Name, Score: math.NaN(), KVTokens: r.kv, Free: worker.Free}
		if scores != nil {
			c.Score = scores[i]
		}
		o.keep(c, chosen)
	}
}

// keep takes a rank into the list if it is one of the best, or the chosen one.
func (o *Grounds) keep(c Weighed, chosen int32) {
	at := o.count
	for at > 0 && o.before(&c, &o.best[at-1]) {
		at--
	}
	switch {
	case o.count < mostWeighed:
		o.count++
	case at == mostWeighed:
		if c.Worker != chosen {
			return
		}
		at--
	case o.best[mostWeighed-1].Worker == chosen: // it stays, though last
		if at == mostWeighed-1 {
			return
		}
		copy(o.best[at+1:mostWeighed-1], o.best[at:mostWeighed-2])
		o.best[at] = c
		return
	}
	copy(o.best[at+1:o.count], o.best[at:o.count-1])
	o.best[at] = c
}

func (o *Grounds) before(a, b *Weighed) bool {
	switch {
	case math.IsNaN(a.Score) || a.Score == b.Score:
		return a.KVTokens < b.KVTokens
	case o.Less:
		return a.Score < b.Score
	}
	return a.Score > b.Score
}
