package live

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/incident"
	"evenkeel/gateway/timeline"
	"evenkeel/stats"
)

// Severities of a finding.
const (
	Bad  = incident.Bad
	Warn = incident.Warn
)

// At which a number becomes a finding.
const (
	fullShare   = 0.95 // of a rank's KV tokens
	lateShare   = 0.5  // of the time an entry may wait, of the oldest
	lateSeconds = 10.0 // where it may wait for ever
	lostShare   = 0.15 // of a step, to imbalance
	failShare   = 0.01 // of requests
	oldScrapes  = 3    // intervals without a scrape
	oldMs       = 5000 // and at least so long
	heldSlack   = 5.0  // s that a round may be late, in a process that gets no CPU time
	takenShare  = 0.95 // of the slots: one that was just given back is taken in the next round
	roomShare   = 0.85 // of the KV tokens of all ranks: what waits finds no room beside answers that grow
)

// findings are what is wrong.
type findings []incident.Finding

// at is where something is wrong: what it is, its name, and the panel that shows more.
type at struct{ of, where, panel string }

// proxyAt is the proxy as a whole.
func proxyAt(panel string) at { return at{panel: panel} }

func (a at) String() string { return a.of + " " + a.where }

// begin is its name at the begin of a sentence.
func (a at) begin() string { return capital(a.String()) }

func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// find notes one of them, in a whole sentence.
type find func(kind incident.Kind, severity string, where at, reason, format string, args ...any) *incident.Finding

func (f *findings) say(kind incident.Kind, severity string, where at, reason, format string, args ...any) *incident.Finding {
	*f = append(*f, incident.Finding{Kind: kind, Severity: severity, Panel: where.panel, Of: where.of, Where: where.where, Reason: reason, What: fmt.Sprintf(format, args...)})
	return &(*f)[len(*f)-1]
}

// findingsOf reads a document as an operator would, first things first. last is what
// ended in the last minute.
func findingsOf(d *Document, last timeline.Ended) (all findings) {
	say := all.say
	p := &d.Proxy
	switch {
	case p.Draining:
		say(incident.Drains, Warn, proxyAt("proxy"), "", "The proxy drains: it is being taken out of service")
	case !p.Ready:
		say(incident.NotReady, Bad, proxyAt("proxy"), p.Why, "The proxy is not ready: %s", p.Why)
	}
	if p.DriftSlots != 0 || p.DriftTokens != 0 {
		say(incident.AuditDrift, Bad, proxyAt("proxy"), "", "The proxy's accounts are off by %s and %s KV tokens, which is a bug that you should report", count(int(p.DriftSlots), "slot"), stats.Grouped(p.DriftTokens))
	}
	if p.ConfigError != "" {
		say(incident.ConfigRefused, Warn, proxyAt("proxy"), "", "The config file was refused and is not in force: %s", mistake(p.ConfigError))
	}
	fails := d.Traffic.FailuresPerS > failShare*d.Traffic.RequestsPerS
	full, busy := make([]bool, len(d.Models)), false // models that are said to have no KV memory left; one has no room for requests
	for i := range d.Models {
		before := len(all)
		if key := overload(d, &d.Models[i], fails, say); len(all) > before {
			all[before].Key, full[i], busy = key, all[before].Kind == incident.KVFull, true
		}
	}
	if fails && !d.Traffic.Recovered {
		requestsFail(d, last, say)
	}
	drained := map[string]bool{} // engines with ranks that are told to drain
	for i := range d.Engines {
		e := &d.Engines[i]
		if engineFinding(e, say) {
			all[len(all)-1].For = seconds(e.SinceS)
		} else if e.Draining && e.Role != fleet.Prefill {
			drained[e.ID] = true
		}
	}
	for i := range d.Sources {
		sourceFindings(&d.Sources[i], say)
	}
	if key := prefillFindings(d, fails, busy, say); key != "" {
		all[len(all)-1].Key = key
	}
	for i := range d.Models {
		modelFindings(&d.Models[i], len(d.Models) > 1 || len(d.Models[i].Groups) > 1, full[i], drained, say)
	}
	if d.Geo != nil {
		for _, peer := range d.Geo.Peers {
			if !peer.Up {
				say(incident.PeerDown, Warn, at{"peer", peer.ID, "geo"}, peer.Fault, "Peer %s in region %s is not up: %s", peer.ID, peer.Region, cmp.Or(peer.Fault, "it answered no probe"))
			}
		}
	}
	for _, a := range d.Areas {
		if a.Holder == "" && !a.Admits {
			where := at{"region", a.Region, "geo"}
			if a.Group != "" {
				where.of, where.where = "group", a.Group
			}
			say(incident.NoOwner, Bad, where, "", "%s has no owner, so that its engines get no requests", where.begin())
		}
	}
	slices.SortStableFunc(all, func(a, b incident.Finding) int { return cmp.Compare(a.Severity, b.Severity) }) // bad before warn
	return all
}

