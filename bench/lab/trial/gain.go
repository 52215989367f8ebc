package trial

import (
	"evenkeel/bench/lab/report"
)

// Interval is a difference in percent, and how far its mean may be off at 95 %.
type Interval struct {
	Mean  float64 `json:"mean_percent"`
	Off   float64 `json:"off_percent"` // 0 where there are fewer than two pairs
	Pairs int     `json:"pairs"`
}

// Gain is by how much evenkeel is above the engine's own balancing, over the pairs that count.
type Gain struct {
	Tokens Interval `json:"tokens_per_s"`
	TTFT   Interval `json:"ttft_mean"`
	TTFT95 Interval `json:"ttft_p95"`
	TPOT95 Interval `json:"tpot_p95"`
}

// Judge compares the pairs of a load; nil where none counts.
func (p *Played) Judge() *Gain {
	of := func(figure func(b *Block) float64) (i Interval) {
		const off = report.Metric("off")
		var all []report.Sample
		for k := range p.Pairs {
			x := &p.Pairs[k]
			if theirs := figure(&x.Engine); x.counts() && theirs > 0 {
				all = append(all, report.Sample{off: percent(figure(&x.Evenkeel), theirs)})
			}
		}
		v := report.Summarize(all...)[off]
		return Interval{Mean: v.Mean, Off: v.Interval(len(all)), Pairs: len(all)}
	}
	g := &Gain{
		Tokens: of(func(b *Block) float64 { return b.Tokens }),
		TTFT:   of(func(b *Block) float64 { return b.TTFT }),
		TTFT95: of(func(b *Block) float64 { return b.TTFT95 }),
		TPOT95: of(func(b *Block) float64 { return b.TPOT95 }),
	}
	if g.Tokens.Pairs == 0 {
		return nil
	}
	return g
}
