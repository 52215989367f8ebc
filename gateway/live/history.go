package live

import (
	"cmp"
	"slices"

	"evenkeel/gateway/detect"
)

// historyOf turns the samples of the last minutes into a History. It leaves out lines that have no
// value in any sample.
func historyOf(samples []detect.Sample) History {
	out := History{Form: Form, EveryMs: detect.SampleInterval.Milliseconds(), AtMs: make([]int64, len(samples)), Ranks: []RankLine{},
		Lines: []NumbersLine{}}
	indexOf := map[int32]int{} // index in out.Ranks of each rank's line
	for i := range samples {
		out.AtMs[i] = samples[i].At.UnixMilli()
		for _, r := range samples[i].Ranks {
			index, hasLine := indexOf[r.ID]
			if !hasLine {
				index = len(out.Ranks)
				indexOf[r.ID] = index
				out.Ranks = append(out.Ranks, RankLine{r.ID, slices.Repeat([]int64{-1}, len(samples))}) // -1: no value
			}
			out.Ranks[index].KVTokens[i] = r.KVTokens
		}
	}
	slices.SortFunc(out.Ranks, func(a, b RankLine) int { return cmp.Compare(a.ID, b.ID) })
	for k, name := range lineNames {
		values := make([]int64, len(samples))
		for i := range samples {
			values[i] = lineValues(&samples[i])[k]
		}
		if len(samples) > 0 && slices.Max(values) >= 0 {
			out.Lines = append(out.Lines, NumbersLine{name, values})
		}
	}
	return out
}

// lineValues returns the values of a sample in the order of lineNames; -1: not known. Values are
// whole numbers. Therefore requests are counted per 1000 s, because fewer than one may come per
// second, and latencies are in microseconds.
func lineValues(s *detect.Sample) [len(lineNames)]int64 {
	microseconds := func(ms float64, of detect.Latency) int64 {
		if of.Samples == 0 {
			return -1
		}
		return int64(1000 * ms)
	}
	requestsPer1000S := int64(1000 * s.RequestsPerS)
	return [...]int64{
		int64(s.Pool), requestsPer1000S, int64(s.TokensPerS), microseconds(s.TPOT.P50Ms, s.TPOT), microseconds(s.TPOT.P99Ms, s.TPOT),
		microseconds(s.TTFT.P50Ms, s.TTFT), microseconds(s.TTFT.P99Ms, s.TTFT),
	}
}
