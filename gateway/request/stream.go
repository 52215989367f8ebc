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

// A stream is an answer under way. The goroutine of the client's connection reads it, and reads
// from the engine only when the client has taken the bytes, so a slow client slows its engine down.
type stream struct {
	job      *job
	upstream upstreamCall

	unread            []byte            // events that the client has not taken yet
	memory            *edge.Reservation // charged for an answer that came at once; nil: nothing
	readAt            time.Time         // when the last bytes arrived
	firstAt           time.Time         // when the first data event came; from then on the client may have bytes
	firstTokenAt      time.Time         // when the first event with tokens came
	lastTokenAt       time.Time         // when the last event with tokens came
	earlierTranscript *sse.Transcript   // the part that earlier calls sent; nil: there was none
	earlierTokens     int               // tokens that earlier calls sent
	state             streamState
	endError          *openai.Error // why the answer ended too early; nil: it did not
}

type streamState uint8

const (
	flowing   streamState = iota // the engine may send more
	lost                         // another engine may continue the answer
	ended                        // no engine sends anything more
	givenBack                    // and slot, call and buffers were given back
)

// upstreamCall is the call from which the answer comes at present. If it breaks, another may
// continue the answer.
type upstreamCall struct {
	job  *job
	slot *dispatcher.Slot // nil once it is released
	rank *roster.Rank
	call *engine.Call
	// tracked lets a drain end the call, until endAccounting; nil: a prefill engine has answered.
	tracked *fleet.TrackedCall
	resp    *engine.Response
	began   time.Time // when the call was prepared

	prefillCall *concurrentPrefill // the prefill that runs at the same time; nil: none does
	prefiller   string             // the prefill engine that has computed the prompt; empty: none has

	pull     *engine.PendingPull // the pull of the KV, which ends with the first event
	lastRead engine.LastRead

	maxTokens       int            // that the rest of the answer may have
	idle            time.Duration  // how long the engine may be silent, as last set on the connection
	coreHalted      *atomic.Bool   // true: the core stands still; nil: not watched
	tokensToCompute int64          // the most of the prompt; 0: none noted, or corrected
	fault           *failure.Fault // why the call ended too early; nil: it did not
	wrongType       error          // the answer is not the event stream that was asked for
	answer          *buffers

	unstreamed         bool // the answer comes in one piece
	computesPrompt     bool // the rank computes the prompt itself
	blocksMayLeak      bool // KV for which the engine waits may never come
	mayHoldTextBack    bool // see buffersText
	countedWithoutSlot bool // in the engine's traffic, until endAccounting
	noUsage            bool // the engine sent none, so evenkeel writes it
	countedRunning     bool // in the engine's traffic, from the first event until endAccounting
}

// endedByDrain must not be called for the answer of a prefill engine, whose call is not tracked.
func (u *upstreamCall) endedByDrain() bool { return u.tracked.MustMove() }

// handsOver: a prefill engine has computed the KV.
func (u *upstreamCall) handsOver() bool { return u.prefiller != "" }

// handoffLink has the names that the dispatcher knows.
func (u *upstreamCall) handoffLink() delivery.Link {
	_, address, _ := strings.Cut(u.rank.Instance, " ") // after the role
	return delivery.Link{Prefiller: u.prefiller, Engine: address}
}

// buffers are used again by later streams.
type buffers struct {
	sse.Answer
	out []byte // bytes that the client has not got yet
}

var buffersPool = sync.Pool{New: func() any { return &buffers{} }}

var readPool = sync.Pool{New: func() any { return new([4 << 10]byte) }}

// tokens counts all calls of the answer.
func (s *stream) tokens() int {
	return s.earlierTokens + s.upstream.answer.Filter.Tokens()
}

func (b *buffers) reset(options sse.Options) {
	b.Answer.Reset(options)
	b.out = b.out[:0]
}

// putBack keeps huge answers out of the pool: a transcript with room for more than 64 Ki token ids
// or bytes, and all buffers if the output buffer has more than 64 KiB.
func (b *buffers) putBack() {
	b.Assembler = nil // it holds one client's answer
	if cap(b.Transcript.IDs) > 64<<10 || cap(b.Transcript.Last) > 64<<10 {
		b.Transcript = sse.Transcript{}
	}
	if cap(b.out) <= 64<<10 {
		buffersPool.Put(b)
	}
}

func (u *upstreamCall) contentType() []byte {
	if u.resp == nil { // processAll has read a prefill engine's answer
		return []byte("text/event-stream")
	}
	return u.resp.ContentType()
}

// newSlotlessStream is for the answer of a prefill engine, or to a request that is passed through.
// rank was made for this stream only: it stands for the engine, and gets a number that no worker of
// the dispatcher has.
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

// shortAnswerTokens bounds the answers that fasthttp writes as ordinary bodies. An event loop
// carries longer ones (see package pump). To pass the sockets to a loop and back costs as much as a
// few reads.
const shortAnswerTokens = 8

var _ pump.Stream = (*stream)(nil) // else no loop would carry an answer, and no error would show it

// Wait is how long the engine may still take for its next bytes.
func (s *stream) Wait(now time.Time) time.Duration { return s.upstream.answer.Reader.Wait(now) }

// Pause ends the wait for the engine, because the client takes no bytes.
func (s *stream) Pause(now time.Time) { s.upstream.answer.Reader.Pause(now) }

func (s *stream) Err() error { return s.upstream.answer.Err() }

// Flow returns the response from which an event loop may read the rest of the answer; nil: no loop
// may. An answer without a slot was read to its end (of a prefill engine), or its length is not
// known (passed through).
func (s *stream) Flow() *engine.Response {
	// First, because an answer that has ended may have no buffers any more.
	if s.state != flowing || s.upstream.slot == nil {
		return nil
	}
	if s.upstream.answer.Assembler != nil || s.upstream.resp.Arrived() {
		return nil
	}
	s.upstream.answer.out = nil // the loop has a buffer of its own (see Arrive)
	return s.upstream.resp
}

// Arrive processes bytes that a loop has read, and appends the client's bytes to dst.
func (s *stream) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	s.readAt = now
	dst, effects := s.upstream.answer.Feed(dst, data, now)
	hasTokens := effects.Events > 0 // a sign that the core works
	// A small read of the loop has emptied the socket. Of a large read, ObserveRead assumes by itself
	// that it may have left bytes unread.
	const leftUnread = false
	s.upstream.rank.ObserveRead(&s.upstream.lastRead, s.job.req.Endpoint, len(data), leftUnread, hasTokens, now)
	if hasTokens {
		s.countProgress(effects.Tokens, effects.Events)
	}
	return dst, effects.End
}

// LeaveLoop is called when a goroutine takes over from an event loop. It keeps the bytes that the
// client has not got yet, and handles the end of the answer, if the loop has read it.
func (s *stream) LeaveLoop(events []byte, end sse.End) {
	s.upstream.answer.out = events
	switch err := s.upstream.answer.Err(); {
	case end != sse.NotEnded: // Arrive has handled the events before the end already
		s.applyEffects(sse.Effects{End: end})
	case err != nil: // silent for too long, or over a limit
		s.bodyEnded(err)
	}
}

func (s *stream) Panicked(v any) { s.job.closeAfterPanic(v, s.Close) }

// closeAfterPanic logs the panic v of a stream, and also a panic of giveBack, which it does not
// pass on.
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
