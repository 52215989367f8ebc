package roster

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// When an engine restarts, the KV of its old process is lost. A decode engine that still asks the engine's address for this KV would fetch
// blocks of another prompt, or wait. So each hand-off records which process at the address made it.

// Fate says whether an engine process still runs, as far as the proxy can tell.
type Fate uint8

// Fates of a process. A known process may become doubted, and a doubted process known again. A process that is gone stays gone.
const (
	Known   Fate = iota // the process runs, as far as is known
	Doubted             // another process may have replaced this one: its hand-offs are not used, but their KV does not count as free
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
	first      int       // processes with smaller numbers are gone
	fates      []Fate    // fates of the processes from first on, the last one Known; empty: only the process first, which is Known
	doubtSince time.Time // when a new engine id last gave reason for doubt
	start      float64   // start time of the newest process, in Unix seconds, from its metrics; 0: not known
	connection connectionState
	newSince   time.Time            // when a connection last showed that there is a new process
	engineIDs  map[string]engineIDs // engine ids in hand-offs, by the candidate's ID
}

// connectionState says how the last connections to an engine went, and whether the known start time is that of the process which accepts
// connections now.
type connectionState uint8

const (
	acceptsStartKnown   connectionState = iota // the process with the known start time accepts connections
	refusedStartUnknown                        // the last connection was refused, so a new process must come; its start time is not known
	acceptsStartUnknown                        // a new process accepts connections, and its start time is not known yet
	refusedStartKnown                          // the last connection was refused, but the start time was read at about the same time
)

// engineIDs are the engine ids in a candidate's hand-offs.
type engineIDs struct {
	ids    []engineID // engine ids in the order in which they were first seen
	shared bool       // old ids come back: several engines share the address, so a new id shows no restart
}

// engineID is one engine id, with the processes that are known to use it.
type engineID struct {
	id           string
	firstProcess int     // number of the process in whose time the id was first seen
	lastProcess  int     // number of the last process that is known to use the id
	start        float64 // the start time that was known when the id was last seen
}

// mostEngineIDs bounds how many ids of one candidate are remembered. More ids than this cannot be restarts.
const mostEngineIDs = 16

// What shows that there is, or may be, a new process, as text for people.
const (
	evidenceStart    = "its process has another start time"
	evidenceAddress  = "its name has another address"
	evidenceRefused  = "a connection was refused"
	evidenceEngineID = "its hand-offs name another engine"
)

// anyObserved says whether any process has reported its start time or made a hand-off.
func (p *Processes) anyObserved() bool { return p.start != 0 || len(p.engineIDs) > 0 }

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

// RecordConnection records how a connection went: whether it was refused, and whether the engine's name has a new address (moved). If this
// shows that there must be a new process, evidence says how, and the process before counts as Gone; empty: nothing shows a new process. The
// state says whether the last connection was accepted or refused, and whether the start time of the newest process is known. RecordStart
// sets the second part: a start time that comes while connections are still refused leads to refusedStartKnown.
func (p *Processes) RecordConnection(moved, isRefused bool, now time.Time) (next *Processes, evidence string) {
	nextState := p.connection
	wasAccepted := p.connection == acceptsStartKnown || p.connection == acceptsStartUnknown
	switch {
	case moved: // another process, at the new address
		nextState, evidence = acceptsStartUnknown, evidenceAddress
		if isRefused {
			nextState = refusedStartUnknown
		}
	case isRefused && wasAccepted: // no process listens, so the old one has ended
		nextState, evidence = refusedStartUnknown, evidenceRefused
	case isRefused: // an earlier refusal has shown already that the old process is gone
	case p.connection == refusedStartUnknown: // the new process accepts connections now
		nextState = acceptsStartUnknown
	case p.connection == refusedStartKnown: // the process whose start time was read accepts connections now
		nextState = acceptsStartKnown
	}
	if nextState == p.connection && evidence == "" {
		return p, ""
	}
	next = new(*p)
	next.connection = nextState
	if evidence != "" {
		next.addProcess(Gone)
		next.newSince = now
	}
	return next, evidence
}

