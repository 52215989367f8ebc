package vectors

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/subset"
)

// kinds are the vectors we answer: each compares what the product computes from
// `in` with `want`.
var kinds = map[string]func(in, want json.RawMessage) error{
	"fscore0":   comparing(fscore0),
	"fscoreH":   comparing(fscoreH),
	"subset":    comparing(subsetChoice),
	"project":   comparing(project),
	"survival":  comparing(survival),
	"refresh":   comparing(refresh),
	"score":     comparing(score),
	"br0":       comparing(round),
	"brh":       comparing(round),
	"cost":      comparing(cost),
	"imbalance": comparing(imbalance),
}

// near compares as the vectors' rule says: within a millionth, of one at least.
func near(what string, got, want float64) error {
	if math.Abs(got-want) <= 1e-6*max(1, math.Abs(want)) {
		return nil
	}
	return fmt.Errorf("%s = %v, want %v", what, got, want)
}

// nearAll is near for lists.
func nearAll[N int64 | float32 | float64](what string, got []N, want []float64) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d %s, want %d", len(got), what, len(want))
	}
	for i := range got {
		if err := near(fmt.Sprintf("%s[%d]", what, i), float64(got[i]), want[i]); err != nil {
			return err
		}
	}
	return nil
}

// comparing reads `in` strictly, since an unread key is an untested one, and `want`
// likewise.
func comparing[In, Want any](compare func(in In, want Want) error) func(rawIn, rawWant json.RawMessage) error {
	return func(rawIn, rawWant json.RawMessage) error {
		var in In
		var want Want
		if err := decodeStrict(rawIn, &in); err != nil {
			return fmt.Errorf("in: %w", err)
		}
		if err := decodeStrict(rawWant, &want); err != nil {
			return fmt.Errorf("want: %w", err)
		}
		return compare(in, want)
	}
}

func fscore0(in struct {
	W       int64 `json:"w"`
	Margin  int64 `json:"m"`
	Workers int   `json:"G"`
}, want struct{ F float64 }) error {
	return near("F", float64(subset.F0(in.W, in.Margin, in.Workers)), want.F)
}

// horizonScore is the part of `in` that F of BR-H reads.
type horizonScore struct {
	Margins []int64 `json:"margins"`
	Alpha   float64 `json:"alpha"`
	Beta    float64 `json:"beta"`
	Gamma   float64 `json:"gamma"`
}

func (h *horizonScore) discounts() []float64 { return subset.Discounts(len(h.Margins)-1, h.Gamma) }

func (h *horizonScore) score() *subset.Score {
	var s subset.Score
	s.SetBRH(h.Margins, h.discounts(), h.Alpha, h.Beta)
	return &s
}

func fscoreH(in struct {
	horizonScore
	W int64 `json:"w"`
}, want struct{ F float64 }) error {
	if err := near("F by the sum", subset.F(in.W, in.Margins, in.discounts(), in.Alpha, in.Beta), want.F); err != nil {
		return err
	}
	return near("F by sorted margins", in.score().F(in.W), want.F)
}

func subsetChoice(in struct {
	horizonScore
	Sizes    []int64 `json:"sizes"`
	Cap      int     `json:"cap"`
	Headroom *int64  `json:"headroom"`
}, want struct {
	Best float64 `json:"best"`
}) error {
	if len(in.Sizes) > subset.MaxItems {
		return fmt.Errorf("%d sizes, at most %d can be chosen from", len(in.Sizes), subset.MaxItems)
	}
	limit := int64(subset.Unlimited)
	if in.Headroom != nil {
		limit = *in.Headroom
	}
	var solver subset.Solver
	got, ok := solver.Best(in.score(), subset.Problem{Tokens: in.Sizes, Cap: in.Cap, Limit: limit})
	if !ok {
		return fmt.Errorf("no subset is allowed, want one that scores %v", want.Best)
	}
	var sum int64 // from the sizes, not as the solver says
	for i, size := range in.Sizes {
		if got.Mask>>i&1 == 1 {
			sum += size
		}
	}
	if sum > limit || got.Len() > in.Cap {
		return fmt.Errorf("chose %d of at most %d, %d tokens of at most %d", got.Len(), in.Cap, sum, limit)
	}
	return near("best", subset.F(sum, in.Margins, in.discounts(), in.Alpha, in.Beta), want.Best)
}

func project(in struct {
	Horizon int           `json:"horizon"`
	Running []requestJSON `json:"running"`
}, want struct {
	Loads []float64 `json:"loads"`
}) error {
	running := make([]policy.Request, len(in.Running))
	for i, r := range in.Running {
		running[i] = policy.Request{Prompt: r.Prompt, Generated: r.Generated, Rhat: r.Rhat}
	}
	got := make([]int64, in.Horizon+1)
	policy.Project(got, running)
	return nearAll("loads", got, want.Loads)
}

func round(rawIn json.RawMessage, want struct {
	Assign [][2]int64 `json:"assign"`
}) error {
	r, err := Decide(rawIn, "")
	if err != nil {
		return err
	}
	got := make([][2]int64, len(r.Assignments))
	for i, a := range r.Assignments {
		got[i] = [2]int64{int64(a.Entry), int64(a.Worker)}
	}
	byEntry := func(a, b [2]int64) int { return slices.Compare(a[:], b[:]) }
	slices.SortFunc(got, byEntry)
	slices.SortFunc(want.Assign, byEntry)
	if !slices.Equal(got, want.Assign) {
		return fmt.Errorf("assign = %v, want %v", got, want.Assign)
	}
	return nil
}

// cost is of several columns, which count by their weights: evenkeel has one of them.
func cost(in struct {
	Loads   [][]float64 `json:"loads"` // [worker][column]
	Weights []float64   `json:"weights"`
}, want struct{ J float64 }) error {
	sum, column := 0.0, make([]float64, len(in.Loads))
	for c, weight := range in.Weights {
		for g, row := range in.Loads {
			if len(row) != len(in.Weights) {
				return fmt.Errorf("in: worker %d has %d columns, there are %d weights", g, len(row), len(in.Weights))
			}
			column[g] = row[c]
		}
		sum += weight * policy.Cost(column)
	}
	return near("J", sum, want.J)
}

func imbalance(in struct {
	Loads []int64 `json:"loads"`
	C0    float64 `json:"c0_ms"`
	C1    float64 `json:"c1_ms_per_token"`
}, want struct {
	Imbalance   float64 `json:"imbalance_tokens"`
	MaxMinusMin float64 `json:"max_minus_min"`
	IdleShare   float64 `json:"idle_share"`
	StepMs      float64 `json:"step_ms"`
	IdealMs     float64 `json:"ideal_step_ms"`
}) error {
	b := policy.Measure(in.Loads)
	for _, c := range []struct {
		what      string
		got, want float64
	}{
		{"imbalance_tokens", float64(b.Imbalance()), want.Imbalance},
		{"max_minus_min", float64(b.MaxMinusMin()), want.MaxMinusMin},
		{"idle_share", b.IdleShare(), want.IdleShare},
		{"step_ms", b.StepMs(in.C0, in.C1), want.StepMs},
		{"ideal_step_ms", b.IdealStepMs(in.C0, in.C1), want.IdealMs},
	} {
		if err := near(c.what, c.got, c.want); err != nil {
			return err
		}
	}
	return nil
}
