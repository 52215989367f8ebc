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

	"evenkeel/gateway"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/incident"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/timeline"
)

// Options of a Live.
type Options struct {
	Version string // of the program
	Log     *zap.Logger
}

// Live tells watchers how a proxy is. While nobody watches it costs a sample a
// second, and a document every five: incidents begin and end then, too.
type Live struct {
	subject Subject
	log     *zap.Logger
	history history
	past    past
	turns   int // samples so far; Run's own

	mu       sync.Mutex
	watchers map[*watcher]struct{}

	judging  sync.Mutex // guards what is made of documents
	book     incident.Book
	paces    paces
	timeline timeline.Timeline
}

// Subject is what is shown: a proxy, or what a test makes up.
type Subject interface {
	Sample(context.Context) (s gateway.Sample, ok bool)
	Document(context.Context) Document
}

// watcher is somebody who reads the stream.
type watcher struct {
	since time.Time
	news  chan news // room for one; closed on one that is too slow, or that gives way
}

// news is what a second brings.
type news struct {
	document, strip []byte // strip is nil but every five seconds
}

const (
	mostWatchers = 16
	writeTimeout = 5 * time.Second // of one event to one watcher
	watchAtLeast = time.Minute     // before a watcher gives way to another one
)

// New prepares the view of a proxy; Run has to run beside it.
func New(g *gateway.Gateway, opt Options) *Live {
	return Of(&proxy{g, opt.Version, hostname()}, opt.Log)
}

// Of prepares the view of a subject.
func Of(s Subject, log *zap.Logger) *Live {
	return &Live{subject: s, log: log, watchers: map[*watcher]struct{}{}}
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
	s, ok := l.subject.Sample(ctx)
	if !ok {
		return
	}
	l.history.add(&s, time.Now())
	turn := l.turns%judgeEvery == 0
	l.turns++
	watched := l.watched()
	if !watched && !turn {
		return
	}
	d := l.subject.Document(ctx)
	if ctx.Err() != nil {
		return
	}
	l.note(&d, &s, time.Now())
	l.judge(&d, true)
	data, err := json.Marshal(d)
	if err != nil { // a number that JSON has not: a bug in whoever told it
		l.log.Error("live: the document for the live page cannot be written", zap.Error(err))
		return
	}
	l.past.keep(d.AtMs, data)
	if !watched {
		return
	}
	n := news{document: data}
	if turn {
		n.strip, _ = json.Marshal(l.strip()) // whole numbers and names
	}
	l.send(n)
}

// Add adds a second of the past to the history and to the timeline, so that a test need not wait for them.
func (l *Live) Add(d *Document, s *gateway.Sample, at time.Time) {
	l.history.add(s, at)
	l.note(d, s, at)
}

// note adds a second to the timeline.
func (l *Live) note(d *Document, s *gateway.Sample, at time.Time) {
	now := timeline.Now{
		Ended: s.Ended, Failures: s.Failures, Whys: s.Whys, Engines: map[timeline.Engine]string{},
		Drains: d.Proxy.Draining, Policy: d.Proxy.Policy, Reload: time.UnixMilli(d.Proxy.ReloadedMs), Started: at.Add(-seconds(d.Proxy.UptimeS)),
	}
	for i := range d.Engines {
		e := &d.Engines[i]
		at := timeline.Engine{Role: e.Role, Name: e.ID}
		now.Engines[at] = e.State
		if e.State == "up" && e.Draining {
			now.Engines[at] = "drain"
		}
	}
	for i := range d.Models {
		m := &d.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			now.Lines = append(now.Lines, timeline.Line{Model: m.Name, Group: g.Name, Tokens: g.MostTokens})
			ranksThatDrain(g, m.role(), now.Engines)
		}
	}
	l.judging.Lock()
	defer l.judging.Unlock()
	l.timeline.Add(now, at)
}

// ranksThatDrain adds ranks that drain without their engine.
func ranksThatDrain(g *Group, role string, states map[timeline.Engine]string) {
	for i := range g.Ranks {
		r := &g.Ranks[i]
		if engine, _, several := strings.Cut(r.Name, "/"); several && states[timeline.Engine{Role: role, Name: engine}] != "drain" {
			at := timeline.Engine{Role: role, Name: r.Name}
			states[at] = "up"
			if r.State == RankDraining {
				states[at] = "drain"
			}
		}
	}
}

