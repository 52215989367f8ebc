// Package timeline remembers what a proxy did in the last quarter of an hour, for a
// strip below the picture of its ranks, and how requests failed over the last hour. It
// is a value without a clock.
package timeline

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	every     = 5 * time.Second // a bin
	stripBins = int(15 * time.Minute / every)
	hourBins  = int(time.Hour / every)
	fewBins   = int(5 * time.Minute / every)
	minute    = int(time.Minute / every)
	tenS      = 2 // bins
	mostFlags = 64
	mostLines = 32 // groups that have a line

	burstLeast = 10  // refusals with a 429 in a bin that are a burst
	burstShare = 0.1 // of the requests that ended in it
)

// Outcome is how requests fail: with a name of a fixed set, and a status.
type Outcome struct {
	Name   string
	Status int
}

// Now is what a proxy has done since it started, and how it stands.
type Now struct {
	Ended    uint64
	Failures map[Outcome]uint64
	Whys     map[Outcome]Why // of the last request that failed so, where somebody told it
	Lines    []Line
	Engines  map[Engine]string // up, drain, or a state of those that get nothing
	Drains   bool              // the proxy
	Policy   string
	Reload   time.Time // last one that was used; zero: none
	Started  time.Time // the proxy; zero: nobody knows
}

// Why is what an operator is told of a failure.
type Why struct {
	Text string
	Own  bool // it is a limit of one key
	At   time.Time
}

// Engine is an engine, or a rank of it; a prefill engine and a decode engine may share a
// name.
type Engine struct{ Role, Name string }

// String is what it is, at the begin of a sentence.
func (e Engine) String() string {
	is := e.Role + " engine "
	if strings.Contains(e.Name, "/") {
		is = e.Role + " rank "
	}
	return strings.ToUpper(is[:1]) + is[1:] + e.Name
}

// Line is how high a group stands.
type Line struct {
	Model, Group string
	Tokens       int64
}

// Timeline keeps the bins. The zero value is empty.
type Timeline struct {
	bins  []bin // of the last hour, oldest first; the last one fills
	was   Now
	flags []Event
	burst bool // the bin that fills has had its flag, or the one before
}

type bin struct {
	number int64 // since 1970
	ended  uint64
	failed map[Outcome]uint64 // nil: none
	lines  []Line             // highest of each; only while the strip shows them
}

// Strip is the last quarter of an hour in bins, oldest first. Every list of numbers
// is as long as AtMs.
type Strip struct {
	Form     int           `json:"form"`
	EveryMs  int64         `json:"every_ms"` // length of a bin; the last one still fills
	AtMs     []int64       `json:"at_ms"`    // Unix, begin of each bin
	Requests []int64       `json:"requests"` // that ended in it
	Failures []FailureLine `json:"failures"` // a line for each outcome that there was
	Lines    []GroupLine   `json:"lines"`
	Events   []Event       `json:"events"` // oldest first
}

// FailureLine is the requests that failed in one way.
type FailureLine struct {
	Outcome string  `json:"outcome"`
	Status  int     `json:"status"`
	Counts  []int64 `json:"counts"`
}

// GroupLine is the fullest rank of a group; -1 where nothing is known.
type GroupLine struct {
	Model  string  `json:"model"`
	Group  string  `json:"group"`
	Tokens []int64 `json:"most_tokens"`
}

// Event is something that happened at one moment.
type Event struct {
	AtMs int64  `json:"at_ms"`
	Kind string `json:"kind"` // start, down, up, drain, reload, policy or refused
	What string `json:"what"`
}

// Failed is how many requests failed in one way.
type Failed struct {
	Outcome    string `json:"outcome"`
	Status     int    `json:"status"`    // of the answer
	Last10S    uint64 `json:"last_10_s"` // of the last 5 s to 10 s, in bins as those of the strip
	LastMinute uint64 `json:"last_minute"`
	Last5Min   uint64 `json:"last_5_min"`
	LastHour   uint64 `json:"last_hour"`
	SinceStart uint64 `json:"since_start"`
	Why        string `json:"why,omitempty"` // of the last one, for operators
	Own        bool   `json:"-"`             // that is a limit of one key: others are served
}

