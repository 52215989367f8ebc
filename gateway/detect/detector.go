package detect

import (
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kind names what is wrong, such as engine_down; also a label of the metric evenkeel_incident.
type Kind string

// Severities of a Finding.
const (
	Bad  = "bad"  // requests fail or wait because of it, or soon will
	Warn = "warn" // an operator should look, but no request fails or waits
)

// harm is how much clients notice.
type harm int

const (
	nothing harm = iota
	slower
	waiting
	failing
)

// Detector describes one kind of finding.
type Detector struct {
	Kind   Kind
	find   func(v *view, report reportFunc)
	harm   harm
	urgent bool // Bad, although it does not harm yet
	effect bool // the result of another finding, if one is present
	// many requests wait: an effect of a cause whose harm is waiting or failing, and otherwise itself
	// a cause
	overload bool
	manyWait bool // many requests wait, and missing engines may be the reason
	// the engine gets none; one such finding may replace another at the same engine
	getsNoRequests bool
	// The engine gets no requests, but others may do its work: bad only while requests fail or wait,
	// or while more than half of the engines of the role are away.
	takesEngineAway bool
	slowsTokens     bool // bad if tokens are much slower, and many requests are affected
	// kinds with the same harm say more about the cause, so they come first
	unspecific bool
	// kinds of a family are the same problem, seen at engines or at ranks
	family string
	// the finding never shares its cause: an operator caused it, or it is about a whole group or proxy
	sharesNoCause bool
	byOwnClock    ownClock // whether the proxy finds it when it is late itself
	// it comes and goes: its incident ends once it was missing for this long; 0: at once
	toleratedAbsence time.Duration

	headline   string
	pluralText string // predicate for several: "are down"; empty: there is at most one
	clients    string // what clients notice
	// replaces clients if all findings are about prefill engines; empty: clients is used
	clientsOfPrefill string
	headlineAsEffect string // words before the cause in an incident where this finding is an effect
	next             string // what the operator should do
	// replaces next if one API key sends most of the requests; the key replaces {key}
	nextForKey string
	command    string // to copy; names replace {where}, {engine}, {host} and {rank}
	runbook    string // entry in the runbook
}

// slowEngineAbsence: a busy engine answers late, then in time for a while, then late again.
const slowEngineAbsence = 2 * time.Minute

// severity is the severity of the findings, before Find looks at how many requests are affected.
func (d *Detector) severity() string {
	if d.harm >= waiting || d.urgent {
		return Bad
	}
	return Warn
}

// sortKey is smaller for causes than for effects, and for more harm. The harm counts 0 to 30, so
// the 1 decides only among kinds of equal harm, and 500 and 1000 outweigh any harm.
func (d *Detector) sortKey() int {
	key := 10 * int(failing-d.harm)
	if d.unspecific {
		key++
	}
	if d.effect {
		key += 1000
	}
	if d.overload {
		key -= 500 // it may cause other effects
	}
	return key
}

// Finding is one thing that is wrong now.
type Finding struct {
	Kind           Kind
	Severity       string
	Panel          string   // of the live page
	WhereKind      string   // "prefill engine", "group"
	Group          string   // decode group of the engine; empty: none
	Where          string   // engine, rank, group or model; empty: the proxy
	What           string   // a whole sentence with Where and all numbers, without a full stop
	Suffix         string   // after What; findings that differ only in this may have one cause
	Ranks          []string // in addition to Where; What names the first
	slowedRequests int      // running requests whose tokens take longer
	slowdown       float64  // factor by which the tokens of slowedRequests take longer
	Key            string   // API key that causes most of the problem
	Reason         string   // in the words of an engine or a file, to compare findings
	follows        bool     // the finding follows from ProxyBusy
	// how long the problem has lasted; 0: not known, so it is taken to begin now
	LastedFor time.Duration
}

func (f *Finding) setSlowdown(slowedRequests int, factor float64) *Finding {
	f.slowedRequests, f.slowdown = slowedRequests, factor
	return f
}

// view is what detectors look at.
type view struct {
	*Facts
	lastMinute Ended
	loads      []load // by index in Models
	drained    map[string]bool
	groupOf    map[string]string // decode group by engine
	running    int               // requests on all ranks together
	manyGroups bool              // there are several groups, so the name of each includes its model
}

// reportFunc adds a finding and returns it. format and args make What.
type reportFunc func(where place, reason, format string, args ...any) *Finding

// noReason: findings are compared by their kind alone.
const noReason = ""

// place is the place of a finding: what it is, such as "prefill engine", its name, and the panel
// that shows more.
type place struct{ kind, name, panel string }

const (
	ranksPanel   = "ranks"
	balancePanel = "balance"
)

func proxyPlace(panel string) place { return place{panel: panel} }

// String names the place in a sentence, such as "prefill engine 10.0.0.1:8000".
func (a place) String() string { return a.kind + " " + a.name }

func (a place) capitalized() string { return words.Capital(a.String()) }

// firstLine is the first line of an error's text. After it, errors about a config show lines of the
// file.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

func waits(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return requests(n) + " wait"
}

// requests returns "no requests", "1 request" or, for example, "1,200 requests". A number below 0
// is written as 0.
func requests(n int) string {
	switch n {
	case 0:
		return "no requests"
	case 1:
		return "1 request"
	}
	return stats.Grouped(max(0, n)) + " requests"
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
