package predictor

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
)

// Row is one prediction and what came of it.
type Row struct {
	P, Mu     float64
	Remaining float64 // R, tokens the request still ran
	Ended     bool    // R <= H: the label of P
}

// Scores says how good predictions were. A figure that is not
// defined for the rows is NaN, and null in JSON.
type Scores struct {
	Rows           int    `json:"rows"`            // predictions scored
	AUC            Figure `json:"auc"`             // ranks the ended above the others; ties half; NaN with one class
	Brier          Figure `json:"brier"`           // mean squared error of P
	ConditionalMAE Figure `json:"conditional_mae"` // mean |Mu - R| over the ended; NaN without any
}

// Figure is a number that may be undefined.
type Figure float64

// Defined reports whether there is a number.
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

// Score scores rows; their order does not matter.
func Score(rows []Row) Scores {
	s := Scores{Rows: len(rows), AUC: Figure(auc(rows)), Brier: Figure(math.NaN()), ConditionalMAE: Figure(math.NaN())}
	var squared, absolute, ended float64
	for _, r := range rows {
		label := 0.0
		if r.Ended {
			label = 1
			ended++
			absolute += math.Abs(r.Mu - r.Remaining)
		}
		squared += (r.P - label) * (r.P - label)
	}
	if len(rows) > 0 {
		s.Brier = Figure(squared / float64(len(rows)))
	}
	if ended > 0 {
		s.ConditionalMAE = Figure(absolute / ended)
	}
	return s
}

// auc is the probability that a row that ended got a larger P than one that
// did not, by rank sums.
func auc(rows []Row) float64 {
	sorted := slices.Clone(rows)
	slices.SortFunc(sorted, func(a, b Row) int { return cmp.Compare(a.P, b.P) })
	var wins, ended, others float64 // others: rows so far that did not end
	for i := 0; i < len(sorted); {
		var tiedEnded, tiedOthers float64
		for p := sorted[i].P; i < len(sorted) && !(sorted[i].P > p); i++ { // so that a NaN ends too
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
	return wins / (ended * others) // 0/0, NaN, with one class
}

// BaseRate is what knowing nothing of a request predicts: the share of rows
// that ended, and how long those ran on average.
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

// ScoreConstant scores rows as if each had been predicted alike.
func ScoreConstant(rows []Row, p Prediction) Scores {
	flat := slices.Clone(rows)
	for i := range flat {
		flat[i].P, flat[i].Mu = p.P, p.Mu
	}
	return Score(flat)
}

// Reliability is one bar of a reliability plot: of the rows predicted about
// P, the share Ended did.
type Reliability struct {
	Rows  int     `json:"rows"`
	P     float64 `json:"p"`     // mean prediction
	Ended float64 `json:"ended"` // observed share
}

// Calibrate sorts rows into bins of equal width over [0, 1] and leaves out
// the empty.
func Calibrate(rows []Row, bins int) []Reliability {
	sums := make([]Reliability, bins)
	for _, r := range rows {
		b := &sums[min(max(int(r.P*float64(bins)), 0), bins-1)]
		b.Rows++
		b.P += r.P
		if r.Ended {
			b.Ended++
		}
	}
	for i := range sums {
		sums[i].P /= float64(sums[i].Rows)
		sums[i].Ended /= float64(sums[i].Rows)
	}
	return slices.DeleteFunc(sums, func(r Reliability) bool { return r.Rows == 0 })
}
