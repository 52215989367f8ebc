package kvevents

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// This file uses the library's connections, but not its sockets. After Close, a socket's reader
// goroutine can block for ever on a message that nothing receives, and a socket's dialler sleeps
// without regard to the context.

const (
	maxMessageBytes = 16 << 20 // a larger one ends the connection
	dialTimeout     = 5 * time.Second
)

type wire struct {
	*zmq4.Conn
	raw  net.Conn
	stop func() bool
}

// dial connects and does the ZeroMQ handshake. When ctx ends, the connection is closed.
func dial(ctx context.Context, as zmq4.SocketType, addr string) (*wire, error) {
	d := net.Dialer{Timeout: dialTimeout}
	raw, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("kvevents: %w; start the engine with kv_events_config, and check that this is its port plus the rank", err)
	}
	w := &wire{raw: raw, stop: context.AfterFunc(ctx, func() { _ = raw.Close() })}
	_ = raw.SetDeadline(time.Now().Add(dialTimeout)) // time limit of the handshake
	g := &guard{Conn: raw, buffered: bufio.NewReaderSize(raw, 64<<10), greetingLeft: greetingBytes}
	if w.Conn, err = zmq4.Open(g, null.Security(), as, nil, false, nil); err != nil {
		w.close()
		return nil, fmt.Errorf("kvevents: %s does not speak ZeroMQ as a publisher does: %w", addr, err)
	}
	_ = raw.SetDeadline(time.Time{})
	return w, nil
}

// close may be called more than once.
func (w *wire) close() {
	w.stop()
	_ = w.raw.Close()
}

// frames skips heartbeats, which the library answers.
func (w *wire) frames() ([][]byte, error) {
	for {
		msg, err := w.RecvMsg()
		if err != nil {
			return nil, err
		}
		if msg.Type == zmq4.UsrMsg {
			return msg.Frames, nil
		}
	}
}

// guard fails a connection on which a peer announces a message larger than maxMessageBytes, because
// the library would allocate any announced length.
type guard struct {
	net.Conn
	buffered     *bufio.Reader
	greetingLeft int    // bytes still to come
	bodyLeft     uint64 // bytes of the frame still to come
	lengthLeft   int    // bytes still to come; 0: the flags of the next frame follow
	frameSize    uint64 // of the body, as far as the length field was read
	moreFrames   bool   // of the same message
	messageSize  uint64 // frames so far
}

// Frames of ZMTP 3: after a greeting each frame has flags, a length and a body.
const (
	greetingBytes = 64
	flagMore      = 1
	flagLong      = 2
	frameCost     = 64 // bytes counted for each frame beside its body, which bounds the frames of a message
)

var errTooLarge = errors.New("kvevents: a message of more than 16 MiB")

func (g *guard) Read(p []byte) (int, error) {
	n, err := g.buffered.Read(p)
	if !g.withinLimit(p[:n]) {
		return 0, errTooLarge
	}
	return n, err
}

// withinLimit parses the bytes that were read, which may begin and end anywhere in a frame.
func (g *guard) withinLimit(p []byte) bool {
	for len(p) > 0 {
		switch {
		case g.greetingLeft > 0:
			n := min(g.greetingLeft, len(p))
			g.greetingLeft -= n
			p = p[n:]
		case g.bodyLeft > 0:
			n := min(g.bodyLeft, uint64(len(p)))
			g.bodyLeft -= n
			p = p[n:]
		case g.lengthLeft == 0: // the byte with the next frame's flags
			g.moreFrames, g.frameSize, g.lengthLeft = p[0]&flagMore != 0, 0, 1
			if p[0]&flagLong != 0 { // the length field has eight bytes, not one
				g.lengthLeft = 8
			}
			p = p[1:]
		default: // a byte of the length field, which is big-endian
			g.frameSize = g.frameSize<<8 | uint64(p[0])
			p = p[1:]
			if g.lengthLeft--; g.lengthLeft > 0 {
				continue
			}
			if g.frameSize > maxMessageBytes { // alone, because the sum below could overflow
				return false
			}
			if g.messageSize+g.frameSize+frameCost > maxMessageBytes {
				return false
			}
			g.bodyLeft = g.frameSize
			g.messageSize += g.frameSize + frameCost
			if !g.moreFrames { // the next frame begins another message
				g.messageSize = 0
			}
		}
	}
	return true
}

// endOfReplay is the sequence number of a replay's end marker.
const endOfReplay = math.MaxUint64
