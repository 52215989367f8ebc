package gateway

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/dispatcher"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A fanned is a client's request that became several PD requests, because an
// engine's answer carries one hand-off only: n above 1, or a list of prompts
// (contract 1.5). Its legs run side by side, their choices renumbered; the
// first failure ends all.
type fanned struct {
	gw     *Gateway
	conn   client
	req    *openai.Request
	in     *incoming
	id     []byte // of the whole answer
	legs   []leg
	wg     sync.WaitGroup
	cancel sync.Once
	stop   chan struct{} // closed by leave
}

// leg is one of the PD requests.
type leg struct {
	*job
	kid    *child
	prompt int // index of its prompt
}

// child is a leg's share of the client's connection: gone when the client is,
// or when a sibling failed.
type child struct {
	mu   sync.Mutex
	gone chan struct{}
	at   time.Time // set before gone is closed
	on   func()
	left bool
}

// Gone is closed when the leg is not wanted any more.
func (c *child) Gone() <-chan struct{} { return c.gone }

// GoneAt is when that was; ask once Gone is closed.
func (c *child) GoneAt() time.Time { return c.at }

// OnGone is edge.Conn's.
func (c *child) OnGone(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.on = f
	if c.left && f != nil {
		f()
	}
}

func (c *child) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left {
		return
	}
	c.left, c.at = true, time.Now()
	close(c.gone)
	if c.on != nil {
		c.on()
	}
}

// isLeg says whether another record counts for the client's request.
func (j *job) isLeg() bool { _, ok := j.client.(*child); return ok }

// fanOut serves a request of several legs.
func (g *Gateway) fanOut(ctx *fasthttp.RequestCtx, conn *edge.Conn, req *openai.Request, body mooncake.Body, legs []openai.Leg, m route, in *incoming, patience time.Time) {
	prefix := "chatcmpl-ek-"
	if req.Endpoint == mooncake.Completions {
		prefix = "cmpl-ek-"
	}
	f := &fanned{gw: g, conn: conn, req: req, in: in, id: []byte(prefix + in.told.ID), stop: make(chan struct{})}
	for i := range legs {
		kid := &child{gone: make(chan struct{})}
		name := letters(i)
		f.legs = append(f.legs, leg{kid: kid, prompt: legs[i].Prompt, job: &job{
			gw: g, req: req, body: body, leg: &legs[i].Leg, client: kid, id: in.told.ID + "-" + name, model: m, arrive: in.told.Arrival, patience: patience, in: in, told: in.told.Leg(name),
			ask: sse.Ask{
				Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs, Cached: -1,
				ID: f.id, Created: in.told.Arrival.Unix(), Choice: legs[i].Choice, DropFinalUsage: req.Stream, DropDone: true,
			},
		}})
	}
	whole := &job{gw: g, req: req, body: body, client: conn, id: in.told.ID, model: m, arrive: in.told.Arrival, patience: patience, in: in, told: in.told}
	for {
		away, err := f.enter()
		if away != nil {
			if whole.send(ctx, away) {
				return
			}
			for _, l := range f.legs { // it came back: they take their old places, and stay
				l.returned, l.asks = true, whole.asks
			}
			continue
		}
		if err != nil {
			whole.end(ctx, whole.notChosen(err))
			return
		}
		break
	}
	conn.OnGone(f.leave)
	if req.Stream {
		f.stream(ctx)
	} else {
		f.collect(ctx)
	}
}

