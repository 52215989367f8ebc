package live

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/detect"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/watch"
)

// Options are what a Live needs besides its Watch.
type Options struct {
	Version   string                         // of the program
	Decisions func(now time.Time) []Decision // the last ones, latest first
	Log       *zap.Logger
}

// Live shows watchers what a Watch has seen of a proxy. It judges nothing itself.
type Live struct {
	watch *watch.Watch
	opt   Options
	zip   *gzip.Writer // compresses the kept documents; reused, because it is large

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// watcher is a client that reads the stream.
type watcher struct {
	since time.Time
	news  chan news // room for one; closed if the watcher is too slow, or must make room for another one
}

// news are the events of one second.
type news struct {
	document, strip []byte // strip is nil in four of five seconds
}

const (
	mostWatchers = 16
	writeTimeout = 5 * time.Second // of one event to one watcher
	watchAtLeast = time.Minute     // how long a watcher is safe from having to make room for another one
)

// New returns a Live of what a Watch sees from now on. Call it before the Watch runs.
func New(w *watch.Watch, opt Options) *Live {
	l := &Live{watch: w, opt: opt, watchers: map[*watcher]struct{}{}}
	l.zip, _ = gzip.NewWriterLevel(nil, gzip.BestSpeed) // the level is valid
	w.OnLook(l.watched, l.show)
	return l
}

// show keeps a document for callers who ask for a past moment, and sends it to the watchers.
func (l *Live) show(look *watch.Look) {
	data, err := json.Marshal(l.document(look))
	if err != nil { // JSON cannot hold some number, for example NaN: a bug in whatever measured it
		l.opt.Log.Error("live: the document for the live page cannot be written", zap.Error(err))
		return
	}
	var b bytes.Buffer
	l.zip.Reset(&b)
	if _, err := l.zip.Write(data); err == nil && l.zip.Close() == nil { // writing to memory cannot fail
		l.watch.With(func(d *detect.Watch) { d.Keep(b.Bytes(), look.Facts.At.Truncate(time.Millisecond)) })
	}
	if !l.watched() {
		return
	}
	n := news{document: data}
	if look.Bin {
		n.strip, _ = json.Marshal(l.strip()) // whole numbers and names
	}
	l.send(n)
}

// document makes the Document of a look, with the last decisions.
func (l *Live) document(look *watch.Look) Document {
	d := documentOf(look, l.opt.Version)
	if l.opt.Decisions != nil {
		d.Decisions = l.opt.Decisions(look.Facts.At)
	}
	return d
}

func (l *Live) strip() (s Strip) {
	l.watch.With(func(d *detect.Watch) { s = stripOf(d.Bins()) })
	return s
}

func (l *Live) history() (h History) {
	l.watch.With(func(d *detect.Watch) { h = historyOf(d.Seconds()) })
	return h
}

// Document returns the present state of the proxy.
func (l *Live) Document(ctx context.Context) Document {
	look := l.watch.Now(ctx)
	return l.document(&look)
}

// watched says whether a client reads the stream.
func (l *Live) watched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watchers) > 0
}

// send gives the news of the last second to every watcher. It drops a watcher that has not read the news before them yet, because this
// watcher is too slow to show the present state.
func (l *Live) send(n news) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w := range l.watchers {
		select {
		case w.news <- n:
		default:
			close(w.news)
			delete(l.watchers, w)
		}
	}
}

// join adds a watcher. If there are mostWatchers, the oldest one is dropped: its connection may belong to a client that does not read any
// more, and buffers on the way take documents for a long time.
func (l *Live) join(now time.Time) (w *watcher, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.watchers) >= mostWatchers {
		var oldest *watcher
		for other := range l.watchers {
			if oldest == nil || other.since.Before(oldest.since) {
				oldest = other
			}
		}
		if now.Sub(oldest.since) < watchAtLeast {
			return nil, false
		}
		close(oldest.news)
		delete(l.watchers, oldest)
	}
	w = &watcher{since: now, news: make(chan news, 1)}
	l.watchers[w] = struct{}{}
	return w, true
}

// unwatch removes a watcher that has left.
func (l *Live) unwatch(w *watcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.watchers, w)
}

