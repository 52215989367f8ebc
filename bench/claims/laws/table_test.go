package main

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/laws"
)

// made are the steps of a deployment whose law is known.
func made(d deployment, e *laws.Entry) (all []point) {
	of := point{GPU: d.gpu, Engine: d.engine, Model: d.model, Ranks: d.ranks, Version: "1", Sends: "deepep_ll", Phase: "decode"}
	for _, n := range []int{8, 64, 256} {
		for _, tokens := range []int{1000, 16_000} {
			p, rows := of, float64(n)
			p.Rows, p.Tokens, p.KVBytes = n, tokens, 5e6+35_136*float64(tokens)
			attention, sending := e.C1Ms*kv(&p), 1+e.MostMs*rows
			p.Attention, p.Dense = part{attention, attention}, part{e.C0Ms - 1 + e.OwnMs*rows, 0}
			p.Sending, p.Experts = part{sending, sending}, part{e.MeanMs * rows, e.MeanMs * rows}
			all = append(all, p)
		}
	}
	of.Phase, of.Sends, of.Rows = "prompt", "deepep_ht", 1
	for _, tokens := range []int{512, 2048, 8192} {
		p, x := of, float64(tokens)
		p.Tokens = tokens
		p.Attention, p.Sending, p.Experts = part{e.Prompt.C0Ms + e.Prompt.OwnMs*x}, part{e.Prompt.MostMs * x}, part{e.Prompt.MeanMs * x}
		all = append(all, p)
	}
	return all
}

var (
	kimi  = deployment{model: "moonshotai/Kimi-K2-Instruct", engine: "sglang", gpu: "B200", ranks: 16}
	truth = laws.Entry{C0Ms: 12, C1Ms: 2e-5, OwnMs: 0.05, MostMs: 0.1, MeanMs: 0.3,
		Prompt: laws.Prompt{C0Ms: 20, OwnMs: 0.05, MostMs: 0.02, MeanMs: 0.1}}
)

func TestLawsAreFoundInTheirSteps(t *testing.T) {
	all, lacks := fitAll(append(made(kimi, &truth),
		point{GPU: "H100", Engine: "vllm", Model: kimi.model, Ranks: 4, Phase: "decode", Why: "E: MoE data missing for a key"}))
	require.Len(t, all, 1)
	e := &all[0]
	require.InDeltaSlice(t, []float64{12, 2e-5, 0.05, 0.1, 0.3}, []float64{e.C0Ms, e.C1Ms, e.OwnMs, e.MostMs, e.MeanMs}, 1e-6)
	require.InDeltaSlice(t, []float64{20, 0.05, 0.02, 0.1}, []float64{e.Prompt.C0Ms, e.Prompt.OwnMs, e.Prompt.MostMs, e.Prompt.MeanMs}, 1e-6)
	require.Less(t, e.Fit.Worst, 1e-3)
	require.Equal(t, "MLA", e.Attention)
	require.Equal(t, 35_136, e.KVBytes, "without what a request holds at once")
	require.Equal(t, []string{"own"}, e.Fit.Estimated())
	require.True(t, e.Masked, "SGLang with deepep skips the rows that pad")
	require.Len(t, lacks, 12*2*5*5-1)
	require.Contains(t, lacks, lack{deployment{model: kimi.model, engine: "vllm", gpu: "H100", ranks: 4}, noKernel})
	require.Contains(t, lacks, lack{deployment{model: kimi.model, engine: "vllm", gpu: "H100", ranks: 8}, noRoom})
	text, err := encode(all)
	require.NoError(t, err)
	var f laws.File
	require.NoError(t, json.Unmarshal(text, &f))
	require.Equal(t, all, f.Laws)
}

// What falls with the load is put into the constant: no part costs less than nothing.
func TestNoConstantIsNegative(t *testing.T) {
	steps := made(kimi, &truth)[:6]
	for i := range steps {
		steps[i].Sending[0] = 12 - 0.01*float64(steps[i].Rows)
	}
	e := decode(kimi, steps)
	require.Zero(t, e.MostMs)
	require.Greater(t, e.C0Ms, 20.)
}

