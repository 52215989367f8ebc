package world

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/load"
	"evenkeel/stats"
)

// ticks is the kernel's USER_HZ, 100 on every Linux that Go runs on.
const ticks = 100

// CPU is the processor time of these processes so far. It asks Linux's /proc.
func CPU(pids ...int) (sum time.Duration, err error) {
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, err
		}
		// The name in parentheses may hold spaces: fields count from behind it.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		for _, f := range fields[11:13] { // utime, stime
			n, err := strconv.ParseInt(f, 10, 64)
			if err != nil {
				return 0, err
			}
			sum += time.Duration(n) * time.Second / ticks
		}
	}
	return sum, nil
}

// RSS is the resident memory of these processes in bytes; one that has ended
// has none.
func RSS(pids ...int) (sum int64) {
	for _, pid := range pids {
		statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if err != nil {
			continue
		}
		pages, err := strconv.ParseInt(strings.Fields(string(statm))[1], 10, 64)
		if err == nil {
			sum += pages * int64(os.Getpagesize())
		}
	}
	return sum
}

// PeakRSS samples resident memory until the function it returns is called, which
// tells the most it saw.
func PeakRSS(pids func() []int) (most func() int64) {
	stop, result := make(chan struct{}), make(chan int64)
	go func() {
		var top int64
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				top = max(top, RSS(pids()...))
			case <-stop:
				result <- top
				return
			}
		}
	}()
	return func() int64 { close(stop); return <-result }
}

// Wave is what programs took for some streams.
type Wave struct {
	*load.Result
	Chunk time.Duration // of CPU, for each event
	RSS   int64         // bytes, the most seen
}

// Measure sends a load, as many streams as there are requests and all at once, and
// measures the processes that serve it.
func Measure(ctx context.Context, pids func() []int, c load.Config) (w Wave, err error) {
	c.Concurrency, c.Stream, c.Chat = len(c.Requests), 1, 0.5
	before, err := CPU(pids()...)
	if err != nil {
		return w, err
	}
	most := PeakRSS(pids)
	w.Result, err = load.Run(ctx, c)
	w.RSS = most()
	if err != nil {
		return w, err
	}
	after, err := CPU(pids()...)
	if err != nil {
		return w, err
	}
	w.Chunk = (after - before) / time.Duration(max(1, w.Events))
	if w.OK != len(c.Requests) {
		err = fmt.Errorf("%d of %d streams ended well: %v", w.OK, len(c.Requests), w.Kinds)
	}
	return w, err
}

// Micros and MiB are how tables show time and memory.
func Micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// MiB is of bytes.
func MiB[N int64 | float64](bytes N) float64 { return float64(bytes) / (1 << 20) }

// Median is of values in any order.
func Median(values []float64) float64 { return stats.Median(slices.Sorted(slices.Values(values))) }
