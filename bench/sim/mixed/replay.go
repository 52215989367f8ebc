package mixed

import (
	"fmt"
	"math/rand/v2"

	"evenkeel/bench/lab/trace"
)

// Replayed are the lengths of a trace's requests in their order, from the one with a number on.
// After the last one it begins anew.
type Replayed struct {
	Name     string
	Requests []trace.Request
	From     int

	next int
}

// Next is the next request. A run that begins, begins with the first.
func (t *Replayed) Next(_ *rand.Rand, at float64) trace.Request {
	if at == 0 {
		t.next = t.From
	}
	q := t.Requests[t.next%len(t.Requests)]
	t.next++
	q.Prompt, q.Output = max(1, q.Prompt), max(1, q.Output) // a rank answers with a token at least
	return q
}

func (t *Replayed) String() string { return fmt.Sprintf("%s from request %d", t.Name, t.From) }
