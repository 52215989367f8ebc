//go:build !linux

package engine

import (
	"errors"
	"net"
)

func dupSocket(net.Conn) (int, bool) { return 0, false }

func netConn(int) (net.Conn, error) { return nil, errors.ErrUnsupported }

func (c *conn) shutdownDetached(bool) {}
