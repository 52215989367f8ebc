package dispatcher

import (
	"cmp"
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/forecast"
	"evenkeel/dispatcher/policy"
)

// shadows have other policies decide the rounds of a group too, in a goroutine
// of their own and without effect, and tell how level the group would be. A
// round that comes while the last one is still decided replaces the one that
// waits: a tick pays for a copy and waits for nothing.
type shadows struct {
	specs   []string
	parse   func(string) (policy.Policy, error)
	metrics *metrics
	log     *zap.Logger
	wake    bell

	mu     sync.Mutex
	groups []*shadowed
}

// shadowed is one group with its shadows.
type shadowed struct {
	sources []*student // of each shadow's predictions; nil: none

	// Under shadows.mu.
	waiting  *board.Round // empty unless full
	full     bool
	gone     bool // the group is
	compared []board.ComparedPolicy

	// The goroutine's.
	current *board.Round
	shadows []*shadow
	inForce level
	loads   []int64
	sorted  [2][]policy.Assignment // by entry: what was bound, what a shadow would
}

// shadow is one policy that decides without effect.
type shadow struct {
	policy   policy.Policy
	spec     string
	name     string
	forecast forecast.Running
	level    level
	assign   []policy.Assignment
}

// level is the mean imbalance right after admission, the past fading.
type level struct {
	group, policy   string // whose
	imbalance, idle float64
	rounds          uint64
}

// fadeRounds is how many rounds the mean imbalance reaches back.
const fadeRounds = 100

// add takes in a round and exports the mean. It starts anew when another policy
// came into force, or the group is named otherwise.
func (l *level) add(m *metrics, group, name string, b policy.Balance) {
	if l.group != group || l.policy != name {
		l.drop(m)
		*l = level{group: group, policy: name}
	}
	l.rounds++
	n := float64(min(l.rounds, fadeRounds))
	l.imbalance += (float64(b.Imbalance()) - l.imbalance) / n
	l.idle += (b.IdleShare() - l.idle) / n
	m.shadowImbalance.WithLabelValues(group, name).Set(l.imbalance)
}

// drop takes a level that is no longer measured off the page.
func (l *level) drop(m *metrics) { m.shadowImbalance.DeleteLabelValues(l.group, l.policy) }

func (l *level) compared(inForce bool) board.ComparedPolicy {
	return board.ComparedPolicy{Policy: l.policy, InForce: inForce, ImbalanceTokens: l.imbalance, IdleShare: l.idle, Rounds: l.rounds}
}

// compared is the policy in force and then its shadows; nil before a first
// round.
func (s *shadows) compared(g *shadowed) []board.ComparedPolicy {
	if g == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(g.compared)
}

// newShadows is nil when there are none to run.
func newShadows(cfg Config, m *metrics) *shadows {
	if len(cfg.Shadow) == 0 {
		return nil
	}
	return &shadows{specs: cfg.Shadow, parse: cfg.Parse, metrics: m, log: cfg.Log, wake: newBell()}
}

// follow starts the shadows of a group.
func (s *shadows) follow(early bool, source func(policy.Needs) *student) *shadowed {
	g := &shadowed{waiting: &board.Round{}, current: &board.Round{}}
	for _, spec := range s.specs {
		if early {
			spec = board.HoldsNothing(spec)
		}
		p := s.make(spec)
		g.shadows = append(g.shadows, &shadow{policy: p, spec: spec, name: p.Name()})
		s.metrics.shadowFailures.WithLabelValues(p.Name()) // an alert needs the zero before the first
		g.sources = append(g.sources, source(policy.NeedsOf(p, 0)))
	}
	s.mu.Lock()
	s.groups = append(s.groups, g)
	s.mu.Unlock()
	return g
}

func (s *shadows) make(spec string) policy.Policy {
	p, err := s.parse(spec)
	if err != nil {
		panic("dispatcher: shadow " + spec + " was accepted before and no longer parses: " + err.Error())
	}
	return p
}

// handOver ends the shadows of a group that is gone.
func (s *shadows) handOver(g *shadowed) {
	if g == nil {
		return
	}
	s.mu.Lock()
	g.gone = true
	s.mu.Unlock()
	s.wake.ring()
}

