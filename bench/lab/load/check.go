package load

import (
	"bytes"

	"evenkeel/bench/lab/reftext"
	"evenkeel/sse"
)

// Check says how closely answers are looked at.
type Check string

// CheckText compares every token with the reference engines' language;
// CheckShape, for any other engine, only how the answer is built and counted.
const (
	CheckText  Check = "text"
	CheckShape Check = "shape"
)

// expected is what the answer to a request must be.
type expected struct {
	check        Check
	answer       uint64 // reftext's key
	promptTokens int
	tokens       int  // exactly under CheckText, at most under CheckShape
	usage        bool // asked for
}

// follower checks one answer, event by event.
type follower struct {
	want   expected
	text   reftext.Checker
	chunk  chunk
	id     []byte // of the first event
	pieces int    // events with text

	finish   []byte // finish_reason; empty: not yet
	recovery bool   // stop_reason recomputed
	usage    usage
	hasUsage bool
	done     bool // [DONE] came
}

func (f *follower) reset(want expected) {
	*f = follower{want: want, text: *reftext.NewChecker(want.answer), id: f.id[:0], finish: f.finish[:0],
		chunk: chunk{scratch: f.chunk.scratch}}
}

// tokens counts what came so far. An engine that is no reference engine says
// it in its usage, at the latest at the end; until then a piece counts as one.
func (f *follower) tokens() int {
	if f.want.check == CheckText {
		return f.text.Tokens()
	}
	if f.hasUsage {
		return f.usage.completion
	}
	return f.pieces
}

// event takes the next event of a stream.
func (f *follower) event(e sse.Event) *fault {
	switch {
	case e.Kind == sse.KindComment:
		return nil
	case f.done:
		return faultf(BadShape, "an event after [DONE]: %s", clip(e.Raw))
	case e.Kind == sse.KindDone:
		f.done = true
		return nil
	case e.Kind == sse.KindOpaque:
		return faultf(BadShape, "an event of more than %d bytes", sse.DefaultMaxEvent)
	}
	return f.object(e.Data)
}

// object takes the data of an event, or a whole answer.
func (f *follower) object(data []byte) *fault {
	c := &f.chunk
	if err := c.scan(data); err != nil {
		return faultf(BadJSON, "%v: %s", err, clip(data))
	}
	if c.failed {
		return faultf(ErrorEvent, "type %q, code %q: %s", c.kind, c.code, clip(c.message))
	}
	if len(f.id) == 0 {
		if len(c.id) == 0 {
			return faultf(BadShape, "no id: %s", clip(data))
		}
		f.id = append(f.id, c.id...)
	} else if !bytes.Equal(f.id, c.id) {
		return faultf(BadShape, "id changes from %s to %s", f.id, c.id)
	}
	if c.choices > 1 || c.choices == 1 && c.index != 0 {
		return faultf(BadShape, "%d choices, the first with index %d; asked for one", c.choices, c.index)
	}
	if c.hasUsage {
		f.hasUsage, f.usage = true, c.usage
	}
	if err := f.compare(c.text); err != nil {
		return err
	}
	if len(c.finish) == 0 {
		return nil
	}
	if len(f.finish) > 0 {
		return faultf(BadShape, "two finish reasons: %s, %s", f.finish, c.finish)
	}
	f.finish = append(f.finish, c.finish...)
	f.recovery = string(c.stopReason) == "recomputed"
	return nil
}

// compare compares a piece of text.
func (f *follower) compare(text []byte) *fault {
	if len(text) == 0 {
		return nil
	}
	if len(f.finish) > 0 {
		return faultf(WrongText, "text after the finish reason: %s", clip(text))
	}
	f.pieces++
	if f.want.check != CheckText {
		return nil
	}
	if err := f.text.Feed(string(text)); err != nil {
		return faultf(WrongText, "%v", err)
	}
	if n := f.text.Tokens(); n > f.want.tokens || n == f.want.tokens && f.text.Partial() {
		return faultf(WrongText, "more than the %d tokens asked for: %s", f.want.tokens, clip(text))
	}
	return nil
}

// end judges a stream whose body ended as HTTP wants it.
func (f *follower) end() *fault {
	switch {
	case !f.done && len(f.finish) == 0:
		return faultf(Truncated, "the body ended after %d of %d tokens, with neither finish_reason nor [DONE]", f.tokens(), f.want.tokens)
	case !f.done:
		return faultf(NoDone, "finish_reason %s, but no [DONE]", f.finish)
	}
	return f.whole()
}

// whole judges what a complete answer holds.
func (f *follower) whole() *fault {
	w := f.want
	switch {
	case len(f.finish) == 0:
		return faultf(NoFinish, "no finish_reason after %d of %d tokens", f.tokens(), w.tokens)
	case f.recovery:
		return faultf(BadFinish, "the engine gave the request back (stop_reason recomputed) after %d of %d tokens", f.tokens(), w.tokens)
	case string(f.finish) != "length" && (w.check == CheckText || string(f.finish) != "stop"):
		return faultf(BadFinish, "finish_reason %s instead of length, after %d of %d tokens", f.finish, f.tokens(), w.tokens)
	case w.check == CheckText && (f.text.Tokens() < w.tokens || f.text.Partial()):
		return faultf(MissingTokens, "%d of %d tokens, ends inside one: %v", f.text.Tokens(), w.tokens, f.text.Partial())
	}
	return f.counts()
}

func (f *follower) counts() *fault {
	w, got := f.want, f.usage
	if f.hasUsage != w.usage {
		if w.usage {
			return faultf(BadUsage, "usage was asked for and did not come")
		}
		return faultf(BadUsage, "usage that was not asked for: %+v", got)
	}
	if !w.usage {
		return nil
	}
	low, high, prompt := w.tokens, w.tokens, w.promptTokens
	if w.check == CheckShape { // another tokenizer and template: its own counts
		low, high, prompt = 1, w.tokens, max(1, got.prompt)
	}
	if got.prompt != prompt || got.completion < low || got.completion > high || got.total != got.prompt+got.completion {
		return faultf(BadUsage, "usage says %d prompt, %d completion, %d in all; expected %d, %d, %d",
			got.prompt, got.completion, got.total, prompt, high, prompt+high)
	}
	return nil
}
