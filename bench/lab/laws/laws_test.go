package laws

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/step"
)

func TestTheLawsAreThoseOfTheFile(t *testing.T) {
	all := All()
	require.Greater(t, len(all), 40)
	require.Contains(t, Source(), "aiconfigurator")
	models, attention := map[string]bool{}, map[string]bool{}
	for i := range all {
		e := &all[i]
		models[e.Model], attention[e.Attention] = true, true
		require.Contains(t, []string{"vllm", "sglang"}, e.Engine)
		require.Positive(t, e.C0Ms, "%+v", e)
		require.GreaterOrEqual(t, min(e.C1Ms, e.OwnMs, e.MostMs, e.MeanMs, e.Prompt.C0Ms, e.Prompt.OwnMs, e.Prompt.MostMs, e.Prompt.MeanMs), 0.,
			"%+v", e)
		require.Positive(t, e.OwnMs+e.MostMs+e.MeanMs, "%+v", e)
		require.Less(t, e.Fit.Error, 0.25, "%+v", e)
		require.LessOrEqual(t, e.Fit.Error, e.Fit.Worst)
		require.GreaterOrEqual(t, e.Fit.Steps, 6)
	}
	require.GreaterOrEqual(t, len(models), 8)
	require.GreaterOrEqual(t, len(attention), 4)
	order := func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Engine, b.Engine), cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Ranks, b.Ranks))
	}
	require.True(t, slices.IsSortedFunc(all, func(a, b Entry) int {
		if o := order(a, b); o != 0 {
			return o
		}
		return 1 // no deployment twice
	}))
	all[0].Model = "another"
	require.NotEqual(t, "another", All()[0].Model, "the list is the caller's own")
}

// Ranks that all have as much, of a size that is captured, take what the law of level ranks says.
func TestTheLawOfAnEntry(t *testing.T) {
	all := All()
	for i := range all {
		e := &all[i]
		l := e.Law()
		ranks := make([]step.Rank, e.Ranks)
		for i := range ranks {
			ranks[i] = step.Rank{Requests: 64, KV: 64 * 3000}
		}
		require.InEpsilon(t, e.Level(64, 64*3000), l.Ms(ranks), 1e-9, "%s %s %s %d", e.Model, e.Engine, e.GPU, e.Ranks)
	}
}

func TestWhichFormALawHas(t *testing.T) {
	for _, c := range []struct {
		name string
		of   Entry
		want step.Form
	}{
		{"vLLM pads all ranks, and experts compute the rows", Entry{Engine: "vllm", Graphs: true}, step.Unmasked},
		{"vLLM pads all ranks, and experts skip the rows", Entry{Engine: "vllm", Graphs: true, Masked: true}, step.Masked},
		{"vLLM with deepep pads all ranks, too", Entry{Engine: "vllm", Graphs: true, AllToAll: "deepep_ll"}, step.Unmasked},
		{"SGLang with deepep pads each rank by itself", Entry{Engine: "sglang", Graphs: true, Masked: true, AllToAll: "deepep_ll"}, step.OwnBuckets},
		{"SGLang without deepep pads all ranks", Entry{Engine: "sglang", Graphs: true, AllToAll: "allgather"}, step.Unmasked},
		{"no graphs, no padding", Entry{Engine: "vllm"}, step.Eager},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := c.of.Law()
			require.Equal(t, c.want, l.Form)
			require.Equal(t, c.of.Graphs, len(l.Sizes) > 0)
			require.True(t, slices.IsSorted(l.Sizes))
		})
	}
	sglang := Entry{Engine: "sglang", Graphs: true}
	require.Equal(t, []int{1, 2, 4, 8, 12, 16, 24}, sglang.Law().Sizes[:7])
}

