package draw

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"evenkeel/bench/lab/trace"
)

// answers is how long answers are.
type answers struct {
	kind  int
	mean  float64 // tokens
	share float64 // bimodal: of the long ones; recurrent: of those from templates; uniform: half the width
	ratio float64 // bimodal: long over short; drifting: of the mean at the end over that at the beginning
	tail  float64 // heavy-tailed: the exponent
}

var answerKinds = []string{"bimodal", "heavy-tailed", "geometric", "uniform", "recurrent", "drifting"}

const (
	bimodal = iota
	heavyTailed
	geometric
	evenly
	recurrent
	drifting
)

func (a *answers) draw(r *rand.Rand) {
	a.kind = r.IntN(len(answerKinds))
	a.mean = logUniform(r, meanFrom, meanTo)
	u, ratio := r.Float64(), r.Float64()
	switch a.kind {
	case bimodal:
		a.share, a.ratio = 0.05+0.45*u, 4*math.Pow(25, ratio)
	case heavyTailed:
		a.tail = 1.1 + 1.4*u
	case evenly:
		a.share = 0.2 + 0.8*u
	case recurrent:
		a.share = 0.5 + 0.45*u
	case drifting:
		a.ratio = 2 * math.Pow(5, ratio)
		if u < 0.5 {
			a.ratio = 1 / a.ratio
		}
	}
}

func (a *answers) text() string { return fmt.Sprintf("%s of %.0f", answerKinds[a.kind], a.mean) }

// longest answer there is, in tokens.
const longest = 32_000

// tail is where a heavy tail is cut, as a multiple of the least.
const tail = 50

// next draws the length of an answer, at a share of the run.
func (a *answers) next(r *rand.Rand, at float64) int {
	x := a.mean
	switch a.kind {
	case bimodal:
		x /= 1 - a.share + a.share*a.ratio
		if r.Float64() < a.share {
			x *= a.ratio
		}
		x *= math.Exp(0.2*r.NormFloat64() - 0.02)
	case heavyTailed:
		x /= 1 + (1-math.Pow(tail, 1-a.tail))/(a.tail-1) // the mean, in units of the least
		x *= min(tail, math.Pow(1-r.Float64(), -1/a.tail))
	case evenly:
		x *= 1 + a.share*(2*r.Float64()-1)
	case drifting: // geometric from mean m to ratio*m, in even steps of its logarithm
		slope := math.Log(a.ratio)
		x *= slope / (a.ratio - 1) * math.Exp(slope*at) * r.ExpFloat64()
	default:
		x *= r.ExpFloat64()
	}
	return within(math.Ceil(x-0.5), 1, longest)
}

// prompts is how long prompts are.
type prompts struct {
	kind   int
	median float64
	huge   float64 // share
}

var promptKinds = []struct {
	name           string
	from, to, sdev float64
}{{"short", 50, 500, 0.7}, {"chat", 500, 3000, 1}, {"long", 4000, 30_000, 0.8}, {"mixed with huge", 500, 3000, 1}}

const mixed = 3

func (p *prompts) draw(r *rand.Rand) {
	p.kind = r.IntN(len(promptKinds))
	k := &promptKinds[p.kind]
	p.median = logUniform(r, k.from, k.to)
	if huge := logUniform(r, 0.02, 0.2); p.kind == mixed {
		p.huge = huge
	}
}

func (p *prompts) text() string {
	if p.kind == mixed {
		return fmt.Sprintf("of %.0f, %.0f %% huge", p.median, 100*p.huge)
	}
	return fmt.Sprintf("of %.0f", p.median)
}

// longestPrompt there is, in tokens.
const longestPrompt = 128_000

func (p *prompts) next(r *rand.Rand) int {
	if r.Float64() < p.huge {
		return 40_000 + r.IntN(80_001)
	}
	return within(p.median*math.Exp(promptKinds[p.kind].sdev*r.NormFloat64()), 16, longestPrompt)
}

// templates are prompts that come again, in recurrent loads.
const templates = 100

// requests draws those of a load. At is the gap before each, a second in the mean.
func (l *Load) requests(r *rand.Rand, n int) func(i int) trace.Request {
	fresh := func(i int) trace.Request {
		return trace.Request{Prompt: l.prompts.next(r), Output: l.answers.next(r, float64(i)/float64(n))}
	}
	var again [templates]trace.Request
	for i := range again {
		again[i] = fresh(0)
		again[i].Key = uint64(i) + 1
	}
	return func(i int) trace.Request { // i is its place in the end
		q := fresh(i)
		if l.answers.kind == recurrent && r.Float64() < l.answers.share {
			u := r.Float64()
			q = again[int(templates*u*u)]
			q.Output = within(float64(q.Output)*math.Exp(0.08*r.NormFloat64()), 1, longest)
		}
		q.At = time.Duration(r.ExpFloat64() * float64(time.Second))
		return q
	}
}
