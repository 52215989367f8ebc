//go:build linux

package main

import (
	"fmt"
	"io"
	"slices"
)

// aim is one figure that a relay must reach, with one core for the proxy.
type aim struct {
	what string
	most float64
	// is reads the figure; ok is false where it was not measured.
	is   func(s *store) (v spread, ok bool)
	unit string // of a figure that is no ratio
}

// aims are what evenkeel must show.
var aims = slices.Concat(
	[]aim{
		{what: "CPU per chunk, 100 streams in steps, to nginx", most: 1.35, is: cpuTo("100", nginxName, chunkCPU)},
		{what: "CPU per chunk, 1,000 streams in steps, to nginx", most: 1.25, is: cpuTo("1000", nginxName, chunkCPU)},
		{what: "CPU per chunk, 100 streams spread, requests included, to nginx", most: 1.6, is: cpuTo("spread-100", nginxName, chunkCPU)},
		{what: "CPU per chunk, 1,000 streams spread, requests included, to nginx", most: 1.3, is: cpuTo("spread-1000", nginxName, chunkCPU)},
	},
	toOthers("100 streams in steps", "100"), toOthers("1,000 streams in steps", "1000"),
	toOthers("100 streams spread, requests included", "spread-100"), toOthers("1,000 streams spread, requests included", "spread-1000"),
	[]aim{
		{what: "CPU per token, unpaced, to evenkeel before", most: 1, is: cpuTo("unpaced", beforeName, chunkCPU)},
		{what: "CPU per request of one token, one after the other, to vllm-router", most: 0.85, is: cpuTo("single", routerName, requestCPU)},
		{what: "CPU per request of one token, spread, to vllm-router", most: 0.85, is: cpuTo("spread-single", routerName, requestCPU)},
		{what: "resident, 1,000 streams in steps", most: 60, unit: " MiB", is: figure("1000", resident)},
		{what: "resident, 1,000 streams spread, requests included", most: 60, unit: " MiB", is: figure("spread-1000", resident)},
		{what: "resident, 2,000 streams spread, requests included", most: 70, unit: " MiB", is: figure("spread-2000", resident)},
		{what: "resident, 9,500 streams in steps", most: 155, unit: " MiB", is: figure("9500", resident)},
		{what: "added to the first token, 2,000 streams in steps, requests included, p99", most: 8, unit: " ms",
			is: func(s *store) (spread, bool) {
				return s.compare("ttft", 1, evenkeelName, without(evenkeelName), func(m Sample) float64 { return m.TTFT.P99 / 1e3 }, difference)
			}},
		{what: "growth of CPU per chunk from 1,000 streams in steps to 9,500, to nginx's", most: 1.2, is: growth},
	})

// toOthers are the aims of a row beside the proxies that do not only copy bytes.
func toOthers(load, row string) (list []aim) {
	for _, peer := range []string{bareName, routerName} {
		list = append(list, aim{what: fmt.Sprintf("CPU per chunk, %s, to %s", load, peer), most: 1, is: cpuTo(row, peer, chunkCPU)})
	}
	return list
}

func cpuTo(row, peer string, of func(Sample) float64) func(s *store) (spread, bool) {
	return func(s *store) (spread, bool) { return s.compare(row, 1, evenkeelName, peer, of, ratio) }
}

func figure(row string, of func(Sample) float64) func(s *store) (spread, bool) {
	return func(s *store) (spread, bool) {
		return s.compare(row, 1, evenkeelName, evenkeelName, of, func(a, _ float64) float64 { return a })
	}
}

// growth is the cost of evenkeel's chunk at 9,500 streams divided by that at 1,000, over the same
// ratio of nginx.
func growth(s *store) (v spread, ok bool) {
	few, a := s.compare("1000", 1, evenkeelName, nginxName, chunkCPU, ratio)
	many, b := s.compare("9500", 1, evenkeelName, nginxName, chunkCPU, ratio)
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
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", a.what, form(a.most), is, verdict)
	}
}
