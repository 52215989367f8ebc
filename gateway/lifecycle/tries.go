package lifecycle

import (
	"slices"
	"strings"
)

// tries is what is remembered of a request's failed attempts: how many there were, and whether the engines or the request itself
// are why they failed.
type tries struct {
	count, unsent int32 // since the last start: of an answer that goes on, those of its next part
	refused       int32 // by engines that were to compute the prompt, attempts that do not count
	bounced       int32 // given back by an engine without room before its first event
	held          int32 // withheld by engines that were not there, attempts that do not count
	redials       int32 // over connections that had ended unseen, attempts that do not count; of its whole life
	unlisted      int32 // by engines that did not have the model, attempts that do not count
	resumed       int32 // lost answers that went on
	suspect       int32 // engines that the request may have broken
	asked         int32 // engines, by a request that is passed through
	broke         []Breach
}

// mostRefused is how many refusals of engines that were to compute the prompt do not count as attempts, because the engines ran nothing.
// If engines refuse a fifth of their probes, three attempts alone would fail one request in a hundred.
const mostRefused = 3

// mostHeld is how often it does not count as an attempt that an engine says that it is not there. After the first time nothing goes
// there until it is back, and the request waits for that in a queue. So only one that came and went again, or one that is told of too
// late, says it twice.
const mostHeld = 2

// mostRedials is how often it does not count as an attempt that a connection which was kept alive had ended. All later calls of the
// request dial, so that none of them meets another one.
const mostRedials = 1

// mostUnlisted is how often it does not count as an attempt that an engine does not have the model. Its list is read again at once, so
// that only several that change at the same time say it.
const mostUnlisted = 3

// poison is how many engines a request may have broken before it is stopped.
const poison = 2

// restart drops the attempts before, as far as they count against the next ones.
func (t *tries) restart() { t.count, t.unsent, t.refused, t.held, t.unlisted = 0, 0, 0, 0, 0 }

// poisons tells whether the request is taken for what breaks engines.
func (t *tries) poisons() bool { return t.suspect >= poison }

func (t *tries) next(follows Next, e *Event) Retry {
	switch follows {
	case Over, Ask, Elsewhere:
		return Retry{}
	case Anew, Granted: // of those granted, each has another group
		return Retry{Budget: Freely}
	case Room:
		t.bounced++
		if int(t.resumed+t.bounced) > e.Rooms {
			return Retry{}
		}
		return Retry{Budget: Freely, Pause: min(int(t.bounced), 8)}
	case Held:
		if t.held < mostHeld {
			t.held++
			return Retry{Budget: Freely, Pause: int(t.held)}
		}
	case Redial:
		if t.redials < mostRedials {
			if t.breaks(e) {
				return Retry{}
			}
			t.redials++
			return Retry{Budget: Freely}
		}
	case Listed:
		if t.unlisted == mostUnlisted {
			return Retry{}
		}
		t.unlisted++
		return Retry{Budget: Freely, Pause: int(t.unlisted)}
	case Unreached:
		t.unsent++
		return Retry{Budget: OfUnsent, N: int(t.unsent)}
	case Untaken:
		if t.refused < mostRefused {
			t.refused++
			return Retry{Budget: Counted, N: max(1, int(t.count)), Pause: int(t.refused)}
		}
	case Again:
	}
	t.count++
	if t.breaks(e) {
		return Retry{}
	}
	return Retry{Budget: Counted, N: int(t.count), Despite: t.resumed > 0}
}

// breaks tells whether the request may be what breaks engines: two failed at it, or died under it.
func (t *tries) breaks(e *Event) bool {
	if e.Faulty {
		t.suspect++
		return t.poisons()
	}
	return e.Breach.Engine != "" && t.died(e.Breach, e.Down)
}

// died notes an engine whose connection broke under the request, and tells whether another one of its side broke before and went
// down then. A connection that broke with its engine alive is no sign, and a cluster may lose one engine of each side at once.
func (t *tries) died(b Breach, down []string) bool {
	role, _, _ := strings.Cut(b.Engine, " ")
	for _, other := range t.broke {
		if other.Engine != b.Engine && strings.HasPrefix(other.Engine, role+" ") && slices.Contains(down, other.Engine) {
			return true
		}
	}
	t.broke = append(t.broke, b)
	return t.suspect+1 >= poison // it failed elsewhere
}

// blame is an engine's 500 whose cause is open: old vLLM answers so to prompts that are too long, and every engine would.
type blame struct {
	accused string // that said it; empty: none, or it is known whose it was
	cleared bool   // two engines said it: it is the request
}

// accuse takes note of an engine that answered 500. If another one did before, it is the request.
func (b *blame) accuse(engine string, dst []Effect) []Effect {
	if b.cleared = b.cleared || b.accused != "" && b.accused != engine; b.cleared {
		b.accused = ""
		return append(dst, Effect{Do: Find, Finding: Innocent})
	}
	b.accused = engine
	return dst
}

// find settles a 500 that no other engine confirmed.
func (b *blame) find(f Finding, dst []Effect) []Effect {
	if b.accused == "" {
		return dst
	}
	b.accused = ""
	return append(dst, Effect{Do: Find, Finding: f})
}
