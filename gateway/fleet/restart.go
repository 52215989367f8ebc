package fleet

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/prefill"
)

// An engine whose process starts again at its address has lost the KV that the
// process before held. A decode engine that still asks there for this KV would pull
// blocks of another prompt, or wait. So hand-offs remember
// which of the processes at an address made them.

// Birth is what made a hand-off: an engine, and one of its processes.
type Birth struct {
	incarnation string // of the engine, where a source of discovery tells
	key         string // where it is, as the fleet names it
	process     int
}

// mostNames bounds the ids that are remembered of one candidate.
const mostNames = 16

// Born names the engine and the process that have an address now.
func (f *Fleet) Born(key string) Birth {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[key]; in != nil {
		return Birth{in.incarnation, key, in.processes.number}
	}
	return Birth{key: key}
}

// A sign is what an engine id says of the process that made a hand-off.
type sign int

const (
	nothing   sign = iota // several engines answer at the address
	another               // a process that was not known
	tooMany               // there are more ids than are remembered, so it is not one process after another
	theNewest             // the newest process, which the probe perhaps met before it was known
	there                 // an older process, asked after a newer one was seen: so it is there still
	before                // an older process, asked before a newer one was seen
)

// tells says what an id means that comes with a hand-off of a process, and where it stands among the ids; -1: nowhere.
func (n *names) tells(id string, process int) (at int, is sign) {
	newest := len(n.ids) - 1
	at = slices.IndexFunc(n.ids, func(x name) bool { return x.id == id })
	switch {
	case n.several:
		return at, nothing
	case at < 0 && len(n.ids) == mostNames:
		return at, tooMany
	case at < 0:
		return at, another
	case at == newest:
		return at, theNewest
	case process >= n.ids[newest].last:
		return at, there
	}
	return at, before
}

// Made is the birth of a hand-off with that engine id, from a candidate that was
// born when its probe was sent.
func (f *Fleet) Made(b Birth, c prefill.Candidate, id string) Birth {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.instances[b.key]
	if in == nil || in.incarnation != b.incarnation || id == "" {
		return b
	}
	id = withoutRank(id)
	p := &in.processes
	n := p.names[c.ID]
	if n == nil {
		if p.names == nil {
			p.names = map[string]*names{}
		}
		n = &names{}
		p.names[c.ID] = n
	}
	at, is := n.tells(id, b.process)
	switch is {
	case nothing:
		if at >= 0 {
			n.ids[at].start = p.start
		}
	case tooMany:
		n.several = true
	case another:
		if last := len(n.ids) - 1; last >= 0 {
			if n.ids[last].last == p.number {
				f.doubt(in)
			}
			b.process = p.number
		}
		n.ids = append(n.ids, name{id: id, first: b.process, last: b.process, start: p.start})
	case theNewest:
		x := &n.ids[at]
		b.process = max(b.process, x.last)
		x.last, x.start = b.process, p.start
	case there:
		n.several = true
		n.ids[at].start = p.start
		p.livesSince(n.ids[at].first)
	case before:
	}
	return b
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

// livesSince ends the doubt about the processes from that one on.
func (p *processes) livesSince(process int) {
	p.doubted = max(p.gone, min(p.doubted, process))
}

// started takes the start time of the process at a prefill engine's address. What
// is older than the one known was read before. read: it was read just now, so
// that the same time as before means that no other process came.
func (f *Fleet) started(key string, start float64, read bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.instances[key]
	if in == nil || in.role != Prefill || start == 0 {
		return
	}
	switch p := &in.processes; {
	case start > p.start:
		if p.start != 0 && !p.ahead {
			unsure := p.doubted == p.number && p.doubted > p.gone // whether the newest id is of this process, or of the one before
			f.another(in, "its process has another start time")
			if unsure {
				p.gone--
			}
		}
		p.start, p.ahead = start, false
	case start == p.start && read:
		p.ahead = false
	}
}

// lives takes a start time that was asked for then and read just now. The ids that
// were seen after the same time was read before are those of the process that is there.
func (f *Fleet) lives(key string, start float64, asked time.Time) {
	f.started(key, start, true)
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.instances[key]
	if in == nil || start == 0 || start != in.processes.start || !asked.After(in.processes.since) {
		return
	}
	for _, n := range in.processes.names {
		for _, x := range n.ids {
			if x.start == start {
				in.processes.livesSince(x.first)
			}
		}
	}
}

// away notes whether the last connection to a prefill engine was refused, and whether its name
// leads to another host. in has the status before s. It is called with f.mu held.
func (f *Fleet) away(in *instance, s engine.Status) {
	p, sign := &in.processes, ""
	refused := errors.Is(s.Err, syscall.ECONNREFUSED)
	switch {
	case s.Moved != in.status.Moved && !s.Moved.At.IsZero():
		sign = "its name has another address"
	case refused && !p.away:
		sign = "a connection was refused"
	}
	if sign != "" && in.role == Prefill {
		f.another(in, sign)
		p.ahead = true
	}
	p.away = refused
}

// another notes a new process. It is called with f.mu held.
func (f *Fleet) another(in *instance, sign string) {
	p := &in.processes
	p.number++
	p.gone, p.doubted = p.number, p.number
	f.forgetExchanges(in.id)
	f.host.Log.Warn("a prefill engine has restarted; prompts whose KV no decode engine has fetched yet are prefilled again",
		zap.String("engine", in.key()), zap.String("sign", sign))
}

// doubt notes a process that nothing tells of but the engine id of a hand-off. It is
// called with f.mu held.
func (f *Fleet) doubt(in *instance) {
	p := &in.processes
	p.number++
	p.doubted, p.since = p.number, time.Now()
	f.forgetExchanges(in.id)
	f.host.Log.Warn("a prefill engine may have restarted; prompts whose KV no decode engine has fetched yet are prefilled again, unless the earlier process answers once more",
		zap.String("engine", in.key()), zap.String("sign", "its hand-offs name another engine"))
}

// Outlived says whether the process that made a hand-off is gone, or may be: sure
// tells which. The process that has its address now would be asked for blocks that
// it never made.
func (f *Fleet) Outlived(b Birth) (gone, sure bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if _, dead := f.dead[b.incarnation]; dead && b.incarnation != "" {
		return true, true
	}
	in := f.instances[b.key]
	if in == nil || in.incarnation != b.incarnation {
		return false, false
	}
	return b.process < in.processes.doubted, b.process < in.processes.gone
}
