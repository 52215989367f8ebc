package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
)

// onGPU is a part of a step as check.py printed it, in ms over all layers.
type onGPU struct {
	Model   string  `json:"model"`
	Ranks   int     `json:"ranks"`
	Part    string  `json:"part"` // attention, projections, experts or prompts, which are the experts of a step of prompts
	Rows    int     `json:"rows"`
	Tokens  int     `json:"tokens"`
	Ms      float64 `json:"ms"`
	Least   float64 `json:"least"`   // what reading and arithmetic take at the rates of the GPU
	Unequal float64 `json:"unequal"` // experts on the fullest rank, where some are wanted more
	Fullest float64 `json:"fullest"` // how many rows that rank has, with the mean rank's for one
}

// machine is where all of a file was measured.
type machine struct {
	GPU       string  `json:"gpu"`
	Torch     string  `json:"torch"`
	Triton    string  `json:"triton"`
	GBs       float64 `json:"gb_s"`
	FP8TFlops float64 `json:"fp8_tflops"`
	system    string  // aiconfigurator's name of the GPU
	all       []onGPU
}

// readMeasured reads what check.py printed.
func readMeasured(from io.Reader) (m machine, err error) {
	lines := bufio.NewScanner(from)
	if !lines.Scan() || json.Unmarshal(lines.Bytes(), &m) != nil || m.GPU == "" {
		return m, errors.New("the first line does not name a GPU: it is not what check.py prints")
	}
	for _, system := range slices.Backward(slices.Sorted(maps.Keys(gpus))) { // GB200 is before B200
		if strings.Contains(m.GPU, gpus[system]) {
			m.system = system
		}
	}
	if m.system == "" {
		return m, fmt.Errorf("there are no laws of %q", m.GPU)
	}
	for lines.Scan() {
		var one onGPU
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return m, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		m.all = append(m.all, one)
	}
	return m, lines.Err()
}

// check writes what was measured beside what the laws were made of: into the page, or to out.
func check(ctx context.Context, cache, into string, files []string, out io.Writer) error {
	env, err := install(ctx, cache, out)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, name := range files {
		var from io.Reader = os.Stdin
		if name != "-" {
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			from = bytes.NewReader(b)
		}
		m, err := readMeasured(from)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		var points []point
		for _, g := range m.grids() {
			some, err := askOne(ctx, env, g)
			if err != nil {
				return err
			}
			points = append(points, some...)
		}
		text.WriteString(m.table(points))
	}
	if into == "" {
		_, err = io.WriteString(out, text.String())
		return err
	}
	return page.Write(into, "claim NAME=laws", "check", "Measured", text.String())
}

// grids are the steps whose parts were measured, by models with the same ranks.
func (m *machine) grids() (all []grid) {
	by := map[int]*grid{}
	for _, one := range m.all {
		g := by[one.Ranks]
		if g == nil {
			g = &grid{GPU: m.system, Engines: []string{"vllm", "sglang"}, Ranks: []int{one.Ranks}}
			by[one.Ranks] = g
		}
		add(&g.Models, one.Model)
		switch one.Part {
		case "attention":
			add(&g.Contexts, one.Tokens)
		case "experts":
			add(&g.Rows, one.Rows)
		case "prompts":
			add(&g.Prompts, one.Tokens)
		}
	}
	for _, ranks := range slices.Sorted(maps.Keys(by)) {
		all = append(all, *by[ranks])
	}
	return all
}

func add[T comparable](to *[]T, x T) {
	if !slices.Contains(*to, x) {
		*to = append(*to, x)
	}
}

// sizes are one row of the table: a part of a model at all sizes that were measured.
type sizes struct {
	label                 string
	least, ms, unequal    []float64
	byEngine              map[string][]float64 // nothing where the step does not fit into the memory
	part                  string
	fullest, fullestCount float64 // sum and number
}

