package incident

import "time"

const (
	moment     = 30 * time.Second // what begins within it has begun together
	follow     = 2 * time.Minute  // what clients see may follow its cause so late
	flap       = time.Minute      // what is back so soon never went
	keep       = 15 * time.Minute // resolved incidents stay so long
	mostKept   = 64               // incidents, open and resolved
	mostFound  = 2000             // findings that are looked at
	mostListed = 48               // names in Incident.Where
)

// Kind is what sort of thing is wrong.
type Kind string

// The kinds there are.
const (
	NotReady      Kind = "not_ready"
	Drains        Kind = "drains"
	AuditDrift    Kind = "audit_drift"
	ConfigRefused Kind = "config_refused"
	CertEnds      Kind = "certificate_ends"
	CertEndsNow   Kind = "certificate_ends_now"
	RequestsFail  Kind = "requests_fail"
	EngineDown    Kind = "engine_down"
	EngineHangs   Kind = "engine_hangs"
	EngineOut     Kind = "engine_out"
	EngineHalted  Kind = "engine_halted"
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
	PrefillBusy   Kind = "prefill_busy"
	Overload      Kind = "overload"
	KVFull        Kind = "kv_full"
	PoolLate      Kind = "pool_late"
	RoundStuck    Kind = "round_stuck"
	PolicySlow    Kind = "policy_slow"
	Imbalance     Kind = "imbalance"
	RankEmpty     Kind = "rank_empty"
	RankSlow      Kind = "rank_slow"
	StepsSlow     Kind = "steps_slow"
	TokensFew     Kind = "tokens_few"
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
	harm     harm
	effect   bool          // it follows from something else, where there is something else
	load     bool          // an effect of what harms as much, and else the cause of what clients see
	crowded  bool          // many requests wait
	vague    bool          // others that harm as much say more
	family   string        // kinds of one say the same of engines and of ranks
	alone    bool          // somebody wants it so, or it is told of a group already: nothing else shares its cause
	rests    time.Duration // it comes and goes: it lasts until it was not found for so long
	headline string        // the first words of the verdict
	many     string        // what several of them do, after their number and noun; empty where there is one at most
	clients  string
	prefill  string // the same where all of these are prefill engines; empty: clients
	first    string // as an effect, what clients see of it is said before its cause, with these words
	next     string
	command  string // {where} and {engine} are put in
	runbook  string
}

// again is how long what comes and goes may be away: a busy engine answers late, then in
// time while it rests, then late again.
const again = 2 * time.Minute

const (
	workers = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq '.engines[] | {id, role, state, since, error}'`
	log     = "journalctl -u evenkeel --since -1h -o cat | tail -50"
	undrain = `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/workers/{where}/drain"`
	drains  = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq .drains`
	tight   = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].workers[] | select(.tight) | {name, slots, used, kv_tokens, capacity}'`
	held    = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].groups[] | {name, policy, held, rounds}'`
	receipt = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?outcome=failed&n=20" | jq '.receipts[] | {id, outcome, attempts}'`
	flood   = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?running=1&key={key}&n=20" | ` +
		`jq '.receipts[] | {id, state, arrival, prompt_tokens}'`
	certEnd = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/metrics" | grep -E "certificate_expiry|reloads_total.*tls"`
	advised = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.advice[] | {model, says, prefill, decode}'`
)

