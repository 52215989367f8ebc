package predictor

// Rules say how predictions become r̂, the number of decode steps for which a policy expects a request to go on, and when it is predicted
// anew.
type Rules struct {
	H     int     // horizon in steps; r̂ is from 1 to H
	Tau   float64 // a prediction is used only if the request ends within the horizon with at least this probability
	Every int     // a request is predicted anew each time it has got so many tokens; 0 or less: only when r̂ falls below 1

	// DecrementAnchor follows the paper to the letter: r̂ counts down from H with each token even if the last prediction was not used.
	// This makes policies expect an end of the request that was not predicted. With the predictor survival, the share of idle time is
	// 0.6 percentage points larger.
	DecrementAnchor bool
}

// DefaultRules returns the rules that are used if a policy sets none, for a horizon in steps.
func DefaultRules(h int) Rules { return Rules{H: h, Tau: 0.5, Every: 20} }

// State has r̂ of a running request: the number of further decode steps that a policy expects of it.
type State struct {
	Rhat float32 // r̂ in steps: from 1 to H after Set; Advance counts it down
	Open bool    // an end within the horizon is expected; false: it was too unlikely by the last prediction, which was left out
}

// Gate turns a prediction into r̂: the mean of Mu and H, weighted by the probabilities that the request ends within the horizon or not.
// If the prediction is not used, because its probability is 0 or below Tau, open is false and r̂ is H: the request is not expected to end
// within the horizon.
func (r Rules) Gate(p Prediction) (rhat float32, open bool) {
	h := float64(r.H)
	if !(p.P > 0 && p.P >= r.Tau) { // this form also leaves out a P of NaN
		return float32(h), false
	}
	return float32(min(max(p.P*p.Mu+(1-p.P)*h, 1), h)), true
}

// Set starts r̂ anew from a prediction at the current age. It must be called when a request is admitted, and when Advance returns true.
func (r Rules) Set(s *State, p Prediction) { s.Rhat, s.Open = r.Gate(p) }

// Advance updates r̂, the predicted number of further steps, when a request has got tokens, so that its age has grown (from, to). r̂ counts
// down with the age. While the request is not expected to end within the horizon (Open is false), r̂ stays at H or, with DecrementAnchor,
// counts down from H. due is true if r̂ falls below 1, or if the age reaches or passes a multiple of Every: the caller must then call Set
// with a prediction at the age `to`. One prediction is enough even if the request has got several times Every tokens at once.
func (r Rules) Advance(s *State, from, to int32) (due bool) {
	if to <= from { // the request has got no token
		return false
	}
	if s.Open || r.DecrementAnchor {
		s.Rhat -= float32(to - from)
	}
	if s.Rhat < 1 {
		return true
	}
	return r.Every > 0 && int(to)/r.Every != int(from)/r.Every // the quotients differ if a multiple of Every lies between
}

// Follow returns tokens+1 values of r̂, the predicted number of further steps, of one request: at q.Age, and after each of the next tokens.
// p predicts at the beginning, and again whenever Advance says that a new prediction is due. The board and the simulator do the same for
// many requests at once.
func (r Rules) Follow(p Predictor, q Query, tokens int) []float32 {
	predictNow := func() Prediction {
		var out [1]Prediction
		p.Predict(r.H, []Query{q}, out[:])
		return out[0]
	}
	var s State
	r.Set(&s, predictNow())
	rhats := append(make([]float32, 0, tokens+1), s.Rhat)
	for range tokens {
		q.Age++
		if due := r.Advance(&s, q.Age-1, q.Age); due {
			r.Set(&s, predictNow())
		}
		rhats = append(rhats, s.Rhat)
	}
	return rhats
}
