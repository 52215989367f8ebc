package predictor

// Rules is the life of r̂, the decode steps a policy expects a request to run
// on.
type Rules struct {
	H     int     // horizon in steps; r̂ lies in [1, H]
	Tau   float64 // the gate: trust a prediction of at least this probability
	Every int     // ask again each time so many tokens were generated; 0 or less: only when r̂ ran out

	// DecrementAnchor takes the paper by its letter: a request the gate shut
	// out counts down from H too, and is so projected to end although nobody
	// can tell when. Costs 0.6 points of idle time with survival.
	DecrementAnchor bool
}

// DefaultRules are the product's, for a horizon.
func DefaultRules(h int) Rules { return Rules{H: h, Tau: 0.5, Every: 20} }

// State is what is kept of r̂ for every running request.
type State struct {
	Rhat float32 // in [1, H] after Set
	Open bool    // the last prediction passed the gate
}

// Gate turns a prediction into r̂. If the prediction does not pass the gate, r̂ is H: the request is not expected to end.
func (r Rules) Gate(p Prediction) (rhat float32, open bool) {
	h := float64(r.H)
	if !(p.P > 0 && p.P >= r.Tau) {
		return float32(h), false
	}
	return float32(min(max(p.P*p.Mu+(1-p.P)*h, 1), h)), true
}

// Set starts r̂ anew from a prediction at the current age: at admission, and
// whenever Advance said so.
func (r Rules) Set(s *State, p Prediction) { s.Rhat, s.Open = r.Gate(p) }

// Advance follows a request from one age to a later one. When it reports due,
// the caller owes a Set with a prediction at age `to`; a burst that ran past
// several refresh points owes one, since only the newest age is worth asking at.
func (r Rules) Advance(s *State, from, to int32) (due bool) {
	if to <= from {
		return false
	}
	if s.Open || r.DecrementAnchor {
		s.Rhat -= float32(to - from)
	}
	return s.Rhat < 1 || r.Every > 0 && int(to)/r.Every != int(from)/r.Every
}

// Follow returns r̂ of one request that is alone and starts at q.Age, after 0, 1, ... and so many tokens: what board and simulator do
// for many requests at once.
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
		if r.Advance(&s, q.Age-1, q.Age) {
			r.Set(&s, predictNow())
		}
		rhats = append(rhats, s.Rhat)
	}
	return rhats
}
