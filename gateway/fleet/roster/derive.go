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
	d := newDeriving(r)
	d.describeEngines()
	p := d.p
	markOneSided(p.routes, p.order)
	dropUnlistedModels(p.Candidates, d.regionListings, d.groupListings)
	requireDecodeRanks(p.Candidates, p.Workers)
	markFallbacks(r.terms.Prefer, p.Candidates, p.Workers)
	markDeserted(p)
	isInService := func(e *Engine) bool { return e.state.serves() && len(e.Status.Models) > 0 }
	p.inService = countByRole(p.order, isInService)
	return p
}

func newDeriving(r *Roster) *deriving {
	return &deriving{r: r, regionListings: map[string]*listings{}, groupListings: map[string]*listings{},
		groupModels: map[string]map[string]bool{}, p: &Snapshot{
			owners: r.owners, engines: make(map[string]*Engine, len(r.order)), ranks: map[int32]*Rank{}, workers: map[string]int32{},
			order:  make([]*Engine, 0, len(r.order)),
			drains: maps.Clone(r.drains), pauses: maps.Clone(r.pauses), hosts: maps.Clone(r.hosts),
			departed: maps.Clone(r.departed),
			routes:   map[string]Route{},
		}}
}

func (d *deriving) describeEngines() {
	for id, l := range d.r.departedRanks {
		d.p.ranks[id] = d.newRank(l.engine, l.rank, id, Absent)
	}
	for _, k := range d.r.order {
		e := new(*d.r.engines[k])
		d.p.engines[k] = e
		d.p.order = append(d.p.order, e)
		// Requests wait for a late engine, unless the other ranks of its group wait for it, too.
		inServiceOrAwaited := e.state.serves() || e.state == Late && d.r.broken[e.barrierGroup()] == ""
		d.addRoutes(e, inServiceOrAwaited)
		for _, rank := range e.Ranks() {
			state := d.r.stateOfRank(e, rank)
			if e.Decodes() {
				d.addDecodeRank(e, rank, state)
			} else {
				d.p.Candidates = append(d.p.Candidates, d.newCandidate(e, rank, state))
			}
		}
	}
}

type deriving struct {
	r *Roster
	p *Snapshot
	// of a group's candidate, by group; an engine may list thousands
	groupModels map[string]map[string]bool
	// of decode-only ranks, by region; of aggregated ranks, by group
	regionListings, groupListings map[string]*listings
}

// addDecodeRank: once its engine has named its models, decode calls can be sent to the rank, even
// while the engine names none. Only while it names models can the dispatcher bind requests to the
// rank.
func (d *deriving) addDecodeRank(e *Engine, rank int, state RankState) {
	name := e.At(rank).ID
	id := d.r.workerIDs[e.workerKey(rank)]
	d.p.workers[name] = id
	if e.board != "" {
		d.p.ranks[id] = d.newRank(e, rank, id, state)
	}
	if len(e.Status.Models) == 0 {
		// An engine that has not named its models may list any, so no candidate of its region loses a
		// model. An aggregated engine decodes only for its own group.
		if e.Role == Decode {
			listingsOf(d.regionListings, e.otherRegion).anyUnnamed = true
		}
		return
	}
	w := d.newWorker(e, rank, d.p.ranks[id])
	d.p.Workers = append(d.p.Workers, w)
	accepts := w.Up || w.Awaited // awaited: requests wait for the rank
	if w.Mixed {
		listingsOf(d.groupListings, e.groupID()).add(e.lists, accepts)
		d.addToGroup(e, w)
	} else {
		listingsOf(d.regionListings, e.otherRegion).add(e.lists, accepts)
	}
	d.addLocalRank(e, rank, &w)
}

// addLocalRank: the proxy follows the prefix cache of a rank that may compute prompts.
func (d *deriving) addLocalRank(e *Engine, rank int, w *board.Worker) {
	if computesPrompts := e.Profile.AllowLocalPrefill || w.Mixed; !computesPrompts {
		return
	}
	l := local.Rank{ID: w.ID, Name: w.Name, Model: w.Model, Engine: w.Engine, Capacity: w.Capacity, Up: w.Up}
	if w.Mixed { // the cache of a rank that only decodes is known from its answers
		l.Events = d.eventSource(e, rank)
	}
	d.p.Locals = append(d.p.Locals, l)
}