// Ended is how many requests ended, and how many of them failed.
type Ended struct{ All, Failed uint64 }

// Add takes in how things stand.
func (t *Timeline) Add(n Now, at time.Time) {
	number := at.UnixNano() / int64(every)
	fresh := len(t.bins) == 0
	if number < t.last()-1 { // the clock was set back: all bins and events are of times to come
		*t = Timeline{was: t.was}
	}
	number = max(number, t.last()) // a clock that was set back a little fills the bin there is
	b := t.bin(number)
	if !fresh {
		b.ended += n.Ended - min(n.Ended, t.was.Ended)
		for o, count := range n.Failures {
			if more := count - min(count, t.was.Failures[o]); more > 0 {
				if b.failed == nil {
					b.failed = map[Outcome]uint64{}
				}
				b.failed[o] += more
			}
		}
		t.flag(&n, b, at)
	} else if !n.Started.IsZero() && at.Sub(n.Started) < 15*time.Minute {
		t.flags = append(t.flags, Event{n.Started.UnixMilli(), "start", "The proxy started"})
	}
	for _, l := range n.Lines[:min(mostLines, len(n.Lines))] {
		i := slices.IndexFunc(b.lines, func(o Line) bool { return o.Model == l.Model && o.Group == l.Group })
		if i < 0 {
			b.lines = append(b.lines, l)
		} else {
			b.lines[i].Tokens = max(b.lines[i].Tokens, l.Tokens)
		}
	}
	t.was = n
	oldest := (number - int64(stripBins)) * every.Milliseconds()
	t.flags = slices.DeleteFunc(t.flags, func(e Event) bool { return e.AtMs < oldest })
	t.flags = t.flags[max(0, len(t.flags)-mostFlags):]
}

// last is the number of the bin that fills; 0: there is none yet.
func (t *Timeline) last() int64 {
	if len(t.bins) == 0 {
		return 0
	}
	return t.bins[len(t.bins)-1].number
}

// bin is the one that fills, which may be a new one.
func (t *Timeline) bin(number int64) *bin {
	if len(t.bins) == 0 || t.last() != number {
		t.burst = t.burst && refusals(&t.bins[len(t.bins)-1]) >= burstLeast
		t.bins = slices.DeleteFunc(t.bins, func(b bin) bool { return b.number <= number-int64(hourBins) })
		t.bins = append(t.bins, bin{number: number})
		for i := range t.bins[:len(t.bins)-len(t.lately(stripBins))] {
			t.bins[i].lines = nil
		}
	}
	return &t.bins[len(t.bins)-1]
}

// lately are the last bins, without those that nothing was added to.
func (t *Timeline) lately(bins int) []bin {
	i, _ := slices.BinarySearchFunc(t.bins, t.last()-int64(bins)+1, func(b bin, from int64) int { return cmp.Compare(b.number, from) })
	return t.bins[i:]
}

// flag notes what has changed since it was looked last.
func (t *Timeline) flag(n *Now, b *bin, at time.Time) {
	say := func(kind, format string, args ...any) {
		t.flags = append(t.flags, Event{at.UnixMilli(), kind, fmt.Sprintf(format, args...)})
	}
	came := map[string][]Engine{}
	for _, e := range slices.SortedFunc(maps.Keys(n.Engines), func(a, b Engine) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Role, b.Role)) }) {
		if was, ok := t.was.Engines[e]; ok && event(was) != event(n.Engines[e]) {
			to := event(n.Engines[e])
			came[to] = append(came[to], e)
		}
	}
	for _, k := range []struct{ kind, one string }{{"down", "went down"}, {"up", "came back"}, {"drain", "began to drain"}} {
		switch list := came[k.kind]; {
		case len(list) == 1:
			say(k.kind, "%s %s", list[0], k.one)
		case len(list) > 1:
			say(k.kind, "%s and %d more %s", list[0], len(list)-1, k.one)
		}
	}
	if n.Drains && !t.was.Drains {
		say("drain", "The proxy began to drain")
	}
	if n.Policy != t.was.Policy {
		say("policy", "Policy %s took over from %s", n.Policy, t.was.Policy)
	}
	if n.Reload.After(t.was.Reload) {
		t.flags = append(t.flags, Event{n.Reload.UnixMilli(), "reload", "Another config came into force"})
	}
	if refused := refusals(b); !t.burst && refused >= burstLeast && float64(refused) >= burstShare*float64(b.ended) {
		t.burst = true
		say("refused", "A burst of requests was refused with a 429")
	}
}

