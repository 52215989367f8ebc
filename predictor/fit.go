package predictor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// FitVersion is the version of the fit files that this package writes and reads.
const FitVersion = 1

// Fit is the content of a fit file: what `evenkeel fit` has learned from past requests.
type Fit struct {
	Version         int       `json:"evenkeel_fit"`
	Kind            Kind      `json:"kind"`
	Created         time.Time `json:"created"`
	Source          Source    `json:"source"`
	Outputs         Runs      `json:"outputs"`
	PromptQuantiles []int32   `json:"prompt_quantiles,omitempty"` // upper bounds of the length buckets q0 to q6, in tokens; q7 has none
	Buckets         []Bucket  `json:"buckets,omitempty"`
	Holdout         Holdout   `json:"holdout"`

	Compared []Comparison `json:"-"` // the kinds of predictor that Train has tried, the simplest first
}

// Source says from which requests a fit was made.
type Source struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
	Rows   int    `json:"rows"`
	From   string `json:"from"` // first arrival: a time (RFC 3339) or, if the trace has no dates, a duration since its start
	To     string `json:"to"`
}

// Holdout says how well a fit to the earlier requests predicted the later ones, and how well their
// base rate did. It was made only for this check: the fit file has a fit to all requests.
type Holdout struct {
	Requests int `json:"requests"` // number of requests at the end of the trace, which the fit to the earlier ones did not see
	Horizon  int `json:"horizon"`  // horizon of the scored predictions, in steps; the fit can be used with any horizon
	Scores
	Base        Scores        `json:"base"`
	Reliability []Reliability `json:"reliability,omitempty"`
}

// Comparison has the scores of one kind of predictor. All kinds are scored on the same requests.
type Comparison struct {
	Kind Kind `json:"kind"`
	Scores
}

// Encode returns the bytes of the fit file.
func (f *Fit) Encode() ([]byte, error) {
	b, err := json.Marshal(f)
	if err != nil {
		return nil, fmt.Errorf("fit file: %w", err)
	}
	return append(b, '\n'), nil
}

// ParseFit refuses another version, unknown fields, and values that cannot be used.
func ParseFit(b []byte) (*Fit, error) {
	// A file of another version may have fields that the strict decoder below would report instead. A
	// Kind that is no text is an error for every version.
	var head struct {
		Version *int `json:"evenkeel_fit"`
		Kind    Kind `json:"kind"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return nil, fmt.Errorf("fit file: %w", err)
	}
	switch {
	case head.Version == nil:
		return nil, errors.New("fit file: no evenkeel_fit in it: make one with evenkeel fit --out")
	case *head.Version != FitVersion:
		return nil, fmt.Errorf("fit file: version %d, this evenkeel reads version %d: fit again", *head.Version, FitVersion)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	f := &Fit{}
	if err := d.Decode(f); err != nil {
		return nil, fmt.Errorf("fit file: %w", err)
	}
	if err := f.validate(); err != nil {
		return nil, fmt.Errorf("fit file: %w", err)
	}
	return f, nil
}

// maxFitOutputs bounds the memory to less than 100 MB of tables. Each request counts twice, among
// all outputs and in a bucket.
const maxFitOutputs = 2 * maxRequests

func (f *Fit) validate() error {
	if f.Kind != KindSurvival && f.Kind != KindExact {
		return fmt.Errorf("kind %q: want survival or exact", f.Kind)
	}
	total := 0 // number of outputs in all runs so far
	checkRuns := func(what string, r Runs) error {
		for i, run := range r {
			length, count := run[0], run[1]
			if isAscending := i == 0 || length > r[i-1][0]; length < 1 || count < 1 || !isAscending {
				return fmt.Errorf("%s: pair %d is %v: want [length, count] of at least 1, lengths ascending", what, i, run)
			}
			if total += int(count); total > maxFitOutputs {
				return fmt.Errorf("more than %d outputs", maxFitOutputs)
			}
		}
		return nil
	}
	if err := checkRuns("outputs", f.Outputs); err != nil {
		return err
	}
	bounds := len(f.PromptQuantiles) // 0: no length buckets
	if rightCount := bounds == 0 || bounds == LengthBuckets-1; !rightCount || !slices.IsSorted(f.PromptQuantiles) {
		return fmt.Errorf("prompt_quantiles %v: want %d lengths, ascending", f.PromptQuantiles, LengthBuckets-1)
	}
	seen := map[BucketName]bool{}
	for _, b := range f.Buckets {
		_, bucket, err := b.Name.parse()
		if err != nil {
			return err
		}
		if seen[b.Name] {
			return fmt.Errorf("bucket %s is listed twice", b.Name)
		}
		if bucket != noBucket && len(f.PromptQuantiles) == 0 {
			return fmt.Errorf("bucket %s without prompt_quantiles", b.Name)
		}
		seen[b.Name] = true
		if err := checkRuns("bucket "+string(b.Name), b.Outputs); err != nil {
			return err
		}
	}
	return nil
}

// Build returns the predictor, and the survival table of all outputs.
func (f *Fit) Build() (Predictor, *Survival, error) {
	table := NewSurvival(f.Outputs.Lengths())
	if f.Kind != KindExact {
		return table, table, nil
	}
	e, err := f.buildExact(table)
	if err != nil {
		return nil, nil, err
	}
	return e, table, nil
}

func (f *Fit) buildExact(all *Survival) (*Exact, error) {
	e := &Exact{all: all, lengthBounds: f.PromptQuantiles, byKey: map[uint64]*history{}}
	if len(f.PromptQuantiles) > 0 {
		e.byLength = make([]*Survival, LengthBuckets)
	}
	for _, b := range f.Buckets {
		key, bucket, err := b.Name.parse()
		if err != nil {
			return nil, fmt.Errorf("fit file: %w", err)
		}
		if bucket != noBucket {
			e.byLength[bucket] = NewSurvival(b.Outputs.Lengths())
		} else if b.Outputs.Len() >= MinKeyOutputs { // Exact does not use keys with fewer
			h := newHistory(b.Outputs.Lengths())
			e.byKey[key] = &h
		}
	}
	return e, nil
}
