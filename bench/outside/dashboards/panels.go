package main

// dashboard is one page of panels.
type dashboard struct {
	file, title, says string
	rows              []row
}

type row struct {
	title  string
	panels []panel
}

// panel is one picture. An expression has metric names as they are: the
// selectors of job and instance are put in when it is written. $rate is the
// window of rates.
type panel struct {
	title, says string
	kind        kind
	unit        string // as Grafana calls it
	lines       []line
	idle        string // why it may be empty though all is well; empty: it may not
	zero        bool   // anything but 0 is red
}

type kind string

const (
	graph kind = "timeseries"
	stat  kind = "stat"
)

type line struct{ expr, legend string }

func one(expr, legend string) []line { return []line{{expr, legend}} }

func quantiles(histogram, by string) []line {
	legend, group := "", "le"
	if by != "" {
		legend, group = " {{"+by+"}}", "le, "+by
	}
	return []line{
		{"histogram_quantile(0.5, sum by (" + group + ") (rate(" + histogram + "_bucket[$rate])))", "p50" + legend},
		{"histogram_quantile(0.99, sum by (" + group + ") (rate(" + histogram + "_bucket[$rate])))", "p99" + legend},
	}
}

// failed are the outcomes that are no fault of the client; rules.yaml has the
// same.
const failed = "engine_error|queue_full|queue_timeout|prefill_kv_exhausted|pool_timeout|draining|prefill_unavailable|prefill_failed|" +
	"prefill_timeout|decode_unavailable|decode_failed|decode_timeout|engine_unavailable|group_incomplete|engine_failed|" +
	"engine_timeout|overloaded|peer_lost|no_region_available|upstream_broken|upstream_incomplete|engine_drained|recompute_unresumable|internal_error"

const noMixed = "only where ranks prefill and decode"

var dashboards = []dashboard{overview, decodeBoard, prefillBoard, regionsBoard}