// show hands a round over, in place of one that still waits.
func (s *shadows) show(g *shadowed, head *board.Round) {
	s.mu.Lock()
	r, missed := g.waiting, g.full
	r.Copy(head)
	g.full = true
	s.mu.Unlock()
	if missed {
		s.metrics.shadowMissed.Inc()
	}
	s.wake.ring()
}

// run decides until ctx ends.
func (s *shadows) run(ctx context.Context) {
	for {
		for s.decideAll() {
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
	}
}

// decideAll decides one round of each group that has one; false when none had.
func (s *shadows) decideAll() (had bool) {
	for _, g := range s.present() {
		s.mu.Lock()
		full := g.full
		if full {
			g.waiting, g.current, g.full = g.current, g.waiting, false
		}
		s.mu.Unlock()
		if full {
			s.decide(g)
			had = true
		}
	}
	return had
}

// present are the groups that are still there; what was told of the others is
// taken off the page.
func (s *shadows) present() []*shadowed {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.groups = slices.DeleteFunc(s.groups, func(g *shadowed) bool {
		if g.gone {
			g.inForce.drop(s.metrics)
			for _, x := range g.shadows {
				x.level.drop(s.metrics)
			}
		}
		return g.gone
	})
	return slices.Clone(s.groups)
}

// decide has every shadow of a group decide its current round, and compares.
func (s *shadows) decide(g *shadowed) {
	m, r := s.metrics, g.current
	bound := sortAssigned(&g.sorted[0], r.Assign)
	g.inForce.add(m, r.Group, r.Policy, g.balance(r, r.Assign))
	for i, x := range g.shadows {
		if err := x.decide(r, g.sources[i]); err != nil {
			m.shadowFailures.WithLabelValues(x.name).Inc()
			s.log.Error("dispatcher: a shadow policy failed", zap.String("policy", x.name), zap.Error(err))
			x.policy = s.make(x.spec) // its scratch may be half written
			continue
		}
		x.level.add(m, r.Group, x.name, g.balance(r, x.assign))
		m.shadowRounds.WithLabelValues(r.Group, x.name).Inc()
		if !slices.EqualFunc(bound, sortAssigned(&g.sorted[1], x.assign), samePlace) {
			m.shadowDisagreements.WithLabelValues(r.Group, x.name).Inc()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g.compared = append(g.compared[:0], g.inForce.compared(true))
	for _, x := range g.shadows {
		if x.level.rounds > 0 {
			g.compared = append(g.compared, x.level.compared(false))
		}
	}
}

func samePlace(a, b policy.Assignment) bool { return a.Entry == b.Entry && a.Worker == b.Worker }

func sortAssigned(dst *[]policy.Assignment, assign []policy.Assignment) []policy.Assignment {
	*dst = append((*dst)[:0], assign...)
	slices.SortFunc(*dst, func(a, b policy.Assignment) int { return cmp.Compare(a.Entry, b.Entry) })
	return *dst
}

// decide has one shadow decide.
func (s *shadow) decide(r *board.Round, source *student) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
		}
	}()
	tables := board.NoTables()
	if source != nil {
		tables = source.tables.Load()
	}
	tables.Look(&r.Snapshot, s.policy, &s.forecast)
	r.Snapshot.Budget = 0 // it has the time
	if r.Snapshot.MaxAgeMs = s.policy.MaxAgeMs(); r.Snapshot.MaxAgeMs > 0 {
		r.Snapshot.MaxAgeMs = max(r.Snapshot.MaxAgeMs, r.GuardMs)
	}
	s.assign = s.policy.Decide(&r.Snapshot, s.assign[:0])
	return nil
}

// balance is that of the group right after the assignments.
func (g *shadowed) balance(r *board.Round, assign []policy.Assignment) policy.Balance {
	workers := r.Snapshot.Workers
	g.loads = g.loads[:0]
	for i := range workers {
		g.loads = append(g.loads, workers[i].KVTokens())
	}
	for _, a := range assign {
		w, ok := slices.BinarySearchFunc(workers, a.Worker, func(w policy.Worker, id int32) int { return cmp.Compare(w.ID, id) })
		at := slices.IndexFunc(r.Snapshot.Pool, func(e policy.Entry) bool { return e.ID == a.Entry })
		if ok && at >= 0 {
			g.loads[w] += int64(r.Snapshot.Pool[at].Prompt)
		}
	}
	return policy.Measure(g.loads)
}
