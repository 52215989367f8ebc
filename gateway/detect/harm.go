package detect

import (
	"fmt"
	"strings"
	"time"

	"evenkeel/internal/stats"
)

// A latency is longer if it has grown by longerTimes, and by more than longerTTFTMs or
// longerTPOTMs.
const (
	longerTimes  = 1.3
	longerTTFTMs = 50
	longerTPOTMs = 5
	fewerTokens  = 0.7              // a smaller share of the earlier rate is reported
	baselineLead = 10 * time.Second // before the begin of the incident
)

type baseline struct {
	ended, failed uint64
	ttft, tpot    Latency
	tokensPerS    float64
	open          int64
}

// baseline has latencies and throughput of baselineLead earlier, because they may get worse before
// the incident is found; nil: there is no sample.
func (r *Ring) baseline(since time.Time) *baseline {
	began, before := r.sampleAt(since), r.sampleAt(since.Add(-baselineLead))
	if began == nil { // before is nil only in the same case
		return nil
	}
	return &baseline{ended: began.Ended, failed: began.Failed, ttft: before.TTFT, tpot: before.TPOT, tokensPerS: before.TokensPerS,
		open: before.open}
}

// describeHarm returns a sentence without a full stop; empty: there is no sample or no baseline.
func (r *Ring) describeHarm(base *baseline) string {
	now := r.Last()
	if now == nil || base == nil {
		return ""
	}
	failed := now.Failed - min(now.Failed, base.failed) // min: never below 0
	ended := now.Ended - min(now.Ended, base.ended)
	parts := []string{}
	if failed > 0 {
		parts = append(parts, fmt.Sprintf("%s of %s requests failed", stats.Grouped(failed), stats.Grouped(ended)))
	} else {
		parts = append(parts, "no request failed")
	}
	if was, is := base.ttft, now.TTFT; isLonger(was, is, longerTTFTMs) {
		parts = append(parts, fmt.Sprintf("the median time to the first token is %s, and was %s", spokenMs(is.P50Ms), spokenMs(was.P50Ms)))
	}
	switch was, is := base.tpot, now.TPOT; {
	case isLonger(was, is, longerTPOTMs):
		parts = append(parts, fmt.Sprintf("a token takes %s in the median, and took %s", spokenMs(is.P50Ms), spokenMs(was.P50Ms)))
	// the P99s in place of P50Ms
	case isLonger(Latency{was.P99Ms, 0, was.Samples}, Latency{is.P99Ms, 0, is.Samples}, longerTPOTMs):
		parts = append(parts, fmt.Sprintf("in the slowest of 100 answers a token takes %s, and took %s", spokenMs(is.P99Ms), spokenMs(was.P99Ms)))
	}
	loadIsThere := float64(now.open) >= fewerTokens*float64(base.open) // else fewer tokens are wanted
	if was, is := base.tokensPerS, now.TokensPerS; is < fewerTokens*was && loadIsThere {
		parts = append(parts, fmt.Sprintf("engines give %.0f tokens per second, and gave %.0f", is, was))
	}
	lastPart := len(parts) - 1
	if lastPart == 0 {
		return "Since then " + parts[0]
	}
	return "Since then " + strings.Join(parts[:lastPart], "; ") + "; and " + parts[lastPart]
}

// isLonger compares the medians.
func isLonger(was, is Latency, ms float64) bool {
	areKnown := was.Samples > 0 && is.Samples > 0
	return areKnown && is.P50Ms > longerTimes*was.P50Ms && is.P50Ms-was.P50Ms > ms
}

func spokenMs(ms float64) string {
	if ms < 1000 {
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f s", ms/1000)
}

// sampleAt returns the last sample up to then, else the oldest; nil: there is none.
func (r *Ring) sampleAt(at time.Time) (found *Sample) {
	oldest := r.oldestWithin(minutesKeptFor)
	for _, t := range []*tier{&r.fine, &r.bins, &r.minutes} {
		for i := range t.list {
			if s := &t.list[i]; !s.At.After(at) && (found == nil || s.At.After(found.At)) {
				found = s
			}
		}
	}
	if found == nil {
		return oldest
	}
	return found
}
