// Package laws has the laws of steps of models on GPUs, by model, engine, GPU and number of ranks.
// They are fitted to the times of kernels, and most of these are measured ones:
// docs/results/laws.md says how, and how far off they are. `make claim NAME=laws` writes laws.json.
package laws

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	"evenkeel/dispatcher/step"
)

// Entry is the law of one deployment. Each rank is one GPU, and experts are spread over all ranks.
type Entry struct {
	Model     string `json:"model"`
	Engine    string `json:"engine"`  // vllm or sglang
	Version   string `json:"version"` // of the engine whose kernels were measured
	GPU       string `json:"gpu"`     // such as H200
	Ranks     int    `json:"ranks"`
	Attention string `json:"attention"`  // such as MLA
	KVBytes   int    `json:"kv_bytes"`   // of a token, over all layers
	AllToAll  string `json:"all_to_all"` // how rows get to their experts in decode steps, such as deepep_ll
	Graphs    bool   `json:"graphs"`     // decode steps run in CUDA graphs
	Masked    bool   `json:"masked"`     // experts skip rows that pad

	C0Ms   float64 `json:"c0_ms"`   // whatever the load
	C1Ms   float64 `json:"c1_ms"`   // per KV token of a rank
	OwnMs  float64 `json:"own_ms"`  // per request of a rank: attention and dense layers
	MostMs float64 `json:"most_ms"` // per request of the rank that has most: sending
	MeanMs float64 `json:"mean_ms"` // per request of all ranks, divided by their number: experts
	Fit    Fit     `json:"fit"`

	Prompt Prompt `json:"prompt,omitzero"`
}

// Prompt is what steps take that compute prompts only, one of them on each rank. The zero Prompt is
// not known.
type Prompt struct {
	AllToAll string  `json:"all_to_all"`
	C0Ms     float64 `json:"c0_ms"`
	OwnMs    float64 `json:"own_ms"`  // per token of a rank
	MostMs   float64 `json:"most_ms"` // per token of the rank that has most
	MeanMs   float64 `json:"mean_ms"` // per token of all ranks, divided by their number
	Fit      Fit     `json:"fit"`
}

// Published is what part of a prompt's experts and sending is left where whole steps that were
// published are right, and not the times of kernels (docs/results/laws.md): these have nothing that
// overlaps, and no experts that are balanced.
const Published = 0.46

// Fit is how well a law fits the steps that it was made of.
type Fit struct {
	Steps   int     `json:"steps"`
	Left    int     `json:"left,omitempty"` // out, because they contradict larger ones
	Error   float64 `json:"error"`          // the mean of the errors, as a share of the step
	Worst   float64 `json:"worst"`
	Own     float64 `json:"own_measured"` // share of the part's time that was measured; the rest is estimated
	Sending float64 `json:"sending_measured"`
	Experts float64 `json:"experts_measured"`
}

// leastMeasured is the share of a part from which it counts as measured. Norms and activations
// never are.
const leastMeasured = 0.8

// Estimated are the parts that were not measured.
func (f *Fit) Estimated() (parts []string) {
	for _, p := range []struct {
		name  string
		share float64
	}{{"own", f.Own}, {"sending", f.Sending}, {"experts", f.Experts}} {
		if p.share < leastMeasured {
			parts = append(parts, p.name)
		}
	}
	return parts
}

// File is laws.json.
type File struct {
	Source string  `json:"source"`
	Laws   []Entry `json:"laws"`
}

//go:embed laws.json
var embedded []byte

var file = sync.OnceValue(func() (f File) {
	if err := json.Unmarshal(embedded, &f); err != nil {
		panic(fmt.Errorf("laws.json: %w", err)) // a test reads it
	}
	return f
})

// All are the laws that are known, by model, engine, GPU and ranks.
func All() []Entry { return slices.Clone(file().Laws) }

// Source is what they were made of.
func Source() string { return file().Source }

// Name is how people call a law: MODEL,ENGINE,GPU,RANKS. The model stands without the organisation
// that made it.
func (e *Entry) Name() string {
	return fmt.Sprintf("%s,%s,%s,%d", e.Model[strings.LastIndexByte(e.Model, '/')+1:], e.Engine, e.GPU, e.Ranks)
}

// Level is how long a decode step takes where each rank has so many requests and KV tokens, and
// none is padded.
func (e *Entry) Level(requests, kv float64) float64 {
	return e.C0Ms + e.C1Ms*kv + (e.OwnMs+e.MostMs+e.MeanMs)*requests
}

// Level is how long a step takes where each rank computes so many tokens of prompts, and nothing
// else.
func (p *Prompt) Level(tokens float64) float64 {
	return p.C0Ms + (p.OwnMs+p.MostMs+p.MeanMs)*tokens
}

// Law is the law of decode steps, and of prompts in them where these are known.
func (e *Entry) Law() step.Law {
	l := step.Law{Model: step.Model{C0Ms: e.C0Ms, C1Ms: e.C1Ms, RequestMs: e.OwnMs}, Form: e.Form(), MostRowsMs: e.MostMs,
		MeanRowsMs: e.MeanMs, Sizes: e.sizes()}
	if p := &e.Prompt; p.Fit.Steps > 0 {
		l.OwnPromptMs, l.SharedPromptMs = p.OwnMs, p.MostMs+p.MeanMs
		l.PrefillMs = max(0, p.C0Ms-e.C0Ms) // what they take beyond a step that runs anyway
	}
	return l
}

// Served is the law of decode steps with prompts in them, as whole steps that were published have
// it.
func (e *Entry) Served() step.Law {
	l := e.Law()
	l.SharedPromptMs *= Published
	return l
}

// Title is a law in words: the model, its engine and its GPUs.
func (e *Entry) Title() string {
	model, _, _ := strings.Cut(e.Name(), ",")
	return fmt.Sprintf("%s, %s, %d %s", model, e.EngineTitle(), e.Ranks, e.GPU)
}

// EngineTitle is the engine's name as its makers write it.
func (e *Entry) EngineTitle() string {
	if e.Engine == "sglang" {
		return "SGLang"
	}
	return "vLLM"
}

// Balances is the policy that is nearest to what the engine does by itself with requests for one
// address: vLLM gives each to the rank with the fewest, and SGLang takes the ranks in turn.
func (e *Entry) Balances() string {
	if e.Engine == "sglang" {
		return "rr"
	}
	return "jsq"
}

// Form is which rows of its ranks a decode step takes its time for.
func (e *Entry) Form() step.Form {
	switch {
	case !e.Graphs:
		return step.Eager
	case e.Engine == "sglang" && strings.HasPrefix(e.AllToAll, "deepep"):
		return step.OwnBuckets
	case e.Masked:
		return step.Masked
	}
	return step.Unmasked
}

// largest is the largest size that both engines capture on these GPUs, unless they are told
// otherwise.
const largest = 512

// sizes are those that the engine captures. SGLang 0.5.23 has 12 beside those of vLLM
// (server_args.py).
func (e *Entry) sizes() []int {
	switch {
	case !e.Graphs:
		return nil
	case e.Engine == "sglang":
		return slices.Insert(step.Captured(largest), 4, 12)
	}
	return step.Captured(largest)
}
