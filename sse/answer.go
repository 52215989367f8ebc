package sse

import (
	"bytes"
	"errors"
	"time"
)

// Effects says what the engine's bytes contained, besides what is forwarded to the client.
type Effects struct {
	Events int
	Tokens int // of the whole answer so far; 0 if Events is 0
	End    End
}

// Answer is one engine's answer as a value: the engine's bytes and the time go in, bytes for the
// client and effects come out. The caller reads the socket. Reset must be called before any other
// method.
type Answer struct {
	Reader     Reader
	Filter     Filter
	Transcript Transcript
	Assembler  *Assembler // for a client that asked for no stream; nil: the client gets each event

	reportedTokens int    // the largest Effects.Tokens so far
	held           []byte // the events from an abort on that AcceptAbort may take
	// bytes of the event that completed the answer, for DropEnd; 0: it is not in the client's bytes
	endBytes int
	hasEnded bool
	err      error
}

// Reset reuses the memory. Afterwards there is no assembler, and the reader has no limits.
func (a *Answer) Reset(options Options) {
	a.Reader.Reset(Limits{})
	a.Filter.Reset(options)
	a.Assembler, a.reportedTokens, a.held, a.endBytes, a.hasEnded, a.err = nil, 0, emptied(a.held), 0, false, nil
}

// Feed appends to dst the client's bytes for p, which must not change during the call. Once the
// answer has ended, Feed returns no more.
func (a *Answer) Feed(dst, p []byte, now time.Time) ([]byte, Effects) {
	var total Effects
	// as by an error, before the stream's last event
	endedEarly := a.hasEnded && !a.Reader.Done() && len(a.held) == 0
	if endedEarly {
		return dst, total
	}
	a.Reader.Feed(p, now) // after [DONE], the Reader only counts
	for total.End == NotEnded && len(a.held) == 0 {
		e, ok := a.Reader.Next()
		if !ok {
			break
		}
		var effects Effects
		dst, effects = a.Event(dst, e)
		total.Events += effects.Events
		// Tokens counts the whole answer, so it is not added up. It is 0 if the event has not raised the
		// count.
		total.Tokens = max(total.Tokens, effects.Tokens)
		total.End = effects.End
	}
	a.hasEnded = a.hasEnded || total.End != NotEnded
	if len(a.held) > 0 { // the caller has yet to decide, and p may be gone by then
		for e, ok := a.Reader.Next(); ok; e, ok = a.Reader.Next() {
			a.held = append(a.held, e.Raw...)
		}
	}
	return dst, total
}

// AcceptAbort takes an abort, for which the answer has ended with Aborted, as the end of the
// answer, with all that has come after it. Options.Aborted must be true by then.
func (a *Answer) AcceptAbort(dst []byte) ([]byte, Effects) {
	var total Effects
	events := bytes.Clone(a.held)
	a.held, a.hasEnded = a.held[:0], false
	for e := range Events(events) {
		var effects Effects
		dst, effects = a.Event(dst, e)
		total.Events += effects.Events
		total.Tokens, total.End = max(total.Tokens, effects.Tokens), effects.End
		if total.End != NotEnded {
			break
		}
	}
	a.hasEnded = total.End != NotEnded
	return dst, total
}

// Event takes in the event that the Reader has just returned.
func (a *Answer) Event(dst []byte, e Event) ([]byte, Effects) {
	from := len(dst)
	dst, end := appendEvent(&a.Filter, e, dst)
	clientCopy := dst[from:]
	if a.Assembler != nil {
		dst = dst[:from] // the bytes of clientCopy stay valid until the next append
	}
	effects := a.countEvent()
	effects.End = end
	if err := a.assemble(clientCopy, e.Kind, end); err != nil {
		a.err, effects.End = err, Broken
		return dst, effects
	}
	switch end {
	case NotEnded:
		switch {
		case a.Filter.streamEnded: // no [DONE] comes after it
			a.Reader.markEnd()
			a.endBytes = len(dst) - from
			effects.End = Complete
		case e.Kind == KindComment && !a.Filter.Started():
			dst = dst[:from] // it would fix the client's status to 200, and the engine may still fail
		default:
			a.resumeWaitIfEmpty(len(clientCopy) > 0)
		}
	case Broken, Garbled:
		a.err = a.Filter.Fault()
	case Refused, Complete, Short:
		dst = dst[:from] // the caller writes an error event or [DONE]
	case Aborted: // the client gets it if the caller accepts it
		dst, a.held = dst[:from], append(a.held[:0], e.Raw...)
	case Preempted:
	}
	return dst, effects
}

