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

// aggregated is the role of engines that prefill and decode.
const aggregated = "aggregated"

// Level of a finding.
type Level string

// The levels. Bad means that requests will fail.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Bad  Level = "bad"
)

// Finding is one thing learned about one engine.
type Finding struct {
	Engine string `json:"engine"` // role and host:port, with /rank behind it if the address has several ranks
	Level  Level  `json:"level"`
	Msg    string `json:"message"`
}

// stepTimeout bounds each request to an engine.
const stepTimeout = 30 * time.Second

const answerBytes = 1 << 20

// tester is a test under way.
type tester struct {
	cfg       *config.Config
	client    *engine.Client
	callbacks *metaserver.Server // nil: nothing receives callbacks of decode engines
	deaf      error              // why nothing can listen for callbacks; nil: no attempt failed
	// hosts to which a hand-off may point a decode engine, or a callback a prefill engine
	hosts map[string]bool
	run   string                                                           // in ids and prompts, so that no prefix cache has them
	seat  func(ctx context.Context, rank string, tokens int) (Seat, error) // nil: no slots are taken

	mu       sync.Mutex // held for the fields below while pairs are tried
	findings []Finding
	said     map[[2]string]bool // kinds of findings that were reported: name of the rank, and format
	records  map[string]*record // by the names of ranks
	pairs    int                // tried so far
}

// testedRank is a rank to which the test sends requests.
type testedRank struct {
	name    string
	fleet   string // its rank's name in the fleet
	seat    Seat   // the slot of this pair's request
	target  *engine.Target
	ranks   int // ranks behind its URL; 0: one
	profile *mooncake.Profile
	models  []string
}

// Seat is a slot of a decode rank.
type Seat struct {
	Scope *owner.Scope // the request is sent only while this proxy owns the scope; nil: no other proxy sends to the rank
	Leave func()       // gives the slot back
}

// ErrNotOurs says that another proxy sends requests to a rank.
var ErrNotOurs = errors.New("selftest: the rank is another proxy's")

// newTester begins a test. callbacks may be nil.
func newTester(cfg *config.Config, callbacks *metaserver.Server) *tester {
	return &tester{
		cfg: cfg, callbacks: callbacks, client: engine.NewClient(engine.Options{}), hosts: map[string]bool{}, said: map[[2]string]bool{},
		records: map[string]*record{},
		run:     fmt.Sprintf("selftest-%x", time.Now().UnixNano()),
	}
}

// report adds a finding. A finding of a rank that is OK or Warn is reported once, whichever partner the rank had.
func (t *tester) report(s string, l Level, format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kind := [2]string{s, format}
	if l != Bad && t.said[kind] && !strings.Contains(format, "%q") {
		return
	}
	t.said[kind] = true
	t.findings = append(t.findings, Finding{s, l, fmt.Sprintf(format, args...)})
}

// record counts the results of the pairs of a rank.
type record struct {
	passed  bool
	failed  int // pairs that failed, with any partner
	blamed  int // of these, pairs in which the rank itself failed
	skipped int // pairs that were not tried any more
}

func (t *tester) id() string { return "ek-" + t.run }

// common is a model that both ranks serve; ok is false if there is none.
func common(a, b testedRank) (model string, ok bool) {
	for _, m := range a.models {
		if slices.Contains(b.models, m) {
			return m, true
		}
	}
	return "", false
}

// otherRank returns the rank n of the same engine.
func (s testedRank) otherRank(n int) testedRank {
	target := *s.target
	target.Rank = n
	s.target = &target
	s.name = fmt.Sprintf("%s/%d", strings.TrimSuffix(s.name, "/0"), n)
	s.fleet = fmt.Sprintf("%s/%d", target.ID, n)
	return s
}

// engines returns the first rank of each engine, for findings that are about the engine and are reported once.
func engines(ranks []testedRank) (list []testedRank) {
	for _, s := range ranks {
		if s.target.Rank <= 0 {
			list = append(list, s)
		}
	}
	return list
}

// pair is a rank of each side. A rank that prefills and decodes is in decode, and prefill is empty.
type pair struct{ prefill, decode testedRank }

// meets says whether both legs of a request through two engines run at the same time (together), and whether the two engines can serve a
// request at all (ever): both must work in the same way.
func meets(p, d testedRank) (together, ever bool) {
	together = !p.profile.HasHandoff()
	return together, together != d.profile.HasHandoff() && (!together || p.profile.Connector == d.profile.Connector)
}

// pairAnswer is what the engines of a pair report of a request.
type pairAnswer struct {
	mooncake.ProbeAnswer
	decoded int // tokens of the prompt, as the decode engine counts them; 0: it does not say
}
