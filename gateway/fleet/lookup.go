package fleet

import (
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Lookup finds a model's route. known is false while no engine has told which
// models it serves, when an unknown name proves nothing. Of one that no engine has told, the route says what engines there are.
func (f *Fleet) Lookup(model string) (r Route, ok, known bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if r, ok = f.routes[model]; !ok {
		r.Alone = len(f.instances) > 0
		for _, in := range f.instances {
			r.Alone = r.Alone && in.role == Aggregated
		}
	}
	return r, ok, len(f.routes) > 0
}

// Models are the names that some healthy engine serves.
func (f *Fleet) Models() []Route {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var list []Route
	for _, r := range f.routes {
		if (r.Prefill || r.Decode) && !r.Half {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b Route) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Sole is the base model that all engines have, those that are down included; empty: there are several, or none is known.
func (f *Fleet) Sole() (name string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, r := range f.routes {
		if name != "" && r.Board != name {
			return ""
		}
		name = r.Board
	}
	return name
}

// forgetRanks drops the ranks of engines that are gone for long, for in a cluster
// that rolls they come under new names for ever. Their numbers stay theirs. It is
// called with f.mu held.
func (f *Fleet) forgetRanks(now time.Time) {
	for id, r := range f.ranks {
		switch {
		case f.instances[r.Instance] != nil:
			r.gone = time.Time{}
		case r.gone.IsZero():
			r.gone = now
		case now.Sub(r.gone) > rankMemory:
			delete(f.ranks, id)
		}
	}
}

// Rank finds where a worker is. Assignments name only workers the fleet has
// published.
func (f *Fleet) Rank(worker int32) *Rank {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.ranks[worker]
}

// Named finds the decode rank of a name, and the board that it serves; nil: there is none that serves one.
func (f *Fleet) Named(name string) (r *Rank, board string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	id, ok := f.ids[name]
	if r = f.ranks[id]; !ok || r == nil {
		return nil, ""
	}
	in := f.instances[r.Instance]
	if in == nil || len(in.status.Models) == 0 {
		return nil, ""
	}
	return r, BoardIn(in.board(), f.abroad(in))
}

// RankOf finds the decode rank of a name that serves a board and lists a model.
func (f *Fleet) RankOf(name, board, model string) (worker int32, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	id, ok := f.ids[name]
	r := f.ranks[id]
	if !ok || r == nil {
		return 0, false
	}
	in := f.instances[r.Instance]
	return id, in != nil && in.has(model) && boardOf(in.status.Models) == board
}

// Beside adds to list the workers that may fail as one of them did, itself included: those behind the same API server. host:
// those on the same host, too, while another host has a rank that takes requests. A host with a broken driver or disk has
// many ranks, all of them free because they fail at once.
func (f *Fleet) Beside(worker int32, host bool, list []int32) []int32 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	one := f.ranks[worker]
	if one == nil { // gone, and nobody is sent there
		return list
	}
	same := func(r *Rank) bool { return r.Instance == one.Instance }
	besides := same
	if at := one.host(); host && at != "" {
		near := func(r *Rank) bool { return same(r) || r.host() == at }
		for id, r := range f.ranks {
			if r.up && r.Board == one.Board && !near(r) && !slices.Contains(list, id) {
				besides = near
				break
			}
		}
	}
	for id, r := range f.ranks {
		if besides(r) && !slices.Contains(list, id) {
			list = append(list, id)
		}
	}
	return list
}

// Around returns the ranks that may refuse requests when one of them does, because one limit or one proxy stands in front of them all:
// those of its group, or if no rank of another group takes requests, those of its engine. It returns none if no rank takes requests
// but these. others says that one does that is not in list either.
func (f *Fleet) Around(worker int32, list []int32) (around []int32, others bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	one := f.ranks[worker]
	if one == nil { // gone, and nobody is sent there
		return nil, false
	}
	for _, beside := range [...]func(*Rank) bool{
		func(r *Rank) bool { return r.Group == one.Group },
		func(r *Rank) bool { return r.Instance == one.Instance },
	} {
		apart := false
		around = around[:0]
		for id, r := range f.ranks {
			switch {
			case r.Board != one.Board:
			case beside(r):
				around = append(around, id)
			case r.up:
				apart, others = true, others || !slices.Contains(list, id)
			}
		}
		if apart {
			return around, others
		}
	}
	return nil, false
}

// host is where its engine runs; empty: nobody knows.
func (r *Rank) host() string {
	if r.Target == nil || r.Target.URL == nil {
		return ""
	}
	return r.Target.URL.Hostname()
}

// DownSince tells whether an engine is down, or was down after a moment.
func (f *Fleet) DownSince(key string, at time.Time) bool {
	s := f.host.Monitor.Status(key)
	return !s.Up || s.Since.After(at)
}

// RejectionFrees tells whether a decode engine that answers a request with an
// error status is known to tell the prefiller to free the hand-off: the profile
// says so, or its version does it.
func (f *Fleet) RejectionFrees(r *Rank) bool {
	if says := r.Profile.RejectReleases; says != nil {
		return *says
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	in := f.instances[r.Instance]
	return in != nil && in.reaches(rejectReleasesMinor, false)
}

// rejectReleasesMinor is the first 0.x of vLLM that notifies the prefiller of a
// rejected decode request (vLLM PR 41269, May 2026).
const rejectReleasesMinor = 25

// NamesRequests tells whether hand-offs of an engine's version name the request
// that made them. A hand-off of such a version that lacks the name is faulty, and a
// decode engine would wait for its KV for ever.
func (f *Fleet) NamesRequests(c prefill.Candidate) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	in := f.instances[c.Instance]
	return in != nil && c.Profile.Connector == mooncake.AscendMooncakeV1 && in.reaches(requestIDsMinor, false)
}

// requestIDsMinor is the first 0.x of vllm-ascend, which reports the version of
// vLLM that it is made for, whose hand-offs have a remote_request_id.
const requestIDsMinor = 14

// GaveBack says that a decode engine gave an answer back. If its profile says that it never does, responses and
// messages that it gave back were taken for whole. It gets none of them any more, until it starts anew, which its metrics tell.
func (f *Fleet) GaveBack(decode string) {
	f.mu.Lock()
	in := f.instances[decode]
	wrong := in != nil && in.role == Decode && in.profile.Ascend() && !in.mayGiveBack()
	if wrong {
		in.gaveBack = new(in.status.StartTime)
	}
	f.mu.Unlock()
	if !wrong {
		return
	}
	f.host.Log.Error("ALARM: a decode engine gave a request back, although its profile has gives_back: false; its responses and messages may have been "+
		"cut short, and it gets none any more; start the engine without recompute_scheduler_enable, or remove gives_back",
		zap.String("decode", in.id))
	f.Publish()
}

// Up counts the engines that take requests now, and of which tier and dispatcher know it.
func (f *Fleet) Up() (prefills, decodes int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.ready.prefills, f.ready.decodes
}

// Count counts the engines that there are.
func (f *Fleet) Count() (prefills, decodes int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	t := f.tally(func(*instance) bool { return true })
	return t.prefills, t.decodes
}

// Kind is a role as people read it in what they lack: engines that prefill and decode may stand in for one that has it.
func (f *Fleet) Kind(role string) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	both, apart := false, len(f.instances) == 0
	for _, in := range f.instances {
		both, apart = both || in.role == Aggregated, apart || in.role != Aggregated
	}
	switch {
	case !both:
		return role
	case !apart:
		return Aggregated
	}
	return role + " or " + Aggregated
}

// tally is called with f.mu held.
func (f *Fleet) tally(of func(*instance) bool) (t tally) {
	for _, in := range f.instances {
		switch {
		case !of(in):
		case in.role == Aggregated:
			t.prefills, t.decodes = t.prefills+1, t.decodes+1
		case in.role == Prefill:
			t.prefills++
		default:
			t.decodes++
		}
	}
	return t
}

// AnyPrefill is a prefill engine that serves a model, nil if none is up.
func (f *Fleet) AnyPrefill(model string) *engine.Target {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++ // the next time another
	for i := range f.order {
		in := f.instances[f.order[(i+f.asked)%len(f.order)]]
		if in.role != Decode && in.serving && in.has(model) {
			return in.target(-1)
		}
	}
	return nil
}

// partners are engines of the other side that serve. An engine that prefills and decodes has none.
func (f *Fleet) partners(role string) (list []config.Engine) {
	other := map[string]string{Prefill: Decode, Decode: Prefill}[role]
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, key := range f.order {
		if in := f.instances[key]; in.role == other && in.serving && f.accepts(in, -1) {
			list = append(list, in.conf)
		}
	}
	return list
}

// Whole is an engine that may serve a request of a model alone.
type Whole struct {
	Instance string // the monitor's id
	ID       string // host:port
	Group    string // of ranks that prefill and decode; empty: it has none
	Target   *engine.Target
	Traffic  *engine.Traffic
}

// Wholes returns the engines of this region, of either side, that serve a model now. computes
// says that the model runs for the request; paired says that all engines of the model work in
// pairs, so that no engine may serve such a request, now or later.
func (f *Fleet) Wholes(model string, computes bool) (list []Whole, paired bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	known, may := false, false
	for _, key := range f.order {
		in := f.instances[key]
		if !in.has(model) || f.abroad(in) != "" {
			continue
		}
		known = true
		if computes && !f.computesAlone(in, model) {
			continue
		}
		may = true
		if in.serving && !in.paused && f.accepts(in, -1) {
			w := Whole{Instance: key, ID: in.id, Target: in.target(-1), Traffic: f.host.Monitor.Traffic(key)}
			if in.role == Aggregated {
				w.Group = f.groupID(in)
			}
			list = append(list, w)
		}
	}
	return list, known && !may
}

// computesAlone says whether an engine may compute a request of a model without another one. An
// engine that is half of a pair may not, unless its profile says so: it was started for its
// half, and some wait for their counterpart. One of SGLang never may: its server ends when its
// DP controller gets a request without a room. It is called with f.mu held.
func (f *Fleet) computesAlone(in *instance, model string) bool {
	switch {
	case in.role == Aggregated:
		return true
	case in.profile.Connector == mooncake.SGLang:
		return false
	case in.profile.PassThrough:
		return true
	case in.role == Prefill:
		return false
	}
	for _, other := range f.instances {
		if other.role == Prefill && other.has(model) {
			return false
		}
	}
	return true
}
