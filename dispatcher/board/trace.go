package board

import (
	"math"

	"evenkeel/dispatcher/policy"
)

// mostScores bounds the scores of one round, one for each entry and rank: explaining a round must
// not take longer than deciding it. In a group of 144 ranks, the first 16 entries get scores. The
// traces of the others only have the loads.
const mostScores = 16 * 144

// writeTraces runs before the entries are bound. The memory of the traces came with Enqueue, so it
// allocates only when a group has grown.
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
			continue
		}
		if scoresLeft -= len(s.Workers); scoresLeft < 0 {
			weigher = nil
		}
		scores, lowerIsBetter := b.scoreRanks(weigher, i, w.prompt())
		if scores == nil {
			weigher = nil
		}
		*w.Trace = Explanation{Tick: b.ticks, Waiting: len(s.Pool), Fullest: fullest, LowerIsBetter: lowerIsBetter}
		addAlternatives(w.Trace, g, p.Immediate(), s, a.Worker, scores)
	}
}

// scoreRanks returns b.scores, valid until the next call. Without scores (nil), KV tokens rank the
// alternatives.
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

// addAlternatives: a rank whose score is NaN could not have taken the entry.
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
