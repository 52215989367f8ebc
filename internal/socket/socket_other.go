//go:build !linux

package socket

import (
	"errors"
	"net"
)

// A Socket never exists on this system: callers use the connection instead.
type Socket struct{}

// Of returns a Socket that does not exist.
func Of(net.Conn) Socket { return Socket{} }

// Exists returns false.
func (Socket) Exists() bool { return false }

// These methods are never called, because Exists is false.

func (Socket) Read([]byte) (int, error)          { return 0, errors.ErrUnsupported }
func (Socket) Write([]byte) (int, error)         { return 0, errors.ErrUnsupported }
func (Socket) Await() error                      { return errors.ErrUnsupported }
func (Socket) Ask([][]byte, func()) (int, error) { return 0, errors.ErrUnsupported }
func (Socket) Quiet() bool                       { return false }

// Write always fails.
func Write(uintptr, []byte) (int, error) { return 0, errors.ErrUnsupported }
