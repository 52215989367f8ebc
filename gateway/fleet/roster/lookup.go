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

// Lookup finds a model's route. known is false while no engine has named its models: then an unknown name proves
// nothing. For a model that no engine has named, the route only says which kinds of engines there are.
func (p *Published) Lookup(model string) (r Route, ok, known bool) {
	if r, ok = p.routes[model]; !ok {
		r.Mixed = len(p.order) > 0
		for _, e := range p.order {
			r.Mixed = r.Mixed && e.Role == Aggregated
		}
	}
	return r, ok, len(p.routes) > 0
}

// Models returns the routes of the models that some healthy engine serves.
func (p *Published) Models() []Route {
	var list []Route
	for _, r := range p.routes {
		if (r.Prefill || r.Decode) && !r.Half {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b Route) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Sole is the name of the only base model that the engines serve, counting those that are down; empty: they serve several base
// models, or no engine has named its models yet.
func (p *Published) Sole() (baseModel string) {
	for _, r := range p.routes {
		if baseModel != "" && r.Board != baseModel {
			return ""
		}
		baseModel = r.Board // the board of a route has the name of its base model
	}
	return baseModel
}

// Rank finds the rank of a worker. Assignments name only workers that the fleet has published.
func (p *Published) Rank(worker int32) *Rank { return p.ranks[worker] }

// Named finds a decode rank by its name, and the board that it serves; nil: no such rank serves a board.
func (p *Published) Named(name string) (r *Rank, board string) {
	id, ok := p.workers[name]
	if r = p.ranks[id]; !ok || r == nil {
		return nil, ""
	}
	e := p.at(r.Instance)
	if len(e.Status.Models) == 0 {
		return nil, ""
	}
	return r, e.board
}

// RankOf finds the decode rank of that name. ok is false if there is none, or if it does not serve the board or list the model.
func (p *Published) RankOf(name, board, model string) (worker int32, ok bool) {
	r, _ := p.Named(name)
	if r == nil {
		return 0, false
	}
	e := p.at(r.Instance)
	return r.Worker, e.has(model) && e.base() == board
}

// Beside adds to list the workers that may fail together with a worker, itself included: those behind the same API
// server. If host is true, it also adds those on the same host, as long as another host has a rank of the same board that takes requests
// and is not in list. A host with a broken driver or disk has many ranks, and all of them are free because they fail at once.
func (p *Published) Beside(worker int32, host bool, list []int32) []int32 {
	one := p.ranks[worker]
	if one == nil { // the worker is gone, and no request is sent there
		return list
	}
	added := func(r *Rank) bool { return r.Instance == one.Instance }
	if hostName := one.host(); host && hostName != "" {
		onSameHost := func(r *Rank) bool { return r.Instance == one.Instance || r.host() == hostName }
		for id, r := range p.ranks {
			if r.State == Up && r.Board == one.Board && !onSameHost(r) && !slices.Contains(list, id) {
				added = onSameHost
				break
			}
		}
	}
	for id, r := range p.ranks {
		if added(r) && !slices.Contains(list, id) {
			list = append(list, id)
		}
	}
	return list
}

// Around returns the ranks that may refuse requests when a worker does, because one limit or one proxy is in front of
// all of them: the ranks of its group, or, if no rank of another group takes requests, those of its engine. It
// returns none if no other rank than these takes requests. Only ranks of the same board count. others says that a rank takes requests
// which is neither among these nor in list.
func (p *Published) Around(worker int32, list []int32) (around []int32, others bool) {
	one := p.ranks[worker]
	if one == nil { // the worker is gone, and no request is sent there
		return nil, false
	}
	for _, isAround := range [...]func(*Rank) bool{
		func(r *Rank) bool { return r.Group == one.Group },
		func(r *Rank) bool { return r.Instance == one.Instance },
	} {
		elsewhere := false
		around = around[:0]
		for id, r := range p.ranks {
			switch {
			case r.Board != one.Board:
			case isAround(r):
				around = append(around, id)
			case r.State == Up:
				elsewhere, others = true, others || !slices.Contains(list, id)
			}
		}
		if elsewhere {
			return around, others
		}
	}
	return nil, false
}

// host is the host name or address of the rank's engine; empty: it is not known.
func (r *Rank) host() string {
	if r.Target == nil || r.Target.URL == nil {
		return ""
	}
	return r.Target.URL.Hostname()
}

// RejectionFrees says whether a decode engine that answers a request with an error status is known to make the
// prefill engine free the KV of the hand-off: by its profile, else by its version.
func (p *Published) RejectionFrees(r *Rank) bool {
	if byProfile := r.Profile.RejectReleases; byProfile != nil {
		return *byProfile
	}
	return p.at(r.Instance).reaches(rejectReleasesMinor, false)
}

// NamesRequests says whether hand-offs of an engine's version name the request that made them. A hand-off of such a
// version without the name is faulty: a decode engine would wait for its KV for ever.
func (p *Published) NamesRequests(c prefill.Candidate) bool {
	return c.Profile.Connector == mooncake.AscendMooncakeV1 && p.at(c.Instance).reaches(requestIDsMinor, false)
}

// Up counts the engines that take requests now and that the tier and the dispatcher know.
func (p *Published) Up() (prefills, decodes int) { return p.ready.prefills, p.ready.decodes }

// Count counts all engines.
func (p *Published) Count() (prefills, decodes int) {
	t := count(p.order, func(*Engine) bool { return true })
	return t.prefills, t.decodes
}

// Kind is how messages about missing engines name the engines of a role. If there are engines that prefill and decode (Aggregated), they
// can stand in for the role: they are named, too, or alone if there are no others.
func (p *Published) Kind(role string) string {
	anyAggregated, anySplit := false, len(p.order) == 0
	for _, e := range p.order {
		anyAggregated, anySplit = anyAggregated || e.Role == Aggregated, anySplit || e.Role != Aggregated
	}
	switch {
	case !anyAggregated:
		return role
	case !anySplit:
		return Aggregated
	}
	return role + " or " + Aggregated
}

// AnyPrefill is an engine that prefills and serves a model; nil: none is up. turn is any number: with other turns, other engines are
// returned.
func (p *Published) AnyPrefill(model string, turn int) *engine.Target {
	for i := range p.order {
		e := p.order[(i+turn)%len(p.order)]
		if e.Role != Decode && e.healthy.serves() && e.has(model) {
			return e.At(-1)
		}
	}
	return nil
}

// Whole is an engine that may serve a request for a model alone.
type Whole struct {
	Instance string // the id of the engine in engine.Monitor
	ID       string // host:port
	Group    string // its group of ranks that prefill and decode; empty: it has none
	Target   *engine.Target
	Traffic  *engine.Traffic
}

// Wholes returns the engines of this region, of any role, that may serve a request for a model alone, and serve the model now. computes
// says that the model runs for the request. paired says that all engines of the model work only in pairs, so that no engine may serve such
// a request, now or later.
func (p *Published) Wholes(model string, computes bool) (list []Whole, paired bool) {
	known, mayServe := false, false
	for _, e := range p.order {
		if !e.has(model) || e.otherRegion != "" {
			continue
		}
		known = true
		if computes && !e.computesAlone(p.order, model) {
			continue
		}
		mayServe = true
		if e.state.in(Up, Starting) {
			w := Whole{Instance: e.Key(), ID: e.ID, Target: e.At(-1), Traffic: e.Traffic}
			if e.Role == Aggregated {
				w.Group = e.groupID()
			}
			list = append(list, w)
		}
	}
	return list, known && !mayServe
}

// computesAlone says whether an engine may compute a request for a model without another engine. An engine that is
// half of a pair may not, unless its profile says so: it was started for its half, and some wait for their
// counterpart. An engine of SGLang never may: its server ends when its DP controller gets a request without a room.
func (e *Engine) computesAlone(engines []*Engine, model string) bool {
	switch {
	case e.Role == Aggregated:
		return true
	case e.Profile.Connector == mooncake.SGLang:
		return false
	case e.Profile.PassThrough:
		return true
	case e.Role == Prefill:
		return false
	}
	return !slices.ContainsFunc(engines, func(other *Engine) bool { return other.Role == Prefill && other.has(model) })
}

// Scopes counts, for every scope, its engines and those of them that are up.
func (p *Published) Scopes() map[string]owner.Reach {
	all := map[string]owner.Reach{}
	for _, e := range p.order {
		if !e.Decodes() && p.owners.Kind != owner.Regions { // a decode group has only engines that decode; a region has all of its engines
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

// BoardsOf returns the boards of the ranks of a decode group, as far as their engines have named their models.
func (p *Published) BoardsOf(name string) (boards []string) {
	for _, e := range p.order {
		if !e.Decodes() || e.Conf.Group != name || len(e.Status.Models) == 0 {
			continue
		}
		if b := e.base(); !slices.Contains(boards, b) {
			boards = append(boards, b)
		}
	}
	return boards
}

// Owned says whether this proxy owns a decode group with ranks of a board that list a model.
func (p *Published) Owned(board, model string) bool {
	return p.owners.Kind != owner.Groups ||
		slices.ContainsFunc(p.order, func(e *Engine) bool { return e.decodesFor(board, model) && e.fence.Admits() })
}

// Begins says whether this proxy may begin requests for a model that ranks of a board will decode; an empty model
// stands for any model.
func (p *Published) Begins(board, model string) bool {
	return p.owners.Kind != owner.Groups ||
		slices.ContainsFunc(p.order, func(e *Engine) bool { return e.decodesFor(board, model) && e.fence.Begins() })
}

// Admits says whether this proxy is the owner of a worker's region.
func (p *Published) Admits(worker int32) bool {
	r := p.Rank(worker)
	return r == nil || p.owners.Kind != owner.Regions || r.Scope.Admits()
}

// RegionFor is the region in which a hand-off of a prefill engine is decoded; empty: ours.
func (p *Published) RegionFor(prefiller string) string { return p.at(prefiller).otherRegion }

// Context is the longest context of an engine's models in tokens, by the engine's key; 0 if that of a base model is
// unknown.
func (p *Published) Context(key string) int { return p.at(key).context() }

// Ranks is how many data-parallel ranks an engine has behind its address.
func (p *Published) Ranks(instance string) int { return max(1, p.at(instance).Conf.Ranks) }

// nowhere stands for an engine that does not exist.
var nowhere = &Engine{Profile: &mooncake.Profile{}, processes: &Processes{}}

// at finds an engine by its key; nowhere if there is none.
func (p *Published) at(key string) *Engine {
	if e := p.engines[key]; e != nil {
		return e
	}
	return nowhere
}

// Engine finds an engine by its key; nil: there is none.
func (p *Published) Engine(key string) *Engine { return p.engines[key] }

// Engines are all engines, in the order of the config and then of arrival.
func (p *Published) Engines() []*Engine { return p.order }

// Born returns the engine and the process that are at an address now.
func (p *Published) Born(key string) Birth {
	e := p.at(key)
	return Birth{e.Incarnation, key, e.processes.Newest()}
}

// Made is the birth of a hand-off that names that engine id, from a candidate whose birth was b when its probe was
// sent. known is false if the hand-off shows something that the roster does not know. The caller must then apply
// Handed, and ask again.
func (p *Published) Made(b Birth, candidate, id string) (made Birth, known bool) {
	e := p.engines[b.Key]
	if e == nil || e.Incarnation != b.Incarnation || id == "" {
		return b, true
	}
	next, process, _ := e.processes.Made(b.Process, candidate, id, time.Time{})
	b.Process = process
	return b, next == e.processes
}

// Outlived says whether the process that made a hand-off is gone, or may be; sure says which. If it is gone, a decode
// engine would ask the process at its address for blocks that this process never made.
func (p *Published) Outlived(b Birth) (gone, sure bool) {
	e := p.engines[b.Key]
	if e == nil || e.Incarnation != b.Incarnation {
		_, dead := p.dead[b.Incarnation]
		dead = dead && b.Incarnation != ""
		return dead, dead
	}
	fate := e.processes.Fate(b.Process)
	return fate != Known, fate == Gone
}

// HostsOf returns a function that says whether a host is one of an engine's: the engine's callback may name no other
// host.
func (p *Published) HostsOf(key string) func(host string) bool {
	hosts := p.at(key).Hosts
	return func(host string) bool { return slices.Contains(hosts, host) }
}

// CallsBack says whether an address is that of a decode engine that calls back.
func (p *Published) CallsBack(a netip.Addr) bool {
	address := a.Unmap().WithZone("").String()
	return slices.ContainsFunc(p.order, func(e *Engine) bool { return e.CallsBack() && slices.Contains(e.Hosts, address) })
}

// KnownHost says whether a hand-off may point decode engines at a host.
func (p *Published) KnownHost(host string, now time.Time) bool {
	trusted := p.hosts[host]
	return trusted.engines > 0 || now.Before(trusted.until)
}
