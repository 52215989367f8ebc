package live

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/incident"
	"evenkeel/gateway/timeline"
	"evenkeel/internal/stats"
)

const failShare = 0.01 // of requests, at which they are said to fail

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
	for _, c := range p.Certificates {
		certificateFinding(c, say)
	}
	fails := d.Traffic.FailuresPerS > failShare*d.Traffic.RequestsPerS
	full, busy := make([]bool, len(d.Models)), false // models that are said to have no KV memory left; one has no room for requests
	for i := range d.Models {
		if f := overload(d, &d.Models[i], fails, say); f != nil {
			full[i], busy = f.Kind == incident.KVFull, true
		}
	}
	if fails && !d.Traffic.Recovered {
		requestsFail(d, last, say)
	}
	drained := map[string]bool{} // engines with ranks that are told to drain
	for i := range d.Engines {
		e := &d.Engines[i]
		if !engineFinding(e, say) && e.Draining && e.Role != fleet.Prefill {
			drained[e.ID] = true
		}
	}
	for i := range d.Sources {
		sourceFindings(&d.Sources[i], say)
	}
	prefillFindings(d, fails, busy, say)
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
	for _, a := range d.Scopes {
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

// How long before its end a certificate is told of, as the alerts on it do.
const (
	certSoon = 14 * day
	certNow  = day
	day      = 24 * time.Hour
)

func certificateFinding(c Certificate, say find) {
	left, where := seconds(c.EndsS), at{"listener", c.Key, "proxy"}
	switch {
	case left >= certSoon:
	case left >= certNow:
		say(incident.CertEnds, Warn, where, "", "The certificate of %s ends in %s", c.Key, count(int(left/day), "day"))
	case left >= 2*time.Hour:
		say(incident.CertEndsNow, Bad, where, "", "The certificate of %s ends in %d hours", c.Key, int(left.Hours()))
	case left > 0:
		say(incident.CertEndsNow, Bad, where, "", "The certificate of %s ends in less than two hours", c.Key)
	default:
		say(incident.CertEndsNow, Bad, where, "", "The certificate of %s has ended, and nobody who checks it can connect", c.Key)
	}
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

// engineFinding reports whether an engine is not up.
func engineFinding(e *Engine, say find) (away bool) {
	lasts, where := seconds(e.SinceS), at{e.Role + " engine", e.ID, "engines"}
	why := incident.WithoutAddress(e.Why, e.ID)
	switch {
	case e.Hangs && e.State != "odd":
		cause, _, _ := strings.Cut(why, ":")
		f := say(incident.EngineHangs, Bad, where, "", "%s hangs: its port takes connections, but %s", where.begin(), cause)
		if e.State == "up" { // so it is known for how long it is up
			return false
		}
		f.For = lasts
	case e.State == "down":
		say(incident.EngineDown, Bad, where, e.Why, "%s is down: %s", where.begin(), cmp.Or(why, "no reason is known")).For = lasts
	case e.State == "odd":
		say(incident.EngineOut, Bad, where, e.Why, "%s is not used: %s", where.begin(), why).For = lasts
	case e.State == "wedged":
		say(incident.EngineOut, Bad, where, e.Why, "%s answers, but computes nothing: %s", where.begin(), cmp.Or(why, "no reason is known")).For = lasts
	case e.State == "halted":
		say(incident.EngineHalted, Bad, where, e.Why, "%s takes no requests for now, and they wait for it: %s", where.begin(), why).For = lasts
	case e.State != "up":
		say(incident.EngineOut, Bad, where, e.Why, "%s is %s and gets no requests: %s", where.begin(), e.State, cmp.Or(why, "no reason is known")).For = lasts
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
