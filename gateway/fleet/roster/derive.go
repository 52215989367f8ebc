package roster

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/kvevents"
	"evenkeel/prefill/local"
)

// Derive returns what the rest of the proxy sees of the roster. It must be called after a Tick.
func Derive(r *Roster) *Snapshot {
	d := &deriving{r: r, regions: map[string]*reach{}, groups: map[string]*reach{}, p: &Snapshot{
		owners: r.owners, engines: make(map[string]*Engine, len(r.order)), ranks: map[int32]*Rank{}, workers: map[string]int32{},
		order: make([]*Engine, 0, len(r.order)),
		stops: maps.Clone(r.drains), pauses: maps.Clone(r.pauses), hosts: maps.Clone(r.hosts), dead: maps.Clone(r.dead),
		left:   maps.Clone(r.left),
		routes: map[string]Route{},
	}}
	p := d.p
	for id, l := range r.leftRanks {
		p.ranks[id] = d.rank(l.of, l.rank, id, Absent)
	}
	for _, k := range r.order {
		e := new(*r.engines[k])
		p.engines[k] = e
		p.order = append(p.order, e)
		d.addRoutes(e, e.state.serves() || e.state == Late)
		for _, rank := range e.Ranks() {
			state := r.stateOfRank(e, rank)
			if e.Decodes() {
				d.addDecodeRank(e, rank, state)
			} else {
				p.Candidates = append(p.Candidates, d.candidate(e, rank, state))
			}
		}
	}
	halves(p.routes, p.order)
	onlyWhereListed(p.Candidates, d.regions, d.groups)
	onlyWhereDecoded(p.Candidates, p.Workers)
	prefer(r.terms.Prefer, p.Candidates, p.Workers)
	markDeserted(p.order, p.Candidates)
	p.ready = count(p.order, func(e *Engine) bool { return e.state.serves() && len(e.Status.Models) > 0 })
	return p
}

// deriving is a Snapshot under construction.
type deriving struct {
	r               *Roster
	p               *Snapshot
	regions, groups map[string]*reach // models listed by decode-only ranks, by region; models listed by ranks that also prefill, by group
}

// addDecodeRank adds a rank that decodes. Requests can be bound to the rank (it is a worker) once its engine has named its models. These
// models are then also added to those that the ranks of its region or its group list.
func (d *deriving) addDecodeRank(e *Engine, rank int, state RankState) {
	name := e.At(rank).ID
	id := d.r.workerIDs[e.nameOf(rank)]
	d.p.workers[name] = id
	if e.board != "" {
		d.p.ranks[id] = d.rank(e, rank, id, state)
	}
	region := e.otherRegion
	if len(e.Status.Models) == 0 {
		if e.Role == Decode { // it may still list any model; an aggregated rank decodes only for its own group
			reachIn(d.regions, region).unknown = true
		}
		return
	}
	w := d.worker(e, rank, d.p.ranks[id])
	d.p.Workers = append(d.p.Workers, w)
	open := w.Up || w.Awaited
	if w.Mixed {
		reachIn(d.groups, e.groupID()).add(e.lists, open)
		d.addToGroup(e, w)
	} else {
		reachIn(d.regions, region).add(e.lists, open)
	}
	// The prefix caches of these ranks are followed, because they may compute prompts or pull only the KV that they lack.
	if computes := e.Profile.AllowLocalPrefill || w.Mixed; computes || e.Profile.PullsLacking() {
		l := local.Rank{ID: w.ID, Name: w.Name, Model: w.Model, Engine: w.Engine, Capacity: w.Capacity, Up: w.Up, Computes: computes}
		if w.Mixed {
			l.Events = d.eventsOf(e, rank)
		}
		d.p.Locals = append(d.p.Locals, l)
	}
}

// addToGroup adds a rank that prefills and decodes to its group, which is one candidate of the prefill tier. The candidate is live if one
// of the ranks takes requests, and late if requests wait for one of the ranks.
func (d *deriving) addToGroup(e *Engine, w board.Worker) {
	id := e.groupID()
	index := slices.IndexFunc(d.p.Candidates, func(c prefill.Candidate) bool { return c.ID == id })
	if index < 0 {
		index = len(d.p.Candidates)
		d.p.Candidates = append(d.p.Candidates, prefill.Candidate{
			ID: id, Instance: id, Target: e.At(-1), Profile: e.Profile, Hardware: e.Conf.Profile, Region: e.otherRegion, Board: e.board,
			Aggregated: true,
		})
	}
	c := &d.p.Candidates[index]
	c.Live = c.Live || w.Up
	c.AnswersLate = c.AnswersLate || w.Awaited
	for _, m := range e.Status.Models {
		if !slices.Contains(c.Models, m.ID) {
			c.Models = append(c.Models, m.ID)
		}
	}
}

