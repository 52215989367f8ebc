package gateway

import (
	"io"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// A fanned is a client's request that became several PD requests, because an
// engine's answer carries one hand-off only: n above 1, or a list of prompts
// (contract 1.5). Its legs run side by side, their choices renumbered; the
// first failure before any byte ends all.
type fanned struct {
	gw   *Gateway
	conn client
	req  *openai.Request
	rec  *record
	jobs []*job
	kids []*child

	once sync.Once // stop
	stop chan struct{}
	legs sync.WaitGroup
}

// child is a leg's share of the client's connection: gone when the client is,
// or when a sibling failed.
type child struct {
	mu   sync.Mutex
	gone chan struct{}
	on   func()
	left bool
}

func (c *child) Gone() <-chan struct{} { return c.gone }

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
	c.left = true
	close(c.gone)
	if c.on != nil {
		c.on()
	}
}

// isLeg says whether another record counts for the client's request.
func (j *job) isLeg() bool { _, ok := j.client.(*child); return ok }

// fanOut serves a request of several legs.
func (g *Gateway) fanOut(ctx *fasthttp.RequestCtx, conn *edge.Conn, req *openai.Request, legs []openai.Leg, m route, rec *record) {
	f := &fanned{gw: g, conn: conn, req: req, rec: rec, stop: make(chan struct{})}
	id := []byte(map[mooncake.Endpoint]string{mooncake.Chat: "chatcmpl-ek-", mooncake.Completions: "cmpl-ek-"}[req.Endpoint] + rec.ID)
	for i := range legs {
		kid := &child{gone: make(chan struct{})}
		legRec := *rec
		f.kids = append(f.kids, kid)
		f.jobs = append(f.jobs, &job{
			gw: g, req: req, leg: &legs[i].Leg, client: kid, id: rec.ID + "-" + itoa(i), model: m, arrive: rec.Arrival, rec: &legRec,
			ask: sse.Ask{
				Usage: req.IncludeUsage || !req.Stream, ContinuousUsage: req.ContinuousUsage, TokenIDs: req.ReturnTokenIDs, Cached: -1,
				ID: id, Created: rec.Arrival.Unix(), Choice: legs[i].Choice, DropFinalUsage: req.Stream, DropDone: true,
			},
		})
	}
	conn.OnGone(f.cancel)
	if req.Stream {
		f.stream(ctx, id, legs)
		return
	}
	f.collect(ctx, legs)
}

func itoa(i int) string { return string(rune('a'+i/26)) + string(rune('a'+i%26)) }

// cancel stops every leg. It never blocks: the connection's watcher calls it.
func (f *fanned) cancel() {
	f.once.Do(func() { close(f.stop) })
	for _, k := range f.kids {
		k.leave()
	}
}

// collect answers a fan-out that is not streamed.
func (f *fanned) collect(ctx *fasthttp.RequestCtx, legs []openai.Leg) {
	parts := make([]sse.Part, len(f.jobs))
	fails := make([]*openai.Error, len(f.jobs))
	for i, j := range f.jobs {
		f.legs.Go(func() {
			s, fail := j.serve()
			if fail == nil {
				parts[i].PromptIndex = legs[i].Prompt
				parts[i].JSON, fail = s.collect()
				s.close(nil)
			}
			if fails[i] = fail; fail != nil {
				f.cancel()
			}
		})
	}
	f.legs.Wait()
	f.conn.OnGone(nil)
	body, fail := []byte(nil), firstFailure(fails)
	if fail == nil {
		var err error
		if body, err = sse.MergeAnswers(parts); err != nil {
			fail = streamError("upstream_broken", err)
		}
	}
	f.settle(fail)
	if fail != nil {
		f.gw.fail(ctx, fail)
		return
	}
	ctx.SetContentType("application/json")
	ctx.SetBody(body)
}

// firstFailure prefers a cause to the cancellations it led to.
func firstFailure(fails []*openai.Error) (first *openai.Error) {
	for _, e := range fails {
		if e != nil && (first == nil || first.Status == statusGone) {
			first = e
		}
	}
	return first
}

// settle sums the legs' numbers into the client's record.
func (f *fanned) settle(fail *openai.Error) {
	r := f.rec
	for _, j := range f.jobs {
		r.PromptTokens += j.rec.PromptTokens
		r.CachedTokens += j.rec.CachedTokens
		r.OutputTokens += j.rec.OutputTokens
		r.ProbeMs = max(r.ProbeMs, j.rec.ProbeMs)
		r.WaitMs = max(r.WaitMs, j.rec.WaitMs)
		r.TransferMs = max(r.TransferMs, j.rec.TransferMs)
		if j.rec.TTFTMs > 0 && (r.TTFTMs == 0 || j.rec.TTFTMs < r.TTFTMs) {
			r.TTFTMs = j.rec.TTFTMs
		}
		r.Attempts += j.rec.Attempts
		r.Prefill, r.Rank, r.Policy = j.rec.Prefill, j.rec.Rank, j.rec.Policy
	}
	r.Outcome = outcomeOf(fail)
	r.TotalMs = ms(time.Since(r.Arrival))
	f.gw.account(r)
}

