package predictor

import (
	"cmp"
	"slices"
	"time"
)

// Sample is one past request.
type Sample struct {
	At             time.Duration // arrival, since the start of the trace
	End            time.Duration // end, since the start of the trace; 0: not known, so each token is assumed to take Options.Step
	Prompt, Output int32         // lengths in tokens
	Key            uint64        // the same for equal prompts; 0: none
}

func (s *Sample) end(step time.Duration) time.Duration {
	if s.End > s.At {
		return s.End
	}
	return s.At + time.Duration(s.Output)*step
}

// agePoint is the time when a past request had generated age tokens.
type agePoint struct {
	time    time.Duration
	request int32
	age     int32
}

// agePoints returns the points at the ages 0, every, 2*every and so on, by time. Tokens are assumed
// to come evenly between arrival and end.
func agePoints(reqs []Sample, first, every int, step time.Duration) []agePoint {
	var points []agePoint
	for i := first; i < len(reqs); i++ {
		r := &reqs[i]
		duration := r.end(step) - r.At
		for age := 0; age < int(r.Output); age += every {
			at := r.At + time.Duration(float64(duration)*float64(age)/float64(r.Output))
			points = append(points, agePoint{at, int32(i), int32(age)})
		}
	}
	slices.SortStableFunc(points, func(a, b agePoint) int { return cmp.Compare(a.time, b.time) })
	return points
}

// replay passes past requests to an Online in the order in which they finished.
type replay struct {
	reqs   []Sample
	step   time.Duration // assumed time of a token, if the end is not known
	order  []int32       // indices of reqs, by end
	passed int           // how many of them were passed to online already
	online *Online
}

func newReplay(reqs []Sample, step time.Duration, online *Online) *replay {
	p := &replay{reqs: reqs, step: step, order: make([]int32, len(reqs)), online: online}
	for i := range p.order {
		p.order[i] = int32(i)
	}
	slices.SortStableFunc(p.order, func(a, b int32) int {
		return cmp.Compare(reqs[a].end(step), reqs[b].end(step))
	})
	return p
}

func (p *replay) finishUntil(t time.Duration) {
	for ; p.passed < len(p.order); p.passed++ {
		r := &p.reqs[p.order[p.passed]]
		if r.end(p.step) > t {
			return
		}
		p.online.Finished(r.Prompt, r.Output, r.Key)
	}
}
