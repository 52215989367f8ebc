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

	"evenkeel/bench/rigs/testbed"
)

// body is a request's. with returns one that has more fields.
type body map[string]any

func (b body) with(more body) body {
	all := maps.Clone(b)
	maps.Copy(all, more)
	return all
}

// answer is what a server said.
type answer struct {
	status int
	kind   string // its content type
	text   []byte
	err    error // it could not be read to its end
}

func (a answer) String() string {
	if a.err != nil {
		return fmt.Sprintf("%d %.300s (%v)", a.status, a.text, a.err)
	}
	return fmt.Sprintf("%d %.300s", a.status, a.text)
}

var caller = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Minute}

// ask sends a request, whose body may be bytes, and reads the whole answer.
func ask(ctx context.Context, method, url string, of any) answer {
	return listen(ctx, method, url, of, nil)
}

// listen is ask, and calls heard with what came so far.
func listen(ctx context.Context, method, url string, of any, heard func(text []byte)) (a answer) {
	text, raw := of.([]byte)
	if !raw && of != nil {
		if text, a.err = json.Marshal(of); a.err != nil {
			return a
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(text))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := caller.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	a.status, a.kind = resp.StatusCode, resp.Header.Get("Content-Type")
	piece := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(piece)
		a.text = append(a.text, piece[:n]...)
		if n > 0 && heard != nil {
			heard(a.text)
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

// value is the answer as a document: its status, its kind, and its body. A stream has the last event of each index, and each event
// before it must have a beginning of its ids.
func (a answer) value() (map[string]any, error) {
	if a.err != nil {
		return nil, a.err
	}
	doc := map[string]any{"status": json.Number(fmt.Sprint(a.status)), "kind": a.kind}
	if len(a.text) == 0 {
		return doc, nil
	}
	if a.kind != "text/event-stream; charset=utf-8" && a.kind != "text/event-stream" {
		v, err := parse(a.text)
		doc["body"] = v
		return doc, err
	}
	last := map[string]any{}
	done, err := testbed.Events(a.text, func(data []byte) error {
		v, err := parse(data)
		if err != nil {
			return err
		}
		event, ok := v.(map[string]any)
		if !ok {
			return fmt.Errorf("an event is no object: %.200s", data)
		}
		index := fmt.Sprint(event["index"])
		if before, ok := last[index].(map[string]any); ok && !begins(event["output_ids"], before["output_ids"]) {
			return fmt.Errorf("an event does not go on with the one before: %.200s", data)
		}
		last[index] = event
		return nil
	})
	doc["body"], doc["done"], doc["kind"] = last, done, "text/event-stream"
	return doc, err
}

// begins says whether a list of ids begins with another one.
func begins(all, with any) bool {
	long, _ := all.([]any)
	short, _ := with.([]any)
	if len(short) > len(long) {
		return false
	}
	for i, v := range short {
		if v != long[i] {
			return false
		}
	}
	return true
}

func parse(text []byte) (v any, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber() // so that numbers are compared as they were written
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("%w in %.200q", err, text)
	}
	return v, nil
}
