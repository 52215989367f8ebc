package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/process"
	"evenkeel/prefill"
)

// proxy is evenkeel as operators run it: a process, its files, its admin
// listener.
type proxy struct {
	url      string
	admin    process.Admin
	dir      string
	settings settings
	process  *process.Process
	reloads  bool // it takes a new config while it runs; else SIGHUP would end it
}

func startProxy(ctx context.Context, s scenario, o options, f *fleet) (p *proxy, err error) {
	p = &proxy{}
	if p.dir, err = process.Folder(o.keep, "chaos"); err != nil {
		return nil, err
	}
	binary, err := process.Evenkeel(ctx, o.binary, p.dir, fmt.Sprint("-race=", o.race))
	if err != nil {
		return nil, err
	}
	free := process.FreeAddresses(3)
	p.settings = settings{
		dir: p.dir, listen: free[0], admin: free[1], hold: s.hold, pool: 4 * s.streams, fleet: f,
		budget: max(prefill.Default().Retry.Budget, 3*s.rate, 3*s.heads), slots: f.of("decode")[0].Config().Slots,
	}
	if s.strangers {
		p.settings.peers = free[2]
	}
	p.url, p.admin = "http://"+p.settings.listen, process.Admin{Address: p.settings.admin, Client: &http.Client{Timeout: 5 * time.Second}}
	if err := errors.Join(p.settings.write(), p.settings.writeKeys(callers)); err != nil {
		return nil, err
	}
	p.process, err = process.Start(exec.Command(binary, "serve", "--config", p.settings.file()), filepath.Join(p.dir, "evenkeel.log"))
	if err != nil {
		return nil, err
	}
	for range 200 {
		if status, _, err := p.admin.Ask(http.MethodGet, "/readyz", nil); err == nil && status == http.StatusOK {
			status, _, _ := p.admin.Ask(http.MethodPost, "/reload", nil) // of an unchanged file
			p.reloads = status/100 == 2
			return p, nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	p.stop(false)
	return nil, fmt.Errorf("the proxy is not ready; %s has its log", p.dir)
}

// series reads /metrics: name and labels to value.
func (p *proxy) series() (map[string]float64, error) {
	status, page, err := p.admin.Ask(http.MethodGet, "/metrics", nil)
	if err != nil || status != http.StatusOK {
		return nil, errors.Join(err, fmt.Errorf("/metrics answered %d", status))
	}
	return process.Series(page), nil
}

// idle waits until neither the proxy nor an engine holds anything.
func (p *proxy) idle(ctx context.Context, f *fleet, patience time.Duration) error {
	var held []string
	for end := time.Now().Add(patience); ; {
		held = append(p.busy(), f.busy()...)
		if len(held) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("held %v after the last request: %s", patience, strings.Join(held, "; "))
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// busy lists what the proxy's own books still hold.
func (p *proxy) busy() (held []string) {
	all, err := p.series()
	if err != nil {
		return []string{err.Error()}
	}
	for name, v := range all {
		metric, _, _ := strings.Cut(name, "{")
		switch {
		case v == 0:
		case metric == "evenkeel_requests_open", metric == "evenkeel_bodies_bytes", metric == "evenkeel_pool_entries", metric == "evenkeel_rank_kv_tokens", metric == "evenkeel_rank_running",
			metric == "evenkeel_prefill_inflight_requests", metric == "evenkeel_handoffs",
			metric == "evenkeel_prefill_held_tokens", metric == "evenkeel_prefill_queued_new_tokens",
			metric == "evenkeel_rank_slots" && strings.Contains(name, `state="used"`):
			held = append(held, fmt.Sprintf("%s %v", name, v))
		}
	}
	return held
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
		if _, _, err := p.admin.Ask(http.MethodGet, "/debug/pprof/heap?gc=1", nil); err != nil {
			return v, err
		}
	}
	all, err := p.series()
	return vitals{all["go_goroutines"], all["go_memstats_heap_alloc_bytes"], all["process_resident_memory_bytes"], all["process_open_fds"]}, err
}

// end lets the proxy shut down as an operator would.
func (p *proxy) end() error {
	_ = p.process.Signal(syscall.SIGTERM) // if it is gone, Wait says so
	select {
	case <-p.process.Gone():
		if err := p.process.Err(); err != nil {
			return fmt.Errorf("it ended with %w; its log says why", err)
		}
		return nil
	case <-time.After(20 * time.Second):
		return errors.New("it has not ended 20 s after SIGTERM, with nothing under way")
	}
}

// stop ends the process however it is, and removes its files.
func (p *proxy) stop(remove bool) {
	p.process.Kill()
	p.admin.Client.CloseIdleConnections()
	if remove {
		_ = os.RemoveAll(p.dir)
	}
}