// addToGroup adds a rank to its group, which is one candidate of the prefill tier: Live if a rank
// takes requests, AnswersLate if requests wait for one. The tier looks at AnswersLate only if no
// rank is live.
func (d *deriving) addToGroup(e *Engine, w board.Worker) {
	id := e.groupID()
	index := slices.IndexFunc(d.p.Candidates, func(c prefill.Candidate) bool { return c.ID == id })
	if index < 0 {
		index = len(d.p.Candidates)
		d.p.Candidates = append(d.p.Candidates, prefill.Candidate{
			ID: id, Instance: id, Target: e.At(NoRank), Profile: e.Profile, Hardware: e.Conf.Profile, Region: e.otherRegion, Board: e.board,
			Aggregated: true,
		})
	}
	c := &d.p.Candidates[index]
	c.Live = c.Live || w.Up
	c.AnswersLate = c.AnswersLate || w.Awaited
	known := d.groupModels[id]
	if known == nil {
		known = map[string]bool{}
		d.groupModels[id] = known
	}
	for _, m := range e.Status.Models {
		if !known[m.ID] {
			known[m.ID] = true
			c.Models = append(c.Models, m.ID)
		}
	}
}

// newCandidate describes a rank of a prefill engine, which has a board and KV events only after its
// engine has named its models. ProbeLimit bounds its unanswered probes while the engine starts
// slowly; 0: no bound.
func (d *deriving) newCandidate(e *Engine, rank int, state RankState) prefill.Candidate {
	id := e.ID + "/" + strconv.Itoa(max(0, rank)) // an only rank counts as rank 0
	// candidates of one profile count as the same hardware
	profileName := e.Conf.Profile
	memory := e.Status.Memories.Of(rank)
	c := prefill.Candidate{
		ID: id, Instance: e.Key(), Target: e.At(rank), Profile: e.Profile,
		Hardware: profileName, CapacityTokens: cmp.Or(e.Profile.KVTokensPerRank, memory.Capacity.Tokens),
		BlockTokens: int(memory.Block.Tokens),
		Region:      e.otherRegion,
		ProbeLimit:  e.limitOf(slowProbes),
		Live:        state.in(Up, Starting), AnswersLate: state.awaited(),
	}
	_, c.Decodes = d.r.engines[Decode+" "+e.ID] // an engine with both roles has two entries
	for _, m := range e.Status.Models {
		c.Models = append(c.Models, m.ID)
	}
	if len(c.Models) > 0 {
		c.Board = BoardIn(e.baseModel(), c.Region)
		c.Events = d.eventSource(e, rank)
	}
	return c
}

// newRank: an engine pins responses if it runs a request to /v1/responses on the rank that the
// request names. SGLang does, and vLLM from version 0.pinsMinor on. An engine with any other
// connector than that of SGLang counts as vLLM here.
func (d *deriving) newRank(e *Engine, number int, id int32, state RankState) *Rank {
	target := e.At(number)
	const ifUnknown = false
	pinsResponses := e.Profile.Connector == mooncake.SGLang || e.hasVersion(pinsMinor, ifUnknown)
	out := &Rank{
		Worker: id, Instance: e.Key(), Target: target, Profile: e.Profile, Traffic: e.Traffic,
		Signs:   e.Traffic.Liveness(target.Rank), // when the core of this rank last gave a sign of life
		Board:   e.board,
		Context: e.longestContext(), Scope: e.ownerScope, PinsResponses: pinsResponses,
		BlockTokens: e.Status.Memories.Of(number).Block.Tokens,
		State:       state,
	}
	if e.Role == Aggregated {
		out.Group = e.groupID()
	}
	return out
}

// newWorker: a worker that is Down takes no part in the steps of its group. Limit is set while only
// a part of the Slots may be used: the engine has just started, or requests of other proxies may
// run on the rank.
func (d *deriving) newWorker(e *Engine, number int, rank *Rank) board.Worker {
	// engines that ignore the named rank do so at this endpoint
	honoursRank := rank.EngineHonoursRank(mooncake.Responses)
	w := board.Worker{
		ID: rank.Worker, Name: rank.Target.ID, Model: e.board, Group: e.Conf.Group, Barrier: e.Conf.Barrier == config.BarrierDP,
		Engine: e.ID,
		Lists:  e.lists,
		Slots:  e.Slots(), Limit: e.limitOf(e.Conf.Slots), Capacity: cmp.Or(e.Conf.KV, e.Status.Memories.Of(number).Capacity.Tokens),
		Cost:       e.Conf.Cost, // step time per KV token, as a multiple of the group's mean
		KeepsKVFor: e.Profile.Keeps(), Unpinned: !honoursRank,
		Process: math.Float64bits(e.Status.StartTime), // 0: not known
		Up:      rank.State == Up, Awaited: rank.State == Halted, Down: e.Status.ComputesNothing() || e.Status.Lacks(number),
	}
	if e.Role == Aggregated {
		w.Mixed, w.Budget = true, e.Conf.Budget
		w.Interval, w.AfterPrompts = e.Conf.Interval, e.Profile.Connector == mooncake.SGLang
	} else {
		w.Early = e.Profile.Early() // bound before the prefill
	}
	d.applyQuota(&w)
	return w
}

