package predictor

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
)

// Row is one prediction with its outcome.
type Row struct {
	P, Mu     float64 // probability of an end within the horizon, and mean number of further tokens in this case
	Remaining float64 // tokens since the prediction
	Ended     bool    // the request has ended within the horizon
}

// Scores says how good predictions were. A figure that is not defined for the rows is NaN, and null
// in JSON.
type Scores struct {
	Rows int `json:"rows"` // number of predictions
	// The probability that P was larger for a request that ended within the horizon than for one that
	// did not, where an equal P counts half; NaN: there were not both kinds of requests.
	AUC   Figure `json:"auc"`
	Brier Figure `json:"brier"` // mean squared error of P
	// The mean absolute error of Mu, in tokens, over the requests that ended within the horizon; NaN:
	// there were none.
	ConditionalMAE Figure `json:"conditional_mae"`
}

// Figure is a number that may be undefined.
type Figure float64

// Defined reports whether the figure has a value.
func (f Figure) Defined() bool { return !math.IsNaN(float64(f)) }

// MarshalJSON writes null for NaN.
func (f Figure) MarshalJSON() ([]byte, error) {
	if !f.Defined() {
		return []byte("null"), nil
	}
	return json.Marshal(float64(f))
}

// UnmarshalJSON reads null as NaN.
func (f *Figure) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*f = Figure(math.NaN())
		return nil
	}
	return json.Unmarshal(b, (*float64)(f))
}

// Score takes rows in any order.
func Score(rows []Row) Scores {
	s := Scores{Rows: len(rows), AUC: Figure(auc(rows)), Brier: Figure(math.NaN()), ConditionalMAE: Figure(math.NaN())}
	var sumOfSquares, sumOfErrors, ended float64 // squares of the errors of P, and errors of Mu
	for _, r := range rows {
		outcome := 0.0
		if r.Ended {
			outcome = 1
			ended++
			sumOfErrors += math.Abs(r.Mu - r.Remaining) // Mu says nothing about requests that do not end
		}
		sumOfSquares += (r.P - outcome) * (r.P - outcome)
	}
	if len(rows) > 0 {
		s.Brier = Figure(sumOfSquares / float64(len(rows)))
	}
	if ended > 0 {
		s.ConditionalMAE = Figure(sumOfErrors / ended)
	}
	return s
}

func auc(rows []Row) float64 {
	sorted := slices.Clone(rows)
	slices.SortFunc(sorted, func(a, b Row) int { return cmp.Compare(a.P, b.P) })
	// wins is the number of pairs in which the row that ended has the larger P; a tie counts as half.
	var wins, ended, others float64
	for i := 0; i < len(sorted); {
		var tiedEnded, tiedOthers float64                                  // rows with the same P
		for p := sorted[i].P; i < len(sorted) && !(sorted[i].P > p); i++ { // with <= instead of !(>), a NaN would never end the loop
			if sorted[i].Ended {
				tiedEnded++
			} else {
				tiedOthers++
			}
		}
		wins += tiedEnded * (others + tiedOthers/2)
		ended += tiedEnded
		others += tiedOthers
	}
	return wins / (ended * others) // NaN (0/0) if all rows ended, or none
}

// BaseRate returns the best prediction if nothing is known about a request; zero if none ended.
func BaseRate(rows []Row) Prediction {
	var ended, remaining float64
	for _, r := range rows {
		if r.Ended {
			ended++
			remaining += r.Remaining
		}
	}
	if ended == 0 {
		return Prediction{}
	}
	return Prediction{P: ended / float64(len(rows)), Mu: remaining / ended}
}

// ScoreConstant returns the scores that rows would have if each had the prediction p.
func ScoreConstant(rows []Row, p Prediction) Scores {
	flat := slices.Clone(rows)
	for i := range flat {
		flat[i].P, flat[i].Mu = p.P, p.Mu
	}
	return Score(flat)
}

// Reliability is one bar of a reliability plot: it compares rows with about the same P with their
// outcomes.
type Reliability struct {
	Rows  int     `json:"rows"`
	P     float64 `json:"p"`     // mean predicted probability
	Ended float64 `json:"ended"` // share of the rows that really ended
}

// Calibrate divides rows into bins of equal width by their P, and leaves out empty bins.
func Calibrate(rows []Row, bins int) []Reliability {
	sums := make([]Reliability, bins)
	for _, r := range rows {
		b := &sums[min(max(int(r.P*float64(bins)), 0), bins-1)] // a P of 1 belongs to the last bin
		b.Rows++
		b.P += r.P
		if r.Ended {
			b.Ended++
		}
	}
	for i := range sums { // an empty bin gets NaN, and is left out
		sums[i].P /= float64(sums[i].Rows)
		sums[i].Ended /= float64(sums[i].Rows)
	}
	return slices.DeleteFunc(sums, func(r Reliability) bool { return r.Rows == 0 })
}
