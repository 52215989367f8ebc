package detect

import (
	"slices"
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Package delivery finds out which engine is to blame for lost hand-offs.
const (
	HandoffsLost Kind = "handoffs_lost"
	PairBroken   Kind = "pair_broken"
	NoHandoffs   Kind = "no_handoff_arrives"
	ReadTooLate  Kind = "kv_read_late"
)

var handoffDetectors = []Detector{
	{
		Kind: HandoffsLost, find: findHandoffsLost, getsNoRequests: true, takesEngineAway: true,
		harm: waiting, headline: "Lost hand-offs", pluralText: "lose their hand-offs of KV, although the engines on the other side work",
		runbook: "handoffs_lost", command: showPairs,
		clients: "Clients wait longer for their first token. Requests whose hand-off was lost were tried again with other engines.",
		next: "Look at the engine's log, and at its KV network: its port, and ibstat or hccn_tool. If engines on the other side were " +
			"restarted, it may keep connections to the former processes: restart it.",
	},
	{
		Kind: PairBroken, find: findPairBroken,
		harm: nothing, headline: "Broken pair", pluralText: "cannot hand over KV", runbook: "pair_broken", command: showPairs,
		clients: "Requests of clients are served by these engines with others.",
		next:    "Look at the network between the two, and whether one keeps connections to a former process of the other.",
	},
	{
		Kind: NoHandoffs, find: findNoHandoffs,
		harm: failing, headline: "No hand-off arrives", pluralText: "get no hand-off through",
		runbook: "no_handoff_arrives", command: showPairs,
		clients: "Clients get an error after all attempts of their requests.",
		next: "It cannot be told from here which side is sick: all prefill engines, all decode engines, or the network between them. Begin " +
			"with what was restarted or changed last, and with the logs of both sides.",
	},
	{
		Kind: ReadTooLate, find: findReadTooLate,
		harm: nothing, headline: "KV read too late", pluralText: "count hand-offs that were reported after their KV was freed", runbook: "kv_read_late",
		command: `curl -s http://{engine}/metrics | grep -E "nixl_num_(kv_expired_reqs|notifications_after_expiry)_total"`,
		clients: "Clients of this proxy get no answer that comes so late: it is withheld, and its prompt is computed again. " +
			"Answers of other callers of the engine may be made of another prompt's KV.",
		next: "Look which decode engine stood still, and whether anybody else sends hand-offs to these engines. If KV takes long to be read, " +
			"raise kv_lease_duration and kv_hold_timeout together.",
	},
}

func (v *view) eachQuarantine(report func(prefiller, engine string, lost string)) {
	for i := range v.Models {
		for _, p := range v.Models[i].Pairs {
			if p.Quarantined {
				report(addressOf(p.Prefiller), addressOf(p.Engine), stats.Grouped(p.Failures)+" in a row were lost")
			}
		}
	}
}

func addressOf(instance string) string {
	if _, address, found := strings.Cut(instance, " "); found {
		return address
	}
	return instance
}

func findHandoffsLost(v *view, report reportFunc) {
	v.eachQuarantine(func(prefiller, engine, lost string) {
		switch {
		case engine == "":
			where := place{"prefill engine", prefiller, "prefill"}
			report(where, noReason, "Hand-offs of %s do not arrive at decode engines that work with other prefill engines: %s. It gets no prompts "+
				"but a trial", where, lost)
		case prefiller == "":
			where := place{"decode engine", engine, ranksPanel}
			report(where, noReason, "%s loses the hand-offs of prefill engines that work with other decode engines: %s. It gets no requests "+
				"but a trial", where.capitalized(), lost)
		}
	})
}

func findPairBroken(v *view, report reportFunc) {
	v.eachQuarantine(func(prefiller, engine, lost string) {
		if prefiller != "" && engine != "" {
			where := place{"pair", prefiller + " and " + engine, ranksPanel}
			report(where, noReason, "Hand-offs of prefill engine %s do not arrive at decode engine %s, although both work with others: %s",
				prefiller, engine, lost)
		}
	})
}

// noneArriveFor is how long no hand-off must have arrived. If one side works, this shows within
// that time.
const noneArriveFor = 3 * time.Second

// findNoHandoffs: hand-offs are lost and none arrives, so that no engine can be blamed.
func findNoHandoffs(v *view, report reportFunc) {
	for i := range v.Models {
		m := &v.Models[i]
		if m.NoneArriveSince.IsZero() || v.At.Sub(m.NoneArriveSince) < noneArriveFor {
			continue
		}
		var prefills, decodes []string
		for _, p := range m.Pairs {
			if p.Prefiller != "" { // else the decode engine alone was to blame before
				prefills = append(prefills, addressOf(p.Prefiller))
			}
			if p.Engine != "" {
				decodes = append(decodes, addressOf(p.Engine))
			}
		}
		slices.Sort(prefills)
		slices.Sort(decodes)
		prefills, decodes = slices.Compact(prefills), slices.Compact(decodes)
		report(place{"model", m.Name, ranksPanel}, noReason,
			"No hand-off of model %s arrives, from prefill engines %s at decode engines %s. No engine is taken out of service",
			m.Name, words.FirstOf(prefills), words.FirstOf(decodes)).LastedFor = v.At.Sub(m.NoneArriveSince)
	}
}

// in seconds
const readLateFor = 300

func findReadTooLate(v *view, report reportFunc) {
	for i := range v.Engines {
		e := &v.Engines[i]
		if late := e.ReadLate; late != nil && late.AgoS < readLateFor {
			where := place{"prefill engine", e.ID, "prefill"}
			report(where, noReason, "%s counts %s that decode engines reported when their KV was freed already. If they "+
				"read it, it may have been another prompt's", where.capitalized(),
				words.Count(int(late.HandOffs), "hand-off"))
		}
	}
}
