package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/process"
	"evenkeel/bench/real/vllm"
)

// world is the engines, and evenkeel before them.
type world struct {
	options
	dir     string
	said    io.Writer // where progress is told
	engines map[string]*engine
	version string // of the engines
	proxy   *process.Process
	now     setting // what the proxy runs with
}

// setting is what differs between the proxies of the rows.
type setting struct {
	decode []string // engines by name, or addresses before them
	slots  int
	ranks  int // of each decode engine, behind one address; 0: one
}

// usual is the setting of most rows.
func (w *world) usual() setting {
	return setting{decode: []string{w.engines["d0"].url(), w.engines["d1"].url()}, slots: slots}
}

func newWorld(ctx context.Context, o options, installed *vllm.Installation, said io.Writer) (_ *world, err error) {
	w := &world{options: o, said: said}
	if w.dir, err = process.Folder(o.keep, "real"); err != nil {
		return nil, err
	}
	if w.binary, err = process.Evenkeel(ctx, o.binary, w.dir); err != nil {
		return nil, err
	}
	events := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:%d","replay_endpoint":"tcp://127.0.0.1:%d"}`, w.at(50), w.at(51))
	w.engines = map[string]*engine{
		"plain": {port: w.at(10), side: w.at(60)},
		"p0":    {port: w.at(11), side: w.at(62), flags: append(connector("kv_producer"), "--kv-events-config", events)},
		"d0":    {port: w.at(12), side: w.at(64), flags: connector("kv_consumer")},
		"d1":    {port: w.at(13), side: w.at(66), flags: connector("kv_consumer")},
		"dp":    {port: w.at(14), side: w.at(68), flags: append(connector("kv_consumer"), "--data-parallel-size", "2")},
	}
	for name, e := range w.engines {
		e.name, e.installed, e.log = name, installed, filepath.Join(w.dir, name+".log")
	}
	return w, w.portsFree()
}

func (w *world) at(offset int) int { return w.port + offset }

// portsFree says which port is taken, before an engine takes a minute to find
// out.
func (w *world) portsFree() error {
	ports := []int{w.at(0), w.at(1), w.at(50), w.at(51)}
	for _, e := range w.engines {
		ports = append(ports, e.port, e.side)
	}
	slices.Sort(ports)
	for _, port := range ports {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return fmt.Errorf("a port that this needs is taken (%w); choose others with -port", err)
		}
		_ = ln.Close()
	}
	return nil
}

