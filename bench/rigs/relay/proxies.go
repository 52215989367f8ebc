//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"evenkeel/bench/rigs/pyenv"
	"evenkeel/bench/rigs/testbed"
)

// Names of what is measured. Direct and twoLegs are no proxy: clients ask a decode engine, or a
// prefill engine and then a decode engine.
const (
	direct       = "no proxy"
	twoLegs      = "no proxy, two legs"
	nginxName    = "nginx"
	bareName     = "net/http"
	routerName   = "vllm-router"
	evenkeelName = "evenkeel"
	beforeName   = "evenkeel before"
)

// place is what a proxy is started before.
type place struct {
	prefill, decode []string // URLs
	slots           int      // of a decode engine
	on              cores
}

// kind is a proxy that can be measured.
type kind struct {
	name    string
	legs    int    // requests to engines for each of a client
	version string // empty: it is not there
	missing string // why
	// start starts it; clients find it at an address, and ask says when it is ready.
	start func(b *bench, at string, p place) (process *testbed.Process, ready string, err error)
	page  bool // the stream that the live page reads is open
}

// proxy is one that runs.
type proxy struct {
	kind    *kind
	targets []string
	prefill []string         // that clients ask before them
	process *testbed.Process // nil: there is none
	ready   string           // the address that says so
}

func (p *proxy) pids() []int {
	if p.process == nil {
		return nil
	}
	return family(p.process.Pid)
}

func (p *proxy) end() {
	if p.process != nil && p.process.End(3*time.Second) != nil {
		p.process.Kill()
	}
}

// run starts a proxy of this kind and waits until it answers.
func (k *kind) run(ctx context.Context, b *bench, p place) (*proxy, error) {
	if k.start == nil {
		without := &proxy{kind: k, targets: addresses(p.decode)}
		if k.legs == 2 {
			without.prefill = addresses(p.prefill)
		}
		return without, nil
	}
	at := testbed.FreeAddresses(1)[0]
	process, ready, err := k.start(b, at, p)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", k.name, err)
	}
	run := &proxy{kind: k, targets: []string{at}, process: process, ready: ready}
	if err := process.Answers(ctx, 60*time.Second, ready); err != nil {
		run.end()
		return nil, fmt.Errorf("%s: %w; %s has its log", k.name, err, b.world.Dir)
	}
	if k.page {
		if err := openPage(ctx, strings.TrimSuffix(ready, "/readyz")); err != nil {
			run.end()
			return nil, fmt.Errorf("%s: %w", k.name, err)
		}
	}
	return run, nil
}

func addresses(urls []string) (list []string) {
	for _, u := range urls {
		list = append(list, strings.TrimPrefix(u, "http://"))
	}
	return list
}

// kinds are all proxies, those that are missing too.
func (b *bench) kinds(ctx context.Context, o options) []*kind {
	list := []*kind{
		{name: direct, legs: 1, version: "-"}, {name: twoLegs, legs: 2, version: "-"}, findNginx(ctx),
		{name: bareName, legs: 1, version: runtime.Version(), start: (*bench).startBare}, b.findRouter(ctx, o.cache),
	}
	if o.before != "" {
		list = append(list, &kind{name: beforeName, legs: 2, version: versionOf(ctx, o.before), start: startEvenkeel(o.before, receipts, "")})
	}
	if o.watched {
		for _, w := range watched {
			collector := ""
			if w.traced {
				collector = b.collector
			}
			list = append(list, &kind{name: w.name, legs: 2, version: versionOf(ctx, b.world.Binary),
				start: startEvenkeel(b.world.Binary, w.receipts, collector), page: w.page})
		}
	}
	return append(list,
		&kind{name: evenkeelName, legs: 2, version: versionOf(ctx, b.world.Binary), start: startEvenkeel(b.world.Binary, receipts, "")})
}

func versionOf(ctx context.Context, binary string) string {
	said, err := exec.CommandContext(ctx, binary, "version").Output()
	if err != nil {
		return "of an unknown version"
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(string(said), "evenkeel "), "\n")
	return first
}

// startEvenkeel keeps that many receipts, and sends spans of every request to a collector unless it
// is empty.
func startEvenkeel(binary string, receipts int, collector string) func(b *bench, at string, p place) (*testbed.Process, string, error) {
	return func(b *bench, at string, p place) (*testbed.Process, string, error) {
		admin := testbed.FreeAddresses(1)[0]
		tracing := ""
		if collector != "" {
			tracing = fmt.Sprintf("tracing: {endpoint: %q, sample: 1}\n", collector)
		}
		err := b.world.Write("evenkeel.yaml",
			fmt.Sprintf("listen: %q\nadmin: {listen: %q, receipts: %d}\nself_test: false\nprefill: {push: {max_unanswered: %d}}\n", at, admin,
				receipts, prefills)+tracing+
				testbed.Engines(testbed.EnginesAt(p.prefill, ""), testbed.EnginesAt(p.decode, ", slots: %d", p.slots)))
		if err != nil {
			return nil, "", err
		}
		cmd := exec.Command(binary, "serve", "--config", b.world.File("evenkeel.yaml"), "--log-level", "warn")
		cmd.Env = append(os.Environ(), fmt.Sprintf("GOMAXPROCS=%d", len(p.on)))
		process, err := b.start("evenkeel", cmd, p.on)
		return process, "http://" + admin + "/readyz", err
	}
}

