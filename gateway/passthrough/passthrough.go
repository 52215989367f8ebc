// Package passthrough handles requests that are not split into prefill and decode: token counts,
// embeddings, scores, speech. Each goes unchanged to one engine that has its model and its
// endpoint. This package chooses the engine. Package gateway/request sends the request to the engine and relays the answer.
package passthrough

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
)

// Parse reads and checks the body of a request to one of the endpoints in Paths.
func Parse(path string, raw []byte, contentType string, lim openai.Limits) (*openai.Request, *openai.Error) {
	switch {
	case takesAudio(path):
		return openai.ParseForm(raw, contentType, lim)
	case path == openai.CountPath:
		return openai.ParseCount(raw, lim)
	}
	return openai.ParsePassed(raw, lim)
}

// Serve sends the request to an engine and relays the answer to the client. raw is the request's body, uncompressed. If Serve
// returns an error, nothing has been sent to the client yet.
func (s *Server) Serve(ctx *fasthttp.RequestCtx, in *request.Incoming, req *openai.Request, path string, raw []byte) *openai.Error {
	seat := s.seats.For(in.Body) // a place among the requests that are passed through at once
	if !seat.Acquire(1) {
		return s.tooManyError()
	}
	p := &request.Passthrough{
		Engines: s, Path: path, ContentType: "application/json", EstimatedTokens: Estimate(path, req), Seat: seat, Memory: s.Bodies.For(in.Body),
		Duration: s.duration.WithLabelValues(path),
	}
	if takesAudio(path) { // the form goes on as it is, under its own content type
		p.ContentType, p.Body = string(ctx.Request.Header.ContentType()), [][]byte{raw}
	} else { // the JSON goes on without the keys that only the proxy may set
		p.Body = req.Body.Splice(nil, mooncake.Reserved, nil)
	}
	if RunsModel(path) {
		p.MaxTokens = int64(len(raw)) // bounds the tokens that the engine computes, each of which has at least one byte of the body
	}
	return s.Requests.ServePassthrough(ctx, in, req, p)
}

// tooManyError is the error of a request that got no seat. Either all seats (limits.passed_through) are taken, or this caller has its share
// of them (ByKeyLimit): one caller may take at most as many seats as stay free for others, which is half of all if it is the only one.
func (s *Server) tooManyError() *openai.Error {
	callerHasShare := !s.seats.Full() // seats are free, so only the caller's share can be the reason
	e := &openai.Error{
		Status: http.StatusTooManyRequests, Code: "queue_full", RetryAfter: 1, ByKeyLimit: callerHasShare,
		Message: "too many requests are passed through to engines already; retry later",
		Why: fmt.Sprintf("as many requests are passed through to engines as limits.passed_through allows: %d",
			s.Settings().Limits.PassedThrough),
	}
	if callerHasShare {
		e.Message = "too many of your requests are passed through to engines already; send the next when some have ended"
		e.Why = fmt.Sprintf("one caller has its share of the requests that may be passed through at once (limits.passed_through: %d): as many "+
			"as are free beside it", s.Settings().Limits.PassedThrough)
	}
	return e
}

// Deps has the parts of the proxy that a Server uses.
type Deps struct {
	Registerer prometheus.Registerer
	Buckets    []float64 // upper bounds of the buckets of the histogram, in seconds
	Settings   func() *fleet.Settings
	Engines    func() Engines  // returns the engines as they are now
	Requests   *request.Server // serves the requests, with the engines that Choose returns
	Bodies     *edge.Quota     // memory of the bodies of requests, and of answers in one piece
}

// Engines is the state of the engines at one moment.
type Engines interface {
	// SoleEngines returns the engines that can serve requests for the model alone. onlyPairs says that the model has engines, but that each
	// only prefills or only decodes. runsModel says that the request runs the model.
	SoleEngines(model string, runsModel bool) (list []roster.SoleEngine, onlyPairs bool)
	// IncompleteGroup names a group of the model that waits for one of its engines; empty: none does.
	IncompleteGroup(model string) string
}

// A Server passes each request unchanged to one engine, and bounds how many run at once.
type Server struct {
	Deps
	duration *prometheus.HistogramVec
	seats    *edge.Quota // bounds the requests that are passed through at once, because they wait in no queue and no pool

	mu               sync.Mutex
	runningCalls     map[string]int                // number of this proxy's running calls, by engine
	missingEndpoints map[missingEndpoint]time.Time // endpoints that engines do not have; the value is when the engine said so
}

// missingEndpoint names an endpoint (path) that an engine (instance) does not have.
type missingEndpoint struct{ instance, path string }

// missingEndpointTTL is how long an engine is not asked again for an endpoint that it does not have.
// After that time the engine may have been replaced by a version that has the endpoint.
const missingEndpointTTL = time.Minute

// New returns a server, and registers the metric evenkeel_passed_seconds. It panics if the metric is registered already.
func New(deps Deps) *Server {
	s := &Server{Deps: deps, seats: edge.NewPlaces(int64(deps.Settings().Limits.PassedThrough)), runningCalls: map[string]int{},
		missingEndpoints: map[missingEndpoint]time.Time{}}
	s.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "evenkeel_passed_seconds",
		Help: "Time from arrival to the end of the answer, for requests that one engine serves alone. Requests without an answer do not " +
			"count.",
		Buckets: deps.Buckets,
	}, []string{"endpoint"})
	for _, path := range Paths {
		s.duration.WithLabelValues(path)
	}
	deps.Registerer.MustRegister(s.duration)
	return s
}

