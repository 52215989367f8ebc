package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/engine/discover"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/fleetcall"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/reload"
	"evenkeel/gateway/service"
	"evenkeel/gateway/watch"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// This file has the methods with which operators ask and change the proxy while it runs. Package
// admin serves them over HTTP.

// Status describes the whole proxy at one instant.
type Status struct {
	Ready      bool                      `json:"ready"`
	Why        string                    `json:"why,omitempty"` // why the proxy is not ready; empty: it is ready
	Started    time.Time                 `json:"started"`
	Open       int64                     `json:"open_requests"`
	PoolPlaces int                       `json:"pool_places"`
	PoolUsed   int                       `json:"pool_places_used"`
	Config     reload.ConfigStatus       `json:"config"`
	Drain      *service.DrainState       `json:"drain,omitempty"` // drain of the proxy itself; nil: it does not drain
	HA         *owner.HAStatus           `json:"ha,omitempty"`
	Engines    []EngineStatus            `json:"engines"`
	Drains     []DrainStatus             `json:"drains"` // engines and ranks that drain, with the requests that still run there
	Pauses     []roster.Pause            `json:"pauses"` // groups of engines that are paused, or all engines
	Discovery  *discover.Status          `json:"discovery,omitempty"`
	Prefill    []prefill.CandidateStatus `json:"prefill"`
	Batch      prefill.BatchStatus       `json:"batch"`
	Dispatch   board.Status              `json:"dispatch"`
	Advice     []advice.Advice           `json:"advice,omitempty"` // how many ranks each model needs; empty: no advice, or none yet
}

// EngineStatus describes one engine: whether it answers, its state and the reason, and its models.
type EngineStatus = roster.EngineStatus

// DrainStatus lists the requests that still run on an engine or rank that drains.
type DrainStatus = roster.DrainStatus

// Status returns the status of all parts of the proxy now. Engines and boards are asked one after
// the other.
func (g *Gateway) Status(ctx context.Context) Status {
	ready, why := g.Ready()
	dispatch := g.dispatcher.Status(ctx)
	engines := g.fleet.Now() // read after dispatch, so that engines has all ranks that dispatch names
	s := Status{
		Ready: ready, Why: why, Started: g.started, Open: g.requests.Open(), PoolPlaces: g.places.Size(), PoolUsed: g.places.Used(),
		Config: *g.config.Status(), Drain: g.service.State(), HA: g.HA(),
		Engines: engines.Statuses(), Prefill: g.scheduler.Status(), Batch: g.scheduler.Batch(), Dispatch: dispatch,
		Advice: g.advice.Latest(),
	}
	fillInSyncWaits(&s.Dispatch, g.Gauges) // from the engines' metrics, because only the engines count these waits
	fillInStates(&s.Dispatch, engines)     // from the fleet, because the dispatcher does not know these states
	s.Pauses = engines.Pauses()
	s.Drains, s.Discovery = engines.DrainStatuses(s.Dispatch, s.Prefill), g.discovery.State()
	return s
}

// fillInSyncWaits fills in how long the ranks of each group wait for each other. The engines count
// this, and the boards do not know it. It changes copies only, because a dispatcher that has ended
// returns the same status to all callers.
func fillInSyncWaits(s *board.Status, gaugesOf func(rank int32) (Gauges, bool)) {
	s.Models = slices.Clone(s.Models)
	for i := range s.Models {
		m := &s.Models[i]
		m.Groups = slices.Clone(m.Groups)
		for j := range m.Groups {
			g := &m.Groups[j]
			if ms, known := meanSyncWait(m.Workers, g.Name, gaugesOf); known && g.Step != nil {
				step := *g.Step
				step.SyncWaitMs = ms
				g.Step = &step
			}
		}
	}
}

