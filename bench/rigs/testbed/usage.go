package testbed

import (
	"slices"
	"time"

	"github.com/prometheus/procfs"
)

// RSS is the resident memory of these processes in bytes; one that has ended
// has none.
func RSS(pids ...int) (sum int64) {
	for _, pid := range pids {
		p, err := procfs.NewProc(pid)
		if err != nil {
			continue
		}
		if s, err := p.Stat(); err == nil {
			sum += int64(s.ResidentMemory())
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

// Micros and MiB are how tables show time and memory.
func Micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// MiB is of bytes.
func MiB[N int64 | float64](bytes N) float64 { return float64(bytes) / (1 << 20) }

// Median is of values in any order: of an even number, the mean of the two in the middle.
func Median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
