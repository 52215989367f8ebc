//go:build linux

package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// report prints what is in the store, and writes the tables of the page if wanted.
func (s *store) report(b *bench) error {
	if len(s.samples) == 0 {
		return nil
	}
	s.write(b.out, b)
	if b.page == "" {
		return nil
	}
	var tables strings.Builder
	s.write(&tables, b)
	return page.Write(b.page, "claim NAME=relay", "relay", "What a relayed token costs", tables.String())
}

// names are those of all proxies, in the order of the tables.
func names() []string {
	list := []string{nginxName, bareName, routerName, beforeName, evenkeelName}
	for _, w := range watched {
		list = append(list, w.name)
	}
	return list
}

// measured are the proxies of which there is a sample, direct left out.
func (s *store) measured() (list []string) {
	for _, name := range names() {
		if slices.ContainsFunc(s.samples, func(m Sample) bool { return m.Proxy == name }) {
			list = append(list, name)
		}
	}
	return list
}

func (s *store) write(out io.Writer, b *bench) {
	rounds, others := 0, 0.0
	for _, m := range s.samples {
		rounds, others = max(rounds, m.Round+1), max(others, m.Others)
	}
	fmt.Fprintf(out, "%d CPUs, %s, Linux on %s, %d rounds of %v. A process may open %s files here, and a\n"+
		"proxy needs two per stream. Other programs used at most %.0f %% of the CPUs during a measurement.\n\n",
		runtime.NumCPU(), runtime.Version(), runtime.GOARCH, rounds, b.window, stats.Grouped(b.files), others*100)
	fmt.Fprint(out, "| proxy | version |\n|---|---|\n")
	for _, name := range names() {
		if p, ok := s.peers[name]; ok {
			if p.version == "" {
				p.version = "not measured: " + p.missing
			}
			fmt.Fprintf(out, "| %s | %s |\n", name, p.version)
		}
	}
	s.writeVerdicts(out)
	s.writeCPU(out)
	s.writeMemory(out)
	s.writeTimes(out)
	s.writeRequests(out)
	s.writeMissing(out, b)
}

// writeMissing names the rows for which a process may not open enough files.
func (s *store) writeMissing(out io.Writer, b *bench) {
	for _, r := range rows {
		if r.files() > b.files && !slices.ContainsFunc(s.samples, func(m Sample) bool { return m.Row == r.name }) {
			fmt.Fprintf(out, "\nThe row of %s streams was not run: a proxy needs %s files for it.\n", stats.Grouped(r.streams),
				stats.Grouped(r.files()))
		}
	}
}

// load is a row with a number of cores for the proxy.
type load struct {
	row
	n int
}

// loads are those of some shapes that were measured.
func (s *store) loads(of ...shape) (list []load) {
	for _, r := range rows {
		for _, n := range r.cores {
			if slices.Contains(of, r.shape) && slices.ContainsFunc(s.samples, func(m Sample) bool { return m.Row == r.name && m.Cores == n }) {
				list = append(list, load{r, n})
			}
		}
	}
	return list
}

// table writes a row for each load: its name, the cores, and what cells say of each proxy; then
// evenkeel's ratio to some of them.
func (s *store) table(out io.Writer, title, first string, loads []load, cell func(l load, proxy string) string,
	ratios ...page.Cells[load]) {
	columns := []page.Cells[load]{{Title: "cores", Of: func(l load) string { return fmt.Sprint(l.n) }}}
	for _, p := range s.measured() {
		columns = append(columns, page.Cells[load]{Title: p, Of: func(l load) string { return cell(l, p) }})
	}
	fmt.Fprintf(out, "\n## %s\n\n%s", title, page.Rows(first, loads, load.title, append(columns, ratios...)...))
}

// to is a column with evenkeel's figure divided by that of another proxy.
func (s *store) to(title, proxy string, of func(l load) func(Sample) float64) page.Cells[load] {
	return page.Cells[load]{Title: title, Of: func(l load) string {
		v, ok := s.compare(l.name, l.n, evenkeelName, proxy, of(l), ratio)
		return cell(ok, "× %.2f (%.2f to %.2f)", v.median, v.low, v.high)
	}}
}

// late says that a proxy was so late that some streams had ended by the time that all were open.
func (s *store) late(r row, cores int, proxy string) string {
	ended := s.values(r.name, cores, proxy, func(m Sample) float64 { return m.Requests })
	if r.shape == standing && len(ended) > 0 && slices.Max(ended) > 0 {
		return " (overloaded: streams ended before all were open)"
	}
	return ""
}