// fillInStates fills in the state of each rank and its reason. It changes copies only, because a
// dispatcher that has ended returns the same status to all callers.
func fillInStates(s *board.Status, engines *roster.Snapshot) {
	s.Models = slices.Clone(s.Models)
	for i := range s.Models {
		m := &s.Models[i]
		m.Workers = slices.Clone(m.Workers)
		for j := range m.Workers {
			w := &m.Workers[j]
			state := roster.Absent // Absent: the rank is not in the fleet any more
			if r := engines.Rank(w.ID); r != nil && !w.Removed {
				state = r.State
			}
			w.State, w.Why = state.String(), state.Why()
		}
	}
}

// meanSyncWait returns how long the ranks of a barrier group wait for each other, as a mean in ms.
// known is false if no engine counts these waits.
func meanSyncWait(ranks []board.WorkerStatus, group string, gaugesOf func(rank int32) (Gauges, bool)) (ms float64, known bool) {
	sum, counting := 0.0, 0 // counting: ranks whose engine counts the waits
	for i := range ranks {
		w := &ranks[i]
		stepsInGroup := w.Barrier && w.Group == group && !w.Down && !w.Removed
		if !stepsInGroup {
			continue
		}
		if gauges, ok := gaugesOf(w.ID); ok && gauges.WaitMs >= 0 { // below 0: the engine does not count these waits
			sum, counting = sum+gauges.WaitMs, counting+1
		}
	}
	return sum / float64(max(1, counting)), counting > 0
}

// Receipts returns the receipts of all requests that run and of the last ones that ended; nil: no
// receipts are kept.
func (g *Gateway) Receipts() *receipt.Ring { return g.journal.Receipts }

// Recent returns how long the requests of the last minute took, and how many failed.
func (g *Gateway) Recent() journal.Recent { return g.journal.Recent() }

// Watch returns the watch, which samples this proxy each second and finds incidents.
func (g *Gateway) Watch() *watch.Watch { return g.watch }

// Gauges are the metrics that an engine exports for one of its ranks.
type Gauges = engine.Gauges

// Gauges returns the last metrics that an engine exported for a decode rank. ok is false if they
// could not be read lately.
func (g *Gateway) Gauges(worker int32) (gauges Gauges, ok bool) {
	r := g.fleet.Now().Rank(worker)
	if r == nil { // the rank has left the fleet
		return gauges, false
	}
	return g.monitor.Gauges(r.Instance, r.Target.Rank)
}

// Config returns the config in force, which a reload replaces by another.
func (g *Gateway) Config() *config.Config { return g.conf().Config }

// Reloader returns the reloader, which has the config in force and the contents of the files that
// the config names.
func (g *Gateway) Reloader() *reload.Reloader { return g.config }

// Geo returns what this proxy knows of proxies in other regions; nil: there are none.
func (g *Gateway) Geo() *geo.Peers { return g.peers.Geo() }

// GeoAddr is the address to which proxies in other regions connect; empty: there are none.
func (g *Gateway) GeoAddr() string { return g.peers.Addr() }

// BindAddr is the address that decode engines call back; empty: no decode engine calls back.
func (g *Gateway) BindAddr() string { return g.callbacks.Addr() }

// Owners lists the regions whose engines this proxy may serve. It is empty if the config has no
// ownership of regions.
func (g *Gateway) Owners() []owner.RegionStatus { return g.owner.RegionsStatus() }

// HA says which decode groups this proxy owns; nil: no other proxy shares them.
func (g *Gateway) HA() *owner.HAStatus { return g.owner.GroupsStatus() }

// Routes lists the routes of the public listener, each with its method, such as GET /health.
func (g *Gateway) Routes() []string { return g.admission.Routes() }

// Service returns the part that knows whether this proxy drains.
func (g *Gateway) Service() *service.Service { return g.service }

// Registry holds every metric of the proxy.
func (g *Gateway) Registry() *prometheus.Registry { return g.reg }

// Policy is the text of the decode policy in force, as in dispatch.policy.
func (g *Gateway) Policy() string { return g.dispatcher.Policy() }

// SetPolicy changes the decode policy from the next tick on. An unknown policy is an error and
// changes nothing.
func (g *Gateway) SetPolicy(spec string) error { return g.dispatcher.SetPolicy(spec) }

