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

// findRequestsFail reports that more than a few requests fail, unless the failures have stopped. It decides by the rates of the last ten
// seconds, but its sentence counts the last minute, so that the numbers match those that the live page shows.
func findRequestsFail(v *view, report reportFunc) {
	if !v.manyFail() || v.Traffic.Recovered {
		return
	}
	f := report(proxyPlace("traffic"), noReason, "%s of the %s requests that ended in the last minute failed%s",
		stats.Grouped(v.lastMinute.Failed), stats.Grouped(v.lastMinute.All), v.failureDetails())
	if v.onlyKeyLimits() { // callers are over limits of their own keys, and the service is not at fault
		f.Severity = Warn
	}
}

// failureDetails returns text that follows the number of requests that failed in the last minute: their most common outcome, and the host
// on which most of them failed.
func (v *view) failureDetails() string {
	most := &Failed{} // the outcome with the most failures in the last minute
	for i := range v.Failures {
		if f := &v.Failures[i]; f.LastMinute > most.LastMinute {
			most = f
		}
	}
	details := ""
	switch {
	case most.LastMinute == 0: // the outcomes of the failures of the last minute are not known
	case v.lastMinute.Failed == 1:
		details = " with " + most.Outcome
	case most.LastMinute >= v.lastMinute.Failed:
		details = ", all of them with " + most.Outcome
	case 2*most.LastMinute > v.lastMinute.Failed: // more than half
		details = ", most of them with " + most.Outcome
	default:
		details = fmt.Sprintf(", %s of them with %s", stats.Grouped(most.LastMinute), most.Outcome)
	}
	// Only the limit of a key is quoted, because other outcomes may have many reasons.
	if most.ByKeyLimit && most.LastMinute > 0 {
		details += ", the last one because " + most.Why
	}
	if host := v.Traffic.FailedOn; host != "" {
		details += ", and attempts of nearly all of them failed on host " + host
	}
	return details
}
