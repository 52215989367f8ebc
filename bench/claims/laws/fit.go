package main

import (
	"cmp"
	"iter"
	"math"
	"slices"
	"strconv"

	"evenkeel/bench/lab/laws"
	"evenkeel/internal/stats"
)

// model is one that is asked for. In vLLM its router says whether experts skip the rows that pad.
type model struct {
	name, attention string
	masked          bool
}

// Routers by vLLM 0.33: FusedTopK and FusedTopKBias mask rows that pad; GroupedTopK routes them.
// Those of gpt-oss, Qwen3.5 and Nemotron are inferred.
var models = []model{
	{"deepseek-ai/DeepSeek-V3", "MLA", false},
	{"moonshotai/Kimi-K2-Instruct", "MLA", false},
	{"moonshotai/Kimi-K2.5", "MLA", false},
	{"deepseek-ai/DeepSeek-V3.2", "sparse MLA", false},
	{"zai-org/GLM-5-FP8", "sparse MLA", false},
	{"sgl-project/DeepSeek-V4-Flash-FP8", "sparse, compressed KV", true},
	{"Qwen/Qwen3-235B-A22B-FP8", "GQA", true},
	{"Qwen/Qwen3-30B-A3B-FP8", "GQA", true},
	{"MiniMaxAI/MiniMax-M2.5", "GQA", true},
	{"openai/gpt-oss-120b", "GQA, half of it with a window", true},
	{"Qwen/Qwen3.5-397B-A17B", "linear and GQA", true},
	{"nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "Mamba and GQA", false},
}

// deployment is what has one law.
type deployment struct {
	model, engine, gpu string
	ranks              int
}

func (d deployment) compare(e deployment) int {
	return cmp.Or(cmp.Compare(d.model, e.model), cmp.Compare(d.engine, e.engine), cmp.Compare(d.gpu, e.gpu), cmp.Compare(d.ranks, e.ranks))
}

// lack is what could not be had.
type lack struct {
	deployment
	why string
}

// Why there is no law.
const (
	noRoom   = "weights or KV of six steps do not fit"
	noA2A    = "no times of sending between nodes"
	noKernel = "no times of its experts"
	noPrompt = "prompts: "
)

// leastSteps are needed for a law, and for that of prompts.
const (
	leastSteps   = 6
	leastPrompts = 3
)

// fitAll makes the laws of all deployments that have enough steps.
func fitAll(points []point) (all []laws.Entry, lacks []lack) {
	decodes, prompts, why := map[deployment][]point{}, map[deployment][]point{}, map[deployment]string{}
	for _, p := range points {
		switch d := (deployment{model: p.Model, engine: p.Engine, gpu: p.GPU, ranks: p.Ranks}); {
		case p.Why != "" && (why[d] == "" || p.Phase == "decode"):
			why[d] = reason(p.Why)
		case p.Why != "":
		case p.Phase == "decode":
			decodes[d] = append(decodes[d], p)
		default:
			prompts[d] = append(prompts[d], p)
		}
	}
	for d := range every() {
		steps, left := consistent(decodes[d])
		if len(steps) < leastSteps {
			lacks = append(lacks, lack{d, cmp.Or(why[d], noRoom)})
			continue
		}
		e := decode(d, steps)
		e.Fit.Left = left
		if steps, left := consistent(prompts[d]); len(steps) >= leastPrompts {
			e.Prompt = prompt(steps)
			e.Prompt.Fit.Left = left
		} else {
			lacks = append(lacks, lack{d, noPrompt + cmp.Or(why[d], noRoom)})
		}
		all = append(all, e)
	}
	return all, lacks
}

// every yields all deployments that are asked for, in the order of laws.json.
func every() iter.Seq[deployment] {
	var all []deployment
	for system, gpu := range gpus {
		g := wanted(system)
		for _, m := range g.Models {
			for _, engine := range g.Engines {
				for _, ranks := range g.Ranks {
					all = append(all, deployment{model: m, engine: engine, gpu: gpu, ranks: ranks})
				}
			}
		}
	}
	slices.SortFunc(all, deployment.compare)
	return slices.Values(all)
}

// mostOfLarger is how many times as long a part may take as the same part of the next larger step.
const mostOfLarger = 3

// consistent leaves out steps of which a part takes much longer than that of the next larger step:
// these were measured wrongly.
func consistent(steps []point) (kept []point, left int) {
	for i := range steps {
		p := &steps[i]
		var larger *point
		for k := range steps {
			q := &steps[k]
			same := q.Rows > p.Rows && q.Tokens == p.Tokens || p.Phase == "prompt" && q.Tokens > p.Tokens
			if same && (larger == nil || q.Rows*q.Tokens < larger.Rows*larger.Tokens) {
				larger = q
			}
		}
		if larger != nil &&
			slices.ContainsFunc([][2]part{{p.Attention, larger.Attention}, {p.Dense, larger.Dense}, {p.Sending, larger.Sending},
				{p.Experts, larger.Experts}},
				func(of [2]part) bool { return of[0][0] > mostOfLarger*of[1][0]+1 }) {
			left++
			continue
		}
		kept = append(kept, *p)
	}
	return kept, left
}

// decode fits the law of steps without prompts. Each part is fitted by itself: all parts are
// weighted alike, so their sum fits the whole step.
func decode(d deployment, steps []point) laws.Entry {
	rows := func(p *point) []float64 { return []float64{1, float64(p.Rows)} }
	own := fitPart(steps, func(p *point) []float64 { return append(rows(p), kv(p)) },
		func(p *point) float64 { return p.Attention[0] + p.Dense[0] })
	sending := fitPart(steps, rows, func(p *point) float64 { return p.Sending[0] })
	experts := fitPart(steps, rows, func(p *point) float64 { return p.Experts[0] })
	of := models[slices.IndexFunc(models, func(m model) bool { return m.name == d.model })]
	e := laws.Entry{
		Model: d.model, Engine: d.engine, Version: steps[0].Version, GPU: d.gpu, Ranks: d.ranks, Attention: of.attention,
		AllToAll: sends(steps[0].Sends), Graphs: true, Masked: of.masked && d.engine == "vllm" || d.engine == "sglang" && steps[0].Sends != "",
		C0Ms: digits(own[0] + sending[0] + experts[0]), C1Ms: digits(own[2]), OwnMs: digits(own[1]), MostMs: digits(sending[1]),
		MeanMs: digits(experts[1]),
	}
	first, last := steps[0], steps[0]
	for _, p := range steps {
		if p.Tokens > last.Tokens {
			last = p
		}
	}
	if last.Tokens > first.Tokens {
		e.KVBytes = int(math.Round((last.KVBytes - first.KVBytes) / float64(last.Tokens-first.Tokens)))
	}
	e.Fit = fitted(steps, func(p *point) float64 { return e.Level(float64(p.Rows), kv(p)) })
	return e
}

// kv is how many tokens a rank holds in a decode step.
func kv(p *point) float64 { return float64(p.Rows) * float64(p.Tokens+1) }

// prompt fits the law of steps that compute a prompt on each rank.
func prompt(steps []point) laws.Prompt {
	tokens := func(p *point) []float64 { return []float64{1, float64(p.Tokens)} }
	own := fitPart(steps, tokens, func(p *point) float64 { return p.Attention[0] + p.Dense[0] })
	sending := fitPart(steps, tokens, func(p *point) float64 { return p.Sending[0] })
	experts := fitPart(steps, tokens, func(p *point) float64 { return p.Experts[0] })
	l := laws.Prompt{AllToAll: sends(steps[0].Sends), C0Ms: digits(own[0] + sending[0] + experts[0]), OwnMs: digits(own[1]),
		MostMs: digits(sending[1]), MeanMs: digits(experts[1])}
	l.Fit = fitted(steps, func(p *point) float64 { return l.Level(float64(p.Tokens)) })
	return l
}

// sends names the all-to-all. Without one, engines gather all rows and scatter the sums.
func sends(name string) string { return cmp.Or(name, "allgather_reducescatter") }

// fitPart fits a part of steps by least squares, each error taken as a share of its whole step. No
// coefficient is negative: of all choices of columns it takes the one that fits best.
func fitPart(steps []point, columns func(*point) []float64, y func(*point) float64) (best []float64) {
	n := len(columns(&steps[0]))
	best = make([]float64, n)
	least := math.Inf(1)
	for choice := range 1 << n {
		var rows [][]float64
		var ys []float64
		for i := range steps {
			p := &steps[i]
			var row []float64
			for k, x := range columns(p) {
				if choice>>k&1 == 1 {
					row = append(row, x/p.ms())
				}
			}
			rows, ys = append(rows, row), append(ys, y(p)/p.ms())
		}
		of := make([]float64, n)
		if choice > 0 {
			r, ok := stats.Regress(rows, ys)
			if !ok || slices.Min(r.Of) < 0 {
				continue
			}
			at := 0
			for k := range n {
				if choice>>k&1 == 1 {
					of[k], at = r.Of[at], at+1
				}
			}
		}
		sum := 0.0
		for i := range steps {
			p, by := &steps[i], 0.0
			for k, x := range columns(p) {
				by += of[k] * x
			}
			sum += math.Pow((by-y(p))/p.ms(), 2)
		}
		if sum < least {
			best, least = of, sum
		}
	}
	return best
}

// fitted is how well a law fits its steps.
func fitted(steps []point, by func(*point) float64) laws.Fit {
	f := laws.Fit{Steps: len(steps)}
	var own, sending, experts part
	for i := range steps {
		p := &steps[i]
		off := math.Abs(by(p)/p.ms() - 1)
		f.Error += off / float64(len(steps))
		f.Worst = max(f.Worst, off)
		for k := range 2 {
			own[k] += p.Attention[k] + p.Dense[k]
			sending[k] += p.Sending[k]
			experts[k] += p.Experts[k]
		}
	}
	f.Error, f.Worst = digits(f.Error), digits(f.Worst)
	f.Own, f.Sending, f.Experts = measured(own), measured(sending), measured(experts)
	return f
}

func measured(p part) float64 {
	if p[0] == 0 {
		return 1
	}
	return math.Round(100*p[1]/p[0]) / 100
}

// digits keeps four: no constant is known better, and rounding hides how machines add.
func digits(x float64) float64 {
	x, _ = strconv.ParseFloat(strconv.FormatFloat(x, 'g', 4, 64), 64)
	return x
}