// RunsModel says whether an engine runs its model for a request to this path. For token counts it does not.
func RunsModel(path string) bool {
	return path != "/tokenize" && path != "/detokenize" && path != openai.CountPath
}

// Paths are the endpoints that are passed through. Some endpoints have several names: SGLang 0.5.23 has only /v1/rerank and /v1/score
// (entrypoints/http_server.py), vLLM 0.33 has all names (entrypoints/pooling/scoring/api_router.py, entrypoints/speech_to_text).
var Paths = []string{
	"/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
	"/v1/audio/transcriptions", "/v1/audio/translations", openai.CountPath,
}

// takesAudio says whether the endpoint takes a form with recorded speech. All other endpoints take JSON.
func takesAudio(path string) bool { return strings.HasPrefix(path, "/v1/audio/") }

// Estimate returns how many tokens a request counts against its key's limit of tokens per minute, until an engine reports the
// real number.
func Estimate(path string, req *openai.Request) int {
	if !RunsModel(path) {
		return 0
	}
	if takesAudio(path) {
		return req.PromptBytes / bytesPerAudioToken
	}
	return req.PromptBytes / bytesPerToken
}

// Rough sizes of a token in bytes: of text, and of a form with speech. A second of speech is a few
// tokens, and takes 3 to 32 KiB.
const (
	bytesPerToken      = 4
	bytesPerAudioToken = 1 << 10
)

var errNoEngine = openai.Unavailable("engine_unavailable", "no healthy engine of this proxy serves the model; retry later", 1)

// Choose returns the engine with the fewest calls of this proxy, among those that are not in tried and may have the endpoint. An engine
// whose group has an engine in tried comes last, because the whole group may share one limit. Choose counts a call for the engine. The
// caller must subtract the call with AddRunning when it is over. outcome is Chosen if an engine was chosen, NoRoute if no engine has the
// endpoint, and otherwise NoneLeft.
func (s *Server) Choose(model, path string, tried []string) (chosen roster.SoleEngine, outcome lifecycle.EventKind, fail *openai.Error) {
	all, onlyPairs := s.Engines().SoleEngines(model, RunsModel(path))
	switch {
	case onlyPairs: // no engine of the model serves such a request alone
		return roster.SoleEngine{}, lifecycle.NoneLeft, errPaired
	case len(all) == 0 && s.Engines().IncompleteGroup(model) != "":
		return roster.SoleEngine{}, lifecycle.NoneLeft, failure.Incomplete(s.Engines().IncompleteGroup(model), model)
	case len(all) == 0:
		return roster.SoleEngine{}, lifecycle.NoneLeft, errNoEngine
	}
	triedGroups := groupsOf(all, tried)
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	better := func(one, other *roster.SoleEngine) bool {
		if oneTried, otherTried := triedGroups[one.Group], triedGroups[other.Group]; oneTried != otherTried {
			return otherTried
		}
		return s.runningCalls[one.Instance] < s.runningCalls[other.Instance]
	}
	best, withoutEndpoint := -1, 0 // best: index of the best engine so far; -1: there is none yet
	start := rand.IntN(len(all))   // random, so that of equal engines not always the first one is chosen
	for k := range all {
		i := (start + k) % len(all)
		notedAt, isNoted := s.missingEndpoints[missingEndpoint{all[i].Instance, path}]
		lacksEndpoint := isNoted && now.Sub(notedAt) < missingEndpointTTL
		if lacksEndpoint { // counted before tried is looked at, so that an engine that was tried and lacks the endpoint counts, too
			withoutEndpoint++
			continue
		}
		if slices.Contains(tried, all[i].Instance) {
			continue
		}
		if best < 0 || better(&all[i], &all[best]) {
			best = i
		}
	}
	switch {
	case best >= 0:
		s.runningCalls[all[best].Instance]++
		return all[best], lifecycle.Chosen, nil
	case withoutEndpoint == len(all):
		return roster.SoleEngine{}, lifecycle.NoRoute, failure.NoRoute
	}
	return roster.SoleEngine{}, lifecycle.NoneLeft, errNoEngine
}

// groupsOf returns the groups of the engines that are in tried. Choose prefers engines of other groups, because the whole group may share
// the limit for which a tried engine refused the request.
func groupsOf(all []roster.SoleEngine, tried []string) map[string]bool {
	groups := map[string]bool{}
	for i := range all {
		if all[i].Group != "" && slices.Contains(tried, all[i].Instance) { // an empty group: the engine is in none
			groups[all[i].Group] = true
		}
	}
	return groups
}

// AddRunning adds n, which may be negative, to the number of this proxy's calls that run on an engine.
func (s *Server) AddRunning(instance string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.runningCalls[instance] += n; s.runningCalls[instance] <= 0 { // so that engines that have left take no memory
		delete(s.runningCalls, instance)
	}
}

// NoteMissingEndpoint notes that an engine does not have an endpoint, and forgets such notes older than missingEndpointTTL.
func (s *Server) NoteMissingEndpoint(instance, path string) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for missing, notedAt := range s.missingEndpoints {
		if now.Sub(notedAt) >= missingEndpointTTL {
			delete(s.missingEndpoints, missing)
		}
	}
	s.missingEndpoints[missingEndpoint{instance, path}] = now
}

var errPaired = &openai.Error{
	Status: http.StatusNotFound, Type: "invalid_request_error", Code: "no_such_route",
	Message: "no engine of this model computes what this endpoint asks for: each of its engines does one half of the work for completions",
	Why: "all engines of the model are prefill engines, or decode engines beside prefill engines; pass_through: true in the profile lets " +
		"them compute such requests, but not with connector sglang",
}