// event is the kind of the event that brings a state.
func event(state string) string {
	if state == "up" || state == "drain" {
		return state
	}
	return "down"
}

func refusals(b *bin) (n uint64) {
	for o, count := range b.failed {
		if o.Status == 429 {
			n += count
		}
	}
	return n
}

// Strip is the last quarter of an hour.
func (t *Timeline) Strip() Strip {
	s := Strip{Form: 1, EveryMs: every.Milliseconds(), AtMs: []int64{}, Requests: []int64{}, Failures: []FailureLine{}, Lines: []GroupLine{}, Events: append([]Event{}, t.flags...)}
	shown := t.lately(stripBins)
	for i := range shown {
		b := &shown[i]
		s.AtMs = append(s.AtMs, b.number*every.Milliseconds())
		s.Requests = append(s.Requests, int64(b.ended))
		for o, count := range b.failed {
			at := slices.IndexFunc(s.Failures, func(l FailureLine) bool { return l.Outcome == o.Name && l.Status == o.Status })
			if at < 0 {
				at = len(s.Failures)
				s.Failures = append(s.Failures, FailureLine{o.Name, o.Status, make([]int64, len(shown))})
			}
			s.Failures[at].Counts[i] = int64(count)
		}
		for _, l := range b.lines {
			at := slices.IndexFunc(s.Lines, func(g GroupLine) bool { return g.Model == l.Model && g.Group == l.Group })
			if at < 0 {
				at = len(s.Lines)
				s.Lines = append(s.Lines, GroupLine{l.Model, l.Group, slices.Repeat([]int64{-1}, len(shown))})
			}
			s.Lines[at].Tokens[i] = l.Tokens
		}
	}
	slices.SortFunc(s.Failures, func(a, b FailureLine) int {
		return cmp.Or(cmp.Compare(a.Outcome, b.Outcome), cmp.Compare(a.Status, b.Status))
	})
	slices.SortFunc(s.Lines, func(a, b GroupLine) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group))
	})
	return s
}

// LastMinute is what ended in it.
func (t *Timeline) LastMinute() (e Ended) {
	for _, b := range t.lately(minute) {
		e.All += b.ended
		for _, count := range b.failed {
			e.Failed += count
		}
	}
	return e
}

// Failures are all ways in which requests failed, those of the last seconds first.
func (t *Timeline) Failures() []Failed {
	by := map[Outcome]*Failed{}
	for o, count := range t.was.Failures {
		by[o] = &Failed{Outcome: o.Name, Status: o.Status, SinceStart: count, Why: t.was.Whys[o].Text, Own: t.was.Whys[o].Own}
	}
	for i := range t.bins {
		age := t.last() - t.bins[i].number // in bins
		for o, count := range t.bins[i].failed {
			f := by[o]
			if f == nil {
				continue
			}
			f.LastHour += count
			if age < int64(fewBins) {
				f.Last5Min += count
			}
			if age < int64(minute) {
				f.LastMinute += count
			}
			if age < int64(tenS) {
				f.Last10S += count
			}
		}
	}
	list := make([]Failed, 0, len(by))
	for _, f := range by {
		list = append(list, *f)
	}
	slices.SortFunc(list, func(a, b Failed) int {
		return cmp.Or(cmp.Compare(b.Last10S, a.Last10S), cmp.Compare(b.LastMinute, a.LastMinute), cmp.Compare(b.Last5Min, a.Last5Min), cmp.Compare(b.LastHour, a.LastHour), cmp.Compare(b.SinceStart, a.SinceStart), cmp.Compare(a.Outcome, b.Outcome), cmp.Compare(a.Status, b.Status))
	})
	return list
}
