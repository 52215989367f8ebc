package live

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"evenkeel/gateway"
)

// The last five minutes are kept all the time, whether anybody watches or not:
// who opens the page at 3 a.m. wants to see how it came to this. A sample is a
// number a rank, copied by the dispatcher in some microseconds.
const (
	sampleEvery = time.Second
	samples     = 300
	rateOver    = 10 // samples that a rate is taken over
)

// history is a ring of samples. Lines begin when their rank is seen first and are forgotten when it has not been seen for all of the ring.
type history struct {
	mu      sync.Mutex
	n       int // samples ever
	at      [samples]int64
	totals  [samples]totals
	ranks   map[int32]*line
	numbers map[string]*line
}

// totals only grow; rates are differences of them.
type totals struct {
	at                    time.Time
	ended, failed, tokens int64
}

// line is the values of one thing, stored one higher: 0 is nothing.
type line struct {
	values [samples]int64
	last   int // sample it was seen in last, counted from 1
}

func newHistory() *history {
	return &history{ranks: map[int32]*line{}, numbers: map[string]*line{}}
}

func (h *history) add(s *gateway.Sample, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.n++
	at := (h.n - 1) % samples
	h.at[at] = now.UnixMilli()
	h.totals[at] = totals{now, int64(s.Ended), int64(s.Failed), s.OutputTokens}
	for _, r := range s.Ranks {
		put(h, h.ranks, r.Worker, r.KVTokens)
	}
	var r Traffic
	h.rates(&r)
	put(h, h.numbers, LineRequests, int64(1000*r.RequestsPerS))
	put(h, h.numbers, LineTokens, int64(r.TokensPerS))
	put(h, h.numbers, LinePool, int64(s.Pool))
	if s.TTFT.Samples > 0 {
		put(h, h.numbers, LineTTFTP50, s.TTFT.P50.Microseconds())
		put(h, h.numbers, LineTTFTP99, s.TTFT.P99.Microseconds())
	}
	if s.TPOT.Samples > 0 {
		put(h, h.numbers, LineTPOTP50, s.TPOT.P50.Microseconds())
		put(h, h.numbers, LineTPOTP99, s.TPOT.P99.Microseconds())
	}
	forget(h, h.ranks)
	forget(h, h.numbers)
}

// put sets a line's value of the sample that is being added.
func put[K comparable](h *history, lines map[K]*line, key K, value int64) {
	l := lines[key]
	if l == nil {
		l = &line{last: h.n - 1}
		lines[key] = l
	}
	for missed := max(l.last+1, h.n-samples+1); missed < h.n; missed++ {
		l.values[(missed-1)%samples] = 0
	}
	l.values[(h.n-1)%samples], l.last = value+1, h.n
}

func forget[K comparable](h *history, lines map[K]*line) {
	for key, l := range lines {
		if l.last <= h.n-samples {
			delete(lines, key)
		}
	}
}

// rates are of the last samples; with h.mu held.
func (h *history) rates(t *Traffic) {
	if h.n < 2 {
		return
	}
	last, first := h.totals[(h.n-1)%samples], h.totals[(h.n-1-min(rateOver, h.n-1))%samples]
	if s := last.at.Sub(first.at).Seconds(); s > 0 {
		rate := func(to, from int64) float64 { return float64(max(0, to-from)) / s }
		t.RequestsPerS, t.FailuresPerS, t.TokensPerS = rate(last.ended, first.ended), rate(last.failed, first.failed), rate(last.tokens, first.tokens)
	}
}

func (h *history) rate(t *Traffic) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rates(t)
}

// copy is the ring as readers get it.
func (h *history) copy() History {
	h.mu.Lock()
	defer h.mu.Unlock()
	kept := min(h.n, samples)
	out := History{
		Form: Form, EveryMs: sampleEvery.Milliseconds(), AtMs: make([]int64, 0, kept),
		Ranks: make([]RankLine, 0, len(h.ranks)), Lines: make([]NumbersLine, 0, len(h.numbers)),
	}
	for n := h.n - kept; n < h.n; n++ {
		out.AtMs = append(out.AtMs, h.at[n%samples])
	}
	for id, l := range h.ranks {
		out.Ranks = append(out.Ranks, RankLine{id, h.values(l)})
	}
	for name, l := range h.numbers {
		out.Lines = append(out.Lines, NumbersLine{name, h.values(l)})
	}
	slices.SortFunc(out.Ranks, func(a, b RankLine) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(out.Lines, func(a, b NumbersLine) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// values are a line's, oldest first, -1 where there was nothing.
func (h *history) values(l *line) []int64 {
	kept := min(h.n, samples)
	out := make([]int64, 0, kept)
	for n := h.n - kept + 1; n <= h.n; n++ { // counted from 1, as line.last
		v := int64(-1)
		if n <= l.last {
			v = l.values[(n-1)%samples] - 1
		}
		out = append(out, v)
	}
	return out
}
