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
	fates      []Fate    // of the processes from first on, the last one Known; empty: only the process first, which is Known
	doubtSince time.Time // when a new engine id last gave reason for doubt
	start      float64   // start time of the newest process, in Unix seconds, from its metrics; 0: not known; see awaitsStart
	// awaitsStart says that start is still that of the process before: a connection has shown that this one is gone.
	awaitsStart bool
	lastRefused bool                 // the last connection was refused
	newSince    time.Time            // when a connection last showed that there is a new process
	engineIDs   map[string]engineIDs // engine ids in hand-offs, by the candidate's ID
}

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

// Fate returns the fate of a process by its number. A number above the newest counts as Known: the process was noticed only after this
// value was made.
func (p *Processes) Fate(process int) Fate {
	switch i := process - p.first; {
	case i < 0:
		return Gone
	case i < len(p.fates):
		return p.fates[i]
	}
	return Known
}

// RecordConnection records how a connection went: whether it was refused, and whether the engine's name has a new address (moved). A new
// address, or the first refused connection, shows that the process before is gone, and that there is or will be a new one. evidence says
// what shows the new process; empty: nothing does. The start time of the new process is then awaited, until RecordStart gets it.
func (p *Processes) RecordConnection(moved, isRefused bool, now time.Time) (next *Processes, evidence string) {
	switch {
	case moved: // another process, at the new address
		evidence = evidenceAddress
	case isRefused && !p.lastRefused: // no process listens, so the old one has ended; later refusals show nothing more
		evidence = evidenceRefused
	}
	if evidence == "" && isRefused == p.lastRefused {
		return p, ""
	}
	next = new(*p)
	next.lastRefused = isRefused
	if evidence != "" {
		next.awaitsStart = true
		next.addProcess(Gone) // the process before has ended for certain
		next.newSince = now
	}
	return next, evidence
}

// RecordStart records a start time of the present process; 0: not known, so nothing changes. readNow says that the time was read just now,
// and does not come from an earlier reading. A start time older than the known one was read earlier, and is ignored. The first start time
// ever is only stored.
//
// A new process is noticed in one of two orders. If its start time comes first, it is later than the known one, and RecordStart adds the
// process. If a refused connection or another address comes first, RecordConnection adds the process, and awaits its start time. Then
// RecordStart adds nothing and only stores the time. An equal time ends this wait only if it was read now: otherwise it may be that of the
// process before.
//
// evidence says what shows that there is a new process that was not known; empty: there is none.
func (p *Processes) RecordStart(start float64, readNow bool) (next *Processes, evidence string) {
	isOlder := start < p.start
	isKnown := start == p.start && !p.awaitsStart
	mayBeOfOld := start == p.start && !readNow
	if start == 0 || isOlder || isKnown || mayBeOfOld {
		return p, ""
	}
	next = new(*p)
	next.awaitsStart = false
	hasChanged := p.start != 0 && start > p.start
	if hasChanged && !p.awaitsStart { // otherwise RecordConnection has added this process
		next.addProcess(p.fateBeforeNewStart())
		evidence = evidenceStart
	}
	next.start = start
	return next, evidence
}

// fateBeforeNewStart is the fate of the newest process when a new start time shows a process after it. The process is Gone, unless it was
// only suspected, from a new engine id, so that the process before it is Doubted. Then the id may be that of the process with the new start
// time, which would be the suspected one, so it is not Gone for certain.
func (p *Processes) fateBeforeNewStart() Fate {
	if n := len(p.fates); n > 1 && p.fates[n-2] == Doubted {
		return Doubted
	}
	return Gone
}

// RecordStartRead records a start time that was requested at the time asked and has just been read. If the request was sent before
// a connection showed the newest process, the answer may be that of the process before. It is then ignored, because the start time of the
// newest process would otherwise look like that of yet another one.
//
// The answer may also end doubts. A doubt is the suspicion, raised by a new engine id in a hand-off, that a new process has replaced the
// known ones (Doubted). If the request was sent after the last doubt arose, the start time shows which of these processes runs.
func (p *Processes) RecordStartRead(start float64, asked time.Time) (next *Processes, evidence string) {
	// The known start time may be that of the old process, and so may the first one ever. A later one is that of a new process, and
	// RecordStart ignores an earlier one.
	mayBeOfOld := p.start == 0 || start == p.start
	if asked.Before(p.newSince) && mayBeOfOld {
		return p, ""
	}
	const readNow = true // even an unchanged time is news: the process that accepts connections has it
	next, evidence = p.RecordStart(start, readNow)
	isOfPresent := start != 0 && start == next.start // it was neither unknown nor older than the known one
	if isOfPresent && asked.After(next.doubtSince) {
		next = next.withoutDoubts(start)
	}
	return next, evidence
}

