//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// leg is the request to a prefill engine, which clients make themselves where no proxy makes it
// for them. Its connection serves one stream.
type leg struct {
	fd      int
	out, in []byte
}

// toPrefill is what a prefill engine is asked beside the prompt.
const toPrefill = `,"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`

// prefill sends a prompt to a prefill engine.
func (c *client) prefill(i int) {
	s := &c.streams[i]
	l := &s.leg
	target := c.job.Prefill[i%len(c.job.Prefill)]
	l.out, l.in = post(s.path, target, s.id, s.body+toPrefill), l.in[:0]
	if l.fd < 0 {
		if err := c.dial(&l.fd, target, i, len(c.streams)+i); err != nil {
			c.lost(i, fmt.Errorf("connect to the prefill engine: %w", err))
		}
		return // the connection says when it can be written to
	}
	c.prefillReady(i, unix.EPOLLOUT)
}

// prefillReady goes on with what a prefill engine is asked.
func (c *client) prefillReady(i int, events uint32) {
	l := &c.streams[i].leg
	if l.fd < 0 {
		return
	}
	if events&unix.EPOLLOUT != 0 && len(l.out) > 0 {
		n, err := unix.Write(l.fd, l.out)
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			c.lost(i, fmt.Errorf("write to the prefill engine: %w", err))
			return
		}
		l.out = l.out[max(0, n):]
		c.want(l.fd, len(c.streams)+i, len(l.out) > 0)
	}
	if events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) == 0 {
		return
	}
	n, err := unix.Read(l.fd, c.buf[:])
	switch {
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
		return
	case err == nil && n == 0:
		err = errors.New("the connection ended")
	case err == nil:
		l.in = append(l.in, c.buf[:n]...)
	}
	var params []byte
	if err == nil {
		params, err = handOff(l.in)
	}
	if err != nil {
		c.lost(i, fmt.Errorf("prefill: %w", err))
		return
	}
	if params == nil {
		return
	}
	if c.job.Lasts > 0 { // no prompt comes after this one
		c.closeLeg(i)
	}
	c.decode(i, fmt.Sprintf(`,"kv_transfer_params":%s`, params))
}

func (c *client) closeLeg(i int) {
	l := &c.streams[i].leg
	if l.fd >= 0 {
		_ = unix.Close(l.fd)
	}
	l.fd = -1
}

// handOff reads the kv_transfer_params of an answer; nil: it is not complete.
func handOff(answer []byte) (params []byte, err error) {
	head, body, whole := bytes.Cut(answer, []byte("\r\n\r\n"))
	if !whole {
		return nil, nil
	}
	size := -1
	status, fields, _ := strings.Cut(string(head), "\r\n")
	for field := range strings.SplitSeq(fields, "\r\n") {
		if name, value, _ := strings.Cut(field, ":"); strings.EqualFold(name, "Content-Length") {
			if size, err = strconv.Atoi(strings.TrimSpace(value)); err != nil {
				return nil, err
			}
		}
	}
	switch {
	case !strings.HasPrefix(status, "HTTP/1.1 200"):
		return nil, fmt.Errorf("%s: %.120s", status, body)
	case size < 0:
		return nil, errors.New("an answer without a length")
	case len(body) < size:
		return nil, nil
	}
	var reply struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(body[:size], &reply); err != nil {
		return nil, err
	}
	if len(reply.Params) == 0 || string(reply.Params) == "null" {
		return nil, errors.New("an answer without kv_transfer_params")
	}
	return reply.Params, nil
}
