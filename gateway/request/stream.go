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

// A stream is an answer under way: it reads the decode engine's events, reports their tokens to the slot, removes what the client did not
// ask for, and passes the bytes on. An event loop (see pump) or the connection's own goroutine drives it. Both read from the engine only as
// fast as the client reads, so a slow client slows its engine down.
type stream struct {
	job  *job
	from source

	unread        []byte        // events the client has not taken yet
	now           time.Time     // when the last bytes came
	firstAt       time.Time     // when the first data event came; from then on the client may have bytes
	firstTokenAt  time.Time     // when the first event with tokens came
	lastTokenAt   time.Time     // when the last event with tokens came
	earlierTrail  *sse.Trail    // the parts of the answer from earlier sources; nil: there was no earlier source
	earlierTokens int           // tokens of the answer from earlier sources
	stage         stage         // how far the answer has come
	broken        *openai.Error // why the answer ended before it was complete; nil: it did not
}

// stage says how far an answer has come.
type stage uint8

const (
	flows   stage = iota // the source may send more
	lost                 // the source failed, and another engine may continue the answer
	ended                // no engine sends anything more
	settled              // ended, and its slot, call and buffers were given back
)

// source is the decode call from which an answer comes at present. If the call fails in the middle of the answer, another source may
// follow.
type source struct {
	job   *job
	slot  *dispatcher.Slot // nil once released
	rank  *fleet.Rank
	call  *engine.Call
	run   *fleet.Run // lets a drain end the call, until hangUp; nil: a prefill engine has answered
	resp  *engine.Response
	began time.Time

	partner *partner // the prefill leg that runs beside the decode leg; nil: no prefill leg does

	wait        *engine.Wait   // for the first event
	lastArrival engine.Arrival // the last arrival of bytes

	maxTokens  int            // tokens that the rest of the answer may have
	idle       time.Duration  // how long the engine may be silent, as set on the connection
	coreHalted *atomic.Bool   // watchCore found that the engine's core stands still, and ends the call; nil: watchCore does not run
	mayCompute int64          // prompt tokens that the engine may compute, as announced by reportCompute; 0: settleCompute was called
	fault      *failure.Fault // why the source failed before the answer was complete; nil: it did not
	answer     *buffers

	whole    bool // the engine sends its answer in one piece, not as events
	local    bool // the rank computes the prompt itself
	stranded bool // the engine may keep the request's KV blocks for ever, because it waits for KV that never comes
	muffled  bool // the engine may hold a text back until the text is complete
	beyond   bool // the engine's traffic counts the request as one beyond the rank's slots, until hangUp
	noUsage  bool // the engine sent no usage, so evenkeel wrote its own count
	heard    bool // the first event has come, and the engine's traffic counts this stream until hangUp
}

// buffers has the memory that a stream needs while it runs. Later streams use it again.
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
	if cap(b.out) <= 64<<10 { // the pool must not keep the memory of one huge event
		buffersPool.Put(b)
	}
}

// contentType is the content type of the engine's answer.
func (s *source) contentType() []byte {
	if s.resp == nil { // the events were made from an answer that was read completely, see prefillOnly
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

// shortAnswer is the largest number of tokens of an answer that no event loop carries. To pass the sockets to a loop and back costs as much
// as a few arrivals, so for such an answer a loop does not pay.
const shortAnswer = 8

var _ pump.Stream = (*stream)(nil) // checked here, because without one of the methods Stream would silently use no loop

func (s *stream) Wait(now time.Time) time.Duration { return s.from.answer.Reader.Wait(now) }

func (s *stream) Err() error { return s.from.answer.Err() }

// Flow returns the response from which an event loop may read the rest of the answer. It is nil if the answer has ended or is not streamed,
// or if bytes have arrived that must be read first.
func (s *stream) Flow() *engine.Response {
	if s.stage != flows || s.from.slot == nil || s.from.answer.Assembler != nil || s.from.resp.Arrived() {
		return nil
	}
	s.from.answer.out = nil
	return s.from.resp
}

// Arrive takes in bytes that an event loop has read, and appends the bytes for the client to dst. The sse.End says whether the engine's
// answer ends with them.
func (s *stream) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	s.now = now
	dst, effects := s.from.answer.Feed(dst, data, now)
	s.from.rank.Vouch(&s.from.lastArrival, s.job.req.Endpoint, len(data), false, effects.Events > 0, now)
	if effects.Events > 0 {
		s.progress(effects.Tokens, effects.Events)
	}
	return dst, effects.End
}

// GoBack takes the answer back from an event loop, with the events that the client has not got yet. end is the result of the last Arrive.
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