func (d *deriving) applyQuota(w *board.Worker) {
	quota := d.r.owners.Quotas[w.Name]
	w.Others = quota.Others
	if quota.Limit > 0 && (w.Limit == 0 || quota.Limit < w.Limit) { // 0: no limit
		w.Limit = quota.Limit
	}
}

// Slots is how many requests a rank may run. With enable_balance_scheduling, all ranks of
// vllm-ascend stop admitting while one has no free slot, so evenkeel leaves one slot of each rank
// free.
func (e *Engine) Slots() int {
	if e.Role == Aggregated && e.Profile.Ascend() && e.Conf.Slots > 1 {
		return e.Conf.Slots - 1
	}
	return e.Conf.Slots
}

// eventSource: the engine's Finder, if any, is asked for the place before each connection. The
// result is empty if KV events are not enabled.
func (d *deriving) eventSource(e *Engine, rank int) prefill.EventSource {
	config := d.r.terms.KVEvents
	if !config.Enabled {
		return prefill.EventSource{}
	}
	source := prefill.EventSource{Place: ConfiguredEvents(e, rank, config), Model: e.baseModel(), ReplayTimeout: config.ReplayTimeout}
	if e.Finder != nil {
		source.Finder = e.Finder(max(0, rank))
	}
	return source
}

// ConfiguredEvents says where, according to the config, a rank publishes the contents of its prefix
// cache.
func ConfiguredEvents(e *Engine, rank int, all prefill.KVEventsConfig) kvevents.Place {
	host, number := e.Target.URL.Hostname(), max(0, rank) // an only rank counts as rank 0
	place := kvevents.Place{Events: kvevents.Endpoint(host, cmp.Or(e.Conf.KVEventsPort, all.Port), number)}
	if port := cmp.Or(e.Conf.KVReplayPort, all.ReplayPort); port != 0 {
		place.Replay = kvevents.Endpoint(host, port, number)
	}
	return place
}

// addRoutes: a route has AllAggregated and PromptLogprobs only if they are true of every engine
// that lists the model, and each other flag if it is true of one. usable: the engine is in service,
// or requests wait for it.
func (d *deriving) addRoutes(e *Engine, usable bool) {
	for _, m := range e.Status.Models {
		r, hasRoute := d.p.routes[m.ID]
		if !hasRoute { // also for a LoRA, the board has the name of the base model
			r = Route{Name: m.ID, Board: e.baseModel(), AllAggregated: true, PromptLogprobs: true}
		}
		if m.Parent != "" {
			r.Adapter, r.Weights = m.AdapterName(), d.r.weights[m.AdapterName()]
		}
		r.addEngine(e, usable)
		if e.Role != Decode {
			r.listed[prefillSide] = true
			r.Prefill = r.Prefill || usable
		}
		if e.Decodes() {
			r.addDecodeEngine(e, m, usable)
		}
		d.p.routes[m.ID] = r
	}
}

func (r *Route) addEngine(e *Engine, usable bool) {
	r.AllAggregated = r.AllAggregated && e.Role == Aggregated
	r.SGLang = r.SGLang || e.Profile.Connector == mooncake.SGLang
	// A decode engine that lacks KV memory may end an answer early. At some endpoints the answer does
	// not show this. An engine that is down counts, too, because it may be up when a request gets
	// there.
	r.GivesBackUnseen = r.GivesBackUnseen || e.mayGiveBack()
	// NoHandOff: some usable engine takes no hand-offs at the endpoint. The request may get to this
	// engine, so none is used there.
	needsHandOff := usable && e.Role != Aggregated // an aggregated engine needs none
	for ep := range r.NoHandOff {
		r.NoHandOff[ep] = r.NoHandOff[ep] || needsHandOff && !e.takesHandOff(mooncake.Endpoint(ep))
	}
}

// addDecodeEngine: any of the engines may get the request, so the shortest context counts.
func (r *Route) addDecodeEngine(e *Engine, m engine.Model, usable bool) {
	r.listed[decodeSide] = true
	r.Decode = r.Decode || usable
	r.Board = e.baseModel() // a request decodes there, so a decode engine overrides a prefill engine
	length := e.maxLen(m)
	isShortest := r.MaxLen == 0 || length < r.MaxLen
	if length > 0 && isShortest { // 0: unknown
		r.MaxLen = length
	}
	r.Clamps = r.Clamps || e.clampsMaxTokens()
	if e.Role == Decode { // an aggregated engine computes every prompt itself
		r.PromptLogprobs = r.PromptLogprobs && e.computesPromptLogprobs()
	}
}