func TestAStepThatALargerOneContradictsIsLeftOut(t *testing.T) {
	steps := made(kimi, &truth)
	steps[0].Sending[0], steps[6].Sending[0] = 1000, 1000 // the smallest decode step and the smallest prompt
	all, _ := fitAll(steps)
	require.Len(t, all, 0, "five steps are not enough")
	steps[0] = made(kimi, &truth)[0]
	all, lacks := fitAll(steps)
	require.Len(t, all, 1)
	require.Zero(t, all[0].Prompt, "two prompts are not enough")
	require.Contains(t, lacks, lack{kimi, noPrompt + noRoom})
}

// Where prompts were measured faster than the law says, the page has a range.
func TestARangeIsPrintedWhereALawIsFarOff(t *testing.T) {
	of := steps[slices.IndexFunc(steps, func(s published) bool { return s.prompt() })].of
	e := laws.Entry{Model: of.model, Engine: of.engine, GPU: of.gpu, Ranks: of.ranks,
		Prompt: laws.Prompt{OwnMs: 0.05, MostMs: 0.05, MeanMs: 0.15, Fit: laws.Fit{Steps: 5}}}
	require.InDelta(t, 0.495, promptShare([]laws.Entry{e}), 1e-9, "149 of 250 µs: 99 of 200 are left")
	require.Equal(t, "99 to 200", between(0.495*0.2, 0.2))
	require.Contains(t, againstTable([]laws.Entry{e}), "| SGLang, 32 H100 | a token of prompts, 32 H100, µs | 139 to 159 | 250 | 1.68 |")
	e.Prompt.MeanMs = 0.06
	require.EqualValues(t, 1, promptShare([]laws.Entry{e}))
	require.EqualValues(t, 1, promptShare(nil))
}

func TestWhatIsLackingIsPutTogether(t *testing.T) {
	var lacks []lack
	lacking := func(model, engine, gpu string, ranks int) {
		lacks = append(lacks, lack{deployment{model: model, engine: engine, gpu: gpu, ranks: ranks}, noRoom})
	}
	for _, gpu := range gpus {
		for _, model := range []string{"a/x", "b/y"} {
			lacking(model, "vllm", gpu, 4)
			lacking(model, "vllm", gpu, 8)
		}
	}
	lacking("a/x", "sglang", "H100", 4)
	lacking("a/x", "sglang", "B200", 8)
	table := lackTable(lacks)
	require.Contains(t, table, "| x, y | vLLM | all GPUs: 4, 8 | "+noRoom+" |\n")
	require.Contains(t, table, "| x | SGLang | B200: 8; H100: 4 | "+noRoom+" |\n")
	require.Equal(t, 4, strings.Count(table, "\n"))
	require.Equal(t, noA2A, reason("PerfDataNotAvailableError: Cross-node EP requires DeepEP A2A data"))
	require.Equal(t, "aiconfigurator ends with KeyError", reason("KeyError: 'x'"))
}

func TestWhatTheProgramPrintsIsRead(t *testing.T) {
	line := `{"gpu": "gb200", "engine": "vllm", "model": "m", "ranks": 8, "phase": "decode", "version": "1", "sends": "", "rows": 8, "tokens": 1000, "attention": [1.5, 1], "dense": [1, 0], "sending": [0, 0], "experts": [2, 2]}`
	all, err := parse(bytes.NewBufferString("a note\n" + line + "\n"))
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, "GB200", all[0].GPU)
	require.InDelta(t, 4.5, all[0].ms(), 1e-9)
	for name, text := range map[string]string{"nothing": "", "half a line": line[:50], "another GPU": strings.ReplaceAll(line, "gb200", "x")} {
		_, err := parse(bytes.NewBufferString(text))
		require.Error(t, err, name)
	}
}

// The page has the laws that are shipped, as they are printed now.
func TestThePageHasTheLawsThatAreShipped(t *testing.T) {
	text, err := os.ReadFile("../../../docs/results/laws.md")
	require.NoError(t, err)
	all := laws.All()
	require.Contains(t, string(text), lawTable(all)+"\n"+againstTable(all), "run make claim NAME=laws")
	for i := range all {
		if e := &all[i]; printed(e) {
			require.Contains(t, string(text), "| "+name(e)+" |")
		}
	}
}
