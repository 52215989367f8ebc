package live

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/gateway/advice"
	"evenkeel/gateway/detect"
	"evenkeel/internal/words"
)

// Bounds of the page of text that GET /live?text answers with, in columns and lines.
const (
	usualWidth  = 100
	leastWidth  = 40
	mostWidth   = 400
	linesOfText = 200
)

// Bounds of the lists on the page of text, so that all of them fit on a screen. GET /live?once has
// everything.
const (
	incidentsInFull   = 3
	incidentsNamed    = 10
	incidentsOver     = 3
	mostListed        = 8 // lines each for prefill engines, engines with trouble, peers and ownership scopes
	decisionsListed   = 5
	ranksWithTheirBar = 16
)

// textOf writes a document as a page of text, the most urgent parts first.
func textOf(d *Document, width int) string {
	s := &sheet{width: width}
	s.proxy(d)
	s.incidents(d)
	s.traffic(d)
	for i := range d.Models {
		s.model(&d.Models[i], d)
	}
	s.prefill(&d.Prefill)
	s.engines(d.Engines)
	s.regions(d)
	s.resolved(d)
	s.decisions(d.Decisions)
	if leftOut := len(s.lines) - (linesOfText - 1); leftOut > 1 { // the last of linesOfText lines says how many are left out
		s.lines = s.lines[:linesOfText-1]
		s.row("%d more lines are left out", leftOut)
	}
	return strings.Join(s.lines, "\n") + "\n"
}

// proxy writes one line: the id, version, region and role of the proxy, and whether it serves
// requests.
func (s *sheet) proxy(d *Document) {
	p, state := &d.Proxy, "ready"
	switch {
	case p.Draining:
		state = "DRAINS"
	case !p.Ready:
		state = "NOT READY: " + p.Why
	}
	isEmpty := func(word string) bool { return word == "" }
	name := strings.Join(slices.DeleteFunc([]string{p.ID + " " + p.Version, p.Region, p.Role}, isEmpty), ", ")
	s.paragraph(0, fmt.Sprintf("%s, up %s, %s: %s", name, durationText(p.UptimeS), clock(d.AtMs), state))
}

// incidents writes the lasting incidents, the most harmful first. The first incidentsInFull get a
// paragraph each, the next ones up to incidentsNamed get one line each, and further ones are only
// counted.
func (s *sheet) incidents(d *Document) {
	lasting := 0
	for i := range d.Incidents {
		in := &d.Incidents[i]
		if in.UntilMs > 0 { // the incident has ended, so the method resolved lists it
			continue
		}
		lasting++
		title := fmt.Sprintf("! %s, for %s", in.Severity, timeSince(d, in.SinceMs))
		if in.LastMs > 0 { // the incident comes and goes, and is not present now
			title += ", not found for " + timeSince(d, in.LastMs) + " and over if it stays so"
		}
		if in.Times > 1 {
			title += fmt.Sprintf(", %d times", in.Times)
		}
		title += ": " + cmp.Or(in.Headline, "incident")
		switch {
		case lasting <= incidentsInFull:
			s.row("%s", title)
			// in.Named says in sentences which engines, ranks, groups or models have the incident.
			s.paragraph(4, strings.TrimSpace(withFullStop(in.What)+" "+withFullStop(in.Harm))+" "+in.Named)
			s.paragraph(4, in.Clients)
			next := "Next: " + in.Next
			if in.Runbook != "" {
				next += " Runbook: " + in.Runbook + "."
			}
			s.paragraph(4, next)
			if in.Command != "" {
				s.command(in.Command)
			}
		case lasting <= incidentsNamed:
			s.row("%s: %s", title, in.What)
		}
	}
	switch {
	case lasting == 0:
		s.row("No incident: nothing is wrong that can be seen from here.")
	case lasting > incidentsNamed:
		s.row("! %d more incidents", lasting-incidentsNamed)
	}
}

// resolved writes the incidents that ended last, at most incidentsOver of them.
func (s *sheet) resolved(d *Document) {
	listed := 0
	for i := range d.Incidents {
		if in := &d.Incidents[i]; in.UntilMs > 0 && listed < incidentsOver { // UntilMs is 0 while an incident lasts
			listed++
			times := ""
			if in.Times > 1 {
				times = fmt.Sprintf(" (%d times)", in.Times)
			}
			s.row("over %s ago, after %s%s: “%s”", timeSince(d, in.UntilMs), durationText(float64(in.UntilMs-in.SinceMs)/1000), times, in.What)
		}
	}
}

