package detect

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kinds of findings about prefill engines and the arrival queue.
const (
	GateClosed  Kind = "gate_closed"
	PrefillOut  Kind = "prefill_out"
	MetricsOld  Kind = "metrics_old"
	NoPrefill   Kind = "no_prefill"
	QueueFull   Kind = "queue_full"
	PrefillBusy Kind = "prefill_busy"
	QueueWaits  Kind = "queue_waits"
)

var prefillDetectors = []Detector{
	{
		Kind: GateClosed, find: findGateClosed,
		harm: slower, toleratedAbsence: gateOpenFor, nextForKey: limitKeyOrAddPrefill, headline: "Full prefill engines",
		pluralText: "take no prompts, because their KV caches are full",
		runbook:    "gate_closed", command: showWorkers,
		clients: "Clients wait longer for their first token.",
		next:    "Look whether finished prefills wait in the pool. If so, add decode ranks, else add prefill ranks.",
	},
	{
		Kind: PrefillOut, find: findPrefillOut, getsNoRequests: true, takesEngineAway: true, unspecific: true,
		harm: waiting, headline: "Failing prefill engine", pluralText: "take no prompts, because earlier ones failed", runbook: "engine_out",
		command: showWorkers,
		clients: "Clients wait longer for their first token. Prompts that failed there were tried elsewhere.",
		next:    "Mend what failed there; the engine's own log may say more. Others take its prompts meanwhile.",
	},
	{
		Kind: MetricsOld, find: findMetricsOld, byOwnClock: engineIsLate,
		harm: slower, family: "late", toleratedAbsence: slowEngineAbsence, headline: "Slow prefill metrics",
		pluralText: "answer too late when they are asked for their metrics", runbook: "metrics_old",
		clients: "Prompts of clients are placed by older figures of these engines and by the proxy's own accounts.",
		next: "Look how long /metrics of each engine takes, and what keeps its API server busy. If it is only slow, raise " +
			"prefill.scrape.timeout.",
		command: "curl -sm 20 -o /dev/null -w '%{time_total} s\\n' http://{engine}/metrics",
	},
	{
		Kind: NoPrefill, find: findNoPrefill,
		harm: failing, effect: true, headline: "No prefill", runbook: "no_prefill", command: showWorkers,
		clients: "Clients wait, and get a 503 when prefill.queue.timeout is over.",
		next:    "Start a prefill engine, or one that does both, or free the KV memory of one that is full.",
	},
	{
		Kind: QueueFull, find: findQueueFull,
		harm: failing, effect: true, manyWait: true, headline: "Full queue", runbook: "queue_full", command: showFailedReceipts,
		clients: "Clients get a 429 for new requests, and are told to try again.",
		next:    "Add ranks to the side that is short, or find the caller that sends too much. A larger limit helps against short peaks only.",
	},
	{
		Kind: PrefillBusy, find: findPrefillBusy,
		nextForKey: "Ask who uses API key {key} what changed, and lower its max_concurrent or rpm in the key file. A time or an id at the " +
			"beginning makes each prompt a new one for every prefix cache. Else add prefill engines.",
		harm: waiting, effect: true, overload: true, manyWait: true, toleratedAbsence: togetherWithin, headline: "Prefill backlog",
		runbook: "prefill_busy",
		command: showAdvice,
		clients: "All clients wait for their first token, whether their own prompts are long or short.",
		next: "Limit the key that sends most, or add prefill engines. If its prompts were in the prefix caches before, " +
			"ask its owner what changed at their beginning: a time or an id there makes each prompt a new one. More decode ranks do not help.",
	},
	{
		Kind: QueueWaits, find: findQueueWaits,
		harm: waiting, effect: true, headline: "No prefill", runbook: "no_prefill", command: showWorkers,
		clients: "Clients wait for their first token.",
		next:    "Bring prefill engines back, or free the KV memory of one that is full.",
	},
}

// lateSeconds is the wait from which a request is late. In a pool with a time limit, lateShare
// decides instead.
const lateSeconds = 10.0

// IsBacklogLong says whether a new prompt would wait longer than lateSeconds until an engine begins
// it.
func (p *Prefill) IsBacklogLong() bool { return p.BacklogS > lateSeconds }

// gateOpenFor: a full engine may take prompts for this long without the end of the incident.
const gateOpenFor = 15 * time.Second

// The metrics of an engine are old if they are older than oldScrapes scrape intervals and older
// than oldMs.
const (
	oldScrapes = 3
	oldMs      = 5000
	silentS    = 60 // for which an engine may be up without having reported its load
)

