package testbed

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Series reads what a program says at /metrics: name and labels to value.
func Series(page []byte) map[string]float64 {
	all := map[string]float64{}
	for line := range strings.Lines(string(page)) {
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || line[0] == '#' {
			continue
		}
		var v float64
		if _, err := fmt.Sscan(line[at+1:], &v); err == nil {
			all[line[:at]] = v
		}
	}
	return all
}

// Sum adds up the series of a page whose names begin so.
func Sum(page []byte, prefix string) (sum float64) {
	for name, v := range Series(page) {
		if strings.HasPrefix(name, prefix) {
			sum += v
		}
	}
	return sum
}

// Await polls until something holds, for so long.
func Await(ctx context.Context, limit time.Duration, what string, holds func() bool) error {
	for end := time.Now().Add(limit); ; {
		if holds() {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("after %v it is not so that %s", limit, what)
		}
		if err := Pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// Pause waits; its error is that of ctx, if that ends first.
func Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