// A prompt costs its own part on its rank, the rest by the mean, and what it takes at once only
// beyond a step that runs anyway.
func TestPromptsOfALaw(t *testing.T) {
	e := Entry{Engine: "vllm", C0Ms: 20, Prompt: Prompt{C0Ms: 23, OwnMs: 0.05, MostMs: 0.02, MeanMs: 0.1, Fit: Fit{Steps: 5}}}
	l := e.Law()
	require.InDelta(t, 20+3+0.05*4096+0.12*4096/2, l.Ms([]step.Rank{{Prompt: 4096}, {}}), 1e-9)
	require.InDelta(t, e.Prompt.Level(4096), l.Ms([]step.Rank{{Prompt: 4096}, {Prompt: 4096}}), 1e-9)
	e.Prompt = Prompt{}
	require.Zero(t, e.Law().OwnPromptMs, "not known")
}

func TestWhichPartsAreEstimated(t *testing.T) {
	require.Equal(t, "sending", strings.Join((&Fit{Own: 0.9, Experts: 1}).Estimated(), ", "))
	require.Empty(t, (&Fit{Own: 0.9, Sending: 1, Experts: 1}).Estimated())
}

func TestALawIsFoundByItsName(t *testing.T) {
	for _, name := range []string{"DeepSeek-V3,sglang,H200,32", "deepseek-v3,SGLang,h200,32", "deepseek-ai/DeepSeek-V3, sglang, H200, 32"} {
		e, err := Find(name)
		require.NoError(t, err)
		require.Equal(t, "DeepSeek-V3,sglang,H200,32", e.Name())
	}
	for name, says := range map[string]string{
		"DeepSeek-V3,vllm,H200,24":   `there is no number of ranks "24" for DeepSeek-V3,vllm,H200, but 8, 16, 32, 64; write MODEL,ENGINE,GPU,RANKS as in DeepSeek-V3,vllm,H200,8 `,
		"DeepSeek-V3,vllm,H200":      "it lacks the number of ranks, which may be 8, 16, 32, 64;",
		"DeepSeek-V3,vllm,H200,":     "it lacks the number of ranks, which may be 8, 16, 32, 64;",
		"DeepSeek-V3,vllm,H200,8,1":  "it has 5 words; write MODEL,ENGINE,GPU,RANKS as in DeepSeek-V3,vllm,H200,8 ",
		"DeepSeek-V3,vlm,H200,8":     `there is no engine "vlm" for DeepSeek-V3 (did you mean "vllm"?), but sglang, vllm;`,
		"DeepSeek-V3,vllm,A100,8":    `there is no GPU "A100" for DeepSeek-V3,vllm (did you mean "H100"?), but `,
		"DeepSeekV3,vllm,H200,16":    `there is no model "DeepSeekV3" (did you mean "DeepSeek-V3"?), but `,
		"GLM-4.5,vllm,H200,8":        `there is no model "GLM-4.5", but DeepSeek-V3, DeepSeek-V3.2, DeepSeek-V4-Flash-FP8, `,
		"qwen3-235b,vllm,H200,8":     `(did you mean "Qwen3-235B-A22B-FP8"?)`,
		"Qwen/Qwen3-235B,vllm,B200,": `(did you mean "Qwen3-235B-A22B-FP8"?)`,
		"gpt-oss-120b":               "it lacks the engine, which may be sglang, vllm; write MODEL,ENGINE,GPU,RANKS as in gpt-oss-120b,sglang,B200,4 ",
		"mine":                       `"mine" is no law of the table: there is no model "mine", but `,
		"":                           "it lacks the model, which may be DeepSeek-V3, ",
	} {
		_, err := Find(name)
		require.ErrorContains(t, err, says)
	}
}

func TestTheListHasEveryLawOnce(t *testing.T) {
	var b strings.Builder
	require.NoError(t, List(&b))
	listed := map[string]bool{}
	for line := range strings.Lines(b.String()) {
		words := strings.Fields(line)
		for _, ranks := range words[3:] {
			if name := strings.Join(append(words[:3:3], ranks), ","); strings.Trim(ranks, "0123456789") == "" {
				require.False(t, listed[name], name)
				listed[name] = true
				_, err := Find(name)
				require.NoError(t, err)
			}
		}
	}
	require.Len(t, listed, len(All()))
	require.Contains(t, b.String(), "own buckets")
}
