package request

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// A stream is an answer under way: it reads the decode engine's events, counts
// their tokens into the slot, edits what the client did not ask for and hands
// the bytes on. The connection's own goroutine reads it: one Read is one
// arrival, so backpressure is the client's own.
type stream struct {
	job *job
	source
	whole bool // the engine's own answer in one piece, no events

	assembler *sse.Assembler // set for an answer put together from the events
	unread    []byte         // events the client has not taken yet
	now       time.Time      // of the last arrival
	firstAt   time.Time      // first data event; from then on the client may have bytes
	tokenFrom time.Time      // first event that carried tokens
	tokenAt   time.Time      // last one
	lost      *openai.Error  // why the source failed of an answer that may go on
	givenBack bool           // and it was for want of KV memory
	sofar     *sse.Trail     // what earlier sources gave; nil: none has
	earlier   int            // tokens of the answer from them
	ended     bool           // nothing more comes from any engine
	broken    *openai.Error  // why it ended before it was whole
	settled   bool
}

// source is the decode call that an answer comes from at the moment. One that
// is lost in the middle is followed by another.
type source struct {
	slot  *dispatcher.Slot // nil once released
	rank  *fleet.Rank
	call  *engine.Call
	run   *fleet.Run // among those a drain may end, while there is a slot
	resp  *engine.Response
	began time.Time
	local bool // it computes the prompt itself

	mayHave int           // tokens
	told    int           // tokens that the board knows of; unlike the mirror's count it never falls
	idle    time.Duration // how long the engine may be silent, as the connection has it
	may     int64         // tokens of the prompt that the engine was to compute at most; 0: that is settled
	beyond  bool          // the engine's traffic expects it beyond the slots until release
	heard   bool          // its first event; the engine's traffic counts it until release
	unheard bool          // the engine took the request, and no first event came
	silent  bool          // it stopped in the middle without a word
	why     error         // its connection broke; nil: that is not why it failed
	*buffers
}

// buffers are what a stream needs while it runs, reused by the next one.
type buffers struct {
	read   [4 << 10]byte
	out    []byte
	reader *sse.Reader
	mirror *sse.Mirror
	trail  sse.Trail
}

var buffersPool = sync.Pool{New: func() any {
	return &buffers{reader: sse.NewReader(), mirror: sse.NewMirror(sse.Ask{Choice: -1})}
}}

// newStream prepares the answer on the rank of a slot.
func (j *job) newStream(slot *dispatcher.Slot) *stream {
	rank := j.srv.Fleet.Rank(slot.Worker)
	call := j.srv.Client.NewCall(rank.Target)
	s := &stream{job: j, source: source{slot: slot, rank: rank, call: call, began: time.Now(), local: slot.NewTokens > 0, mayHave: j.mayHave(rank.Context), buffers: buffersPool.Get().(*buffers)}}
	resumed := j.resume.times > 0
	s.whole = !resumed && !j.req.Stream && (j.req.Passthrough || rank.Profile.NonStream == mooncake.NonStreamPassthrough)
	ask := j.ask
	ask.TokensPerChunk = rank.Traffic.TokensPerChunk()
	ask.MaxTokens, ask.Context = s.mayHave, contextOf(rank.Context)
	if ask.Cached = j.cached; s.local {
		ask.Cached = sse.OwnCached
	}
	if s.whole { // its one piece has choices and usage
		ask.ContinuousUsage = true
	} else if j.keep(rank); !resumed && !j.req.Stream { // a resumed source's events go to the assembler of the answer
		s.assembler = sse.NewAssembler(j.req.Endpoint == mooncake.Chat, j.srv.Settings().Limits.AnswerBytes)
	}
	s.run = j.srv.Fleet.Track(fleet.Place{Instance: rank.Instance, Rank: rank.Target.Rank}, func() { call.Leave(notice) }, s.whole || s.local) // the first event of a whole answer is its last
	s.reader.Reset(sse.Limits{})
	if s.trail.Reset(mooncake.ByText(j.resume.how)); !s.whole && j.resume.keeping != keepNothing {
		s.trail.KeepPrompt = s.local
		ask.Trail = &s.trail
	}
	s.mirror.Reset(ask)
	s.out = s.out[:0]
	return s
}

