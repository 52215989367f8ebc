//go:build !linux

package socket

import (
	"errors"
	"net"
)

// A Socket is never found on this system.
type Socket struct{}

// Of finds none.
func Of(net.Conn) Socket { return Socket{} }

// Exists is false.
func (Socket) Exists() bool { return false }

// These are never called.
func (Socket) Read([]byte) (int, error)          { return 0, errors.ErrUnsupported }
func (Socket) Write([]byte) (int, error)         { return 0, errors.ErrUnsupported }
func (Socket) Await() error                      { return errors.ErrUnsupported }
func (Socket) Ask([][]byte, func()) (int, error) { return 0, errors.ErrUnsupported }
func (Socket) Quiet() bool                       { return false }

// Write fails.
func Write(uintptr, []byte) (int, error) { return 0, errors.ErrUnsupported }
