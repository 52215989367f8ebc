package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"evenkeel/bench/report"
	"evenkeel/bench/sim"
	"evenkeel/dispatcher/board"
)

// scenario is a load on a fleet.
type scenario struct {
	on           *source
	ranks, slots int
	rho          float64 // open loop; 0: closed
	pool         int     // closed loop: requests beyond the slots
	capacity     int64   // KV tokens of a rank; 0: unlimited
	stale        int     // steps
	transfer     int     // steps
}

// closed is the closed loop that evenkeel simulate has by default.
func closed(on *source, ranks int) scenario {
	return scenario{on: on, ranks: ranks, slots: slotsOfRank, pool: poolOfRank * ranks}
}

func open(on *source, ranks int, rho float64) scenario {
	return scenario{on: on, ranks: ranks, slots: slotsOfRank, rho: rho}
}

// A rank decodes so many requests at once, and so many wait for it in a closed
// loop.
const (
	slotsOfRank = 16
	poolOfRank  = 4
)

func (sc scenario) size() string { return fmt.Sprintf("%d x %d", sc.ranks, sc.slots) }

func (sc scenario) load() string {
	if sc.rho > 0 {
		return fmt.Sprintf("rho %g", sc.rho)
	}
	if sc.pool != poolOfRank*sc.ranks {
		return fmt.Sprintf("closed, pool of %d", sc.pool)
	}
	return "closed"
}

// words are put together, those that are given, with the same before each.
type words struct{ text, before string }

func (w *words) add(given bool, format string, args ...any) {
	if given {
		w.text += w.before + fmt.Sprintf(format, args...)
	}
}

func (sc scenario) String() string {
	s := words{fmt.Sprintf("%s, %s, %s", sc.on.name, sc.size(), sc.load()), ", "}
	s.add(sc.capacity > 0, "%s KV tokens a rank", report.Grouped(float64(sc.capacity), 0))
	s.add(sc.stale > 0 || sc.transfer > 0, "seen %d steps late, transfer %d", sc.stale, sc.transfer)
	return s.text
}

// command simulates the scenario by itself; empty where the command line knows no
// such trace.
func (b *book) command(sc scenario, policies []string) string {
	if sc.on.flag == "" {
		return ""
	}
	requests := b.requests(sc.on)
	line := words{fmt.Sprintf("evenkeel simulate --trace %s --workers %d --slots %d", sc.on.flag, sc.ranks, sc.slots), " "}
	line.add(sc.rho > 0, "--load %g", sc.rho)
	line.add(sc.rho == 0 && sc.pool != poolOfRank*sc.ranks, "--pool %d", sc.pool)
	line.add(sc.capacity > 0, "--capacity %d", sc.capacity)
	line.add(sc.stale > 0, "--stale %d", sc.stale)
	line.add(sc.transfer > 0, "--transfer %d", sc.transfer)
	line.add(requests > 0, "--requests %d", requests)
	line.add(true, "--seeds %d --policies %s", b.seeds, strings.Join(policies, ","))
	return line.text
}

// outcome is what policies did in a scenario.
type outcome struct {
	metrics map[string]report.Metrics // by policy
	refused string                    // why it cannot be simulated: the trace is too short for the fleet
}

func (o *outcome) of(policy string, m report.Metric) report.Value { return o.metrics[policy][m] }

// simulations runs each policy in each scenario once, whoever asks.
type simulations struct {
	ctx      context.Context
	seeds    int
	most     int // requests of a seed; 0: all there are
	progress io.Writer
	done     map[scenario]*outcome
	err      error // the first; nothing is simulated after it
}

// Err is report.Book's.
func (s *simulations) Err() error { return s.err }

// fails keeps an error, and says it.
func (s *simulations) fails(err error) string {
	s.err = cmp.Or(s.err, err)
	return err.Error()
}

// refuses is why a plan is not run, which tables say.
func (s *simulations) refuses(plan interface{ Validate() error }) string {
	if err := cmp.Or(s.err, plan.Validate()); err != nil {
		return err.Error()
	}
	return ""
}

// requests of a seed; 0 is all there are.
func (s *simulations) requests(on *source) int {
	if t := on.from.Trace; t != nil && s.most > len(t.Requests)/2 {
		return 0
	}
	return s.most
}

// run simulates what of the policies was not simulated yet.
func (s *simulations) run(sc scenario, policies []string) *outcome {
	out := s.done[sc]
	if out == nil {
		out = &outcome{metrics: map[string]report.Metrics{}}
		s.done[sc] = out
	}
	plan := sim.Plan{
		Source: sc.on.from, Requests: s.requests(sc.on), Seeds: s.seeds,
		Fleet: sim.Uniform(sc.ranks, sc.slots, sc.capacity), Load: sim.Load{Rho: sc.rho, Pool: sc.pool}, Window: board.DefaultWindow,
	}
	plan.Fleet.Stale, plan.Fleet.Transfer = sc.stale, sc.transfer
	plan.Policies = lacking(out.metrics, policies)
	if out.refused != "" || len(plan.Policies) == 0 {
		return out
	}
	if out.refused = s.refuses(&plan); out.refused != "" {
		fmt.Fprintf(s.progress, "%s: left out, %s\n", sc, out.refused)
		return out
	}
	began := time.Now()
	result, err := plan.Run(s.ctx)
	if err != nil {
		out.refused = s.fails(fmt.Errorf("%s: %w", sc, err))
		return out
	}
	for _, r := range result.Runs {
		out.metrics[r.Policy] = sim.Repeatable(r.Metrics)
	}
	fmt.Fprintf(s.progress, "%s: %d policies, %d seeds, %.1f s\n", sc, len(plan.Policies), s.seeds, time.Since(began).Seconds())
	return out
}

// lacking are the policies that were not simulated yet.
func lacking(done map[string]report.Metrics, policies []string) (list []string) {
	for _, p := range policies {
		if _, ok := done[p]; !ok {
			list = append(list, p)
		}
	}
	return list
}
