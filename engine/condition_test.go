package engine

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// scene has the health of an engine, and what a check of it would find.
type scene struct {
	health
	now     time.Time
	start   float64 // of the engine's process
	stopped error   // why it takes no requests; nil: it does
	listErr error   // why it does not list its models; nil: it does
	host    byte
}

// newScene has an engine that was found up.
func newScene() *scene {
	s := &scene{now: time.Unix(1e9, 0), start: 1}
	s.in = Instance{ID: "e", Canaries: []*Target{{}}, Ranks: 3, Slots: 4}
	s.end(s.begin(), nil)
	return s
}

func (s *scene) move(f func(h *health, now time.Time)) {
	s.now = s.now.Add(time.Second)
	before := s.Status
	f(&s.health, s.now)
	s.settle(before, s.now)
}

// begin returns a check over a new connection that begins now.
func (s *scene) begin() check {
	c := check{was: s.health, facts: s.facts, fresh: true, began: s.now, limit: 5 * time.Second}
	s.due = notDue
	c.facts.resolve([]netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, s.host})}, s.now)
	return c
}

// end ends a check, which fails with err; nil: it is good.
func (s *scene) end(c check, err error) {
	if c.err = err; err == nil {
		c.answerCheck(false, time.Minute, s.now)
		c.facts.modelsErr, c.facts.start = s.listErr, s.start
		switch {
		case errors.Is(s.stopped, ErrReforming) || errors.Is(s.stopped, errScaleFailed):
			c.facts.modelsErr, c.reforming = ErrReforming, s.stopped
		case s.in.Held == nil || !errors.Is(s.stopped, ErrPaused): // else it is not asked
			c.halt = s.stopped
		}
		if c.facts.modelsErr == nil {
			c.facts.models = []Model{{ID: "m"}}
		}
	}
	s.move(func(h *health, now time.Time) { h.endCheck(c, now) })
}

// In whatever order things happen, each moves the state only as its table says, and nothing but its
// end ends an operator's hold, or a halt that a check has seen.
func TestStatesMoveAsTheirTableSays(t *testing.T) {
	unchanged := func(from, to State) bool { return to == from }
	returns := func(from, to State) bool {
		wasOut := from == Out || from == Wedged
		return wasOut && to >= Accused || !wasOut && to == from
	}
	begins := func(from, to State) bool { return to == from || from == Up && to == Accused }
	ends := func(from, to State) bool { return to == from || from == Accused && to == Up }
	halts := func(from, to State) bool { return to == Halted || from <= Late && to == from }
	good := func(from, to State) bool { return to > Late && (to != Wedged || from != Up) }
	on := func(f func(*health, time.Time)) func(*rapid.T, *scene) {
		return func(_ *rapid.T, s *scene) { s.move(f) }
	}
	why := errors.New("500")
	moves := map[string]struct {
		do    func(rt *rapid.T, s *scene)
		legal func(from, to State) bool
	}{
		"good check": {func(_ *rapid.T, s *scene) { s.end(s.begin(), nil) }, good},
		"failed check": {func(rt *rapid.T, s *scene) {
			s.end(s.begin(), rapid.SampledFrom([]error{errNoListener, errSlow, errors.New("503")}).Draw(rt, "why"))
		}, func(from, to State) bool { return to == from || to == Down || to == Late }},
		"no check": {func(_ *rapid.T, s *scene) { s.end(s.begin(), syscall.EMFILE) }, unchanged},
		"moved": {func(rt *rapid.T, s *scene) {
			s.host++
			s.end(s.begin(), rapid.SampledFrom([]error{nil, errNoListener}).Draw(rt, "found"))
		}, func(State, State) bool { return true }},
		"restart": {func(_ *rapid.T, s *scene) { s.start++; s.end(s.begin(), nil) },
			func(_, to State) bool { return to == Up || to == Halted }},
		"stopped": {func(rt *rapid.T, s *scene) {
			s.stopped = rapid.SampledFrom([]error{ErrPaused, ErrReforming, errors.New("a fault")}).Draw(rt, "why")
			s.end(s.begin(), nil)
		}, func(_, to State) bool { return to == Halted }},
		"resumed": {func(_ *rapid.T, s *scene) { s.stopped = nil; s.end(s.begin(), nil) }, good},
		"refused": {on(func(h *health, now time.Time) { h.recordFailure(errNoListener, now) }),
			func(_, to State) bool { return to <= Late }},
		"refuses all": {on(func(h *health, now time.Time) { h.recordFailure(ErrPaused, now) }), halts},
		"fails": {on(func(h *health, now time.Time) { h.recordOutcome(Faulted, why, now) }),
			func(from, to State) bool { return to == from || from >= Accused && to == Out }},
		"served": {on(func(h *health, now time.Time) { h.recordOutcome(Served, nil, now) }), returns},
		"canary fails": {on(func(h *health, now time.Time) { h.endCanary(canaryFailed, why, false, now) }),
			func(from, to State) bool { return to == from || from > Halted && to == Wedged }},
		"canary passes": {on(func(h *health, now time.Time) { h.endCanary(canaryPassed, nil, true, now) }), returns},
		"no canary":     {on(func(h *health, now time.Time) { h.endCanary(canaryNotMade, nil, true, now) }), unchanged},
		"accused":       {on(func(h *health, _ time.Time) { h.addAccusations(1) }), begins},
		"settled":       {on(func(h *health, _ time.Time) { h.addAccusations(-maxAccused) }), ends},
		"silent":        {on(func(h *health, now time.Time) { h.recordSilence(true, false, now) }), begins},
		"a sign":        {on(func(h *health, now time.Time) { h.recordSilence(false, true, now) }), ends},
		"hold":          {on(func(h *health, _ time.Time) { h.hold(&Held{Why: "an operator"}) }), halts},
		"free": {on(func(h *health, _ time.Time) { h.hold(nil) }),
			func(from, to State) bool { return to == from || from == Halted && to == Up }},
		"reload": {func(_ *rapid.T, s *scene) { s.health = health{in: s.in} }, func(_, to State) bool { return to == Down }},
	}
	kinds := slices.Sorted(maps.Keys(moves))
	history := func(rt *rapid.T) {
		s := newScene()
		seen, did := false, []string{} // seen: a check has seen why it is stopped
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			kind := rapid.SampledFrom(kinds).Draw(rt, "what")
			from := s.State()
			did = append(did, kind)
			moves[kind].do(rt, s)
			to, isHeld := s.State(), s.in.Held != nil
			seen = s.stopped != nil && (seen && kind != "reload" && kind != "stopped" || s.halt.confirmed)
			if isHeld || seen {
				require.LessOrEqual(rt, to, Halted, "it is held or halted, after %q", did)
			}
			if !isHeld {
				require.True(rt, moves[kind].legal(from, to), "%s moves %d to %d, after %q", kind, from, to, did)
			}
		}
	}
	for range 20 { // a hundred histories each
		rapid.Check(t, history)
	}
}
