package detect

import (
	"strings"
	"time"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kind is what sort of thing is wrong.
type Kind string

// Severities of a Finding.
const (
	Bad  = "bad"  // requests fail or wait because of it, or will
	Warn = "warn" // worth a look
)

// How much clients see.
type harm int

const (
	nothing harm = iota
	slower
	waiting
	failing
)

// Detector is a kind of thing that may be wrong: how it is found, how it goes together with others, and what is said of it.
type Detector struct {
	Kind    Kind
	find    func(v *view, say say)
	harm    harm
	urgent  bool // it is bad, though clients see nothing of it yet
	effect  bool // it follows from something else, where there is something else
	load    bool // an effect of what harms as much, and else the cause of what clients see
	crowded bool // many requests wait
	gone    bool // the engine gets nothing: one of these may follow the other
	// other engines may take over: it is bad while requests fail or wait, or more than half of the engines of the role are away
	spare  bool
	wide   bool          // it makes tokens slower: it is bad where it is much and for many
	vague  bool          // others that harm as much say more
	family string        // kinds of one say the same of engines and of ranks
	alone  bool          // somebody wants it so, or it is told of a group already: nothing else shares its cause
	rests  time.Duration // it comes and goes: it lasts until it was not found for so long

	headline string // the first words of the verdict
	many     string // what several of them do, after their number and noun; empty where there is one at most
	clients  string // what they see of it
	prefill  string // the same where all of these are prefill engines; empty: clients
	first    string // as an effect, what clients see of it is said before its cause, with these words
	next     string // what to do
	sender   string // the same where most of it is of one key; {key} is put in
	command  string // to copy; {where} and {engine} are put in
	runbook  string // the entry
}

// again is how long what comes and goes may be away: a busy engine answers late, then in time while it rests, then late again.
const again = 2 * time.Minute

// severity follows from the harm.
func (d *Detector) severity() string {
	if d.harm >= waiting || d.urgent {
		return Bad
	}
	return Warn
}

// order has causes first, those that say most before the others.
func (d *Detector) order() int {
	n := 10 * int(failing-d.harm)
	if d.vague {
		n++
	}
	if d.effect {
		n += 1000
	}
	if d.load {
		n -= 500 // the cause of other effects
	}
	return n
}

// Finding is one thing that is wrong now.
type Finding struct {
	Kind     Kind
	Severity string
	Panel    string        // of the page that shows more
	Of       string        // what Where names: "prefill engine", "group"
	Where    string        // name of the engine, rank, group or model; empty: the proxy
	What     string        // a whole sentence with what Where names and all numbers, without a full stop
	Rest     string        // said behind What, and behind what several of a kind do; it tells no causes apart
	Ranks    []string      // that What names, beside Where
	running  int           // requests whose tokens it makes slower
	times    float64       // and how many times as long these take
	Key      string        // of the caller that most of it is of; empty: there is none
	Reason   string        // why, as an engine or a file told it; empty: there is no more to say
	For      time.Duration // it has been so, as far as somebody else knows; 0: since it is told
}

// slows says how many requests a finding makes slower, and how many times as long their tokens take.
func (f *Finding) slows(running int, times float64) *Finding {
	f.running, f.times = running, times
	return f
}

// view is what detectors see: the facts, and what several of them ask of these.
type view struct {
	*Facts
	last    Ended  // in the last minute
	loads   []load // of each model
	drained map[string]bool
	running int  // requests, on all ranks
	several bool // groups are named with their model
}

// say notes a finding, in a whole sentence.
type say func(where at, reason, format string, args ...any) *Finding

// at is where something is wrong: what it is, its name, and the panel that shows more.
type at struct{ of, where, panel string }

// proxyAt is the proxy as a whole.
func proxyAt(panel string) at { return at{panel: panel} }

func (a at) String() string { return a.of + " " + a.where }

// begin is its name at the begin of a sentence.
func (a at) begin() string { return words.Capital(a.String()) }

// firstLine is what an error says; below it a file's lines may follow.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// waits says how many requests wait.
func waits(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return requests(n) + " wait"
}

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

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
