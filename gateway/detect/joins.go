package detect

import "time"

// class decides which findings may join an incident.
type class int

const (
	isAlone  class = iota // no other finding shares its cause
	isMute                // clients notice nothing
	isCause               // a fault that lasts
	comes                 // a fault that comes and goes
	isEffect              // clients notice it, and another finding may have caused it
	isLoad                // many requests wait: an effect of findings that harm as much, and otherwise a cause of effects
	classes               // number of classes
)

// class returns the class of the detector's kind.
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

// window says when a finding may join an incident. It compares the begins of both.
type window int

const (
	never   window = iota
	atOnce         // within a moment of the incident's begin, if they share a cause
	ever           // at any time, if they share a cause
	follows        // from a moment before the incident's begin until soon after it
	near           // within a moment before or after the incident's begin
	behind         // at any time from a moment before the incident's begin
)

// joinWhen says which finding may join which incident. Rows are the class of the incident's first member, columns that of the finding.
var joinWhen = [classes][classes]window{
	/*          alone  mute   cause  comes  effect   load */
	isAlone:  {never, never, never, never, never, never},
	isMute:   {never, atOnce, atOnce, atOnce, never, never},
	isCause:  {never, atOnce, atOnce, atOnce, follows, follows},
	comes:    {never, atOnce, atOnce, ever, follows, follows},
	isEffect: {never, atOnce, atOnce, atOnce, near, follows},
	isLoad:   {never, atOnce, atOnce, ever, behind, behind},
}

// allows says whether a finding may join an incident. late is the time from the incident's begin to the finding's, below 0 if the finding
// began first. shares says whether they share a cause.
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
