// Package passthrough serves requests that are not split into prefill and decode: token counts, embeddings, scores, speech. Each goes
// unchanged to one engine that has its model and its endpoint. This package chooses the engine; gateway/request sends the request to it and
// relays the answer.
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
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
)

// Parse reads and checks the body of a request to one of the endpoints.
func Parse(path string, raw []byte, contentType string, lim openai.Limits) (*openai.Request, *openai.Error) {
	switch {
	case hears(path):
		return openai.ParseForm(raw, contentType, lim)
	case path == openai.CountPath:
		return openai.ParseCount(raw, lim)
	}
	return openai.ParsePassed(raw, lim)
}

// Serve sends a request to an engine and relays the answer. raw is the request's body. If Serve returns an error, the client has got no
// answer yet, so the caller must send the error.
func (s *Server) Serve(ctx *fasthttp.RequestCtx, in *request.Incoming, req *openai.Request, path string, raw []byte) *openai.Error {
	seat := s.seats.For(in.Body)
	if !seat.Acquire(1) {
		return s.full()
	}
	p := &request.Passed{
		Engines: s, Path: path, Kind: "application/json", Estimate: Estimate(path, req), Seat: seat, Memory: s.Bodies.For(in.Body),
		Took: s.took.WithLabelValues(path),
	}
	if hears(path) {
		p.Kind, p.Body = string(ctx.Request.Header.ContentType()), [][]byte{raw}
	} else {
		p.Body = req.Body.Splice(nil, mooncake.Reserved, nil)
	}
	if computes(path) {
		p.Most = int64(len(raw)) // a token has at least one byte
	}
	return s.Requests.Pass(ctx, in, req, p)
}

func (s *Server) full() *openai.Error {
	e := &openai.Error{
		Status: http.StatusTooManyRequests, Code: "queue_full", RetryAfter: 1, Own: !s.seats.Full(),
		Message: "too many requests are passed through to engines already; retry later",
		Why: fmt.Sprintf("as many requests are passed through to engines as limits.passed_through allows: %d",
			s.Settings().Limits.PassedThrough),
	}
	if e.Own {
		e.Message = "too many of your requests are passed through to engines already; send the next when some have ended"
		e.Why = fmt.Sprintf("one caller has its share of the requests that may be passed through at once (limits.passed_through: %d): as many "+
			"as are free beside it", s.Settings().Limits.PassedThrough)
	}
	return e
}

// Env is what requests that are passed through need of the proxy.
type Env struct {
	Registerer prometheus.Registerer
	Buckets    []float64 // of histograms of seconds
	Settings   func() *fleet.Settings
	Engines    func() Engines  // returns what is known of the engines at present
	Requests   *request.Server // sends the requests to the engines that Choose returns
	Bodies     *edge.Account   // of requests, and of answers in one piece
}

// Engines is what is known of engines at a moment.
type Engines interface {
	Wholes(model string, computes bool) (list []fleet.Whole, paired bool)
}

// A Server passes requests through.
type Server struct {
	Env
	took  *prometheus.HistogramVec
	seats *edge.Account // bounds how many requests are passed through at once, because they go through no queue and no pool

	mu    sync.Mutex
	busy  map[string]int     // the number of this proxy's calls under way, by engine
	lacks map[lack]time.Time // endpoints that engines do not have, and when the engine answered so
}

type lack struct{ instance, path string }

// lackMemory is how long an engine gets no requests to an endpoint that it did not have. Later the engine may be a new process, which has
// the endpoint.
const lackMemory = time.Minute

// New makes the server of a proxy.
func New(env Env) *Server {
	s := &Server{Env: env, seats: edge.NewPlaces(int64(env.Settings().Limits.PassedThrough)), busy: map[string]int{},
		lacks: map[lack]time.Time{}}
	s.took = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "evenkeel_passed_seconds",
		Help: "Time from arrival to the end of the answer, for requests that one engine serves alone. Requests without an answer do not " +
			"count.",
		Buckets: env.Buckets,
	}, []string{"endpoint"})
	for _, path := range Paths {
		s.took.WithLabelValues(path)
	}
	env.Registerer.MustRegister(s.took)
	return s
}

