package geo

import (
	"errors"
	"io"
	"time"

	"evenkeel/sse"
)

// fill reads one arrival; event tells whether a data event is in it. Events are
// handed on whole, but for those that come in pieces: what comes after one that broke
// off could not be told apart.
func (f *Forward) fill() (event bool, err error) {
	err = f.receive()
	for {
		e, ok := f.reader.Next()
		if !ok {
			break
		}
		f.out = append(f.out, e.Raw...)
		if e.Kind == sse.KindData {
			f.events++
		}
		event = event || e.Kind != sse.KindComment
	}
	if err == nil {
		err = f.reader.Err()
	}
	return event, err
}

// receive reads what has arrived, and waits for it as long as the peer may be
// silent.
func (f *Forward) receive() error {
	if wait := f.reader.Wait(time.Now()); wait != f.idle {
		f.idle = wait
		f.resp.SetIdle(wait)
	}
	n, err := f.resp.Read(f.read[:])
	f.reader.Feed(f.read[:n], time.Now())
	return err
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
// that the connection is closed.
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

// Pending is how much more Read has without waiting.
func (f *Forward) Pending() int { return len(f.out) }

// more reads on until there is something to hand out, or nothing more.
func (f *Forward) more() {
	if f.reader.Done() { // even if the connection has failed
		f.over = io.EOF
		return
	}
	if _, err := f.fill(); err != nil && !f.reader.Done() {
		f.over = ErrPeerLost
		if f.reader.Torn() {
			f.out = append(f.out, sse.BlankLine...)
		}
		f.out = sse.ErrorEvent(f.out, "upstream region lost", "server_error", "peer_lost")
	}
}

// finish closes the response. It waits a short time for the end of the body, because
// the connection can then serve again. The client's own end does not wait for it.
func (f *Forward) finish() {
	n := f.node
	n.mu.Lock()
	wait := f.reader != nil && f.reader.Done() && !f.resp.Ended() && n.ctx.Err() == nil
	if wait {
		n.running.Go(func() {
			defer f.resp.Close()
			for f.reader.Err() == nil && f.receive() == nil {
			}
		})
	}
	n.mu.Unlock()
	if !wait {
		f.resp.Close()
	}
}

// Close ends the forward, however far it was read.
func (f *Forward) Close() {
	outcome := OutcomeOK
	switch {
	case f.reader == nil: // it came whole
	case f.Lost():
		outcome = OutcomeLost
	case !f.reader.Done():
		outcome = OutcomeGone
	}
	f.End(outcome)
	f.finish()
}

// Lost says whether the peer was lost in the middle, before the client left.
func (f *Forward) Lost() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.left && errors.Is(f.over, ErrPeerLost)
}

// Whole says whether all of the answer was read.
func (f *Forward) Whole() bool { return f.reader == nil || f.reader.Done() }
