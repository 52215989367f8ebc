package roster

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// When an engine restarts, the KV of its old process is lost. A decode engine that still asks the engine's address for this KV would fetch
// blocks of another prompt, or wait. So each hand-off records which process at the address made it.

// Fate says whether a process still runs.
type Fate uint8

// Fates of a process. A known process may become doubted, and a doubted process known again. A process that is gone stays gone.
const (
	Known   Fate = iota // the process runs, as far as is known
	Doubted             // another process may have replaced it: its hand-offs are not used, but their KV does not count as free either
	Gone                // the process has ended
)

// ProcessID identifies the maker of a hand-off: an engine and one of its processes.
type ProcessID struct {
	Incarnation string // incarnation of the engine, if a source of discovery gives one
	Key         string // the engine's role and address
	Process     int
}

// Processes are the processes that were seen at an engine's address, numbered from 0. A new start time proves a new process. So does a
// refused connection, because then no process listens at the address. A new engine id in hand-offs only gives reason for doubt, because it
// may come from a second engine behind the same address. A value never changes: methods return the next value, or the same pointer if they
// learn nothing.
type Processes struct {
	first int       // processes with smaller numbers are gone
	fates []Fate    // fates of the processes from first on, the last one Known; empty: only the process first, which is Known
	since time.Time // when a new engine id last gave reason for doubt
	start float64   // start time of the newest process, in Unix seconds, from its metrics; 0: not known
	line  line
	names map[string]names // by the candidate's ID
}

// line says how the last connections to an engine went, and whether the known start time is that of the process which accepts connections
// now.
type line uint8

const (
	settled  line = iota // the process with the known start time accepts connections
	refused              // the last connection was refused, so a new process must come, whose start time is not known yet
	expected             // a new process accepts connections, and its start time is not known yet
	crossed              // the last connection was refused, but the start time was read at about the same time
)

// names are the engine ids in a candidate's hand-offs.
type names struct {
	ids     []name // in the order in which they were first seen
	several bool   // old ids come back: several engines share the address, so a new id shows no restart
}

// name is one engine id.
type name struct {
	id    string
	first int     // number of the process in whose time the id was first seen
	last  int     // number of the last process that is known to use the id
	start float64 // the start time that was known when the id was last seen
}

// mostNames bounds how many ids of one candidate are remembered. More ids than this cannot be restarts.
const mostNames = 16

// Signs that there is a new process, as text for people.
const (
	signStart   = "its process has another start time"
	signAddress = "its name has another address"
	signRefused = "a connection was refused"
	signName    = "its hand-offs name another engine"
)

// seen says whether any process has reported its start time or made a hand-off.
func (p *Processes) seen() bool { return p.start != 0 || len(p.names) > 0 }

// Newest is the number of the newest process.
func (p *Processes) Newest() int { return p.first + max(0, len(p.fates)-1) }

// Fate returns the fate of a process by its number. A number above the newest counts as Known.
func (p *Processes) Fate(process int) Fate {
	switch i := process - p.first; {
	case i < 0:
		return Gone
	case i < len(p.fates):
		return p.fates[i]
	}
	return Known
}

// Reached records how a connection went: whether it was refused, and whether the engine's name has a new address (moved). sign says why
// there must be a new process; empty: there need not be one.
func (p *Processes) Reached(moved, isRefused bool) (next *Processes, sign string) {
	nextLine := p.line
	switch {
	case moved:
		nextLine, sign = expected, signAddress
		if isRefused {
			nextLine = refused
		}
	case isRefused && (p.line == settled || p.line == expected):
		nextLine, sign = refused, signRefused
	case isRefused: // the refusal was recorded before
	case p.line == refused:
		nextLine = expected
	case p.line == crossed:
		nextLine = settled
	}
	if nextLine == p.line && sign == "" {
		return p, ""
	}
	next = new(*p)
	next.line = nextLine
	if sign != "" {
		next.replaced(false)
	}
	return next, sign
}

// Started records a start time of the present process. A start time older than the known one was read earlier, and is ignored. read says
// that the time was read just now, so that an unchanged time shows that no new process came.
func (p *Processes) Started(start float64, read bool) (next *Processes, sign string) {
	nextLine := settled // the process with this start time accepts connections
	if p.line == refused || p.line == crossed {
		nextLine = crossed // but the last connection was refused
	}
	unchanged := start == p.start && (!read || nextLine == p.line)
	if start == 0 || start < p.start || unchanged {
		return p, ""
	}
	next = new(*p)
	next.line = nextLine
	alreadyAdded := nextLine != p.line // Reached has added the new process, whose start time this is
	if start > p.start && p.start != 0 && !alreadyAdded {
		doubt := len(p.fates) > 1 && p.fates[len(p.fates)-2] == Doubted
		next.replaced(doubt) // the newest engine id may belong to this process or to the one before
		sign = signStart
	}
	next.start = start
	return next, sign
}