// opened notes that the first data event is here.
func (s *stream) opened() {
	s.firstAt = time.Now()
	s.computed()
	if s.slot != nil { // else all of it came at once
		s.heard = true
		s.rank.Traffic.Begin()
	}
	j := s.job
	if j.resume.times > 0 {
		return // the client has had its first event
	}
	j.told.Transferred(s.firstAt.Sub(s.began))
	j.told.First(s.firstAt)
	if j.srv.Node != nil {
		j.srv.Node.Served(s.firstAt.Sub(j.arrive))
	}
}

// fill reads one arrival and turns its complete events into bytes for the
// client. An error is returned only before the first data event; afterwards it
// becomes the stream's last event.
func (s *stream) fill() error {
	if s.lost != nil {
		s.goOn()
		return nil //nolint:nilerr // what was read decides how the answer ends
	}
	if wait := s.reader.Wait(time.Now()); wait != s.idle {
		s.idle = max(wait, 1)
		s.resp.SetIdle(s.idle)
	}
	n, err := s.resp.Read(s.read[:])
	s.now = time.Now()
	s.reader.Feed(s.read[:n], s.now)
	for !s.ended && s.lost == nil {
		e, ok := s.reader.Next()
		if !ok {
			break
		}
		s.event(e)
	}
	if err == nil {
		err = s.reader.Err()
	}
	if err == nil || s.ended || s.lost != nil {
		return nil //nolint:nilerr // the end of the stream is not part of the answer
	}
	if s.reader.Torn() && s.assembler == nil {
		s.out = append(s.out, sse.BlankLine...) // the error or the end must be an event of its own
	}
	switch {
	case errors.Is(err, sse.ErrTooMuch):
		s.end(streamError("upstream_broken", err))
		return nil
	case errors.Is(err, io.EOF) && s.mirror.Finished() && s.reader.Buffered() == 0:
		s.end(nil) // whole, but without [DONE], as some engines leave it
		return nil
	case s.run.Moved():
		s.lose(s.job.srv.movedOut())
	case errors.Is(err, io.EOF):
		err = errNotWhole
		s.lose(streamError("upstream_incomplete", err))
	default:
		s.silent, s.why = engine.WasSilent(err), err
		s.job.srv.Monitor.Report(s.rank.Instance, err)
		s.cut(err)
	}
	if s.mirror.Started() {
		return nil
	}
	return err
}

// event handles one event of the engine.
func (s *stream) event(e sse.Event) {
	mark := len(s.out)
	edited, verdict := s.mirror.Event(e, s.out)
	// The mirror appends what it edited to s.out and returns the whole of it;
	// an event it left alone is returned as it came.
	if len(edited) > 0 && &edited[0] != &e.Raw[0] {
		s.out = edited
		edited = s.out[mark:]
	} else {
		s.out = append(s.out, edited...)
	}
	if s.assembler != nil {
		s.out = s.out[:mark] // edited stays readable until the next append
	}
	if now := s.mirror.Tokens(); now > s.told {
		s.told = now
		s.progress(now)
	}
	if s.assembler != nil && len(edited) > 0 && (verdict == sse.Forward || verdict == sse.Recomputed) {
		if err := s.assembler.Add(edited); err != nil {
			s.end(streamError("upstream_broken", err))
		}
	}
	switch verdict {
	case sse.Forward:
		if e.Kind == sse.KindComment && !s.mirror.Started() {
			s.out = s.out[:mark] // it would commit us to a 200
		}
	case sse.Overrun:
		s.end(streamError("upstream_broken", s.mirror.Fault()))
	case sse.Failed:
		s.out = s.out[:mark] // end says it in our own words, whatever the engine's dialect
		fail := engineError(s.mirror.Failure())
		// Engines may fail at a request twice, not a third time. Before the first event `again` judges it.
		if fail.Status/100 == 5 && (s.firstAt.IsZero() || !s.job.tries.suspected()) {
			s.lose(fail)
		} else {
			s.end(fail)
		}
	case sse.Recomputed:
		if s.firstAt.IsZero() { // serve begins anew
			s.job.srv.metrics.recomputes.WithLabelValues(tierAnew).Inc()
		}
		s.job.srv.Dispatcher.Preempted(s.slot.Worker)
		s.givenBack = true
		s.lose(openai.NewError(http.StatusBadGateway, "recompute_unresumable",
			"the decode engine ran out of KV memory and gave the request back; it cannot be resumed"))
	case sse.Ended:
		s.out = s.out[:mark]
		if s.mirror.Finished() {
			s.end(nil)
		} else {
			s.lose(streamError("upstream_incomplete", errNotWhole))
		}
	}
}

