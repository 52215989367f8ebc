package live

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/gateway/incident"
)

// Severities of a Problem.
const (
	Bad  = incident.Bad
	Warn = incident.Warn
)

// Problem is one thing that is wrong, and where.
type Problem struct {
	Severity string `json:"severity"`
	Panel    string `json:"panel"` // that shows more: proxy, traffic, ranks, pool, balance, prefill, engines, geo
	Where    string `json:"where"` // name of the engine, rank, group or model; empty: the proxy
	What     string `json:"what"`
}

// At which a number becomes a problem.
const (
	fullShare   = 0.95 // of a rank's KV tokens
	lateShare   = 0.5  // of the time an entry may wait, of the oldest
	lateSeconds = 10.0 // where it may wait for ever
	lostShare   = 0.15 // of a step, to imbalance
	failShare   = 0.01 // of requests
	oldScrapes  = 3    // intervals without a scrape
	oldMs       = 5000 // and at least so long
)

// findings are what is wrong.
type findings []incident.Finding

// find notes one of them.
type find func(kind incident.Kind, severity, panel, where, reason, format string, args ...any)

func (f *findings) say(kind incident.Kind, severity, panel, where, reason, format string, args ...any) {
	*f = append(*f, incident.Finding{Kind: kind, Severity: severity, Panel: panel, Where: where, Reason: reason, What: fmt.Sprintf(format, args...)})
}

// problems lists them.
func problems(all findings) []Problem {
	list := make([]Problem, 0, len(all))
	for _, f := range all {
		list = append(list, Problem{f.Severity, f.Panel, f.Where, f.What})
	}
	return list
}

// findingsOf reads a document as an operator would, first things first.
func findingsOf(d *Document) (all findings) {
	say := all.say
	p := &d.Proxy
	switch {
	case p.Draining:
		say(incident.Drains, Warn, "proxy", "", "", "drains: %s", cmp.Or(p.Why, "no new requests soon"))
	case !p.Ready:
		say(incident.NotReady, Bad, "proxy", "", p.Why, "not ready: %s", p.Why)
	}
	if p.DriftSlots != 0 || p.DriftTokens != 0 {
		say(incident.AuditDrift, Bad, "proxy", "", "", "the audit is off by %d slots and %d KV tokens: a bug, report it", p.DriftSlots, p.DriftTokens)
	}
	if p.ConfigError != "" {
		say(incident.ConfigRefused, Warn, "proxy", "", "", "the config file was refused and is not in force: %s", firstLine(p.ConfigError))
	}
	if t := &d.Traffic; t.FailuresPerS > failShare*t.RequestsPerS {
		how := ""
		if len(d.Failures) > 0 && d.Failures[0].Last5Min > 0 {
			how = ", most of the last minutes with " + d.Failures[0].Outcome
		}
		say(incident.RequestsFail, Bad, "traffic", "", "", "%.1f of %.1f requests/s fail%s", t.FailuresPerS, t.RequestsPerS, how)
	}
	for i := range d.Engines {
		e := &d.Engines[i]
		switch {
		case e.State != "up":
			kind := incident.EngineOut
			if e.State == "down" {
				kind = incident.EngineDown
			}
			say(kind, Bad, "engines", e.ID, e.Why, "%s engine is %s: %s", e.Role, e.State, cmp.Or(e.Why, "no reason told"))
			all[len(all)-1].For = time.Duration(e.SinceS * float64(time.Second))
		case e.Draining:
			say(incident.EngineDrains, Warn, "engines", e.ID, "", "%s engine drains", e.Role)
		case e.Why != "":
			say(incident.EngineAmiss, Warn, "engines", e.ID, e.Why, "%s", e.Why)
		}
	}
	for i := range d.Sources {
		sourceProblems(&d.Sources[i], say)
	}
	prefillProblems(&d.Prefill, say)
	for i := range d.Models {
		modelProblems(&d.Models[i], len(d.Models) > 1 || len(d.Models[i].Groups) > 1, say)
	}
	if d.Geo != nil {
		for _, peer := range d.Geo.Peers {
			if !peer.Up {
				say(incident.PeerDown, Warn, "geo", peer.ID, peer.Fault, "peer in %s is not up: %s", peer.Region, cmp.Or(peer.Fault, "no probe was answered"))
			}
		}
	}
	for _, a := range d.Areas {
		if a.Holder == "" && !a.Admits {
			say(incident.NoOwner, Bad, "geo", cmp.Or(a.Group, a.Region), "", "no dispatcher owns it, nobody sends its engines requests")
		}
	}
	slices.SortStableFunc(all, func(a, b incident.Finding) int { return cmp.Compare(a.Severity, b.Severity) }) // bad before warn
	return all
}