// Prefill returns the prefill tier, whose policy operators may change.
func (g *Gateway) Prefill() *prefill.Scheduler { return g.scheduler }

// ScorePrefill asks every prefill policy to which engine it would send the request with this body.
// A body with messages is a chat, and any other body a completion. Nothing is sent.
func (g *Gateway) ScorePrefill(raw []byte) ([]prefill.Scored, error) {
	var body struct {
		Messages json.RawMessage `json:"messages"`
	}
	if err := json.Unmarshal(raw, &body); err != nil {
		return nil, fmt.Errorf("the body is not JSON: %w", err)
	}
	ep := mooncake.Completions
	if body.Messages != nil {
		ep = mooncake.Chat
	}
	req, fail := openai.Parse(ep, raw, g.admission.Limits())
	if fail != nil {
		return nil, errors.New(fail.Message)
	}
	route, _, _ := g.fleet.Now().Lookup(req.Model)
	route.Name = req.Model // Lookup leaves the name empty if no engine lists the model
	return g.requests.Score(req, route)
}

// ErrNoSuchEngine is the error of Remove and DrainEngine for an unknown id.
var ErrNoSuchEngine = roster.ErrNoSuchEngine

// Add registers an engine of a role: "prefill", "decode" or "aggregated". If an engine with the
// same host:port is registered already, Add replaces its settings, keeps its requests, and ends its
// drain.
func (g *Gateway) Add(role string, e config.Engine) error {
	if !slices.Contains(config.Roles, role) {
		return fmt.Errorf("%q is not a role; write prefill, decode or aggregated", role)
	}
	e, err := g.conf().Complete(role, e)
	if err != nil {
		return err
	}
	return g.fleet.Add(role, e)
}

// Remove removes an engine by its host:port. Requests that run on it finish.
func (g *Gateway) Remove(role, id string) error { return g.fleet.Remove(role, id) }

// DrainEngine sends no new requests to an engine (host:port), or to one of its ranks
// (host:port/rank). If limit is above 0, requests that still run after that time move to another
// engine, or end with an error event where they cannot. Prefills that have finished are decoded all
// the same. A second call sets another limit. Once DrainEngine has returned, no further request is
// bound to the engine, and its status counts all that were bound before.
func (g *Gateway) DrainEngine(role, id string, limit time.Duration) error {
	return g.fleet.Drain(role, id, limit)
}

// UndrainEngine ends the drain of an engine or rank, which then takes requests again.
func (g *Gateway) UndrainEngine(role, id string) error { return g.fleet.Undrain(role, id) }

// ForgetPrefixes drops what is known of the prefix cache of a prefill engine, or of all engines,
// decode engines as well, if id is empty. found is false if there is no such engine.
func (g *Gateway) ForgetPrefixes(id string) (found bool) {
	if id == "" {
		g.rankCaches.Forget(g.rankCaches.IDs())
	}
	return g.scheduler.ForgetPrefixes(id)
}

// forgetCaches drops what is known of the prefix caches of these prefill engines and these decode
// ranks.
func (g *Gateway) forgetCaches(candidates []string, workers []int32) {
	for _, id := range candidates {
		g.scheduler.ForgetPrefixes(id)
	}
	g.rankCaches.Forget(workers)
}

// Calls returns the part that calls all engines of the fleet at once, for example to change their
// weights.
func (g *Gateway) Calls() *fleetcall.Caller { return g.calls }

// IDOf turns an address, host:port or a URL, into the id and the URL of an engine.
func IDOf(address string) (id, url string, err error) {
	if id, err = config.InstanceID(address); err == nil { // the address is a URL
		return id, address, nil
	}
	if _, _, splitErr := net.SplitHostPort(address); splitErr != nil {
		return "", "", fmt.Errorf("%q is neither host:port nor a URL", address)
	}
	url = "http://" + address
	id, err = config.InstanceID(url)
	return id, url, err
}