var overview = dashboard{
	file: "overview.json", title: "evenkeel: overview",
	says: "What to look at first at 3 a.m.: is it up, is it right, who waits, and for what.",
	rows: []row{
		{"Is it up, is it right", []panel{
			{title: "Failed requests", says: "Share that failed by no fault of their clients.", kind: stat, unit: "percentunit",
				lines: one(`(sum(rate(evenkeel_requests_total{outcome=~"`+failed+`"}[$rate])) or vector(0)) / sum(rate(evenkeel_requests_total[$rate]))`, ""), zero: true},
			{title: "Books off by", says: "evenkeel_audit_drift: a leak of ours.", kind: stat, unit: "short", lines: one(`sum(abs(evenkeel_audit_drift))`, ""), zero: true},
			{title: "Double releases", kind: stat, unit: "short", lines: one(`sum(evenkeel_double_releases_total) + sum(evenkeel_prefill_double_releases_total)`, ""), zero: true},
			{title: "Late pulls", says: "Answers withheld because they could have been made of somebody else's KV.", kind: stat, unit: "short",
				lines: one(`sum(increase(evenkeel_late_pulls_total[1h]))`, ""), zero: true},
			{title: "Incidents, bad", says: "Requests fail or wait because of them. The live page says more.", kind: stat, unit: "short",
				lines: one(`count(evenkeel_incident{severity="bad"}) or vector(0)`, ""), zero: true},
			{title: "Incidents, others", says: "They are worth a look.", kind: stat, unit: "short",
				lines: one(`count(evenkeel_incident{severity="warn"}) or vector(0)`, ""), zero: true},
		}},
		{"What clients see", []panel{
			{title: "Requests by outcome", kind: graph, unit: "reqps", lines: one(`sum by (outcome) (rate(evenkeel_requests_total[$rate])) > 0`, "{{outcome}}")},
			{title: "Time to first token", kind: graph, unit: "s", lines: quantiles("evenkeel_ttft_seconds", "")},
			{title: "Time per output token", kind: graph, unit: "s", lines: quantiles("evenkeel_tpot_seconds", "")},
			{title: "Gap between tokens", kind: graph, unit: "s", lines: quantiles("evenkeel_itl_seconds", "")},
			{title: "Time of requests that one engine serves alone", kind: graph, unit: "s", lines: quantiles("evenkeel_passed_seconds", "endpoint"),
				idle: "there are no such requests, as embeddings are"},
			{title: "Open", kind: graph, unit: "short", lines: []line{{`sum(evenkeel_requests_open)`, "requests"}, {`sum(evenkeel_connections_open)`, "connections"},
				{`sum(evenkeel_geo_forwards_inflight)`, "at peers"}}},
			{title: "Where the time goes", says: "Mean seconds of a request in each stage.", kind: graph, unit: "s",
				lines: one(`sum by (stage) (rate(evenkeel_stage_seconds_sum[$rate])) / sum by (stage) (rate(evenkeel_stage_seconds_count[$rate]))`, "{{stage}}")},
		}},
		{"Who waits, and for what", []panel{
			{title: "Backlog", says: "Until what comes now would begin.", kind: graph, unit: "s", lines: []line{
				{`max by (instance, model) (evenkeel_prefill_backlog_seconds)`, "{{instance}} {{model}} prefill"},
				{`max by (instance, model) (evenkeel_decode_backlog_seconds)`, "{{instance}} {{model}} decode"},
			}},
			{title: "Waiting", kind: graph, unit: "short", lines: []line{{`sum by (priority) (evenkeel_prefill_queue_requests)`, "arrival queue, priority {{priority}}"},
				{`sum(evenkeel_pool_entries)`, "pool"}, {`sum(evenkeel_geo_queue_requests)`, "for a region"}}},
			{title: "In use", says: "Mean of one minute.", kind: graph, unit: "percentunit",
				lines: one(`max by (instance, model, role, resource) (evenkeel_utilisation_ratio)`, "{{instance}} {{model}} {{role}} {{resource}}")},
			{title: "Ranks advised, and there are", kind: graph, unit: "short", lines: []line{
				{`max by (instance, model, role) (evenkeel_advised_ranks)`, "{{instance}} {{model}} {{role}} advised"},
				{`max by (instance, model, role) (evenkeel_live_ranks)`, "{{instance}} {{model}} {{role}} live"},
			}},
			{title: "Advice", kind: graph, unit: "short", lines: one(`max by (instance, model, kind, reason) (evenkeel_advice) == 1`,
				"{{instance}} {{model}}: {{kind}}, {{reason}}")},
			{title: "Prefill ranks for a decode rank", kind: graph, unit: "short", lines: one(`max by (instance, model) (evenkeel_pd_ratio_advice)`, "{{instance}} {{model}}")},
		}},
		{"What goes wrong", []panel{
			{title: "Incidents", says: "How long each has lasted. Its kind is the title of its entry in the runbook.", kind: graph, unit: "s",
				lines: one(`time() - evenkeel_incident`, "{{instance}} {{severity}} {{kind}} {{subject}}"), idle: "nothing is wrong"},
			{title: "Engines by state", kind: graph, unit: "short", lines: one(`sum by (role, state) (evenkeel_engine_state) > 0`, "{{role}} {{state}}")},
			{title: "Engines that sources list", kind: graph, unit: "short", lines: []line{
				{`sum by (instance, source, state) (evenkeel_discovery_engines) > 0`, "{{instance}} {{source}} {{state}}"},
				{`evenkeel_discovery_stale > 0`, "{{instance}} {{source}} fails"},
			}, idle: "only with discovery"},
			{title: "Clients that left", kind: graph, unit: "reqps", lines: one(`sum by (phase) (rate(evenkeel_cancels_total[$rate]))`, "{{phase}}")},
			{title: "Answers that went on elsewhere", says: "Tier 4: not at all.", kind: graph, unit: "reqps", lines: []line{
				{`sum by (tier) (rate(evenkeel_recomputes_total[$rate])) > 0`, "given back, tier {{tier}}"},
				{`sum by (tier) (rate(evenkeel_decode_losses_total[$rate])) > 0`, "lost, tier {{tier}}"},
			}, idle: "none had to"},
			{title: "Hand-offs", says: "Finished prefills whose KV is held; an orphan is one nobody will fetch.", kind: graph, unit: "short",
				lines: one(`sum by (state) (evenkeel_handoffs)`, "{{state}}")},
			{title: "Certificates end in", kind: graph, unit: "s", lines: one(`evenkeel_certificate_expiry_timestamp_seconds - time()`, "{{instance}} {{key}}"),
				idle: "without TLS there is none"},
			{title: "Cores in use", kind: graph, unit: "short", lines: one(`rate(process_cpu_seconds_total[$rate])`, "{{instance}}")},
			{title: "Memory", kind: graph, unit: "bytes", lines: []line{
				{`process_resident_memory_bytes`, "{{instance}}"}, {`evenkeel_bodies_bytes`, "{{instance}} bodies"}}},
		}},
	},
}

