package detect

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kinds.
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
		harm: slower, rests: gates, sender: flood, headline: "Full prefill engines", many: "take no prompts, because their KV caches are full",
		runbook: "gate_closed", command: workers,
		clients: "Clients wait longer for their first token.",
		next:    "Look whether finished prefills wait in the pool. If so, add decode ranks, else add prefill ranks.",
	},
	{
		Kind: PrefillOut, find: findPrefillOut, gone: true, spare: true, vague: true,
		harm: waiting, headline: "Failing prefill engine", many: "take no prompts, because earlier ones failed", runbook: "engine_out",
		command: workers,
		clients: "Clients wait longer for their first token. Prompts that failed there were tried elsewhere.",
		next:    "Mend what failed there; the engine's own log may say more. Others take its prompts meanwhile.",
	},
	{
		Kind: MetricsOld, find: findMetricsOld,
		harm: slower, family: "late", rests: again, headline: "Slow prefill metrics",
		many: "answer too late when they are asked for their metrics", runbook: "metrics_old",
		clients: "Clients notice nothing yet. Prompts are placed by older figures of these engines and by the proxy's own accounts.",
		next: "Look how long /metrics of each engine takes, and what keeps its API server busy. If it is only slow, raise " +
			"prefill.scrape.timeout.",
		command: "curl -sm 20 -o /dev/null -w '%{time_total} s\\n' http://{engine}/metrics",
	},
	{
		Kind: NoPrefill, find: findNoPrefill,
		harm: failing, effect: true, headline: "No prefill", runbook: "no_prefill", command: workers,
		clients: "Clients wait, and get a 503 when prefill.queue.timeout is over.",
		next:    "Start a prefill engine, or one that does both, or free the KV memory of one that is full.",
	},
	{
		Kind: QueueFull, find: findQueueFull,
		harm: failing, effect: true, crowded: true, headline: "Full queue", runbook: "queue_full", command: receipt,
		clients: "Clients get a 429 for new requests, and are told to try again.",
		next:    "Add ranks to the side that is short, or find the caller that sends too much. A larger limit helps against short peaks only.",
	},
	{
		Kind: PrefillBusy, find: findPrefillBusy,
		sender: "Ask who uses API key {key} what changed, and lower its max_concurrent or rpm in the key file. A time or an id at the " +
			"beginning makes each prompt a new one for every prefix cache. Else add prefill engines.",
		harm: waiting, effect: true, load: true, crowded: true, rests: moment, headline: "Prefill backlog", runbook: "prefill_busy",
		command: advised,
		clients: "All clients wait for their first token, whether their own prompts are long or short.",
		next: "Limit the key that sends most, or add prefill engines. If its prompts were in the prefix caches before, " +
			"ask its owner what changed at their beginning: a time or an id there makes each prompt a new one. More decode ranks do not help.",
	},
	{
		Kind: QueueWaits, find: findQueueWaits,
		harm: waiting, effect: true, headline: "No prefill", runbook: "no_prefill", command: workers,
		clients: "Clients wait for their first token.",
		next:    "Bring prefill engines back, or free the KV memory of one that is full.",
	},
}

// lateSeconds is the wait, in s, from which a request is reported as late. In a pool with a time limit, lateShare decides instead.
const lateSeconds = 10.0

// Late says whether a new prompt would wait longer than lateSeconds until an engine begins it.
func (p *Prefill) IsBacklogLong() bool { return p.BacklogS > lateSeconds }

// gates is how long the gate of a full engine may be open between two prompts while the incident lasts.
const gates = 15 * time.Second

// The metrics of an engine are old if they are older than oldScrapes scrape intervals and older than oldMs.
const (
	oldScrapes = 3
	oldMs      = 5000
	silentS    = 60 // s for which an engine may be up without having reported its load
)

