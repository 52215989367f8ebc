package trace

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"evenkeel/internal/spelling"
)

// Synthetic is the Format of a drawn trace.
const Synthetic Format = "synthetic"

// SynthPrefix stands before a synthetic trace's name where a file could stand.
const SynthPrefix = "synth:"

// Prefixed is the synthetic trace whose prompts share blocks.
const Prefixed = "prefix"

// shapes are the synthetic traces. Times have exponential gaps
// of a second in the mean: a replay at a rate of its own rescales them.
var shapes = []struct {
	name string
	draw func(*rand.Rand) drawer
}{
	{"lognormal", func(r *rand.Rand) drawer {
		return steady(r, func() Request {
			return Request{Prompt: logNormal(r, 7.6, 1, 16, 64_000), Output: logNormal(r, 5.2, 1, 4, 8000)}
		})
	}},
	{"pareto", func(r *rand.Rand) drawer { return steady(r, func() Request { return heavyTailed(r) }) }},
	{"burst", burst},
	{"mix", func(r *rand.Rand) drawer { return steady(r, func() Request { return tinyAndHuge(r) }) }},
	{"recurrent", func(r *rand.Rand) drawer { return steady(r, recurrent(r)) }},
	{"code", func(r *rand.Rand) drawer { return steady(r, completion(r)) }},
	{Prefixed, talking},
}

// drawer yields a request and the gap to the one before, in mean gaps.
type drawer func() (Request, float64)

// SynthNames lists the synthetic traces, with the prefix.
func SynthNames() []string {
	names := make([]string, len(shapes))
	for i := range shapes {
		names[i] = SynthPrefix + shapes[i].name
	}
	return names
}

// Synth draws n requests of a synthetic trace; each seed draws others.
func Synth(name string, n int, seed uint64) (*Trace, error) {
	if n < 1 {
		return nil, fmt.Errorf("%s%s: %d requests; want at least 1", SynthPrefix, name, n)
	}
	for i := range shapes {
		if shapes[i].name != name {
			continue
		}
		next := shapes[i].draw(rand.New(rand.NewPCG(seed, uint64(i)+1)))
		t := &Trace{Format: Synthetic, Requests: make([]Request, n)}
		at := 0.0 // s
		for k := range t.Requests {
			r, gap := next()
			if k > 0 {
				at += gap
			}
			r.At = time.Duration(at * float64(time.Second))
			t.Requests[k] = r
		}
		return t, nil
	}
	return nil, fmt.Errorf("there is no synthetic trace %q%s; there are %s", SynthPrefix+name, spelling.Hint(SynthPrefix+name, SynthNames()),
		strings.Join(SynthNames(), ", "))
}

func steady(r *rand.Rand, request func() Request) drawer {
	return func() (Request, float64) { return request(), r.ExpFloat64() }
}

// logNormal draws tokens, cut to a range.
func logNormal(r *rand.Rand, mu, sigma float64, least, most int) int {
	return within(math.Exp(mu+sigma*r.NormFloat64()), least, most)
}

// within rounds to tokens of a range.
func within(x float64, least, most int) int {
	return int(math.Round(min(float64(most), max(float64(least), x))))
}

func heavyTailed(r *rand.Rand) Request {
	return Request{
		Prompt: logNormal(r, 8, 0.9, 16, 64_000),
		Output: within(60*math.Pow(1-r.Float64(), -1/1.3), 4, 8000),
	}
}

func tinyAndHuge(r *rand.Rand) Request {
	prompt := 50 + r.IntN(501)
	if r.Float64() < 0.1 {
		prompt = 40_000 + r.IntN(80_001)
	}
	return Request{Prompt: prompt, Output: logNormal(r, 5.3, 0.8, 4, 4000)}
}

// burst alternates dense and sparse arrivals of heavy-tailed requests.
func burst(r *rand.Rand) drawer {
	left, gap := 0, 1.6
	return func() (Request, float64) {
		if left == 0 {
			if gap == 1.6 {
				gap, left = 0.15, 50+r.IntN(201)
			} else {
				gap, left = 1.6, 50+r.IntN(401)
			}
		}
		left--
		return heavyTailed(r), gap * r.ExpFloat64()
	}
}

// recurrent draws most requests from templates, the first of them most often;
// the template is the key.
func recurrent(r *rand.Rand) func() Request {
	const least, most = 8, 4000 // output tokens
	fresh := func() Request {
		return Request{Prompt: logNormal(r, 8, 0.9, 32, 60_000), Output: logNormal(r, 5.3, 1.1, least, most)}
	}
	var templates [150]Request
	for i := range templates {
		templates[i] = fresh()
		templates[i].Key = uint64(i) + 1
	}
	return func() Request {
		if r.Float64() >= 0.85 {
			return fresh()
		}
		u := r.Float64()
		q := templates[int(float64(len(templates))*u*u)]
		q.Output = within(float64(q.Output)*math.Exp(0.08*r.NormFloat64()), least, most)
		return q
	}
}

// completion draws as code completion is used: prompts of a file, answers of a
// line. Medians are those that Splitwise (ISCA 2024) gives for Azure's code
// trace, 1,500 and 13 tokens; the mean answer is about 28 tokens.
func completion(r *rand.Rand) func() Request {
	return func() Request {
		return Request{Prompt: logNormal(r, math.Log(1500), 0.8, 16, 7500), Output: logNormal(r, math.Log(13), 1.25, 1, 1000)}
	}
}
