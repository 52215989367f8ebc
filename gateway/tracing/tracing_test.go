package tracing

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"evenkeel/gateway/tracing/tracetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counts are how many spans came to which end.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) add(outcome string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[outcome] += n
}

func (c *counts) of(outcome string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[outcome]
}

func start(t *testing.T, url string, change func(*Config)) (*Tracer, *counts) {
	t.Helper()
	n := &counts{n: map[string]int{}}
	cfg := Config{Endpoint: url, Sample: 1, Timeout: 5 * time.Second, Version: "v1", Log: zap.NewNop(), Count: n.add}
	if change != nil {
		change(&cfg)
	}
	tr, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = tr.Shutdown(ctx)
	})
	return tr, n
}

func headers(pairs ...string) func(string) string {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Set(pairs[i], pairs[i+1])
	}
	return h.Get
}

func carriedBy(s *Span) map[string]string {
	m := map[string]string{}
	s.EachHeader(func(k, v string) { m[k] = v })
	return m
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"

func TestWhoDecidesWhatIsSampled(t *testing.T) {
	c := tracetest.Start(t)
	for _, row := range []struct {
		name    string
		sample  float64
		trusted bool
		parent  string
		want    bool
	}{
		{"nobody decided, and all are wanted", 1, false, "", true},
		{"nobody decided, and none are wanted", 0, false, "", false},
		{"a trusted caller wants it", 0, true, parent + "01", true},
		{"a trusted caller does not want it", 1, true, parent + "00", false},
		{"what anybody wants is not enough", 0, false, parent + "01", false},
		{"what anybody does not want is left", 1, false, parent + "00", false},
		{"anybody's are sampled like those of nobody", 1, false, parent + "01", true},
		{"a broken context is none", 1, true, "00-xyz", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			tr, _ := start(t, c.URL, func(cfg *Config) { cfg.Sample = row.sample })
			s := tr.Start(headers("traceparent", row.parent, "tracestate", "a=1"), row.trusted, "chat", time.Now())
			require.Equal(t, row.want, s.Recording())
			got := carriedBy(s)
			require.Equal(t, map[bool]string{true: "01", false: "00"}[row.want], got["traceparent"][53:], "what runs below knows")
			if strings.HasPrefix(row.parent, parent) {
				require.Equal(t, parent[3:35], s.TraceID(), "the trace goes on")
				require.Equal(t, "a=1", got["tracestate"])
				require.NotEqual(t, parent[36:52], got["traceparent"][36:52], "below us, not below our caller")
			}
			child := s.Child("step", false)
			require.Equal(t, row.want, child.Recording())
			child.End()
			s.End()
		})
	}
}

func TestBaggageIsCarriedForTrustedCallersOnly(t *testing.T) {
	c := tracetest.Start(t)
	tr, _ := start(t, c.URL, nil)
	h := headers("baggage", "team=a")
	require.Equal(t, "team=a", carriedBy(tr.Start(h, true, "chat", time.Now()))["baggage"])
	require.Empty(t, carriedBy(tr.Start(h, false, "chat", time.Now()))["baggage"])
	require.Empty(t, carriedBy(tr.Start(headers("baggage", "a="+strings.Repeat("x", maxBaggage)), true, "chat", time.Now()))["baggage"],
		"too much of it")
}

func TestShutdownExportsWhatHasEnded(t *testing.T) {
	c := tracetest.Start(t)
	tr, n := start(t, c.URL, func(cfg *Config) {
		cfg.Service, cfg.Resource, cfg.Headers = "ek-test", map[string]string{"deployment.environment.name": "lab"},
			map[string]string{"X-Token": "secret"}
	})
	for range 2*batchSpans + 3 {
		tr.Start(headers(), false, "chat", time.Now()).End()
	}
	require.NoError(t, tr.Shutdown(t.Context()))
	require.Len(t, c.Spans(), 2*batchSpans+3)
	require.Equal(t, 2*batchSpans+3, n.of(Exported))
	require.Equal(t, "ek-test", c.Resource()["service.name"])
	require.Equal(t, "lab", c.Resource()["deployment.environment.name"])
	require.Equal(t, "secret", c.Headers().Get("X-Token"))
	tr.Start(headers(), false, "chat", time.Now()).End()
	require.NoError(t, tr.Shutdown(t.Context()), "a second time is nothing")
	require.Len(t, c.Spans(), 2*batchSpans+3)
}