var decodeBoard = dashboard{
	file: "decode.json", title: "evenkeel: decode balance",
	says: "How evenly the ranks of a group are loaded, what imbalance costs, and how other policies would do.",
	rows: []row{
		{"Load", []panel{
			{title: "KV tokens of each rank", kind: graph, unit: "short", lines: one(`evenkeel_rank_kv_tokens`, "{{rank}}")},
			{title: "Slots in use", kind: graph, unit: "percentunit",
				lines: one(`sum by (group, rank) (evenkeel_rank_slots{state="used"}) / sum by (group, rank) (evenkeel_rank_slots)`, "{{rank}}")},
			{title: "Running", kind: graph, unit: "short", lines: []line{
				{`evenkeel_rank_running`, "{{rank}}"}, {`evenkeel_rank_beyond_slots > 0`, "{{rank}} in its engine's queue"}}},
			{title: "A token takes", says: "By rank, in the mean. Behind a barrier all ranks are as slow as the slowest.", kind: graph, unit: "s",
				lines: one(`avg_over_time(evenkeel_rank_running[$rate]) / rate(evenkeel_rank_output_tokens_total[$rate])`, "{{rank}}")},
			{title: "Empty answers", says: "Share of a rank's answers that the engine ended without any text.", kind: graph, unit: "percentunit",
				lines: one(`rate(evenkeel_rank_empty_answers_total[$rate]) / rate(evenkeel_rank_answers_total[$rate])`, "{{rank}}")},
			{title: "Pool", kind: graph, unit: "short", lines: []line{{`sum(evenkeel_pool_entries)`, "entries"}, {`max(evenkeel_pool_oldest_seconds)`, "oldest, seconds"}}},
			{title: "Wait in the pool", kind: graph, unit: "s", lines: []line{
				{`histogram_quantile(0.5, sum by (le) (rate(evenkeel_stage_seconds_bucket{stage="pool_wait"}[$rate])))`, "p50"},
				{`histogram_quantile(0.99, sum by (le) (rate(evenkeel_stage_seconds_bucket{stage="pool_wait"}[$rate])))`, "p99"},
			}},
		}},
		{"Balance", []panel{
			{title: "Imbalance", says: "Sum over ranks of the largest load less their own.", kind: graph, unit: "short", lines: one(`evenkeel_imbalance_tokens`, "{{group}}")},
			{title: "Idle share of a step", kind: graph, unit: "percentunit",
				lines: []line{{`evenkeel_idle_share_ratio`, "{{group}} by load"}, {`evenkeel_step_lost_ratio`, "{{group}} by the step model"}}},
			{title: "Time of a step", kind: graph, unit: "s", lines: quantiles("evenkeel_step_seconds", "group")},
			{title: "Step model", kind: graph, unit: "short", lines: one(`evenkeel_step_model_r2_ratio`, "{{group}} R²")},
			{title: "What a step takes by it", says: "A step without load, and what a million KV tokens of the fullest rank add.", kind: graph,
				unit: "s", lines: []line{
					{`evenkeel_step_model_c0_seconds`, "{{group}} without load"}, {`1e6 * evenkeel_step_model_c1_seconds`, "{{group}} a million KV tokens"},
				}},
		}},
		{"Deciding", []panel{
			{title: "Time of a tick", kind: graph, unit: "s", lines: quantiles("evenkeel_tick_seconds", "group")},
			{title: "Policy replaced, or overruled", kind: graph, unit: "short", lines: []line{
				{`sum by (reason) (increase(evenkeel_tick_fallbacks_total[$rate]))`, "fallback: {{reason}}"},
				{`sum by (fault) (increase(evenkeel_invalid_assignments_total[$rate]))`, "invalid: {{fault}}"},
			}, idle: "none was"},
			{title: "Held back", says: "Requests that wait now though they have a slot.", kind: graph, unit: "short",
				lines: one(`evenkeel_held_entries`, "{{group}}")},
			{title: "Budget of a tick", kind: graph, unit: "short", lines: one(`evenkeel_tick_budget_evaluations`, "{{group}}")},
			{title: "Answers learned from", kind: graph, unit: "short", lines: one(`evenkeel_predictor_outputs`, "{{model}} {{kind}}")},
			{title: "Drift of answer lengths", says: "Above the critical line it is more than chance.", kind: graph, unit: "short", lines: []line{
				{`evenkeel_predictor_drift_ratio{against="table"}`, "{{model}} {{kind}}"},
				{`evenkeel_predictor_drift_critical_ratio{against="table"}`, "{{model}} {{kind}} critical"},
			}},
			{title: "Error of predictions (Brier)", kind: graph, unit: "short", lines: one(`evenkeel_predictor_brier`, "{{model}} {{kind}}"),
				idle: "scored once enough predictions were used"},
		}},
		{"Ranks that prefill and decode", []panel{
			{title: "Backlog", says: "Prompt tokens that a rank has yet to compute.", kind: graph, unit: "short", lines: one(`evenkeel_rank_backlog_tokens`, "{{rank}}"), idle: noMixed},
			{title: "Largest backlog as a multiple of the mean", kind: graph, unit: "short", lines: one(`evenkeel_backlog_imbalance_ratio`, "{{group}}"), idle: noMixed},
			{title: "Steps in which a rank computes a prompt", kind: graph, unit: "percentunit",
				lines: one(`sum by (group) (rate(evenkeel_prefill_steps_total[$rate])) / sum by (group) (rate(evenkeel_step_seconds_count[$rate]))`, "{{group}}"), idle: noMixed},
			{title: "What a step takes for prompts and requests",
				says: "Of 1,000 prompt tokens on the slowest rank, of 1,000 that a rank computes in the mean, of any prompt, of a request.",
				kind: graph, unit: "s", lines: []line{
					{`1000 * evenkeel_step_model_own_prefill_seconds`, "{{group}} a rank's own part"}, {`1000 * evenkeel_step_model_shared_prefill_seconds`, "{{group}} shared part"},
					{`evenkeel_step_model_prefill_step_seconds`, "{{group}} any prompt"}, {`evenkeel_step_model_request_seconds`, "{{group}} a request"},
				}, idle: "learned once there were steps with prompts"},
			{title: "Rounds", kind: graph, unit: "ops", lines: one(`sum by (group) (rate(evenkeel_rounds_total[$rate]))`, "{{group}}"), idle: noMixed},
			{title: "Ranks that a round fills", kind: graph, unit: "short", lines: quantiles("evenkeel_round_ranks", "group"), idle: noMixed},
			{title: "Time held for a round", kind: graph, unit: "s", lines: quantiles("evenkeel_round_hold_seconds", ""), idle: noMixed},
		}},
		{"Engines", []panel{
			{title: "Engines with decode slots", kind: graph, unit: "short", lines: one(`sum by (state) (evenkeel_engine_state{role=~"decode|aggregated"})`, "{{state}}")},
			{title: "Pull and first token", kind: graph, unit: "s", lines: []line{
				{`histogram_quantile(0.5, sum by (le) (rate(evenkeel_stage_seconds_bucket{stage="transfer"}[$rate])))`, "p50"},
				{`histogram_quantile(0.99, sum by (le) (rate(evenkeel_stage_seconds_bucket{stage="transfer"}[$rate])))`, "p99"},
			}},
			{title: "Trouble", kind: graph, unit: "short", lines: []line{
				{`evenkeel_pairs_quarantined`, "pairs in quarantine"}, {`sum by (engine) (evenkeel_engine_over_slots)`, "{{engine}} over slots"},
				{`sum by (engine) (evenkeel_engine_gauges_frozen)`, "{{engine}} gauges frozen"},
				{`sum by (engine) (increase(evenkeel_engine_short_pulled_tokens_total[$rate])) / 1000 > 0`, "{{engine}} thousand tokens computed in spite of a hand-off"},
				{`sum(increase(evenkeel_heedless_engines_total[$rate]))`, "heedless calls"}, {`sum(increase(evenkeel_late_pulls_total[$rate]))`, "late pulls"},
			}},
			{title: "Outages", kind: graph, unit: "short", lines: one(`sum by (engine, reason) (increase(evenkeel_engine_outages_total[$rate]))`, "{{engine}} {{reason}}"),
				idle: "none was"},
			{title: "Prefilled where it is decoded", kind: graph, unit: "reqps", lines: one(`sum by (reason) (rate(evenkeel_local_prefill_requests_total[$rate]))`, "{{reason}}")},
			{title: "Bound before their prefill",
				says: "Requests that wait for their first token there, and KV tokens that are kept for prefills which will not come, in thousands.",
				kind: graph, unit: "short", lines: []line{
					{`sum by (rank) (evenkeel_rank_bound)`, "{{rank}} bound"}, {`sum by (rank) (evenkeel_bind_orphan_tokens) / 1000 > 0`, "{{rank}} thousand orphan tokens"},
				}, idle: "only where the connector wants the rank so early"},
			{title: "Callbacks and lost ranks", says: "Of requests that are bound before their prefill.", kind: graph, unit: "reqps", lines: []line{
				{`sum by (result) (rate(evenkeel_bind_callbacks_total[$rate])) > 0`, "callback {{result}}"}, {`sum by (cause) (rate(evenkeel_bind_rebinds_total[$rate])) > 0`, "bound anew: {{cause}}"},
			}, idle: "only where the connector wants the rank so early"},
			{title: "Drains of hand-offs", kind: graph, unit: "short", lines: one(`sum by (outcome) (increase(evenkeel_drains_total[$rate]))`, "{{outcome}}")},
		}},
	},
}

