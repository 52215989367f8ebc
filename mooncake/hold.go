package mooncake

import "time"

// Freed says whether a prefill engine has freed KV that was never fetched, since a request was
// written.
type Freed uint8

// Values of Freed.
const (
	FreedUnknown Freed = iota // the engine does not count
	FreedNone
	FreedSome // or the count could not be read, or is another process's
)

// Answer is what is known of an answer from pulled KV when its first event comes.
type Answer struct {
	// KeptUntil is until when the prefill engine certainly keeps the KV. Nothing renews it: a proxy
	// sees no heartbeats between engines.
	KeptUntil time.Time
	Came      time.Time // when the first event came, or the whole of an answer in one piece
	// Whole: the answer is in one piece and does not show when its KV was pulled.
	Whole bool
	Freed Freed // the prefill engine's count up to a Whole answer after KeptUntil
	// Silent: the rank's core gave no sign of life for so long that it may have pulled too late.
	Silent bool
	// Spoiled: the rank's prefix cache may have got another prompt's KV while the request waited.
	Spoiled bool
}

// MayBeAnotherPrompts says that the client must not get the answer. A prefill engine gives KV away
// once the hold is over, and a decode engine whose core stood still reads it after that, without an
// error (vLLM 0.32, nixl/base_worker.py).
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