// eachPrefillRank names an engine with one rank without the rank.
func (v *view) eachPrefillRank(report func(rank *PrefillEngine, where place)) {
	oneRank := map[string]bool{}
	for i := range v.Engines {
		if e := &v.Engines[i]; e.Role == prefillRole && e.Ranks == 1 {
			oneRank[e.ID] = true
		}
	}
	for i := range v.Prefill.Engines {
		rank := &v.Prefill.Engines[i]
		name := rank.ID
		if engine, found := strings.CutSuffix(rank.ID, "/0"); found && oneRank[engine] {
			name = engine
		}
		report(rank, place{"prefill engine", name, "prefill"})
	}
}

// findGateClosed names the API key with more than half of the prompt tokens.
func findGateClosed(v *view, report reportFunc) {
	v.eachPrefillRank(func(e *PrefillEngine, where place) {
		if e.State == "closed" {
			key, sentence := v.Prefill.keyOfMostTokens()
			f := report(where, noReason, "%s takes no prompts, because its KV cache is %.0f %% full", where.capitalized(), 100*e.KVShare)
			f.Key = key
			if key != "" {
				f.Suffix = ": " + sentence
			}
		}
	})
}

func findPrefillOut(v *view, report reportFunc) {
	const takesNone = " takes no prompts, because earlier ones failed"
	v.eachPrefillRank(func(e *PrefillEngine, where place) {
		if e.State != "out" || e.LosesHandoffs { // the second has a finding of its own
			return
		}
		// The sentence names the engine already, and advice follows a semicolon.
		why, _, _ := strings.Cut(strings.Replace(WithoutAddress(e.Why, e.ID), "prefill "+e.ID+" answered", "it answered", 1), "; ")
		if why != "" {
			why = ": " + why
		}
		report(where, e.Why, "%s%s%s", where.capitalized(), takesNone, why)
	})
	for i := range v.Prefill.Groups {
		if g := &v.Prefill.Groups[i]; g.State == "out" {
			where := place{"group", g.ID, ranksPanel}
			report(where, noReason, "%s%s", where.capitalized(), takesNone)
		}
	}
}

func findMetricsOld(v *view, report reportFunc) {
	upFor := map[string]float64{} // seconds by engine
	for i := range v.Engines {
		if e := &v.Engines[i]; e.Role == prefillRole && e.State == "up" {
			upFor[e.ID] = e.SinceS
		}
	}
	intervalMs := v.Prefill.ScrapeEveryMs
	v.eachPrefillRank(func(e *PrefillEngine, where place) {
		inService := e.State == "open" || e.State == "closed"
		switch {
		// not asked for its metrics, or another finding reports its state
		case intervalMs <= 0 || !inService:
		case e.ScrapeAgeMs > max(oldMs, oldScrapes*intervalMs):
			report(where, noReason, "%s answers too late when it is asked for its metrics", where.capitalized())
		case e.ScrapeAgeMs < 0 && upFor[engineOf(e.ID)] > silentS: // -1: never read
			report(where, noReason, "%s has not told its load since it is up: its metrics cannot be read, or lack it", where.capitalized())
		}
	})
}

func (p *Prefill) countOpen() (open int, role string) {
	for i := range p.Engines {
		if p.Engines[i].State == "open" {
			open++
		}
	}
	for i := range p.Groups {
		if p.Groups[i].State == "open" {
			open++
		}
	}
	if len(p.Groups) > 0 && len(p.Engines) == 0 {
		return open, "aggregated"
	}
	return open, "prefill"
}

// findNoPrefill is only a warning if no request waits and the KV cache of some engine is too full:
// it soon has room again.
func findNoPrefill(v *view, report reportFunc) {
	hasAny := len(v.Prefill.Engines)+len(v.Prefill.Groups) > 0
	open, role := v.Prefill.countOpen()
	if open > 0 || !hasAny || v.anyPaused() {
		return
	}
	f := report(proxyPlace("prefill"), noReason, "No %s engine takes prompts", role)
	anyFull := slices.ContainsFunc(v.Prefill.Engines, func(e PrefillEngine) bool { return e.State == "closed" })
	if v.Prefill.Waiting == 0 && anyFull {
		f.Severity = Warn
	}
}

