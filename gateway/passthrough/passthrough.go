// Package passthrough handles requests that are not split into prefill and decode: token counts,
// embeddings, scores, speech. Each goes unchanged to one engine that has its model and its
// endpoint. This package chooses the engine; gateway/request sends the request and relays the
// answer.
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

// Parse checks the body of a request to one of Paths.
func Parse(path string, raw []byte, contentType string, lim openai.Limits) (*openai.Request, *openai.Error) {
	switch {
	case takesAudio(path):
		return openai.ParseForm(raw, contentType, lim)
	case path == openai.CountPath:
		return openai.ParseCount(raw, lim)
	}
	return openai.ParsePassed(raw, lim)
}

// Serve sends the request to an engine and relays the answer. raw is the body, uncompressed. If
// Serve returns an error, nothing has been sent to the client.
func (s *Server) Serve(ctx *fasthttp.RequestCtx, in *request.Incoming, req *openai.Request, path string, raw []byte) *openai.Error {
	seat := s.seats.For(in.Body)
	if !seat.Acquire(1) {
		return s.tooManyError()
	}
	p := &request.Passthrough{
		Engines: s, Path: path, ContentType: "application/json", EstimatedTokens: Estimate(path, req), Seat: seat, Memory: s.Bodies.For(in.Body),
		Duration: s.duration.WithLabelValues(path),
	}
	if takesAudio(path) { // as it is, under its own content type
		p.ContentType, p.Body = string(ctx.Request.Header.ContentType()), [][]byte{raw}
	} else { // without the keys that only the proxy may set
		p.Body = req.Body.Splice(nil, mooncake.Reserved, nil)
	}
	if RunsModel(path) {
		p.MaxTokens = int64(len(raw)) // each token has at least one byte
	}
	return s.Requests.ServePassthrough(ctx, in, req, p)
}

// Either all seats (limits.passed_through) are taken, or this caller has its share of them: as many
// as stay free for others, which is half of all if it is the only caller.
func (s *Server) tooManyError() *openai.Error {
	callerHasShare := !s.seats.Full()
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
	// SoleEngines can serve requests for the model alone. onlyPairs: its engines each only prefill or
	// only decode. runsModel: the request runs the model.
	SoleEngines(model string, runsModel bool) (list []roster.SoleEngine, onlyPairs bool)
	// IncompleteGroup is a group of the model that waits for one of its engines; empty: none.
	IncompleteGroup(model string) string
}

// A Server passes each request unchanged to one engine, and bounds how many run at once.
type Server struct {
	Deps
	duration *prometheus.HistogramVec
	seats    *edge.Quota // for passed-through requests, which wait in no queue and no pool

	mu               sync.Mutex
	runningCalls     map[string]int                // number of this proxy's running calls, by engine
	missingEndpoints map[missingEndpoint]time.Time // when the engine said so
}

type missingEndpoint struct{ instance, path string }

// After missingEndpointTTL, the engine may have been replaced by a version that has the endpoint.
const missingEndpointTTL = time.Minute

// New panics if its metric is registered already.
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

// RunsModel is false for token counts.
func RunsModel(path string) bool {
	return path != "/tokenize" && path != "/detokenize" && path != openai.CountPath
}

// Paths have several names for some endpoints: SGLang 0.5.23 has only /v1/rerank and /v1/score
// (entrypoints/http_server.py), vLLM 0.33 has all names (entrypoints/pooling/scoring/api_router.py,
// entrypoints/speech_to_text).
var Paths = []string{
	"/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
	"/v1/audio/transcriptions", "/v1/audio/translations", openai.CountPath,
}

// takesAudio says whether the endpoint takes a form with recorded speech, and not JSON.
func takesAudio(path string) bool { return strings.HasPrefix(path, "/v1/audio/") }

// Estimate is for the key's limit of tokens per minute, until an engine reports the real number.
func Estimate(path string, req *openai.Request) int {
	if !RunsModel(path) {
		return 0
	}
	if takesAudio(path) {
		return req.PromptBytes / bytesPerAudioToken
	}
	return req.PromptBytes / bytesPerToken
}

// Rough sizes of a token in bytes. A second of speech is a few tokens, and takes 3 to 32 KiB.
const (
	bytesPerToken      = 4
	bytesPerAudioToken = 1 << 10
)

var errNoEngine = openai.Unavailable("engine_unavailable", "no healthy engine of this proxy serves the model; retry later", 1)

// Choose returns the engine with the fewest calls of this proxy, among those that are not in tried
// and may have the endpoint, and counts a call, which the caller must subtract with AddRunning. An
// engine whose group has one in tried comes last, because the whole group may share one limit.
// outcome is Chosen, NoRoute if no engine has the endpoint, or NoneLeft.
func (s *Server) Choose(model, path string, tried []string) (chosen roster.SoleEngine, outcome lifecycle.EventKind, fail *openai.Error) {
	all, onlyPairs := s.Engines().SoleEngines(model, RunsModel(path))
	switch {
	case onlyPairs:
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
	best, withoutEndpoint := -1, 0 // best: -1: none yet
	start := rand.IntN(len(all))   // so that of equal engines not always the first is chosen
	for k := range all {
		i := (start + k) % len(all)
		notedAt, isNoted := s.missingEndpoints[missingEndpoint{all[i].Instance, path}]
		lacksEndpoint := isNoted && now.Sub(notedAt) < missingEndpointTTL
		if lacksEndpoint { // before tried is looked at, so that it counts, too
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

func groupsOf(all []roster.SoleEngine, tried []string) map[string]bool {
	groups := map[string]bool{}
	for i := range all {
		if all[i].Group != "" && slices.Contains(tried, all[i].Instance) {
			groups[all[i].Group] = true
		}
	}
	return groups
}

// AddRunning adds n, which may be negative, to this proxy's calls on an engine.
func (s *Server) AddRunning(instance string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.runningCalls[instance] += n; s.runningCalls[instance] <= 0 {
		// Engines that have left take no memory.
		delete(s.runningCalls, instance)
	}
}

// NoteMissingEndpoint also forgets outdated notes.
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
