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

// Lookup finds the route of a model. modelsKnown is false while no engine has named its models, so
// that the model may still turn up. If no engine lists it, the route has only AllAggregated.
func (p *Snapshot) Lookup(model string) (r Route, listed, modelsKnown bool) {
	if r, listed = p.routes[model]; !listed {
		r.AllAggregated = len(p.order) > 0 // false without any engine
		for _, e := range p.order {
			r.AllAggregated = r.AllAggregated && e.Role == Aggregated
		}
	}
	return r, listed, len(p.routes) > 0
}

// Models leaves out models that only engines of one side list (OneSided). A model of which one side
// is down stays: that side may come back.
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

// SoleModel is the only base model of the engines, even if down, and of other regions; empty: there
// are several, or none is known yet.
func (p *Snapshot) SoleModel(offered []string) (baseModel string) {
	for _, r := range p.routes {
		if baseModel != "" && r.Board != baseModel {
			return ""
		}
		baseModel = r.Board // a route's board has the name of its base model
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

// Rank returns nil if there is no such worker, or its engine left long ago.
func (p *Snapshot) Rank(worker int32) *Rank { return p.ranks[worker] }

// RankByName returns nil if there is no such decode rank, or if it is on no board because its
// engine names no models now.
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

// WorkerByName finds a decode rank by its name, and returns its worker id.
func (p *Snapshot) WorkerByName(name, baseModel, model string) (worker int32, ok bool) {
	r, _ := p.RankByName(name)
	if r == nil {
		return 0, false
	}
	e := p.engineOrEmpty(r.Instance)
	return r.Worker, e.listsModel(model) && e.baseModel() == baseModel
}

// FailingWith adds to list the ranks that may fail together with a worker: those behind the same
// API server and, with sameHost, on the same host: a host with a broken driver or disk has many
// ranks, which look free because every request there fails at once. It spares the host if no other
// host could take the request.
func (p *Snapshot) FailingWith(worker int32, sameHost bool, list []int32) []int32 {
	failed := p.ranks[worker]
	if failed == nil { // no request is sent there
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

// SharingQueueWith returns the ranks that are likely to refuse requests because a worker did, e.g.
// by one rate limit: those of its group, or only of its engine if no other group takes requests. It
// returns none if no other rank takes requests. othersExist: the caller can send the request to a
// rank that is neither returned nor avoided.
func (p *Snapshot) SharingQueueWith(worker int32, avoided []int32) (sameQueue []int32, othersExist bool) {
	refusing := p.ranks[worker]
	if refusing == nil { // no request is sent there
		return nil, false
	}
	inGroup := func(r *Rank) bool { return r.Group == refusing.Group }
	inEngine := func(r *Rank) bool { return r.Instance == refusing.Instance }
	sameQueue, anyOtherUp, othersExist := p.splitBoard(refusing.Board, inGroup, avoided)
	if !anyOtherUp { // else no rank would be left
		sameQueue, anyOtherUp, othersExist = p.splitBoard(refusing.Board, inEngine, avoided)
	}
	if !anyOtherUp {
		return nil, false
	}
	return sameQueue, othersExist
}

func (p *Snapshot) splitBoard(board string, isChosen func(*Rank) bool, avoided []int32) (chosen []int32, anyOtherUp, otherExists bool) {
	for id, r := range p.ranks {
		switch {
		case r.Board != board:
		case isChosen(r):
			chosen = append(chosen, id)
		case r.State == Up:
			anyOtherUp = true
			otherExists = otherExists || !slices.Contains(avoided, id)
		}
	}
	return chosen, anyOtherUp, otherExists
}

func (r *Rank) host() string {
	if r.Target == nil || r.Target.URL == nil {
		return ""
	}
	return r.Target.URL.Hostname()
}

// RejectionFrees says whether a decode engine that rejects a request makes the prefill engine free
// the KV.
func (p *Snapshot) RejectionFrees(r *Rank) bool {
	if byProfile := r.Profile.RejectReleases; byProfile != nil {
		return *byProfile
	}
	const ifUnknown = false
	return p.engineOrEmpty(r.Instance).hasVersion(rejectReleasesMinor, ifUnknown)
}

// HandoffsNameRequests says whether a hand-off without the name of its request is faulty: a decode
// engine would wait for its KV for ever.
func (p *Snapshot) HandoffsNameRequests(c prefill.Candidate) bool {
	const ifUnknown = false
	return c.Profile.Connector == mooncake.AscendMooncakeV1 && p.engineOrEmpty(c.Instance).hasVersion(requestIDsMinor, ifUnknown)
}

// CountInService counts engines that the prefill tier and the dispatcher know already.
func (p *Snapshot) CountInService() (prefills, decodes int) {
	return p.inService.prefills, p.inService.decodes
}

// CountKnown counts engines, up or not.
func (p *Snapshot) CountKnown() (prefills, decodes int) {
	t := countByRole(p.order, func(*Engine) bool { return true })
	return t.prefills, t.decodes
}

// RoleText names the engines of a role in messages. Aggregated engines can do the work of either
// role.
func (p *Snapshot) RoleText(role string) string {
	anyAggregated, anySplit := false, false
	for _, e := range p.order {
		anyAggregated = anyAggregated || e.Role == Aggregated
		anySplit = anySplit || e.Role != Aggregated
	}
	switch {
	case !anyAggregated: // also without any engine
		return role
	case !anySplit:
		return Aggregated
	}
	return role + " or " + Aggregated
}

// AnyPrefill returns an engine that prefills and lists the model; nil: none is in service. With a
// growing turn (0 or more) the engines take turns.
func (p *Snapshot) AnyPrefill(model string, turn int) *engine.Target {
	for i := range p.order {
		e := p.order[(i+turn)%len(p.order)]
		if e.Role != Decode && e.byHealth.serves() && e.listsModel(model) {
			return e.At(NoRank)
		}
	}
	return nil
}

// SoleEngine is an engine that may serve a whole request alone.
type SoleEngine struct {
	Instance string // in engine.Monitor
	ID       string
	Group    string // of an aggregated engine; else empty
	Target   *engine.Target
	Traffic  *engine.Traffic
}

// SoleEngines returns the engines of this region in service that may serve a request alone.
// computes: the engine has to run the model. paired: all engines of the model work only in pairs,
// so that none can ever serve the request alone.
func (p *Snapshot) SoleEngines(model string, computes bool) (list []SoleEngine, paired bool) {
	anyLists, anyWorksAlone := false, false
	for _, e := range p.order {
		if e.otherRegion != "" || !e.listsModel(model) {
			continue
		}
		anyLists = true
		if computes && !e.computesAlone(p.order, model) {
			continue
		}
		anyWorksAlone = true
		if e.state.in(Up, Starting) {
			w := SoleEngine{Instance: e.Key(), ID: e.ID, Target: e.At(NoRank), Traffic: e.Traffic}
			if e.Role == Aggregated {
				w.Group = e.groupID()
			}
			list = append(list, w)
		}
	}
	return list, anyLists && !anyWorksAlone
}

// computesAlone: a prefill or decode engine may wait for its counterpart, unless its profile allows
// requests without or, for a decode engine, no engine prefills for the model.
func (e *Engine) computesAlone(engines []*Engine, model string) bool {
	switch {
	case e.Role == Aggregated:
		return true
	// the server exits if its DP controller gets a request without a bootstrap room
	case e.Profile.Connector == mooncake.SGLang:
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
		if !e.Decodes() && p.owners.Kind != owner.Regions { // only regions contain prefill engines
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

// BoardsOf returns the boards of a decode group, without AggregatedMark, as OwnsGroupFor and
// AcceptsNew take them.
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

// OwnsGroupFor is true if groups have no owners.
func (p *Snapshot) OwnsGroupFor(board, model string) bool {
	return p.owners.Kind != owner.Groups ||
		slices.ContainsFunc(p.order, func(e *Engine) bool { return e.decodesFor(board, model) && e.ownerScope.Admits() })
}

// AcceptsNew says whether this proxy owns ranks of the board and is not about to hand them over. An
// empty model stands for any. It is true if groups have no owners.
func (p *Snapshot) AcceptsNew(board, model string) bool {
	return p.owners.Kind != owner.Groups ||
		slices.ContainsFunc(p.order, func(e *Engine) bool { return e.decodesFor(board, model) && e.ownerScope.AcceptsNew() })
}

// Admits says whether this proxy owns the worker's region. It is true if regions have no owners, or
// if the worker is not known.
func (p *Snapshot) Admits(worker int32) bool {
	r := p.Rank(worker)
	return r == nil || p.owners.Kind != owner.Regions || r.Scope.Admits()
}

// RegionFor is where a hand-off of a prefill engine is decoded; empty: the proxy's own region.
func (p *Snapshot) RegionFor(prefiller string) string { return p.engineOrEmpty(prefiller).otherRegion }

// LongestContext is in tokens; 0: the context of a base model is unknown.
func (p *Snapshot) LongestContext(key string) int { return p.engineOrEmpty(key).longestContext() }

// Ranks is how many data-parallel ranks an engine has behind its address.
func (p *Snapshot) Ranks(instance string) int { return max(1, p.engineOrEmpty(instance).Conf.Ranks) }

// so that callers need no check for nil
var emptyEngine = &Engine{Profile: &mooncake.Profile{}}

func (p *Snapshot) engineOrEmpty(key string) *Engine {
	if e := p.engines[key]; e != nil {
		return e
	}
	return emptyEngine
}

// Engine returns nil if there is none.
func (p *Snapshot) Engine(key string) *Engine { return p.engines[key] }

// Engines are in the order of the config and then of arrival.
func (p *Snapshot) Engines() []*Engine { return p.order }

// GenerationAt returns the generation of the KV that the engine at an address makes now.
func (p *Snapshot) GenerationAt(key string) Generation {
	return Generation{key, p.engineOrEmpty(key).kv.number}
}

// KVInDoubt says whether the engine may no longer have its KV, so that a hand-off for it must not
// be used; gone: it certainly does not have it.
func (p *Snapshot) KVInDoubt(made Generation) (inDoubt, gone bool) {
	kv := p.departed[made.Key].kv
	if e := p.engines[made.Key]; e != nil {
		kv = e.kv
	}
	return made.Number == 0 || made.Number != kv.number, made.Number < kv.goneBefore
}

// NamesNothingNew says that the engine id in a hand-off is that of its generation, that the
// generation is over, or that there is no id.
func (p *Snapshot) NamesNothingNew(made Generation, engineID string) bool {
	e := p.engines[made.Key]
	return e == nil || engineID == "" || e.Profile.SharedAddress || made.Number != e.kv.number ||
		withoutRank(engineID) == e.kv.engineID
}

// HostsOf returns whether a host belongs to an engine. Callbacks of a decode engine may name no
// other host, and prefill engines may fetch its KV from no other.
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
