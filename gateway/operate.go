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
	"evenkeel/gateway/fleet"
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

// What operators may ask and change while the proxy runs; gateway/admin puts it
// on HTTP.

// Status is the whole proxy at one instant.
type Status struct {
	Ready      bool                      `json:"ready"`
	Why        string                    `json:"why,omitempty"` // not ready
	Started    time.Time                 `json:"started"`
	Open       int64                     `json:"open_requests"`
	PoolPlaces int                       `json:"pool_places"`
	PoolUsed   int                       `json:"pool_places_used"`
	Config     reload.ConfigStatus       `json:"config"`
	Drain      *service.DrainState       `json:"drain,omitempty"` // of the proxy itself
	HA         *owner.HAStatus           `json:"ha,omitempty"`
	Engines    []EngineStatus            `json:"engines"`
	Drains     []DrainStatus             `json:"drains"` // of engines and ranks
	Pauses     []fleet.Pause             `json:"pauses"` // of groups, or of all engines
	Discovery  *discover.Status          `json:"discovery,omitempty"`
	Prefill    []prefill.CandidateStatus `json:"prefill"`
	Batch      prefill.BatchStatus       `json:"batch"`
	Dispatch   board.Status              `json:"dispatch"`
	Advice     []advice.Advice           `json:"advice,omitempty"` // on the number of ranks, one a model; none yet, or off
}

// EngineStatus says of one engine whether it answers, which state it is in and why, and what it serves.
type EngineStatus = fleet.EngineStatus

// DrainStatus is what is left on an engine or rank that drains.
type DrainStatus = fleet.DrainStatus

// Status copies what all parts know.
func (g *Gateway) Status(ctx context.Context) Status {
	ready, why := g.Ready()
	dispatch := g.dispatcher.Status(ctx)
	engines := g.fleet.Now() // it knows all ranks that the dispatcher has
	s := Status{
		Ready: ready, Why: why, Started: g.started, Open: g.requests.Open(), PoolPlaces: g.places.Size(), PoolUsed: g.places.Used(),
		Config: *g.config.Status(), Drain: g.service.State(), HA: g.HA(),
		Engines: engines.Statuses(), Prefill: g.tier.Status(), Batch: g.tier.Batch(), Dispatch: dispatch,
		Advice: g.advice.Latest(),
	}
	readClocks(&s.Dispatch, g.Gauges)
	tellStates(&s.Dispatch, engines)
	s.Pauses = engines.Pauses()
	s.Drains, s.Discovery = engines.DrainStatuses(s.Dispatch, s.Prefill), g.discovery.State()
	return s
}

// readClocks fills in how long ranks wait for each other by what their engines count, which boards do not know. It writes to copies,
// because the status of a dispatcher that has ended belongs to everybody who asks.
func readClocks(s *board.Status, of func(rank int32) (Gauges, bool)) {
	s.Models = slices.Clone(s.Models)
	for i := range s.Models {
		m := &s.Models[i]
		m.Groups = slices.Clone(m.Groups)
		for j := range m.Groups {
			g := &m.Groups[j]
			if ms, told := waited(m.Workers, g.Name, of); told && g.Step != nil {
				step := *g.Step
				step.SyncWaitMs, g.Step = ms, &step
			}
		}
	}
}

// tellStates fills in which ranks take nothing, and why, into copies, too.
func tellStates(s *board.Status, engines *fleet.Published) {
	for i := range s.Models {
		m := &s.Models[i]
		m.Workers = slices.Clone(m.Workers)
		for j := range m.Workers {
			w, state := &m.Workers[j], roster.Absent
			if r := engines.Rank(w.ID); r != nil && !w.Removed {
				state = r.State
			}
			w.State, w.Why = state.String(), state.Why()
		}
	}
}

// waited is how long ranks of a barrier group wait in the mean; not told: no engine counts it.
func waited(ranks []board.WorkerStatus, group string, of func(rank int32) (Gauges, bool)) (ms float64, told bool) {
	sum, n := 0.0, 0
	for i := range ranks {
		w := &ranks[i]
		if !w.Barrier || w.Group != group || w.Down || w.Removed {
			continue
		}
		if said, ok := of(w.ID); ok && said.WaitMs >= 0 {
			sum, n = sum+said.WaitMs, n+1
		}
	}
	return sum / float64(max(1, n)), n > 0
}

// Receipts are those of the last requests, and of all that run; nil: none are
// kept.
func (g *Gateway) Receipts() *receipt.Ring { return g.journal.Receipts }

// Recent tells what clients got over the last minute.
func (g *Gateway) Recent() journal.Recent { return g.journal.Recent() }

// Watch is what looks at this proxy.
func (g *Gateway) Watch() *watch.Watch { return g.watch }

// Gauges are what an engine says of one of its ranks.
type Gauges = engine.Gauges

