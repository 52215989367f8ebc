//go:build linux

package main

import (
	"fmt"
	"io"
)

// aim is one figure that a relay must reach, with one core for the proxy.
type aim struct {
	what string
	most float64
	// is reads the figure; ok is false where it was not measured.
	is   func(s *store) (v spread, ok bool)
	unit string // of a figure that is no ratio
	row  string // whose number of streams the verdict tells if it is not the row's
}

// aims are what evenkeel must show.
var aims = []aim{
	{what: "CPU per chunk, 100 streams, to nginx", most: 1.35, is: cpuTo("100", nginxName, chunkCPU)},
	{what: "CPU per chunk, 1,000 streams, to nginx", most: 1.25, is: cpuTo("1000", nginxName, chunkCPU)},
	{what: "CPU per chunk, 100 streams, to net/http", most: 1, is: cpuTo("100", bareName, chunkCPU)},
	{what: "CPU per chunk, 1,000 streams, to net/http", most: 1, is: cpuTo("1000", bareName, chunkCPU)},
	{what: "CPU per chunk, 100 streams, to vllm-router", most: 1, is: cpuTo("100", routerName, chunkCPU)},
	{what: "CPU per chunk, 1,000 streams, to vllm-router", most: 1, is: cpuTo("1000", routerName, chunkCPU)},
	{what: "CPU per token, unpaced, to evenkeel before", most: 1, is: cpuTo("unpaced", beforeName, chunkCPU)},
	{what: "CPU per request of one token, to vllm-router", most: 0.75, is: cpuTo("single", routerName, requestCPU)},
	{what: "resident, 1,000 streams", most: 60, unit: " MiB", is: figure("1000", resident), row: "1000"},
	{what: "resident, 10,000 streams", most: 160, unit: " MiB", is: figure("10000", resident), row: "10000"},
	{what: "added to the first token, 2,000 streams, p99", most: 8, unit: " ms", is: func(s *store) (spread, bool) {
		return s.compare("ttft", 1, evenkeelName, without(evenkeelName), func(m Sample) float64 { return m.TTFT.P99 / 1e3 }, difference)
	}},
	{what: "growth of CPU per chunk from 1,000 streams to 30,000, to nginx's", most: 1.2, is: growth, row: "30000"},
}

func cpuTo(row, peer string, of func(Sample) float64) func(s *store) (spread, bool) {
	return func(s *store) (spread, bool) { return s.compare(row, 1, evenkeelName, peer, of, ratio) }
}

func figure(row string, of func(Sample) float64) func(s *store) (spread, bool) {
	return func(s *store) (spread, bool) {
		return s.compare(row, 1, evenkeelName, evenkeelName, of, func(a, _ float64) float64 { return a })
	}
}

// growth is how many times what it costs at 1,000 streams evenkeel's chunk costs at
// 30,000, over the same of nginx. Where the limit of files allows evenkeel fewer, nginx's
// is taken at 10,000, the row that is nearest.
func growth(s *store) (v spread, ok bool) {
	peer := "30000"
	if n, ok := s.median(peer, 1, evenkeelName, func(m Sample) float64 { return float64(m.Streams) }); ok && n < 15_000 {
		peer = "10000"
	}
	few, a := s.compare("1000", 1, evenkeelName, nginxName, chunkCPU, ratio)
	many, b := s.compare(peer, 1, evenkeelName, nginxName, chunkCPU, ratio)
	return spread{many.median / few.median, many.low / few.high, many.high / few.low}, a && b
}

func (s *store) writeVerdicts(out io.Writer) {
	fmt.Fprint(out, "\n| evenkeel must show, with one core | at most | is | |\n|---|--:|--:|---|\n")
	for _, a := range aims {
		v, ok := a.is(s)
		form := func(x float64) string {
			if a.unit == "" {
				return fmt.Sprintf("× %.2f", x)
			}
			return fmt.Sprintf("%.1f%s", x, a.unit)
		}
		is, verdict := "–", "not measured"
		if ok {
			is, verdict = fmt.Sprintf("%s (%s to %s)", form(v.median), form(v.low), form(v.high)), "**not met**"
			if v.median <= a.most {
				verdict = "met"
			}
			for _, r := range rows {
				if r.name == a.row {
					is += s.streams(r, 1, evenkeelName)
				}
			}
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", a.what, form(a.most), is, verdict)
	}
}
