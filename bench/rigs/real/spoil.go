package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
)

// What -break breaks of what passes between evenkeel and its decode engines. Each is something that
// evenkeel must never do, so rows that see it must fail.
const (
	breakHandoff = "handoff" // a request gets the hand-off of the one before it
	breakToken   = "token"   // the third event of each stream is lost
	breakRank    = "rank"    // every request names rank 0
)

var breaks = []string{breakHandoff, breakToken, breakRank}

// spoiled is a way to a decode engine on which something breaks, or the engine's own URL.
func (w *site) spoiled(engine string) (string, error) {
	if w.breaks == "" {
		return engine, nil
	}
	to, err := url.Parse(engine)
	if err != nil {
		return "", err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	var mu sync.Mutex
	var last json.RawMessage
	proxy := &httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		switch {
		case w.breaks == breakRank && r.Out.Header.Get("X-Data-Parallel-Rank") != "":
			r.Out.Header.Set("X-Data-Parallel-Rank", "0")
		case w.breaks == breakHandoff && r.In.Method == http.MethodPost:
			body, _ := io.ReadAll(r.In.Body)
			mu.Lock()
			body, last = exchanged(body, last)
			mu.Unlock()
			r.Out.Body, r.Out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		}
	}}
	if w.breaks == breakToken {
		proxy.ModifyResponse = func(r *http.Response) error {
			if strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
				r.Body = lossy(r.Body)
			}
			return nil
		}
	}
	server := &http.Server{Handler: proxy} //nolint:gosec // one client, on loopback, that this command starts itself
	w.AtEnd(func() { _ = server.Close() })
	go func() { _ = server.Serve(ln) }()
	return fmt.Sprintf("http://%s", ln.Addr()), nil
}

// exchanged is a request with the hand-off of the one before it, and its own.
func exchanged(body []byte, last json.RawMessage) ([]byte, json.RawMessage) {
	var doc map[string]json.RawMessage
	if json.Unmarshal(body, &doc) != nil || doc["kv_transfer_params"] == nil {
		return body, last
	}
	own := doc["kv_transfer_params"]
	if last != nil {
		doc["kv_transfer_params"] = last
	}
	body, _ = json.Marshal(doc) //nolint:errchkjson // what was read can be written
	return body, own
}

// lossy is a stream without its third event.
func lossy(body io.ReadCloser) io.ReadCloser {
	from, to := io.Pipe()
	go func() {
		lines, events, event := bufio.NewReader(body), 0, []byte(nil)
		for {
			line, err := lines.ReadBytes('\n')
			if event = append(event, line...); len(bytes.TrimSpace(line)) == 0 || err != nil {
				if events++; events != 3 {
					if _, failed := to.Write(event); failed != nil {
						return
					}
				}
				event = event[:0]
			}
			if err != nil {
				_ = to.CloseWithError(err)
				return
			}
		}
	}()
	return ended{from, body}
}

// ended is a stream whose end ends the one that it is made of.
type ended struct {
	*io.PipeReader
	of io.Closer
}

func (e ended) Close() error { return errors.Join(e.PipeReader.Close(), e.of.Close()) }
