package live

import (
	"fmt"
	"strings"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/incident"
	"evenkeel/internal/stats"
)

// At which a load becomes a finding.
const (
	oldScrapes = 3    // intervals without a scrape
	oldMs      = 5000 // and at least so long
	takenShare = 0.95 // of the slots: one that was just given back is taken in the next round
	roomShare  = 0.85 // of the KV tokens of all ranks: what waits finds no room beside answers that grow
)

// overload says that a model has no free slot or no KV memory, and so many wait for one that each has
// to wait for about one answer, or others are refused.
func overload(d *Document, m *Model, fails bool, say find) (f *incident.Finding) {
	used, slots, kv, capacity := 0, 0, int64(0), int64(0)
	for i := range m.Groups {
		for j := range m.Groups[i].Ranks {
			if r := &m.Groups[i].Ranks[j]; r.State == RankUp {
				used, slots, kv, capacity = used+r.Used, slots+r.Slots, kv+r.KVTokens, capacity+r.Capacity
			}
		}
	}
	waiting, where := m.Pool.Entries, "in the pool"
	if len(d.Models) == 1 && d.Prefill.Waiting > 0 && (waiting > 0 || d.Proxy.PlacesUsed >= d.Proxy.Places) { // else they wait for prefill
		where = "in the arrival queue"
		if waiting > 0 {
			where = "in the pool and in the arrival queue"
		}
		waiting += d.Prefill.Waiting
	}
	full := capacity > 0 && float64(kv) >= roomShare*float64(capacity)
	switch free := float64(used) < takenShare*float64(slots); {
	case slots == 0 || waiting == 0 || free && !full:
		return nil
	case waiting < min(used, slots) && !(full && free && 2*waiting >= used) && !(fails && refused(d) != nil): // KV memory comes free in large pieces
		return nil
	case !free:
		full = false // more KV memory would not help
	}
	kind, ranks := "decode slot", "decode ranks"
	if m.Aggregated {
		kind, ranks = "slot", "ranks"
	}
	key, floods := floodOf(d.Waiting)
	if full {
		f = say(incident.KVFull, Bad, at{"model", m.Name, "ranks"}, "",
			"The KV caches of the %s of model %s are %.0f %% full, so that %s of %s %ss stay free, and %s %s%s",
			ranks, m.Name, 100*float64(kv)/float64(capacity), stats.Grouped(slots-used), stats.Grouped(slots), kind,
			waits(waiting), where, floods)
		f.Key = key
		return f
	}
	taken := fmt.Sprintf("All %s %ss of model %s are", stats.Grouped(slots), kind, m.Name)
	switch {
	case used < slots:
		taken = fmt.Sprintf("%s of the %s %ss of model %s are", stats.Grouped(used), stats.Grouped(slots), kind, m.Name)
	case slots == 1:
		taken = fmt.Sprintf("The only %s of model %s is", kind, m.Name)
	}
	f = say(incident.Overload, Bad, at{"model", m.Name, "pool"}, "", "%s taken, and %s %s%s%s", taken, waits(waiting), where, floods, slower(m))
	f.Key = key
	return f
}

// slower says behind an overload that slots are taken for longer than before; empty: they are not.
func slower(m *Model) string {
	for i := range m.Groups {
		g := &m.Groups[i]
		switch {
		case g.FewS > 0:
			return fmt.Sprintf(". Answers of group %s hold their slots for longer, because a step gives %.1f tokens and gave %.1f before", g.Name, g.StepTokens, g.UsualTokens)
		case g.SlowS > 0:
			return fmt.Sprintf(". Answers of group %s hold their slots for longer, because a step takes %.0f ms and took %.0f ms before", g.Name, g.StepMs, g.UsualMs)
		}
	}
	return ""
}

// floodOf names the key of most of the requests that wait, and says so behind a sentence. Both are empty where there is none.
func floodOf(waiting []Waiting) (key, says string) {
	all := 0
	for _, w := range waiting {
		all += w.Requests
	}
	if len(waiting) == 0 || waiting[0].Key == "" || 2*waiting[0].Requests <= all {
		return "", ""
	}
	key = waiting[0].Key
	if waiting[0].Requests == all {
		return key, ", all of API key " + key
	}
	return key, fmt.Sprintf(": %s of the %s that wait are of API key %s", stats.Grouped(waiting[0].Requests), stats.Grouped(all), key)
}

// refused is how requests are refused because a queue is full; nil: none is lately, or
// only by the limit of a key.
func refused(d *Document) *Failed {
	for i := range d.Failures {
		if f := &d.Failures[i]; f.Outcome == "queue_full" && f.Last10S > 0 && !f.Own {
			return f
		}
	}
	return nil
}

