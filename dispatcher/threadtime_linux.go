package dispatcher

import (
	"time"

	"golang.org/x/sys/unix"
)

// hasThreadTime says whether threadTime tells anything.
const hasThreadTime = true

// threadTime is the CPU time that the calling thread has used since it began.
func threadTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0 // the kernel has had this clock since 2.6.12
	}
	return time.Duration(t.Nano())
}