// rows are those of one model. With MLA, aiconfigurator's times of attention hold the projections.
func (m *machine) rows(model string, points []point) (all []*sizes) {
	var inside onGPU // projections of as many rows as attention was measured with
	for _, part := range []string{"projections", "attention", "experts", "prompts"} {
		s := &sizes{part: part, byEngine: map[string][]float64{}}
		var labels []string
		rows := 0
		for _, one := range m.all {
			if one.Model != model || one.Part != part {
				continue
			}
			if part == "projections" && latent(model) {
				if inside.Ms == 0 {
					inside = one
				}
				continue
			}
			if rows = one.Rows; part == "attention" {
				one.Ms, one.Least = one.Ms+inside.Ms, one.Least+inside.Least
			}
			labels = append(labels, report.Grouped(float64(max(one.Rows, one.Tokens)), 0))
			s.least, s.ms = append(s.least, one.Least), append(s.ms, one.Ms)
			if one.Unequal > 0 {
				s.unequal = append(s.unequal, one.Unequal)
				s.fullest, s.fullestCount = s.fullest+one.Fullest, s.fullestCount+1
			}
			for engine := range engines {
				s.byEngine[engine] = append(s.byEngine[engine], one.by(engine, points))
			}
		}
		if len(s.ms) == 0 {
			continue
		}
		what := map[string]string{"projections": "projections; requests", "experts": "experts; requests",
			"prompts": "experts; tokens of a prompt"}[part]
		if part == "attention" {
			what = fmt.Sprintf("attention of %d requests; tokens of each", rows)
			if inside.Ms > 0 {
				what = "projections and " + what
			}
		}
		s.label = what + ": " + strings.Join(labels, ", ")
		all = append(all, s)
	}
	return all
}

// latent says whether a model has MLA.
func latent(name string) bool {
	return slices.ContainsFunc(models, func(m model) bool { return m.name == name && strings.Contains(m.attention, "MLA") })
}

// by is the same part in what the laws were made of; 0: there is none.
func (m *onGPU) by(engine string, points []point) float64 {
	for i := range points {
		p := &points[i]
		if p.Model != m.Model || p.Engine != engine || p.Why != "" || (p.Phase == "prompt") != (m.Part == "prompts") ||
			p.Rows != m.Rows || m.Tokens > 1 && p.Tokens != m.Tokens {
			continue
		}
		switch m.Part {
		case "attention":
			return p.Attention[0]
		case "projections":
			return p.Dense[0]
		default:
			return p.Experts[0]
		}
	}
	return 0
}

// table is what was measured on one GPU, and how it compares.
func (m *machine) table(points []point) string {
	t := page.Markdown{Head: []string{"model, ranks", "part, ms", "at least", "measured", "unequally", "vLLM's", "SGLang's"}, Text: 7}
	var names []string
	ranks := map[string]int{}
	for _, one := range m.all {
		add(&names, one.Model)
		ranks[one.Model] = one.Ranks
	}
	times := map[[2]string][]float64{} // part and engine: what the laws say, with what was measured for one
	var fullest, count float64
	for _, name := range names {
		for _, s := range m.rows(name, points) {
			t.Add(fmt.Sprintf("%s, %d", short(name), ranks[name]), s.label, list(s.least), list(s.ms), list(s.unequal), list(s.byEngine["vllm"]),
				list(s.byEngine["sglang"]))
			fullest, count = fullest+s.fullest, count+s.fullestCount
			beside := s.ms
			if len(s.unequal) > 0 {
				beside = s.unequal
			}
			for engine, by := range s.byEngine {
				for i, ms := range by {
					if ms > 0 {
						k := [2]string{s.part, engine}
						times[k] = append(times[k], ms/beside[i])
					}
				}
			}
		}
	}
	sums := page.Markdown{Head: []string{"with what was measured for 1", "vLLM's", "SGLang's"}}
	for _, part := range []struct{ key, name string }{
		{"attention", "attention"},
		{"projections", "projections"},
		{"experts", "experts, unequally"},
		{"prompts", "experts of prompts, unequally"},
	} {
		sums.Add(part.name, spread(times[[2]string{part.key, "vllm"}]), spread(times[[2]string{part.key, "sglang"}]))
	}
	return fmt.Sprintf("**%s**, PyTorch %s, Triton %s: %.0f GB/s, %.0f TFLOP/s in fp8. Unequally, the fullest rank has %.1f times the mean "+
		"rows.\n\n",
		m.GPU, m.Torch, m.Triton, m.GBs, m.FP8TFlops, fullest/max(count, 1)) + t.String() + "\n" + sums.String() + "\n"
}

// list has the times of all sizes.
func list(ms []float64) string {
	if len(ms) == 0 {
		return "–"
	}
	var all []string
	for _, x := range ms {
		switch {
		case x == 0:
			all = append(all, "–")
		case x < 100:
			all = append(all, report.Grouped(x, 1))
		default:
			all = append(all, report.Grouped(x, 0))
		}
	}
	return strings.Join(all, "; ")
}

// spread is from the least to the largest.
func spread(x []float64) string {
	if len(x) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f to %.2f", slices.Min(x), slices.Max(x))
}

// measuredFiles are those that the page has.
func measuredFiles() ([]string, error) {
	return filepath.Glob("bench/claims/laws/measured/*.jsonl")
}
