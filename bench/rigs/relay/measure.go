//go:build linux

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// Sample is one measurement of one proxy under one row.
type Sample struct {
	Row     string
	Cores   int
	Proxy   string
	Round   int
	Streams int

	Chunk, Request time.Duration // of CPU
	Chunks         float64       // a second
	Requests       float64       // a second
	Idle, RSS      int64         // bytes
	TTFT, Gaps     Times
	Whole, Failed  int
	Load           float64 // share of their CPUs that engines and clients used
	Others         float64 // share of all CPUs that others used
	Why            map[string]int
}

// Times are in microseconds.
type Times struct{ N, P50, P99, P999 float64 }

func timesOf(all []uint32) (t Times) {
	if len(all) == 0 {
		return t
	}
	slices.Sort(all)
	at := func(share float64) float64 { return float64(all[min(len(all)-1, int(share*float64(len(all))))]) }
	return Times{N: float64(len(all)), P50: at(0.5), P99: at(0.99), P999: at(0.999)}
}

// bench is a run.
type bench struct {
	options
	world *testbed.World
	cores cores
	files int // that a process may open

	collector string // URL that takes traces

}

// spare is how many files a process has open beside its streams.
const spare = 600

// site is the engines of a row.
type site struct {
	prefill, decode []string
	helpers         []*helper
}

func (s *site) end() {
	for _, h := range s.helpers {
		h.end()
	}
}

// engines starts the engines of a row.
func (b *bench) engines(r row, on cores) (s *site, err error) {
	s = &site{}
	start := func(j engineJob) (urls []string, err error) {
		h, err := b.help("engines", on)
		if err != nil {
			return nil, err
		}
		s.helpers = append(s.helpers, h)
		if err := h.send.Encode(j); err != nil {
			return nil, err
		}
		return urls, h.receive.Decode(&urls)
	}
	if s.prefill, err = start(engineJob{Role: refengine.Prefill, Count: 1, Listen: "127.0.0.20:0", Slots: 1}); err != nil {
		s.end()
		return nil, fmt.Errorf("prefill engines: %w", err)
	}
	if s.decode, err = start(engineJob{
		Role: refengine.Both, Count: r.ranks(), Listen: "127.0.0.21:0", Slots: r.slots(), Step: r.step(), Spread: r.spread && r.shape != single,
	}); err != nil {
		s.end()
		return nil, fmt.Errorf("decode engines: %w", err)
	}
	return s, nil
}

// measure measures a proxy once.
func (b *bench) measure(ctx context.Context, r row, k *kind, s *site, n, round int) (m Sample, err error) {
	m = Sample{Row: r.name, Cores: n, Proxy: k.name, Round: round, Streams: r.streams}
	on, rest := share(b.cores, n)
	p, err := k.run(ctx, b, place{prefill: s.prefill, decode: s.decode, slots: r.slots(), on: on})
	if err != nil {
		return m, err
	}
	defer p.end()
	if err := testbed.Pause(ctx, time.Second); err != nil {
		return m, err
	}
	pids := p.pids()
	m.Idle = testbed.RSS(pids...)
	most := testbed.PeakRSS(func() []int { return pids })
	defer func() { m.RSS = most() }()
	job := r.job(b.window)
	job.Targets, job.Prefill = p.targets, p.prefill
	c, err := b.clients(job, rest)
	if err != nil {
		return m, err
	}
	defer c.end()
	load := []int{c.process.Pid}
	for _, h := range s.helpers {
		load = append(load, h.process.Pid)
	}
	if _, err := c.told(); err != nil { // all streams are there
		return m, err
	}
	if err := testbed.Pause(ctx, settle); err != nil {
		return m, err
	}
	from, err := c.mark(p, load)
	if err != nil {
		return m, err
	}
	if err := testbed.Pause(ctx, b.window); err != nil {
		return m, err
	}
	to, err := c.mark(p, load)
	if err != nil {
		return m, err
	}
	if err := c.send.Encode(stop); err != nil {
		return m, err
	}
	last, err := c.told()
	if err != nil {
		return m, err
	}
	seconds := to.at.Sub(from.at).Seconds()
	chunks, requests := to.Events-from.Events, to.Requests-from.Requests
	m.Chunks, m.Requests = float64(chunks)/seconds, float64(requests)/seconds
	if chunks == 0 {
		return m, fmt.Errorf("%s: no chunk came in %v; failed: %v", k.name, b.window, last.Result.Failed)
	}
	used, loaded := to.proxy-from.proxy, to.load-from.load
	m.Load = loaded.Seconds() / seconds / float64(len(rest))
	m.Others = max(0, (to.all-from.all-loaded-used).Seconds()) / seconds / float64(len(b.cores))
	m.Chunk, m.Request = used/time.Duration(chunks), used/time.Duration(max(1, requests))
	m.TTFT, m.Gaps = timesOf(last.Result.TTFT), timesOf(last.Result.Gaps)
	m.Whole, m.Why = last.Result.Whole, last.Result.Failed
	for _, n := range m.Why {
		m.Failed += n
	}
	return m, nil
}

// crowd is the process of clients.
type crowd struct{ *helper }

// clients starts the clients of a job.
func (b *bench) clients(j Job, on cores) (crowd, error) {
	h, err := b.help("clients", on)
	if err != nil {
		return crowd{}, err
	}
	if err := h.send.Encode(j); err != nil {
		h.end()
		return crowd{}, err
	}
	return crowd{h}, nil
}

// told returns the next report of the clients.
func (c crowd) told() (t Told, err error) {
	if err := c.receive.Decode(&t); err != nil {
		return t, fmt.Errorf("clients: %w", err)
	}
	return t, nil
}

// reading is what came so far, and the CPU time that was used for it.
type reading struct {
	Told
	all, load, proxy time.Duration // by all programs, by engines and clients, by the proxy
	at               time.Time
}

func (c crowd) mark(p *proxy, load []int) (r reading, err error) {
	if r.all, err = machine(); err != nil {
		return r, err
	}
	if r.load, err = usedBy(load); err != nil {
		return r, err
	}
	if err = c.send.Encode(mark); err != nil {
		return r, err
	}
	if r.Told, err = c.told(); err != nil {
		return r, err
	}
	r.proxy, err = usedBy(p.pids())
	r.at = time.Now()
	return r, err
}
