package journal

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
	"evenkeel/gateway/tracing/tracetest"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// life is what a request tells of itself from its arrival to its end.
func life(g *Journal, header func(string) string, req *openai.Request, lease *prefill.Lease, slot *dispatcher.Slot) {
	r := g.Begin(LogEntry{ID: "r", Arrival: time.Unix(0, 1)})
	r.OpenViews(header, false, mooncake.Chat.Path())
	var headers []engine.Header
	for _, e := range []Event{
		{Kind: Parsing}, {Kind: Parsed, Req: req}, {Kind: Attempted}, {Kind: Entered, Phase: Queued}, {Kind: Chose, Lease: lease}, {Kind: Entered, Phase: Prefill},
	} {
		r.showEvent(e)
	}
	headers = r.WithTraceHeaders(headers)
	for _, e := range []Event{
		{Kind: Prefilled, Tokens: 10}, {Kind: Entered, Phase: Pooled}, {Kind: Placed, Slot: slot}, {Kind: Entered, Phase: Transfer, Call: "decode"},
	} {
		r.showEvent(e)
	}
	r.WithTraceHeaders(headers[:0])
	for _, e := range []Event{{Kind: First}, {Kind: Entered, Phase: Streaming}} {
		r.showEvent(e)
	}
	r.EndAttempt(nil)
	r.showEvent(Event{Kind: ended})
}

// watching are the ways to watch requests.
func watching(tb testing.TB) map[string]*Journal {
	tb.Helper()
	c := tracetest.Start(tb)
	all := map[string]*Journal{}
	for name, sample := range map[string]float64{"off": -1, "receipts": -1, "traces, not sampled": 0, "traces": 1} {
		g := &Journal{}
		if sample >= 0 {
			t, err := tracing.New(tracing.Config{Endpoint: c.URL, Sample: sample, Timeout: time.Second, Log: zap.NewNop(),
				Count: func(string, int) {}})
			require.NoError(tb, err)
			tb.Cleanup(func() { require.NoError(tb, t.Shutdown(context.Background())) })
			g.setTracer(t)
		}
		if name == "receipts" {
			g.Receipts = receipt.NewRing(10_000, 64<<20)
		}
		all[name] = g
	}
	return all
}

func TestARequestThatNobodyWatchesCostsNothing(t *testing.T) {
	g, req, lease, slot := &Journal{}, &openai.Request{}, &prefill.Lease{}, &dispatcher.Slot{}
	r := g.Begin(LogEntry{ID: "r", Arrival: time.Unix(0, 1)})
	header := func(string) string { return "" }
	require.Zero(t, testing.AllocsPerRun(100, func() {
		r.OpenViews(header, false, mooncake.Chat.Path())
		r.Report(Event{Kind: Parsing})
		r.showEvent(Event{Kind: Parsed, Req: req})
		r.Report(Event{Kind: Attempted})
		for _, p := range phases {
			r.Report(Event{Kind: Entered, Phase: p, Call: "decode"})
		}
		r.Report(Event{Kind: Chose, Lease: lease})
		r.Report(Event{Kind: Prefilled, Tokens: 10})
		r.showEvent(Event{Kind: Placed, Slot: slot})
		r.Report(Event{Kind: PlacedLocally, Slot: slot})
		r.WithTraceHeaders(nil)
		r.Report(Event{Kind: AttemptEnded})
		r.Report(Event{Kind: Retried})
		r.EndAttempt(nil)
		r.showEvent(Event{Kind: ended})
	}))
}

// BenchmarkWatch is what a request costs that is watched, from its arrival to
// its end; a stream of any length costs the same. The requests of a busy proxy
// take some hundred microseconds each.
func BenchmarkWatch(b *testing.B) {
	ways := watching(b)
	for _, name := range []string{"off", "receipts", "traces, not sampled", "traces"} {
		b.Run(name, func(b *testing.B) {
			g, req := ways[name], &openai.Request{Model: "m", Stream: true}
			lease := &prefill.Lease{}
			slot := &dispatcher.Slot{Binding: board.Binding{WorkerName: "d", Policy: "evenkeel"}, Trace: &board.Explanation{}}
			header := func(string) string { return "" }
			b.ReportAllocs()
			for b.Loop() {
				life(g, header, req, lease, slot)
			}
		})
	}
}
