package roster

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// An engine whose process starts again at its address has lost the KV that the process before held. A decode engine that
// still asks there for this KV would pull blocks of another prompt, or wait. So hand-offs remember which of the processes at
// an address made them.

// Fate is what is known of a process.
type Fate uint8

// Fates of a process. A process that is known may be doubted, and one that is doubted may be known again. One that is gone stays gone.
const (
	Known   Fate = iota // it is there, as far as is known
	Doubted             // another process may have taken its place: what it made is neither used nor taken for free
	Gone
)

// Birth is what made a hand-off: an engine, and one of its processes.
type Birth struct {
	Incarnation string // of the engine, where a source of discovery tells
	Key         string // the engine's role and address
	Process     int
}

// Processes are those that were seen at an engine's address, numbered from 0. The engine's start time tells of a new one, and
// a refused connection does, because then no process listens there. A new engine id in its hand-offs may also be that of another
// engine behind the same address, so that it raises no more than a doubt. A value does not change: a method returns the next one,
// which is the same pointer if it has learned nothing.
type Processes struct {
	first int    // those before it are gone
	fates []Fate // of the others; the newest one is known. None: first is the newest
	since time.Time
	start float64 // of the newest, in Unix seconds, as its metrics say; 0: not told
	line  line
	names map[string]names // by candidate
}

// line is how connections to an engine went, and whether the start time is that of the process that they lead to.
type line uint8

const (
	settled  line = iota // connections are taken by the process whose start time is known
	refused              // the last one was refused, and the start time of the next process is not known
	expected             // one was refused or led to another host, and the start time of the process that is there now is not known
	crossed              // the last one was refused, and the start time was read at the same time
)

// names are the engine ids in a candidate's hand-offs.
type names struct {
	ids     []name // in the order in which they came first
	several bool   // ids come back: several engines answer there, so that they tell of no restart
}

// name is one engine id.
type name struct {
	id    string
	first int     // process that it was seen of
	last  int     // process that was known to have it
	start float64 // that was known when it came last
}

// mostNames bounds the ids that are remembered of one candidate.
const mostNames = 16

// Signs that another process is there.
const (
	signStart   = "its process has another start time"
	signAddress = "its name has another address"
	signRefused = "a connection was refused"
	signName    = "its hand-offs name another engine"
)

// seen says whether a process has said when it began, or has made a hand-off.
func (p *Processes) seen() bool { return p.start != 0 || len(p.names) > 0 }

// Newest is the number of the newest process.
func (p *Processes) Newest() int { return p.first + max(0, len(p.fates)-1) }

// Fate returns what is known of a process.
func (p *Processes) Fate(process int) Fate {
	switch i := process - p.first; {
	case i < 0:
		return Gone
	case i < len(p.fates):
		return p.fates[i]
	}
	return Known
}

// Reached takes the outcome of a connection: whether it was refused, and whether the engine's name leads to another address than before.
// sign says why another process must be there; it is empty if none must.
func (p *Processes) Reached(moved, isRefused bool) (next *Processes, sign string) {
	to := p.line
	switch {
	case moved:
		to, sign = expected, signAddress
		if isRefused {
			to = refused
		}
	case isRefused && (p.line == settled || p.line == expected):
		to, sign = refused, signRefused
	case isRefused:
	case p.line == refused:
		to = expected
	case p.line == crossed:
		to = settled
	}
	if to == p.line && sign == "" {
		return p, ""
	}
	next = new(*p)
	if next.line = to; sign != "" {
		next.replaced(false)
	}
	return next, sign
}

// Started takes a start time of the process that is there. One that is older than the known one was read before. read: it was read just
// now, so that the same time as before means that no other process came.
func (p *Processes) Started(start float64, read bool) (next *Processes, sign string) {
	to := [...]line{settled, crossed, settled, crossed}[p.line]
	if start == 0 || start < p.start || start == p.start && (!read || to == p.line) {
		return p, ""
	}
	next = new(*p)
	next.line = to
	if start > p.start && p.start != 0 && to == p.line {
		doubt := len(p.fates) > 1 && p.fates[len(p.fates)-2] == Doubted
		next.replaced(doubt) // the newest id may be of this process, or of the one before
		sign = signStart
	}
	next.start = start
	return next, sign
}

