//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel/bench/rigs/testbed"
)

// store is what was measured, in a file if it has one.
type store struct {
	Samples  []Sample
	Peers    map[string]peer
	Profiles map[string][]Cost `json:",omitempty"` // of rows that missed an aim, with one core

	path string
}

type peer struct{ Version, Missing string }

func openStore(path string) (*store, error) {
	s := &store{Peers: map[string]peer{}, Profiles: map[string][]Cost{}, path: path}
	if path == "" {
		return s, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	return s, json.Unmarshal(text, s)
}

func (s *store) save() error {
	if s.path == "" {
		return nil
	}
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(s.path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(s.path, text, 0o600)
}

// next is the first round of a row that was not measured yet.
func (s *store) next(row string, cores int) (round int) {
	for _, m := range s.Samples {
		if m.Row == row && m.Cores == cores {
			round = max(round, m.Round+1)
		}
	}
	return round
}

// values are what each round says of a proxy under a row; nil: it was not measured.
func (s *store) values(row string, cores int, proxy string, of func(Sample) float64) (list []float64) {
	for _, m := range s.Samples {
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
	for _, x := range s.Samples {
		if x.Row != row || x.Cores != cores || x.Proxy != a {
			continue
		}
		for _, y := range s.Samples {
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

// versions are those of a proxy whose samples are in the store, with their rows where there are several.
func (s *store) versions(proxy string) string {
	rows := map[string][]string{}
	for _, m := range s.Samples {
		if m.Proxy == proxy && !slices.Contains(rows[m.Version], m.Row) {
			rows[m.Version] = append(rows[m.Version], m.Row)
		}
	}
	if len(rows) <= 1 {
		return cmp.Or(strings.Join(slices.Collect(maps.Keys(rows)), ""), s.Peers[proxy].Version)
	}
	var list []string
	for _, version := range slices.Sorted(maps.Keys(rows)) {
		list = append(list, version+" (rows "+strings.Join(rows[version], ", ")+")")
	}
	return strings.Join(list, "; ")
}
