package sse

import (
	"bytes"
	"errors"
	"time"
)

// Effects says what the engine's bytes contained, besides what is forwarded to the client.
type Effects struct {
	Events int // events that carried tokens
	Tokens int // tokens of the whole answer so far; 0 if Events is 0
	End    End
}

// Answer is one engine's answer as a value: the engine's bytes and the time go in, bytes for the client and effects come out.
// The caller reads the socket and calls Feed. Reset must be called before any other method.
type Answer struct {
	Reader     Reader
	Filter     Filter
	Transcript Transcript
	Assembler  *Assembler // collects the events for a client that asked for no stream; nil: the client gets each event

	reportedTokens int    // the largest Effects.Tokens returned so far
	held           []byte // the events from an abort on that AcceptAbort takes; empty: there is none, or it was accepted
	endBytes       int    // bytes of the event that completed the answer, which DropEnd removes; 0: no such event is in the client's bytes
	hasEnded       bool
	err            error
}

// Reset makes the answer ready for another request and reuses its memory. Afterwards the assembler is
// nil and the reader has no limits, until the caller sets them.
func (a *Answer) Reset(options Options) {
	a.Reader.Reset(Limits{})
	a.Filter.Reset(options)
	a.Assembler, a.reportedTokens, a.held, a.endBytes, a.hasEnded, a.err = nil, 0, emptied(a.held), 0, false, nil
}

// Feed takes in p, the bytes that came from the engine since the last Feed, and appends to dst the bytes for the client. p must not change
// during the call. Once the answer has ended, Feed returns no more events or bytes.
func (a *Answer) Feed(dst, p []byte, now time.Time) ([]byte, Effects) {
	var total Effects
	endedEarly := a.hasEnded && !a.Reader.Done() && len(a.held) == 0 // as by an error, before the stream's last event
	if endedEarly {                                                  // the rest of the body does not matter
		return dst, total
	}
	a.Reader.Feed(p, now) // after [DONE], the Reader only counts these bytes
	for total.End == NotEnded && len(a.held) == 0 {
		e, ok := a.Reader.Next()
		if !ok {
			break
		}
		var effects Effects
		dst, effects = a.Event(dst, e)
		total.Events += effects.Events
		// Tokens counts the whole answer up to the event, so it is not added up. It is 0 if the event has not raised the count.
		total.Tokens = max(total.Tokens, effects.Tokens)
		total.End = effects.End
	}
	a.hasEnded = a.hasEnded || total.End != NotEnded
	if len(a.held) > 0 { // the caller has yet to decide about an abort, and p may be gone by then
		for e, ok := a.Reader.Next(); ok; e, ok = a.Reader.Next() {
			a.held = append(a.held, e.Raw...)
		}
	}
	return dst, total
}

// AcceptAbort takes an abort, for which the answer has ended with Aborted, as the end of the answer, with all that has come after it.
// Options.Aborted must be true by then. Feed then takes what is still to come.
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

// Event takes in one event, which the Reader has just returned, and appends to dst the bytes that the client gets for it: none if an
// assembler collects the events, or if the event ends the answer without being a part of it. It also tells the Reader whether the event
// ends the answer, and whether the wait for the next event goes on as if this one had not come.
func (a *Answer) Event(dst []byte, e Event) ([]byte, Effects) {
	from := len(dst) // offset in dst where the client's copy of the event begins
	dst, end := appendEvent(&a.Filter, e, dst)
	clientCopy := dst[from:] // empty: the filter has nothing for the client now
	if a.Assembler != nil {
		dst = dst[:from] // this client gets no events; the bytes of clientCopy stay valid until the next append
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
		case a.Filter.streamEnded: // this event is the last one, and no [DONE] comes after it
			a.Reader.markEnd()
			a.endBytes = len(dst) - from // DropEnd removes so many bytes
			effects.End = Complete
		case e.Kind == KindComment && !a.Filter.Started():
			dst = dst[:from] // a comment sent now would fix the client's status to 200, and the engine may still fail
		default:
			a.resumeWaitIfEmpty(len(clientCopy) > 0)
		}
	case Broken, Garbled:
		a.err = a.Filter.Fault()
	case Refused, Complete, Short:
		dst = dst[:from] // the client does not get this event: the caller writes an error event or [DONE]
	case Aborted: // the client gets the event if the caller accepts it
		dst, a.held = dst[:from], append(a.held[:0], e.Raw...)
	case Preempted: // the client gets the event's content
	}
	return dst, effects
}

