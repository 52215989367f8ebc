//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"golang.org/x/sys/unix"
)

// toPrefill is what a prefill engine is asked beside the prompt, by clients who make this request
// themselves where no proxy makes it for them.
const toPrefill = `,"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`

// prefill sends a prompt to a prefill engine.
func (c *client) prefill(i int) {
	s := &c.streams[i]
	target := c.job.Prefill[i%len(c.job.Prefill)]
	s.handOff = s.handOff[:0]
	if err := c.send(&s.prompt, target, post(s.path, target, s.id, s.body+toPrefill)); err != nil {
		c.lost(i, fmt.Errorf("prefill: %w", err))
	}
}

// readHandOff reads what a prefill engine answers, and then asks for the tokens.
func (c *client) readHandOff(i int) {
	s := &c.streams[i]
	n, err := unix.Read(s.prompt.fd, c.buf[:])
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return
	}
	if err == nil && n == 0 {
		err = errors.New("the connection ended")
	}
	var params []byte
	if err == nil {
		s.handOff = append(s.handOff, c.buf[:n]...)
		params, err = handOff(s.handOff)
	}
	switch {
	case err != nil:
		c.lost(i, fmt.Errorf("prefill: %w", err))
		return
	case params == nil:
		return
	case c.job.Lasts > 0: // no prompt comes after this one
		s.prompt.close()
	}
	c.decode(i, fmt.Sprintf(`,"kv_transfer_params":%s`, params))
}

// handOff reads the kv_transfer_params of an answer; nil: it is not complete.
func handOff(answer []byte) (params []byte, err error) {
	if !bytes.Contains(answer, []byte("\r\n\r\n")) {
		return nil, nil
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(answer)), nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.ContentLength < 0 {
		return nil, errors.New("an answer without a length")
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil { // the rest is on its way
		return nil, nil //nolint:nilerr // what lies in memory ends too early, and nothing else can be wrong
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s %s: %.120s", resp.Proto, resp.Status, body)
	}
	var reply struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(body, &reply); err != nil {
		return nil, err
	}
	if len(reply.Params) == 0 || string(reply.Params) == "null" {
		return nil, errors.New("an answer without kv_transfer_params")
	}
	return reply.Params, nil
}