// prefillFindings: full says that a model has no free slot or no KV memory.
func prefillFindings(d *Document, fails, full bool, say find) {
	p := &d.Prefill
	open := 0
	alone := map[string]bool{} // engines of one rank: that has the engine's name
	for i := range d.Engines {
		if e := &d.Engines[i]; e.Role == fleet.Prefill && e.Ranks == 1 {
			alone[e.ID] = true
		}
	}
	for i := range p.Engines {
		e := &p.Engines[i]
		where := at{"prefill engine", e.ID, "prefill"}
		if engine, found := strings.CutSuffix(e.ID, "/0"); found && alone[engine] {
			where.where = engine
		}
		switch e.State {
		case "open":
			open++
		case "closed":
			say(incident.GateClosed, Warn, where, "", "%s takes no prompts, because its KV cache is %.0f %% full", where.begin(), 100*e.KVShare)
		case "out":
			says := "%s takes no prompts, because earlier ones failed"
			why, _, _ := strings.Cut(strings.Replace(incident.WithoutAddress(e.Why, e.ID), "prefill "+e.ID+" answered", "it answered", 1), "; ")
			if why != "" {
				says += ": " + strings.ReplaceAll(why, "%", "%%")
			}
			say(incident.PrefillOut, Bad, where, e.Why, says, where.begin())
		}
		if old := max(oldMs, oldScrapes*p.ScrapeEveryMs); (e.State == "open" || e.State == "closed") && p.ScrapeEveryMs > 0 && e.ScrapeAgeMs > old {
			say(incident.MetricsOld, Warn, where, "", "%s answers too late when it is asked for its metrics", where.begin())
		}
	}
	for i := range p.Groups {
		switch g := &p.Groups[i]; g.State {
		case "open":
			open++
		case "out":
			where := at{"group", g.ID, "ranks"}
			say(incident.PrefillOut, Bad, where, "", "%s takes no prompts, because earlier ones failed", where.begin())
		}
	}
	kind := "prefill"
	if len(p.Groups) > 0 && len(p.Engines) == 0 {
		kind = "aggregated"
	}
	if open == 0 && len(p.Engines)+len(p.Groups) > 0 {
		say(incident.NoPrefill, Bad, proxyAt("prefill"), "", "No %s engine takes prompts", kind)
	}
	switch f := refused(d); {
	case fails && f != nil && f.Why != "":
		say(incident.QueueFull, Bad, proxyAt("prefill"), "", "Requests are refused, because %s. At the last look %s waited in the arrival queue, and %s of %s places of the pool were taken", f.Why, requests(p.Waiting), stats.Grouped(max(0, d.Proxy.PlacesUsed)), stats.Grouped(max(0, d.Proxy.Places)))
	case p.QueueMax > 0 && p.Waiting >= p.QueueMax && len(d.Models) == 1: // it is the sum over all models
		say(incident.QueueFull, Bad, proxyAt("prefill"), "", "The arrival queue is full: %s in it, and its limit is %s (prefill.queue.max)", waits(p.Waiting), stats.Grouped(p.QueueMax))
	case p.BusyS > 0 && !full:
		key, floods := floodOf(d.Waiting)
		say(incident.PrefillBusy, Bad, proxyAt("prefill"), "",
			"Prompts come faster than the prefill engines compute them: %s, and a prompt that comes now begins in about %.0f s%s%s",
			waits(p.Waiting), p.BacklogS, floods, lostHits(p.Hits)).Key = key
	case p.Waiting > 0 && open == 0:
		say(incident.QueueWaits, Bad, proxyAt("prefill"), "", "%s for %s engine", capital(waits(p.Waiting)), map[string]string{"prefill": "a prefill", "aggregated": "an aggregated"}[kind])
	}
}

// hitsLost is how many of a key's prompt tokens less are in a prefix cache, for that to be said.
const hitsLost = 0.3

// lostHits says behind a sentence that prompts of a key are no longer in the caches; empty: they are.
func lostHits(h *Hits) string {
	if h == nil || h.Before-h.Share < hitsLost {
		return ""
	}
	whose := "these prompts"
	if h.Key != "" {
		whose = "the prompts of API key " + h.Key
	}
	return fmt.Sprintf(". Prefix caches had %.0f %% of the tokens of %s, and have %.0f %% since a minute ago: these prompts may begin differently now", 100*h.Before, whose, 100*h.Share)
}
