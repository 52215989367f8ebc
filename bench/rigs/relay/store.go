//go:build linux

package main

import (
	"slices"

	"evenkeel/bench/rigs/testbed"
)

// store is what was measured.
type store struct {
	samples []Sample
	peers   map[string]peer
}

type peer struct{ version, missing string }

// values are what each round says of a proxy under a row; nil: it was not measured.
func (s *store) values(row string, cores int, proxy string, of func(Sample) float64) (list []float64) {
	for _, m := range s.samples {
		if m.Row == row && m.Cores == cores && m.Proxy == proxy {
			list = append(list, of(m))
		}
	}
	return list
}

// median is that of all rounds; ok is false where there are none.
func (s *store) median(row string, cores int, proxy string, of func(Sample) float64) (v float64, ok bool) {
	list := s.values(row, cores, proxy, of)
	if len(list) == 0 {
		return 0, false
	}
	return testbed.Median(list), true
}

// spread is a median with the least and the most of the rounds.
type spread struct{ median, low, high float64 }

// compare joins what each round says of two proxies: a machine that slowed down
// slowed both.
func (s *store) compare(row string, cores int, a, b string, of func(Sample) float64, join func(a, b float64) float64) (r spread, ok bool) {
	var list []float64
	for _, x := range s.samples {
		if x.Row != row || x.Cores != cores || x.Proxy != a {
			continue
		}
		for _, y := range s.samples {
			if y.Row == row && y.Cores == cores && y.Proxy == b && y.Round == x.Round {
				list = append(list, join(of(x), of(y)))
			}
		}
	}
	if len(list) == 0 {
		return r, false
	}
	return spread{testbed.Median(list), slices.Min(list), slices.Max(list)}, true
}

func ratio(a, b float64) float64 { return a / b }

func difference(a, b float64) float64 { return a - b }

func chunkCPU(m Sample) float64   { return testbed.Micros(m.Chunk) }
func requestCPU(m Sample) float64 { return testbed.Micros(m.Request) }
func resident(m Sample) float64   { return testbed.MiB(m.RSS) }

// perStream is the memory of a stream in KiB, beyond the process that idles.
func perStream(m Sample) float64 { return float64(m.RSS-m.Idle) / 1024 / float64(m.Streams) }
