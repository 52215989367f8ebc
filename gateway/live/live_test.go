package live

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/gateway/detect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve shows a fake without its clock: a test has seconds pass.
func serve(t *testing.T, f Fake) (l *Live, second func(), url string) {
	w := f.Watch()
	l = f.Live(w)
	server := httptest.NewServer(l)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return l, func() { f.Pass(time.Second); w.CheckOnce(t.Context()) }, server.URL
}

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

var (
	refused = detect.Outcome{Name: "queue_full", Status: 429}
	broken  = detect.Outcome{Name: "upstream_broken", Status: 502}
)

// reader reads a stream of events.
type reader struct {
	*bufio.Reader
	body io.Closer
}

func stream(t testing.TB, url, encoding string) *reader {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	req.Header.Set("Accept-Encoding", encoding)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	require.Equal(t, http.StatusOK, resp.StatusCode)
	body := io.Reader(resp.Body)
	if resp.Header.Get("Content-Encoding") == "gzip" {
		body, err = gzip.NewReader(body)
		require.NoError(t, err)
	}
	return &reader{bufio.NewReaderSize(body, 1<<20), resp.Body}
}

// next reads an event into v and returns its name.
func (e *reader) next(t testing.TB, v any) (name string) {
	for {
		line, err := e.ReadString('\n')
		require.NoError(t, err)
		if rest, ok := strings.CutPrefix(line, "event: "); ok {
			name = strings.TrimSpace(rest)
		}
		if rest, ok := strings.CutPrefix(line, "data: "); ok {
			require.NoError(t, json.Unmarshal([]byte(rest), v))
			return name
		}
	}
}

func TestAWatcherGetsTheHistoryAndThenEveryDocument(t *testing.T) {
	for _, encoding := range []string{"identity", "gzip"} {
		f := NewFake(144)
		l, second, url := serve(t, f)
		for range 5 {
			second()
		}
		require.Equal(t, 1, f.Asked(), "nobody watches: one every five seconds is judged")
		read := stream(t, url, encoding)
		var h History
		require.Equal(t, "history", read.next(t, &h))
		require.Len(t, h.AtMs, 5)
		require.Len(t, h.Ranks, 144)
		var d Document
		require.Equal(t, "document", read.next(t, &d))
		require.Len(t, d.Models[0].Groups[0].Ranks, 144)
		var strip Strip
		require.Equal(t, "strip", read.next(t, &strip))
		require.NotEmpty(t, strip.AtMs)
		for i := range 6 {
			before := d.AtMs
			f.Change(func(f *detect.Facts) { f.At = time.UnixMilli(before + 1000) })
			second()
			require.Equal(t, "document", read.next(t, &d))
			if i%5 == 0 {
				require.Equal(t, "strip", read.next(t, &strip))
			}
			require.Equal(t, before+1000, d.AtMs)
		}
		require.NoError(t, read.body.Close())
		require.Eventually(t, func() bool { return !l.hasWatchers() }, time.Minute, time.Millisecond)
		made := f.Asked()
		for range 5 {
			second()
		}
		require.Equal(t, made+1, f.Asked(), "nobody watches any more")
	}
}

func TestOnceIsOneDocumentWithoutNulls(t *testing.T) {
	f := NewFake(2)
	_, _, url := serve(t, f)
	resp, err := http.Get(url + "?once")
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var d Document
	require.NoError(t, json.Unmarshal(body, &d))
	require.Equal(t, Form, d.Form)
	require.NotContains(t, string(body), "null")
}

func TestAWatcherThatReadsNothingIsLetGo(t *testing.T) {
	l, second, _ := serve(t, NewFake(1))
	slow, ok := l.addWatcher(time.Now())
	require.True(t, ok)
	fast, ok := l.addWatcher(time.Now())
	require.True(t, ok)
	second()
	<-fast.news
	second()
	<-slow.news
	_, open := <-slow.news
	require.False(t, open, "it had not read the first when the second came")
	<-fast.news
	require.True(t, l.hasWatchers())
	l.removeWatcher(fast)
	l.removeWatcher(slow)
}

// Watchers that never read look like others until their connections' buffers are full.
func TestTheOldestWatcherGivesWay(t *testing.T) {
	l, _, url := serve(t, NewFake(1))
	var all []*watcher
	for i := range maxWatchers {
		w, ok := l.addWatcher(time.Now().Add(-minWatchTime - time.Duration(maxWatchers-i)*time.Second))
		require.True(t, ok)
		all = append(all, w)
	}
	read := stream(t, url, "")
	var h History
	require.Equal(t, "history", read.next(t, &h))
	_, open := <-all[0].news
	require.False(t, open, "the oldest one is let go")
	for _, w := range all[1:] {
		require.Contains(t, l.watchers, w)
		l.removeWatcher(w)
	}
	require.NoError(t, read.body.Close())
	require.Eventually(t, func() bool { return !l.hasWatchers() }, time.Minute, time.Millisecond)
}

