package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const onOneGPU = `{"gpu": "NVIDIA H100 80GB HBM3", "torch": "2", "triton": "3", "gb_s": 3000, "fp8_tflops": 1300}
{"model": "Qwen/Qwen3-30B-A3B-FP8", "ranks": 8, "part": "projections", "rows": 16, "tokens": 1, "ms": 2, "least": 1}
{"model": "Qwen/Qwen3-30B-A3B-FP8", "ranks": 8, "part": "experts", "rows": 16, "tokens": 1, "ms": 3, "least": 1, "unequal": 4, "fullest": 1.5}
{"model": "Qwen/Qwen3-30B-A3B-FP8", "ranks": 8, "part": "attention", "rows": 16, "tokens": 1000, "ms": 5, "least": 1}
{"model": "deepseek-ai/DeepSeek-V3", "ranks": 16, "part": "projections", "rows": 16, "tokens": 1, "ms": 2, "least": 1}
{"model": "deepseek-ai/DeepSeek-V3", "ranks": 16, "part": "prompts", "rows": 1, "tokens": 1024, "ms": 3, "least": 1, "unequal": 4, "fullest": 1.5}
{"model": "deepseek-ai/DeepSeek-V3", "ranks": 16, "part": "attention", "rows": 16, "tokens": 1000, "ms": 5, "least": 1}
`

func TestWhatWasMeasuredStandsBesideTheSamePart(t *testing.T) {
	m, err := readMeasured(strings.NewReader(onOneGPU))
	require.NoError(t, err)
	require.Equal(t, "h100_sxm", m.system)
	require.Equal(t, []grid{
		{GPU: "h100_sxm", Engines: []string{"vllm", "sglang"}, Models: []string{"Qwen/Qwen3-30B-A3B-FP8"}, Ranks: []int{8}, Rows: []int{16}, Contexts: []int{1000}},
		{GPU: "h100_sxm", Engines: []string{"vllm", "sglang"}, Models: []string{deepSeek}, Ranks: []int{16}, Contexts: []int{1000}, Prompts: []int{1024}},
	}, m.grids())
	table := m.table([]point{
		{Engine: "vllm", Model: "Qwen/Qwen3-30B-A3B-FP8", Phase: "decode", Rows: 16, Tokens: 1000, Attention: part{10}, Dense: part{6}, Experts: part{8}},
		{Engine: "vllm", Model: "Qwen/Qwen3-30B-A3B-FP8", Phase: "decode", Rows: 64, Tokens: 1000, Attention: part{99}, Dense: part{99}, Experts: part{99}},
		{Engine: "vllm", Model: deepSeek, Phase: "prompt", Rows: 1, Tokens: 1024, Experts: part{12}},
		{Engine: "vllm", Model: deepSeek, Phase: "decode", Rows: 16, Tokens: 1000, Attention: part{14}},
		{Engine: "sglang", Model: deepSeek, Phase: "decode", Rows: 16, Tokens: 1000, Why: "no times"},
	})
	for _, row := range []string{
		"| Qwen3-30B-A3B-FP8, 8 | projections; requests: 16 | 1.0 | 2.0 | – | 6.0 | – |",
		"| Qwen3-30B-A3B-FP8, 8 | attention of 16 requests; tokens of each: 1,000 | 1.0 | 5.0 | – | 10.0 | – |",
		"| Qwen3-30B-A3B-FP8, 8 | experts; requests: 16 | 1.0 | 3.0 | 4.0 | 8.0 | – |",
		"| DeepSeek-V3, 16 | projections and attention of 16 requests; tokens of each: 1,000 | 2.0 | 7.0 | – | 14.0 | – |",
		"| DeepSeek-V3, 16 | experts; tokens of a prompt: 1,024 | 1.0 | 3.0 | 4.0 | 12.0 | – |",
		"| experts of prompts, unequally | 3.00 to 3.00 | – |",
		"the fullest rank has 1.5 times the mean rows",
	} {
		require.Contains(t, table, row)
	}
}

func TestWhatIsNoMeasurementIsRefused(t *testing.T) {
	for _, text := range []string{"", "{}", "Traceback", `{"gpu": "TPU v9"}`, `{"gpu": "NVIDIA H200"}` + "\nTraceback"} {
		_, err := readMeasured(strings.NewReader(text))
		require.Error(t, err, text)
	}
}

// No GPU is faster than its own memory: what was measured takes as long as reading and arithmetic
// do.
func TestWhatThePageHasWasMeasured(t *testing.T) {
	files, err := filepath.Glob("measured/*.jsonl")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, name := range files {
		file, err := os.Open(name)
		require.NoError(t, err)
		m, err := readMeasured(file)
		require.NoError(t, err)
		require.NoError(t, file.Close())
		for _, one := range m.all {
			require.Greater(t, one.Ms, one.Least, "%s: %+v", name, one)
		}
		require.Len(t, m.all, 36)
	}
}
