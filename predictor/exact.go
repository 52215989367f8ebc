package predictor

import (
	"fmt"
	"slices"
	"sort"
)

// How many outputs a bucket must have before predictions come from it.
const (
	MinKeyOutputs    = 5  // finished outputs of one key
	MinLengthOutputs = 50 // finished outputs of one prompt-length bucket
	LengthBuckets    = 8  // by quantiles of the prompts a fit saw
)

// Exact predicts from the outputs of requests with the same key. If these are too few,
// it predicts from the outputs of prompts of about the same length, else from all outputs. It never changes once
// built.
type Exact struct {
	all      *Survival
	edges    []int32 // ascending; bucket k holds prompts in (edges[k-1], edges[k]]
	byLength []*Survival
	byKey    map[uint64]*history // those with MinKeyOutputs at least
}

// Predict answers each query from the narrowest bucket that has enough outputs.
func (e *Exact) Predict(horizon int, queries []Query, out []Prediction) {
	out = out[:len(queries)]
	for k := range queries {
		age := int(queries[k].Age)
		if queries[k].Key != 0 {
			if history := e.byKey[queries[k].Key]; history != nil {
				out[k] = history.predict(age, horizon)
				continue
			}
		}
		t := e.table(queries[k].Prompt)
		if t.Len() == 0 {
			out[k] = unknown(horizon)
			continue
		}
		out[k] = t.between(t.rank(age), t.rank(age+horizon), age, horizon)
	}
}

// table returns the table for prompts of about this length, or that of all prompts if it has too few outputs.
func (e *Exact) table(prompt int32) *Survival {
	if len(e.byLength) > 0 {
		if b := e.byLength[lengthBucket(e.edges, prompt)]; b.Len() >= MinLengthOutputs {
			return b
		}
	}
	return e.all
}

// lengthBucket is the index of the bucket a prompt falls in. Up to 7 edges:
// comparing them all is faster than searching.
func lengthBucket(edges []int32, prompt int32) int {
	k := 0
	for _, edge := range edges {
		if prompt > edge {
			k++
		}
	}
	return k
}

// lengthEdges returns the upper bounds of all but the last of n buckets that
// hold about as many prompts each.
func lengthEdges(prompts []int32, n int) []int32 {
	if len(prompts) == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(prompts))
	edges := make([]int32, n-1)
	for k := range edges {
		edges[k] = sorted[(len(sorted)*(k+1)+n-1)/n-1]
	}
	return edges
}

// Bucket is one bucket of a fit file.
type Bucket struct {
	Name    BucketName `json:"key"`
	Outputs Runs       `json:"outputs"`
}

// BucketName is a key in 16 hex digits, or q and the number of a length bucket.
type BucketName string

func keyName(key uint64) BucketName { return BucketName(fmt.Sprintf("%016x", key)) }
func lengthName(k int) BucketName   { return BucketName(fmt.Sprintf("q%d", k)) }

// parse tells a length bucket (length >= 0) from a key.
func (n BucketName) parse() (key uint64, length int, err error) {
	for k := range LengthBuckets {
		if n == lengthName(k) {
			return 0, k, nil
		}
	}
	if _, err := fmt.Sscanf(string(n), "%16x", &key); err != nil || n != keyName(key) || key == 0 {
		return 0, 0, fmt.Errorf("bucket %q: neither q0 to q%d nor a key of 16 hex digits", string(n), LengthBuckets-1)
	}
	return key, -1, nil
}

// Runs is a multiset of lengths as [value, count] pairs, values ascending.
type Runs [][2]int32

// NewRuns counts lengths.
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

// Len is how many lengths there are.
func (r Runs) Len() int {
	n := 0
	for _, run := range r {
		n += int(run[1])
	}
	return n
}

// Lengths returns all lengths, ascending.
func (r Runs) Lengths() []int32 {
	out := make([]int32, 0, r.Len())
	for _, run := range r {
		for range run[1] {
			out = append(out, run[0])
		}
	}
	return out
}

// spread returns at most `most` lengths with the same distribution as all of them. Any stretch of the result has
// about this distribution, too: a ring forgets them in this order, and must not forget the short lengths
// first.
func (r Runs) spread(most int) []int32 {
	total := r.Len()
	n := min(total, most)
	if n == 0 {
		return nil
	}
	ends := make([]int, len(r)) // ends[i] = lengths in the runs up to i
	sum := 0
	for i, run := range r {
		sum += int(run[1])
		ends[i] = sum
	}
	stride := coprimeNear(n*618/1000, n) // golden section: evenly over any stretch
	out := make([]int32, n)
	for i := range out {
		quantile := i * stride % n                 // which of the n quantiles
		rank := (2*quantile + 1) * total / (2 * n) // the lengths' own index
		out[i] = r[sort.SearchInts(ends, rank+1)][0]
	}
	return out
}

// coprimeNear returns the smallest number from least up that shares no divisor with n.
func coprimeNear(least, n int) int {
	gcd := func(a, b int) int {
		for b != 0 {
			a, b = b, a%b
		}
		return a
	}
	for least = max(least, 1); gcd(least, n) != 1; {
		least++
	}
	return least
}