// Lives takes a start time that was asked for at a moment and was read just now. The ids that were seen after the same time was read
// before are those of the process that is there.
func (p *Processes) Lives(start float64, asked time.Time) (next *Processes, sign string) {
	next, sign = p.Started(start, true)
	if start == 0 || start != next.start || !asked.After(next.since) {
		return next, sign
	}
	for _, n := range next.names {
		for _, x := range n.ids {
			if x.start == start {
				next = next.livesSince(x.first)
			}
		}
	}
	return next, sign
}

// Made takes the engine id of a candidate's hand-off, whose probe was sent when process was the newest. by is the process that made it.
// sign says why another process may be there; it is empty if none may.
func (p *Processes) Made(process int, candidate, id string, now time.Time) (next *Processes, by int, sign string) {
	id = withoutRank(id)
	n := p.names[candidate]
	at, newest := slices.IndexFunc(n.ids, func(x name) bool { return x.id == id }), len(n.ids)-1
	x := name{id: id, first: process, last: process}
	if at >= 0 {
		x = n.ids[at]
	}
	x.start = p.start
	several, full, doubt := n.several, at < 0 && len(n.ids) == mostNames, false
	switch {
	case n.several: // it tells nothing
	case full: // so it is not one process after another
		several = true
	case at < 0 && newest < 0: // the first one that is seen
	case at < 0: // a process that was not known
		if process, doubt = p.Newest(), n.ids[newest].last == p.Newest(); doubt {
			process++
		}
		x.first, x.last = process, process
	case at == newest: // the newest process, which the probe perhaps met before it was known
		process = max(process, x.last)
		x.last = process
	case process >= n.ids[newest].last: // an older process, asked after a newer one was seen: so it is there still
		several = true
	default: // an older process, asked before a newer one was seen
		return p, process, ""
	}
	if several == n.several && (at < 0 && n.several || at >= 0 && x == n.ids[at]) {
		return p, process, ""
	}
	next = new(*p)
	if doubt {
		next.doubt(now)
		sign = signName
	}
	if n.ids = slices.Clone(n.ids); at >= 0 {
		n.ids[at] = x
	} else if !full {
		n.ids = append(n.ids, x)
	}
	if several && !n.several && at >= 0 {
		next = next.livesSince(x.first)
	}
	n.several = several
	if next.names = maps.Clone(p.names); next.names == nil {
		next.names = map[string]names{}
	}
	next.names[candidate] = n
	return next, process, sign
}

// withoutRank is the id of the process that has an engine: vLLM gives the engines of
// its data parallel ranks one id, and adds _dp and the rank (0.32.0, v1/engine/core.py).
func withoutRank(id string) string {
	base := strings.TrimRight(id, "0123456789")
	if before, ok := strings.CutSuffix(base, "_dp"); ok && base != id {
		return before
	}
	return id
}

// replaced adds a process: those before it are gone, but for the last of them where that is only a doubt.
func (p *Processes) replaced(doubt bool) {
	next := p.Newest() + 1
	p.first, p.fates = next, []Fate{Known}
	if doubt {
		p.first, p.fates = next-1, []Fate{Doubted, Known}
	}
}

// emptied is after a process has lost what it held, as one that has started anew has.
func (p *Processes) emptied() *Processes {
	next := new(*p)
	next.replaced(false)
	return next
}

// doubt adds a process of which only the engine id of a hand-off is a sign.
func (p *Processes) doubt(now time.Time) {
	fates := make([]Fate, max(1, len(p.fates))+1)
	for i := range fates[:len(fates)-1] {
		fates[i] = Doubted
	}
	p.fates, p.since = fates, now
}

// livesSince ends the doubt about the processes from that one on.
func (p *Processes) livesSince(process int) *Processes {
	from := max(0, process-p.first)
	if from >= len(p.fates) || !slices.Contains(p.fates[from:], Doubted) {
		return p
	}
	p = new(*p)
	p.fates = slices.Clone(p.fates)
	clear(p.fates[from:])
	return p
}