// ServeHTTP answers GET /live: with one Document for ?once, with a page of text for ?text, and otherwise with a stream.
func (l *Live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	if r.URL.Query().Has("text") {
		l.text(w, r)
		return
	}
	if at := r.URL.Query().Get("at"); at != "" {
		l.servePast(w, r, at)
		return
	}
	if r.URL.Query().Has("once") {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(l.Document(r.Context())) // the operator left
		return
	}
	watcher, ok := l.join(time.Now())
	if !ok {
		refuse(w, openai.NewError(http.StatusServiceUnavailable, "too_many_watchers",
			"too many callers watch already; close another page, come back in a minute, or use /live?once"))
		return
	}
	defer l.unwatch(watcher)
	s := newSender(w, r)
	defer s.close()
	if s.event("history", l.history()) != nil || s.event("document", l.Document(r.Context())) != nil || s.event("strip", l.strip()) != nil {
		return // the watcher left
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case n, ok := <-watcher.news:
			if !ok || s.write("document", n.document) != nil || n.strip != nil && s.write("strip", n.strip) != nil {
				return
			}
		}
	}
}

// text answers with a Document as a page of text: the present one, or that of a past moment.
func (l *Live) text(w http.ResponseWriter, r *http.Request) {
	query, width := r.URL.Query(), usualWidth
	if query.Has("width") {
		var err error
		if width, err = strconv.Atoi(query.Get("width")); err != nil || width < leastWidth || width > mostWidth {
			refuse(w, openai.NewError(http.StatusBadRequest, "bad_query",
				fmt.Sprintf("width is a number of columns from %d to %d", leastWidth, mostWidth)))
			return
		}
	}
	var d Document
	if at := query.Get("at"); at == "" {
		d = l.Document(r.Context())
	} else if data, refusal := l.kept(at); refusal != nil {
		refuse(w, refusal)
		return
	} else {
		var document bytes.Buffer
		unzip(data, &document)
		_ = json.Unmarshal(document.Bytes(), &d) // we wrote it, so it can be read
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, textOf(&d, width)) // the operator left
}

// kept returns the compressed document of a past moment, which at gives in Unix ms.
func (l *Live) kept(at string) (data []byte, refusal *openai.Error) {
	var ok bool
	ms, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, openai.NewError(http.StatusBadRequest, "bad_query", "at is a moment in Unix ms, as at_ms of a document")
	}
	l.watch.With(func(d *detect.Watch) { data, ok = d.Page(time.UnixMilli(ms)) })
	if !ok {
		return nil, openai.NewError(http.StatusNotFound, "not_found", "no document of that moment is kept; those of the last 15 minutes are")
	}
	return data, nil
}

// refuse answers with an error.
func refuse(w http.ResponseWriter, e *openai.Error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON()) // the operator left
}

// servePast answers with the Document of a past moment, which at gives in Unix ms.
func (l *Live) servePast(w http.ResponseWriter, r *http.Request, at string) {
	data, refusal := l.kept(at)
	if refusal != nil {
		refuse(w, refusal)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(data) // the operator left
		return
	}
	unzip(data, w)
}

// unzip writes the clear text of a compressed document.
func unzip(data []byte, to io.Writer) {
	if text, err := gzip.NewReader(bytes.NewReader(data)); err == nil {
		_, _ = io.Copy(to, text) //nolint:gosec // it is our own, and the operator may have left
	}
}

// sender writes events to one watcher. Documents differ little from one another, so a compressed stream of whole ones is as small as a
// stream of changes.
type sender struct {
	to   io.Writer
	zip  *gzip.Writer // nil: in clear text
	conn *http.ResponseController
}

// newSender begins a stream of events, compressed if the client takes gzip.
func newSender(w http.ResponseWriter, r *http.Request) *sender {
	s := &sender{to: w, conn: http.NewResponseController(w)}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("X-Accel-Buffering", "no") // nginx must not buffer events
	h.Add("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		s.zip = gzip.NewWriter(w)
		s.to = s.zip
	}
	return s
}

// event writes one event with a value as JSON.
func (s *sender) event(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return s.write(name, data)
}

// write writes one event with data, and flushes it. The watcher has writeTimeout to take it.
func (s *sender) write(name string, data []byte) error {
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