func TestThereAreSoManyWatchersAndNoMore(t *testing.T) {
	l, _, url := serve(t, NewFake(1))
	for range maxWatchers {
		_, ok := l.addWatcher(time.Now())
		require.True(t, ok)
	}
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	var said struct{ Error struct{ Code string } }
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&said))
	require.Equal(t, "too_many_watchers", said.Error.Code)
}

func TestDocumentsOf144RanksStaySmall(t *testing.T) {
	f := NewFake(144)
	_, second, url := serve(t, f)
	for range 300 {
		second()
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	counted := &counter{Reader: resp.Body}
	zip, err := gzip.NewReader(counted)
	require.NoError(t, err)
	read := &reader{bufio.NewReaderSize(zip, 1<<20), resp.Body}
	var event json.RawMessage
	read.next(t, &event)
	t.Logf("history: %d bytes, %d on the wire", len(event), counted.n)
	read.next(t, &event)
	read.next(t, &event)
	before := counted.n
	const seconds = 5
	for range seconds {
		second()
		if name := read.next(t, &event); name == "strip" {
			read.next(t, &event)
		}
	}
	t.Logf("document: %d bytes, %d a second on the wire", len(event), (counted.n-before)/seconds)
	require.Less(t, (counted.n-before)/seconds, 16<<10)
}

type counter struct {
	io.Reader
	n int
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += n
	return n, err
}

// What was to be seen at a moment of the last minutes can be seen again.
func TestTheDocumentOfAMoment(t *testing.T) {
	f := NewFake(3)
	_, second, url := serve(t, f)
	for i := range 7 { // at 0 and 5 one is made
		f.Change(func(f *detect.Facts) { f.At = time.UnixMilli(int64(1000 * (i + 1))) })
		second()
	}
	for query, want := range map[string]int64{"5999": 1000, "6000": 6000, "99999": 6000} {
		for _, encoding := range []string{"identity", "gzip"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"?at="+query, nil)
			require.NoError(t, err)
			req.Header.Set("Accept-Encoding", encoding)
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			body := io.Reader(resp.Body)
			if encoding == "gzip" {
				require.Equal(t, "gzip", resp.Header.Get("Content-Encoding"))
				body, err = gzip.NewReader(body)
				require.NoError(t, err)
			}
			var d Document
			require.NoError(t, json.NewDecoder(body).Decode(&d))
			require.NoError(t, resp.Body.Close())
			require.Equal(t, want, d.AtMs, query)
		}
	}
	for query, status := range map[string]int{"999": http.StatusNotFound, "noon": http.StatusBadRequest} {
		resp, err := http.Get(url + "?at=" + query)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, status, resp.StatusCode, query)
	}
}

// Incidents and failures are judged whether anybody watches or not.
func TestIncidentsAreNotedThoughNobodyWatches(t *testing.T) {
	f := NewFake(16)
	l, second, _ := serve(t, f)
	turn := func(seconds int) Document {
		for range seconds {
			second()
		}
		return l.Document(t.Context())
	}
	require.Empty(t, turn(1).Incidents)
	f.Change(func(d *detect.Facts) { d.Engines[12].State, d.Engines[12].Why = "down", "connection refused" })
	f.Fail(map[detect.Outcome]uint64{{Name: "upstream_broken", Status: 502}: 7}, nil, 0)
	turn(5)
	f.Change(nil)
	d := turn(10)
	require.Len(t, d.Incidents, 1)
	require.Equal(t, "Decode engine 10.0.3.10:8000 is down: connection refused", d.Incidents[0].What)
	require.Positive(t, d.Incidents[0].UntilMs)
	require.Equal(t, []detect.Failed{{Outcome: "upstream_broken", Status: 502, LastMinute: 7, Last5Min: 7, LastHour: 7, SinceStart: 7}},
		d.Failures)
	var kinds []string
	for _, e := range l.strip().Events {
		kinds = append(kinds, e.Kind)
	}
	require.Equal(t, []string{"down", "up"}, kinds)
}

// A reader that leaves gets a document without models, and nothing follows from it.
func TestAReaderThatLeavesEndsNoIncident(t *testing.T) {
	f := NewFake(16)
	l, second, _ := serve(t, f)
	f.Change(func(d *detect.Facts) { d.Engines[12].State = "down" })
	second()
	f.Change(func(d *detect.Facts) { d.Models, d.Engines = nil, nil })
	gone, leave := context.WithCancel(t.Context())
	leave()
	l.Document(gone)
	d := l.Document(t.Context())
	require.Len(t, d.Incidents, 1)
	require.Zero(t, d.Incidents[0].UntilMs, "only Run says that it is over")
}
