package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"time"

	"github.com/prometheus/client_golang/api"
	v1 "github.com/prometheus/client_golang/api/prometheus/v1"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
)

// site is two regions and the Prometheus that watches them.
type site struct {
	*testbed.World
	proxies    []*testbed.Proxy // by region
	prometheus v1.API
	began      time.Time // of the load
	ended      time.Time
}

var regions = [2]string{"us", "eu"}

// build starts everything and waits until both regions are ready.
func (w *site) build(ctx context.Context, rules string) error {
	if err := w.Write("peers.key", testbed.PeersKey); err != nil {
		return err
	}
	w.proxies = w.Proxies(regions[:]...)
	prometheus := testbed.FreeAddresses(1)[0]
	client, err := api.NewClient(api.Config{Address: "http://" + prometheus, Client: w.HTTP})
	if err != nil {
		return err
	}
	w.prometheus = v1.NewAPI(client)
	for i, p := range w.proxies {
		config, err := w.region(i)
		if err != nil {
			return err
		}
		if err := errors.Join(w.Write(p.Config(), config), p.Serve()); err != nil {
			return err
		}
	}
	for _, p := range w.proxies {
		if err := p.Ready(ctx); err != nil {
			return err
		}
	}
	if err := w.Write("prometheus.yaml", fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 5s}\nrule_files: [%q]\n"+
		"scrape_configs:\n  - {job_name: evenkeel, static_configs: [{targets: [%q, %q]}]}\n", rules, w.proxies[0].Address,
		w.proxies[1].Address)); err != nil {
		return err
	}
	p, err := w.Start("prometheus",
		exec.Command("prometheus", "--config.file", w.File("prometheus.yaml"), "--storage.tsdb.path", w.File("tsdb"),
			"--web.listen-address", prometheus))
	if err != nil {
		return err
	}
	return p.Answers(ctx, time.Minute, "http://"+prometheus+"/-/ready")
}

// region starts a region's engines and returns the config file of its proxy. The
// first has too little to prefill with for its load, so that it forwards.
func (w *site) region(i int) (config string, err error) {
	prefill := refengine.Config{
		Role: refengine.Prefill, Prompts: refengine.Prompts{Base: 40 * time.Millisecond, PerToken: 30 * time.Microsecond},
		KV:      refengine.KV{PrefixCache: 4096},
		Answers: refengine.Answers{PromptTokensDetails: true}, Seed: uint64(i * 10),
	}
	if i == 0 {
		prefill.Prompts.Base = 90 * time.Millisecond
	}
	second := prefill
	second.Seed++
	engines, err := w.Engines(prefill, second, refengine.Config{
		Role: refengine.Decode, KV: refengine.KV{PrefixCache: 4096}, Answers: refengine.Answers{PromptTokensDetails: true}, Slots: 16,
		Steps:  refengine.Steps{C0: 15 * time.Millisecond, C1: 400 * time.Nanosecond},
		DPSize: 4, Seed: uint64(i * 10),
	})
	if err != nil {
		return "", err
	}
	p, other := w.proxies[i], w.proxies[1-i]
	return fmt.Sprintf(`listen: %q
admin: {listen: %q}
self_test: false
dispatch: {step_model: {c0_ms: 15, c1_ms: 0.0004}}
advice: {interval: 500ms}
health: {slow_start: 0s}
geo:
  mode: distributed
  self: {id: %s-1, region: %[3]s}
  listen: %[4]q
  hmac: {keys_file: %[5]q}
  peers: [{id: %[6]s-1, region: %[6]s, url: "http://%[7]s", price_out: 0.02, price_in: 0.02}]
  ownership: {engine: static}
%[8]s`, p.Clients, p.Address, p.Name, p.Peers, w.File("peers.key"), other.Name, other.Peers, testbed.Engines(
		append(testbed.EnginesAt(engines[0].URLs(), ""), testbed.EnginesAt(engines[1].URLs(), "")...),
		testbed.EnginesAt(engines[2].URLs(), ", group: %s, slots: 16", p.Name))), nil
}

// load has clients of both regions talk, in sessions that share prefixes. Some
// leave.
func (w *site) load(ctx context.Context, last time.Duration) error {
	rng := rand.New(rand.NewPCG(1, 2))
	requests := make([]trace.Request, 4000)
	for i := range requests {
		requests[i] = trace.Request{Prompt: 300 + rng.IntN(1500), Output: 20 + rng.IntN(120)}
		for b := range requests[i].Prompt / 128 {
			requests[i].HashIDs = append(requests[i].HashIDs, uint64((i%40)*1000+b))
		}
	}
	w.began = time.Now()
	defer func() { w.ended = time.Now() }()
	var loads []load.Config
	for i, p := range w.proxies {
		loads = append(loads, load.Config{
			URLs: []string{p.URL()}, Requests: requests, Duration: last, SharePrefixes: true,
			Concurrency: [2]int{40, 6}[i], Chat: 0.5, Stream: 0.9, Usage: 0.5, Cancel: load.Cancel{Share: 0.05}, Seed: uint64(i),
			Backoff: 100 * time.Millisecond,
		})
	}
	results, err := testbed.Drive(ctx, nil, loads...)
	if err != nil {
		return err
	}
	for i, got := range results {
		if t := testbed.Count(testbed.None, got); len(t.Wrong) > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %s", regions[i], t.First()))
		}
	}
	return err
}
