package request

import (
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/delivery"
	"evenkeel/engine"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/pump"
	"evenkeel/sse"
)

// A stream is an answer under way. It reads the decode engine's events, counts
// their tokens in the slot, removes what the client did not ask for, and passes
// the bytes on. The goroutine of the client's connection reads the stream. It reads
// from the engine only when the client has taken the bytes, so a slow client slows its engine down.
type stream struct {
	job      *job
	upstream upstreamCall

	unread            []byte            // events that the client has not taken yet
	memory            *edge.Reservation // what the caller was charged for the events of an answer that came at once; nil: nothing
	readAt            time.Time         // when the last bytes arrived
	firstAt           time.Time         // when the first data event came; from then on the client may have bytes
	firstTokenAt      time.Time         // when the first event with tokens came
	lastTokenAt       time.Time         // when the last event with tokens came
	earlierTranscript *sse.Transcript   // the part of the answer that earlier calls sent; nil: there was no earlier call
	earlierTokens     int               // number of tokens that earlier calls sent
	state             streamState       // how far the answer has come
	endError          *openai.Error     // why the answer ended too early; nil: it is complete, or has not ended
}

// streamState says how far an answer has come.
type streamState uint8

const (
	flowing   streamState = iota // the engine may send more of the answer
	lost                         // the call failed, and another engine may continue the answer
	ended                        // no engine sends anything more of the answer
	givenBack                    // no engine sends anything more, and the slot, the call and the buffers were given back
)

// upstreamCall is the call to an engine from which the answer comes at present. If the call breaks
// before the answer is complete, another upstreamCall may continue the answer.
type upstreamCall struct {
	job  *job
	slot *dispatcher.Slot // the slot of the request; nil once it is released
	rank *roster.Rank
	call *engine.Call
	// tracked lets a drain end the call, until endAccounting; nil: a prefill engine has answered.
	tracked *fleet.TrackedCall
	resp    *engine.Response
	began   time.Time // when the call was prepared

	prefillCall *concurrentPrefill // the prefill that runs at the same time; nil: none does
	prefiller   string             // id of the prefill engine that has computed the prompt; empty: none has

	pull     *engine.PendingPull // the pull of the KV, which ends with the first event
	lastRead engine.LastRead     // the last read of bytes from the engine

	maxTokens       int            // tokens that the rest of the answer may have
	idle            time.Duration  // how long the engine may be silent, as last set on the connection
	coreHalted      *atomic.Bool   // true: the engine's core was silent for so long that another engine is tried; nil: not watched
	tokensToCompute int64          // the most prompt tokens that the engine may compute; 0: none was noted, or it was corrected
	fault           *failure.Fault // why the call ended too early; nil: the answer is complete, or has not ended
	wrongType       error          // the engine answered with something else than the event stream that was asked for; nil: it did not
	answer          *buffers

	unstreamed         bool // the engine sends its answer in one piece, not as events
	computesPrompt     bool // the rank computes the prompt itself
	blocksMayLeak      bool // the engine may keep the request's KV blocks for ever, because it waits for KV that never comes
	mayHoldTextBack    bool // the engine may send no text before the whole answer is computed (see buffersText)
	countedWithoutSlot bool // the engine's traffic counts the request as one without a slot, until endAccounting
	noUsage            bool // the engine sent no usage, so evenkeel writes the usage
	countedRunning     bool // the first event has come, and the engine's traffic counts the answer as running until endAccounting
}

// endedByDrain says whether the call had to leave its engine, because the engine was taken out of service or is paused. It must not be
// called for the answer of a prefill engine, whose call is not tracked.
func (u *upstreamCall) endedByDrain() bool { return u.tracked.MustMove() }

// handsOver says whether the rank gets the KV of the prompt from a prefill engine.
func (u *upstreamCall) handsOver() bool { return u.prefiller != "" }

// handoffLink returns the engines of the call's hand-off, by the names that the dispatcher knows.
func (u *upstreamCall) handoffLink() delivery.Link {
	_, address, _ := strings.Cut(u.rank.Instance, " ") // it follows the role
	return delivery.Link{Prefiller: u.prefiller, Engine: address}
}

// buffers are the memory of a stream. Later streams use it again.
type buffers struct {
	sse.Answer
	out []byte // bytes that the client has not got yet
}

var buffersPool = sync.Pool{New: func() any { return &buffers{} }}

var readPool = sync.Pool{New: func() any { return new([4 << 10]byte) }}

// tokens returns how many tokens the answer has from all its calls.
func (s *stream) tokens() int {
	return s.earlierTokens + s.upstream.answer.Filter.Tokens()
}

// reset makes the buffers of an earlier stream ready for an answer that is filtered with these options.
func (b *buffers) reset(options sse.Options) {
	b.Answer.Reset(options)
	b.out = b.out[:0]
}

