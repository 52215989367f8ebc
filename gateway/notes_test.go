package gateway

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
	"evenkeel/gateway/tracing/tracetest"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// life is what a request tells of itself from its arrival to its end.
func life(g *Gateway, ctx *fasthttp.RequestCtx, req *openai.Request, lease *prefill.Lease, slot *dispatcher.Slot) {
	rec := record{ID: "r", Arrival: time.Unix(0, 1)}
	g.witness(ctx, &rec, mooncake.Chat, false)
	parse := rec.span.Child("parse", false)
	parse.End()
	rec.parsed(req)
	j := job{gw: g, req: req, id: rec.ID, rec: &rec, arrive: rec.Arrival}
	var headers []engine.Header
	j.begin()
	j.enter(phaseQueued)
	j.chose(lease)
	j.enter(phasePrefill)
	headers = j.carry(headers)
	j.prefilled(&mooncake.ProbeAnswer{PromptTokens: 10})
	j.enter(phasePooled)
	j.bound(slot)
	j.calls("decode")
	j.enter(phaseTransfer)
	j.carry(headers[:0])
	j.notes.call.Event("first token")
	j.enter(phaseStreaming)
	j.ends(nil)
	rec.tell(nil)
}

// watching are the ways to watch requests.
func watching(tb testing.TB) map[string]*Gateway {
	tb.Helper()
	c := tracetest.Start(tb)
	all := map[string]*Gateway{}
	for name, sample := range map[string]float64{"off": -1, "receipts": -1, "traces, not sampled": 0, "traces": 1} {
		g := &Gateway{}
		if sample >= 0 {
			t, err := tracing.New(tracing.Config{Endpoint: c.URL, Sample: sample, Timeout: time.Second, Log: zap.NewNop(), Count: func(string, int) {}})
			require.NoError(tb, err)
			tb.Cleanup(func() { require.NoError(tb, t.Shutdown(context.Background())) })
			g.tracer.Store(t)
		}
		if name == "receipts" {
			g.receipts = receipt.NewRing(10_000, 64<<20)
		}
		all[name] = g
	}
	return all
}

func TestARequestThatNobodyWatchesCostsNothing(t *testing.T) {
	var ctx fasthttp.RequestCtx
	g, req, lease, slot := &Gateway{}, &openai.Request{}, &prefill.Lease{}, &dispatcher.Slot{}
	rec := &record{ID: "r", Arrival: time.Unix(0, 1)}
	j := &job{gw: g, req: req, id: rec.ID, rec: rec}
	got := &mooncake.ProbeAnswer{}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		g.witness(&ctx, rec, mooncake.Chat, false)
		rec.parsed(req)
		j.begin()
		for _, p := range phases {
			j.enter(p)
		}
		j.chose(lease)
		j.prefilled(got)
		j.bound(slot)
		j.calls("decode")
		j.carry(nil)
		j.fails("", 0, nil)
		j.retries()
		j.ends(nil)
		rec.tell(nil)
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
			lease, slot := &prefill.Lease{}, &dispatcher.Slot{WorkerName: "d", Policy: "evenkeel", Grounds: &dispatcher.Grounds{}}
			var ctx fasthttp.RequestCtx
			b.ReportAllocs()
			for b.Loop() {
				life(g, &ctx, req, lease, slot)
			}
		})
	}
}