func TestACollectorThatAnswersNothingHoldsNothingUp(t *testing.T) {
	c := tracetest.Start(t)
	release := c.Hold()
	defer release()
	tr, n := start(t, c.URL, nil)
	const surplus = 100
	for range queueSpans + batchSpans + surplus {
		tr.Start(headers(), false, "chat", time.Now()).End()
	}
	require.GreaterOrEqual(t, n.of(Dropped), surplus-batchSpans, "what has no room is dropped")
	require.LessOrEqual(t, n.of(Dropped), surplus+batchSpans)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.Error(t, tr.Shutdown(ctx), "the end does not wait for it either")
	require.Equal(t, queueSpans+batchSpans+surplus, n.of(Dropped)+n.of(Failed)+n.of(Exported), "each is counted once")
}

func TestSpansThatACollectorRefusesAreCounted(t *testing.T) {
	c := tracetest.Start(t)
	c.Answer(http.StatusBadRequest)
	tr, n := start(t, c.URL, nil)
	tr.Start(headers(), false, "chat", time.Now()).End()
	require.NoError(t, tr.Shutdown(t.Context()))
	require.Equal(t, 1, n.of(Failed))
}

func TestWithoutATracerNothingIsDone(t *testing.T) {
	var tr *Tracer
	h := headers("traceparent", parent+"01")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		s := tr.Start(h, true, "chat", time.Time{})
		child := s.Child("step", true)
		child.Event("x")
		child.Fail("kind", "message")
		child.EachHeader(func(string, string) { t.Fatal("a header") })
		child.End()
		s.Rename("y")
		s.End()
	}))
	require.NoError(t, tr.Shutdown(t.Context()))
}

func TestEndpoint(t *testing.T) {
	for _, row := range []struct {
		text     string
		insecure bool
		want     string
	}{
		{"http://c:4318", false, "http://c:4318/v1/traces"},
		{"https://c:4318/", false, "https://c:4318/v1/traces"},
		{"https://c/otlp/v1/traces", false, "https://c/otlp/v1/traces"},
		{"c:4318", false, "https://c:4318/v1/traces"},
		{"c:4318", true, "http://c:4318/v1/traces"},
		{"grpc://c:4317", false, ""},
		{"http://user:secret@c", false, ""},
		{"http://", false, ""},
	} {
		got, err := Endpoint(row.text, row.insecure)
		require.Equal(t, row.want == "", err != nil, "%s: %v", row.text, err)
		require.Equal(t, row.want, got, row.text)
	}
}

// A client may send any bytes, and a span that has some which are no text must
// not cost others theirs: the collector takes a batch or refuses it.
func TestBytesThatAreNoTextLoseNoSpans(t *testing.T) {
	c := tracetest.Start(t)
	tr, n := start(t, c.URL, nil)
	s := tr.Start(headers("tracestate", "a=\xff"), false, "chat", time.Now())
	s.Rename("chat \xff")
	s.Set(attribute.String("id", "a\xffb"), attribute.StringSlice("best", []string{"\xff"}))
	s.Event("choose", attribute.String("engine", "\xff"))
	s.Fail("kind \xff", "cause \xff")
	s.End()
	tr.Start(headers(), false, "of another", time.Now()).End()
	require.NoError(t, tr.Shutdown(t.Context()))
	require.Equal(t, 2, n.of(Exported))
	require.Equal(t, "a\uFFFDb", c.Spans()[0].Attributes["id"])
}
