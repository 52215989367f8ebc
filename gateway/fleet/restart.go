package fleet

import (
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/fleet/roster"
	"evenkeel/prefill"
)

// Birth is what made a hand-off.
type Birth = roster.Birth

// Born names the engine and the process that have an address now.
func (f *Fleet) Born(key string) Birth {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[key]; in != nil {
		return Birth{Incarnation: in.incarnation, Key: key, Process: in.processes.Newest()}
	}
	return Birth{Key: key}
}

// Made is the birth of a hand-off with that engine id, from a candidate that was
// born when its probe was sent.
func (f *Fleet) Made(b Birth, c prefill.Candidate, id string) Birth {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.instances[b.Key]
	if in == nil || in.incarnation != b.Incarnation || id == "" {
		return b
	}
	next, by, sign := in.processes.Made(b.Process, c.ID, id, time.Now())
	if in.processes, b.Process = next, by; sign != "" {
		f.forgetExchanges(in.id)
		f.host.Log.Warn("a prefill engine may have restarted; prompts whose KV no decode engine has fetched yet are prefilled again, unless the earlier process answers once more",
			zap.String("engine", in.key()), zap.String("sign", sign))
	}
	return b
}

// lives takes a start time of a prefill engine that was asked for then and read just now.
func (f *Fleet) lives(key string, start float64, asked time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if in := f.instances[key]; in != nil && in.role == Prefill {
		f.another(in)(in.processes.Lives(start, asked))
	}
}

// another keeps what was learned of an engine's processes. A sign tells of a new one. It is called with f.mu held.
func (f *Fleet) another(in *instance) func(next *roster.Processes, sign string) {
	return func(next *roster.Processes, sign string) {
		if in.processes = next; sign == "" {
			return
		}
		f.forgetExchanges(in.id)
		f.host.Log.Warn("a prefill engine has restarted; prompts whose KV no decode engine has fetched yet are prefilled again",
			zap.String("engine", in.key()), zap.String("sign", sign))
	}
}

// Outlived says whether the process that made a hand-off is gone, or may be: sure
// tells which. The process that has its address now would be asked for blocks that
// it never made.
func (f *Fleet) Outlived(b Birth) (gone, sure bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if _, dead := f.dead[b.Incarnation]; dead && b.Incarnation != "" {
		return true, true
	}
	in := f.instances[b.Key]
	if in == nil || in.incarnation != b.Incarnation {
		return false, false
	}
	fate := in.processes.Fate(b.Process)
	return fate != roster.Known, fate == roster.Gone
}