// traffic writes rates, latencies, failures and the advice on the number of ranks.
func (s *sheet) traffic(d *Document) {
	t, p := &d.Traffic, &d.Proxy
	s.paragraph(0, fmt.Sprintf("%.1f requests/s (%.1f/s fail), %s open, %s tokens/s, policy %s", t.RequestsPerS, t.FailuresPerS,
		shortCount(p.Open), shortCount(int64(t.TokensPerS)), cmp.Or(p.Policy, "–")))
	s.paragraph(0, fmt.Sprintf("TTFT %s; TPOT %s (last minute)", percentiles(t.TTFT), percentiles(t.TPOT)))
	for _, f := range d.Failures {
		if f.LastHour == 0 { // failures of an older time are not shown
			continue
		}
		s.row("failed with %s: %s in 10 s, %s in 5 min, %s in 1 h, %s in all", f.Outcome, shortCount(f.Last10S), shortCount(f.Last5Min),
			shortCount(f.LastHour), shortCount(f.SinceStart))
	}
	for _, a := range d.Advice {
		s.paragraph(0, "advice for "+a.Model+": "+adviceText(&a, d.Incidents))
	}
}

// adviceText is the sentence of an advice on the number of ranks. Advice is a mean over the last
// minute, so it may call the ranks enough although many requests wait now. In this case, adviceText
// says that the advice is not known.
func adviceText(a *advice.Advice, incidents []detect.Incident) string {
	manyWait := slices.ContainsFunc(incidents, func(in detect.Incident) bool { return in.UntilMs == 0 && in.Crowded }) // 0: it lasts
	callsRanksEnough := len(a.Steps) > 0 && a.Steps[0].Reason == advice.ReasonBalanced
	if manyWait && callsRanksEnough {
		return "not known: many requests wait now, though the ranks were not too busy in the mean of the last minute"
	}
	return a.Says
}

// prefill writes a summary of the queue of prompts and of batch requests, and then a line per
// prefill engine, those that take no prompts first.
func (s *sheet) prefill(p *detect.Prefill) {
	s.lines = append(s.lines, "")
	s.paragraph(0, prefillSummary(p))
	s.prefillEngines(p.Engines)
}

// prefillSummary says how many requests wait for prefill, and which share of the prompt tokens was
// found in prefix caches (hits). It also says how many batch requests wait and ran, if there are
// any.
func prefillSummary(p *detect.Prefill) string {
	text := fmt.Sprintf("prefill policy %s: %d of at most %d requests wait, hits %.0f %% of tokens", cmp.Or(p.Policy, "–"), p.Waiting,
		p.QueueMax, 100*p.HitShare)
	if b := p.Batch; b.Waiting > 0 || b.Ran > 0 {
		text += fmt.Sprintf("; batch: %s, %s ran", words.Count(b.Waiting, "request")+" wait", shortCount(int64(b.Ran)))
		if b.Ran > 0 {
			text += ", held back for " + durationText(b.HeldS/float64(b.Ran)) + " on average"
		}
	}
	return text
}

// prefillEngines writes a line per prefill engine, those that take no prompts first: its state, the
// share of its KV cache in use and the share from which on it gets no prompts, its unanswered
// prompts (probes), how many of their tokens are still to be computed (new), and the share of
// prompt tokens that were found in its prefix cache (hits).
func (s *sheet) prefillEngines(all []detect.PrefillEngine) {
	list := slices.Clone(all)
	slices.SortStableFunc(list, func(a, b detect.PrefillEngine) int { return cmp.Compare(rankOfState(a.State), rankOfState(b.State)) })
	nameWidth := 0
	for i := range list {
		nameWidth = max(nameWidth, columns(clean(list[i].ID)))
	}
	nameWidth = min(nameWidth, s.width/3) // leaves room for the numbers beside long names
	for i, e := range list {
		if i == mostListed {
			s.row("  %d more prefill engines", len(list)-i)
			break
		}
		s.row("  %s %-6s KV %3.0f %% of %.0f %%, %d probes, %s new, hits %.0f %%  %s", padRight(tail(e.ID, nameWidth), nameWidth), e.State,
			100*e.KVShare, 100*e.GateShare, e.Inflight, shortCount(e.NewTokens), 100*e.HitShare, e.Why)
	}
}

// rankOfState sorts engines that take no prompts before those that do: it returns 1 for the state
// of an engine that takes prompts, else 0.
func rankOfState(state string) int {
	if state == "open" {
		return 1
	}
	return 0
}

