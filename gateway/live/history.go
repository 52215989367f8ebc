package live

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway"
	"evenkeel/gateway/journal"
)

// The last five minutes are kept all the time, whether anybody watches or not:
// who opens the page at 3 a.m. wants to see how it came to this. A sample is a
// number a rank, copied by the dispatcher in some microseconds.
const (
	sampleEvery = time.Second
	samples     = 300
	rateOver    = 10 // samples that a rate is taken over
)

// history is a ring of samples.
type history struct {
	mu   sync.Mutex
	n    int // samples ever
	ring [samples]sample
}

// sample is what is kept of a second. What ended, failed or was generated are totals
// since the start, and rates are differences of them.
type sample struct {
	at                    time.Time
	ended, failed, tokens int64
	ranks                 []board.Load
	numbers               [len(lineNames)]int64 // by lineNames; -1: nothing is known
}

func (h *history) add(s *gateway.Sample, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.n++
	last := h.back(0)
	*last = sample{at: now, ended: int64(s.Ended), failed: int64(s.Failed), tokens: s.OutputTokens, ranks: s.Ranks}
	var r Traffic
	h.rates(&r)
	us := func(d time.Duration, of journal.Latency) int64 {
		if of.Samples == 0 {
			return -1
		}
		return d.Microseconds()
	}
	last.numbers = [...]int64{
		int64(s.Pool), int64(1000 * r.RequestsPerS), int64(r.TokensPerS), us(s.TPOT.P50, s.TPOT), us(s.TPOT.P99, s.TPOT), us(s.TTFT.P50, s.TTFT), us(s.TTFT.P99, s.TTFT),
	}
}

// back is the sample that was added so many before the last one; with h.mu held.
func (h *history) back(n int) *sample { return &h.ring[(h.n-1-n)%samples] }

// rates are of the last samples; with h.mu held.
func (h *history) rates(t *Traffic) {
	if h.n < 2 {
		return
	}
	last, first := h.back(0), h.back(min(rateOver, h.n-1))
	if s := last.at.Sub(first.at).Seconds(); s > 0 {
		rate := func(to, from int64) float64 { return float64(max(0, to-from)) / s }
		t.RequestsPerS, t.FailuresPerS, t.TokensPerS = rate(last.ended, first.ended), rate(last.failed, first.failed), rate(last.tokens, first.tokens)
		t.Recovered = h.recovered(first)
	}
}

const (
	surely = 5               // so many requests would have failed since the last failure, if it had gone on, for it to be over
	calmly = 3 * time.Second // and none has failed for so long: at high rates some may go well between two failures
)

// recovered says that what failed since a sample is over: rates of ten seconds would tell of it for as long. Requests that went well
// since then count by how large a share of them failed before; with h.mu held.
func (h *history) recovered(first *sample) bool {
	last := h.back(0)
	for i := 0; h.back(i) != first; i++ {
		if at := h.back(i); at.failed > h.back(i+1).failed {
			return last.at.Sub(at.at) >= calmly && (last.ended-at.ended)*(at.failed-first.failed) >= surely*(at.ended-first.ended)
		}
	}
	return false
}

func (h *history) rate(t *Traffic) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rates(t)
}

// copy is the ring as readers get it.
func (h *history) copy() History {
	h.mu.Lock()
	kept := make([]sample, min(h.n, samples))
	for i := range kept {
		kept[i] = *h.back(len(kept) - 1 - i)
	}
	h.mu.Unlock()
	out := History{Form: Form, EveryMs: sampleEvery.Milliseconds(), AtMs: make([]int64, len(kept)), Ranks: []RankLine{}, Lines: []NumbersLine{}}
	lines := map[int32]int{} // of a rank, in out.Ranks
	for i := range kept {
		out.AtMs[i] = kept[i].at.UnixMilli()
		for _, r := range kept[i].ranks {
			at, ok := lines[r.Worker]
			if !ok {
				at, lines[r.Worker] = len(out.Ranks), len(out.Ranks)
				out.Ranks = append(out.Ranks, RankLine{r.Worker, slices.Repeat([]int64{-1}, len(kept))})
			}
			out.Ranks[at].KVTokens[i] = r.KVTokens
		}
	}
	slices.SortFunc(out.Ranks, func(a, b RankLine) int { return cmp.Compare(a.ID, b.ID) })
	for k, name := range lineNames {
		values := make([]int64, len(kept))
		for i := range kept {
			values[i] = kept[i].numbers[k]
		}
		if len(kept) > 0 && slices.Max(values) >= 0 {
			out.Lines = append(out.Lines, NumbersLine{name, values})
		}
	}
	return out
}
