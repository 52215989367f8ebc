//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// used is the processor time of a process so far, user and system, of threads that
// have ended too. It is the sum that /proc/PID/stat has in hundredths of a second, to
// the nanosecond.
func used(pid int) (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED of the process: what clock_getcpuclockid(3) makes of a pid
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduled), &t); err != nil {
		return 0, fmt.Errorf("the CPU clock of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// usedBy is what processes have used together.
func usedBy(pids []int) (all time.Duration, err error) {
	for _, pid := range pids {
		one, err := used(pid)
		if err != nil {
			return all, err
		}
		all += one
	}
	return all, nil
}

// machine is the processor time that all programs have used so far, and what other
// machines on the same hardware have taken from this one.
func machine() (time.Duration, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return 0, err
	}
	s, err := fs.Stat()
	if err != nil {
		return 0, err
	}
	c := s.CPUTotal
	return time.Duration((c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal) * float64(time.Second)), nil
}

// family is a process and those that it started, such as nginx's workers.
func family(pid int) []int {
	list := []int{pid}
	paths, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is right
	for _, path := range paths {
		text, _ := os.ReadFile(path) // empty: the thread has ended
		for _, f := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(f); err == nil {
				list = append(list, family(n)...)
			}
		}
	}
	return list
}

// fileLimit is how many files a process may have open, raised as far as it goes.
func fileLimit() (int, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("getrlimit: %w", err)
	}
	for _, most := range []uint64{1 << 20, l.Max} { // more than the hard limit is for root with CAP_SYS_RESOURCE
		if try := (unix.Rlimit{Cur: max(most, l.Cur), Max: max(most, l.Max)}); unix.Setrlimit(unix.RLIMIT_NOFILE, &try) == nil {
			return int(try.Cur), nil
		}
	}
	return int(l.Cur), nil
}