// engines writes the number of engines that are up, and a line per engine that has trouble or
// drains.
func (s *sheet) engines(all []detect.Engine) {
	unwell, up := 0, 0
	for _, e := range all {
		if e.State == "up" {
			up++
		}
	}
	s.row("engines: %d of %d are up", up, len(all))
	for _, e := range all {
		if e.State == "up" && !e.Draining && e.Why == "" {
			continue
		}
		if unwell++; unwell > mostListed { // only counted, for the last line
			continue
		}
		state := e.State
		if e.Draining {
			state += ", draining"
		}
		s.row("  %s %s: %s for %s  %s", e.Role, e.ID, state, durationText(e.SinceS), e.Why)
	}
	if unwell > mostListed {
		s.row("  %d more engines are not well", unwell-mostListed)
	}
}

// regions writes the proxies of other regions, and which proxy owns which engines.
func (s *sheet) regions(d *Document) {
	if d.Geo != nil {
		for _, p := range d.Geo.Peers[:min(mostListed, len(d.Geo.Peers))] {
			state := "up"
			switch {
			case !p.Up:
				state = "down: " + p.Fault
			case p.Draining:
				state = "draining"
			}
			s.row("peer %s in %s, round trip %.1f ms, %d requests in flight: %s", p.ID, p.Region, p.RTTMs, p.InFlight, state)
		}
	}
	for _, a := range d.Scopes[:min(mostListed, len(d.Scopes))] {
		s.row("engines of %s: %s, owner %s, epoch %d", cmp.Or(a.Group, a.Region), a.Phase, cmp.Or(a.Holder, "none"), a.Epoch)
	}
}

// decisions writes the last decisions, the latest first.
func (s *sheet) decisions(all []Decision) {
	for i, d := range all[:min(decisionsListed, len(all))] {
		if i == 0 {
			s.row("last decisions:")
		}
		prompt, waited := "", ""
		if d.Prompt > 0 { // 0: the length of the prompt is not known
			prompt = shortCount(int64(d.Prompt)) + " tokens, "
		}
		if d.Rank != "" || d.WaitMs > 0 { // the request has come as far as the pool
			waited = "waited " + durationText(d.WaitMs/1000) + ", "
		}
		s.row("  %s %s%s → %s, %s%s  %s", clock(d.AtMs), prompt, cmp.Or(d.Prefill, "–"), cmp.Or(d.Rank, "–"), waited, cmp.Or(d.Outcome, "runs"),
			d.Why)
	}
}

// withFullStop adds a full stop to a sentence that has none. It leaves an empty text and a question
// as they are.
func withFullStop(sentence string) string {
	if sentence == "" || strings.HasSuffix(sentence, ".") || strings.HasSuffix(sentence, "?") {
		return sentence
	}
	return sentence + "."
}

// clock writes a time in Unix ms as the time of day in UTC.
func clock(ms int64) string { return time.UnixMilli(ms).UTC().Format("15:04:05 UTC") }

// timeSince writes how long a time in Unix ms lies before the time of the document.
func timeSince(d *Document, ms int64) string { return durationText(float64(max(0, d.AtMs-ms)) / 1000) }

// durationText writes a duration in ms, s, min, h or d, whichever fits its length.
func durationText(seconds float64) string {
	switch {
	case seconds < 1:
		return fmt.Sprintf("%.0f ms", 1000*seconds)
	case seconds < 120:
		return fmt.Sprintf("%.0f s", seconds)
	case seconds < 2*3600:
		return fmt.Sprintf("%.0f min", seconds/60)
	case seconds < 48*3600:
		return fmt.Sprintf("%.0f h", seconds/3600)
	}
	return fmt.Sprintf("%.0f d", seconds/86400)
}

// shortCount shortens a count to about five characters, such as 12k or 1.2M.
func shortCount[N int64 | uint64](n N) string {
	switch {
	case n >= 10_000_000:
		return fmt.Sprintf("%dM", n/1_000_000)
	case n >= 1_000_000:
		return fmt.Sprintf("%.1fM", float64(n)/1e6)
	case n >= 10_000:
		return fmt.Sprintf("%dk", n/1000)
	}
	return fmt.Sprint(n)
}

// percentiles writes the median and the 99th percentile of a latency; –: there were no samples.
func percentiles(l detect.Latency) string {
	if l.Samples == 0 {
		return "–"
	}
	return fmt.Sprintf("p50 %.1f, p99 %.1f ms", l.P50Ms, l.P99Ms)
}
