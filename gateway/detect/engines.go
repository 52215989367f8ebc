package detect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"evenkeel/internal/words"
)

// Kinds of findings about engines, and about the sources that discover engines.
const (
	EngineMoved  Kind = "engine_moved"
	EngineHangs  Kind = "engine_hangs"
	EngineDown   Kind = "engine_down"
	EngineOut    Kind = "engine_out"
	EngineHalted Kind = "engine_halted"
	EngineDrains Kind = "engine_drains"
	EngineAmiss  Kind = "engine_amiss"
	SourceFails  Kind = "source_fails"
	EnginesUnfit Kind = "engines_unfit"
)

var engineDetectors = []Detector{
	{
		Kind: EngineMoved, find: findEngineMoved, getsNoRequests: true, takesEngineAway: true,
		harm: waiting, headline: "Moved name", pluralText: "have names that lead to other addresses, where nothing answers",
		runbook: "engine_moved",
		command: "getent ahosts {host}; " + showWorkers,
		clients: "Clients whose requests ran at the old address get the rest from other engines where that is possible, and else an " +
			"error.",
		clientsOfPrefill: "Clients wait longer for their first token. Prompts that were computed at the old address are computed again on " +
			"other engines.",
		next: "Look why the name leads elsewhere: at its DNS record, or at the endpoints of its service. The engine at the old address may " +
			"be alive, so do not restart it. " +
			"Requests go to the new address once something answers there.",
	},
	{
		Kind: EngineHangs, find: findEngineHangs, getsNoRequests: true, takesEngineAway: true, byOwnClock: engineIsLate,
		harm: waiting, headline: "Engine hangs", pluralText: "take connections, but do not answer their health checks", runbook: "engine_hangs",
		clientsOfPrefill: "Clients whose prompts were sent there wait until the engine goes on, until it counts as down, or until " +
			"limits.probe_timeout is over. Then other engines compute their prompts.",
		clients: "Clients whose requests ran there get no tokens for now. If the engine goes on, so do these requests. " +
			"Else they go on elsewhere when limits.event_timeout is over, or end with an error.",
		next: "Look whether the process is stopped, its host pages, or its core or its GPU stands still. " +
			"Keep its log and its stacks before you restart it. It may come back by itself.",
		command: `curl -sm 10 -o /dev/null -w '%{http_code}, connected after %{time_connect} s, %{time_total} s in all\n' http://{engine}/health`,
	},
	{
		Kind: EngineDown, find: findEngineDown, getsNoRequests: true, takesEngineAway: true,
		harm: waiting, headline: "Engine outage", pluralText: "are down", runbook: "engine_down", command: "curl -sm 3 -i http://{engine}/health",
		clients:          "Clients whose requests ran there get the rest from other engines where that is possible, and else an error.",
		clientsOfPrefill: "Clients wait longer for their first token. Prompts that were computed there are computed again on other engines.",
		next:             "Look whether the machine and the process are alive, and restart the engine. Its own log says why it ended.",
	},
	{
		Kind: EngineOut, find: findEngineOut, getsNoRequests: true, takesEngineAway: true,
		harm: waiting, headline: "Failing engine", pluralText: "get no requests, because earlier ones failed", runbook: "engine_out",
		command: showWorkers,
		clients: "Clients wait longer. Requests that failed there were tried elsewhere, as long as the retry budget lasted.",
		next:    "Read the engine's own log. You may restart it at any time, because nothing new is sent there.",
	},
	{
		Kind: EngineHalted, find: findEngineHalted, getsNoRequests: true, takesEngineAway: true,
		harm: waiting, headline: "Halted engine", pluralText: "take no requests for now", runbook: "engine_halted", command: showWorkers,
		clients: "Clients wait, and get a 503 when the time limit of their queue is over. Answers that run there stand still meanwhile, or go " +
			"on elsewhere.",
		next: "Look who changes the number of ranks, or begin the recovery of a group that has met a fault. Do not restart an engine that " +
			"re-forms.",
	},
	{
		Kind: EngineDrains, find: findEngineDrains,
		harm: nothing, family: "drains", headline: "Drain", pluralText: "drain", runbook: "drains", command: takeDrainBack,
		clients: "New requests of clients go to the other engines, and what runs there goes on.",
		next:    "Restart the engine when nothing runs there any more, then take the drain back.",
	},
	{
		Kind: EngineAmiss, find: findEngineAmiss, byOwnClock: engineIsLate,
		harm: slower, unspecific: true, family: "late", toleratedAbsence: slowEngineAbsence, headline: "Engine trouble",
		pluralText: "are up, but something is amiss",
		command:    showWorkers, runbook: "engine_amiss",
		clients: "Clients may wait longer.",
		next:    "Read what is amiss, and the engine's own log.",
	},
	{
		Kind: SourceFails, find: findSourceFails,
		harm: nothing, sharesNoCause: true, headline: "Discovery fails", runbook: "source_fails", command: showLogs,
		clients: "Engines that come get no requests of clients, and engines that go are not forgotten.",
		next:    "Mend the source. Its last list stays in force until then.",
	},
	{
		Kind: EnginesUnfit, find: findEnginesUnfit,
		harm: nothing, sharesNoCause: true, headline: "Unfit engines", runbook: "engines_unfit", command: showWorkers,
		clients: "No request of clients is sent to these engines.",
		next:    "Read why each engine is unfit, and start it with the connector of its profile.",
	},
}

