package detect

import (
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kind names what is wrong, such as engine_down. Incidents and the metric evenkeel_incident have it as a label.
type Kind string

// Severities of a Finding.
const (
	Bad  = "bad"  // requests fail or wait because of the finding, or soon will
	Warn = "warn" // no request fails or waits because of the finding, but an operator should look
)

// harm is how much clients notice of a finding, from nothing to failing requests.
type harm int

const (
	nothing harm = iota
	slower
	waiting
	failing
)

// Detector describes one kind of finding: how it is found, how it relates to other kinds, and which texts describe it.
type Detector struct {
	Kind           Kind
	find           func(v *view, report reportFunc)
	harm           harm
	urgent         bool // the finding is Bad, although it does not harm yet
	effect         bool // the finding is the result of another one, if another one is present
	overload       bool // many requests wait: an effect of a cause whose harm is waiting or failing, and otherwise itself a cause
	manyWait       bool // many requests wait, and missing engines may be the reason
	getsNoRequests bool // the engine gets no requests; one such finding may replace another at the same engine
	// the finding means that an engine gets no requests, but other engines may do its work: it is bad only while requests fail or wait,
	// or while more than half of the engines of the role are away
	takesEngineAway  bool
	slowsTokens      bool          // the finding makes tokens slower: it is bad if they are much slower, and many requests are affected
	unspecific       bool          // kinds with the same harm say more about the cause, so they come first
	family           string        // name of a family; its kinds are the same problem, seen at engines or at ranks; empty: none
	sharesNoCause    bool          // the finding never shares its cause: an operator caused it, or it is about a whole group or proxy
	byOwnClock       ownClock      // whether the proxy finds it when it is late itself
	toleratedAbsence time.Duration // the finding comes and goes: its incident ends once it was missing for this long; 0: at once

	headline         string // title of an incident with this cause
	pluralText       string // predicate of a sentence about several such findings: "are down"; empty: there is at most one
	clients          string // what clients notice of the finding
	clientsOfPrefill string // replaces clients if all findings are about prefill engines; empty: clients is used
	headlineAsEffect string // words before the cause in an incident where this finding is an effect
	next             string // what the operator should do
	nextForKey       string // replaces next if one API key sends most of the requests; the key replaces {key}
	command          string // shell command to copy; names replace {where}, {engine}, {host} and {rank}
	runbook          string // name of the kind's entry in the runbook
}

// slowEngineAbsence is the toleratedAbsence of findings about engines that answer late: a busy engine answers late, then in time for a
// while, then late again.
const slowEngineAbsence = 2 * time.Minute

// severity is the severity of the findings, before Find looks at how many requests are affected.
func (d *Detector) severity() string {
	if d.harm >= waiting || d.urgent {
		return Bad
	}
	return Warn
}

// sortKey sorts causes before effects, and more harmful causes before less harmful ones: a smaller key comes first. The harm counts 0 to
// 30, so the 1 for unspecific kinds decides only among kinds of equal harm, and the 500 and 1000 outweigh any harm.
func (d *Detector) sortKey() int {
	key := 10 * int(failing-d.harm) // failing is the worst harm, and counts 0
	if d.unspecific {
		key++
	}
	if d.effect {
		key += 1000
	}
	if d.overload {
		key -= 500 // an overload may cause other effects, so it comes before them
	}
	return key
}

// Finding is one thing that is wrong now.
type Finding struct {
	Kind           Kind
	Severity       string
	Panel          string        // panel of the live page that shows more
	WhereKind      string        // what Where names: "prefill engine", "group"
	Group          string        // decode group of the engine; empty: none
	Where          string        // name of the engine, rank, group or model; empty: the proxy
	What           string        // a whole sentence with the name in Where and all numbers, without a full stop
	Suffix         string        // text after What; findings that differ only in Suffix may have one cause
	Ranks          []string      // ranks that the finding is about, in addition to Where; What names the first of them
	slowedRequests int           // number of running requests whose tokens take longer because of the finding
	slowdown       float64       // factor by which the tokens of slowedRequests take longer
	Key            string        // API key that causes most of the problem; empty: no single key does
	Reason         string        // cause in the words of an engine or a file, to compare findings; empty: not known
	follows        bool          // the finding follows from ProxyBusy
	LastedFor      time.Duration // how long the problem has lasted; 0: not known, so it is taken to begin now
}

// setSlowdown sets how many requests the finding makes slower, and by which factor their tokens take longer. It returns f.
func (f *Finding) setSlowdown(slowedRequests int, factor float64) *Finding {
	f.slowedRequests, f.slowdown = slowedRequests, factor
	return f
}

// view is what detectors look at: the facts, and values that several detectors derive from them.
type view struct {
	*Facts
	lastMinute Ended  // requests that ended in the last minute
	loads      []load // load of each model, in the order of Models
	drained    map[string]bool
	groupOf    map[string]string // decode group of each engine that has one
	running    int               // number of requests that run on all ranks together
	manyGroups bool              // there are several groups, so the name of each includes its model
}

// reportFunc adds a finding about a place and returns it. format and args make its sentence. reason is the cause in the words of an engine
// or a file (see Finding.Reason).
type reportFunc func(where place, reason, format string, args ...any) *Finding

// noReason is the reason of findings that are compared by their kind alone.
const noReason = ""

// place is the place of a finding: what it is, such as "prefill engine", its name, and the panel that shows more.
type place struct{ kind, name, panel string }

// Panels of the live page that show more about groups and their ranks.
const (
	ranksPanel   = "ranks"
	balancePanel = "balance"
)

// proxyPlace is the place of a finding about the whole proxy.
func proxyPlace(panel string) place { return place{panel: panel} }

// String names the place in a sentence, such as "prefill engine 10.0.0.1:8000".
func (a place) String() string { return a.kind + " " + a.name }

// capitalized is String with a capital, to begin a sentence.
func (a place) capitalized() string { return words.Capital(a.String()) }

// firstLine is the first line of an error's text. After it, errors about a config show lines of the file.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// waits returns "1 request waits" or, for example, "12 requests wait".
func waits(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return requests(n) + " wait"
}

// requests returns "no requests", "1 request" or, for example, "1,200 requests". A number below 0 is written as 0.
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