func (b *bench) startBare(at string, p place) (*testbed.Process, string, error) {
	cmd := exec.Command(os.Args[0], append([]string{"bare-proxy", at}, p.decode...)...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("GOMAXPROCS=%d", len(p.on)))
	process, err := b.start("bare-proxy", cmd, p.on)
	return process, "http://" + at + "/health", err
}

// runBare is what net/http gives: ReverseProxy, flushing at once, round robin.
func runBare(listen string, engines []string) error {
	targets := make([]*url.URL, len(engines))
	for i, e := range engines {
		u, err := url.Parse(e)
		if err != nil {
			return err
		}
		targets[i] = u
	}
	var next atomic.Uint64
	rp := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(targets[next.Add(1)%uint64(len(targets))]) },
		FlushInterval: -1,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1024, IdleConnTimeout: 60 * time.Second},
	}
	server := &http.Server{Addr: listen, Handler: rp, ReadHeaderTimeout: 10 * time.Second}
	return server.ListenAndServe()
}

func findNginx(ctx context.Context) *kind {
	k := &kind{name: nginxName, legs: 1, missing: "not installed; Debian's package is nginx-light"}
	path, err := exec.LookPath("nginx")
	if err != nil {
		return k
	}
	said, err := exec.CommandContext(ctx, path, "-v").CombinedOutput()
	if err != nil {
		k.missing = err.Error()
		return k
	}
	_, k.version, _ = strings.Cut(strings.TrimSpace(string(said)), "nginx/")
	k.start = func(b *bench, at string, p place) (*testbed.Process, string, error) {
		if err := b.world.Write("nginx.conf", nginxConfig(at, p, b.files)); err != nil {
			return nil, "", err
		}
		process, err := b.start(nginxName, exec.Command(path, "-c", b.world.File("nginx.conf"), "-p", b.world.Dir), p.on)
		return process, "http://" + at + "/health", err
	}
	return k
}

// nginxConfig passes requests on to the engines in turn. It has a worker for each core, and workers
// that share the streams evenly need a socket each.
func nginxConfig(listen string, p place, files int) string {
	servers, reuse := "", ""
	for _, e := range p.decode {
		servers += fmt.Sprintf("    server %s;\n", strings.TrimPrefix(e, "http://"))
	}
	if len(p.on) > 1 {
		reuse = " reuseport"
	}
	return fmt.Sprintf(`daemon off;
worker_processes %d;
error_log stderr error;
pid nginx.pid;
events { worker_connections %d; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  upstream engines {
    keepalive 1024;
%s  }
  server {
    listen %s backlog=4096%s;
    client_max_body_size 32m;
    location / {
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }
  }
}
`, len(p.on), files-spare/2, servers, listen, reuse)
}

// routerVersion is the one that is installed and measured.
const routerVersion = "0.1.17"

// findRouter installs vllm-router into a cache folder, unless it is there.
func (b *bench) findRouter(ctx context.Context, cache string) *kind {
	k := &kind{name: routerName, legs: 2}
	env, err := pyenv.At(cache, "relay")
	if err == nil && !env.Has(ctx, routerName, routerVersion) {
		fmt.Fprintf(b.out, "%s %s is being installed into %s: 130 MB\n", routerName, routerVersion, env.Dir)
		err = errors.Join(env.Create(ctx), env.Run(ctx, "python", "-m", "pip", "-q", "install", routerName+"=="+routerVersion))
	}
	if err != nil {
		k.missing = fmt.Sprintf("not installed, and it cannot be: %v", err)
		return k
	}
	k.version = routerVersion
	k.start = func(b *bench, at string, p place) (*testbed.Process, string, error) {
		host, port, err := net.SplitHostPort(at)
		if err != nil {
			return nil, "", err
		}
		_, metrics, err := net.SplitHostPort(testbed.FreeAddresses(1)[0])
		if err != nil {
			return nil, "", err
		}
		args := []string{"--host", host, "--port", port, "--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "warning",
			"--prometheus-port", metrics, "--worker-startup-check-interval", "1"}
		for _, u := range p.prefill {
			args = append(args, "--prefill", u)
		}
		for _, u := range p.decode {
			args = append(args, "--decode", u)
		}
		cmd := exec.Command(env.Bin(routerName), args...)
		cmd.Env = append(os.Environ(), fmt.Sprintf("TOKIO_WORKER_THREADS=%d", len(p.on)))
		process, err := b.start(routerName, cmd, p.on)
		return process, "http://" + at + "/health", err
	}
	return k
}
