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

// Options of a Live.
type Options struct {
	Version   string                         // version of the program
	Decisions func(now time.Time) []Decision // returns the last decisions, the latest first; nil: there are none
	Log       *zap.Logger
}

// Live serves GET /live. It shows the results of a Watch to its readers, who are called watchers
// here.
type Live struct {
	watch      *watch.Watch
	opt        Options
	compressor *gzip.Writer // compresses stored documents; reused, because a gzip.Writer takes much memory

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// watcher is one reader of the stream.
type watcher struct {
	since time.Time
	news  chan news // has room for the news of one second; closed if the watcher is too slow, or if another takes its place
}

// news has the events of one second.
type news struct {
	document, strip []byte // strip is nil except every five seconds
}

const (
	maxWatchers  = 16
	writeTimeout = 5 * time.Second // most time that the write of one event to one watcher may take
	minWatchTime = time.Minute     // a watcher that has read for less is not replaced by another
)

// New returns a Live that shows the results of w. Call it before w runs.
func New(w *watch.Watch, opt Options) *Live {
	l := &Live{watch: w, opt: opt, watchers: map[*watcher]struct{}{}}
	l.compressor, _ = gzip.NewWriterLevel(nil, gzip.BestSpeed) // fails only for an invalid level
	w.OnSnapshot(l.hasWatchers, l.storeAndSend)
	return l
}

// storeAndSend stores the document of a snapshot, for requests with at=, and sends it to all
// watchers. If the snapshot ends a bin of five seconds, it also sends the new strip.
func (l *Live) storeAndSend(snapshot *watch.Snapshot) {
	data, err := json.Marshal(l.document(snapshot))
	if err != nil { // a bug: some number is NaN or infinite, which JSON cannot express
		l.opt.Log.Error("live: the document for the live page cannot be written", zap.Error(err))
		return
	}
	var b bytes.Buffer
	l.compressor.Reset(&b)
	if _, err := l.compressor.Write(data); err == nil && l.compressor.Close() == nil { // a write to memory does not fail
		l.watch.With(func(d *detect.Watch) { d.KeepPage(b.Bytes(), snapshot.Facts.At.Truncate(time.Millisecond)) })
	}
	if !l.hasWatchers() {
		return
	}
	n := news{document: data}
	if snapshot.EndsBin {
		n.strip, _ = json.Marshal(l.strip()) // has only whole numbers and names, so it does not fail
	}
	l.send(n)
}

// document makes the document of a snapshot, with the last decisions.
func (l *Live) document(snapshot *watch.Snapshot) Document {
	d := documentOf(snapshot, l.opt.Version)
	if l.opt.Decisions != nil {
		d.Decisions = l.opt.Decisions(snapshot.Facts.At)
	}
	return d
}

// strip returns the strip of the last quarter of an hour.
func (l *Live) strip() (s Strip) {
	l.watch.With(func(d *detect.Watch) { s = stripOf(d.Bins()) })
	return s
}

// history returns the samples of the last minutes.
func (l *Live) history() (h History) {
	l.watch.With(func(d *detect.Watch) { h = historyOf(d.Seconds()) })
	return h
}

// Document returns the document of the present state, which it examines now.
func (l *Live) Document(ctx context.Context) Document {
	snapshot := l.watch.Now(ctx)
	return l.document(&snapshot)
}

// hasWatchers says whether the stream has any reader.
func (l *Live) hasWatchers() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watchers) > 0
}

// send gives the news of the last second to every watcher. It drops a watcher that has not read the
// news before them yet, because this watcher is too slow to show the present state.
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

// addWatcher adds a watcher. If there are maxWatchers already, the stream of the oldest one is
// ended, because its client may be gone: the buffers of a connection take documents for a long time
// even if no client reads them. ok is false if even the oldest watcher has read for less than
// minWatchTime.
func (l *Live) addWatcher(now time.Time) (w *watcher, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.watchers) >= maxWatchers {
		var oldest *watcher
		for other := range l.watchers {
			if oldest == nil || other.since.Before(oldest.since) {
				oldest = other
			}
		}
		if now.Sub(oldest.since) < minWatchTime {
			return nil, false
		}
		close(oldest.news)
		delete(l.watchers, oldest)
	}
	w = &watcher{since: now, news: make(chan news, 1)}
	l.watchers[w] = struct{}{}
	return w, true
}

// removeWatcher removes a watcher whose client has left.
func (l *Live) removeWatcher(w *watcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.watchers, w)
}