// role is that of the engines behind a board.
func (m *Model) role() string {
	if m.Aggregated {
		return fleet.Aggregated
	}
	return fleet.Decode
}

func (l *Live) strip() Strip {
	l.judging.Lock()
	defer l.judging.Unlock()
	return l.timeline.Strip()
}

// judge says what is wrong, and what was. Only Run has the book observe: a document that
// somebody else asked for may be cut short when they leave.
func (l *Live) judge(d *Document, observe bool) {
	l.history.rate(&d.Traffic)
	l.judging.Lock()
	defer l.judging.Unlock()
	d.Failures = l.timeline.Failures()
	if observe {
		l.paces.add(d, time.Now())
	}
	l.paces.tell(d)
	if observe {
		l.book.Observe(time.Now(), findingsOf(d, l.timeline.LastMinute()))
	}
	d.Incidents = l.book.Incidents()
}

// Document is how the proxy is now.
func (l *Live) Document(ctx context.Context) Document {
	d := l.subject.Document(ctx)
	if ctx.Err() == nil {
		l.judge(&d, false)
	}
	return d
}

func (l *Live) watched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watchers) > 0
}

// send gives everybody the document. Who has not read the last one yet is too
// slow to see what is now, and is let go.
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

// join admits a watcher. If there are mostWatchers already, the oldest one gives way, because the buffers of its connection
// may take documents for a long time even if no client reads them.
func (l *Live) join(now time.Time) (w *watcher, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.watchers) >= mostWatchers {
		var oldest *watcher
		for o := range l.watchers {
			if oldest == nil || o.since.Before(oldest.since) {
				oldest = o
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

func (l *Live) unwatch(w *watcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.watchers, w)
}

// ServeHTTP answers GET /live: with one document for ?once, with one as a page of text for ?text, and else with a
// stream of them.
func (l *Live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	if r.URL.Query().Has("text") {
		l.text(w, r)
		return
	}
	if at := r.URL.Query().Get("at"); at != "" {
		l.then(w, r, at)
		return
	}
	if r.URL.Query().Has("once") {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(l.Document(r.Context())) // the operator left
		return
	}
	watcher, ok := l.join(time.Now())
	if !ok {
		refuse(w, openai.NewError(http.StatusServiceUnavailable, "too_many_watchers", "too many callers watch already; close another page, come back in a minute, or use /live?once"))
		return
	}
	defer l.unwatch(watcher)
	s := newSender(w, r)
	defer s.close()
	if s.event("history", l.history.copy()) != nil || s.event("document", l.Document(r.Context())) != nil || s.event("strip", l.strip()) != nil {
		return // the watcher left
	}
	for {
		select {
		case <-r.Context().Done():
			return
		case n, ok := <-watcher.news:
			if !ok || s.raw("document", n.document) != nil || n.strip != nil && s.raw("strip", n.strip) != nil {
				return
			}
		}
	}
}

// text answers with one document as a page of text: with the present one, or with that of a moment.
func (l *Live) text(w http.ResponseWriter, r *http.Request) {
	query, width := r.URL.Query(), usualWidth
	if query.Has("width") {
		var err error
		if width, err = strconv.Atoi(query.Get("width")); err != nil || width < leastWidth || width > mostWidth {
			refuse(w, openai.NewError(http.StatusBadRequest, "bad_query", fmt.Sprintf("width is a number of columns from %d to %d", leastWidth, mostWidth)))
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
		_ = unzip(data, &document)               // memory takes all
		_ = json.Unmarshal(document.Bytes(), &d) // it is our own
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, textOf(&d, width)) // the operator left
}

// kept is the document of a moment, compressed.
func (l *Live) kept(at string) (data []byte, refusal *openai.Error) {
	ms, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, openai.NewError(http.StatusBadRequest, "bad_query", "at is a moment in Unix ms, as at_ms of a document")
	}
	data, ok := l.past.find(ms)
	if !ok {
		return nil, openai.NewError(http.StatusNotFound, "not_found", "no document of that moment is kept; those of the last 15 minutes are")
	}
	return data, nil
}

func refuse(w http.ResponseWriter, e *openai.Error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON()) // the operator left
}

// then answers with the document of a moment.
func (l *Live) then(w http.ResponseWriter, r *http.Request, at string) {
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
	_ = unzip(data, w) // likewise
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
