package predictor

// Rules say how predictions become r̂, the number of further decode steps that a policy expects of
// a request.
type Rules struct {
	H     int     // horizon in steps; r̂ is from 1 to H
	Tau   float64 // least probability of an end within the horizon with which a prediction is used
	Every int     // tokens after which a request is predicted anew; 0 or less: only when r̂ falls below 1

	// DecrementAnchor follows the paper to the letter: r̂ counts down from H even if the last
	// prediction was not used. Policies then expect an end that was not predicted: with the predictor
	// survival, the share of idle time is 0.6 percentage points larger.
	DecrementAnchor bool
}

// DefaultRules are used if a policy sets none.
func DefaultRules(h int) Rules { return Rules{H: h, Tau: 0.5, Every: 20} }

// State has r̂ of a running request.
type State struct {
	Rhat float32 // r̂ in steps: from 1 to H after Set; Advance counts it down
	Open bool    // an end within the horizon is expected; false: it was too unlikely
}

// Gate turns a prediction into r̂: the mean of Mu and H, weighted by the probabilities that the
// request ends within the horizon or not. If the prediction is not used, r̂ is H and open is false.
func (r Rules) Gate(p Prediction) (rhat float32, open bool) {
	h := float64(r.H)
	if !(p.P > 0 && p.P >= r.Tau) { // also leaves out NaN
		return float32(h), false
	}
	return float32(min(max(p.P*p.Mu+(1-p.P)*h, 1), h)), true
}

// Set starts r̂ anew. It must be called when a request is admitted, and when Advance returns true.
func (r Rules) Set(s *State, p Prediction) { s.Rhat, s.Open = r.Gate(p) }

// Advance counts r̂ down by the tokens that a request has got. If due is true, the caller must call
// Set with a prediction at the age `to`. One is enough even after several times Every tokens.
func (r Rules) Advance(s *State, from, to int32) (due bool) {
	if to <= from {
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

// Follow returns tokens+1 values of r̂ of one request: at q.Age, and after each further token.
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
