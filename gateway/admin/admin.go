// Package admin serves the operators' listener: metrics, health, status, and the calls that change
// a running proxy. It also speaks the admin API of vllm-ascend's proxy. On any address but loopback
// the listener needs a token; guard.go says what else it asks of a request.
package admin

import (
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/gateway/live"
)

// Options are what the listener needs besides the proxy itself.
type Options struct {
	Log     *zap.Logger
	Version string // version of the program, shown on the live page
}

// New returns the listener's handler. It registers the process's own metrics
// beside the proxy's.
func New(g *gateway.Gateway, opt Options) (http.Handler, error) {
	h := &handler{g: g, log: opt.Log}
	for _, c := range []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})} {
		if err := g.Registry().Register(c); err != nil {
			return nil, err
		}
	}
	livePage := live.New(g.Watch(), live.Options{Version: opt.Version, Log: opt.Log, Decisions: func(now time.Time) []live.Decision {
		return live.Decisions(g.Receipts().Latest(live.MostDecisions), now)
	}})
	mux := http.NewServeMux()
	for pattern, f := range h.open() {
		mux.Handle(pattern, f)
	}
	for pattern, f := range h.guarded(livePage) {
		mux.HandleFunc(pattern, h.guard(f))
	}
	return limitBodyTime(limitWriteTime(answerUnknownRoutes(mux))), nil
}

// answerUnknownRoutes passes requests to the routes of mux, and answers those that no route takes.
// Like the errors of routes, this answer is JSON. It says which paths or methods there are.
func answerUnknownRoutes(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler, pattern := mux.Handler(r) // if pattern is empty, handler refuses the request
		if pattern != "" {                 // a route takes the request
			mux.ServeHTTP(w, r)
			return
		}
		refused := muxRefusal{header: http.Header{}}
		handler.ServeHTTP(&refused, r)
		if allowed := refused.header.Get("Allow"); refused.status == http.StatusMethodNotAllowed {
			w.Header().Set("Allow", allowed)
			fail(w, http.StatusMethodNotAllowed, "method_not_allowed", r.URL.Path+" takes "+allowed+", not "+r.Method)
			return
		}
		fail(w, http.StatusNotFound, "not_found",
			"this listener has nothing at "+r.URL.Path+"; / is a page for people, docs/openapi.yaml lists the rest")
	})
}

// muxRefusal is a ResponseWriter that stores the status and the headers with which the mux refuses
// a request.
type muxRefusal struct {
	header http.Header
	status int
}

func (r *muxRefusal) Header() http.Header         { return r.header }
func (r *muxRefusal) Write(p []byte) (int, error) { return len(p), nil }
func (r *muxRefusal) WriteHeader(status int)      { r.status = status }

// open returns the routes that need no token: health, and the page for people, which asks for the
// token itself.
func (h *handler) open() map[string]http.Handler {
	open := map[string]http.Handler{"GET /livez": http.HandlerFunc(h.livez), "GET /readyz": http.HandlerFunc(h.readyz)}
	for path, page := range live.Page() {
		open["GET "+path] = page
	}
	return open
}

// guarded returns the routes for operators only. docs/openapi.yaml describes all of them.
func (h *handler) guarded(livePage http.Handler) map[string]http.HandlerFunc {
	guarded := map[string]http.HandlerFunc{
		"GET /metrics":                  promhttp.HandlerFor(h.g.Registry(), promhttp.HandlerOpts{}).ServeHTTP,
		"GET /status":                   h.status,
		"GET /live":                     livePage.ServeHTTP,
		"GET /workers":                  h.workers,
		"POST /workers":                 h.addWorker,
		"DELETE /workers/{id}":          h.removeWorker,
		"POST /reload":                  h.reload,
		"POST /drain":                   h.drain,
		"DELETE /drain":                 h.undrain,
		"POST /instances/add":           h.instances(h.addInstance),
		"POST /instances/remove":        h.instances(h.removeInstance),
		"POST /reset_prefix_cache":      h.resetPrefixCache,
		"POST /admin/fleet/call":        h.callFleet,
		"GET /prefill":                  h.prefill,
		"PUT /prefill/policy":           h.setPrefillPolicy,
		"POST /prefill/score":           h.scorePrefill,
		"GET /prefill/hotspots":         h.hotspots,
		"DELETE /prefill/index":         h.forgetPrefixes,
		"GET /decisions":                h.decisions,
		"GET /geo":                      h.geo,
		"PUT /geo":                      h.tuneGeo,
		"GET /geo/receipts":             h.receipts,
		"GET /policy":                   h.policy,
		"PUT /policy":                   h.setPolicy,
		"GET /debug/pprof/{profile...}": pprof.Index,
		"GET /debug/pprof/cmdline":      pprof.Cmdline,
		"GET /debug/pprof/profile":      pprof.Profile,
		"GET /debug/pprof/symbol":       pprof.Symbol,
		"GET /debug/pprof/trace":        pprof.Trace,
	}
	for _, path := range []string{"/workers/{id}/drain", "/workers/{id}/{rank}/drain"} {
		guarded["POST "+path], guarded["DELETE "+path] = h.drainWorker, h.undrainWorker
	}
	return guarded
}

