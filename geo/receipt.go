package geo

import (
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/geo/policy"
)

// Receipt is the record of one forward that has ended.
type Receipt struct {
	At        time.Time `json:"at"`
	RID       string    `json:"rid"`
	Origin    string    `json:"origin"`
	Peer      string    `json:"peer"`
	Model     string    `json:"model"`
	Predicted struct {
		policy.Terms
		LocalCost float64 `json:"local_cost"` // predicted cost in the origin's region, in ms; -1: no engine there could have served the request
	} `json:"predicted"`
	Actual struct {
		TTFTMs       float64 `json:"ttft_ms"` // 0: there was no first event
		TotalMs      float64 `json:"total_ms"`
		CachedTokens int     `json:"cached_tokens"` // -1: not reported
	} `json:"actual"`
	BytesOut int64   `json:"bytes_out"`
	BytesIn  int64   `json:"bytes_in"`
	USD      float64 `json:"usd"`
	Outcome  string  `json:"outcome"`
	Cause    string  `json:"cause,omitempty"`
}

// The outcomes of a forward.
const (
	OutcomeOK = "ok"
	// The forward failed before its first event, and the request is served in another way.
	OutcomeFallback = "fallback"
	OutcomeLost     = "lost"          // the peer was lost in the middle of the answer
	OutcomeGone     = "client_gone"   // the client left
	OutcomeRelayed  = "relayed_error" // the peer's refusal was passed on to the client
)

// usd is the price in USD of so many bytes. The prices are in USD per GB, 1e9 bytes.
func usd(out, in int64, priceOut, priceIn float64) float64 {
	return (float64(out)*priceOut + float64(in)*priceIn) / 1e9
}

// maxReceipts bounds the receipts that are kept.
const maxReceipts = 10_000

// receipts keeps the last receipts, in a ring that grows until it is full.
type receipts struct {
	mu   sync.Mutex
	ring []Receipt
	next int // index of the oldest receipt, which the next one replaces if the ring is full
}

// add adds a receipt, and drops the oldest one if there are already maxReceipts.
func (r *receipts) add(receipt *Receipt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) < maxReceipts {
		r.ring = append(r.ring, *receipt)
		return
	}
	r.ring[r.next] = *receipt
	r.next = (r.next + 1) % maxReceipts
}

// last returns at most n receipts, the latest first. A number below 0 counts as 0.
func (r *receipts) last(n int) []Receipt {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = max(0, min(n, len(r.ring))) // no more than there are
	list := make([]Receipt, 0, n)
	for i := range n {
		// This is before the modulo; next is 0 while the ring grows.
		latest := r.next + len(r.ring) - 1
		list = append(list, r.ring[(latest-i)%len(r.ring)])
	}
	return list
}

// fields returns the receipt as fields of a log line.
func (r *Receipt) fields() []zap.Field {
	return []zap.Field{
		zap.String("rid", r.RID), zap.String("origin", r.Origin), zap.String("peer", r.Peer), zap.String("model", r.Model),
		zap.Any("predicted", r.Predicted), zap.Any("actual", r.Actual), zap.Int64("bytes_out", r.BytesOut), zap.Int64("bytes_in", r.BytesIn),
		zap.Float64("usd", r.USD), zap.String("outcome", r.Outcome), zap.String("cause", r.Cause),
	}
}

// spending is the cost of a peer's egress on the present UTC day.
type spending struct {
	day string
	usd float64
}

// add adds an amount, and returns the sum of the present day. It drops the sum of an earlier day.
func (s *spending) add(usd float64, now time.Time) float64 {
	if day := now.UTC().Format(time.DateOnly); day != s.day {
		s.day, s.usd = day, 0
	}
	s.usd += usd
	return s.usd
}

// today returns the sum of the present day.
func (s *spending) today(now time.Time) float64 { return s.add(0, now) }
