package process

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
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
