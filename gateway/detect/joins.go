package detect

import "time"

// class is how a kind goes together with others.
type class int

const (
	isAlone  class = iota // nothing else shares its cause
	isMute                // clients see nothing of it
	isCause               // something is wrong
	comes                 // likewise, and it comes and goes
	isEffect              // clients see it, and it follows from something else, where there is something else
	isLoad                // many requests wait: an effect of what harms as much, and else the cause of other effects
	classes               // how many there are
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

// window says when a finding may join an incident, by the time between their begins.
type window int

const (
	never   window = iota
	atOnce         // within a moment of it, if they share a cause
	ever           // at any time, if they share a cause
	follows        // not more than a moment before it, and soon after it
	near           // not more than a moment before or after it
	behind         // not more than a moment before it
)

// joinWhen is which kind may join which incident: a row for the incident's lead, a column for what is found.
var joinWhen = [classes][classes]window{
	/*          alone  mute   cause  comes  effect   load */
	isAlone:  {never, never, never, never, never, never},
	isMute:   {never, atOnce, atOnce, atOnce, never, never},
	isCause:  {never, atOnce, atOnce, atOnce, follows, follows},
	comes:    {never, atOnce, atOnce, ever, follows, follows},
	isEffect: {never, atOnce, atOnce, atOnce, near, follows},
	isLoad:   {never, atOnce, atOnce, ever, behind, behind},
}

// allows says whether a finding may join an incident that began so long before it.
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
