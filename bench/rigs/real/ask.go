package main

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

// answer is what a server said, byte for byte.
type answer struct {
	status int
	head   http.Header
	body   []byte
	err    error // the answer could not be read to its end
	first  time.Duration
	took   time.Duration
}

// caller keeps no connections: a server that was restarted at its address is
// asked anew.
var caller = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// askPatience bounds one question. An idle machine answers the longest in a minute.
const askPatience = 15 * time.Minute

// ask sends a request and reads the whole answer. A nil body has none.
func ask(ctx context.Context, method, url string, body any) answer {
	return listen(ctx, method, url, body, nil)
}

// listen is ask, and calls heard with the number of bytes that came so far.
func listen(ctx context.Context, method, url string, body any, heard func(bytes int)) (a answer) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	began := time.Now()
	defer func() { a.took = time.Since(began) }()
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return answer{err: err}
		}
		text = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, text)
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := caller.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	a.status, a.head = resp.StatusCode, resp.Header
	piece := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(piece)
		if n > 0 {
			if a.body == nil {
				a.first = time.Since(began)
			}
			a.body = append(a.body, piece[:n]...)
			if heard != nil {
				heard(len(a.body))
			}
		}
		if errors.Is(err, io.EOF) {
			return a
		}
		if err != nil {
			a.err = err
			return a
		}
	}
}

// The two routes that are asked.
const (
	completions = "/v1/completions"
	chat        = "/v1/chat/completions"
)

// body is a request's. with returns one that has more fields.
type body map[string]any

func (b body) with(more body) body {
	all := maps.Clone(b)
	maps.Copy(all, more)
	return all
}

// String is how a body looks in a report.
func (a answer) String() string {
	text := string(a.body[:min(len(a.body), 300)])
	if a.err != nil {
		return fmt.Sprintf("%d %s (%v)", a.status, text, a.err)
	}
	return fmt.Sprintf("%d %s", a.status, text)
}