// requestsFail counts over the last minute, as the strip and the table of failures do
// over longer times: a rate of ten seconds would agree with neither.
func requestsFail(d *Document, last timeline.Ended, say find) {
	how, most := "", &Failed{}
	for i := range d.Failures {
		if f := &d.Failures[i]; f.LastMinute > most.LastMinute {
			most = f
		}
	}
	switch {
	case most.LastMinute == 0:
	case last.Failed == 1:
		how = " with " + most.Outcome
	case most.LastMinute >= last.Failed:
		how = ", all of them with " + most.Outcome
	case 2*most.LastMinute > last.Failed:
		how = ", most of them with " + most.Outcome
	default:
		how = fmt.Sprintf(", %s of them with %s", stats.Grouped(most.LastMinute), most.Outcome)
	}
	if most.Own && most.LastMinute > 0 {
		how += ", the last one because " + most.Why
	}
	if host := d.Traffic.FailedOn; host != "" {
		how += ", and attempts of nearly all of them failed on host " + host
	}
	say(incident.RequestsFail, Bad, proxyAt("traffic"), "", "%s of the %s requests that ended in the last minute failed%s", stats.Grouped(last.Failed), stats.Grouped(last.All), how)
}

// overload says that a model has no free slot or no KV memory, and so many wait for one that each has
// to wait for about one answer, or others are refused.
func overload(d *Document, m *Model, fails bool, say find) (key string) {
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
		return ""
	case waiting < min(used, slots) && !(full && free && 2*waiting >= used) && !(fails && refused(d) != nil): // KV memory comes free in large pieces
		return ""
	case !free:
		full = false // more KV memory would not help
	}
	kind, ranks := "decode slot", "decode ranks"
	if m.Aggregated {
		kind, ranks = "slot", "ranks"
	}
	key, floods := floodOf(d.Waiting)
	if full {
		say(incident.KVFull, Bad, at{"model", m.Name, "ranks"}, "",
			"The KV caches of the %s of model %s are %.0f %% full, so that %s of %s %ss stay free, and %s %s%s",
			ranks, m.Name, 100*float64(kv)/float64(capacity), stats.Grouped(slots-used), stats.Grouped(slots), kind,
			waits(waiting), where, floods)
		return key
	}
	taken := fmt.Sprintf("All %s %ss of model %s are", stats.Grouped(slots), kind, m.Name)
	switch {
	case used < slots:
		taken = fmt.Sprintf("%s of the %s %ss of model %s are", stats.Grouped(used), stats.Grouped(slots), kind, m.Name)
	case slots == 1:
		taken = fmt.Sprintf("The only %s of model %s is", kind, m.Name)
	}
	say(incident.Overload, Bad, at{"model", m.Name, "pool"}, "", "%s taken, and %s %s%s%s", taken, waits(waiting), where, floods, slower(m))
	return key
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

