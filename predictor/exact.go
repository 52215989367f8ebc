package predictor

import (
	"fmt"
	"slices"
	"sort"
)

// Bounds of the buckets, which hold the output lengths of similar requests.
const (
	MinKeyOutputs    = 5  // outputs of a key from which on it is used
	MinLengthOutputs = 50 // outputs of a length bucket from which on it is used
	LengthBuckets    = 8  // ranges of prompt lengths, divided by quantiles
)

// Exact predicts from the output lengths of equal prompts. If these are too few, it predicts from
// prompts of about the same length, and then from all. It does not change after it is built.
type Exact struct {
	all          *Survival
	lengthBounds []int32             // ascending; length bucket k has the prompts from lengthBounds[k-1]+1 to lengthBounds[k] tokens
	byLength     []*Survival         // by length bucket; empty: the bounds are not known yet
	byKey        map[uint64]*history // only keys with at least MinKeyOutputs outputs
}

// Predict answers each query from the narrowest bucket that has enough outputs.
func (e *Exact) Predict(horizon int, queries []Query, out []Prediction) {
	out = out[:len(queries)]
	for k := range queries {
		age := int(queries[k].Age)
		if queries[k].Key != 0 {
			if history := e.byKey[queries[k].Key]; history != nil { // nil: the key has too few outputs
				out[k] = history.predict(age, horizon) // as predictFrom below, but by a binary search
				continue
			}
		}
		table := e.tableFor(queries[k].Prompt)
		if table.Len() == 0 {
			out[k] = unknown(horizon)
			continue
		}
		untilAge, untilEnd := table.countAtMost(age), table.countAtMost(age+horizon)
		out[k] = table.predictFrom(untilAge, untilEnd, age, horizon)
	}
}

func (e *Exact) tableFor(prompt int32) *Survival {
	if len(e.byLength) > 0 {
		if table := e.byLength[lengthBucket(e.lengthBounds, prompt)]; table.Len() >= MinLengthOutputs {
			return table
		}
	}
	return e.all
}

// lengthBucket compares all bounds, because with at most 7 this is faster than a binary search.
func lengthBucket(bounds []int32, prompt int32) int {
	k := 0
	for _, bound := range bounds {
		if prompt > bound {
			k++
		}
	}
	return k
}

// quantileBounds divides prompt lengths into n buckets with about equally many prompts each; the
// last bucket has no upper bound.
func quantileBounds(prompts []int32, n int) []int32 {
	if len(prompts) == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(prompts))
	bounds := make([]int32, n-1)
	for k := range bounds {
		upTo := (len(sorted)*(k+1) + n - 1) / n // prompts in the buckets up to k, rounded up
		bounds[k] = sorted[upTo-1]
	}
	return bounds
}

// Bucket has the output lengths of similar requests in a fit file: of one key, or of one range of
// prompt lengths.
type Bucket struct {
	Name    BucketName `json:"key"`
	Outputs Runs       `json:"outputs"`
}

// BucketName is a key in 16 hex digits, or q and the number of a length bucket.
type BucketName string

func keyName(key uint64) BucketName { return BucketName(fmt.Sprintf("%016x", key)) }
func lengthName(k int) BucketName   { return BucketName(fmt.Sprintf("q%d", k)) }

// noBucket means that a BucketName is a key.
const noBucket = -1

func (n BucketName) parse() (key uint64, lengthBucket int, err error) {
	for k := range LengthBuckets {
		if n == lengthName(k) {
			return 0, k, nil
		}
	}
	// Sscanf also accepts fewer digits, capitals and text after the digits.
	if _, err := fmt.Sscanf(string(n), "%16x", &key); err != nil || n != keyName(key) || key == 0 {
		return 0, 0, fmt.Errorf("bucket %q: neither q0 to q%d nor a key of 16 hex digits", string(n), LengthBuckets-1)
	}
	return key, noBucket, nil
}

// Runs has pairs [length, number of times that it occurs], by length, ascending.
type Runs [][2]int32

// NewRuns takes lengths in any order.
func NewRuns(lengths []int32) Runs {
	runs := Runs{}
	for _, v := range slices.Sorted(slices.Values(lengths)) {
		if n := len(runs); n > 0 && runs[n-1][0] == v {
			runs[n-1][1]++
		} else {
			runs = append(runs, [2]int32{v, 1})
		}
	}
	return runs
}

// Len counts each length as often as it occurs.
func (r Runs) Len() int {
	n := 0
	for _, run := range r {
		n += int(run[1])
	}
	return n
}

// Lengths returns all lengths, ascending, each as often as it occurs.
func (r Runs) Lengths() []int32 {
	out := make([]int32, 0, r.Len())
	for _, run := range r {
		for range run[1] {
			out = append(out, run[0])
		}
	}
	return out
}

// sampleEvenly returns at most maxLengths lengths with the same distribution. They are not sorted,
// so that any part of the result has about this distribution, too: a ring forgets them in this
// order, and if it forgot the short lengths first, the rest would be too long.
func (r Runs) sampleEvenly(maxLengths int) []int32 {
	total := r.Len()
	n := min(total, maxLengths) // the sample has the middle of each of n quantiles
	if n == 0 {
		return nil
	}
	ends := make([]int, len(r)) // ends[i] is the number of lengths in the runs up to i
	sum := 0
	for i, run := range r {
		count := int(run[1])
		sum += count
		ends[i] = sum
	}
	stride := coprimeNear(n*618/1000, n) // with a stride of the golden section, 0.618 n, any part of the result is spread evenly
	out := make([]int32, n)
	for i := range out {
		quantile := i * stride % n
		rank := (2*quantile + 1) * total / (2 * n) // index of the quantile's middle in the sorted lengths
		run := r[sort.SearchInts(ends, rank+1)]    // the first run that ends behind this index
		out[i] = run[0]
	}
	return out
}

// coprimeNear returns the smallest number from atLeast on that has no common divisor with n.
func coprimeNear(atLeast, n int) int {
	gcd := func(a, b int) int {
		for b != 0 {
			a, b = b, a%b
		}
		return a
	}
	coprime := max(atLeast, 1)
	for gcd(coprime, n) != 1 {
		coprime++
	}
	return coprime
}
