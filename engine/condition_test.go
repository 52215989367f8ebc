package engine

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
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
	fails := func(from, to State) bool { return to == from || to == Down || to == Late }
	leads := func(to State) func(State, State) bool { return func(_, now State) bool { return now == to } }
	canary := func(outcome string, isSilent bool) step {
		return does(func(h *health, now time.Time) { h.endCanary(outcome, err500, isSilent, now) })
	}
	stopped := func(why error) step { return times(1, stops(why), checks(nil)) }
	moved := sets(func(s *scene) { s.host++ })
	moves := map[string]struct {
		do    []step // one of them
		legal func(from, to State) bool
	}{
		"good check":   {[]step{checks(nil)}, good},
		"failed check": {[]step{checks(errNoListener), checks(errSlow), checks(err500)}, fails},
		"no check":     {[]step{checks(errNoSocket)}, unchanged},
		"moved": {[]step{times(1, moved, checks(nil)), times(1, moved, checks(errNoListener))},
			func(State, State) bool { return true }},
		"restart": {[]step{times(1, sets(func(s *scene) { s.start++ }), checks(nil))},
			func(_, to State) bool { return to == Up || to == Halted }},
		"stopped":     {[]step{stopped(ErrPaused), stopped(ErrReforming), stopped(errors.New("a fault"))}, leads(Halted)},
		"resumed":     {[]step{stopped(nil)}, good},
		"refused":     {[]step{reports(errNoListener)}, func(_, to State) bool { return to <= Late }},
		"refuses all": {[]step{reports(ErrPaused)}, halts},
		"fails": {[]step{judges(Faulted, err500)},
			func(from, to State) bool { return to == from || from >= Accused && to == Out }},
		"served": {[]step{judges(Served, nil)}, returns},
		"canary fails": {[]step{canary(canaryFailed, false)},
			func(from, to State) bool { return to == from || from > Halted && to == Wedged }},
		"canary passes": {[]step{canary(canaryPassed, true)}, returns},
		"no canary":     {[]step{canary(canaryNotMade, true)}, unchanged},
		"accused":       {[]step{accuses(1)}, begins},
		"settled":       {[]step{accuses(-maxAccused)}, ends},
		"silent":        {[]step{silent(true, false)}, begins},
		"a sign":        {[]step{silent(false, true)}, ends},
		"hold":          {[]step{holds(&Held{Why: "an operator"})}, halts},
		"free":          {[]step{holds(nil)}, func(from, to State) bool { return to == from || from == Halted && to == Up }},
		"reload":        {[]step{sets(func(s *scene) { s.health = health{in: s.in} })}, leads(Down)},
	}
	kinds := slices.Sorted(maps.Keys(moves))
	history := func(rt *rapid.T) {
		s := newScene()
		seen, did := false, []string{} // seen: a check has seen why it is stopped
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			kind := rapid.SampledFrom(kinds).Draw(rt, "what")
			from := s.State()
			did = append(did, kind)
			rapid.SampledFrom(moves[kind].do).Draw(rt, "which")(t, s)
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
