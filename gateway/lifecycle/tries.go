package lifecycle

import (
	"slices"
	"strings"
)

// tries counts a request's failed attempts, and remembers what shows whether the engines or the request itself made them fail.
type tries struct {
	counted, unreached int32 // attempts that count as tries, and attempts that reached no engine; both since the last resetCounts
	refusals           int32 // attempts that ended because an engine refused to compute the prompt; they do not count
	givenBack          int32 // how often an engine without KV room gave the request back before the first event
	pauses             int32 // attempts that ended as Paused, because the engine took no requests for a short time; they do not count
	doubts             int32 // hand-offs that were not used because their KV was in doubt
	redials            int32 // attempts over kept-alive connections that the engine had already closed; they do not count
	withoutModel       int32 // attempts at engines that did not have the model; they do not count
	resumed            int32 // how often a lost answer went on
	enginesFailed      int32 // number of engines that reported a failure of their own at the request
	enginesAsked       int32 // number of engines that were tried, if the request is passed through
	brokenConns        []BrokenConn
	// unexplained500 is the engine whose 500 has no known cause yet; empty: there is none. The request may be the cause: old vLLM
	// answers prompts that are too long with 500.
	unexplained500 string
	causes500      bool // the request is the cause of all its 500s, because two engines answered it with 500
}

// uncountedRefusals is how many refusals by prefill engines do not count as attempts, because the engines ran nothing. If engines refuse a
// fifth of their prefill calls, three attempts without this allowance would fail one request in a hundred.
const uncountedRefusals = 3

// uncountedPauses is how many attempts that ended as Paused do not count. After the first, evenkeel sends nothing to that engine until it
// is back, and the request waits in a queue until then. So a second attempt only ends as Paused if the engine came back and went away
// again, or if evenkeel learned too late that the engine was away.
const uncountedPauses = 2

// uncountedRedials is how many attempts over a kept-alive connection that the engine had already closed do not count. All later calls of
// the request open new connections, so this cannot happen to them.
const uncountedRedials = 1

// uncountedWithoutModel is how many attempts at an engine that does not have the model do not count. evenkeel then reads the engine's list
// of models again at once, so several such attempts only happen if several engines change at the same time.
const uncountedWithoutModel = 3

// maxBrokenEngines is how many engines may fail at a request before evenkeel considers the request the cause. Such a request gets no more
// attempts.
const maxBrokenEngines = 2

// resetCounts sets the counts to zero that would limit the next attempts. What limits the whole request stays.
func (t *tries) resetCounts() {
	t.counted, t.unreached, t.refusals, t.pauses, t.withoutModel = 0, 0, 0, 0, 0
}

// mayBreakEngines says whether evenkeel considers the request the cause of the engines' failures.
func (t *tries) mayBreakEngines() bool { return t.enginesFailed >= maxBrokenEngines }

// nextAttempt counts an attempt that has ended, and says on which budget and after which pause another attempt begins, if one does. next is
// the verdict on the attempt, and e is the event that reported its end. For some verdicts the pause grows with the number of such attempts.
func (t *tries) nextAttempt(next NextStep, e *Event) Retry {
	switch next {
	case Over, Ask, Elsewhere: // no engine of this proxy is tried again
		return Retry{Budget: NoMore}
	case Anew, Granted: // Anew: nothing has failed; Granted: the budget was already asked
		return Retry{Budget: Freely}
	case NoRoom: // an engine without room for KV gave the request back
		t.givenBack++
		losses := int(t.resumed + t.givenBack) // answers that were lost and went on count, too
		if losses > e.MostLosses {             // the profile of the engine allows no more losses of one request
			return Retry{Budget: NoMore}
		}
		return Retry{Budget: Freely, Pause: int(t.givenBack)}
	case NoModel: // the engine did not have the model
		if t.withoutModel == uncountedWithoutModel { // so many misses do not come from a mere change of the models of engines
			return Retry{Budget: NoMore}
		}
		t.withoutModel++
		return Retry{Budget: Freely, Pause: int(t.withoutModel)}
	case Unreached: // the attempt reached no engine
		t.unreached++
		return Retry{Budget: OfUnsent, N: int(t.unreached)}
	// The engine took no requests for a short time, had closed the connection, or refused the request: it has most likely computed
	// nothing, so the first attempts that end so do not count.
	case Held, Redial, Untaken:
		if retry, uncounted := t.uncountedAttempt(next, e); uncounted {
			return retry
		}
	case Again:
	}
	return t.countedAttempt(e)
}

