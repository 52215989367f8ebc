//go:build linux

package main

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// answer follows the bytes of one streamed HTTP answer, cut anywhere: it counts
// events and knows whether the stream came to its end. The zero value is ready.
type answer struct {
	at     spot
	head   []byte // of the response, until it is complete
	left   int    // bytes of the chunk that are still to come
	closes bool   // the connection ends with this answer

	events int  // with data, [DONE] among them
	data   bool // the event that comes has a line of data
	done   bool // [DONE] came
	failed bool // an event told of an error

	line     [14]byte // how the line begins that comes
	lineSize int
}

// spot is where in an answer the next byte stands.
type spot uint8

const (
	inHead spot = iota
	inSize      // of a chunk
	inSizeRest
	inChunk
	behindChunk
	inTrailer
	atEnd
)

// feed reads bytes, and returns how many events they complete. Where the answer is
// not a stream, the error says what came.
func (a *answer) feed(b []byte) (events int, err error) {
	before := a.events
	for len(b) > 0 && err == nil {
		switch a.at {
		case inHead:
			b, err = a.readHead(b)
		case inSize:
			b, err = a.readSize(b)
		case inChunk:
			n := min(a.left, len(b))
			a.text(b[:n])
			if b, a.left = b[n:], a.left-n; a.left == 0 {
				a.at = behindChunk
			}
		case inSizeRest, behindChunk, inTrailer:
			i := bytes.IndexByte(b, '\n')
			if i < 0 {
				return a.events - before, nil
			}
			b = b[i+1:]
			switch {
			case a.at == behindChunk:
				a.at = inSize
			case a.at == inTrailer:
				a.at = atEnd
			case a.left == 0:
				a.at = inTrailer
			default:
				a.at = inChunk
			}
		case atEnd:
			err = fmt.Errorf("bytes behind the end: %.40q", b)
		}
	}
	return a.events - before, err
}

func (a *answer) readHead(b []byte) (rest []byte, err error) {
	had := len(a.head)
	a.head = append(a.head, b...)
	end := bytes.Index(a.head, []byte("\r\n\r\n"))
	if end < 0 {
		return nil, nil
	}
	head, rest := string(a.head[:end]), b[end+4-had:]
	a.head = a.head[:0]
	status, fields, _ := strings.Cut(head, "\r\n")
	if _, code, _ := strings.Cut(status, " "); !strings.HasPrefix(code, "200") {
		return rest, fmt.Errorf("status %.3s: %.120s", code, rest)
	}
	chunked := false
	for field := range strings.SplitSeq(fields, "\r\n") {
		name, value, _ := strings.Cut(field, ":")
		switch value = strings.TrimSpace(value); {
		case strings.EqualFold(name, "Transfer-Encoding"):
			chunked = strings.EqualFold(value, "chunked")
		case strings.EqualFold(name, "Connection"):
			a.closes = strings.EqualFold(value, "close")
		}
	}
	if !chunked {
		return rest, fmt.Errorf("an answer in one piece: %.120s", rest)
	}
	a.at = inSize
	return rest, nil
}

func (a *answer) readSize(b []byte) (rest []byte, err error) {
	for i, c := range b {
		switch {
		case c == '\r' || c == ';':
			a.at = inSizeRest
			return b[i+1:], nil
		default:
			digit, err := strconv.ParseUint(string(c), 16, 8)
			if err != nil {
				return nil, fmt.Errorf("no size of a chunk: %.40q", b)
			}
			a.left = a.left<<4 | int(digit)
		}
	}
	return nil, nil
}

// text reads the body.
func (a *answer) text(b []byte) {
	for len(b) > 0 {
		if n := a.lineSize; n < len(a.line) {
			copy(a.line[n:], b)
		}
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			a.lineSize += len(b)
			return
		}
		a.endLine(a.lineSize + i)
		a.lineSize = 0
		b = b[i+1:]
	}
}

// endLine reads a line of so many bytes.
func (a *answer) endLine(size int) {
	begin := a.line[:min(size, len(a.line))]
	switch {
	case size == 0 && a.data:
		a.events++
		a.data = false
	case size == 0:
	case string(begin) == "data: [DONE]":
		a.data, a.done = true, true
	case bytes.HasPrefix(begin, []byte("data:")):
		a.data = true
		a.failed = a.failed || a.done || string(begin) == `data: {"error"`
	}
}

// whole says what an answer that has ended lacks of so many events and [DONE].
func (a *answer) whole(events int) error {
	switch {
	case a.failed:
		return fmt.Errorf("an error as an event, after %d of %d", a.events, events)
	case a.at != atEnd:
		return fmt.Errorf("cut off after %d of %d events", a.events, events)
	case !a.done:
		return fmt.Errorf("no [DONE] after %d of %d events", a.events, events)
	case a.events != events+1:
		return fmt.Errorf("%d of %d events", a.events-1, events)
	}
	return nil
}
