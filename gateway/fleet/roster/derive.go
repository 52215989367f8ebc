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

// Derive returns what the rest of the proxy sees of the roster: the candidates of the prefill tier, the workers of the dispatcher, and the
// routes of the models. It first describes each engine and rank by itself. Then it marks what depends on other engines: models that no
// request can use, candidates whose KV no rank would fetch, candidates that come second, and engines whose probes should move elsewhere.
// Derive must be called after a Tick.
func Derive(r *Roster) *Snapshot {
	d := newDeriving(r)
	d.describeEngines()
	p := d.p
	markOneSided(p.routes, p.order)                                     // models that only prefill or only decode engines list
	dropUnlistedModels(p.Candidates, d.regionListings, d.groupListings) // models of a candidate that no decode rank lists
	requireDecodeRanks(p.Candidates, p.Workers)                         // candidates whose KV no decode rank would fetch now
	markFallbacks(r.terms.Prefer, p.Candidates, p.Workers)              // engines of the kind that comes second
	markDeserted(p)                                                     // engines that cannot compute while others can
	isInService := func(e *Engine) bool { return e.state.serves() && len(e.Status.Models) > 0 }
	p.inService = countByRole(p.order, isInService)
	return p
}

// newDeriving begins a Snapshot of the roster. It copies what events change in the roster itself, such as drains.
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

// describeEngines adds all engines to the snapshot: their routes, a candidate for each rank of a prefill engine, and a worker for each rank
// that decodes (addDecodeRank, which also fills the listings). Ranks of engines that have left are added as Absent.
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

// deriving is a Snapshot under construction, with lists that only its construction needs.
type deriving struct {
	r                             *Roster
	p                             *Snapshot
	groupModels                   map[string]map[string]bool // the models of a group's candidate, by group; an engine may list thousands
	regionListings, groupListings map[string]*listings       // model lists: of decode-only ranks, by region; of aggregated ranks, by group
}

// addDecodeRank adds a rank that decodes. Its worker id can be found by its name from now on. Once its engine has named its models, decode
// calls can be sent to the rank, even while the engine names none. While the engine names its models, the rank is also a worker, to which
// the dispatcher can bind requests.
func (d *deriving) addDecodeRank(e *Engine, rank int, state RankState) {
	name := e.At(rank).ID
	id := d.r.workerIDs[e.workerKey(rank)]
	d.p.workers[name] = id
	if e.board != "" { // empty: the engine has never named its models
		d.p.ranks[id] = d.newRank(e, rank, id, state)
	}
	if len(e.Status.Models) == 0 {
		// An engine that has not named its models may list any model. So while a decode engine has not named them, no candidate of
		// its region loses a model. An aggregated engine decodes only for its own group, whose candidate has only models that were
		// named.
		if e.Role == Decode {
			listingsOf(d.regionListings, e.otherRegion).anyUnnamed = true
		}
		return
	}
	w := d.newWorker(e, rank, d.p.ranks[id])
	d.p.Workers = append(d.p.Workers, w)
	// The listings decide for which models a prefill candidate can be used.
	accepts := w.Up || w.Awaited // awaited: the rank takes no requests now, but they wait for it
	if w.Mixed {
		listingsOf(d.groupListings, e.groupID()).add(e.lists, accepts)
		d.addToGroup(e, w)
	} else {
		listingsOf(d.regionListings, e.otherRegion).add(e.lists, accepts)
	}
	d.addLocalRank(e, rank, &w)
}

// addLocalRank adds a rank that decodes to those whose prefix caches the proxy follows, if it may
// compute prompts.
func (d *deriving) addLocalRank(e *Engine, rank int, w *board.Worker) {
	if computesPrompts := e.Profile.AllowLocalPrefill || w.Mixed; !computesPrompts {
		return
	}
	l := local.Rank{ID: w.ID, Name: w.Name, Model: w.Model, Engine: w.Engine, Capacity: w.Capacity, Up: w.Up}
	if w.Mixed { // the cache of a rank that only decodes is known from the answers that it gave
		l.Events = d.eventSource(e, rank)
	}
	d.p.Locals = append(d.p.Locals, l)
}

// addToGroup adds a rank that prefills and decodes to its group, which is one candidate of the prefill tier. The candidate is Live if one
// of the ranks takes requests. It has AnswersLate if requests wait for one of the ranks (Worker.Awaited). The prefill tier looks at
// AnswersLate only if no rank is live: requests then wait for the candidate, and are not refused.
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
	c.AnswersLate = c.AnswersLate || w.Awaited // whether or not a rank is live
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

