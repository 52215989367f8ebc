package incident

import "fmt"

// Kind is what sort of thing is wrong.
type Kind string

// The kinds there are.
const (
	NotReady      Kind = "not_ready"
	Drains        Kind = "drains"
	AuditDrift    Kind = "audit_drift"
	ConfigRefused Kind = "config_refused"
	RequestsFail  Kind = "requests_fail"
	EngineDown    Kind = "engine_down"
	EngineOut     Kind = "engine_out"
	EngineDrains  Kind = "engine_drains"
	EngineAmiss   Kind = "engine_amiss"
	SourceFails   Kind = "source_fails"
	EnginesUnfit  Kind = "engines_unfit"
	GateClosed    Kind = "gate_closed"
	PrefillOut    Kind = "prefill_out"
	MetricsOld    Kind = "metrics_old"
	NoPrefill     Kind = "no_prefill"
	QueueFull     Kind = "queue_full"
	QueueWaits    Kind = "queue_waits"
	PoolLate      Kind = "pool_late"
	PolicySlow    Kind = "policy_slow"
	Imbalance     Kind = "imbalance"
	RanksFull     Kind = "ranks_full"
	RanksTight    Kind = "ranks_tight"
	RanksDrain    Kind = "ranks_drain"
	PeerDown      Kind = "peer_down"
	NoOwner       Kind = "no_owner"
)

// How much clients see.
type harm int

const (
	nothing harm = iota
	slower
	waiting
	failing
)

// kind is what is said of a kind.
type kind struct {
	harm    harm
	effect  bool   // it follows from something else, where there is something else
	vague   bool   // others that harm as much say more
	family  string // kinds of one say the same of engines and of ranks
	alone   bool   // somebody wants it so, or it is told of a group already: nothing else shares its cause
	many    string // several of them, after their number; empty where only the proxy has it
	clients string
	next    string
	command string // {where} and {engine} are put in
	runbook string
}

const (
	workers = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq '.engines[] | {id, role, state, since, error}'`
	log     = "journalctl -u evenkeel --since -1h -o cat | tail -50"
	undrain = `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/workers/{where}/drain"`
	drains  = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq .drains`
	receipt = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?outcome=failed&n=20" | jq '.receipts[] | {id, outcome, attempts}'`
)