var prefillBoard = dashboard{
	file: "prefill.json", title: "evenkeel: prefill",
	says: "Which engine gets a prompt, what waits, what KV is held, and how well caches are known.",
	rows: []row{
		{"Load", []panel{
			{title: "Candidates by state", kind: graph, unit: "short", lines: one(`sum by (state) (evenkeel_prefill_candidates)`, "{{state}}")},
			{title: "Arrival queue", kind: graph, unit: "short", lines: one(`sum by (priority) (evenkeel_prefill_queue_requests)`, "priority {{priority}}")},
			{title: "Wait in it", kind: graph, unit: "s", lines: quantiles("evenkeel_prefill_queue_wait_seconds", "")},
			{title: "Unanswered probes", kind: graph, unit: "short", lines: one(`evenkeel_prefill_inflight_requests`, "{{candidate}}")},
			{title: "Tokens being computed", kind: graph, unit: "short", lines: one(`evenkeel_prefill_queued_new_tokens`, "{{candidate}}")},
			{title: "Time of a prefill", kind: graph, unit: "s", lines: quantiles("evenkeel_prefill_probe_seconds", "candidate")},
		}},
		{"KV memory", []panel{
			{title: "KV in use", kind: graph, unit: "percentunit", lines: one(`evenkeel_prefill_kv_usage_ratio`, "{{candidate}} {{source}}")},
			{title: "Tokens held", kind: graph, unit: "short", lines: one(`sum by (candidate, state) (evenkeel_prefill_held_tokens)`, "{{candidate}} {{state}}")},
			{title: "Gates", says: "0: closed for new prompts.", kind: graph, unit: "short", lines: one(`evenkeel_prefill_gate_open`, "{{candidate}}")},
			{title: "Hand-offs", kind: graph, unit: "short", lines: one(`sum by (state) (evenkeel_handoffs)`, "{{state}}")},
			{title: "Freed by the engine's timeout", kind: graph, unit: "short", lines: one(`sum(increase(evenkeel_handoffs_expired_total[$rate]))`, "hand-offs")},
			{title: "Prefills by how they ended", kind: graph, unit: "reqps", lines: one(`sum by (outcome) (rate(evenkeel_prefill_attempts_total[$rate]))`, "{{outcome}}")},
		}},
		{"Prefix caches", []panel{
			{title: "Tokens found in caches", kind: graph, unit: "percentunit",
				lines: one(`sum by (source) (rate(evenkeel_prefix_hit_tokens_total[$rate])) / on () group_left () sum(rate(evenkeel_prefix_prompt_tokens_total[$rate]))`,
					"{{source}}")},
			{title: "Mispredicted", kind: graph, unit: "percentunit", lines: one(`evenkeel_prefix_misprediction_ratio`, "{{instance}}"),
				idle: "without prefix hits there is nothing to predict"},
			{title: "Index", kind: graph, unit: "short", lines: []line{{`evenkeel_prefix_index_bytes / 1e6`, "{{instance}} MB"},
				{`evenkeel_prefix_index_entries / 1e3`, "{{instance}} thousand blocks"}}},
			{title: "KV events", kind: graph, unit: "short", lines: []line{
				{`sum by (candidate) (rate(evenkeel_kv_events_batches_total[$rate]))`, "{{candidate}} batches a second"},
				{`max by (candidate) (evenkeel_kv_events_lag_seconds)`, "{{candidate}} lag, seconds"},
				{`max by (candidate) (evenkeel_kv_events_precise)`, "{{candidate}} relied on"},
				{`sum by (candidate, result) (increase(evenkeel_kv_events_gaps_total[$rate]))`, "{{candidate}} gaps, {{result}}"},
			}, idle: "engines that publish none"},
			{title: "Hotspots", kind: graph, unit: "short", lines: []line{{`sum by (state) (evenkeel_hotspot_classes)`, "{{state}}"},
				{`sum(rate(evenkeel_hotspot_filtered_requests_total[$rate]))`, "requests kept off, a second"}}},
			{title: "Evicted from the index", kind: graph, unit: "short", lines: one(`sum by (reason) (rate(evenkeel_prefix_index_evictions_total[$rate]))`, "{{reason}}")},
		}},
		{"Deciding", []panel{
			{title: "Choices", kind: graph, unit: "reqps", lines: one(`sum by (policy, reason) (rate(evenkeel_prefill_decisions_total[$rate]))`, "{{policy}} {{reason}}")},
			{title: "Time of a choice", kind: graph, unit: "s", lines: quantiles("evenkeel_prefill_decision_seconds", "")},
			{title: "Learned time of a new token", kind: graph, unit: "s", lines: one(`evenkeel_calibration_prefill_seconds_per_token`, "{{model}} {{hardware}}"),
				idle: "until it is learned"},
			{title: "Fit of it", kind: graph, unit: "percentunit", lines: one(`evenkeel_calibration_r2_ratio`, "{{model}} {{hardware}}"), idle: "until it is learned"},
			{title: "Sessions", kind: graph, unit: "reqps", lines: one(`sum by (outcome) (rate(evenkeel_affinity_total[$rate]))`, "{{outcome}}"), idle: "prefill.affinity is off"},
			{title: "Retries refused, requests displaced", kind: graph, unit: "short", lines: []line{
				{`sum(increase(evenkeel_prefill_retry_budget_exhausted_total[$rate]))`, "retries refused"},
				{`sum(increase(evenkeel_prefill_queue_displaced_total[$rate]))`, "displaced"},
			}},
		}},
	},
}

