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
		lived := r.end(step) - r.At
		for a := 0; a < int(r.Output); a += every {
			at := r.At + time.Duration(float64(lived)*float64(a)/float64(r.Output))
			points = append(points, agePoint{at, int32(i), int32(a)})
		}
	}
	slices.SortStableFunc(points, func(a, b agePoint) int { return cmp.Compare(a.time, b.time) })
	return points
}

// past replays requests in the order they finished and knows, at any moment,
// what serve would then know: the last 4096 outputs and recent traffic.
type past struct {
	reqs             []Sample
	step             time.Duration
	order            []int32 // requests by end
	next             int     // in order: the first that had not finished
	window           window
	outputs, prompts *recent
	online           *Online // is told of them as well; nil: nobody
}

func newPast(reqs []Sample, step time.Duration) *past {
	p := &past{reqs: reqs, step: step, order: make([]int32, len(reqs)), outputs: newRecent(), prompts: newRecent()}
	longest := int32(0)
	for i := range p.order {
		p.order[i] = int32(i)
		longest = max(longest, reqs[i].Output)
	}
	slices.SortStableFunc(p.order, func(a, b int32) int {
		return cmp.Compare(reqs[a].end(step), reqs[b].end(step))
	})
	p.window = newWindow(int(longest))
	return p
}

// until takes in all that had finished by t.
func (p *past) until(t time.Duration) {
	for ; p.next < len(p.order); p.next++ {
		r := &p.reqs[p.order[p.next]]
		if r.end(p.step) > t {
			return
		}
		p.window.push(r.Output)
		p.outputs.push(r.Output)
		p.prompts.push(r.Prompt)
		if p.online != nil {
			p.online.Finished(r.Prompt, r.Output, r.Key)
		}
	}
}

// features are those of a row, at the time past has reached.
func (p *past) features(prompt, age int32, h int) (v vector) {
	v.ofRequest(prompt, age)
	v.ofTable(p.window.predict(int(age), h))
	v.ofTraffic(p.outputs.features(), p.prompts.features())
	return v
}

// window is a survival table over the last 4096 outputs that takes one more in
// O(log n): Fenwick trees of counts and sums over the lengths.
type window struct {
	ring   ring
	counts []int32
	sums   []int64
}

func newWindow(longest int) window {
	return window{ring: newRing(OutputsMost), counts: make([]int32, longest+1), sums: make([]int64, longest+1)}
}

func (w *window) push(v int32) {
	if old, forgot := w.ring.push(v); forgot {
		w.add(old, -1)
	}
	w.add(v, 1)
}

func (w *window) add(v, n int32) {
	for i := int(v); i < len(w.counts); i += i & -i {
		w.counts[i] += n
		w.sums[i] += int64(v) * int64(n)
	}
}

// upTo is how many outputs were at most v, and their sum.
func (w *window) upTo(v int) (n int, sum int64) {
	for i := min(v, len(w.counts)-1); i > 0; i -= i & -i {
		n += int(w.counts[i])
		sum += w.sums[i]
	}
	return n, sum
}

func (w *window) predict(age, h int) Prediction {
	i, before := w.upTo(age)
	j, through := w.upTo(age + h)
	if i == j {
		return unknown(h)
	}
	return Prediction{
		P:  float64(j-i) / float64(len(w.ring.buf)-i),
		Mu: float64(through-before)/float64(j-i) - float64(age),
	}
}
