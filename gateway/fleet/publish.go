package fleet

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

// Publish derives what prefill tier, dispatcher and API need from the engines'
// present state. The tier and the dispatcher hear first: a request that the API lets
// in finds there what it was let in for.
func (f *Fleet) Publish() {
	f.publishing.Lock()
	defer f.publishing.Unlock()
	f.mu.Lock()
	routes := map[string]Route{}
	var candidates []prefill.Candidate
	var workers []board.Worker
	var locals []local.Rank
	f.appraise(time.Now())
	f.breaks()
	regions, groups := map[string]*reach{}, map[string]*reach{} // of ranks that decode, of ranks that do both
	for _, r := range f.ranks {                                 // also of an engine that is gone, or whose models are not known any more
		r.up = false
	}
	for _, k := range f.order {
		in := f.instances[k]
		f.name(in)
		f.route(routes, in, (in.serving || in.status.Late) && f.accepts(in, -1))
		for _, r := range ranksOf(in) {
			lost := in.status.Lost[max(0, r)] != ""
			up := in.serving && !in.paused && !lost && f.accepts(in, r)
			if in.role == Prefill {
				candidates = append(candidates, f.candidate(in, r, up))
			} else if len(in.status.Models) == 0 { // its board is unknown
				if in.role == Decode {
					reachIn(regions, f.abroad(in)).unknown = true
				}
			} else {
				admits := f.Admission.Admits(f.scopeOf(in)) && !f.broken[in.together()]
				up = up && admits
				w := f.worker(in, r, up)
				w.Down = w.Down || lost
				w.Awaited = in.status.Halted() && in.serving && !lost && admits && f.accepts(in, r)
				workers = append(workers, w)
				if w.Mixed {
					reachIn(groups, f.groupID(in)).add(in.lists, up || w.Awaited)
				} else {
					reachIn(regions, f.abroad(in)).add(in.lists, up || w.Awaited)
				}
				if computes := in.profile.AllowLocalPrefill || w.Mixed; computes || in.profile.PullsLacking() {
					l := local.Rank{ID: w.ID, Name: w.Name, Model: w.Model, Engine: w.Engine, Capacity: w.Capacity, Up: up, Computes: computes}
					if w.Mixed {
						l.Events = f.eventsOf(in, r, f.host.Settings().Prefill.KVEvents)
					}
					locals = append(locals, l)
				}
				if w.Mixed {
					candidates = f.joins(candidates, in, up, w.Awaited)
				}
			}
		}
	}
	f.halves(routes)
	onlyWhereListed(candidates, regions, groups)
	onlyWhereDecoded(candidates, workers)
	prefer(f.host.Settings().Engines.Prefer, candidates, workers)
	f.desert(candidates)
	ready := f.tally(func(in *instance) bool { return in.serving && f.accepts(in, -1) && len(in.status.Models) > 0 })
	f.forgetRanks(time.Now())
	f.mu.Unlock()
	f.host.Publish(candidates, locals, workers)
	f.mu.Lock()
	f.routes, f.ready = routes, ready
	f.mu.Unlock()
	f.rescue()
}

// onlyWhereDecoded takes out of service the prefillers of other regions in
// whose region nothing decodes: their KV could go nowhere. Where all decode ranks
// are only awaited, prompts wait before their prefill, because KV is not held for so long.
func onlyWhereDecoded(candidates []prefill.Candidate, workers []board.Worker) {
	for i := range candidates {
		c := &candidates[i]
		if !c.Live && !c.Late || c.Mixed {
			continue
		}
		up, awaited := false, false
		for _, w := range workers {
			if base, there := strings.CutSuffix(w.Model, BoardIn("", c.Region)); there && slices.Contains(c.Models, base) {
				up, awaited = up || w.Up, awaited || w.Awaited
			}
		}
		switch {
		case c.Region != "":
			c.Live, c.Late = up && c.Live, up && c.Late || !up && awaited
		case awaited && !up && !c.Profile.Early():
			c.Live, c.Late = false, true
		}
	}
}

