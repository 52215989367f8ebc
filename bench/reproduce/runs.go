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

func (sc scenario) String() string {
	s := report.Words{Text: fmt.Sprintf("%s, %s, %s", sc.on.name, sc.size(), sc.load()), Before: ", "}
	s.Add(sc.capacity > 0, "%s KV tokens a rank", report.Grouped(float64(sc.capacity), 0))
	s.Add(sc.stale > 0 || sc.transfer > 0, "seen %d steps late, transfer %d", sc.stale, sc.transfer)
	return s.Text
}

// command simulates the scenario by itself; empty where the command line knows no
// such trace.
func (b *book) command(sc scenario, policies []string) string {
	if sc.on.flag == "" {
		return ""
	}
	requests := b.requests(sc.on)
	line := report.Words{Text: fmt.Sprintf("evenkeel simulate --trace %s --workers %d --slots %d", sc.on.flag, sc.ranks, sc.slots), Before: " "}
	line.Add(sc.rho > 0, "--load %g", sc.rho)
	line.Add(sc.rho == 0 && sc.pool != poolOfRank*sc.ranks, "--pool %d", sc.pool)
	line.Add(sc.capacity > 0, "--capacity %d", sc.capacity)
	line.Add(sc.stale > 0, "--stale %d", sc.stale)
	line.Add(sc.transfer > 0, "--transfer %d", sc.transfer)
	line.Add(requests > 0, "--requests %d", requests)
	line.Add(true, "--seeds %d --policies %s", b.seeds, strings.Join(policies, ","))
	return line.Text
}

// outcome is what policies did in a scenario.
type outcome struct {
	metrics map[string]report.Metrics  // by policy
	seeds   map[string][]report.Sample // of a prefill scenario, by policy
	pace    float64                    // of a prefill scenario, once it is known
	refused string                     // why it cannot be simulated: the trace is too short for the fleet
}

func (o *outcome) of(policy string, m report.Metric) report.Value { return o.metrics[policy][m] }

// simulations runs each policy in each scenario once, whoever asks.
type simulations struct {
	ctx      context.Context
	seeds    int
	most     int // requests of a seed; 0: all there are
	progress io.Writer
	done     map[fmt.Stringer]*outcome // by scenario
	err      error                     // the first; nothing is simulated after it
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

// known is what a scenario gave so far, and those of the policies that can be simulated in it and were not yet.
func (s *simulations) known(sc fmt.Stringer, policies []string) (out *outcome, lacking []string) {
	if out = s.done[sc]; out == nil {
		out = &outcome{metrics: map[string]report.Metrics{}, seeds: map[string][]report.Sample{}}
		s.done[sc] = out
	}
	for _, p := range policies {
		if _, ok := out.metrics[p]; !ok && out.refused == "" {
			lacking = append(lacking, p)
		}
	}
	return out, lacking
}

// run simulates what of the policies was not simulated yet.
func (s *simulations) run(sc scenario, policies []string) *outcome {
	out, lacking := s.known(sc, policies)
	if lacking == nil {
		return out
	}
	plan := sim.Plan{
		Policies: lacking, Source: sc.on.from, Requests: s.requests(sc.on), Seeds: s.seeds,
		Fleet: sim.Uniform(sc.ranks, sc.slots, sc.capacity), Load: sim.Load{Rho: sc.rho, Pool: sc.pool}, Window: board.DefaultWindow,
	}
	plan.Fleet.Stale, plan.Fleet.Transfer = sc.stale, sc.transfer
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