// ServeHTTP answers GET /live: with a page of text for ?text, with a stored document for ?at=, with
// the present document for ?once, and otherwise with a stream of events.
func (l *Live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	if r.URL.Query().Has("text") {
		l.serveText(w, r)
		return
	}
	if at := r.URL.Query().Get("at"); at != "" {
		l.servePast(w, r, at)
		return
	}
	if r.URL.Query().Has("once") {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(l.Document(r.Context())) // an error means that the operator has left
		return
	}
	l.serveStream(w, r)
}

// serveStream answers first with the history, the document and the strip, and then with the news of
// each second, until the watcher leaves or is dropped. The strip has what happened in the last
// quarter of an hour, in bins of five seconds. It is sent again when a bin ends.
func (l *Live) serveStream(w http.ResponseWriter, r *http.Request) {
	watcher, ok := l.addWatcher(time.Now())
	if !ok {
		refuse(w, openai.NewError(http.StatusServiceUnavailable, "too_many_watchers",
			"too many callers watch already; close another page, come back in a minute, or use /live?once"))
		return
	}
	defer l.removeWatcher(watcher)
	s := newSender(w, r)
	defer s.close()
	if s.event("history", l.history()) != nil || s.event("document", l.Document(r.Context())) != nil || s.event("strip", l.strip()) != nil {
		return // the watcher has left
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case n, ok := <-watcher.news:
			if !ok { // the watcher was dropped
				return
			}
			hasStrip := n.strip != nil                                                                  // when a bin has ended
			if s.write("document", n.document) != nil || hasStrip && s.write("strip", n.strip) != nil { // the watcher has left
				return
			}
		}
	}
}

// serveText answers with a page of text: of the present document, or of the document stored at the
// time at.
func (l *Live) serveText(w http.ResponseWriter, r *http.Request) {
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
	} else if data, refusal := l.storedDocument(at); refusal != nil {
		refuse(w, refusal)
		return
	} else {
		var document bytes.Buffer
		unzip(data, &document)
		_ = json.Unmarshal(document.Bytes(), &d) // storeAndSend has written the document, so it is valid JSON
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, textOf(&d, width)) // an error means that the operator has left
}

// storedDocument returns the document that was stored at a time in Unix ms, compressed by gzip.
func (l *Live) storedDocument(at string) (data []byte, refusal *openai.Error) {
	var ok bool
	ms, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, openai.NewError(http.StatusBadRequest, "bad_query", "at is a moment in Unix ms, as at_ms of a document")
	}
	l.watch.With(func(d *detect.Watch) { data, ok = d.PageAt(time.UnixMilli(ms)) })
	if !ok {
		return nil, openai.NewError(http.StatusNotFound, "not_found", "no document of that moment is kept; those of the last 15 minutes are")
	}
	return data, nil
}

// refuse answers with an error.
func refuse(w http.ResponseWriter, e *openai.Error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON()) // an error means that the operator has left
}

// servePast answers with the document that was stored at the time at, which is in Unix ms.
func (l *Live) servePast(w http.ResponseWriter, r *http.Request, at string) {
	data, refusal := l.storedDocument(at)
	if refusal != nil {
		refuse(w, refusal)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(data) // an error means that the operator has left
		return
	}
	unzip(data, w)
}

// unzip writes a stored document uncompressed.
func unzip(data []byte, to io.Writer) {
	if text, err := gzip.NewReader(bytes.NewReader(data)); err == nil {
		_, _ = io.Copy(to, text) //nolint:gosec // storeAndSend wrote the data, so it is no bomb; an error means that the operator left
	}
}

// sender writes events to one watcher. Successive documents differ little, so with compression
// a stream of whole documents is about as small as a stream of changes.
type sender struct {
	to         io.Writer
	compressor *gzip.Writer // nil: the stream is not compressed
	conn       *http.ResponseController
}

// newSender begins a stream of events, compressed if the client takes gzip.
func newSender(w http.ResponseWriter, r *http.Request) *sender {
	s := &sender{to: w, conn: http.NewResponseController(w)}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("X-Accel-Buffering", "no") // an nginx in front must not buffer events
	h.Add("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		s.compressor = gzip.NewWriter(w)
		s.to = s.compressor
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
	if s.compressor != nil {
		if err := s.compressor.Flush(); err != nil {
			return err
		}
	}
	return s.conn.Flush()
}

// close ends the compressed stream, if the stream is compressed.
func (s *sender) close() {
	if s.compressor != nil {
		_ = s.compressor.Close() // the watcher has left
	}
}
