package detect

import "time"

// class says how findings of a kind join those of other kinds.
type class int

const (
	isAlone  class = iota // no other finding shares its cause
	isMute                // clients do not notice it
	isCause               // something is wrong
	comes                 // something is wrong that comes and goes
	isEffect              // clients notice it; it is a result of another finding, if one is present
	isLoad                // many requests wait: an effect of a harmful cause, else itself the cause of other effects
	classes               // number of classes
)

func (d *Detector) class() class {
	switch {
	case d.alone:
		return isAlone
	case d.load:
		return isLoad
	case d.effect:
		return isEffect
	case d.harm == nothing:
		return isMute
	case d.rests > 0:
		return comes
	}
	return isCause
}

// window says when a finding may join an incident, by the time from the begin of the incident to that of the finding.
type window int

const (
	never   window = iota
	atOnce         // within a moment (30 s) of the incident's begin, if both share a cause
	ever           // at any time, if both share a cause
	follows        // from a moment before the incident's begin until two minutes after it
	near           // within a moment before or after the incident's begin
	behind         // at any time from a moment before the incident's begin
)

// joinWhen says which finding may join which incident: a row for the class of the incident's first member, a column
// for that of the finding.
var joinWhen = [classes][classes]window{
	/*          alone  mute   cause  comes  effect   load */
	isAlone:  {never, never, never, never, never, never},
	isMute:   {never, atOnce, atOnce, atOnce, never, never},
	isCause:  {never, atOnce, atOnce, atOnce, follows, follows},
	comes:    {never, atOnce, atOnce, ever, follows, follows},
	isEffect: {never, atOnce, atOnce, atOnce, near, follows},
	isLoad:   {never, atOnce, atOnce, ever, behind, behind},
}

// allows says whether a finding may join an incident. late is the time from the begin of the incident to that of the finding: below 0 if
// the finding began first. shares: both have the same cause.
func (w window) allows(late time.Duration, shares bool) bool {
	switch w {
	case atOnce:
		return shares && late.Abs() <= moment
	case ever:
		return shares
	case follows:
		return late >= -moment && late <= follow
	case near:
		return late.Abs() <= moment
	case behind:
		return late >= -moment
	default:
		return false
	}
}