var kinds = map[Kind]kind{
	NotReady: {
		harm: failing, effect: true, clients: "New requests are refused with a 503.", runbook: "EvenkeelSideDown", command: workers,
		next: "Look which side has no engine that answers, and start one.",
	},
	Drains: {
		harm: nothing, alone: true, clients: "Those that are served are answered to their end; new ones go to other proxies.", runbook: "Drains",
		next: "Wait for the last request, or take the drain back.", command: `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/drain"`,
	},
	AuditDrift: {
		harm: waiting, alone: true, clients: "Ranks may look fuller or emptier than they are.", runbook: "EvenkeelAuditDrift", command: log,
		next: "Keep the log and report the bug. Restart the proxy after a drain.",
	},
	ConfigRefused: {
		harm: nothing, alone: true, clients: "Nothing: the config before is in force.", runbook: "EvenkeelReloadFailed", command: "evenkeel check --config FILE",
		next: "Mend the file; the proxy reads it again by itself.",
	},
	RequestsFail: {
		harm: failing, effect: true, vague: true, clients: "Their requests end with an error.", runbook: "EvenkeelErrorBudgetBurnsFast", command: receipt,
		next: "Look by which outcome they fail, and at the receipts of those.",
	},
	EngineDown: {
		harm: waiting, many: "engines are down", clients: "Answers that ran there go on elsewhere where they can; the others end with an error.", runbook: "EvenkeelEngineDown",
		next: "Look whether the machine and the process live, and restart the engine.", command: "curl -sm 3 -i http://{engine}/health",
	},
	EngineOut: {
		harm: waiting, many: "engines fail requests and get none", clients: "Those that failed there were tried elsewhere, as long as the retry budget lasts.", runbook: "EvenkeelBreakerOpen",
		next: "Read the engine's own log; a restart is safe, nothing new is sent there.", command: workers,
	},
	EngineDrains: {
		harm: nothing, family: "drains", many: "engines drain", clients: "Nothing, as long as the other engines can take their load.", runbook: "Drains",
		next: "Restart it when nothing runs there any more, then take the drain back.", command: undrain,
	},
	EngineAmiss: {
		harm: slower, family: "late", many: "engines are up, and something is amiss", clients: "They may wait longer.", command: workers, runbook: "EvenkeelScrapeStale",
		next: "Read what is amiss, and the engine's log.",
	},
	SourceFails: {
		harm: nothing, alone: true, many: "sources of engines fail", clients: "Nothing until engines change.", runbook: "EvenkeelDiscoveryStale", command: log,
		next: "Mend the source; its last list stays in force meanwhile.",
	},
	EnginesUnfit: {
		harm: nothing, alone: true, many: "sources have engines that are not used", clients: "Nothing: these engines get no requests.", runbook: "EvenkeelEnginesUnfit", command: workers,
		next: "Read why each is unfit, and start it with the profile's connector.",
	},
	GateClosed: {
		harm: slower, many: "prefill engines are full", clients: "They wait longer for their first token.", runbook: "EvenkeelGateClosed", command: workers,
		next: "See whether hand-offs wait in the pool: then decode is short; else prefill is.",
	},
	PrefillOut: {
		harm: waiting, many: "prefill engines fail prompts and get none", clients: "Prompts that failed there were tried elsewhere.", runbook: "EvenkeelBreakerOpen",
		next: "Read the engine's own log, and restart it.", command: workers,
	},
	MetricsOld: {
		harm: slower, family: "late", many: "prefill engines have not told their load lately", clients: "They may wait longer: prompts go there by our own accounts alone.", runbook: "EvenkeelScrapeStale",
		next: "Ask the engine for its metrics, and see how long it takes.", command: "curl -sm 5 -o /dev/null -w '%{time_total} s\\n' http://{engine}/metrics",
	},
	NoPrefill: {
		harm: failing, effect: true, clients: "They wait, and get a 503 when prefill.queue.timeout is over.", runbook: "EvenkeelSideDown", command: workers,
		next: "Start a prefill engine, or free the KV of one that is full.",
	},
	QueueFull: {
		harm: failing, effect: true, clients: "New requests are refused with a 429.", runbook: "EvenkeelRefuses", command: receipt,
		next: "Add prefill ranks, or find the caller that sends too much.",
	},
	QueueWaits: {
		harm: waiting, effect: true, clients: "They wait for their first token.", runbook: "EvenkeelPrefillBacklog", command: workers,
		next: "Add prefill ranks, or free the KV of one that is full.",
	},
	PoolLate: {
		harm: waiting, effect: true, many: "models have finished prefills that wait too long for a decode rank", clients: "They wait for their first token; those that wait too long get an error.", runbook: "EvenkeelDecodeBacklog", command: workers,
		next: "See which ranks are down, drain or are full, and add decode ranks.",
	},
	PolicySlow: {
		harm: slower, alone: true, many: "groups have a policy that was too slow", clients: "Tokens come a little later: a simpler policy decides.", runbook: "EvenkeelTickFallback", command: log,
		next: "See what else uses this machine's cores, or choose a simpler policy.",
	},
	Imbalance: {
		harm: slower, alone: true, many: "groups lose much of every step to imbalance", clients: "Every token of the group comes later.", runbook: "EvenkeelStepLost",
		next: "See which rank is the fullest, and what another policy would have cost.", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq '.models[].groups[].twin.says'`,
	},
	RanksFull: {
		harm: slower, alone: true, many: "groups have ranks with a full KV cache", clients: "They may wait for a decode rank.", runbook: "EvenkeelDecodeBacklog", command: workers,
		next: "Add decode ranks, or lower the slots of a rank.",
	},
	RanksTight: {
		harm: slower, alone: true, many: "groups have ranks that are kept emptier", clients: "Answers there were stopped and computed again.", runbook: "EvenkeelCapacitySuspect", command: workers,
		next: "Set kv_tokens of the engine to what its cache really holds.",
	},
	RanksDrain: {
		harm: nothing, family: "drains", many: "groups have ranks that drain", clients: "Nothing, as long as the other ranks can take their load.", runbook: "Drains", command: drains,
		next: "Wait until they are empty. They still take part in the steps of their group.",
	},
	PeerDown: {
		harm: nothing, many: "peers are not up", clients: "Nothing, as long as this region has room.", runbook: "EvenkeelPeerDown", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/geo" | jq .peers`,
		next: "See whether the other proxy lives, and then the link.",
	},
	NoOwner: {
		harm: failing, many: "areas have no owner", clients: "Requests for its engines wait or are refused.", runbook: "EvenkeelNoOwner", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq .areas`,
		next: "See whether the lease store answers, and which proxies live.",
	},
}

// gone are the kinds that say that an engine gets nothing: one of them may follow the
// other.
var gone = map[Kind]bool{EngineDown: true, EngineOut: true, PrefillOut: true}

// order has causes first, those that say most before the others.
func (k kind) order() int {
	n := 10 * int(failing-k.harm)
	if k.vague {
		n++
	}
	if k.effect {
		n += 1000
	}
	return n
}

// say tells of several findings of a kind.
func (k kind) say(n int, host, reason string) string {
	s := fmt.Sprintf("%d %s", n, k.many)
	if host != "" {
		s = host + ": " + s
	}
	if reason != "" {
		s += ": " + reason
	}
	return s
}
