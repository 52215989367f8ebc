//go:build !linux

package dispatcher

import "time"

const hasThreadTime = false

func threadTime() time.Duration { return 0 }
