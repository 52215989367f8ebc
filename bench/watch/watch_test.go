package main

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"evenkeel/bench/refengine"
	"evenkeel/bench/world"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSlowStreamsFitIntoTheFiles(t *testing.T) {
	few := options{busy: 10, idle: 20}
	n, err := slowStreams(few)
	require.NoError(t, err)
	require.Equal(t, few.idle, n, "all of them are streams where there is room")
	_, err = slowStreams(options{busy: 1 << 20, idle: 1})
	require.ErrorContains(t, err, "raise ulimit -n")
	all := options{busy: 0, idle: (fileLimit() - 1000) * 3 / 4}
	n, err = slowStreams(all)
	require.NoError(t, err)
	require.Less(t, n, all.idle, "the others are connections")
	require.LessOrEqual(t, all.idle+n, fileLimit()-1000)
}

func TestIdleClientsStayUntilTheirServerGoes(t *testing.T) {
	e, err := refengine.Start(refengine.Config{Role: refengine.Both, Model: idleModel, PrefillBase: time.Nanosecond, C0: time.Millisecond})
	require.NoError(t, err)
	defer e.Close()
	c := idlers{address: strings.TrimPrefix(e.URLs()[0], "http://")}
	c.open(3, 2)
	require.Equal(t, int64(5), c.count(5))
	e.Kill()
	require.Eventually(t, func() bool { return c.there.Load() == 0 }, 30*time.Second, time.Millisecond)
}

func TestTheCollectorCountsSpans(t *testing.T) {
	s, err := openSink()
	require.NoError(t, err)
	defer s.close()
	defer http.DefaultClient.CloseIdleConnections()
	text, err := proto.Marshal(&collector.ExportTraceServiceRequest{ResourceSpans: []*trace.ResourceSpans{{ScopeSpans: []*trace.ScopeSpans{{Spans: make([]*trace.Span, 3)}, {Spans: make([]*trace.Span, 2)}}}}})
	require.NoError(t, err)
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write(text)
	require.NoError(t, z.Close())
	post := func(body []byte, encoding string) int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/traces", bytes.NewReader(body))
		require.NoError(t, err)
		if encoding != "" {
			req.Header.Set("Content-Encoding", encoding)
		}
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	require.Equal(t, http.StatusOK, post(text, ""))
	require.Equal(t, http.StatusOK, post(zipped.Bytes(), "gzip"))
	require.Equal(t, http.StatusBadRequest, post([]byte("no spans"), ""))
	require.Equal(t, http.StatusBadRequest, post(text, "gzip"))
	require.Equal(t, int64(10), s.spans.Load())
}

func TestRatiosAreToTheMeanOfThePlainProxies(t *testing.T) {
	all := make([][]sample, len(ways))
	for i := range all {
		all[i] = []sample{{Wave: world.Wave{Chunk: time.Duration(10+i) * time.Microsecond, RSS: 300 << 20}, live: int64(100+i) << 20}}
	}
	var b bytes.Buffer
	require.NoError(t, report(&b, all))
	lines := strings.Split(b.String(), "\n")
	require.Equal(t, []string{"off", "10.0", "0.95", "100", "1.00", "300"}, strings.Fields(lines[1]))
	require.Equal(t, []string{"receipts", "14.0", "1.33", "104", "1.03", "300"}, strings.Fields(lines[5]))
}
