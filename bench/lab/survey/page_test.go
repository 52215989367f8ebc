package survey

import (
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

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
			"sglang:num_running_reqs{R} 3", "sglang:num_queue_reqs{R} 1", "sglang:num_decode_prealloc_queue_reqs{R} 1",
			"sglang:num_decode_transfer_queue_reqs{R} 2", "sglang:num_used_tokens{R} 250", "sglang:max_total_num_tokens{R} 1000",
			`sglang:realtime_tokens_total{mode="decode",R} 70`, `sglang:realtime_tokens_total{mode="prefill_compute",R} 40`,
			`sglang:realtime_tokens_total{mode="prefill_cache",R} 10`,
		} {
			b.WriteString(strings.Replace(line, "R}", `engine_type="decode",model_name="m",`+rank+"}", 1) + "\n")
		}
	}
	b.WriteString("sglang:prompt_tokens_histogram_bucket{le=\"100\"} 4\nsglang:prompt_tokens_histogram_bucket{le=\"+Inf\"} " +
		"5\nsglang:prompt_tokens_histogram_sum 450\n")
	p, err := Read([]byte(b.String()))
	require.NoError(t, err)
	require.True(t, p.SGLang)
	require.Equal(t, "decode", p.Role)
	require.Equal(t, "m", p.Model)
	require.Len(t, p.Ranks, 2)
	r := p.Ranks[0]
	require.Equal(t, []float64{3, 4, 250, 1000, 70, 40, 50}, []float64{r.Running, r.Waiting, r.KV, r.Room, r.Output, r.Computed, r.Prompt})
	require.Equal(t, 2., r.Coming)
	require.Empty(t, p.Uncounted)
	require.InDelta(t, 90, r.Prompts.mean(), 1e-9)
	require.Empty(t, p.Ranks[1].Prompts.Bounds)
}

// A page without a counter is not one that counts nothing.
func TestASurveySaysWhatAPageLacks(t *testing.T) {
	both := func(metric string, value int) (lines string) { // of two ranks
		for rank := range 2 {
			lines += fmt.Sprintf("sglang:%s,engine_type=\"decode\",model_name=\"m\",dp_rank=\"%d\"} %d\n", metric, rank, value)
		}
		return lines
	}
	run, idles := both(`num_running_reqs{tp_rank="0"`, 18), both(`num_running_reqs{tp_rank="0"`, 0)
	counted := func(i int) string { return both(`realtime_tokens_total{mode="decode"`, 100*i) }
	kv := both(`num_used_tokens{tp_rank="0"`, 500)
	for name, tt := range map[string]struct {
		page func(i int) string
		says string
	}{
		"an engine that has counted nothing yet": {func(int) string { return idles + kv }, "nothing was answered meanwhile; survey again while clients send"},
		"no counter":                             {func(int) string { return run + kv }, "requests ran, but the pages lack sglang:realtime_tokens_total"},
		"no KV":                                  {func(i int) string { return run + counted(i) }, "they lack sglang:num_used_tokens"},
		"no lengths":                             {func(i int) string { return run + counted(i) + kv }, "lack sglang:prompt_tokens_histogram and sglang:generation_tokens_histogram"},
		"vLLM, no counter":                       {func(int) string { return ranksOf(2) }, "the pages lack vllm:generation_tokens_total"},
	} {
		s := &Series{Address: "a"}
		for i := range 60 {
			p, err := Read([]byte(tt.page(i)))
			require.NoError(t, err)
			s.Add(i, began.Add(time.Duration(i)*time.Second), p)
		}
		f := Judge(t.Context(), []*Series{s}, Given{}, func(int, int) {})[0]
		require.ErrorContains(t, f.Why, tt.says, name)
		for _, row := range f.Rows() {
			require.NotContains(t, row.Value, "NaN", name)
			require.False(t, f.Kind == untold && strings.Contains(row.Value, "idle"), name)
		}
	}
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