// uncountedAttempt is nextAttempt for the kinds of failed attempts of which the first ones do not count. uncounted is false for a later
// one, which counts like any other attempt.
func (t *tries) uncountedAttempt(next NextStep, e *Event) (_ Retry, uncounted bool) {
	switch {
	case next == Held && t.pauses < uncountedPauses: // an engine took no requests for a short time
		t.pauses++
		return Retry{Budget: Freely, Pause: int(t.pauses)}, true
	case next == Redial && t.redials < uncountedRedials: // the engine had already closed the kept-alive connection
		if mayBreakEngines := t.noteFailure(e); mayBreakEngines {
			return Retry{Budget: NoMore}, true
		}
		t.redials++
		return Retry{Budget: Freely}, true
	case next == Untaken && t.refusals < uncountedRefusals: // an engine refused the request
		t.refusals++
		// The refusal does not count, but the budget must allow another attempt. It counts attempts from 1, and perhaps none has
		// counted yet.
		attempts := max(1, int(t.counted))
		return Retry{Budget: Counted, N: attempts, Pause: int(t.refusals)}, true
	}
	return Retry{}, false // the caller counts the attempt, and does not use this Retry
}

// countedAttempt counts a failed attempt, and lets the budget decide whether another one follows. If the request may be what breaks
// engines, none does.
func (t *tries) countedAttempt(e *Event) Retry {
	t.counted++
	if mayBreakEngines := t.noteFailure(e); mayBreakEngines {
		return Retry{Budget: NoMore}
	}
	// Despite makes the code that asks the budget check whether an engine answered this attempt. If none did, a client that has a part
	// of the answer gets another attempt even if the budget is empty.
	clientHasPart := t.resumed > 0
	return Retry{Budget: Counted, N: int(t.counted), Despite: clientHasPart}
}

// noteFailure notes the failure that ended an attempt. It returns whether the request may be what makes engines fail: two engines reported
// a failure, or an engine's connection broke after another engine had reported a failure or gone down (see noteBrokenConn).
func (t *tries) noteFailure(e *Event) (mayBreakEngines bool) {
	if e.Faulty { // the engine itself reported a failure
		t.enginesFailed++
		return t.mayBreakEngines()
	}
	return e.BrokenConn.Engine != "" && t.noteBrokenConn(e.BrokenConn, e.Down) // empty: the failure does not look like a dying engine
}

// noteBrokenConn notes that an engine's connection broke under the request. It says whether the request may have killed maxBrokenEngines
// engines, i.e. two, of which this engine is the second: earlier, another engine of the same role lost its connection and went down, or an
// engine reported a failure. down has the engines of t.brokenConns that went down. A broken connection of an engine that still runs proves
// nothing. Neither does the loss of one prefill and one decode engine, which a cluster may lose together.
func (t *tries) noteBrokenConn(b BrokenConn, down []string) (mayBreakEngines bool) {
	role, _, _ := strings.Cut(b.Engine, " ") // Engine is "role address"
	for _, other := range t.brokenConns {
		if other.Engine != b.Engine && strings.HasPrefix(other.Engine, role+" ") && slices.Contains(down, other.Engine) {
			return true
		}
	}
	t.brokenConns = append(t.brokenConns, b)
	// Engines that reported a failure at the request count whatever their role is, and whether or not they are down.
	return t.enginesFailed+1 >= maxBrokenEngines // +1 for this engine
}

// note500 notes an engine that answered 500: the engine or the request may be the cause. Once a second engine has done so, the request is
// the cause: no engine is blamed for these 500s or for later ones, which the effect Resolve reports.
func (t *tries) note500(engine string, dst []Effect) []Effect {
	if t.unexplained500 != "" && t.unexplained500 != engine { // a second engine
		t.causes500 = true
	}
	if t.causes500 {
		t.unexplained500 = ""
		return append(dst, Effect{Kind: Resolve, Blame: Nobody})
	}
	t.unexplained500 = engine
	return dst
}

// resolve500 reports, by the effect Resolve, what caused the 500 that note500 has noted: the engine, or Disputed if that stays unknown. It
// does nothing if none is noted.
func (t *tries) resolve500(cause Blame, dst []Effect) []Effect {
	if t.unexplained500 == "" {
		return dst
	}
	t.unexplained500 = ""
	return append(dst, Effect{Kind: Resolve, Blame: cause})
}
