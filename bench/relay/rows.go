//go:build linux

package main

import (
	"fmt"
	"time"
)

// row is one load.
type row struct {
	name    string // for -rows
	streams int
	rate    int // chunks a second of all streams together
	shape   shape
	cores   []int // for the proxy, one run each
}

// shape is what clients do.
type shape int

const (
	standing shape = iota // every stream is one answer, and all are there together
	turning               // an answer that ends is followed by a request, on the same connection
	unpaced               // so, and engines write as fast as they can
	single                // so, and an answer is one token
)

// rows are what is measured.
var rows = []row{
	{"100", 100, 2_500, standing, []int{1}},
	{"1000", 1_000, 20_000, standing, []int{1, 2}},
	{"4000", 4_000, 20_000, standing, []int{1}},
	{"10000", 10_000, 20_000, standing, []int{1}},
	{"30000", 30_000, 20_000, standing, []int{1}},
	{"ttft", 2_000, 20_000, turning, []int{1, 2}},
	{"unpaced", 64, 0, unpaced, []int{1}},
	{"single", 32, 0, single, []int{1, 2}},
}

const (
	promptTokens  = 64
	turningTokens = 100 // of an answer
	unpacedTokens = 150
	settle        = time.Second
	slack         = 2 * time.Second // a proxy may be so late to have opened all streams, and a fifth of what opening should take
)

// opening is how long it takes to open all streams.
func opening(streams int) time.Duration {
	return time.Duration(float64(streams) / max(500, float64(streams)/30) * float64(time.Second))
}

// step is the time between two chunks of a stream.
func (r row) step(streams int) time.Duration {
	if r.rate == 0 {
		return 0
	}
	return time.Duration(float64(streams) / float64(r.rate) * float64(time.Second))
}

// ranks is the number of decode engines: a rank has at most so many requests.
func ranks(streams int) int { return max(8, (streams+249)/250) }

// job is what clients do for a row, with so many streams and a window of that length.
func (r row) job(streams int, window time.Duration) Job {
	j := Job{Streams: streams, Rate: float64(streams) / opening(streams).Seconds(), Prompt: promptTokens, Step: r.step(streams)}
	switch r.shape {
	case standing:
		j.Lasts = opening(streams)*6/5 + settle + window + slack + j.Step
	case turning:
		j.Tokens = turningTokens
	case unpaced:
		j.Tokens = unpacedTokens
	case single:
		j.Tokens = 1
	}
	return j
}

// title names a row in tables.
func (r row) title() string {
	switch r.shape {
	case unpaced:
		return fmt.Sprintf("%d, unpaced", r.streams)
	case single:
		return fmt.Sprintf("%d, one token each", r.streams)
	}
	return fmt.Sprintf("%s, %s chunks/s", grouped(r.streams), grouped(r.rate))
}

// grouped writes 12500 as 12,500.
func grouped(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}
