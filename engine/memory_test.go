package engine

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// A test data file whose name begins with "made" was made of label values that were published; the
// others were recorded.
func TestWhatAPageSaysOfTheMemory(t *testing.T) {
	read := func(t *testing.T, page string) *Sample {
		t.Helper()
		s, err := MetricNames{}.Parse([]byte(page))
		require.NoError(t, err)
		return s
	}
	both := func(m Memory) Memories { return Memories{"0": m, "1": m} }
	for name, row := range map[string]struct {
		file, page string
		context    int
		want       Memories
	}{
		"two groups of layers: the engine's own size": {
			file: "vllm-0.32.0-gemma3.txt", context: 2048,
			want: Memories{"0": {Capacity: Reading{31_751, sizeLabel}, Block: Reading{32, effectiveLabel}}},
		},
		"the blocks of full attention are larger": {
			file: "vllm-0.32.0-gemma4.txt", context: 2048,
			want: Memories{"0": {Capacity: Reading{42_226, sizeLabel}, Block: Reading{64, effectiveLabel}}},
		},
		"the smallest block is one of 64": {
			file: "made-vllm-0.33-deepseek-v4.txt", context: 1 << 20,
			want: Memories{"0": {Capacity: Reading{1_179_770, sizeLabel}, Block: Reading{256, effectiveLabel}}},
		},
		"decode context parallelism, each engine with its own": {
			file: "made-vllm-0.33-dcp4-dp2.txt", context: 131_072,
			want: both(Memory{Capacity: Reading{1_280_000, sizeLabel}, Block: Reading{256, effectiveLabel}}),
		},
		"before 0.32, the blocks of each rank": {
			file: "metrics-dp2.txt", context: 131_072,
			want: Memories{
				"0": {Capacity: Reading{4096 * 128, productLabels}, Block: Reading{128, blockLabel}},
				"1": {Capacity: Reading{2048 * 128, productLabels}, Block: Reading{128, blockLabel}},
			},
		},
		"or the sum of the blocks of all": {
			page: `vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="5000",num_gpu_blocks_override="2500"} 1
vllm:cache_config_info{block_size="64",engine="1",num_gpu_blocks="5000",num_gpu_blocks_override="2500"} 1
`,
			want: both(Memory{Capacity: Reading{160_000, productLabels}, Block: Reading{64, blockLabel}}),
		},
		"full attention with blocks of two sizes": {
			page: `vllm:cache_config_info{block_size="16",effective_attention_block_size="None",engine="0",kv_cache_size_tokens="9000",num_gpu_blocks="70"} 1` + "\n",
			want: Memories{"0": {Capacity: Reading{9000, sizeLabel}, Block: Reading{16, blockLabel}}},
		},
		"too few blocks for one request mean something else": {
			page: `vllm:cache_config_info{block_size="4",engine="0",num_gpu_blocks="20377"} 1` + "\n", context: 163_840,
			want: Memories{"0": {Block: Reading{4, blockLabel}, Misread: Reading{81_508, productLabels}, Context: 163_840}},
		},
		"just enough are believed": {
			page: `vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="128"} 1` + "\n", context: 2048,
			want: Memories{"0": {Capacity: Reading{2048, productLabels}, Block: Reading{16, blockLabel}}},
		},
		"SGLang's memory may be less than its context": {
			page: "sglang:max_total_num_tokens{dp_rank=\"0\"} 1000\nsglang:max_total_num_tokens{dp_rank=\"1\"} 3000\n", context: 2048,
			want: Memories{"0": {Capacity: Reading{1000, capacityName}}, "1": {Capacity: Reading{3000, capacityName}}},
		},
		"a node that counts from another rank than 0": {
			page: `vllm:cache_config_info{block_size="16",engine="4",num_gpu_blocks="200"} 1` + "\n",
			want: Memories{"0": {Capacity: Reading{3200, productLabels}, Block: Reading{16, blockLabel}}},
		},
		"not measured yet": {
			page: `vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="None",num_gpu_blocks="None"} 1` + "\n", context: 2048,
			want: Memories{"0": {Block: Reading{128, blockLabel}}},
		},
		"nothing": {page: "vllm:num_requests_running{engine=\"0\"} 1\n", context: 2048},
	} {
		t.Run(name, func(t *testing.T) {
			if row.file != "" {
				page, err := os.ReadFile("testdata/" + row.file)
				require.NoError(t, err)
				row.page = string(page)
			}
			models := []Model{{ID: "m", MaxModelLen: row.context}, {ID: "lora", Parent: "m"}}
			require.Equal(t, row.want, read(t, row.page).Memories(models))
		})
	}
}

func TestMemoryOfARank(t *testing.T) {
	one, two := Memory{Capacity: Reading{Tokens: 1}}, Memory{Capacity: Reading{Tokens: 2}}
	for name, row := range map[string]struct {
		of                  Memories
		only, first, second Memory
		all                 int64
	}{
		"two ranks":                   {Memories{"0": one, "1": two}, one, one, two, 3},
		"one without a number":        {Memories{"": two}, two, two, Memory{}, 2},
		"one with another number":     {Memories{"3": two}, two, Memory{}, Memory{}, 2},
		"of one nothing is known":     {Memories{"0": one, "1": {Misread: Reading{Tokens: 5}}}, one, one, Memory{Misread: Reading{Tokens: 5}}, 0},
		"an engine that tells no one": {},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, []Memory{row.only, row.first, row.second}, []Memory{row.of.Of(-1), row.of.Of(0), row.of.Of(1)})
			require.Equal(t, row.all, row.of.Tokens())
		})
	}
}

// A pool of an SGLang server with a sliding window is fuller than that of full attention.
func TestTokensHeldAreThoseOfFullAttention(t *testing.T) {
	s, err := MetricNames{}.Parse([]byte("sglang:token_usage{dp_rank=\"0\"} 0.9\nsglang:full_token_usage{dp_rank=\"0\"} 0.125\n" +
		"sglang:token_usage{dp_rank=\"1\"} 0.5\n"))
	require.NoError(t, err)
	odd, err := MetricNames{}.Parse([]byte("sglang:token_usage 0.25\nsglang:full_token_usage -0.001\n"))
	require.NoError(t, err)
	held, known := odd.HeldShare(0)
	require.True(t, known)
	require.Equal(t, 0.25, held, "a number that cannot be right does not cost the page")
	for rank, want := range [][2]float64{{0.9, 0.125}, {0.5, 0.5}} {
		fullest, _ := s.KVUsage(rank)
		held, known := s.HeldShare(rank)
		require.True(t, known)
		require.Equal(t, want, [2]float64{fullest, held})
	}
}