// eachCandidate calls report for each rank of the prefill engines, with its place. An engine with one rank is named without the rank.
func (v *view) eachCandidate(report func(e *PrefillEngine, where at)) {
	oneRank := map[string]bool{}
	for i := range v.Engines {
		if e := &v.Engines[i]; e.Role == prefillRole && e.Ranks == 1 {
			oneRank[e.ID] = true
		}
	}
	for i := range v.Prefill.Engines {
		e := &v.Prefill.Engines[i]
		name := e.ID
		if engine, found := strings.CutSuffix(e.ID, "/0"); found && oneRank[engine] {
			name = engine
		}
		report(e, at{"prefill engine", name, "prefill"})
	}
}

// findGateClosed reports each prefill rank that gets no prompts because its KV cache is too full. If one API key has more than half of the
// prompt tokens on prefill engines, the finding names it.
func findGateClosed(v *view, say say) {
	v.eachCandidate(func(e *PrefillEngine, where at) {
		if e.State == "closed" {
			key, says := v.Prefill.heaviest()
			f := say(where, "", "%s takes no prompts, because its KV cache is %.0f %% full", where.begin(), 100*e.KVShare)
			f.Key = key
			if key != "" {
				f.Rest = ": " + says
			}
		}
	})
}

func findPrefillOut(v *view, say say) {
	const says = " takes no prompts, because earlier ones failed"
	v.eachCandidate(func(e *PrefillEngine, where at) {
		if e.State != "out" {
			return
		}
		// The sentence names the engine already, and what follows a semicolon in an error is advice.
		why, _, _ := strings.Cut(strings.Replace(WithoutAddress(e.Why, e.ID), "prefill "+e.ID+" answered", "it answered", 1), "; ")
		if why != "" {
			why = ": " + why
		}
		say(where, e.Why, "%s%s%s", where.begin(), says, why)
	})
	for i := range v.Prefill.Groups {
		if g := &v.Prefill.Groups[i]; g.State == "out" {
			where := at{"group", g.ID, "ranks"}
			say(where, "", "%s%s", where.begin(), says)
		}
	}
}

func findMetricsOld(v *view, say say) {
	upFor := map[string]float64{} // s since each engine came up
	for i := range v.Engines {
		if e := &v.Engines[i]; e.Role == prefillRole && e.State == "up" {
			upFor[e.ID] = e.SinceS
		}
	}
	intervalMs := v.Prefill.ScrapeEveryMs
	v.eachCandidate(func(e *PrefillEngine, where at) {
		inService := e.State == "open" || e.State == "closed"
		switch {
		case intervalMs <= 0 || !inService: // it is not asked for its metrics, or its state is a finding of its own
		case e.ScrapeAgeMs > max(oldMs, oldScrapes*intervalMs):
			say(where, "", "%s answers too late when it is asked for its metrics", where.begin())
		case e.ScrapeAgeMs < 0 && upFor[engineOf(e.ID)] > silentS:
			say(where, "", "%s has not told its load since it is up: its metrics cannot be read, or lack it", where.begin())
		}
	})
}

// open counts the prefill ranks and groups that take prompts. called is the word for their engines: prefill or aggregated.
func (p *Prefill) open() (n int, called string) {
	for i := range p.Engines {
		if p.Engines[i].State == "open" {
			n++
		}
	}
	for i := range p.Groups {
		if p.Groups[i].State == "open" {
			n++
		}
	}
	if len(p.Groups) > 0 && len(p.Engines) == 0 {
		return n, "aggregated"
	}
	return n, "prefill"
}

func findNoPrefill(v *view, say say) {
	hasAny := len(v.Prefill.Engines)+len(v.Prefill.Groups) > 0
	if open, called := v.Prefill.open(); open == 0 && hasAny && !v.paused() {
		f := say(proxyAt("prefill"), "", "No %s engine takes prompts", called)
		if v.Prefill.Waiting == 0 && slices.ContainsFunc(v.Prefill.Engines, func(e PrefillEngine) bool { return e.State == "closed" }) {
			f.Severity = Warn // their caches are full for the moment, and no request waits
		}
	}
}

