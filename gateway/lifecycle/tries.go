package lifecycle

import (
	"slices"
	"strings"
)

// tries is what is remembered of a request's failed attempts: how many there were, and whether the engines or the request itself
// are why they failed.
type tries struct {
	counted, unreached int32 // attempts that count, and attempts that reached no engine; both since restart was last called
	refused            int32 // attempts that ended because an engine refused to compute the prompt; they do not count
	givenBack          int32 // how often an engine without KV room gave the request back before its first event
	withheld           int32 // attempts that ended as Withheld, because the engine was not there; they do not count
	redials            int32 // attempts over connections that had ended unseen, since the request came; they do not count
	unlisted           int32 // attempts at engines that did not have the model; they do not count
	resumed            int32 // how often a lost answer went on
	suspects           int32 // engines that the request may have broken
	asked              int32 // engines that were asked, for a request that is passed through
	breaches           []Breach
}

// mostRefused is how many refusals of engines that were to compute the prompt do not count as attempts, because the engines ran nothing.
// If engines refuse a fifth of their probes, three attempts alone would fail one request in a hundred.
const mostRefused = 3

// mostHeld is how many attempts that ended as Withheld do not count. After the first, evenkeel sends nothing to that engine until it is
// back, and the request waits for that in a queue. So a second one only comes from an engine that came back and went again, or of
// whose absence evenkeel learned too late.
const mostHeld = 2

// mostRedials is how many attempts over a kept-alive connection that had ended do not count. All later calls of the request open new
// connections, so no second call meets an ended one.
const mostRedials = 1

// mostUnlisted is how many attempts at an engine that does not have the model do not count. evenkeel then reads the engine's list
// again at once, so several such attempts only happen if several engines change at the same time.
const mostUnlisted = 3

// poison is how many engines a request may have broken before it is stopped.
const poison = 2

// restart forgets the earlier attempts, as far as they would count against the next ones.
func (t *tries) restart() { t.counted, t.unreached, t.refused, t.withheld, t.unlisted = 0, 0, 0, 0, 0 }

// poisons says whether evenkeel takes the request for the cause of its engines' failures.
func (t *tries) poisons() bool { return t.suspects >= poison }

// retry counts an attempt that has ended, and says on which budget and after which pause another one begins; the zero Retry: none begins.
// next is the verdict on the attempt, and e is the event that reported its end. The first mostHeld, mostRedials and mostRefused attempts of
// their kinds do not count. Each later one counts like Again, behind the switch.
func (t *tries) retry(next Next, e *Event) Retry {
	switch next {
	case Over, Ask, Elsewhere: // no engine is tried here
		return Retry{}
	case Anew, Granted: // for Anew, nothing has failed; for Granted, the budget was asked before
		return Retry{Budget: Freely}
	case NoRoom:
		t.givenBack++
		if int(t.resumed+t.givenBack) > e.MostLosses {
			return Retry{}
		}
		return Retry{Budget: Freely, Pause: min(int(t.givenBack), 8)} // the base pause is doubled 8 times at most
	case Held:
		if t.withheld < mostHeld {
			t.withheld++
			return Retry{Budget: Freely, Pause: int(t.withheld)}
		}
	case Redial:
		if t.redials < mostRedials {
			if t.noteFailure(e) {
				return Retry{}
			}
			t.redials++
			return Retry{Budget: Freely}
		}
	case NoModel:
		if t.unlisted == mostUnlisted { // a mere change of engines hardly causes so many
			return Retry{}
		}
		t.unlisted++
		return Retry{Budget: Freely, Pause: int(t.unlisted)}
	case Unreached:
		t.unreached++
		return Retry{Budget: OfUnsent, N: int(t.unreached)}
	case Untaken:
		if t.refused < mostRefused {
			t.refused++
			return Retry{Budget: Counted, N: max(1, int(t.counted)), Pause: int(t.refused)}
		}
	case Again:
	}
	t.counted++
	if t.noteFailure(e) {
		return Retry{}
	}
	return Retry{Budget: Counted, N: int(t.counted), Despite: t.resumed > 0}
}

// noteFailure notes the failure that ended an attempt. It says whether the request may be what makes engines fail: two engines said that
// they failed, or the connection of an engine broke after another engine had said so or had gone down (see secondDied).
func (t *tries) noteFailure(e *Event) (mayPoison bool) {
	if e.Faulty { // the engine itself said so
		t.suspects++
		return t.poisons()
	}
	return e.Breach.Engine != "" && t.secondDied(e.Breach, e.Down) // else the failure is not one that a dying engine shows
}

// secondDied notes an engine whose connection broke under the request. It says whether the connection of another engine of the same role
// broke before and that engine went down then, or an engine failed at the request before. down are the engines of t.breaches that went
// down. A broken connection whose engine still runs is no sign, and a cluster may lose one prefill and one decode engine at once.
func (t *tries) secondDied(b Breach, down []string) bool {
	role, _, _ := strings.Cut(b.Engine, " ")
	for _, other := range t.breaches {
		if other.Engine != b.Engine && strings.HasPrefix(other.Engine, role+" ") && slices.Contains(down, other.Engine) {
			return true
		}
	}
	t.breaches = append(t.breaches, b)
	return t.suspects+1 >= poison // an engine said before that it failed at the request
}

// blame is an engine's 500 whose cause is open: old vLLM answers so to prompts that are too long, and every engine would.
type blame struct {
	accused string // the engine that answered 500; empty: none did, or the cause is known
	cleared bool   // two engines answered 500, which clears both: the request is the cause
}

// accuse takes note of an engine that answered 500. If another engine did before, the request is the cause.
func (b *blame) accuse(engine string, dst []Effect) []Effect {
	if b.cleared = b.cleared || b.accused != "" && b.accused != engine; b.cleared {
		b.accused = ""
		return append(dst, Effect{Do: Find, Finding: Innocent})
	}
	b.accused = engine
	return dst
}

// find settles a 500 that no other engine confirmed, with the cause f. It does nothing if no engine is accused.
func (b *blame) find(f Finding, dst []Effect) []Effect {
	if b.accused == "" {
		return dst
	}
	b.accused = ""
	return append(dst, Effect{Do: Find, Finding: f})
}
