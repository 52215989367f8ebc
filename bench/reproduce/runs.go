package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
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
	s := fmt.Sprintf("%s, %s, %s", sc.on.name, sc.size(), sc.load())
	if sc.capacity > 0 {
		s += fmt.Sprintf(", %s KV tokens a rank", report.Grouped(float64(sc.capacity), 0))
	}
	if sc.stale > 0 || sc.transfer > 0 {
		s += fmt.Sprintf(", seen %d steps late, transfer %d", sc.stale, sc.transfer)
	}
	return s
}

// command simulates the scenario by itself; empty where the command line knows no
// such trace.
func (b *book) command(sc scenario, policies []string) string {
	if sc.on.flag == "" {
		return ""
	}
	line := "evenkeel simulate --trace " + sc.on.flag + " --workers " + strconv.Itoa(sc.ranks) + " --slots " + strconv.Itoa(sc.slots)
	if sc.rho > 0 {
		line += fmt.Sprintf(" --load %g", sc.rho)
	} else if sc.pool != poolOfRank*sc.ranks {
		line += " --pool " + strconv.Itoa(sc.pool)
	}
	if sc.capacity > 0 {
		line += " --capacity " + strconv.FormatInt(sc.capacity, 10)
	}
	if sc.stale > 0 {
		line += " --stale " + strconv.Itoa(sc.stale)
	}
	if sc.transfer > 0 {
		line += " --transfer " + strconv.Itoa(sc.transfer)
	}
	if n := b.requests(sc.on); n > 0 {
		line += " --requests " + strconv.Itoa(n)
	}
	return line + " --seeds " + strconv.Itoa(b.seeds) + " --policies " + strings.Join(policies, ",")
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
}

// requests of a seed; 0 is all there are.
func (s *simulations) requests(on *source) int {
	if t := on.from.Trace; t != nil && s.most > len(t.Requests)/2 {
		return 0
	}
	return s.most
}

// run simulates what of the policies was not simulated yet.
func (s *simulations) run(sc scenario, policies []string) (*outcome, error) {
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
		return out, nil
	}
	if err := plan.Validate(); err != nil {
		out.refused = err.Error()
		fmt.Fprintf(s.progress, "%s: left out, %v\n", sc, err)
		return out, nil //nolint:nilerr // the tables say it
	}
	began := time.Now()
	result, err := plan.Run(s.ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", sc, err)
	}
	for _, r := range result.Runs {
		out.metrics[r.Policy] = sim.Repeatable(r.Metrics)
	}
	fmt.Fprintf(s.progress, "%s: %d policies, %d seeds, %.1f s\n", sc, len(plan.Policies), s.seeds, time.Since(began).Seconds())
	return out, nil
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
