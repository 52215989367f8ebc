package policy

// Balance measures how equal the loads of the ranks of a group are.
type Balance struct {
	Ranks         int
	Max, Min, Sum int64 // KV tokens of the fullest rank, of the emptiest, and of all together
}

// Measure returns the balance of these loads, in KV tokens.
func Measure(loads []int64) Balance {
	var b Balance
	for _, l := range loads {
		b.Add(l)
	}
	return b
}

// Add includes the load of one more rank.
func (b *Balance) Add(load int64) {
	if b.Ranks == 0 {
		b.Max, b.Min = load, load
	}
	b.Ranks++
	b.Max, b.Min = max(b.Max, load), min(b.Min, load)
	b.Sum += load
}

// Mean returns the mean load of a rank; 0 without ranks.
func (b Balance) Mean() float64 {
	if b.Ranks == 0 {
		return 0
	}
	return float64(b.Sum) / float64(b.Ranks)
}

// Imbalance is by how many KV tokens the ranks are below the fullest rank, summed over all.
func (b Balance) Imbalance() int64 { return int64(b.Ranks)*b.Max - b.Sum }

// MaxMinusMin is the second measure of the BalanceRoute paper.
func (b Balance) MaxMinusMin() int64 { return b.Max - b.Min }

// IdleShare is the imbalance as a share of what the group would hold if every rank had the load of
// the fullest.
func (b Balance) IdleShare() float64 {
	if b.Max == 0 {
		return 0
	}
	return float64(b.Imbalance()) / (float64(b.Ranks) * float64(b.Max))
}

// StepMs returns how long a step takes, in ms. c0 is that of a step without load, and c1 the ms per
// KV token of the fullest rank.
func (b Balance) StepMs(c0, c1 float64) float64 { return c0 + c1*float64(b.Max) }

// IdealStepMs is that of ranks that all have the mean load.
func (b Balance) IdealStepMs(c0, c1 float64) float64 {
	return c0 + c1*b.Mean()
}

// LostShare is the share of a step that is lost because the loads are not equal.
func (b Balance) LostShare(c0, c1 float64) float64 {
	step := b.StepMs(c0, c1)
	if step <= 0 {
		return 0
	}
	return (step - b.IdealStepMs(c0, c1)) / step
}
