package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/process"
	"evenkeel/bench/refengine"
	"evenkeel/bench/trace"
)

// world is two regions and the Prometheus that watches them.
type world struct {
	dir        string
	engines    []*refengine.Engine
	processes  []*process.Process
	clients    [2]string // addresses, by region
	admins     [2]string
	peers      [2]string
	prometheus string
	began      time.Time // of the load
	ended      time.Time
}

var regions = [2]string{"us", "eu"}

// begin starts everything and waits until both regions are ready. What it
// returns beside an error wants to be closed, too.
func begin(ctx context.Context, binary, rules string) (w *world, err error) {
	w = &world{}
	if w.dir, err = process.Folder("", "dashboards"); err != nil {
		return w, err
	}
	if binary, err = process.Evenkeel(ctx, binary, w.dir); err != nil {
		return w, err
	}
	if rules, err = filepath.Abs(rules); err != nil {
		return w, err
	}
	free := process.FreeAddresses(7)
	for i := range regions {
		w.clients[i], w.admins[i], w.peers[i] = free[3*i], free[3*i+1], free[3*i+2]
	}
	w.prometheus = free[6]
	if err := w.write("peers.key", "a 0123456789abcdef0123456789abcdef\n"); err != nil {
		return w, err
	}
	for i := range regions {
		if err := w.region(binary, i); err != nil {
			return w, err
		}
	}
	if err := w.write("prometheus.yaml", fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 5s}\nrule_files: [%q]\nscrape_configs:\n  - {job_name: evenkeel, static_configs: [{targets: [%q, %q]}]}\n", rules, w.admins[0], w.admins[1])); err != nil {
		return w, err
	}
	if err := w.process("prometheus", "prometheus", "--config.file", filepath.Join(w.dir, "prometheus.yaml"), "--storage.tsdb.path", filepath.Join(w.dir, "tsdb"), "--web.listen-address", w.prometheus); err != nil {
		return w, err
	}
	for i, url := range []string{w.admins[0] + "/readyz", w.admins[1] + "/readyz", w.prometheus + "/-/ready"} { // in the order they were started
		if err := w.processes[i].Answers(ctx, "http://"+url); err != nil {
			return w, fmt.Errorf("%w; %s has the logs", err, w.dir)
		}
	}
	return w, nil
}

// region starts a proxy and its engines. The first has too little to prefill
// with for its load, so that it forwards.
func (w *world) region(binary string, i int) error {
	var engines strings.Builder
	for _, role := range []refengine.Role{refengine.Prefill, refengine.Decode} {
		fmt.Fprintf(&engines, "  %s:\n", role)
		for n := range 2 {
			c := refengine.Config{
				Role: role, PrefillBase: 40 * time.Millisecond, PrefillPerToken: 30 * time.Microsecond, PrefixCache: 4096, PromptTokensDetails: true,
				Slots: 16, C0: 15 * time.Millisecond, C1: 400 * time.Nanosecond, DPSize: 1, Seed: uint64(i*10 + n),
			}
			if role == refengine.Decode {
				if n > 0 {
					continue
				}
				c.DPSize = 4
			} else if i == 0 {
				c.PrefillBase = 90 * time.Millisecond
			}
			e, err := refengine.Start(c)
			if err != nil {
				return err
			}
			w.engines = append(w.engines, e)
			for _, u := range e.URLs() {
				if role == refengine.Decode {
					fmt.Fprintf(&engines, "    - {url: %q, group: %s, slots: 16}\n", u, regions[i])
				} else {
					fmt.Fprintf(&engines, "    - {url: %q}\n", u)
				}
			}
		}
	}
	other := 1 - i
	text := fmt.Sprintf(`listen: %q
admin: {listen: %q}
self_test: false
dispatch: {shadow: [pjsq-kv, prr], step_model: {c0_ms: 15, c1_ms: 0.0004}}
advice: {interval: 500ms, window: 10s, calm: 20s}
health: {slow_start: 0s}
geo:
  mode: distributed
  self: {id: %s-1, region: %[3]s}
  listen: %[4]q
  hmac: {keys_file: %[5]q}
  peers: [{id: %[6]s-1, region: %[6]s, url: "http://%[7]s", price_out: 0.02, price_in: 0.02}]
  ownership: {engine: static}
engines:
%[8]s`, w.clients[i], w.admins[i], regions[i], w.peers[i], filepath.Join(w.dir, "peers.key"), regions[other], w.peers[other], engines.String())
	if err := w.write(regions[i]+".yaml", text); err != nil {
		return err
	}
	return w.process(regions[i], binary, "serve", "--config", filepath.Join(w.dir, regions[i]+".yaml"))
}

func (w *world) write(name, text string) error {
	return os.WriteFile(filepath.Join(w.dir, name), []byte(text), 0o600)
}

// process starts a command that logs into the world's folder.
func (w *world) process(name, binary string, args ...string) error {
	p, err := process.Start(exec.Command(binary, args...), filepath.Join(w.dir, name+".log"))
	if err != nil {
		return err
	}
	w.processes = append(w.processes, p)
	return nil
}

// load has clients of both regions talk, in sessions that share prefixes. Some
// leave.
func (w *world) load(ctx context.Context, last time.Duration) error {
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
	results := make(chan error, len(regions))
	for i := range regions {
		go func() {
			got, err := load.Run(ctx, load.Config{
				URLs: []string{"http://" + w.clients[i]}, Requests: requests, Duration: last, SharePrefixes: true,
				Concurrency: [2]int{40, 6}[i], Chat: 0.5, Stream: 0.9, Usage: 0.5, Cancel: load.Cancel{Share: 0.05}, Seed: uint64(i), Backoff: 100 * time.Millisecond,
			})
			if err == nil && got.Failed > 0 {
				err = fmt.Errorf("%s: %d requests failed: %v", regions[i], got.Failed, got.Failures)
			}
			results <- err
		}()
	}
	return errors.Join(<-results, <-results)
}

// close ends all processes and removes their files.
func (w *world) close() {
	for _, p := range w.processes {
		_ = p.Signal(syscall.SIGINT) // an error: it has ended
	}
	for _, p := range w.processes {
		select {
		case <-p.Gone():
		case <-time.After(5 * time.Second):
			p.Kill()
		}
	}
	for _, e := range w.engines {
		e.Close()
	}
	if w.dir != "" {
		_ = os.RemoveAll(w.dir)
	}
}
