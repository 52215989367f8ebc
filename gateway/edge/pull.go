package edge

import (
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"

	"go.uber.org/zap"
)

// ErrUnfinished is what Pull's end gets when nobody read the source to its
// end: the client left, or wanted the head only.
var ErrUnfinished = errors.New("edge: the client left before the answer's end")

// Pull streams an answer by being read: give it to ctx.SetBodyStream(p, -1).
// fasthttp then writes and flushes one HTTP chunk a Read on the connection's
// own goroutine, so a slow client slows the source down and no goroutine or
// pipe is spent on it.
//
// A Read that fails with anything but io.EOF ends the connection without the
// last chunk: the client sees a truncated answer, never a whole one.
type Pull struct {
	src  io.Reader
	end  func(err error)
	log  *zap.Logger
	err  error // why reading ended; nil: not yet
	once sync.Once
}

// NewPull returns a Pull of src. end is called exactly once, when fasthttp is
// through with the answer or has given it up: err is nil after src's io.EOF,
// the error src gave, an error about its panic, or ErrUnfinished.
func NewPull(src io.Reader, end func(err error), log *zap.Logger) *Pull {
	return &Pull{src: src, end: end, log: log}
}

// Read reads from the source and turns its panic into an error.
func (p *Pull) Read(b []byte) (n int, err error) {
	if p.err != nil {
		return 0, p.err
	}
	defer func() {
		if v := recover(); v != nil {
			n, err = 0, p.panicked("reading an answer", v)
		}
		if err != nil {
			p.err = err
		}
	}()
	return p.src.Read(b)
}

// Close calls end, the first time. It never fails: fasthttp would report the
// failure of an answer that is already out.
func (p *Pull) Close() error {
	p.once.Do(func() {
		defer func() {
			if v := recover(); v != nil {
				_ = p.panicked("ending an answer", v) // logged; there is nobody to tell
			}
		}()
		switch p.err {
		case nil:
			p.end(ErrUnfinished)
		case io.EOF: // fasthttp compares the same way: a wrapped one is a failure
			p.end(nil)
		default:
			p.end(p.err)
		}
	})
	return nil
}

func (p *Pull) panicked(doing string, v any) error {
	p.log.Error("edge: panic while "+doing, zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	return fmt.Errorf("edge: panic while %s: %v", doing, v)
}