// Gauges is what an engine said of a decode rank when its metrics were last read; ok is false where it is not known lately.
func (g *Gateway) Gauges(worker int32) (said Gauges, ok bool) {
	r := g.fleet.Now().Rank(worker)
	if r == nil {
		return said, false
	}
	return g.monitor.Gauges(r.Instance, r.Target.Rank)
}

// Config is what is in force.
func (g *Gateway) Config() *config.Config { return g.conf().Config }

// Reloader has the config in force and what the files hold that it names.
func (g *Gateway) Reloader() *reload.Reloader { return g.config }

// Geo is this proxy among others, for operators; nil without others.
func (g *Gateway) Geo() *geo.Node { return g.peers.Node() }

// GeoAddr is where other dispatchers connect; empty without others.
func (g *Gateway) GeoAddr() string { return g.peers.Addr() }

// BindAddr is where decode engines call back; empty: none does.
func (g *Gateway) BindAddr() string { return g.meta.Addr() }

// Owners lists the regions whose engines this proxy may serve; none without
// ownership.
func (g *Gateway) Owners() []owner.RegionStatus { return g.owner.RegionsStatus() }

// HA says which decode groups this proxy owns; nil: it is alone.
func (g *Gateway) HA() *owner.HAStatus { return g.owner.GroupsStatus() }

// Routes lists what the public listener serves, as GET /path.
func (g *Gateway) Routes() []string { return g.door.Routes() }

// Service is whether this proxy is in service.
func (g *Gateway) Service() *service.Service { return g.service }

// Registry holds every metric of the proxy.
func (g *Gateway) Registry() *prometheus.Registry { return g.reg }

// Policy is the decode policy in force; SetPolicy replaces it from the next
// tick on.
func (g *Gateway) Policy() string { return g.dispatcher.Policy() }

// SetPolicy changes the decode policy; an unknown one changes nothing.
func (g *Gateway) SetPolicy(spec string) error { return g.dispatcher.SetPolicy(spec) }

// Prefill is the prefill tier, for operators.
func (g *Gateway) Prefill() *prefill.Tier { return g.tier }

// ScorePrefill asks every prefill policy where the request of a body would go,
// without sending it.
func (g *Gateway) ScorePrefill(raw []byte) ([]prefill.Scored, error) {
	var is struct {
		Messages json.RawMessage `json:"messages"`
	}
	if err := json.Unmarshal(raw, &is); err != nil {
		return nil, fmt.Errorf("the body is not JSON: %w", err)
	}
	ep := mooncake.Completions
	if is.Messages != nil {
		ep = mooncake.Chat
	}
	req, fail := openai.Parse(ep, raw, g.door.Accept())
	if fail != nil {
		return nil, errors.New(fail.Message)
	}
	m, _, _ := g.fleet.Now().Lookup(req.Model)
	m.Name = req.Model
	return g.requests.Score(req, m)
}

// ErrNoSuchEngine is what Remove and DrainEngine answer for an unknown id.
var ErrNoSuchEngine = fleet.ErrNoSuchEngine

// Add registers an engine of a role, "prefill", "decode" or "aggregated". An engine whose
// host:port is known is described anew, keeps its load and drains no more.
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

// Remove takes an engine out by host:port. What runs on it finishes.
func (g *Gateway) Remove(role, id string) error { return g.fleet.Remove(role, id) }

// DrainEngine stops new work for an engine, host:port, or for one of its ranks,
// host:port/rank. With a limit above 0 what still runs then goes on elsewhere
// where it can, and ends with an error event where it cannot; finished prefills
// are decoded all the same. A second call sets another limit. When it returns
// nothing is bound there any more; what was is among the requests of its status.
func (g *Gateway) DrainEngine(role, id string, limit time.Duration) error {
	return g.fleet.Drain(role, id, limit)
}

// UndrainEngine has an engine or rank take work again.
func (g *Gateway) UndrainEngine(role, id string) error { return g.fleet.Undrain(role, id) }

// ForgetPrefixes drops what is known of the prefix cache of a prefill candidate,
// or of all engines for an empty id. It reports whether there is such a
// candidate.
func (g *Gateway) ForgetPrefixes(id string) bool {
	if id == "" {
		g.locals.Forget(g.locals.IDs())
	}
	return g.tier.ForgetPrefixes(id)
}

// forget drops what is known of prefix caches: of candidates, and of ranks that decode.
func (g *Gateway) forget(candidates []string, workers []int32) {
	for _, id := range candidates {
		g.tier.ForgetPrefixes(id)
	}
	g.locals.Forget(workers)
}

// Calls calls engines.
func (g *Gateway) Calls() *fleetcall.Caller { return g.calls }

// IDOf turns what operators write, host:port or a URL, into an engine's id and
// URL.
func IDOf(address string) (id, url string, err error) {
	if id, err = config.InstanceID(address); err == nil {
		return id, address, nil
	}
	if _, _, splitErr := net.SplitHostPort(address); splitErr != nil {
		return "", "", fmt.Errorf("%q is neither host:port nor a URL", address)
	}
	url = "http://" + address
	id, err = config.InstanceID(url)
	return id, url, err
}