// RecordStart records a start time of the present process; 0: not known, so nothing changes. A start time older than the known one was read
// earlier, and is ignored. readNow says that the time was read just now, so that an unchanged time shows that no new process came. A later
// start time than the known one is that of a new process. RecordStart adds this process, unless RecordConnection has added it already and
// only its start time was missing. evidence says what shows that there is a new process that was not known; empty: there is none.
func (p *Processes) RecordStart(start float64, readNow bool) (next *Processes, evidence string) {
	nextState := acceptsStartKnown
	if p.connection == refusedStartUnknown || p.connection == refusedStartKnown {
		nextState = refusedStartKnown
	}
	addedWithoutStart := p.connection == refusedStartUnknown || p.connection == acceptsStartUnknown // by RecordConnection
	showsNothing := start == p.start && (!readNow || !addedWithoutStart)
	isOlder := start < p.start
	if start == 0 || isOlder || showsNothing {
		return p, ""
	}
	next = new(*p)
	next.connection = nextState
	hasChanged := p.start != 0 && start > p.start
	if hasChanged && !addedWithoutStart {
		fateBefore := Gone
		// If the newest process was only suspected, from a new engine id, the id may be that of the process whose start time this
		// is. Then the suspected process is the present one, so it is not Gone for certain.
		if n := len(p.fates); n > 1 && p.fates[n-2] == Doubted {
			fateBefore = Doubted
		}
		next.addProcess(fateBefore)
		evidence = evidenceStart
	}
	next.start = start
	return next, evidence
}

// RecordStartRead records a start time that was requested at the time asked and has just been read. If the request was sent after the last
// doubt arose, the answer also ends doubts. A doubt is the suspicion, raised by a new engine id in a hand-off, that a new process has
// replaced the known ones (Doubted). If the request was sent before a connection showed a new process, the answer may be that of the old
// process. It is then ignored, because the start time of the new process would otherwise look like that of yet another one.
func (p *Processes) RecordStartRead(start float64, asked time.Time) (next *Processes, evidence string) {
	// The known start time may be that of the old process, and so may the first start time ever. A later one is that of a new process,
	// and RecordStart ignores an earlier one.
	mayBeOfOld := p.start == 0 || start == p.start
	if asked.Before(p.newSince) && mayBeOfOld {
		return p, ""
	}
	const readNow = true // even an unchanged time is news: the process that accepts connections has it
	next, evidence = p.RecordStart(start, readNow)
	isNewest := start != 0 && start == next.start // it was neither unknown nor older than the known one
	if isNewest && asked.After(next.doubtSince) {
		next = next.withoutDoubts(start)
	}
	return next, evidence
}

// withoutDoubts returns the state after the present process has shown its start time. A process is Doubted if a later engine id made it
// look as if a new process had replaced it. Engine ids that came while this start time was known belong to the present process. So it has
// run since the id first came: the processes from then on are all this one, and none of them is Doubted any more.
func (p *Processes) withoutDoubts(start float64) *Processes {
	next := p
	for _, ofCandidate := range p.engineIDs {
		for _, id := range ofCandidate.ids {
			if isOfPresent := id.start == start; isOfPresent {
				next = next.knownFrom(id.firstProcess)
			}
		}
	}
	return next
}