func sourceProblems(s *Source, say find) {
	if s.Error != "" {
		say(incident.SourceFails, Warn, "engines", s.Name, "", "discovery fails, its last list of %s stays in force: %s", count(s.Engines, "engine"), firstLine(s.Error))
	}
	if n := len(s.Unfit); n > 0 {
		names := make([]string, n)
		for i, e := range s.Unfit {
			names[i] = e.ID
		}
		say(incident.EnginesUnfit, Warn, "engines", s.Name, "", "%s found and not used: %s; %s: %s", count(n, "engine"), listed(names), names[0], firstLine(s.Unfit[0].Why))
	}
}

// firstLine is what an error says; below it a file's lines may follow.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

func prefillProblems(p *Prefill, say find) {
	open := 0
	for i := range p.Engines {
		e := &p.Engines[i]
		switch e.State {
		case "open":
			open++
		case "closed":
			say(incident.GateClosed, Warn, "prefill", e.ID, "", "takes no prompts: its KV cache is %.0f %% full", 100*e.KVShare)
		case "out":
			say(incident.PrefillOut, Bad, "prefill", e.ID, "", "takes no prompts: those before failed")
		}
		if old := max(oldMs, oldScrapes*p.ScrapeEveryMs); (e.State == "open" || e.State == "closed") && p.ScrapeEveryMs > 0 && e.ScrapeAgeMs > old {
			say(incident.MetricsOld, Warn, "prefill", e.ID, "", "has not told its load for %s", span(e.ScrapeAgeMs/1000))
		}
	}
	if open == 0 && len(p.Engines) > 0 {
		say(incident.NoPrefill, Bad, "prefill", "", "", "no prefill engine takes prompts")
	}
	switch {
	case p.QueueMax > 0 && p.Waiting >= p.QueueMax:
		say(incident.QueueFull, Bad, "prefill", "", "", "the arrival queue is full: %d requests", p.Waiting)
	case p.Waiting > 0 && open == 0:
		say(incident.QueueWaits, Bad, "prefill", "", "", "%d requests wait for a prefill engine", p.Waiting)
	}
}

// modelProblems names groups with their model where there are several.
func modelProblems(m *Model, several bool, say find) {
	late := lateSeconds
	if m.Pool.TTLS > 0 {
		late = lateShare * m.Pool.TTLS
	}
	if m.Pool.OldestS > late {
		say(incident.PoolLate, Bad, "pool", m.Name, "", "a finished prefill has waited %.1f s for a decode rank; %d wait", m.Pool.OldestS, m.Pool.Entries)
	}
	for i := range m.Groups {
		g := &m.Groups[i]
		name := cmp.Or(g.Name, m.Name)
		if several && g.Name != "" {
			name = m.Name + " · " + g.Name
		}
		if g.FallbackRounds > 0 {
			say(incident.PolicySlow, Warn, "balance", name, "", "the policy was too slow: %s decides for now", g.Policy)
		}
		if g.LostShare > lostShare {
			say(incident.Imbalance, Warn, "balance", name, "", "imbalance costs %.0f %% of every step", 100*g.LostShare)
		}
		full, tight, draining := []string{}, []string{}, []string{}
		for j := range g.Ranks {
			r := &g.Ranks[j]
			switch {
			case r.State == RankDraining:
				draining = append(draining, r.Name)
			case r.State == RankUp && r.Capacity > 0 && float64(r.KVTokens) >= fullShare*float64(r.Capacity):
				full = append(full, r.Name)
			case r.Tight:
				tight = append(tight, r.Name)
			}
		}
		some := func(kind incident.Kind, names []string, what string) {
			if n := len(names); n > 0 {
				say(kind, Warn, "ranks", name, "", "%s %s: %s", count(n, "rank"), what, listed(names))
			}
		}
		some(incident.RanksFull, full, "with a full KV cache")
		some(incident.RanksTight, tight, "kept emptier, the engine ran out of KV memory")
		some(incident.RanksDrain, draining, "draining")
	}
}

// listed names the first few.
func listed(names []string) (s string) {
	const most = 3
	for i, n := range names[:min(most, len(names))] {
		if i > 0 {
			s += ", "
		}
		s += n
	}
	if len(names) > most {
		s += fmt.Sprintf(" and %d more", len(names)-most)
	}
	return s
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
