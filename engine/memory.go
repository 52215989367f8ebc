package engine

import (
	"cmp"
	"fmt"
	"strconv"

	dto "github.com/prometheus/client_model/go"
)

// Reading is a number of tokens on an engine's metrics page, and where it stands there. The zero
// value: not known.
type Reading struct {
	Tokens int64  `json:"tokens"`
	From   string `json:"from"` // the series, and the labels if it is one of them
}

// Memory is what an engine's metrics page says about the KV memory of one rank.
type Memory struct {
	Capacity Reading `json:"capacity,omitzero"` // KV tokens that fit
	Block    Reading `json:"block,omitzero"`    // tokens of a KV block
	// Misread is what the page seems to say of the capacity, if it is less than Context. vLLM does not
	// start with less memory than one request of max_model_len needs (0.33,
	// v1/core/kv_cache_planning.py), so it means something else, and Capacity is not known.
	Misread Reading `json:"misread,omitzero"`
	Context int     `json:"-"` // max_model_len, in tokens; 0: nothing is misread
}

// Memories is by rank, counted from 0. If the engine does not number its ranks, the only key is
// empty.
type Memories map[string]Memory

// Of returns the memory of a rank; -1: of the only rank, whatever its number.
func (m Memories) Of(rank int) Memory {
	if memory, ok := m[strconv.Itoa(max(0, rank))]; ok {
		return memory
	}
	if rank > 0 {
		return Memory{}
	}
	if memory, ok := m[""]; ok || rank == 0 {
		return memory
	}
	if len(m) == 1 {
		for _, memory := range m {
			return memory
		}
	}
	return Memory{}
}

// Tokens is the capacity of all ranks together; 0: that of one is not known.
func (m Memories) Tokens() (all int64) {
	for _, memory := range m {
		if memory.Capacity.Tokens == 0 {
			return 0
		}
		all += memory.Capacity.Tokens
	}
	return all
}

const (
	// sizeLabel is of each engine, for all groups of layers (0.32, 0.33).
	sizeLabel = CacheConfigName + " kv_cache_size_tokens"
	// productLabels are right for a model with one group of layers.
	productLabels = CacheConfigName + " num_gpu_blocks × block_size"
	// effectiveLabel is of full attention, with decode context parallelism (0.32, 0.33).
	effectiveLabel = CacheConfigName + " effective_attention_block_size"
	// blockLabel is the smallest of all groups of layers.
	blockLabel = CacheConfigName + " block_size"
)

// Model is one model or LoRA adapter in an engine's answer to GET /v1/models.
type Model struct {
	ID          string
	Parent      string // the base model of a LoRA adapter; empty: the model is not an adapter
	Adapter     string // the adapter's own name, if ID is another name of it; empty: it is not
	MaxModelLen int    // longest prompt and answer together, in tokens; 0: unknown
}

// AdapterName is the engine's own name of an adapter; for a base model, the ID.
func (m Model) AdapterName() string { return cmp.Or(m.Adapter, m.ID) }

// LongestContext returns 0 if none is known.
func LongestContext(models []Model) (longest int) {
	for _, m := range models {
		longest = max(longest, m.MaxModelLen)
	}
	return longest
}

// For returns the memory for this max_model_len, in tokens; 0: not known.
func (m Memory) For(context int) Memory {
	// SGLang may have less memory than its context, and then takes shorter requests (0.5.23,
	// managers/tp_worker.py).
	isVLLM := m.Capacity.From == sizeLabel || m.Capacity.From == productLabels
	if isVLLM && m.Capacity.Tokens < int64(context) {
		m.Misread, m.Capacity, m.Context = m.Capacity, Reading{}, context
	}
	return m
}

// PageMemories reads the series of vllm:cache_config_info, by their label engine. The page does not
// tell the context, so nothing is misread.
func PageMemories(configs []*dto.Metric) (map[string]Memory, error) {
	all := map[string]Memory{}
	sharers := blockSharers(configs)
	for _, config := range configs {
		m, err := configMemory(config, sharers)
		if err != nil {
			return nil, err
		}
		if m != (Memory{}) {
			all[Label(config, "engine")] = m
		}
	}
	return all, nil
}

// blockSharers: an API server of vLLM adds up the blocks of all its engines and shows the sum for
// each. The result is by how many engines to divide; 1: the numbers differ, so each is the engine's
// own.
func blockSharers(configs []*dto.Metric) int {
	for _, m := range configs {
		if Label(m, "num_gpu_blocks") != Label(configs[0], "num_gpu_blocks") {
			return 1
		}
	}
	return len(configs)
}

// configMemory reads one engine. Before 0.32 kv_cache_size_tokens is no number: the capacity is
// that of the blocks, divided by sharers.
func configMemory(config *dto.Metric, sharers int) (m Memory, err error) {
	// It is 0 if the label is missing or None, as until the engine has measured its memory.
	number := func(label string, limit int64) int64 {
		n, _, wrong := Whole(CacheConfigName+" "+label, Label(config, label), limit)
		if err == nil {
			err = wrong
		}
		return n
	}
	size, effective := number("kv_cache_size_tokens", MostKVTokens), number("effective_attention_block_size", mostBlock)
	blocks, block := number("num_gpu_blocks", MostKVTokens*int64(sharers)), number("block_size", mostBlock)
	product := float64(blocks/int64(sharers)) * float64(block)
	switch {
	case err != nil:
		return Memory{}, err
	case size > 0:
		m.Capacity = Reading{size, sizeLabel}
	case product > MostKVTokens:
		return Memory{}, &PageError{CacheConfigName, fmt.Sprintf("num_gpu_blocks %d of block_size %d", blocks, block)}
	case product > 0:
		m.Capacity = Reading{int64(product), productLabels}
	}
	switch {
	case effective > 0:
		m.Block = Reading{effective, effectiveLabel}
	case block > 0:
		m.Block = Reading{block, blockLabel}
	}
	return m, nil
}
