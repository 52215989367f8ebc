package detect

import (
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kinds of findings about the proxy itself.
const (
	Drains        Kind = "drains"
	NotReady      Kind = "not_ready"
	AuditDrift    Kind = "audit_drift"
	ConfigRefused Kind = "config_refused"
	CertEnds      Kind = "certificate_ends"
	CertEndsNow   Kind = "certificate_ends_now"
)

var proxyDetectors = []Detector{
	{
		Kind: Drains, find: findDrains,
		harm: nothing, sharesNoCause: true, headline: "The proxy drains", runbook: "drains", command: `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/drain"`,
		clients: "Clients that are served get their answers to the end. New requests get a 503, unless a load balancer sends them to another " +
			"proxy.",
		next: "Wait until the last request has ended, or take the drain back.",
	},
	{
		Kind: NotReady, find: findNotReady,
		harm: failing, effect: true, headline: "The proxy is not ready", runbook: "not_ready", command: showWorkers,
		headlineAsEffect: "All new requests get a 503",
		clients:          "Clients get a 503 for new requests.",
		next:             "Look which side has no engine that answers, and start one.",
	},
	{
		Kind: AuditDrift, find: findAuditDrift,
		harm: waiting, sharesNoCause: true, headline: "The accounts are wrong", runbook: "audit_drift", command: showLogs,
		clients: "Clients may wait longer, because ranks may look fuller or emptier to the proxy than they are.",
		next:    "Keep the log and report the bug. Restart the proxy after a drain.",
	},
	{
		Kind: ConfigRefused, find: findConfigRefused,
		harm: nothing, sharesNoCause: true, headline: "The config was refused", runbook: "config_refused",
		command: "evenkeel check --config FILE",
		clients: "Requests of clients are served by the config before, which is in force.",
		next:    "Mend the file. The proxy reads it again by itself. Do not restart the proxy before: it would not start with this file.",
	},
	{
		Kind: CertEnds, find: findCertEnds,
		harm: nothing, sharesNoCause: true, headline: "A certificate ends soon", runbook: "certificate_ends", command: showCertificates,
		clients: "Clients cannot connect to this listener after the end of its certificate.",
		next:    "Renew the certificate. The proxy reads the new files by itself.",
	},
	{
		Kind: CertEndsNow, find: findCertEndsNow, urgent: true,
		harm: nothing, sharesNoCause: true, headline: "A certificate ends", runbook: "certificate_ends", command: showCertificates,
		clients: "Clients cannot connect to this listener after the end of its certificate.",
		next:    "Replace the files of the certificate now. The proxy reads them by itself.",
	},
}

func findDrains(v *view, report reportFunc) {
	if v.Proxy.Draining {
		report(proxyPlace("proxy"), noReason, "The proxy drains: it is being taken out of service")
	}
}

func findNotReady(v *view, report reportFunc) {
	if p := &v.Proxy; !p.Ready && !p.Draining { // findDrains reports a proxy that drains
		report(proxyPlace("proxy"), p.Why, "The proxy is not ready: %s", p.Why)
	}
}

func findAuditDrift(v *view, report reportFunc) {
	if p := &v.Proxy; p.DriftSlots != 0 || p.DriftTokens != 0 {
		report(proxyPlace("proxy"), noReason, "The proxy's accounts are off by %s and %s KV tokens, which is a bug that you should report",
			words.Count(int(p.DriftSlots), "slot"), stats.Grouped(p.DriftTokens))
	}
}

func findConfigRefused(v *view, report reportFunc) {
	if v.Proxy.ConfigError != "" {
		report(proxyPlace("proxy"), noReason, "The config file was refused and is not in force: %s", shortConfigError(v.Proxy.ConfigError))
	}
}

// shortConfigError leaves out the list of valid keys, which `evenkeel check` shows.
func shortConfigError(text string) string {
	what, _, _ := strings.Cut(firstLine(text), "; the keys here are ")
	return what
}

// A certificate is a warning from certSoon before its end on, and bad from certNow on.
const (
	certSoon = 14 * day
	certNow  = day
	day      = 24 * time.Hour
)

func findCertEnds(v *view, report reportFunc) {
	for _, c := range v.Proxy.Certificates {
		if left := seconds(c.EndsS); left >= certNow && left < certSoon {
			report(place{"listener", c.Key, "proxy"}, noReason, "The certificate of %s ends in %s", c.Key, words.Count(int(left/day), "day"))
		}
	}
}

func findCertEndsNow(v *view, report reportFunc) {
	for _, c := range v.Proxy.Certificates {
		switch left, where := seconds(c.EndsS), (place{"listener", c.Key, "proxy"}); {
		case left >= certNow: // findCertEnds reports it
		case left >= 2*time.Hour:
			report(where, noReason, "The certificate of %s ends in %d hours", c.Key, int(left.Hours()))
		case left > 0:
			report(where, noReason, "The certificate of %s ends in less than two hours", c.Key)
		default:
			report(where, noReason, "The certificate of %s has ended, and nobody who checks it can connect", c.Key)
		}
	}
}
