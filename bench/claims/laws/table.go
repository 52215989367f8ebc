package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
)

// tabulate makes laws.json and the tables of the page.
func tabulate(ctx context.Context, cache, root string, out io.Writer) error {
	env, err := install(ctx, cache, out)
	if err != nil {
		return err
	}
	points, err := ask(ctx, env, out)
	if err != nil {
		return err
	}
	all, lacks := fitAll(points)
	text, err := encode(all)
	if err != nil {
		return err
	}
	if err := report.Replace(filepath.Join(root, "bench", "lab", "laws", "laws.json"), text); err != nil {
		return err
	}
	at := filepath.Join(root, "docs", "results", "laws.md")
	if err := page.Write(at, "claim NAME=laws", "laws", "Laws", lawTable(all)+"\n"+againstTable(all)); err != nil {
		return err
	}
	return page.Write(at, "claim NAME=laws", "lacks", "What could not be had", lackTable(lacks))
}

// encode has a law on each line, so that a change shows which ones changed.
func encode(all []laws.Entry) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\"source\": \"kernel times of NVIDIA's aiconfigurator %s (Apache-2.0), fitted by make claim NAME=laws\",\n\"laws\": [\n",
		aiconfigurator)
	for i := range all {
		line, err := json.Marshal(&all[i])
		if err != nil {
			return nil, err
		}
		b.Write(line)
		if i < len(all)-1 {
			b.WriteByte(',')
		}
		b.WriteByte('\n')
	}
	b.WriteString("]}\n")
	return b.Bytes(), nil
}

// short is a model without who made it.
func short(model string) string { return model[strings.Index(model, "/")+1:] }

// Engines are as their makers write them.
var engines = map[string]string{"vllm": "vLLM", "sglang": "SGLang"}

// printed are the laws that the page has.
func printed(e *laws.Entry) bool {
	return (e.Ranks == 8 || e.Ranks == 32) && (e.GPU == "H200" || e.GPU == "B200")
}

// name is a deployment in a table.
func name(e *laws.Entry) string {
	return fmt.Sprintf("%s, %s, %d %s", short(e.Model), engines[e.Engine], e.Ranks, e.GPU)
}

func lawTable(all []laws.Entry) string {
	t := page.Markdown{Head: []string{"model, engine, ranks", "c0, ms", "c1, µs", "own, ms", "sending, ms", "experts, ms", "off, %",
		"prompts: own, µs", "experts and sending, µs", "form", "estimated"}, Text: 2}
	low := promptShare(all)
	shown, worst := 0, 0.0
	var off []float64
	for i := range all {
		e := &all[i]
		off = append(off, e.Fit.Error)
		worst = max(worst, e.Fit.Worst)
		if !printed(e) {
			continue
		}
		shown++
		own, shared := "–", "–"
		estimated := e.Fit.Estimated()
		if p := &e.Prompt; p.Fit.Steps > 0 {
			own, shared = us(p.OwnMs), between(low*(p.MostMs+p.MeanMs), p.MostMs+p.MeanMs)
			for _, part := range p.Fit.Estimated() {
				estimated = append(estimated, "prompts' "+part)
			}
		}
		t.Add(name(e), fmt.Sprintf("%.1f", e.C0Ms), fmt.Sprintf("%.4f", 1000*e.C1Ms),
			fmt.Sprintf("%.3f", e.OwnMs), fmt.Sprintf("%.3f", e.MostMs), fmt.Sprintf("%.3f", e.MeanMs),
			fmt.Sprintf("%.1f, %.0f", 100*e.Fit.Error, 100*e.Fit.Worst), own, shared, e.Form().String(), cmp.Or(strings.Join(estimated, ", "), "–"))
	}
	if len(off) == 0 {
		return "There are no laws."
	}
	slices.Sort(off)
	others := ""
	for i, share := range promptShares(all) {
		if i > 0 {
			others += fmt.Sprintf(" (by the next one %.0f %%)", 100*share)
		}
	}
	return fmt.Sprintf("%d laws of aiconfigurator %s (wheels with SHA-256 %s… and %s…), which measured %s. These are the %d with 8 and 32 "+
		"ranks on H200 and B200; "+
		"`bench/lab/laws/laws.json` has all of them, with 4, 16 and 64 ranks and with H100, GB200 and B300. Half of the laws are less than %.1f "+
		"%% off in the mean of their steps; the worst step is %.0f %% off. "+
		"What was published of prompts is faster than the law, so the ranges begin with %.0f %% of experts and sending: so much would be left "+
		"if the first such row below is true%s.\n\n",
		len(all), aiconfigurator, wheels[0].sha256[:12], wheels[1].sha256[:12], versions(all), shown, 100*off[len(off)/2], 100*worst, 100*low,
		others) + t.String()
}

// versions are those of the engines whose kernels were measured.
func versions(all []laws.Entry) string {
	var names []string
	for i := range all {
		names = append(names, engines[all[i].Engine]+" "+all[i].Version)
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), " and ")
}

func us(ms float64) string { return fmt.Sprintf("%.0f", 1000*ms) }

func between(low, high float64) string {
	if us(low) == us(high) {
		return us(high)
	}
	return us(low) + " to " + us(high)
}

// published is a whole step, or a token of a prompt, that somebody has measured on such engines.
type published struct {
	what      string
	of        deployment
	low, high float64 // ms of a step, or µs of a prompt's token
	requests  float64 // of a rank in the step; 0: a prompt's token
	context   float64 // KV tokens of each
}

func (s *published) prompt() bool { return s.requests == 0 }

// by is what the law says of it.
func (s *published) by(e *laws.Entry) float64 {
	if s.prompt() {
		return 1000 * e.Prompt.Level(chunk) / chunk
	}
	return e.Level(s.requests, s.requests*s.context)
}

