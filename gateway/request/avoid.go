package request

import "slices"

// avoided are engines that a request keeps off, because they failed at it, or refused it.
type avoided struct {
	prefill []string // candidates tried since the last start
	decode  []int32  // workers that failed, and those beside them
	refused []int32  // workers that refused it, and all of those beside them once a second one of these has refused it
	last    []int32  // workers beside one that refused it: it goes there if no other can take it at once
	halted  int      // how often the core of a rank stood still, and the request was taken from there
	others  bool     // a rank takes requests that is beside none of these
}

// ranks are the workers that no attempt should go to while there are others.
func (a *avoided) ranks() []int32 { return slices.Concat(a.decode, a.refused) }

// refuse notes that a worker refused the request. It may be that its queue is full, or that what stands before all of those around it
// has enough: the next attempt goes to others if one can take it at once. If a second one of those around refuses it, all of them have,
// and the request waits for others. If others have refused it twice before, they are as good again.
func (a *avoided) refuse(worker int32, around []int32, others bool) {
	again := slices.ContainsFunc(around, func(id int32) bool { return id != worker && slices.Contains(a.refused, id) })
	a.others = others
	switch {
	case !again:
		a.refused = append(a.refused, worker)
		a.last = append(a.last, around...)
	case others:
		a.refused = append(a.refused, around...)
	default:
		a.refused, a.last = around, nil
	}
}
