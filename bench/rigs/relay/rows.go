//go:build linux

package main

import (
	"fmt"
	"time"

	"evenkeel/internal/stats"
)

// row is one load.
type row struct {
	name    string // for -rows
	streams int
	rate    int // chunks per second of all streams together, of single: requests per second; 0: as fast as they go
	shape   shape
	tokens  int  // of an answer; of standing ones, as many as its time lasts
	spread  bool // each stream gets its tokens at times of its own, and not all of a rank together
	cores   []int
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
	{"100", 100, 2_500, standing, 0, false, []int{1}},
	{"1000", 1_000, 20_000, standing, 0, false, []int{1, 2}},
	{"4000", 4_000, 20_000, standing, 0, false, []int{1}},
	{"9500", 9_500, 20_000, standing, 0, false, []int{1}}, // a limit of 20,000 files allows a proxy so many
	{"ttft", 2_000, 20_000, turning, 100, false, []int{1}},
	{"spread-100", 100, 2_500, turning, 64, true, []int{1}},
	{"spread-1000", 1_000, 20_000, turning, 96, true, []int{1}},
	{"spread-2000", 2_000, 20_000, turning, 96, true, []int{1}},
	{"unpaced", 64, 0, unpaced, 150, false, []int{1}},
	{"single", 32, 0, single, 1, false, []int{1}},
	{"spread-single", 100, 400, single, 1, true, []int{1}},
}

const (
	promptTokens = 64
	settle       = time.Second
	slack        = 2 * time.Second // a proxy may be so late to have opened all streams, and a fifth of what opening should take
)

// opening is how long it takes to open all streams.
func (r row) opening() time.Duration {
	return time.Duration(float64(r.streams) / max(500, float64(r.streams)/30) * float64(time.Second))
}

// each is the time in which every stream has its turn once.
func (r row) each() time.Duration {
	if r.rate == 0 {
		return 0
	}
	return time.Duration(float64(r.streams) / float64(r.rate) * float64(time.Second))
}

// step is the time between two chunks of a stream.
func (r row) step() time.Duration {
	if r.shape == single {
		return 0
	}
	return r.each()
}

// ranks is the number of decode engines: a rank has at most 250 requests.
func (r row) ranks() int { return max(8, (r.streams+249)/250) }

// slots of a rank: more than its share, so that no request waits for one.
func (r row) slots() int { return r.streams/r.ranks()*5/4 + 8 }

// files is how many a proxy has open: two sockets for each stream, and some beside them.
func (r row) files() int { return 2*r.streams + spare }

// job is what clients do for a row, with a window of that length.
func (r row) job(window time.Duration) Job {
	j := Job{Streams: r.streams, Rate: float64(r.streams) / r.opening().Seconds(), Prompt: promptTokens, Tokens: r.tokens, Step: r.step()}
	switch r.shape {
	case standing:
		j.Lasts = r.opening()*6/5 + settle + window + slack + j.Step
	case single:
		j.Every = r.each()
	}
	return j
}

// title names a row in tables, with its regime.
func (r row) title() string {
	switch {
	case r.shape == unpaced:
		return fmt.Sprintf("%d, unpaced", r.streams)
	case r.shape == single && r.rate == 0:
		return fmt.Sprintf("%d, one token each, one after the other", r.streams)
	case r.shape == single:
		return fmt.Sprintf("%d, one token each, %d requests/s, spread", r.streams, r.rate)
	}
	text := fmt.Sprintf("%s, %s chunks/s, ", stats.Grouped(r.streams), stats.Grouped(r.rate))
	if r.spread {
		text += "spread"
	} else {
		text += "in steps"
	}
	if r.shape == turning {
		text += fmt.Sprintf(", %d tokens per answer", r.tokens)
	}
	return text
}
