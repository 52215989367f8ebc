package journal

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/tracing/tracetest"
	"evenkeel/prefill"
)

// traced is a journal whose requests are all traced, until the returned end.
func traced(t *testing.T) (s *sinks, spans func() []tracetest.Span) {
	t.Helper()
	s = open(t)
	c := tracetest.Start(t)
	begin, err := s.PrepareTracing(&config.Tracing{Endpoint: c.URL, Sample: 1})
	require.NoError(t, err)
	require.NoError(t, begin())
	return s, func() []tracetest.Span {
		off, err := s.PrepareTracing(&config.Tracing{})
		require.NoError(t, err)
		require.NoError(t, off())
		s.flushes.Wait()
		return c.Spans()
	}
}

// The spans of a request stand as its calls do: what an engine does is within the call to it.
func TestASpanStandsWithinTheCallItIsPartOf(t *testing.T) {
	s, spans := traced(t)
	r := s.begin("r")
	r.Report(Event{Kind: Parsing})
	r.Report(Event{Kind: Parsed, Req: &openai.Request{Model: "m", Stream: true, MaxTokens: 9}})
	r.Report(Event{Kind: Attempted})
	r.Report(Event{Kind: Entered, Phase: Queued})
	r.Report(Event{Kind: Chose,
		Lease: &prefill.Lease{Candidate: prefill.Candidate{ID: "p0"}, Policy: "prefix", Trace: &prefill.Trace{Reason: "only", Eligible: 1}}})
	r.Report(Event{Kind: Entered, Phase: Prefill})
	probe := r.WithTraceHeaders([]engine.Header{{Name: "A"}})
	r.Report(Event{Kind: Prefilled, Tokens: 100, Cached: 32})
	r.Report(Event{Kind: Entered, Phase: Pooled})
	r.Report(Event{Kind: Placed, Slot: &dispatcher.Slot{Binding: board.Binding{WorkerName: "d1", Policy: "rr"}}, Took: time.Millisecond})
	r.Report(Event{Kind: Entered, Phase: Transfer, Call: "decode"})
	first := r.WithTraceHeaders(nil)
	r.Report(Event{Kind: AttemptEnded, Cause: "engine d1: connection reset", Status: 0, Answer: openai.NewError(502, "decode_failed", "m")})
	r.Report(Event{Kind: Retried})
	r.Report(Event{Kind: Attempted})
	r.Report(Event{Kind: Entered, Phase: Queued})
	local := board.Binding{WorkerName: "d2", Policy: "rr", NewTokens: 84}
	r.Report(Event{Kind: PlacedLocally, Slot: &dispatcher.Slot{Binding: local}, Tokens: 0})
	r.Report(Event{Kind: Entered, Phase: Prefill, Call: "decode"})
	r.Report(Event{Kind: First, At: r.Arrival.Add(7 * time.Millisecond)})
	r.Report(Event{Kind: Entered, Phase: Streaming})
	r.EndAttempt(nil)
	r.End(nil)

	all := spans()
	require.Equal(t, `chat m (server)
  parse (internal)
  attempt (internal) !
    queue (internal)
    probe (client)
    pool_wait (internal)
    decode (client) !
      transfer (internal) !
  attempt (internal)
    queue (internal)
    decode (client)
      local_prefill (internal)
      relay (internal)
`, tracetest.Tree(all))
	of := map[string]tracetest.Span{}
	for _, one := range all {
		if _, ok := of[one.Name]; !ok {
			of[one.Name] = one
		}
		require.Equal(t, r.TraceID, one.Trace)
	}
	parent := func(headers []engine.Header) string { return headers[len(headers)-1].Value }
	require.Equal(t, "A", probe[0].Name)
	require.Contains(t, parent(probe), of["probe"].ID)
	require.Contains(t, parent(first), of["decode"].ID)
	require.Equal(t, "engine d1: connection reset", of["decode"].Error)
	require.Equal(t, map[string]any{"gen_ai.usage.input_tokens": int64(100), "gen_ai.usage.cache_read.input_tokens": int64(32)},
		of["probe"].Attributes)
	require.Equal(t, []string{"choose"}, of["queue"].Events)
	require.Equal(t, "d1", of["pool_wait"].EventAttributes["admit"]["evenkeel.decode.rank"])
	require.Equal(t, "p0", of["queue"].EventAttributes["choose"]["evenkeel.prefill.engine"])
	require.Subset(t, of["chat m"].Attributes, map[string]any{
		"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.request.stream": true, "gen_ai.request.max_tokens": int64(9),
		"url.path":            "/v1/chat/completions",
		"evenkeel.request.id": "r", "evenkeel.client.request.id": "theirs", "evenkeel.key": "k", "evenkeel.outcome": "ok", "evenkeel.attempts": int64(2),
		"http.response.status_code": int64(200), "evenkeel.decode.rank": "d2", "evenkeel.route": Local, "gen_ai.response.time_to_first_chunk": 0.007,
	})
	require.NotContains(t, of["chat m"].Attributes, "evenkeel.geo.peer")
	require.InDelta(t, len(all), s.count("evenkeel_trace_spans_total", "exported"), 0)
	require.NoError(t, s.Close())
}

// A status page of traces that is red for every mistake of a client is looked at by no one.
func TestWhatTheClientDidIsNoErrorOfASpan(t *testing.T) {
	for _, c := range []struct {
		fail   *openai.Error
		begun  bool // the answer had
		failed string
		status int64
	}{
		{openai.NewError(400, "invalid_json", "m"), false, "", 400},
		{openai.NewError(StatusClientClosed, "client_closed", "m"), false, "", 499},
		{openai.NewError(429, "queue_full", "m"), false, "queue_full", 429},
		{openai.NewError(502, "decode_failed", "m"), false, "decode_failed", 502},
		{openai.NewError(502, "upstream_broken", "m"), true, "upstream_broken", 200},
	} {
		s, spans := traced(t)
		r := s.begin("r")
		if c.begun {
			r.Report(Event{Kind: First, At: r.Arrival.Add(time.Millisecond)})
		}
		r.End(c.fail)
		all := spans()
		require.Len(t, all, 1)
		require.Equal(t, c.failed, all[0].Error, c.fail.Code)
		require.Equal(t, c.fail.Code, all[0].Attributes["error.type"])
		require.Equal(t, c.status, all[0].Attributes["http.response.status_code"], c.fail.Code)
		require.NoError(t, s.Close())
	}
}

func TestAnOperationIsNamedAfterItsEndpoint(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat",
		"/v1/completions": "text_completion", "/v1/embeddings": "embeddings",
	} {
		require.Equal(t, want, operation(path))
	}
}

func TestAConfigOfTracesThatIsWrongChangesNothing(t *testing.T) {
	s, spans := traced(t)
	_, err := s.PrepareTracing(&config.Tracing{Endpoint: "https://collector", TLS: config.CollectorTLS{CAFile: "/nowhere"}})
	require.Error(t, err)
	s.begin("r").End(nil)
	require.Len(t, spans(), 1)
	s.begin("r").End(nil)
	require.Len(t, spans(), 1, "it is off")
	require.NoError(t, s.Close())
}