// need starts those of the engines that do not run, and waits for them.
func (w *world) need(ctx context.Context, names ...string) error {
	began, missing := time.Now(), []string{}
	for _, name := range names {
		if e := w.engines[name]; !e.Running() {
			if err := e.start(); err != nil {
				return err
			}
			missing = append(missing, name)
		}
	}
	for _, name := range missing {
		if err := w.engines[name].ready(ctx); err != nil {
			return err
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(w.said, "       %s started in %.0f s\n", strings.Join(missing, ", "), time.Since(began).Seconds())
	}
	if w.version == "" {
		var v struct{ Version string }
		got := ask(ctx, "GET", w.engines[names[0]].url()+"/version", nil)
		if err := json.Unmarshal(got.body, &v); err != nil {
			return fmt.Errorf("the engine does not tell its version: %w", errors.Join(got.err, err))
		}
		w.version = "vLLM " + v.Version
	}
	return nil
}

// evenkeel has the proxy run with this setting, and waits until it is ready.
func (w *world) evenkeel(ctx context.Context, s setting) error {
	if w.proxyRuns() && slices.Equal(s.decode, w.now.decode) && s.slots == w.now.slots && s.ranks == w.now.ranks {
		return w.ready(ctx)
	}
	w.endProxy()
	file := filepath.Join(w.dir, "evenkeel.yaml")
	if err := os.WriteFile(file, []byte(w.config(s)), 0o600); err != nil {
		return err
	}
	var err error
	w.proxy, err = process.Start(exec.Command(w.binary, "serve", "--config", file), filepath.Join(w.dir, "evenkeel.log"))
	if err != nil {
		return err
	}
	w.now = s
	return w.ready(ctx)
}

func (w *world) proxyRuns() bool {
	if w.proxy == nil {
		return false
	}
	select {
	case <-w.proxy.Gone():
		return false
	default:
		return true
	}
}

func (w *world) endProxy() {
	if w.proxyRuns() {
		_ = w.proxy.Signal(syscall.SIGTERM)
		select {
		case <-w.proxy.Gone():
		case <-time.After(10 * time.Second):
		}
	}
	w.proxy.Kill()
}

func (w *world) url() string   { return fmt.Sprintf("http://127.0.0.1:%d", w.at(0)) }
func (w *world) admin() string { return fmt.Sprintf("http://127.0.0.1:%d", w.at(1)) }

// config is the proxy's config file.
func (w *world) config(s setting) string {
	var b strings.Builder
	fmt.Fprintf(&b, `listen: "127.0.0.1:%d"
admin: {listen: "127.0.0.1:%d"}
profiles:
  nixl: {connector: nixl-pull, kv_hold_timeout: 30s, chat_resume: vllm_prompt_token_ids%s}
prefill:
  kv_events: {enabled: true, port: %d, replay_port: %d}
  index: {tokenize: engine, tokenize_timeout: 2s}
  scrape: {timeout: 5s}
expose_route_headers: true
engines:
  prefill: [{url: %q, profile: nixl}]
  decode:
`, w.at(0), w.at(1), map[bool]string{true: ", dp_mode: internal"}[s.ranks > 1], w.at(50), w.at(51), w.engines["p0"].url())
	for _, url := range s.decode {
		fmt.Fprintf(&b, "    - {url: %q, profile: nixl, group: main, slots: %d", url, s.slots)
		if s.ranks > 1 {
			fmt.Fprintf(&b, ", ranks: %d", s.ranks)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// ready waits until the proxy is ready and has slots on all decode ranks.
func (w *world) ready(ctx context.Context) error {
	want := float64(len(w.now.decode) * w.now.slots * max(1, w.now.ranks))
	return process.Await(ctx, time.Minute, "evenkeel is ready, with free slots on every rank", func() bool {
		if ask(ctx, "GET", w.admin()+"/readyz", nil).status != 200 {
			return false
		}
		free := 0.0
		for name, v := range process.Series(ask(ctx, "GET", w.admin()+"/metrics", nil).body) {
			if strings.HasPrefix(name, "evenkeel_rank_slots{") && strings.Contains(name, `state="free"`) {
				free += v
			}
		}
		return free == want
	})
}

// books are the proxy's metrics.
func (w *world) books(ctx context.Context) map[string]float64 {
	return process.Series(ask(ctx, "GET", w.admin()+"/metrics", nil).body)
}

// idle waits until no engine has a request or holds KV, and the proxy's books
// agree. Its limit is less than the 30 s after which a prefill engine gives up
// KV that was not fetched, so what is free was given back.
func (w *world) idle(ctx context.Context, engines ...string) error {
	const limit = 20 * time.Second
	var left []string
	err := process.Await(ctx, limit, "nothing is held", func() bool {
		left = nil
		for _, name := range engines {
			series, err := w.engines[name].series(ctx)
			if err != nil {
				left = append(left, err.Error())
				continue
			}
			for _, g := range held {
				if v := gauge(series, g); v != 0 {
					left = append(left, fmt.Sprintf("%s %s %v", name, g, v))
				}
			}
		}
		for name, v := range w.books(ctx) {
			if v != 0 && (strings.HasPrefix(name, "evenkeel_audit_drift{") || strings.HasPrefix(name, "evenkeel_rank_kv_tokens{") ||
				strings.HasPrefix(name, "evenkeel_double_releases_total") || strings.HasPrefix(name, "evenkeel_prefill_double_releases_total")) {
				left = append(left, fmt.Sprintf("evenkeel: %s %v", name, v))
			}
		}
		return len(left) == 0
	})
	if err != nil {
		slices.Sort(left)
		return fmt.Errorf("still held after %v: %s", limit, strings.Join(left, "; "))
	}
	return nil
}

// close ends everything; remove says whether the files go.
func (w *world) close(remove bool) error {
	w.endProxy()
	done := make(chan struct{})
	for _, e := range w.engines {
		go func() { e.Stop(); done <- struct{}{} }()
	}
	for range w.engines {
		<-done
	}
	if remove && w.keep == "" {
		return os.RemoveAll(w.dir)
	}
	return nil
}