var kinds = map[Kind]kind{
	NotReady: {
		harm: failing, effect: true, headline: "The proxy is not ready", runbook: "EvenkeelSideDown", command: workers,
		first:   "All new requests get a 503",
		clients: "Clients get a 503 for new requests.",
		next:    "Look which side has no engine that answers, and start one.",
	},
	Drains: {
		harm: nothing, alone: true, headline: "The proxy drains", runbook: "Drains", command: `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/drain"`,
		clients: "Clients that are served get their answers to the end. New requests go to other proxies.",
		next:    "Wait until the last request has ended, or take the drain back.",
	},
	AuditDrift: {
		harm: waiting, alone: true, headline: "The accounts are wrong", runbook: "EvenkeelAuditDrift", command: log,
		clients: "Clients may wait longer, because ranks may look fuller or emptier to the proxy than they are.",
		next:    "Keep the log and report the bug. Restart the proxy after a drain.",
	},
	ConfigRefused: {
		harm: nothing, alone: true, headline: "The config was refused", runbook: "EvenkeelReloadFailed", command: "evenkeel check --config FILE",
		clients: "Clients notice nothing, because the config before is in force.",
		next:    "Mend the file. The proxy reads it again by itself. Do not restart the proxy before: it would not start with this file.",
	},
	CertEnds: {
		harm: nothing, alone: true, headline: "A certificate ends soon", runbook: "EvenkeelCertificateEnds", command: certEnd,
		clients: "Clients notice nothing yet.",
		next:    "Renew the certificate. The proxy reads the new files by itself.",
	},
	CertEndsNow: {
		harm: nothing, alone: true, headline: "A certificate ends", runbook: "EvenkeelCertificateEndsNow", command: certEnd,
		clients: "Clients notice nothing before it ends. After that, they cannot connect to this listener.",
		next:    "Replace the files of the certificate now. The proxy reads them by itself.",
	},
	RequestsFail: {
		harm: failing, effect: true, vague: true, headline: "Requests fail", runbook: "EvenkeelErrorBudgetBurnsFast", command: receipt,
		clients: "The clients of these requests get an error.",
		next: "Read the receipts of such requests: they have the engines of each attempt, and what these answered. " +
			"If a host is named, drain its engines.",
	},
	EngineDown: {
		harm: waiting, headline: "Engine outage", many: "are down", runbook: "EvenkeelEngineDown", command: "curl -sm 3 -i http://{engine}/health",
		clients: "Clients whose requests ran there get the rest from other engines where that is possible, and else an error.",
		prefill: "Clients wait longer for their first token. Prompts that were computed there are computed again on other engines.",
		next:    "Look whether the machine and the process are alive, and restart the engine. Its own log says why it ended.",
	},
	EngineHangs: {
		harm: waiting, headline: "Engine hangs", many: "take connections, but do not answer their health checks", runbook: "EvenkeelEngineDown",
		prefill: "Clients whose prompts were sent there wait until the engine goes on, until it counts as down, or until " +
			"limits.probe_timeout is over. Then other engines compute their prompts.",
		clients: "Clients whose requests ran there get no tokens for now. If the engine goes on, so do these requests. " +
			"Else they go on elsewhere when limits.event_timeout is over, or end with an error.",
		next: "Look whether the process is stopped, its host pages, or its core or its GPU stands still. " +
			"Keep its log and its stacks before you restart it. It may come back by itself.",
		command: `curl -sm 10 -o /dev/null -w '%{http_code}, connected after %{time_connect} s, %{time_total} s in all\n' http://{engine}/health`,
	},
	EngineOut: {
		harm: waiting, headline: "Failing engine", many: "get no requests, because earlier ones failed", runbook: "EvenkeelBreakerOpen", command: workers,
		clients: "Clients wait longer. Requests that failed there were tried elsewhere, as long as the retry budget lasted.",
		next:    "Read the engine's own log. You may restart it at any time, because nothing new is sent there.",
	},
	EngineHalted: {
		harm: waiting, headline: "Halted engine", many: "take no requests for now", runbook: "EvenkeelEngineHalted", command: workers,
		clients: "Clients wait, and get a 503 when the time limit of their queue is over. Answers that run there stand still meanwhile, or go on elsewhere.",
		next:    "Look who changes the number of ranks, or begin the recovery of a group that has met a fault. Do not restart an engine that re-forms.",
	},
	EngineDrains: {
		harm: nothing, family: "drains", headline: "Drain", many: "drain", runbook: "Drains", command: undrain,
		clients: "Clients notice nothing, as long as the other engines can take the load.",
		next:    "Restart the engine when nothing runs there any more, then take the drain back.",
	},
	EngineAmiss: {
		harm: slower, vague: true, family: "late", rests: again, headline: "Engine trouble", many: "are up, but something is amiss", command: workers, runbook: "EvenkeelScrapeStale",
		clients: "Clients may wait longer.",
		next:    "Read what is amiss, and the engine's own log.",
	},
	SourceFails: {
		harm: nothing, alone: true, headline: "Discovery fails", runbook: "EvenkeelDiscoveryStale", command: log,
		clients: "Clients notice nothing until engines come or go.",
		next:    "Mend the source. Its last list stays in force until then.",
	},
	EnginesUnfit: {
		harm: nothing, alone: true, headline: "Unfit engines", runbook: "EvenkeelEnginesUnfit", command: workers,
		clients: "Clients notice nothing, because these engines get no requests.",
		next:    "Read why each engine is unfit, and start it with the connector of its profile.",
	},
	GateClosed: {
		harm: slower, headline: "Full prefill engines", many: "take no prompts, because their KV caches are full", runbook: "EvenkeelGateClosed", command: workers,
		clients: "Clients wait longer for their first token.",
		next:    "Look whether finished prefills wait in the pool. If so, add decode ranks, else add prefill ranks.",
	},
	PrefillOut: {
		harm: waiting, headline: "Failing prefill engine", many: "take no prompts, because earlier ones failed", runbook: "EvenkeelBreakerOpen", command: workers,
		clients: "Clients wait longer for their first token. Prompts that failed there were tried elsewhere.",
		next:    "Mend what failed there; the engine's own log may say more. Others take its prompts meanwhile.",
	},
	MetricsOld: {
		harm: slower, family: "late", rests: again, headline: "Slow prefill metrics", many: "answer too late when they are asked for their metrics", runbook: "EvenkeelScrapeStale",
		clients: "Clients notice nothing yet. Prompts are placed by older figures of these engines and by the proxy's own accounts.",
		next:    "Look how long /metrics of each engine takes, and what keeps its API server busy. If it is only slow, raise prefill.scrape.timeout.",
		command: "curl -sm 20 -o /dev/null -w '%{time_total} s\\n' http://{engine}/metrics",
	},
	NoPrefill: {
		harm: failing, effect: true, headline: "No prefill", runbook: "EvenkeelSideDown", command: workers,
		clients: "Clients wait, and get a 503 when prefill.queue.timeout is over.",
		next:    "Start a prefill engine, or one that does both, or free the KV memory of one that is full.",
	},
	QueueFull: {
		harm: failing, effect: true, crowded: true, headline: "Full queue", runbook: "EvenkeelRefuses", command: receipt,
		clients: "Clients get a 429 for new requests, and are told to try again.",
		next:    "Add ranks to the side that is short, or find the caller that sends too much. A larger limit helps against short peaks only.",
	},
	QueueWaits: {
		harm: waiting, effect: true, headline: "No prefill", runbook: "EvenkeelPrefillBacklog", command: workers,
		clients: "Clients wait for their first token.",
		next:    "Bring prefill engines back, or free the KV memory of one that is full.",
	},
	PrefillBusy: {
		harm: waiting, effect: true, load: true, crowded: true, rests: moment, headline: "Prefill backlog", runbook: "EvenkeelPrefillBacklog", command: advised,
		clients: "All clients wait for their first token, whether their own prompts are long or short.",
		next: "Limit the key that sends most, or add prefill engines. If its prompts were in the prefix caches before, " +
			"ask its owner what changed at their beginning: a time or an id there makes each prompt a new one. More decode ranks do not help.",
	},
	Overload: {
		harm: failing, effect: true, load: true, crowded: true, rests: moment, headline: "Overload", many: "are overloaded: their slots are taken, and many requests wait", runbook: "Overload", command: advised,
		clients: "Clients wait for their first token until a slot is free. Those that wait too long get a 503, and new ones get a 429 while a queue is full.",
		next:    "Add decode ranks, or find the caller that sends too much and limit its key. A larger pool.size or prefill.queue.max only lets more clients wait.",
	},
	KVFull: {
		harm: failing, effect: true, load: true, crowded: true, rests: moment, headline: "Full KV caches", runbook: "Overload", command: advised,
		many: "have full KV caches, and many requests wait",
		clients: "Clients wait for their first token until an answer ends and frees KV memory. " +
			"Those that wait too long get a 503, and new ones get a 429 while a queue is full.",
		next: "Add decode ranks. More slots do not help. " +
			"Look whether prompts are longer than usual, and whether the capacity of a rank is what its engine logs.",
	},
	PoolLate: {
		harm: waiting, effect: true, crowded: true, headline: "Long waits", many: "have requests in the pool that wait too long for a rank", runbook: "EvenkeelDecodeBacklog", command: workers,
		clients: "Clients wait for their first token. Those that wait too long get an error.",
		next:    "Look which decode ranks are down, drain or are full, and add decode ranks.",
	},
	RoundStuck: {
		harm: waiting, headline: "Stuck round", many: "hold requests for a round for longer than they may", runbook: "EvenkeelRoundStuck", command: held,
		clients: "Clients wait for their first token, although ranks have free slots.",
		next:    "Write patience=0 into the policy, so that nothing is held, and report the bug.",
	},
	PolicySlow: {
		harm: slower, alone: true, headline: "Slow policy", runbook: "EvenkeelTickFallback", command: log,
		clients: "Clients get their tokens a little later, because a simpler policy decides.",
		next:    "Look what else uses the cores of this machine, or choose a simpler policy.",
	},
	Imbalance: {
		harm: slower, alone: true, headline: "Imbalance", runbook: "EvenkeelStepLost",
		clients: "Clients of this group get every token later.",
		next:    "Look which rank is the fullest, and what another policy would have cost.", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq '.models[].groups[].twin.says'`,
	},
	RankEmpty: {
		harm: failing, alone: true, headline: "Empty answers", runbook: "EvenkeelRankEmpty",
		clients: "Clients whose requests go there get an empty answer with status 200. No error is counted, and nothing is tried again.",
		next: "Drain the rank now: it is free so soon that it gets more requests than any other. " +
			"Then look at its weights, its GPU's memory errors and its last restart. Tell those who use the answers.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" -X POST -H "Content-Type: application/json" -d '{"deadline": "10s"}' "$ADMIN/workers/{where}/drain"`,
	},
	RankSlow: {
		harm: slower, alone: true, headline: "Slow rank", runbook: "EvenkeelRankSlow",
		clients: "Clients whose answers are there get every token later.",
		next:    "Look at the rank's GPU and its host (clock, temperature, other processes), and drain the rank meanwhile.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | ` +
			`jq -r '.models[].groups[].ranks[] | "\(.token_ms // "-") ms \(.running) running \(.name)"' | sort -rn | head`,
	},
	StepsSlow: {
		harm: slower, alone: true, headline: "Slow steps", runbook: "EvenkeelStepsSlow",
		clients: "Clients of this group get every token later.",
		next: "One rank is enough to make all of them slow. If a rank is named, look for who else uses its engine. " +
			"If no rank is named, compare the GPUs' clocks and the network between the ranks, host by host.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | ` +
			`jq '.models[].groups[] | {name,step_ms,usual_ms,slow_s,most_tokens,differ}'`,
	},
	TokensFew: {
		harm: slower, alone: true, headline: "Fewer tokens in each step", runbook: "EvenkeelStepTokensFew",
		clients: "Clients of this group get every token later. All clients may wait longer for their first token, because slots are taken for longer.",
		next: "Look whether speculative decoding is on in all engines of the group, and what share of its draft tokens is accepted. " +
			"The steps themselves are as fast as before, so no GPU is slow, and more prefill engines do not help.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | ` +
			`jq '.models[].groups[] | {name,step_ms,token_ms,step_tokens,usual_step_tokens,few_s}'`,
	},
	RanksFull: {
		harm: slower, alone: true, headline: "Full decode ranks", runbook: "EvenkeelDecodeBacklog", command: workers,
		clients: "Clients may wait for a decode rank.",
		next:    "Add decode ranks, or lower the slots of a rank.",
	},
	RanksTight: {
		harm: slower, alone: true, headline: "Too little KV memory", runbook: "Preemptions", command: tight,
		clients: "Clients wait longer, because answers there were stopped and go on elsewhere. Answers that cannot go on end with an error.",
		next:    "Compare the capacity with what the engine logs, and set kv_tokens. If it is right, lower slots or add decode ranks.",
	},
	RanksDrain: {
		harm: nothing, family: "drains", headline: "Drain", many: "have ranks that drain", runbook: "Drains", command: drains,
		clients: "Clients notice nothing, as long as the other ranks can take the load.",
		next:    "Wait until the ranks are empty. They still take part in the steps of their group.",
	},
	PeerDown: {
		harm: nothing, headline: "Peer outage", many: "are not up", runbook: "EvenkeelPeerDown", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/geo" | jq .peers`,
		clients: "Clients notice nothing, as long as this region has room.",
		next:    "Look whether the other proxy is alive, and then at the link.",
	},
	NoOwner: {
		harm: failing, headline: "No owner", many: "have no owner, so that their engines get no requests", runbook: "EvenkeelNoOwner", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq .areas`,
		clients: "Clients of these engines wait or are refused.",
		next:    "Look whether the lease store answers, and which proxies are alive.",
	},
}

// gone are the kinds that say that an engine gets nothing: one of them may follow the
// other.
var gone = map[Kind]bool{EngineDown: true, EngineHangs: true, EngineOut: true, EngineHalted: true, PrefillOut: true}

// order has causes first, those that say most before the others.
func (k kind) order() int {
	n := 10 * int(failing-k.harm)
	if k.vague {
		n++
	}
	if k.effect {
		n += 1000
	}
	if k.load {
		n -= 500 // the cause of other effects
	}
	return n
}

// say tells of several findings of a kind.
func (k kind) say(which, reason string) string {
	s := which + " " + k.many
	if reason != "" {
		s += ": " + reason
	}
	return s
}
