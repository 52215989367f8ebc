package request

import (
	"bytes"
	"cmp"
	"io"
	"runtime/debug"
	"sync"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// merged is the body of a streamed fan-out: the events of its legs as they
// come, whole, and one end.
type merged struct {
	whole   *fanned
	pieces  chan piece
	pending []byte
	over    int // legs that ended
	ended   bool
	fail    *openai.Error
	usage   []sse.Usage      // of leg i, written before its last piece is sent
	details []map[string]int // as usage: the counts of prompt_tokens_details
}

// piece is what a leg has for the client: whole events, or its end.
type piece struct {
	contentType []byte
	events      []byte
	done        bool
	fail        *openai.Error
}

// stream answers a streamed fan-out. The status is decided by the first leg
// that has an event, or fails.
func (f *fanned) stream(ctx *fasthttp.RequestCtx) {
	m := &merged{whole: f, pieces: make(chan piece, len(f.legs)), usage: make([]sse.Usage, len(f.legs)), details: make([]map[string]int, len(f.legs))}
	for i, l := range f.legs {
		f.wg.Go(func() {
			if fail := f.guard(func() *openai.Error { return m.run(i, l) }); fail != nil {
				m.send(piece{fail: fail, done: true})
			}
		})
	}
	var first piece
	select {
	case first = <-m.pieces:
	case <-f.stop:
		first.fail = failure.Gone()
	}
	edge.EndWait(ctx)
	if first.fail != nil {
		m.fail = first.fail
		f.mark(ctx, first.fail)
		f.srv.Fail(ctx, first.fail)
		m.Close()
		return
	}
	m.put(first)
	f.srv.markRoute(ctx, f.in)
	f.srv.Stream(ctx, first.contentType, m, 0)
}

// run serves one leg to its end and sends what it has. That nobody reads any
// more is told by stop. An error is that of a leg that has no answer.
func (m *merged) run(i int, l branch) *openai.Error {
	s, fail := l.job.serve(nil)
	if fail != nil {
		return fail
	}
	defer s.close()
	contentType := bytes.Clone(s.resp.ContentType())
	for {
		events, err := s.next()
		if len(events) > 0 && !m.send(piece{contentType: contentType, events: bytes.Clone(events)}) {
			return nil
		}
		if err != nil {
			m.usage[i], _ = s.answer.Mirror.Usage()
			m.details[i] = s.answer.Mirror.PromptDetails()
			m.send(piece{contentType: contentType, fail: s.broken, done: true})
			return nil
		}
	}
}

func (m *merged) send(p piece) bool {
	select {
	case m.pieces <- p:
		return true
	case <-m.whole.stop:
		return false
	}
}

// put lays a piece where Read finds it.
func (m *merged) put(p piece) {
	m.pending = p.events
	if !p.done {
		return
	}
	m.over++
	m.fail = p.fail
	if m.fail != nil || m.over == len(m.whole.legs) {
		m.finish()
	}
}

// finish appends the end of the whole answer: the sum of the legs' usage, or
// the error, and [DONE].
func (m *merged) finish() {
	m.ended = true
	if m.fail != nil {
		m.pending = sse.ErrorEvent(m.pending, m.fail.Message, cmp.Or(m.fail.Type, "server_error"), m.fail.Code)
	} else if m.whole.req.IncludeUsage {
		usage, details := m.sumUsage()
		m.pending = sse.UsageEvent(m.pending, m.whole.id, []byte(m.whole.req.Model), m.whole.in.Record.Arrival.Unix(), m.whole.req.Endpoint == mooncake.Chat, usage, details)
	}
	m.pending = append(m.pending, sse.Done...)
}

// sumUsage counts each prompt once and every completion.
func (m *merged) sumUsage() (sum sse.Usage, details map[string]int) {
	sum, details = sse.Usage{Cached: -1}, map[string]int{}
	seen := map[int]bool{}
	for i, u := range m.usage {
		if prompt := m.whole.legs[i].prompt; !seen[prompt] {
			seen[prompt] = true
			sum.Prompt += u.Prompt
			if u.Cached >= 0 {
				sum.Cached = max(0, sum.Cached) + u.Cached
			}
			for name, n := range m.details[i] {
				details[name] += n
			}
		}
		sum.Completion += u.Completion
	}
	sum.Total = sum.Prompt + sum.Completion
	return sum, details
}

// Read hands out what has arrived, waiting for the first bytes only.
func (m *merged) Read(p []byte) (int, error) {
	for len(m.pending) == 0 {
		if m.ended {
			return 0, io.EOF
		}
		select {
		case next := <-m.pieces:
			m.put(next)
		case <-m.whole.stop:
			return 0, io.ErrClosedPipe
		}
	}
	n := copy(p, m.pending)
	m.pending = m.pending[n:]
	return n, nil
}

// Pending is how much more Read has without waiting.
func (m *merged) Pending() int { return len(m.pending) }

// Close ends every leg and settles the request. How the legs ended is known already.
func (m *merged) Close() {
	if m.fail == nil && !m.ended {
		m.fail = failure.Gone()
	}
	m.whole.part(m.fail)
}

// A fanned is a client's request that became several PD requests, because an
// engine's answer carries one hand-off only: n above 1, or a list of prompts. Its legs run side by side, their choices renumbered; the
// first failure ends all.
type fanned struct {
	srv    *Server
	conn   client
	req    *openai.Request
	in     *Incoming
	id     []byte // of the whole answer
	legs   []branch
	wg     sync.WaitGroup
	cancel sync.Once
	stop   chan struct{} // closed by leave
}

// A branch is one of the PD requests.
type branch struct {
	job    *job
	kid    *edge.Disconnect // its share of the client's connection: gone when the client is, or when a sibling failed
	prompt int              // index of its prompt
}

// letters numbers legs in a request id: aa, ab, ..., zz, baa, ...
func letters(i int) string {
	name := string(rune('a' + i%26))
	for i /= 26; i >= 26; i /= 26 {
		name = string(rune('a'+i%26)) + name
	}
	return string(rune('a'+i)) + name
}

// endLegs ends every leg. It never blocks: the connection's watcher calls it.
func (f *fanned) endLegs() {
	f.cancel.Do(func() { close(f.stop) })
	for _, l := range f.legs {
		l.kid.Leave()
	}
}

// part ends the legs and settles the request once they have let go of their
// engines. After a failure that may take until the first event of each leg, so the
// client does not wait for it.
func (f *fanned) part(fail *openai.Error) {
	f.endLegs()
	f.conn.OnGone(nil)
	last := func() {
		f.wg.Wait()
		f.settle(fail)
	}
	if fail == nil || f.srv.tails.Run(mostTails, last) != nil {
		last()
	}
}

// guard serves a leg. The edge cannot recover a panic on a leg's own goroutine, and it
// would end the process; it ends the request instead.
func (f *fanned) guard(serve func() *openai.Error) (fail *openai.Error) {
	defer func() {
		if v := recover(); v != nil {
			f.srv.Log.Error("a leg of a request ended with a panic, which is a bug", zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
			fail = failure.Broken()
		}
	}()
	return serve()
}

// mark tells the client, or another dispatcher, where the request was served.
func (f *fanned) mark(ctx *fasthttp.RequestCtx, fail *openai.Error) {
	f.srv.markRoute(ctx, f.in)
	if f.in.From != nil {
		f.srv.explain(ctx, f.in, fail)
	}
}

// settle sums the legs' facts into those of the client's request.
func (f *fanned) settle(fail *openai.Error) {
	for _, l := range f.legs {
		f.in.Record.Sum(&l.job.record.Facts)
	}
	f.srv.Account(f.in, fail)
}