// queueTrouble is the worst kind of finding about the arrival queue; empty: none.
func (v *view) queueTrouble() Kind {
	p := &v.Prefill
	open, _ := p.countOpen()
	// Waiting is the sum over all models, so it is compared only if there is one.
	queueIsFull := p.QueueMax > 0 && p.Waiting >= p.QueueMax && len(v.Models) == 1
	switch { // the worst first
	case v.refusedBecause() != "" || queueIsFull:
		return QueueFull
	case p.LongBacklogS > 0 && !v.anyOverloaded(): // an overload of the ranks explains the backlog
		return PrefillBusy
	case p.Waiting > 0 && open == 0 && !v.anyPaused(): // an operator's pause is no trouble
		return QueueWaits
	}
	return ""
}

// refusedBecause is why requests are refused by a full queue; empty: few fail, none for this, or
// not known.
func (v *view) refusedBecause() string {
	if f := v.queueFullFailures(); v.manyFail() && f != nil {
		return f.Why
	}
	return ""
}

func (v *view) anyOverloaded() bool {
	for _, l := range v.loads {
		if l.kind != "" {
			return true
		}
	}
	return false
}

// findQueueFull: the arrival queue or the pool is full. A request has a place in the pool from the
// begin of its prefill until it gets a decode rank. The reason of the last refusal says which it
// was.
func findQueueFull(v *view, report reportFunc) {
	if v.queueTrouble() != QueueFull {
		return
	}
	p := &v.Prefill
	if why := v.refusedBecause(); why != "" {
		placesUsed, places := max(0, v.Proxy.PlacesUsed), max(0, v.Proxy.Places) // below 0 only by a bug
		report(proxyPlace("prefill"), noReason,
			"Requests are refused, because %s. At the last look %s waited in the arrival queue, and %s of %s places of the pool were taken",
			why, requests(p.Waiting), stats.Grouped(placesUsed), stats.Grouped(places))
		return
	}
	// No refusals show it, but the arrival queue has reached its limit.
	report(proxyPlace("prefill"), noReason, "The arrival queue is full: %s in it, and its limit is %s (prefill.queue.max)", waits(p.Waiting),
		stats.Grouped(p.QueueMax))
}

// findPrefillBusy names the API key with more than half of the prompt tokens, else of the waiting
// requests.
func findPrefillBusy(v *view, report reportFunc) {
	if v.queueTrouble() == PrefillBusy {
		apiKey, apiKeyText := v.keyOfMostWaiting()
		if key, sentence := v.Prefill.keyOfMostTokens(); key != "" {
			apiKey, apiKeyText = key, ". "+words.Capital(sentence)
		}
		report(proxyPlace("prefill"), noReason,
			"Prompts come faster than the prefill engines compute them: %s, and a prompt that comes now begins in about %.0f s%s%s",
			waits(v.Prefill.Waiting), v.Prefill.BacklogS, apiKeyText, lostHitsText(v.Prefill.Hits)).Key = apiKey
	}
}

func findQueueWaits(v *view, report reportFunc) {
	if v.queueTrouble() == QueueWaits {
		an := "a prefill"
		if _, role := v.Prefill.countOpen(); role == "aggregated" {
			an = "an aggregated"
		}
		report(proxyPlace("prefill"), noReason, "%s for %s engine", words.Capital(waits(v.Prefill.Waiting)), an)
	}
}

// the smallest drop of a key's cached share that is reported
const reportedHitsDrop = 0.3

// keyOfMostTokens returns the API key with more than half of the prompt tokens that prefill engines
// hold; empty: no key has so many.
func (p *Prefill) keyOfMostTokens() (key, sentence string) {
	// an empty key stands for all callers without one
	if h := p.Heaviest; h != nil && h.Key != "" && h.Share > 0.5 {
		return h.Key, fmt.Sprintf("%.0f %% of the prompt tokens that prefill engines hold are of API key %s, whose prompts have %s tokens in "+
			"the mean", 100*h.Share, h.Key, stats.Grouped(h.Mean))
	}
	return "", ""
}

// lostHitsText says that far fewer prompt tokens of a key are found in prefix caches than before.
func lostHitsText(h *Hits) string {
	if h == nil || h.Before-h.Share < reportedHitsDrop {
		return ""
	}
	whose := "these prompts" // an empty key stands for callers without one
	if h.Key != "" {
		whose = "the prompts of API key " + h.Key
	}
	return fmt.Sprintf(". Prefix caches had %.0f %% of the tokens of %s, and have %.0f %% since a minute ago: these prompts may begin "+
		"differently now", 100*h.Before, whose, 100*h.Share)
}