// joins lists the group of a rank that prefills and decodes as one candidate: it takes a request when a rank of it does, and
// requests wait for it when a rank is held.
func (f *Fleet) joins(candidates []prefill.Candidate, in *instance, up, held bool) []prefill.Candidate {
	id := f.groupID(in)
	at := slices.IndexFunc(candidates, func(c prefill.Candidate) bool { return c.ID == id })
	if at < 0 {
		at = len(candidates)
		candidates = append(candidates, prefill.Candidate{
			ID: id, Instance: id, Target: in.target(-1), Profile: in.profile, Hardware: in.conf.Profile, Region: f.abroad(in), Board: f.boardOf(in), Mixed: true,
		})
	}
	c := &candidates[at]
	c.Live, c.Late = c.Live || up, c.Late || held
	for _, m := range in.status.Models {
		if !slices.Contains(c.Models, m.ID) {
			c.Models = append(c.Models, m.ID)
		}
	}
	return candidates
}

// groupID names the candidate that the group of an engine is.
func (f *Fleet) groupID(in *instance) string { return in.conf.Group + " of " + f.boardOf(in) }

// together names the group whose ranks step together with those of an engine that prefills and decodes; empty: it has none.
func (i *instance) together() string {
	if i.role != Aggregated || i.conf.Barrier != config.BarrierDP {
		return ""
	}
	return i.conf.Region + "/" + i.conf.Group
}

// breaks finds the groups of which an engine has served and is down now. The other engines of such a group say that
// they are well, and their ranks wait in vain for its ranks. They do not wait for one that was taken out of the group.
func (f *Fleet) breaks() {
	now := map[string]bool{}
	for _, k := range f.order {
		in := f.instances[k]
		if errors.Is(in.status.Err, engine.ErrRetired) { // nobody waits for it, even once its process has ended
			in.standing.served = false
		}
		group := in.together()
		if group == "" || !in.standing.served || in.status.Up && (in.status.Halted() || !in.status.Wedged) {
			continue
		}
		if now[group] = true; !f.broken[group] {
			f.host.Log.Warn("an engine is down; the other ranks of its group get no requests until it is back, because the ranks of a group step together; if these ranks do not, give them groups of their own, or write barrier: none",
				zap.String("engine", in.id), zap.String("group", in.conf.Group))
		}
	}
	f.broken = now
}

// prefer says which candidates come second where a model has engines of both kinds. Prefill engines whose KV no rank
// would fetch always do.
func prefer(kind string, candidates []prefill.Candidate, workers []board.Worker) {
	mixed := func(c prefill.Candidate) bool { return c.Mixed }
	if !slices.ContainsFunc(candidates, mixed) {
		return
	}
	decodes := map[string]bool{}
	for i := range workers {
		decodes[workers[i].Model] = decodes[workers[i].Model] || workers[i].Up
	}
	serves := func(c *prefill.Candidate) bool { return c.Live && (c.Mixed || decodes[c.Board]) }
	first := func(model string) bool { // some engine of the preferred kind does
		return slices.ContainsFunc(candidates, func(c prefill.Candidate) bool {
			return c.Mixed == (kind == config.PreferAggregated) && serves(&c) && slices.Contains(c.Models, model)
		})
	}
	for i := range candidates {
		c := &candidates[i]
		preferred := c.Mixed == (kind == config.PreferAggregated)
		c.Idle = !serves(c)
		c.Second = c.Idle || !preferred && slices.ContainsFunc(c.Models, first)
	}
}

func (f *Fleet) candidate(in *instance, r int, up bool) prefill.Candidate {
	c := prefill.Candidate{
		ID: in.id + "/" + strconv.Itoa(max(0, r)), Instance: in.key(), Target: in.target(r), Profile: in.profile,
		Hardware: in.conf.Profile, CapacityTokens: cmp.Or(in.profile.KVTokensPerRank, capacityOf(in, r)), Region: f.abroad(in), Live: up, Limit: in.limit(slowProbes),
		Late: (in.status.Late && !in.paused || in.status.Halted()) && in.status.Lost[max(0, r)] == "" && f.accepts(in, r),
	}
	_, c.Decodes = f.instances[Decode+" "+in.id]
	for _, m := range in.status.Models {
		c.Models = append(c.Models, m.ID)
	}
	if len(c.Models) > 0 {
		c.Board = BoardIn(boardOf(in.status.Models), c.Region)
		c.Events = f.eventsOf(in, r, f.host.Settings().Prefill.KVEvents)
	}
	return c
}

