package live

import (
	"cmp"
	"slices"

	"evenkeel/gateway/detect"
)

// historyOf turns the samples of the last minutes into a History.
func historyOf(kept []detect.Sample) History {
	out := History{Form: Form, EveryMs: detect.Every.Milliseconds(), AtMs: make([]int64, len(kept)), Ranks: []RankLine{},
		Lines: []NumbersLine{}}
	lines := map[int32]int{} // by rank: index of its line in out.Ranks
	for i := range kept {
		out.AtMs[i] = kept[i].At.UnixMilli()
		for _, r := range kept[i].Ranks {
			line, ok := lines[r.ID]
			if !ok {
				line = len(out.Ranks)
				lines[r.ID] = line
				out.Ranks = append(out.Ranks, RankLine{r.ID, slices.Repeat([]int64{-1}, len(kept))})
			}
			out.Ranks[line].KVTokens[i] = r.KVTokens
		}
	}
	slices.SortFunc(out.Ranks, func(a, b RankLine) int { return cmp.Compare(a.ID, b.ID) })
	for k, name := range lineNames {
		values := make([]int64, len(kept))
		for i := range kept {
			values[i] = numbers(&kept[i])[k]
		}
		if len(kept) > 0 && slices.Max(values) >= 0 {
			out.Lines = append(out.Lines, NumbersLine{name, values})
		}
	}
	return out
}

// numbers returns the values of a sample in the order of lineNames; -1: not known.
func numbers(s *detect.Sample) [len(lineNames)]int64 {
	us := func(ms float64, of detect.Latency) int64 {
		if of.Samples == 0 {
			return -1
		}
		return int64(1000 * ms)
	}
	return [...]int64{
		int64(s.Pool), int64(1000 * s.RequestsPerS), int64(s.TokensPerS), us(s.TPOT.P50Ms, s.TPOT), us(s.TPOT.P99Ms, s.TPOT),
		us(s.TTFT.P50Ms, s.TTFT), us(s.TTFT.P99Ms, s.TTFT),
	}
}
