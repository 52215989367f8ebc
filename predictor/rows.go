package predictor

import (
	"cmp"
	"slices"
	"time"
)

// Sample is one past request, as a trace or a request log has it.
type Sample struct {
	At             time.Duration // arrival, since the start of the trace
	End            time.Duration // end, since the start of the trace; 0: not known, so each token is assumed to take Options.Step
	Prompt, Output int32         // lengths in tokens
	Key            uint64        // the same for equal prompts; 0: no key
}

// end returns when the request had finished. If this is not known, step is the time that each token is assumed to take.
func (s *Sample) end(step time.Duration) time.Duration {
	if s.End > s.At {
		return s.End
	}
	return s.At + time.Duration(s.Output)*step
}

// agePoint is a point at which a past request can be predicted: the time when it had generated age tokens.
type agePoint struct {
	time    time.Duration
	request int32
	age     int32
}

// agePoints returns the age points of the requests from the index first on, sorted by time. Each request has one at each of the ages 0,
// every, 2*every and so on that are below its output. Its tokens are assumed to come evenly between its arrival and its end.
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

// replay passes past requests to an Online in the order in which they finished, so that the Online knows at each time what a server would
// have known.
type replay struct {
	reqs   []Sample
	step   time.Duration // time that each token is assumed to take
	order  []int32       // indices of reqs, in the order in which the requests finished
	passed int           // number of requests in order that were passed to online already
	online *Online
}

// newReplay sorts reqs by the time at which each of them finished. It passes none of them to online yet. step is the time that each token
// is assumed to take if the time of the end is not known.
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

// finishUntil passes all requests to the Online that had finished by the time t, and were not passed before.
func (p *replay) finishUntil(t time.Duration) {
	for ; p.passed < len(p.order); p.passed++ {
		r := &p.reqs[p.order[p.passed]]
		if r.end(p.step) > t {
			return
		}
		p.online.Finished(r.Prompt, r.Output, r.Key)
	}
}