// withoutDoubts returns the state after the present process has shown its start time. This ends doubts about it: a process is Doubted if a
// new engine id in a hand-off made it look as if another one had replaced it. Each engine id has the start time that was known when a
// hand-off last named it. So an id with the start time of the present process belongs to this process, which has run since the id first
// came (firstProcess). Then all numbers from firstProcess on are this one process, and become Known.
//
// For example, process 1 is Doubted because a new id made process 2 look like its successor. If the id of process 1 has the present start
// time, both are one process, and 1 is Known again.
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
	index := slices.IndexFunc(p.engineIDs[candidate].ids, func(x engineID) bool { return x.id == id })
	if isNew := index < 0; isNew {
		return p.recordNewID(process, candidate, id, now)
	}
	next, maker = p.recordKnownID(process, candidate, index)
	return next, maker, ""
}

// recordNewID is RecordHandoff for an engine id that no hand-off of the candidate has named before. process was the newest process when the
// probe was sent. maker is the process that has this id, and so has made the hand-off. If the newest process has used another id before, a
// new process seems to have replaced it, because each process has one id. It gets the next number, and evidence says what shows it. If
// several engines share the address, or if the id is the first one of the candidate, a new id shows nothing, and maker is process.
func (p *Processes) recordNewID(process int, candidate, id string, now time.Time) (next *Processes, maker int, evidence string) {
	known := p.engineIDs[candidate] // the ids that the candidate's hand-offs have named so far
	newestID := len(known.ids) - 1
	entry := engineID{id: id, firstProcess: process, lastProcess: process, start: p.start}
	const added = -1 // not in the place of a known id
	switch {
	case known.shared: // several engines share the address, so ids show no restart, and new ones are not kept
		return p, process, ""
	case len(known.ids) == mostEngineIDs: // so many ids do not come from restarts: several engines share the address
		known.shared = true
		return p.withEngineIDs(candidate, known), process, ""
	case newestID < 0: // the first id of this candidate
		return p.withEngineIDs(candidate, known.with(added, entry)), process, ""
	}
	// The id belongs to the newest process, unless that process has shown another id. Then it belongs to one that was not noticed yet.
	maker = p.Newest()
	suspectNew := known.ids[newestID].lastProcess == maker
	if suspectNew {
		maker++ // the number that addSuspected gives the new process below
	}
	entry.firstProcess, entry.lastProcess = maker, maker
	next = p.withEngineIDs(candidate, known.with(added, entry))
	if suspectNew {
		next.addSuspected(now)
		evidence = evidenceEngineID
	}
	return next, maker, evidence
}

// recordKnownID is RecordHandoff for an engine id that an earlier hand-off of the candidate has named: the one at index among those ids.
// maker is the process that made the hand-off: the newest process when the probe was sent (process), or the first one that is known to use
// the id, if that is a later one.
//
// If the id is not the newest one of the candidate, it matters when the probe was sent. If that was before the newer id came, the older
// process may have answered, and nothing is learned. If it was later, a restart cannot explain the older id, because a restarted engine
// never has an old id again. So two engines share the address, and ids show no restart from now on.
func (p *Processes) recordKnownID(process int, candidate string, index int) (next *Processes, maker int) {
	known := p.engineIDs[candidate]
	newestID := len(known.ids) - 1
	entry := known.ids[index]
	entry.start = p.start // the start time that is known now; withoutDoubts finds by it the ids of the process that runs
	maker = process
	switch {
	case known.shared: // ids show no restart
	case index == newestID: // the id of the newest process, which the probe may have reached before the proxy knew this process
		// It is not lastProcess: with an id that is configured, or if the engine has dropped its KV, what was made before is gone.
		maker = max(process, entry.firstProcess)
		entry.lastProcess = max(maker, entry.lastProcess)
	case process < known.ids[newestID].lastProcess: // an older id, and the probe was sent before the newer id came
		return p, maker
	default: // an older id, and the probe was sent after the newer id came
		known = known.with(index, entry)
		known.shared = true
		next = p.withEngineIDs(candidate, known)
		return next.knownFrom(entry.firstProcess), maker // a newer id had made these processes look replaced, and they are not
	}
	if entry == known.ids[index] {
		return p, maker
	}
	return p.withEngineIDs(candidate, known.with(index, entry)), maker
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

// withEngineIDs returns the state with other engine ids of a candidate.
func (p *Processes) withEngineIDs(candidate string, ids engineIDs) *Processes {
	next := new(*p)
	next.engineIDs = maps.Clone(p.engineIDs) // p keeps its own map
	if next.engineIDs == nil {
		next.engineIDs = map[string]engineIDs{}
	}
	next.engineIDs[candidate] = ids
	return next
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

// knownFrom returns the state in which a process and all later processes are Known, and no longer Doubted: no other process has replaced
// them after all.
func (p *Processes) knownFrom(process int) *Processes {
	from := max(0, process-p.first)                                        // index in fates; processes before first stay Gone
	if from >= len(p.fates) || !slices.Contains(p.fates[from:], Doubted) { // all of them are Known already
		return p
	}
	next := new(*p)
	next.fates = slices.Clone(p.fates)
	clear(next.fates[from:]) // sets them to Known, the zero value
	return next
}