// candidate describes a rank of a prefill engine for the prefill tier. rank is -1 for an only rank without a number. The candidate has a
// board and KV events only after its engine has named its models.
func (d *deriving) candidate(e *Engine, rank int, state RankState) prefill.Candidate {
	id := e.ID + "/" + strconv.Itoa(max(0, rank)) // an only rank counts as rank 0
	c := prefill.Candidate{
		ID: id, Instance: e.Key(), Target: e.At(rank), Profile: e.Profile,
		Hardware: e.Conf.Profile, CapacityTokens: cmp.Or(e.Profile.KVTokensPerRank, e.Capacity(rank)), Region: e.otherRegion,
		ProbeLimit: e.limit(slowProbes),
		Live:       state.in(Up, Starting), AnswersLate: state.awaited(),
	}
	_, c.Decodes = d.r.engines[Decode+" "+e.ID] // an engine that does both is there twice, once in each role
	for _, m := range e.Status.Models {
		c.Models = append(c.Models, m.ID)
	}
	if len(c.Models) > 0 {
		c.Board = BoardIn(e.base(), c.Region)
		c.Events = d.eventsOf(e, rank)
	}
	return c
}

// rank describes a rank to which decode calls can be sent. id is its worker id.
func (d *deriving) rank(e *Engine, rank int, id int32, state RankState) *Rank {
	t := e.At(rank)
	out := &Rank{
		Worker: id, Instance: e.Key(), Target: t, Profile: e.Profile, Traffic: e.Traffic, Signs: e.Traffic.Liveness(t.Rank),
		Region:  e.otherRegion,
		Board:   e.board,
		Context: e.context(), Scope: e.fence, PinsResponses: e.Profile.Connector == mooncake.SGLang || e.reaches(pinsMinor, false), State: state,
	}
	if e.Role == Aggregated {
		out.Group = e.groupID()
	}
	return out
}

// worker describes a rank for the dispatcher. r is the number of the rank in its engine; -1: the only rank, which has no number.
func (d *deriving) worker(e *Engine, r int, rank *Rank) board.Worker {
	w := board.Worker{
		ID: rank.Worker, Name: rank.Target.ID, Model: e.board, Group: e.Conf.Group, Barrier: e.Conf.Barrier == config.BarrierDP,
		Engine: e.ID, Lists: e.lists, Slots: e.Slots(), Limit: e.limit(e.Conf.Slots), Capacity: cmp.Or(e.Conf.KV, e.Capacity(r)),
		Cost: e.Conf.Cost, KeepsKVFor: e.Profile.Keeps(),
		Up: rank.State == Up, Awaited: rank.State == Halted,
		Unpinned: !rank.EngineHonoursRank(mooncake.Responses),
		Down:     !e.Status.Up || e.Status.Wedged && !e.Status.Halted() || e.Status.Lost[max(0, r)] != "",
		Process:  math.Float64bits(e.Status.StartTime), Early: e.Profile.Early(), AtOnce: e.Profile.Early() &&
			e.Profile.Connector == mooncake.NIXLPush,
	}
	if e.Role == Aggregated {
		w.Mixed = true
		w.Budget = e.Conf.Budget
		w.Interval = e.Conf.Interval
		w.Early, w.AtOnce = false, false // no KV is sent to the rank
	} else if e.Profile.Renews() {
		w.MaxEngineQueue = d.r.terms.Beyond
	}
	// If requests of other proxies run on the rank as well, this proxy may use only a part of the slots.
	room := d.r.owners.Quotas[w.Name]
	w.Others = room.Others
	if room.Limit > 0 && (w.Limit == 0 || room.Limit < w.Limit) {
		w.Limit = room.Limit
	}
	return w
}

// Slots is how many requests a rank may run. With enable_balance_scheduling, all ranks of vllm-ascend stop admitting requests while one
// rank has no free slot, so evenkeel leaves one slot of each rank free.
func (e *Engine) Slots() int {
	if e.Role == Aggregated && e.Profile.Ascend() && e.Conf.Slots > 1 {
		return e.Conf.Slots - 1
	}
	return e.Conf.Slots
}

// eventsOf says where a rank publishes the contents of its prefix cache; empty: KV events are not enabled.
func (d *deriving) eventsOf(e *Engine, rank int) prefill.EventSource {
	config := d.r.terms.KVEvents
	if !config.Enabled {
		return prefill.EventSource{}
	}
	source := prefill.EventSource{Place: EventsOf(e, rank, config), Model: e.base(), ReplayTimeout: config.ReplayTimeout}
	if e.Finder != nil {
		source.Finder = e.Finder(max(0, rank))
	}
	return source
}

// EventsOf says where, according to the config, a rank publishes the contents of its prefix cache. An engine without ports of its own has
// the ports that the config gives all engines.
func EventsOf(e *Engine, rank int, all prefill.KVEventsConfig) kvevents.Place {
	host, rank := e.Target.URL.Hostname(), max(0, rank)
	place := kvevents.Place{Events: kvevents.Endpoint(host, cmp.Or(e.Conf.KVEventsPort, all.Port), rank)}
	if port := cmp.Or(e.Conf.KVReplayPort, all.ReplayPort); port != 0 {
		place.Replay = kvevents.Endpoint(host, port, rank)
	}
	return place
}

