package prefill

import (
	"cmp"
	"context"
	"slices"
)

var noContext = context.Background()

// byBegin sorts a copy of jobs by when their prefills began.
func byBegin(jobs []*job) []*job {
	return slices.SortedFunc(slices.Values(jobs), func(a, b *job) int { return cmp.Compare(a.began, b.began) })
}