// engineFinding reports whether an engine is not up.
func engineFinding(e *Engine, say find) (away bool) {
	where := at{e.Role + " engine", e.ID, "engines"}
	why := incident.WithoutAddress(e.Why, e.ID)
	switch {
	case e.Hangs && e.State != "odd":
		cause, _, _ := strings.Cut(why, ":")
		say(incident.EngineHangs, Bad, where, "", "%s hangs: its port takes connections, but %s", where.begin(), cause)
		return e.State != "up" // until then it is known for how long it is up
	case e.State == "down":
		say(incident.EngineDown, Bad, where, e.Why, "%s is down: %s", where.begin(), cmp.Or(why, "no reason is known"))
	case e.State == "odd":
		say(incident.EngineOut, Bad, where, e.Why, "%s is not used: %s", where.begin(), why)
	case e.State == "wedged":
		say(incident.EngineOut, Bad, where, e.Why, "%s answers, but computes nothing: %s", where.begin(), cmp.Or(why, "no reason is known"))
	case e.State == "halted":
		say(incident.EngineHalted, Bad, where, e.Why, "%s takes no requests for now, and they wait for it: %s", where.begin(), why)
	case e.State != "up":
		say(incident.EngineOut, Bad, where, e.Why, "%s is %s and gets no requests: %s", where.begin(), e.State, cmp.Or(why, "no reason is known"))
	case e.Draining:
		say(incident.EngineDrains, Warn, where, "", "%s drains: it takes no new requests", where.begin())
		return false
	case e.Why != "":
		say(incident.EngineAmiss, Warn, where, e.Why, "%s is up, but something is amiss: %s", where.begin(), why)
		return false
	}
	return e.State != "up"
}

func sourceFindings(s *Source, say find) {
	where := at{"source", s.Name, "engines"}
	if s.Error != "" {
		say(incident.SourceFails, Warn, where, "", "Discovery by %s fails, and its last list of %s stays in force: %s", s.Name, count(s.Engines, "engine"), firstLine(s.Error))
	}
	if n := len(s.Unfit); n > 0 {
		names := make([]string, n)
		for i, e := range s.Unfit {
			names[i] = e.Role + " engine " + e.ID
		}
		say(incident.EnginesUnfit, Warn, where, "", "%s of %s %s not used: %s. The first one is unfit: %s", count(n, "engine"), s.Name, are(n), listed(names), firstLine(s.Unfit[0].Why))
	}
}

// mistake is what is wrong with a config: without the keys that there are, which `evenkeel check` lists.
func mistake(text string) string {
	what, _, _ := strings.Cut(firstLine(text), "; the keys here are ")
	return what
}

// firstLine is what an error says; below it a file's lines may follow.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// prefillFindings returns the key that floods prefill engines, where one does. full says that a model has no free slot or no KV memory.
func prefillFindings(d *Document, fails, full bool, say find) (key string) {
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
			waits(p.Waiting), p.BacklogS, floods, lostHits(p.Hits))
		return key
	case p.Waiting > 0 && open == 0:
		say(incident.QueueWaits, Bad, proxyAt("prefill"), "", "%s for %s engine", capital(waits(p.Waiting)), map[string]string{"prefill": "a prefill", "aggregated": "an aggregated"}[kind])
	}
	return ""
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

