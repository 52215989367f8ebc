package geo

import (
	"errors"
	"io"
	"time"

	"evenkeel/sse"
)

// fill reads one arrival; event tells whether a data event is in it. Events are
// handed on whole: what comes after one that broke off could not be told apart.
func (f *Forward) fill() (event bool, err error) {
	k, err := f.resp.Read(f.read[:])
	f.framer.Feed(f.read[:k])
	for {
		e, ok := f.framer.Next()
		if !ok {
			break
		}
		f.out = append(f.out, e.Raw...)
		if e.Kind == sse.KindData {
			f.events++
		}
		event = event || e.Kind != sse.KindComment
		f.done = f.done || e.Kind == sse.KindDone
	}
	return event, err
}

// ContentType of the answer that is streamed.
func (f *Forward) ContentType() []byte { return f.resp.ContentType() }

// Cached is how many prompt tokens the peer found in a cache; -1: it did not say.
func (f *Forward) Cached() int { return f.cached }

// Events is how many data events came so far: about as many tokens.
func (f *Forward) Events() int { return f.events }

// FirstAt is when the first event was here.
func (f *Forward) FirstAt() time.Time { return f.firstAt }

// Read hands out whole events as they come, waiting for the first bytes only.
// A peer that is lost is an event that says so, no [DONE], and ErrPeerLost, so
// that the connection is closed (geo R30).
func (f *Forward) Read(p []byte) (int, error) {
	for len(f.out) == 0 {
		if f.over != nil {
			return 0, f.over
		}
		f.more()
	}
	k := copy(p, f.out)
	f.out = f.out[:copy(f.out, f.out[k:])]
	return k, nil
}

// tailTime is how long the end of a body may take behind its [DONE].
const tailTime = 250 * time.Millisecond

// more reads on until there is something to hand out, or nothing more.
func (f *Forward) more() {
	if f.done {
		f.resp.SetIdle(tailTime)
	}
	_, err := f.fill()
	switch {
	case err == nil:
	case f.done: // whole, whatever became of the connection
		f.over = io.EOF
	default:
		f.over = ErrPeerLost
		f.out = sse.ErrorEvent(f.out, "upstream region lost", "server_error", "peer_lost")
	}
}

// Close ends the forward, however far it was read.
func (f *Forward) Close() {
	f.resp.Close()
	outcome := OutcomeOK
	switch {
	case f.framer == nil: // it came whole
	case errors.Is(f.over, ErrPeerLost) && !f.gone():
		outcome = OutcomeLost
	case !f.done:
		outcome = OutcomeGone
	}
	f.end(outcome, "")
}

// Lost says whether the peer was lost in the middle.
func (f *Forward) Lost() bool { return errors.Is(f.over, ErrPeerLost) && !f.gone() }

// Whole says whether all of the answer was read.
func (f *Forward) Whole() bool { return f.framer == nil || f.done }