// chunk is how many tokens of prompts each rank computes at once.
const chunk = 8192

const deepSeek = "deepseek-ai/DeepSeek-V3"

// Sources stand in the page. Where no law has as many ranks as the step that was published, those
// with fewer and with more stand.
var steps = []published{
	{what: "a step of 72 H100, 256 requests with 2,000 tokens, ms", of: deployment{deepSeek, "sglang", "H100", 32}, low: 92, high: 92, requests: 256, context: 2000},
	{what: "the same", of: deployment{deepSeek, "sglang", "H100", 64}, low: 92, high: 92, requests: 256, context: 2000},
	{what: "the same", of: deployment{deepSeek, "sglang", "H200", 32}, low: 92, high: 92, requests: 256, context: 2000},
	{what: "a step of 48 GB200, 1,408 requests with 2,000 tokens, ms", of: deployment{deepSeek, "sglang", "GB200", 32}, low: 105, high: 105, requests: 1408, context: 2000},
	{what: "the same", of: deployment{deepSeek, "sglang", "GB200", 64}, low: 105, high: 105, requests: 1408, context: 2000},
	{what: "a step of 128 H800, 128 requests with 4,096 tokens, ms", of: deployment{deepSeek, "sglang", "H100", 64}, low: 55, high: 55, requests: 128, context: 4096},
	{what: "a token of prompts, 32 H100, µs", of: deployment{deepSeek, "sglang", "H100", 32}, low: 139, high: 159},
	{what: "a token of prompts, GB200, µs", of: deployment{deepSeek, "sglang", "GB200", 32}, low: 38, high: 54},
}

// differ is by how much a law may be off what is published before the page prints a range.
const differ = 0.2

// promptShares are how much of experts and sending is left of a prompt where what was published is
// true, by each of the published tokens; 1 where the law is near enough.
func promptShares(all []laws.Entry) (shares []float64) {
	for i := range steps {
		s := &steps[i]
		e := find(all, s.of)
		if e == nil || !s.prompt() || e.Prompt.Fit.Steps == 0 {
			continue
		}
		really, by := (s.low+s.high)/2, s.by(e)
		share := 1.0
		if by/really-1 > differ {
			share = max(0, 1-(by-really)/(1000*(e.Prompt.MostMs+e.Prompt.MeanMs)))
		}
		shares = append(shares, share)
	}
	return shares
}

// promptShare is that of the first published token.
func promptShare(all []laws.Entry) float64 {
	if shares := promptShares(all); len(shares) > 0 {
		return shares[0]
	}
	return 1
}

func find(all []laws.Entry, d deployment) *laws.Entry {
	for i := range all {
		if e := &all[i]; (deployment{model: e.Model, engine: e.Engine, gpu: e.GPU, ranks: e.Ranks}) == d {
			return e
		}
	}
	return nil
}

func againstTable(all []laws.Entry) string {
	t := page.Markdown{Head: []string{"law of DeepSeek-V3", "what was published", "published", "by the law", "law / published"}}
	for i := range steps {
		s := &steps[i]
		e := find(all, s.of)
		if e == nil || s.prompt() && e.Prompt.Fit.Steps == 0 {
			continue
		}
		by := s.by(e)
		text := fmt.Sprintf("%.0f", s.low)
		if s.low < s.high {
			text += fmt.Sprintf(" to %.0f", s.high)
		}
		t.Add(fmt.Sprintf("%s, %d %s", engines[s.of.engine], s.of.ranks, s.of.gpu), s.what, text, fmt.Sprintf("%.0f", by),
			fmt.Sprintf("%.2f", 2*by/(s.low+s.high)))
	}
	return t.String()
}

// lackTable has a row for each reason, with the deployments that have it.
func lackTable(lacks []lack) string {
	type key struct{ engine, why, where string }
	where := map[[3]string]map[string][]int{} // engine, reason, model: ranks of each GPU
	for _, l := range lacks {
		k := [3]string{l.engine, l.why, l.model}
		if where[k] == nil {
			where[k] = map[string][]int{}
		}
		where[k][l.gpu] = append(where[k][l.gpu], l.ranks)
	}
	models := map[key][]string{}
	for k, of := range where {
		to := key{k[0], k[1], places(of)}
		models[to] = append(models[to], short(k[2]))
	}
	t := page.Markdown{Head: []string{"model", "engine", "ranks", "why there is no law"}, Text: 3}
	for k, names := range models {
		slices.Sort(names)
		t.Add(strings.Join(names, ", "), engines[k.engine], k.where, k.why)
	}
	slices.SortFunc(t.Rows, func(a, b []string) int { return cmp.Or(cmp.Compare(a[3], b[3]), slices.Compare(a, b)) })
	return t.String()
}

// places are GPUs with their numbers of ranks, those with the same numbers together.
func places(of map[string][]int) string {
	by := map[string][]string{}
	for gpu, ranks := range of {
		text := strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
		by[text] = append(by[text], gpu)
	}
	var all []string
	for ranks, names := range by {
		slices.Sort(names)
		name := strings.Join(names, ", ")
		if len(names) == len(gpus) {
			name = "all GPUs"
		}
		all = append(all, name+": "+ranks)
	}
	slices.Sort(all)
	return strings.Join(all, "; ")
}

// reason is what aiconfigurator says, in a few words.
func reason(text string) string {
	switch {
	case strings.Contains(text, "Cross-node EP requires"):
		return noA2A
	case strings.Contains(text, "MoE data missing"):
		return noKernel
	}
	kind, _, _ := strings.Cut(text, ":")
	return "aiconfigurator ends with " + kind
}
