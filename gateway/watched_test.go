package gateway_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/config"
	"evenkeel/gateway/tracing/tracetest"
)

// BenchmarkStreams is the processor time of a streamed request of 40 tokens, of
// 100 at once: client, proxy, engines and collector together, since they share a
// process. The ratios are to a proxy that keeps no receipts and has no traces;
// what a machine does beside it moves them by some percent.
func BenchmarkStreams(b *testing.B) {
	ways := []struct {
		name string
		set  func(*config.Config, string)
	}{
		{"off", func(cfg *config.Config, _ string) { cfg.Admin.Receipts = 0 }},
		{"receipts", func(*config.Config, string) {}},
		{"traces-sample-0.1", func(cfg *config.Config, url string) { cfg.Tracing.Endpoint = url }},
		{"traces-all", func(cfg *config.Config, url string) { cfg.Tracing.Endpoint, cfg.Tracing.Sample = url, 1 }},
	}
	p, err := refengine.Start(refengine.Config{Role: refengine.Prefill, Prompts: refengine.Prompts{Concurrency: 8}}.Quick())
	require.NoError(b, err)
	defer p.Close()
	d, err := refengine.Start(refengine.Config{Role: refengine.Decode, Slots: 100, Steps: refengine.Steps{C0: 10 * time.Millisecond}}.Quick())
	require.NoError(b, err)
	defer d.Close()
	collector := tracetest.Start(b)
	requests := make([]trace.Request, 300)
	for i := range requests {
		requests[i] = trace.Request{Prompt: 200, Output: 40}
	}
	urls, least := make([]string, len(ways)), make([]time.Duration, len(ways))
	for i, w := range ways {
		cfg := config.Default()
		cfg.Listen, cfg.Admin.Listen, cfg.SelfTest = "127.0.0.1:0", "127.0.0.1:0", false
		cfg.Engines.Prefill = []config.Engine{{URL: p.URLs()[0]}}
		cfg.Engines.Decode = []config.Engine{{URL: d.URLs()[0], Slots: 100}}
		w.set(cfg, collector.URL)
		urls[i] = serving(b, cfg)
	}
	for b.Loop() {
		for i := range ways { // in turn, so that a busy moment is nobody's alone
			before := processor()
			got, err := load.Run(b.Context(), load.Config{URLs: urls[i : i+1], Requests: requests, Concurrency: 100, Chat: 0.5, Stream: 1, Seed: 7})
			require.NoError(b, err)
			require.Equal(b, len(requests), got.OK, "%v", got.Failures)
			if took := (processor() - before) / time.Duration(len(requests)); least[i] == 0 || took < least[i] {
				least[i] = took
			}
		}
	}
	b.ReportMetric(float64(least[0].Microseconds()), "off-cpu-µs/request")
	for i := 1; i < len(ways); i++ {
		b.ReportMetric(float64(least[i])/float64(least[0]), ways[i].name+"-ratio")
	}
}

// serving is a proxy that is ready, until the benchmark ends.
func serving(b *testing.B, cfg *config.Config) (url string) {
	require.NoError(b, cfg.Validate())
	g, err := gateway.New(cfg, zap.NewNop())
	require.NoError(b, err)
	handler, err := admin.New(g, admin.Options{Log: zap.NewNop()})
	require.NoError(b, err)
	require.NoError(b, g.Start(handler))
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(b, g.Shutdown(ctx))
	})
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if ok, why := g.Ready(); ok {
			return "http://" + g.Addr()
		} else if time.Now().After(end) {
			b.Fatal(why)
		}
	}
}

// processor is the processor time of this process so far.
func processor() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