// assemble adds an event to the assembler, if there is one and the event is a part of the answer. clientCopy has the bytes that the filter
// has made of the event; empty: none. end is the filter's result.
func (a *Answer) assemble(clientCopy []byte, kind Kind, end End) error {
	belongsToAnswer := len(clientCopy) > 0 && kind != KindComment && (end == NotEnded || end == Preempted)
	if a.Assembler == nil || !belongsToAnswer {
		return nil
	}
	return a.Assembler.Add(clientCopy)
}

// resumeWaitIfEmpty lets the Reader's wait, which has a time limit, go on as if the last event had not come, if that event has nothing of
// the answer. Before the answer has begun, this is the wait for the first event, and filterPassedIt is false for such an event: the filter
// holds it back or drops it. Later it is the wait for the next event.
func (a *Answer) resumeWaitIfEmpty(filterPassedIt bool) {
	switch {
	case a.Filter.Started(): // the answer has begun
		if a.Filter.facts.isEmpty { // but it makes no progress by this event, such as a ping
			a.Reader.resumeWait()
		}
	case !filterPassedIt:
		a.Reader.resumeWaitForFirst()
	}
}

// countEvent returns how an event that the filter has just read changes the count of tokens. If the count is larger than all that were
// reported before, Events is 1, and Tokens is this count of the whole answer. Otherwise both are 0: the event has no tokens, or the
// engine's usage has corrected an estimate down.
func (a *Answer) countEvent() (effects Effects) {
	if tokens := a.Filter.Tokens(); tokens > a.reportedTokens {
		a.reportedTokens = tokens
		effects.Events, effects.Tokens = 1, tokens
	}
	return effects
}

// Closed returns how the answer ended; the caller calls it when the engine's body ends. An answer with a finish_reason is Complete even
// without [DONE], because some engines leave [DONE] out, but it is Short if the body ended within an event.
func (a *Answer) Closed() End {
	if a.Filter.Finished() && a.Reader.Buffered() == 0 {
		return Complete
	}
	return Short
}

// FinalUsageCame says that the engine has sent a finish_reason and its final usage, so that the answer lacks at most [DONE].
func (a *Answer) FinalUsageCame() bool { return a.Filter.finalUsageCame }

// DropEnd removes the event that completes the answer from the end of dst. A caller needs it if it finds
// that the answer is not complete after all. dst must end with this event, not with a [DONE] after it.
func (a *Answer) DropEnd(dst []byte) []byte {
	if a.endBytes == 0 || a.endBytes > len(dst) { // dst does not have such an event
		return dst
	}
	dst, a.endBytes = dst[:len(dst)-a.endBytes], 0
	a.Filter.eventCount-- // the error event that follows gets the number of the removed event
	return dst
}

// CloseEvent appends a blank line if the last event was cut off in its middle. Without this line, a client would read the next event
// as a part of the last one.
func (a *Answer) CloseEvent(dst []byte) []byte {
	if a.Reader.Torn() && a.Assembler == nil {
		return append(dst, BlankLine...)
	}
	return dst
}

// MissingUsage appends a last event with only the usage, if the client waits for one: by OpenAI's API the usage comes in an event of its
// own, and some engines send it only in the event with the finish_reason. With an assembler, the event goes there instead.
func (a *Answer) MissingUsage(dst []byte) []byte {
	before := len(dst)
	dst = a.Filter.MissingUsage(dst)
	if a.Assembler != nil && len(dst) > before { // there is such an event
		_ = a.Assembler.Add(dst[before:]) // an error changes nothing: the answer is whole without the usage
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

// forms has a row for each Form that is not chunked. The row says how to read an event or a whole answer, and how a stream of this form
// ends. Verbatim needs no functions, because its events are forwarded as they are.
var forms = [...]struct {
	read   func(b []byte, cached int) formFacts
	adapt  func(f *Filter, s *formFacts, data []byte)                // edits s for this client, as with its own id; nil: no edits
	record func(t *Transcript, f *Filter, s *formFacts, data []byte) // adds an event to the transcript; nil: no engine can continue the answer
	failed func(dst []byte, events int, message, typ, code string) []byte
	end    string // the event that ends a complete answer; empty: the event with the finish_reason ends it
}{
	Responses: {read: readResponse, failed: failedResponse},
	Messages:  {read: readMessage, adapt: adaptMessage, failed: failedMessage, end: messageStop},
	Generated: {read: readGenerated, adapt: (*Filter).adaptGenerated, record: (*Transcript).recordGenerated, end: Done},
	Verbatim:  {},
}