// waits says how many requests wait.
func waits(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return requests(n) + " wait"
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// requests says how many there are.
func requests(n int) string {
	switch n {
	case 0:
		return "no requests"
	case 1:
		return "1 request"
	}
	return stats.Grouped(max(0, n)) + " requests"
}

func are(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// modelFindings names groups with their model where there are several. Ranks of engines that
// drain are told of with those. told says that the model is said to have no KV memory left.
func modelFindings(m *Model, several, told bool, drained map[string]bool, say find) {
	late := lateSeconds
	if m.Pool.TTLS > 0 {
		late = lateShare * m.Pool.TTLS
	}
	if m.Pool.OldestS > late {
		what, rank := "finished prefill", "decode rank"
		if m.Aggregated {
			what, rank = "request", "rank"
		}
		say(incident.PoolLate, Bad, at{"model", m.Name, "pool"}, "", "A %s of model %s has waited %.1f s for a %s, and %s in the pool", what, m.Name, m.Pool.OldestS, rank, waits(m.Pool.Entries))
	}
	emptyRanks(m, say)
	for i := range m.Groups {
		g := &m.Groups[i]
		of, name := "group", g.Name
		switch {
		case g.Name == "":
			of, name = "model", m.Name
		case several:
			name = m.Name + " · " + g.Name
		}
		on := func(panel string) at { return at{of, name, panel} }
		if r := g.Rounds; r != nil && r.HeldS > r.MaxHoldS+heldSlack {
			say(incident.RoundStuck, Bad, on("ranks"), "", "%s of %s %s %s held for a round for %.0f s, although none may be held for longer than %.3g s", capital(requests(g.Held)), of, name, are(g.Held), r.HeldS, r.MaxHoldS)
		}
		if g.FallbackRounds > 0 {
			say(incident.PolicySlow, Warn, on("balance"), "", "The decode policy of %s %s is too slow at times, and %s decides instead", of, name, g.Policy)
		}
		if g.LostShare > lostShare {
			say(incident.Imbalance, Warn, on("balance"), "", "Imbalance costs %s %s %.0f %% of every step", of, name, 100*g.LostShare)
		}
		slowRanks(g, m.role(), of, name, on("ranks"), say)
		if g.SlowS > 0 {
			say(incident.StepsSlow, Warn, on("balance"), "",
				"Steps of %s %s%s take %.0f ms, and took %.0f ms at such a load before%s", of, name, g.allOn(), g.StepMs, g.UsualMs, whatDiffers(g)).For = seconds(g.SlowS)
		}
		if g.FewS > 0 {
			say(incident.TokensFew, Warn, on("balance"), "",
				"A step of %s %s%s gives %.1f tokens to an answer, and gave %.1f before, so that a token takes %.0f ms",
				of, name, g.allOn(), g.StepTokens, g.UsualTokens, g.TokenMs).For = seconds(g.FewS)
		}
		full, tight, draining := []string{}, []string{}, []string{}
		for j := range g.Ranks {
			r := &g.Ranks[j]
			switch {
			case r.State == RankDraining:
				if engine, _, _ := strings.Cut(r.Name, "/"); !drained[engine] {
					draining = append(draining, r.Name)
				}
			case r.State == RankUp && r.Capacity > 0 && float64(r.KVTokens) >= fullShare*float64(r.Capacity):
				full = append(full, r.Name)
			case r.Tight:
				tight = append(tight, r.Name)
			}
		}
		some := func(kind incident.Kind, names []string, one, many string) {
			rank := "decode rank"
			if m.Aggregated {
				rank = "rank"
			}
			if n := len(names); n == 1 {
				say(kind, Warn, on("ranks"), "", "%s %s of %s %s %s", capital(rank), names[0], of, name, one)
			} else if n > 1 {
				say(kind, Warn, on("ranks"), "", "%d %ss of %s %s %s: %s", n, rank, of, name, many, listed(names))
			}
		}
		if told {
			full = nil
		}
		some(incident.RanksFull, full, "has a full KV cache", "have full KV caches")
		some(incident.RanksTight, tight, "ran out of KV memory and is kept emptier", "ran out of KV memory and are kept emptier")
		some(incident.RanksDrain, draining, "drains: it takes no new requests", "drain and take no new requests")
	}
}

// emptyRanks says which ranks of a model give nearly nothing but empty answers, where the others give few.
func emptyRanks(m *Model, say find) {
	bad, rest := []string{}, Lately{}
	var sum Lately
	for i := range m.Groups {
		for j := range m.Groups[i].Ranks {
			r := &m.Groups[i].Ranks[j]
			of := &rest
			if share, known := r.Lately.share(); known && share >= emptyShare {
				bad, of = append(bad, r.Name), &sum
			}
			of.Answers, of.Empty = of.Answers+r.Lately.Answers, of.Empty+r.Lately.Empty
		}
	}
	others, known := rest.share()
	if len(bad) == 0 || !known || others > wholeShare {
		return
	}
	all := sum.Answers + rest.Answers
	if len(bad) == 1 {
		say(incident.RankEmpty, Bad, at{"rank", bad[0], "ranks"}, "",
			"Rank %s gives empty answers: %s of its last %s answers ended without any text, and %.0f %% of those of the other ranks; "+
				"of the last %s answers, %.0f %% were its", bad[0], stats.Grouped(sum.Empty), stats.Grouped(sum.Answers), 100*others, stats.Grouped(all),
			100*float64(sum.Answers)/float64(all))
		return
	}
	say(incident.RankEmpty, Bad, at{"model", m.Name, "ranks"}, "",
		"%d ranks of model %s give empty answers: %s of their last %s answers ended without any text, and %.0f %% of those of the other ranks: %s",
		len(bad), m.Name, stats.Grouped(sum.Empty), stats.Grouped(sum.Answers), 100*others, listed(bad))
}

// allOn says behind its name on which host all ranks of the group are; empty: on several.
func (g *Group) allOn() string {
	on := ""
	for i := range g.Ranks {
		at, _, _ := strings.Cut(g.Ranks[i].Name, "/")
		host, _, err := net.SplitHostPort(at)
		if err != nil || on != "" && host != on {
			return ""
		}
		on = host
	}
	if on == "" {
		return ""
	}
	return ", all on host " + on + ","
}

const (
	differRanks = 3 // that tell a gauge, before one of them can differ
	differSaid  = 2 // that the sentence has
)

// whatDiffers says behind a sentence about slow steps what the ranks say of themselves; empty where too few do.
func whatDiffers(g *Group) string {
	tell := 0
	for i := range g.Ranks {
		if r := &g.Ranks[i]; r.gauges != nil && r.Steps {
			tell++
		}
	}
	switch {
	case tell < differRanks:
		return ""
	case len(g.Differ) == 0:
		return fmt.Sprintf(". The metrics of the engines name none of the %d ranks that has much more to do than the others", tell)
	}
	says := "."
	for i, d := range g.Differ[:min(differSaid, len(g.Differ))] {
		if i > 0 {
			says += "; rank"
		} else {
			says += " Rank"
		}
		says += " " + d.Rank + " says that it " + d.Says
	}
	if more := len(g.Differ) - differSaid; more > 0 {
		says += fmt.Sprintf("; and %d more (differ in /live?once)", more)
	}
	return says
}

// A rank without a barrier is slow where it takes so many times as long for a token as the middle one of its group, and so much longer.
const (
	slowRank    = 3
	slowRankMs  = 20
	slowRanksOf = 3 // ranks that have a pace
)

// slowRanks says which ranks are much slower than the others. Behind a barrier all are as slow as the slowest.
func slowRanks(g *Group, role, of, name string, where at, say find) {
	slow, paced, worst := []string{}, 0, 0.0
	for i := range g.Ranks {
		if r := &g.Ranks[i]; r.TokenMs > 0 {
			if paced++; r.TokenMs > slowRank*g.TokenMs && r.TokenMs-g.TokenMs > slowRankMs {
				slow, worst = append(slow, r.Name), max(worst, r.TokenMs)
			}
		}
	}
	switch n := len(slow); {
	case g.Barrier || n == 0 || paced < slowRanksOf:
	case n == 1:
		say(incident.RankSlow, Warn, at{"rank", slow[0], where.panel}, "",
			"Rank %s gives a token in %.0f ms, and the middle one of %s %s in %.0f ms", slow[0], worst, of, name, g.TokenMs)
	default:
		say(incident.RankSlow, Warn, where, "",
			"%d %s ranks of %s %s give a token in up to %.0f ms, and the middle one in %.0f ms: %s", n, role, of, name, worst, g.TokenMs, listed(slow))
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
	return stats.Grouped(n) + " " + what + "s"
}