// piece is what a leg has for the client: bytes, or its end.
type piece struct {
	bytes []byte
	fail  *openai.Error // before its first event
	done  bool
}

// stream answers a streamed fan-out. The status is decided by the first leg
// that has an event, or fails.
func (f *fanned) stream(ctx *fasthttp.RequestCtx, id []byte, legs []openai.Leg) {
	r := &fannedReader{f: f, id: id, legs: legs, pieces: make(chan piece, len(f.jobs)), usage: make([]sse.Usage, len(f.jobs))}
	contentTypes := make(chan []byte, len(f.jobs))
	for i, j := range f.jobs {
		f.legs.Go(func() { r.leg(i, j, contentTypes) })
	}
	var first piece
	select {
	case first = <-r.pieces:
	case <-f.stop:
		first.fail = errGone()
	}
	if first.fail != nil {
		f.cancel()
		f.legs.Wait()
		f.conn.OnGone(nil)
		f.settle(first.fail)
		f.gw.fail(ctx, first.fail)
		return
	}
	r.take(first)
	f.gw.startStream(ctx, edge.NewPull(r, r.close, f.gw.log), <-contentTypes)
}

// fannedReader is the body of a streamed fan-out.
type fannedReader struct {
	f       *fanned
	id      []byte
	legs    []openai.Leg
	pieces  chan piece
	pending []byte
	over    int // legs that ended
	ended   bool
	fail    *openai.Error
	usage   []sse.Usage // of leg i, written before its last piece is sent
}

// leg runs one leg to its end and sends what it has; a reader that left is
// noticed by stop.
func (r *fannedReader) leg(i int, j *job, contentTypes chan<- []byte) {
	send := func(p piece) bool {
		select {
		case r.pieces <- p:
			return true
		case <-r.f.stop:
			return false
		}
	}
	s, fail := j.serve()
	if fail != nil {
		send(piece{fail: fail, done: true})
		return
	}
	defer s.close(nil)
	contentTypes <- append([]byte(nil), s.resp.ContentType()...)
	for {
		events, err := s.next()
		if len(events) > 0 && !send(piece{bytes: append([]byte(nil), events...)}) {
			return
		}
		if err != nil {
			r.usage[i], _ = s.mirror.Usage()
			send(piece{fail: s.broken, done: true})
			return
		}
	}
}

// take puts a piece where Read finds it: whole events of one leg, so that legs
// may alternate.
func (r *fannedReader) take(p piece) {
	r.pending = append(r.pending[:0], p.bytes...)
	if !p.done {
		return
	}
	r.over++
	r.fail = p.fail
	if r.fail != nil || r.over == len(r.f.jobs) {
		r.finish()
	}
}

// finish appends the end of the whole answer: the sum of the legs' usage, or
// the error, and [DONE].
func (r *fannedReader) finish() {
	r.ended = true
	if r.fail != nil {
		r.pending = sse.ErrorEvent(r.pending, r.fail.Message, orElse(r.fail.Type, "server_error"), r.fail.Code)
	} else if r.f.req.IncludeUsage {
		r.pending = sse.UsageEvent(r.pending, r.id, []byte(r.f.req.Model), r.f.rec.Arrival.Unix(), r.f.req.Endpoint == mooncake.Chat, sumUsage(r.usage, r.legs))
	}
	r.pending = append(r.pending, sse.Done...)
}

// sumUsage counts each prompt once and every completion.
func sumUsage(legs []sse.Usage, of []openai.Leg) (sum sse.Usage) {
	seen := map[int]bool{}
	for i, u := range legs {
		if !seen[of[i].Prompt] {
			seen[of[i].Prompt] = true
			sum.Prompt += u.Prompt
			sum.Cached += max(0, u.Cached)
		}
		sum.Completion += u.Completion
	}
	sum.Total = sum.Prompt + sum.Completion
	return sum
}

func (r *fannedReader) Read(p []byte) (int, error) {
	for len(r.pending) == 0 {
		if r.ended {
			return 0, io.EOF
		}
		select {
		case next := <-r.pieces:
			r.take(next)
		case <-r.f.stop:
			return 0, io.ErrClosedPipe
		}
	}
	n := copy(p, r.pending)
	r.pending = r.pending[n:]
	return n, nil
}

// close ends every leg and settles the request. err tells of a client that
// left; how the legs ended is known already.
func (r *fannedReader) close(error) {
	r.f.cancel()
	r.f.legs.Wait()
	r.f.conn.OnGone(nil)
	if r.fail == nil && !r.ended {
		r.fail = errGone()
	}
	r.f.settle(r.fail)
}
