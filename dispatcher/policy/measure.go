package policy

// Balance measures how level the loads of a group are.
type Balance struct {
	Ranks         int
	Max, Min, Sum int64 // KV tokens
}

// Measure reads the loads of one group at one step.
func Measure(loads []int64) Balance {
	var b Balance
	for _, l := range loads {
		b.Add(l)
	}
	return b
}

// Add takes in the load of one more rank.
func (b *Balance) Add(load int64) {
	if b.Ranks == 0 {
		b.Max, b.Min = load, load
	}
	b.Ranks++
	b.Max, b.Min = max(b.Max, load), min(b.Min, load)
	b.Sum += load
}

// Mean is the load of a rank in the mean, in KV tokens; 0 without ranks.
func (b Balance) Mean() float64 {
	if b.Ranks == 0 {
		return 0
	}
	return float64(b.Sum) / float64(b.Ranks)
}

// Imbalance is what all ranks together lack to the fullest one, in KV tokens.
func (b Balance) Imbalance() int64 { return int64(b.Ranks)*b.Max - b.Sum }

// MaxMinusMin is the paper's second measure, in KV tokens.
func (b Balance) MaxMinusMin() int64 { return b.Max - b.Min }

// IdleShare is the imbalance as a share of what the group could hold at the
// load of its fullest rank; 0 when it holds nothing.
func (b Balance) IdleShare() float64 {
	if b.Max == 0 {
		return 0
	}
	return float64(b.Imbalance()) / (float64(b.Ranks) * float64(b.Max))
}

// StepMs is how long a step takes: the fullest rank holds the others up.
func (b Balance) StepMs(c0, c1 float64) float64 { return c0 + c1*float64(b.Max) }

// IdealStepMs is the same with the load spread evenly.
func (b Balance) IdealStepMs(c0, c1 float64) float64 {
	return c0 + c1*b.Mean()
}

// LostShare is the share of a step lost to imbalance; 0 for a step of no length.
func (b Balance) LostShare(c0, c1 float64) float64 {
	step := b.StepMs(c0, c1)
	if step <= 0 {
		return 0
	}
	return (step - b.IdealStepMs(c0, c1)) / step
}
