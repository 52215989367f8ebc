package request

import (
	"context"
	"errors"
	"slices"

	"github.com/valyala/fasthttp"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// fanOut serves a request of several legs. An error it returns has not been answered.
func (srv *Server) fanOut(ctx *fasthttp.RequestCtx, conn *edge.Conn, whole *job, legs []openai.Leg) *openai.Error {
	req, in := whole.req, whole.in
	prefix := "chatcmpl-ek-"
	if req.Endpoint == mooncake.Completions {
		prefix = "cmpl-ek-"
	}
	f := &fanned{srv: srv, conn: conn, req: req, in: in, id: []byte(prefix + in.Record.ID), stop: make(chan struct{})}
	for i := range legs {
		kid, name := edge.NewDisconnect(srv.Log), letters(i)
		f.legs = append(f.legs, branch{kid: kid, prompt: legs[i].Prompt, job: &job{
			srv: srv, req: req, body: whole.body, leg: &legs[i].Leg, client: reader{kid}, id: in.Record.ID + "-" + name, model: whole.model, arrive: whole.arrive, in: in, record: in.Record.Leg(name),
			ask: sse.Ask{
				Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs, Cached: -1,
				ID: f.id, Created: in.Record.Arrival.Unix(), Choice: legs[i].Choice, DropFinalUsage: req.Stream, DropDone: true,
			},
		}})
	}
	if answered, fail := f.goElsewhere(ctx, whole); answered || fail != nil {
		return fail
	}
	conn.OnGone(f.endLegs)
	if req.Stream {
		f.stream(ctx)
	} else {
		f.collect(ctx)
	}
	return nil
}

// goElsewhere takes the turns of all legs. It may be that another dispatcher answers
// the whole request; one that gives it back lets the legs take their old places.
func (f *fanned) goElsewhere(ctx *fasthttp.RequestCtx, whole *job) (answered bool, fail *openai.Error) {
	defer func() {
		if fail == nil {
			return
		}
		for _, l := range f.legs {
			if s := l.job.local.slot; s != nil {
				f.srv.Dispatcher.Release(s, board.Outcome{Kind: board.Cancelled})
			}
		}
		whole.record.EndAttempt(fail)
		edge.EndWait(ctx)
		f.srv.markRoute(ctx, f.in)
	}()
	whole.record.Reached = journal.Queued // its legs enter phases, it does not until it is sent
	for {
		away, err := f.enter()
		switch {
		case away != nil:
		case err != nil:
			return false, whole.notChosen(err)
		default:
			return false, nil
		}
		whole.record.Report(journal.Event{What: journal.Attempted})
		what, fail := whole.send(ctx, away)
		if what == lifecycle.PeerAnswers || fail != nil {
			return fail == nil, fail
		}
		whole.life.CameBack(what)
		for _, l := range f.legs {
			l.job.life.Moved(&whole.life)
		}
	}
}

// enter has the legs that decode ranks do not serve whole enter the arrival
// queue together. It may be that the whole request goes to another region: the
// decision about its first leg is one about all, as long as none was served here.
func (f *fanned) enter() (away *geo.Forward, err error) {
	rest := f.legs
	if !f.srv.Settings().Geo.Follows() {
		rest = slices.DeleteFunc(slices.Clone(rest), func(l branch) bool {
			l.job.local.slot = l.job.bindLocal()
			return l.job.local.slot != nil
		})
	}
	if len(rest) == 0 {
		return nil, nil
	}
	head := f.ask(rest)
	turns := make([]prefill.Request, len(rest))
	for i, l := range rest {
		turns[i] = l.job.arrival()
	}
	tickets, err := f.srv.Tier.EnterAll(turns)
	if err == nil && head != nil && f.goes(&tickets[0]) || errors.Is(err, prefill.ErrElsewhere) {
		if away = head.Forward(); away == nil {
			err = prefill.ErrElsewhere // nowhere
		}
		return away, err
	}
	for i, l := range rest {
		if err == nil {
			l.job.stay.ticket = &tickets[i]
		}
	}
	return nil, err
}

// ask gives the legs their question, which is one; nil: there are no other
// regions.
func (f *fanned) ask(legs []branch) (head *geo.Question) {
	first := legs[0]
	if head = first.job.elsewhere(first.job.life.Stays() || len(legs) < len(f.legs)); head == nil {
		return nil
	}
	head.Legs(len(legs))
	first.job.question = head
	for _, l := range legs[1:] {
		l.job.question = head.Leg(l.job.id, l.job.recognize())
	}
	return head
}

// goes waits until it is known whether the request goes elsewhere.
func (f *fanned) goes(first *prefill.Ticket) bool {
	ctx, cancel := context.WithCancel(f.srv.Serving())
	defer cancel()
	f.conn.OnGone(cancel)
	defer f.conn.OnGone(nil)
	return first.Elsewhere(ctx)
}

// collect answers a fan-out that is not streamed.
func (f *fanned) collect(ctx *fasthttp.RequestCtx) {
	parts := make([]sse.Part, len(f.legs))
	ends := make(chan *openai.Error, len(f.legs)) // in the order they happened
	for i, l := range f.legs {
		f.wg.Go(func() {
			ends <- f.guard(func() *openai.Error {
				s, fail := l.job.serve(nil)
				if fail == nil {
					parts[i].PromptIndex = l.prompt
					parts[i].JSON, fail = s.collect()
				}
				return fail
			})
		})
	}
	var answer []byte
	var fail *openai.Error
	for range f.legs {
		if fail = <-ends; fail != nil {
			break
		}
	}
	if fail == nil {
		var err error
		if answer, err = sse.MergeAnswers(parts); err != nil {
			fail = failure.Stream("upstream_broken", err)
		}
	}
	if fail != nil {
		f.mark(ctx, fail)
		f.srv.Fail(ctx, fail)
		f.part(fail)
		return
	}
	f.part(nil)
	f.mark(ctx, nil)
	Piece(ctx, "application/json", answer, nil)
}
