package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/prefill"
)

// proxy is evenkeel as operators run it, with its files.
type proxy struct {
	*testbed.Proxy
	settings settings
}

func startProxy(ctx context.Context, w *testbed.World, s scenario, loops int, f *fleet) (*proxy, error) {
	p := &proxy{Proxy: w.Proxies("evenkeel")[0]}
	p.settings = settings{
		world: w, proxy: p.Proxy, loops: loops, callbacks: testbed.FreeAddresses(1)[0], hold: s.hold, pool: 4 * s.streams, fleet: f,
		geo:    s.strangers,
		budget: max(prefill.Default().Retry.Budget, 3*s.rate, 3*s.heads), slots: f.of("decode")[0].Config().Slots,
	}
	if err := errors.Join(p.settings.write(), p.settings.writeKeys(callers), p.Serve()); err != nil {
		return nil, err
	}
	return p, p.Ready(ctx)
}

// idle waits until neither the proxy nor an engine holds anything, but for blocks that only a
// restart frees.
func (p *proxy) idle(ctx context.Context, f *fleet, patience time.Duration) error {
	return testbed.Idle(ctx, patience, func() []string { return append(p.Held(p.Name), f.hold(testbed.UsedBy)...) })
}

// vitals are what must not grow for ever.
type vitals struct {
	Goroutines float64 `json:"goroutines"`
	Heap       float64 `json:"heap_bytes"` // after two collections
	Resident   float64 `json:"resident_bytes"`
	Files      float64 `json:"open_files"`
}

func (p *proxy) vitals() (v vitals, err error) {
	for range 2 { // what pools hold goes with the second
		if _, _, err := p.Ask(http.MethodGet, "/debug/pprof/heap?gc=1", nil); err != nil {
			return v, err
		}
	}
	all, err := p.Series()
	return vitals{
			Goroutines: all["go_goroutines"], Heap: all["go_memstats_heap_alloc_bytes"], Resident: all["process_resident_memory_bytes"],
			Files: all["process_open_fds"],
		},
		err
}
