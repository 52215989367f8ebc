package roster

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// If the process of an engine starts again at its address, the KV of the process before is lost. A decode engine that
// still asks there for this KV would pull blocks of another prompt, or wait. So each hand-off remembers which of the
// processes at an address made it.

// Fate is what is known of a process.
type Fate uint8

// Fates of a process. A known process may be doubted, and a doubted one may be known again. A process that is gone
// stays gone.
const (
	Known   Fate = iota // it is there, as far as is known
	Doubted             // another process may have taken its place: hand-offs of it are not used, and their KV does not count as free
	Gone
)

// Birth identifies what made a hand-off: an engine, and one of its processes.
type Birth struct {
	Incarnation string // incarnation of the engine, if a source of discovery gives one
	Key         string // the engine's role and address
	Process     int
}

// Processes are the processes that were seen at an engine's address, numbered from 0. A new start time shows a new
// process. So does a refused connection, because then no process listens there. A new engine id in hand-offs may also
// be the id of another engine behind the same address, so it is only a reason for doubt. A value does not change: a
// method returns the next value, which is the same pointer if nothing was learned.
type Processes struct {
	first int    // processes with smaller numbers are gone
	fates []Fate // fates of the processes from first on; the newest is known. Empty: first is the newest
	since time.Time
	start float64 // start time of the newest, in Unix seconds, by its metrics; 0: not known
	line  line
	names map[string]names // by candidate
}

// line is how connections to an engine went, and whether the start time belongs to the process to which they lead.
type line uint8

const (
	settled  line = iota // the process with the known start time accepts connections
	refused              // the last connection was refused, and the start time of the next process is not known
	expected             // a connection was refused or led to another host, and the start time of the present process is not known
	crossed              // the last connection was refused, while the start time was read at the same time
)

// names are the engine ids in a candidate's hand-offs.
type names struct {
	ids     []name // in the order in which they came first
	several bool   // ids come back, so several engines answer there, and ids show no restart
}

// name is one engine id.
type name struct {
	id    string
	first int     // the process of which it was first seen
	last  int     // the last process that is known to have it
	start float64 // the start time that was known when it came last
}

// mostNames bounds how many ids of one candidate are remembered.
const mostNames = 16

// Signs that there is another process.
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

// Reached takes the outcome of a connection: whether it was refused, and whether the engine's name leads to another
// address than before. sign says why there must be another process; it is empty if there need not be one.
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

// Started takes a start time of the present process. A start time that is older than the known one was read earlier,
// and is ignored. read says that it was read just now, so that an unchanged time means that no other process came.
func (p *Processes) Started(start float64, read bool) (next *Processes, sign string) {
	// the process with this start time accepts connections, unless the last one was refused
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

// Lives takes a start time that was asked for at the time asked and was read just now. Engine ids that came while
// this start time was known are ids of the present process.
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

// Made takes the engine id of a candidate's hand-off, whose probe was sent when process was the newest. by is the
// process that made the hand-off. sign says why there may be another process; it is empty if there cannot be.
func (p *Processes) Made(process int, candidate, id string, now time.Time) (next *Processes, by int, sign string) {
	id = withoutRank(id)
	seen := p.names[candidate]
	index, newest := slices.IndexFunc(seen.ids, func(x name) bool { return x.id == id }), len(seen.ids)-1
	entry := name{id: id, first: process, last: process}
	if index >= 0 {
		entry = seen.ids[index]
	}
	entry.start = p.start
	several, full, doubt := seen.several, index < 0 && len(seen.ids) == mostNames, false
	switch {
	case seen.several: // the ids show nothing
	case full: // too many ids, so they are not of one process after another
		several = true
	case index < 0 && newest < 0: // the first id that is seen
	case index < 0: // the id of a process that was not known
		if process, doubt = p.Newest(), seen.ids[newest].last == p.Newest(); doubt {
			process++
		}
		entry.first, entry.last = process, process
	case index == newest: // the id of the newest process, which the probe may have met before the process was known
		process = max(process, entry.last)
		entry.last = process
	case process >= seen.ids[newest].last: // of an older process, asked after a newer one was seen: so the older one is still there
		several = true
	default: // the id of an older process, and the probe was sent before a newer one was seen
		return p, process, ""
	}
	if several == seen.several && (index < 0 && seen.several || index >= 0 && entry == seen.ids[index]) {
		return p, process, ""
	}
	next = new(*p)
	if doubt {
		next.doubt(now)
		sign = signName
	}
	if seen.ids = slices.Clone(seen.ids); index >= 0 {
		seen.ids[index] = entry
	} else if !full {
		seen.ids = append(seen.ids, entry)
	}
	if several && !seen.several && index >= 0 {
		next = next.livesSince(entry.first)
	}
	seen.several = several
	if next.names = maps.Clone(p.names); next.names == nil {
		next.names = map[string]names{}
	}
	next.names[candidate] = seen
	return next, process, sign
}

// withoutRank is an engine id without the number of a rank, so that it names the process of the engine: vLLM gives the engines of its
// data parallel ranks one id, and adds _dp and the rank (0.32.0, v1/engine/core.py).
func withoutRank(id string) string {
	base := strings.TrimRight(id, "0123456789")
	if before, ok := strings.CutSuffix(base, "_dp"); ok && base != id {
		return before
	}
	return id
}

// replaced adds a process. The processes before it are gone; if doubt is true, the last of them is only doubted.
func (p *Processes) replaced(doubt bool) {
	next := p.Newest() + 1
	p.first, p.fates = next, []Fate{Known}
	if doubt {
		p.first, p.fates = next-1, []Fate{Doubted, Known}
	}
}

// emptied returns the state after a process has lost what it held, which counts like a restart.
func (p *Processes) emptied() *Processes {
	next := new(*p)
	next.replaced(false)
	return next
}

// doubt adds a process that is known only from the engine id of a hand-off.
func (p *Processes) doubt(now time.Time) {
	fates := make([]Fate, max(1, len(p.fates))+1)
	for i := range fates[:len(fates)-1] {
		fates[i] = Doubted
	}
	p.fates, p.since = fates, now
}

// livesSince returns the state in which a process and those after it are known and not doubted.
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
