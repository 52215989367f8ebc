package request

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/delivery"
	"evenkeel/gateway/lifecycle"
)

// answered500 is what engines that answered 500 leave to be settled: the engine, another engine
// behind it or the request may be at fault.
type answered500 struct {
	handoffs  []lostHandoff                 // over which decode engines answered 500
	settle    []func(cause lifecycle.Blame) // called once it is known whose fault the 500s were
	ofRequest bool
}

type lostHandoff struct {
	slot *dispatcher.Slot // it may have been given back
	link delivery.Link
	at   time.Time
}

// confirm adds a hand-off, and says whether its 500 counts as an engine's word against the request:
// it is the first one, or the dispatcher knows of nothing else that could explain this one and an
// earlier one.
func (a *answered500) confirm(d Dispatcher, slot *dispatcher.Slot, link delivery.Link) (confirms bool) {
	confirms = len(a.handoffs) == 0
	for _, earlier := range a.handoffs {
		confirms = confirms || d.BlamesRequest(slot, earlier.link, link, earlier.at)
	}
	a.handoffs = append(a.handoffs, lostHandoff{slot, link, time.Now()})
	return confirms
}

// resolve: if the request is at fault, the lost hand-offs are taken back. The last one is not
// reported yet, and will not be.
func (a *answered500) resolve(d Dispatcher, cause lifecycle.Blame) {
	if a == nil {
		return
	}
	for _, settle := range a.settle {
		settle(cause)
	}
	a.settle = nil
	if cause == lifecycle.Nobody {
		for i := range max(0, len(a.handoffs)-1) {
			d.Excuse(a.handoffs[i].slot, a.handoffs[i].link)
		}
		a.handoffs, a.ofRequest = nil, true
	}
}

func (a *answered500) causes500() bool { return a != nil && a.ofRequest }
