package predictor

import (
	"cmp"
	"slices"
	"time"
)

// Sample is one past request, as a trace or a request log has it.
type Sample struct {
	At             time.Duration // arrival
	End            time.Duration // when it had finished; 0: unknown, then Options.Step a token after At
	Prompt, Output int32         // tokens
	Key            uint64        // equal for requests that recur, 0 = none
}

// end returns when the request had finished. If that is not known, it is computed from the given time of a token.
func (s *Sample) end(step time.Duration) time.Duration {
	if s.End > s.At {
		return s.End
	}
	return s.At + time.Duration(s.Output)*step
}

// agePoint is one row: a past request when it had generated age tokens.
type agePoint struct {
	time    time.Duration
	request int32
	age     int32
}

// agePoints returns rows of the requests from first on at ages 0, every,
// 2*every, .. below their outputs, by time.
func agePoints(reqs []Sample, first, every int, step time.Duration) []agePoint {
	var points []agePoint
	for i := first; i < len(reqs); i++ {
		r := &reqs[i]
		duration := r.end(step) - r.At
		for a := 0; a < int(r.Output); a += every {
			at := r.At + time.Duration(float64(duration)*float64(a)/float64(r.Output))
			points = append(points, agePoint{at, int32(i), int32(a)})
		}
	}
	slices.SortStableFunc(points, func(a, b agePoint) int { return cmp.Compare(a.time, b.time) })
	return points
}

// past tells an Online of requests in the order in which they finished, so that
// it knows, at any moment, what serve would then know.
type past struct {
	reqs     []Sample
	step     time.Duration
	order    []int32 // indexes of reqs, by the ends of the requests
	finished int     // in order: the first that had not finished
	online   *Online
}

// newPast returns the past of reqs, of which online has been told nothing yet: until tells it. step is the time that a token takes.
func newPast(reqs []Sample, step time.Duration, online *Online) *past {
	p := &past{reqs: reqs, step: step, order: make([]int32, len(reqs)), online: online}
	for i := range p.order {
		p.order[i] = int32(i)
	}
	slices.SortStableFunc(p.order, func(a, b int32) int {
		return cmp.Compare(reqs[a].end(step), reqs[b].end(step))
	})
	return p
}

// until takes in all that had finished by t.
func (p *past) until(t time.Duration) {
	for ; p.finished < len(p.order); p.finished++ {
		r := &p.reqs[p.order[p.finished]]
		if r.end(p.step) > t {
			return
		}
		p.online.Finished(r.Prompt, r.Output, r.Key)
	}
}
