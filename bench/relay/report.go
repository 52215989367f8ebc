//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"evenkeel/bench/report"
	"evenkeel/bench/world"
)

const head = `# What a relayed token costs

This page is for people who ask how much CPU time and memory a proxy costs. It compares evenkeel
with other proxies, on the same engines and under the same load. All programs share one machine,
so compare the ratios and not the times. ` + "`make bench-relay`" + ` wrote it; [Testing](../testing.md)
says how to run it.

| proxy | what it does with a request |
|---|---|
| nginx | It sends the request to one engine, which prefills for itself, and copies the bytes of the answer. |
| net/http | It is Go's own reverse proxy, and does the same as nginx. |
| vllm-router | It sends the request to a prefill engine and then to a decode engine. |
| evenkeel | It does the same as vllm-router. It also reads each event of the answer, counts its tokens, and can continue the answer on another engine. |
| evenkeel before | It is another build of evenkeel, such as that of the last release. |

The engines are [reference engines](../glossary.md#reference-engine). At every step, a decode rank
gives a token to each of its requests. It gives the first token at once. The prefill engine computes
64 prompts at once, and evenkeel is told so (` + "`prefill.push.max_unanswered`" + `).

Each row names its regime. How much a chunk costs depends on it, so no figure of one regime stands
for another one.

| regime | what engines and clients do |
|---|---|
| in steps | A rank writes the tokens of a step all at once, at its end. The proxy wakes once and passes many chunks on, so a chunk costs less. |
| spread | Each stream gets its tokens at times of its own, spread over the step, as from an engine whose server writes a step's tokens one after the other. The proxy wakes for nearly every chunk. |
| no number of tokens is named | All streams are open before the measurement begins, and none ends in it. No request is in the figure. |
| 64 tokens per answer | A request follows each answer that ends. The CPU time per chunk includes the requests: here one for every 64 chunks. |
| unpaced | Engines write as fast as they can. A request follows each answer. |
| one token each, one after the other | Each client sends its next request when it has the answer, so that the proxy is never idle. |
| one token each, 400 requests/s, spread | Requests come one by one at this rate, and the proxy is idle between them. |

Clients read on one thread and check each answer: its status is 200, it has as many events as
tokens, and it has ` + "`[DONE]`" + `. In a row with one core, the proxy has a core of its own, and engines
and clients have the others. In a row with two cores on a machine of two, all programs share both.

| figure | what it is |
|---|---|
| streams | The number of answers that are open at the same time. *2,500 chunks/s* is the rate of all of them together. |
| chunk | The event of an answer that carries one token. |
| CPU time | The user and system time of all processes of the proxy, per chunk, while all streams are open. |
| memory | The largest resident memory. Per stream, it is this memory less that of the process before its first request, divided by the number of streams. |
| what is added | A percentile of what clients see behind the proxy, less the same percentile without a proxy in the same round. Below 0, clients saw the token sooner behind the proxy. Without a proxy, clients ask a decode engine. vllm-router and evenkeel make two requests of each. To compare with these, clients make the two requests themselves, one after the other, so that the engines have the same work. |
| gap | The time between two chunks of one stream. |
| to nginx, × 1.09 (1.08 to 1.25) | evenkeel's figure divided by that of nginx. The ratio is made within each round. The first number is the median of the rounds; the smallest and the largest stand in brackets. |
| every other figure | The median of the rounds. |

A measurement is made again if other programs used more than a tenth of the CPUs during it. The
fourth try stands, however much they used.
`

// report prints what is in the store, and writes the page and its plots if wanted.
func (s *store) report(b *bench) error {
	if len(s.Samples) == 0 {
		return nil
	}
	s.write(b.out, b)
	if b.page == "" {
		return nil
	}
	var page bytes.Buffer
	page.WriteString(head + "\n")
	s.write(&page, b)
	pictures := filepath.Join(filepath.Dir(b.page), "..", "img")
	if err := errors.Join(os.MkdirAll(filepath.Dir(b.page), 0o755), os.MkdirAll(pictures, 0o755)); err != nil {
		return err
	}
	for _, f := range figures {
		picture, err := s.draw(f)
		if err != nil {
			return err
		}
		if err := report.Replace(filepath.Join(pictures, f.file), picture); err != nil {
			return err
		}
		fmt.Fprintf(&page, "\n![%s](../img/%s)\n", f.title, f.file)
	}
	return report.Replace(b.page, page.Bytes())
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
		if slices.ContainsFunc(s.Samples, func(m Sample) bool { return m.Proxy == name }) {
			list = append(list, name)
		}
	}
	return list
}