// progress tells the board how far the request is; the tick reads it.
func (s *stream) progress(tokens int) {
	s.slot.Progress(tokens)
	if s.heard {
		s.rank.Traffic.Heard()
	}
	s.shed()
	if s.tokenFrom.IsZero() {
		s.tokenFrom = s.now
	} else {
		s.job.srv.metrics.itl.Observe(s.now.Sub(s.tokenAt).Seconds())
	}
	s.tokenAt = s.now
}

// end closes the stream's contents: whole when fail is nil, else with an error
// event, never as if whole. The slot is free from here on.
func (s *stream) end(fail *openai.Error) {
	if s.ended {
		return
	}
	if fail != nil && s.job.client.left() {
		fail = errGone() // that is why it broke
	}
	s.ended, s.broken = true, fail
	if fail == nil {
		s.owe()
	}
	s.judge(fail)
	switch {
	case fail == nil:
		s.release(board.Finished)
	case fail.Status == journal.StatusClientClosed:
		s.release(board.Cancelled)
		return
	default:
		s.release(board.Failed)
		if !s.firstAt.IsZero() {
			s.job.srv.Log.Warn("answer broke off", zap.Inline(s.job), zap.String("engine", s.rank.Target.ID),
				zap.Int("tokens", s.tokens()), zap.String("outcome", journal.Outcome(fail)), zap.String("cause", s.forLog(fail)))
		}
	}
	if s.assembler != nil || s.whole || s.job.client.isLeg() {
		return // whoever puts the answer together says how it ended
	}
	if fail != nil {
		s.out = sse.ErrorEvent(s.out, fail.Message, cmp.Or(fail.Type, "server_error"), fail.Code)
	}
	s.out = append(s.out, sse.Done...)
}

// owe adds the final usage that the engine told in an event of another kind.
func (s *stream) owe() {
	mark := len(s.out)
	s.out = s.mirror.Owed(s.out)
	if s.assembler == nil || len(s.out) == mark {
		return
	}
	_ = s.assembler.Add(s.out[mark:]) // the answer is whole without it
	s.out = s.out[:mark]
}

// forLog is why a stream failed, without the words of the engine. Only the client
// may get those, because many engines repeat what they were sent.
func (s *stream) forLog(fail *openai.Error) string {
	if said := s.mirror.Failure(); said.Status != 0 && said.Message == fail.Message {
		return fmt.Sprintf("an error event of status %d; the engine's log has its text", said.Status)
	}
	return fail.Message
}

// Read hands out what has arrived, waiting for the first bytes only.
func (s *stream) Read(p []byte) (int, error) {
	if len(s.unread) == 0 {
		events, err := s.next()
		if err != nil {
			return 0, err
		}
		s.unread = events
	}
	n := copy(p, s.unread)
	s.unread = s.unread[n:]
	return n, nil
}

// Pending is how much more Read has without waiting.
func (s *stream) Pending() int { return len(s.unread) + len(s.out) }

// next returns the whole events that have arrived, waiting for the first; they
// are valid until the next call. io.EOF ends the answer, whole or not.
func (s *stream) next() ([]byte, error) {
	for len(s.out) == 0 || s.more() {
		if s.ended {
			return nil, io.EOF
		}
		if err := s.fill(); err != nil {
			return nil, err
		}
	}
	events := s.out
	s.out = s.out[:0]
	return events, nil
}

// more says that more of the arrival is left, which the client is to get at once.
func (s *stream) more() bool {
	return !s.ended && s.lost == nil && len(s.out) < mostAtOnce && s.resp.Arrived()
}

const mostAtOnce = 64 << 10

// collect reads an answer that is not streamed to its end, settles the request, and returns
// its JSON.
func (s *stream) collect() ([]byte, *openai.Error) {
	defer s.close(nil)
	for !s.ended {
		if err := s.fill(); err != nil {
			return nil, streamError("upstream_broken", err)
		}
	}
	switch {
	case s.broken != nil:
		return nil, s.broken
	case s.whole: // as readWhole framed it
		return bytes.TrimSpace(bytes.TrimPrefix(bytes.Clone(s.out), []byte("data:"))), nil
	}
	body, err := s.assembler.JSON(nil)
	if err != nil {
		s.broken = streamError("upstream_broken", err)
		return nil, s.broken
	}
	return body, nil
}
