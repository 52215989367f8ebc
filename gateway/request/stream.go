package request

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/pump"
	"evenkeel/sse"
)

// A stream is an answer under way: it reads the decode engine's events, counts
// their tokens into the slot, edits what the client did not ask for and hands
// the bytes on. The connection's own goroutine reads it: one Read is one
// arrival, so a slow client slows its engine down.
type stream struct {
	job  *job
	from source

	unread        []byte        // events the client has not taken yet
	now           time.Time     // of the last arrival
	firstAt       time.Time     // first data event; from then on the client may have bytes
	firstTokenAt  time.Time     // first event that carried tokens
	lastTokenAt   time.Time     // last event that carried tokens
	earlierTrail  *sse.Trail    // what earlier sources gave of the answer; nil: there was none
	earlierTokens int           // tokens of the answer from earlier sources
	stage         stage         // how far the answer has come
	broken        *openai.Error // why the answer ended before it was whole; nil: it did not
}

// stage says how far an answer has come.
type stage uint8

const (
	flows   stage = iota // its source may send more
	lost                 // its source failed, and the answer may go on elsewhere
	ended                // nothing more comes from any engine
	settled              // and nothing is held for it any more
)

// source is the decode call that an answer comes from at the moment. If it is
// lost in the middle, another source may follow.
type source struct {
	job   *job
	slot  *dispatcher.Slot // nil once released
	rank  *fleet.Rank
	call  *engine.Call
	run   *fleet.Run // among those that a drain may end, until hangUp; nil: a prefill engine has answered
	resp  *engine.Response
	began time.Time

	partner *partner // the prefill leg that runs beside the decode leg; nil: no prefill leg does

	wait        *engine.Wait   // for the first event
	lastArrival engine.Arrival // the last arrival of bytes

	maxTokens  int            // tokens that the rest of the answer may have
	idle       time.Duration  // how long the engine may be silent, as the connection has it
	coreHalted *atomic.Bool   // the engine's core was silent for so long that the request goes elsewhere; nil: that is not watched
	mayCompute int64          // what reportCompute has announced: prompt tokens that the engine was to compute at most; 0: that is settled
	fault      *failure.Fault // why it ended before the answer was whole; nil: it has not, or the answer was
	answer     *buffers

	whole    bool // the engine's own answer in one piece, no events
	local    bool // the rank computes the prompt itself
	stranded bool // its engine may keep the request's KV blocks for ever, because it waits for KV that never comes
	muffled  bool // the engine may send nothing of a text before it has all of it
	beyond   bool // the engine's traffic counts the request as one beyond the rank's slots, until hangUp
	noUsage  bool // the engine sent no usage, and evenkeel writes it in the engine's place
	heard    bool // its first event came; the engine's traffic counts it until hangUp
}

// buffers are what a stream needs while it runs, reused by the next one.
type buffers struct {
	sse.Answer
	out []byte // for the client
}

var buffersPool = sync.Pool{New: func() any { return &buffers{} }}

var readPool = sync.Pool{New: func() any { return new([4 << 10]byte) }}

// tokens is how many tokens the answer has, from all its sources.
func (s *stream) tokens() int {
	return s.earlierTokens + s.from.answer.Mirror.Tokens()
}

// putBack returns the buffers to the pool, except those that one huge answer has made large.
func (b *buffers) putBack() {
	b.Assembler = nil
	if cap(b.Trail.IDs) > 64<<10 || cap(b.Trail.Last) > 64<<10 {
		b.Trail = sse.Trail{}
	}
	if cap(b.out) <= 64<<10 { // one huge event must not stay in the pool
		buffersPool.Put(b)
	}
}

// contentType is that of the engine's answer. Without a response, all events are here already, and a stream of events is meant.
func (s *source) contentType() []byte {
	if s.resp == nil { // all of it is here
		return []byte("text/event-stream")
	}
	return s.resp.ContentType()
}

// slotless prepares the stream of an answer whose engine has no slot for it: a prefill engine's own answer, or one that is passed
// through.
func slotless(j *job, rank *fleet.Rank, ask sse.Ask) *stream {
	rank.Worker = -1
	s := &stream{job: j, from: source{job: j, whole: ask.Whole, rank: rank, began: time.Now(), maxTokens: ask.MaxTokens,
		answer: buffersPool.Get().(*buffers)}}
	s.from.answer.Trail.Reset(false)
	s.from.answer.Answer.Reset(ask)
	s.from.answer.out = s.from.answer.out[:0]
	return s
}

// shortAnswer is how many tokens an answer may have at most so that no loop carries it, and fasthttp writes it as any other
// body. To pass the sockets to a loop and back costs as much as a few arrivals.
const shortAnswer = 8

var _ pump.Stream = (*stream)(nil) // else no loop would carry an answer, and nothing would say so

func (s *stream) Wait(now time.Time) time.Duration { return s.from.answer.Reader.Wait(now) }

func (s *stream) Err() error { return s.from.answer.Err() }

// Flow returns the response from which a loop may read the rest of the answer; nil: no loop may, because the answer has ended, is not
// streamed, or has bytes here that were not read yet.
func (s *stream) Flow() *engine.Response {
	if s.stage != flows || s.from.slot == nil || s.from.answer.Assembler != nil || s.from.resp.Arrived() {
		return nil
	}
	s.from.answer.out = nil
	return s.from.resp
}

// Arrive takes in bytes that a loop has read, and appends what the client gets of them to dst. The end says whether the engine's answer
// is over with them.
func (s *stream) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	s.now = now
	dst, effects := s.from.answer.Feed(dst, data, now)
	s.from.rank.Vouch(&s.from.lastArrival, s.job.req.Endpoint, len(data), false, effects.Events > 0, now)
	if effects.Events > 0 {
		s.progress(effects.Tokens, effects.Events)
	}
	return dst, effects.End
}

// GoBack takes the answer back from a loop, with the events that the client has not got yet. end is that of the last Arrive.
func (s *stream) GoBack(events []byte, end sse.End) {
	s.from.answer.out = events
	switch err := s.from.answer.Err(); {
	case end != sse.Runs:
		s.effect(sse.Effects{End: end})
	case err != nil:
		s.broke(err)
	}
}

// Panicked settles the request if the code that streams its answer has panicked with v.
func (s *stream) Panicked(v any) { s.job.panicked(v, s.Close) }

// panicked settles a request whose stream has panicked.
func (j *job) panicked(v any, settle func()) {
	log := func(doing string, v any) {
		j.srv.Log.Error("panic while "+doing, zap.Inline(j), zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	}
	log("an answer was streamed", v)
	defer func() {
		if v := recover(); v != nil {
			log("a stream was ended", v)
		}
	}()
	settle()
}
