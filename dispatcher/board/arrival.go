package board

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// Early ranks. Some connectors want to know the decode rank before the prefill begins. A
// request is then bound while it waits for its prefill: its slot and the room for its KV are taken
// at once, but no step reads that KV before the request starts to decode. What the rank's steps
// feel counts it from its first event on, and policies see in how many steps that is predicted.

// AheadAuto as Config.BindAhead: as many requests beyond the slots as are on their way to their first
// token, in the mean, if a slot's time goes by as that of the last requests did.
const AheadAuto = -1

// HoldsNothing is a policy's spec, without hold where it names none: a request that is held back
// from a rank that is early is not even being prefilled.
func HoldsNothing(spec string) string {
	sp, err := policy.ParseSpec(spec)
	if err != nil || !sp.Takes("hold") || sp.Sets("hold") {
		return spec // what is no policy is told elsewhere
	}
	if sp, err = sp.With("hold", "0"); err != nil {
		return spec
	}
	return sp.String()
}

// prefillsLater takes in whether the ranks are early, and says whether that has changed.
func (b *board) prefillsLater(ws []Worker) (changed bool) {
	was := b.early
	if len(ws) > 0 { // else those that come back will tell
		b.early = slices.ContainsFunc(ws, func(w Worker) bool { return w.Early })
	}
	return b.early != was
}

// seeStarts counts the requests of a rank as decoding whose first event has come, and takes in
// when that of the others is predicted now.
func (b *board) seeStarts(r *rank) {
	for i, slot := range r.slots {
		c := &b.ledger.table[slot]
		if !c.early {
			continue
		}
		if b.started(slot) {
			if !c.first.IsZero() && c.lead > 0 {
				b.starts.Came(c.lead, b.now.Sub(c.since))
			}
			r.foresee(i, c, time.Time{})
		} else if first := b.counts.first(slot); !first.IsZero() {
			r.foresee(i, c, first)
		}
	}
}

// foresee changes when the first token of a rank's request is predicted; zero: it has come.
func (r *rank) foresee(i int, c *charge, first time.Time) {
	switch {
	case c.first.IsZero() == first.IsZero():
	case first.IsZero():
		r.early, r.later, r.running[i].Start = r.early-1, r.later-int64(c.prompt), 0
	default:
		r.early, r.later, r.running[i].Start = r.early+1, r.later+int64(c.prompt), 1
	}
	c.first = first
}

// foreseeStarts tells policies in how many steps the requests of a rank start that have not yet.
// One that is later than predicted slides on: until its first event it is always a step away.
func (b *board) foreseeStarts(r *rank, stepMs float32, now time.Time) {
	for i, slot := range r.slots {
		if c := &b.ledger.table[slot]; !c.first.IsZero() {
			start := c.since.Add(b.starts.Correct(c.first.Sub(c.since)))
			r.running[i].Start = stepsIn(max(1, start.Sub(now)), stepMs)
		}
	}
}

// stepsIn is how many steps a time is, 1 at least; of no time 0, and 1 while nobody knows how long
// a step takes.
func stepsIn(d time.Duration, stepMs float32) int32 {
	switch {
	case d <= 0:
		return 0
	case stepMs <= 0:
		return 1
	}
	return int32(max(1, min(math.Ceil(d.Seconds()*1000/float64(stepMs)), math.MaxInt32)))
}
