package selftest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
)

// aggregated is the role of engines that both prefill and decode.
const aggregated = "aggregated"

// Level is how serious a finding is.
type Level string

// The levels. Bad means that requests to the engine will fail.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Bad  Level = "bad"
)

// Finding is one thing learned about one engine.
type Finding struct {
	Engine string `json:"engine"` // role and host:port, followed by /rank if the address has several ranks
	Level  Level  `json:"level"`
	Msg    string `json:"message"`
}

// requestTimeout bounds each request to an engine.
const requestTimeout = 30 * time.Second

const answerBytes = 1 << 20 // largest answer of an engine that is read, in bytes

// tester holds the state of one run of the test.
type tester struct {
	cfg       *config.Config
	client    *engine.Client
	callbacks *metaserver.Server                                               // nil: nothing receives callbacks of decode engines
	listenErr error                                                            // why listening for callbacks failed; nil: it did not fail
	hosts     map[string]bool                                                  // hosts that hand-offs and callbacks may name
	run       string                                                           // unique start of all prompts, so that no prefix cache has them
	takeSlot  func(ctx context.Context, rank string, tokens int) (Slot, error) // nil: no slots are taken

	// Only the goroutine that called Run uses these two.
	pairs   int // number of pairs that were tried so far
	leftOut int // number of pairs that were not tried, because the test had to end

	// mu guards the fields below while goroutines of tryRounds or sendConcurrently run. Both functions
	// wait for their goroutines, so that Run and TryEngine need no lock afterwards.
	mu       sync.Mutex
	findings []Finding
	reported map[[2]string]bool      // findings that were reported already, by the name of the rank and the format of the message
	results  map[string]*pairResults // results of pairs, by the name of the rank
}

// testedRank is a rank to which the test sends requests.
type testedRank struct {
	name       string
	rosterName string // the rank's name in the roster of a running proxy
	slot       Slot   // the slot that the request to the rank takes
	target     *engine.Target
	ranks      int // ranks behind the engine's URL; 0: one rank without a number
	profile    *mooncake.Profile
	models     []string
	listed     []engine.Model // the models with their contexts
}

// Slot is a slot of a decode rank that a request of the test has taken from a running proxy.
type Slot struct {
	Scope   *owner.Scope // the request is sent only while this proxy owns the scope; nil: no other proxy sends to the rank
	Release func()       // gives the slot back
}

// ErrNotOwned says that another proxy sends requests to a rank.
var ErrNotOwned = errors.New("selftest: the rank is another proxy's")

// newTester returns a tester for one test. With nil callbacks, nothing receives callbacks of decode
// engines.
func newTester(cfg *config.Config, callbacks *metaserver.Server) *tester {
	return &tester{
		cfg: cfg, callbacks: callbacks, client: engine.NewClient(engine.Options{}), hosts: map[string]bool{}, reported: map[[2]string]bool{},
		results: map[string]*pairResults{},
		run:     fmt.Sprintf("selftest-%x", time.Now().UnixNano()),
	}
}

// report adds a finding about a rank, a role or all engines. It adds a finding of level OK or Warn
// only once per subject, because the same finding may come up with several partners. Findings with
// the same format count as the same, unless the format quotes a value (%q).
func (t *tester) report(subject string, level Level, format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kind := [2]string{subject, format}
	differsByValue := strings.Contains(format, "%q") // the format quotes a value, such as the name of a model
	if level != Bad && t.reported[kind] && !differsByValue {
		return
	}
	t.reported[kind] = true
	t.findings = append(t.findings, Finding{subject, level, fmt.Sprintf(format, args...)})
}

// pairResults counts the results of the pairs of a rank.
type pairResults struct {
	passed  bool
	failed  int // pairs that failed, with any partner
	blamed  int // failed pairs in which this rank itself failed, and not its partner
	skipped int // pairs that were not tried, because the rank had failed too often
}

// id is the beginning of the ids of all requests of this run.
func (t *tester) id() string { return "ek-" + t.run }

// commonModel returns a model that both ranks serve. ok is false if there is none.
func commonModel(a, b testedRank) (model string, ok bool) {
	for _, m := range a.models {
		if slices.Contains(b.models, m) {
			return m, true
		}
	}
	return "", false
}

// otherRank returns the rank with this number of the same engine. s is the engine's rank 0.
func (s testedRank) otherRank(number int) testedRank {
	target := *s.target
	target.Rank = number
	s.target = &target
	s.name = fmt.Sprintf("%s/%d", strings.TrimSuffix(s.name, "/0"), number)
	s.rosterName = fmt.Sprintf("%s/%d", target.ID, number)
	return s
}

// firstRanks returns the first rank of each engine, for findings about a whole engine.
func firstRanks(ranks []testedRank) (list []testedRank) {
	for _, s := range ranks {
		if s.target.Rank <= 0 { // rank 0, or the only rank of an engine whose ranks have no numbers (-1)
			list = append(list, s)
		}
	}
	return list
}

// pair is a prefill rank and a decode rank that are tried together. A rank that prefills and
// decodes is in decode, and prefill is empty.
type pair struct{ prefill, decode testedRank }

// compatibility says how a prefill engine p and a decode engine d work together. concurrent says
// that they work on a request at the same time. compatible says that they can serve a request
// together at all, because both use hand-offs, or both use the same connector without hand-offs.
func compatibility(p, d testedRank) (concurrent, compatible bool) {
	if p.profile.HasHandoff() {
		return false, d.profile.HasHandoff()
	}
	sameConnector := p.profile.Connector == d.profile.Connector
	return true, !d.profile.HasHandoff() && sameConnector
}

// pairAnswer is what the engines of a pair report of a request.
type pairAnswer struct {
	mooncake.ProbeAnswer
	decodeCount int // prompt tokens as the decode engine counts them; 0: it reports no count
}
