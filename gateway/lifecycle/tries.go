package lifecycle

import (
	"slices"
	"strings"
)

// tries counts failed attempts, and what shows whether engines or the request made them fail.
type tries struct {
	counted, unreached int32 // attempts that count, and attempts that reached no engine
	refusals           int32 // an engine refused to compute the prompt; not counted
	givenBack          int32 // by an engine without KV room, before the first event
	pauses             int32 // attempts that ended as Paused; not counted
	doubts             int32
	redials            int32 // over kept-alive connections that were closed already; not counted
	withoutModel       int32 // the engine did not have the model; not counted
	resumed            int32 // how often a lost answer went on
	enginesFailed      int32 // engines that reported a failure of their own
	enginesAsked       int32
	brokenConns        []BrokenConn
	// unexplained500 is the engine whose 500 has no known cause yet. The request may be the cause: old
	// vLLM answers prompts that are too long with 500.
	unexplained500 string
	causes500      bool // two engines answered the request with 500, so it is the cause
}

// uncountedRefusals by prefill engines do not count as attempts, because the engines ran nothing.
// If engines refuse a fifth of their prefill calls, three attempts without this allowance would
// fail one request in a hundred.
const uncountedRefusals = 3

// uncountedPauses: after the first, the request waits in a queue until the engine is back. A second
// attempt only ends as Paused if the engine went away again, or if evenkeel learned too late that
// it was away.
const uncountedPauses = 2

// uncountedRedials: all later calls of the request open new connections.
const uncountedRedials = 1

// uncountedWithoutModel: evenkeel then reads the engine's list of models again at once, so several
// such attempts only happen if several engines change at the same time.
const uncountedWithoutModel = 3

// maxBrokenEngines may fail at a request before it is considered the cause. It then gets no more
// attempts.
const maxBrokenEngines = 2

// resetCounts resets what would limit the next attempts. What limits the whole request stays.
func (t *tries) resetCounts() {
	t.counted, t.unreached, t.refusals, t.pauses, t.withoutModel = 0, 0, 0, 0, 0
}

func (t *tries) mayBreakEngines() bool { return t.enginesFailed >= maxBrokenEngines }

// nextAttempt: next is the verdict on the attempt, and e reported its end.
func (t *tries) nextAttempt(next NextStep, e *Event) Retry {
	switch next {
	case Over, Ask, Elsewhere:
		return Retry{Budget: NoMore}
	case Anew, Granted: // Anew: nothing has failed; Granted: the budget was already asked
		return Retry{Budget: Freely}
	case NoRoom:
		t.givenBack++
		losses := int(t.resumed + t.givenBack)
		if losses > e.MostLosses {
			return Retry{Budget: NoMore}
		}
		return Retry{Budget: Freely, Pause: int(t.givenBack)}
	case NoModel:
		if t.withoutModel == uncountedWithoutModel { // more than a mere change of the models of engines
			return Retry{Budget: NoMore}
		}
		t.withoutModel++
		return Retry{Budget: Freely, Pause: int(t.withoutModel)}
	case Unreached:
		t.unreached++
		return Retry{Budget: OfUnsent, N: int(t.unreached)}
	// The engine has most likely computed nothing, so the first attempts that end so do not count.
	case Held, Redial, Untaken:
		if retry, uncounted := t.uncountedAttempt(next, e); uncounted {
			return retry
		}
	case Again:
	}
	return t.countedAttempt(e)
}

// uncountedAttempt: uncounted is false for a later attempt, which counts like any other.
func (t *tries) uncountedAttempt(next NextStep, e *Event) (_ Retry, uncounted bool) {
	switch {
	case next == Held && t.pauses < uncountedPauses:
		t.pauses++
		return Retry{Budget: Freely, Pause: int(t.pauses)}, true
	case next == Redial && t.redials < uncountedRedials:
		if mayBreakEngines := t.noteFailure(e); mayBreakEngines {
			return Retry{Budget: NoMore}, true
		}
		t.redials++
		return Retry{Budget: Freely}, true
	case next == Untaken && t.refusals < uncountedRefusals:
		t.refusals++
		// The budget must still allow another attempt. It counts from 1, and perhaps none has counted
		// yet.
		attempts := max(1, int(t.counted))
		return Retry{Budget: Counted, N: attempts, Pause: int(t.refusals)}, true
	}
	return Retry{}, false
}

func (t *tries) countedAttempt(e *Event) Retry {
	t.counted++
	if mayBreakEngines := t.noteFailure(e); mayBreakEngines {
		return Retry{Budget: NoMore}
	}
	// A client that has a part of the answer gets another attempt even if the budget is empty, unless
	// an engine answered this attempt.
	clientHasPart := t.resumed > 0
	return Retry{Budget: Counted, N: int(t.counted), Despite: clientHasPart}
}

func (t *tries) noteFailure(e *Event) (mayBreakEngines bool) {
	if e.Faulty {
		t.enginesFailed++
		return t.mayBreakEngines()
	}
	return e.BrokenConn.Engine != "" && t.noteBrokenConn(e.BrokenConn, e.Down) // empty: not like a dying engine
}

// noteBrokenConn says whether the request may have killed two engines, of which this is the second.
// down has the engines of t.brokenConns that went down. A broken connection of an engine that still
// runs proves nothing. Neither does the loss of one prefill and one decode engine, which a cluster
// may lose together.
func (t *tries) noteBrokenConn(b BrokenConn, down []string) (mayBreakEngines bool) {
	role, _, _ := strings.Cut(b.Engine, " ")
	for _, other := range t.brokenConns {
		if other.Engine != b.Engine && strings.HasPrefix(other.Engine, role+" ") && slices.Contains(down, other.Engine) {
			return true
		}
	}
	t.brokenConns = append(t.brokenConns, b)
	// Engines that reported a failure count whatever their role is, and whether or not they are down.
	return t.enginesFailed+1 >= maxBrokenEngines
}

// note500: once a second engine has answered 500, the request is the cause, and no engine is blamed
// for these or later ones.
func (t *tries) note500(engine string, dst []Effect) []Effect {
	if t.unexplained500 != "" && t.unexplained500 != engine {
		t.causes500 = true
	}
	if t.causes500 {
		t.unexplained500 = ""
		return append(dst, Effect{Kind: Resolve, Blame: Nobody})
	}
	t.unexplained500 = engine
	return dst
}

// resolve500 reports what caused the 500 that note500 has noted.
func (t *tries) resolve500(cause Blame, dst []Effect) []Effect {
	if t.unexplained500 == "" {
		return dst
	}
	t.unexplained500 = ""
	return append(dst, Effect{Kind: Resolve, Blame: cause})
}