// queueTrouble is the kind of the worst finding about the arrival queue; empty: nothing is wrong with it.
func (v *view) queueTrouble() Kind {
	p := &v.Prefill
	open, _ := p.open()
	// Waiting is the sum over all models, so it is compared with the limit only if there is one model.
	reachesLimit := p.QueueMax > 0 && p.Waiting >= p.QueueMax && len(v.Models) == 1
	switch {
	case v.refusedBecause() != "" || reachesLimit:
		return QueueFull
	case p.BusyS > 0 && !v.overloaded(): // an overload of the ranks explains the backlog
		return PrefillBusy
	case p.Waiting > 0 && open == 0 && !v.paused():
		return QueueWaits
	}
	return ""
}

// refusedBecause is why requests are refused because a queue is full. It is empty if only a few requests fail, if none of them is refused
// for this, or if the reason is not known.
func (v *view) refusedBecause() string {
	if f := v.refused(); v.fails() && f != nil {
		return f.Why
	}
	return ""
}

// overloaded says whether the load of some model is a finding.
func (v *view) overloaded() bool {
	for _, l := range v.loads {
		if l.kind != "" {
			return true
		}
	}
	return false
}

func findQueueFull(v *view, say say) {
	if v.queueTrouble() != QueueFull {
		return
	}
	p := &v.Prefill
	if why := v.refusedBecause(); why != "" {
		say(proxyAt("prefill"), "", "Requests are refused, because %s. At the last look %s waited in the arrival queue, and %s of %s places of "+
			"the pool were taken",
			why, requests(p.Waiting), stats.Grouped(max(0, v.Proxy.PlacesUsed)), stats.Grouped(max(0, v.Proxy.Places)))
		return
	}
	say(proxyAt("prefill"), "", "The arrival queue is full: %s in it, and its limit is %s (prefill.queue.max)", waits(p.Waiting),
		stats.Grouped(p.QueueMax))
}

func findPrefillBusy(v *view, say say) {
	if v.queueTrouble() == PrefillBusy {
		key, floods := v.floods()
		if heavy, says := v.Prefill.heaviest(); heavy != "" {
			key, floods = heavy, ". "+words.Capital(says)
		}
		say(proxyAt("prefill"), "",
			"Prompts come faster than the prefill engines compute them: %s, and a prompt that comes now begins in about %.0f s%s%s",
			waits(v.Prefill.Waiting), v.Prefill.BacklogS, floods, lostHits(v.Prefill.Hits)).Key = key
	}
}

func findQueueWaits(v *view, say say) {
	if v.queueTrouble() == QueueWaits {
		an := "a prefill"
		if _, called := v.Prefill.open(); called == "aggregated" {
			an = "an aggregated"
		}
		say(proxyAt("prefill"), "", "%s for %s engine", words.Capital(waits(v.Prefill.Waiting)), an)
	}
}

// hitsLost is the smallest drop of a key's cached share of prompt tokens that is reported.
const hitsLost = 0.3

// heaviest returns the API key with more than half of the prompt tokens that prefill engines hold, and a sentence that says so. Both are
// empty if no key has so many.
func (p *Prefill) heaviest() (key, says string) {
	if h := p.Heaviest; h != nil && h.Key != "" && h.Share > 0.5 {
		return h.Key, fmt.Sprintf("%.0f %% of the prompt tokens that prefill engines hold are of API key %s, whose prompts have %s tokens in "+
			"the mean", 100*h.Share, h.Key, stats.Grouped(h.Mean))
	}
	return "", ""
}

// lostHits returns text that follows a sentence: the prompts of a key are in the prefix caches much less than before. Empty: they are not.
func lostHits(h *Hits) string {
	if h == nil || h.Before-h.Share < hitsLost {
		return ""
	}
	whose := "these prompts"
	if h.Key != "" {
		whose = "the prompts of API key " + h.Key
	}
	return fmt.Sprintf(". Prefix caches had %.0f %% of the tokens of %s, and have %.0f %% since a minute ago: these prompts may begin "+
		"differently now", 100*h.Before, whose, 100*h.Share)
}
