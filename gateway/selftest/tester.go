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

// The levels: Bad means that requests will fail.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Bad  Level = "bad"
)

// Finding is one thing learned about one engine.
type Finding struct {
	Engine string `json:"engine"` // role and host:port, and /rank where several ranks stand behind it
	Level  Level  `json:"level"`
	Msg    string `json:"message"`
}

// stepTimeout bounds each question to an engine.
const stepTimeout = 30 * time.Second

const answerBytes = 1 << 20

type tester struct {
	cfg       *config.Config
	client    *engine.Client
	callbacks *metaserver.Server // nil: callbacks of decode engines are not heard
	deaf      error              // why callbacks is nil
	// where a hand-off may send a decode engine, or a callback a prefill engine
	hosts map[string]bool
	run   string                                                           // in request ids and prompts: no cache answers for the engines
	seat  func(ctx context.Context, rank string, tokens int) (Seat, error) // nil: no slots are taken

	mu       sync.Mutex // held for the rest while pairs are tried
	findings []Finding
	said     map[[2]string]bool // the kinds of findings that were reported, by rank and format
	records  map[string]*record // by the names of ranks
	pairs    int                // tried so far
}

type subject struct {
	name    string
	fleet   string // as the fleet names it
	seat    Seat   // the slot of this pair's request
	target  *engine.Target
	ranks   int // behind its URL; 0: one
	profile *mooncake.Profile
	models  []string
}

// Seat is a slot of a decode rank.
type Seat struct {
	Scope *owner.Scope // the request is sent only while it is ours; nil: no other proxy sends to the rank
	Leave func()       // gives the slot back
}

// ErrNotOurs says that another proxy sends requests to a rank.
var ErrNotOurs = errors.New("selftest: the rank is another proxy's")

func newTester(cfg *config.Config, callbacks *metaserver.Server) *tester {
	return &tester{
		cfg: cfg, callbacks: callbacks, client: engine.NewClient(engine.Options{}), hosts: map[string]bool{}, said: map[[2]string]bool{},
		records: map[string]*record{},
		run:     fmt.Sprintf("selftest-%x", time.Now().UnixNano()),
	}
}

// report adds a finding. Findings of a rank that are OK or Warn are told once, whichever partner the rank had.
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
	blamed  int // of these, for its own failure
	skipped int // pairs that were not tried any more
}

func (t *tester) id() string { return "ek-" + t.run }

func common(a, b subject) (model string, ok bool) {
	for _, m := range a.models {
		if slices.Contains(b.models, m) {
			return m, true
		}
	}
	return "", false
}

// rank is another rank of the same engine.
func (s subject) rank(n int) subject {
	target := *s.target
	target.Rank = n
	s.target = &target
	s.name = fmt.Sprintf("%s/%d", strings.TrimSuffix(s.name, "/0"), n)
	s.fleet = fmt.Sprintf("%s/%d", target.ID, n)
	return s
}

// engines are the first ranks: what differs between engines is told once.
func engines(ranks []subject) (list []subject) {
	for _, s := range ranks {
		if s.target.Rank <= 0 {
			list = append(list, s)
		}
	}
	return list
}

// pair is a rank of each side. One that prefills and decodes has no other.
type pair struct{ prefill, decode subject }

// meets says whether both legs of a request are under way at the same time. Engines of which one
// does so, and the other one in no way or in another, serve no request together.
func meets(p, d subject) (together, ever bool) {
	together = !p.profile.HasHandoff()
	return together, together != d.profile.HasHandoff() && (!together || p.profile.Connector == d.profile.Connector)
}

// pairAnswer is what a pair tells of a request.
type pairAnswer struct {
	mooncake.ProbeAnswer
	decoded int // tokens of the prompt, as the decode engine counts them; 0: it does not tell
}
