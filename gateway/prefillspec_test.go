package gateway_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// What dashboards of the prefill tier are made of, by labels.
var prefillMetrics = map[string][]string{
	"prefill_decisions_total":               {"policy", "reason"},
	"prefill_decision_seconds":              {},
	"prefill_candidates":                    {"state"},
	"prefill_inflight_requests":             {"candidate"},
	"prefill_queued_new_tokens":             {"candidate"},
	"prefill_held_tokens":                   {"candidate", "state"},
	"prefill_kv_usage_ratio":                {"candidate", "source"},
	"prefill_gate_open":                     {"candidate"},
	"prefill_canaries_total":                {"candidate", "outcome"},
	"prefill_probe_seconds":                 {"candidate", "outcome"},
	"prefill_queue_wait_seconds":            {},
	"prefill_attempts_total":                {"outcome"},
	"prefill_retry_budget_exhausted_total":  {},
	"prefill_policy_errors_total":           {"policy"},
	"prefill_filter_skipped_total":          {"filter"},
	"prefix_prompt_tokens_total":            {},
	"prefix_hit_tokens_total":               {"source"},
	"prefix_misprediction_tokens":           {"direction"},
	"prefix_feedback_available":             {"model"},
	"prefix_index_bytes":                    {},
	"prefix_index_entries":                  {},
	"prefix_index_evictions_total":          {"reason"},
	"kv_events_batches_total":               {"candidate"},
	"kv_events_gaps_total":                  {"candidate", "result"},
	"kv_events_lag_seconds":                 {"candidate"},
	"hotspot_classes":                       {"state"},
	"hotspot_filtered_requests_total":       {},
	"affinity_total":                        {"outcome"},
	"local_prefill_requests_total":          {},
	"calibration_prefill_seconds_per_token": {"model"},
	"calibration_r2_ratio":                  {"model"},
}

// That the proxy has what docs/metrics.md has, and nothing else, is in TestMetrics.
func TestThePrefillTierHasItsMetrics(t *testing.T) {
	t.Parallel()
	docs := metricsDoc(t)
	for name, labels := range prefillMetrics {
		row, ok := docs["evenkeel_"+name]
		require.True(t, ok, name)
		require.Subset(t, slices.Collect(maps.Keys(row.labels)), labels, name)
	}
}