func (s *store) write(out io.Writer, b *bench) {
	rounds, others := 0, 0.0
	for _, m := range s.Samples {
		rounds, others = max(rounds, m.Round+1), max(others, m.Others)
	}
	fmt.Fprintf(out, "%d CPUs, %s, Linux on %s, %d rounds of %v. A process may open %s files here, and a\n"+
		"proxy needs two per stream. Other programs used at most %.0f %% of the CPUs during a measurement.\n\n",
		runtime.NumCPU(), runtime.Version(), runtime.GOARCH, rounds, b.window, grouped(b.files), others*100)
	fmt.Fprint(out, "| proxy | version |\n|---|---|\n")
	for _, name := range names() {
		if p, ok := s.Peers[name]; ok {
			if p.Version = s.versions(name); p.Version == "" {
				p.Version = "not measured: " + p.Missing
			}
			fmt.Fprintf(out, "| %s | %s |\n", name, p.Version)
		}
	}
	s.writeVerdicts(out)
	s.writeProfiles(out)
	s.writeCPU(out)
	s.writeMemory(out)
	s.writeTimes(out)
	s.writeRequests(out)
	s.writeMissing(out, b)
}

// writeMissing names the rows for which a process may not open enough files.
func (s *store) writeMissing(out io.Writer, b *bench) {
	for _, r := range rows {
		if r.files() > b.files && !slices.ContainsFunc(s.Samples, func(m Sample) bool { return m.Row == r.name }) {
			fmt.Fprintf(out, "\nThe row of %s streams was not run: a proxy needs %s files for it.\n", grouped(r.streams), grouped(r.files()))
		}
	}
}

// each calls f for every row and number of cores that was measured.
func (s *store) each(f func(r row, cores int)) {
	for _, r := range rows {
		for _, n := range r.cores {
			if slices.ContainsFunc(s.Samples, func(m Sample) bool { return m.Row == r.name && m.Cores == n }) {
				f(r, n)
			}
		}
	}
}

// table begins a table.
func table(out io.Writer, title, first string, columns ...string) {
	fmt.Fprintf(out, "\n## %s\n\n| %s | %s |\n|---|%s\n", title, first, strings.Join(columns, " | "), strings.Repeat("--:|", len(columns)))
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
	proxies := s.measured()
	table(out, "CPU time per chunk, µs", "streams", append(append([]string{"cores"}, proxies...), "evenkeel to nginx", "to net/http", "to vllm-router")...)
	s.each(func(r row, n int) {
		if r.shape == single {
			return
		}
		cells := []string{fmt.Sprint(n)}
		for _, p := range proxies {
			v, ok := s.median(r.name, n, p, chunkCPU)
			cells = append(cells, cell(ok, "%.1f%s", v, s.late(r, n, p)))
		}
		for _, p := range []string{nginxName, bareName, routerName} {
			v, ok := s.compare(r.name, n, evenkeelName, p, chunkCPU, ratio)
			cells = append(cells, v.cell(ok))
		}
		fmt.Fprintf(out, "| %s | %s |\n", r.title(), strings.Join(cells, " | "))
	})
}

func cell(ok bool, format string, args ...any) string {
	if !ok {
		return "–"
	}
	return fmt.Sprintf(format, args...)
}

func (v spread) cell(ok bool) string {
	return cell(ok, "× %.2f (%.2f to %.2f)", v.median, v.low, v.high)
}