// enter has the legs that decode ranks do not serve whole enter the arrival
// queue together. It may be that the whole request goes to another region: the
// decision about its first leg is one about all, as long as none was served
// here (geo R1, R6).
func (f *fanned) enter() (away *geo.Forward, err error) {
	rest := f.legs
	if !f.gw.conf().Geo.Follows() {
		rest = slices.DeleteFunc(slices.Clone(rest), func(l leg) bool {
			l.local.slot = l.bindLocal()
			return l.local.slot != nil
		})
	}
	if len(rest) == 0 {
		return nil, nil
	}
	head := f.ask(rest)
	turns := make([]prefill.Request, len(rest))
	for i, l := range rest {
		turns[i] = l.turn()
	}
	tickets, err := f.gw.tier.EnterAll(turns)
	if err == nil && head != nil && f.goes(&tickets[0]) || errors.Is(err, prefill.ErrElsewhere) {
		if away = head.Forward(); away == nil {
			err = prefill.ErrElsewhere // nowhere
		}
		return away, err
	}
	for i, l := range rest {
		if err == nil {
			l.ticket = &tickets[i]
		}
	}
	for _, l := range f.legs {
		if s := l.local.slot; err != nil && s != nil {
			f.gw.dispatcher.Release(s, dispatcher.Outcome{Kind: dispatcher.Cancelled})
		}
	}
	return nil, err
}

// ask gives the legs their question, which is one; nil: there are no other
// regions.
func (f *fanned) ask(legs []leg) (head *geo.Question) {
	first := legs[0]
	if head = first.elsewhere(first.returned && !first.asks || len(legs) < len(f.legs)); head == nil {
		return nil
	}
	head.Legs(len(legs))
	first.question = head
	for _, l := range legs[1:] {
		l.question = head.Leg(l.id, l.recognize())
	}
	return head
}

// goes waits until it is known whether the request goes elsewhere.
func (f *fanned) goes(first *prefill.Ticket) bool {
	ctx, cancel := context.WithCancel(f.gw.service.context())
	defer cancel()
	f.conn.OnGone(cancel)
	defer f.conn.OnGone(nil)
	return first.Elsewhere(ctx)
}

// letters numbers legs in a request id: aa, ab, ...
func letters(i int) string { return string(rune('a'+i/26)) + string(rune('a'+i%26)) }

// leave ends every leg. It never blocks: the connection's watcher calls it.
func (f *fanned) leave() {
	f.cancel.Do(func() { close(f.stop) })
	for _, l := range f.legs {
		l.kid.leave()
	}
}

// part ends the legs and settles the request once they have let go of their
// engines. After a failure that may take until the first event of each leg, so the
// client does not wait for it.
func (f *fanned) part(fail *openai.Error) {
	f.leave()
	f.conn.OnGone(nil)
	last := func() {
		f.wg.Wait()
		f.settle(fail)
	}
	if fail == nil || f.gw.tails.begin(mostTails, last) != nil {
		last()
	}
}

// collect answers a fan-out that is not streamed.
func (f *fanned) collect(ctx *fasthttp.RequestCtx) {
	parts := make([]sse.Part, len(f.legs))
	ends := make(chan *openai.Error, len(f.legs)) // in the order they happened
	for i, l := range f.legs {
		f.wg.Go(func() {
			s, fail := l.serve()
			if fail == nil {
				parts[i].PromptIndex = l.prompt
				parts[i].JSON, fail = s.collect()
				s.close(nil)
			}
			ends <- fail
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
			fail = streamError("upstream_broken", err)
		}
	}
	if fail != nil {
		f.mark(ctx, fail)
		f.gw.fail(ctx, fail)
		f.part(fail)
		return
	}
	f.part(nil)
	f.mark(ctx, nil)
	ctx.SetContentType("application/json")
	ctx.SetBody(answer)
}

// mark tells the client, or another dispatcher, where the request was served.
func (f *fanned) mark(ctx *fasthttp.RequestCtx, fail *openai.Error) {
	f.gw.markRoute(ctx, f.in)
	if f.in.from != nil {
		f.gw.regions.explain(ctx, f.in, fail)
	}
}

// settle sums the legs' facts into those of the client's request.
func (f *fanned) settle(fail *openai.Error) {
	for _, l := range f.legs {
		f.in.told.Sum(&l.told.Facts)
	}
	f.gw.account(f.in, fail)
}
