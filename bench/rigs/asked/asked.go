// Package asked asks servers, and says in which fields the answers of two of them differ.
package asked

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"time"
)

// Body is a request's.
type Body map[string]any

// With is the body with more fields.
func (b Body) With(more Body) Body {
	all := maps.Clone(b)
	maps.Copy(all, more)
	return all
}

// Answer is what a server said, byte for byte.
type Answer struct {
	Status int
	Head   http.Header
	Body   []byte
	Err    error         // the answer could not be read to its end
	First  time.Duration // until the first byte of the body
	Took   time.Duration
}

// String is how an answer looks in a report.
func (a Answer) String() string {
	text := string(a.Body[:min(len(a.Body), 300)])
	if a.Err != nil {
		return fmt.Sprintf("%d %s (%v)", a.Status, text, a.Err)
	}
	return fmt.Sprintf("%d %s", a.Status, text)
}

// caller keeps no connections: a server that was restarted at its address is
// asked anew.
var caller = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// patience bounds one question. An idle machine answers the longest in a minute.
const patience = 15 * time.Minute

// Ask sends a request and reads the whole answer. A nil body has none, and bytes are sent as they
// are.
func Ask(ctx context.Context, method, url string, body any) Answer {
	return Listen(ctx, method, url, body, nil)
}

// Listen is Ask, and calls heard with what came so far of the body.
func Listen(ctx context.Context, method, url string, body any, heard func(sofar []byte)) (a Answer) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	began := time.Now()
	defer func() { a.Took = time.Since(began) }()
	text, raw := body.([]byte)
	if !raw && body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return Answer{Err: err}
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(text))
	if err != nil {
		return Answer{Err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := caller.Do(req)
	if err != nil {
		return Answer{Err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	a.Status, a.Head = resp.StatusCode, resp.Header
	piece := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(piece)
		if n > 0 {
			if a.Body == nil {
				a.First = time.Since(began)
			}
			a.Body = append(a.Body, piece[:n]...)
			if heard != nil {
				heard(a.Body)
			}
		}
		if errors.Is(err, io.EOF) {
			return a
		}
		if err != nil {
			a.Err = err
			return a
		}
	}
}
