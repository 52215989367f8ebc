//go:build unix

package edge

import (
	"fmt"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// RaiseFileLimit raises the soft limit of open files to the hard limit, and returns it. It logs a
// warning if the limit stays below want: two files for each running request.
func RaiseFileLimit(log *zap.Logger, want uint64) (uint64, error) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	before := uint64(lim.Cur)
	if lim.Cur < lim.Max {
		lim.Cur = lim.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
			return before, fmt.Errorf("raise the limit of open files from %d to %d: %w; set it with ulimit -n or LimitNOFILE", before, lim.Max, err)
		}
	}
	now := uint64(lim.Cur)
	if now < want {
		log.Warn("the limit of open files is low; raise the hard limit with ulimit -Hn or LimitNOFILE", zap.Uint64("limit", now),
			zap.Uint64("wanted", want))
	} else {
		log.Info("the limit of open files is high enough", zap.Uint64("limit", now), zap.Uint64("at_start", before))
	}
	return now, nil
}