// requireDecodeRanks: if no decode rank would fetch a candidate's KV now, but requests wait for
// one, prompts wait before their prefill, because prefill engines do not hold KV for so long.
// Otherwise a candidate in another region is out of service. In the own region admission checks
// Route.Decode instead.
func requireDecodeRanks(candidates []prefill.Candidate, workers []board.Worker) {
	for i := range candidates {
		c := &candidates[i]
		inService := c.Live || c.AnswersLate
		if !inService || c.Aggregated { // it decodes by itself
			continue
		}
		up, awaited := decodeRanksOf(c, workers)
		switch {
		case up:
		case c.Region != "":
			c.Live, c.AnswersLate = false, awaited
		// with an early connector, requests wait before their prefill anyway
		case awaited && !c.Profile.Early():
			c.Live, c.AnswersLate = false, true
		}
	}
}

func decodeRanksOf(c *prefill.Candidate, workers []board.Worker) (up, awaited bool) {
	markOfRegion := BoardIn("", c.Region) // empty: the proxy's own region
	for _, w := range workers {
		baseModel, isOfRegion := strings.CutSuffix(w.Model, markOfRegion) // w.Model is a board
		if isOfRegion && slices.Contains(c.Models, baseModel) {
			up = up || w.Up
			awaited = awaited || w.Awaited
		}
	}
	return up, awaited
}

// markFallbacks: if a model has aggregated and split engines, those that preferredKind does not
// prefer come second (Fallback). So do candidates that cannot complete any request now
// (NoDecodeRank).
func markFallbacks(preferredKind string, candidates []prefill.Candidate, workers []board.Worker) {
	isAggregated := func(c prefill.Candidate) bool { return c.Aggregated }
	if !slices.ContainsFunc(candidates, isAggregated) {
		return
	}
	decodes := map[string]bool{} // by board: a rank takes requests
	for i := range workers {
		boardName := workers[i].Model
		decodes[boardName] = decodes[boardName] || workers[i].Up
	}
	isPreferred := func(c *prefill.Candidate) bool { return c.Aggregated == (preferredKind == config.PreferAggregated) }
	serves := func(c *prefill.Candidate) bool { return c.Live && (c.Aggregated || decodes[c.Board]) }
	servedByPreferred := map[string]bool{} // by model
	for i := range candidates {
		if c := &candidates[i]; isPreferred(c) && serves(c) {
			for _, model := range c.Models {
				servedByPreferred[model] = true
			}
		}
	}
	for i := range candidates {
		c := &candidates[i]
		c.NoDecodeRank = !serves(c)
		c.Fallback = c.NoDecodeRank
		if !c.Fallback && !isPreferred(c) {
			c.Fallback = slices.ContainsFunc(c.Models, func(model string) bool { return servedByPreferred[model] })
		}
	}
}

// markDeserted marks the engines that are halted or down while another engine can do their work.
// The fleet then ends calls on them, so that the requests go to the other engine. A server of
// SGLang that is paused, or whose memory is released, answers no health check, so it is down
// (0.5.23, health_generate in entrypoints/http_server.py).
func markDeserted(p *Snapshot) {
	// by model, and by board: another engine takes requests
	prefills, decodes := map[string]bool{}, map[string]bool{}
	for i := range p.Candidates {
		for _, m := range p.Candidates[i].Models {
			prefills[m] = prefills[m] || p.Candidates[i].Live
		}
	}
	for i := range p.Workers {
		decodes[p.Workers[i].Model] = decodes[p.Workers[i].Model] || p.Workers[i].Up
	}
	for _, e := range p.order {
		canPrefill := slices.ContainsFunc(e.Status.Models, func(m engine.Model) bool { return prefills[m.ID] })
		canDoTheWork := canPrefill
		if e.Role == Decode {
			canDoTheWork = decodes[e.board]
		}
		state := e.Status.State()
		computesNothing := state == engine.Down || state == engine.Halted || state == engine.Late && e.Role == Prefill
		e.Deserted = computesNothing && canDoTheWork
	}
}

func countByRole(engines []*Engine, includes func(*Engine) bool) (counts roleCounts) {
	for _, e := range engines {
		if !includes(e) {
			continue
		}
		if e.Decodes() {
			counts.decodes++
		}
		if e.Role != Decode {
			counts.prefills++
		}
	}
	return counts
}
