package main

import (
	"fmt"
	"slices"
	"sync"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
)

// ledger knows from the engines' own books which faults struck whose request.
type ledger struct {
	mu      sync.Mutex
	strikes map[uint64][]refengine.Rule // by the key of the answer
	kinds   map[string]int
}

func newLedger() *ledger {
	return &ledger{strikes: map[uint64][]refengine.Rule{}, kinds: map[string]int{}}
}

// struck is refengine.Hooks.OnStrike.
func (l *ledger) struck(answer uint64, r refengine.Rule) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.strikes[answer] = append(l.strikes[answer], r)
	l.kinds[string(r.Fault)]++
}

func (l *ledger) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.strikes)
	clear(l.kinds)
}

// harmless are faults that change nothing a client may notice, and no retry.
// Swallow is none of them: the ids of what a parser kept back are gone, so an
// answer that is lost after it cannot go on by its ids.
var harmless = []refengine.Fault{
	refengine.MissingDone, refengine.FrozenGauges, refengine.SlowPages, refengine.Slow, refengine.Comments, refengine.CRLF,
	refengine.SplitBytes,
	refengine.UsageAlways, refengine.EOSFirst, refengine.CallbackTwice, refengine.CallbackShortID, refengine.CallbackNewKey,
	refengine.CallbackEmpty,
}

// final tells faults that say no to the request itself: the answer is the
// client's, no other engine is asked. A callback that sends the KV to a stranger is one of them.
func final(r refengine.Rule) bool {
	return r.Fault == refengine.Reject || r.Fault == refengine.CallbackBadHost || r.Fault == refengine.Status &&
		(r.Value < 500 || r.Value == 501)
}

// saved counts the requests that a retry could save, and those of them that it
// did not: struck once by a fault that another attempt is spared, with other
// engines up. A request that failed without any fault of its own is one that
// was not saved.
type saved struct {
	Struck  int            `json:"struck"`  // requests, by anything
	Final   int            `json:"final"`   // of them, told no by an engine
	Often   int            `json:"often"`   // struck more than once: attempts are bounded
	Savable int            `json:"savable"` // the rest
	Lost    []load.Failure `json:"lost"`    // of the savable, and of those no fault struck
	Share   float64        `json:"share"`   // saved of the savable
}

func (l *ledger) saved(failures []load.Failure) (s saved) {
	l.mu.Lock()
	defer l.mu.Unlock()
	savable := func(rules []refengine.Rule) bool {
		rules = slices.DeleteFunc(slices.Clone(rules), func(r refengine.Rule) bool { return slices.Contains(harmless, r.Fault) })
		switch {
		case slices.ContainsFunc(rules, final):
			s.Final++
			return false
		case len(rules) > 1:
			s.Often++
			return false
		}
		return true
	}
	s.Struck = len(l.strikes)
	fine := map[uint64]bool{}
	for answer, rules := range l.strikes {
		if fine[answer] = savable(rules); fine[answer] {
			s.Savable++
		}
	}
	for _, f := range failures {
		if f.Kind == "http_401/invalid_api_key" || f.Kind == "http_429/queue_full" {
			continue // the caller's own limits, and keys that were taken away
		}
		if ok, struck := fine[f.Answer]; ok || !struck {
			for _, r := range l.strikes[f.Answer] {
				f.Detail += fmt.Sprintf(" [%s %s %s]", r.Fault, r.Phase, r.Leg)
			}
			s.Lost = append(s.Lost, f)
		}
	}
	s.Share = 1
	if s.Savable > 0 {
		s.Share = 1 - float64(len(s.Lost))/float64(s.Savable)
	}
	return s
}
