package testbed

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/refengine"
)

// Books are the series of a proxy that are 0 while it has nothing to do.
var Books = []string{
	"evenkeel_requests_open", "evenkeel_bodies_bytes", "evenkeel_pool_entries", "evenkeel_rank_kv_tokens", "evenkeel_rank_running",
	"evenkeel_prefill_inflight_requests", "evenkeel_handoffs", "evenkeel_prefill_held_tokens", "evenkeel_prefill_queued_new_tokens",
	"evenkeel_geo_forwards_inflight", "evenkeel_bind_callbacks_expected", "evenkeel_audit_drift", "evenkeel_double_releases_total",
	"evenkeel_prefill_double_releases_total",
}

// Held lists what of these books is not 0, and slots that are used.
func Held(who string, all map[string]float64, books ...string) (held []string) {
	for name, v := range all {
		metric, labels, _ := strings.Cut(name, "{")
		used := metric == "evenkeel_rank_slots" && strings.Contains(labels, `state="used"`)
		if v != 0 && (used || slices.Contains(books, metric)) {
			held = append(held, fmt.Sprintf("%s: %s %v", who, name, v))
		}
	}
	return held
}

// HeldBy lists what an engine still holds.
func HeldBy(who string, s refengine.Stats) []string {
	return append(UsedBy(who, s), told(who, "KV tokens for nobody", s.Stranded())...)
}

// UsedBy lists what an engine still holds for requests.
func UsedBy(who string, s refengine.Stats) []string {
	return slices.Concat(told(who, "running", s.Running), told(who, "waiting", s.Waiting), told(who, "hand-offs", int64(s.Pins)),
		told(who, "KV tokens", s.KVUsed-s.Stranded()))
}

func told(who, what string, n int64) []string {
	if n == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s: %d %s", who, n, what)}
}

// Idle waits until nothing is held any more.
func Idle(ctx context.Context, limit time.Duration, held func() []string) error {
	var last []string
	err := Await(ctx, limit, "nothing is held", func() bool { last = held(); return len(last) == 0 })
	if err != nil && ctx.Err() == nil {
		slices.Sort(last)
		return fmt.Errorf("held %v after the last request: %s", limit, strings.Join(last, "; "))
	}
	return err
}
