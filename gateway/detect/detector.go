package detect

import (
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kind is the kind of a finding.
type Kind string

// Severities of a Finding.
const (
	Bad  = "bad"  // requests fail or wait because of it, or will
	Warn = "warn" // worth a look
)

// harm is how much clients notice of a kind of finding, in rising order.
type harm int

const (
	nothing harm = iota
	slower
	waiting
	failing
)

// Detector describes one kind of finding: how it is found, how it relates to other kinds, and what is said about it.
type Detector struct {
	Kind    Kind
	find    func(v *view, say say)
	harm    harm
	urgent  bool // it is bad, although clients notice nothing yet
	effect  bool // it is caused by another finding, if there is one
	load    bool // it is an effect of findings that harm as much, and otherwise the cause of other effects
	crowded bool // many requests wait
	gone    bool // the engine gets no requests; while it is away, findings with this mark follow each other and stay one incident
	// Other engines may take over its work: it is bad only while requests fail or wait, or if more than half of the engines of the role are
	// away.
	spare  bool
	wide   bool          // it slows tokens down: it is bad if the slowdown is large and concerns many requests
	vague  bool          // other kinds with the same harm say more about the cause, and come first
	family string        // kinds of one family say the same about engines and about ranks, and share a cause
	alone  bool          // it never shares a cause: an operator wanted it, or it describes a whole group
	rests  time.Duration // it comes and goes, and ends only when it was absent this long

	headline string // first words of the incident
	many     string // sentence about several of them, without its subject (number and noun); empty: there is at most one
	clients  string // what clients notice of it
	prefill  string // what clients notice if all of these are prefill engines; empty: as clients says
	first    string // if it is an effect, these words come before the cause
	next     string // what to do
	sender   string // what to do instead of next if most of the requests are from one API key; {key} is replaced by it
	command  string // a command to copy; {where} and {engine} are replaced
	runbook  string // entry of the runbook
}

// again is how long a finding that comes and goes may be absent. A busy engine answers late, then in time while it has less to do, then
// late again.
const again = 2 * time.Minute

// severity is the severity that follows from the harm.
func (d *Detector) severity() string {
	if d.harm >= waiting || d.urgent {
		return Bad
	}
	return Warn
}

// order sorts causes before effects, and among causes those that harm more first.
func (d *Detector) order() int {
	n := 10 * int(failing-d.harm)
	if d.vague {
		n++
	}
	if d.effect {
		n += 1000
	}
	if d.load {
		n -= 500 // it may be the cause of other effects
	}
	return n
}

// Finding is one thing that is wrong now.
type Finding struct {
	Kind     Kind
	Severity string
	Panel    string        // the panel of the page that shows more
	Of       string        // noun for Where: "prefill engine", "group"
	Where    string        // name of the engine, rank, group or model; empty: the proxy
	What     string        // a whole sentence with the name in Where and all numbers, without a full stop
	Rest     string        // ends the sentence, also one about several findings of a kind; findings that differ only in it may have one cause
	Ranks    []string      // ranks that What names, beside Where
	slowed   int           // requests whose tokens are slower because of it
	times    float64       // how many times as long these tokens take
	Key      string        // key of the caller that causes most of it; empty: there is none
	Reason   string        // why, as an engine or a file says; empty: nothing more is known
	For      time.Duration // how long it has lasted, if known; 0: since it was found
}

// setSlowdown sets how many requests a finding slows down, and how many times as long their tokens take.
func (f *Finding) setSlowdown(running int, times float64) *Finding {
	f.slowed, f.times = running, times
	return f
}

// view is what detectors look at: the facts, and values that several detectors derive from them.
type view struct {
	*Facts
	last    Ended  // requests that ended in the last minute
	loads   []load // of each model
	drained map[string]bool
	running int  // requests, on all ranks
	several bool // there are several groups, so their names include the model
}

// say adds a finding; format and args make its sentence.
type say func(where at, reason, format string, args ...any) *Finding

// at is the place of a finding: what it is, its name, and the panel that shows more.
type at struct{ of, where, panel string }

// proxyAt is the place of a finding about the whole proxy.
func proxyAt(panel string) at { return at{panel: panel} }

func (a at) String() string { return a.of + " " + a.where }

// begin returns the place in words, as the beginning of a sentence.
func (a at) begin() string { return words.Capital(a.String()) }

// firstLine is the first line of an error's text. Lines of a file may follow it.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// waits says in words how many requests wait.
func waits(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return requests(n) + " wait"
}

// requests says in words how many requests there are.
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
