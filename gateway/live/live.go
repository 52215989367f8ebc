package live

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/openai"
)

// Options of a Live.
type Options struct {
	Version string // of the program
	Log     *zap.Logger
}

// Live tells watchers how a proxy is. While nobody watches it costs a sample a
// second and makes no document.
type Live struct {
	source  source
	log     *zap.Logger
	history *history

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// source is what is shown: a proxy, or what a test makes up.
type source interface {
	Sample(context.Context) (s gateway.Sample, ok bool)
	Document(context.Context) Document
}

// watcher is somebody who reads the stream.
type watcher struct {
	documents chan []byte // room for one; closed on one that is too slow
}

const (
	mostWatchers = 16
	writeTimeout = 5 * time.Second // of one event to one watcher
)

// New prepares the view of a proxy; Run has to run beside it.
func New(g *gateway.Gateway, opt Options) *Live {
	return newLive(&proxy{g, opt.Version, hostname()}, opt.Log)
}

func newLive(s source, log *zap.Logger) *Live {
	return &Live{source: s, log: log, history: newHistory(), watchers: map[*watcher]struct{}{}}
}

// Run samples the proxy, and sends documents while somebody watches, until ctx
// ends.
func (l *Live) Run(ctx context.Context) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			l.sample(ctx)
		}
	}
}

// sample is one second. Parts that do not answer within it leave a gap, which
// watchers see as age.
func (l *Live) sample(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, sampleEvery)
	defer cancel()
	s, ok := l.source.Sample(ctx)
	if !ok {
		return
	}
	l.history.add(&s, time.Now())
	if !l.watched() {
		return
	}
	d := l.Document(ctx)
	if ctx.Err() != nil {
		return
	}
	data, err := json.Marshal(d)
	if err != nil { // a number that JSON has not: a bug in whoever told it
		l.log.Error("live: the document cannot be written", zap.Error(err))
		return
	}
	l.send(data)
}

// Document is how the proxy is now.
func (l *Live) Document(ctx context.Context) Document {
	d := l.source.Document(ctx)
	l.history.rate(&d.Traffic)
	d.Problems = problems(&d)
	return d
}

func (l *Live) watched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watchers) > 0
}

// send gives everybody the document. Who has not read the last one yet is too
// slow to see what is now, and is let go.
func (l *Live) send(document []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w := range l.watchers {
		select {
		case w.documents <- document:
		default:
			close(w.documents)
			delete(l.watchers, w)
		}
	}
}

func (l *Live) join() (w *watcher, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.watchers) >= mostWatchers {
		return nil, false
	}
	w = &watcher{documents: make(chan []byte, 1)}
	l.watchers[w] = struct{}{}
	return w, true
}

func (l *Live) unwatch(w *watcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.watchers, w)
}

// ServeHTTP answers GET /live, with one document for ?once and else with a
// stream of them.
func (l *Live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	if r.URL.Query().Has("once") {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(l.Document(r.Context())) // the operator left
		return
	}
	watcher, ok := l.join()
	if !ok {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write(openai.NewError(http.StatusServiceUnavailable, "too_many_watchers", "as many watch as may; close another page, or use /live?once").JSON())
		return
	}
	defer l.unwatch(watcher)
	s := newSender(w, r)
	defer s.close()
	if s.event("history", l.history.copy()) != nil || s.event("document", l.Document(r.Context())) != nil {
		return // the watcher left
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case document, ok := <-watcher.documents:
			if !ok || s.raw("document", document) != nil {
				return
			}
		}
	}
}

// sender writes events to one watcher. Each document is much like the last one,
// so a compressed stream of whole documents is as small as one of changes.
type sender struct {
	to   io.Writer
	zip  *gzip.Writer // nil: in clear text
	conn *http.ResponseController
}

func newSender(w http.ResponseWriter, r *http.Request) *sender {
	s := &sender{to: w, conn: http.NewResponseController(w)}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("X-Accel-Buffering", "no") // an nginx in front must not gather events
	h.Add("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		s.zip = gzip.NewWriter(w)
		s.to = s.zip
	}
	return s
}

func (s *sender) event(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return s.raw(name, data)
}

func (s *sender) raw(name string, data []byte) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	for _, part := range [][]byte{[]byte("event: " + name + "\ndata: "), data, []byte("\n\n")} {
		if _, err := s.to.Write(part); err != nil {
			return err
		}
	}
	if s.zip != nil {
		if err := s.zip.Flush(); err != nil {
			return err
		}
	}
	return s.conn.Flush()
}

func (s *sender) close() {
	if s.zip != nil {
		_ = s.zip.Close() // the watcher left
	}
}