// newCandidate describes a rank of a prefill engine for the prefill tier. rank is NoRank for an only rank without a number. The candidate
// has a board and KV events only after its engine has named its models. AnswersLate says that requests wait for the rank, because its
// engine is late or halted: the candidate gets no prompts, but they are not refused. ProbeLimit bounds its unanswered prefill calls
// (probes) while the engine starts slowly; 0: no bound. It grows as the share of the slots does, up to slowProbes.
func (d *deriving) newCandidate(e *Engine, rank int, state RankState) prefill.Candidate {
	id := e.ID + "/" + strconv.Itoa(max(0, rank)) // an only rank counts as rank 0
	profileName := e.Conf.Profile                 // candidates of one profile count as the same hardware
	memory := e.Status.Memories.Of(rank)
	c := prefill.Candidate{
		ID: id, Instance: e.Key(), Target: e.At(rank), Profile: e.Profile,
		Hardware: profileName, CapacityTokens: cmp.Or(e.Profile.KVTokensPerRank, memory.Capacity.Tokens),
		BlockTokens: int(memory.Block.Tokens),
		Region:      e.otherRegion,
		ProbeLimit:  e.limitOf(slowProbes),
		Live:        state.in(Up, Starting), AnswersLate: state.awaited(),
	}
	_, c.Decodes = d.r.engines[Decode+" "+e.ID] // an engine with both roles has two entries in engines
	for _, m := range e.Status.Models {
		c.Models = append(c.Models, m.ID)
	}
	if len(c.Models) > 0 {
		c.Board = BoardIn(e.baseModel(), c.Region)
		c.Events = d.eventSource(e, rank)
	}
	return c
}

