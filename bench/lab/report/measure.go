package report

import (
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// Step is one step of a barrier group, as the engines logged it. Only running
// requests count: KV that waits for a slot is no load.
type Step struct {
	Start    time.Duration // since the run began
	Length   time.Duration
	Late     time.Duration // how much later than Start+Length it ended
	Running  []int         // requests, by rank
	KVTokens []int         // by rank
	Prefill  []int         // tokens of prompts, by rank; nil: the ranks only decode
}

// End is when the step was due to end.
func (s Step) End() time.Duration { return s.Start + s.Length }

// load of a step, over its ranks.
func (s Step) load() (largest, smallest, sum int) {
	if len(s.KVTokens) == 0 {
		return 0, 0, 0
	}
	for _, l := range s.KVTokens {
		sum += l
	}
	return slices.Max(s.KVTokens), slices.Min(s.KVTokens), sum
}

func (s Step) imbalance() int {
	largest, _, sum := s.load()
	return len(s.KVTokens)*largest - sum
}

// prefills tells how many ranks computed a prompt, and how many tokens all computed.
func (s Step) prefills() (ranks, tokens int) {
	for _, n := range s.Prefill {
		tokens += n
		if n > 0 {
			ranks++
		}
	}
	return ranks, tokens
}

// StepModel is how long a step takes: C0 + C1 times the largest load of the
// group, in KV tokens, and Request for each request that a rank has in the mean.
// Where ranks also prefill, the slowest rank takes Own more for each token of its
// prompts, all take Shared more for each token that a rank computes in the mean,
// and Prefill more if any rank computes one.
type StepModel struct {
	C0                            time.Duration
	C1                            float64 // ns, which is less than one on some GPUs
	Request, Own, Shared, Prefill time.Duration
}

// KVShare is the part of a step that depends on the load.
func (m StepModel) KVShare(kvTokens float64) float64 {
	kv := m.C1 * kvTokens
	if kv == 0 {
		return 0
	}
	return kv / (float64(m.C0) + kv)
}

// Window is the measured part of a run, since its beginning. An empty one
// measures nothing.
type Window struct{ From, To time.Duration }

// Length is 0 for an empty window.
func (w Window) Length() time.Duration { return max(0, w.To-w.From) }

// Cut keeps the steps that lie wholly in the window.
func (w Window) Cut(steps []Step) []Step {
	var in []Step
	for _, s := range steps {
		if s.Start >= w.From && s.End() <= w.To {
			in = append(in, s)
		}
	}
	return in
}

// Measure takes the measures of steps that follow each other,
// and what the same steps would give if every one were balanced: the bound.
// Each running request generates a token a step. No steps: nothing is measured.
func Measure(steps []Step, m StepModel) (run, bound Sample) {
	run, bound = Sample{}, Sample{}
	if len(steps) == 0 {
		return run, bound
	}
	var imbalance, spread, idle, tokens, held, length, kvLength, ideal, prefills, empty float64
	mixed := false // some step tells of prefills
	late := make([]float64, 0, len(steps))
	for _, s := range steps {
		largest, smallest, sum := s.load()
		ranks := float64(len(s.KVTokens))
		imbalance += float64(s.imbalance())
		spread += float64(largest - smallest)
		if largest > 0 {
			idle += float64(s.imbalance()) / (ranks * float64(largest))
		}
		running := 0.0
		for _, n := range s.Running {
			running += float64(n)
		}
		tokens += running
		held += float64(sum)
		length += float64(s.Length)
		kvLength += m.C1 * float64(largest)
		ideal += float64(m.C0) + (m.C1*float64(sum)+float64(m.Request)*running)/max(1, ranks)
		mixed = mixed || s.Prefill != nil
		if computing, prompts := s.prefills(); computing > 0 {
			prefills++
			empty += 1 - float64(computing)/float64(len(s.Prefill))
			ideal += float64(m.Prefill) + float64(m.Own+m.Shared)*float64(prompts)/float64(len(s.Prefill))
		}
		late = append(late, millis(float64(s.Late)))
	}
	n := float64(len(steps))
	span := steps[len(steps)-1].End() - steps[0].Start
	slices.Sort(late)

	run[Imbalance], run[MaxMinusMin], run[IdleShare] = imbalance/n, spread/n, idle/n
	run[TokensPerS] = tokens / span.Seconds()
	run[StepMean], run[KVShare] = millis(length/n), kvLength/length
	run[KVTokens], run[Running] = held/n, tokens/n
	run[StepLateP50], run[StepLateP99] = stats.Percentile(late, 0.50), stats.Percentile(late, 0.99)
	run[WindowS], run[Steps] = span.Seconds(), n
	if mixed {
		run[MixedSteps] = prefills / n
	}
	if prefills > 0 {
		run[EmptyRanks] = empty / prefills
	}

	bound[Imbalance], bound[MaxMinusMin], bound[IdleShare] = 0, 0, 0
	bound[TokensPerS] = tokens / (ideal / 1e9)
	bound[StepMean] = millis(ideal / n)
	if ranks := len(steps[0].KVTokens); ranks > 0 {
		m.C0 += time.Duration(float64(m.Request) * tokens / n / float64(ranks))
		bound[KVShare] = m.KVShare(held / n / float64(ranks))
	}
	return run, bound
}

func millis(nanoseconds float64) float64 { return nanoseconds / 1e6 }
