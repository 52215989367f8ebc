package board

import (
	"math"

	"evenkeel/dispatcher/policy"
)

// mostScores bounds how many scores of ranks a policy computes for the traces of one round, because explaining a round must not take longer
// than deciding it. In a group of 144 ranks, the first 16 entries of a round get scores. The traces of the other entries only have the
// loads of the ranks.
const mostScores = 16 * 144

// writeTraces writes why each rank of a round was chosen into the traces of the entries, before these are bound. Enqueue brought the memory
// of the traces, so that writeTraces allocates only when a group has grown.
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
	weigher, _ := p.Policy.(policy.Weigher)
	scoresLeft := mostScores
	for i, a := range b.assignments {
		w, ok := b.waiting[a.Entry]
		if !ok || w.Trace == nil {
			continue
		}
		scores, lowerIsBetter, scored := b.scores[:len(s.Workers)], true, false
		scoresLeft -= len(scores)
		if weigher != nil && scoresLeft >= 0 {
			lowerIsBetter, scored = weigher.Weigh(s, i, a, int64(w.prompt()), scores)
		}
		if !scored { // the policy has no scores, or mostScores is reached: no later entry of the round gets scores either
			weigher, scores, lowerIsBetter = nil, nil, true // the KV tokens decide then, and fewer are better
		}
		*w.Trace = Explanation{Tick: b.ticks, Waiting: len(s.Pool), Fullest: fullest, LowerIsBetter: lowerIsBetter}
		addAlternatives(w.Trace, g, p.Immediate(), s, a.Worker, scores)
	}
}

// addAlternatives adds the ranks that could have taken an entry to its trace, which keeps the best by score or, if scores is nil, by KV
// tokens. A rank whose score is NaN could not have taken the entry. immediate: the policy lets the engine queue what has no free slot.
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
