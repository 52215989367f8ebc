package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"evenkeel/bench/refengine"
	"evenkeel/bench/world"
)

const (
	busyModel = "ref"
	idleModel = "idle"
)

// proxy is one that is measured, and its idle clients.
type proxy struct {
	*world.Proxy
	tell io.Writer
	said *bufio.Reader
	idle int
}

// start returns when the proxy is ready and its idle clients come.
func start(ctx context.Context, site *world.World, o options, n int, w way, engines []*refengine.Engine, collector string, slow int) (*proxy, error) {
	p := &proxy{Proxy: site.Proxies(strconv.Itoa(n))[0], idle: o.idle}
	crowd := exec.CommandContext(ctx, os.Args[0], "crowd", "-proxy", p.Clients, "-streams", strconv.Itoa(slow), "-connections", strconv.Itoa(o.idle-slow))
	crowd.Stderr = os.Stderr
	in, err := crowd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := crowd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.tell, p.said = in, bufio.NewReader(out)
	if err := crowd.Start(); err != nil {
		return nil, err
	}
	site.AtEnd(func() { _, _ = in.Close(), crowd.Wait() }) // it ends then
	urls, err := p.hear()                                  // of its engines
	if err != nil {
		return nil, err
	}
	prefill, decode, _ := strings.Cut(urls, " ")
	if err := p.ServeWith(ctx, settings(p, o, w, engines, prefill, decode, collector, slow), "--log-level", "warn"); err != nil {
		return nil, err
	}
	if w.page {
		if err := p.watch(ctx, site); err != nil {
			return nil, err
		}
	}
	_, err = io.WriteString(p.tell, "open\n")
	return p, err
}

// settings is the proxy's config file.
func settings(p *proxy, o options, w way, engines []*refengine.Engine, prefill, decode, collector string, slow int) string {
	var b strings.Builder
	receipts := 0
	if w.receipted {
		receipts = 10_000 // the default
	}
	fmt.Fprintf(&b, `listen: %q
admin: {listen: %q, receipts: %d}
self_test: false
pool: {size: 4096}
prefill: {queue: {max: 20000}}
health: {slow_start: 0s, canary: 0s}
limits: {idle_timeout: 2h}
`, p.Clients, p.Address, receipts)
	if w.tracing {
		fmt.Fprintf(&b, "tracing: {endpoint: %q, sample: 1}\n", collector)
	}
	b.WriteString(world.Engines(
		world.EnginesAt(append(engines[0].URLs(), prefill), ""),
		append(world.EnginesAt([]string{decode}, ", group: idle, slots: %d", max(slow, 1)), world.EnginesAt(engines[1].URLs(), ", group: busy, slots: %d", slotsOf(o))...)))
	return b.String()
}

// watch reads the stream that the page reads, until the end.
func (p *proxy) watch(ctx context.Context, site *world.World) error {
	ctx, leave := context.WithCancel(ctx)
	site.AtEnd(leave)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.Address+"/live", nil)
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