// Lives records a start time that was requested at the time asked and read just now. Engine ids that came while this start time was known
// belong to the present process.
func (p *Processes) Lives(start float64, asked time.Time) (next *Processes, sign string) {
	next, sign = p.Started(start, true)
	if start == 0 || start != next.start || !asked.After(next.since) {
		return next, sign
	}
	for _, n := range next.names {
		for _, engineID := range n.ids {
			if engineID.start == start {
				next = next.livesSince(engineID.first)
			}
		}
	}
	return next, sign
}

// Made records the engine id of a candidate's hand-off. process was the newest process when the probe was sent, and by is the process that
// made the hand-off. sign says why there may be a new process; empty: the id gives no reason to think so.
func (p *Processes) Made(process int, candidate, id string, now time.Time) (next *Processes, by int, sign string) {
	id = withoutRank(id)
	by = process
	seen := p.names[candidate]
	index := slices.IndexFunc(seen.ids, func(x name) bool { return x.id == id })
	newest := len(seen.ids) - 1
	isNew := index < 0
	entry := name{id: id, first: process, last: process}
	if !isNew {
		entry = seen.ids[index]
	}
	entry.start = p.start
	tooMany := isNew && len(seen.ids) == mostNames
	several := seen.several
	doubt := false // the id is a reason to think that there is a new process
	switch {
	case seen.several: // ids show no restart
	case tooMany: // so many ids do not come from restarts: several engines share the address
		several = true
	case isNew && newest < 0: // the first id of this candidate
	case isNew: // it belongs to a new process, unless the newest process has shown no id yet
		by = p.Newest()
		if seen.ids[newest].last == by {
			doubt = true
			by++
		}
		entry.first, entry.last = by, by
	case index == newest: // the id of the newest process; the probe may have reached it before the proxy knew this process
		by = max(process, entry.last)
		entry.last = by
	case process >= seen.ids[newest].last: // an older id, although the probe was sent after a newer id came: so both engines run
		several = true
	default: // an older id, and the probe was sent before the newer id came
		return p, by, ""
	}
	nothingToStore := isNew && seen.several || !isNew && entry == seen.ids[index] // where ids show no restart, new ones are not kept
	if several == seen.several && nothingToStore {
		return p, by, ""
	}
	next = new(*p)
	if doubt {
		next.doubt(now)
		sign = signName
	}
	seen.ids = slices.Clone(seen.ids)
	if !isNew {
		seen.ids[index] = entry
	} else if !tooMany {
		seen.ids = append(seen.ids, entry)
	}
	if several && !seen.several && !isNew { // the older id is back, so its process and all later ones were not replaced
		next = next.livesSince(entry.first)
	}
	seen.several = several
	next.names = maps.Clone(p.names)
	if next.names == nil {
		next.names = map[string]names{}
	}
	next.names[candidate] = seen
	return next, by, sign
}

// withoutRank returns an engine id without the number of a rank, so that it identifies the engine's process. vLLM builds the id of a data
// parallel rank from an id that all its ranks share, _dp and the rank's number (0.32.0, v1/engine/core.py).
func withoutRank(id string) string {
	base := strings.TrimRight(id, "0123456789")
	if before, ok := strings.CutSuffix(base, "_dp"); ok && base != id {
		return before
	}
	return id
}

// replaced adds a new process. The process just before it counts as Doubted if doubt is true, otherwise as Gone. All earlier ones are
// Gone. replaced changes p, so p must be a copy that nobody else has yet.
func (p *Processes) replaced(doubt bool) {
	next := p.Newest() + 1
	p.first, p.fates = next, []Fate{Known}
	if doubt {
		p.first, p.fates = next-1, []Fate{Doubted, Known}
	}
}

// emptied returns the state after the engine has dropped its KV, which counts like a restart.
func (p *Processes) emptied() *Processes {
	next := new(*p)
	next.replaced(false)
	return next
}

// doubt adds a process that is known only from the engine id of a hand-off. All earlier processes become Doubted. doubt changes
// p, so p must be a copy that nobody else has yet.
func (p *Processes) doubt(now time.Time) {
	fates := make([]Fate, max(1, len(p.fates))+1)
	for i := range fates[:len(fates)-1] {
		fates[i] = Doubted
	}
	p.fates, p.since = fates, now
}

// livesSince returns the state in which a process and all later processes are known, and not doubted.
func (p *Processes) livesSince(process int) *Processes {
	from := max(0, process-p.first)
	if from >= len(p.fates) || !slices.Contains(p.fates[from:], Doubted) {
		return p
	}
	p = new(*p)
	p.fates = slices.Clone(p.fates)
	clear(p.fates[from:]) // Known is the zero value
	return p
}
