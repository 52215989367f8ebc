//go:build !linux

package loop

import (
	"errors"
	"io"
	"time"

	"go.uber.org/zap"
)

// A Loop needs epoll, which only Linux has: elsewhere each socket has a goroutine.
type Loop struct {
	Buffer [1]byte
	Out    []byte
}

// A Watch is never made on this system.
type Watch struct {
	at         int64
	tick       int64
	prev, next *Watch
}

// New always returns errors.ErrUnsupported.
func New(*zap.Logger) (*Loop, error) { return nil, errors.ErrUnsupported }

// Post is never called.
func (l *Loop) Post(func()) bool { return false }

// Close is never called.
func (l *Loop) Close() {}

// Add is never called.
func (l *Loop) Add(int, Handler, bool) (*Watch, error) { return nil, errors.ErrUnsupported }

func (w *Watch) Loop() *Loop              { return nil }
func (w *Watch) CallAgain(bool)           {}
func (w *Watch) Pause() error             { return errors.ErrUnsupported }
func (w *Watch) Resume() error            { return errors.ErrUnsupported }
func (w *Watch) WakeAt(time.Time)         {}
func (w *Watch) Remove()                  {}
func (w *Watch) Forget()                  {}
func (w *Watch) Read([]byte) (int, error) { return 0, io.EOF }