var regionsBoard = dashboard{
	file: "regions.json", title: "evenkeel: regions and ownership",
	says: "Which peers take what, what that costs, and who owns which engines.",
	rows: []row{
		{"Peers", []panel{
			{title: "Up", kind: graph, unit: "short", lines: one(`evenkeel_geo_peer_up`, "{{instance}} → {{peer}}")},
			{title: "Available", kind: graph, unit: "short", lines: one(`evenkeel_geo_peer_available`, "{{instance}} → {{peer}} {{model}}")},
			{title: "Round trip", kind: graph, unit: "s", lines: one(`evenkeel_geo_rtt_seconds`, "{{instance}} → {{peer}}")},
			{title: "Age of what is known", kind: graph, unit: "s", lines: one(`evenkeel_geo_probe_age_seconds`, "{{instance}} → {{peer}}")},
			{title: "Unavailable, why", kind: graph, unit: "short", lines: one(`sum by (peer, reason) (increase(evenkeel_geo_peer_unavailable_total[$rate]))`,
				"{{peer}} {{reason}}"), idle: "none was"},
			{title: "Replicas that take a request", kind: graph, unit: "short", lines: one(`evenkeel_geo_n_avail`, "{{instance}} {{model}}")},
		}},
		{"Requests", []panel{
			{title: "Decisions", kind: graph, unit: "reqps", lines: one(`sum by (instance, policy, route) (rate(evenkeel_geo_decisions_total[$rate]))`, "{{instance}} {{route}}")},
			{title: "Forwards", kind: graph, unit: "reqps", lines: one(`sum by (instance, peer, outcome) (rate(evenkeel_geo_forwards_total[$rate]))`,
				"{{instance}} → {{peer}} {{outcome}}")},
			{title: "Came back", kind: graph, unit: "reqps", lines: one(`sum by (peer, cause) (rate(evenkeel_geo_fallbacks_total[$rate]))`, "{{peer}} {{cause}}"),
				idle: "none did"},
			{title: "Received", kind: graph, unit: "reqps", lines: one(`sum by (origin, outcome) (rate(evenkeel_geo_received_total[$rate]))`, "from {{origin}}: {{outcome}}")},
			{title: "Refused at the door", kind: graph, unit: "reqps", lines: one(`sum by (reason) (rate(evenkeel_geo_rejects_total[$rate]))`, "{{reason}}"), idle: "none was"},
			{title: "Time to first token by route", kind: graph, unit: "s",
				lines: one(`histogram_quantile(0.99, sum by (le, route, peer) (rate(evenkeel_geo_ttft_seconds_bucket[$rate])))`, "{{route}} {{peer}} p99")},
		}},
		{"Cost", []panel{
			{title: "Bytes between regions", kind: graph, unit: "Bps", lines: one(`sum by (peer, direction) (rate(evenkeel_geo_egress_bytes_total[$rate]))`,
				"{{peer}} {{direction}}")},
			{title: "Dollars an hour", kind: graph, unit: "currencyUSD", lines: one(`3600 * sum by (peer) (rate(evenkeel_geo_egress_usd_total[$rate]))`, "{{peer}}")},
			{title: "Prediction of a peer's first token, off by", kind: graph, unit: "s", lines: quantiles("evenkeel_geo_cost_error_seconds", "peer")},
		}},
		{"Who owns what", []panel{
			{title: "Owner", says: "1 for the proxy that admits to the engines of the area; the sum over proxies is 1.", kind: graph, unit: "short",
				lines: one(`evenkeel_geo_owner`, "{{instance}} {{region}}")},
			{title: "Takeovers", kind: graph, unit: "short", lines: one(`evenkeel_geo_takeover_active`, "{{instance}} {{region}}")},
			{title: "Epoch", kind: graph, unit: "short", lines: one(`evenkeel_geo_epoch`, "{{instance}} {{region}}")},
			{title: "Owner of a decode group", says: "The sum over proxies is 1.", kind: graph, unit: "short", lines: one(`evenkeel_ha_owner`, "{{instance}} {{group}}"),
				idle: "ha.mode is off"},
			{title: "Store of leases away",
				says: "1 while it fails or is too slow for owners to renew in time; owned by promises: 1 while a group goes on without it.",
				kind: graph, unit: "short", lines: []line{
					{`max by (instance) (evenkeel_ha_lease_store_away or evenkeel_geo_lease_store_away)`, "{{instance}} away"},
					{`evenkeel_ha_pledged`, "{{instance}} {{group}} owned by promises"},
				}, idle: "neither ha nor geo.ownership is on"},
			{title: "Clock off Prometheus's", kind: graph, unit: "s", lines: one(`timestamp(evenkeel_clock_seconds) - evenkeel_clock_seconds`, "{{instance}}")},
		}},
	},
}
