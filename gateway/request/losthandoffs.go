package request

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/delivery"
)

// lostHandoffs are the hand-offs of a request over which decode engines answered 500. The engine,
// the prefill engine behind it or the request may be at fault.
type lostHandoffs []lostHandoff

type lostHandoff struct {
	slot *dispatcher.Slot // it may have been given back
	link delivery.Link
	at   time.Time
}

// confirm adds a hand-off, and says whether its 500 counts as an engine's word against the request:
// it is the first one, or the dispatcher knows of nothing else that this one and an earlier one
// could be due to.
func (l *lostHandoffs) confirm(d Dispatcher, slot *dispatcher.Slot, link delivery.Link) (confirms bool) {
	confirms = len(*l) == 0
	for _, earlier := range *l {
		confirms = confirms || d.BlamesRequest(slot, earlier.link, link, earlier.at)
	}
	*l = append(*l, lostHandoff{slot, link, time.Now()})
	return confirms
}

// excuse takes the hand-offs back, because the request itself made the engines answer 500. The last
// one is not reported yet.
func (l lostHandoffs) excuse(d Dispatcher) lostHandoffs {
	for i := range max(0, len(l)-1) {
		d.Excuse(l[i].slot, l[i].link)
	}
	return nil
}