// putBack returns the buffers to the pool. So that huge answers do not fill the pool, it drops a transcript with room for more than 64 Ki
// token ids or bytes, and all buffers if the output buffer has room for more than 64 KiB.
func (b *buffers) putBack() {
	b.Assembler = nil // it holds one client's answer
	if cap(b.Transcript.IDs) > 64<<10 || cap(b.Transcript.Last) > 64<<10 {
		b.Transcript = sse.Transcript{}
	}
	if cap(b.out) <= 64<<10 {
		buffersPool.Put(b)
	}
}

// contentType returns the Content-Type of the engine's answer.
func (u *upstreamCall) contentType() []byte {
	if u.resp == nil { // processAll has read all events of a prefill engine's answer
		return []byte("text/event-stream")
	}
	return u.resp.ContentType()
}

// newSlotlessStream prepares the stream of an answer that takes no slot of a rank: the answer of a prefill engine, or to a request that is
// passed through. The caller has made rank for this stream only. It stands for the engine, and gets a number that no worker of the
// dispatcher has.
func newSlotlessStream(j *job, rank *roster.Rank, options sse.Options) *stream {
	const noWorker = -1
	rank.Worker = noWorker
	s := &stream{job: j, upstream: upstreamCall{job: j, unstreamed: options.Unstreamed, rank: rank, began: time.Now(),
		maxTokens: options.MaxTokens, answer: buffersPool.Get().(*buffers)}}
	const keepText = false // no other engine can continue such an answer
	s.upstream.answer.Transcript.Reset(keepText)
	s.upstream.answer.reset(options)
	return s
}

// shortAnswerTokens bounds the answers, in tokens, that fasthttp writes as ordinary bodies. Longer answers are carried by an event loop
// (see package pump). To pass the sockets to a loop and back costs as much as a few reads.
const shortAnswerTokens = 8

var _ pump.Stream = (*stream)(nil) // without this interface, no loop would carry an answer, and no error would show it

// Wait is how long the engine may still take for its next bytes. After that, the engine counts as silent.
func (s *stream) Wait(now time.Time) time.Duration { return s.upstream.answer.Reader.Wait(now) }

// Pause ends the wait for the engine, because the client takes no bytes.
func (s *stream) Pause(now time.Time) { s.upstream.answer.Reader.Pause(now) }

func (s *stream) Err() error { return s.upstream.answer.Err() }

// Flow returns the response from which an event loop may read the rest of the answer. It returns nil if no loop may: the answer has ended,
// comes from a call without a slot, is not streamed to the client, or has bytes that have arrived but were not read. No loop carries an
// answer without a slot, because it was read to its end (of a prefill engine), or its length is not known (passed through).
func (s *stream) Flow() *engine.Response {
	if s.state != flowing || s.upstream.slot == nil { // checked first: an answer that has ended may have no buffers any more
		return nil
	}
	if s.upstream.answer.Assembler != nil || s.upstream.resp.Arrived() {
		return nil
	}
	s.upstream.answer.out = nil // the loop has a buffer of its own (see Arrive)
	return s.upstream.resp
}

// Arrive processes bytes that a loop has read, and appends the client's bytes to dst. The end that it returns says whether the engine's
// answer has ended with these bytes.
func (s *stream) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	s.readAt = now
	dst, effects := s.upstream.answer.Feed(dst, data, now)
	hasTokens := effects.Events > 0 // tokens are a sign that the core of the engine's rank works
	// A small read of the loop has emptied the socket. Of a large read, ObserveRead assumes by itself that it may have left bytes
	// unread.
	const leftUnread = false
	s.upstream.rank.ObserveRead(&s.upstream.lastRead, s.job.req.Endpoint, len(data), leftUnread, hasTokens, now)
	if hasTokens {
		s.countProgress(effects.Tokens, effects.Events)
	}
	return dst, effects.End
}

// LeaveLoop is called when a goroutine passes the rest of the answer on to the client, which an event loop has done so far. It keeps
// events, the bytes that the client has not got yet, for the next call of Next. Then it handles the end of the answer, if
// the loop has read it (end; NotEnded: it has not), or else the error that has ended it (err).
func (s *stream) LeaveLoop(events []byte, end sse.End) {
	s.upstream.answer.out = events
	switch err := s.upstream.answer.Err(); {
	case end != sse.NotEnded: // Arrive has handled the events before the end already
		s.applyEffects(sse.Effects{End: end})
	case err != nil: // the engine was silent for too long, or sent more than a limit allows
		s.bodyEnded(err)
	}
}

// Panicked closes the stream after the code that streams the answer has panicked with v.
func (s *stream) Panicked(v any) { s.job.closeAfterPanic(v, s.Close) }

// closeAfterPanic logs the panic v of a stream, and calls giveBack, which gives back what the request holds. It also logs a panic of
// giveBack, and does not pass it on.
func (j *job) closeAfterPanic(v any, giveBack func()) {
	log := func(doing string, v any) {
		j.srv.Log.Error("panic while "+doing, zap.Inline(j), zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	}
	log("an answer was streamed", v)
	defer func() {
		if v := recover(); v != nil {
			log("a stream was ended", v)
		}
	}()
	giveBack()
}