// addRoutes adds an engine to the routes of the models that it lists. A route has Mixed and PromptLogprobs only if they are true of every
// engine that lists the model, and each other flag if it is true of one such engine. up: the engine is in service, or requests wait for it.
func (d *deriving) addRoutes(e *Engine, up bool) {
	for _, m := range e.Status.Models {
		r, ok := d.p.routes[m.ID]
		if !ok {
			r = Route{Name: m.ID, Board: e.base(), AllAggregated: true, PromptLogprobs: true}
		}
		r.AllAggregated = r.AllAggregated && e.Role == Aggregated
		for ep := range r.NoHandOff {
			r.NoHandOff[ep] = r.NoHandOff[ep] || up && e.Role != Aggregated && !e.takesHandOff(mooncake.Endpoint(ep))
		}
		r.SGLang = r.SGLang || e.Profile.Connector == mooncake.SGLang
		r.GivesBackUnseen = r.GivesBackUnseen || e.mayGiveBack() // also if it is down now: it may be up when a request gets there
		if e.Role == Decode {
			r.PromptLogprobs = r.PromptLogprobs && e.computesRows()
		} else {
			r.listed[prefillSide] = true
			r.Prefill = r.Prefill || up
		}
		if e.Decodes() {
			r.listed[decodeSide] = true
			r.Decode = r.Decode || up
			r.Board = e.base() // the board is where the request decodes, so a decode engine overrides a prefill engine
			if length := e.maxLen(m); length > 0 && (r.MaxLen == 0 || length < r.MaxLen) {
				r.MaxLen = length // the shortest context, because any of the engines may get the request
			}
			r.Clamps = r.Clamps || e.clamps()
		}
		d.p.routes[m.ID] = r
	}
}

// onlyWhereDecoded takes the prefill engines of another region out of service if no rank of that region decodes, because no engine could
// fetch their KV. If no decode rank for a candidate takes requests now, but requests wait for some of them (Worker.Awaited), prompts wait
// before their prefill (Late), because engines do not hold the KV of finished prefills for so long.
func onlyWhereDecoded(candidates []prefill.Candidate, workers []board.Worker) {
	for i := range candidates {
		c := &candidates[i]
		inService := c.Live || c.AnswersLate
		if !inService || c.Aggregated { // a mixed candidate decodes by itself
			continue
		}
		up, awaited := false, false // whether a decode rank for the candidate takes requests, and whether requests wait for one
		for _, w := range workers {
			if base, sameRegion := strings.CutSuffix(w.Model, BoardIn("", c.Region)); sameRegion && slices.Contains(c.Models, base) {
				up = up || w.Up
				awaited = awaited || w.Awaited
			}
		}
		switch {
		case c.Region != "":
			c.Live = up && c.Live
			c.AnswersLate = up && c.AnswersLate || !up && awaited
		case awaited && !up && !c.Profile.Early():
			c.Live, c.AnswersLate = false, true
		}
	}
}

// prefer marks the candidates that come second if a model has two kinds of engines: aggregated ones, which prefill and decode, and split
// ones, which do only one of the two. kind is the preferred kind. Prefill engines whose KV no rank would fetch always come second. Without
// an aggregated engine, prefer does nothing.
func prefer(kind string, candidates []prefill.Candidate, workers []board.Worker) {
	mixed := func(c prefill.Candidate) bool { return c.Aggregated }
	if !slices.ContainsFunc(candidates, mixed) {
		return
	}
	decodes := map[string]bool{}
	for i := range workers {
		decodes[workers[i].Model] = decodes[workers[i].Model] || workers[i].Up
	}
	serves := func(c *prefill.Candidate) bool { return c.Live && (c.Aggregated || decodes[c.Board]) }
	servedByPreferred := func(model string) bool { // some engine of the preferred kind serves the model
		return slices.ContainsFunc(candidates, func(c prefill.Candidate) bool {
			return c.Aggregated == (kind == config.PreferAggregated) && serves(&c) && slices.Contains(c.Models, model)
		})
	}
	for i := range candidates {
		c := &candidates[i]
		preferred := c.Aggregated == (kind == config.PreferAggregated)
		c.NoDecodeRank = !serves(c)
		c.Fallback = c.NoDecodeRank || !preferred && slices.ContainsFunc(c.Models, servedByPreferred)
	}
}

// markDeserted marks the prefill engines that are down or halted while another engine serves one of their models. The fleet then ends the
// probes on them, so that the prompts go to the other engine.
func markDeserted(engines []*Engine, candidates []prefill.Candidate) {
	live := map[string]bool{} // by model
	for i := range candidates {
		for _, m := range candidates[i].Models {
			live[m] = live[m] || candidates[i].Live
		}
	}
	for _, e := range engines {
		e.Deserted = e.Role == Prefill && (!e.Status.Up || e.Status.Halted()) &&
			slices.ContainsFunc(e.Status.Models, func(m engine.Model) bool { return live[m.ID] })
	}
}

// count counts the engines for which counts is true, by role. An engine that prefills and decodes counts for both roles.
func count(engines []*Engine, counts func(*Engine) bool) (t tally) {
	for _, e := range engines {
		if !counts(e) {
			continue
		}
		if e.Decodes() {
			t.decodes++
		}
		if e.Role != Decode {
			t.prefills++
		}
	}
	return t
}
