package request

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// Incoming is a request as it was admitted, and what is told of it.
type Incoming struct {
	Told *journal.Request
	Wishes
	Limits   Limits       // of its caller
	Priority int          // in the arrival queue
	Body     *edge.Charge // what the body takes of the account of bodies in memory
	Address  string       // of the client
	From     *geo.Hop     // how it came from another dispatcher; nil: from a client
	way      string       // where it was served, as routeHeader names it; empty: nowhere
	over     atomic.Bool  // it was accounted for
}

// Limits are what a request holds of its caller's limits.
type Limits interface {
	// GiveBack settles them with the tokens that prompts and answers had in the end.
	GiveBack(tokens int)
}

// Wishes are what a request asks for besides its body. Only a trusted caller is
// heard on anything but the session, its patience and where the request stays.
type Wishes struct {
	Explain       bool      // answer headers name engine, policy and reason
	Stays         bool      // the request is never forwarded
	Session       uint64    // hash of its name; 0: none
	Patience      time.Time // when the client gives up by itself, for an answer that has not begun; zero: unknown
	PrefillPolicy string    // the policy that chooses its prefill engine; empty: the default
	Whole         bool      // its endpoint takes no hand-off: a decode rank computes it alone, or nobody does
	Disaggregate  string    // DisaggregateAuto, Always or Never; empty: as configured
	ToPrefill     string    // the candidate that has to prefill; empty: any
	ToDecode      []int32   // the decode rank that has to decode; nil: any
}

// aimed says whether a trusted caller named an engine.
func (w *Wishes) aimed() bool { return w.ToPrefill != "" || w.ToDecode != nil }

// Incoming begins the record of a request. It counts as open until Refuse, or the end
// of its answer.
func (srv *Server) Incoming(facts journal.Facts) *Incoming {
	srv.open.Add(1)
	return &Incoming{Told: srv.Journal.Request(facts)}
}

// NewID is 128 random bits: the stem of every id a request has on engines.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return hex.EncodeToString(b[:])
}

// Serve answers a request, or has another dispatcher answer it. An error it returns
// has not been answered yet.
func (srv *Server) Serve(ctx *fasthttp.RequestCtx, in *Incoming, req *openai.Request, m fleet.Route, legs []openai.Leg) *openai.Error {
	conn, ok := edge.ConnOf(ctx)
	if !ok {
		return &openai.Error{Status: http.StatusInternalServerError, Code: "internal_error", Message: "the connection is not watched"}
	}
	in.way = wayLocal
	j := &job{srv: srv, req: req, body: req.Body, client: reader{conn}, id: in.Told.ID, model: m, arrive: in.Told.Arrival, in: in, told: in.Told}
	req.Body, req.Prompts = mooncake.Body{}, nil // the jobs have it, as long as they need it
	if len(legs) > 1 {
		return srv.fanOut(ctx, conn, j, legs)
	}
	j.leg = &legs[0].Leg
	j.ask = sse.Ask{Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs, Choice: -1, Cached: -1, Form: sse.FormOf(req.Endpoint.Path())}
	s, fail := j.serve(ctx)
	if s == nil && fail == nil {
		return nil // another dispatcher answers
	}
	srv.expose(ctx, in)
	srv.markRoute(ctx, in)
	in.Body.Give() // what is kept to go on elsewhere is on an account of its own
	if fail != nil {
		return fail
	}
	if in.From != nil {
		srv.explain(ctx, in, nil)
	}
	if req.Stream {
		tokens := s.mayHave
		if s.stage == ended {
			tokens = 0
		}
		srv.Stream(ctx, s.resp.ContentType(), flow{s}, tokens)
		return nil
	}
	answer, fail := s.collect()
	if fail != nil {
		srv.Fail(ctx, fail)
		return nil
	}
	Piece(ctx, "application/json", answer, nil)
	return nil
}

// Refuse ends a request that never had an answer.
func (srv *Server) Refuse(ctx *fasthttp.RequestCtx, in *Incoming, e *openai.Error) {
	if in.Explain {
		markReason(ctx, e)
	}
	if in.From != nil {
		srv.explain(ctx, in, e)
	}
	srv.Account(in, e)
	srv.Fail(ctx, e)
}

// Broken ends a request whose handler panics. Whoever recovers answers it.
func (srv *Server) Broken(in *Incoming) {
	srv.Account(in, failure.Broken())
}

// Account gives back what a finished request holds of its caller's limits, and has
// the journal write what became of it: its very end, once for each. fail is nil for
// an answer that was whole.
func (srv *Server) Account(in *Incoming, fail *openai.Error) {
	if !in.over.CompareAndSwap(false, true) {
		return // it was Broken, and then its answer was closed
	}
	defer srv.open.Add(-1)
	in.Limits.GiveBack(in.Told.PromptTokens + in.Told.OutputTokens)
	in.Body.Give()
	if in.From != nil {
		srv.Node.Received(in.Told.Origin, journal.Outcome(fail))
	}
	in.Told.End(fail)
}
