package detect

import "time"

type joinClass int

const (
	isAlone        joinClass = iota // shares its cause with no other finding
	isUnnoticed                     // clients do not notice it
	isCause                         // clients notice it
	isIntermittent                  // clients notice it, and it comes and goes
	isEffect                        // clients notice it; another one that is present is the cause
	// many requests wait: an effect of a harmful cause, or else itself a cause
	isLoad
	isProxy // the proxy's own clock is late, so that much else seems late
	classes
)

// joinClass is the class by which joinWhen decides. If several cases apply, the first one counts.
func (d *Detector) joinClass() joinClass {
	switch {
	case d.Kind == ProxyBusy:
		return isProxy
	case d.sharesNoCause:
		return isAlone
	case d.overload: // before effect, which it is, too
		return isLoad
	case d.effect:
		return isEffect
	case d.harm == nothing:
		return isUnnoticed
	case d.toleratedAbsence > 0:
		return isIntermittent
	}
	return isCause
}

// joinWindow says when a finding may join an incident, by the time from the begin of the incident
// to the begin of the finding.
type joinWindow int

const (
	never           joinWindow = iota
	atBeginIfShared            // at most 30 s before or after, if both share a cause
	alwaysIfShared             // at any time, if both share a cause
	soonAfterBegin             // from 30 s before until two minutes after
	aroundBegin                // at most 30 s before or after
	afterBegin                 // at any time from 30 s before on
)

// joinWhen has a row for the class of the incident's first member, a column for that of the
// finding.
var joinWhen = [classes][classes]joinWindow{
	// columns: alone, unnoticed, cause, intermittent, effect, load; isProxy joins none
	isAlone:        {never, never, never, never, never, never},
	isUnnoticed:    {never, atBeginIfShared, atBeginIfShared, atBeginIfShared, never, never},
	isCause:        {never, atBeginIfShared, atBeginIfShared, atBeginIfShared, soonAfterBegin, soonAfterBegin},
	isIntermittent: {never, atBeginIfShared, atBeginIfShared, alwaysIfShared, soonAfterBegin, soonAfterBegin},
	isEffect:       {never, atBeginIfShared, atBeginIfShared, atBeginIfShared, aroundBegin, soonAfterBegin},
	isLoad:         {never, atBeginIfShared, atBeginIfShared, alwaysIfShared, afterBegin, afterBegin},
	isProxy:        {isEffect: afterBegin, isLoad: afterBegin},
}

// allows: delay is below 0 if the finding began first.
func (w joinWindow) allows(delay time.Duration, sharesCause bool) bool {
	switch w {
	case atBeginIfShared:
		return sharesCause && delay.Abs() <= togetherWithin
	case alwaysIfShared:
		return sharesCause
	case soonAfterBegin:
		return delay >= -togetherWithin && delay <= effectWithin
	case aroundBegin:
		return delay.Abs() <= togetherWithin
	case afterBegin:
		return delay >= -togetherWithin
	default:
		return false
	}
}
