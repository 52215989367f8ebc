package roster

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Lookup finds the route of a model. listed is false if no engine lists the model; then the route has only AllAggregated, which says
// whether all engines are aggregated. modelsKnown is false while no engine has named its models, so that the model may still turn up.
func (p *Snapshot) Lookup(model string) (r Route, listed, modelsKnown bool) {
	if r, listed = p.routes[model]; !listed {
		r.AllAggregated = len(p.order) > 0 // false without any engine
		for _, e := range p.order {
			r.AllAggregated = r.AllAggregated && e.Role == Aggregated
		}
	}
	return r, listed, len(p.routes) > 0
}

// Models returns the routes of the models that some engine in service lists, or an engine for which requests wait. It leaves out models
// that are listed only by engines that prefill, or only by engines that decode (OneSided), because no request for them can be completed. It
// does not leave out a model of which one side is down: that side may come back.
func (p *Snapshot) Models() []Route {
	var list []Route
	for _, r := range p.routes {
		if (r.Prefill || r.Decode) && !r.OneSided {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b Route) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// SoleModel is the only base model among those of the engines, including engines that are down, and those that other regions offer. It is
// empty if there are several, or if none is known yet.
func (p *Snapshot) SoleModel(offered []string) (baseModel string) {
	for _, r := range p.routes {
		if baseModel != "" && r.Board != baseModel {
			return ""
		}
		baseModel = r.Board // the board of a route has the name of its base model
	}
	for _, model := range offered {
		if r, listed, _ := p.Lookup(model); listed {
			model = r.Board // model may be a LoRA adapter
		}
		if baseModel != "" && model != baseModel {
			return ""
		}
		baseModel = model
	}
	return baseModel
}

// Rank finds the rank of a worker; nil: the fleet has not published such a worker, or its engine left long ago.
func (p *Snapshot) Rank(worker int32) *Rank { return p.ranks[worker] }

// RankByName finds a decode rank by its name, and returns it with the name of its board. r is nil if there is no such rank, or if its
// engine does not list its models now, so that the rank is on no board.
func (p *Snapshot) RankByName(name string) (r *Rank, board string) {
	id, known := p.workers[name]
	if r = p.ranks[id]; !known || r == nil {
		return nil, ""
	}
	e := p.engineOrEmpty(r.Instance)
	if len(e.Status.Models) == 0 {
		return nil, ""
	}
	return r, e.board
}

// WorkerByName finds a decode rank by its name, and returns its worker id. ok is false if there is no such rank, if its engine does not
// list the model, or if its engine has another base model.
func (p *Snapshot) WorkerByName(name, baseModel, model string) (worker int32, ok bool) {
	r, _ := p.RankByName(name)
	if r == nil {
		return 0, false
	}
	e := p.engineOrEmpty(r.Instance)
	return r.Worker, e.listsModel(model) && e.baseModel() == baseModel
}

// FailingWith adds to list a worker and the workers that may fail together with it: the ranks behind the same API server. If sameHost is
// true, it also adds the ranks on the same host, because a host with a broken driver or disk has many ranks, which look free because every
// request there fails at once. It spares the host if the request could go to no other host then.
func (p *Snapshot) FailingWith(worker int32, sameHost bool, list []int32) []int32 {
	failed := p.ranks[worker]
	if failed == nil { // the worker is gone, so no request is sent there
		return list
	}
	failedHost := failed.host()
	addHost := sameHost && p.otherHostServes(failed, list)
	for id, r := range p.ranks {
		mayFail := r.Instance == failed.Instance || addHost && r.host() == failedHost
		if mayFail && !slices.Contains(list, id) {
			list = append(list, id)
		}
	}
	return list
}

// otherHostServes says whether another host than that of the failed rank has a rank of the same board that takes requests and is not in
// avoided. It is false if the host of the failed rank is not known.
func (p *Snapshot) otherHostServes(failed *Rank, avoided []int32) bool {
	failedHost := failed.host()
	if failedHost == "" {
		return false
	}
	for id, r := range p.ranks {
		takesSameRequests := r.State == Up && r.Board == failed.Board
		onOtherHost := r.Instance != failed.Instance && r.host() != failedHost
		if takesSameRequests && onOtherHost && !slices.Contains(avoided, id) {
			return true
		}
	}
	return false
}

// SharingQueueWith returns the ranks that are likely to refuse requests because a worker did, e.g. because one rate limit covers all of
// them (sameQueue). These are the ranks of the worker's group, or only the ranks of its engine if no other group takes requests. It returns
// none if no rank besides these takes requests. Only ranks of the worker's board count, because others cannot get its requests. avoided are
// ranks that the request avoids already. othersExist says whether a rank takes requests that is neither returned nor avoided: the caller
// can send the request there.
func (p *Snapshot) SharingQueueWith(worker int32, avoided []int32) (sameQueue []int32, othersExist bool) {
	refusing := p.ranks[worker]
	if refusing == nil { // the worker is gone, so no request is sent there
		return nil, false
	}
	inGroup := func(r *Rank) bool { return r.Group == refusing.Group }
	inEngine := func(r *Rank) bool { return r.Instance == refusing.Instance }
	sameQueue, anyOtherUp, othersExist := p.splitBoard(refusing.Board, inGroup, avoided)
	if !anyOtherUp { // if all these ranks refused, no rank would be left, so only those of the engine are taken to refuse
		sameQueue, anyOtherUp, othersExist = p.splitBoard(refusing.Board, inEngine, avoided)
	}
	if !anyOtherUp {
		return nil, false
	}
	return sameQueue, othersExist
}

// splitBoard returns the ranks of a board for which isChosen returns true. anyOtherUp says whether any other rank of the board takes
// requests, and otherExists whether such a rank is not in avoided.
func (p *Snapshot) splitBoard(board string, isChosen func(*Rank) bool, avoided []int32) (chosen []int32, anyOtherUp, otherExists bool) {
	for id, r := range p.ranks {
		switch {
		case r.Board != board: // not a rank of this board
		case isChosen(r):
			chosen = append(chosen, id)
		case r.State == Up:
			anyOtherUp = true
			otherExists = otherExists || !slices.Contains(avoided, id)
		}
	}
	return chosen, anyOtherUp, otherExists
}

// host is the host name or address of the rank's engine; empty: not known.
func (r *Rank) host() string {
	if r.Target == nil || r.Target.URL == nil {
		return ""
	}
	return r.Target.URL.Hostname()
}

// RejectionFrees says whether a decode engine that rejects a request also makes the prefill engine free the KV of the hand-off. The profile
// decides, or else the engine's version.
func (p *Snapshot) RejectionFrees(r *Rank) bool {
	if byProfile := r.Profile.RejectReleases; byProfile != nil {
		return *byProfile
	}
	const ifUnknown = false
	return p.engineOrEmpty(r.Instance).hasVersion(rejectReleasesMinor, ifUnknown)
}

// HandoffsNameRequests says whether the hand-offs of the candidate's engine must name the request that made them. A hand-off without the
// name is faulty then, because a decode engine would wait for its KV for ever.
func (p *Snapshot) HandoffsNameRequests(c prefill.Candidate) bool {
	const ifUnknown = false
	return c.Profile.Connector == mooncake.AscendMooncakeV1 && p.engineOrEmpty(c.Instance).hasVersion(requestIDsMinor, ifUnknown)
}

// CountInService returns how many engines are in service, by role, as far as the prefill tier and the dispatcher know them already.
func (p *Snapshot) CountInService() (prefills, decodes int) {
	return p.inService.prefills, p.inService.decodes
}

// CountKnown returns how many engines there are, by role, whether they are up or not.
func (p *Snapshot) CountKnown() (prefills, decodes int) {
	t := countByRole(p.order, func(*Engine) bool { return true })
	return t.prefills, t.decodes
}

// RoleText is how messages about missing engines name the engines of a role (Prefill or Decode). Aggregated engines can do the work of
// either role, so messages name them as well. If all engines are aggregated, messages name only that role.
func (p *Snapshot) RoleText(role string) string {
	anyAggregated, anySplit := false, false
	for _, e := range p.order {
		anyAggregated = anyAggregated || e.Role == Aggregated
		anySplit = anySplit || e.Role != Aggregated
	}
	switch {
	case !anyAggregated: // also if there is no engine at all
		return role
	case !anySplit:
		return Aggregated
	}
	return role + " or " + Aggregated
}

// AnyPrefill returns an engine that prefills and lists the model; nil: no such engine is in service. The search begins at another engine
// for each value of turn (0 or more), so callers that count turn up use the engines in turn.
func (p *Snapshot) AnyPrefill(model string, turn int) *engine.Target {
	for i := range p.order {
		e := p.order[(i+turn)%len(p.order)]
		if e.Role != Decode && e.byHealth.serves() && e.listsModel(model) {
			return e.At(NoRank)
		}
	}
	return nil
}

// SoleEngine is an engine that may serve a whole request alone: no second engine prefills or decodes for it.
type SoleEngine struct {
	Instance string // the id of the engine in engine.Monitor
	ID       string // host:port
	Group    string // groupID of an aggregated engine; empty: the engine is not aggregated
	Target   *engine.Target
	Traffic  *engine.Traffic
}

// SoleEngines returns the engines of this region, of any role, that may serve a request for a model alone and are in service now. computes
// says that the engine has to run the model for the request. paired says that engines list the model, but all of them work only in pairs of
// prefill and decode, so that no engine can ever serve the request alone, whether it is in service or not.
func (p *Snapshot) SoleEngines(model string, computes bool) (list []SoleEngine, paired bool) {
	anyLists, anyWorksAlone := false, false // whether an engine lists the model, and whether one of these may serve it alone
	for _, e := range p.order {
		if e.otherRegion != "" || !e.listsModel(model) {
			continue
		}
		anyLists = true
		if computes && !e.computesAlone(p.order, model) {
			continue
		}
		anyWorksAlone = true
		if e.state.in(Up, Starting) { // in service
			w := SoleEngine{Instance: e.Key(), ID: e.ID, Target: e.At(NoRank), Traffic: e.Traffic}
			if e.Role == Aggregated {
				w.Group = e.groupID()
			}
			list = append(list, w)
		}
	}
	return list, anyLists && !anyWorksAlone
}

// computesAlone says whether an engine may compute a request for a model without another engine. An aggregated engine may. A prefill or
// decode engine may not, because it may wait for its counterpart, unless its profile allows it or, for a decode engine, no engine prefills
// for the model.
func (e *Engine) computesAlone(engines []*Engine, model string) bool {
	switch {
	case e.Role == Aggregated:
		return true
	case e.Profile.Connector == mooncake.SGLang: // the server exits if its DP controller gets a request without a bootstrap room
		return false
	case e.Profile.PassThrough:
		return true
	case e.Role == Prefill:
		return false
	}
	prefills := func(other *Engine) bool { return other.Role == Prefill && other.listsModel(model) }
	return !slices.ContainsFunc(engines, prefills)
}

// CountByScope returns, for every scope, how many engines it has and how many of them are up.
func (p *Snapshot) CountByScope() map[string]owner.EngineCounts {
	all := map[string]owner.EngineCounts{}
	for _, e := range p.order {
		if !e.Decodes() && p.owners.Kind != owner.Regions { // only regions contain engines that do not decode
			continue
		}
		r := all[e.Scope]
		if r.All++; e.Status.Up {
			r.Up++
		}
		all[e.Scope] = r
	}
	return all
}

// BoardsOf returns the boards of the ranks of a decode group, as far as the engines of the group have named their models. They are named as
// in Route.Board, and as OwnsGroupFor and AcceptsNew take them: by the base model alone, without AggregatedMark.
func (p *Snapshot) BoardsOf(name string) (boards []string) {
	for _, e := range p.order {
		if !e.Decodes() || e.Conf.Group != name || len(e.Status.Models) == 0 {
			continue
		}
		if b := e.baseModel(); !slices.Contains(boards, b) {
			boards = append(boards, b)
		}
	}
	return boards
}

// OwnsGroupFor says whether this proxy owns a decode group with ranks of the board that list the model. It is true if groups have no
// owners.
func (p *Snapshot) OwnsGroupFor(board, model string) bool {
	return p.owners.Kind != owner.Groups ||
		slices.ContainsFunc(p.order, func(e *Engine) bool { return e.decodesFor(board, model) && e.ownerScope.Admits() })
}

// AcceptsNew says whether this proxy may begin requests for a model that ranks of the board will decode: it owns such ranks, and is not
// about to hand them over. An empty model stands for any model. The result is true if groups have no owners.
func (p *Snapshot) AcceptsNew(board, model string) bool {
	return p.owners.Kind != owner.Groups ||
		slices.ContainsFunc(p.order, func(e *Engine) bool { return e.decodesFor(board, model) && e.ownerScope.AcceptsNew() })
}

// Admits says whether this proxy may send new requests to a worker, because it owns the worker's region. It is true if regions have no
// owners, or if the worker is not known.
func (p *Snapshot) Admits(worker int32) bool {
	r := p.Rank(worker)
	return r == nil || p.owners.Kind != owner.Regions || r.Scope.Admits()
}

// RegionFor is the region in which a hand-off of a prefill engine is decoded; empty: the proxy's own.
func (p *Snapshot) RegionFor(prefiller string) string { return p.engineOrEmpty(prefiller).otherRegion }

// LongestContext is the longest context of an engine's models, in tokens; 0: the context of a base model is unknown.
func (p *Snapshot) LongestContext(key string) int { return p.engineOrEmpty(key).longestContext() }

// Ranks is how many data-parallel ranks an engine has behind its address.
func (p *Snapshot) Ranks(instance string) int { return max(1, p.engineOrEmpty(instance).Conf.Ranks) }

// emptyEngine stands for an engine that does not exist, so that callers need no check for nil.
var emptyEngine = &Engine{Profile: &mooncake.Profile{}}

// engineOrEmpty finds an engine by its key; emptyEngine: there is none.
func (p *Snapshot) engineOrEmpty(key string) *Engine {
	if e := p.engines[key]; e != nil {
		return e
	}
	return emptyEngine
}

// Engine finds an engine by its key (role and host:port); nil: there is none.
func (p *Snapshot) Engine(key string) *Engine { return p.engines[key] }

// Engines are all engines, in the order of the config and then of arrival.
func (p *Snapshot) Engines() []*Engine { return p.order }

// GenerationAt returns the generation of the KV that the engine at an address makes now.
func (p *Snapshot) GenerationAt(key string) Generation {
	return Generation{key, p.engineOrEmpty(key).kv.number}
}

// KVInDoubt says whether the engine may no longer have KV that it made, so that a hand-off for it must
// not be used. gone says that the engine certainly does not have it.
func (p *Snapshot) KVInDoubt(made Generation) (inDoubt, gone bool) {
	kv := p.departed[made.Key].kv
	if e := p.engines[made.Key]; e != nil {
		kv = e.kv
	}
	return made.Number == 0 || made.Number != kv.number, made.Number < kv.goneBefore
}

// NamesNothingNew says that the engine id in a hand-off tells nothing: it is the one that hand-offs of
// its generation name, the generation is over, or there is none (empty).
func (p *Snapshot) NamesNothingNew(made Generation, engineID string) bool {
	e := p.engines[made.Key]
	return e == nil || engineID == "" || e.Profile.SharedAddress || made.Number != e.kv.number ||
		withoutRank(engineID) == e.kv.engineID
}

// HostsOf returns a function that says whether a host belongs to an engine. Callbacks of a decode engine may name no other host, and
// prefill engines may fetch the engine's KV from no other host.
func (p *Snapshot) HostsOf(key string) func(host string) bool {
	hosts := p.engineOrEmpty(key).Hosts
	return func(host string) bool { return slices.Contains(hosts, host) }
}

// CallsBack says whether an address belongs to a decode engine that calls the proxy back.
func (p *Snapshot) CallsBack(a netip.Addr) bool {
	address := a.Unmap().WithZone("").String()
	return slices.ContainsFunc(p.order, func(e *Engine) bool { return e.CallsBack() && slices.Contains(e.Hosts, address) })
}

// KnownHost says whether hand-offs may tell decode engines to fetch KV from a host.
func (p *Snapshot) KnownHost(host string, now time.Time) bool {
	trusted := p.hosts[host]
	return trusted.engines > 0 || now.Before(trusted.trustedUntil)
}