// computes says whether an engine runs its model for a request. For tokenization and token counts it does not.
func computes(path string) bool {
	return path != "/tokenize" && path != "/detokenize" && path != openai.CountPath
}

// Paths are the endpoints that are passed through. Some endpoints have several paths, and not every engine has all of them. SGLang 0.5.23
// has only /v1/rerank and /v1/score (entrypoints/http_server.py). vLLM 0.33 has all (entrypoints/pooling/scoring/api_router.py,
// entrypoints/speech_to_text).
var Paths = []string{
	"/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
	"/v1/audio/transcriptions", "/v1/audio/translations", openai.CountPath,
}

// hears says whether an endpoint takes a form with recorded speech. All other endpoints take JSON.
func hears(path string) bool { return strings.HasPrefix(path, "/v1/audio/") }

// Estimate is how many tokens a request counts against the tokens per minute of its API key, until an engine has counted its tokens.
func Estimate(path string, req *openai.Request) int {
	if !computes(path) {
		return 0
	}
	if hears(path) {
		return req.PromptBytes / bytesPerHeard
	}
	return req.PromptBytes / bytesPerToken
}

const (
	bytesPerToken = 4       // of text, roughly
	bytesPerHeard = 1 << 10 // bytes of recorded speech per token, roughly: a second of speech has a few tokens, and 3 to 32 KiB
)

var errNoEngine = openai.Unavailable("engine_unavailable", "no healthy engine of this proxy serves the model; retry later", 1)

// Choose returns the engine with the fewest calls of this proxy, among those that may have the endpoint and were not tried. If an engine of
// a group was tried, the other engines of the group come last, because a common rate limit may bound the whole group. Choose counts the new
// call; the caller must undo this with Count when the call is over.
func (s *Server) Choose(model, path string, tried []string) (fleet.Whole, lifecycle.What, *openai.Error) {
	all, paired := s.Engines().Wholes(model, computes(path))
	switch {
	case paired:
		return fleet.Whole{}, lifecycle.NoneLeft, errPaired
	case len(all) == 0:
		return fleet.Whole{}, lifecycle.NoneLeft, errNoEngine
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	found, from := -1, rand.IntN(len(all))
	lacking, triedGroups := 0, map[string]bool{}
	for i := range all {
		if all[i].Group != "" && slices.Contains(tried, all[i].Instance) {
			triedGroups[all[i].Group] = true
		}
	}
	better := func(one, other *fleet.Whole) bool {
		if oneTried, otherTried := triedGroups[one.Group], triedGroups[other.Group]; oneTried != otherTried {
			return otherTried
		}
		return s.busy[one.Instance] < s.busy[other.Instance]
	}
	for i := range all {
		i = (i + from) % len(all) // starts at a random engine, so that among equal engines each is taken as often
		if lackedAt, ok := s.lacks[lack{all[i].Instance, path}]; ok && now.Sub(lackedAt) < lackMemory {
			lacking++
			continue
		}
		if slices.Contains(tried, all[i].Instance) {
			continue
		}
		if found < 0 || better(&all[i], &all[found]) {
			found = i
		}
	}
	switch {
	case found >= 0:
		s.busy[all[found].Instance]++
		return all[found], lifecycle.Chosen, nil
	case lacking == len(all):
		return fleet.Whole{}, lifecycle.NoRoute, failure.NoRoute
	}
	return fleet.Whole{}, lifecycle.NoneLeft, errNoEngine
}

// Count adds n, which may be negative, to the number of this proxy's calls to an engine.
func (s *Server) Count(instance string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy[instance] += n; s.busy[instance] <= 0 {
		delete(s.busy, instance)
	}
}

// Without notes that an engine does not have an endpoint.
func (s *Server) Without(instance, path string) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for old, lackedAt := range s.lacks {
		if now.Sub(lackedAt) >= lackMemory {
			delete(s.lacks, old)
		}
	}
	s.lacks[lack{instance, path}] = now
}

var errPaired = &openai.Error{
	Status: http.StatusNotFound, Type: "invalid_request_error", Code: "no_such_route",
	Message: "no engine of this model computes what this endpoint asks for: each of its engines does one half of the work for completions",
	Why: "all engines of the model are prefill engines, or decode engines beside prefill engines; pass_through: true in the profile lets " +
		"them compute such requests, but not with connector sglang",
}
