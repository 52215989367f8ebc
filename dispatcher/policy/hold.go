package policy

// HoldRule says when an admission should wait for a better moment: it lengthens everybody's step by more than it gives.
type HoldRule struct {
	C0Ms, C1Ms float64
	Running    int     // requests that decode now
	Share      float64 // of an even share of the step an admission may cost; 1 is where it would lower the group's tokens per second
	Steps      float64 // nobody is held longer
}

// Placed is one placement of the round.
type Placed struct {
	Rank        int   // index
	Tokens      int64 // added to its load
	WaitedSteps float64
	Overdue     bool

	// Set by Apply.
	Held    bool
	AddsMs  float64 // to every step
	WorthMs float64 // the most it may add
}

// Apply marks the placements to hold back and returns how many. loads are those
// of the group before the round; they become those after it.
func (r HoldRule) Apply(loads []int64, placed []Placed) (held int) {
	for i := range placed {
		loads[placed[i].Rank] += placed[i].Tokens
	}
	for r.drop(loads, placed) {
		held++
	}
	return held
}

// drop holds back the first placement that should be.
func (r HoldRule) drop(loads []int64, placed []Placed) bool {
	var most, second int64
	fullest := none
	for g, x := range loads {
		switch {
		case fullest == none || x > most:
			second, most, fullest = most, x, g
		case x > second:
			second = x
		}
	}
	for i := range placed {
		p := &placed[i]
		if p.Rank != fullest || p.Held || p.Overdue || p.WaitedSteps >= r.Steps {
			continue
		}
		without := max(second, most-p.Tokens)
		p.AddsMs = r.C1Ms * float64(most-without)
		p.WorthMs = r.Share * (r.C0Ms + r.C1Ms*float64(without)) / float64(r.Running+1)
		if p.AddsMs > p.WorthMs {
			p.Held = true
			loads[p.Rank] -= p.Tokens
			return true
		}
	}
	return false
}
