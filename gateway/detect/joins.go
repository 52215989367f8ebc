package detect

import "time"

// joinClass says how findings of a kind join those of other kinds.
type joinClass int

const (
	isAlone        joinClass = iota // the finding shares its cause with no other finding
	isUnnoticed                     // clients do not notice the finding
	isCause                         // something is wrong that clients notice
	isIntermittent                  // something is wrong that clients notice, and that comes and goes
	isEffect                        // clients notice the finding; if another one is present, that one is the cause
	isLoad                          // many requests wait: an effect of a harmful cause, or else a cause of other effects
	isProxy                         // the proxy's own clock is late, so that much else seems late
	classes                         // number of classes above
)

// joinClass is the class of the detector's findings. By the classes, joinWhen says which findings may join which incident, and how late. If
// several cases apply to a detector, the first one counts.
func (d *Detector) joinClass() joinClass {
	switch {
	case d.Kind == ProxyBusy:
		return isProxy
	case d.sharesNoCause: // whatever else the finding is
		return isAlone
	case d.overload: // before effect, because an overload is marked as an effect, too
		return isLoad
	case d.effect:
		return isEffect
	case d.harm == nothing: // clients notice nothing
		return isUnnoticed
	case d.toleratedAbsence > 0: // the finding comes and goes
		return isIntermittent
	}
	return isCause
}

// joinWindow says when a finding may join an incident, by the time from the begin of the incident to the begin of the finding.
type joinWindow int

const (
	never           joinWindow = iota
	atBeginIfShared            // at most 30 s before or after the incident's begin, if both share a cause
	alwaysIfShared             // at any time, if both share a cause
	soonAfterBegin             // from 30 s before the incident's begin until two minutes after it
	aroundBegin                // at most 30 s before or after the incident's begin
	afterBegin                 // at any time from 30 s before the incident's begin on
)

// joinWhen says which finding may join which incident: a row for the class of the incident's first member, a column
// for that of the finding.
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

// allows says whether a finding may join an incident. delay is the time from the begin of the incident to that of the finding: below 0 if
// the finding began first. sharesCause says that the incident and the finding have the same cause.
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
