package policy

// Balance measures how equal the loads of the ranks of a group are: the fuller the fullest rank, the longer all ranks wait for it.
type Balance struct {
	Ranks         int
	Max, Min, Sum int64 // KV tokens of the fullest rank, of the emptiest rank, and of all ranks together
}

// Measure returns the balance of the loads of one group. loads has the KV tokens of each rank.
func Measure(loads []int64) Balance {
	var b Balance
	for _, l := range loads {
		b.Add(l)
	}
	return b
}

// Add includes the load of one more rank, in KV tokens, in the balance.
func (b *Balance) Add(load int64) {
	if b.Ranks == 0 {
		b.Max, b.Min = load, load
	}
	b.Ranks++
	b.Max, b.Min = max(b.Max, load), min(b.Min, load)
	b.Sum += load
}

// Mean returns the mean load of a rank, in KV tokens; 0 without ranks.
func (b Balance) Mean() float64 {
	if b.Ranks == 0 {
		return 0
	}
	return float64(b.Sum) / float64(b.Ranks)
}

// Imbalance returns by how many KV tokens the ranks are below the fullest rank, summed over all ranks.
func (b Balance) Imbalance() int64 { return int64(b.Ranks)*b.Max - b.Sum }

// MaxMinusMin returns how many KV tokens the emptiest rank is below the fullest: the second measure of the BalanceRoute paper.
func (b Balance) MaxMinusMin() int64 { return b.Max - b.Min }

// IdleShare returns the imbalance as a share, 0 to 1, of the KV tokens that the group would hold if every rank had the load of the fullest;
// 0 if the group holds nothing.
func (b Balance) IdleShare() float64 {
	if b.Max == 0 {
		return 0
	}
	return float64(b.Imbalance()) / (float64(b.Ranks) * float64(b.Max))
}

// StepMs returns how long a step takes, in ms. c0 is the time of a step without load, and c1 the time per KV token of the fullest rank, for
// which the other ranks wait.
func (b Balance) StepMs(c0, c1 float64) float64 { return c0 + c1*float64(b.Max) }

// IdealStepMs returns how long a step would take, in ms, if all ranks had the mean load.
func (b Balance) IdealStepMs(c0, c1 float64) float64 {
	return c0 + c1*b.Mean()
}

// LostShare returns which share of a step, 0 to 1, is lost because the loads are not equal; 0 if the step has no length.
func (b Balance) LostShare(c0, c1 float64) float64 {
	step := b.StepMs(c0, c1)
	if step <= 0 {
		return 0
	}
	return (step - b.IdealStepMs(c0, c1)) / step
}