// livez answers 200 as long as the process can answer at all.
func (h *handler) livez(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") }

// readyz answers 503 while no request could be served, and as soon as the proxy begins to drain.
// Operators also get a line for each engine that is missing. Kubelets and strangers do not get
// these lines, because they contain addresses.
func (h *handler) readyz(w http.ResponseWriter, r *http.Request) {
	if ok, why := h.g.Ready(); !ok {
		known, tokenRequired := h.g.Reloader().CheckToken(bearer(r))
		if known && (tokenRequired || isLoopback(r.Host)) { // if no token is set, a caller that uses a loopback name counts as an operator
			why = strings.Join(append([]string{why}, h.g.Missing()...), "\n")
		}
		http.Error(w, why, http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
	for _, p := range h.g.Pauses() { // engines are paused; requests for them are accepted, and wait
		_, _ = io.WriteString(w, p.String()+"\n")
	}
}

// status answers GET /status with the status of all parts of the proxy at this time.
func (h *handler) status(w http.ResponseWriter, r *http.Request) { reply(w, h.g.Status(r.Context())) }

// workers lists the ranks with slots by model, and all engines.
func (h *handler) workers(w http.ResponseWriter, r *http.Request) {
	s := h.g.Status(r.Context())
	reply(w, map[string]any{"engines": s.Engines, "drains": s.Drains, "discovery": s.Discovery, "models": s.Dispatch.Models})
}

// newWorker is the body of POST /workers: the engine to add.
type newWorker struct {
	Role     string  `json:"role"` // role of the engine; empty: decode
	URL      string  `json:"url"`
	Profile  string  `json:"profile"`
	Ranks    int     `json:"ranks"`
	Group    string  `json:"group"`
	Barrier  string  `json:"barrier"`
	Slots    int     `json:"slots"`
	KV       int64   `json:"kv_tokens"`
	Cost     float32 `json:"cost"`
	Budget   int     `json:"token_budget"`
	Interval int     `json:"prefill_schedule_interval"`
}

// addWorker registers the engine that the body describes (newWorker).
func (h *handler) addWorker(w http.ResponseWriter, r *http.Request) {
	var e newWorker
	if !readJSON(w, r, &e) {
		return
	}
	e.Role = cmp.Or(e.Role, "decode")
	_, url, err := gateway.IDOf(e.URL)
	if err == nil {
		err = h.g.Add(e.Role, config.Engine{
			URL: url, Profile: e.Profile, Ranks: e.Ranks, Group: e.Group, Barrier: e.Barrier, Slots: e.Slots, KV: e.KV, Cost: e.Cost,
			Budget: e.Budget, Interval: e.Interval,
		})
	}
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_worker", err.Error())
		return
	}
	h.log.Info("an operator added an engine", zap.String("role", e.Role), zap.String("url", url))
	w.WriteHeader(http.StatusCreated)
}

// withWorker calls f with the role and the id of the engine or rank that the path names, as
// host:port or host:port/rank. The role comes from the query; if it is empty, f decides which
// engine of the address is meant. withWorker answers the request by the error that f returns.
func (h *handler) withWorker(w http.ResponseWriter, r *http.Request, f func(role, id string) error) {
	address, rank, _ := strings.Cut(r.PathValue("id"), "/") // a client may write the slash before the rank as %2F
	rank = cmp.Or(rank, r.PathValue("rank"))
	id, _, err := gateway.IDOf(address)
	if rank != "" { // the path names one rank of the engine
		id += "/" + rank
	}
	if err == nil {
		err = f(r.URL.Query().Get("role"), id)
	}
	switch {
	case errors.Is(err, gateway.ErrNoSuchEngine):
		fail(w, http.StatusNotFound, "not_found", err.Error()+"; GET /workers lists them")
	case err != nil:
		fail(w, http.StatusBadRequest, "bad_worker", err.Error())
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// removeWorker removes an engine. Without a role in the query, it removes the decode engine with
// the address or, if there is none, the aggregated one.
func (h *handler) removeWorker(w http.ResponseWriter, r *http.Request) {
	h.withWorker(w, r, func(role, id string) error {
		err := h.g.Remove(cmp.Or(role, "decode"), id)
		if role == "" && errors.Is(err, gateway.ErrNoSuchEngine) { // an aggregated engine decodes, too
			err = h.g.Remove("aggregated", id)
		}
		return err
	})
}

// drainWorker begins the drain of an engine or rank. The body is {"deadline":"5m"}, or no body for
// no deadline.
func (h *handler) drainWorker(w http.ResponseWriter, r *http.Request) {
	if limit, ok := readDeadline(w, r); ok {
		h.withWorker(w, r, func(role, id string) error { return h.g.DrainEngine(role, id, limit) })
	}
}

// undrainWorker ends the drain of an engine or rank.
func (h *handler) undrainWorker(w http.ResponseWriter, r *http.Request) {
	h.withWorker(w, r, h.g.UndrainEngine)
}

// drain takes the proxy itself out of service. The body is that of drainWorker.
func (h *handler) drain(w http.ResponseWriter, r *http.Request) {
	if limit, ok := readDeadline(w, r); ok {
		h.g.Service().Drain(limit)
		w.WriteHeader(http.StatusNoContent)
	}
}

// reload reads the config file again. With ?dry=1 it only reports what a reload would change.
func (h *handler) reload(w http.ResponseWriter, r *http.Request) {
	dry, err := strconv.ParseBool(cmp.Or(r.URL.Query().Get("dry"), "0"))
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_query", "dry is 0 or 1")
		return
	}
	result := h.g.Reloader().Reload(dry)
	w.Header().Set("Content-Type", "application/json")
	if result.Error != "" { // the config was refused; the answer says where it is wrong
		w.WriteHeader(http.StatusUnprocessableEntity)
	}
	reply(w, result)
}

// undrain takes the proxy itself back into service.
func (h *handler) undrain(w http.ResponseWriter, _ *http.Request) {
	h.g.Service().Undrain()
	w.WriteHeader(http.StatusNoContent)
}

// readDeadline reads from the body how long a drain may take; 0: there is no body, and so no limit.
// ok is false if readDeadline has answered the request with an error.
func readDeadline(w http.ResponseWriter, r *http.Request) (limit time.Duration, ok bool) {
	if r.ContentLength == 0 {
		return 0, true
	}
	var in struct {
		Deadline string `json:"deadline"`
	}
	if !readJSON(w, r, &in) {
		return 0, false
	}
	limit, err := time.ParseDuration(in.Deadline)
	if err != nil || limit <= 0 {
		fail(w, http.StatusBadRequest, "bad_deadline", `write {"deadline":"5m"} with a time above 0 that has a unit, or send no body for no deadline`)
		return 0, false
	}
	return limit, true
}

// instances serves /instances/add and /instances/remove of vllm-ascend's proxy, whose body is
// {"type":"prefill|decode|aggregated","instances":["host:port"]}. It calls f for each instance, and
// answers with the engines of each role that the fleet then has. At the first error of f it stops,
// and answers with that error.
func (h *handler) instances(f func(role, address string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Type      string       `json:"type"`
			Instances stringOrList `json:"instances"`
		}
		if !readJSON(w, r, &in) {
			return
		}
		if !slices.Contains(config.Roles, in.Type) || len(in.Instances) == 0 {
			fail(w, http.StatusBadRequest, "bad_instances", `write {"type":"prefill", "decode" or "aggregated","instances":["host:port"]}`)
			return
		}
		for _, address := range in.Instances {
			switch err := f(in.Type, address); {
			case errors.Is(err, gateway.ErrNoSuchEngine):
				fail(w, http.StatusNotFound, "not_found", err.Error())
				return
			case err != nil:
				fail(w, http.StatusBadRequest, "bad_instances", err.Error())
				return
			}
		}
		s := h.g.Status(r.Context())
		out := map[string][]string{}
		for _, role := range config.Roles {
			out[role] = []string{}
		}
		for _, e := range s.Engines {
			out[e.Role] = append(out[e.Role], e.ID)
		}
		reply(w, map[string]any{
			"message":                   "ok",
			"current_prefill_instances": out["prefill"], "current_decode_instances": out["decode"], "current_aggregated_instances": out["aggregated"],
		})
	}
}

// stringOrList is a list of addresses. Like vllm-ascend's proxy, it also accepts one string in
// place of a list.
type stringOrList []string

// UnmarshalJSON implements json.Unmarshaler.
func (o *stringOrList) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil {
		*o = stringOrList{one}
		return nil
	}
	var all []string
	err := json.Unmarshal(b, &all)
	*o = all
	return err
}

// addInstance registers an engine with the default settings of its role.
func (h *handler) addInstance(role, address string) error {
	_, url, err := gateway.IDOf(address)
	if err != nil {
		return err
	}
	return h.g.Add(role, config.Engine{URL: url})
}

// removeInstance removes the engine with this role and address. Its running requests finish.
func (h *handler) removeInstance(role, address string) error {
	id, _, err := gateway.IDOf(address)
	if err != nil {
		return err
	}
	return h.g.Remove(role, id)
}

// policy answers GET /policy with the decode policy in force.
func (h *handler) policy(w http.ResponseWriter, _ *http.Request) {
	reply(w, map[string]string{"policy": h.g.Policy()})
}

// setPolicy changes the decode policy to the one that the body names.
func (h *handler) setPolicy(w http.ResponseWriter, r *http.Request) {
	h.setPolicyFromBody(w, r, "policy", h.g)
}