// troubleKind is empty if nothing is wrong, or an operator has paused the engine. The kind nearest
// to the cause is taken: a new address may explain a hang or an outage, and a hang explains an
// outage.
func (e *Engine) troubleKind() Kind {
	addressChanged := e.Moved != nil && e.Moved.AgoS < addressChangeS
	// In state halted or odd, the reason is known.
	answersBadly := e.State == "down" || e.State == "out" || e.State == "wedged" || e.Hangs
	switch {
	case e.Paused && e.State == "halted": // an operator asked for it
		return ""
	case addressChanged && answersBadly:
		return EngineMoved
	case e.Hangs && e.State != "odd": // Why of an odd engine is about its connector
		return EngineHangs
	case e.State == "down":
		return EngineDown
	case e.State == "halted":
		return EngineHalted
	case e.State != "up":
		return EngineOut
	case e.Draining:
		return EngineDrains
	case e.Why != "":
		return EngineAmiss
	}
	return ""
}

// anyPaused: then waiting requests are no fault.
func (v *view) anyPaused() bool {
	return slices.ContainsFunc(v.Engines, func(e Engine) bool { return e.Paused })
}

// for how long, in s, a changed address may be why an engine does not answer
const addressChangeS = 3600

func findEngineMoved(v *view, report reportFunc) {
	v.eachEngine(EngineMoved, func(e *Engine, where place, why string) {
		// A failed health check adds both addresses to its error.
		why, _, _ = strings.Cut(why, "; its name has another address")
		finding := "nothing answers there"
		if e.State != "down" {
			finding = "what answers there is not the engine"
		}
		report(where, noReason, "%s has another address: its name leads to %s since %s ago, and led to %s before; and %s: %s",
			where.capitalized(), e.Moved.To, spokenAge(e.Moved.AgoS), e.Moved.From, finding,
			// the later of the two began the trouble
			cmp.Or(why, unknownWhy)).LastedFor = seconds(min(e.Moved.AgoS, e.SinceS))
	})
}

func spokenAge(s float64) string {
	if s < 120 {
		return fmt.Sprintf("%.0f s", s)
	}
	return fmt.Sprintf("%.0f minutes", s/60)
}

// drainedEngines returns engines with decode ranks. A finding EngineDrains reports each of them
// together with its ranks.
func drainedEngines(f *Facts) map[string]bool {
	all := map[string]bool{}
	for i := range f.Engines {
		if e := &f.Engines[i]; e.Draining && e.State == "up" && e.Role != prefillRole {
			all[e.ID] = true
		}
	}
	return all
}

// eachEngine: why is e.Why without the engine's address.
func (v *view) eachEngine(kind Kind, report func(e *Engine, where place, why string)) {
	for i := range v.Engines {
		if e := &v.Engines[i]; e.troubleKind() == kind {
			report(e, place{e.Role + " engine", e.ID, "engines"}, WithoutAddress(e.Why, e.ID))
		}
	}
}

const unknownWhy = "no reason is known"

func findEngineHangs(v *view, report reportFunc) {
	v.eachEngine(EngineHangs, func(e *Engine, where place, why string) {
		cause, _, _ := strings.Cut(why, ":") // the rest is the error of a call that timed out
		f := report(where, noReason, "%s hangs: its port takes connections, but %s", where.capitalized(), cause)
		if e.State != "up" { // else SinceS says nothing about the hang
			f.LastedFor = seconds(e.SinceS)
		}
	})
}

func findEngineDown(v *view, report reportFunc) {
	v.eachEngine(EngineDown, func(e *Engine, where place, why string) {
		report(where, e.Why, "%s is down: %s", where.capitalized(), cmp.Or(why, unknownWhy)).LastedFor = seconds(e.SinceS)
	})
}

func findEngineOut(v *view, report reportFunc) {
	v.eachEngine(EngineOut, func(e *Engine, where place, why string) {
		text := fmt.Sprintf("is %s and gets no requests: %s", e.State, cmp.Or(why, unknownWhy))
		switch e.State {
		case "odd":
			text = "is not used: " + why // why is never empty in state odd
		case "wedged":
			text = "answers, but computes nothing: " + cmp.Or(why, unknownWhy)
		}
		report(where, e.Why, "%s %s", where.capitalized(), text).LastedFor = seconds(e.SinceS)
	})
}

func findEngineHalted(v *view, report reportFunc) {
	v.eachEngine(EngineHalted, func(e *Engine, where place, why string) {
		f := report(where, e.Why, "%s takes no requests for now, and they wait for it: %s", where.capitalized(), why)
		f.LastedFor = seconds(e.SinceS)
	})
}

func findEngineDrains(v *view, report reportFunc) {
	v.eachEngine(EngineDrains, func(_ *Engine, where place, _ string) {
		report(where, noReason, "%s drains: it takes no new requests", where.capitalized())
	})
}

func findEngineAmiss(v *view, report reportFunc) {
	v.eachEngine(EngineAmiss, func(e *Engine, where place, why string) {
		report(where, e.Why, "%s is up, but something is amiss: %s", where.capitalized(), why)
	})
}

func findSourceFails(v *view, report reportFunc) {
	for i := range v.Sources {
		if s := &v.Sources[i]; s.Error != "" {
			report(place{"source", s.Name, "engines"}, noReason, "Discovery by %s fails, and its last list of %s stays in force: %s", s.Name,
				words.Count(s.Engines, "engine"), firstLine(s.Error))
		}
	}
}

func findEnginesUnfit(v *view, report reportFunc) {
	for i := range v.Sources {
		s := &v.Sources[i]
		n := len(s.Unfit)
		if n == 0 {
			continue
		}
		names := make([]string, n)
		for i, e := range s.Unfit {
			names[i] = e.Role + " engine " + e.ID
		}
		report(place{"source", s.Name, "engines"}, noReason, "%s of %s %s not used: %s. The first one is unfit: %s", words.Count(n, "engine"),
			s.Name, words.Are(n), words.FirstOf(names), firstLine(s.Unfit[0].Why))
	}
}