// RecordHandoff records the engine id that a candidate's hand-off names. The processes at the engine's address are numbered in the order in
// which they were noticed. process was the newest process when the probe was sent, and maker is the process that made the hand-off. Each
// process has an engine id of its own. A new id therefore gives reason to suspect a new process: it gets a number, and those before it
// become Doubted. But if an older id comes back, several engines share the address. From then on, ids show nothing, and the doubts end.
// evidence says what shows that there may be a new process; empty: the id gives no reason to think so.
func (p *Processes) RecordHandoff(process int, candidate, id string, now time.Time) (next *Processes, maker int, evidence string) {
	id = withoutRank(id)
	maker = process
	known := p.engineIDs[candidate] // the ids that the candidate's hand-offs have shown so far
	index := slices.IndexFunc(known.ids, func(x engineID) bool { return x.id == id })
	newestID := len(known.ids) - 1
	isNew := index < 0
	entry := engineID{id: id, firstProcess: process, lastProcess: process}
	if !isNew {
		entry = known.ids[index]
	}
	entry.start = p.start // the start time that is known now; withoutDoubts finds by it the ids of the process that runs
	tooMany := isNew && len(known.ids) == mostEngineIDs
	shared := known.shared
	suspectNew := false // the id gives reason to think that a new process has made the hand-off
	switch {
	case known.shared: // several engines share the address, so ids show no restart
	case tooMany: // so many ids do not come from restarts: several engines share the address
		shared = true
	case isNew && newestID < 0: // the first id of this candidate
	case isNew: // the id belongs to the newest process if that process has shown no id yet, and otherwise to one that is not known yet
		maker = p.Newest()
		if known.ids[newestID].lastProcess == maker {
			suspectNew = true
			maker++
		}
		entry.firstProcess, entry.lastProcess = maker, maker
	case index == newestID: // the id of the newest process, which the probe may have reached before the proxy knew this process
		maker = max(process, entry.lastProcess)
		entry.lastProcess = maker
	case process >= known.ids[newestID].lastProcess: // an older id in a probe sent after a newer id came: so two engines run there
		shared = true
	default: // an older id, and the probe was sent before the newer id came
		return p, maker, ""
	}
	becameShared := shared && !known.shared
	isUseless := isNew && known.shared // where ids show no restart, new ones are not kept
	isUnchanged := !isNew && entry == known.ids[index]
	if !becameShared && (isUseless || isUnchanged) {
		return p, maker, ""
	}
	next = new(*p)
	if suspectNew {
		next.addSuspected(now)
		evidence = evidenceEngineID
	}
	if becameShared && !isNew { // the older id is back, so its process and all later ones were not replaced, and are Known again
		next = next.knownFrom(entry.firstProcess)
	}
	known = known.with(index, entry)
	known.shared = shared
	next.setEngineIDs(candidate, known)
	return next, maker, evidence
}

// with returns the engine ids in which entry replaces the id at index or, if index is below 0, is added. If the list is full, nothing is
// added.
func (e engineIDs) with(index int, entry engineID) engineIDs {
	e.ids = slices.Clone(e.ids)
	switch {
	case index >= 0:
		e.ids[index] = entry
	case len(e.ids) < mostEngineIDs:
		e.ids = append(e.ids, entry)
	}
	return e
}

// setEngineIDs replaces the engine ids of a candidate. It changes p, so p must be a copy that no other goroutine has yet. It copies the
// map, because the value from which p was copied has the same map.
func (p *Processes) setEngineIDs(candidate string, ids engineIDs) {
	all := maps.Clone(p.engineIDs)
	if all == nil {
		all = map[string]engineIDs{}
	}
	all[candidate] = ids
	p.engineIDs = all
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

// addProcess adds a new process. before is the fate of the process just before it: Doubted or Gone. All earlier processes are Gone.
// addProcess changes p, so p must be a copy that no other goroutine has yet.
func (p *Processes) addProcess(before Fate) {
	next := p.Newest() + 1
	p.first, p.fates = next, []Fate{Known} // processes with smaller numbers are Gone
	if before == Doubted {
		p.first, p.fates = next-1, []Fate{Doubted, Known}
	}
}

// withoutKV returns the state after the engine has dropped its KV, which counts like a restart.
func (p *Processes) withoutKV() *Processes {
	next := new(*p)
	next.addProcess(Gone)
	return next
}

// addSuspected adds a process that is known only from the engine id of a hand-off. All earlier processes become Doubted.
// addSuspected changes p, so p must be a copy that no other goroutine has yet.
func (p *Processes) addSuspected(now time.Time) {
	fates := make([]Fate, max(1, len(p.fates))+1) // at least 1, because an empty list stands for one process
	for i := range fates[:len(fates)-1] {         // all but the new one, which is Known, the zero value
		fates[i] = Doubted
	}
	p.fates, p.doubtSince = fates, now
}

// knownFrom returns the state in which a process and all later processes are Known, and no longer Doubted.
func (p *Processes) knownFrom(process int) *Processes {
	from := max(0, process-p.first)                                        // index in fates; a process before first is gone
	if from >= len(p.fates) || !slices.Contains(p.fates[from:], Doubted) { // all of them are Known already
		return p
	}
	p = new(*p)
	p.fates = slices.Clone(p.fates)
	clear(p.fates[from:]) // Known is the zero value
	return p
}
