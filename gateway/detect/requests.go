package detect

import (
	"fmt"

	"evenkeel/internal/stats"
)

// Kinds of findings about the requests of clients.
const (
	RequestsFail Kind = "requests_fail"
)

var requestDetectors = []Detector{
	{
		Kind: RequestsFail, find: findRequestsFail,
		harm: failing, effect: true, unspecific: true, headline: "Requests fail", runbook: "requests_fail", command: showFailedReceipts,
		clients: "The clients of these requests get an error.",
		next: "Read the receipts of such requests: they have the engines of each attempt, and what these answered. " +
			"If a host is named, drain its engines.",
	},
}

const failShare = 0.01 // a larger share of failed requests is reported

// findRequestsFail decides by the last ten seconds, but tells of the last minute, as the live page
// does.
func findRequestsFail(v *view, report reportFunc) {
	if !v.manyFail() || v.Traffic.Recovered {
		return
	}
	f := report(proxyPlace("traffic"), noReason, "%s of the %s requests that ended in the last minute failed%s",
		stats.Grouped(v.lastMinute.Failed), stats.Grouped(v.lastMinute.All), v.failureDetails())
	if v.onlyKeyLimits() { // the service is not at fault
		f.Severity = Warn
	}
}

func (v *view) failureDetails() string {
	most := &Failed{} // in the last minute
	for i := range v.Failures {
		if f := &v.Failures[i]; f.LastMinute > most.LastMinute {
			most = f
		}
	}
	details := ""
	switch {
	case most.LastMinute == 0: // not known
	case v.lastMinute.Failed == 1:
		details = " with " + most.Outcome
	case most.LastMinute >= v.lastMinute.Failed:
		details = ", all of them with " + most.Outcome
	case 2*most.LastMinute > v.lastMinute.Failed:
		details = ", most of them with " + most.Outcome
	default:
		details = fmt.Sprintf(", %s of them with %s", stats.Grouped(most.LastMinute), most.Outcome)
	}
	// Other outcomes may have many reasons.
	if most.ByKeyLimit && most.LastMinute > 0 {
		details += ", the last one because " + most.Why
	}
	if host := v.Traffic.FailedOn; host != "" {
		details += ", and attempts of nearly all of them failed on host " + host
	}
	return details
}
