//go:build linux

// Command relay measures what a proxy costs: evenkeel beside nginx, a bare net/http
// reverse proxy and vLLM's router, on the same engines under the same load in one
// run. It prints CPU time per chunk, memory a stream and what is added to the times
// that clients see; compare the ratios, machines are noisy.
//
// nginx and the bare proxy send each request to one engine, which prefills for
// itself. vLLM's router and evenkeel send it to a prefill engine and then to a
// decode engine, and evenkeel does all it does: parse, probe, pool, decide, count,
// edit.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"time"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/internal/stats"
)

type options struct {
	testbed.Options
	out     io.Writer
	rows    *regexp.Regexp
	proxies *regexp.Regexp
	rounds  int
	window  time.Duration
	before  string
	cache   string
	page    string
	watched bool
}

func main() { testbed.Main("relay", testbed.Page(run, []string{"-page", "docs/results/relay.md"})) }

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 {
		switch args[0] { // helpers and a peer, as processes of their own
		case "bare-proxy":
			return runBare(args[1], args[2:])
		case "clients":
			return runClients()
		case "engines":
			return runEngines()
		}
	}
	o := options{out: out}
	flags := o.Flags("relay")
	rows := flags.String("rows", ".*", "rows to run: a pattern of their names, such as 1000 or 1000/2, with two cores for the proxy")
	proxies := flags.String("proxies", ".*", "proxies to run: a pattern of their names")
	flags.IntVar(&o.rounds, "rounds", 2, "times that each proxy is measured, in turn")
	flags.DurationVar(&o.window, "window", 5*time.Second, "how long a measurement lasts")
	flags.StringVar(&o.before, "before", "", "another evenkeel that is measured as well, such as that of the last release")
	flags.StringVar(&o.cache, "cache", "", "folder for vllm-router; empty: evenkeel/relay in the user's cache folder")
	flags.StringVar(&o.page, "page", "", "page whose tables are written")
	flags.BoolVar(&o.watched, "watched", false,
		"measure evenkeel as well with the live page open, with every request traced, and without receipts")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	var err error
	for _, p := range []struct {
		text string
		to   **regexp.Regexp
	}{{*rows, &o.rows}, {*proxies, &o.proxies}} {
		if *p.to, err = regexp.Compile("^(?:" + p.text + `)(?:/\d)?$`); err != nil {
			return err
		}
	}
	return o.run(ctx)
}

func (o options) run(ctx context.Context) (err error) {
	b := &bench{options: o}
	if b.cores, err = allCores(); err != nil {
		return err
	}
	if b.files, err = fileLimit(); err != nil {
		return err
	}
	if b.world, err = testbed.New(ctx, "relay", o.Options); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.world.Close(err == nil)) }()
	if o.watched {
		c, err := openCollector()
		if err != nil {
			return err
		}
		b.collector = c.url
		defer func() {
			err = errors.Join(err,
				c.close(err == nil && slices.ContainsFunc(watched, func(w way) bool { return w.traced && o.proxies.MatchString(w.name) })))
		}()
	}
	kinds := b.kinds(ctx, o)
	s := &store{peers: map[string]peer{}}
	for _, k := range kinds {
		s.peers[k.name] = peer{k.version, k.missing}
	}
	for _, r := range rows {
		for _, n := range r.cores {
			if !o.rows.MatchString(fmt.Sprintf("%s/%d", r.name, n)) {
				continue
			}
			if err := b.row(ctx, r, n, kinds, s); err != nil {
				return fmt.Errorf("row %s: %w", r.name, err)
			}
		}
	}
	return s.report(b)
}

// row measures all proxies under a row, in turn.
func (b *bench) row(ctx context.Context, r row, n int, kinds []*kind, s *store) error {
	_, rest := share(b.cores, n)
	fmt.Fprintf(b.out, "\n%s, %d %s for the proxy\n", r.title(), n, map[bool]string{true: "core", false: "cores"}[n == 1])
	if r.files() > b.files {
		fmt.Fprintf(b.out, "  not run: a proxy needs %s files for it, and a process may open %s; raise the limit (ulimit -n)\n",
			stats.Grouped(r.files()), stats.Grouped(b.files))
		return nil
	}
	at, err := b.engines(r, rest)
	if err != nil {
		return err
	}
	defer at.end()
	for round := range b.rounds {
		for _, k := range kinds {
			if k.version == "" || !b.proxies.MatchString(k.name) {
				continue
			}
			var m Sample
			for range tries {
				var err error
				if m, err = b.measure(ctx, r, k, at, n, round); err != nil {
					return err
				}
				fmt.Fprintf(b.out, "  %d %-18s %s\n", round+1, k.name, m)
				if m.Others <= mostOthers {
					break
				}
			}
			s.samples = append(s.samples, m)
		}
	}
	return nil
}

// A measurement beside which other programs used more than this share of the CPUs is made again, as
// often as there are tries: then the last one stands, and the page says how much they used.
const (
	mostOthers = 0.10
	tries      = 4
)

func (m Sample) String() string {
	text := fmt.Sprintf("%5d streams  %6.1f µs a chunk  %6.0f µs a request  %7.0f chunks/s  %6.0f requests/s  %6.1f MiB (%.1f idle)  TTFT "+
		"%.1f %.1f  gaps %.1f %.1f %.1f ms  load %.0f %%, others %.0f %%",
		m.Streams, testbed.Micros(m.Chunk), testbed.Micros(m.Request), m.Chunks, m.Requests, testbed.MiB(m.RSS), testbed.MiB(m.Idle),
		m.TTFT.P50/1e3, m.TTFT.P99/1e3, m.Gaps.P50/1e3, m.Gaps.P99/1e3, m.Gaps.P999/1e3, m.Load*100, m.Others*100)
	if m.Failed > 0 {
		text += fmt.Sprintf("  %d of %d failed: %v", m.Failed, m.Failed+m.Whole, m.Why)
	}
	return text
}
