package sse

import (
	"errors"
	"time"
)

// End is how an engine's answer ended.
type End uint8

// The ends.
const (
	Runs      End = iota // it has not ended
	Whole                // as it should
	Short                // [DONE] came, or the body ended, without a finish_reason
	Refused              // the engine says that it failed: see Mirror.Failure
	GivenBack            // the engine ran out of KV memory and wants a new prefill
	Broken               // it has more than it may have, or cannot be put together: see Err
	Garbled              // one of its events cannot be read; another engine may send it intact: see Err
)

// Effects are what an arrival was, besides bytes for the client.
type Effects struct {
	Events int // that carried tokens
	Tokens int // the most that were counted so far; 0 if Events is
	End    End
}

// Answer is one engine's answer as a value: the engine's bytes and the time go in, bytes for
// the client and effects come out. It has no clock and no socket, so that whoever
// reads the socket can drive it. Use Reset before anything else.
type Answer struct {
	Reader    Reader
	Mirror    Mirror
	Trail     Trail
	Assembler *Assembler // takes the events instead of the client; nil: they are for the client

	told  int // tokens
	tail  int // bytes of the event that says that the answer is whole
	ended bool
	err   error
}

// Reset makes the answer ready for another request; it keeps its memory. The assembler is
// nil, and the reader has no limits, until the caller sets them.
func (a *Answer) Reset(ask Ask) {
	a.Reader.Reset(Limits{})
	a.Mirror.Reset(ask)
	a.Assembler, a.told, a.tail, a.ended, a.err = nil, 0, 0, false, nil
}

// Feed takes in the bytes that came by now, and appends to dst what the client gets for
// them. p must not change meanwhile. Behind an end nothing more is read, in later calls either.
func (a *Answer) Feed(dst, p []byte, now time.Time) ([]byte, Effects) {
	var all Effects
	if a.ended && !a.Reader.Done() {
		return dst, all
	}
	a.Reader.Feed(p, now)
	for all.End == Runs {
		e, ok := a.Reader.Next()
		if !ok {
			break
		}
		var fx Effects
		dst, fx = a.Event(dst, e)
		all.Events += fx.Events
		all.Tokens, all.End = max(all.Tokens, fx.Tokens), fx.End
	}
	a.ended = a.ended || all.End != Runs
	return dst, all
}

// Event is Feed of one event.
func (a *Answer) Event(dst []byte, e Event) ([]byte, Effects) {
	var fx Effects
	mark := len(dst)
	edited, verdict := a.Mirror.Event(e, dst)
	// The mirror appends what it edited to dst and returns the whole of it;
	// an event it left alone is returned as it came.
	if len(edited) > 0 && &edited[0] != &e.Raw[0] {
		dst = edited
		edited = dst[mark:]
	} else {
		dst = append(dst, edited...)
	}
	if a.Assembler != nil {
		dst = dst[:mark] // edited stays readable until the next append
	}
	if now := a.Mirror.Tokens(); now > a.told {
		a.told = now
		fx.Events, fx.Tokens = 1, now
	}
	if a.Assembler != nil && len(edited) > 0 && (verdict == Forward || verdict == Recomputed) {
		if err := a.Assembler.Add(edited); err != nil {
			a.err, fx.End = err, Broken
			return dst, fx
		}
	}
	switch verdict {
	case Forward:
		if e.Kind == KindComment && !a.Mirror.Started() {
			dst = dst[:mark] // it would commit us to a 200
		}
		if a.Mirror.over {
			a.Reader.finish()
			a.tail, fx.End = len(dst)-mark, Whole
		}
	case Drop:
		if !a.Mirror.Started() {
			a.Reader.unheard()
		}
	case Overrun:
		a.err, fx.End = a.Mirror.Fault(), Broken
	case Unreadable:
		a.err, fx.End = a.Mirror.Fault(), Garbled
	case Failed:
		dst, fx.End = dst[:mark], Refused // whoever ends the answer says it in words of ours, whatever the engine's dialect
	case Recomputed:
		fx.End = GivenBack
	case Ended:
		dst, fx.End = dst[:mark], Short
		if a.Mirror.Finished() {
			fx.End = Whole
		}
	}
	return dst, fx
}

// Closed tells that the engine's body has ended, and says how the answer has then. Some
// engines leave [DONE] out.
func (a *Answer) Closed() End {
	if a.Mirror.Finished() && a.Reader.Buffered() == 0 {
		return Whole
	}
	return Short
}

// Unend takes the event back that says that the answer is whole, from the bytes that end with it: the answer is not
// believed. [DONE] is not among them.
func (a *Answer) Unend(dst []byte) []byte {
	if a.tail == 0 || a.tail > len(dst) {
		return dst
	}
	dst, a.tail = dst[:len(dst)-a.tail], 0
	a.Mirror.events-- // the event of the failure has its number
	return dst
}

// Mend appends what has to stand before another event if one was cut in the middle.
func (a *Answer) Mend(dst []byte) []byte {
	if a.Reader.Torn() && a.Assembler == nil {
		return append(dst, BlankLine...)
	}
	return dst
}

// Owed appends the final usage that the engine told in an event of another kind.
func (a *Answer) Owed(dst []byte) []byte {
	mark := len(dst)
	dst = a.Mirror.Owed(dst)
	if a.Assembler != nil && len(dst) > mark {
		_ = a.Assembler.Add(dst[mark:]) // the answer is whole without it
		return dst[:mark]
	}
	return dst
}

// Err is why nothing more is taken: the reader's word, or why the answer is Broken.
func (a *Answer) Err() error {
	if a.err != nil {
		return a.err
	}
	return a.Reader.Err()
}

// TooMuch says that the engine sent more bytes than its answer may have.
func (a *Answer) TooMuch() bool { return errors.Is(a.Reader.Err(), ErrTooMuch) }

// forms are what differs between the forms that are not chunks. Each but Verbatim reads an event, or a whole
// answer, and writes what ends a stream for its client.
var forms = [...]struct {
	read   func(b []byte, cached int) told
	judge  func(m *Mirror, s *told, data []byte)           // changes what was read by what the client asked for; nil: nothing depends on that
	keep   func(t *Trail, m *Mirror, s *told, data []byte) // adds an event to what another leg would need; nil: no answer goes on
	failed func(dst []byte, events int, message, typ, code string) []byte
	end    string // the last event of an answer that is whole; empty: the one that has its finish_reason
}{
	Responses: {read: readResponse, failed: failedResponse},
	Messages:  {read: readMessage, failed: failedMessage, end: messageStop},
	Generated: {read: readGenerated, judge: (*Mirror).generated, keep: (*Trail).keepGenerated, end: Done},
	Verbatim:  {},
}
