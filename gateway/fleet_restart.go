package gateway

import (
	"errors"
	"slices"
	"syscall"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/prefill"
)

// An engine whose process starts again at its address has lost the KV that the
// process before held. A decode engine that still asks there for this KV would pull
// blocks of another prompt, or wait. So hand-offs remember
// which of the processes at an address made them.

// birth is what made a hand-off: an engine, and one of its processes.
type birth struct {
	incarnation string // of the engine, where a source of discovery tells
	key         string // where it is, as the fleet names it
	process     int
}

// processes counts the processes that were seen at an engine's address. Three
// signs tell of a new one: its start time, the engine id in its hand-offs, and a
// refused connection, because then no process listens there.
type processes struct {
	number int
	start  float64 // in Unix seconds, as its metrics say; 0: not told
	ahead  bool    // another sign told of the process whose start time is not read yet
	away   bool    // the last connection was refused
	names  map[string]name
}

// name is the engine id that a candidate's hand-offs had last.
type name struct {
	id      string
	process int      // the process that was known to have it
	before  []string // other ids
	several bool     // ids come back: several engines answer there, so that they tell of no restart
}

// mostNames bounds the ids that are remembered of one candidate.
const mostNames = 16

// born names the engine and the process that have an address now.
func (f *fleet) born(key string) birth {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[key]; in != nil {
		return birth{in.incarnation, key, in.processes.number}
	}
	return birth{key: key}
}

// made is the birth of a hand-off with that engine id, from a candidate that was
// born when its probe was sent.
func (f *fleet) made(b birth, c prefill.Candidate, id string) birth {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.instances[b.key]
	if in == nil || in.incarnation != b.incarnation || id == "" {
		return b
	}
	p := &in.processes
	n := p.names[c.ID]
	switch {
	case n.several:
		return b
	case n.id == id: // perhaps the probe met a process that was not known yet
		b.process = max(b.process, n.process)
		n.process = b.process
	case n.id == "":
		n.id, n.process = id, b.process
	case slices.Contains(n.before, id) || len(n.before) == mostNames:
		n = name{several: true}
	default:
		if n.process == p.number {
			f.another(in, "its hand-offs name another engine")
			p.ahead = true
		}
		n = name{id: id, process: p.number, before: append(n.before, n.id)}
		b.process = p.number
	}
	if p.names == nil {
		p.names = map[string]name{}
	}
	p.names[c.ID] = n
	return b
}

// started takes the start time of the process at a prefill engine's address. What
// is older than the one known was read before. read: it was read just now, so
// that the same time as before means that no other process came.
func (f *fleet) started(key string, start float64, read bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.instances[key]
	if in == nil || in.role != rolePrefill || start == 0 {
		return
	}
	switch p := &in.processes; {
	case start > p.start:
		if p.start != 0 && !p.ahead {
			f.another(in, "its process has another start time")
		}
		p.start, p.ahead = start, false
	case start == p.start && read:
		p.ahead = false
	}
}

// away notes whether the last connection to a prefill engine was refused. It is
// called with f.mu held.
func (f *fleet) away(in *instance, s engine.Status) {
	p := &in.processes
	refused := errors.Is(s.Err, syscall.ECONNREFUSED)
	if refused && !p.away && in.role == rolePrefill {
		f.another(in, "a connection was refused")
		p.ahead = true
	}
	p.away = refused
}

// another notes a new process. It is called with f.mu held.
func (f *fleet) another(in *instance, sign string) {
	in.processes.number++
	f.gw.exchanges.forget(in.id)
	f.gw.log.Warn("prefill engine is another process than before: prompts whose KV no decode engine has fetched are prefilled again",
		zap.String("engine", in.key()), zap.String("sign", sign))
}

// outlived says whether the process that made a hand-off is gone. The process that
// has its address now would be asked for blocks that it never made.
func (g *Gateway) outlived(h *handoff) bool {
	g.fleet.mu.RLock()
	defer g.fleet.mu.RUnlock()
	if _, dead := g.fleet.dead[h.born.incarnation]; dead && h.born.incarnation != "" {
		return true
	}
	in := g.fleet.instances[h.born.key]
	return in != nil && in.incarnation == h.born.incarnation && in.processes.number != h.born.process
}

var errOutlived = errors.New("the prefill engine's process that made the hand-off is gone, and its KV with it")
