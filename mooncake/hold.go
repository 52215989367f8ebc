package mooncake

import "time"

// Freed says whether a prefill engine has freed KV that no decode engine had fetched, since a request was written.
type Freed uint8

// Values of Freed.
const (
	FreedUnknown Freed = iota // the engine does not count
	FreedNone
	FreedSome // or the count could not be read, or is another process's
)

// Answer is what is known of an answer that a decode engine makes of KV which it pulled, when its first event comes.
type Answer struct {
	// KeptUntil is until when the prefill engine certainly keeps the KV. It is fixed when that engine answers, and nothing renews it: a
	// proxy sees no heartbeats between engines, and cannot infer them.
	KeptUntil time.Time
	Came      time.Time // when the first event came, or the whole of an answer in one piece
	// Whole: the answer came in one piece, so that it does not show when its KV was pulled.
	Whole bool
	Freed Freed // what the prefill engine counts from the request to a Whole answer that came after KeptUntil
	// Silent: between the request and the answer, the core of the rank gave no sign of life for so long that it may have pulled too late.
	Silent bool
	// Spoiled: while the request waited, the prefix cache of its rank may have got another prompt's KV that it would have found there.
	Spoiled bool
}

// MayBeAnotherPrompts says whether the answer may be made of another prompt's KV, so that the client must not get it. A prefill engine
// gives KV to another prompt once the hold is over. A decode engine whose core stood still reads it after that, and gets no error (vLLM
// 0.32, nixl/base_worker.py).
func (a Answer) MayBeAnotherPrompts() bool {
	switch {
	case a.Spoiled:
		return true
	case a.Came.Before(a.KeptUntil):
		return false
	case a.Whole && a.Freed != FreedUnknown:
		return a.Freed == FreedSome
	case a.Whole:
		return a.Silent
	}
	return true
}