func (a *Answer) assemble(clientCopy []byte, kind Kind, end End) error {
	belongsToAnswer := len(clientCopy) > 0 && kind != KindComment && (end == NotEnded || end == Preempted)
	if a.Assembler == nil || !belongsToAnswer {
		return nil
	}
	return a.Assembler.Add(clientCopy)
}

// resumeWaitIfEmpty lets the wait, which has a time limit, go on if the last event has nothing of
// the answer. Before the answer has begun, filterPassedIt is false for such an event.
func (a *Answer) resumeWaitIfEmpty(filterPassedIt bool) {
	switch {
	case a.Filter.Started():
		if a.Filter.facts.isEmpty { // such as a ping
			a.Reader.resumeWait()
		}
	case !filterPassedIt:
		a.Reader.resumeWaitForFirst()
	}
}

// countEvent: Events is 0 if the event has no tokens, or if the engine's usage has corrected an
// estimate down.
func (a *Answer) countEvent() (effects Effects) {
	if tokens := a.Filter.Tokens(); tokens > a.reportedTokens {
		a.reportedTokens = tokens
		effects.Events, effects.Tokens = 1, tokens
	}
	return effects
}

// Closed returns how the answer ended when the engine's body ends. With a finish_reason it is
// Complete even without [DONE], because some engines leave it out, but Short if the body ended
// within an event.
func (a *Answer) Closed() End {
	if a.Filter.Finished() && a.Reader.Buffered() == 0 {
		return Complete
	}
	return Short
}

// FinalUsageCame says that the answer lacks at most [DONE].
func (a *Answer) FinalUsageCame() bool { return a.Filter.finalUsageCame }

// DropEnd removes the event that completes the answer from the end of dst, if the answer is not
// complete after all. dst must end with it, not with a [DONE].
func (a *Answer) DropEnd(dst []byte) []byte {
	if a.endBytes == 0 || a.endBytes > len(dst) {
		return dst
	}
	dst, a.endBytes = dst[:len(dst)-a.endBytes], 0
	a.Filter.eventCount-- // the error event gets its number
	return dst
}

// CloseEvent appends a blank line if the last event was cut off. Otherwise a client would read the
// next event as a part of it.
func (a *Answer) CloseEvent(dst []byte) []byte {
	if a.Reader.Torn() && a.Assembler == nil {
		return append(dst, BlankLine...)
	}
	return dst
}

// MissingUsage is Filter.MissingUsage. With an assembler, the event goes there instead.
func (a *Answer) MissingUsage(dst []byte) []byte {
	before := len(dst)
	dst = a.Filter.MissingUsage(dst)
	if a.Assembler != nil && len(dst) > before {
		_ = a.Assembler.Add(dst[before:]) // on an error the answer is whole without the usage
		return dst[:before]
	}
	return dst
}

// Err returns why the answer is Broken or Garbled, else the Reader's error; nil: there is no error.
func (a *Answer) Err() error {
	if a.err != nil {
		return a.err
	}
	return a.Reader.Err()
}

// TooMuch says that the engine sent more bytes than the reader's limits allow.
func (a *Answer) TooMuch() bool { return errors.Is(a.Reader.Err(), ErrTooMuch) }

// forms says how to read each Form that is not chunked. Verbatim needs no functions.
var forms = [...]struct {
	read  func(b []byte, cached int) formFacts
	adapt func(f *Filter, s *formFacts, data []byte) // nil: no edits
	// nil: no engine can continue the answer
	record func(t *Transcript, f *Filter, s *formFacts, data []byte)
	failed func(dst []byte, events int, message, typ, code string) []byte
	end    string // empty: the event with the finish_reason ends the answer
}{
	Responses: {read: readResponse, failed: failedResponse},
	Messages:  {read: readMessage, adapt: adaptMessage, failed: failedMessage, end: messageStop},
	Generated: {read: readGenerated, adapt: (*Filter).adaptGenerated, record: (*Transcript).recordGenerated, end: Done},
	Verbatim:  {},
}