// newRank describes a rank to which decode calls can be sent. number is the number of the rank in its engine, and id is its worker id. An
// engine pins responses if it runs a request to /v1/responses on the rank that the request names. SGLang does, and vLLM does from version
// 0.pinsMinor on. An engine with any other connector than that of SGLang counts as vLLM here.
func (d *deriving) newRank(e *Engine, number int, id int32, state RankState) *Rank {
	target := e.At(number)
	const ifUnknown = false // an engine whose version cannot be read is not relied on
	pinsResponses := e.Profile.Connector == mooncake.SGLang || e.hasVersion(pinsMinor, ifUnknown)
	out := &Rank{
		Worker: id, Instance: e.Key(), Target: target, Profile: e.Profile, Traffic: e.Traffic,
		Signs:   e.Traffic.Liveness(target.Rank), // knows when the core of this rank last gave a sign of life
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

// newWorker describes a rank for the dispatcher. number is the number of the rank in its engine; NoRank: the only rank. The worker is Up if
// it takes requests, and Awaited if requests wait for it, because its engine is halted. A worker that is Down takes no part in the steps of
// its group. The worker has a fixed number of Slots. It also has a Limit while only a part of them may be used, because its engine has just
// started, or because requests of other proxies may run on the rank (applyQuota).
func (d *deriving) newWorker(e *Engine, number int, rank *Rank) board.Worker {
	honoursRank := rank.EngineHonoursRank(mooncake.Responses) // engines that ignore the named rank do so at this endpoint
	w := board.Worker{
		ID: rank.Worker, Name: rank.Target.ID, Model: e.board, Group: e.Conf.Group, Barrier: e.Conf.Barrier == config.BarrierDP,
		Engine: e.ID,
		Lists:  e.lists, // the names of the models that requests may ask for
		Slots:  e.Slots(), Limit: e.limitOf(e.Conf.Slots), Capacity: cmp.Or(e.Conf.KV, e.Status.Memories.Of(number).Capacity.Tokens),
		Cost:       e.Conf.Cost, // step time per KV token, as a multiple of the mean of the group
		KeepsKVFor: e.Profile.Keeps(), Unpinned: !honoursRank,
		Process: math.Float64bits(e.Status.StartTime), // 0: not known; otherwise no other process of the engine has it
		Up:      rank.State == Up, Awaited: rank.State == Halted, Down: e.Status.ComputesNothing() || e.Status.Lacks(number),
	}
	if e.Role == Aggregated {
		w.Mixed, w.Budget = true, e.Conf.Budget
		w.Interval, w.AfterPrompts = e.Conf.Interval, e.Profile.Connector == mooncake.SGLang
	} else {
		w.Early = e.Profile.Early() // the rank is bound before the prefill
	}
	d.applyQuota(&w)
	return w
}

// applyQuota limits a worker to the part of its slots that this proxy may use, if requests of other proxies run on the rank as well.
func (d *deriving) applyQuota(w *board.Worker) {
	quota := d.r.owners.Quotas[w.Name]
	w.Others = quota.Others
	if quota.Limit > 0 && (w.Limit == 0 || quota.Limit < w.Limit) { // a limit of 0 means no limit
		w.Limit = quota.Limit
	}
}

// Slots is how many requests a rank may run. With enable_balance_scheduling, all ranks of vllm-ascend stop admitting requests while one
// rank has no free slot, so evenkeel leaves one slot of each rank free.
func (e *Engine) Slots() int {
	if e.Role == Aggregated && e.Profile.Ascend() && e.Conf.Slots > 1 {
		return e.Conf.Slots - 1
	}
	return e.Conf.Slots
}

// eventSource says where a rank publishes the contents of its prefix cache: at the place that the config gives. If the engine has a Finder,
// it is asked for the place before each connection. rank may be NoRank, for an only rank without a number. The result is empty if KV events
// are not enabled.
func (d *deriving) eventSource(e *Engine, rank int) prefill.EventSource {
	config := d.r.terms.KVEvents
	if !config.Enabled {
		return prefill.EventSource{}
	}
	source := prefill.EventSource{Place: ConfiguredEvents(e, rank, config), Model: e.baseModel(), ReplayTimeout: config.ReplayTimeout}
	if e.Finder != nil {
		source.Finder = e.Finder(max(0, rank)) // an only rank counts as rank 0
	}
	return source
}

// ConfiguredEvents says where, according to the config, a rank publishes the contents of its prefix cache. An engine without ports of its
// own has the ports that the config gives all engines. rank is NoRank for an only rank without a number.
func ConfiguredEvents(e *Engine, rank int, all prefill.KVEventsConfig) kvevents.Place {
	host, number := e.Target.URL.Hostname(), max(0, rank) // an only rank counts as rank 0
	place := kvevents.Place{Events: kvevents.Endpoint(host, cmp.Or(e.Conf.KVEventsPort, all.Port), number)}
	if port := cmp.Or(e.Conf.KVReplayPort, all.ReplayPort); port != 0 {
		place.Replay = kvevents.Endpoint(host, port, number)
	}
	return place
}

// addRoutes adds an engine to the routes of the models that it lists. A route has AllAggregated and PromptLogprobs only if they are true of
// every engine that lists the model, and each other flag if it is true of one such engine. usable says that the engine is in service, or
// that requests wait for it. For each of the two sides, prefill and decode, a route knows whether an engine lists the model at all (listed,
// also if the engine is down), and whether such an engine is usable (Prefill and Decode).
func (d *deriving) addRoutes(e *Engine, usable bool) {
	for _, m := range e.Status.Models {
		r, hasRoute := d.p.routes[m.ID]
		if !hasRoute { // a board has the name of its base model, also for requests for a LoRA
			r = Route{Name: m.ID, Board: e.baseModel(), AllAggregated: true, PromptLogprobs: true}
		}
		if m.Parent != "" {
			r.Adapter, r.Weights = m.AdapterName(), d.r.weights[m.AdapterName()]
		}
		r.addEngine(e, usable)
		if e.Role != Decode {
			r.listed[prefillSide] = true // usable or not
			r.Prefill = r.Prefill || usable
		}
		if e.Decodes() {
			r.addDecodeEngine(e, m, usable)
		}
		d.p.routes[m.ID] = r
	}
}

// addEngine adds to a route what depends on all engines that list the model, whatever their role. usable says that the engine e is in
// service, or that requests wait for it.
func (r *Route) addEngine(e *Engine, usable bool) {
	r.AllAggregated = r.AllAggregated && e.Role == Aggregated
	r.SGLang = r.SGLang || e.Profile.Connector == mooncake.SGLang
	// A decode engine that lacks KV memory may give a request back: it ends the answer early, so that the request goes on elsewhere.
	// Answers of some endpoints do not show this. An engine that is down counts, too, because it may be up when a request gets there.
	r.GivesBackUnseen = r.GivesBackUnseen || e.mayGiveBack()
	// NoHandOff: some usable engine takes no hand-offs at the endpoint. The request may get to this engine, so none is used there.
	needsHandOff := usable && e.Role != Aggregated // an aggregated engine prefills and decodes by itself
	for ep := range r.NoHandOff {
		r.NoHandOff[ep] = r.NoHandOff[ep] || needsHandOff && !e.takesHandOff(mooncake.Endpoint(ep))
	}
}

// addDecodeEngine adds to a route what depends on the engines that decode for it. e is such an engine, and lists the model m. usable says
// that e is in service, or that requests wait for it. The route gets the board of e and the shortest context of all these engines, because
// any of them may get the request. Clamps says that some of them cuts max_tokens to what the prompt leaves of the context.
func (r *Route) addDecodeEngine(e *Engine, m engine.Model, usable bool) {
	r.listed[decodeSide] = true // usable or not
	r.Decode = r.Decode || usable
	r.Board = e.baseModel() // the board is where the request decodes, so a decode engine overrides a prefill engine
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

// requireDecodeRanks changes the candidates whose KV no decode rank would fetch now. If requests wait for such a rank (Worker.Awaited), the
// candidate gets AnswersLate instead of Live: prompts then wait before their prefill, because prefill engines do not hold the KV of
// finished prefills for so long. If requests wait for no such rank, a candidate in another region is taken out of service. One in the
// proxy's own region stays in service: admission checks whether an engine decodes the model at all (Route.Decode).
func requireDecodeRanks(candidates []prefill.Candidate, workers []board.Worker) {
	for i := range candidates {
		c := &candidates[i]
		inService := c.Live || c.AnswersLate
		if !inService || c.Aggregated { // an aggregated candidate decodes by itself
			continue
		}
		up, awaited := decodeRanksOf(c, workers)
		switch {
		case up: // the KV will be fetched
		case c.Region != "": // in another region: out of service, unless requests wait for a rank there
			c.Live, c.AnswersLate = false, awaited
		case awaited && !c.Profile.Early(): // with an early connector, requests wait before their prefill anyway
			c.Live, c.AnswersLate = false, true
		}
	}
}

// decodeRanksOf says whether a decode rank that can fetch the KV of a candidate takes requests (up), and whether requests wait for such a
// rank (awaited).
func decodeRanksOf(c *prefill.Candidate, workers []board.Worker) (up, awaited bool) {
	markOfRegion := BoardIn("", c.Region) // the end of each board's name in that region; empty: the proxy's own region
	for _, w := range workers {
		baseModel, isOfRegion := strings.CutSuffix(w.Model, markOfRegion) // w.Model is a board: the base model and its region
		if isOfRegion && slices.Contains(c.Models, baseModel) {
			up = up || w.Up
			awaited = awaited || w.Awaited
		}
	}
	return up, awaited
}

// markFallbacks marks the candidates that come second (Fallback) if a model has two kinds of engines: aggregated ones, which prefill and
// decode, and split ones, which do only one of the two. preferredKind is config.PreferAggregated, or prefers split engines. Candidates that
// cannot complete any request now (NoDecodeRank), e.g. prefill engines whose KV no rank would fetch, always come second. Without an
// aggregated candidate, markFallbacks does nothing.
func markFallbacks(preferredKind string, candidates []prefill.Candidate, workers []board.Worker) {
	isAggregated := func(c prefill.Candidate) bool { return c.Aggregated }
	if !slices.ContainsFunc(candidates, isAggregated) {
		return
	}
	decodes := map[string]bool{} // by board: whether a rank takes requests
	for i := range workers {
		boardName := workers[i].Model // a worker's Model is the name of its board
		decodes[boardName] = decodes[boardName] || workers[i].Up
	}
	isPreferred := func(c *prefill.Candidate) bool { return c.Aggregated == (preferredKind == config.PreferAggregated) }
	// An aggregated candidate decodes by itself; any other needs a rank of its board.
	serves := func(c *prefill.Candidate) bool { return c.Live && (c.Aggregated || decodes[c.Board]) }
	servedByPreferred := map[string]bool{} // by model: some engine of the preferred kind serves it
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
		if !c.Fallback && !isPreferred(c) { // the candidate comes second if the preferred kind serves one of its models
			c.Fallback = slices.ContainsFunc(c.Models, func(model string) bool { return servedByPreferred[model] })
		}
	}
}

// markDeserted marks the engines that are halted or down while another engine can do their work.
// The fleet then ends calls on them, so that the requests go to the other engine. A server of
// SGLang that is paused, or whose memory is released, answers no health check, so it is down
// (0.5.23, health_generate in entrypoints/http_server.py).
func markDeserted(p *Snapshot) {
	prefills, decodes := map[string]bool{}, map[string]bool{} // by model, and by board: another engine takes requests
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

// countByRole counts, by role, the engines for which includes returns true. An engine that prefills and decodes counts for both roles.
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
