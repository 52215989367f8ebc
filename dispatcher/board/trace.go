package board

import (
	"math"

	"evenkeel/dispatcher/policy"
)

// mostScores is the largest number of scores that a policy computes for the traces of one round, one for each entry and rank. Without this
// bound, explaining a round could take longer than deciding it. In a group of 144 ranks, the first 16 entries of a round get scores. The
// traces of the other entries only have the loads of the ranks.
const mostScores = 16 * 144

// writeTraces writes into the trace of each assigned entry why the policy chose its rank. It runs before the entries are bound. The memory
// of the traces came with Enqueue, so writeTraces allocates only when a group has grown. Once mostScores scores are computed in a round, or
// if the policy has no scores, the traces only have the loads of the ranks.
func (b *board) writeTraces(g *group, p *policyInUse) {
	if !b.cfg.Explain {
		return
	}
	s := &b.snapshot
	fullest := int64(0)
	for _, r := range g.steppingRanks {
		fullest = max(fullest, r.kv)
	}
	if cap(b.scores) < len(s.Workers) {
		b.scores = make([]float64, len(s.Workers))
	}
	weigher, _ := p.Policy.(policy.Weigher) // nil: the policy has no scores
	scoresLeft := mostScores                // how many more scores may be computed in this round
	for i, a := range b.assignments {
		w, ok := b.waiting[a.Entry]
		if !ok || w.Trace == nil {
			continue // there is no such entry, or its caller wants no trace
		}
		if scoresLeft -= len(s.Workers); scoresLeft < 0 {
			weigher = nil
		}
		scores, lowerIsBetter := b.scoreRanks(weigher, i, w.prompt())
		if scores == nil { // then no later entry of the round gets scores either
			weigher = nil
		}
		*w.Trace = Explanation{Tick: b.ticks, Waiting: len(s.Pool), Fullest: fullest, LowerIsBetter: lowerIsBetter}
		addAlternatives(w.Trace, g, p.Immediate(), s, a.Worker, scores)
	}
}

// scoreRanks returns how good the policy finds each rank for the entry of the i-th assignment, which has a prompt of this many tokens. The
// result is in b.scores, so it is valid until the next call. If the policy gives no scores, or weigher is nil, scores is nil: KV tokens
// then rank the alternatives, and fewer are better.
func (b *board) scoreRanks(weigher policy.Weigher, i int, prompt int32) (scores []float64, lowerIsBetter bool) {
	if weigher == nil {
		return nil, true
	}
	scores = b.scores[:len(b.snapshot.Workers)]
	lowerIsBetter, ok := weigher.Weigh(&b.snapshot, i, b.assignments[i], int64(prompt), scores)
	if !ok {
		return nil, true
	}
	return scores, lowerIsBetter
}

// addAlternatives adds the ranks that could have taken an entry to its trace, which keeps the best by score or, if scores is nil, by KV
// tokens. A rank whose score is NaN could not have taken the entry. immediate says that the policy sends entries even to a rank without a
// free slot, where the engine queues them.
func addAlternatives(explanation *Explanation, g *group, immediate bool, s *policy.Snapshot, chosen int32, scores []float64) {
	for i, r := range g.steppingRanks {
		worker := &s.Workers[i]
		if r.ID == chosen {
			explanation.KVTokens = r.kv
		}
		couldTake := worker.Up && (immediate || worker.Free > 0)
		if scores != nil {
			couldTake = !math.IsNaN(scores[i])
		}
		if !couldTake {
			continue
		}
		explanation.Able++
		c := Alternative{Worker: r.ID, Name: r.Name, Score: math.NaN(), KVTokens: r.kv, Free: worker.Free}
		if scores != nil {
			c.Score = scores[i]
		}
		explanation.Keep(c, chosen)
	}
}
