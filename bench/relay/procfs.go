package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ticks is the kernel's USER_HZ, 100 on every Linux that Go runs on.
const ticks = 100

// cpu is the CPU time of the proxy's processes so far.
func (p *proxy) cpu() (sum time.Duration, err error) {
	for _, pid := range p.pids() {
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

// rss is the resident memory of the proxy's processes in bytes.
func (p *proxy) rss() (sum int64) {
	for _, pid := range p.pids() {
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

// watchMemory samples until the function it returns is called, which tells the
// most it saw.
func (p *proxy) watchMemory() (most func() int64) {
	stop, result := make(chan struct{}), make(chan int64)
	go func() {
		var top int64
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				top = max(top, p.rss())
			case <-stop:
				result <- top
				return
			}
		}
	}()
	return func() int64 { close(stop); return <-result }
}

// children are the processes whose parent is pid: nginx's workers.
func children(pid int) (list []int) {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(f); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}
