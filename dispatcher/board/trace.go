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
// of the traces came with Enqueue, so writeTraces allocates only when a group has grown. At most mostScores scores are computed in a round,
// so that explaining it takes no longer than deciding it. The traces of the other entries only have the loads of the ranks.
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
	scoresLeft := mostScores
	for i, a := range b.assignments {
		w, ok := b.waiting[a.Entry]
		if !ok || w.Trace == nil {
			continue // there is no such entry, or its caller wants no trace
		}
		scores, lowerIsBetter, scored := b.scores[:len(s.Workers)], true, false // the same memory for each entry
		scoresLeft -= len(scores)
		if weigher != nil && scoresLeft >= 0 {
			lowerIsBetter, scored = weigher.Weigh(s, i, a, int64(w.prompt()), scores) // writes the score of each rank into scores
		}
		// The policy has no scores, or mostScores is reached. In both cases, no later entry of the round gets scores either.
		if !scored {
			weigher, scores, lowerIsBetter = nil, nil, true // without scores, KV tokens rank the alternatives, and fewer are better
		}
		*w.Trace = Explanation{Tick: b.ticks, Waiting: len(s.Pool), Fullest: fullest, LowerIsBetter: lowerIsBetter}
		addAlternatives(w.Trace, g, p.Immediate(), s, a.Worker, scores)
	}
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