// worker is called with f.mu held.
func (f *Fleet) worker(in *instance, r int, up bool) board.Worker {
	t := in.target(r)
	id := f.number(in, t.ID)
	traffic := f.host.Monitor.Traffic(in.key())
	rank := &Rank{
		Worker: id, Instance: in.key(), Target: t, Profile: in.profile, Traffic: traffic, Signs: traffic.Signs(t.Rank),
		Region: f.abroad(in), Board: f.boardOf(in), Context: in.context(), Scope: f.Admission.Of(f.scopeOf(in)), Pins: in.profile.Connector == mooncake.SGLang || in.reaches(pinsMinor, false),
		up: up,
	}
	if in.role == Aggregated {
		rank.Group = f.groupID(in)
	}
	f.ranks[id] = rank
	w := board.Worker{
		ID: id, Name: t.ID, Model: f.boardOf(in), Group: in.conf.Group, Barrier: in.conf.Barrier == "dp",
		Engine: in.id, Lists: in.lists, Slots: in.conf.Slots, Limit: in.limit(in.conf.Slots), Capacity: cmp.Or(in.conf.KV, capacityOf(in, r)), Cost: in.conf.Cost, Up: up,
		Strays:  !rank.Heeds(mooncake.Responses),
		Down:    !in.status.Up || in.status.Wedged && !in.status.Halted(),
		Process: math.Float64bits(in.status.StartTime), Early: in.profile.Early(), AtOnce: in.profile.Early() && in.profile.Connector == mooncake.NIXLPush,
	}
	if in.role == Aggregated {
		w.Mixed, w.Budget, w.Interval, w.Early, w.AtOnce = true, in.conf.Budget, in.conf.Interval, false, false
		if in.profile.Ascend() && w.Slots > 1 { // with enable_balance_scheduling, all ranks of vllm-ascend stop admitting while one has no free slot
			w.Slots--
		}
	} else if in.profile.Renews() {
		w.Beyond = f.host.Settings().Dispatch.Beyond
	}
	limit, others := f.Admission.Room(f.scopeOf(in), t.ID, w.Slots)
	if w.Others = others; limit > 0 && (w.Limit == 0 || limit < w.Limit) {
		w.Limit = limit
	}
	return w
}

func (f *Fleet) route(routes map[string]Route, in *instance, up bool) {
	for _, m := range in.status.Models {
		r, ok := routes[m.ID]
		if !ok {
			r = Route{Name: m.ID, Board: boardOf(in.status.Models), Alone: true, Rows: true}
		}
		r.Alone = r.Alone && in.role == Aggregated
		for ep := range r.Whole {
			r.Whole[ep] = r.Whole[ep] || up && in.role != Aggregated && !in.takesHandOff(mooncake.Endpoint(ep))
		}
		r.SGLang = r.SGLang || in.profile.Connector == mooncake.SGLang
		r.Blind = r.Blind || in.mayGiveBack() // one that is down now may be up when the request gets there
		if in.role == Decode {
			r.Rows = r.Rows && in.computesRows()
		} else {
			r.listed[0] = true
			r.Prefill = r.Prefill || up
		}
		if in.decodes() {
			r.listed[1] = true
			r.Decode = r.Decode || up
			r.Board = boardOf(in.status.Models)
			if n := in.maxLen(m); n > 0 && (r.MaxLen == 0 || n < r.MaxLen) {
				r.MaxLen = n
			}
			r.Clamps = r.Clamps || in.clamps()
		}
		routes[m.ID] = r
	}
}

// Context is that of an engine by its key.
func (f *Fleet) Context(key string) int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[key]; in != nil {
		return in.context()
	}
	return 0
}
