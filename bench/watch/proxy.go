package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"evenkeel/bench/process"
	"evenkeel/bench/refengine"
)

const (
	busyModel = "ref"
	idleModel = "idle"
)

// proxy is one that is measured, its idle clients, and who watches it.
type proxy struct {
	clients, admin string // addresses
	serve          *process.Process
	crowd          *exec.Cmd
	tell           io.WriteCloser
	said           *bufio.Reader
	leave          context.CancelFunc // of the page's watcher; nil: there is none
	idle           int
}

// start returns when the proxy is ready and its idle clients come. What it returns
// beside an error wants to be closed, too.
func start(ctx context.Context, o options, dir string, n int, w way, engines []*refengine.Engine, collector string, slow int) (*proxy, error) {
	p := &proxy{clients: "127.0.0.1:" + process.FreePort(), admin: "127.0.0.1:" + process.FreePort(), idle: o.idle}
	p.crowd = exec.CommandContext(ctx, os.Args[0], "crowd", "-proxy", p.clients, "-streams", strconv.Itoa(slow), "-connections", strconv.Itoa(o.idle-slow))
	p.crowd.Stderr = os.Stderr
	var err error
	if p.tell, err = p.crowd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.crowd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.said = bufio.NewReader(out)
	if err := p.crowd.Start(); err != nil {
		return nil, err
	}
	urls, err := p.hear() // of its engines
	if err != nil {
		return p, err
	}
	prefill, decode, _ := strings.Cut(urls, " ")
	file := filepath.Join(dir, strconv.Itoa(n)+".yaml")
	if err := os.WriteFile(file, []byte(settings(p, o, w, engines, prefill, decode, collector, slow)), 0o600); err != nil {
		return p, err
	}
	log := filepath.Join(dir, strconv.Itoa(n)+".log")
	if p.serve, err = process.Start(exec.Command(o.binary, "serve", "--config", file, "--log-level", "warn"), log); err != nil {
		return p, err
	}
	if err := p.serve.Answers(ctx, "http://"+p.admin+"/readyz"); err != nil {
		text, _ := os.ReadFile(log) // without it the error says enough
		return p, fmt.Errorf("%w: %s", err, text)
	}
	if w.page {
		if err := p.watch(ctx); err != nil {
			return p, err
		}
	}
	_, err = io.WriteString(p.tell, "open\n")
	return p, err
}

// settings is the proxy's config file.
func settings(p *proxy, o options, w way, engines []*refengine.Engine, prefill, decode, collector string, slow int) string {
	var b strings.Builder
	receipts, shadows := 0, ""
	if w.receipted {
		receipts = 10_000 // the default
	}
	if w.shadows {
		shadows = "pjsq-kv, br0"
	}
	fmt.Fprintf(&b, `listen: %q
admin: {listen: %q, receipts: %d}
self_test: false
dispatch: {shadow: [%s]}
pool: {size: 4096}
prefill: {queue: {max: 20000}}
health: {slow_start: 0s, canary: 0s}
limits: {idle_timeout: 2h}
`, p.clients, p.admin, receipts, shadows)
	if w.tracing {
		fmt.Fprintf(&b, "tracing: {endpoint: %q, sample: 1}\n", collector)
	}
	fmt.Fprintf(&b, "engines:\n  prefill:\n    - {url: %q}\n    - {url: %q}\n  decode:\n    - {url: %q, group: idle, slots: %d}\n", engines[0].URLs()[0], prefill, decode, max(slow, 1))
	for _, u := range engines[1].URLs() {
		fmt.Fprintf(&b, "    - {url: %q, group: busy, slots: %d}\n", u, slotsOf(o))
	}
	return b.String()
}

// watch reads the stream that the page reads, until the proxy is closed.
func (p *proxy) watch(ctx context.Context) error {
	ctx, p.leave = context.WithCancel(ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.admin+"/live", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept-Encoding", "gzip") // as browsers do; so this process does not unpack it
	resp, err := http.DefaultClient.Do(req)   //nolint:bodyclose // closed when it ends, below
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}()
	return nil
}

// held asks the crowd how many of the idle clients the proxy holds, which is all
// or an error.
func (p *proxy) held() error {
	if _, err := io.WriteString(p.tell, "count\n"); err != nil {
		return err
	}
	text, err := p.hear()
	if err != nil {
		return err
	}
	if n, err := strconv.Atoi(text); err != nil || n != p.idle {
		return fmt.Errorf("%s of %d idle clients are there", text, p.idle)
	}
	return nil
}

// hear is the next line of the crowd.
func (p *proxy) hear() (string, error) {
	text, err := p.said.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("the idle clients' process ended: %w", err)
	}
	return strings.TrimSpace(text), nil
}

// memory is what the proxy's last collection of garbage left, by its own metrics:
// the next one is due when that has doubled, and stacks count once.
func (p *proxy) memory() (int64, error) {
	_, page, err := process.Admin{Address: p.admin, Client: http.DefaultClient}.Ask(http.MethodGet, "/metrics", nil)
	if err != nil {
		return 0, err
	}
	all := process.Series(page)
	next, there := all["go_memstats_next_gc_bytes"]
	stacks, too := all["go_memstats_stack_inuse_bytes"]
	if !there || !too {
		return 0, errors.New("its metrics do not say how much memory it has in use")
	}
	return int64((next + stacks) / 2), nil
}

func (p *proxy) pid() int { return p.serve.Pid }

func (p *proxy) close() {
	if p.leave != nil {
		p.leave()
	}
	p.serve.Kill()
	_ = p.tell.Close() // it ends then
	_ = p.crowd.Wait()
}