func (s *store) writeCPU(out io.Writer) {
	of := func(load) func(Sample) float64 { return chunkCPU }
	s.table(out, "CPU time per chunk, µs", "streams", s.loads(standing, turning, unpaced), func(l load, p string) string {
		v, ok := s.median(l.name, l.n, p, chunkCPU)
		return cell(ok, "%.1f%s", v, s.late(l.row, l.n, p))
	}, s.to("evenkeel to nginx", nginxName, of), s.to("to net/http", bareName, of), s.to("to vllm-router", routerName, of))
}

func cell(ok bool, format string, args ...any) string {
	if !ok {
		return "–"
	}
	return fmt.Sprintf(format, args...)
}

func (s *store) writeMemory(out io.Writer) {
	s.table(out, "Resident memory, MiB (KiB per stream)", "streams", s.loads(standing, turning), func(l load, p string) string {
		v, ok := s.median(l.name, l.n, p, resident)
		one, _ := s.median(l.name, l.n, p, perStream)
		return cell(ok, "%.0f (%.1f)%s", v, one, s.late(l.row, l.n, p))
	})
	fmt.Fprintf(out, "\nBefore the first request, with one core:")
	for i, p := range s.measured() {
		var idle []float64
		for _, m := range s.samples {
			if m.Proxy == p && m.Cores == 1 {
				idle = append(idle, testbed.MiB(m.Idle))
			}
		}
		if len(idle) > 0 {
			fmt.Fprintf(out, "%s %s %.0f MiB", map[bool]string{true: ",", false: ""}[i > 0], p, testbed.Median(idle))
		}
	}
	fmt.Fprintln(out, ".")
}

// writeTimes has a line for each proxy and load.
func (s *store) writeTimes(out io.Writer) {
	t := page.Markdown{Head: []string{"streams", "cores", "proxy", "to the first token", "to gaps", "failed streams",
		"CPUs of engines and clients in use"}}
	for _, l := range s.loads(standing, turning) {
		for _, p := range append([]string{direct, twoLegs}, s.measured()...) {
			if _, ok := s.median(l.name, l.n, p, chunkCPU); !ok {
				continue
			}
			base := without(p)
			added := func(of func(Sample) Times) string {
				var parts []string
				for _, at := range []func(Times) float64{func(t Times) float64 { return t.P50 }, func(t Times) float64 { return t.P99 },
					func(t Times) float64 { return t.P999 }} {
					figure := func(m Sample) float64 { return at(of(m)) / 1e3 }
					v, _ := s.median(l.name, l.n, p, figure)
					ok := true
					if base != p {
						var d spread
						d, ok = s.compare(l.name, l.n, p, base, figure, difference)
						v = d.median
					}
					parts = append(parts, cell(ok, "%.1f", v))
				}
				return strings.Join(parts, " / ")
			}
			name := p + s.late(l.row, l.n, p)
			if base == p {
				name += ", the times themselves"
			}
			busy, _ := s.median(l.name, l.n, p, func(m Sample) float64 { return m.Load * 100 })
			t.Add(l.title(), fmt.Sprint(l.n), name, added(func(m Sample) Times { return m.TTFT }), added(func(m Sample) Times { return m.Gaps }),
				s.failures(l.row, l.n, p), fmt.Sprintf("%.0f %%", busy))
		}
	}
	fmt.Fprintf(out, "\n## What is added to what clients see, ms: p50 / p99 / p99.9\n\n%v", &t)
}

// without is what a proxy's times are compared with: clients that make as many requests themselves.
func without(proxy string) string {
	switch proxy {
	case direct, nginxName, bareName:
		return direct
	}
	return twoLegs
}

// failures says how many streams failed of how many.
func (s *store) failures(r row, cores int, proxy string) string {
	failed, all := 0, 0
	for _, m := range s.samples {
		if m.Row == r.name && m.Cores == cores && m.Proxy == proxy {
			failed, all = failed+m.Failed, all+m.Failed+m.Whole
		}
	}
	return fmt.Sprintf("%d of %s", failed, stats.Grouped(all))
}

func (s *store) writeRequests(out io.Writer) {
	of := func(l load) func(Sample) float64 {
		if l.shape == unpaced {
			return chunkCPU
		}
		return requestCPU
	}
	s.table(out, "Requests, and streams without a pace", "load", s.loads(single, unpaced), func(l load, p string) string {
		v, ok := s.median(l.name, l.n, p, of(l))
		rate, _ := s.median(l.name, l.n, p, func(m Sample) float64 { return m.Requests })
		if l.shape == unpaced {
			return cell(ok, "%.1f µs per token, %.0f streams/s", v, rate)
		}
		return cell(ok, "%.0f µs per request, %.0f requests/s", v, rate)
	}, s.to("evenkeel to vllm-router", routerName, of))
}