func (s *store) writeMemory(out io.Writer) {
	proxies := s.measured()
	table(out, "Resident memory, MiB (KiB per stream)", "streams", append([]string{"cores"}, proxies...)...)
	s.each(func(r row, n int) {
		if r.shape != standing && r.shape != turning {
			return
		}
		cells := []string{fmt.Sprint(n)}
		for _, p := range proxies {
			v, ok := s.median(r.name, n, p, resident)
			one, _ := s.median(r.name, n, p, perStream)
			cells = append(cells, cell(ok, "%.0f (%.1f)%s", v, one, s.late(r, n, p)))
		}
		fmt.Fprintf(out, "| %s | %s |\n", r.title(), strings.Join(cells, " | "))
	})
	fmt.Fprintf(out, "\nBefore the first request, with one core:")
	for i, p := range proxies {
		var idle []float64
		for _, m := range s.Samples {
			if m.Proxy == p && m.Cores == 1 {
				idle = append(idle, world.MiB(m.Idle))
			}
		}
		if len(idle) > 0 {
			fmt.Fprintf(out, "%s %s %.0f MiB", map[bool]string{true: ",", false: ""}[i > 0], p, world.Median(idle))
		}
	}
	fmt.Fprintln(out, ".")
}

// writeTimes has a line for each proxy and row.
func (s *store) writeTimes(out io.Writer) {
	table(out, "What is added to what clients see, ms: p50 / p99 / p99.9", "streams", "cores", "proxy", "to the first token", "to gaps", "failed streams", "CPUs of engines and clients in use")
	s.each(func(r row, n int) {
		if r.shape != standing && r.shape != turning {
			return
		}
		for _, p := range append([]string{direct, twoLegs}, s.measured()...) {
			if _, ok := s.median(r.name, n, p, chunkCPU); !ok {
				continue
			}
			added := func(of func(Sample) Times) string {
				var parts []string
				for _, at := range []func(Times) float64{func(t Times) float64 { return t.P50 }, func(t Times) float64 { return t.P99 }, func(t Times) float64 { return t.P999 }} {
					figure := func(m Sample) float64 { return at(of(m)) / 1e3 }
					v, _ := s.median(r.name, n, p, figure)
					ok := true
					if base := without(p); base != p {
						var d spread
						d, ok = s.compare(r.name, n, p, base, figure, difference)
						v = d.median
					}
					parts = append(parts, cell(ok, "%.1f", v))
				}
				return strings.Join(parts, " / ")
			}
			name := p + s.late(r, n, p)
			if without(p) == p {
				name += ", the times themselves"
			}
			load, _ := s.median(r.name, n, p, func(m Sample) float64 { return m.Load * 100 })
			fmt.Fprintf(out, "| %s | %d | %s | %s | %s | %s | %.0f %% |\n", r.title(), n, name, added(func(m Sample) Times { return m.TTFT }),
				added(func(m Sample) Times { return m.Gaps }), s.failures(r, n, p), load)
		}
	})
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
	for _, m := range s.Samples {
		if m.Row == r.name && m.Cores == cores && m.Proxy == proxy {
			failed, all = failed+m.Failed, all+m.Failed+m.Whole
		}
	}
	return fmt.Sprintf("%d of %s", failed, grouped(all))
}

func (s *store) writeRequests(out io.Writer) {
	proxies := s.measured()
	table(out, "Requests, and streams without a pace", "load", append(append([]string{"cores"}, proxies...), "evenkeel to vllm-router")...)
	s.each(func(r row, n int) {
		if r.shape != single && r.shape != unpaced {
			return
		}
		cells := []string{fmt.Sprint(n)}
		of, what := requestCPU, "requests"
		if r.shape == unpaced {
			of, what = chunkCPU, "streams"
		}
		for _, p := range proxies {
			v, ok := s.median(r.name, n, p, of)
			rate, _ := s.median(r.name, n, p, func(m Sample) float64 { return m.Requests })
			format := "%.0f µs per request, %.0f %s/s"
			if r.shape == unpaced {
				format = "%.1f µs per token, %.0f %s/s"
			}
			cells = append(cells, cell(ok, format, v, rate, what))
		}
		v, ok := s.compare(r.name, n, evenkeelName, routerName, of, ratio)
		fmt.Fprintf(out, "| %s | %s | %s |\n", r.title(), strings.Join(cells, " | "), v.cell(ok))
	})
}
