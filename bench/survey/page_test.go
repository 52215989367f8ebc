package survey

import (
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAPageOfVLLM(t *testing.T) {
	text, err := os.ReadFile("testdata/vllm-0.32-dp2.txt")
	require.NoError(t, err)
	p, err := Read(text)
	require.NoError(t, err)
	require.Len(t, p.Ranks, 2)
	require.False(t, p.SGLang)
	require.Positive(t, p.Started)
	for _, r := range p.Ranks {
		require.Positive(t, r.Output)
		require.Positive(t, r.Computed)
		require.Positive(t, r.Gaps)
		require.Greater(t, r.GapsMs/r.Gaps, 1.)
		require.Positive(t, r.Room)
		require.Zero(t, r.Pulled)
		require.Equal(t, r.Prompts.total(), r.Outputs.total())
		require.True(t, math.IsInf(r.Prompts.Bounds[len(r.Prompts.Bounds)-1], 1))
		require.InDelta(t, r.Prompts.Sum+r.Outputs.Sum, r.Ended, 0)
	}
}

// The tensor-parallel workers of a rank tell the same each, and histograms are of all ranks.
func TestAPageOfSGLang(t *testing.T) {
	var b strings.Builder
	for _, rank := range []string{`dp_rank="0",tp_rank="0"`, `dp_rank="0",tp_rank="1"`, `dp_rank="1",tp_rank="2"`} {
		for _, line := range []string{
			"sglang:num_running_reqs{R} 3", "sglang:num_queue_reqs{R} 1", "sglang:num_used_tokens{R} 250", "sglang:max_total_num_tokens{R} 1000",
			`sglang:realtime_tokens_total{mode="decode",R} 70`, `sglang:realtime_tokens_total{mode="prefill_compute",R} 40`,
			`sglang:realtime_tokens_total{mode="prefill_cache",R} 10`,
		} {
			b.WriteString(strings.Replace(line, "R}", `engine_type="decode",model_name="m",`+rank+"}", 1) + "\n")
		}
	}
	b.WriteString("sglang:prompt_tokens_histogram_bucket{le=\"100\"} 4\nsglang:prompt_tokens_histogram_bucket{le=\"+Inf\"} 5\nsglang:prompt_tokens_histogram_sum 450\n")
	p, err := Read([]byte(b.String()))
	require.NoError(t, err)
	require.True(t, p.SGLang)
	require.Equal(t, "decode", p.Role)
	require.Equal(t, "m", p.Model)
	require.Len(t, p.Ranks, 2)
	r := p.Ranks[0]
	require.Equal(t, []float64{3, 1, 250, 1000, 70, 40, 50}, []float64{r.Running, r.Waiting, r.KV, r.Room, r.Output, r.Computed, r.Prompt})
	require.InDelta(t, 90, r.Prompts.mean(), 1e-9)
	require.Empty(t, p.Ranks[1].Prompts.Bounds)
}

func TestWhatIsNoPage(t *testing.T) {
	for text, want := range map[string]string{
		"up 1\n": "neither vllm:num_requests_running nor sglang:num_running_reqs",
		"<html>": "neither",
		"vllm:num_requests_running{engine=\"0\"} many\n": "is not in the text format",
		ranksOf(mostRanks + 1):                           "are the most that are looked at",
	} {
		_, err := Read([]byte(text))
		require.ErrorContains(t, err, want)
	}
}

func TestLengthsAreDrawnAsTheyWere(t *testing.T) {
	var few []int32
	for i := range int32(100) {
		few = append(few, 100+i, 4000)
	}
	seen := histogram(few)
	h, ok := newTexts(seen, seen)
	require.True(t, ok)
	sum, long := 0., 0
	const n = 10_000
	for range n {
		q := h.next(dice())
		sum += float64(q.Prompt) / n
		if q.Prompt > 1000 {
			long++
		}
	}
	require.InEpsilon(t, seen.mean(), sum, 0.02)
	require.InDelta(t, n/2, long, 300)
	huge := histogram([]int32{10, 10, 10, 10, 10, 10, 10, 10, 10, 210_000})
	far := huge.fine()
	require.InDelta(t, 10, far.below[len(far.below)-1], 1e-9, "nothing is lost in a bucket that is thousands of means wide")
	huge.Sum = 0
	huge.fine() // a page without a sum
	_, ok = newTexts(histogram(few[:20]), seen)
	require.False(t, ok, "too few have ended")
}

func ranksOf(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "vllm:num_requests_running{engine=\"%d\"} 1\n", i)
	}
	return b.String()
}
